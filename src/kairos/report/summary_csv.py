"""summary.csv: one row per evaluated milestone and one per reference row, each with the protocol of its numbers."""

from itertools import chain

import pandas as pd

from kairos.config import REFERENCE_ROWS
from kairos.report.collect import Results
from kairos.sampling.settings import GUIDANCE

_FIRST = ("experiment", "method", "seed", "step", "images_seen", "train_seconds")
_PROTOCOL = ("n_samples", "scheduler", "steps", "nfe", "weights", "extractor_hash", "reference_hash", "eval_seed")
_OPTIONAL_PROTOCOL = ("sets", "spacing", "clip", "sample_seed", *GUIDANCE)


def text(results: Results) -> str:
    """The content of summary.csv: every training's milestones in the order of the configuration, then reference rows.

    Its columns are those a script may rely on, then whatever else was measured. Floats have as many digits as they need
    to be read back exactly.
    """
    reference, metric = results.reference, results.metric
    shared = {key: reference.get(key) for key in ("extractor", "extractor_hash", "reference_hash", "sets", "eval_seed")}
    shared["experiment"] = results.experiment.experiment
    named = [name for name in REFERENCE_ROWS if name in reference["rows"]]
    rows = pd.DataFrame([{"method": name, **reference["rows"][name], **shared} for name in named], dtype=object)
    records = [*(milestone.columns for _, milestone in results.evaluated), *reference["rows"].values()]
    measured = [name for name in chain.from_iterable(records) if not name.endswith("_sets")]
    fixed = [*_FIRST, metric, f"{metric}_spread", "val_loss", "val_vlb", *_PROTOCOL]
    columns = [*dict.fromkeys([*fixed, *measured]), *_OPTIONAL_PROTOCOL, "extractor", "identity"]
    return pd.concat([results.table, rows]).reindex(columns=columns).to_csv(index=False, lineterminator="\n")
