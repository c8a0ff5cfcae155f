"""Section `dataset`."""

from collections.abc import Collection
from typing import Literal

from pydantic import Field, model_validator

from kairos.errors import ConfigError
from kairos.section import Section


class DatasetConfig(Section):
    """Which images, and the uniform form they are brought into."""

    source: Literal["digits", "folder", "zip", "parquet", "hub"] = Field(
        "digits", description="where the images come from; zip: EDM's and StyleGAN's, with dataset.json"
    )
    path: str | None = Field(None, description="folder, zip, parquet file(s) (glob allowed) or hub id; not for digits")
    files: str | None = Field(
        None,
        description="folder and zip: a list of the files that are used, a name in a line; LIST:N: of its lines those "
        "that end in N (CelebA's partition); heldout may name another list then",
    )
    images: int | None = Field(
        None,
        ge=1,
        description="number of images the source must hold (held-out ones with a place of their own not counted)",
    )
    split: str = Field("train", description="split of a hub data set")
    image_column: str | None = Field(None, description="column of the images; null: the only image column")
    label_column: str | None = Field(None, description="column of the classes; null: `label` where there is one")
    captions: str | None = Field(
        None, description="COCO's captions (*.json), a column (parquet, hub), or sidecar: a .txt beside each image"
    )
    heldout_captions: str | None = Field(None, description="those of held-out images of their own; null: as captions")
    unmatched: Literal["count", "refuse"] = Field(
        "count", description="images without captions and captions without images are left out, or end the job"
    )
    resolution: int | None = Field(None, ge=4, le=2048, description="side in pixels; null: the images' own, all equal")
    crop: Literal["center", "adm", "pad", "none"] = Field(
        "center",
        description="centre crop to a square, then resized; adm: ADM's, halved by box and resized before the cut; pad: "
        "black around it up to resolution; none: images are square",
    )
    resample: Literal["bicubic", "lanczos"] = Field("bicubic", description="filter that images are resized with")
    color: Literal["rgb", "grey"] = Field("rgb", description="colour channels kept")
    heldout: float | str = Field(
        0.1,
        description="held out for evaluation: a share from 0, below 1; a split (hub), folder, zip or parquet file(s), "
        "or a list of files where `files` is one",
    )
    split_seed: int = Field(0, ge=0, description="seed of the split into training and held-out images")
    limit: int | None = Field(
        None,
        ge=2,
        description="use a random subset of that many images (held-out ones with a path of their own not counted)",
    )
    store: Literal["auto", "copy", "refer"] = Field(
        "auto", description="pixels are copied, or read again where they are; auto: refer for pretrained autoencoders"
    )
    broken: Literal["refuse", "skip"] = Field("refuse", description="a broken image ends the job, or is counted")
    flips: bool = Field(False, description="train on horizontally flipped images too (never for digits or text)")
    low_resolution: int | None = Field(
        None, ge=2, description="condition low_resolution: the images made smaller by this factor (area), then enlarged"
    )
    train_images: int | None = Field(None, ge=1, description="number of training images, needed for lengths in epochs")

    @model_validator(mode="after")
    def _path_where_needed(self) -> "DatasetConfig":
        if self.source != "digits" and not self.path:
            raise ValueError(f"dataset.path: got null, allowed: the path or hub id of source {self.source}")
        if self.source == "digits" and self.flips:
            raise ValueError("dataset.flips: got true, allowed: false for digits (a flipped digit is no digit)")
        if self.source == "digits" if isinstance(self.heldout, str) else not 0 <= self.heldout < 1:
            further = "" if self.source == "digits" else ", or where the images to hold out are"
            raise ValueError(f"dataset.heldout: got {self.heldout!r}, allowed: a share from 0, below 1{further}")
        if self.files and self.source not in ("folder", "zip"):
            raise ValueError(f"dataset.files: got {self.files!r}, allowed: null with source {self.source}")
        if self.crop == "adm" and not self.resolution:
            raise ValueError(
                "dataset.resolution: got null, allowed: a number with crop adm, which resizes before it cuts"
            )
        side = self.resolution or 8 * (self.source == "digits")  # of other sources it is known when they are prepared
        if self.low_resolution and side % self.low_resolution:
            raise ValueError(
                f"dataset.low_resolution: got {self.low_resolution}, allowed: a divisor of the images' side, {side}"
            )
        return self

    @model_validator(mode="after")
    def _captions_fit(self) -> "DatasetConfig":
        tables = self.source in ("parquet", "hub")
        allowed = "a column" if tables else "null" if self.source == "digits" else "a path *.json, or sidecar"
        for name, value in (("captions", self.captions), ("heldout_captions", self.heldout_captions)):
            in_table = value != "sidecar" and not str(value).endswith(".json")
            if value is not None and (self.source == "digits" or in_table != tables):
                raise ValueError(f"dataset.{name}: got {value!r}, allowed: {allowed} with source {self.source}")
        if self.heldout_captions and not (self.captions and isinstance(self.heldout, str)):
            got = f"dataset.heldout_captions: got {self.heldout_captions!r}, allowed"
            raise ValueError(f"{got}: null without captions, or where dataset.heldout is no place of its own")
        return self

    @property
    def parts(self) -> "tuple[DatasetConfig, ...]":
        """The section itself and, where held-out images have a place of their own, the section that names it."""
        if not isinstance(self.heldout, str):
            return (self,)
        field = "split" if self.source == "hub" else "files" if self.files else "path"
        own = {"captions": self.heldout_captions or self.captions, "heldout_captions": None}
        return self, self.model_copy(update={field: self.heldout, "heldout": 0.0, "images": None, **own})

    @property
    def caption_files(self) -> list[str]:
        """The files of captions."""
        return [str(part.captions) for part in self.parts if str(part.captions).endswith(".json")]

    def check_count(self, count: int) -> None:
        """Compare the number of images that the source holds with the one it must hold.

        Raises:
            ConfigError: they differ.
        """
        if self.images not in (None, count):
            raise ConfigError(f"dataset.images: got {self.images}, but {self.path or self.source} holds {count} images")

    def label_column_of(self, columns: Collection[str]) -> str | None:
        """The column of the classes in a table with some columns, or None."""
        return self.label_column or ("label" if "label" in columns else None)

    def held_out(self, count: int) -> int:
        """How many of `count` images a share holds out: at least one and not all, but none of a share of 0."""
        share = float(self.heldout)
        return min(max(round(share * count), 1), count - 1) if share else 0
