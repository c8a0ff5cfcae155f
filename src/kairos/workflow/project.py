"""A user's project outside of the clone: its Snakefile uses the rules that are installed with kairos."""

import shutil
from pathlib import Path

from kairos_timesteps.errors import demand

_TEMPLATES = {"project.smk": "Snakefile", "project.gitignore": ".gitignore"}  # in the folder of this module
# files and folders in kairos' own folder; they keep their paths, without the start ``workflow/``
_COPIED = ("params.yaml", "experiments/schema.json", "workflow/profiles")


def installed() -> Path:
    """Return the folder of kairos' Snakefile: in the package if a wheel is installed, else the root of the clone."""
    packaged = Path(__file__).parent / "pipeline"
    return packaged if packaged.is_dir() else Path(__file__).parents[3]


def create_project(folder: Path) -> list[str]:
    """Write the files of a project, and return the names of the files and folders at its top, sorted.

    They are the Snakefile, .gitignore, and copies of params.yaml, the schema and the profiles. Missing folders are
    created.

    Args:
        folder: folder of the project, which must be empty or missing.

    Raises:
        ConfigError: the folder contains something, or is a file.
    """
    is_empty = folder.is_dir() and not any(folder.iterdir())
    demand(is_empty or not folder.exists(), "DIR", repr(str(folder)), "an empty or new folder")
    for name in _COPIED:
        source = installed() / name
        target = folder / name.removeprefix("workflow/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copyfile(source, target)
    for template, name in _TEMPLATES.items():
        shutil.copyfile(Path(__file__).parent / template, folder / name)
    return sorted(path.name for path in folder.iterdir())
