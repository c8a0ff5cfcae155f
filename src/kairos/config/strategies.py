"""Sections `diffusion` and `methods`: the forward process, and the strategies that are compared on it."""

from typing import Literal

from pydantic import Field

from kairos.diffusion.registries import LOSSES, PROCESSES
from kairos.section import Section, component
from kairos.strategies.registries import SAMPLERS, WEIGHTINGS


class DiffusionConfig(Section):
    """The forward process and what the network predicts."""

    process: component(PROCESSES) = Field("discrete", validate_default=True, description="forward process")  # type: ignore[valid-type]
    prediction: Literal["epsilon", "x0", "v"] = Field("epsilon", description="what the network predicts")
    losses: list[component(LOSSES)] = Field(  # type: ignore[valid-type]
        ["mse"], validate_default=True, min_length=1, description="per-sample loss terms; their sum is minimised"
    )


class MethodConfig(Section):
    """A timestep strategy: a sampler and a weighting."""

    sampler: component(SAMPLERS) = Field("uniform", validate_default=True, description="how timesteps are drawn")  # type: ignore[valid-type]
    weighting: component(WEIGHTINGS) = Field("none", validate_default=True, description="how their losses are weighted")  # type: ignore[valid-type]
