"""Costs of the recipes in a folder, and the cheapest test of each paper's claim, for the site.

GPU-hours are floating-point operations over a GPU's peak speed at the experiment's precision, times a utilisation. The
utilisation is an assumption, not a measurement.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kairos.config import Experiment, find_experiment_files, load
from kairos.costs.cards import PEAKS
from kairos.costs.estimate import CostEstimate, estimate_cost
from kairos.costs.network import NetworkCost, count_network_cost
from kairos.report.formatting import format_number
from kairos.report.published_numbers import compute_published_factor, describe_claim

SEEDS = 5  # number of seeds for a claim; with fewer, the report tests no differences


@dataclass(frozen=True)
class Recipe:
    """An experiment file and its cost.

    Attributes:
        file: path of the experiment file.
        experiment: the checked experiment.
        estimate: cost on a GPU of 10^12 floating-point operations per second.
    """

    file: Path
    experiment: Experiment
    estimate: CostEstimate

    def gpu_hours(self, gpu: str, utilisation: float, fractions: dict[str, tuple[float, float]] | None = None) -> float:
        """Return the GPU-hours of training and sampling.

        Args:
            gpu: key of `PEAKS`.
            utilisation: fraction of the peak speed that is reached.
            fractions: fractions of training and of sampling that count, by method; None: all methods in full.
        """
        methods = self.estimate.methods
        training_peak = PEAKS[gpu][self.experiment.training.precision]
        sampling_peak = PEAKS[gpu][self.experiment.sampling.precision]
        hours = 0.0
        for name, (training, sampling) in (fractions or dict.fromkeys(methods, (1.0, 1.0))).items():
            training_hours = (methods[name].training_hours or 0) * training / training_peak
            sampling_hours = (methods[name].sampling_hours or 0) * sampling / sampling_peak
            hours += training_hours + sampling_hours
        return hours / utilisation

    def gpu_hours_by_gpu(self, utilisation: float) -> dict[str, float]:
        """Return the GPU-hours of the whole experiment for each GPU of `PEAKS`."""
        return {gpu: self.gpu_hours(gpu, utilisation) for gpu in PEAKS}

    @property
    def test_steps(self) -> dict[str, int]:
        """Training steps that test the claim, by method; empty without a claim.

        The baseline trains to its end. The claimed method trains to the first snapshot at or after the claimed step, or
        to its end for the highest ratio along both curves.
        """
        claim, snapshots = self.experiment.claim, self.experiment.milestones[1:]  # without step 0
        if claim is None:
            return {}
        final_step = snapshots[-1]
        if claim.quantity == "highest_ratio":
            return {claim.baseline: final_step, claim.method: final_step}
        claimed_step = final_step / claim.factor
        if claim.cost == "time":
            methods = self.estimate.methods
            claimed_step *= methods[claim.baseline].flops_per_step / methods[claim.method].flops_per_step
        step = next((step for step in snapshots if step >= claimed_step), final_step)
        return {claim.baseline: final_step, claim.method: step}

    def test_gpu_hours(self, gpu: str, utilisation: float) -> float:
        """Return the GPU-hours of testing the claim with `SEEDS` seeds.

        The GPU-hours include training up to `test_steps`. For the highest ratio, all snapshots of both methods are
        sampled. Otherwise the samples are of the baseline's last snapshot and of two snapshots of the claimed method,
        between which the step that reaches the baseline's distance is interpolated.
        """
        claim: Any = self.experiment.claim
        snapshots, seed_factor = self.experiment.milestones, SEEDS / len(self.experiment.seeds)
        sampled_snapshots = {claim.baseline: 1, claim.method: 2}
        if claim.quantity == "highest_ratio":
            sampled_snapshots = dict.fromkeys(sampled_snapshots, len(snapshots))
        fractions = {}
        for method, step in self.test_steps.items():
            fractions[method] = (step / snapshots[-1], sampled_snapshots[method] / len(snapshots))
        return seed_factor * self.gpu_hours(gpu, utilisation, fractions)


def load_recipes(folder: Path) -> list[Recipe]:
    """Load the experiment files below a folder and estimate their costs.

    Raises:
        ConfigError: there is no experiment file, or one is not valid; the message reports the file.
    """
    network_costs: dict[str, NetworkCost] = {}  # recipes share networks, and counting one takes seconds

    def count_once(*arguments: Any) -> NetworkCost:
        key = repr(arguments)
        if key not in network_costs:
            network_costs[key] = count_network_cost(*arguments)
        return network_costs[key]

    # all files are checked before the first network is counted
    experiments = {file: load(file) for file in find_experiment_files(folder)}
    recipes = []
    for file, experiment in experiments.items():
        estimate = estimate_cost(experiment, tflops=1, utilisation=1, count_network=count_once)
        recipes.append(Recipe(file, experiment, estimate))
    return recipes


def select_cheapest_tests(recipes: Sequence[Recipe]) -> list[Recipe]:
    """Return, for each claim of a paper, the recipe that tests the claim in the fewest GPU-hours."""
    with_claim = [recipe for recipe in recipes if recipe.experiment.claim is not None]
    cheapest: dict[Any, Recipe] = {}
    for recipe in sorted(with_claim, key=lambda recipe: recipe.test_gpu_hours("H100", 1.0)):
        claim: Any = recipe.experiment.claim
        paper = recipe.file.parent  # the recipes of a paper share a folder
        cheapest.setdefault((paper, claim.sentence), recipe)  # keeps the first, which is the cheapest
    return list(cheapest.values())


def describe_claims(recipes: Sequence[Recipe], utilisation: float) -> Iterator[str]:
    """Yield a paragraph per claim: the recipe that tests the claim in the fewest GPU-hours, and its cost.

    Args:
        recipes: recipes with their costs.
        utilisation: fraction of the peak speed that is reached.
    """
    for recipe in select_cheapest_tests(recipes):
        claim: Any = recipe.experiment.claim
        published = compute_published_factor(recipe.experiment.published, claim)
        by_rows = "without published curves" if published is None else f"by the published rows {published:.2f}"
        claim_text = f"{claim.sentence}. As a test: {describe_claim(claim)}; {by_rows}"
        steps = " and ".join(f"{name} at {step:,}" for name, step in recipe.test_steps.items())
        hours = " or ".join(f"{format_number(recipe.test_gpu_hours(gpu, utilisation))} {gpu}-hours" for gpu in PEAKS)
        yield f"\n{claim_text}. The cheapest test is {recipe.file} with {SEEDS} seeds,\n  {steps} steps: {hours}"
