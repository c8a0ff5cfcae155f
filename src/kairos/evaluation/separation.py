"""Check that a distance can rank methods: real held-out images must score clearly below a fitted Gaussian.

An extractor that was trained on few images gives its training images features that no other image has. Held-out real
images are then as far from the training images as blurred noise is, and so is every method, however good it is.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kairos.data.settings import DatasetConfig
from kairos.data.source_statistics import count_images
from kairos.evaluation.settings import EvaluationConfig
from kairos.files import glance

CLEAR = 2.0  # standard deviations by which the rows must differ
ENOUGH_IMAGES = 1000  # training images; benchmarks/metric_can_rank.py measures 80, 320 and 1,600
TRAINED = ("classifier", "selfsupervised")  # extractors that are trained on the experiment's images
ADVICE = (
    "Rank by the validation loss (evaluation.primary_metric: validation), add images, or set another "
    "evaluation.extractor or fewer of its steps."
)


def reason_not_to_rank(reference: Mapping[str, Any]) -> str | None:
    """Return why the distance cannot rank methods, or None if it can or if a reference row is missing.

    The distance can rank methods if real held-out images are below a fitted Gaussian by more than `CLEAR` standard
    deviations of the difference:

    * The deviation of the real images, a bootstrap's, is in every record of stage reference. A missing one is treated
      as 0, so that any lower score can rank.
    * The deviation of a Gaussian row with one set of samples is None; the real images' deviation replaces it.

    Args:
        reference: content of reference.json; rows ``floor`` and ``gaussian`` are used.
    """
    metric, rows = reference["metric"], reference["rows"]
    real, gaussian = rows.get("floor", {}), rows.get("gaussian", {})
    if metric not in real or metric not in gaussian:
        return None
    real_deviation = real.get(f"{metric}_spread")
    if real_deviation is None:  # not by stage reference
        real_deviation = 0.0
    gaussian_deviation = gaussian.get(f"{metric}_spread")
    if gaussian_deviation is None:  # one set of samples
        gaussian_deviation = real_deviation
    deviation_of_difference = math.hypot(real_deviation, gaussian_deviation)
    if gaussian[metric] - real[metric] > CLEAR * deviation_of_difference:
        return None
    real_score = f"{real[metric]:.4g} ± {real_deviation:.2g}"
    gaussian_score = f"{gaussian[metric]:.4g} ± {gaussian_deviation:.2g}"
    if "n_samples" in real:  # in every row of stage reference
        real_score = f"{real['n_samples']} real held-out images score {real_score}"
    return (
        f"{metric} cannot rank methods on these images: {real_score}, not clearly below the {gaussian_score} of a "
        "Gaussian fitted to the data."
    )


def warning_before_run(evaluation: EvaluationConfig, dataset: DatasetConfig, results: Path) -> str | None:
    """Return a warning if the distance is unlikely to rank methods, else None.

    Existing reference rows decide alone, see `reason_not_to_rank`. If there are none, the warning is for extractors
    that are trained on fewer than `ENOUGH_IMAGES` images, if the number is known. There is no warning if methods are
    ranked by the validation loss.

    Args:
        evaluation, dataset: sections of the experiment, with a definite extractor.
        results: folder of the experiment's results. Rows there are used if they were computed with equal options of
            the extractor, number of samples and reference.
    """
    if evaluation.primary_metric != "distance":
        return None
    # existing reference rows
    record = glance(results / "reference/reference.json")  # empty without the file
    manifest = glance(results / "extractor/manifest.json")
    recorded_settings = (manifest.get("options"), record.get("num_samples"), record.get("reference"))
    settings = (evaluation.extractor.plain(), evaluation.num_samples, evaluation.reference)
    if record and recorded_settings == settings:
        reason = reason_not_to_rank(record)
        return f"{reason} {ADVICE}" if reason else None
    # number of images
    name = evaluation.extractor.name
    images = count_images(dataset).train  # training images; None: unknown
    if name not in TRAINED or images is None or images >= ENOUGH_IMAGES:
        return None
    return (
        f"evaluation.extractor: {name} is trained on {images} images. From fewer than {ENOUGH_IMAGES:,} it may learn "
        f"them by heart, and its distance cannot rank methods then. {ADVICE}"
    )
