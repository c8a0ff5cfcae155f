"""The classifier's network as feature extractor of images without labels, trained on a task made of the images alone.

What is asked is which quarter of an image a part is from and which way up it is: turns as Gidaris et al. 2018,
"Unsupervised representation learning by predicting image rotations", places in the manner of Doersch et al. 2015.
`benchmarks/extractors.py` compares the features with a classifier's, and with those of other tasks.
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

PART = 0.8  # of an image's side
load = classifier.load


def train(options: SelfsupervisedOptions, dataset: PreparedDataset, folder: Path) -> dict[str, Any]:
    """Train the network, write its weights into the folder and return what the manifest says of it."""

    def task(chosen: np.ndarray, step: int) -> tuple[Tensor, Tensor]:
        classes = Stream(options.seed, "selfsupervised classes").integers(step, 16, range(len(chosen)))
        places = Stream(options.seed, "selfsupervised places").uniform(step, range(len(chosen)), (2,))
        return turned(parts(classifier.pixels(dataset, chosen), classes % 4, places), classes // 4), classes

    return classifier.fit("selfsupervised", options, dataset, 16, task, folder)


def parts(images: Tensor, quarters: Tensor, places: Tensor) -> Tensor:
    """A square of each image in the middle of an image of the same size, whose borders mirror it.

    No pixel is interpolated: a network that knows enlarged parts alone takes blurred images for usual ones.

    Args:
        images: (n, channels, side, side).
        quarters: towards which corner each square lies, int64 (n,).
        places: where in that quarter of all places, (n, 2) in [0, 1).
    """
    side = images.shape[-1]
    last = round(PART * side) - 1
    inside = last - (last - (torch.arange(side) - (side - last - 1) // 2).abs()).abs()  # (side,): row of the square
    corners = torch.stack([quarters // 2, quarters % 2], dim=1)  # (n, 2): down, across
    offsets = ((side - last) / 2 * (corners + places)).long()  # (n, 2): half of the side - last places each
    rows, columns = (offsets[:, :, None] + inside).unbind(1)  # (n, side) each
    each = torch.arange(len(images))[:, None, None]
    return images[each, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def turned(images: Tensor, turns: Tensor) -> Tensor:
    """Each square image turned by so many quarters, (n, channels, side, side)."""
    return torch.stack([image.rot90(int(turn), (1, 2)) for image, turn in zip(images, turns)])
