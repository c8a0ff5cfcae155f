"""A project of one's own outside of the clone: its Snakefile takes the rules that are installed with kairos."""

import shutil
from pathlib import Path

from kairos_timesteps.errors import demand

_WRITTEN = {"project.smk": "Snakefile", "project.gitignore": ".gitignore"}  # from beside this file
_COPIED = ("params.yaml", "experiments/schema.json", "workflow/profiles")


def installed() -> Path:
    """The folder of our Snakefile: in the package where that was installed from a wheel, else the clone."""
    packaged = Path(__file__).parent / "pipeline"
    return packaged if packaged.is_dir() else Path(__file__).parents[3]


def begin(folder: Path) -> list[str]:
    """Write a project: Snakefile, profiles, the demo's params.yaml; returns the names of what it has.

    Raises:
        ConfigError: something is there already.
    """
    free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    demand(free, "DIR", repr(str(folder)), "a folder that is empty or not there yet")
    for source in _COPIED:
        place = folder / source.removeprefix("workflow/")
        place.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (installed() / source).is_dir() else shutil.copyfile
        copy(installed() / source, place)
    for source, name in _WRITTEN.items():
        shutil.copyfile(Path(__file__).parent / source, folder / name)
    return sorted(path.name for path in folder.iterdir())
