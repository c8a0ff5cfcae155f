"""Methods of experiments side by side: one table, with the tests and factors of the report; an index of all reports.

All are compared at the last milestone that all have, over the seeds that all have there. A difference is in units of
the metric: the geometric mean over seeds of the ratio to the baseline, less 1, times the baseline's value. The ends of
its interval are those of the ratio on the same scale; the test is of the ratio too.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pandas as pd

from kairos.evaluation.separation import ADVICE, cannot_rank
from kairos.report import formatting
from kairos.report.collect import Measured, Results
from kairos.report.ranking import Ratio, Row, compare
from kairos_timesteps.errors import KairosError, demand

COLUMNS = (
    "experiment", "method", "seeds", "step", "metric", "value", "spread", "baseline", "difference", "low", "high",
    "p_value", "steps_factor", "time_factor",
)  # fmt: skip
_SHARED = ("experiment", "seeds", "step", "metric", "baseline")  # in a terminal said once where they are alike
_NO_PROTOCOL = ("identity", "accuracy")  # of one training; of the extractor, whose hash is there
_LINKS = {"report": "report.html", "report of what is there": "report_unfinished.html", "summary.csv": "summary.csv"}
_LINKS["picture"] = "figures/metric_vs_steps.svg"
_NONE = Ratio(math.nan, math.nan, math.nan)
_SAME = Ratio(1, math.nan, math.nan)  # the baseline against itself
Sides = Sequence[tuple[Results, list[str]]]


def join(sides: Sides, baseline: str | None = None) -> Measured:
    """Methods of several experiments as those of one, named ``experiment/method``; of one they keep their names.

    Args:
        sides: experiments, each with the methods of it that are compared.
        baseline: its name, or the method's alone; default: the first experiment's uniform method, else its first.

    Raises:
        KairosError: numbers came about under different protocols; names the fields that differ.
        ConfigError: there is no such baseline.
    """
    tables, names = list[pd.DataFrame](), list[str]()
    for (found, methods), label in zip(sides, _labels(sides)):
        own = {method: f"{label}/{method}" if len(sides) > 1 else method for method in methods}
        rows = found.table[found.table["method"].isin(methods)].assign(metric=found.primary_metric, **_of_losses(found))
        tables.append(rows.assign(experiment=label, method=rows["method"].map(own)))
        names += own.values()
    rows = pd.concat(tables)
    protocol = dict.fromkeys(chain(*(found.trainings[0].final.evaluation["protocol"] for found, _ in sides)))
    differ = []
    for name in ("metric", *_of_losses(sides[0][0]), *(name for name in protocol if name not in _NO_PROTOCOL)):
        said = rows.assign(value=rows[name].astype(str)).drop_duplicates("value")
        if len(said) > 1:
            values = [f"{value[:12]} in {label}" for value, label in zip(said["value"], said["experiment"])]
            differ.append(f"{name} ({', '.join(values)})")
    if differ:
        raise KairosError(f"not compared: the protocols of the numbers differ in {'; '.join(differ)}")
    wanted = baseline or sides[0][0].baseline
    chosen = next((name for name in names if wanted in (name, name.rpartition("/")[2])), None)
    demand(chosen or not baseline, "--baseline", baseline, ", ".join(names))
    return Measured(rows, names, sorted({*rows["seed"]}), sides[0][0].primary_metric, chosen or names[0])


def _of_losses(found: Results) -> dict[str, str]:
    """Settings that two validation losses must share to compare, where these rank methods; else nothing."""
    if found.primary_metric == found.metric:
        return {}
    experiment = found.experiment
    return {
        "data": str(found.dataset.get("content_sha256")),
        "autoencoder": str(found.autoencoder.get("sha256")),
        "diffusion.process": str(experiment.diffusion.process),
        "evaluation.strata": str(experiment.evaluation.strata),
        "evaluation.loss_images": str(experiment.evaluation.loss_images),
    }


def table(measured: Measured) -> pd.DataFrame:
    """A row per method, the lowest distance first; NaN where there is nothing to say.

    Raises:
        KairosError: no milestone, or no seed there, is evaluated of all methods.
    """
    if measured.baseline is None:
        measured = replace(measured, baseline=measured.methods[0])
    rows = compare(measured)
    if not rows[0].seeds:
        raise KairosError(f"{', '.join(measured.methods)}: no seed is evaluated of all of them at their last milestone")
    base = next(row.curve.mean[-1] for row in rows if row.method == measured.baseline)
    experiments = dict(zip(measured.table["method"], measured.table["experiment"]))
    records = []
    for row in rows:
        own, value = row.curve, row.curve.mean[-1]
        ratio = _SAME if row.method == measured.baseline else row.against or _NONE
        differences = (base * (part - 1) for part in (ratio.value, ratio.low, ratio.high))
        factors = ((factor or _NONE).value for factor in (row.steps, row.time))
        where = (experiments[row.method], row.method.rpartition("/")[2], row.seeds, int(own.steps[-1]))
        what = (measured.metric, value, own.spread[-1], measured.baseline)
        records.append((*where, *what, *differences, ratio.p, *factors))
    return pd.DataFrame(records, columns=COLUMNS)


def written(found: pd.DataFrame, form: str) -> str:
    """The table as text, as csv, json, md or else for a terminal; csv and json have all digits."""
    if form == "csv":
        return found.to_csv(index=False, lineterminator="\n")
    if form == "json":
        return found.to_json(orient="records", indent=1, double_precision=15) + "\n"
    cells = found.map(_cell)
    if form == "md":
        lines = [cells.columns, ["---"] * cells.shape[1], *cells.to_numpy(str)]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)
    alike = [name for name in _SHARED if cells[name].nunique() == 1]
    head = ", ".join(f"{name} {cells[name][0]}" for name in alike)
    columns = [[name, *column] for name, column in cells.drop(columns=alike).items()]
    widths = [max(map(len, column)) * (-1 if column[0] in ("experiment", "method") else 1) for column in columns]
    padded = ([f"{cell:{'<' if w < 0 else '>'}{abs(w)}}" for cell in column] for column, w in zip(columns, widths))
    return f"{head}\n\n" + "".join("  ".join(line).rstrip() + "\n" for line in zip(*padded))


def index(entries: dict[Path, tuple[Results, list[Row]] | str], out: Path) -> str:
    """The page at `out`: of each folder its results compared, or why there are none, and links to its reports."""
    shown = []
    for folder, found in entries.items():
        there = {told: folder / name for told, name in _LINKS.items() if (folder / name).exists()}
        links = {told: os.path.relpath(path, out.parent) for told, path in there.items()}
        warned = [] if isinstance(found, str) else list(warnings([(found[0], [])]))
        shown.append((folder.name, found, links.pop("picture", None), links, warned))
    return formatting.template(Path(__file__).with_suffix(".html.jinja")).render(
        formatting=formatting, experiments=shown
    )


def warnings(sides: Sides) -> Iterator[str]:
    """Report every distance that ranks methods although it cannot, see `separation.cannot_rank`."""
    for (found, _), label in zip(sides, _labels(sides)):
        if found.primary_metric == found.metric and (reason := cannot_rank(found.reference)):
            yield f"{label}: {reason} {ADVICE}"


def remarks(sides: Sides, measured: Measured) -> Iterator[str]:
    """Yield the notes below a comparison table: unfinished or outdated results, and seeds that are left out."""
    for (found, _), label in zip(sides, _labels(sides)):
        if found.missing:
            told = ", ".join(line.partition(";")[0] for line in found.missing[:3])
            yield f"{label} is unfinished, {formatting.plural(len(found.missing), 'training')}: {told}"
        for changes in found.outdated:
            yield f"{label}: results of other settings are left out: {changes}"
        yield from (f"{label}: {note}" for note in found.notes)
    if left := [str(seed) for seed in measured.seeds if seed not in measured.common.seeds]:
        yield f"left out, since not all methods have them at the last common milestone: seeds {formatting.listed(left)}"


def _labels(sides: Sides) -> list[str]:
    names = [found.experiment.experiment for found, _ in sides]
    return names if len(set(names)) == len(names) else [str(found.folder) for found, _ in sides]


def _cell(value: object) -> str:
    if isinstance(value, float):
        return formatting.number(value, 4) if math.isfinite(value) else ""
    return f"{value:,}" if isinstance(value, int) else str(value)
