"""``kairos check`` and ``kairos schema``: what an experiment file will do, and what may stand in one."""

import argparse
import json
from pathlib import Path

from kairos.progress import table


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """The experiment file; a schema needs none."""
    if name == "schema":
        return
    what = "experiment file, e.g. params.yaml, or a folder of some: a line each, and what cannot be used"
    parser.add_argument("file", type=Path, metavar="FILE", help=what)
    parser.add_argument("--profile", type=Path, metavar="DIR", help="compare time limits with this cluster's profile")
    parser.add_argument("--gpu-memory", type=float, metavar="GIB", help="of a GPU; default: of this machine's")
    parser.add_argument("--steps-per-second", type=float, metavar="R", help="of a training, for the time limits")
    parser.add_argument("--folder", action="store_true", help="print the folder of its results only")


def run(arguments: argparse.Namespace) -> None:
    """Check the file and print jobs, methods and milestones, or print the schema."""
    from kairos.config import Experiment, load
    from kairos.fetching import lacking
    from kairos.report.text import component
    from kairos.workflow.layout import Layout

    if arguments.command == "schema":
        print(json.dumps(Experiment.model_json_schema(), indent=1, ensure_ascii=False))
        return
    if arguments.file.is_dir():
        _folder(arguments.file)
        return
    given = load(arguments.file)
    if arguments.folder:
        print(Layout(given, arguments.file).results)
        return
    from kairos.costs.beforehand import remarks

    experiment, said = given.settled()
    layout = Layout(experiment, arguments.file)
    print(f"{arguments.file}: experiment {experiment.experiment}, results in {layout.results}/\n")
    print(_ruled([("stage", "jobs"), *((stage, str(jobs)) for stage, jobs in layout.jobs().items())]) + "\n")
    process, prediction = experiment.diffusion.process, experiment.diffusion.prediction
    coupled = {its.coupling["name"] for its in experiment.methods.values()} != {"independent"}
    parts = ["sampler", "weighting", *["coupling"] * coupled]
    methods = [(name, *(component(getattr(its, part)) for part in parts)) for name, its in experiment.methods.items()]
    print(_ruled([("method", *parts), *methods]))
    steps = ", ".join(str(step) for step in experiment.milestones)
    segments = f", in {len(layout.segments)} segments" if len(layout.segments) > 1 else ""
    images = experiment.evaluation.num_samples * experiment.evaluation.sets
    print(f"\nprocess: {component(process)}" + (f", prediction {prediction}" if prediction else ""))
    print(f"seeds: {', '.join(map(str, experiment.seeds))}")
    print(f"milestones: {steps} (of {experiment.training.batch_size} images a step){segments}")
    print(f"evaluated with {images} images a milestone, {experiment.evaluation.sets} sets")
    if given == experiment:
        print(f"extractor: {component(experiment.evaluation.extractor)}")
    said += [*remarks(experiment, arguments.profile, arguments.gpu_memory, arguments.steps_per_second)]
    said += lacking(experiment)
    print(*said, sep="\n", end="\n" if said else "")


def _folder(folder: Path) -> None:
    """A line for every experiment file below a folder.

    Raises:
        ConfigError: some cannot be used: all of these, with the reasons.
    """
    from kairos.config import files_in, load
    from kairos.errors import ConfigError
    from kairos.workflow.layout import Layout

    rows, faults = list[tuple[str, ...]]([("file", "methods", "trainings", "milestones", "jobs")]), []
    for file in files_in(folder):
        try:
            experiment, _ = load(file).settled()
        except ConfigError as error:
            faults.append(str(error) if str(file) in str(error) else f"{file}: {error}")
            continue
        its = Layout(experiment, file)
        numbers = (len(its.methods), len(its.trainings), len(its.steps), sum(its.jobs().values()))
        rows.append((str(file), *map(str, numbers)))
    print(table(rows, lambda head, column, cell: column > 0))
    if faults:
        raise ConfigError("\n".join([f"{len(faults)} files cannot be used", *faults]))


def _ruled(rows: list[tuple[str, ...]]) -> str:
    rule = ["-" * max(map(len, column)) for column in zip(*rows)]
    return table([rows[0], rule, *rows[1:]], lambda *cell: False)
