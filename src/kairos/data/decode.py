"""Conversion of image files to arrays of one format: 8 bits, grey or RGB, square, with the configured resolution."""

import io
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from kairos.array_shapes import SingleImage
from kairos.data.values import SIXTEEN_BIT_COLOUR, find_kind, find_range
from kairos_timesteps.errors import KairosError

RESAMPLING = {"bicubic": Image.Resampling.BICUBIC, "lanczos": Image.Resampling.LANCZOS}
# how images of each EXIF orientation become upright; 1 is upright
_TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def read_image(data: bytes | Path) -> Image.Image:
    """Decode an image file completely, and return it upright, rotated or mirrored as its EXIF orientation requires.

    Args:
        data: content or path of the file.

    Raises:
        ValueError: the file is missing or cannot be decoded; the message contains the reason.
    """
    try:
        with Image.open(io.BytesIO(data) if isinstance(data, bytes) else data) as image:
            mark_sixteen_bit_colour(image)
            image.load()  # open alone reads the header only; a truncated file fails here
            # not `ImageOps.exif_transpose`, which also encodes the other EXIF tags again and fails if one is damaged
            transposition = find_transposition(image)
            return image if transposition is None else image.transpose(transposition)
    except UnidentifiedImageError:  # its message contains the address of an object, which varies
        raise ValueError("cannot identify image file") from None
    except MemoryError:  # a property of the machine, not of the image
        raise
    except Exception as error:  # PIL raises errors of many types for damaged files, such as struct.error and TypeError
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from None


def find_transposition(image: Image.Image) -> Image.Transpose | None:
    """Return the rotation or reflection that makes an image upright by its EXIF orientation; None if it is upright.

    An orientation that is not an integer from 2 to 8 is ignored.
    """
    orientation = image.getexif().get(ExifTags.Base.Orientation)
    return _TRANSPOSITIONS.get(orientation) if isinstance(orientation, int) else None


def mark_sixteen_bit_colour(image: Image.Image) -> None:
    """Set `SIXTEEN_BIT_COLOUR` in the information of an image of 16 bits per channel, of which PIL reads the upper 8.

    Grey images of 16 bits, which PIL reads completely, get no mark. The pixels must not have been read yet.
    """
    # PIL describes the bytes of a file as in ``RGB;16B``, with the order of the bytes; ``BGR;16`` has 16 bits a pixel
    is_reduced = any(re.search(r";16[BLN]", str(tile.args)) for tile in getattr(image, "tile", ()))
    if is_reduced and not image.mode.startswith("I"):
        image.info[SIXTEEN_BIT_COLOUR] = True


def to_pixels(
    image: Image.Image,
    color: str,
    crop: str,
    resolution: int | None,
    name: str,
    resample: str = "bicubic",
    value_range: Sequence[float] | None = None,
) -> SingleImage:
    """Convert a decoded image to the format of the data set, uint8 (height, width, channels).

    Values of `crop`:

    * ``center``: cut out the largest centred square.
    * ``pad``: centre the image on a black square. Its side is `resolution`, or without one the image's longer side.
    * ``none``: accept square images only.
    * ``adm``: the cropping of ADM, DiT, U-ViT and SpeeD. Halve the image by averaging while its short side is at least
      twice the resolution, resize it, then cut out the centre. The caller ensures that there is a resolution.

    Except with ``adm``, the image is resized after cropping. Images with more than 8 bits or with transparency are
    converted by `_to_eight_bit`. The caller ensures that their values are in the range, see `values.DatasetValues`.

    Args:
        image: the decoded image, in any mode of PIL.
        color: ``grey`` (1 channel) or ``rgb`` (3 channels).
        crop: how the image becomes square.
        resolution: side in pixels after resizing (with antialiasing); None: the image is not resized.
        name: name of the image in error messages.
        resample: filter for resizing, a key of `RESAMPLING`.
        value_range: values that become black and white, see `values.find_range`.

    Raises:
        KairosError: the image is not square and `crop` is ``none``, or it is too large for padding.
    """
    image = _to_eight_bit(image, value_range)
    mode = "L" if color == "grey" else "RGB"
    if image.mode != mode:  # convert copies an image even if it already has the mode
        image = image.convert(mode)
    if crop == "adm":
        assert resolution is not None  # DatasetConfig checks that
        image = _resize_short_side(image, resolution, RESAMPLING[resample])
    # side of the square to cut out
    width, height = image.size
    if crop == "none" and width != height:
        raise KairosError(f"dataset.crop: {name} is {width}×{height} pixels, crop none takes square images only")
    if crop == "pad":
        side = resolution or max(width, height)
        if side < max(width, height):
            raise KairosError(
                f"dataset.resolution: got {resolution} with crop pad, but {name} is {width}×{height} pixels; "
                "allowed: its longer side or more"
            )
    else:
        side = min(width, height)
    # Cut it out. With pad the corner is negative; `int` rounds it towards 0, and // would not.
    left = int((width - side) / 2)
    top = int((height - side) / 2)
    image = image.crop((left, top, left + side, top + side))  # black beyond the edges of the image
    if resolution is not None and image.size != (resolution, resolution):
        image = image.resize((resolution, resolution), RESAMPLING[resample])
    return np.atleast_3d(np.asarray(image))  # grey images get a channel axis


def _resize_short_side(image: Image.Image, resolution: int, resample: Image.Resampling) -> Image.Image:
    """Resize an image so that its short side is `resolution`, as `center_crop_arr` in ADM's image_datasets.py does.

    The image is first halved by averaging while its short side is at least twice the resolution. `resample` is the
    filter of the last step.
    """
    while min(image.size) >= 2 * resolution:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = resolution / min(image.size)
    return image.resize((round(image.width * scale), round(image.height * scale)), resample)


def _to_eight_bit(image: Image.Image, value_range: Sequence[float] | None) -> Image.Image:
    """Return an image as an opaque one with 8 bits per channel, grey or RGB.

    Integers of 16 or 32 bits and floats are scaled by `values.find_range` and rounded; values outside of the range
    become black or white. Transparency is composed over white and becomes RGB. Other modes, such as palettes and CMYK,
    become RGB. An opaque image with mode L or RGB is returned itself.
    """
    kind = find_kind(image)
    if kind in ("integer", "float"):
        black, white = find_range(kind, value_range)
        scaled = (np.asarray(image).astype(np.float64) - black) / (white - black) * 255
        return Image.fromarray(scaled.round().clip(0, 255).astype(np.uint8))
    has_alpha = "A" in image.mode or "a" in image.mode  # RGBA and LA, or premultiplied RGBa and La
    if has_alpha or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image if image.mode in ("L", "RGB") else image.convert("RGB")
