"""Compare the Fréchet Inception distance of two folders of PNG files by kairos and by torch-fidelity.

    python benchmarks/frechet.py --out benchmarks/results/frechet.csv

Both packages read the same random weights of Inception-v3, so that no download is needed.
Each computes the features of both folders; nothing is cached. The second folder has images of CIFAR-10 from $DATA, see
benchmarks/README.md. The first folder has other images of CIFAR-10, with noise. Without CIFAR-10, enlarged digits
replace it. Processes, one thread each:

- ``torch-fidelity``: its command, ``fidelity --fid``.
- ``kairos``: a process that reads the files with Pillow and calls the functions of stage evaluate. The command itself
  rejects sets of 2,048 images or fewer, the number of features.

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
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from result_file import write_rows

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("DATA", ROOT.parent / "shared" / "data")).resolve()
GENERATED, REAL = "generated", "real"
NOISE = 24  # largest change of a pixel of the first folder


def iterate_images() -> Iterator[np.ndarray]:
    """Yield different images, uint8 (32, 32, 3), of CIFAR-10, or digits if CIFAR-10 is not in the folder $DATA."""
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
    """Write `count` PNG files into each of the two folders below `folder`; the images of ``generated`` have noise."""
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


def write_weights(path: Path, layers: Sequence[str] = ("2048",)) -> Any:
    """Write random weights of torch-fidelity's Inception-v3, whose features have order 1; return the network.

    Convolutions have He's initialisation; weights and statistics of the normalisations are random too.
    """
    import torch
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    class RandomInception(FeatureExtractorInceptionV3):
        def load_state_dict(self, *arguments, **options):
            for layer in self.modules():
                if isinstance(layer, torch.nn.Conv2d):
                    torch.nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                elif isinstance(layer, torch.nn.BatchNorm2d):
                    for values in (layer.running_var, layer.weight.data):
                        values.uniform_(0.5, 1.5)
                    for values in (layer.running_mean, layer.bias.data):
                        values.uniform_(-0.5, 0.5)

    torch.manual_seed(0)
    torch.save({}, path)  # the network reads a file before `load_state_dict` replaces its content
    network = RandomInception("random", list(layers), feature_extractor_weights_path=str(path))
    torch.save(network.state_dict(), path)
    return network


def compute_distance(folder: Path, weights: Path) -> float:
    """Return the distance of the two folders below `folder` by the functions of stage evaluate, on one CPU thread.

    `weights` is the file of Inception-v3's weights.
    """
    from kairos import compute
    from kairos.evaluation.extractors import build_extractor, open_extractor
    from kairos.evaluation.measurements import iterate_rows, measure
    from kairos.evaluation.metrics import frechet_distance, statistics_to_store
    from kairos.evaluation.settings import InceptionOptions

    device = compute.setup(1, "cpu")
    with tempfile.TemporaryDirectory(dir=folder) as extractor_folder:
        build_extractor(InceptionOptions(path=str(weights)), None, Path(extractor_folder))
        extractor = open_extractor(Path(extractor_folder), device)
    statistics = {}
    for name in (GENERATED, REAL):
        paths = sorted((folder / name).glob("*.png"))
        images = np.stack([np.asarray(Image.open(path).convert("RGB")) for path in paths])
        statistics[name] = measure(extractor, iterate_rows(images, range(len(images))), {"moments"})
    real = statistics_to_store(statistics[REAL])
    return frechet_distance(statistics[GENERATED].gaussians["features"], real, layer="features")


def run_command(command: Sequence[str | Path], folder: Path) -> tuple[float, str]:
    """Run a command in a folder; return the CPU seconds of its processes and its standard output.

    Raises:
        subprocess.CalledProcessError: the command fails.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    output = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, output


def measure_torch_fidelity(folder: Path, weights: Path) -> tuple[float, float]:
    """Return CPU seconds and distance of torch-fidelity, as a process, for the two folders below `folder`."""
    inputs = ["--input1", folder / GENERATED, "--input2", folder / REAL]
    options = ["--cpu", "--fid", "--json", "--silent", "--no-cache", "--feature-extractor-weights-path", weights]
    seconds, output = run_command([sys.executable, "-m", "torch_fidelity.fidelity", *inputs, *options], folder)
    return seconds, json.loads(output)["frechet_inception_distance"]


def measure_kairos(folder: Path, weights: Path) -> tuple[float, float]:
    """Return CPU seconds and distance of kairos, as a process, for the two folders below `folder`."""
    seconds, output = run_command([sys.executable, __file__, "--compute", folder, weights], folder)
    return seconds, float(output)


def main() -> None:
    """Measure in rounds, print each row and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=2000, help="PNG files of each folder")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compute", type=Path, nargs=2, help=argparse.SUPPRESS)  # the process of kairos
    arguments = parser.parse_args()
    if arguments.compute:
        print(compute_distance(*arguments.compute))
        return
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_folders(folder, arguments.images)
        weights = folder / "weights.pth"
        write_weights(weights)
        for number in range(arguments.rounds):
            other_seconds, other_distance = measure_torch_fidelity(folder, weights)
            seconds, distance = measure_kairos(folder, weights)
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
        write_rows(
            arguments.out,
            rows,
            f"python benchmarks/frechet.py --images {arguments.images} --rounds {arguments.rounds}; {setting}",
        )


if __name__ == "__main__":
    main()
