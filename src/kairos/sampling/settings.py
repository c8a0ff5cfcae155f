"""Section `sampling`."""

from typing import Any, Literal

from kairos.forward_process import build_process
from kairos.sampling.registries import SCHEDULERS, resolve_solver
from kairos.sampling.time_grids import build_time_grid
from kairos.section import Section, component, field
from kairos_timesteps.errors import ConfigError, demand

GUIDANCE = ("guidance_scale", "guidance_channels", "guidance_power", "guidance_interval")


class SamplingConfig(Section):
    """How images are drawn from a milestone."""

    scheduler: component(SCHEDULERS) = field("ddim", "sampling scheme")
    steps: int = field(50, "intervals of the grid from noise to the image", ge=1)
    weights: Literal["ema", "raw"] = field("ema", "which weights are sampled")
    guidance_scale: float = field(1.0, "classifier-free guidance; 1: none", ge=0)
    guidance_channels: int | None = field(None, "only the first so many are guided; null: all", ge=1)
    guidance_power: float | None = field(
        None, "MDT's power-cosine: none at noise, all of it at the image; null: constant", gt=0
    )
    guidance_interval: list[float] | None = field(
        None, "least and most noise over signal that is guided; null: all", min_length=2, max_length=2
    )
    precision: Literal["fp32", "tf32", "bf16"] = field("fp32", "of the network; images are decoded in fp32")
    batch_size: int = field(128, "images per network evaluation; does not change the images", ge=1)
    shards: int = field(1, "jobs that a segment's images are drawn in; does not change the images", ge=1)
    labels: Literal["balanced", "data"] = field("balanced", "classes alike, or as often as in the data")
    grid: int = field(64, "images on the grid picture", ge=1, le=400)
    seed: int = field(0, "seed of the noise, which is a function of it and the image's index", ge=0)

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
        guided, process = self.guidance_scale != 1, diffusion["process"]
        where = "sampling.guidance_scale"
        demand(not guided or conditions, where, "other than 1", "1 for a model without conditions")
        if guided and dropout == 0:
            raise ConfigError(f"{where}: other than 1 needs training.condition_dropout > 0")
        for name in GUIDANCE[1:]:
            value, beside = getattr(self, name), "with guidance_scale 1, which guides nothing"
            demand(guided or value is None, f"sampling.{name}", f"{value} {beside}", "null")
        least, most = self.guidance_interval or (0, 1)
        demand(0 <= least < most, "sampling.guidance_interval", self.guidance_interval, "0 <= least < most")
        timesteps = process.get("timesteps", self.steps)
        allowed = f"at most diffusion.process.timesteps = {timesteps}"
        demand(self.steps <= timesteps, "sampling.steps", self.steps, allowed)
        scheduler = resolve_solver(self.scheduler, process)
        good = not scheduler.get("offset") or self.steps < timesteps
        demand(good, "sampling.scheduler.offset", f"1 with all {timesteps} timesteps as steps", "0")
        if scheduler.get("spacing") == "karras" and "timesteps" in process:
            build_time_grid(build_process(diffusion), self.steps, scheduler)
