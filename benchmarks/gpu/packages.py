"""Print the folder with packages that the GPU benchmarks need besides torch and numpy; empty if they are installed.

    PYTHONPATH=$(python benchmarks/gpu/packages.py) ...

If pydantic is missing, pip installs it into a folder of its own below the user's cache: from the wheels in
``benchmarks/gpu/wheels`` if there are any, else from the package index. ``make gpu-wheels`` downloads the wheels, for a
GPU machine without a network.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

WHEELS = Path(__file__).with_name("wheels")


def find_packages() -> str:
    """Return the folder with pydantic, after installing it there if it is missing; empty if Python finds pydantic.

    Raises:
        SystemExit: pip cannot install pydantic.
    """
    if importlib.util.find_spec("pydantic"):
        return ""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = cache / "kairos" / f"gpu-packages-{version}"
    if not (folder / "pydantic").is_dir():
        source = ["--no-index", "--find-links", str(WHEELS)] if any(WHEELS.glob("*.whl")) else []
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), *source, "pydantic>=2"]
        if subprocess.run(command, stdout=sys.stderr).returncode:
            raise SystemExit(
                "pydantic: not installed, and pip cannot install it; on a machine with a network run "
                f"`make gpu-wheels GPU_PYTHON={version}`, and copy benchmarks/gpu/wheels here"
            )
    return str(folder)


if __name__ == "__main__":
    print(find_packages())
