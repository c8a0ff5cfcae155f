"""How well an autoencoder gives images back: PSNR in numbers, and a picture."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kairos.autoencoders.codec import Codec
from kairos.data.dataset import PreparedDataset, to_uint8
from kairos.data.grid import write_grid

PICTURED = 16
_SIDE = 64  # least side of an image in the picture


def reconstructions(
    codec: Codec, dataset: PreparedDataset, indices: np.ndarray, batch_size: int
) -> Iterator[np.ndarray]:
    """Images to the latents' means and back: batches of uint8 (n, height, width, channels)."""
    for batch in np.split(indices, range(batch_size, len(indices), batch_size)):
        yield to_uint8(codec.decode(codec.to_model_space(codec.encode(dataset.tensor(batch))[0])))


def psnr(images: np.ndarray, others: np.ndarray) -> float:
    """Peak signal-to-noise ratio in dB of uint8 images, from the mean squared error over all of them."""
    error = np.mean((images.astype(np.float64) - others.astype(np.float64)) ** 2)
    return 10 * math.log10(255**2 / max(float(error), 1e-12))


def write_picture(path: Path, images: np.ndarray, others: np.ndarray) -> None:
    """Rows of originals, each above the row of their reconstructions, enlarged so that people can see them."""
    shape = images.shape[1:]
    columns = min(8, len(images))
    white = np.full((-len(images) % columns, *shape), 255, np.uint8)
    rows = [np.concatenate([part, white]).reshape(-1, columns, *shape) for part in (images, others)]
    write_grid(path, np.stack(rows, axis=1).reshape(-1, *shape), columns, _SIDE)
