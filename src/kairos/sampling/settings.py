"""Section `sampling`."""

from typing import Any, Literal

from pydantic import Field

from kairos.diffusion.processes import build_process
from kairos.errors import ConfigError
from kairos.sampling.places import places
from kairos.sampling.registries import SCHEDULERS, resolved
from kairos.section import Section, component

GUIDANCE = ("guidance_scale", "guidance_channels", "guidance_power", "guidance_interval")


class SamplingConfig(Section):
    """How images are drawn from a milestone."""

    scheduler: component(SCHEDULERS) = Field("ddim", validate_default=True, description="sampling scheme")  # type: ignore[valid-type]
    steps: int = Field(50, ge=1, description="intervals of the grid from noise to the image")
    weights: Literal["ema", "raw"] = Field("ema", description="which weights are sampled")
    guidance_scale: float = Field(1.0, ge=0, description="classifier-free guidance; 1: none")
    guidance_channels: int | None = Field(None, ge=1, description="only the first so many are guided; null: all")
    guidance_power: float | None = Field(
        None, gt=0, description="MDT's power-cosine: none at noise, all of it at the image; null: constant"
    )
    guidance_interval: list[float] | None = Field(
        None, min_length=2, max_length=2, description="least and most noise over signal that is guided; null: all"
    )
    precision: Literal["fp32", "tf32", "bf16"] = Field("fp32", description="of the network; images are decoded in fp32")
    batch_size: int = Field(128, ge=1, description="images per network evaluation; does not change the images")
    shards: int = Field(1, ge=1, description="jobs that a segment's images are drawn in; does not change the images")
    labels: Literal["balanced", "data"] = Field("balanced", description="classes alike, or as often as in the data")
    grid: int = Field(64, ge=1, le=400, description="images on the grid picture")
    seed: int = Field(0, ge=0, description="seed of the noise, which is a function of it and the image's index")

    @property
    def nfe(self) -> int:
        """Network evaluations per image; guidance makes each of them two."""
        each = getattr(SCHEDULERS.entry(self.scheduler["name"]).options, "evaluations", 1)
        return int(each * (self.steps - 1) + 1)

    def check_fits(self, diffusion: dict[str, Any], conditions: list[str], dropout: float) -> None:
        """Check against the other sections: the process, the model's conditions, the share trained without them.

        Raises:
            ConfigError: a field does not fit; the message names it.
        """
        if self.guidance_scale != 1 and not conditions:
            raise ConfigError("sampling.guidance_scale: got other than 1, allowed: 1 for a model without conditions")
        if self.guidance_scale != 1 and dropout == 0:
            raise ConfigError("sampling.guidance_scale: other than 1 needs training.condition_dropout > 0")
        for name in GUIDANCE[1:]:
            if self.guidance_scale == 1 and (value := getattr(self, name)) is not None:
                raise ConfigError(
                    f"sampling.{name}: got {value} with guidance_scale 1, which guides nothing, allowed: null"
                )
        if (interval := self.guidance_interval) and not 0 <= interval[0] < interval[1]:
            raise ConfigError(f"sampling.guidance_interval: got {interval}, allowed: 0 <= least < most")
        process = diffusion["process"]
        timesteps = process.get("timesteps", self.steps)
        if self.steps > timesteps:
            raise ConfigError(
                f"sampling.steps: got {self.steps}, allowed: at most diffusion.process.timesteps = {timesteps}"
            )
        scheduler = resolved(self.scheduler, process)
        if scheduler.get("offset") and self.steps == timesteps:
            raise ConfigError(f"sampling.scheduler.offset: got 1 with all {timesteps} timesteps as steps, allowed: 0")
        if scheduler.get("spacing") == "karras" and "timesteps" in process:
            places(build_process(diffusion), self.steps, scheduler)
