"""Table of what the experiments of a folder cost, and the cheapest test of each paper's claim.

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
from kairos.costs.rendering import in_bytes
from kairos.progress import table
from kairos.report.formatting import number

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
    """An experiment file and its cost, counted for a GPU of one TFLOP/s."""

    file: Path
    experiment: Experiment
    found: Estimate

    def hours(self, gpu: str, utilisation: float, shares: dict[str, tuple[float, float]] | None = None) -> float:
        """GPU-hours of all methods, or of these shares of the trainings and samples of some."""
        of = self.found.methods
        train, draw = (PEAKS[gpu][its.precision] for its in (self.experiment.training, self.experiment.sampling))
        shares = shares or dict.fromkeys(of, (1.0, 1.0))
        each = ((of[n].hours or 0) * a / train + (of[n].sampling or 0) * b / draw for n, (a, b) in shares.items())
        return sum(each) / utilisation

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
        return {claim.baseline: steps[-1], claim.method: next((step for step in steps if step >= wanted), steps[-1])}

    def test_hours(self, gpu: str, utilisation: float) -> float:
        """GPU-hours of that with `SEEDS` seeds: trainings, and the samples of the milestones about the steps to do."""
        steps, seeds = self.experiment.milestones, SEEDS / len(self.experiment.seeds)
        drawn = dict(zip(self.test, (1, 2)))  # the distance is read off between two milestones
        share = {name: (step / steps[-1], drawn[name] / len(steps)) for name, step in self.test.items()}
        return seeds * self.hours(gpu, utilisation, share)


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
    """Return, for each claim of a paper, the recipe that decides the claim in the fewest GPU-hours."""
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
        stored = in_bytes(sum(part or 0 for part in sizes)) + "+" * (None in sizes)
        costs = (*map(number, one.all_hours(utilisation).values()), in_bytes(sum(one.found.memory.values())), stored)
        jobs = sum(stage.jobs for stage in one.found.stages)
        rows.append((one.file, len(own.methods), f"{own.milestones[-1]:,}", jobs, *costs))
    sums = (number(sum(one.hours(gpu, utilisation) for one in found)) for gpu in PEAKS)
    rows.append(("all", sum(row[1] for row in rows[1:]), "", sum(row[3] for row in rows[1:]), *sums, "", ""))
    whole = table(rows, lambda head, column, cell: column > 0)
    return "\n".join([whole, _NOTE.format(utilisation), *claims(found, utilisation)])


def claims(found: Sequence[Recipe], utilisation: float) -> Iterator[str]:
    """Yield a paragraph per claim: the recipe that decides the claim in the fewest GPU-hours, and its cost."""
    for one in cheapest(found):
        claim: Any = one.experiment.claim
        hours = (f"{number(one.test_hours(gpu, utilisation))} {gpu}-hours" for gpu in PEAKS)
        rows = " and ".join(f"{name} at {step:,}" for name, step in one.test.items())
        what = f"{claim.method} {claim.factor:g} times faster than {claim.baseline}, in {claim.cost}"
        yield f"\n{what}: decided at the least by {one.file} with {SEEDS} seeds,\n  {rows} steps: {' or '.join(hours)}"
