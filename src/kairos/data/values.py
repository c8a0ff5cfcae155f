"""Ranges of stored pixel values: the values of a data set's image files that become black (0) and white (255).

One rule holds for all images of a data set and depends on no single image. Values of 8 bits are unchanged. Of integers
with more bits 0 becomes black and 65535 white, of floats 0 and 1, unless `dataset.value_range` sets other values.
Values outside of the range are rejected, except floats that round to black or white, such as 1.001.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kairos_timesteps.errors import ConfigError, rejection

if TYPE_CHECKING:
    from PIL import Image  # checks before a run, which read no image, import this module

Kind = Literal["8-bit", "16-bit colour", "integer", "float"]

SIXTEEN_BIT_COLOUR = "sixteen_bit_colour"  # key in `Image.info` of images of which PIL reads the upper 8 of 16 bits
_NOUNS: dict[Kind, str] = {
    "8-bit": "images of 8 bits",
    "16-bit colour": "colour images of 16 bits",
    "integer": "grey images of more than 8 bits",
    "float": "images of floats",
}
# values that become black and white, unless `dataset.value_range` sets others for integers and floats
_RANGES: dict[Kind, tuple[float, float]] = {
    "8-bit": (0, 255),
    "16-bit colour": (0, 65535),
    "integer": (0, 65535),
    "float": (0, 1),
}
_MOST_NAMES = 3  # images that an error lists
_MOST_WARNED_NAMES = 5  # images that a warning lists

_DARK, _BRIGHT = 16, 239  # a pixel up to the first level is nearly black, one from the second on is nearly white
_SHARE = 0.99  # of an image's pixels; a hot pixel makes no image bright


@dataclass(frozen=True)
class ImageValues:
    """Stored values of an image.

    Attributes:
        kind: type of the values.
        smallest, largest: the smallest and the largest value; 0 and 255 for 8 bits, which are not measured.
    """

    kind: Kind
    smallest: float
    largest: float


@dataclass
class _ValuesOfKind:
    """Stored values of all images of a data set that have one type.

    Attributes:
        count: number of images.
        smallest, largest: the smallest and the largest value of all images.
        unsuitable_count: number of images that the range does not fit.
        unsuitable: name and values of the first of these images.
    """

    count: int = 0
    smallest: float = np.inf
    largest: float = -np.inf
    unsuitable_count: int = 0
    unsuitable: list[str] = field(default_factory=list)


def find_kind(image: "Image.Image") -> Kind:
    """Return the type of an image's stored values; PIL may have read only the header of the file."""
    if image.mode.startswith("I"):  # 16 or 32 bits; PIL has no mode of 16 bits with colour
        return "integer"
    if image.mode == "F":
        return "float"
    return "16-bit colour" if image.info.get(SIXTEEN_BIT_COLOUR) else "8-bit"


def find_range(kind: Kind, value_range: Sequence[float] | None) -> tuple[float, float]:
    """Return the values of a type that become black and white.

    Args:
        kind: type of the values.
        value_range: `dataset.value_range`. Images of 8 bits and of colour keep their default range.
    """
    if value_range is None or kind in ("8-bit", "16-bit colour"):
        return _RANGES[kind]
    black, white = value_range
    return black, white


def measure_values(image: "Image.Image") -> ImageValues:
    """Return type and extrema of an image's stored values.

    Raises:
        ValueError: pixels are NaN or infinite; the message contains their number.
    """
    kind = find_kind(image)
    if kind == "8-bit":
        return ImageValues(kind, *_RANGES[kind])
    if kind == "16-bit colour":  # the lower 8 bits are unknown
        upper = np.asarray(image.convert("RGB"))
        return ImageValues(kind, int(upper.min()) * 256, int(upper.max()) * 256 + 255)
    values = np.asarray(image)
    damaged = values.size - np.count_nonzero(np.isfinite(values))
    if damaged:
        raise ValueError(f"{damaged} of {values.size} pixels are NaN or infinite")
    return ImageValues(kind, float(values.min()), float(values.max()))


class DatasetValues:
    """Stored values of a data set's images, which are added one by one.

    Args:
        value_range: `dataset.value_range`.
    """

    def __init__(self, value_range: Sequence[float] | None):
        self._value_range = value_range
        self._by_kind: dict[Kind, _ValuesOfKind] = {}

    def add(self, name: str, values: ImageValues) -> None:
        """Add the values of the image with a name."""
        total = self._by_kind.setdefault(values.kind, _ValuesOfKind())
        total.count += 1
        total.smallest = min(total.smallest, values.smallest)
        total.largest = max(total.largest, values.largest)
        if not fits(values, self._value_range):
            total.unsuitable_count += 1
            if len(total.unsuitable) < _MOST_NAMES:
                total.unsuitable.append(f"{name} ({_interval(values.smallest, values.largest)})")

    def add_unread(self, kind: Kind) -> None:
        """Count an image of which only the header has been read."""
        self._by_kind.setdefault(kind, _ValuesOfKind()).count += 1

    def check_range(self) -> None:
        """Raise ConfigError if the range does not fit some images; the message has the values of the whole data set."""
        total_count = sum(values.count for values in self._by_kind.values())
        for kind, values in self._by_kind.items():
            if not values.unsuitable_count:
                continue
            images = f"{values.unsuitable_count} of {total_count} images"
            names = ", ".join(values.unsuitable)
            if kind == "8-bit":
                got = f"{format_range(self._value_range)}, but {images} have 8 bits, such as {names}"
                allowed = "null, which takes them as they are; a range is for images of more than 8 bits alone"
            elif kind == "16-bit colour":
                got = f"{format_range(self._value_range)}, but {images} have colour of 16 bits, such as {names}"
                allowed = "null or [0, 65535], since only their upper 8 bits are read; or convert them to 8 bits"
            else:
                present = _interval(values.smallest, values.largest)
                got = f"{self._describe_range(kind)}, but {images} hold other values, such as {names}"
                suggestion = format_range(_suggest_range(kind, values.smallest, values.largest))
                allowed = (
                    f"[low, high], the values that become black and white in all images, such as {suggestion}; "
                    f"the {_NOUNS[kind]} hold {present}"
                )
            raise rejection("dataset.value_range", got, allowed)

    def check_bits(self) -> None:
        """Raise ConfigError if no integer uses the upper one of 16 bits and no range is set.

        Such images have fewer bits, for example 12, and would become nearly black.
        """
        if self._value_range is not None:
            return
        for kind in ("integer", "16-bit colour"):
            values = self._by_kind.get(kind)
            if values is None or values.largest >= 2**15 or values.largest < values.smallest:  # the last: none is read
                continue
            got = (
                f"{self._describe_range(kind)}, but the {_NOUNS[kind]} hold {values.largest:g} at most, which would be "
                f"{values.largest / 257:.0f} of 255"
            )
            alternative = "images of 8 bits"
            if kind == "integer":
                alternative = format_range(_suggest_range(kind, values.smallest, values.largest))
            raise rejection("dataset.value_range", got, f"{alternative}, or [0, 65535] if the images are dark")

    def propose_range(self) -> tuple[float, float] | None:
        """Return a range for `dataset.value_range` that fits all images; None if its default fits them.

        Raises:
            ConfigError: the default does not fit, and images of several types or of 16-bit colour need other ranges.
        """
        try:
            self.check_range()
            self.check_bits()
        except ConfigError:
            if len(self._by_kind) > 1 or "16-bit colour" in self._by_kind:
                raise
            ((kind, values),) = self._by_kind.items()
            return _suggest_range(kind, values.smallest, values.largest)
        return None

    def records(self) -> list[dict[str, Any]]:
        """Return number, extrema and range of the images of each type, as JSON; extrema of 8 bits are not measured."""
        records = []
        for kind, values in self._by_kind.items():
            black, white = find_range(kind, self._value_range)
            record = {"kind": kind, "count": values.count, "black": black, "white": white}
            if kind != "8-bit" and values.smallest <= values.largest:
                record |= {"smallest": values.smallest, "largest": values.largest}
            records.append(record)
        return records

    def _describe_range(self, kind: Kind) -> str:
        """Return the range of a type as text: the setting, or null with the default."""
        if self._value_range is not None:
            return format_range(self._value_range)
        return f"null ({_interval(*_RANGES[kind])})"


def fits(values: ImageValues, value_range: Sequence[float] | None) -> bool:
    """Return True if the values of an image are in the range of their type; floats may exceed it by half a level.

    A range other than [0, 65535] fits no image of 8 bits and none of colour.
    """
    if values.kind == "8-bit":
        return value_range is None
    if values.kind == "16-bit colour":
        return value_range is None or tuple(value_range) == _RANGES[values.kind]
    black, white = find_range(values.kind, value_range)
    tolerance = (white - black) / 255 / 2 if values.kind == "float" else 0
    return black - tolerance <= values.smallest and values.largest <= white + tolerance


def describe_values(records: Sequence[dict[str, Any]]) -> str:
    """Describe the stored values of a data set and their scaling in one line, from `DatasetValues.records`."""
    texts = []
    for record in records:
        text = f"{record['count']:,} {_NOUNS[record['kind']]}"
        if record["count"] == 1:
            text = text.replace("images", "image", 1)
        if record["kind"] == "8-bit":
            texts.append(f"{text}, taken as they are")
            continue
        if "smallest" in record:
            text += f" ({_interval(record['smallest'], record['largest'])})"
        texts.append(f"{text}, of which {_number(record['black'])} becomes black and {_number(record['white'])} white")
    return "; ".join(texts)


def describe_rule(value_range: Sequence[float] | None) -> str:
    """Describe in one line how stored values are scaled, for a data set whose images are not read yet."""
    if value_range is not None:
        black, white = map(_number, value_range)
        return f"images have more than 8 bits; {black} becomes black and {white} white"
    return "8 bits as stored; integers of more bits: 0 black, 65535 white; floats: 0 black, 1 white"


def find_shade(counts: np.ndarray) -> Literal["", "black", "white"]:
    """Return ``black`` or ``white`` if 99 % of an image's pixels are nearly so, otherwise an empty text.

    Args:
        counts: number of pixels of each channel and level, (channels, 256).
    """
    enough = _SHARE * counts.sum()
    if counts[:, : _DARK + 1].sum() >= enough:
        return "black"
    return "white" if counts[:, _BRIGHT:].sum() >= enough else ""


def describe_shades(names_by_shade: dict[str, list[str]], count: int) -> list[str]:
    """Return a warning for nearly black and one for nearly white images, if there are any among `count` images."""
    warnings = []
    for shade, limit in (("black", f"{_DARK} or less"), ("white", f"{_BRIGHT} or more")):
        names = names_by_shade.get(shade, [])
        if names:
            listed = ", ".join(names[:_MOST_WARNED_NAMES]) + (", ..." if len(names) > _MOST_WARNED_NAMES else "")
            warnings.append(
                f"{len(names)} of {count} images are nearly {shade} ({_SHARE:.0%} of the pixels are {limit} of 255): "
                f"{listed}; if they should not be, correct the files or dataset.value_range"
            )
    return warnings


def _suggest_range(kind: Kind, smallest: float, largest: float) -> tuple[float, float]:
    """Return a range that contains the values of a data set, and preferably a usual one, for an error message."""
    if smallest < 0:
        return (-1, 1) if kind == "float" and smallest >= -1.002 and largest <= 1.002 else (smallest, largest)
    if kind != "float":
        bits = max(int(largest).bit_length(), 8)
        return (0, 2**bits - 1) if largest > 1 else (0, 1)
    for white in (255, 4095, 65535):  # of floats that were integers
        if white / 2 < largest <= white:
            return 0, white
    return 0, largest


def _number(value: float) -> str:
    """Return a number as a user would write it, with six digits unless it is an integer."""
    return str(int(value)) if float(value).is_integer() else f"{value:.6g}"


def _interval(low: float, high: float) -> str:
    return f"{_number(low)} to {_number(high)}"


def format_range(value_range: Sequence[float] | None) -> str:
    """Return a range as a user would write it."""
    return "null" if value_range is None else f"[{', '.join(map(_number, value_range))}]"
