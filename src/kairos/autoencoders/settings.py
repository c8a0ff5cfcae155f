"""Section `autoencoder`."""

from typing import Literal

from pydantic import Field, model_validator

from kairos.section import Section


class AutoencoderConfig(Section):
    """The space that the diffusion model works in."""

    kind: Literal["none", "train", "pretrained"] = Field("none", description="pixels, our own, or from diffusers")
    path: str | None = Field(
        None, description="pretrained: folder or hub id of an AutoencoderKL, AutoencoderTiny or VQModel"
    )
    scaling: float | None = Field(
        None,
        gt=0,
        description="pretrained: factor from its latents to x0, such as 0.18215 (SD's KL-f8), 0.23010 (U-ViT's COCO), "
        "1 (LDM's VQ-f4); null: its config's, but 1 for a VQModel that has diffusers' default",
    )
    latent_channels: int = Field(4, ge=1, le=64, description="train: channels of the latents")
    channels: list[int] = Field([32, 64], min_length=1, description="train: width per level; each further level halves")
    layers: int = Field(1, ge=1, le=4, description="train: residual blocks per level")
    steps: int = Field(1000, ge=1, description="train: optimiser steps")
    batch_size: int = Field(64, ge=1, description="train: images per step")
    learning_rate: float = Field(1e-3, gt=0, description="train: peak learning rate, cosine decay")
    kl_weight: float = Field(1e-4, ge=0, description="train: weight of the KL term per dimension")
    seed: int = Field(0, ge=0, description="train: seed")
    encode_batch_size: int = Field(64, ge=1, description="images per encoding step")
    shards: int = Field(1, ge=1, description="jobs that the images are encoded in; does not change the latents")

    @model_validator(mode="after")
    def _path_where_needed(self) -> "AutoencoderConfig":
        if self.kind == "pretrained" and not self.path:
            raise ValueError("autoencoder.path: got null, allowed: folder or hub id of the pretrained autoencoder")
        if self.kind != "pretrained" and self.scaling:
            raise ValueError(f"autoencoder.scaling: got {self.scaling}, allowed: null with kind {self.kind}")
        return self
