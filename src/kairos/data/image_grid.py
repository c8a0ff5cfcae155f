"""Pictures that show many images in a grid."""

import io
import math
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from kairos.array_shapes import ImageArray
from kairos.files import atomic

SIDE = 48  # least side in pixels to which an image is enlarged
GAP = 2  # width in pixels of the white lines between images

Picture = UInt8[np.ndarray, "picture_height picture_width channels"]


def tile_images(images: ImageArray, columns: int | None = None, side: int = SIDE) -> Picture:
    """Arrange images in a grid, row by row, with white lines between them.

    Args:
        images: one or more images, (n, height, width, channels).
        columns: images per row; None: the square root of n, rounded up.
        side: each image is enlarged, by an integer factor, until its longer side has at least this many pixels.

    Returns:
        The picture, uint8 (height, width, channels), without a margin; cells without an image are white.
    """
    count, height, width, channels = images.shape
    factor = max(1, math.ceil(side / max(height, width)))
    images = images.repeat(factor, axis=1).repeat(factor, axis=2)
    if not columns:
        columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    # every cell is an image with a white line below and a white line to the right of it
    cell_height = height * factor + GAP
    cell_width = width * factor + GAP
    empty_cells = rows * columns - count
    cells = np.pad(images, ((0, empty_cells), (0, GAP), (0, GAP), (0, 0)), constant_values=255)
    grid = cells.reshape(rows, columns, cell_height, cell_width, channels)
    # after the swap: (rows, cell height, columns, cell width, channels)
    picture = grid.swapaxes(1, 2).reshape(rows * cell_height, columns * cell_width, channels)
    return picture[:-GAP, :-GAP]  # without the lines at the lower and right edge


def write_image_grid(path: Path, images: ImageArray, columns: int | None = None, side: int = SIDE) -> None:
    """Write the picture that `tile_images` returns as a PNG file, atomically; images with one channel are grey."""
    picture = tile_images(images, columns, side)
    if picture.shape[-1] == 1:  # PIL takes grey images without a channel dimension
        picture = picture[..., 0]
    content = io.BytesIO()
    Image.fromarray(picture).save(content, format="png")
    with atomic(path) as file:
        file.write(content.getvalue())
