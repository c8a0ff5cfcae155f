"""First view of an experiment in MLflow: the prepared comparison (its shape: view.json), and a note."""

import json
from bisect import bisect
from itertools import accumulate
from pathlib import Path
from string import Template

from kairos.report import compare, formatting, ranking
from kairos.report.collect import Results
from kairos.report.findings import summarise_outcome
from kairos.tracking.store import Client
from kairos_timesteps.errors import KairosError

KEY = "kairos"
TAG = f"mlflow.sharedViewState.{KEY}"  # as MLflow's own button `Share` writes it
NOTE = "mlflow.note.content"
_TRAINING = "workflowType=machine_learning"  # of MLflow's two workspaces the one with runs
_COLUMNS = ["method", "seeds", "value", "difference", "low", "high", "p_value", "steps_factor", "time_factor"]
_LIMIT = 3500  # characters of a table: older servers take tags of 5,000


def tags(results: Results, parent: str, experiment: str) -> dict[str, str]:
    """Tags of the MLflow experiment.

    Args:
        results: that were imported.
        parent: id of the run of the experiment as a whole, which has the report.
        experiment: id of the MLflow experiment.
    """
    shape = Template(Path(__file__).with_name("view.json").read_text(encoding="utf-8"))
    report = f"[report](#/experiments/{experiment}/runs/{parent}/artifacts/report.html?{_TRAINING})"
    told = f"{note(results)}\n\nThe {report} and its figures are artifacts of the run `{results.experiment.experiment}`"
    charts = f"[charts]({place(experiment)}&compareRunsMode=CHART)"
    told += f"; grids of samples those of each training. The same as {charts}."
    kind = "custom_model_development"  # else MLflow asks
    return {
        TAG: json.dumps(json.loads(shape.substitute(metric=results.metric)), separators=(",", ":")),
        NOTE: told,
        "mlflow.experimentKind": kind,
    }


def note(results: Results) -> str:
    """The comparison in Markdown: the outcome, then all methods, the lowest distance first, as many as have room."""
    try:
        rows, found = ranking.compare_methods(results), compare.build_comparison_table(results.measurements)
    except KairosError as error:  # no number to compare: runs can be looked at all the same
        return str(error)
    value = [formatting.format_plus_minus(*pair) for pair in zip(found["value"], found["spread"])]
    first, *others = (f"{method} {distance}" for method, distance in zip(found["method"], value))
    limits = "" if rows[0].is_ranked else f" (too few seeds to rank: {rows[0].seed_count})"
    head = f"{results.primary_metric}, lowest first{limits}: {', '.join([f'**{first}**', *others[:4]])}"
    shown = found.assign(value=value)[_COLUMNS].rename(columns={"value": results.primary_metric})
    lines = compare.format_table(shown, "md").splitlines()
    kept = lines[: bisect([*accumulate(len(line) + 1 for line in lines)], _LIMIT)]
    more = f"\n\n{len(lines) - len(kept)} more are in the report." if kept != lines else ""
    return "\n\n".join([head, " ".join(summarise_outcome(results, rows)), "\n".join(kept) + more])


def place(experiment: str) -> str:
    """The address of the prepared comparison below that of the server."""
    return f"#/experiments/{experiment}/runs?{_TRAINING}&viewStateShareKey={KEY}"


def prepared(client: Client) -> dict[str, str]:
    """Names of the experiments that have a prepared comparison, the latest first, and where it is."""
    found = client.search_experiments(order_by=["last_update_time DESC"])
    return {own.name: place(own.experiment_id) for own in found if TAG in own.tags}
