"""Sampling schemes by name."""

from dataclasses import dataclass

from kairos.options import option
from kairos.registry import Registry

SPACINGS = ("leading", "trailing", "linspace")


@dataclass(frozen=True)
class DdpmOptions:
    """Ancestral sampling; variance and spacing are explicit because diffusers' defaults are not the papers'."""

    spacing: str = option("trailing", "how the steps are spread over the timesteps", choices=SPACINGS)
    variance: str = option("fixed_large", "reverse variance", choices=("fixed_large", "fixed_small"))
    clip: bool = option(False, "clip the predicted x0 to [-1, 1]: for pixels, wrong for latents")


@dataclass(frozen=True)
class DdimOptions:
    """DDIM sampling."""

    spacing: str = option("trailing", "how the steps are spread over the timesteps", choices=SPACINGS)
    eta: float = option(0.0, "noise of each step: 0 deterministic, 1 as DDPM", ge=0, le=1)
    clip: bool = option(False, "clip the predicted x0 to [-1, 1]: for pixels, wrong for latents")


SCHEDULERS = Registry("sampling scheme")
SCHEDULERS.add("ddpm", "kairos.sampling.schedulers:ddpm", DdpmOptions, "ancestral sampling (Ho et al. 2020)")
SCHEDULERS.add("ddim", "kairos.sampling.schedulers:ddim", DdimOptions, "DDIM (Song et al. 2021)")
