"""summary.csv: one row per evaluated milestone and one per reference row, each with the protocol of its numbers."""

from itertools import chain
from typing import Any

import pandas as pd

from kairos.config import REFERENCE_ROWS
from kairos.report.collect import Milestone, Results, Training
from kairos.sampling.settings import GUIDANCE

_FIRST = ("experiment", "method", "seed", "step", "images_seen", "train_seconds")
_PROTOCOL = ("n_samples", "scheduler", "steps", "nfe", "weights", "extractor_hash", "reference_hash", "eval_seed")
_OPTIONAL_PROTOCOL = ("sets", "spacing", "clip", "sample_seed", *GUIDANCE)


def text(results: Results) -> str:
    """The content of summary.csv: every training's milestones in the order of the configuration, then reference rows.

    Its columns are those a script may rely on, then whatever else was measured. Floats have as many digits as they need
    to be read back exactly.
    """
    reference, metric, experiment = results.reference, results.metric, results.experiment.experiment
    named = {name: reference["rows"][name] for name in REFERENCE_ROWS if name in reference["rows"]}
    shared = {key: reference.get(key) for key in ("extractor", "extractor_hash", "reference_hash", "sets", "eval_seed")}
    rows = [_row(experiment, training, milestone) for training, milestone in results.evaluated]
    rows += [{"method": name, **row, **shared, "experiment": experiment} for name, row in named.items()]
    fixed = [*_FIRST, metric, f"{metric}_spread", "val_loss", "val_vlb", *_PROTOCOL]
    records = [*(milestone.columns for _, milestone in results.evaluated), *reference["rows"].values()]
    measured = [name for name in dict.fromkeys(chain.from_iterable(records)) if not name.endswith("_sets")]
    columns = [*dict.fromkeys([*fixed, *measured]), *_OPTIONAL_PROTOCOL, "extractor", "identity"]
    return pd.DataFrame(rows, columns=columns, dtype=object).to_csv(index=False, lineterminator="\n")


def _row(experiment: str, training: Training, milestone: Milestone) -> dict[str, Any]:
    own = (experiment, training.method, training.seed, milestone.step, milestone.images, milestone.seconds)
    measured = {**milestone.columns, **milestone.evaluation["protocol"]}
    return {**dict(zip(_FIRST, own)), **measured, "identity": milestone.record["identity"]}
