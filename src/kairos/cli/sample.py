"""``kairos sample``: generate images from snapshots."""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from kairos.cli.common import add_device, add_shards, add_timing, demand_option, pair_options, write_timing, yaml_type
from kairos.cli.jobs import Job, add_job, check_command_form, open_job
from kairos_timesteps.errors import ConfigError

# options that are fields of section `sampling`
_GUIDANCE = ("guidance_scale", "guidance_channels", "guidance_power", "guidance_interval")
_SETTINGS = ("scheduler", "steps", "weights", *_GUIDANCE, "precision", "batch_size", "labels")


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `kairos sample`.

    An option that is not set and is a field of section `sampling` is absent from the parsed arguments. Exceptions are
    ``--seed`` and ``--grid-images``, which are then None.
    """
    parser.epilog = (
        "With --config: images of all snapshots of a training run, or of a segment. Without: repeat --snapshot and "
        "--out, in pairs, to "
        "sample from several snapshots in one job; options that are omitted have the values of the snapshot's "
        "configuration. Image i depends only on the seed and on i."
    )
    add_job(parser, required=False, seed="seed of the training run; without --config, of the images")
    add = parser.add_argument

    # snapshots, files to write, and images
    add("--snapshot", type=Path, action="append", metavar="D", help="folder of a snapshot (repeatable)")
    add("--out", type=Path, action="append", metavar="F", help="npz file to write (repeatable)")
    add("--grid", type=Path, action="append", metavar="F", help="PNG with a grid of the first images (repeatable)")
    add("--grid-images", type=int, metavar="N", help="number of images in the grid")
    add("--num", type=int, metavar="N", help="number of images")
    # fields of section `sampling`
    solver = "ddpm, ddim, dpm_solver, euler, heun, or with options as in an experiment file: '{name: ddim, eta: 1}'"
    override = partial(add, default=argparse.SUPPRESS)  # absent unless set: the snapshot has the defaults
    override("--weights", choices=("ema", "raw"), help="averaged (ema) or raw weights")
    override("--scheduler", type=yaml_type("scheduler", "a name or {name: ..., options}"), metavar="NAME", help=solver)
    override("--steps", type=int, metavar="N", help="number of intervals of the solver's time grid")
    override("--guidance-scale", type=float, metavar="X", help="classifier-free guidance; 1: none")
    channels = yaml_type("guidance-channels", "a number or null")
    power = yaml_type("guidance-power", "a number or null")
    override("--guidance-channels", type=channels, metavar="K", help="only the first K channels are guided; null: all")
    override(
        "--guidance-power",
        type=power,
        metavar="P",
        help="exponent of power-cosine guidance, which is zero at pure noise; null: constant",
    )
    bounds = "lowest and highest ratio of noise to signal with guidance; null: all"
    interval = yaml_type("guidance-interval", "[lowest, highest] or null")
    override("--guidance-interval", type=interval, metavar="[A,B]", help=bounds)
    override("--precision", choices=("fp32", "tf32", "bf16"), help="precision of the network")
    override("--batch-size", type=int, metavar="N", help="images per network evaluation")
    override("--labels", choices=("balanced", "data"), help="equal class frequencies, or those of the training data")
    # folders to read, device, shards and timing
    add("--autoencoder", type=Path, metavar="DIR", help="default: results/<experiment>/autoencoder of the snapshot")
    add(
        "--latents",
        type=Path,
        metavar="DIR",
        help="latents with the conditions of the training data; default: results/<experiment>/latents of the snapshot",
    )
    add_device(parser)
    add_shards(parser, "F", "with --config those of sampling.shards, if all of them are in place")
    add_timing(parser)


def run(arguments: argparse.Namespace) -> None:
    """Generate images from snapshots: those of a training run with ``--config``, else those in ``--snapshot``.

    With ``--config``, the images are written to ``samples`` in the folder of the training run, as the experiment
    configures them. Without, they are written to the npz files in ``--out``. With ``--shard``, each npz file contains
    one shard of the images. With ``--merge``, no images are generated: the npz files in ``--merge`` are shards, which
    are merged into ``--out``. Their list is divided evenly, and its beginning belongs to the first ``--out``. With
    ``--grid``, the first images are written as PNG too. Files read: snapshots, and the autoencoder and latents that
    they were trained on.

    The file of ``--timing`` contains `snapshots`, the number of snapshots, and `images`, ``--num`` for each snapshot
    even if only a shard is generated.

    Raises:
        ConfigError: options that are repeated together have different numbers of values. It is also raised if the
            number of ``--merge`` is not a multiple of the number of ``--out``, or a setting is not allowed or does not
            fit a snapshot.
        KairosError: a file is missing or damaged; the npz files of earlier snapshots remain.
    """
    by_hand = ("snapshot", "out", "grid", "grid_images", "num", "autoencoder", "latents", "merge", *_SETTINGS)
    check_command_form(arguments, by_hand, suppressed=_SETTINGS)
    if arguments.config is not None:
        _sample_run(arguments, open_job(arguments))
        return
    for option in ("snapshot", "out", "num"):
        demand_option(getattr(arguments, option) is not None, option, "none", "a value, or --config, --method, --seed")
    outputs = pair_options(arguments, "snapshot", "out", "grid")
    shard_files = arguments.merge
    shards_per_output, remainder = divmod(len(shard_files), len(outputs))
    demand_option(remainder == 0, "merge", len(shard_files), f"an equal number for each of {len(outputs)} --out")

    from kairos.sampling import sample  # imports torch, after the checks of the arguments

    jobs = []
    for index, (snapshot, out, grid) in enumerate(outputs):
        first_shard = index * shards_per_output
        shards = tuple(shard_files[first_shard : first_shard + shards_per_output])
        jobs.append(sample.SamplingJob(snapshot, out, grid, shards))
    # `vars` contains only the settings on the command line: the others are suppressed, see `add_arguments`
    overrides = {name: value for name, value in vars(arguments).items() if name in _SETTINGS}
    if arguments.grid_images is not None:
        overrides["grid"] = arguments.grid_images  # field `sampling.grid` is a number of images, not a file
    _check_overrides(overrides)
    request = sample.SamplingRequest(
        num=arguments.num,
        seed=arguments.seed,
        overrides=overrides,
        autoencoder=arguments.autoencoder,
        latents=arguments.latents,
        shard=arguments.shard,
        device=arguments.device,
    )
    sample.run(jobs, request)
    write_timing(arguments, snapshots=len(jobs), images=arguments.num * len(jobs))


def _sample_run(arguments: argparse.Namespace, job: Job) -> None:
    """Generate the images of all snapshots of a training run, or of a segment of it, as the experiment configures.

    With ``--shard``, the files contain one shard of the images. Without, shards are merged if all of them are in place.

    Raises:
        KairosError: a file is missing or damaged; the files of earlier snapshots remain.
    """
    from kairos.sampling import sample
    from kairos.sampling.samples_file import hash_samples
    from kairos.validity import Result

    experiment, folder = job.experiment, job.run_folder
    results = [Result("sample", job.method, job.seed, name) for name in job.snapshots]
    # a shard is no result
    outdated = job.select_outdated(results) if job.shard is None else {result: {} for result in results}
    jobs = {}
    for result in outdated:
        name = str(result.snapshot)
        out, grid = folder / "samples" / f"{name}.npz", folder / "samples" / f"{name}.png"
        if job.shard is not None:
            seed = str(job.seed)
            out = Path(job.layout.shard_path("sample", job.shard.name, str(job.method), seed, name))
        shards = tuple(job.list_finished_shards(name))
        jobs[sample.SamplingJob(folder / "snapshots" / name, out, None if job.shard else grid, shards)] = result
    overrides = experiment.sampling.model_dump(mode="json", exclude={"shards", "seed"})
    image_count = experiment.evaluation.num_samples * experiment.evaluation.sets
    request = sample.SamplingRequest(
        num=image_count,
        seed=experiment.sampling.seed,
        overrides=overrides,
        autoencoder=job.results / "autoencoder",
        latents=job.results / "latents",
        shard=job.shard,
        device=arguments.device,
    )

    def finish(sampling_job: sample.SamplingJob) -> None:
        if job.shard is None and sampling_job.grid is not None:
            result = jobs[sampling_job]
            content = hash_samples(sampling_job.out, sampling_job.grid)
            job.complete_record(result, outdated[result], sampling_job.out, sampling_job.grid, content_sha256=content)

    sample.run(list(jobs), request, finished=finish)
    if jobs:
        write_timing(arguments, job.timing_file, snapshots=len(jobs), images=image_count * len(jobs))


def _check_overrides(overrides: dict[str, Any]) -> None:
    """Check each option that replaces a field of section `sampling`, given by the names of the fields.

    Raises:
        ConfigError: a value is not allowed; the message begins with the option.
    """
    from kairos.sampling.settings import SamplingConfig
    from kairos.section import check

    for name, value in overrides.items():
        option = "--grid-images" if name == "grid" else f"--{name.replace('_', '-')}"
        try:
            check(SamplingConfig, {name: value}, option)
        except ConfigError as error:
            # `check` adds the name of the field, which repeats the option; `--scheduler.eta` is its option eta
            raise ConfigError(str(error).replace(f"{option}: {name}", option, 1)) from None
