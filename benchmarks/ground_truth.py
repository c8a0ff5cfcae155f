"""Compare samplers that learn with the exact best density, on problems with an independent parameter per timestep.

    python benchmarks/ground_truth.py --out benchmarks/results/ground_truth.csv

Timestep t has one parameter at distance d_t from its optimum, with loss_t = h_t/2 d_t² and gradients
h_t d_t + s_t N(0, 1). SGD trains it at a constant rate; the objective is the mean of loss_t over t. The timesteps share
no parameters, so the second moment of d_t is known exactly after any number of steps, for every fixed density p. With
N ~ Binomial(B, p_t) samples of a batch of B at t, each with weight w, and rate r,

    E d'² = E (1 - r h w N/B)² E d² + (r w s)² E N / B²,     E N = B p,  E N² = B p (1 - p) + B² p²

where w = 1/(T p) for samplers with importance weights and w = 1 for others. With importance weights, p changes
only the noise of a step; without them, it also changes the expected step. Minimising the final loss over p gives the
best fixed density of either family. Samplers run through `kairos_timesteps.Strategy` on a torch module with these
losses, as in any training loop. SGD has no preconditioner: gradient_norm and first_order use the Euclidean metric here.

Columns:
    loss: measured final loss.
    path_loss: expected final loss of a training run on the densities that the sampler used, by the recursion. Its
        standard deviation is much lower. It neglects that the sampler's density depends on the noise of the run.
    path_over_uniform, path_over_optimum: path_loss over the loss of uniform, and over the optimum of its family.
    tv_from_optimum: total variation distance of the sampler's last density from the optimum.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from result_file import write_rows
from torch import Tensor, nn

from kairos_timesteps.base import TableDensity
from kairos_timesteps.options import parse
from kairos_timesteps.strategy import Strategy

PERIOD = 10  # steps between two looks at a sampler's density

# Shorter periods than the defaults: a few hundred steps stand for a training. None was tuned to a result.
SAMPLERS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "loss_second_moment": {},
    "loss_rms": {"start": 20, "decay": 0.98},
    "gradient_norm": {"frequency": 10, "bins": 10, "samples": 4},
    "gradient_variance": {"frequency": 10, "bins": 10, "samples": 4},
    "first_order": {"frequency": 10, "bins": 10, "samples": 8},
    "adaptive": {"frequency": 5, "feature_timesteps": None},
    "adaptive, entropy 1": {"frequency": 5, "feature_timesteps": None, "entropy": 1.0},
    "adaptive_official": {"frequency": 5},
}


@dataclass(frozen=True)
class Problem:
    """A problem with an independent parameter per timestep, and the settings of its training.

    Attributes:
        name: name in the table.
        about: description in one line.
        curvature: known curvature h, float64 (T,).
        noise: known gradient noise s, float64 (T,).
        rate: learning rate of SGD, constant.
        batch: samples of a step.
        steps: steps of training.
        start: initial distance of every parameter from its optimum.
    """

    name: str
    about: str
    curvature: Tensor
    noise: Tensor
    rate: float = 0.5  # times the largest curvature: 1, so that SGD is stable whatever the density
    batch: int = 32
    steps: int = 300
    start: float = 1.0

    @property
    def timesteps(self) -> int:
        """Number of timesteps T."""
        return len(self.curvature)

    def loss(self, second_moments: Tensor) -> Tensor:
        """Return the mean of h_t/2 E d_t² over t, for second moments (..., T)."""
        return (self.curvature / 2 * second_moments).mean(-1)


def problems(timesteps: int = 40) -> list[Problem]:
    """Return three problems, in which timesteps differ in different ways; x = t/(T - 1)."""
    x = torch.linspace(0, 1, timesteps, dtype=torch.float64)
    h_noise, h_flat, h_slow = (2 * 10 ** (-power * x) for power in (1.0, 1.5, 1.2))
    return [
        Problem("noise", "h = 2/10^x, s = 3 h: the loss is in proportion to the gradient's size", h_noise, 3 * h_noise),
        Problem("flat", "h = 2/10^(1.5 x), s = 3 sqrt(h): the loss is the same at all t", h_flat, 3 * h_flat**0.5),
        Problem("slow", "h = 2/10^(1.2 x), s = 0.5: the same noise, but large t learns slowly", h_slow, 0.5 + 0 * x),
    ]


def second_moments(
    problem: Problem, p: Tensor, corrected: bool, steps: int | None = None, start: Tensor | float | None = None
) -> Tensor:
    """Return the exact E d_t² after training on a fixed density, (T,).

    Args:
        problem: problem that is trained.
        p: density over timesteps, (T,); positive if `corrected`.
        corrected: True if samples have importance weights 1/(T p).
        steps: number of steps; None: the problem's.
        start: E d_t² before the first step, (T,); None: the problem's.
    """
    batch = problem.batch
    step_count = problem.steps if steps is None else steps
    initial = problem.start**2 if start is None else start

    # one step: E d'² = (1 - shrink) E d² + added, see the module
    weight = 1 / (problem.timesteps * p) if corrected else torch.ones_like(p)
    relative_step = problem.rate * weight * problem.curvature
    shrink = 2 * relative_step * p - relative_step**2 * (p * (1 - p) / batch + p**2)  # 1 - E (1 - r h w N/B)²
    added = (problem.rate * weight * problem.noise) ** 2 * p / batch

    # all steps: the closed form of the recursion; timesteps that are never drawn keep their moment
    log_decay = step_count * torch.log1p(-shrink)
    sum_of_added = -torch.expm1(log_decay) * added / torch.where(p > 0, shrink, 1.0)
    return torch.exp(log_decay) * initial + torch.where(p > 0, sum_of_added, 0.0)


def along(problem: Problem, densities: list[Tensor], corrected: bool) -> Tensor:
    """Return the exact E d_t² after training on fixed densities that each apply for `PERIOD` steps in turn, (T,)."""
    moments = torch.full_like(problem.curvature, problem.start**2)
    for number, p in enumerate(densities):
        moments = second_moments(problem, p, corrected, min(PERIOD, problem.steps - number * PERIOD), moments)
    return moments


def minimised(problem: Problem, corrected: bool, density: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Return the density of a parametrised family that has the lowest final loss, (T,).

    Args:
        problem: problem that is trained.
        corrected: True if samples have importance weights.
        density: function from parameters to a density, (T,).
        start: parameters from which the search starts.
    """
    parameters = start.double().clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [parameters], max_iter=1000, line_search_fn="strong_wolfe", tolerance_grad=1e-10, tolerance_change=1e-14
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = problem.loss(second_moments(problem, density(parameters), corrected)).log()
        loss.backward()
        return loss

    optimizer.step(closure)
    return density(parameters).detach()


def optimum(problem: Problem, corrected: bool) -> Tensor:
    """Return the best fixed density, (T,), with importance weights if `corrected`, else without."""
    return minimised(problem, corrected, lambda logits: torch.softmax(logits, 0), torch.zeros(problem.timesteps))


def best_beta(problem: Problem) -> Tensor:
    """Return the best fixed Beta density without importance weights, the limit for a policy on one image, (T,)."""
    u = (torch.arange(problem.timesteps, dtype=torch.float64) + 0.5) / problem.timesteps

    def density(logs: Tensor) -> Tensor:
        a, b = logs.exp()
        return torch.softmax((a - 1) * u.log() + (b - 1) * (1 - u).log(), 0)

    return minimised(problem, False, density, torch.zeros(2))


class Quadratics(nn.Module):
    """A network whose squared error of epsilon, times c_t, is loss_t plus a term that adds the gradient noise.

    With x0 = 0 the network computes the noise from x_t and adds an error of exactly k_t d_t + v_t epsilon. The weighted
    loss c (k d + v epsilon)² has curvature 2 c k² and a gradient with noise 2 c k v epsilon.
    """

    def __init__(self, problem: Problem, strategy: Strategy):
        super().__init__()
        schedule = strategy.process.schedule
        c = torch.from_numpy(schedule.vlb)
        k = (problem.curvature / (2 * c)).sqrt()
        self.register_buffer("k", k.float())
        self.register_buffer("v", (problem.noise / (2 * c * k)).float())
        self.register_buffer("sigma", torch.from_numpy(1 - schedule.alphas_cumprod).sqrt().float())
        self.distance = nn.Parameter(torch.full((problem.timesteps,), problem.start))

    def forward(self, x_t: Tensor, t: Tensor) -> Tensor:
        """Return the noise in x_t (n, 1, 1, 1) plus the error k_t d_t + v_t epsilon."""
        epsilon = x_t[:, 0, 0, 0] / self.sigma[t]
        return (epsilon + self.k[t] * self.distance[t] + self.v[t] * epsilon)[:, None, None, None]


class Fixed(TableDensity):
    """A sampler with a fixed table of masses, with or without importance weights."""

    def __init__(self, strategy: Strategy, p: Tensor, corrected: bool):
        super().__init__(parse(TableDensity, {}), strategy.process.schedule)
        self.set_masses(p.numpy())
        self.importance = corrected


def train(problem: Problem, strategy: Strategy) -> tuple[Tensor, list[Tensor]]:
    """Train a problem; return the final distances, float64 (T,), and the density every `PERIOD` steps from step 0.

    All random numbers are functions of the strategy's seed.
    """
    network = Quadratics(problem, strategy)
    optimizer = torch.optim.SGD(network.parameters(), lr=problem.rate)
    x0 = torch.zeros(problem.batch, 1, 1, 1)
    generator = torch.Generator().manual_seed(strategy.seed)
    densities = []
    for step in range(problem.steps):
        if step % PERIOD == 0:
            densities.append(torch.from_numpy(strategy.sampler.probabilities(x0[:1]).copy()))
        draw = strategy.draw(x0)
        noise = torch.randn(x0.shape, generator=generator)
        output = network(strategy.process.noised(x0, noise, draw.t), draw.t)
        optimizer.zero_grad()
        strategy.loss(draw, (output - noise).flatten(1).square().mean(1)).backward()
        with strategy.observe(draw, network, optimizer):
            optimizer.step()
    return network.distance.detach().double(), densities


def make_strategy(problem: Problem, sampler: str, seed: int) -> Strategy:
    """Return a strategy with a sampler of `SAMPLERS` and the weights of the variational bound.

    With these weights, the losses of `Quadratics` are the losses of the problem.
    """
    name = sampler.partition(",")[0]
    return Strategy(f"{name}+vlb", "linear", timesteps=problem.timesteps, sampler=SAMPLERS[sampler], seed=seed)


def rows_of(problem: Problem, samplers: list[str], seeds: int) -> list[dict[str, Any]]:
    """Return the table of one problem: exact losses of fixed densities, then the losses of each sampler."""
    best = {corrected: optimum(problem, corrected) for corrected in (True, False)}
    uniform = torch.full_like(best[True], 1 / problem.timesteps)

    def exact_loss(p: Tensor, corrected: bool) -> float:
        return problem.loss(second_moments(problem, p, corrected)).item()

    def standard_error(values: Tensor) -> str:
        return f"{values.std().item() / len(values) ** 0.5:.5f}" if len(values) > 1 else ""

    def row(name: str, corrected: bool, losses: Tensor, path_losses: Tensor, p: Tensor) -> dict[str, Any]:
        path_loss = path_losses.mean().item()
        uniform_loss, least_loss = exact_loss(uniform, corrected), exact_loss(best[corrected], corrected)
        return {
            "problem": problem.name,
            "sampler": name,
            "updates": "importance" if corrected else "plain",
            "loss": f"{losses.mean().item():.5f}" if len(losses) else "",
            "loss_error": standard_error(losses),
            "path_loss": f"{path_loss:.5f}",
            "path_error": standard_error(path_losses),
            "path_over_uniform": f"{path_loss / uniform_loss:.4f}",
            "path_over_optimum": f"{path_loss / least_loss:.4f}",
            "tv_from_optimum": f"{(p - best[corrected]).abs().sum(-1).mean().item() / 2:.4f}",
        }

    # fixed densities, exact
    rows = []
    fixed_densities = [("= uniform", uniform, True), ("= optimum", best[True], True), ("= optimum", best[False], False)]
    fixed_densities.append(("= best Beta", best_beta(problem), False))
    for name, p, corrected in fixed_densities:
        rows.append(row(name, corrected, torch.empty(0), torch.tensor([exact_loss(p, corrected)]), p))

    # samplers, measured
    for name in samplers:
        losses, path_losses, last_densities = [], [], []  # by seed
        for seed in range(seeds):
            strategy = make_strategy(problem, name, seed)
            distance, densities = train(problem, strategy)
            corrected = strategy.sampler.importance or name == "uniform"
            losses.append(problem.loss(distance**2))
            path_losses.append(problem.loss(along(problem, densities, corrected)))
            last_densities.append(densities[-1])
        rows.append(row(name, corrected, torch.stack(losses), torch.stack(path_losses), torch.stack(last_densities)))
    return rows


def main() -> None:
    """Measure, print a table and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--problems", nargs="*", default=[problem.name for problem in problems()])
    parser.add_argument("--samplers", nargs="*", default=list(SAMPLERS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.perf_counter()
    rows = []
    for problem in problems():
        if problem.name not in arguments.problems:
            continue
        print(f"{problem.name}: {problem.about}")
        print(
            f"{'sampler':<20} {'updates':<11} {'loss':>17} {'path loss':>17} {'/uniform':>9} {'/optimum':>9} {'TV':>7}"
        )
        problem_rows = rows_of(problem, arguments.samplers, arguments.seeds)
        for row in problem_rows:
            loss, path_loss = row["loss"], row["path_loss"]
            if row["loss_error"]:
                loss += f" ± {row['loss_error']}"
            if row["path_error"]:
                path_loss += f" ± {row['path_error']}"
            print(
                f"{row['sampler']:<20} {row['updates']:<11} {loss:>17} {path_loss:>17} {row['path_over_uniform']:>9} "
                f"{row['path_over_optimum']:>9} {row['tv_from_optimum']:>7}"
            )
        rows += problem_rows
    print(f"{time.perf_counter() - begun:.0f} s")
    if arguments.out:
        p = problems()[0]
        setting = (
            f"python benchmarks/ground_truth.py --seeds {arguments.seeds}: T {p.timesteps}, batch {p.batch}, "
            f"{p.steps} steps of SGD at rate {p.rate}, start {p.start}, torch {torch.__version__}, 1 thread; "
            "rows '=' are exact, others means over seeds with standard errors"
        )
        write_rows(arguments.out, rows, setting)


if __name__ == "__main__":
    main()
