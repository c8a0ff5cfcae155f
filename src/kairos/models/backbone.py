"""What our own backbones share: their weights' names, images told by channels."""

from typing import Any

import torch
from torch import Tensor, nn

from kairos.errors import KairosError
from kairos.options import dump

Descriptions = dict[str, dict[str, Any]]


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
        """What config.json holds, for those who open the file elsewhere."""
        facts = {"shape": list(self.shape), "conditions": self.conditions, "outputs": self.outputs}
        return {"_class_name": type(self).__name__, "options": dump(self.options), **facts}

    def weights(self) -> dict[str, Tensor]:
        """Parameters and buffers under their published names."""
        return dict(self.state_dict())

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Load what `weights` gave."""
        self.load_state_dict(weights)

    def published(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """A published file's weights under our names."""
        return weights

    def joined(self, x: Tensor, conditions: dict[str, Tensor]) -> Tensor:
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

    def unpatched(self, patches: Tensor, patch: int) -> Tensor:
        """Patches (batch, tokens, patch * patch * outputs), row by row, as (batch, outputs, height, width)."""
        _, height, width = self.shape
        values = patches.view(len(patches), height // patch, width // patch, patch, patch, self.outputs)
        return values.permute(0, 5, 1, 3, 2, 4).reshape(len(patches), self.outputs, height, width)
