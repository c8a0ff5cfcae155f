"""First view of an experiment in MLflow: a prepared comparison, whose layout is view.json, and a note."""

import json
from bisect import bisect
from itertools import accumulate
from pathlib import Path
from string import Template
from typing import Any

from kairos.config import Experiment
from kairos.report import compare, formatting, ranking
from kairos.report.collect import Results
from kairos.report.equal_time import describe_clock
from kairos.report.findings import find_warnings, summarise_outcome
from kairos.tracking.mlflow_store import Client, filter_by_tags
from kairos.tracking.run_content import CURRENT, flatten
from kairos_timesteps.errors import KairosError
from kairos_timesteps.options import default_values

KEY = "kairos"
TAG = f"mlflow.sharedViewState.{KEY}"  # the tag that MLflow's button `Share` writes
NOTE = "mlflow.note.content"
_RUNS_WORKSPACE = "workflowType=machine_learning"  # selects the one of MLflow's two workspaces that shows runs
# columns of the note's table: a selection from `build_comparison_table`, and the options; each with its heading
_COLUMNS = {
    "method": "method",
    "options": "options",
    "seeds": "seeds",
    "value": "{metric} at step {step}: mean over seeds ± standard deviation over sample sets or seeds, the larger one",
    "difference": "difference to {baseline}",
    "low": "95 % interval from",
    "high": "to",
    "p_value": "p value of the difference",
    "speedup_steps": "speed-up in steps to the final value of {baseline}",
    "speedup_seconds": "speed-up in seconds of training to that value",
}
_HEADING_METHODS = 5  # largest number of methods in the heading of a note
_OPTION_WIDTH = 150  # pixels: MLflow's default cuts names such as weighting.gamma
_TAG_LIMIT = 4900  # characters: older servers accept tags of 5,000
# characters of the table and of the warnings in a note
_TABLE_LIMIT = 2600
_WARNINGS_LIMIT = 900


def build_experiment_tags(results: Results, outcome: str, parent_id: str, experiment_id: str) -> dict[str, str]:
    """Return the tags of an MLflow experiment: its note, the layout of the prepared comparison, and its kind.

    The note is `outcome`, followed by links to the report and to the charts. Without a kind, MLflow would request one
    from the user.

    Args:
        outcome: comparison of methods from `build_note`, the start of the experiment's note.
        parent_id: id of the experiment's parent run, which contains the report.
    """
    report_link = f"[report](#/experiments/{experiment_id}/runs/{parent_id}/artifacts/report.html?{_RUNS_WORKSPACE})"
    charts_link = f"[charts]({comparison_path(experiment_id)}&compareRunsMode=CHART)"
    note = (
        f"{outcome}\n\nThe {report_link} and its figures are artifacts of the run "
        f"`{results.experiment.experiment}`; grids of samples are artifacts of each training run. The comparison is "
        f"also shown as {charts_link}."
    )
    return {
        TAG: _build_comparison(results),
        NOTE: note,
        "mlflow.experimentKind": "custom_model_development",  # without it MLflow asks the user
    }


def _build_comparison(results: Results) -> str:
    """Return the layout of the prepared comparison: view.json with the metric, a filter, and the options as columns.

    The filter selects the current runs of the experiment. The options of `select_options` follow the names of sampler
    and weighting. The other options are the last columns, up to the length of a tag.
    """
    layout = Template(Path(__file__).with_name("view.json").read_text(encoding="utf-8"))
    experiment = results.experiment
    current_runs = filter_by_tags({"kairos.experiment": experiment.experiment, CURRENT: "true"})
    comparison = json.loads(
        layout.substitute(metric=results.distance_metric, loss=results.validation_metric, filter=current_runs)
    )

    # columns of the layout up to the weighting, options that differ from defaults, further columns, other options
    columns = comparison["columnOrder"]
    position = columns.index("params.`weighting.name`") + 1
    selected = [name for options in select_options(experiment).values() for name in options]
    logged = [name for settings in experiment.methods.values() for name, _ in flatten(settings.model_dump(mode="json"))]
    selected_columns = [f"params.`{name}`" for name in selected]
    comparison["columnWidths"] |= dict.fromkeys(selected_columns, _OPTION_WIDTH)
    other_columns = [f"params.`{name}`" for name in logged]
    columns = list(dict.fromkeys([*columns[:position], *selected_columns, *columns[position:], *other_columns]))
    while True:
        text = json.dumps(comparison | {"columnOrder": columns, "selectedColumns": columns}, separators=(",", ":"))
        if len(text) <= _TAG_LIMIT:
            return text
        columns.pop()


def select_options(experiment: Experiment) -> dict[str, dict[str, str]]:
    """Return the options of each method that differ from their defaults, as texts by name, such as ``weighting.gamma``.

    If an option of a component differs from its default in any method, all methods with this component have it, so that
    their values can be compared.
    """
    options = dict[tuple[str, str], dict[str, Any]]()  # by method, and by kind and name of the component
    not_default = set[tuple[str, str]]()  # kind and name of the component, name of the option
    for method, settings in experiment.methods.items():
        for component in settings.components:
            kind = component.registry.kind
            component_key = f"{kind} {component.name}"
            defaults = dict(flatten(default_values(component.component_class), f"{kind}."))
            # None for an option that has a default and is set to None: `flatten` leaves it out
            values = {**dict.fromkeys(defaults), **dict(flatten(component.plain_options(), f"{kind}."))}
            options[method, component_key] = values
            not_default |= {(component_key, name) for name, value in values.items() if value != defaults.get(name)}
    selected: dict[str, dict[str, str]] = {method: {} for method in experiment.methods}
    for (method, component_key), values in options.items():
        for name, value in values.items():
            if (component_key, name) in not_default:
                selected[method][name] = str(value)
    return selected


def build_note(results: Results) -> str:
    """Return the comparison of methods in Markdown: a heading, the outcome, warnings, and a table.

    Heading and table list the methods by the primary metric, the lowest value first, with the options of
    `select_options`. The heading lists at most five methods. Table and warnings are cut to the lines that fit into a
    tag. If the results cannot be compared, the note is only the reason.
    """
    try:
        rows = ranking.compare_methods(results.measurements)
        # without a baseline, the table compares with its first method
        table = compare.build_comparison_table(results.measurements, rows if results.baseline else None)
    except KairosError as error:
        return str(error)
    values = [formatting.format_plus_minus(value, spread) for value, spread in zip(table["value"], table["spread"])]
    options_by_method = select_options(results.experiment)
    options = [
        ", ".join(f"{name}={value}" for name, value in options_by_method[method].items()) for method in table["method"]
    ]

    # heading; the table's rows are in order, the lowest value first
    best, *others = (f"{method} {value}" for method, value in zip(table["method"], values))
    with_options = f" ({options[0]})" if options[0] else ""
    first_methods = ", ".join([f"**{best}**{with_options}", *others[: _HEADING_METHODS - 1]])
    not_ranked = ""
    if not rows[0].metric_can_rank:
        not_ranked = " (not ranked, see the reason below)"
    elif not rows[0].is_ranked:
        not_ranked = f" (too few seeds to rank: {rows[0].seed_count})"
    deviation = "the larger standard deviation (over sample sets or seeds)"
    quantity = f"{results.primary_metric}, mean over {rows[0].seed_count} seeds ± {deviation}"
    heading = f"{quantity}, lowest first{not_ranked}: {first_methods}"

    # outcome, warnings and table
    outcome = " ".join([*summarise_outcome(results, rows), describe_clock(results.measurements, results.runs)])
    paragraphs = [heading, outcome]
    warnings = "\n".join(f"- {warning}" for warning in find_warnings(results))
    if warnings:
        paragraphs.append(f"Before you rely on these numbers:\n\n{_cut_lines(warnings, _WARNINGS_LIMIT)}")
    columns = table.assign(value=values, options=options)[[*_COLUMNS]]
    if not any(options):
        columns = columns.drop(columns="options")
    terms = {"metric": results.primary_metric, "step": f"{table['step'][0]:,}", "baseline": table["baseline"][0]}
    columns = columns.rename(columns={column: heading.format_map(terms) for column, heading in _COLUMNS.items()})
    paragraphs.append(_cut_lines(compare.format_table(columns, "md"), _TABLE_LIMIT))
    return "\n\n".join(paragraphs)


def _cut_lines(text: str, limit: int) -> str:
    """Return the first lines of a text, up to `limit` characters, and a sentence with the number of omitted lines.

    A text within the limit is returned without that sentence.
    """
    lines = text.splitlines()
    line_ends = list(accumulate(len(line) + 1 for line in lines))  # characters up to the end of each line
    shown_count = bisect(line_ends, limit)  # number of lines that end within the limit
    omitted_count = len(lines) - shown_count
    more = f"\n\n{omitted_count} more are in the report." if omitted_count else ""
    return "\n".join(lines[:shown_count]) + more


def comparison_path(experiment_id: str) -> str:
    """Return the path of the prepared comparison of an MLflow experiment, relative to the server's address."""
    return f"#/experiments/{experiment_id}/runs?{_RUNS_WORKSPACE}&viewStateShareKey={KEY}"


def find_prepared_comparisons(client: Client) -> dict[str, str]:
    """Return the path of each prepared comparison by the name of its MLflow experiment, the latest change first.

    Only the 1000 experiments that were changed last are searched. Experiments without a prepared comparison are left
    out.
    """
    experiments = client.search_experiments(order_by=["last_update_time DESC"])
    return {
        experiment.name: comparison_path(experiment.experiment_id)
        for experiment in experiments
        if TAG in experiment.tags
    }
