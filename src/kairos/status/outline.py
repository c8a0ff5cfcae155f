"""Outline of an experiment: its training runs and paths, from its file or from its results' folder."""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kairos.config import Experiment, load
from kairos.files import glance
from kairos.report.outdated import ExpectedSettings
from kairos_timesteps.errors import KairosError


@dataclass(frozen=True)
class Outline:
    """The trainings of an experiment, and where their results are.

    Attributes:
        results: folder of the results.
        trainings: method and seed of each.
        milestones: steps, 0 first; empty where only a folder of results is known.
        experiment: None where only a folder of results is known.
    """

    results: Path
    trainings: list[tuple[str, int]]
    milestones: tuple[int, ...] = ()
    experiment: Experiment | None = None

    @cached_property
    def expected(self) -> ExpectedSettings | None:
        """Settings that results must have to count; None where only a folder of results is known."""
        return None if self.experiment is None else ExpectedSettings(self.experiment, self.results)

    @cached_property
    def reference(self) -> dict[str, Any]:
        """The record of the reference statistics; empty where there is none."""
        return glance(self.results / "reference" / "reference.json")


def outline(path: Path) -> Outline:
    """Return the outline of the experiment whose file, or folder of results, is at `path`.

    Raises:
        KairosError: there is neither an experiment file nor a folder of results.
        ConfigError: the file cannot be used.
    """
    results = path if path.is_dir() else None
    if results and path.resolve() == (Path("results") / path.name).resolve():
        frozen = Path(".kairos/config").glob(f"{path.name}-" + "?" * 16 + ".yaml")
        path = max(frozen, key=os.path.getmtime, default=path)
    if path.is_dir():
        found = [(seed.parent.name, int(seed.name[4:])) for seed in path.glob("*/seed*") if seed.name[4:].isdigit()]
        if not found:
            raise KairosError(f"{path}: no training there; pass an experiment file or a folder results/<experiment>")
        return Outline(path, sorted(found))
    experiment = load(path)
    trainings = [(method, seed) for method in experiment.methods for seed in experiment.seeds]
    return Outline(results or Path("results") / experiment.experiment, trainings, experiment.milestones, experiment)
