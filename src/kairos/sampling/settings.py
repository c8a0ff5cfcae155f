"""Section `sampling`."""

from typing import Literal

from pydantic import Field

from kairos.sampling.registries import SCHEDULERS
from kairos.section import Section, component


class SamplingConfig(Section):
    """How images are drawn from a milestone."""

    scheduler: component(SCHEDULERS) = Field("ddim", validate_default=True, description="sampling scheme")  # type: ignore[valid-type]
    steps: int = Field(50, ge=1, description="network evaluations per image")
    weights: Literal["ema", "raw"] = Field("ema", description="which weights are sampled")
    guidance_scale: float = Field(1.0, ge=0, description="classifier-free guidance; 1: none")
    batch_size: int = Field(128, ge=1, description="images per network evaluation; does not change the images")
    grid: int = Field(64, ge=1, le=400, description="images on the grid picture")
    seed: int = Field(0, ge=0, description="seed of the starting noise, one generator per image")
