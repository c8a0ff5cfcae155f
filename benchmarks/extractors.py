"""Test if feature distances rank known image damage: self-supervised extractor compared with a classifier.

    python benchmarks/extractors.py --data $DATA --out benchmarks/results/extractors.csv

Every extractor is trained on the same 10,000 images of CIFAR-10 or of Fashion-MNIST (padded to 32×32), by default for
two seeds. The distance from their statistics is computed for sets of 900 held-out images:

- ``floor``: undamaged images;
- ``blur``: blurred images, by standard deviation in pixels;
- ``noise``: images with noise, by standard deviation in grey levels of 255;
- ``modes``: images of 8, 5 or 2 of the ten classes.

The distance of ``modes`` depends on the classes that are left out, also for a classifier. It is therefore a mean over
ten cyclic choices of consecutive classes, which leave out every class equally often.

Columns: ``distance``, and its ``ratio`` to the floor. Rows with damage ``order`` report if the distances of each kind
of damage rise strictly from the floor. Their ``rank`` is Spearman's correlation over all damages with the first
extractor of that seed; ``seconds`` is the CPU time of training.

Other pretext tasks: ``parts``, the quarter of an image that a crop is from and the crop's rotation. ``contrastive`` is
NT-Xent of two crops with changed brightness and contrast (Chen et al. 2020). ``untrained`` is a random network.
"""

import argparse
import csv
import io
import time
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter
from scipy.stats import spearmanr
from torch import Tensor, nn

from kairos.data.dataset import PreparedDataset
from kairos.data.random_order import random_order
from kairos.evaluation import classifier, extractors, measurements, metrics
from kairos.evaluation.settings import ClassifierOptions, SelfsupervisedOptions
from kairos.files import write_record
from kairos_timesteps.randomness import Stream

FILES = {
    "cifar10": "cifar10/train-00000-of-00001.parquet",
    "fashion_mnist": "fashion_mnist/train-00000-of-00001.parquet",
}
BLUR = (0.4, 0.6, 1.0, 1.5, 2.5)
NOISE = (4, 8, 16, 32, 64)
MODES = (8, 5, 2)
PART = 0.8  # of an image's side
KINDS = ("blur", "noise", "modes")
Train = Callable[[Any, PreparedDataset, Path], dict[str, Any]]


def load(folder: Path, name: str, train: int, heldout: int) -> PreparedDataset:
    """Return `train` training images and `heldout` held-out images of a data set in the form that stage prepare gives.

    Images are selected at random, equally at each call. Grey images of 28 pixels are padded to 32.

    Args:
        folder: folder of the data sets.
        name: name of the data set, a key of `FILES`.
        train, heldout: numbers of images.
    """
    table = pq.read_table(folder / FILES[name])
    rows = random_order(Stream(0, "benchmark images"), len(table))[: train + heldout].numpy()
    table = table.take(rows)
    column = next(column for column in table.column_names if column != "label")
    images = np.stack([np.asarray(Image.open(io.BytesIO(cell["bytes"]))) for cell in table[column].to_pylist()])
    if images.ndim == 3:
        images = np.pad(images, ((0, 0), (2, 2), (2, 2)))[..., None]
    labels = np.array(table["label"].to_pylist())
    train_indices, heldout_indices = np.split(np.arange(len(table)), [train])
    record = {"classes": [str(label) for label in range(10)], "content_sha256": name}
    return PreparedDataset(folder, images, train_indices, heldout_indices, {"class": labels}, record)


def damaged(images: np.ndarray) -> dict[str, np.ndarray]:
    """Return blurred and noisy images by kind and strength, uint8; all noisy images have one noise, scaled."""
    pixels, noise = images.astype(np.float64), np.random.default_rng(0).normal(size=images.shape)
    damaged_images = {f"blur {sigma}": gaussian_filter(pixels, (0, sigma, sigma, 0)) for sigma in BLUR}
    damaged_images |= {f"noise {sigma}": pixels + sigma * noise for sigma in NOISE}
    return {name: values.round().clip(0, 255).astype(np.uint8) for name, values in damaged_images.items()}


def measure(extractor: extractors.Extractor, dataset: PreparedDataset, count: int) -> dict[str, float]:
    """Return the distance of every damage and of `floor` from the training images, by name.

    Each distance is of `count` held-out images. The distance of ``modes`` is a mean over ten selections of classes.

    Raises:
        AssertionError: a selection of classes has too few held-out images.
    """

    def compute_features(images: np.ndarray) -> Tensor:
        batches = measurements.iterate_rows(images, range(len(images)))
        return torch.cat([extractor.compute_layers(batch)["features"] for batch in batches])

    def fit_gaussian(features: Tensor) -> metrics.Gaussian:
        sums = measurements.MomentSums()
        sums.add(features)
        return sums.mean_and_covariance

    real = metrics.RealStatistics({"features": fit_gaussian(compute_features(dataset.images[dataset.train]))})

    def compute_distance(features: Tensor) -> float:
        return metrics.frechet_distance(fit_gaussian(features), real, "features")

    heldout = dataset.images[dataset.heldout]
    heldout_features = compute_features(heldout)
    labels = dataset.conditions["class"][dataset.heldout]
    distances = {"floor": compute_distance(heldout_features[:count])}
    for name, images in damaged(heldout[:count]).items():
        distances[name] = compute_distance(compute_features(images))
    for modes in MODES:
        # images of `modes` consecutive classes, for each first class
        sets = [heldout_features[(labels - first) % 10 < modes][:count] for first in range(10)]
        has_enough = all(len(features) == count for features in sets)
        assert has_enough, f"too few held-out images for {count} of {modes} classes"
        distances[f"modes {modes}"] = float(np.mean([compute_distance(features) for features in sets]))
    return distances


def ordered(distances: dict[str, float], kind: str) -> bool:
    """Return True if the distances of a kind of damage rise strictly with its strength, starting from the floor."""
    values = [distances["floor"], *(value for name, value in distances.items() if name.startswith(kind))]
    return all(low < high for low, high in pairwise(values))


def parts(options: SelfsupervisedOptions, dataset: PreparedDataset, folder: Path) -> dict[str, Any]:
    """Train with another pretext task: predict the quarter of the image that a crop is from, and its rotation.

    The network is written into `folder`; returns its record.
    """

    def task(indices: np.ndarray, step: int) -> tuple[Tensor, Tensor]:
        classes = Stream(options.seed, "classes").integers(step, 16, range(len(indices)))
        positions = Stream(options.seed, "places").uniform(step, range(len(indices)), (2,))
        crops = mirrored(classifier.load_pixels(dataset, indices), classes % 4, positions)
        return classifier.rotate_images(crops, classes // 4), classes

    return classifier.train_on_task("parts", options, dataset, 16, task, folder)


def mirrored(images: Tensor, quarters: Tensor, positions: Tensor) -> Tensor:
    """Return crops of images, each in the middle of an image of the original size that mirrors its borders.

    No pixel is interpolated: a network that was only trained on enlarged crops takes blurred images for normal ones.

    Args:
        images: (n, channels, side, side).
        quarters: corner towards which each crop lies, int64 (n,).
        positions: position of each crop within the range of its quarter, (n, 2) in [0, 1).
    """
    side = images.shape[-1]
    last = round(PART * side) - 1
    inside = last - (last - (torch.arange(side) - (side - last - 1) // 2).abs()).abs()  # (side,): row of the square
    corners = torch.stack([quarters // 2, quarters % 2], dim=1)  # (n, 2): down, across
    offsets = ((side - last) / 2 * (corners + positions)).long()  # (n, 2): half of the side - last places each
    rows, columns = (offsets[:, :, None] + inside).unbind(1)  # (n, side) each
    image_indices = torch.arange(len(images))[:, None, None]
    return images[image_indices, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def contrastive(options: SelfsupervisedOptions, dataset: PreparedDataset, folder: Path) -> dict[str, Any]:
    """Train with another task: find the two crops of a batch that are from one image.

    The number of steps is half of the option's, at equal cost. The network is written into `folder`; returns its
    record.
    """

    class Pairs(nn.Module):
        """Features, and similarities of the outputs of the head: the classes are the other crops of the batch."""

        def __init__(self, *arguments: Any):
            super().__init__()
            self.inner = classifier.Classifier(*arguments)

        def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
            features, projected = self.inner(images)
            unit = nn.functional.normalize(projected, dim=1)
            return features, (unit @ unit.T / 0.2).fill_diagonal_(-1e9)

    torch.manual_seed(options.seed)
    pairs = Pairs(tuple(dataset.images.shape[1:]), 64, options.channels, options.features)
    steps = max(1, options.steps // 2)
    optimizer = torch.optim.AdamW(pairs.parameters(), lr=options.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, total_steps=steps)
    size = options.batch_size
    classes = torch.arange(2 * size).roll(size)
    for step in range(steps):
        indices = dataset.train[Stream(options.seed, "pairs").integers(step, len(dataset.train), range(size)).numpy()]
        images = classifier.load_pixels(dataset, indices).repeat(2, 1, 1, 1)
        quarters = Stream(options.seed, "quarters").integers(step, 4, range(2 * size))
        images = mirrored(images, quarters, Stream(options.seed, "places").uniform(step, range(2 * size), (2,)))
        light = Stream(options.seed, "light").uniform(step, range(2 * size), (2, 1, 1, 1)).float()
        images = (images.float() - 127.5) * (0.6 + 0.8 * light[:, 0]) + 127.5 + 76 * (light[:, 1] - 0.5)
        loss = nn.functional.cross_entropy(pairs(images)[1], classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return _write(pairs.inner, "contrastive", dataset, options, 64, folder)


def untrained(options: SelfsupervisedOptions, dataset: PreparedDataset, folder: Path) -> dict[str, Any]:
    """Write a network with its initial weights into `folder`, and return its record."""
    torch.manual_seed(options.seed)
    shape = tuple(dataset.images.shape[1:])
    model = classifier.Classifier(shape, 4, options.channels, options.features)
    return _write(model, "untrained", dataset, options, 4, folder)


def _write(model: nn.Module, kind: str, dataset: PreparedDataset, options: Any, classes: int, folder: Path) -> dict:
    """Write the weights of a network into a folder, and return the record with which `classifier.load` opens it."""
    from safetensors.torch import save_file

    save_file(model.state_dict(), folder / classifier.WEIGHTS)
    shape = list(dataset.images.shape[1:])
    return {"name": kind, "metric": "d", "features": options.features, "classes": classes, "shape": shape}


TRAINED: dict[str, Train] = {
    "classifier": classifier.train,
    "selfsupervised": classifier.train_on_rotations,
    "parts": parts,
    "contrastive": contrastive,
    "untrained": untrained,
}


def trained(name: str, dataset: PreparedDataset, **options: Any) -> tuple[extractors.Extractor, float]:
    """Train an extractor of `TRAINED` with some options; return it and the CPU seconds of its training."""
    settings = (ClassifierOptions if name == "classifier" else SelfsupervisedOptions)(**options)
    with TemporaryDirectory() as folder:
        begun = time.process_time()
        record = {"options": vars(settings), **TRAINED[name](settings, dataset, Path(folder))}
        seconds = time.process_time() - begun
        write_record(Path(folder) / "record.json", record)
        return classifier.load(Path(folder), record), seconds


def main() -> None:
    """Measure, print a line per extractor, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder with cifar10/, fashion_mnist/")
    parser.add_argument("--out", type=Path, required=True, metavar="F", help="CSV file to write")
    parser.add_argument("--sets", nargs="+", default=list(FILES), choices=FILES, metavar="NAME", help="data sets")
    parser.add_argument("--extractors", nargs="+", default=list(TRAINED), choices=TRAINED, metavar="NAME")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="trainings of each extractor")
    parser.add_argument(
        "--images", type=int, nargs=3, default=(10_000, 5000, 900), metavar="N", help="train, held, set"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    train, heldout, count = arguments.images
    names = " ".join(f"'{name}'" if " " in name else name for name in arguments.extractors)
    head = f"# python benchmarks/extractors.py --extractors {names} --seeds {arguments.seeds} "
    head += f"--images {train} {heldout} {count}: torch {torch.__version__}, cpu, 1 thread\n"
    sets = {data: load(arguments.data, data, train, heldout) for data in arguments.sets}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with open(arguments.out, "w", newline="", encoding="utf-8") as file:
        file.write(head)
        columns = ["data", "seed", "extractor", "damage", "distance", "ratio", "rank", "seconds", *KINDS]
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for seed, (data, dataset) in product(range(arguments.seeds), sets.items()):
            first: dict[str, float] = {}
            for name in arguments.extractors:
                extractor, seconds = trained(name, dataset, seed=seed)
                distances = measure(extractor, dataset, count)
                first = first or distances
                rank = float(spearmanr(list(distances.values()), [first[damage] for damage in distances])[0])
                right = {kind: ordered(distances, kind) for kind in KINDS}
                ratios = {damage: value / distances["floor"] for damage, value in distances.items()}
                text = "  ".join(f"{damage} {ratio:.3f}" for damage, ratio in ratios.items())
                print(f"{data} {name} seed {seed}: {seconds:.0f} s, rank {rank:.3f}, {right}\n  {text}", flush=True)
                key = {"data": data, "seed": seed, "extractor": name}
                for damage, value in distances.items():
                    row = key | {"damage": damage, "distance": f"{value:.5g}", "ratio": f"{ratios[damage]:.4f}"}
                    writer.writerow(row)
                writer.writerow(key | {"damage": "order", "rank": f"{rank:.4f}", "seconds": round(seconds), **right})
                file.flush()


if __name__ == "__main__":
    main()
