"""Measures of a fine-tuned network."""

from functools import cache
from typing import Any

import numpy as np
import torch
from fashion_mnist import Data
from torch import Tensor, nn

from kairos.evaluation.metrics import RealStatistics, frechet_distance
from kairos_timesteps import ValidationLoss

LEVELS = 8  # equal intervals of the process in which the loss is measured
IMAGES = 128  # images of a validation loss
MEASURES = (
    "distance", "val_loss", "recognised", "memorised", "base_distance",
    *(f"val_{level}" for level in range(1, LEVELS + 1)), *(f"train_{level}" for level in range(1, LEVELS + 1)),
)  # fmt: skip
SEED = 1_000_000  # seed of validation noise; generated images have this number plus the seed of the run


def measure(setting: Any, network: nn.Module, task: str, training: Data, seed: int) -> dict[str, float]:
    """Return all measures of a network in evaluation mode.

    README.md explains the columns. The seed decides the noise of generated images; all runs share the noise of
    validation losses.
    """
    heldout = setting.heldout_data(task)
    repeats = -(-IMAGES // len(training.images))
    repeated = Data(training.images.repeat(repeats, 1, 1, 1), training.labels.repeat(repeats))
    validation_losses = level_losses(setting, network, heldout)
    training_losses = level_losses(setting, network, repeated)
    labels = setting.labels_to_generate(task)
    images = setting.generate(network, labels, SEED + seed)
    base_labels = setting.labels_to_generate("base")
    has_base_labels = torch.equal(base_labels, labels)
    base_images = images if has_base_labels else setting.generate(network, base_labels, SEED + seed)
    nearest = nearest_distances(images, training.images).median()
    nearest_heldout = nearest_distances(heldout.images[: len(images)], training.images).median()
    return {
        "distance": distance(setting, images, task),
        "val_loss": float(np.mean(validation_losses)),
        "recognised": float(setting.recognise(task, images, labels).float().mean()),
        "memorised": float(nearest / nearest_heldout),
        "base_distance": distance(setting, base_images, "base"),
        **{f"val_{level}": loss for level, loss in enumerate(validation_losses, 1)},
        **{f"train_{level}": loss for level, loss in enumerate(training_losses, 1)},
    }


def measure_real(setting: Any, task: str, count: int, seed: int) -> dict[str, float]:
    """Return distance and recognised share of real images that are not held out, as the best values of both."""
    data = setting.training_data(task, count, seed)
    recognised = setting.recognise(task, data.images, data.labels).float().mean()
    return {"distance": distance(setting, data.images, task), "recognised": float(recognised)}


def level_losses(setting: Any, network: nn.Module, data: Data) -> list[float]:
    """Return the loss in each of `LEVELS` equal intervals of the process, of the first `IMAGES` images."""
    images, labels = data.images[:IMAGES], data.labels[:IMAGES]
    loss = ValidationLoss(images, setting.process, strata=LEVELS, seed=SEED, conditions={"labels": labels})

    def predict(x_t: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tensor:
        return setting.predict(network, x_t, t, conditions["labels"])

    return [float(value) for value in loss(predict)["level_loss"]]


def nearest_distances(images: Tensor, training: Tensor) -> Tensor:
    """Return the Euclidean distance of each image to the nearest training image, (n,)."""
    return torch.cdist(images.flatten(1), training.flatten(1)).amin(1)


def gaussian(features: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return mean (d,) and covariance (d, d) of features (n, d)."""
    values = features.double().cpu().numpy()
    return values.mean(0), np.cov(values, rowvar=False)


@cache
def _real_statistics(setting: Any, task: str) -> RealStatistics:
    """Return the statistics of a task's held-out images, or of the base's images for ``base``."""
    data = setting.base_data() if task == "base" else setting.heldout_data(task)
    return RealStatistics({"features": gaussian(setting.features(data.images))})


def distance(setting: Any, images: Tensor, task: str) -> float:
    """Return the Fréchet distance of images to a task's held-out images, or to the base's images for ``base``."""
    return frechet_distance(gaussian(setting.features(images)), _real_statistics(setting, task), layer="features")
