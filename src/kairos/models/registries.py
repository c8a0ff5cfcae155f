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


def _sizes(*rows: tuple[Any, ...], **more: Any) -> dict[str, dict[str, Any]]:
    """Published sizes by name, of rows (name, width, depth, heads, patch)."""
    fields = ("width", "depth", "heads", "patch")
    return {row[0]: dict(zip(fields, row[1:], strict=True)) | more for row in rows}


_WIDTHS = (("s", 384, 12, 6), ("b", 768, 12, 12), ("l", 1024, 24, 16), ("xl", 1152, 28, 16))
DIT_SIZES = _sizes(*((f"{name}/{patch}", *row, patch) for name, *row in _WIDTHS for patch in (2, 4, 8)))
UVIT_SIZES = _sizes(
    ("s/2", 512, 12, 8, 2), ("s/2-deep", 512, 16, 8, 2), ("s/4", 512, 12, 8, 4), ("m/4", 768, 16, 12, 4),
    ("l/2", 1024, 20, 16, 2), convolution=True,
)  # fmt: skip
UVIT_SIZES |= _sizes(("h/2", 1152, 28, 16, 2), ("printed", 1152, 12, 16, 2), convolution=False)
VIT_SIZES = _sizes(("b/2", 768, 12, 12, 2), ("xl/2", 1152, 28, 16, 2), ("printed", 1152, 12, 16, 2))
_SIZE = "published size, which the fields below may change"


@dataclass(frozen=True)
class DiTOptions:
    """A diffusion transformer as published (Peebles and Xie 2023): shared embedders, adaLN-zero."""

    sizes = DIT_SIZES

    size: str = option("s/2", _SIZE, choices=tuple(DIT_SIZES))
    patch: int = option(None, "side of a patch", ge=1)
    width: int = option(None, "hidden width", ge=8)
    depth: int = option(None, "transformer blocks", ge=1)
    heads: int = option(None, "attention heads", ge=1)
    mlp_ratio: float = option(4.0, "width of the MLP in multiples of the hidden width", gt=0)
    conditions: list[str] = option([], "conditions the model takes: of class, text, low_resolution")

    def __post_init__(self) -> None:
        fill(self, self.sizes[self.size])
        if self.width % self.heads:
            raise ValueError(f"width: got {self.width}, allowed: a multiple of heads = {self.heads}")


@dataclass(frozen=True)
class MDTOptions(DiTOptions):
    """The masked diffusion transformer, version 1 (Gao et al. 2023)."""

    decoder_depth: int = option(2, "blocks, the last of depth, that see all patches in the masked pass too", ge=1)
    ratio: float = option(0.3, "share of the patches that the masked pass hides", ge=0, lt=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decoder_depth > self.depth:
            raise ValueError(f"decoder_depth: got {self.decoder_depth}, allowed: at most depth = {self.depth}")


@dataclass(frozen=True)
class UViTOptions(DiTOptions):
    """U-ViT (Bao et al. 2023): everything a token, long skips. Size printed: Kim et al. 2025, table 9."""

    sizes = UVIT_SIZES

    size: str = option("s/2", _SIZE, choices=tuple(UVIT_SIZES))
    depth: int = option(None, "half of it before, half behind one block in the middle", ge=2)
    convolution: bool = option(None, "end with a 3x3 convolution")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % 2:
            raise ValueError(f"width: got {self.width}, allowed: an even number")


@dataclass(frozen=True)
class ViTOptions(DiTOptions):
    """The plain vision transformer of Min-SNR (Hang et al. 2023); size printed: of depth 12."""

    sizes = VIT_SIZES

    size: str = option("b/2", _SIZE, choices=tuple(VIT_SIZES))
    conditions: list[str] = option([], "conditions the model takes: of class, low_resolution")
    timesteps: int = option(1000, "rows of the learned table of times: at least those of the process", ge=1)


MODELS = Registry("model")  # `takes`: the conditions a backbone can be told of; `text`: whether as tokens or pooled
MODELS.add(
    "unet", "kairos.models.unet:UNet", UNetOptions, "DDPM U-Net, opens in diffusers", takes=("class", "low_resolution")
)
_TAKES = ("class", "text", "low_resolution")
MODELS.add(
    "dit", "kairos.models.dit:DiT", DiTOptions, "diffusion transformer in its published layout",
    takes=_TAKES, text="pooled",
)  # fmt: skip
MODELS.add("mdt", "kairos.models.mdt:MDT", MDTOptions, "masked diffusion transformer", takes=_TAKES, text="pooled")
MODELS.add("uvit", "kairos.models.uvit:UViT", UViTOptions, "U-ViT, long skips", takes=_TAKES, text="tokens")
MODELS.add("vit", "kairos.models.vit:ViT", ViTOptions, "Min-SNR's vision transformer", takes=_TAKES[::2])
