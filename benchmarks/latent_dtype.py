"""Error of x0 if latents are stored in float16: a trained autoencoder on digits, and TAESD on CIFAR-10.

    python benchmarks/latent_dtype.py --out benchmarks/results/latent_dtype.csv

Images are encoded twice, with `autoencoder.dtype` float32 and float16. x0 is a sample of the moments, with equal noise.
CIFAR-10 and TAESD are read from the folder $DATA, see benchmarks/README.md; without them their row is skipped.

Columns:
    data: data set and autoencoder.
    values: number of values of x0.
    bytes_ratio: bytes of the latents in float16 over float32.
    max_error: largest absolute error of x0, whose standard deviation is about 1.
    max_relative: largest error of a value relative to the value's magnitude, over values of at least 0.01.
    rms_error: root mean square of the error.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from result_file import write_rows

from kairos.autoencoders.codec import load_codec
from kairos.autoencoders.encode import encode
from kairos.autoencoders.settings import AutoencoderConfig
from kairos.autoencoders.train_or_load import make_autoencoder
from kairos.data.dataset import open_dataset
from kairos.data.latents import open_latents
from kairos.data.prepare import prepare
from kairos.data.settings import DatasetConfig

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("DATA", ROOT.parent / "shared" / "data")).resolve()
FIELDS = ["data", "values", "bytes_ratio", "max_error", "max_relative", "rms_error"]


def measure(name: str, dataset: DatasetConfig, autoencoder: AutoencoderConfig, folder: Path) -> list[object]:
    """Encode a data set in both data types and return a row of the table, in the order of `FIELDS`.

    Data set, autoencoder and latents are written into `folder`.
    """
    prepare(dataset, folder / "dataset")
    images = open_dataset(folder / "dataset")
    make_autoencoder(autoencoder, images, folder / "autoencoder", torch.device("cpu"))
    codec = load_codec(folder / "autoencoder")
    x0, sizes = [], []
    for dtype in ("float32", "float16"):
        encode(images, codec, folder / dtype, False, 64, dtype=dtype)
        latents = open_latents(folder / dtype)
        noise = torch.randn(len(images.images), *latents.shape, generator=torch.Generator().manual_seed(0))
        x0.append(latents.load_x0(np.arange(len(images.images)), noise=noise).double())
        sizes.append(sum(file.stat().st_size for file in (folder / dtype).glob("*.npy")))
    x0_float32, x0_float16 = x0
    error = (x0_float16 - x0_float32).abs()
    relative_error = (error / x0_float32.abs())[x0_float32.abs() >= 0.01]
    errors = (error.max(), relative_error.max(), error.square().mean().sqrt())
    return [name, x0_float32.numel(), f"{sizes[1] / sizes[0]:.3f}", *(f"{number:.2e}" for number in errors)]


def main() -> None:
    """Measure all cases and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    trained = AutoencoderConfig(kind="train", channels=[16, 32], steps=300)
    cases = [("digits, trained autoencoder", DatasetConfig(color="grey"), trained)]
    cifar = DATA / "cifar10"
    if cifar.is_dir() and (DATA / "taesd").is_dir():
        tables = DatasetConfig(source="parquet", path=f"{cifar}/train-*.parquet", limit=500, resolution=64)
        cases.append(
            ("CIFAR-10 at 64 pixels, TAESD", tables, AutoencoderConfig(kind="pretrained", path=f"{DATA}/taesd"))
        )
    rows = []
    for name, dataset, autoencoder in cases:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(name, dataset, autoencoder, Path(folder)))
        print(dict(zip(FIELDS, rows[-1])), flush=True)
    setting = f"python {' '.join(sys.argv)}; torch {torch.__version__}"
    write_rows(arguments.out, [dict(zip(FIELDS, row)) for row in rows], setting)


if __name__ == "__main__":
    main()
