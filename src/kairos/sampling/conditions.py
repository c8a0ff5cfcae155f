"""Conditions of each generated image, as a function of the image's index alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairos.data.latents import Latents, open_latents
from kairos_timesteps.errors import KairosError
from kairos_timesteps.randomness import Stream

_LATENTS = "pass --latents DIR, the latents that the model was trained on"


def select_condition_sources(
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


@dataclass(frozen=True)
class ImageConditions:
    """Conditions of the images with some indices; see `load_conditions`."""

    descriptions: dict[str, dict[str, Any]]
    latents: Latents | None
    labels: str
    seed: int

    def __call__(self, indices: range) -> dict[str, Tensor]:
        """Return the conditions that the model takes for the images with some indices, each (n, ...)."""
        if self.latents is None:  # classes alone
            numbers = torch.arange(indices.start, indices.stop)
            return {name: numbers % item["num_classes"] for name, item in self.descriptions.items()}
        images, which = self._told(self.latents, indices)
        known = self.latents.load_conditions(images, which=which)
        return {name: known[name] for name in self.descriptions}

    def recorded(self, name: str, indices: range) -> np.ndarray:
        """Return a condition's values to store with the images, (n, ...); for texts the captions, as bytes in UTF-8."""
        if self.latents is None:
            return self(indices)[name].numpy()
        images, which = self._told(self.latents, indices)
        captions = self.latents.dataset.captions
        if captions is None or self.descriptions[name]["kind"] != "text":
            return self.latents.dataset.conditions[name][images]
        texts = captions.texts(captions.caption_indices(images, which))
        return np.array([text.encode() for text in texts], f"S{captions.longest_bytes}")

    def _told(self, latents: Latents, indices: range) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of images, and which of an image's captions: in each round the next, or drawn."""
        if self.labels == "data":
            which = Stream(self.seed, "sample_captions").integers(0, 2**32, indices).numpy()
        else:
            which = np.arange(indices.start, indices.stop) // (len(latents.heldout) or len(latents.train))
        return select_condition_sources(latents, indices, self.descriptions, self.labels, self.seed), which


def load_conditions(
    names: list[str], descriptions: dict[str, dict[str, Any]], latents: Path, labels: str = "balanced", seed: int = 0
) -> ImageConditions:
    """Conditions of the images with some indices, each (n, ...), for the names that the model takes.

    Where labels are ``balanced`` and a class is all that the model is told, classes go round: image i has class i mod
    K, so that every set of images holds all classes alike. Else image i has all its conditions from the image that
    `select_condition_sources` names, and with each round the next caption of it.

    Raises:
        KairosError: a condition is needed from latents that are not there, or have others.
    """
    taken = {name: descriptions[name] for name in names}
    if not names or (labels != "data" and all(item["kind"] == "class" for item in taken.values())):
        return ImageConditions(taken, None, labels, seed)
    if not latents.is_dir():
        raise KairosError(f"condition {names[-1]!r} is that of real images, but {latents} is no folder; {_LATENTS}")
    opened = open_latents(latents)
    check_conditions(opened, taken, latents)
    return ImageConditions(taken, opened, labels, seed)


def check_conditions(latents: Latents, descriptions: dict[str, dict[str, Any]], folder: Path) -> None:
    """Compare the conditions of latents with those that a model was trained with.

    Raises:
        KairosError: they are missing, or of another form or text encoder.
    """
    for name in descriptions:
        found, wanted = (
            {key: value for key, value in one.get(name, {}).items() if key not in ("file", "null")}
            for one in (latents.manifest["conditions"], descriptions)
        )
        if found != wanted:
            raise KairosError(
                f"{folder}: condition {name!r} is {found or 'not there'}, the model was told {wanted}; {_LATENTS}"
            )
