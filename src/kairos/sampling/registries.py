"""Solvers by name, and the options that each process allows."""

from typing import Any

from kairos_timesteps.diffusion.schedule import VARIANCES
from kairos_timesteps.errors import ConfigError, demand
from kairos_timesteps.options import Options, option
from kairos_timesteps.registry import Registry

DISCRETE = ("trailing", "leading", "linspace", "karras")
CONTINUOUS = ("karras", "uniform")
SPACINGS = ("auto", "trailing", "leading", "linspace", "uniform", "karras")


class GridOptions(Options):
    """Options of a solver's time grid and of the predicted x0."""

    spacing: str = option("auto", "spacing of the time grid; auto: the default of the process", choices=SPACINGS)
    rho: float = option(7.0, "karras: concentration of the steps at small noise", gt=0)
    sigma_min: float | None = option(None, "karras: smallest noise over signal; null: that of the process", gt=0)
    sigma_max: float | None = option(None, "karras: largest noise over signal; null: that of the process", gt=0)
    clip: bool = option(False, "clip the predicted x0 to [-1, 1]: for pixels, wrong for latents")

    evaluations = 1  # network evaluations per interval; the last interval has one in any case

    def __post_init__(self) -> None:
        good = not (self.sigma_min and self.sigma_max) or self.sigma_min < self.sigma_max
        demand(good, "sigma_min", self.sigma_min, f"less than sigma_max = {self.sigma_max}")


class DdpmOptions(GridOptions):
    """Ancestral sampling. Variance and spacing are explicit because diffusers' defaults differ from the papers'."""

    variance: str = option(
        "fixed_large", "reverse variance; learned_range: predicted by the network", choices=VARIANCES
    )


class OdeOptions(GridOptions):
    """Solvers of the ODE on the timesteps of latent diffusion's public code."""

    offset: int = option(0, "added to leading's timesteps (latent diffusion: 1)", choices=(0, 1))
    end: str = option("image", "first: end at the first timestep, as latent diffusion", choices=("image", "first"))


class DdimOptions(OdeOptions):
    """DDIM sampling."""

    eta: float = option(0.0, "noise of each step; 0: deterministic, 1: as DDPM", ge=0, le=1)


class EulerOptions(GridOptions):
    """Euler's method on the ODE, with EDM's churn."""

    s_churn: float = option(0.0, "noise added in all intervals; 0: none, deterministic", ge=0)
    s_min: float = option(0.0, "smallest noise level at which noise is added", ge=0)
    s_max: float | None = option(None, "largest noise level at which noise is added; null: no limit", gt=0)
    s_noise: float = option(1.0, "factor of the added noise", gt=0)


class HeunOptions(EulerOptions):
    """Heun's method on the ODE, with EDM's churn."""

    evaluations = 2


SCHEDULERS = Registry("solver")
SCHEDULERS.add("ddpm", "kairos.sampling.solvers:ddpm", DdpmOptions, "ancestral sampling (Ho et al. 2020)")
SCHEDULERS.add("ddim", "kairos.sampling.solvers:ddim", DdimOptions, "DDIM (Song et al. 2021)")
SCHEDULERS.add("dpm_solver", "kairos.sampling.solvers:dpm_solver", OdeOptions, "DPM-Solver++ (Lu et al. 2022)")
SCHEDULERS.add("euler", "kairos.sampling.solvers:edm", EulerOptions, "Euler's method on the ODE (flow, EDM)")
SCHEDULERS.add("heun", "kairos.sampling.solvers:edm", HeunOptions, "EDM's sampler (Karras et al. 2022)")


def resolve_solver(scheduler: dict[str, Any], process: dict[str, Any]) -> dict[str, Any]:
    """Return a solver with spacing ``auto`` replaced by the default of the process.

    Args:
        scheduler: the solver, ``{"name": ..., option: ...}`` with all options.
        process: the forward process, in the form of `scheduler`.

    Raises:
        ConfigError: the process does not allow an option's value.
    """
    is_discrete = "timesteps" in process
    spacings: tuple[str, ...] = DISCRETE if is_discrete else CONTINUOUS
    if process["name"] == "flow":  # its noise over signal is unbounded, so karras has no end points
        spacings = ("uniform",)
    allowed: dict[str, tuple[Any, ...]] = {"spacing": ("auto", *spacings)}  # allowed values; the first is the default
    if spacings != CONTINUOUS:
        allowed["s_churn"] = (0,)  # churn needs continuous, unbounded noise levels
    if scheduler.get("spacing") != "leading":
        allowed["offset"] = (0,)
    if not is_discrete:
        allowed["end"] = ("image",)
    if process.get("variance") != "learned_range":
        allowed["variance"] = VARIANCES[:2]
    reasons = {"offset": f"spacing {scheduler.get('spacing')}", "variance": f"variance {process.get('variance')}"}
    for name, values in allowed.items():
        if scheduler.get(name, values[0]) not in values:
            reason = reasons.get(name, f"process {process['name']}")
            choices = ", ".join(map(str, values))
            raise ConfigError(f"sampling.scheduler.{name}: got {scheduler[name]!r}, allowed with {reason}: {choices}")
    if scheduler.get("spacing") == "auto":
        return {**scheduler, "spacing": spacings[0]}
    return scheduler
