"""Conversion of published U-Net weights to diffusers' names: from ddpm-torch, ADM and latent diffusion.

ddpm-torch is tqch/ddpm-torch. Latent diffusion has ADM's names.
"""

import re
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# names within a block, or outside of all blocks: from diffusers to ADM
_ADM_NAMES = {
    "conv_in": "input_blocks.0.0", "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
    "class_embedding": "label_emb", "conv_norm_out": "out.0", "conv_out": "out.2",
    "norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1", "norm2": "out_layers.0",
    "conv2": "out_layers.3", "conv_shortcut": "skip_connection", "group_norm": "norm", "to_out.0": "proj_out",
    "to_q": "qkv", "to_k": "qkv", "to_v": "qkv",
}  # fmt: skip
# names within a block, or outside of all blocks: from diffusers to ddpm-torch
_DDPM_TORCH_NAMES = {
    "conv_in": "in_conv", "time_embedding.linear_1": "embed.0", "time_embedding.linear_2": "embed.2",
    "conv_norm_out": "out_conv.0", "conv_out": "out_conv.2", "time_emb_proj": "fc", "conv_shortcut": "skip",
    "group_norm": "norm", "to_out.0": "project_out", "to_q": "project_in", "to_k": "project_in", "to_v": "project_in",
}  # fmt: skip
# such as down_blocks.2.attentions.1.to_q.weight or mid_block.resnets.0.norm1.bias, see `_BlockWeight`
_BLOCK_WEIGHT = re.compile(
    r"(?P<side>down|up|mid)_blocks?\.(?:(?P<block>\d+)\.)?"
    r"(?P<modules>resnets|attentions|downsamplers|upsamplers)\.(?P<index>\d+)\.(?P<parameter>.+)"
)
_LATENT_DIFFUSION_PREFIX = "model.diffusion_model."


@dataclass(frozen=True)
class _BlockWeight:
    """Weight in a block of diffusers' U-Net, parsed from its name, such as ``down_blocks.2.attentions.1.to_q.bias``.

    Attributes:
        side: ``down``, ``mid`` or ``up``; in the example ``down``.
        block: index of the block on its side, in the example 2. Blocks of ``up`` begin at the lowest resolution.
        modules: ``resnets``, ``attentions``, ``downsamplers`` or ``upsamplers``; in the example
            ``attentions``.
        index: index among these modules of the block, in the example 1.
        parameter: name within the module, in the example ``to_q.bias``.
    """

    side: str
    block: int
    modules: str
    index: int
    parameter: str

    @staticmethod
    def parse(name: str) -> "_BlockWeight | None":
        """Parse a name of diffusers; return None for a weight outside of all blocks, such as ``conv_in.weight``."""
        match = _BLOCK_WEIGHT.match(name)
        if match is None:
            return None
        block = int(match["block"] or 0)  # there is one middle block, without an index
        return _BlockWeight(match["side"], block, match["modules"], int(match["index"]), match["parameter"])

    @property
    def is_attention(self) -> bool:
        """True for a weight of attention."""
        return self.modules == "attentions"

    @property
    def is_resampling(self) -> bool:
        """True for a weight of a change of resolution, at the end of a block."""
        return self.modules in ("downsamplers", "upsamplers")


@dataclass(frozen=True)
class _Layout:
    """Numbers that decide the published names of the weights of a U-Net.

    Attributes:
        levels: number of levels.
        blocks: residual blocks per level; side ``up`` has one more.
        attention_levels: levels with attention; 0 is the full resolution.
    """

    levels: int
    blocks: int
    attention_levels: frozenset[int]

    def level_of(self, weight: _BlockWeight) -> int:
        """Return the level of a weight on side ``down`` or ``up``, where 0 is the full resolution."""
        return weight.block if weight.side == "down" else self.levels - 1 - weight.block

    def has_attention(self, weight: _BlockWeight) -> bool:
        """Return True if the level of a weight has attention."""
        return self.level_of(weight) in self.attention_levels


def to_diffusers_names(model: dict[str, Tensor], weights: dict[str, Tensor], options: Any) -> dict[str, Tensor]:
    """Return published weights by diffusers' names, reshaped to the model's weights where the sizes are equal.

    Attention's joint qkv weights are split into q, k and v. Unknown weights keep their names. Weights of the model that
    the file lacks are missing in the result. A file with diffusers' names is returned as it is.

    Args:
        model: weights of the model, by diffusers' names.
        weights: weights of a published file. Latent diffusion's weights may have the prefix ``model.diffusion_model.``;
            then weights without the prefix are dropped.
        options: options of the model. Its `qkv` is the order of the rows of attention's qkv: by head, then q, k, v
            (legacy), or by q, k, v, then head.
    """
    weights = _remove_latent_diffusion_prefix(weights)
    if "conv_in.weight" in weights:  # diffusers' names already
        return weights
    is_ddpm_torch = "in_conv.weight" in weights  # else ADM or latent diffusion
    published_name = _ddpm_torch_name if is_ddpm_torch else _adm_name
    layout = _Layout(len(options.widths), options.blocks, _find_attention_levels(model))
    published_names = {name: published_name(name, layout) for name in model}

    # weights that no weight of the model comes from keep their names
    recognised = set(published_names.values())
    converted = {name: value for name, value in weights.items() if name not in recognised}
    for name, current in model.items():  # `current` is the model's weight, which has the shape to return
        if published_names[name] not in weights:
            continue
        value = weights[published_names[name]]
        projection = re.search(r"\.to_([qkv])\.", name)  # such as .to_q.
        if projection and value.numel() == 3 * current.numel():  # q, k and v are one weight in the file
            number = "qkv".index(projection[1])  # 0, 1 or 2
            value = _select_projection(value, current, number, options)
        # a convolution with kernel 1 and a linear layer have different shapes for equal numbers
        if value.numel() == current.numel():
            value = value.reshape(current.shape)
        converted[name] = value
    return converted


def _remove_latent_diffusion_prefix(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with prefix ``model.diffusion_model.`` by their names without it; all weights if none has it.

    The other weights belong to latent diffusion's other networks.
    """
    without_prefix = {}
    for name, value in weights.items():
        if name.startswith(_LATENT_DIFFUSION_PREFIX):
            without_prefix[name.removeprefix(_LATENT_DIFFUSION_PREFIX)] = value
    return without_prefix or weights


def _find_attention_levels(model: dict[str, Tensor]) -> frozenset[int]:
    """Return the levels with attention of a model, whose weights have diffusers' names; 0 is the full resolution."""
    levels = set()
    for name in model:
        weight = _BlockWeight.parse(name)
        if weight is not None and weight.side == "down" and weight.is_attention:
            levels.add(weight.block)
    return frozenset(levels)


def _select_projection(qkv: Tensor, current: Tensor, projection: int, options: Any) -> Tensor:
    """Return the query (0), key (1) or value (2) rows of attention's joint weights `qkv`, (heads, rows per head, ...).

    `current` are the model's weights of this projection; the caller reshapes the result to their shape. Option `qkv` is
    the order of the joint rows, see `to_diffusers_names`.
    """
    width, *columns = current.shape  # columns: empty for a bias
    heads = width // (options.head_channels or width)  # 0: one head of the full width
    # q, k and v are on axis 1 of the legacy order, and on axis 0 of the new order
    if options.qkv == "legacy":
        return qkv.reshape(heads, 3, -1, *columns).select(1, projection)
    return qkv.reshape(3, heads, -1, *columns).select(0, projection)


def _ddpm_torch_name(name: str, layout: _Layout) -> str:
    """Return ddpm-torch's name of a weight from diffusers' name.

    Examples with 4 levels, 2 blocks and attention on level 1:

    * ``down_blocks.0.resnets.1.conv1.bias`` is ``downsamples.level_0.1.conv1.bias``;
    * ``down_blocks.1.resnets.0.conv1.bias`` is ``downsamples.level_1.0.0.conv1.bias``;
    * ``down_blocks.1.attentions.0.to_q.bias`` is ``downsamples.level_1.0.1.project_in.bias``;
    * ``down_blocks.0.downsamplers.0.conv.bias`` is ``downsamples.level_0.2.1.bias``;
    * ``up_blocks.0.upsamplers.0.conv.bias`` is ``upsamples.level_3.3.1.bias``;
    * ``mid_block.resnets.1.conv1.bias`` is ``middle.2.conv1.bias``.
    """
    weight = _BlockWeight.parse(name)
    if weight is None:
        return _translate(name, _DDPM_TORCH_NAMES)
    parameter = _translate(weight.parameter, _DDPM_TORCH_NAMES)
    if weight.side == "mid":
        return f"middle.{_middle_index(weight)}.{parameter}"
    level = f"{weight.side}samples.level_{layout.level_of(weight)}"  # downsamples or upsamples
    if weight.is_resampling:
        # a change of resolution follows the blocks of a level, as a pair of which the second module is the convolution
        blocks_before = layout.blocks if weight.side == "down" else layout.blocks + 1
        return f"{level}.{blocks_before}.1.{weight.parameter.removeprefix('conv.')}"
    if not layout.has_attention(weight):
        return f"{level}.{weight.index}.{parameter}"
    position_in_pair = 1 if weight.is_attention else 0  # a block with attention is a pair of modules
    return f"{level}.{weight.index}.{position_in_pair}.{parameter}"


def _adm_name(name: str, layout: _Layout) -> str:
    """Return ADM's name of a weight from diffusers' name.

    ADM numbers the blocks through all levels of a side, and ``input_blocks.0`` is the first convolution. Examples with
    4 levels, 2 blocks and attention on level 1:

    * ``down_blocks.1.resnets.0.conv1.bias`` is ``input_blocks.4.0.in_layers.2.bias``;
    * ``down_blocks.1.attentions.0.to_q.bias`` is ``input_blocks.4.1.qkv.bias``;
    * ``down_blocks.0.downsamplers.0.conv.bias`` is ``input_blocks.3.0.op.bias``;
    * ``up_blocks.2.upsamplers.0.conv.bias`` is ``output_blocks.8.2.conv.bias``;
    * ``mid_block.resnets.1.conv1.bias`` is ``middle_block.2.in_layers.2.bias``.
    """
    weight = _BlockWeight.parse(name)
    if weight is None:
        return _translate(name, _ADM_NAMES)
    if weight.side == "mid":
        return f"middle_block.{_middle_index(weight)}.{_translate(weight.parameter, _ADM_NAMES)}"
    # a level has blocks + 1 of ADM's blocks: the last is the change of resolution (down) or contains it (up)
    index_in_level = layout.blocks if weight.is_resampling else weight.index
    block = weight.block * (layout.blocks + 1) + index_in_level
    module = 1 if weight.is_attention else 0
    if weight.side == "up":
        if weight.is_resampling:  # after the residual block and, if there is one, the attention
            module = 2 if layout.has_attention(weight) else 1
        return f"output_blocks.{block}.{module}.{_translate(weight.parameter, _ADM_NAMES)}"
    parameter = weight.parameter
    if parameter.startswith("conv."):  # the strided convolution of a downsampler
        parameter = f"op.{parameter.removeprefix('conv.')}"
    return f"input_blocks.{1 + block}.{module}.{_translate(parameter, _ADM_NAMES)}"


def _middle_index(weight: _BlockWeight) -> int:
    """Return the index of a module in the published middle block: residual block, attention, residual block."""
    return 1 if weight.is_attention else 2 * weight.index


def _translate(name: str, module_names: dict[str, str]) -> str:
    """Return a weight's name with its module, the part before the last dot, renamed if `module_names` contains it."""
    module, _, parameter = name.rpartition(".")
    return f"{module_names.get(module, module)}.{parameter}"
