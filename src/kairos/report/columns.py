"""Columns of summary.csv with their meaning, except those that metrics write.

Metrics declare their columns in `kairos.evaluation.settings`. The documentation has a table of all columns.
"""

from kairos.sampling.settings import GUIDANCE, SamplingConfig

FIRST_COLUMNS = {
    "experiment": "name of the experiment",
    "method": "name of the method, or of a reference row: floor, reconstruction, gaussian or noise",
    "seed": "seed of the training run",
    "step": "training steps until the snapshot",
    "images_seen": "images that the training run has processed until the snapshot, repeated ones included",
    "train_seconds": "seconds of training steps until the snapshot, over all jobs of the run, without saving",
}
# settings of the evaluation that decide the numbers; a comparison needs equal ones
PROTOCOL = {
    "n_samples": "images per set of samples",
    "scheduler": "solver that generated the samples",
    "steps": "intervals of the solver's time grid",
    "nfe": "network evaluations per image",
    "weights": "weights that were sampled: ema, the average, or raw",
    "extractor_hash": "SHA-256 of the feature extractor",
    "reference_hash": "SHA-256 of the statistics of the real images, with the extractor",
    "eval_seed": "seed of validation noise and reference rows",
}
OPTIONAL_PROTOCOL = {
    "sets": "sets of samples",
    "spacing": "spacing of the solver's time grid",
    "clip": "True if the solver clips the predicted x0 to [-1, 1]",
    "sample_seed": "seed of the samples' noise",
    **{name: str(SamplingConfig.model_fields[name].description) for name in GUIDANCE},
}
LAST_COLUMNS = {
    "extractor": "name of the feature extractor",
    "identity": "SHA-256 of everything that decides the training run",
    "warnings": "warnings about the numbers of the row, separated by `;`",
    "machine": "kind of machine that `train_seconds` was measured on; several of a resumed run are separated by `;`",
}
# meaning of a column that ends in _spread, for the column without this ending
SPREAD = "standard deviation over the sets of samples, empty with one set; a bootstrap for distances of real images"
