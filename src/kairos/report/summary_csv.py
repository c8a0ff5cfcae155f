"""summary.csv: one row per evaluated milestone and one per reference row, each with the protocol of its numbers."""

from typing import Any

import pandas as pd

from kairos.config import REFERENCE_ROWS
from kairos.report.collect import Milestone, Results, Training

_PROTOCOL = ("n_samples", "scheduler", "steps", "nfe", "weights", "extractor_hash", "reference_hash", "eval_seed")
_OPTIONAL_PROTOCOL = ("sets", "spacing", "clip", "sample_seed", "guidance_scale")


def columns(results: Results) -> list[str]:
    """The columns in their order: those a script may rely on, then whatever else was measured."""
    metric = results.metric
    fixed = ["experiment", "method", "seed", "step", "images_seen", "train_seconds"]
    fixed += [metric, f"{metric}_spread", "val_loss", "val_vlb", *_PROTOCOL]
    milestones = [milestone for training in results.trainings for milestone in training.milestones]
    records = [*(milestone.columns for milestone in milestones), *results.reference["rows"].values()]
    measured = [name for record in records for name in record]
    optional = [name for name in dict.fromkeys(measured) if name not in fixed and not name.endswith("_sets")]
    return [*fixed, *optional, *_OPTIONAL_PROTOCOL, "extractor", "identity"]


def rows(results: Results) -> list[dict[str, Any]]:
    """The table's rows: every training's milestones in the order of the configuration, then the reference rows."""
    table = [_row(results, training, milestone) for training in results.trainings for milestone in training.milestones]
    reference = results.reference
    shared = {key: reference.get(key) for key in ("extractor", "extractor_hash", "reference_hash", "sets", "eval_seed")}
    shared |= {"experiment": results.experiment.experiment}
    named = [name for name in REFERENCE_ROWS if name in reference["rows"]]
    return table + [{"method": name, **reference["rows"][name], **shared} for name in named]


def text(results: Results) -> str:
    """The content of summary.csv; floats have as many digits as they need to be read back exactly."""
    table = pd.DataFrame(rows(results), columns=columns(results), dtype=object)
    return table.to_csv(index=False, lineterminator="\n")


def _row(results: Results, training: Training, milestone: Milestone) -> dict[str, Any]:
    return {
        "experiment": results.experiment.experiment,
        "method": training.method,
        "seed": training.seed,
        "step": milestone.step,
        "images_seen": milestone.images,
        "train_seconds": milestone.seconds,
        **milestone.columns,
        **milestone.evaluation["protocol"],
        "identity": milestone.record["identity"],
    }
