"""Backbones by name."""

from dataclasses import dataclass
from typing import Any

from kairos.options import option
from kairos.registry import Registry


def fill(options: Any, size: dict[str, Any]) -> None:
    """Give the fields that were left out the values of a published size."""
    for name, value in size.items():
        if getattr(options, name) is None:
            object.__setattr__(options, name, value)


@dataclass(frozen=True)
class UNetOptions:
    """The DDPM U-Net (diffusers UNet2DModel); the defaults are the CIFAR-10 model of 35.7 M parameters."""

    channels: int = option(128, "width of the first level", ge=8)
    multipliers: list[int] = option([1, 2, 2, 2], "width of each level, in multiples of channels")
    blocks: int = option(2, "residual blocks per level", ge=1)
    attention: list[int] = option([16], "resolutions (sides) with self-attention")
    dropout: float = option(0.1, "dropout in residual blocks", ge=0, lt=1)
    norm_groups: int = option(32, "groups of the group normalisation", ge=1)
    pad: bool = option(True, "pad sizes that the levels cannot halve; false: refuse them")
    init: str = option("ddpm", "weights to start from: DDPM's, or diffusers'", choices=("ddpm", "diffusers"))
    conditions: list[str] = option([], "conditions the model takes: of class, low_resolution")


DIT_SIZES = {
    f"{name}/{patch}": {"width": width, "depth": depth, "heads": heads, "patch": patch}
    for name, width, depth, heads in (("s", 384, 12, 6), ("b", 768, 12, 12), ("l", 1024, 24, 16), ("xl", 1152, 28, 16))
    for patch in (2, 4, 8)
}


@dataclass(frozen=True)
class DiTOptions:
    """A diffusion transformer as published (Peebles and Xie 2023): shared embedders, adaLN-zero."""

    size: str = option("s/2", "published size, which the fields below may change", choices=tuple(DIT_SIZES))
    patch: int = option(None, "side of a patch", ge=1)
    width: int = option(None, "hidden width", ge=8)
    depth: int = option(None, "transformer blocks", ge=1)
    heads: int = option(None, "attention heads", ge=1)
    mlp_ratio: float = option(4.0, "width of the MLP in multiples of the hidden width", gt=0)
    conditions: list[str] = option([], "conditions the model takes: of class, low_resolution")

    def __post_init__(self) -> None:
        fill(self, DIT_SIZES[self.size])
        if self.width % self.heads:
            raise ValueError(f"width: got {self.width}, allowed: a multiple of heads = {self.heads}")


MODELS = Registry("model")  # `takes`: the conditions that a backbone can be told of
MODELS.add(
    "unet", "kairos.models.unet:UNet", UNetOptions, "DDPM U-Net, opens in diffusers", takes=("class", "low_resolution")
)
MODELS.add(
    "dit",
    "kairos.models.dit:DiT",
    DiTOptions,
    "diffusion transformer in its published layout",
    takes=("class", "low_resolution"),
)
