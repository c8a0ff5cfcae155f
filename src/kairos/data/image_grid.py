"""A picture of many images, large enough to look at."""

import io
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kairos.files import atomic

SIDE = 48  # pixels an image is at least enlarged to
GAP = 2


def tile_images(images: NDArray[np.uint8], columns: int | None = None, side: int = SIDE) -> NDArray[np.uint8]:
    """Images (n, height, width, channels) in rows, enlarged by a whole factor, thin white lines between."""
    count, height, width, channels = images.shape
    factor = max(1, math.ceil(side / max(height, width)))
    images = images.repeat(factor, axis=1).repeat(factor, axis=2)
    columns = columns or math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    height, width = height * factor + GAP, width * factor + GAP
    cells = np.pad(images, ((0, rows * columns - count), (0, GAP), (0, GAP), (0, 0)), constant_values=255)
    picture = cells.reshape(rows, columns, height, width, channels).swapaxes(1, 2)
    return picture.reshape(rows * height, columns * width, channels)[:-GAP, :-GAP]


def write_image_grid(path: Path, images: NDArray[np.uint8], columns: int | None = None, side: int = SIDE) -> None:
    """Write the grid picture as PNG, atomically; one channel is grey."""
    picture = tile_images(images, columns, side)
    content = io.BytesIO()
    Image.fromarray(picture[..., 0] if picture.shape[-1] == 1 else picture).save(content, format="png")
    with atomic(path) as file:
        file.write(content.getvalue())
