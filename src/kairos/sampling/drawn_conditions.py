"""What a conditional model is told about each image that it draws, as a function of the image's index alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairos.data.latents import Latents, open_latents
from kairos.errors import KairosError
from kairos.randomness import Stream


@dataclass(frozen=True)
class Prompts:
    """Conditions of the images with some indices.

    Where labels are ``balanced``, classes go round: image i has class i mod K, so that every set of images holds all
    classes alike; other conditions repeat those of the data's images in their order, and with each round the next
    caption of an image. Where they are as in the ``data``, image i has all its conditions from one image of the data,
    drawn by the seed and i, and its caption likewise. The data's images are the training images; for texts and images
    the held-out ones where there are any, which no model has learned by heart.

    Args:
        names: of the conditions that the model takes.
        descriptions: of these.
        latents: what it was trained on, where a condition is read from there.
        labels: ``balanced`` or ``data``.
        seed: of the images.
    """

    names: list[str]
    descriptions: dict[str, dict[str, Any]]
    latents: Latents | None
    labels: str
    seed: int

    def __call__(self, indices: range) -> dict[str, Tensor]:
        """What the model is told, each (n, ...)."""
        numbers, known = torch.arange(indices.start, indices.stop), {}
        if self.latents is not None:
            images, which = self._chosen(indices)
            known = self.latents.conditions(images, which=which)
        return {
            name: known[name] if self._is_read(name) else numbers % self.descriptions[name]["num_classes"]
            for name in self.names
        }

    def recorded(self, name: str, indices: range) -> np.ndarray:
        """What is kept of a condition, (n, ...): of a text not its states but itself, bytes in UTF-8."""
        if self.descriptions[name]["kind"] != "text" or self.latents is None or self.latents.dataset.captions is None:
            return self(indices)[name].numpy()
        captions = self.latents.dataset.captions
        texts = captions.texts(captions.numbers(*self._chosen(indices)))
        return np.array([text.encode() for text in texts], f"S{captions.longest}")

    def _is_read(self, name: str) -> bool:
        return self.labels == "data" or self.descriptions[name]["kind"] != "class"

    def _chosen(self, indices: range) -> tuple[np.ndarray, np.ndarray]:
        """The images of the data that stand behind some indices, and which of their captions."""
        assert self.latents is not None
        shown = {self.descriptions[name]["kind"] for name in self.names} & {"text", "image"}
        images = self.latents.heldout if shown and len(self.latents.heldout) else self.latents.train
        if self.labels == "data":
            drawn = Stream(self.seed, "sample_conditions").integers(0, len(images), indices).numpy()
            return images[drawn], Stream(self.seed, "sample_captions").integers(0, 2**32, indices).numpy()
        numbers = np.arange(indices.start, indices.stop)
        return images[numbers % len(images)], numbers // len(images)


def conditions_of(
    names: list[str], descriptions: dict[str, dict[str, Any]], latents: Path, labels: str = "balanced", seed: int = 0
) -> Prompts:
    """See `Prompts`; latents are opened where a condition is read from them.

    Raises:
        KairosError: a condition is needed from latents that are not there.
    """
    read = [name for name in names if labels == "data" or descriptions[name]["kind"] != "class"]
    if read and not latents.is_dir():
        raise KairosError(
            f"condition {read[0]!r} is that of the training images, but {latents} is no folder; "
            "pass --latents DIR, the latents that the model was trained on"
        )
    return Prompts(names, descriptions, open_latents(latents) if read else None, labels, seed)
