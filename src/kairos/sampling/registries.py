"""Solvers by name, and the options that each process allows."""

from typing import Any

from kairos_timesteps.diffusion.schedule import VARIANCES
from kairos_timesteps.errors import ConfigError, demand
from kairos_timesteps.options import Options, option
from kairos_timesteps.registry import Registry

DISCRETE = ("trailing", "leading", "linspace", "karras")  # spacings of discrete processes; the first is the default
CONTINUOUS = ("karras", "uniform")  # spacings of continuous processes; the first is the default
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
        if self.sigma_min is not None and self.sigma_max is not None:
            demand(
                self.sigma_min < self.sigma_max, "sigma_min", self.sigma_min, f"less than sigma_max = {self.sigma_max}"
            )


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
    """Check a solver against the forward process and replace spacing ``auto`` by the default of the process.

    Args:
        scheduler: the solver, ``{"name": ..., option: ...}`` with all options.
        process: the forward process, in the form of `scheduler`.

    Raises:
        ConfigError: the process does not allow an option's value.
    """
    spacings = _allowed_spacings(process)
    for name, (values, reason) in _restricted_options(scheduler, process, spacings).items():
        if name in scheduler and scheduler[name] not in values:
            choices = ", ".join(map(str, values))
            raise ConfigError(f"sampling.scheduler.{name}: got {scheduler[name]!r}, allowed with {reason}: {choices}")
    if scheduler.get("spacing") == "auto":
        return {**scheduler, "spacing": spacings[0]}
    return scheduler


def _allowed_spacings(process: dict[str, Any]) -> tuple[str, ...]:
    """Return the spacings of time grids that a process allows; the first is its default."""
    if process["name"] == "flow":  # its noise over signal is unbounded, so karras has no end points
        return ("uniform",)
    if "timesteps" in process:
        return DISCRETE
    return CONTINUOUS


def _restricted_options(
    scheduler: dict[str, Any], process: dict[str, Any], spacings: tuple[str, ...]
) -> dict[str, tuple[tuple[Any, ...], str]]:
    """Return the options that the process or the spacing restricts: allowed values and the reason, by option.

    Args:
        scheduler: the solver, see `resolve_solver`.
        process: the forward process.
        spacings: spacings that the process allows.
    """
    of_process = f"process {process['name']}"
    restricted: dict[str, tuple[tuple[Any, ...], str]] = {"spacing": (("auto", *spacings), of_process)}
    if spacings != CONTINUOUS:  # churn needs continuous, unbounded noise levels
        restricted["s_churn"] = ((0,), of_process)
    if scheduler.get("spacing") != "leading":
        restricted["offset"] = ((0,), f"spacing {scheduler.get('spacing')}")
    if "timesteps" not in process:
        restricted["end"] = (("image",), of_process)
    if process.get("variance") != "learned_range":
        fixed_variances = tuple(variance for variance in VARIANCES if variance != "learned_range")
        restricted["variance"] = (fixed_variances, f"variance {process.get('variance')}")
    return restricted
