"""What an experiment is to consist of, read without checking it, which would take three times as long."""

import os
from dataclasses import dataclass
from pathlib import Path

from kairos.errors import KairosError


@dataclass(frozen=True)
class Outline:
    """The trainings of an experiment, and where their results are.

    Attributes:
        results: folder of the results.
        trainings: method and seed of each.
        milestones: steps, 0 first; empty where only a folder of results is known.
        file: the experiment file; None where only a folder of results is known.
    """

    results: Path
    trainings: list[tuple[str, int]]
    milestones: list[int]
    file: Path | None = None


def outline(path: Path) -> Outline:
    """What the experiment file, or the folder of results, at `path` stands for.

    Raises:
        KairosError: neither is there.
        ConfigError: the file cannot be used.
    """
    if not path.is_dir():
        return _of_file(path, None)
    frozen = sorted(Path(".kairos/config").glob(f"{path.name}-" + "?" * 16 + ".yaml"), key=os.path.getmtime)
    if frozen and path.resolve() == (Path("results") / path.name).resolve():
        return _of_file(frozen[-1], path)
    found = [(folder.parent.name, int(folder.name[4:])) for folder in path.glob("*/seed*") if folder.name[4:].isdigit()]
    if not found:
        raise KairosError(f"{path}: no training there; pass an experiment file or a folder results/<experiment>")
    return Outline(path, sorted(found), [])


def _of_file(path: Path, results: Path | None) -> Outline:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast
    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.load(file, loader)
        name, methods, seeds = values["experiment"], list(values["methods"]), values.get("seeds") or [0]
        milestones = values["training"]["milestones"]
        if not all(type(step) is int for step in (*milestones, *seeds)):
            raise TypeError
    except (OSError, KeyError, TypeError, AttributeError, ValueError, RecursionError, yaml.YAMLError):
        # lengths in other units, defaults, or a mistake that `load` explains
        from kairos.config import load

        experiment = load(path)
        name, methods, seeds = experiment.experiment, list(experiment.methods), experiment.seeds
        milestones = list(experiment.milestones[1:])
    folder = results or Path("results") / str(name)
    return Outline(folder, [(method, seed) for method in methods for seed in seeds], [0, *milestones], path)
