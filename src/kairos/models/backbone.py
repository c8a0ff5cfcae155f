"""Base class of backbones: names of weights, image conditions as channels, null values of texts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kairos.shapes import EncodedTexts, Images, Inputs, Output, PatchPixels, Rows
from kairos_timesteps.errors import KairosError

Descriptions = dict[str, dict[str, Any]]


class NullText(nn.Module):
    """Null value of a text condition, which replaces the NaN of dropped texts.

    The `null` of the description selects it, by default ``empty``. ``empty`` is fixed: the empty text's state,
    ``description["empty"]``, or zeros until weights are loaded. ``random`` is fixed: normal vectors of norm about 1, as
    in SpeeD. ``learned`` starts from such vectors and is trained. The saved weights contain all three as ``value``.

    Args:
        description: description of the condition; `shape` is the shape of its value for one image.
        axes: number of axes that the model takes: 1, a vector; 2, a sequence of vectors.

    Raises:
        KairosError: the text has another number of axes.
    """

    def __init__(self, description: dict[str, Any], axes: int):
        super().__init__()
        shape = tuple(description["shape"])
        null = description.get("null", "empty")
        if len(shape) != axes:
            allowed = "one vector" if axes == 1 else "a sequence of vectors"
            raise KairosError(
                f"model.conditions: got text of shape {shape} per image, allowed with this model: {allowed}"
            )
        if null != "empty":
            value = torch.randn(shape) / shape[-1] ** 0.5  # each vector, of shape[-1] numbers, has a norm of about 1
        elif description.get("empty") is not None:
            value = torch.tensor(description["empty"], dtype=torch.float32)
        else:
            value = torch.zeros(shape)
        self.value: Tensor
        if null == "learned":
            self.value = nn.Parameter(value)
        else:
            self.register_buffer("value", value)

    def forward(self, values: EncodedTexts) -> EncodedTexts:
        """Return the texts (batch, *shape) with each NaN replaced by the number at its position in the null value."""
        return torch.where(values.isnan(), self.value, values)


class Backbone(nn.Module):
    """Base class of networks ``model(x, t, conditions)``.

    Args:
        options: options of the registry's class.
        shape: (channels, height, width) of x0.
        conditions: descriptions of the model's conditions.
        outputs: number of output channels.

    Attributes:
        inputs: number of input channels: channels of x0 and of all conditions that are images.
    """

    def __init__(self, options: Any, shape: tuple[int, int, int], conditions: Descriptions, outputs: int):
        super().__init__()
        self.options: Any = options
        self.shape = shape
        self.conditions = conditions
        self.outputs = outputs
        self._image_conditions = [name for name, description in conditions.items() if description["kind"] == "image"]
        condition_channels = sum(conditions[name]["shape"][0] for name in self._image_conditions)
        self.inputs = shape[0] + condition_channels

    def config(self) -> dict[str, Any]:
        """Return the content of config.json, which describes the weights for use outside kairos.

        It has the class's name, options, shape of x0, conditions without the empty text's state, and output channels.
        """
        conditions = {}
        for name, description in self.conditions.items():
            # the state of the empty text is large, and the weights contain it
            conditions[name] = {key: value for key, value in description.items() if key != "empty"}
        return {
            "_class_name": type(self).__name__,
            "options": self.options.plain_options(),
            "shape": list(self.shape),
            "conditions": conditions,
            "outputs": self.outputs,
        }

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors of parameters and buffers, not copies, by their published names."""
        return dict(self.state_dict())

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Replace all weights by those of a dictionary as `weights` returns; raise RuntimeError if it does not fit."""
        self.load_state_dict(weights)

    def convert_published(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a published file's weights by the names and in the shapes of `weights`.

        They are returned unchanged here; subclasses whose names or shapes differ from the published ones convert them.
        """
        return weights

    def load_published(self, weights: dict[str, Tensor]) -> None:
        """Load a published file's weights after `convert_published`; buffers that the file lacks keep their values.

        Raises:
            KairosError: weights are missing, unknown, or of another shape; the message contains their names.
        """
        current = self.weights()
        buffer_names = {name for name, _ in self.named_buffers()}
        current_buffers = {name: value for name, value in current.items() if name in buffer_names}
        loaded = current_buffers | self.convert_published(weights)
        if problem := describe_mismatch(current, loaded):
            raise KairosError(f"the weights do not fit {type(self).__name__} as configured; {problem}")
        self.load_weights(loaded)

    def with_image_conditions(self, x: Images, conditions: dict[str, Rows]) -> Inputs:
        """Return x with the model's image conditions as further channels, (batch, inputs, height, width).

        The conditions are in the model's order and converted to the type of x; they have the height and width of x. A
        model without image conditions returns x itself.
        """
        if not self._image_conditions:
            return x
        images = [conditions[name].to(x.dtype) for name in self._image_conditions]
        return torch.cat([x, *images], dim=1)

    def patch_grid(self, patch: int) -> tuple[int, int]:
        """Return the number of rows and of columns of patches with side `patch` in x0.

        Raises:
            KairosError: `patch` does not divide height and width.
        """
        _, height, width = self.shape
        if height % patch or width % patch:
            raise KairosError(f"model.patch: got {patch} with x0 of {height}x{width}, allowed: a divisor of both sides")
        return height // patch, width // patch

    def unpatchify(self, patches: PatchPixels, patch: int) -> Output:
        """Reshape patches (batch, tokens, patch * patch * outputs), row by row, to (batch, outputs, height, width).

        A patch contains its pixels row by row, and each pixel its channels.
        """
        _, height, width = self.shape
        batch, rows, columns = len(patches), height // patch, width // patch
        pixels = patches.view(batch, rows, columns, patch, patch, self.outputs)
        pixels = pixels.permute(0, 5, 1, 3, 2, 4)  # (batch, outputs, rows, patch, columns, patch)
        return pixels.reshape(batch, self.outputs, height, width)


def describe_mismatch(expected: dict[str, Tensor], loaded: dict[str, Tensor]) -> str:
    """Return a text that lists why weights `loaded` do not fit a model's weights `expected`; empty if they fit.

    It has at most five names of each kind of problem. An example is ``missing: a.bias, a.weight; of another shape:
    b.weight (3, 2) for (3, 4)``, where (3, 4) is expected.
    """
    other_shapes = []
    for name in sorted(expected.keys() & loaded.keys()):
        loaded_shape, expected_shape = tuple(loaded[name].shape), tuple(expected[name].shape)
        if loaded_shape != expected_shape:
            other_shapes.append(f"{name} {loaded_shape} for {expected_shape}")
    problems = {
        "missing": sorted(expected.keys() - loaded.keys()),
        "not of this model": sorted(loaded.keys() - expected.keys()),
        "of another shape": other_shapes,
    }
    descriptions = []
    for problem, names in problems.items():
        if names:
            more = ", …" if len(names) > 5 else ""
            descriptions.append(f"{problem}: {', '.join(names[:5])}{more}")
    return "; ".join(descriptions)


def apply_padded(network: Callable[[Inputs], Output], x: Inputs, factor: int) -> Output:
    """Return the output of a network that needs sides divisible by `factor`, for images x of any size.

    The images (batch, channels, height, width) are padded by zeros, and the output, of equal sides, is cropped to the
    sides of x. The padding is even on all sides, up to one row or column more below and to the right.
    """
    height, width = x.shape[-2:]
    extra_rows, extra_columns = -height % factor, -width % factor  # up to the next multiple of `factor`
    if extra_rows == 0 and extra_columns == 0:
        return network(x)
    top, left = extra_rows // 2, extra_columns // 2
    right, bottom = extra_columns - left, extra_rows - top
    output = network(nn.functional.pad(x, (left, right, top, bottom)))
    return output[..., top : top + height, left : left + width]
