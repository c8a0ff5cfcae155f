"""Conditions of a model, such as classes and captions: a dictionary with one array, a row per image, for each name.

Each kind of condition has a null value without information. It replaces the condition when that is dropped for
classifier-free guidance.
"""

from typing import Any

import torch

from kairos.shapes import Flags, Rows

Descriptions = dict[str, dict[str, Any]]  # by name, as in the record of a data set: {"kind": "class", ...}


def zero(values: Rows, description: dict[str, Any]) -> Rows:
    """Return zeros with the shape and type of `values`: the null values of a condition that is a tensor per image.

    Such a condition is an embedding or an image, with description ``{"kind": "tensor", "shape": [...]}``.
    """
    return torch.zeros_like(values)


def no_class(values: Rows, description: dict[str, Any]) -> Rows:
    """Return the null class, which is number `num_classes`, for each image, with the shape and type of `values`.

    The description of the condition is ``{"kind": "class", "num_classes": 10}``.
    """
    return torch.full_like(values, description["num_classes"])


def no_text(values: Rows, description: dict[str, Any]) -> Rows:
    """Return NaN as the null values of encoded texts, with the shape (batch, *shape) and type of `values`.

    NaN marks a dropped text; the model replaces NaN by its null value, which may be trained. The description of the
    condition is ``{"kind": "text", "shape": [77, 768], "null": "empty"}``.
    """
    return torch.full_like(values, torch.nan)


# function that returns null values, by kind of condition; conditions of kind image are flipped with the images
CONDITIONS = {"class": no_class, "tensor": zero, "text": no_text, "image": zero}


def nulls(conditions: dict[str, Rows], descriptions: Descriptions) -> dict[str, Rows]:
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


def drop(conditions: dict[str, Rows], descriptions: Descriptions, dropped: Flags) -> dict[str, Rows]:
    """Return new conditions by name, in which all conditions of the samples that `dropped` selects are null values.

    Args:
        conditions: conditions by name, each (batch, ...).
        descriptions: descriptions of at least these conditions.
        dropped: True for each sample that loses its conditions, bool (batch,), on the device of the conditions.
    """
    null_values = nulls(conditions, descriptions)
    new_conditions = {}
    for name, values in conditions.items():
        further_dimensions = [1] * (values.ndim - 1)
        mask = dropped.view(-1, *further_dimensions)  # (batch, 1, ...), broadcasts over a sample's values
        new_conditions[name] = torch.where(mask, null_values[name], values)
    return new_conditions
