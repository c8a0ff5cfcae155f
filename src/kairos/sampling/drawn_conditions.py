"""What a conditional model is told about each image that it draws, as a function of the image's index alone."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kairos.errors import KairosError


def conditions_of(
    indices: range, names: list[str], descriptions: dict[str, dict[str, Any]], latents: Path
) -> dict[str, Tensor]:
    """Conditions of the images `indices`, for the names that the model takes.

    Classes go round: image i has class i mod K, so that every set of images holds all classes alike. Other conditions
    repeat those of the training images in their order, read from the latents.

    Raises:
        KairosError: a condition is needed from latents that are not there.
    """
    result = {}
    for name in names:
        description = descriptions[name]
        if description["kind"] == "class":
            result[name] = torch.arange(indices.start, indices.stop) % description["num_classes"]
        else:
            if not latents.is_dir():
                raise KairosError(
                    f"condition {name!r} is repeated from the training images, but {latents} is no folder; "
                    "pass --latents DIR, the latents that the model was trained on"
                )
            from kairos.data.latents import open_latents

            opened = open_latents(latents)
            chosen = opened.train[torch.arange(indices.start, indices.stop).numpy() % len(opened.train)]
            result[name] = opened.conditions(chosen)[name]
    return result
