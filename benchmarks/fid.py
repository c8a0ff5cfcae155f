"""Compute FID with the published Inception for slices of CIFAR-10, a fitted Gaussian and uniform noise.

    python benchmarks/fid.py --out benchmarks/results/fid.csv

The 50,000 training images of CIFAR-10 come from $DATA, see benchmarks/README.md. The weights are downloaded if they are
missing. Moments of 5,000 images each are saved in --folder as soon as they are computed, so that a repeated command
resumes. Moments of larger sets are merged from these. ``real.npz`` in the folder has mean and covariance of all 50,000
images, for ``evaluation.reference``.

Sets:

- ``gaussian``: 10,000 samples of a Gaussian with mean and covariance of the pixels of all training images, rounded.
- ``noise``: 10,000 images of uniform noise.

Columns:
    set, reference: the two sets of images; `real a:b` are the training images a to b - 1.
    fid: Fréchet distance of the features.
    images, reference_images: numbers of images.

The last line of the output has the seconds per 1,000 images, over all parts that this call has computed.
"""

import argparse
import platform
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from frechet import iterate_images
from result_file import write_rows

from kairos.array_shapes import Gaussian
from kairos.evaluation.evaluate import cache_published_extractor
from kairos.evaluation.extractors import open_extractor
from kairos.evaluation.measurements import iterate_rows, measure
from kairos.evaluation.metrics import RealStatistics, frechet_distance
from kairos.files import atomic
from kairos.progress import ProgressBar

PART = 5_000  # images whose moments are saved together
GENERATED = 10_000  # images of the sets gaussian and noise
PIXELS = 32 * 32 * 3
PAIRS = [  # sets and their references
    ("real 0:5000", "real 5000:10000"),
    ("real 0:25000", "real 25000:50000"),
    ("real 0:10000", "real 10000:50000"),
    ("real 0:10000", "real 0:50000"),
    ("gaussian", "real 0:50000"),
    ("noise", "real 0:50000"),
]


def draw_gaussian(images: np.ndarray) -> np.ndarray:
    """Return samples of a Gaussian fitted to the pixels of images, uint8 (n, 32, 32, 3)."""
    pixels = images.reshape(-1, PIXELS).astype(np.float32)
    mean = pixels.mean(0)
    root = np.linalg.cholesky(np.cov(pixels, rowvar=False) + 1e-3 * np.eye(PIXELS))
    samples = mean + np.random.default_rng(0).standard_normal((GENERATED, PIXELS)) @ root.T
    return samples.round().clip(0, 255).astype(np.uint8).reshape(-1, 32, 32, 3)


def list_parts(images: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield name and images of all parts, in the order in which they are needed."""
    for start in range(0, len(images), PART):
        yield f"real-{start}", images[start : start + PART]
    for name in ("gaussian", "noise"):
        generated = None
        for start in range(0, GENERATED, PART):
            if generated is None:
                shape = (GENERATED, 32, 32, 3)
                noise = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
                generated = draw_gaussian(images) if name == "gaussian" else noise
            yield f"{name}-{start}", generated[start : start + PART]


def merge(parts: list[Gaussian]) -> Gaussian:
    """Return mean and unbiased covariance of the union of parts of `PART` images each."""
    means = np.stack([mean for mean, _ in parts])
    within = sum((PART - 1) * covariance for _, covariance in parts)
    between = PART * (means - means.mean(0)).T @ (means - means.mean(0))
    return means.mean(0), (within + between) / (len(parts) * PART - 1)


def load(folder: Path, name: str) -> tuple[Gaussian, int]:
    """Return the moments of a set, such as ``real 0:25000`` or ``noise``, and its number of images."""
    kind, _, positions = name.partition(" ")
    start, end = map(int, positions.split(":")) if positions else (0, GENERATED)
    parts = []
    for first in range(start, end, PART):
        with np.load(folder / f"{kind}-{first}.npz") as file:
            parts.append((file["mu"], file["sigma"]))
    return merge(parts), end - start


def main() -> None:
    """Compute the missing moments, and write the distances."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, default=Path("results/fid"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # each core computes a batch
    extractor = open_extractor(cache_published_extractor("inception"), torch.device(arguments.device))
    images = np.stack([*iterate_images()])
    seconds, count = 0.0, 0
    for name, part in list_parts(images):
        path = arguments.folder / f"{name}.npz"
        if path.exists():
            continue
        begun = time.perf_counter()
        progress = ProgressBar(len(part), name, "image")
        mean, covariance = measure(
            extractor, iterate_rows(part, range(PART)), {"moments"}, progress=progress
        ).gaussians["features"]
        progress.close()
        with atomic(path) as file:
            np.savez(file, mu=mean, sigma=covariance)
        seconds, count = seconds + time.perf_counter() - begun, count + len(part)
    (mean, covariance), _ = load(arguments.folder, "real 0:50000")
    with atomic(arguments.folder / "real.npz") as file:
        np.savez(file, mu=mean, sigma=covariance)
    rows = []
    for name, reference in PAIRS:
        (samples, image_count), (real, reference_count) = (
            load(arguments.folder, name),
            load(arguments.folder, reference),
        )
        distance = frechet_distance(samples, RealStatistics({"features": real}), layer="features")
        row = {"set": name, "reference": reference, "fid": f"{distance:.3f}"}
        rows.append({**row, "images": image_count, "reference_images": reference_count})
        print(rows[-1], flush=True)
    if arguments.out:
        device = f"{arguments.device}, {platform.machine()}"
        setting = f"python benchmarks/fid.py --out {arguments.out}; torch {torch.__version__}, {device}"
        write_rows(arguments.out, rows, setting)
    if count:
        print(f"{1000 * seconds / count:.1f} s per 1,000 images")


if __name__ == "__main__":
    main()
