"""Conditions: what a model may be told about an image, as a dictionary from a name to one array per image.

A kind of condition says how its value without information looks, which stands in where the condition is dropped for
classifier-free guidance. Prepare stores conditions, encode and train carry them, sample draws or repeats them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kairos.registry import Registry


@dataclass(frozen=True)
class Condition:
    """A tensor per image, such as a token sequence's embedding or an image; zero means none.

    `description` stands in a data set's manifest: ``{"kind": "tensor", "shape": [...]}``.
    """

    options: Any
    description: dict[str, Any]

    def null(self, values: Tensor) -> Tensor:
        """Values of the same shape that carry no information."""
        return torch.zeros_like(values)


class ClassCondition(Condition):
    """A class per image, int64 (batch,), of ``{"kind": "class", "num_classes": 10}``."""

    def null(self, values: Tensor) -> Tensor:
        """The class past the last one."""
        return torch.full_like(values, self.description["num_classes"])


class TextCondition(Condition):
    """A text's states, float32 (batch, *shape), of ``{"kind": "text", "shape": [77, 768], "null": "empty"}``."""

    def null(self, values: Tensor) -> Tensor:
        """Not a number: the model owns the value that stands for no text, and puts it there."""
        return torch.full_like(values, torch.nan)


CONDITIONS = Registry("condition")
CONDITIONS.add("class", "kairos.conditions:ClassCondition", help="a class per image")
CONDITIONS.add("tensor", "kairos.conditions:Condition", help="a tensor per image")
CONDITIONS.add("text", "kairos.conditions:TextCondition", help="a text per image, encoded by stage text")
CONDITIONS.add("image", "kairos.conditions:Condition", help="an image per image, flipped with it")


def build(descriptions: dict[str, dict[str, Any]]) -> dict[str, Condition]:
    """The conditions of a data set by name, from its manifest."""
    return {name: CONDITIONS.build(item["kind"], {}, item) for name, item in descriptions.items()}


def drop(conditions: dict[str, Tensor], kinds: dict[str, Condition], dropped: Tensor) -> dict[str, Tensor]:
    """Replace all conditions of the samples in `dropped`, bool (batch,), by their null values."""
    result = {}
    for name, values in conditions.items():
        mask = dropped.view(-1, *[1] * (values.ndim - 1))
        result[name] = torch.where(mask, kinds[name].null(values), values)
    return result
