"""Sections `diffusion` and `methods`: the forward process, and the strategies that are compared on it."""

from typing import Any, Literal

from pydantic import ConfigDict, SerializerFunctionWrapHandler, ValidationInfo, field_validator, model_serializer

from kairos.forward_process import chosen_prediction
from kairos.losses.registries import LOSSES, check_losses
from kairos.section import Section, component, field
from kairos_timesteps.components import COUPLINGS, SAMPLERS, WEIGHTINGS
from kairos_timesteps.diffusion.registries import PROCESSES


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
        """Check that the losses fit the process: a loss trains the variance if and only if the variance is learned."""
        check_losses(self.losses, self.process)


_SCALAR = {"type": ["number", "string", "boolean", "null"]}
_VALUES = {"type": "array", "minItems": 1, "uniqueItems": True, "items": _SCALAR}
_KEYS = {"pattern": r"^(sampler|weighting|coupling)(\..+)?$"}
_GRID = {"type": "object", "minProperties": 1, "propertyNames": _KEYS, "additionalProperties": _VALUES}
_HELP = "values of options, sampler.k: [1, 2, 5]: a method of each combination, written out by config.grid"


class MethodConfig(Section):
    """A timestep strategy: a sampler, a weighting and a coupling of noise with images."""

    model_config = ConfigDict(
        json_schema_extra=lambda schema: schema["properties"].update(grid={**_GRID, "description": _HELP})
    )

    sampler: component(SAMPLERS) = field("uniform", "how timesteps are drawn")
    weighting: component(WEIGHTINGS) = field("none", "how their losses are weighted")
    coupling: component(COUPLINGS) = field("independent", "which noise an image gets")

    @model_serializer(mode="wrap")
    def _without_the_usual(self, values_of: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Methods from before there were couplings stay what they were, to the hash."""
        values: dict[str, Any] = values_of(self)
        usual = self.coupling["name"] == "independent"
        return {name: value for name, value in values.items() if name != "coupling" or not usual}
