"""First view of an experiment in MLflow: a prepared comparison, whose layout is view.json, and a note."""

import json
from bisect import bisect
from itertools import accumulate
from pathlib import Path
from string import Template

from kairos.report import compare, formatting, ranking
from kairos.report.collect import Results
from kairos.report.equal_time import describe_clock
from kairos.report.findings import find_warnings, summarise_outcome
from kairos.tracking.mlflow_store import Client
from kairos_timesteps.errors import KairosError

KEY = "kairos"
TAG = f"mlflow.sharedViewState.{KEY}"  # the tag that MLflow's button `Share` writes
NOTE = "mlflow.note.content"
_RUNS_WORKSPACE = "workflowType=machine_learning"  # selects the one of MLflow's two workspaces that shows runs
# columns of the note's table, a selection from `build_comparison_table`
_COLUMNS = ["method", "seeds", "value", "difference", "low", "high", "p_value", "speedup_steps", "speedup_seconds"]
_HEADING_METHODS = 5  # largest number of methods in the heading of a note
# characters of the table and of the warnings: older servers accept tags of 5,000
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
    layout = Template(Path(__file__).with_name("view.json").read_text(encoding="utf-8"))
    comparison = json.loads(layout.substitute(metric=results.distance_metric, loss=results.validation_metric))
    report_link = f"[report](#/experiments/{experiment_id}/runs/{parent_id}/artifacts/report.html?{_RUNS_WORKSPACE})"
    charts_link = f"[charts]({comparison_path(experiment_id)}&compareRunsMode=CHART)"
    note = (
        f"{outcome}\n\nThe {report_link} and its figures are artifacts of the run "
        f"`{results.experiment.experiment}`; grids of samples are artifacts of each training run. The comparison is "
        f"also shown as {charts_link}."
    )
    return {
        TAG: json.dumps(comparison, separators=(",", ":")),
        NOTE: note,
        "mlflow.experimentKind": "custom_model_development",  # without it MLflow asks the user
    }


def build_note(results: Results) -> str:
    """Return the comparison of methods in Markdown: a heading, the outcome, warnings, and a table.

    Heading and table list the methods by the primary metric, the lowest value first. The heading lists at most five
    methods. Table and warnings are cut to the lines that fit into a tag. If the results cannot be compared, the note is
    only the reason.
    """
    try:
        rows = ranking.compare_methods(results.measurements)
        # without a baseline, the table compares with its first method
        table = compare.build_comparison_table(results.measurements, rows if results.baseline else None)
    except KairosError as error:
        return str(error)
    values = [formatting.format_plus_minus(value, spread) for value, spread in zip(table["value"], table["spread"])]

    # heading; the table's rows are in order, the lowest value first
    best, *others = (f"{method} {value}" for method, value in zip(table["method"], values))
    first_methods = ", ".join([f"**{best}**", *others[: _HEADING_METHODS - 1]])
    not_ranked = ""
    if not rows[0].metric_can_rank:
        not_ranked = " (not ranked, see the reason below)"
    elif not rows[0].is_ranked:
        not_ranked = f" (too few seeds to rank: {rows[0].seed_count})"
    heading = f"{results.primary_metric}, lowest first{not_ranked}: {first_methods}"

    # outcome, warnings and table
    outcome = " ".join([*summarise_outcome(results, rows), describe_clock(results.measurements, results.runs)])
    columns = table.assign(value=values)[_COLUMNS].rename(columns={"value": results.primary_metric})
    paragraphs = [heading, outcome]
    warnings = "\n".join(f"- {warning}" for warning in find_warnings(results))
    if warnings:
        paragraphs.append(f"Before you rely on these numbers:\n\n{_cut_lines(warnings, _WARNINGS_LIMIT)}")
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
