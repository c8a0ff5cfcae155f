"""report.html: the template page.html.jinja, filled with the results of an experiment; images are part of the page."""

import base64
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
from PIL import Image

from kairos.models.settings import omit_overridden_size
from kairos.report import findings, formatting, published_numbers
from kairos.report.collect import Record, Results, RunResults, SnapshotResults
from kairos.report.equal_time import compare_at_equal_time, describe_clock
from kairos.report.figures import available_figures
from kairos.report.plot_style import BAND, DPI, MethodStyle, assign_styles
from kairos.report.ranking import build_curve, compare_methods, has_not_moved
from kairos.report.shown_methods import select_shown_methods
from kairos.sampling.settings import GUIDANCE, SOLVERS
from kairos.stages import STAGES

_ROWS_SHOWN = 30  # rows shown of a longer table


def render_page(results: Results, figures: Path) -> str:
    """Return the report as one HTML document that contains its images; nothing is written.

    The folder `figures` contains every available figure, drawn before. Figures of analyses are read from the results
    folder; a missing one is left out.

    Raises:
        KairosError: no snapshot after step 0 is evaluated for all methods, or a metrics.jsonl is damaged.
    """
    comparisons = compare_methods(results.measurements)
    shared_provenance, varying_provenance = _split_provenance(results)
    # protocol and model of the first run are shown for all runs
    last_snapshot = results.runs[0].last_snapshot
    protocol = last_snapshot.evaluation["protocol"]
    final_metrics = [run.last_snapshot.evaluation["metrics"] for run in results.runs]
    common = results.measurements.common_measurements
    styles = assign_styles(select_shown_methods(results), results.baseline)

    def final_value(method: str, column: str) -> float:
        """Return a column of a method at the last common snapshot, mean over seeds; NaN if a seed lacks it."""
        return float(common.values_of(method, column).iloc[:, -1].mean(skipna=False))

    template = formatting.load_template(Path(__file__).with_suffix(".html.jinja"))
    clock = describe_clock(results.measurements, results.runs)
    return template.render(
        formatting=formatting,
        results=results,
        comparisons=comparisons,
        clock=clock,
        equal_time=compare_at_equal_time(results.measurements),
        protocol=protocol,
        solver=_solver_settings(protocol),
        # a setting of guidance that the protocol lacks has the value in the experiment
        guidance={name: protocol.get(name, getattr(results.experiment.sampling, name)) for name in GUIDANCE},
        model=omit_overridden_size(last_snapshot.record["config"]["model"]),
        validation=_validation_size(results),
        last_step=max(snapshot.step for _, snapshot in results.run_snapshots),
        ranked=comparisons[0].is_ranked,
        metric_can_rank=comparisons[0].metric_can_rank,
        styles=styles,
        other_color=BAND,
        rows_shown=_ROWS_SHOWN,
        learned_rows=_list_learned_snapshots(results, styles),
        outcome=findings.summarise_outcome(results, comparisons),
        warnings=[*results.notes, *findings.find_warnings(results)],
        curves=_tabulate_curves(results, styles),
        # True for a method if none of its runs has moved its sampler from the start
        unmoved={method: all(map(has_not_moved, results.runs_of(method))) for method in results.methods},
        has_not_moved=has_not_moved,
        final_value=final_value,
        further_metrics=_further_metrics(final_metrics, results.primary_metric),
        reference_metrics=_further_metrics(results.reference["rows"].values(), results.distance_metric),
        snapshot_labels=[f"step {step:,}" if step else "untrained" for step in results.experiment.milestones],
        losses=formatting.join_names(
            [formatting.describe_component(loss.plain()) for loss in results.experiment.diffusion.losses]
        ),
        costs=_sum_costs(results.jobs),
        cost_machines=sorted({job["machine"]["processor"] for job in results.jobs if "machine" in job}),
        published_numbers=published_numbers.compare_published_numbers(results),
        accelerations=_compute_accelerations(results),
        acceleration_by_chance=published_numbers.compute_baseline_acceleration_by_chance(results),
        claim=published_numbers.judge_claim(results),
        shared_provenance=shared_provenance,
        varying_provenance=varying_provenance,
        figures={name: _load_figure(figures, name) for name in available_figures(results)},
        analyses=_load_analyses(results),
    )


def _tabulate_curves(results: Results, styles: dict[str, MethodStyle]) -> dict[str, dict[float, tuple[float, float]]]:
    """Return mean and standard deviation of the primary metric by method and step, ``{method: {step: (mean, std)}}``.

    All methods are included: those with a style come first, and otherwise the order of the configuration is kept. Steps
    ascend. Both numbers are from `build_curve`, and NaN if unknown.
    """
    values_by_method = {}
    for method in sorted(results.methods, key=lambda method: method not in styles):  # False sorts before True
        curve = build_curve(results.measurements, method)
        means_with_stds = zip(curve.mean, curve.std)
        values_by_method[method] = dict(zip(curve.steps, means_with_stds))
    return values_by_method


def _list_learned_snapshots(
    results: Results, styles: dict[str, MethodStyle]
) -> list[tuple[RunResults, SnapshotResults]]:
    """Return all snapshots of the runs whose sampler learns, as pairs (run, snapshot).

    Methods that have a style come first; otherwise the order of `Results.run_snapshots` is kept.
    """
    learned = [(run, snapshot) for run, snapshot in results.run_snapshots if run.learns_sampler]
    return sorted(learned, key=lambda run_and_snapshot: run_and_snapshot[0].method not in styles)


def _split_provenance(results: Results) -> tuple["pd.Series[str]", pd.DataFrame]:
    """Return the provenance that all runs share, by field, and a table with a row per run and the varying fields.

    All values are texts; a field that a run lacks is a dash. Shared fields that are None or an empty list are left out.
    """
    rows = []
    for run in results.runs:
        provenance = run.record["provenance"]
        rows.append({key: formatting.format_record_value(value) for key, value in provenance.items()})
    table = pd.DataFrame(rows).fillna(formatting.DASH)
    is_shared = table.nunique() == 1  # by field
    shared_values = table.loc[:, is_shared].iloc[0]  # the first run's, which are equal for all runs
    is_empty = shared_values.isin(["None", "[]"])  # texts of an absent value and of an empty list
    return shared_values[~is_empty], table.loc[:, ~is_shared]


def _compute_accelerations(results: Results) -> list[published_numbers.Acceleration]:
    """Return the accelerations of `compute_accelerations`; empty if the experiment has no published numbers."""
    if not results.experiment.published:
        return []
    return list(published_numbers.compute_accelerations(results))


def _solver_settings(protocol: Record) -> Record:
    """Return ``name`` and options of the solver in an evaluation's protocol; options that it lacks are left out.

    If this version of kairos has no such solver, the result contains the name alone.
    """
    solver_name = protocol["scheduler"]  # its options are separate fields of the protocol
    if solver_name not in SOLVERS:  # not registered here: its options are unknown
        return {"name": solver_name}
    option_names = [name for name in SOLVERS[solver_name].model_fields if name != "name"]
    options = {name: protocol[name] for name in option_names if name in protocol}
    return {"name": solver_name, **options}


def _validation_size(results: Results) -> tuple[int, int] | None:
    """Return the numbers of held-out images and of strata, without the first and last cell, of validation losses.

    The result is None if a common snapshot has no validation loss per timestep. Both numbers are from the last common
    snapshot of the first method and seed. If its record lacks the number of images, as in earlier versions, the number
    follows from the experiment and the data set.
    """
    if not results.has_validation_losses:
        return None
    snapshots_of_first_method = results.common_snapshots[results.methods[0]]
    validation = snapshots_of_first_method[0].evaluation["validation"]
    default_image_count = min(results.experiment.evaluation.loss_images, results.dataset["heldout_count"])
    image_count = validation.get("images", default_image_count)
    stratum_count = len(validation["per_timestep"]) - 2  # without the first and the last cell
    return image_count, stratum_count


def _further_metrics(records: Iterable[Iterable[str]], excluded: str) -> list[str]:
    """Return the names of the metrics that any record contains, each once, except the metric `excluded`.

    Standard deviations (``_spread``), values of single sample sets (``_sets``) and ``n_samples`` are left out. Names
    have the order of the first record; names that only later records contain follow.
    """
    names = dict.fromkeys(chain.from_iterable(records))
    other_names = [name for name in names if name not in (excluded, "n_samples")]
    return [name for name in other_names if not name.endswith(("_spread", "_sets"))]


def _sum_costs(jobs: tuple[Record, ...]) -> list[Any]:
    """Return the costs of the jobs as a dictionary per stage, and a last one of stage ``all`` with the total.

    Keys are ``stage``, ``jobs`` (their number), ``peak`` (largest peak memory in bytes), and sums of seconds:
    ``wall_seconds``, ``cpu_seconds``, ``startup_wall_seconds`` and ``startup_cpu_seconds``. Stages are in the order of
    the pipeline; other stages follow, before the total. The list is empty without jobs.
    """
    if not jobs:
        return []
    table = pd.DataFrame(list(jobs))
    table_of_total = table.assign(stage="all")
    costs = (
        pd.concat([table, table_of_total])
        .groupby("stage")
        .agg(
            jobs=("stage", "size"),
            peak=("peak_rss_bytes", "max"),
            wall_seconds=("wall_seconds", "sum"),
            cpu_seconds=("cpu_seconds", "sum"),
            startup_wall_seconds=("startup_wall_seconds", "sum"),
            startup_cpu_seconds=("startup_cpu_seconds", "sum"),
        )
    )
    # stages in the order of the pipeline, then stages that are not listed, then the total
    positions = {row.name: position for position, row in enumerate(STAGES)}
    unlisted_position = len(STAGES)
    positions["all"] = unlisted_position + 1
    costs = costs.sort_index(key=lambda stages: stages.map(positions).fillna(unlisted_position))
    return costs.reset_index().to_dict("records")


def _load_analyses(results: Results) -> list[tuple[str, str, tuple[str, int | None]]]:
    """Return name, title and figure of each analysis whose PNG file exists; for the figure see `_load_figure`."""
    folder = results.folder / "analyses"
    analyses = []
    for analysis in results.experiment.analyses:
        if (folder / f"{analysis.name}.png").is_file():
            figure = _load_figure(folder, analysis.name, form="png")
            analyses.append((analysis.name, analysis.title, figure))
    return analyses


def _load_figure(folder: Path, name: str, form: str = "svg") -> tuple[str, int | None]:
    """Return a figure as a data URL and its width in CSS pixels; the width is None for an SVG, which contains it.

    The file is NAME.svg or NAME.png in the folder. With form ``svg``, figures whose names end in ``samples`` are read
    from their PNG files.
    """
    # an SVG file of samples would contain their pixels as well, and be larger
    if form == "svg" and not name.endswith("samples"):
        return _data_url(folder / f"{name}.svg", "svg+xml"), None
    path = folder / f"{name}.png"
    with Image.open(path) as image:
        inches = image.width / DPI
    return _data_url(path, "png"), round(inches * 96)  # 96 CSS pixels an inch: letters as large as in an SVG


def _data_url(path: Path, image_type: str) -> str:
    """Return the content of an image file as a base64 data URL; `image_type` is such as ``png`` or ``svg+xml``."""
    return f"data:image/{image_type};base64,{base64.b64encode(path.read_bytes()).decode()}"
