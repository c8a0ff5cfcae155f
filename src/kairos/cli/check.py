"""``kairos check`` and ``kairos schema``: what an experiment file will do, and what may stand in one."""

import argparse
import json
import textwrap
from itertools import zip_longest
from pathlib import Path
from typing import Any

from kairos.cli.common import add_plugins
from kairos.progress import table
from kairos_timesteps.options import but_name, dump
from kairos_timesteps.registry import Registry

_WIDTH = 100  # columns of the output


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `check` or `schema`."""
    if name == "schema":
        add_plugins(parser)
        return
    what = "experiment file, e.g. params.yaml, or a folder of some: a line each, and what cannot be used"
    parser.add_argument("file", type=Path, metavar="FILE", help=what)
    parser.add_argument("--profile", type=Path, metavar="DIR", help="compare time limits with this cluster's profile")
    parser.add_argument("--gpu-memory", type=float, metavar="GIB", help="of a GPU; default: of this machine's")
    parser.add_argument("--steps-per-second", type=float, metavar="R", help="of a training, for the time limits")
    parser.add_argument("--all-options", action="store_true", help="also print options that have their default value")
    parser.add_argument("--folder", action="store_true", help="print the folder of its results only")


def run(arguments: argparse.Namespace) -> None:
    """Check the file and print jobs, methods and milestones, or print the schema."""
    from kairos.config import Experiment, load
    from kairos.config.plugins import load_plugins
    from kairos.downloads import lacking
    from kairos.evaluation.registries import EXTRACTORS
    from kairos.evaluation.separation import warning_before_run
    from kairos.report.formatting import describe_sample_sets
    from kairos.workflow.layout import Layout
    from kairos_timesteps.components import COUPLINGS, SAMPLERS, WEIGHTINGS
    from kairos_timesteps.diffusion.registries import PROCESSES

    if arguments.command == "schema":
        load_plugins(arguments.plugin)
        print(json.dumps(Experiment.model_json_schema(), indent=1, ensure_ascii=False))
        return
    if arguments.file.is_dir():
        _folder(arguments.file)
        return
    given = load(arguments.file)
    if arguments.folder:
        print(Layout(given, arguments.file).results)
        return
    from kairos.costs.preflight import find_warnings

    experiment, said = given.resolve()
    layout = Layout(experiment, arguments.file)
    print(f"{arguments.file}: experiment {experiment.experiment}, results in {layout.results}/\n")
    if warning := warning_before_run(experiment.evaluation, experiment.dataset, Path(layout.results)):
        print(textwrap.fill(f"warning: {warning}", _WIDTH, subsequent_indent="  ") + "\n")
    print(_ruled([("stage", "jobs"), *((stage, str(jobs)) for stage, jobs in layout.count_jobs().items())]) + "\n")
    coupled = any(method.coupling["name"] != "independent" for method in experiment.methods.values())
    parts = {"sampler": SAMPLERS, "weighting": WEIGHTINGS} | ({"coupling": COUPLINGS} if coupled else {})
    rows = [("method", *parts)]
    for name, method in experiment.methods.items():
        components = {part: getattr(method, part) for part in parts}
        rows.append((name, *(_component(parts[part], components[part], arguments.all_options) for part in parts)))
    print(_ruled(rows) + "\n")
    prediction = f", prediction {experiment.diffusion.prediction}" if experiment.diffusion.prediction else ""
    steps = ", ".join(str(step) for step in experiment.milestones)
    segments = f", in {len(layout.segments)} segments" if len(layout.segments) > 1 else ""
    facts = {
        "process": _component(PROCESSES, experiment.diffusion.process, arguments.all_options) + prediction,
        "seeds": ", ".join(map(str, experiment.seeds)),
        "milestones": f"{steps} (of {experiment.training.batch_size} images a step){segments}",
        "samples": f"{describe_sample_sets(experiment.evaluation)} at each milestone",
    }
    if given == experiment:
        facts["extractor"] = _component(EXTRACTORS, experiment.evaluation.extractor, arguments.all_options)
    for name, fact in facts.items():
        print(textwrap.fill(f"{name}: {fact}", _WIDTH, subsequent_indent="  "))
    said += [*find_warnings(experiment, arguments.profile, arguments.gpu_memory, arguments.steps_per_second)]
    said += lacking(experiment)
    print(*said, sep="\n", end="\n" if said else "")


def _folder(folder: Path) -> None:
    """A line for every experiment file below a folder.

    Raises:
        ConfigError: some cannot be used: all of these, with the reasons.
    """
    from kairos.config import find_experiment_files, load
    from kairos.workflow.layout import Layout
    from kairos_timesteps.errors import ConfigError

    rows, faults = list[tuple[str, ...]]([("file", "methods", "trainings", "milestones", "jobs")]), []
    for file in find_experiment_files(folder):
        try:
            experiment, _ = load(file).resolve()
        except ConfigError as error:
            faults.append(str(error) if str(file) in str(error) else f"{file}: {error}")
            continue
        its = Layout(experiment, file)
        numbers = (len(its.methods), len(its.trainings), len(its.snapshots), sum(its.count_jobs().values()))
        rows.append((str(file), *map(str, numbers)))
    print(table(rows, lambda head, column, cell: column > 0))
    if faults:
        raise ConfigError("\n".join([f"{len(faults)} files cannot be used", *faults]))


def _component(registry: Registry, named: Any, all_options: bool) -> str:
    """Return a component's name with its options; without `all_options` only those that differ from their defaults."""
    if isinstance(named, list):
        return ", ".join(_component(registry, one, all_options) for one in named)
    if not isinstance(named, dict):
        return "null" if named is None else str(named)
    if "name" not in named:
        return str(named)
    default = dump(registry.entry(named["name"]).options())
    shown = []
    for option, value in but_name(named).items():
        text = _component(registry, value, all_options)
        is_default = option in default and text == _component(registry, default[option], all_options)
        if not is_default or (all_options and value not in (None, [])):
            shown.append(f"{option} {text}")
    return str(named["name"]) + (f" ({', '.join(shown)})" if shown else "")


def _ruled(rows: list[tuple[str, ...]]) -> str:
    """Return a table with a rule below its header; cells are wrapped where it would be wider than `_WIDTH`."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    while sum(widths) + 2 * (len(widths) - 1) > _WIDTH:
        widths[widths.index(max(widths))] -= 1
    lines: list[tuple[str, ...]] = []
    for row in rows:
        cells = [textwrap.wrap(cell, width) or [""] for cell, width in zip(row, widths)]
        lines += zip_longest(*cells, fillvalue="")
    rule = tuple("-" * width for width in widths)
    return table([lines[0], rule, *lines[1:]], lambda *cell: False)
