"""Sampling schemes: from noise to x0 with diffusers' schedulers, on the timesteps that are visited alone.

A scheme is what a registry entry builds from ``(options, process, steps)``: a function ``scheme(network, noise,
generators)`` that gives x0.

The visited timesteps form a process of their own, with betas 1 - alpha-bar_i / alpha-bar_{i-1} (Nichol and Dhariwal
2021, section 4), and diffusers' scheduler runs all steps of that one. This is exact for every spacing. Diffusers' own
spacing is not: its DDIM takes the previous timestep to be ``t - T // steps``, wrong unless steps divides T (and always
with ``linspace``), its DDPM adds noise to the last image when that step is not t = 0, and its ``trailing`` timesteps
end in -1 for some numbers of steps (1000 in 61).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kairos.sampling.registries import DdimOptions, DdpmOptions

Network = Callable[[Tensor, int], Tensor]

# what the network predicts, in diffusers' words
PREDICTION_TYPES = {"epsilon": "epsilon", "x0": "sample", "v": "v_prediction"}


@dataclass(frozen=True)
class Scheme:
    """A diffusers scheduler over the visited timesteps.

    Args:
        timesteps: timesteps of the full process that the network is shown, descending.
        scheduler: diffusers scheduler of a process with as many timesteps, all of them visited.
        step_options: further arguments of each step, such as DDIM's eta.
    """

    timesteps: tuple[int, ...]
    scheduler: Any
    step_options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, network: Network, noise: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """Draw x0 from noise N(0, I), both (batch, c, h, w).

        Args:
            network: from x_t and a timestep to the prediction, as the model was trained.
            noise: the starting point.
            generators: one per image; the noise of each step comes from them.
        """
        x = noise
        for t, index in zip(self.timesteps, self.scheduler.timesteps.tolist()):
            output = network(x, t)
            (x, *_) = self.scheduler.step(
                output, index, x, generator=list(generators), return_dict=False, **self.step_options
            )
        return x


def spaced_timesteps(spacing: str, steps: int, timesteps: int) -> NDArray[np.int64]:
    """The timesteps that `steps` network evaluations visit, descending, distinct (Lin et al. 2024, table 2).

    ``trailing`` holds t = T - 1, ``leading`` holds t = 0, ``linspace`` both.
    """
    ascending: NDArray[Any]
    if spacing == "leading":
        ascending = np.arange(steps) * (timesteps // steps)
    elif spacing == "trailing":
        ascending = np.round(np.arange(1, steps + 1) * timesteps / steps) - 1
    else:
        ascending = np.round(np.linspace(0, timesteps - 1, steps)) if steps > 1 else np.array([timesteps - 1])
    return ascending.astype(np.int64)[::-1].copy()


def respaced_betas(alphas_cumprod: NDArray[np.float64], visited: NDArray[np.int64]) -> NDArray[np.float64]:
    """The betas of the process that consists of the visited timesteps alone, shape of `visited`, ascending."""
    kept = alphas_cumprod[np.sort(visited)]
    return 1 - kept / np.concatenate([[1.0], kept[:-1]])


def ddim(options: DdimOptions, process: Any, steps: int) -> Scheme:
    """DDIM (Song et al. 2021, eq. 12 and 16)."""
    from diffusers.schedulers.scheduling_ddim import DDIMScheduler

    visited = spaced_timesteps(options.spacing, steps, process.timesteps)
    scheduler = DDIMScheduler(
        **_shared(process, visited, options.clip),
        set_alpha_to_one=True,  # the last step ends at alpha-bar = 1: the image itself
    )
    scheduler.set_timesteps(steps)
    # where x0 is clipped, the direction to x_t must follow from the clipped x0
    return Scheme(tuple(visited.tolist()), scheduler, {"eta": options.eta, "use_clipped_model_output": options.clip})


def ddpm(options: DdpmOptions, process: Any, steps: int) -> Scheme:
    """Ancestral sampling (Ho et al. 2020, algorithm 2) with variance beta_t (fixed_large) or the posterior's."""
    from diffusers.schedulers.scheduling_ddpm import DDPMScheduler

    visited = spaced_timesteps(options.spacing, steps, process.timesteps)
    scheduler = DDPMScheduler(**_shared(process, visited, options.clip), variance_type=options.variance)
    scheduler.set_timesteps(steps)
    return Scheme(tuple(visited.tolist()), scheduler)


def _shared(process: Any, visited: NDArray[np.int64], clip: bool) -> dict[str, Any]:
    """What both schedulers are told; every default of diffusers that matters is stated."""
    return {
        "num_train_timesteps": len(visited),
        "trained_betas": respaced_betas(process.schedule.alphas_cumprod, visited),
        "prediction_type": PREDICTION_TYPES[process.prediction],
        "clip_sample": clip,
        "thresholding": False,
        "timestep_spacing": "leading",  # of the visited timesteps: all of them, down to the first
        "steps_offset": 0,
        "rescale_betas_zero_snr": False,
    }
