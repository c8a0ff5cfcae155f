"""What a conditional model is told about each image that it draws, as a function of the image's index alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairos.errors import KairosError
from kairos.randomness import Stream


def told_of(
    latents: Any, indices: range, descriptions: dict[str, dict[str, Any]], labels: str = "balanced", seed: int = 0
) -> np.ndarray:
    """Numbers of the images whose conditions the drawn images with some indices have, int64 (n,).

    They are held-out images, where there are any, but where a class is the only condition; and come in their order, or
    are drawn where labels are as in the ``data``.
    """
    further = any(item["kind"] != "class" for item in descriptions.values())
    pool = latents.heldout if further and len(latents.heldout) else latents.train
    drawn = np.arange(indices.start, indices.stop)
    if labels == "data":
        drawn = Stream(seed, "sample_conditions").integers(0, len(pool), indices).numpy()
    return np.asarray(pool[drawn % len(pool)])


def conditions_of(
    names: list[str], descriptions: dict[str, dict[str, Any]], latents: Path, labels: str = "balanced", seed: int = 0
) -> Callable[[range], dict[str, Tensor]]:
    """Conditions of the images with some indices, each (n, ...), for the names that the model takes.

    Where labels are ``balanced``, classes go round: image i has class i mod K, so that every set of images holds all
    classes alike; other conditions are those of the images that `told_of` names. Where they are as in the ``data``,
    image i has all its conditions from one image that `told_of` draws.

    Raises:
        KairosError: a condition is needed from latents that are not there.
    """
    read = [name for name in names if labels == "data" or descriptions[name]["kind"] != "class"]
    if read and not latents.is_dir():
        raise KairosError(
            f"condition {read[0]!r} is that of real images, but {latents} is no folder; "
            "pass --latents DIR, the latents that the model was trained on"
        )
    from kairos.data.latents import open_latents

    opened = open_latents(latents) if read else None

    def conditions(indices: range) -> dict[str, Tensor]:
        numbers, known = torch.arange(indices.start, indices.stop), {}
        if opened is not None:
            known = opened.conditions(told_of(opened, indices, descriptions, labels, seed))
        return {name: known[name] if name in read else numbers % descriptions[name]["num_classes"] for name in names}

    return conditions
