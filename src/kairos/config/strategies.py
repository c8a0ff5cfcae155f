"""Sections `diffusion` and `methods`: the forward process, and the strategies that are compared on it."""

from typing import Any, Literal

from pydantic import ConfigDict, ValidationInfo, field_validator

from kairos.diffusion.registries import LOSSES, PROCESSES, check_losses, chosen_prediction
from kairos.section import Section, component, field
from kairos.strategies.registries import SAMPLERS, WEIGHTINGS


class DiffusionConfig(Section):
    """The forward process and what the network predicts."""

    process: component(PROCESSES) = field("discrete", "forward process")
    prediction: Literal["epsilon", "x0", "v"] | None = field(
        None, "what the network predicts, where the process leaves a choice"
    )
    losses: list[component(LOSSES)] = field(["mse"], "per-sample loss terms; their sum is minimised", min_length=1)

    @field_validator("prediction")
    @classmethod
    def _a_choice_there_is(cls, value: str | None, info: ValidationInfo) -> str | None:
        process = info.data.get("process")
        return chosen_prediction(process["name"], value) if process else value  # without one it is refused already

    def model_post_init(self, context: Any) -> None:
        """Whether a learned variance is trained."""
        check_losses(self.losses, self.process)


_SCALAR = {"type": ["number", "string", "boolean", "null"]}
_VALUES = {"type": "array", "minItems": 1, "uniqueItems": True, "items": _SCALAR}
_KEYS = {"pattern": r"^(sampler|weighting)(\..+)?$"}
_GRID = {"type": "object", "minProperties": 1, "propertyNames": _KEYS, "additionalProperties": _VALUES}
_HELP = "values of options, sampler.k: [1, 2, 5]: a method of each combination, written out by config.grid"


class MethodConfig(Section):
    """A timestep strategy: a sampler and a weighting."""

    model_config = ConfigDict(
        json_schema_extra=lambda schema: schema["properties"].update(grid={**_GRID, "description": _HELP})
    )

    sampler: component(SAMPLERS) = field("uniform", "how timesteps are drawn")
    weighting: component(WEIGHTINGS) = field("none", "how their losses are weighted")
