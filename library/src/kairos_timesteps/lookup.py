"""Names of strategies, their components, and the table of what a strategy trains on; without torch."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kairos_timesteps.base import Sampler, Weighting
from kairos_timesteps.components import SAMPLERS, WEIGHTINGS, checked
from kairos_timesteps.diffusion.processes import Process
from kairos_timesteps.errors import ConfigError, rejection
from kairos_timesteps.numeric import Array
from kairos_timesteps.options import suggestion

Options = Mapping[str, Any] | None


def parse_name(name: str) -> tuple[str, str]:
    """Return the names of sampler and weighting of ``sampler+weighting``, or of one of them alone.

    A bare name selects the sampler and the weighting of that name. If only one exists, the other is ``uniform`` or
    ``none``.

    Raises:
        ConfigError: a name is unknown; the message lists what exists.
    """
    first, plus, second = (part.strip() for part in name.partition("+"))
    if not plus:
        second = first if first in WEIGHTINGS else "none"
        # a name of a weighting alone has sampler uniform
        first = "uniform" if second == first not in SAMPLERS else first
    if not plus and first not in SAMPLERS and first not in SAMPLERS.unavailable:
        samplers, weightings = (", ".join(sorted(registry)) for registry in (SAMPLERS, WEIGHTINGS))
        hint = suggestion(first, [*SAMPLERS, *WEIGHTINGS])
        raise ConfigError(
            f"unknown strategy {name!r}{hint} Allowed: a sampler ({samplers}), a weighting ({weightings}), or "
            "sampler+weighting"
        )
    if first in WEIGHTINGS and second in SAMPLERS and first not in SAMPLERS:
        raise ConfigError(f"strategy {name!r}: the sampler comes first; write {second}+{first}")
    SAMPLERS.entry(first)
    WEIGHTINGS.entry(second)
    return first, second


def build_pair(
    process: Process, names: tuple[str, str], sampler: Options, weighting: Options, seed: int = 0
) -> tuple[Sampler, Weighting]:
    """Build a sampler and a weighting on a process. The process provides sigma_data if the weighting does not set it.

    Raises:
        ConfigError: an option is unknown, not allowed, or does not fit the process.
    """
    schedule = process.schedule
    sampler_options = checked(SAMPLERS, names[0], sampler, schedule.timesteps, schedule.name)
    weighting_options = checked(WEIGHTINGS, names[1], weighting, schedule.timesteps, schedule.name)
    if getattr(weighting_options, "sigma_data", 0) is None:
        weighting_options.sigma_data = getattr(process, "sigma_data", None)
    try:
        built = SAMPLERS[names[0]].component(sampler_options, schedule, seed)
        _check_importance(built, f"sampler {names[0]}")
        return built, WEIGHTINGS[names[1]].component(weighting_options, schedule, process.prediction)
    except ConfigError:
        raise
    except ValueError as error:  # of a user's component
        raise ConfigError(str(error)) from None


def _check_importance(sampler: Sampler, where: str) -> None:
    """Reject importance weights if timesteps are never drawn, because no weight corrects for them.

    A curriculum is checked at its `checked_steps`. Densities that require further context are not checked here.

    Raises:
        ConfigError: there are such timesteps.
    """
    if not sampler.importance or sampler.requires_context:
        return
    for context in sampler.checked_contexts():
        (unreached,) = np.nonzero(sampler.probabilities(**context) <= 0)
        if len(unreached):
            got = f"true, but {len(unreached)} timesteps are never drawn, such as {unreached[0]}"
            raise rejection(f"{where}.importance", got, "false, or a floor above 0")


def table(sampler: Sampler, weighting: Weighting, x0: Any = None, step: int = 0, **context: Any) -> dict[str, Array]:
    """Return what a strategy trains on at a step, each column (T,).

    ``t`` is the process' own time. ``p`` is the probability of its timestep, floor included. ``w`` is the weight with
    importance weights, without factors that depend on a sample's loss. ``effective`` is p w.
    """
    p, w = sampler.probabilities(x0, step=step, **context), weighting.weights(step)
    if sampler.importance:
        w = np.where(p > 0, w / (len(p) * np.where(p > 0, p, 1.0)), w)
    return {"t": sampler.schedule.times, "p": p, "w": w, "effective": p * w}
