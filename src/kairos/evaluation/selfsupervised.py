"""The classifier's network as feature extractor of images without labels, trained on a task made of the images alone.

What is asked is which quarter of an image a part is from and which way up it is: turns as Gidaris et al. 2018,
"Unsupervised representation learning by predicting image rotations", places in the manner of Doersch et al. 2015.
`benchmarks/extractors.py` compares the features with a classifier's, and with those of other tasks.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kairos.data.dataset import PreparedDataset
from kairos.evaluation import classifier
from kairos.evaluation.registries import SelfsupervisedOptions
from kairos.randomness import Stream

SIDES = (0.6, 0.75)  # of a part, in those of the image: parts of neighbouring quarters overlap
load = classifier.load


def train(options: SelfsupervisedOptions, dataset: PreparedDataset, folder: Path) -> dict[str, Any]:
    """Train the network, write its weights into the folder and return what the manifest says of it."""

    def task(chosen: np.ndarray, step: int) -> tuple[Tensor, Tensor]:
        classes = Stream(options.seed, "selfsupervised classes").integers(step, 16, range(len(chosen)))
        places = Stream(options.seed, "selfsupervised places").uniform(step, range(len(chosen)), (3,))
        seen = parts(classifier.pixels(dataset, chosen), classes % 4, places)
        return turned(seen, classes // 4), classes

    return classifier.fit("selfsupervised", options, dataset, 16, task, folder)


def parts(images: Tensor, quarters: Tensor, places: Tensor) -> Tensor:
    """A square of each image, enlarged to all of it.

    Args:
        images: uint8 (n, channels, height, width).
        quarters: which of four each square's middle lies in, int64 (n,).
        places: the square's side and place within those allowed, (n, 3) in [0, 1).

    Returns:
        float32 of the images' shape and range.
    """
    side = SIDES[0] + (SIDES[1] - SIDES[0]) * places[:, :1]  # (n, 1)
    corner = torch.stack([quarters % 2, quarters // 2], dim=1)  # (n, 2): across, down
    middle = (1 - side) * (corner + places[:, 1:] - 1)  # (n, 2): coordinates of an image go from -1 to 1
    affine = torch.cat([side[:, :, None] * torch.eye(2), middle[:, :, None]], dim=2).float()  # (n, 2, 3)
    grid = nn.functional.affine_grid(affine, list(images.shape), align_corners=False)
    return nn.functional.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)


def turned(images: Tensor, turns: Tensor) -> Tensor:
    """Each square image turned by so many quarters, (n, channels, side, side)."""
    return torch.stack([image.rot90(int(turn), (1, 2)) for image, turn in zip(images, turns)])
