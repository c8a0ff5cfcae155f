"""Section `dataset` of an experiment file."""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from kairos.section import Section, field
from kairos_timesteps.errors import ConfigError, KairosError, demand
from kairos_timesteps.options import yaml_number_hint


class MissingDataError(ConfigError):
    """Images, or a list of files, that are not on this machine; they may be downloaded later."""


class DatasetConfig(Section):
    """Section `dataset`: the images, and the uniform format that they are converted to."""

    source: Literal["digits", "folder", "zip", "parquet", "hub"] = field(
        "digits", "where the images come from; zip: EDM's and StyleGAN's, with dataset.json"
    )
    path: str | None = field(None, "folder, zip, parquet file(s) (glob allowed) or hub id; not for digits")
    files: str | None = field(
        None,
        "folder and zip: a list of the files to use, one name per line; LIST:N uses the lines that end in N "
        "(CelebA's partition); heldout may then be another list",
    )
    images: int | None = field(
        None, "number of images the source must hold (without held-out images from another path)", ge=1
    )
    split: str = field("train", "split of a hub data set")
    image_column: str | None = field(None, "column of the images; null: the only image column")
    label_column: str | None = field(None, "column of the classes; null: `label` where there is one")
    captions: str | None = field(
        None, "COCO's captions (*.json), a column (parquet, hub), or sidecar (folder): a .txt file per image"
    )
    heldout_captions: str | None = field(None, "captions of held-out images from another path; null: as captions")
    unmatched: Literal["count", "refuse"] = field(
        "count", "images without captions and captions without images: count leaves them out, refuse ends the job"
    )
    resolution: int | None = field(None, "side in pixels; null: the images' own, all equal", ge=4, le=2048)
    crop: Literal["center", "adm", "pad", "none"] = field(
        "center",
        "centre crop to a square, then resized; adm: ADM's, halved by box and resized before the cut; pad: "
        "black around it up to resolution; none: images are square",
    )
    resample: Literal["bicubic", "lanczos"] = field("bicubic", "filter that images are resized with")
    color: Literal["rgb", "grey"] = field("rgb", "colour channels kept")
    value_range: list[float] | None = field(
        None,
        "stored values that become black and white in all images, [low, high]; null: 8 bits are unchanged, integers of "
        "more bits have [0, 65535], floats [0, 1]",
    )
    heldout: float | str = field(
        0.1,
        "held out for evaluation: a share from 0, below 1; or a split (hub), folder, zip or parquet file(s), "
        "or another list of files if `files` is set",
    )
    split_seed: int = field(0, "seed of the split into training and held-out images", ge=0)
    limit: int | None = field(
        None, "use a random subset of this many images (without held-out images from another path)", ge=2
    )
    store: Literal["auto", "copy", "refer"] = field(
        "auto", "copy the pixels, or refer to the original files; auto: refer for pretrained autoencoders"
    )
    broken: Literal["refuse", "skip"] = field("refuse", "a broken image ends the job, or is skipped and counted")
    flips: bool = field(False, "train on horizontally flipped images too (never for digits or text)")
    low_resolution: int | None = field(
        None, "condition low_resolution: the images made smaller by this factor (area), then enlarged", ge=2
    )
    train_images: int | None = field(None, "number of training images, needed for lengths in epochs", ge=1)

    def model_post_init(self, context: Any) -> None:
        """Check that the settings of the data set fit its source and each other; raise ConfigError if they do not."""
        self._check_source()
        self._check_sizes()
        self._check_captions()

    def _check_source(self) -> None:
        """Check that path, list of files, flips and held-out images fit the kind of source.

        Digits have no flips and no range of values, and `heldout` is a share; all other sources need a path. With
        source hub it must not start with a slash. A share is at least 0 and below 1. Other held-out images have another
        path, split or list than the training images; it may be missing. A list of files is for folders and zips only.

        Raises:
            ConfigError: a field does not fit.
        """
        is_digits = self.source == "digits"
        if is_digits:
            demand(self.value_range is None, "dataset.value_range", self.value_range, "null for digits, of 8 bits")
            demand(not self.flips, "dataset.flips", "true", "false for digits (a flipped digit is no digit)")
        else:
            demand(self.path, "dataset.path", "null", f"the path or hub id of source {self.source}")
        if self.source == "hub":
            allowed = "the id of a data set on the hub, such as OWNER/NAME; source folder, zip or parquet reads files"
            demand(not str(self.path).startswith("/"), "dataset.path", f"{self.path!r} with source hub", allowed)
        number_hint = ""
        if isinstance(self.heldout, str):
            # a share that YAML reads as text, such as 1e-1; a folder may be called 2012
            number_hint = "" if self.heldout.isdigit() else yaml_number_hint(self.heldout)
            valid_heldout = not is_digits and not number_hint
        else:
            valid_heldout = 0 <= self.heldout < 1
        alternative = "" if is_digits else ", or where the images to hold out are"
        allowed = f"a share from 0, below 1{alternative}{number_hint}"
        demand(valid_heldout, "dataset.heldout", repr(self.heldout), allowed)
        heldout = self.heldout_section
        if heldout is not None:
            has_other_images = (heldout.path, heldout.files, heldout.split) != (self.path, self.files, self.split)
            allowed = "a share, or another path, split or list than that of the training images"
            demand(has_other_images, "dataset.heldout", repr(self.heldout), allowed)
        if self.source not in ("folder", "zip"):
            demand(not self.files, "dataset.files", repr(self.files), f"null with source {self.source}")

    def _check_sizes(self) -> None:
        """Check the range of values, that crop ``adm`` has a resolution, and that the low-resolution factor fits.

        The factor divides the images' side, which is 8 for digits. It is not checked if the side is not known yet.

        Raises:
            ConfigError: the range is no increasing pair, the resolution is missing, or the factor does not divide the
                side.
        """
        if self.value_range is not None:
            is_pair = len(self.value_range) == 2 and self.value_range[0] < self.value_range[1]
            demand(is_pair, "dataset.value_range", self.value_range, "[low, high] with low below high, or null")
        if self.crop == "adm":
            allowed = "a number with crop adm, which resizes before it cuts"
            demand(self.resolution is not None, "dataset.resolution", "null", allowed)
        if self.side is not None:
            self.check_low_resolution(self.side)

    def check_low_resolution(self, side: int) -> None:
        """Check that the low-resolution factor divides the side of the prepared images; null passes.

        Raises:
            ConfigError: the factor does not divide the side.
        """
        if self.low_resolution is not None:
            is_divisor = side % self.low_resolution == 0
            allowed = f"a divisor of the images' side, {side}"
            demand(is_divisor, "dataset.low_resolution", self.low_resolution, allowed)

    def _check_captions(self) -> None:
        """Check that `captions` and `heldout_captions`, if they are set, have a form that fits the source.

        Parquet and hub need a column, zip a path ``*.json``, and folder such a path or ``sidecar``; digits have no
        captions. `heldout_captions` also needs `captions`, and `heldout` that is not a share.

        Raises:
            ConfigError: a field does not fit.
        """
        for name in ("captions", "heldout_captions"):
            value = getattr(self, name)
            if value is None:
                continue
            is_column = value != "sidecar" and not value.endswith(".json")
            if self.source == "digits":
                valid, allowed = False, "null"
            elif self.source in ("parquet", "hub"):
                valid, allowed = is_column, "a column"
            elif self.source == "zip":
                valid, allowed = value.endswith(".json"), "a path *.json"  # text files in a zip are not read
            else:
                valid, allowed = not is_column, "a path *.json, or sidecar"
            demand(valid, f"dataset.{name}", repr(value), f"{allowed} with source {self.source}")
        if self.heldout_captions:
            valid = bool(self.captions) and isinstance(self.heldout, str)
            allowed = "null without captions, or if dataset.heldout is a share"
            demand(valid, "dataset.heldout_captions", repr(self.heldout_captions), allowed)

    @property
    def side(self) -> int | None:
        """Side of the prepared images in pixels; None if it is known only from the images. Digits have 8 by default."""
        if self.resolution is None and self.source == "digits":
            return 8
        return self.resolution

    @property
    def channels(self) -> int:
        """Channels of the prepared images: 1 if `color` is grey, otherwise 3."""
        return 1 if self.color == "grey" else 3

    @property
    def heldout_section(self) -> "DatasetConfig | None":
        """Copy of this section that selects the held-out images alone; None if `heldout` is a share.

        The value of `heldout` replaces the split (hub), the list of files (if there is one) or else the path. In the
        copy `heldout` is 0, `images` is None, and `captions` are `heldout_captions` or else `captions`.
        """
        if not isinstance(self.heldout, str):
            return None
        if self.source == "hub":
            changed_field = "split"
        elif self.files:
            changed_field = "files"
        else:
            changed_field = "path"
        captions = self.heldout_captions or self.captions
        update = {"heldout": 0.0, "images": None, "captions": captions, "heldout_captions": None}
        return self.model_copy(update={changed_field: self.heldout, **update})

    @property
    def sections(self) -> "tuple[DatasetConfig, ...]":
        """Tuple of this section and, unless it is None, of `heldout_section`."""
        heldout = self.heldout_section
        return (self,) if heldout is None else (self, heldout)

    @property
    def caption_files(self) -> list[str]:
        """Paths of the JSON files of captions, of training and then of held-out images; a shared file occurs twice."""
        captions = [section.captions for section in self.sections]
        return [path for path in captions if path is not None and path.endswith(".json")]

    def check_count(self, count: int) -> None:
        """Raise ConfigError if `dataset.images` is set and differs from `count`, the number of images of the source."""
        if self.images not in (None, count):
            raise ConfigError(f"dataset.images: got {self.images}, but {self.path or self.source} holds {count} images")

    def find_label_column(self, columns: Collection[str]) -> str | None:
        """Return the name of the column of labels; None without one.

        It is `label_column` if that is set. Otherwise it is ``label`` if `columns` has it.

        Raises:
            ConfigError: `label_column` is set, and `columns` lacks it.
        """
        if self.label_column:
            allowed = f"one of {', '.join(columns)}"
            demand(self.label_column in columns, "dataset.label_column", repr(self.label_column), allowed)
            return self.label_column
        return "label" if "label" in columns else None

    def heldout_count(self, count: int) -> int:
        """Return the number of held-out images among `count` images, if `heldout` is a share; `count` is at least 1.

        The number is 0 for share 0. Otherwise it is the rounded product, at least 1 and at most `count` - 1.

        Raises:
            ValueError: `heldout` is a path, split or list.
        """
        share = float(self.heldout)
        if share == 0:
            return 0
        return min(max(round(share * count), 1), count - 1)


@contextmanager
def report_as_heldout() -> Iterator[None]:
    """Replace the names of fields in a KairosError of the block, which reads `DatasetConfig.heldout_section`.

    The experiment file has no section of held-out images: its path, files and captions come from the fields
    `dataset.heldout` and `dataset.heldout_captions`. The message must contain these names instead.
    """
    try:
        yield
    except KairosError as error:
        message = re.sub(r"dataset\.(path|files)", "dataset.heldout", str(error), count=1)
        message = message.replace("dataset.captions", "dataset.heldout_captions", 1)
        raise type(error)(message) from None
