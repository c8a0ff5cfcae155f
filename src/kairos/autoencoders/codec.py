"""Codecs: one interface to encode images and decode latents, for every kind of autoencoder."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kairos.array_shapes import ImageArray
from kairos.data.pixels import to_uint8
from kairos.files import check_files, open_record, read_json
from kairos.finite import demand_finite
from kairos.quick_imports import without_pipeline_packages
from kairos.shapes import EncodedImages, Images
from kairos_timesteps.errors import ConfigError, KairosError

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, AutoencoderTiny, VQModel

FILES = ("config.json", "diffusion_pytorch_model.safetensors")  # configuration and weights in a folder of diffusers
KINDS = ("AutoencoderKL", "AutoencoderTiny", "VQModel")
REMEDY = "use another autoencoder (autoencoder.path), or train it with a lower autoencoder.learning_rate"


@dataclass(frozen=True)
class Codec:
    """The codec of experiments without an autoencoder, whose x0 is the image; base class of other codecs.

    Attributes:
        record: record of stage autoencoder.
        device: device of the computation.
    """

    record: dict[str, Any]
    device: torch.device

    def encode(self, images: Images) -> tuple[EncodedImages, EncodedImages | None]:
        """Return mean and log-variance (n, c, h, w) of the latents z of images (n, C, H, W) in [-1, 1].

        Without an autoencoder they are `images` itself and None. Subclasses return None as log-variance if the encoder
        is deterministic.
        """
        return images, None

    def decode(self, x0: EncodedImages) -> Images:
        """Return the images (n, C, H, W) of x0 in model space (n, c, h, w): without an autoencoder, x0 itself.

        The values of the images may exceed [-1, 1] slightly.
        """
        return x0

    def to_model_space(self, z: EncodedImages) -> EncodedImages:
        """Convert latents z to x0 = (z − shift) · scale, with shift and scale of the record (0 and 1 for pixels)."""
        x0: EncodedImages = (z - self.record["shift_factor"]) * self.record["scaling_factor"]
        return x0

    def reconstruct(self, images: Images) -> ImageArray:
        """Encode images (n, C, H, W) in [-1, 1] as mean latents, and return the decoded images.

        They are uint8 (n, H, W, C) in main memory, clipped to the range of the pixels.
        """
        mean, _ = self.encode(images)
        return to_uint8(self.decode(self.to_model_space(mean)))


@dataclass(frozen=True)
class AutoencoderCodec(Codec):
    """Codec with an AutoencoderKL, AutoencoderTiny or VQModel of diffusers.

    The latents of a VQModel are the vectors before quantisation (LDM's `VQModelInterface`); decoding quantises them.

    Attributes:
        model: the autoencoder.
        grey: the images have one channel and the autoencoder three. The channel is repeated before encoding, and the
            three channels are averaged after decoding.
        source: folder or hub id of the autoencoder, for error messages.
    """

    model: "AutoencoderKL | AutoencoderTiny | VQModel"
    grey: bool
    source: str

    @torch.no_grad()
    def encode(self, images: Images) -> tuple[EncodedImages, EncodedImages | None]:
        """Return mean and log-variance (n, c, h, w) of the latents z of images (n, C, H, W) in [-1, 1].

        Both are on the codec's device, and the images may be on another one. The log-variance is None if the encoder is
        deterministic. The latents are not scaled, see `to_model_space`.

        Raises:
            NotFiniteError: a mean or log-variance is not finite.
        """
        images = images.to(self.device)
        if self.grey:
            images = images.expand(-1, 3, -1, -1)
        encoded = self.model.encode(images)
        if hasattr(encoded, "latents"):  # AutoencoderTiny, VQModel
            moments = {"mean": encoded.latents}
        else:
            moments = {"mean": encoded.latent_dist.mean, "logvar": encoded.latent_dist.logvar}
        demand_finite(moments, f"autoencoder {self.source}: latents of {len(images)} images", REMEDY)
        return moments["mean"], moments.get("logvar")

    @torch.no_grad()
    def decode(self, x0: EncodedImages) -> Images:
        """Convert x0 (n, c, h, w), on any device, to latents z, and decode them to images on the codec's device.

        The images are (n, C, H, W), and their values may exceed [-1, 1] slightly.

        Raises:
            NotFiniteError: a pixel is not finite.
        """
        z = x0.to(self.device) / self.record["scaling_factor"] + self.record["shift_factor"]
        images: Images = self.model.decode(z).sample
        demand_finite(images, f"autoencoder {self.source}: pixels of {len(images)} decoded images", REMEDY)
        return images.mean(dim=1, keepdim=True) if self.grey else images


def load_codec(folder: Path | str, device: torch.device | str = "cpu") -> Codec:
    """Load the codec in a folder that stage autoencoder wrote, after comparing its files with their hashes.

    The result is an `AutoencoderCodec` on the device. If the record has kind ``none``, it is a plain `Codec`, which
    needs no other files.

    Raises:
        KairosError: the folder is missing or not complete, or the autoencoder cannot be loaded.
        DamagedError: the record is damaged, or a file that it lists is missing or does not match its checksum.
    """
    folder = Path(folder)
    record = open_record(folder, f"autoencoder --config F --dataset DIR --out {folder}")
    if record["kind"] == "none":
        return Codec(record, torch.device(device))
    check_files(folder, record["files"], "make it again with: kairos autoencoder")
    return make_codec(load_model(folder), record, device, source=str(folder))


def make_codec(model: Any, record: dict[str, Any], device: torch.device | str, source: str) -> AutoencoderCodec:
    """Return a codec with an autoencoder of diffusers, which is moved to the device and frozen.

    `model` itself changes: it is in evaluation mode afterwards, and its weights require no gradients. `record`
    contains at least ``scaling_factor``, ``shift_factor`` and ``image_shape``. The images of the codec are grey if they
    have one channel and the model takes three. Error messages contain `source`, a folder or hub id.
    """
    model = model.to(device).eval().requires_grad_(False)
    image_channels, _, _ = record["image_shape"]
    is_grey = image_channels == 1 and model.config.in_channels == 3
    return AutoencoderCodec(record=record, device=torch.device(device), model=model, grey=is_grey, source=source)


def load_model(folder: Path | str) -> Any:
    """Load an autoencoder of diffusers from a folder, on the CPU, in float32 and in evaluation mode.

    The folder's config.json contains the class, one of `KINDS`. Warnings of diffusers stay switched off for this
    process. Nothing is downloaded.

    Raises:
        ConfigError: the folder contains another kind of network, or its config.json states no class.
        KairosError: the autoencoder cannot be loaded, for example since the file of weights is missing.
        DamagedError: config.json is not JSON.
        NotFiniteError: a weight is not finite.
        FileNotFoundError: the folder has no config.json.
    """
    class_name = read_json(Path(folder) / "config.json").get("_class_name")
    if class_name not in KINDS:
        raise ConfigError(f"autoencoder.path: {folder} holds {class_name!r}, allowed: {', '.join(KINDS)}")
    try:
        with without_pipeline_packages():  # without packages that only diffusers' pipelines need, the import is quick
            import diffusers  # slow nevertheless, and not needed to reject the folder

            model_class = getattr(diffusers, class_name)  # imports its module
        diffusers.logging.set_verbosity_error()  # diffusers warns of a field in every AutoencoderTiny that it saved
        # `low_cpu_mem_usage` would need the package accelerate
        model = model_class.from_pretrained(
            folder, torch_dtype=torch.float32, local_files_only=True, low_cpu_mem_usage=False
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise KairosError(f"autoencoder: {folder} cannot be loaded ({' '.join(str(error).split())})") from None
    demand_finite(model.state_dict(), f"autoencoder {folder}: weights", REMEDY)
    return model


def downsampling(model: Any) -> int:
    """Return the factor by which an autoencoder of diffusers reduces the sides of an image: 2 ** (levels - 1)."""
    # AutoencoderTiny has no such option but one for the encoder and one for the decoder
    level_channels = model.config.get("block_out_channels") or model.config.encoder_block_out_channels
    return int(2 ** (len(level_channels) - 1))  # every level except the last halves the sides
