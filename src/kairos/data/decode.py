"""An image file's content becomes pixels of one form: 8 bits, grey or RGB, square, of the resolution asked for."""

import io
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from kairos_timesteps.errors import KairosError

RESAMPLING = {"bicubic": Image.Resampling.BICUBIC, "lanczos": Image.Resampling.LANCZOS}


def read_image(data: bytes | Path) -> Image.Image:
    """Decode an image file completely, upright as its EXIF orientation says.

    Raises:
        ValueError: it cannot be decoded; the text says why.
    """
    try:
        with Image.open(io.BytesIO(data) if isinstance(data, bytes) else data) as image:
            image.load()  # open alone reads the header only; a truncated file fails here
            return ImageOps.exif_transpose(image)
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from None


def to_pixels(
    image: Image.Image, color: str, crop: str, resolution: int | None, name: str, resample: str = "bicubic"
) -> np.ndarray:
    """Bring a decoded image into the data set's form: uint8 (height, width, channels).

    Args:
        color: ``grey`` (1 channel) or ``rgb`` (3 channels).
        crop: ``center`` cuts the largest centred square out; ``pad`` sets the image in the middle of a black square of
            side `resolution`, or of its own longer side; ``none`` wants square images; ``adm`` is ADM's (also DiT's,
            U-ViT's and SpeeD's): halved by box while the short side has twice the resolution, resized, then cut.
        resolution: side in pixels after resizing (with antialiasing), or None to keep the size.
        name: what messages call the image.
        resample: the filter, of `RESAMPLING`.

    Raises:
        KairosError: the image is not square and nothing says to cut it, or too large to be padded.
    """
    image = _eight_bit(image).convert("L" if color == "grey" else "RGB")
    if crop == "adm":
        assert resolution is not None  # the section's own check
        while min(image.size) >= 2 * resolution:
            image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
        scale = resolution / min(image.size)  # image_datasets.py, center_crop_arr
        image = image.resize((round(image.width * scale), round(image.height * scale)), RESAMPLING[resample])
    width, height = image.size
    if crop == "none" and width != height:
        raise KairosError(f"dataset.crop: {name} is {width}×{height} pixels, crop none takes square images only")
    side = (resolution or max(width, height)) if crop == "pad" else min(width, height)
    if crop == "pad" and side < max(width, height):
        raise KairosError(
            f"dataset.resolution: got {resolution} with crop pad, but {name} is {width}×{height} pixels; "
            "allowed: its longer side or more"
        )
    left, top = int((width - side) / 2), int((height - side) / 2)  # adm: never negative, so as its own // 2
    image = image.crop((left, top, left + side, top + side))  # black where that is beyond its edges
    if resolution is not None and image.size != (resolution, resolution):
        image = image.resize((resolution, resolution), RESAMPLING[resample])
    return np.atleast_3d(np.asarray(image))


def _eight_bit(image: Image.Image) -> Image.Image:
    """Opaque, at most 8 bits per channel: transparency over white, 16 bits scaled by 1/257, floats of [0, 1] by 255."""
    if image.mode.startswith("I"):
        wide = np.asarray(image).astype(np.int64).clip(0, 65535)  # PIL has no 16-bit colour: these are grey
        return Image.fromarray(((wide + 128) // 257).astype(np.uint8))
    if image.mode == "F":
        values = np.asarray(image)
        top = 1.0 if values.max() <= 1.0 else 255.0
        return Image.fromarray((values / top * 255.0).round().clip(0, 255).astype(np.uint8))
    if "A" in image.mode or "a" in image.mode or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image if image.mode in ("L", "RGB") else image.convert("RGB")
