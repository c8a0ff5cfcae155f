"""Section `dataset`."""

from collections.abc import Collection
from typing import Any, Literal

from kairos.section import Section, field
from kairos_timesteps.errors import ConfigError, demand


class DatasetConfig(Section):
    """Settings of the images, and of the uniform form that they are converted to."""

    source: Literal["digits", "folder", "zip", "parquet", "hub"] = field(
        "digits", "where the images come from; zip: EDM's and StyleGAN's, with dataset.json"
    )
    path: str | None = field(None, "folder, zip, parquet file(s) (glob allowed) or hub id; not for digits")
    files: str | None = field(
        None,
        "folder and zip: a list of the files that are used, a name in a line; LIST:N: of its lines those "
        "that end in N (CelebA's partition); heldout may name another list then",
    )
    images: int | None = field(
        None, "number of images the source must hold (held-out ones with a place of their own not counted)", ge=1
    )
    split: str = field("train", "split of a hub data set")
    image_column: str | None = field(None, "column of the images; null: the only image column")
    label_column: str | None = field(None, "column of the classes; null: `label` where there is one")
    captions: str | None = field(
        None, "COCO's captions (*.json), a column (parquet, hub), or sidecar: a .txt beside each image"
    )
    heldout_captions: str | None = field(None, "those of held-out images of their own; null: as captions")
    unmatched: Literal["count", "refuse"] = field(
        "count", "images without captions and captions without images are left out, or end the job"
    )
    resolution: int | None = field(None, "side in pixels; null: the images' own, all equal", ge=4, le=2048)
    crop: Literal["center", "adm", "pad", "none"] = field(
        "center",
        "centre crop to a square, then resized; adm: ADM's, halved by box and resized before the cut; pad: "
        "black around it up to resolution; none: images are square",
    )
    resample: Literal["bicubic", "lanczos"] = field("bicubic", "filter that images are resized with")
    color: Literal["rgb", "grey"] = field("rgb", "colour channels kept")
    heldout: float | str = field(
        0.1,
        "held out for evaluation: a share from 0, below 1; a split (hub), folder, zip or parquet file(s), "
        "or a list of files where `files` is one",
    )
    split_seed: int = field(0, "seed of the split into training and held-out images", ge=0)
    limit: int | None = field(
        None, "use a random subset of that many images (held-out ones with a path of their own not counted)", ge=2
    )
    store: Literal["auto", "copy", "refer"] = field(
        "auto", "pixels are copied, or read again where they are; auto: refer for pretrained autoencoders"
    )
    broken: Literal["refuse", "skip"] = field("refuse", "a broken image ends the job, or is counted")
    flips: bool = field(False, "train on horizontally flipped images too (never for digits or text)")
    low_resolution: int | None = field(
        None, "condition low_resolution: the images made smaller by this factor (area), then enlarged", ge=2
    )
    train_images: int | None = field(None, "number of training images, needed for lengths in epochs", ge=1)

    def model_post_init(self, context: Any) -> None:
        """Check that the settings of the data set fit its source and each other."""
        source, digits = self.source, self.source == "digits"
        demand(digits or self.path, "dataset.path", "null", f"the path or hub id of source {source}")
        demand(not (digits and self.flips), "dataset.flips", "true", "false for digits (a flipped digit is no digit)")
        good = not digits if isinstance(self.heldout, str) else 0 <= self.heldout < 1
        further = "" if digits else ", or where the images to hold out are"
        demand(good, "dataset.heldout", repr(self.heldout), f"a share from 0, below 1{further}")
        good = not self.files or source in ("folder", "zip")
        demand(good, "dataset.files", repr(self.files), f"null with source {source}")
        allowed = "a number with crop adm, which resizes before it cuts"
        demand(self.crop != "adm" or self.resolution, "dataset.resolution", "null", allowed)
        side = self.resolution or 8 * digits  # of other sources it is known when they are prepared
        good = side % (self.low_resolution or 1) == 0
        demand(good, "dataset.low_resolution", self.low_resolution, f"a divisor of the images' side, {side}")
        tables = source in ("parquet", "hub")
        allowed = "a column" if tables else "null" if digits else "a path *.json, or sidecar"
        for name in ("captions", "heldout_captions"):
            if (value := getattr(self, name)) is not None:
                good = not digits and tables == (value != "sidecar" and not value.endswith(".json"))
                demand(good, f"dataset.{name}", repr(value), f"{allowed} with source {source}")
        allowed = "null without captions, or where dataset.heldout is no place of its own"
        good = not self.heldout_captions or (bool(self.captions) and isinstance(self.heldout, str))
        demand(good, "dataset.heldout_captions", repr(self.heldout_captions), allowed)

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

    def find_label_column(self, columns: Collection[str]) -> str | None:
        """The column of the classes in a table with some columns, or None."""
        return self.label_column or ("label" if "label" in columns else None)

    def heldout_count(self, count: int) -> int:
        """Return the number of held-out images, of `count`: at least one and not all, or none if the share is 0."""
        share = float(self.heldout)
        return min(max(round(share * count), 1), count - 1) if share else 0
