"""Sections `diffusion` and `methods`: the forward process, and the timestep strategies that are compared."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, ValidationInfo, field_validator

from kairos.components import component
from kairos.forward_process import prediction_name, select_prediction
from kairos.library_components import LibraryComponent
from kairos.losses.settings import LOSSES, LossOptions, check_losses
from kairos.section import Section, field
from kairos_timesteps.components import COUPLINGS, PROCESSES, SAMPLERS, WEIGHTINGS

_Loss = Annotated[LossOptions, component(LOSSES)]


class DiffusionConfig(Section):
    """The forward process, the prediction target and the losses."""

    process: Annotated[LibraryComponent, component(PROCESSES)] = field("discrete", "forward process")
    prediction: Literal["epsilon", "x0", "v"] | None = field(
        None, "prediction target of the network, if the process has several"
    )
    losses: list[_Loss] = field(["mse"], "per-sample loss terms; their sum is minimised", min_length=1)

    @field_validator("prediction")
    @classmethod
    def _resolve_prediction(cls, value: str | None, info: ValidationInfo) -> str | None:
        """Return the configured prediction target, or else the default of the process, see `select_prediction`.

        The result is None for a process with a single target. If field `process` is not valid, the value is returned.

        Raises:
            ValueRejected: the process does not have the configured target.
        """
        process = info.data.get("process")
        if process is None:  # the process is not valid, which pydantic reports
            return value
        return select_prediction(process, value)

    @property
    def prediction_name(self) -> str:
        """Name of the prediction target in metrics and texts, also for a process that has only one."""
        return prediction_name(self.prediction or self.process.component_class.prediction)

    def model_post_init(self, context: Any) -> None:
        """Check the losses against each other and against the process.

        Raises:
            ConfigError: they do not fit, see `check_losses`.
        """
        check_losses(self.losses, self.process)


# JSON schema of a method's `grid`, which is expanded before methods are checked
_SCALAR = {"type": ["number", "string", "boolean", "null"]}
_VALUES = {"type": "array", "minItems": 1, "uniqueItems": True, "items": _SCALAR}
_KEYS = {"pattern": r"^(sampler|weighting|coupling)(\..+)?$"}
_GRID = {"type": "object", "minProperties": 1, "propertyNames": _KEYS, "additionalProperties": _VALUES}
_HELP = "values of options, such as sampler.k: [1, 2, 5]; each combination becomes a method"


class MethodConfig(Section):
    """A timestep strategy: a sampler, a weighting and a coupling of noise with images."""

    model_config = ConfigDict(
        json_schema_extra=lambda schema: schema["properties"].update(grid={**_GRID, "description": _HELP})
    )

    sampler: Annotated[LibraryComponent, component(SAMPLERS)] = field("uniform", "distribution of timesteps")
    weighting: Annotated[LibraryComponent, component(WEIGHTINGS)] = field("none", "weight of the loss at each timestep")
    coupling: Annotated[LibraryComponent, component(COUPLINGS)] = field("independent", "assignment of noise to images")

    @property
    def components(self) -> tuple[LibraryComponent, ...]:
        """Sampler, weighting and coupling, in this order; without the default coupling, ``independent``."""
        if self.coupling.name == "independent":
            return self.sampler, self.weighting
        return self.sampler, self.weighting, self.coupling
