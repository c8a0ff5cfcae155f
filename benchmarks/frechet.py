"""Compare the Fréchet Inception distance of two folders of PNG files by kairos and by torch-fidelity.

    python benchmarks/frechet.py --out benchmarks/results/frechet.csv

Both packages read the same weights of Inception-v3: random ones of He's initialisation, so that no download is needed.
Each computes the features of both folders; nothing is cached. The second folder has images of CIFAR-10 from $DATA, see
benchmarks/README.md. The first folder has other images of CIFAR-10, with noise. Without CIFAR-10, enlarged digits
replace it. Commands, one thread each:

- ``torch-fidelity``: ``fidelity --fid``.
- ``kairos``: both folders are packed into npz files with Pillow and numpy, which counts; then ``kairos evaluate
  --metrics fid``. It rejects sets of 2,048 images or fewer, the number of features.

Columns:
    images, round: PNG files of each folder, number of the round.
    torch_fidelity_s, kairos_s: CPU seconds of all processes, from the files to the distance.
    ratio: kairos_s over torch_fidelity_s.
    torch_fidelity, kairos: the distances.
    difference: relative difference of the distances.
"""

import argparse
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from cpu_time import run_command
from PIL import Image
from result_file import write_rows

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("DATA", ROOT.parent / "shared" / "data")).resolve()
GENERATED, REAL = "generated", "real"
NOISE = 24  # largest change of a pixel of the first folder


def iterate_images() -> Iterator[np.ndarray]:
    """Yield different images, uint8 (32, 32, 3)."""
    if (DATA / "cifar10").is_dir():
        import pyarrow.parquet as pq

        table = pq.ParquetFile(next((DATA / "cifar10").glob("train-*.parquet")))
        for batch in table.iter_batches(batch_size=1000, columns=["img"]):
            for image in batch.column("img").to_pylist():
                yield np.asarray(Image.open(io.BytesIO(image["bytes"])))
    else:
        from sklearn.datasets import load_digits

        digits = (load_digits().images * 15.9).astype(np.uint8)
        for shift in range(8):
            for digit in np.roll(digits, shift, axis=2):
                yield np.asarray(Image.fromarray(digit).resize((32, 32)).convert("RGB"))


def write_folders(folder: Path, count: int) -> None:
    """Write `count` PNG files into each of the two folders."""
    random = np.random.default_rng(0)
    images = iterate_images()
    for name in (REAL, GENERATED):
        (folder / name).mkdir()
        for index in range(count):
            image = next(images)
            if name == GENERATED:
                noise = random.integers(-NOISE, NOISE + 1, image.shape)
                image = (image + noise).clip(0, 255).astype(np.uint8)
            Image.fromarray(image).save(folder / name / f"{index:05d}.png")


def write_weights(path: Path) -> None:
    """Write random weights of torch-fidelity's Inception-v3, with features of the images' order of magnitude."""
    import torch
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    class RandomInception(FeatureExtractorInceptionV3):
        def load_state_dict(self, *arguments, **options):
            for layer in self.modules():
                if isinstance(layer, torch.nn.Conv2d):
                    torch.nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    torch.manual_seed(0)
    path.parent.mkdir(parents=True)
    torch.save({}, path)
    torch.save(RandomInception("random", ["2048"], feature_extractor_weights_path=str(path)).state_dict(), path)


def pack(folder: Path) -> None:
    """Pack the PNG files of a folder into an npz file of its name."""
    images = [np.asarray(Image.open(path).convert("RGB")) for path in sorted(folder.glob("*.png"))]
    np.savez(folder.with_suffix(".npz"), images=np.stack(images))


def measure_torch_fidelity(folder: Path, weights: Path) -> tuple[float, float]:
    """Return CPU seconds and distance of torch-fidelity."""
    inputs = ["--input1", folder / GENERATED, "--input2", folder / REAL]
    options = ["--cpu", "--fid", "--json", "--silent", "--no-cache", "--feature-extractor-weights-path", weights]
    seconds, output = run_command([sys.executable, "-m", "torch_fidelity.fidelity", *inputs, *options], folder)
    return seconds, json.loads(output)["frechet_inception_distance"]


def measure_kairos(folder: Path, weights_home: Path) -> tuple[float, float]:
    """Return CPU seconds and distance of kairos, whose cache begins empty."""
    with tempfile.TemporaryDirectory(dir=folder) as working_folder:
        total = 0.0
        for name in (GENERATED, REAL):
            seconds, _ = run_command([sys.executable, __file__, "--pack", folder / name], Path(working_folder))
            total += seconds
        files = ["--samples", folder / f"{GENERATED}.npz", "--reference", folder / f"{REAL}.npz", "--out", "x.json"]
        command = [sys.executable, "-m", "kairos", "evaluate", *files, "--metrics", "fid"]
        seconds, _ = run_command(command, Path(working_folder), {"TORCH_HOME": str(weights_home)})
        record = json.loads((Path(working_folder) / "x.json").read_text())
    return total + seconds, record["metrics"]["fid"]


def main() -> None:
    """Measure in rounds, print each row and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=2100, help="PNG files of each folder, more than 2,048")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pack", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.pack:
        pack(arguments.pack)
        return
    from kairos.evaluation.inception_weights import NAME

    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_folders(folder, arguments.images)
        weights = folder / "torch" / "hub" / "checkpoints" / NAME
        write_weights(weights)
        for number in range(arguments.rounds):
            other_seconds, other_distance = measure_torch_fidelity(folder, weights)
            seconds, distance = measure_kairos(folder, folder / "torch")
            rows.append({
                "images": arguments.images,
                "round": number + 1,
                "torch_fidelity_s": f"{other_seconds:.1f}",
                "kairos_s": f"{seconds:.1f}",
                "ratio": f"{seconds / other_seconds:.3f}",
                "torch_fidelity": f"{other_distance:.8g}",
                "kairos": f"{distance:.8g}",
                "difference": f"{abs(distance / other_distance - 1):.1e}",
            })  # fmt: skip
            print(rows[-1], flush=True)
    if arguments.out:
        import torch

        from kairos import portable

        setting = f"1 thread, torch {torch.__version__}, {portable.machine()['processor']}"
        write_rows(arguments.out, rows, f"python benchmarks/frechet.py; {setting}")


if __name__ == "__main__":
    main()
