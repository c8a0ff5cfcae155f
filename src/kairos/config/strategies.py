"""Sections `diffusion` and `methods`: the forward process, and the strategies that are compared on it."""

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from kairos.diffusion.registries import LOSSES, PROCESSES, check_losses, chosen_prediction
from kairos.errors import ConfigError
from kairos.section import Section, component
from kairos.strategies.registries import SAMPLERS, WEIGHTINGS


class DiffusionConfig(Section):
    """The forward process and what the network predicts."""

    process: component(PROCESSES) = Field("discrete", validate_default=True, description="forward process")  # type: ignore[valid-type]
    prediction: Literal["epsilon", "x0", "v"] | None = Field(
        None, validate_default=True, description="what the network predicts, where the process leaves a choice"
    )
    losses: list[component(LOSSES)] = Field(  # type: ignore[valid-type]
        ["mse"], validate_default=True, min_length=1, description="per-sample loss terms; their sum is minimised"
    )

    @field_validator("prediction")
    @classmethod
    def _a_choice_there_is(cls, value: str | None, info: ValidationInfo) -> str | None:
        process = info.data.get("process")
        if process is None:  # refused already
            return value
        try:
            return chosen_prediction(process["name"], value)
        except ConfigError as error:
            raise ValueError(str(error)) from None

    @model_validator(mode="after")
    def _variance_is_trained(self) -> "DiffusionConfig":
        try:
            check_losses(self.losses, self.process)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self


class MethodConfig(Section):
    """A timestep strategy: a sampler and a weighting."""

    sampler: component(SAMPLERS) = Field("uniform", validate_default=True, description="how timesteps are drawn")  # type: ignore[valid-type]
    weighting: component(WEIGHTINGS) = Field("none", validate_default=True, description="how their losses are weighted")  # type: ignore[valid-type]
