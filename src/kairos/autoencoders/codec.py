"""From images to latents and back, the same for every kind of autoencoder."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kairos.data.dataset import to_uint8
from kairos.files import check_files, open_record, read_json
from kairos_timesteps.errors import ConfigError, KairosError

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, AutoencoderTiny, VQModel

FILES = ("config.json", "diffusion_pytorch_model.safetensors")  # a diffusers folder
KINDS = ("AutoencoderKL", "AutoencoderTiny", "VQModel")


@dataclass(frozen=True)
class Codec:
    """An autoencoder ready for use; as it stands none: x0 is the image.

    `manifest`: the record of stage autoencoder.
    `device`: where the autoencoder computes.
    """

    manifest: dict[str, Any]
    device: torch.device

    def encode(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Images (n, C, H, W) in [-1, 1] to mean and log-variance (n, c, h, w) of the latents z; None: no variance."""
        return images, None

    def decode(self, x0: Tensor) -> Tensor:
        """Model space (n, c, h, w) to images (n, C, H, W), in [-1, 1] but for overshoot."""
        return x0

    def to_model_space(self, z: Tensor) -> Tensor:
        """x0 = (z − shift) · scale; of pixels 0 and 1."""
        return (z - self.manifest["shift_factor"]) * self.manifest["scaling_factor"]

    def reconstructed(self, images: Tensor) -> np.ndarray:
        """Images (n, C, H, W) in [-1, 1] to the latents' means and back, uint8 (n, H, W, C)."""
        return to_uint8(self.decode(self.to_model_space(self.encode(images)[0])))


@dataclass(frozen=True)
class AutoencoderCodec(Codec):
    """An AutoencoderKL, AutoencoderTiny or VQModel of diffusers.

    What a VQModel encodes is the vector before quantisation (LDM's `VQModelInterface`); decoding quantises.

    `grey`: the images have one channel and the autoencoder three; grey is repeated before encoding and the three
    channels are averaged after decoding.
    """

    model: "AutoencoderKL | AutoencoderTiny | VQModel"
    grey: bool

    @torch.no_grad()
    def encode(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Images (n, C, H, W) in [-1, 1] to mean and log-variance (n, c, h, w), None without a variance."""
        images = images.to(self.device)
        encoded = self.model.encode(images.expand(-1, 3, -1, -1) if self.grey else images)
        if hasattr(encoded, "latents"):  # AutoencoderTiny, VQModel
            return encoded.latents, None
        return encoded.latent_dist.mean, encoded.latent_dist.logvar

    @torch.no_grad()
    def decode(self, x0: Tensor) -> Tensor:
        """Model space (n, c, h, w) to images (n, C, H, W), in [-1, 1] but for overshoot."""
        z = x0.to(self.device) / self.manifest["scaling_factor"] + self.manifest["shift_factor"]
        images = self.model.decode(z).sample
        return images.mean(dim=1, keepdim=True) if self.grey else images


def load_codec(folder: Path | str, device: torch.device | str = "cpu") -> Codec:
    """The codec of a folder that stage autoencoder wrote.

    Raises:
        KairosError: the folder is missing or not complete.
        DamagedError: weights or configuration are not those that the manifest tells of.
    """
    folder = Path(folder)
    manifest = open_record(folder, f"autoencoder --config F --dataset DIR --out {folder}")
    if manifest["kind"] == "none":
        return Codec(manifest, torch.device(device))
    check_files(folder, manifest["files"], "make it again with: kairos autoencoder")
    return wrap(load_model(folder), manifest, device)


def wrap(model: Any, manifest: dict[str, Any], device: torch.device | str) -> AutoencoderCodec:
    """A codec around a model in memory; the manifest needs scaling_factor, shift_factor and image_shape."""
    model = model.to(device).eval().requires_grad_(False)
    grey = manifest["image_shape"][0] == 1 and model.config.in_channels == 3
    return AutoencoderCodec(manifest, torch.device(device), model, grey)


def load_model(folder: Path | str) -> Any:
    """The diffusers autoencoder in a folder, in float32, its class as its config.json says."""
    name = read_json(Path(folder) / "config.json").get("_class_name")
    if name not in KINDS:
        raise ConfigError(f"autoencoder.path: {folder} holds {name!r}, allowed: {', '.join(KINDS)}")
    import diffusers

    diffusers.logging.set_verbosity_error()  # it warns of a field that every AutoencoderTiny it saved itself has
    try:
        cls = getattr(diffusers, name)
        return cls.from_pretrained(folder, torch_dtype=torch.float32, local_files_only=True, low_cpu_mem_usage=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise KairosError(f"autoencoder: {folder} cannot be loaded ({' '.join(str(error).split())})") from None


def downsampling(model: Any) -> int:
    """How many pixels of an image's side make one latent."""
    channels = model.config.get("block_out_channels") or model.config.encoder_block_out_channels
    return 2 ** (len(channels) - 1)


def check_size(shape: tuple[int, int, int], factor: int, what: str) -> None:
    """Refuse images that the autoencoder cannot halve as often as it wants to.

    Raises:
        ConfigError: names the sizes that work.
    """
    _, height, width = shape
    if height % factor or width % factor:
        below, above = (max(factor, height // factor * factor), -(-height // factor) * factor)
        near = " or ".join(str(size) for size in sorted({below, above}))
        raise ConfigError(
            f"dataset.resolution: images are {height}×{width}, but {what} needs sides that are multiples of {factor}; "
            f"allowed: {near}, for example"
        )
