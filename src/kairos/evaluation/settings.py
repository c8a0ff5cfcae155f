"""Section `evaluation`, and what the reference fixes for every evaluation that uses it."""

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from kairos.evaluation.registries import EXTRACTORS
from kairos.section import Section, component


class EvaluationConfig(Section):
    """How images are compared with real ones."""

    extractor: component(EXTRACTORS) = Field("auto", validate_default=True, description="features of images")  # type: ignore[valid-type]
    num_samples: int = Field(450, ge=2, description="images per set")
    sets: int = Field(3, ge=1, description="sets of samples; their spread is the uncertainty of a distance")
    kid: bool = Field(True, description="kernel distance beside the Fréchet distance")
    strata: int = Field(32, ge=1, description="validation loss: strata of times between the two end points")
    loss_images: int = Field(256, ge=1, description="validation loss: held-out images, fixed")
    precision: Literal["fp32", "tf32", "bf16"] = Field("fp32", description="of the extractor and the validation loss")
    seed: int = Field(0, ge=0, description="seed of validation noise and reference rows")


@dataclass(frozen=True)
class LossSettings:
    """The validation loss: number of held-out images, of strata between the end points, seed and precision."""

    images: int
    strata: int
    seed: int
    precision: str = "fp32"
