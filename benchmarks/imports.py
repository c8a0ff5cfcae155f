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
    """Return milliseconds of each run, and torch's version; a first run, not counted, reads and compiles the files."""
    environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "" if kept else "1"}
    run = [sys.executable, "-c", CODE]
    runs = [subprocess.run(run, env=environment, capture_output=True, text=True, check=True) for _ in range(RUNS + 1)]
    return [1e3 * float(one.stdout.split()[0]) for one in runs[1:]], runs[0].stdout.split()[1]


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
