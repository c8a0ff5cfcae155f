"""Check that a trained extractor classifies better than chance, and that its features vary.

Distances of other features differ only by noise. The classes of `selfsupervised` are rotations.

Two numbers are checked:

* The balanced accuracy: the share of correctly classified images of a class, mean over classes. A network that always
  predicts one class has the balanced accuracy 1 / classes, however large that class is.
* The effective rank of the features: the exponential of the entropy of the normalised eigenvalues of their covariance.
  It is 1 if all features vary in one direction. Roy and Vetterli 2007, "The effective rank: a measure of effective
  dimensionality", define it with singular values.

The limits are from 123 networks trained on CIFAR-10, Fashion-MNIST and digits with 0 to 600 steps. Classes were even,
or had 53, 24 and 23 % or 90, 5 and 5 % of the images. Skill is the part of the way from chance to a perfect balanced
accuracy. Networks that always predicted one class had effective ranks from 1.04 on, so low ranks alone do not find
them. Networks with at most 10 steps on ten classes of photographs had a skill of at most 0.08, with 20 steps 0.12 or
more. The lowest effective rank of a network that had learned its task well was 1.18 (rotations of digits, accuracy
0.74).
"""

import math
from typing import Any

import numpy as np

from kairos.array_shapes import FeatureArray, IntegerArray

LEAST_SKILL = 0.1  # part of the way from chance to a perfect balanced accuracy
DEVIATIONS = 2.0  # standard deviations of chance that the balanced accuracy must exceed as well
MANY_CLASSES_FACTOR = 3.0  # for many classes, this multiple of chance suffices instead of `LEAST_SKILL`
LEAST_EFFECTIVE_RANK = 1.1


def check_instrument(
    name: str, features: FeatureArray, classes: IntegerArray, predictions: IntegerArray
) -> tuple[dict[str, Any], list[str]]:
    """Return the checked numbers of an extractor, and the reasons to reject it, an empty list if it passes.

    Args:
        name: name of the extractor, for the reasons.
        features: features of the checked images.
        classes: class of each image.
        predictions: class that the network predicts for each image.

    Returns:
        The first result has ``count`` (images), ``accuracy`` (share of images that are classified correctly),
        ``largest_class`` (share of images), ``balanced_accuracy`` and ``effective_rank``.
    """
    counts = np.bincount(classes)
    is_present = counts > 0
    correct_counts = np.bincount(classes[predictions == classes], minlength=len(counts))
    class_counts = counts[is_present]
    numbers = {
        "count": len(classes),
        "accuracy": float(correct_counts.sum() / len(classes)),
        "largest_class": float(counts.max() / len(classes)),
        "balanced_accuracy": float((correct_counts[is_present] / class_counts).mean()),
        "effective_rank": effective_rank(features),
    }
    reasons = []
    chance = 1 / len(class_counts)
    required = chance + _least_excess(chance, class_counts)
    if numbers["balanced_accuracy"] < required:
        reasons.append(
            f"{name} has not learned to classify the images: balanced accuracy {numbers['balanced_accuracy']:.3f}, "
            f"expected at least {required:.3f} (chance: {chance:.3f}; accuracy {numbers['accuracy']:.3f}, share of the "
            f"largest class {numbers['largest_class']:.3f})."
        )
    if numbers["effective_rank"] < LEAST_EFFECTIVE_RANK:
        reasons.append(
            f"The features of {name} vary in one direction alone: effective rank {numbers['effective_rank']:.2f}, "
            f"expected at least {LEAST_EFFECTIVE_RANK}."
        )
    return numbers, reasons


def _least_excess(chance: float, class_counts: IntegerArray) -> float:
    """Return by how much the balanced accuracy must exceed `chance`; `class_counts` are the images of each class."""
    if chance == 1:  # a single class: the accuracy shows nothing
        return 0.0
    variance = chance * (1 - chance) * float((1 / class_counts).sum()) / len(class_counts) ** 2
    effect = min(LEAST_SKILL * (1 - chance), (MANY_CLASSES_FACTOR - 1) * chance)
    return max(effect, DEVIATIONS * math.sqrt(variance))


def effective_rank(features: FeatureArray) -> float:
    """Return the exponential of the entropy of the normalised eigenvalues of the features' covariance.

    It is 1 for features that do not vary, and for fewer than two images.
    """
    if len(features) < 2:
        return 1.0
    covariance = np.cov(features.astype(np.float64), rowvar=False)
    eigenvalues = np.linalg.eigvalsh(covariance).clip(min=0)  # rounding may make them slightly negative
    positive = eigenvalues[eigenvalues > 0]
    if not len(positive):
        return 1.0
    shares = positive / positive.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))
