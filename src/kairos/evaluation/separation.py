"""Check that a distance can rank methods: real held-out images must score clearly below a fitted Gaussian.

The results contain the warnings of these checks: stage `reference` stores those of the extractor and of the reference
rows, and stage `evaluate` those of a snapshot.

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
    "Rank by the validation loss (evaluation.primary_metric: validation), add images, or change evaluation.extractor "
    "or its steps."
)


def find_instrument_faults(reference: Mapping[str, Any]) -> list[str]:
    """Return the reasons why distances from a reference cannot rank methods; empty if they can.

    The reasons are the warnings of the extractor, then the reason of the reference rows.

    Args:
        reference: content of reference/record.json.
    """
    reason = reason_not_to_rank(reference)
    extractor_warnings = reference.get("extractor_warnings", [])  # published extractors have none
    return [*extractor_warnings, reason] if reason else [*extractor_warnings]


def describe_gaussian_limit(reference: Mapping[str, Any]) -> str | None:
    """Return the warning about a distance that is not below a fitted Gaussian's; None without this reference row.

    Args:
        reference: content of reference/record.json, or the fields of an external reference.
    """
    gaussian = gaussian_value(reference, reference.get("metric", ""))
    if gaussian is None:
        return None
    return f"{reference['metric']} is not below the {gaussian:.4g} of a Gaussian fitted to the data"


def gaussian_value(reference: Mapping[str, Any], metric: str) -> float | None:
    """Return a metric of the reference row ``gaussian``; None if the reference lacks it."""
    value: float | None = reference.get("rows", {}).get("gaussian", {}).get(metric)
    return value


def reason_not_to_rank(reference: Mapping[str, Any]) -> str | None:
    """Return why the reference rows show that a distance cannot rank methods; None if it can, or without both rows.

    The distance can rank methods if real held-out images are below a fitted Gaussian by more than `CLEAR` standard
    deviations of the difference:

    * The deviation of the real images, a bootstrap's, is in every record of stage reference. A missing one is treated
      as 0, so that any lower score can rank.
    * The deviation of a Gaussian row with one set of samples is None; the real images' deviation replaces it.

    Args:
        reference: record of the real images; rows ``floor`` and ``gaussian`` are used.
    """
    metric, rows = reference.get("metric"), reference.get("rows", {})  # moments of other programs have neither
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

    An existing reference decides alone, see `find_instrument_faults`. If there is none, the warning is for extractors
    that are trained on fewer than `ENOUGH_IMAGES` images, if the number is known. There is no warning if methods are
    ranked by the validation loss.

    Args:
        evaluation, dataset: sections of the experiment, with a definite extractor.
        results: folder of the experiment's results. A reference there is used if it was computed with equal options
            of the extractor, number of samples and reference.
    """
    if evaluation.primary_metric != "distance":
        return None
    # existing reference
    record = glance(results / "reference/record.json")  # empty without the file
    extractor = glance(results / "extractor/record.json")
    configured_extractor = extractor.get("replaces") or extractor  # the extractor that the experiment file sets
    recorded_settings = (configured_extractor.get("options"), record.get("num_samples"), record.get("reference"))
    settings = (evaluation.extractor.plain(), evaluation.num_samples, evaluation.reference)
    if record and recorded_settings == settings:
        faults = find_instrument_faults(record)
        return " ".join([*faults, ADVICE]) if faults else None
    # number of images
    name = evaluation.extractor.name
    images = count_images(dataset).train  # training images; None: unknown
    if name not in TRAINED or images is None or images >= ENOUGH_IMAGES:
        return None
    return (
        f"evaluation.extractor: {name} is trained on {images} images. From fewer than {ENOUGH_IMAGES:,} it may learn "
        f"them by heart, and its distance cannot rank methods then. {ADVICE}"
    )
