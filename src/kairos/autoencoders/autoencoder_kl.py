"""AutoencoderKL of diffusers without attention, in torch alone: an import of diffusers takes 6 s of CPU time.

Names of weights, initial weights, outputs and files are equal to those of diffusers, so each loads the files of the
other. `can_build` selects the configurations of this form; diffusers computes the other ones.
"""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

_NORM_EPS = 1e-6
_SIZES = {  # fields of a configuration that set the sizes of the network
    "in_channels",
    "out_channels",
    "block_out_channels",
    "layers_per_block",
    "latent_channels",
    "norm_num_groups",
}
# fields with one allowed value, which is also the default of diffusers
_FIXED = {"act_fn": "silu", "use_quant_conv": True, "use_post_quant_conv": True}


def can_build(config: dict[str, Any]) -> bool:
    """Return True if the content of a ``config.json`` describes a network that `AutoencoderKL` computes."""
    block_types = {*config.get("down_block_types", ()), *config.get("up_block_types", ())}
    return (
        config.get("_class_name") == "AutoencoderKL"
        and config.keys() >= _SIZES
        and block_types == {"DownEncoderBlock2D", "UpDecoderBlock2D"}
        and config.get("mid_block_add_attention") is False
        and all(config.get(name, value) == value for name, value in _FIXED.items())
    )


def load(folder: Path, config: dict[str, Any]) -> "AutoencoderKL":
    """Load an autoencoder from a folder of diffusers, in float32.

    Args:
        folder: folder with ``diffusion_pytorch_model.safetensors``.
        config: content of the folder's ``config.json``, for which `can_build` is True.

    Raises:
        ValueError: the file is no safetensors file.
        RuntimeError: names or shapes of the weights do not match the configuration.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    model = AutoencoderKL({name: value for name, value in config.items() if not name.startswith("_")})
    try:
        weights = load_file(folder / "diffusion_pytorch_model.safetensors")
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return model


class Config(dict[str, Any]):
    """Configuration of an autoencoder, whose fields are also attributes."""

    def __getattr__(self, name: str) -> Any:
        """Return the value of a field."""
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Posterior:
    """Normal distribution of the latents of images.

    Attributes:
        mean: means (n, channels, height, width).
        logvar: logarithms of the variances.
        std: standard deviations.
        var: variances.
    """

    def __init__(self, moments: Tensor):
        self.mean, logvar = moments.chunk(2, dim=1)
        self.logvar = logvar.clamp(-30.0, 20.0)
        self.std = torch.exp(0.5 * self.logvar)
        self.var = torch.exp(self.logvar)


class Encoded(NamedTuple):
    """Result of `AutoencoderKL.encode`."""

    latent_dist: Posterior


class Decoded(NamedTuple):
    """Result of `AutoencoderKL.decode`: images (n, channels, height, width)."""

    sample: Tensor


class AutoencoderKL(nn.Module):
    """Convolutional KL autoencoder, with the part of the interface of diffusers' class that kairos uses.

    Args:
        config: configuration with the names of diffusers.
    """

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        self.config = Config(config)
        channels, groups = config["block_out_channels"], config["norm_num_groups"]
        layers, latent_channels = config["layers_per_block"], config["latent_channels"]
        self.encoder = _Encoder(config["in_channels"], channels, layers, groups, 2 * latent_channels)
        self.decoder = _Decoder(latent_channels, channels, layers, groups, config["out_channels"])
        self.quant_conv = nn.Conv2d(2 * latent_channels, 2 * latent_channels, 1)
        self.post_quant_conv = nn.Conv2d(latent_channels, latent_channels, 1)

    def encode(self, images: Tensor) -> Encoded:
        """Encode images (n, channels, height, width) in [-1, 1]."""
        return Encoded(Posterior(self.quant_conv(self.encoder(images))))

    def decode(self, latents: Tensor) -> Decoded:
        """Decode latents (n, channels, height, width)."""
        return Decoded(self.decoder(self.post_quant_conv(latents)))

    def register_to_config(self, **fields: Any) -> None:
        """Set fields of the configuration."""
        self.config.update(fields)

    def to_json_string(self) -> str:
        """Return the content of ``config.json``."""
        header = {"_class_name": "AutoencoderKL", "_diffusers_version": version("diffusers")}
        return json.dumps({**self.config, **header}, indent=2, sort_keys=True) + "\n"


class _ResidualBlock(nn.Module):
    """Two convolutions with group normalisation and SiLU, added to their input."""

    def __init__(self, inputs: int, outputs: int, groups: int):
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, inputs, eps=_NORM_EPS)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, outputs, eps=_NORM_EPS)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(functional.silu(self.norm1(x)))
        hidden = self.conv2(functional.silu(self.norm2(hidden)))
        if self.conv_shortcut is not None:
            x = self.conv_shortcut(x)
        return x + hidden


class _Downsample(nn.Module):
    """Convolution of stride 2 with padding on the right and at the bottom."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(functional.pad(x, (0, 1, 0, 1)))


class _Upsample(nn.Module):
    """Repetition of every pixel in a square of 2x2, and a convolution."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(functional.interpolate(x, scale_factor=2.0, mode="nearest"))


class _Level(nn.Module):
    """Residual blocks of one resolution; encoder and decoder add a list of one layer that changes the resolution."""

    def __init__(self, inputs: int, outputs: int, layers: int, groups: int):
        super().__init__()
        level_inputs = [inputs, *[outputs] * (layers - 1)]
        self.resnets = nn.ModuleList(_ResidualBlock(each, outputs, groups) for each in level_inputs)

    def forward(self, x: Tensor) -> Tensor:
        for layers in self.children():
            for layer in layers:
                x = layer(x)
        return x


class _MidBlock(nn.Module):
    """Two residual blocks at the lowest resolution."""

    def __init__(self, channels: int, groups: int):
        super().__init__()
        self.resnets = nn.ModuleList(_ResidualBlock(channels, channels, groups) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.resnets:
            x = block(x)
        return x


class _Encoder(nn.Module):
    """Encoder from images to moments of the latents."""

    def __init__(self, inputs: int, channels: list[int], layers: int, groups: int, outputs: int):
        super().__init__()
        self.conv_in = nn.Conv2d(inputs, channels[0], 3, padding=1)
        self.down_blocks = nn.ModuleList()
        level_inputs = channels[0]
        for number, level_channels in enumerate(channels):
            level = _Level(level_inputs, level_channels, layers, groups)
            if number + 1 < len(channels):
                level.downsamplers = nn.ModuleList([_Downsample(level_channels)])
            self.down_blocks.append(level)
            level_inputs = level_channels
        self.mid_block = _MidBlock(channels[-1], groups)
        self.conv_norm_out = nn.GroupNorm(groups, channels[-1], eps=_NORM_EPS)
        self.conv_out = nn.Conv2d(channels[-1], outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down_blocks:
            x = level(x)
        x = self.mid_block(x)
        return self.conv_out(functional.silu(self.conv_norm_out(x)))


class _Decoder(nn.Module):
    """Decoder from latents to images."""

    def __init__(self, inputs: int, channels: list[int], layers: int, groups: int, outputs: int):
        super().__init__()
        self.conv_in = nn.Conv2d(inputs, channels[-1], 3, padding=1)
        self.up_blocks = nn.ModuleList()  # listed before and filled after `mid_block`, for the weights of diffusers
        self.mid_block = _MidBlock(channels[-1], groups)
        level_inputs = channels[-1]
        for number, level_channels in enumerate(reversed(channels)):
            level = _Level(level_inputs, level_channels, layers + 1, groups)
            if number + 1 < len(channels):
                level.upsamplers = nn.ModuleList([_Upsample(level_channels)])
            self.up_blocks.append(level)
            level_inputs = level_channels
        self.conv_norm_out = nn.GroupNorm(groups, channels[0], eps=_NORM_EPS)
        self.conv_out = nn.Conv2d(channels[0], outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid_block(self.conv_in(x))
        for level in self.up_blocks:
            x = level(x)
        return self.conv_out(functional.silu(self.conv_norm_out(x)))
