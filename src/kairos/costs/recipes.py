"""What the experiments of a folder cost, in one table, and the cheapest test of what their papers claim.

GPU-hours are operations over a GPU's peak at the experiment's precision, times a utilisation that is stated, not
measured.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kairos.config import Experiment, files_in, load
from kairos.costs.estimate import Estimate, estimate
from kairos.costs.network import Network, measure
from kairos.costs.text import in_bytes
from kairos.progress import table
from kairos.report.text import number

# 10^12 operations per second without sparsity: NVIDIA's data sheets of the SXM forms; fp32 is outside of tensor cores
PEAKS = {
    "H100": {"fp32": 67.0, "tf32": 494.7, "bf16": 989.4, "fp64": 67.0},
    "A100": {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp64": 19.5},
}
_NOTE = """
GPU-hours at {:.0%} of the peak at each experiment's precision, of the seeds in the files; memory of a training on one
GPU (training.microbatch takes less); +: without what is not known before the data are here"""
SEEDS = 5  # that decide a claim: from so many on the report tests


@dataclass(frozen=True)
class Recipe:
    """An experiment file and its cost; `at_one` has GPU-hours at one TFLOP/s, of trainings and of samples by method."""

    file: Path
    experiment: Experiment
    found: Estimate

    @property
    def at_one(self) -> dict[str, tuple[float, float]]:
        """See above."""
        return {name: (its.hours or 0, its.sampling or 0) for name, its in self.found.methods.items()}

    def hours(self, gpu: str, utilisation: float, shares: dict[str, tuple[float, float]] | None = None) -> float:
        """GPU-hours of all methods, or of these shares of the trainings and samples of some."""
        peaks, shares = PEAKS[gpu], shares or dict.fromkeys(self.at_one, (1.0, 1.0))
        speeds = [peaks[section.precision] for section in (self.experiment.training, self.experiment.sampling)]
        each = (self.at_one[name][part] * share[part] for name, share in shares.items() for part in (0, 1))
        return sum(hours / speed for hours, speed in zip(each, speeds * len(shares))) / utilisation

    def all_hours(self, utilisation: float) -> dict[str, float]:
        """GPU-hours of the whole experiment by GPU."""
        return {gpu: self.hours(gpu, utilisation) for gpu in PEAKS}

    @property
    def test(self) -> dict[str, int]:
        """The steps that decide the claim, by method: all of the baseline's, and those of the method that are to do."""
        claim, steps = self.experiment.claim, self.experiment.milestones[1:]
        if claim is None:
            return {}
        own, base = (self.found.methods[name].operations for name in (claim.method, claim.baseline))
        wanted = steps[-1] / claim.factor * (base / own if claim.cost == "time" else 1)
        return {claim.baseline: steps[-1], claim.method: next(step for step in steps if step >= wanted)}

    def test_hours(self, gpu: str, utilisation: float) -> float:
        """GPU-hours of that with `SEEDS` seeds: trainings, and the samples of the milestones about the steps to do."""
        steps, seeds = self.experiment.milestones, SEEDS / len(self.experiment.seeds)
        drawn = dict(zip(self.test, (1, 2)))  # the distance is read off between two milestones
        shares = {
            name: (step / steps[-1] * seeds, drawn[name] / len(steps) * seeds) for name, step in self.test.items()
        }
        return self.hours(gpu, utilisation, shares)


def recipes(folder: Path) -> list[Recipe]:
    """The experiments below a folder with their costs.

    Raises:
        ConfigError: there is none, or one cannot be used; the message names the file.
    """
    made: dict[str, Network] = {}

    def once(*asked: Any) -> Network:
        if (key := repr(asked)) not in made:
            made[key] = measure(*asked)
        return made[key]

    checked = {file: load(file) for file in files_in(folder)}  # all, before the first is counted
    return [Recipe(file, its, estimate(its, tflops=1, utilisation=1, count=once)) for file, its in checked.items()]


def cheapest(found: Sequence[Recipe]) -> list[Recipe]:
    """Of each claim of a paper the recipe that decides it in the fewest GPU-hours."""
    claims: dict[Any, Recipe] = {}
    for recipe in sorted(found, key=lambda one: one.test_hours("H100", 1.0) if one.test else 0):
        if (claim := recipe.experiment.claim) is not None:
            claims.setdefault((recipe.file.parent, claim.factor), recipe)
    return list(claims.values())


def text(found: Sequence[Recipe], utilisation: float) -> str:
    """A table of all, with their sums, and what would decide each claim."""
    heads = ("jobs", *(f"{gpu} h" for gpu in PEAKS), "memory", "storage")
    rows: list[tuple[Any, ...]] = [("recipe", "methods", "steps", *heads)]
    for one in found:
        own, sizes = one.experiment, one.found.storage.values()
        jobs = sum(stage.jobs for stage in one.found.stages)
        hours = map(number, one.all_hours(utilisation).values())
        stored = in_bytes(sum(part or 0 for part in sizes)) + "+" * (None in sizes)
        memory = in_bytes(sum(one.found.memory.values()))
        rows.append((one.file, len(own.methods), f"{own.milestones[-1]:,}", jobs, *hours, memory, stored))
    sums = (number(sum(one.hours(gpu, utilisation) for one in found)) for gpu in PEAKS)
    rows.append(("all", sum(row[1] for row in rows[1:]), "", sum(row[3] for row in rows[1:]), *sums, "", ""))
    lines = [table(rows, lambda head, column, cell: column > 0)]
    lines.append(_NOTE.format(utilisation))
    return "\n".join([*lines, *claims(found, utilisation)])


def claims(found: Sequence[Recipe], utilisation: float) -> Iterator[str]:
    """What would decide each claim in the fewest GPU-hours."""
    for one in cheapest(found):
        claim, hours = (
            one.experiment.claim,
            [f"{number(one.test_hours(gpu, utilisation))} {gpu}-hours" for gpu in PEAKS],
        )
        rows = " and ".join(f"{name} at {step:,}" for name, step in one.test.items())
        assert claim is not None
        what = f"{claim.method} {claim.factor:g} times faster than {claim.baseline}, in {claim.cost}"
        yield f"\n{what}: decided at the least by {one.file} with {SEEDS} seeds,\n  {rows} steps: {' or '.join(hours)}"
