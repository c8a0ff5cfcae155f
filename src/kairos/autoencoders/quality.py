"""How well an autoencoder gives images back: PSNR in numbers, and a picture."""

import math
from pathlib import Path

import numpy as np

from kairos.autoencoders.codec import Codec
from kairos.data.dataset import PreparedDataset, to_uint8
from kairos.files import atomic

PICTURED = 16
_SIDE = 64  # least side of an image in the picture


def reconstruct(codec: Codec, dataset: PreparedDataset, indices: np.ndarray, batch_size: int) -> np.ndarray:
    """Images through the autoencoder and back, from the latents' means: uint8 (n, height, width, channels)."""
    parts = []
    for start in range(0, len(indices), batch_size):
        mean, _ = codec.encode(dataset.tensor(indices[start : start + batch_size]))
        parts.append(to_uint8(codec.decode(codec.to_model_space(mean))))
    return np.concatenate(parts)


def psnr(images: np.ndarray, others: np.ndarray) -> float:
    """Peak signal-to-noise ratio in dB of uint8 images, from the mean squared error over all of them."""
    error = np.mean((images.astype(np.float64) - others.astype(np.float64)) ** 2)
    return 10 * math.log10(255**2 / max(float(error), 1e-12))


def write_picture(path: Path, images: np.ndarray, others: np.ndarray) -> None:
    """Rows of originals, each above the row of their reconstructions, enlarged so that people can see them."""
    from PIL import Image

    count, height, width, channels = images[:PICTURED].shape
    columns = min(8, count)
    factor = max(1, -(-_SIDE // height))
    gap = 2
    rows = -(-count // columns)
    sheet = np.full((rows * (2 * height * factor + 3 * gap), columns * (width * factor + gap), channels), 255, np.uint8)
    for index in range(count):
        row, column = divmod(index, columns)
        for below, image in enumerate((images[index], others[index])):
            enlarged = image.repeat(factor, axis=0).repeat(factor, axis=1)
            top = row * (2 * height * factor + 3 * gap) + below * (height * factor + gap)
            left = column * (width * factor + gap)
            sheet[top : top + height * factor, left : left + width * factor] = enlarged
    with atomic(path) as file:
        Image.fromarray(sheet[:, :, 0] if channels == 1 else sheet).save(file, format="png")
