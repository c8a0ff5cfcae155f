"""Published U-Nets' weights under diffusers' names: ddpm-torch's (tqch/ddpm-torch), ADM's and latent diffusion's."""

import re
from typing import Any

from torch import Tensor

_ADM = {
    "conv_in": "input_blocks.0.0", "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
    "class_embedding": "label_emb", "conv_norm_out": "out.0", "conv_out": "out.2",
    "norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1", "norm2": "out_layers.0",
    "conv2": "out_layers.3", "conv_shortcut": "skip_connection", "group_norm": "norm", "to_out.0": "proj_out",
    "to_q": "qkv", "to_k": "qkv", "to_v": "qkv",
}  # fmt: skip
_DDPM = {
    "conv_in": "in_conv", "time_embedding.linear_1": "embed.0", "time_embedding.linear_2": "embed.2",
    "conv_norm_out": "out_conv.0", "conv_out": "out_conv.2", "time_emb_proj": "fc", "conv_shortcut": "skip",
    "group_norm": "norm", "to_out.0": "project_out", "to_q": "project_in", "to_k": "project_in", "to_v": "project_in",
}  # fmt: skip
_DIFFUSERS_NAME = re.compile(
    r"(down|up|mid)_blocks?\.(?:(\d+)\.)?(resnets|attentions|(?:down|up)samplers)\.(\d+)\.(.+)"
)


def to_diffusers_names(own: dict[str, Tensor], weights: dict[str, Tensor], options: Any) -> dict[str, Tensor]:
    """Published weights under the names of `own`, in its shapes where they can be; what is unknown keeps its name.

    Args:
        own: the model's weights.
        weights: a published file's; latent diffusion's may stand behind ``model.diffusion_model.``.
        options: the model's; its `qkv` says whether attention's rows go head by head (legacy) or q, k, v by one.
    """
    prefix = "model.diffusion_model."
    within = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    weights = within or weights
    if "conv_in.weight" in weights:
        return weights
    levels, blocks = len(options.widths), options.blocks
    attended = {int(name.split(".")[1]) for name in own if name.startswith("down_blocks") and "attentions" in name}
    adm = "in_conv.weight" not in weights
    theirs = {name: _published_name(name, levels, blocks, attended, adm) for name in own}
    found = {name: value for name, value in weights.items() if name not in theirs.values()}
    for name, like in own.items():
        if (value := weights.get(theirs[name])) is None:
            continue
        if (part := re.search(r"\.to_([qkv])\.", name)) and value.numel() == 3 * like.numel():
            heads = like.shape[0] // (options.head_channels or like.shape[0])
            order = (heads, 3, -1) if options.qkv == "legacy" else (3, heads, -1)
            value = value.reshape(*order, *like.shape[1:]).select(order.index(3), "qkv".index(part[1]))
        found[name] = value.reshape(like.shape) if value.numel() == like.numel() else value
    return found


def _published_name(name: str, levels: int, blocks: int, attended: set[int], adm: bool) -> str:
    """The published name of a weight.

    ADM numbers its blocks through all levels; resampling is one of them, or the last part of one. ddpm-torch has a
    block with attention as a pair, and resampling as a pair with its convolution last.
    """
    table = _ADM if adm else _DDPM
    if not (found := _DIFFUSERS_NAME.match(name)):
        return _translate(name, table)
    side, level, kind, number, rest = found[1], int(found[2] or 0), found[3], int(found[4]), found[5]
    attention, resampling = int(kind == "attentions"), kind.endswith("samplers")
    if side == "mid":
        return f"{'middle_block' if adm else 'middle'}.{1 if attention else 2 * number}.{_translate(rest, table)}"
    place = level if side == "down" else levels - 1 - level
    if not adm:
        if resampling:
            return f"{side}samples.level_{place}.{blocks + (side == 'up')}.1.{rest.removeprefix('conv.')}"
        pair = f".{attention}" if place in attended else ""
        return f"{side}samples.level_{place}.{number}{pair}.{_translate(rest, table)}"
    block = level * (blocks + 1) + (blocks if resampling else number)
    if side == "down":
        rest = f"op.{rest.removeprefix('conv.')}" if rest.startswith("conv.") else rest
        return f"input_blocks.{1 + block}.{attention}.{_translate(rest, table)}"
    position = 1 + (place in attended) if resampling else attention
    return f"output_blocks.{block}.{position}.{_translate(rest, table)}"


def _translate(name: str, table: dict[str, str]) -> str:
    head, _, kind = name.rpartition(".")
    return f"{table.get(head, head)}.{kind}"
