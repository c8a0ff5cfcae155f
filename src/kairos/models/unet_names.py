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
_PLACE = re.compile(r"(down|up|mid)_blocks?\.(?:(\d+)\.)?(resnets|attentions|(?:down|up)samplers)\.(\d+)\.(.+)")


def renamed(own: dict[str, Tensor], weights: dict[str, Tensor], options: Any) -> dict[str, Tensor]:
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
    place = _ddpm if "in_conv.weight" in weights else _adm
    theirs = {name: place(name, levels, blocks, attended) for name in own}
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


def _adm(name: str, levels: int, blocks: int, attended: set[int]) -> str:
    """ADM's name of a weight: blocks are numbered through all levels, resampling is one of them or its last part."""
    if not (found := _PLACE.match(name)):
        return _translated(name, _ADM)
    side, level, kind, number, rest = found[1], int(found[2] or 0), found[3], int(found[4]), found[5]
    if side == "mid":
        return f"middle_block.{2 * number if kind == 'resnets' else 1}.{_translated(rest, _ADM)}"
    if side == "down":
        block = 1 + level * (blocks + 1) + (blocks if kind == "downsamplers" else number)
        where = f"input_blocks.{block}.{int(kind == 'attentions')}"
        rest = rest.replace("conv.", "op.") if rest.startswith("conv.") else rest
    else:
        block = level * (blocks + 1) + (blocks if kind == "upsamplers" else number)
        position = 1 + (levels - 1 - level in attended) if kind == "upsamplers" else int(kind == "attentions")
        where = f"output_blocks.{block}.{position}"
    return f"{where}.{_translated(rest, _ADM)}"


def _ddpm(name: str, levels: int, blocks: int, attended: set[int]) -> str:
    """ddpm-torch's name of a weight: a block with attention is a pair, resampling a pair with its convolution last."""
    if not (found := _PLACE.match(name)):
        return _translated(name, _DDPM)
    side, level, kind, number, rest = found[1], int(found[2] or 0), found[3], int(found[4]), found[5]
    if side == "mid":
        return f"middle.{2 * number if kind == 'resnets' else 1}.{_translated(rest, _DDPM)}"
    level = level if side == "down" else levels - 1 - level
    if kind.endswith("samplers"):
        last = blocks + (side == "up")
        return f"{side}samples.level_{level}.{last}.1.{rest.removeprefix('conv.')}"
    pair = f".{int(kind == 'attentions')}" if level in attended else ""
    return f"{side}samples.level_{level}.{number}{pair}.{_translated(rest, _DDPM)}"


def _translated(name: str, table: dict[str, str]) -> str:
    head, _, kind = name.rpartition(".")
    return f"{table.get(head, head)}.{kind}"
