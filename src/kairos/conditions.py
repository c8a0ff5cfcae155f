"""Conditions: what a model may be told about an image, as a dictionary from a name to one array per image.

A kind of condition says how its value without information looks, which stands in where the condition is dropped for
classifier-free guidance. Prepare stores conditions, encode and train carry them, sample draws or repeats them.
"""

from typing import Any

import torch
from torch import Tensor

Descriptions = dict[str, dict[str, Any]]  # by name, as a data set's manifest has them: {"kind": "class", ...}


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
    """Return NaN as the null value of encoded texts, float32 (batch, *shape).

    The description of the condition is ``{"kind": "text", "shape": [77, 768], "null": "empty"}``. NaN marks a dropped
    text; the model owns the null value and replaces NaN by it.
    """
    return torch.full_like(values, torch.nan)


# by kind, what makes values of the same shape that carry no information; an image is flipped with the one it belongs to
CONDITIONS = {"class": no_class, "tensor": zero, "text": no_text, "image": zero}


def nulls(conditions: dict[str, Tensor], descriptions: Descriptions) -> dict[str, Tensor]:
    """Values of the same shapes that carry no information."""
    described = {name: descriptions[name] for name in conditions}
    return {name: CONDITIONS[described[name]["kind"]](conditions[name], described[name]) for name in conditions}


def drop(conditions: dict[str, Tensor], descriptions: Descriptions, dropped: Tensor) -> dict[str, Tensor]:
    """Replace all conditions of the samples in `dropped`, bool (batch,), by their null values."""
    null = nulls(conditions, descriptions)
    return {
        name: torch.where(dropped.view(-1, *[1] * (values.ndim - 1)), null[name], values)
        for name, values in conditions.items()
    }
