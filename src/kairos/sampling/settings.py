"""Section `sampling`."""

from typing import Any, Literal

from kairos.forward_process import build_process
from kairos.sampling.registries import SCHEDULERS, resolve_solver
from kairos.sampling.time_grids import build_time_grid
from kairos.section import Section, component, field
from kairos_timesteps.errors import ConfigError, demand

GUIDANCE = ("guidance_scale", "guidance_channels", "guidance_power", "guidance_interval")


class SamplingConfig(Section):
    """Settings of the generation of images from a snapshot."""

    scheduler: component(SCHEDULERS) = field("ddim", "solver")
    steps: int = field(50, "intervals of the solver's time grid from noise to the image", ge=1)
    weights: Literal["ema", "raw"] = field("ema", "weights to generate with")
    guidance_scale: float = field(1.0, "classifier-free guidance; 1: none", ge=0)
    guidance_channels: int | None = field(None, "number of guided channels, the first ones; null: all", ge=1)
    guidance_power: float | None = field(
        None, "power of MDT's power-cosine, from no guidance at noise to full at the image; null: constant", gt=0
    )
    guidance_interval: list[float] | None = field(
        None, "smallest and largest noise over signal that are guided; null: all", min_length=2, max_length=2
    )
    precision: Literal["fp32", "tf32", "bf16"] = field("fp32", "precision of the network; images are decoded in fp32")
    batch_size: int = field(128, "images per network evaluation; does not change the images", ge=1)
    shards: int = field(1, "jobs that share the images of a snapshot; does not change the images", ge=1)
    labels: Literal["balanced", "data"] = field("balanced", "classes equally often, or as often as in the data")
    grid: int = field(64, "images on the PNG picture", ge=1, le=400)
    seed: int = field(0, "seed of the noise; noise is a function of seed and image index", ge=0)

    @property
    def nfe(self) -> int:
        """Number of network evaluations per image; with guidance, each evaluates the network twice."""
        per_interval = getattr(SCHEDULERS.entry(self.scheduler["name"]).options, "evaluations", 1)
        last_interval = 1  # every solver evaluates the network once there
        return int(per_interval * (self.steps - 1) + last_interval)

    def check_fits(self, diffusion: dict[str, Any], conditions: list[str], dropout: float) -> None:
        """Check the section against other sections of the experiment.

        Args:
            diffusion: section `diffusion`.
            conditions: names of the model's conditions.
            dropout: share of the training samples without conditions.

        Raises:
            ConfigError: a field does not fit the other sections; the message contains its name.
        """
        self._check_guidance(conditions, dropout)
        process = diffusion["process"]
        timesteps = process.get("timesteps")  # None for a continuous process, which has a time for every step
        if timesteps is not None:
            allowed = f"at most diffusion.process.timesteps = {timesteps}"
            demand(self.steps <= timesteps, "sampling.steps", self.steps, allowed)
        scheduler = resolve_solver(self.scheduler, process)
        if timesteps is None:
            return
        if scheduler.get("offset"):
            got = f"1 with all {timesteps} timesteps as steps"
            demand(self.steps < timesteps, "sampling.scheduler.offset", got, "0")
        if scheduler.get("spacing") == "karras":
            build_time_grid(build_process(diffusion), self.steps, scheduler)  # raises ConfigError if levels collide

    def _check_guidance(self, conditions: list[str], dropout: float) -> None:
        """Check the fields of guidance against each other and the model's conditions.

        Raises:
            ConfigError: a field does not fit.
        """
        scale_field = "sampling.guidance_scale"
        if self.guidance_scale != 1:
            demand(len(conditions) > 0, scale_field, "other than 1", "1 for a model without conditions")
            if dropout == 0:
                raise ConfigError(f"{scale_field}: other than 1 needs training.condition_dropout > 0")
        else:
            for name in ("guidance_channels", "guidance_power", "guidance_interval"):
                value = getattr(self, name)
                got = f"{value} with guidance_scale 1, which guides nothing"
                demand(value is None, f"sampling.{name}", got, "null")
        if self.guidance_interval is not None:
            smallest, largest = self.guidance_interval
            is_ascending = 0 <= smallest < largest
            demand(is_ascending, "sampling.guidance_interval", self.guidance_interval, "0 <= smallest < largest")
