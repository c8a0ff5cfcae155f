"""Sampling schemes by name, and which options of theirs a process allows."""

from typing import Any

from kairos_timesteps.diffusion.schedule import VARIANCES
from kairos_timesteps.errors import ConfigError, demand
from kairos_timesteps.options import Options, option
from kairos_timesteps.registry import Registry

DISCRETE = ("trailing", "leading", "linspace", "karras")
CONTINUOUS = ("karras", "uniform")
SPACINGS = ("auto", "trailing", "leading", "linspace", "uniform", "karras")


class GridOptions(Options):
    """Options of a solver's time grid, and of its use of the estimate of x0."""

    spacing: str = option(
        "auto", "how the steps are spread; auto: the first of those the process has", choices=SPACINGS
    )
    rho: float = option(7.0, "karras: how much the steps crowd at little noise", gt=0)
    sigma_min: float | None = option(None, "karras: least noise over signal; null: the process' own", gt=0)
    sigma_max: float | None = option(None, "karras: most noise over signal; null: the process' own", gt=0)
    clip: bool = option(False, "clip the estimate of x0 to [-1, 1]: for pixels, wrong for latents")

    evaluations = 1  # of the network per interval; the last has one in any case

    def __post_init__(self) -> None:
        good = not (self.sigma_min and self.sigma_max) or self.sigma_min < self.sigma_max
        demand(good, "sigma_min", self.sigma_min, f"less than sigma_max = {self.sigma_max}")


class DdpmOptions(GridOptions):
    """Ancestral sampling; variance and spacing are explicit because diffusers' defaults are not the papers'."""

    variance: str = option("fixed_large", "reverse variance; learned_range: what the network gives", choices=VARIANCES)


class OdeOptions(GridOptions):
    """The ODE on timesteps as latent diffusion's public code has them."""

    offset: int = option(0, "added to leading's timesteps (latent diffusion: 1)", choices=(0, 1))
    end: str = option(
        "image", "first: end at the first timestep's noise, as latent diffusion", choices=("image", "first")
    )


class DdimOptions(OdeOptions):
    """DDIM sampling."""

    eta: float = option(0.0, "noise of each step: 0 deterministic, 1 as DDPM", ge=0, le=1)


class EulerOptions(GridOptions):
    """The ODE by Euler's method, with EDM's churn."""

    s_churn: float = option(0.0, "noise added in all intervals; 0: none, deterministic", ge=0)
    s_min: float = option(0.0, "least noise level at which noise is added", ge=0)
    s_max: float | None = option(None, "largest such noise level; null: no limit", gt=0)
    s_noise: float = option(1.0, "factor of the noise that is added", gt=0)


class HeunOptions(EulerOptions):
    """The ODE by Heun's method, with EDM's churn."""

    evaluations = 2


SCHEDULERS = Registry("sampling scheme")
SCHEDULERS.add("ddpm", "kairos.sampling.solvers:ddpm", DdpmOptions, "ancestral sampling (Ho et al. 2020)")
SCHEDULERS.add("ddim", "kairos.sampling.solvers:ddim", DdimOptions, "DDIM (Song et al. 2021)")
SCHEDULERS.add("dpm_solver", "kairos.sampling.solvers:dpm_solver", OdeOptions, "DPM-Solver++ (Lu et al. 2022)")
SCHEDULERS.add("euler", "kairos.sampling.solvers:edm", EulerOptions, "Euler's method on the ODE (flow, EDM)")
SCHEDULERS.add("heun", "kairos.sampling.solvers:edm", HeunOptions, "EDM's sampler (Karras et al. 2022)")


def resolve_solver(scheduler: dict[str, Any], process: dict[str, Any]) -> dict[str, Any]:
    """A scheme with the spacing that `auto` means for the process, both as fields `component` store them.

    Raises:
        ConfigError: the process does not allow an option.
    """
    spacings: tuple[str, ...] = DISCRETE if "timesteps" in process else CONTINUOUS
    if process["name"] == "flow":  # its noise over signal has no bounds that a grid could lie between
        spacings = ("uniform",)
    allowed: dict[str, tuple[Any, ...]] = {"spacing": ("auto", *spacings)}
    if spacings != CONTINUOUS:
        allowed["s_churn"] = (0,)  # noise is added where noise levels are continuous and unbounded
    if scheduler.get("spacing") != "leading":
        allowed["offset"] = (0,)
    if "timesteps" not in process:
        allowed["end"] = ("image",)
    if process.get("variance") != "learned_range":
        allowed["variance"] = VARIANCES[:2]
    given = {"offset": f"spacing {scheduler.get('spacing')}", "variance": f"variance {process.get('variance')}"}
    for name, values in allowed.items():
        if scheduler.get(name, values[0]) not in values:
            beside = f"with {given.get(name, 'process ' + process['name'])}: {', '.join(map(str, values))}"
            raise ConfigError(f"sampling.scheduler.{name}: got {scheduler[name]!r}, allowed {beside}")
    return {**scheduler, "spacing": spacings[0]} if scheduler.get("spacing") == "auto" else scheduler
