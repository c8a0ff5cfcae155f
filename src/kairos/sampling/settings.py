"""Section `sampling`, the solvers by name, and the options that each forward process allows."""

from typing import Annotated, Any, ClassVar, Literal

from kairos.components import ComponentOptions, Components, component
from kairos.diffusion import DiffusionConfig
from kairos.forward_process import build_process
from kairos.library_components import LibraryComponent
from kairos.sampling.time_grids import build_time_grid
from kairos.section import Section, field
from kairos_timesteps.diffusion.schedule import VARIANCES
from kairos_timesteps.errors import ConfigError, demand

# fields of section `sampling` that configure guidance; the sampling protocol contains them
GUIDANCE = ("guidance_scale", "guidance_channels", "guidance_power", "guidance_interval")
DISCRETE = ("trailing", "leading", "linspace", "karras")  # spacings of discrete processes; the first is the default
CONTINUOUS = ("karras", "uniform")  # spacings of continuous processes; the first is the default


class SolverOptions(ComponentOptions):
    """Base class of the options of a solver: options of its time grid and of the predicted x0.

    Attributes:
        evaluations: network evaluations per interval; the last interval has one in any case.
    """

    evaluations: ClassVar[int] = 1

    spacing: Literal["auto", "trailing", "leading", "linspace", "uniform", "karras"] = field(
        "auto", "spacing of the time grid; auto: the default of the process"
    )
    rho: float = field(7.0, "karras: concentration of the steps at small noise", gt=0)
    sigma_min: float | None = field(None, "karras: smallest noise over signal; null: that of the process", gt=0)
    sigma_max: float | None = field(None, "karras: largest noise over signal; null: that of the process", gt=0)
    clip: bool = field(False, "clip the predicted x0 to [-1, 1]: for pixels, wrong for latents")

    def model_post_init(self, context: Any) -> None:
        """Raise ConfigError if `sigma_min` and `sigma_max` are set and `sigma_min` is not below `sigma_max`."""
        if self.sigma_min is not None and self.sigma_max is not None:
            allowed = f"less than sigma_max = {self.sigma_max}"
            demand(self.sigma_min < self.sigma_max, "sigma_min", self.sigma_min, allowed)


SOLVERS: Components[SolverOptions] = Components("solver")


@SOLVERS.register
class DdpmOptions(SolverOptions):
    """Ancestral sampling (Ho et al. 2020).

    Variance and spacing are explicit because diffusers' defaults differ from the papers'.
    """

    code: ClassVar[str] = "kairos.sampling.solvers:ddpm"

    name: str = "ddpm"
    variance: Literal["fixed_large", "fixed_small", "learned_range"] = field(
        "fixed_large", "reverse variance; learned_range: predicted by the network"
    )


class OdeOptions(SolverOptions):
    """Base class of the options of solvers on the timesteps of latent diffusion's public code."""

    offset: Literal[0, 1] = field(0, "added to leading's timesteps (latent diffusion: 1)")
    end: Literal["image", "first"] = field("image", "first: end at the first timestep, as latent diffusion")


@SOLVERS.register
class DdimOptions(OdeOptions):
    """DDIM (Song et al. 2021)."""

    code: ClassVar[str] = "kairos.sampling.solvers:ddim"

    name: str = "ddim"
    eta: float = field(0.0, "noise of each step; 0: deterministic, 1: as DDPM", ge=0, le=1)


@SOLVERS.register
class DpmSolverOptions(OdeOptions):
    """DPM-Solver++ (Lu et al. 2022)."""

    code: ClassVar[str] = "kairos.sampling.solvers:dpm_solver"

    name: str = "dpm_solver"


@SOLVERS.register
class EulerOptions(SolverOptions):
    """Euler's method on the ODE of a flow or of EDM, with EDM's churn."""

    code: ClassVar[str] = "kairos.sampling.solvers:edm"

    name: str = "euler"
    s_churn: float = field(0.0, "noise added in all intervals; 0: none, deterministic", ge=0)
    s_min: float = field(0.0, "smallest noise level at which noise is added", ge=0)
    s_max: float | None = field(None, "largest noise level at which noise is added; null: no limit", gt=0)
    s_noise: float = field(1.0, "factor of the added noise", gt=0)


@SOLVERS.register
class HeunOptions(EulerOptions):
    """EDM's sampler, Heun's method on the ODE with churn (Karras et al. 2022)."""

    evaluations: ClassVar[int] = 2

    name: str = "heun"


def resolve_solver(scheduler: SolverOptions, process: LibraryComponent) -> SolverOptions:
    """Check a solver against the forward process, and replace spacing ``auto``, in a copy, by the process's default.

    Raises:
        ConfigError: the process, or the spacing of the grid, does not allow an option's value.
    """
    spacings = _allowed_spacings(process)
    for name, (values, reason) in _restricted_options(scheduler, process, spacings).items():
        value = getattr(scheduler, name, values[0])  # a solver without the option has no restriction
        if value not in values:
            choices = ", ".join(map(str, values))
            raise ConfigError(f"sampling.scheduler.{name}: got {value!r}, allowed with {reason}: {choices}")
    if scheduler.spacing == "auto":
        return scheduler.model_copy(update={"spacing": spacings[0]})
    return scheduler


def _allowed_spacings(process: LibraryComponent) -> tuple[str, ...]:
    """Return the spacings of time grids that a process allows, the default first; a flow allows only ``uniform``."""
    if process.name == "flow":  # its noise over signal is unbounded, so karras has no end points
        return ("uniform",)
    if process.get("timesteps") is not None:
        return DISCRETE
    return CONTINUOUS


def _restricted_options(
    scheduler: SolverOptions, process: LibraryComponent, spacings: tuple[str, ...]
) -> dict[str, tuple[tuple[Any, ...], str]]:
    """Return a tuple of allowed values and the reason, by name of each option that the process or spacing restricts.

    An example is ``{"end": (("image",), "process flow")}``. The solver need not have these options. `spacings` are the
    ones that the process allows.
    """
    process_reason = f"process {process.name}"
    restricted: dict[str, tuple[tuple[Any, ...], str]] = {"spacing": (("auto", *spacings), process_reason)}
    if spacings != CONTINUOUS:  # churn needs continuous, unbounded noise levels
        restricted["s_churn"] = ((0,), process_reason)
    if scheduler.spacing != "leading":  # ``auto`` never becomes leading
        restricted["offset"] = ((0,), f"spacing {scheduler.spacing}")
    if process.get("timesteps") is None:
        restricted["end"] = (("image",), process_reason)
    if process.get("variance") != "learned_range":
        fixed_variances = tuple(variance for variance in VARIANCES if variance != "learned_range")
        restricted["variance"] = (fixed_variances, f"variance {process.get('variance')}")
    return restricted


class SamplingConfig(Section):
    """Settings of the generation of images from a snapshot."""

    scheduler: Annotated[SolverOptions, component(SOLVERS)] = field("ddim", "solver")
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
    precision: Literal["fp32", "tf32", "bf16"] = field(
        "fp32", "precision of the network, fp32 also on a GPU; images are decoded in fp32"
    )
    batch_size: int = field(128, "images per network evaluation; does not change the images", ge=1)
    shards: int = field(1, "jobs that share the images of a snapshot; does not change the images", ge=1)
    labels: Literal["balanced", "data"] = field("balanced", "classes equally often, or as often as in the data")
    grid: int = field(64, "images on the PNG picture", ge=1, le=400)
    seed: int = field(0, "seed of the noise; noise is a function of seed and image index", ge=0)

    @property
    def nfe(self) -> int:
        """Number of evaluations per image; with guidance, each is two forward passes of the network."""
        last_interval = 1  # every solver evaluates the network once there
        return self.scheduler.evaluations * (self.steps - 1) + last_interval

    def check_fits(self, diffusion: DiffusionConfig, conditions: list[str], dropout: float) -> None:
        """Check the section against other sections of the experiment.

        * Guidance fits the model and its training, see `_check_guidance`.
        * A discrete process has at least `steps` timesteps, and more with an `offset`.
        * The process allows the options of the solver.
        * The noise levels of spacing karras are in the range of the process. With a discrete process, they fall on
          different timesteps.

        Args:
            diffusion: section `diffusion`.
            conditions: names of the model's conditions.
            dropout: share of the training samples without conditions.

        Raises:
            ConfigError: a field does not fit the other sections; the message contains its name.
        """
        self._check_guidance(conditions, dropout)
        process = diffusion.process
        timesteps = process.get("timesteps")  # None for a continuous process, which has a time for every step
        if timesteps is not None:
            allowed = f"at most diffusion.process.timesteps = {timesteps}"
            demand(self.steps <= timesteps, "sampling.steps", self.steps, allowed)
        scheduler = resolve_solver(self.scheduler, process)
        if timesteps is not None and getattr(scheduler, "offset", 0) > 0:
            got = f"1 with all {timesteps} timesteps as steps"
            demand(self.steps < timesteps, "sampling.scheduler.offset", got, "0")
        if scheduler.spacing == "karras":
            # the standard deviation of the data may be unknown yet; the grid does not depend on it
            built_process = build_process(process, diffusion.prediction, sigma_data=1.0)
            # raises ConfigError if the noise levels do not fit the process; the grid is not used
            build_time_grid(built_process, self.steps, scheduler)

    def _check_guidance(self, conditions: list[str], dropout: float) -> None:
        """Check the fields of guidance against each other and the model's conditions.

        A scale other than 1 needs conditions, and training that drops them (`dropout` above 0). With scale 1 the other
        fields are null. The interval ascends from 0 or more. The number of guided channels is checked in
        `kairos.sampling.sample`, where the shape of x0 is available.

        Raises:
            ConfigError: a field does not fit.
        """
        scale_field = "sampling.guidance_scale"
        if self.guidance_scale != 1:
            demand(len(conditions) > 0, scale_field, self.guidance_scale, "1 for a model without conditions")
            allowed = "1 for a model that is trained with training.condition_dropout 0"
            demand(dropout > 0, scale_field, self.guidance_scale, allowed)
        else:
            for name in ("guidance_channels", "guidance_power", "guidance_interval"):
                value = getattr(self, name)
                got = f"{value} with guidance_scale 1, which guides nothing"
                demand(value is None, f"sampling.{name}", got, "null")
        if self.guidance_interval is not None:
            smallest, largest = self.guidance_interval
            is_ascending = 0 <= smallest < largest
            demand(is_ascending, "sampling.guidance_interval", self.guidance_interval, "0 <= smallest < largest")
