"""Conversion of published U-Net weights to diffusers' names: from ddpm-torch, ADM and latent diffusion.

ddpm-torch is tqch/ddpm-torch. Latent diffusion has ADM's names.
"""

import re
from typing import Any

from torch import Tensor

# parts of names: diffusers' to ADM's
_ADM = {
    "conv_in": "input_blocks.0.0", "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
    "class_embedding": "label_emb", "conv_norm_out": "out.0", "conv_out": "out.2",
    "norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1", "norm2": "out_layers.0",
    "conv2": "out_layers.3", "conv_shortcut": "skip_connection", "group_norm": "norm", "to_out.0": "proj_out",
    "to_q": "qkv", "to_k": "qkv", "to_v": "qkv",
}  # fmt: skip
# parts of names: diffusers' to ddpm-torch's
_DDPM = {
    "conv_in": "in_conv", "time_embedding.linear_1": "embed.0", "time_embedding.linear_2": "embed.2",
    "conv_norm_out": "out_conv.0", "conv_out": "out_conv.2", "time_emb_proj": "fc", "conv_shortcut": "skip",
    "group_norm": "norm", "to_out.0": "project_out", "to_q": "project_in", "to_k": "project_in", "to_v": "project_in",
}  # fmt: skip
# side, level, kind of module, its number, and the rest of a name
_DIFFUSERS_NAME = re.compile(
    r"(down|up|mid)_blocks?\.(?:(\d+)\.)?(resnets|attentions|(?:down|up)samplers)\.(\d+)\.(.+)"
)


def to_diffusers_names(model: dict[str, Tensor], weights: dict[str, Tensor], options: Any) -> dict[str, Tensor]:
    """Return published weights by diffusers' names, in the shapes of a model where possible.

    Unknown weights keep their names.

    Args:
        model: weights of the model, by diffusers' names.
        weights: weights of a published file; latent diffusion's may have the prefix ``model.diffusion_model.``.
        options: options of the model. Its `qkv` is the order of the rows of attention's qkv: by head, then q, k, v
            (legacy), or by q, k, v, then head.
    """
    prefix = "model.diffusion_model."
    prefixed = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    weights = prefixed or weights
    if "conv_in.weight" in weights:  # diffusers' names already
        return weights
    levels, blocks = len(options.widths), options.blocks
    attention_levels = set()
    for name in model:
        if name.startswith("down_blocks") and "attentions" in name:
            attention_levels.add(int(name.split(".")[1]))
    is_adm = "in_conv.weight" not in weights
    published_names = {name: _published_name(name, levels, blocks, attention_levels, is_adm) for name in model}
    known = set(published_names.values())
    converted = {name: value for name, value in weights.items() if name not in known}
    for name, current in model.items():
        value = weights.get(published_names[name])
        if value is None:
            continue
        projection = re.search(r"\.to_([qkv])\.", name)
        if projection and value.numel() == 3 * current.numel():
            value = _select_projection(value, current, "qkv".index(projection[1]), options)
        if value.numel() == current.numel():
            value = value.reshape(current.shape)
        converted[name] = value
    return converted


def _select_projection(qkv: Tensor, current: Tensor, number: int, options: Any) -> Tensor:
    """Return the query (0), key (1) or value (2) part of attention's joint weights, (heads, rows per head, ...).

    Args:
        qkv: joint weights of query, key and value, 3 times the size of `current`.
        current: weights of one projection of the model.
        number: number of the projection.
        options: options of the model, see `to_diffusers_names`.
    """
    heads = current.shape[0] // (options.head_channels or current.shape[0])
    if options.qkv == "legacy":
        return qkv.reshape(heads, 3, -1, *current.shape[1:]).select(1, number)
    return qkv.reshape(3, heads, -1, *current.shape[1:]).select(0, number)


def _published_name(name: str, levels: int, blocks: int, attention_levels: set[int], is_adm: bool) -> str:
    """Return the published name of a weight.

    Args:
        name: diffusers' name.
        levels: number of levels.
        blocks: residual blocks per level.
        attention_levels: levels with attention.
        is_adm: return ADM's name, not ddpm-torch's.
    """
    table = _ADM if is_adm else _DDPM
    parts = _DIFFUSERS_NAME.match(name)
    if parts is None:
        return _translate(name, table)
    side, kind, rest = parts[1], parts[3], parts[5]
    block_level, number = int(parts[2] or 0), int(parts[4])  # diffusers counts the blocks of `up` from the last level
    if side == "mid":
        middle = "middle_block" if is_adm else "middle"
        position = 1 if kind == "attentions" else 2 * number
        return f"{middle}.{position}.{_translate(rest, table)}"
    level = block_level if side == "down" else levels - 1 - block_level
    has_attention = level in attention_levels
    if is_adm:
        return _adm_name(side, block_level, kind, number, rest, blocks, has_attention)
    return _ddpm_torch_name(side, level, kind, number, rest, blocks, has_attention)


def _ddpm_torch_name(side: str, level: int, kind: str, number: int, rest: str, blocks: int, has_attention: bool) -> str:
    """Return ddpm-torch's name of a weight on side ``down`` or ``up``.

    A block with attention is a pair. Resampling is a pair with its convolution last.
    """
    if kind.endswith("samplers"):
        position = blocks + (side == "up")
        return f"{side}samples.level_{level}.{position}.1.{rest.removeprefix('conv.')}"
    pair = f".{int(kind == 'attentions')}" if has_attention else ""
    return f"{side}samples.level_{level}.{number}{pair}.{_translate(rest, _DDPM)}"


def _adm_name(side: str, block_level: int, kind: str, number: int, rest: str, blocks: int, has_attention: bool) -> str:
    """Return ADM's name of a weight on side ``down`` or ``up``.

    ADM numbers blocks through all levels. Resampling is a block on side ``down``, and the last part of a block on side
    ``up``.
    """
    is_resampling = kind.endswith("samplers")
    position = int(kind == "attentions")
    block = block_level * (blocks + 1) + (blocks if is_resampling else number)
    if side == "down":
        if rest.startswith("conv."):
            rest = f"op.{rest.removeprefix('conv.')}"
        return f"input_blocks.{1 + block}.{position}.{_translate(rest, _ADM)}"
    if is_resampling:
        position = 1 + has_attention
    return f"output_blocks.{block}.{position}.{_translate(rest, _ADM)}"


def _translate(name: str, table: dict[str, str]) -> str:
    """Return the name of a weight with the module's name translated and ``weight`` or ``bias`` kept."""
    module, _, kind = name.rpartition(".")
    return f"{table.get(module, module)}.{kind}"
