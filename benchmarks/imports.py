"""Import time of `kairos_timesteps.Strategy` beyond `import torch`: milliseconds, 10 new processes each.

    python benchmarks/imports.py > benchmarks/results/imports.csv

The modules are copied to a folder of their own first: once they are compiled there and kept, as pip does at
installation, once compiled anew by every process (PYTHONDONTWRITEBYTECODE=1).
"""

import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CODE = """
import time, torch
begun = time.perf_counter()
import kairos_timesteps
kairos_timesteps.Strategy
print(time.perf_counter() - begun, torch.__version__)
"""
RUNS = 10


def measured(folder: str, kept: bool) -> tuple[list[float], str]:
    """Return milliseconds of each import in a new process, and torch's version.

    A first process, which is not counted, reads and compiles the files.

    Args:
        folder: folder that contains the package.
        kept: True if compiled modules are kept for the next process.
    """
    environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "" if kept else "1"}
    command = [sys.executable, "-c", CODE]
    times, version = [], ""
    for _ in range(RUNS + 1):
        process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        seconds, version = process.stdout.split()
        times.append(1e3 * float(seconds))
    return times[1:], version


def main() -> None:
    """Print a row with compiled modules and a row without."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(__file__).resolve().parents[1] / "library" / "src" / "kairos_timesteps"
        shutil.copytree(source, Path(folder, "kairos_timesteps"), ignore=shutil.ignore_patterns("__pycache__"))
        rows = {way: measured(folder, kept) for way, kept in (("compiled anew", False), ("compiled before", True))}
    version = next(iter(rows.values()))[1]
    print(f"# {RUNS} processes each, python {platform.python_version()}, torch {version}, cpu {platform.machine()}")
    print("way,least_ms,median_ms")
    for way, (times, _) in rows.items():
        print(f"{way},{min(times):.1f},{statistics.median(times):.1f}")


if __name__ == "__main__":
    main()
