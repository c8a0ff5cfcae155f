"""Compare stage prepare with one thread and with several, for JPEG files of 250 and 500 pixels.

    python benchmarks/decoding.py --out benchmarks/results/decoding.csv

Each round prepares the images with one thread and then with several, so that a drift of the machine's speed affects
both. The benchmark checks that all written files are equal. The images are smooth random fields with noise, 4:3, as
files in a folder and in a zip.

Columns:
    source: folder or zip.
    pixels: short side of the files.
    resolution: side of the prepared images.
    threads: number of threads that is compared with one.
    images_per_s_one, images_per_s: fastest round with one thread and with several.
    ratio: images_per_s over images_per_s_one.
    cpu_ratio: CPU time of several threads over one thread.
"""

import argparse
import os
import platform
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image
from result_file import write_rows

from kairos.data.prepare import prepare
from kairos.data.settings import DatasetConfig
from kairos.files import sha256_file

SIZES = ((250, 64), (250, 256), (500, 256))  # short side of the files, and the resolution of the data set
FIELDS = ["source", "pixels", "resolution", "threads", "images_per_s_one", "images_per_s", "ratio", "cpu_ratio"]


def write_jpegs(folder: Path, count: int, side: int) -> None:
    """Write random images into a new folder, as JPEG files with the size in bytes of photographs.

    An image has `side` pixels in height and 4/3 `side` pixels in width.
    """
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    width = side * 4 // 3
    for index in range(count):
        coarse = random.integers(0, 256, (side // 16, width // 16, 3), dtype=np.uint8)
        smooth = Image.fromarray(coarse).resize((width, side), Image.Resampling.BICUBIC)
        noisy = np.asarray(smooth).astype(np.int64) + random.integers(-12, 13, (side, width, 3))
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / f"{index:04d}.jpg", quality=90)


def pack(folder: Path, archive: Path) -> None:
    """Pack the files of a folder into a zip, without compression."""
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(folder.iterdir()):
            file.write(path, path.name)


def measure(config: DatasetConfig, out: Path, threads: int) -> tuple[float, float, str]:
    """Prepare a data set with some threads; return wall seconds, CPU seconds and the hash of the images."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    wall_start, cpu_start = time.perf_counter(), time.process_time()
    prepare(config, out)
    wall, cpu = time.perf_counter() - wall_start, time.process_time() - cpu_start
    return wall, cpu, sha256_file(out / "images.npy")


def main() -> None:
    """Measure all sizes, print the ratios and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=4000, help="images of 250 pixels; half of this number of 500")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for side, resolution in SIZES:
            count = arguments.images * 250 // side
            images = folder / f"images{side}"
            if not images.exists():
                write_jpegs(images, count, side)
                pack(images, folder / f"images{side}.zip")
            for source, path in (("folder", images), ("zip", folder / f"images{side}.zip")):
                config = DatasetConfig(source=source, path=str(path), resolution=resolution)
                seconds: dict[int, list[tuple[float, float]]] = {1: [], arguments.threads: []}  # wall and CPU
                hashes = set()
                for _ in range(arguments.rounds):
                    for threads, seconds_of_rounds in seconds.items():
                        wall, cpu, content_hash = measure(config, folder / "out", threads)
                        seconds_of_rounds.append((wall, cpu))
                        hashes.add(content_hash)
                assert len(hashes) == 1, "the prepared images depend on the number of threads"
                one, several = (min(wall for wall, _ in rounds) for rounds in seconds.values())
                cpu_one, cpu_several = (min(cpu for _, cpu in rounds) for rounds in seconds.values())
                values = [source, side, resolution, arguments.threads, f"{count / one:.0f}", f"{count / several:.0f}"]
                rows.append([*values, f"{one / several:.2f}", f"{cpu_several / cpu_one:.2f}"])
                print(dict(zip(FIELDS, rows[-1])), flush=True)
    setting = f"python {' '.join(sys.argv)}; {os.cpu_count()} CPUs, Python {platform.python_version()}"
    write_rows(arguments.out, [dict(zip(FIELDS, row)) for row in rows], setting)


if __name__ == "__main__":
    main()
