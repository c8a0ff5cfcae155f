"""Base of kairos' backbones: names of weights, image conditions as channels, null texts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kairos_timesteps.errors import KairosError
from kairos_timesteps.options import dump

Descriptions = dict[str, dict[str, Any]]


class NullText(nn.Module):
    """Null value of a text condition, which replaces the NaN of dropped texts.

    The `null` of the description selects it. ``empty`` is fixed: the empty text's state, ``description["empty"]``, or
    zeros until weights are loaded. ``random`` is fixed: normal of norm about 1, as in SpeeD. ``learned`` is trained.

    Args:
        description: description of the condition; `shape` is the shape of its value for one image.
        axes: number of axes that the model takes: 1, a vector; 2, a sequence of vectors.

    Raises:
        KairosError: the text has another number of axes.
    """

    def __init__(self, description: dict[str, Any], axes: int):
        super().__init__()
        shape, kind = tuple(description["shape"]), description.get("null", "empty")
        if len(shape) != axes:
            takes = "one vector" if axes == 1 else "a sequence of vectors"
            raise KairosError(
                f"model.conditions: got text of shape {shape} per image, allowed with this model: {takes}"
            )
        value = torch.zeros(shape) if kind == "empty" else torch.randn(shape) / shape[-1] ** 0.5
        if kind == "empty" and description.get("empty") is not None:
            value = torch.tensor(description["empty"], dtype=torch.float32)
        self.value: Tensor
        if kind == "learned":
            self.value = nn.Parameter(value)
        else:
            self.register_buffer("value", value)

    def forward(self, values: Tensor) -> Tensor:
        """Values (batch, *shape) without NaN."""
        return torch.where(values.isnan(), self.value, values)


class Backbone(nn.Module):
    """A module ``model(x, t, conditions)``.

    Args:
        options: of the registry's class.
        shape: (channels, height, width) of x0.
        conditions: descriptions of the conditions it takes.
        outputs: channels of what it gives.

    Attributes:
        inputs: channels of what goes in: those of x0 and of every condition that is an image.
    """

    def __init__(self, options: Any, shape: tuple[int, int, int], conditions: Descriptions, outputs: int):
        super().__init__()
        self.options: Any = options
        self.shape, self.conditions, self.outputs = shape, conditions, outputs
        self._images = [name for name, item in conditions.items() if item["kind"] == "image"]
        self.inputs = shape[0] + sum(conditions[name]["shape"][0] for name in self._images)

    def config(self) -> dict[str, Any]:
        """Return the content of config.json, for use of the weights outside of kairos."""
        described = {name: {k: v for k, v in item.items() if k != "empty"} for name, item in self.conditions.items()}
        facts = {"shape": list(self.shape), "conditions": described, "outputs": self.outputs}
        return {"_class_name": type(self).__name__, "options": dump(self.options), **facts}

    def weights(self) -> dict[str, Tensor]:
        """Parameters and buffers under their published names."""
        return dict(self.state_dict())

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Load what `weights` gave."""
        self.load_state_dict(weights)

    def to_kairos_names(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """A published file's weights under our names."""
        return weights

    def load_published(self, weights: dict[str, Tensor]) -> None:
        """Load a published file's weights, which `to_kairos_names` renames; buffers that it lacks stay as they are.

        Raises:
            KairosError: names what is missing, what the model has not, and shapes that differ.
        """
        own, given = self.weights(), self.to_kairos_names(weights)
        fixed = dict(self.named_buffers())
        given = {name: value for name, value in own.items() if name in fixed} | given
        if fault := describe_mismatch(own, given):
            raise KairosError(f"the weights do not fit {type(self).__name__} as configured; {fault}")
        self.load_weights(given)

    def with_image_conditions(self, x: Tensor, conditions: dict[str, Tensor]) -> Tensor:
        """x with the images that it is told of behind it, (batch, inputs, height, width)."""
        return torch.cat([x, *(conditions[name].to(x.dtype) for name in self._images)], dim=1) if self._images else x

    def grid(self, patch: int) -> tuple[int, int]:
        """Rows and columns of patches.

        Raises:
            KairosError: patches do not divide the size.
        """
        _, height, width = self.shape
        if height % patch or width % patch:
            raise KairosError(f"model.patch: got {patch} with x0 of {height}x{width}, allowed: a divisor of both sides")
        return height // patch, width // patch

    def unpatchify(self, patches: Tensor, patch: int) -> Tensor:
        """Patches (batch, tokens, patch * patch * outputs), row by row, as (batch, outputs, height, width)."""
        _, height, width = self.shape
        values = patches.view(len(patches), height // patch, width // patch, patch, patch, self.outputs)
        return values.permute(0, 5, 1, 3, 2, 4).reshape(len(patches), self.outputs, height, width)


def describe_mismatch(own: dict[str, Tensor], given: dict[str, Tensor]) -> str:
    """Describe why weights do not fit a model: at most five names of each kind of problem; empty if they fit."""
    differing = sorted(name for name in own.keys() & given.keys() if own[name].shape != given[name].shape)
    wrong = {
        "missing": sorted(own.keys() - given.keys()),
        "not of this model": sorted(given.keys() - own.keys()),
        "of another shape": [f"{name} {tuple(given[name].shape)} for {tuple(own[name].shape)}" for name in differing],
    }
    return "; ".join(
        f"{what}: {', '.join(names[:5])}{', …' * (len(names) > 5)}" for what, names in wrong.items() if names
    )


def apply_padded(network: Callable[[Tensor], Tensor], x: Tensor, factor: int) -> Tensor:
    """``network(x)`` of images (batch, channels, height, width) of any size, which it sees in multiples of `factor`."""
    height, width = x.shape[-2:]
    below, right = -height % factor, -width % factor
    if not (below or right):
        return network(x)
    top, left = below // 2, right // 2
    x = network(nn.functional.pad(x, (left, right - left, top, below - top)))
    return x[..., top : top + height, left : left + width]
