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

_PASS_LATENTS = "pass --latents DIR, the latents that the model was trained on"
_CAPTION_NUMBERS = 2**32  # caption numbers are drawn below it; they count modulo the captions of an image


def select_condition_sources(
    latents: Any, indices: range, descriptions: dict[str, dict[str, Any]], labels: str = "balanced", seed: int = 0
) -> np.ndarray:
    """Return the dataset indices whose conditions the generated images use, int64 (n,).

    Held-out images are used if the data set has any, unless a class is the only condition; otherwise training images.

    Args:
        latents: opened latents with indices `train` and `heldout`.
        indices: indices of the generated images.
        descriptions: descriptions of the model's conditions.
        labels: ``balanced`` takes the images in order, ``data`` draws them at random.
        seed: seed of the random choice.
    """
    has_other_than_class = any(item["kind"] != "class" for item in descriptions.values())
    if has_other_than_class and len(latents.heldout):
        pool = latents.heldout
    else:
        pool = latents.train
    if labels == "data":
        positions = Stream(seed, "sample_conditions").integers(0, len(pool), indices).numpy()
    else:
        positions = np.arange(indices.start, indices.stop) % len(pool)
    return np.asarray(pool[positions])


@dataclass(frozen=True)
class ImageConditions:
    """Conditions of generated images by image index; see `load_conditions`.

    Attributes:
        descriptions: descriptions of the model's conditions.
        latents: latents from which the conditions are read; None if classes are assigned in turn.
        labels: ``balanced`` or ``data``, see `select_condition_sources`.
        seed: seed of random choices.
    """

    descriptions: dict[str, dict[str, Any]]
    latents: Latents | None
    labels: str
    seed: int

    def __call__(self, indices: range) -> dict[str, Tensor]:
        """Return the model's conditions for the images `indices`, each (n, ...)."""
        if self.latents is None:
            image_numbers = torch.arange(indices.start, indices.stop)
            return {name: image_numbers % item["num_classes"] for name, item in self.descriptions.items()}
        sources, caption_choice = self._select_sources(self.latents, indices)
        conditions = self.latents.load_conditions(sources, caption_numbers=caption_choice)
        return {name: conditions[name] for name in self.descriptions}

    def values_to_store(self, name: str, indices: range) -> np.ndarray:
        """Return the values of one condition to store with the images, (n, ...): captions as UTF-8 bytes for texts."""
        if self.latents is None:  # classes that are assigned in turn
            return self(indices)[name].numpy()
        sources, caption_choice = self._select_sources(self.latents, indices)
        captions = self.latents.dataset.captions
        if captions is None or self.descriptions[name]["kind"] != "text":
            return self.latents.dataset.conditions[name][sources]  # of an array with a row per image of the data set
        texts = captions.texts(captions.caption_indices(sources, caption_choice))
        return np.array([text.encode() for text in texts], f"S{captions.longest_bytes}")

    def _select_sources(self, latents: Latents, indices: range) -> tuple[np.ndarray, np.ndarray]:
        """Return the dataset indices of the sources, and which caption of each source is used, both (n,).

        Captions are drawn at random for labels ``data``. Otherwise each round through the images takes the next one.
        The second array contains caption numbers, taken modulo the number of captions of the image.
        """
        if self.labels == "data":
            caption_choice = Stream(self.seed, "sample_captions").integers(0, _CAPTION_NUMBERS, indices).numpy()
        else:
            images_per_round = len(latents.heldout) or len(latents.train)
            caption_choice = np.arange(indices.start, indices.stop) // images_per_round
        sources = select_condition_sources(latents, indices, self.descriptions, self.labels, self.seed)
        return sources, caption_choice


def load_conditions(
    names: list[str], descriptions: dict[str, dict[str, Any]], latents: Path, labels: str = "balanced", seed: int = 0
) -> ImageConditions:
    """Return the conditions of generated images.

    For labels ``balanced`` and a class as the only condition, image i has class i mod K, so that every set of images
    contains all classes equally often. Otherwise image i takes all its conditions from one image of the data set, see
    `select_condition_sources`. Without names there are no conditions.

    Args:
        names: names of the conditions that the model takes.
        descriptions: descriptions of these conditions, and maybe of others.
        latents: folder of the latents that the model was trained on; opened only if conditions are read from it.
        labels: ``balanced`` or ``data``, see `select_condition_sources`.
        seed: seed of random choices.

    Raises:
        KairosError: the latents are missing, or their conditions differ from the model's.
    """
    required = {name: descriptions[name] for name in names}
    only_classes = all(item["kind"] == "class" for item in required.values())
    if not names or (labels != "data" and only_classes):
        return ImageConditions(required, latents=None, labels=labels, seed=seed)
    if not latents.is_dir():
        raise KairosError(
            f"condition {names[-1]!r} is taken from real images, but the folder {latents} does not exist; "
            f"{_PASS_LATENTS}"
        )
    opened = open_latents(latents)
    check_conditions(opened, required, latents)
    return ImageConditions(required, opened, labels, seed)


def check_conditions(latents: Latents, descriptions: dict[str, dict[str, Any]], folder: Path) -> None:
    """Check that latents in `folder` have the conditions that a model was trained with.

    Raises:
        KairosError: a condition is missing, or has another shape or text encoder.
    """
    for name in descriptions:
        available = _comparable(latents.manifest["conditions"].get(name, {}))
        required = _comparable(descriptions[name])
        if available != required:
            raise KairosError(
                f"{folder}: condition {name!r}: got {available or 'none'}, expected {required}, as in training; "
                f"{_PASS_LATENTS}"
            )


def _comparable(description: dict[str, Any]) -> dict[str, Any]:
    """Return a condition's description without the fields that may differ between latents and model."""
    return {key: value for key, value in description.items() if key not in ("file", "null")}
