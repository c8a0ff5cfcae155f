"""``kairos extractor``, ``kairos reference`` and ``kairos evaluate``: comparison of samples with real images."""

import argparse
from pathlib import Path

from kairos.cli.common import add_config, add_timing, demand, pair_options, set_up_device, write_timing


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of one of the three subcommands."""
    add = parser.add_argument
    if name == "evaluate":
        parser.epilog = "Repeat --samples, --out and --milestone, in pairs, to evaluate several files in one job."
        add(
            "--samples",
            type=Path,
            action="append",
            required=True,
            metavar="F",
            help="npz of generated images (repeatable)",
        )
        add("--out", type=Path, action="append", required=True, metavar="F", help="JSON record to write (repeatable)")
        reference = "reference.json or its folder; or an npz of real images (with --extractor)"
        add("--reference", type=Path, required=True, metavar="F", help=reference)
        milestone = "snapshot whose validation loss is added to the record (repeatable)"
        add("--milestone", type=Path, action="append", metavar="D", help=milestone)
        extractor = "folder, inception or dinov2; default: ../extractor of the reference"
        add("--extractor", type=Path, metavar="DIR", help=extractor)
        add("--latents", type=Path, metavar="DIR", help="default: results/<experiment>/latents of the milestone")
        add(
            "--metrics",
            metavar="M,...",
            help="with an npz reference: names of metrics; default: the default metrics of the extractor",
        )
        add(
            "--sets",
            type=int,
            default=1,
            metavar="K",
            help="with an npz reference: number of sets that the samples are split into",
        )
    else:
        add_config(parser)
        add("--dataset", type=Path, required=True, metavar="DIR", help="prepared data set")
        if name == "reference":
            for part in ("autoencoder", "latents", "extractor"):
                add(f"--{part}", type=Path, required=True, metavar="DIR", help=f"folder of stage {part}")
        add("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    add_timing(parser)


def run(arguments: argparse.Namespace) -> None:
    """Run the subcommand."""
    facts = {"extractor": _extractor, "reference": _reference, "evaluate": _evaluate}[arguments.command](arguments)
    write_timing(arguments, **facts)


def _extractor(arguments: argparse.Namespace) -> dict[str, int]:
    """Train or copy the feature extractor; return no entries for the timing record."""
    from kairos.config import load

    experiment, _ = load(arguments.config).resolve()
    from kairos import resource_usage
    from kairos.data.dataset import open_dataset
    from kairos.evaluation import extractors
    from kairos.evaluation.registries import EXTRACTORS

    dataset, extractor = open_dataset(arguments.dataset), experiment.evaluation.extractor
    EXTRACTORS.entry(extractor["name"]).load()  # its imports count as start-up
    set_up_device(experiment, "cpu")
    resource_usage.end_startup()
    extractors.build_extractor(extractor, dataset, arguments.out)
    return {}


def _reference(arguments: argparse.Namespace) -> dict[str, int]:
    """Write the statistics of real images; return no entries for the timing record."""
    from kairos.config import load

    a, experiment = arguments, load(arguments.config)
    from kairos.evaluation import reference

    folders = a.dataset, a.autoencoder, a.latents, a.extractor, a.out
    reference.build_reference(experiment.evaluation, set_up_device(experiment), *folders)
    return {}


def _evaluate(arguments: argparse.Namespace) -> dict[str, int]:
    """Evaluate files of samples; return their number for the timing record."""
    pairs = pair_options(arguments, "samples", "out", "milestone")
    demand(arguments.sets >= 1, "sets", arguments.sets, "1 or more")
    from kairos.evaluation import evaluate

    jobs = [evaluate.EvaluationJob(*paths) for paths in pairs]
    metrics = arguments.metrics.split(",") if arguments.metrics else None
    evaluate.run(jobs, arguments.reference, arguments.extractor, arguments.latents, arguments.sets, metrics)
    return {"files": len(jobs)}
