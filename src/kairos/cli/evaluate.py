"""``kairos extractor``, ``kairos reference`` and ``kairos evaluate``: comparison of samples with real images."""

import argparse
from pathlib import Path

from kairos.cli.common import (
    add_config,
    add_device,
    add_timing,
    demand_option,
    pair_options,
    set_up_device,
    write_timing,
)
from kairos.cli.jobs import Job, add_job, check_command_form, open_job


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of one of the three subcommands, with the file of the timing record."""
    if name == "evaluate":
        _add_evaluate_arguments(parser)
    else:
        _add_stage_arguments(name, parser)
    add_timing(parser)


def _add_stage_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `extractor` or `reference`: the experiment file, and folders to read and to write.

    Only the experiment file is required.
    """
    add_config(parser)
    for folder in ("dataset", "autoencoder", "latents", "extractor") if name == "reference" else ("dataset",):
        help = f"folder to read (default: results/<experiment>/{folder})"
        parser.add_argument(f"--{folder}", type=Path, metavar="DIR", help=help)
    help = f"folder to write (default: results/<experiment>/{name})"
    parser.add_argument("--out", type=Path, metavar="DIR", help=help)


def _add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `evaluate`.

    They are samples, records to write, the reference, snapshots with their latents, the extractor and the device. The
    names of metrics and the number of sample sets apply only to a reference that is an npz file.
    """
    add = parser.add_argument
    parser.epilog = (
        "With --config: the samples of a training run. Without: those in --samples; repeat --samples, --out and "
        "--snapshot, in pairs, to evaluate several files in one job."
    )
    add_job(parser, required=False)
    add(
        "--samples",
        type=Path,
        action="append",
        metavar="F",
        help="npz of generated images (repeatable)",
    )
    add("--out", type=Path, action="append", metavar="F", help="JSON record to write (repeatable)")
    reference = "reference/record.json or its folder; or an npz of real images (with --extractor)"
    add("--reference", type=Path, metavar="F", help=reference)
    snapshot = "snapshot whose validation loss is added to the record (repeatable)"
    add("--snapshot", type=Path, action="append", metavar="D", help=snapshot)
    extractor = "folder, or the published inception or dinov2; default: ../extractor of the reference"
    add("--extractor", type=Path, metavar="DIR", help=extractor)
    add("--latents", type=Path, metavar="DIR", help="default: results/<experiment>/latents of the snapshot")
    add(
        "--metrics",
        metavar="M,...",
        help="with an npz reference: names of metrics; default: the default metrics of the extractor",
    )
    add(
        "--sets",
        type=int,
        metavar="K",
        help="with an npz reference: number of sets that the samples are split into; default: 1",
    )
    add_device(parser)


def run(arguments: argparse.Namespace) -> None:
    """Write the folder of the extractor or of the reference, or evaluate samples.

    - `extractor` reads the data set, and writes a feature extractor that is trained on it or fetched.
    - `reference` reads data set, autoencoder, latents and extractor. It writes the statistics of real images and the
      reference rows.
    - `evaluate` reads npz files of samples and the reference, and writes a JSON record of metrics for each npz file. It
      logs warnings about the numbers of images.

    The time of a job of the pipeline is recorded, for `evaluate` with the number of files.
    """
    if arguments.command == "evaluate":
        _evaluate(arguments)
        return
    from kairos.validity import Result

    job = open_job(arguments)

    def write() -> None:
        if arguments.command == "extractor":
            _build_extractor(arguments, job)
        else:
            _build_reference(arguments, job)
        write_timing(arguments, None if arguments.out else job.timing_file)

    # folders that an option sets are not those of the pipeline
    if any(getattr(arguments, name, None) for name in ("out", "dataset", "autoencoder", "latents", "extractor")):
        write()
    else:
        job.compute(Result(arguments.command), write)


def _build_extractor(arguments: argparse.Namespace, job: Job) -> None:
    """Write the folder of the feature extractor that `evaluation.extractor` selects, or that is chosen for ``auto``.

    A classifier is trained on the data set, on the CPU; a published extractor is copied, after its download if it is
    missing. The end of start-up is marked before.

    Raises:
        ConfigError: the experiment is not valid; or the extractor is ``auto``, and the evaluation is not possible.
        KairosError: the data set is missing, or the extractor cannot be trained or downloaded.
    """
    experiment = job.experiment
    if experiment.evaluation.extractor.name == "auto":
        # `resolve` lists all images of the source, so it is called only if necessary; jobs of Snakemake get a resolved
        # experiment
        experiment, _ = experiment.resolve()  # without the messages, which `kairos check` prints

    # imported after the check of the experiment file, since it takes seconds
    from kairos import resource_usage
    from kairos.data.dataset import open_dataset
    from kairos.evaluation import extractors, inception_weights
    from kairos.evaluation.settings import InceptionOptions

    dataset = open_dataset(arguments.dataset or job.results / "dataset")
    extractor = experiment.evaluation.extractor
    extractor.load()  # imports the extractor's code now, so that the timing counts the imports as start-up
    set_up_device(experiment, "cpu")
    resource_usage.end_startup()
    if isinstance(extractor, InceptionOptions) and not extractor.path and experiment.evaluation.needs_logits:
        inception_weights.download_weights(needs_last_layer=True)  # nothing if it is there
    extractors.build_extractor(extractor, dataset, arguments.out or job.results / "extractor")


def _build_reference(arguments: argparse.Namespace, job: Job) -> None:
    """Write the statistics of real images and the reference rows, such as the distance of held-out images.

    Data set, autoencoder, latents and extractor are read. The statistics and ``reference/record.json`` are written to
    ``--out``.

    Raises:
        ConfigError: the experiment is not valid.
        KairosError: a folder that the stage reads is missing or damaged.
    """
    from kairos.evaluation import reference  # imported after the check of the experiment file, since it takes seconds

    results = job.results
    reference.build_reference(
        job.experiment.evaluation,
        set_up_device(job.experiment),
        dataset=arguments.dataset or results / "dataset",
        autoencoder=arguments.autoencoder or results / "autoencoder",
        latents=arguments.latents or results / "latents",
        extractor=arguments.extractor or results / "extractor",
        out=arguments.out or results / "reference",
    )


def _evaluate(arguments: argparse.Namespace) -> None:
    """Compare samples with the reference, and write their records.

    With ``--config``, the samples are those of a training run, and all files are in the folder of results. Without, the
    options name the files. With ``--snapshot``, a record contains the validation loss of the snapshot too. Without
    ``--metrics``, the metrics of the reference are measured, or for an npz reference the default metrics of the
    extractor. If a file cannot be evaluated, the records of earlier files remain.

    Raises:
        ConfigError: options of both forms are combined, or a required one is missing. Options that are repeated
            together have different numbers of values, or ``--sets`` is below 1. ``--metrics`` is set although the
            reference is not an npz file.
        KairosError: a file is missing or damaged, or files do not belong together.
    """
    by_hand = ("samples", "out", "snapshot", "reference", "extractor", "latents", "metrics", "sets")
    check_command_form(arguments, by_hand)
    if arguments.config is not None:
        _evaluate_run(arguments, open_job(arguments))
        return
    for option in ("samples", "out", "reference"):
        demand_option(getattr(arguments, option), option, "none", "a path, or --config, --method and --seed")
    outputs = pair_options(arguments, "samples", "out", "snapshot")
    sets = 1 if arguments.sets is None else arguments.sets
    demand_option(sets >= 1, "sets", sets, "1 or more")

    from kairos.evaluation import evaluate  # imported after the checks of the arguments, since it takes seconds

    jobs = [evaluate.EvaluationJob(samples, out, snapshot) for samples, out, snapshot in outputs]
    evaluate.run(
        jobs,
        arguments.reference,
        extractor=arguments.extractor,
        latents=arguments.latents,
        sets=sets,
        metric_names=arguments.metrics.split(",") if arguments.metrics else None,
        device=arguments.device,
    )
    write_timing(arguments, files=len(jobs))


def _evaluate_run(arguments: argparse.Namespace, job: Job) -> None:
    """Evaluate the samples of a training run or of a segment of it, and write their records.

    Raises:
        KairosError: a file is missing or damaged, or files do not belong together.
    """
    from kairos.evaluation import evaluate
    from kairos.validity import Result

    folder, results = job.run_folder, job.results
    outdated = job.select_outdated([Result("evaluate", job.method, job.seed, name) for name in job.snapshots])
    if not outdated:
        return
    jobs = {}
    for result in outdated:
        evaluation_job = evaluate.EvaluationJob(
            samples=folder / "samples" / f"{result.snapshot}.npz",
            out=folder / "evaluation" / f"{result.snapshot}.json",
            snapshot=folder / "snapshots" / str(result.snapshot),
        )
        jobs[evaluation_job] = result
    evaluate.run(
        list(jobs),
        results / "reference" / "record.json",
        extractor=results / "extractor",
        latents=results / "latents",
        device=arguments.device,
        finished=lambda evaluation_job: job.complete_record(jobs[evaluation_job], outdated[jobs[evaluation_job]]),
    )
    write_timing(arguments, job.timing_file, files=len(jobs))
