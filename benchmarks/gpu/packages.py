"""Print the folder of packages that a GPU machine lacks, for PYTHONPATH; an empty line if there is none.

    PYTHONPATH=$(python benchmarks/gpu/packages.py) ...

The wheels in the folder $WHEELS are unpacked, for a machine without a network; ``make gpu-wheels`` downloads them.
Without $WHEELS, pip installs pydantic and jaxtyping if Python does not find both. Both ways fill a folder below the
user's cache, and no installed package changes.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

REQUIRED = ("pydantic", "jaxtyping")  # pure Python, except the core of pydantic
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def find_packages() -> str:
    """Return the folder of unpacked or installed packages, after filling it; empty if none is needed.

    Raises:
        SystemExit: there are no wheels in $WHEELS, or pip cannot install the packages.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kairos"
    if wheels := os.environ.get("WHEELS"):
        return str(_unpack_wheels(Path(wheels), cache))
    if all(map(importlib.util.find_spec, REQUIRED)):
        return ""
    folder = cache / f"gpu-packages-{VERSION}"
    if not all((folder / name).is_dir() for name in REQUIRED):
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), *REQUIRED]
        if subprocess.run(command, stdout=sys.stderr).returncode:
            raise SystemExit(
                f"{' and '.join(REQUIRED)}: missing, and pip cannot install them. On a machine with a network run "
                f"`make gpu-wheels GPU_PYTHON={VERSION}`, copy wheels/ here, and run `WHEELS=wheels make gpu`"
            )
    return str(folder)


def _unpack_wheels(wheels: Path, cache: Path) -> Path:
    """Unpack the wheels of a folder below `cache`, and return the folder with their packages.

    Raises:
        SystemExit: the folder contains no wheels.
    """
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise SystemExit(f"WHEELS: got {wheels}, allowed: a folder with wheels (*.whl)")
    names = " ".join(file.name for file in files)
    folder = cache / f"gpu-wheels-{hashlib.sha256(names.encode()).hexdigest()[:16]}"
    for file in files:
        with zipfile.ZipFile(file) as archive:
            archive.extractall(folder)
    return folder


if __name__ == "__main__":
    print(find_packages())
