"""Stage `sample`: images from snapshots; the snapshot contains all settings that decide the images."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kairos import compute, resource_usage
from kairos.array_shapes import ImageBatch, RowArray
from kairos.data.image_grid import write_image_grid
from kairos.data.pixels import to_uint8
from kairos.diffusion import DiffusionConfig
from kairos.files import open_record
from kairos.finite import demand_finite
from kairos.progress import ProgressBar, log
from kairos.sampling.conditions import ImageConditions, load_conditions
from kairos.sampling.generate import (
    DataPrediction,
    Guidance,
    build_guided_predictor,
    iterate_batches,
    make_noise_source,
)
from kairos.sampling.samples_file import Batches, merge_shards, open_samples, write_samples
from kairos.sampling.settings import GUIDANCE, SamplingConfig, resolve_solver
from kairos.sampling.time_grids import build_time_grid
from kairos.section import check
from kairos.shards import Shard
from kairos_timesteps.errors import ConfigError, KairosError

_REMEDY = (
    "the network or the solver diverged: set sampling.precision to fp32, use more sampling.steps, another "
    "sampling.scheduler or less sampling.guidance_scale, or train again with a lower training.optimizer.lr"
)


@dataclass(frozen=True)
class SamplingJob:
    """Images to generate from one snapshot.

    Attributes:
        snapshot: folder of the snapshot.
        out: npz file to write.
        grid: PNG picture of the first images to write; None: no picture.
        shard_files: files of all shards, which are merged; empty: the images are generated.
    """

    snapshot: Path
    out: Path
    grid: Path | None = None
    shard_files: tuple[Path, ...] = ()


@dataclass(frozen=True)
class SamplingRequest:
    """Settings that all jobs of a sampling request share; None or an absent field: the snapshot's configuration.

    Attributes:
        num: number of images.
        seed: seed of the images.
        overrides: fields of section `sampling` that replace the snapshot's.
        autoencoder: folder of the autoencoder; None: ``../../../../../autoencoder``, relative to the snapshot.
        latents: folder of the latents, needed for labels ``data`` and conditions other than classes; None:
            ``../../../../../latents``, relative to the snapshot.
        shard: the shard to generate; None: all images.
        device: device that generates the images; None: the device of the snapshot's training run.
    """

    num: int
    seed: int | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    autoencoder: Path | None = None
    latents: Path | None = None
    shard: Shard | None = None
    device: str | None = None


def run(
    jobs: list[SamplingJob], request: SamplingRequest, finished: Callable[[SamplingJob], None] = lambda job: None
) -> None:
    """Generate or merge the images of every job, and write them, one job after another.

    If a job fails, the files of earlier jobs remain. `finished` is called after each job.

    Raises:
        KairosError: a snapshot or autoencoder is missing or damaged, or the two do not belong together.
        ConfigError: the number of images is below 1, a setting does not fit a snapshot, or there are more shards than
            batches.
    """
    if request.num < 1:
        raise ConfigError(f"--num: got {request.num}, allowed: 1 or more")
    for job in jobs:
        sample_snapshot(job, request)
        finished(job)


def load_settings(snapshot: Path, overrides: dict[str, Any]) -> tuple[SamplingConfig, dict[str, Any]]:
    """Return a snapshot's section `sampling` with overrides and without spacing ``auto``, and the snapshot's record.

    Raises:
        KairosError: the snapshot is missing, or its record is damaged.
        ConfigError: a replaced field has an invalid value, or the section does not fit the snapshot.
    """
    record = open_record(snapshot, "train --config F --method M --seed N --out D", "snapshot.json")
    config, source = record["config"], f"{snapshot}/snapshot.json"
    sampling = check(SamplingConfig, {**config["sampling"], **overrides}, f"{source}: sampling")
    diffusion = check(DiffusionConfig, config["diffusion"], f"{source}: diffusion")
    sampling.check_fits(diffusion, _condition_names(record), config["training"]["condition_dropout"])
    solver = resolve_solver(sampling.scheduler, diffusion.process)
    return sampling.model_copy(update={"scheduler": solver}), record


def _condition_names(record: dict[str, Any]) -> list[str]:
    """Return the names of the network's conditions from a snapshot's record; empty if the list is missing or null."""
    names: list[str] = record["config"]["model"].get("conditions") or []
    return names


def set_up_device(record: dict[str, Any], device: str | None = None) -> torch.device:
    """Set threads and determinism of this process as in a snapshot's training run, and return the device to use.

    TF32 is forbidden, also if the training run used it.

    Args:
        record: record of the snapshot.
        device: name of the device, option ``--device``; None: the device of the snapshot's training run.

    Raises:
        KairosError: the device is not usable here.
    """
    training = record["config"]["training"]
    device_field = "--device"
    if device is None:
        device, device_field = training["device"], "training.device of the snapshot (--device replaces it)"
    return compute.setup(training["threads"], device, training["deterministic"], device_field=device_field)


@dataclass(frozen=True)
class _SnapshotSampler:
    """Generation of a job's images from one snapshot, with all settings resolved.

    Attributes:
        snapshot: folder of the snapshot.
        record: record of the snapshot.
        options: section `sampling`, whose solver has a spacing other than ``auto``.
        conditions: conditions by image index.
        guidance: classifier-free guidance.
        autoencoder: folder of the autoencoder, see `SamplingRequest`.
        seed: seed of the images.
        rows: indices of the images to generate.
        label: name of the job for progress and messages.
        device: device that generates the images, see `SamplingRequest`.
    """

    snapshot: Path
    record: dict[str, Any]
    options: SamplingConfig
    conditions: ImageConditions
    guidance: Guidance
    autoencoder: Path | None
    seed: int
    rows: range
    label: str
    device: str | None

    def generate(self) -> Iterator[ImageBatch]:
        """Yield the images in batches, uint8 (n, height, width, channels); the network is loaded before the first one.

        Threads and determinism of this process are set as in the training run. Start-up ends with the loading, and a
        progress bar shows the images. Padding of the last batch is left out.

        Raises:
            KairosError: the snapshot or the autoencoder is missing or damaged, or they do not belong together.
            NotFiniteError: weights, sampled images or decoded pixels are not finite.
        """
        from kairos.snapshots import open_snapshot

        # network, autoencoder and time grid
        device = set_up_device(self.record, self.device)
        snapshot = open_snapshot(self.snapshot, self.options.weights, device)
        codec = open_codec(self.snapshot, self.record, self.autoencoder, device)
        process, solver = snapshot.process, self.options.scheduler
        shape = tuple(self.record["shape"])
        grid = build_time_grid(process, self.options.steps, solver)
        resource_usage.end_startup()

        # images
        progress = ProgressBar(len(self.rows), self.label, "image")
        for indices, kept_count in iterate_batches(self.rows, self.options.batch_size):
            with torch.inference_mode():  # ends before `yield`, so that it does not apply to the caller
                batch_conditions = {name: values.to(device) for name, values in self.conditions(indices).items()}
                predictor = build_guided_predictor(
                    process, snapshot.model, batch_conditions, self.record["conditions"], self.guidance
                )
                predict_x0 = DataPrediction(process, predictor, solver.clip, self.options.precision)
                noise = make_noise_source(self.seed, indices, shape, device)
                # `solver` holds options; `build` runs the solver over all steps of the grid
                x0 = solver.build(process, grid, predict_x0, noise)  # (batch, c, h, w)
                demand_finite(x0, f"{self.snapshot}: {len(x0)} sampled images", _REMEDY)
                images = to_uint8(codec.decode(x0.float()))[:kept_count]
            yield images
            progress.advance(kept_count)
        progress.close()

    def stored_conditions(self, name: str) -> Iterator[RowArray]:
        """Yield the values of one condition to store with the images, in batches (n, ...)."""
        for indices, kept_count in iterate_batches(self.rows, self.options.batch_size):
            yield self.conditions.values_to_store(name, indices)[:kept_count]


def sample_snapshot(job: SamplingJob, request: SamplingRequest) -> None:
    """Write the images of one snapshot or of a shard, and log their number and file.

    The images are generated and decoded, or merged if the job lists the files of all shards. The sampling protocol and
    the conditions, except for images as conditions, are stored with them. If `job.grid` is set, the first images are
    written as a picture; their number is option `grid`. The caller ensures that a job with `shard_files` has no shard.

    Raises:
        ConfigError: a setting does not fit the snapshot, or there are more shards than batches.
        KairosError: the snapshot, the autoencoder, the latents or a shard is missing or damaged.
    """
    sampler, protocol = _prepare_sampler(job, request)
    if job.shard_files:
        images = merge_shards(job.shard_files, protocol, request.num, sampler.options.batch_size)
    else:
        images = sampler.generate()
    stored_conditions: dict[str, Batches] = {}
    for name, description in sampler.conditions.descriptions.items():
        if description["kind"] != "image":  # images as conditions would double the size of the file
            stored_conditions[name] = sampler.stored_conditions(name)
    write_samples(job.out, images, protocol, stored_conditions, num=len(sampler.rows))
    if job.grid is not None:
        write_image_grid(job.grid, open_samples(job.out).images[: sampler.options.grid])
    log(f"{sampler.label}: {len(sampler.rows)} images in {job.out}")


def _prepare_sampler(job: SamplingJob, request: SamplingRequest) -> tuple[_SnapshotSampler, dict[str, Any]]:
    """Resolve all settings of a job, and return its sampler and the sampling protocol to store.

    The network and the autoencoder are not loaded yet; latents are opened if conditions are read from them. A sampler
    of a shard generates the images of the shard alone, and the protocol contains the shard's record.

    Raises:
        ConfigError: a setting does not fit the snapshot, or there are more shards than batches.
        KairosError: the snapshot is missing, or the latents do not belong to it.
    """
    # settings of the snapshot and of the request
    options, record = load_settings(job.snapshot, request.overrides)
    seed = options.seed if request.seed is None else request.seed
    latents = request.latents or job.snapshot / "../../../../../latents"
    conditions = load_conditions(_condition_names(record), record["conditions"], latents, options.labels, seed)
    guidance = _guidance(options, record["shape"][0])
    protocol = _sampling_protocol(record, options, seed, request.num)
    label = f"sample {record['method']} seed {record['seed']} step {record['step']}"

    # images to generate
    rows = range(request.num)
    shard = request.shard
    if shard is not None:
        rows = shard.rows(request.num, options.batch_size)
        protocol["shard"] = shard.record(request.num, options.batch_size)
        label += f" shard {shard.number} of {shard.of}"
        if not rows:
            batches = math.ceil(request.num / options.batch_size)
            raise ConfigError(
                f"{label}: got {shard.of} shards, allowed: at most {batches}, the number of batches of "
                f"{options.batch_size} images"
            )
    sampler = _SnapshotSampler(
        snapshot=job.snapshot,
        record=record,
        options=options,
        conditions=conditions,
        guidance=guidance,
        autoencoder=request.autoencoder,
        seed=seed,
        rows=rows,
        label=label,
        device=request.device,
    )
    return sampler, protocol


def _sampling_protocol(record: dict[str, Any], options: SamplingConfig, seed: int, num: int) -> dict[str, Any]:
    """Return the settings that determine the images, as JSON values on one level, to store with the images.

    ``model_files`` contains the hashes of the sampled weights. ``labels`` is None without conditions. ``seed`` is the
    seed of the images, and ``training_seed`` the seed of the training run. ``num`` is the number of images of the whole
    job, also in a shard.
    """
    has_conditions = bool(_condition_names(record))
    snapshot_fields = {name: record[name] for name in ("identity", "method", "step", "autoencoder_sha256")}
    sampling_fields = {name: getattr(options, name) for name in ("weights", "steps", "nfe", "precision", *GUIDANCE)}
    model_files = {}
    for name, sha256 in record["files"].items():
        if name.startswith(f"{options.weights}/"):  # the folder of the weights that are sampled
            model_files[name] = sha256
    return {
        **snapshot_fields,
        "training_seed": record["seed"],
        "model_files": model_files,
        "scheduler": options.scheduler.plain(),
        **sampling_fields,
        "labels": options.labels if has_conditions else None,
        "seed": seed,
        "num": num,
    }


def _guidance(options: SamplingConfig, channels: int) -> Guidance:
    """Return the guidance that section `sampling` configures, for x0 with `channels` channels.

    Raises:
        ConfigError: more channels are guided than x0 has.
    """
    guidance = Guidance(
        scale=options.guidance_scale,
        channels=options.guidance_channels,
        power=options.guidance_power,
        interval=options.guidance_interval,
    )
    if guidance.channels is not None and guidance.channels > channels:
        raise ConfigError(
            f"sampling.guidance_channels: got {guidance.channels}, allowed: at most {channels}, those of x0"
        )
    return guidance


def open_codec(snapshot: Path, record: dict[str, Any], folder: Path | None, device: torch.device | str) -> Any:
    """Load the autoencoder that a snapshot was trained with.

    Args:
        snapshot: folder of the snapshot.
        record: record of the snapshot.
        folder: folder of the autoencoder; None: ``../../../../../autoencoder``, relative to the snapshot.
        device: device for the autoencoder.

    Raises:
        KairosError: the autoencoder is missing, or is another one. Its hash is compared with the record. For imported
            weights without a recorded autoencoder, only the shape of its latents is compared.
        DamagedError: a file of the autoencoder has changed.
    """
    from kairos.autoencoders.codec import load_codec

    folder = folder or snapshot / "../../../../../autoencoder"
    advice = f"pass --autoencoder DIR, the one that {snapshot} was trained with"
    if not (folder / "record.json").is_file():
        raise KairosError(f"{folder.resolve()}: no autoencoder; {advice}")
    codec = load_codec(folder, device)
    required_hash = record["autoencoder_sha256"]
    if required_hash is None:  # imported weights, whose autoencoder is unknown: only the shape can be compared
        latent_shape, required_shape = list(codec.record["latent_shape"]), list(record["shape"])
        if latent_shape != required_shape:
            raise KairosError(f"--autoencoder: {folder} has latents of shape {latent_shape}, allowed: {required_shape}")
    elif required_hash != codec.record["sha256"]:
        raise KairosError(
            f"{folder}: got autoencoder {codec.record['sha256'][:12]}, expected {required_hash[:12]}; {advice}"
        )
    return codec
