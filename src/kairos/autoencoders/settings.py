"""Section `autoencoder` of an experiment file, and the sizes of images that an autoencoder accepts."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from kairos.section import Section, field
from kairos_timesteps.errors import ConfigError, demand


class AutoencoderConfig(Section):
    """Section `autoencoder`: the space that the diffusion model works in."""

    kind: Literal["none", "train", "pretrained"] = field(
        "none", "none: pixels; train: an autoencoder trained on the data set; pretrained: an autoencoder of diffusers"
    )
    path: str | None = field(None, "pretrained: folder or hub id of an AutoencoderKL, AutoencoderTiny or VQModel")
    scaling: float | None = field(
        None,
        "pretrained: factor from its latents to x0, such as 0.18215 (SD's KL-f8), 0.23010 (U-ViT's COCO), "
        "1 (LDM's VQ-f4); null: its config's, but 1 for a VQModel that has diffusers' default",
        gt=0,
    )
    latent_channels: int = field(4, "train: channels of the latents", ge=1, le=64)
    channels: list[Annotated[int, Field(ge=1)]] = field(
        [32, 64], "train: width per level; each further level halves", min_length=1
    )
    layers: int = field(1, "train: residual blocks per level", ge=1, le=4)
    steps: int = field(1000, "train: optimizer steps", ge=1)
    batch_size: int = field(64, "train: images per step", ge=1)
    learning_rate: float = field(1e-3, "train: peak learning rate, cosine decay", gt=0)
    kl_weight: float = field(1e-4, "train: weight of the KL term per dimension", ge=0)
    seed: int = field(0, "train: seed", ge=0)
    encode_batch_size: int = field(64, "images per encoding step", ge=1)
    dtype: Literal["float32", "float16"] = field("float32", "of the latents on disk; x0 is computed in float32")
    shards: int = field(1, "number of jobs that encode the images in parallel; does not change the latents", ge=1)

    def model_post_init(self, context: Any) -> None:
        """Check that a pretrained autoencoder has a path, other kinds no scaling, and kind ``none`` data type float32.

        An empty path is treated as missing. Other kinds may have a path, which is ignored.

        Raises:
            ConfigError: a field does not fit the kind.
        """
        if self.kind == "pretrained":
            demand(self.path, "autoencoder.path", "null", "folder or hub id of the pretrained autoencoder")
        else:
            demand(self.scaling is None, "autoencoder.scaling", self.scaling, f"null with kind {self.kind}")
        if self.kind == "none":
            demand(
                self.dtype == "float32", "autoencoder.dtype", self.dtype, "float32 with kind none (pixels are uint8)"
            )

    @property
    def factor(self) -> int:
        """Downsampling factor of an autoencoder of kind ``train``: each level except the last halves the sides."""
        return int(2 ** (len(self.channels) - 1))

    def check_trainable_on(self, shape: tuple[int, int, int]) -> None:
        """Check that an autoencoder of kind ``train`` accepts images of `shape` (channels, height, width).

        Raises:
            ConfigError: the sides of the images cannot be halved at every level except the last.
        """
        levels = len(self.channels)
        check_image_size(shape, self.factor, f"an autoencoder with {levels} levels (autoencoder.channels)")


def check_image_size(shape: tuple[int, int, int], factor: int, autoencoder: str) -> None:
    """Check that height and width of the images are multiples of the autoencoder's downsampling factor.

    Args:
        shape: channels, height and width of the images.
        factor: downsampling factor.
        autoencoder: name of the autoencoder in the error message.

    Raises:
        ConfigError: a side is not a multiple; the message contains the nearest multiples below and above it.
    """
    _, height, width = shape
    proposals = []
    for side in sorted({height, width}):
        if side % factor:
            size_below = max(factor, math.floor(side / factor) * factor)
            size_above = math.ceil(side / factor) * factor
            nearest_sizes = sorted({size_below, size_above})  # one if the side is smaller than the factor
            sizes_text = " or ".join(str(size) for size in nearest_sizes)
            proposals.append(f"{sizes_text} instead of {side}")
    if proposals:
        raise ConfigError(
            f"dataset.resolution: images are {height}×{width}, but {autoencoder} needs sides that are multiples of "
            f"{factor}; allowed: {', '.join(proposals)}, for example"
        )
