"""Sections `dataset` and `autoencoder`."""

from typing import Literal

from pydantic import Field, model_validator

from kairos.config.base import Section


class DatasetConfig(Section):
    """Which images, and the uniform form they are brought into."""

    source: Literal["digits", "folder", "parquet", "hub"] = Field("digits", description="where the images come from")
    path: str | None = Field(None, description="folder, parquet file(s) (glob allowed) or hub id; not for digits")
    split: str = Field("train", description="split of a hub data set")
    image_column: str | None = Field(None, description="column of the images; null: the only image column")
    label_column: str | None = Field(None, description="column of the classes; null: `label` where there is one")
    resolution: int | None = Field(None, ge=4, le=2048, description="side in pixels; null: the images' own, all equal")
    crop: Literal["center", "pad", "none"] = Field(
        "center", description="centre crop to a square; pad: black around it up to resolution; none: images are square"
    )
    color: Literal["rgb", "grey"] = Field("rgb", description="colour channels kept")
    heldout: float = Field(0.1, gt=0, lt=1, description="share of the images held out for evaluation")
    split_seed: int = Field(0, ge=0, description="seed of the split into training and held-out images")
    limit: int | None = Field(None, ge=2, description="use a random subset of that many images")
    broken: Literal["refuse", "skip"] = Field("refuse", description="a broken image ends the job, or is counted")
    flips: bool = Field(False, description="train on horizontally flipped images too (never for digits or text)")
    train_images: int | None = Field(None, ge=1, description="number of training images, needed for lengths in epochs")

    @model_validator(mode="after")
    def _path_where_needed(self) -> "DatasetConfig":
        if self.source != "digits" and not self.path:
            raise ValueError(f"dataset.path: got null, allowed: the path or hub id of source {self.source}")
        if self.source == "digits" and self.flips:
            raise ValueError("dataset.flips: got true, allowed: false for digits (a flipped digit is no digit)")
        return self


class AutoencoderConfig(Section):
    """The space that the diffusion model works in."""

    kind: Literal["none", "train", "pretrained"] = Field("none", description="pixels, our own, or from diffusers")
    path: str | None = Field(None, description="pretrained: folder or hub id of an AutoencoderKL or AutoencoderTiny")
    latent_channels: int = Field(4, ge=1, le=64, description="train: channels of the latents")
    channels: list[int] = Field([32, 64], min_length=1, description="train: width per level; each further level halves")
    layers: int = Field(1, ge=1, le=4, description="train: residual blocks per level")
    steps: int = Field(1000, ge=1, description="train: optimiser steps")
    batch_size: int = Field(64, ge=1, description="train: images per step")
    learning_rate: float = Field(1e-3, gt=0, description="train: peak learning rate, cosine decay")
    kl_weight: float = Field(1e-4, ge=0, description="train: weight of the KL term per dimension")
    seed: int = Field(0, ge=0, description="train: seed")
    encode_batch_size: int = Field(64, ge=1, description="images per encoding step")

    @model_validator(mode="after")
    def _path_where_needed(self) -> "AutoencoderConfig":
        if self.kind == "pretrained" and not self.path:
            raise ValueError("autoencoder.path: got null, allowed: folder or hub id of the pretrained autoencoder")
        return self
