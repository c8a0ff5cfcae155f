"""Backbones by name, with their options and published sizes."""

from typing import Any, ClassVar, Literal

from pydantic import model_validator

from kairos.components import ComponentOptions, Components, spellings
from kairos.section import field
from kairos_timesteps.errors import demand


class BackboneOptions(ComponentOptions):
    """Base class of the options of a backbone.

    Attributes:
        takes: conditions that the backbone can be conditioned on; None: any.
        text_form: form in which the backbone takes a text; None: it takes none, or any form.
        masks: True if the backbone can hide tokens, which masked losses need.
    """

    takes: ClassVar[tuple[str, ...] | None] = None
    text_form: ClassVar[Literal["tokens", "pooled"] | None] = None
    masks: ClassVar[bool] = False

    conditions: list[str] = field([], "conditions the model takes")


BACKBONES: Components[BackboneOptions] = Components("model")
_CONDITIONS_WITHOUT_TEXT = ("class", "low_resolution")
_CONDITIONS_WITH_TEXT = ("class", "text", "low_resolution")
_SIZE_HELP = "published size, which the fields below may change"


class SizedOptions(BackboneOptions):
    """Base class of a backbone with published sizes.

    An option whose default is None takes its value from the published size that option `size` selects.

    Attributes:
        sizes: options of each published size, by its name.
    """

    sizes: ClassVar[dict[str, dict[str, Any]]]

    size: str = field(..., _SIZE_HELP)

    @model_validator(mode="before")
    @classmethod
    def _fill_from_size(cls, values: Any) -> Any:
        """Return the options, with values of the published size where they are missing or None; `size` becomes a text.

        Raises:
            ValueRejected: there is no such size.
        """
        size = str(values.get("size", cls.model_fields["size"].default))  # for YAML, the name 64 is a number
        demand(size in cls.sizes, "size", size, f"one of {', '.join(cls.sizes)}")
        published = {name: value for name, value in cls.sizes[size].items() if values.get(name) is None}
        return {**values, "size": size, **published}


def _declare_size(default: str, sizes: Any) -> Any:
    """Return the declaration of option `size`, whose JSON schema allows only the names of the published sizes.

    Args:
        default: size of an experiment file that sets none.
        sizes: published sizes, by name.
    """

    def allow_published_sizes(schema: dict[str, Any]) -> None:
        del schema["type"]  # a size may be a number in YAML
        schema["enum"] = spellings(sizes)

    return field(default, _SIZE_HELP, json_schema_extra=allow_published_sizes)


# options of the published U-Nets, of which the later ones are variants of the earlier ones
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
    """Raise ConfigError if `widths`, with a number for each level, is empty or contains a number below 1.

    The numbers are channels, or multiples of channels.
    """
    demand(min(widths, default=0) >= 1, "multipliers", f"widths {widths}", "at least 1 channel for each level")


@BACKBONES.register
class UNetOptions(SizedOptions):
    """diffusers' UNet2DModel, which diffusers opens; by default DDPM's for CIFAR-10, of 35.7 M parameters."""

    code: ClassVar[str] = "kairos.models.unet:UNet"
    takes: ClassVar[tuple[str, ...] | None] = _CONDITIONS_WITHOUT_TEXT
    sizes: ClassVar[dict[str, dict[str, Any]]] = {name: UNET_SIZES[name] for name in ("ddpm", "speed")}

    name: str = "unet"
    size: str = _declare_size("ddpm", sizes)
    channels: int = field(None, "width of the first level", ge=8)
    multipliers: list[int | float] = field(None, "width of each level, in multiples of channels")
    blocks: int = field(None, "residual blocks per level", ge=1)
    attention: list[int] = field(None, "resolutions (sides) with self-attention")
    dropout: float = field(None, "dropout in residual blocks", ge=0, lt=1)
    norm_groups: int = field(32, "groups of the group normalisation", ge=1)
    norm_eps: float = field(None, "added to the variance in the group normalisation", gt=0)
    head_channels: int = field(None, "width of an attention head; 0: one head of the full width", ge=0)
    embedding: Literal["ddpm", "adm"] = field(None, "order and spacing of the sinusoids of t")
    padding: Literal[0, 1] = field(None, "padding of strided convolutions; 0: right and below only")
    scale_shift: bool = field(None, "t scales and shifts the normalised features; false: it is added")
    resample: Literal["conv", "resnet"] = field(None, "between levels: strided convolutions, or residual blocks")
    pad: bool = field(True, "pad sizes that the levels cannot halve; false: reject them")
    init: Literal["ddpm", "adm", "diffusers"] = field(
        None, "initialisation of the weights, by the code that it is from"
    )
    null_class: bool = field(None, "add a row for no class to the table of classes; condition dropout needs it")
    qkv: Literal["new", "legacy"] = field(None, "order of the rows of the q, k, v projection in published weights")
    conditions: list[str] = field([], "conditions the model takes: of class, low_resolution")

    def model_post_init(self, context: Any) -> None:
        """Check that each level has channels, whose number is divisible by `norm_groups` and `head_channels`.

        Raise ConfigError if not. A `head_channels` of 0 fits any width.
        """
        check_multipliers(self.widths)
        for name in ("norm_groups", "head_channels"):
            divisor = getattr(self, name)
            divides_all = divisor == 0 or all(width % divisor == 0 for width in self.widths)  # 0: the full width
            demand(divides_all, name, divisor, f"a divisor of every width of {self.widths}")

    @property
    def widths(self) -> list[int]:
        """Number of channels of each level: `channels` times its multiplier, rounded to a whole number."""
        return [round(self.channels * multiplier) for multiplier in self.multipliers]


@BACKBONES.register
class LdmOptions(UNetOptions):
    """The U-Net of latent diffusion on CelebA-HQ (Rombach et al. 2022), of 274 M parameters."""

    sizes: ClassVar[dict[str, dict[str, Any]]] = {"celebahq": UNET_SIZES["celebahq"]}

    name: str = "ldm_unet"
    size: str = _declare_size("celebahq", sizes)


@BACKBONES.register
class AdmOptions(UNetOptions):
    """ADM's U-Net by the side of its images (Dhariwal and Nichol 2021)."""

    sizes: ClassVar[dict[str, dict[str, Any]]] = {name: UNET_SIZES[name] for name in ("64", "256", "512")}

    name: str = "adm"
    size: str = _declare_size("256", sizes)


DDPMPP_SIZES: dict[str, dict[str, Any]] = {"ddpmpp": {"multipliers": [2, 2, 2]}, "vp": {"multipliers": [1, 2, 2, 2]}}


@BACKBONES.register
class DdpmppOptions(SizedOptions):
    """EDM's DDPM++ for CIFAR-10 (Karras et al. 2022), of 55.7 M parameters."""

    code: ClassVar[str] = "kairos.models.ddpmpp:DDPMpp"
    takes: ClassVar[tuple[str, ...] | None] = ("class",)
    sizes: ClassVar[dict[str, dict[str, Any]]] = DDPMPP_SIZES

    name: str = "ddpmpp"
    size: str = _declare_size("ddpmpp", sizes)
    channels: int = field(128, "width of the first convolution", ge=8)
    multipliers: list[int] = field(None, "width of each level, in multiples of channels")
    blocks: int = field(4, "residual blocks per level", ge=1)
    attention: list[int] = field([16], "resolutions (sides) with self-attention")
    dropout: float = field(0.13, "dropout in residual blocks", ge=0, lt=1)
    augment: Literal[9, 0] = field(9, "labels of training.augment as condition; 0: none")
    conditions: list[str] = field([], "conditions the model takes: of class")

    def model_post_init(self, context: Any) -> None:
        """Check that each level has channels, and that `channels` is a multiple of 4; raise ConfigError otherwise."""
        check_multipliers(self.multipliers)
        # the width of the time embedding must be even, and a normalisation's group has at least 4 channels
        demand(self.channels % 4 == 0, "channels", self.channels, "a multiple of 4")


def _list_sizes(*rows: tuple[str, int, int, int, int], **shared: Any) -> dict[str, dict[str, Any]]:
    """Return options of published transformer sizes by name, from rows of name, width, depth, heads and patch.

    The options `shared` are added to each size.
    """
    return {
        name: {"width": width, "depth": depth, "heads": heads, "patch": patch, **shared}
        for name, width, depth, heads, patch in rows
    }


_DIT_WIDTHS = (("s", 384, 12, 6), ("b", 768, 12, 12), ("l", 1024, 24, 16), ("xl", 1152, 28, 16))
DIT_SIZES: dict[str, dict[str, Any]] = {}
for _name, _width, _depth, _heads in _DIT_WIDTHS:
    DIT_SIZES |= _list_sizes(*((f"{_name}/{_patch}", _width, _depth, _heads, _patch) for _patch in (2, 4, 8)))
UVIT_SIZES = _list_sizes(
    ("s/2", 512, 12, 8, 2), ("s/2-deep", 512, 16, 8, 2), ("s/4", 512, 12, 8, 4), ("m/4", 768, 16, 12, 4),
    ("l/2", 1024, 20, 16, 2), convolution=True,
)  # fmt: skip
UVIT_SIZES |= _list_sizes(("h/2", 1152, 28, 16, 2), ("printed", 1152, 12, 16, 2), convolution=False)
VIT_SIZES = _list_sizes(("b/2", 768, 12, 12, 2), ("xl/2", 1152, 28, 16, 2), ("printed", 1152, 12, 16, 2))


class TransformerOptions(SizedOptions):
    """Options that all transformers share; each transformer's subclass adds further options."""

    patch: int = field(None, "side of a patch", ge=1)
    width: int = field(None, "hidden width", ge=8)
    depth: int = field(None, "transformer blocks", ge=1)
    heads: int = field(None, "attention heads", ge=1)
    mlp_ratio: float = field(4.0, "width of the MLP in multiples of the hidden width", gt=0)
    conditions: list[str] = field([], "conditions the model takes: of class, text, low_resolution")

    def model_post_init(self, context: Any) -> None:
        """Check that `width` is a multiple of `heads`; raise ConfigError otherwise."""
        demand(self.width % self.heads == 0, "width", self.width, f"a multiple of heads = {self.heads}")


@BACKBONES.register
class DiTOptions(TransformerOptions):
    """A diffusion transformer as published (Peebles and Xie 2023): shared embedders, adaLN-zero."""

    code: ClassVar[str] = "kairos.models.dit:DiT"
    takes: ClassVar[tuple[str, ...] | None] = _CONDITIONS_WITH_TEXT
    text_form: ClassVar[Literal["tokens", "pooled"] | None] = "pooled"
    sizes: ClassVar[dict[str, dict[str, Any]]] = DIT_SIZES

    name: str = "dit"
    size: str = _declare_size("s/2", sizes)


@BACKBONES.register
class MDTOptions(TransformerOptions):
    """The masked diffusion transformer, version 1 (Gao et al. 2023)."""

    code: ClassVar[str] = "kairos.models.mdt:MDT"
    takes: ClassVar[tuple[str, ...] | None] = _CONDITIONS_WITH_TEXT
    text_form: ClassVar[Literal["tokens", "pooled"] | None] = "pooled"
    masks: ClassVar[bool] = True
    sizes: ClassVar[dict[str, dict[str, Any]]] = DIT_SIZES

    name: str = "mdt"
    size: str = _declare_size("s/2", sizes)
    decoder_depth: int = field(2, "last blocks, which process all patches in the masked pass too", ge=1)
    ratio: float = field(0.3, "share of the patches that the masked pass hides", ge=0, lt=1)

    def model_post_init(self, context: Any) -> None:
        """Check also that `decoder_depth` is at most `depth`; raise ConfigError otherwise."""
        super().model_post_init(context)
        demand(self.decoder_depth <= self.depth, "decoder_depth", self.decoder_depth, f"at most depth = {self.depth}")


@BACKBONES.register
class UViTOptions(TransformerOptions):
    """U-ViT (Bao et al. 2023): patches, time and conditions are tokens, and long skips connect blocks.

    Size ``printed`` is the one in Kim et al. 2025, table 9.
    """

    code: ClassVar[str] = "kairos.models.uvit:UViT"
    takes: ClassVar[tuple[str, ...] | None] = _CONDITIONS_WITH_TEXT
    text_form: ClassVar[Literal["tokens", "pooled"] | None] = "tokens"
    sizes: ClassVar[dict[str, dict[str, Any]]] = UVIT_SIZES

    name: str = "uvit"
    size: str = _declare_size("s/2", sizes)
    depth: int = field(None, "blocks, half of them before and half after one in the middle", ge=2)
    convolution: bool = field(None, "end with a 3x3 convolution")

    def model_post_init(self, context: Any) -> None:
        """Check also that `width` is even, as the embedding of times needs; raise ConfigError otherwise."""
        super().model_post_init(context)
        demand(self.width % 2 == 0, "width", self.width, "an even number")


@BACKBONES.register
class ViTOptions(TransformerOptions):
    """The plain vision transformer of Min-SNR (Hang et al. 2023); size ``printed`` has depth 12."""

    code: ClassVar[str] = "kairos.models.vit:ViT"
    takes: ClassVar[tuple[str, ...] | None] = _CONDITIONS_WITHOUT_TEXT
    sizes: ClassVar[dict[str, dict[str, Any]]] = VIT_SIZES

    name: str = "vit"
    size: str = _declare_size("b/2", sizes)
    conditions: list[str] = field([], "conditions the model takes: of class, low_resolution")
    timesteps: int = field(1000, "rows of the learned table of times: at least those of the process", ge=1)


def omit_overridden_size(model: dict[str, Any]) -> dict[str, Any]:
    """Return plain values of a backbone, without `size` if its options are not those of the published size.

    An option of the published size that is missing counts as different. If all are equal, or without `size`, the
    result is `model` itself.
    """
    if "size" not in model:
        return model
    backbone = BACKBONES.find(model["name"])
    assert issubclass(backbone, SizedOptions)  # it has option `size`
    published_options = backbone.sizes[model["size"]]
    is_overridden = any(model.get(name) != value for name, value in published_options.items())
    if not is_overridden:
        return model
    return {name: value for name, value in model.items() if name != "size"}
