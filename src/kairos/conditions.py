"""Conditions of a model, such as classes and captions: a dictionary with one array, a row per image, for each name.

Each kind of condition has a null value without information. It replaces the condition when that is dropped for
classifier-free guidance.
"""

from typing import Any

import torch
from torch import Tensor

Descriptions = dict[str, dict[str, Any]]  # by name, as in the manifest of a data set: {"kind": "class", ...}


def zero(values: Tensor, description: dict[str, Any]) -> Tensor:
    """Return zeros, the null value of a condition that is a tensor per image, such as an embedding or an image.

    Its description is ``{"kind": "tensor", "shape": [...]}``.
    """
    return torch.zeros_like(values)


def no_class(values: Tensor, description: dict[str, Any]) -> Tensor:
    """Return the null class, one past the last class, for each image; int64 (batch,).

    The description of the condition is ``{"kind": "class", "num_classes": 10}``.
    """
    return torch.full_like(values, description["num_classes"])


def no_text(values: Tensor, description: dict[str, Any]) -> Tensor:
    """Return NaN as the null value of encoded texts, with the shape (batch, *shape) and type of `values`.

    The description of the condition is ``{"kind": "text", "shape": [77, 768], "null": "empty"}``. NaN marks a dropped
    text; the model replaces NaN by its null value, which may be trained.
    """
    return torch.full_like(values, torch.nan)


# function that returns null values, by kind of condition; conditions of kind image are flipped with the images
CONDITIONS = {"class": no_class, "tensor": zero, "text": no_text, "image": zero}


def nulls(conditions: dict[str, Tensor], descriptions: Descriptions) -> dict[str, Tensor]:
    """Return the null values of conditions, by name, with the shapes, types and devices of the conditions.

    Args:
        conditions: conditions by name, each (batch, ...).
        descriptions: descriptions of at least these conditions; ``kind`` is a key of `CONDITIONS`.
    """
    null_values = {}
    for name, values in conditions.items():
        make_null_values = CONDITIONS[descriptions[name]["kind"]]
        null_values[name] = make_null_values(values, descriptions[name])
    return null_values


def drop(conditions: dict[str, Tensor], descriptions: Descriptions, dropped: Tensor) -> dict[str, Tensor]:
    """Return conditions with null values for the samples where `dropped`, bool (batch,), is True.

    All conditions of such a sample are null. The arguments do not change.

    Args:
        conditions: conditions by name, each (batch, ...).
        descriptions: descriptions of at least these conditions.
        dropped: mask of the samples, on the device of the conditions.
    """
    null_values = nulls(conditions, descriptions)
    new_conditions = {}
    for name, values in conditions.items():
        further_dimensions = [1] * (values.ndim - 1)
        mask = dropped.view(-1, *further_dimensions)  # (batch, 1, ...), broadcasts over a sample's values
        new_conditions[name] = torch.where(mask, null_values[name], values)
    return new_conditions
