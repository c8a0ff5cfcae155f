"""report.html: the template beside this file, filled with the results; its images are inside the page."""

import base64
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
from PIL import Image

from kairos.analyses.registries import ANALYSES
from kairos.models.registries import omit_overridden_size
from kairos.report import findings, formatting, interactive, published_numbers
from kairos.report.collect import Record, Results
from kairos.report.figures import figures_of
from kairos.report.plot_style import DPI, looks
from kairos.report.ranking import compare, curve, stands_still
from kairos.sampling.registries import SCHEDULERS
from kairos.sampling.settings import GUIDANCE
from kairos_timesteps.options import dump

_STAGES = ("prepare", "autoencoder", "text", "encode", "extractor", "reference", "train", "sample", "evaluate")


def page(results: Results, figures: Path, live: dict[str, str] | None = None) -> str:
    """The report as one HTML document, with the figures of a folder inside, and those for a browser by name."""
    rows, records = compare(results), [training.record["provenance"] for training in results.trainings]
    curves = {method: curve(results.measured, method) for method in results.methods}
    words = [{key: formatting.words(value) for key, value in record.items()} for record in records]
    provenance = pd.DataFrame(words).fillna(formatting.NONE)
    same = provenance.nunique() == 1
    shared = provenance.loc[:, same].iloc[0]
    final = results.trainings[0].final
    protocol, config = final.evaluation["protocol"], final.record["config"]
    return formatting.template(Path(__file__).with_suffix(".html.jinja")).render(
        formatting=formatting,
        results=results,
        rows=rows,
        protocol=protocol,
        scheduler=_scheduler(protocol),
        guidance={name: protocol.get(name, getattr(results.experiment.sampling, name)) for name in GUIDANCE},
        model=omit_overridden_size(config["model"]),
        validation=_validation(results),
        last_step=max(milestone.step for _, milestone in results.evaluated),
        ranked=rows[0].judged,
        looks=looks(results.methods, results.baseline),
        verdict=findings.verdict(results, rows),
        warnings=[*results.notes, *findings.warnings(results)],
        curves={one: dict(zip(c.steps, zip(c.mean, c.spread))) for one, c in curves.items()},
        still={method: all(map(stands_still, results.of(method))) for method in results.methods},
        stands_still=stands_still,
        final=lambda method, name: results.measured.common.values(method, name).iloc[:, -1].mean(skipna=False),
        further_metrics=_further_metrics(
            [one.final.evaluation["metrics"] for one in results.trainings], results.primary_metric
        ),
        reference_metrics=_further_metrics(results.reference["rows"].values(), results.metric),
        milestones=[f"step {step:,}" if step else "untrained" for step in results.experiment.milestones],
        losses=formatting.listed([formatting.component(loss) for loss in results.experiment.diffusion.losses]),
        costs=_costs(results.jobs),
        beside=published_numbers.beside(results),
        accelerations=list(published_numbers.accelerations(results)) if results.experiment.published else [],
        claimed=published_numbers.claimed(results),
        shared=shared[~shared.isin(["None", "[]"])],
        varying=provenance.loc[:, ~same],
        figures={name: _figure(figures, name) for name in figures_of(results)},
        analyses=_analyses(results),
        live=live or {},
        library=interactive.LIBRARY.js_raw,
    )


def _scheduler(protocol: Record) -> Record:
    """The sampling scheme of an evaluation's protocol with its options."""
    if protocol["scheduler"] not in SCHEDULERS:
        return {"name": protocol["scheduler"]}
    options = dump(SCHEDULERS.parse(protocol["scheduler"], {}, "scheduler"))
    return {"name": protocol["scheduler"], **{name: protocol[name] for name in options if name in protocol}}


def _validation(results: Results) -> tuple[int, int] | None:
    """The number of held-out images and of strata between the end points that the validation losses were measured on.

    None where a training has no validation loss. Records of earlier versions do not have the number of images.
    """
    if not results.validated:
        return None
    measured = results.trainings[0].final.evaluation["validation"]
    held_out = min(results.experiment.evaluation.loss_images, results.dataset["heldout_count"])
    return measured.get("images", held_out), len(measured["per_timestep"]) - 2


def _further_metrics(records: Iterable[Iterable[str]], first: str) -> list[str]:
    """Columns of the records other than the column `first`, standard deviations and values of single sets."""
    names = dict.fromkeys(name for record in records for name in record if name != "n_samples")
    return [name for name in names if name != first and not name.endswith(("_spread", "_sets"))]


def _costs(jobs: tuple[Record, ...]) -> list[Any]:
    """CPU and wall time of every stage, the sum last."""
    if not jobs:
        return []
    table = pd.DataFrame(list(jobs))
    both = pd.concat([table, table.assign(stage="all")])
    order = {name: place for place, name in enumerate(_STAGES)} | {"all": len(_STAGES) + 1}
    times = [f"{kind}{unit}_seconds" for kind in ("", "startup_") for unit in ("wall", "cpu")]
    sums = {time: (time, "sum") for time in times}
    costs = both.groupby("stage").agg(jobs=("stage", "size"), peak=("peak_rss_bytes", "max"), **sums)
    costs = costs.sort_index(key=lambda names: names.map(order).fillna(len(_STAGES)))
    return costs.reset_index().to_dict("records")


def _analyses(results: Results) -> list[tuple[str, str, tuple[str, int | None]]]:
    """Name, title and figure of the analyses that are there."""
    folder, asked = results.folder / "analyses", [named["name"] for named in results.experiment.analyses]
    there = [name for name in asked if (folder / f"{name}.png").is_file()]
    return [(name, ANALYSES.entry(name).help, _figure(folder, name, "png")) for name in there]


def _figure(folder: Path, name: str, form: str = "svg") -> tuple[str, int | None]:
    """A figure as a data URL; a PNG with the width at which it was drawn, so that letters are of one size."""
    path, kind, width = folder / f"{name}.svg", "svg+xml", None
    if form == "png" or name.endswith("samples"):
        path, kind = folder / f"{name}.png", "png"
        with Image.open(path) as image:
            width = round(image.width * 96 / DPI)
    return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}", width
