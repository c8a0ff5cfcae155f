"""Backbones by name, with their options and published sizes.

An option whose default is None takes its value from the published size that option `size` selects.
"""

from dataclasses import fields
from functools import partial
from typing import Any, ClassVar

from kairos_timesteps.errors import demand
from kairos_timesteps.options import Options, dump, option, public_name
from kairos_timesteps.registry import Registry


def fill_unset_fields(options: Any, size: dict[str, Any]) -> None:
    """Set the fields that are None to the values of a published size."""
    for name, value in size.items():
        if getattr(options, name) is None:
            object.__setattr__(options, name, value)


_DDPM = {
    "channels": 128, "multipliers": [1, 2, 2, 2], "blocks": 2, "attention": [16], "dropout": 0.1, "norm_eps": 1e-6,
    "head_channels": 0, "embedding": "ddpm", "padding": 0, "scale_shift": False, "resample": "conv", "init": "ddpm",
    "null_class": True, "qkv": "new",
}  # fmt: skip
_LDM = {
    **_DDPM, "channels": 224, "multipliers": [1, 2, 3, 4], "attention": [32, 16, 8], "dropout": 0.0, "norm_eps": 1e-5,
    "head_channels": 32, "embedding": "adm", "padding": 1, "init": "adm", "qkv": "legacy",
}  # fmt: skip
_SPEED = {
    **_LDM, "channels": 128, "multipliers": [1, 2, 2, 1], "blocks": 3, "attention": [16], "head_channels": 0,
    "null_class": False,
}  # fmt: skip
_ADM = {
    **_LDM, "channels": 256, "multipliers": [1, 1, 2, 2, 4, 4], "head_channels": 64, "scale_shift": True,
    "resample": "resnet", "null_class": False,
}  # fmt: skip
UNET_SIZES: dict[str, dict[str, Any]] = {
    "ddpm": _DDPM,
    "speed": _SPEED,
    "celebahq": _LDM,
    "64": {**_ADM, "channels": 192, "multipliers": [1, 2, 3, 4], "blocks": 3, "dropout": 0.1, "qkv": "new"},
    "256": _ADM,
    "512": {**_ADM, "multipliers": [0.5, 1, 1, 2, 2, 4, 4]},
}


def check_multipliers(widths: list[int]) -> None:
    """Check that there are levels and that each has at least one channel.

    Raises:
        ConfigError: a level has no channels, or there is no level.
    """
    demand(min(widths, default=0) >= 1, "multipliers", f"those of widths {widths}", "a number > 0 for each level")


class UNetOptions(Options):
    """A U-Net as diffusers' UNet2DModel; by default DDPM's for CIFAR-10, of 35.7 M parameters.

    An option whose default is None takes its value from `size`.
    """

    size: str = option("ddpm", "published size, which the fields below may change", choices=("ddpm", "speed"))
    channels: int = option(None, "width of the first level", ge=8)
    multipliers: list[int | float] = option(None, "width of each level, in multiples of channels")
    blocks: int = option(None, "residual blocks per level", ge=1)
    attention: list[int] = option(None, "resolutions (sides) with self-attention")
    dropout: float = option(None, "dropout in residual blocks", ge=0, lt=1)
    norm_groups: int = option(32, "groups of the group normalisation", ge=1)
    norm_eps: float = option(None, "added to the variance in the group normalisation", gt=0)
    head_channels: int = option(None, "width of an attention head; 0: one head of the full width", ge=0)
    embedding: str = option(None, "order and spacing of the sinusoids of t", choices=("ddpm", "adm"))
    padding: int = option(None, "padding of strided convolutions; 0: right and below only", choices=(0, 1))
    scale_shift: bool = option(None, "t scales and shifts the normalised features; false: it is added")
    resample: str = option(None, "between levels: strided convolutions, or residual blocks", choices=("conv", "resnet"))
    pad: bool = option(True, "pad sizes that the levels cannot halve; false: reject them")
    init: str = option(
        None, "initialisation of the weights, by the code that it is from", choices=("ddpm", "adm", "diffusers")
    )
    null_class: bool = option(None, "add a row for no class to the table of classes; condition dropout needs it")
    qkv: str = option(None, "order of the rows of attention in published weights", choices=("new", "legacy"))
    conditions: list[str] = option([], "conditions the model takes: of class, low_resolution")

    def __post_init__(self) -> None:
        fill_unset_fields(self, UNET_SIZES[self.size])
        check_multipliers(self.widths)
        for name in ("norm_groups", "head_channels"):
            divisor = getattr(self, name)
            divides_all = divisor == 0 or all(width % divisor == 0 for width in self.widths)  # 0: the full width
            demand(divides_all, name, divisor, f"a divisor of every width of {self.widths}")

    @property
    def widths(self) -> list[int]:
        """Number of channels of each level."""
        return [round(self.channels * multiplier) for multiplier in self.multipliers]


class LdmOptions(UNetOptions):
    """The U-Net of latent diffusion on CelebA-HQ (Rombach et al. 2022), of 274 M parameters."""

    size: str = option("celebahq", "published size, which the fields below may change", choices=("celebahq",))


class AdmOptions(UNetOptions):
    """ADM's U-Net by the side of its images (Dhariwal and Nichol 2021)."""

    size: str = option("256", "published size, which the fields below may change", choices=("64", "256", "512"))


DDPMPP_SIZES: dict[str, dict[str, Any]] = {"ddpmpp": {"multipliers": [2, 2, 2]}, "vp": {"multipliers": [1, 2, 2, 2]}}


class DdpmppOptions(Options):
    """EDM's DDPM++ for CIFAR-10 (Karras et al. 2022), of 55.7 M parameters.

    An option whose default is None takes its value from `size`.
    """

    size: str = option("ddpmpp", "published size, which the fields below may change", choices=tuple(DDPMPP_SIZES))
    channels: int = option(128, "width of the first convolution", ge=8)
    multipliers: list[int] = option(None, "width of each level, in multiples of channels")
    blocks: int = option(4, "residual blocks per level", ge=1)
    attention: list[int] = option([16], "resolutions (sides) with self-attention")
    dropout: float = option(0.13, "dropout in residual blocks", ge=0, lt=1)
    augment: int = option(9, "labels of training.augment as condition; 0: none", choices=(9, 0))
    conditions: list[str] = option([], "conditions the model takes: of class")

    def __post_init__(self) -> None:
        fill_unset_fields(self, DDPMPP_SIZES[self.size])
        check_multipliers(self.multipliers)
        # the width of the time embedding must be even, and a normalisation's group has at least 4 channels
        demand(self.channels % 4 == 0, "channels", self.channels, "a multiple of 4")


def _sizes(*rows: tuple[str, int, int, int, int], **shared: Any) -> dict[str, dict[str, Any]]:
    """Return published sizes of transformers by name.

    Args:
        rows: name, width, depth, heads and patch of each size.
        shared: further options, equal for all sizes.
    """
    return {
        name: {"width": width, "depth": depth, "heads": heads, "patch": patch, **shared}
        for name, width, depth, heads, patch in rows
    }


_DIT_WIDTHS = (("s", 384, 12, 6), ("b", 768, 12, 12), ("l", 1024, 24, 16), ("xl", 1152, 28, 16))
DIT_SIZES: dict[str, dict[str, Any]] = {}
for _name, _width, _depth, _heads in _DIT_WIDTHS:
    DIT_SIZES |= _sizes(*((f"{_name}/{_patch}", _width, _depth, _heads, _patch) for _patch in (2, 4, 8)))
UVIT_SIZES = _sizes(
    ("s/2", 512, 12, 8, 2), ("s/2-deep", 512, 16, 8, 2), ("s/4", 512, 12, 8, 4), ("m/4", 768, 16, 12, 4),
    ("l/2", 1024, 20, 16, 2), convolution=True,
)  # fmt: skip
UVIT_SIZES |= _sizes(("h/2", 1152, 28, 16, 2), ("printed", 1152, 12, 16, 2), convolution=False)
VIT_SIZES = _sizes(("b/2", 768, 12, 12, 2), ("xl/2", 1152, 28, 16, 2), ("printed", 1152, 12, 16, 2))
_SIZE = "published size, which the fields below may change"


class TransformerOptions(Options):
    """Options that all transformers share; each transformer's own options are in its subclass.

    An option whose default is None takes its value from `size`.

    Attributes:
        sizes: published sizes by name; subclasses set them, and `size` selects one.
    """

    sizes: ClassVar[dict[str, dict[str, Any]]]

    size: str = option("s/2", _SIZE)
    patch: int = option(None, "side of a patch", ge=1)
    width: int = option(None, "hidden width", ge=8)
    depth: int = option(None, "transformer blocks", ge=1)
    heads: int = option(None, "attention heads", ge=1)
    mlp_ratio: float = option(4.0, "width of the MLP in multiples of the hidden width", gt=0)
    conditions: list[str] = option([], "conditions the model takes: of class, text, low_resolution")

    def __post_init__(self) -> None:
        fill_unset_fields(self, self.sizes[self.size])
        demand(self.width % self.heads == 0, "width", self.width, f"a multiple of heads = {self.heads}")


class DiTOptions(TransformerOptions):
    """A diffusion transformer as published (Peebles and Xie 2023): shared embedders, adaLN-zero."""

    sizes = DIT_SIZES

    size: str = option("s/2", _SIZE, choices=tuple(DIT_SIZES))


class MDTOptions(TransformerOptions):
    """The masked diffusion transformer, version 1 (Gao et al. 2023)."""

    sizes = DIT_SIZES

    size: str = option("s/2", _SIZE, choices=tuple(DIT_SIZES))
    decoder_depth: int = option(2, "last blocks, which process all patches in the masked pass too", ge=1)
    ratio: float = option(0.3, "share of the patches that the masked pass hides", ge=0, lt=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        demand(self.decoder_depth <= self.depth, "decoder_depth", self.decoder_depth, f"at most depth = {self.depth}")


class UViTOptions(TransformerOptions):
    """U-ViT (Bao et al. 2023): patches, time and conditions are tokens, and long skips connect blocks.

    Size ``printed`` is the one in Kim et al. 2025, table 9.
    """

    sizes = UVIT_SIZES

    size: str = option("s/2", _SIZE, choices=tuple(UVIT_SIZES))
    depth: int = option(None, "blocks, half of them before and half after one in the middle", ge=2)
    convolution: bool = option(None, "end with a 3x3 convolution")

    def __post_init__(self) -> None:
        super().__post_init__()
        demand(self.width % 2 == 0, "width", self.width, "an even number")


class ViTOptions(TransformerOptions):
    """The plain vision transformer of Min-SNR (Hang et al. 2023); size ``printed`` has depth 12."""

    sizes = VIT_SIZES

    size: str = option("b/2", _SIZE, choices=tuple(VIT_SIZES))
    conditions: list[str] = option([], "conditions the model takes: of class, low_resolution")
    timesteps: int = option(1000, "rows of the learned table of times: at least those of the process", ge=1)


# Facts of a backbone: `takes`: its conditions; `text`: form of a text, tokens or pooled; `masks`: it can hide tokens
MODELS = Registry("model")
_WITHOUT_TEXT = ("class", "low_resolution")
_WITH_TEXT = ("class", "text", "low_resolution")
_unet = partial(MODELS.add, code="kairos.models.unet:UNet", takes=_WITHOUT_TEXT)
_unet("unet", options=UNetOptions, help="DDPM U-Net, opens in diffusers")
_unet("ldm_unet", options=LdmOptions, help="latent diffusion's U-Net")
_unet("adm", options=AdmOptions, help="ADM's U-Net")
MODELS.add("ddpmpp", "kairos.models.ddpmpp:DDPMpp", DdpmppOptions, "EDM's DDPM++", takes=("class",))
_dit = partial(MODELS.add, takes=_WITH_TEXT, text="pooled")
_dit("dit", "kairos.models.dit:DiT", DiTOptions, "diffusion transformer in its published layout")
_dit("mdt", "kairos.models.mdt:MDT", MDTOptions, "masked diffusion transformer", masks=True)
MODELS.add("uvit", "kairos.models.uvit:UViT", UViTOptions, "U-ViT, long skips", takes=_WITH_TEXT, text="tokens")
MODELS.add("vit", "kairos.models.vit:ViT", ViTOptions, "Min-SNR's vision transformer", takes=_WITHOUT_TEXT)


def omit_overridden_size(model: dict[str, Any]) -> dict[str, Any]:
    """Return a `model` section without its published `size` if another option overrides one of the size's fields."""
    if "size" not in model:
        return model
    options = MODELS.entry(model["name"]).options
    published = dump(MODELS.parse(model["name"], {"size": model["size"]}, "model"))
    size_fields = [public_name(field) for field in fields(options) if field.default is None]  # taken from the size
    is_overridden = any(model.get(name) != published[name] for name in size_fields)
    if not is_overridden:
        return model
    return {name: value for name, value in model.items() if name != "size"}
