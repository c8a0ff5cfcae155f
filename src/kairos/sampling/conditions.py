"""Conditions of each generated image, as a function of the image's index alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kairos.array_shapes import IntegerArray, RowArray
from kairos.data.latents import Latents, open_latents
from kairos.shapes import Rows
from kairos_timesteps.errors import KairosError
from kairos_timesteps.randomness import Stream

_PASS_LATENTS = "pass --latents DIR, the latents that the model was trained on"
_CAPTION_NUMBERS = 2**32  # caption numbers are drawn below it, and used modulo the captions of an image


def select_condition_sources(
    latents: Any, indices: range, descriptions: dict[str, dict[str, Any]], labels: str = "balanced", seed: int = 0
) -> IntegerArray:
    """Return the dataset indices whose conditions the generated images use, int64 (n,).

    Held-out images are used if the data set has any and a condition is not a class; otherwise training images.

    Args:
        latents: opened latents with indices `train` and `heldout`.
        indices: indices of the generated images.
        descriptions: descriptions of the model's conditions.
        labels: ``balanced`` takes the images in order and begins again after the last one, so that generated image i
            uses image i modulo their number. ``data`` draws them at random, with replacement. Other values are
            treated as ``balanced``.
        seed: seed of the random choice for ``data``; each image's choice depends on the seed and its index alone.
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

    def __call__(self, indices: range) -> dict[str, Rows]:
        """Return the model's conditions for the images `indices` by name, each (n, ...), on the CPU.

        Without latents every condition is a class, and image i has class i modulo the number of classes, int64 (n,).
        The dictionary is empty for a model without conditions.
        """
        if self.latents is None:
            image_indices = torch.arange(indices.start, indices.stop)
            return {name: image_indices % item["num_classes"] for name, item in self.descriptions.items()}
        source_indices, caption_numbers = self._select_sources(self.latents, indices)
        conditions = self.latents.load_conditions(source_indices, caption_numbers=caption_numbers)
        return {name: conditions[name] for name in self.descriptions}

    def values_to_store(self, name: str, indices: range) -> RowArray:
        """Return the values of condition `name` to store with the images, (n, ...), as in the data set.

        A text is stored as the caption itself, in UTF-8 bytes of the length of the longest caption of the data set. The
        caller ensures that the condition is not computed from the images, as ``low_resolution`` is.
        """
        if self.latents is None:  # classes that are assigned in turn
            return self(indices)[name].numpy()
        source_indices, caption_numbers = self._select_sources(self.latents, indices)
        captions = self.latents.dataset.captions
        if captions is None or self.descriptions[name]["kind"] != "text":  # not a caption
            condition_of_dataset = self.latents.dataset.conditions[name]  # a row per image
            return condition_of_dataset[source_indices]
        texts = captions.texts(captions.caption_indices(source_indices, caption_numbers))
        return np.array([text.encode() for text in texts], f"S{captions.longest_bytes}")

    def _select_sources(self, latents: Latents, indices: range) -> tuple[IntegerArray, IntegerArray]:
        """Return the dataset indices of the images whose conditions are used, and their caption numbers, both (n,).

        A caption number is used modulo the number of captions of its image. It is drawn at random for labels ``data``.
        Otherwise it is 0 in the first round through the images, 1 in the second, and so on.
        """
        if self.labels == "data":
            caption_numbers = Stream(self.seed, "sample_captions").integers(0, _CAPTION_NUMBERS, indices).numpy()
        else:
            # only captions use the numbers, and with captions `select_condition_sources` takes these images
            has_heldout = len(latents.heldout) > 0
            images_per_round = len(latents.heldout if has_heldout else latents.train)
            caption_numbers = np.arange(indices.start, indices.stop) // images_per_round
        source_indices = select_condition_sources(latents, indices, self.descriptions, self.labels, self.seed)
        return source_indices, caption_numbers


def load_conditions(
    names: list[str], descriptions: dict[str, dict[str, Any]], latents: Path, labels: str = "balanced", seed: int = 0
) -> ImageConditions:
    """Return the conditions of generated images, as a function of their indices.

    For labels ``balanced`` and a class as the only condition, image i has class i mod K, so that every set of images
    contains all classes equally often. Otherwise image i takes all its conditions from one image of the data set, see
    `select_condition_sources`. Without names there are no conditions.

    Args:
        names: names of the conditions that the model takes.
        descriptions: descriptions of at least these conditions.
        latents: folder of the latents that the model was trained on; opened only if conditions are read from it.
        labels: ``balanced`` or ``data``, see `select_condition_sources`.
        seed: seed of random choices.

    Raises:
        KairosError: conditions are read from the latents, and these are missing, incomplete, or have other conditions
            than the model.
    """
    required = {name: descriptions[name] for name in names}
    only_classes = all(item["kind"] == "class" for item in required.values())
    needs_latents = bool(names) and (labels == "data" or not only_classes)
    if not needs_latents:
        return ImageConditions(required, latents=None, labels=labels, seed=seed)
    if not latents.is_dir():
        # any of the names would do: all conditions are taken from the images
        raise KairosError(
            f"condition {names[-1]!r} is taken from real images, but the folder {latents} does not exist; "
            f"{_PASS_LATENTS}"
        )
    opened = open_latents(latents)
    check_conditions(opened, required, latents)
    return ImageConditions(required, opened, labels, seed)


def check_conditions(latents: Latents, descriptions: dict[str, dict[str, Any]], folder: Path) -> None:
    """Check that latents have the conditions that a model was trained with; further conditions are not checked.

    Args:
        latents: the opened latents.
        descriptions: descriptions of the model's conditions.
        folder: folder of the latents, for the error message.

    Raises:
        KairosError: a condition is missing or differs, for example in its shape or text encoder.
    """
    for name in descriptions:
        available = _comparable(latents.record["conditions"].get(name, {}))
        required = _comparable(descriptions[name])
        if available != required:
            raise KairosError(
                f"{folder}: condition {name!r}: got {available or 'none'}, expected {required}, as in training; "
                f"{_PASS_LATENTS}"
            )


def _comparable(description: dict[str, Any]) -> dict[str, Any]:
    """Return a condition's description without ``file`` and ``null``, which may differ between latents and model."""
    return {key: value for key, value in description.items() if key not in ("file", "null")}
