"""``kairos check`` and ``kairos schema``: check an experiment file, or print the schema of experiment files."""

import argparse
import json
import textwrap
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kairos.cli.common import add_plugins
from kairos.components import ComponentOptions
from kairos.files import read_record
from kairos.library_components import LibraryComponent
from kairos.progress import table
from kairos_timesteps.options import default_values, options_without_name
from kairos_timesteps.registry import Registry

if TYPE_CHECKING:
    from kairos.config import Experiment

_WIDTH = 100  # columns of the output
_GAP = 2  # columns between the cells of a table, as `progress.table` prints them
_Table = list[tuple[str, ...]]  # rows of cells; the first is the header


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `check`, or of `schema`, which has ``--plugin`` alone."""
    if name == "schema":
        add_plugins(parser)
        return
    file = "experiment file, e.g. params.yaml, or a folder of experiment files: a line for each, and all errors"
    parser.add_argument("file", type=Path, metavar="FILE", help=file)
    parser.add_argument("--profile", type=Path, metavar="DIR", help="check the time limits of this cluster's profile")
    parser.add_argument(
        "--gpu-memory", type=float, metavar="GIB", help="memory of a GPU; default: that of this machine"
    )
    parser.add_argument(
        "--steps-per-second", type=float, metavar="R", help="speed of a training run, for the time limits"
    )
    all_options = "also print the default options of methods, model, forward process and feature extractor"
    parser.add_argument("--all-options", action="store_true", help=all_options)
    parser.add_argument("--folder", action="store_true", help="print only the folder of results")


def run(arguments: argparse.Namespace) -> None:
    """Print the JSON schema, with plugins, or check one experiment file or all files below a folder.

    No file is written. The check of one file also reads the data that the experiment names, the profile of a cluster
    and earlier results. The other options have no effect on the check of a folder. A file that is not valid raises
    ConfigError.
    """
    from kairos.config import Experiment
    from kairos.config.plugins import load_plugins

    if arguments.command == "schema":
        load_plugins(arguments.plugin)
        print(json.dumps(Experiment.model_json_schema(), indent=1, ensure_ascii=False))
    elif arguments.file.is_dir():
        _check_folder(arguments.file)
    else:
        _check_file(arguments)


def _check_file(arguments: argparse.Namespace) -> None:
    """Check an experiment file and print jobs, methods, settings, and messages such as warnings, in this order.

    A warning that the distance may not rank methods is printed before the jobs. With ``--folder``, only the folder of
    results is printed, after the check of the file alone.

    Raises:
        ConfigError: the experiment is not valid, or is certain to fail. Images, memory and time limits are checked
            after jobs, methods and settings are printed.
        KairosError: a file of the cluster's profile cannot be read.
    """
    from kairos.config import load
    from kairos.workflow.layout import Layout

    configured = load(arguments.file)
    if arguments.folder:
        print(Layout(configured, arguments.file).results)
        return

    # imported after `--folder`, which the Makefile calls before every run
    from kairos.costs.preflight import find_warnings
    from kairos.downloads import warn_of_missing
    from kairos.evaluation.separation import warning_before_run

    experiment, messages = configured.resolve()
    layout = Layout(experiment, arguments.file)
    print(f"{arguments.file}: experiment {experiment.experiment}, results in {layout.results}/\n")
    ranking_warning = warning_before_run(experiment.evaluation, experiment.dataset, Path(layout.results))
    if ranking_warning:
        print(_wrap(f"warning: {ranking_warning}") + "\n")

    # tables of jobs and methods
    job_rows: _Table = [("stage", "jobs")]
    job_rows += [(stage, str(count)) for stage, count in layout.count_jobs().items()]
    print(_render_table(job_rows) + "\n")
    print(_render_table(_method_rows(experiment, arguments.all_options)) + "\n")

    # settings, one per line
    settings = _describe_settings(layout, arguments.all_options)
    if configured == experiment:  # else `messages` report the extractor that `resolve` has chosen for auto
        extractor = experiment.evaluation.extractor
        settings["extractor"] = _describe_component(extractor, arguments.all_options)
    for name, setting in settings.items():
        print(_wrap(f"{name}: {setting}"))

    # messages about the extractor, and warnings; ConfigError if a job is certain to fail
    messages += find_warnings(
        experiment,
        profile=arguments.profile,
        gpu_memory=arguments.gpu_memory,
        steps_per_second=arguments.steps_per_second,
    )
    messages += warn_of_missing(experiment)
    messages += _find_dataset_warnings(Path(layout.results))
    for message in messages:
        print(message)


def _find_dataset_warnings(results: Path) -> list[str]:
    """Return the warnings in the record of the prepared data set in a folder of results; empty if it is not prepared.

    Raises:
        DamagedError: the record is damaged.
    """
    record = results / "dataset" / "record.json"
    if not record.is_file():
        return []
    return [f"warning: {record.parent}: {warning}" for warning in read_record(record)["warnings"]]


def _wrap(text: str) -> str:
    """Return a text in lines of at most `_WIDTH` columns; lines after the first are indented."""
    return textwrap.fill(text, _WIDTH, subsequent_indent="  ")


def _method_rows(experiment: "Experiment", all_options: bool) -> _Table:
    """Return a header, and a row for each method of an experiment: name, sampler and weighting with their options.

    If a method has a coupling other than ``independent``, the last column contains the couplings.

    Args:
        all_options: True to include options that have their default value.
    """
    kinds = ["sampler", "weighting"]  # of components: columns of the table, and fields of a method
    if any(method.coupling.name != "independent" for method in experiment.methods.values()):
        kinds.append("coupling")
    rows: _Table = [("method", *kinds)]
    for name, method in experiment.methods.items():
        cells = [_describe_component(getattr(method, kind), all_options) for kind in kinds]
        rows.append((name, *cells))
    return rows


def _describe_settings(layout: Any, all_options: bool) -> dict[str, str]:
    """Return descriptions of settings by label: ``model``, ``process``, ``seeds``, ``milestones`` and ``samples``.

    The text for ``milestones`` has the steps, the batch size, and the number of segments if there are several. The
    text for ``process`` has the prediction target unless it is None.

    Args:
        layout: layout of the checked experiment.
        all_options: True to include options that have their default value.
    """
    from kairos.report.formatting import describe_sample_sets

    experiment = layout.experiment
    process = _describe_component(experiment.diffusion.process, all_options)
    if experiment.diffusion.prediction:
        process += f", prediction {experiment.diffusion.prediction}"
    steps = ", ".join(map(str, experiment.milestones))
    segments = f", in {len(layout.segments)} segments" if len(layout.segments) > 1 else ""
    return {
        "model": _describe_component(experiment.model, all_options),
        "process": process,
        "seeds": ", ".join(map(str, experiment.seeds)),
        "milestones": f"{steps} (steps of {experiment.training.batch_size} images){segments}",
        "samples": f"{describe_sample_sets(experiment.evaluation)} at each milestone",
    }


def _check_folder(folder: Path) -> None:
    """Check all experiment files below a folder and print a table of the valid files.

    The columns are the file and the numbers of methods, of training runs, of snapshots of all training runs, and of
    jobs.

    Raises:
        ConfigError: the folder contains no file, or some files are not valid. The error is raised after the table, and
            its message contains the errors of all files.
        KairosError: the snapshot in a file's `training.start_from` is damaged; no table is printed then.
    """
    from kairos.config import find_experiment_files, load
    from kairos.workflow.layout import Layout
    from kairos_timesteps.errors import ConfigError

    rows: _Table = [("file", "methods", "runs", "milestones", "jobs")]
    problems = []
    for file in find_experiment_files(folder):
        try:
            experiment, _ = load(file).resolve()
        except ConfigError as error:
            message = str(error)
            if str(file) not in message:  # most messages contain the file, but not those of `resolve`
                message = f"{file}: {message}"
            problems.append(message)
            continue
        layout = Layout(experiment, file)
        job_count = sum(layout.count_jobs().values())
        counts = (len(layout.methods), len(layout.trainings), len(layout.snapshots), job_count)
        rows.append((str(file), *map(str, counts)))
    print(table(rows))
    if problems:
        raise ConfigError("\n".join([f"{len(problems)} files cannot be used", *problems]))


def _describe_component(component: ComponentOptions | LibraryComponent, all_options: bool) -> str:
    """Return a component as text, such as ``speed (k 5, tau 700)``.

    Args:
        all_options: True to include options that have their default value.
    """
    if isinstance(component, LibraryComponent):
        return _describe_value(component.plain(), component.registry, all_options)
    defaults = type(component)(name=component.name).plain_options()  # of a component with no option set
    options = component.plain_options()
    return _describe_options(component.name, options, defaults, registry=None, all_options=all_options)


def _describe_value(value: Any, registry: Registry | None, all_options: bool) -> str:
    """Return the value of an option as text; the items of a list are joined by commas, and None is ``null``.

    A mapping with a name is a component of `registry`, and is described with its options, as in ``speed (k 5)``: the
    options of a mixture are samplers. Without a registry, no mapping is a component.
    """
    if isinstance(value, list):
        return ", ".join(_describe_value(item, registry, all_options) for item in value)
    if value is None:
        return "null"
    if registry is None or not isinstance(value, dict) or "name" not in value:  # no component
        return str(value)
    defaults = default_values(registry.entry(value["name"]).component)
    return _describe_options(value["name"], options_without_name(value), defaults, registry, all_options)


def _describe_options(
    name: str, options: dict[str, Any], defaults: dict[str, Any], registry: Registry | None, all_options: bool
) -> str:
    """Return the name of a component with its options in parentheses, or the name alone if no option is left.

    Options that have their default value are left out. With `all_options`, they are left out only if that value is None
    or an empty list.
    """
    described = []
    for option, value in options.items():
        text = _describe_value(value, registry, all_options)
        # compares texts: a value that is a component has all its options, and the default perhaps only some
        is_default = option in defaults and text == _describe_value(defaults[option], registry, all_options)
        is_empty = value in (None, [])
        if not is_default or (all_options and not is_empty):
            described.append(f"{option} {text}")
    if not described:
        return name
    return f"{name} ({', '.join(described)})"


def _render_table(rows: _Table) -> str:
    """Return a table as text with a rule below its header, at most `_WIDTH` wide.

    Cells of the widest columns are wrapped, so that a row may take several lines. All columns are aligned left.
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    while sum(widths) + _GAP * (len(widths) - 1) > _WIDTH:  # narrow the widest column by one character
        widest = widths.index(max(widths))
        widths[widest] -= 1
    lines: _Table = []
    for row in rows:
        wrapped_cells = [textwrap.wrap(cell, width) or [""] for cell, width in zip(row, widths)]  # lines of each cell
        lines += zip_longest(*wrapped_cells, fillvalue="")  # line i of the row has line i of each cell
    header, *body = lines
    rule = tuple("-" * width for width in widths)
    return table([header, rule, *body], left=range(len(header)))
