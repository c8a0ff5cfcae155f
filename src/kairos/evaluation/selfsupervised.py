"""The classifier's network as feature extractor of images without labels, trained on a task made of the images alone.

It learns which way up an image is (Gidaris et al. 2018, "Unsupervised representation learning by predicting image
rotations"). `benchmarks/extractors.py` compares its features with a classifier's, and with those of other tasks.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairos.data.dataset import PreparedDataset
from kairos.evaluation import classifier
from kairos.evaluation.registries import SelfsupervisedOptions
from kairos.randomness import Stream

load = classifier.load


def train(options: SelfsupervisedOptions, dataset: PreparedDataset, folder: Path) -> dict[str, Any]:
    """Train the network, write its weights into the folder and return what the manifest says of it."""

    def task(chosen: np.ndarray, step: int) -> tuple[Tensor, Tensor]:
        turns = Stream(options.seed, "selfsupervised turns").integers(step, 4, range(len(chosen)))
        return turned(classifier.pixels(dataset, chosen), turns), turns

    return classifier.fit("selfsupervised", options, dataset, 4, task, folder)


def turned(images: Tensor, turns: Tensor) -> Tensor:
    """Each square image turned by so many quarters, (n, channels, side, side)."""
    return torch.stack([image.rot90(int(turn), (1, 2)) for image, turn in zip(images, turns)])
