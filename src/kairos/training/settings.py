"""Section `training` of an experiment: lengths, hardware, split into jobs; optimizers, schedules, averages, probes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from kairos.components import ComponentOptions, Components, component
from kairos.devices import DEVICE_PATTERN
from kairos.diffusion import DiffusionConfig, MethodConfig
from kairos.models.settings import BACKBONES, BackboneOptions
from kairos.section import Section, check, field
from kairos_timesteps.errors import demand


class OptimizerOptions(ComponentOptions):
    """Base class of the options of an optimizer, with linear warm-up and gradient clipping.

    A gradient that is not finite ends the training run; EDM's code replaces its values by 0 and 1e5.
    """

    lr: float = field(2e-4, "learning rate after warm-up", gt=0)
    betas: list[float] = field([0.9, 0.999], "decay rates of the two moment estimates, each in [0, 1)")
    eps: float = field(1e-8, "term added to the denominator", gt=0)
    weight_decay: float = field(0.0, "weight decay (decoupled for adamw)", ge=0)
    warmup_steps: int = field(0, "steps of linear warm-up", ge=0)
    warmup_from_zero: bool = field(False, "the first step has rate 0 (EDM, U-ViT) instead of 1/warmup_steps of lr")
    grad_clip: float | None = field(1.0, "largest gradient norm; null: no clipping", gt=0)

    def model_post_init(self, context: Any) -> None:
        """Check that there are two decay rates, each in [0, 1); raise ConfigError otherwise."""
        is_valid = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        demand(is_valid, "betas", self.betas, "two numbers, each in [0, 1)")


OPTIMIZERS: Components[OptimizerOptions] = Components("optimizer")


@OPTIMIZERS.register
class AdamOptions(OptimizerOptions):
    """Adam (Kingma and Ba 2015)."""

    code: ClassVar[str] = "kairos.training.optim:adam"

    name: str = "adam"


@OPTIMIZERS.register
class AdamWOptions(OptimizerOptions):
    """AdamW, Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    code: ClassVar[str] = "kairos.training.optim:adamw"

    name: str = "adamw"


class ScheduleOptions(ComponentOptions):
    """Base class of the options of a learning-rate schedule."""


SCHEDULES: Components[ScheduleOptions] = Components("learning-rate schedule")


@SCHEDULES.register
class ConstantOptions(ScheduleOptions):
    """Constant learning rate."""

    code: ClassVar[str] = "kairos.training.optim:constant"

    name: str = "constant"


@SCHEDULES.register
class CosineOptions(ScheduleOptions):
    """Half a cosine, from the learning rate to a fraction of it (Loshchilov and Hutter 2017)."""

    code: ClassVar[str] = "kairos.training.optim:cosine"

    name: str = "cosine"
    length: int | None = field(None, "steps until the end is reached; null: the last milestone", ge=1)
    final: float = field(0.0, "fraction of the learning rate at the end", ge=0, le=1)


@SCHEDULES.register
class RepeatedDecayOptions(ScheduleOptions):
    """Constant except for a short decay to 0 before each of some steps, so that their weights can be evaluated."""

    code: ClassVar[str] = "kairos.training.optim:decays"

    name: str = "decays"
    at: list[float] = field([100_000], "steps at which a decay ends, increasing; after each the rate is full again")
    share: float = field(0.2, "length of a decay, as a fraction of the steps before its end", gt=0, le=1)

    def model_post_init(self, context: Any) -> None:
        """Check that there are steps, all at least 1 and increasing; raise ConfigError otherwise."""
        is_valid = self.at and self.at[0] >= 1 and self.at == sorted({*self.at})  # the set removes equal steps
        demand(is_valid, "at", self.at, "steps, 1 or more, increasing")


@SCHEDULES.register
class InverseSqrtOptions(ScheduleOptions):
    """Constant, then proportional to the inverse square root of the step, as EDM2's (Karras et al. 2024)."""

    code: ClassVar[str] = "kairos.training.optim:inverse_sqrt"

    name: str = "inverse_sqrt"
    reference: int = field(70_000, "step from which the rate falls", ge=1)


class AverageOptions(ComponentOptions):
    """Base class of the options of an average of the weights."""


AVERAGES: Components[AverageOptions] = Components("average of weights")


@AVERAGES.register
class ConstantDecayOptions(AverageOptions):
    """Exponential moving average with a decay per step (Ho et al. 2020)."""

    code: ClassVar[str] = "kairos.training.optim:decay"

    name: str = "decay"
    decay: float = field(0.9999, "decay per step", ge=0, lt=1)
    warmup: bool = field(True, "decay min(decay, (1 + n)/(10 + n)), so that early averages forget the initial weights")
    count_from: Literal[0, 1] = field(0, "n of the first step (ddpm-torch: 0, latent diffusion: 1)")


@AVERAGES.register
class HalfLifeOptions(AverageOptions):
    """EDM's exponential moving average, whose half-life is given in images (Karras et al. 2022)."""

    code: ClassVar[str] = "kairos.training.optim:half_life"

    name: str = "half_life"
    images: float = field(500_000.0, "half-life of the average, in images", gt=0)
    rampup: float | None = field(0.05, "largest half-life, as a fraction of the images seen; null: no limit", gt=0)


@AVERAGES.register
class PowerOptions(AverageOptions):
    """EDM2's power function, whose half-life grows with the length of the training run (Karras et al. 2024)."""

    code: ClassVar[str] = "kairos.training.optim:power"

    name: str = "power"
    width: float = field(0.05, "relative width sigma_rel of the averaging profile", gt=0, lt=0.289)


class ProbeOptions(ComponentOptions):
    """Base class of the options of a probe: a measurement in steps that log, see `kairos.training.loop.StepResult`.

    The code is called as ``code(options)`` and returns the probe.
    """


PROBES: Components[ProbeOptions] = Components("probe")  # kairos has none of its own


_Probe = Annotated[ProbeOptions, component(PROBES)]


class TrainingConfig(Section):
    """Lengths, optimizer, and hardware of training runs."""

    batch_size: int = field(128, "images per step, over all processes", ge=1)
    microbatch: int | None = field(
        None, "images per forward pass and process, gradients add up; null: all at once", ge=1
    )
    processes: int = field(
        1, "processes of one training run, one GPU each; changes results of coupling assignment alone", ge=1
    )
    nodes: int = field(1, "machines that these processes are spread over evenly", ge=1)
    trainings_per_gpu: int = field(1, "training runs that share a GPU, if one does not use it fully", ge=1)
    milestones: list[int | str] = field(
        [1000], "lengths at which weights are kept and evaluated: 500, '64k images', '10 epochs'", min_length=1
    )
    segments: int = field(1, "jobs that a training run is split into; each resumes from the previous one's state", ge=1)
    checkpoint_every: int = field(500, "steps between checkpoints, from which a killed run resumes", ge=1)
    log_every: int | None = field(
        None,
        "steps between lines of metrics.jsonl, which synchronise with the device; null: 1 on a CPU, 10 on a GPU",
        ge=1,
    )
    optimizer: Annotated[OptimizerOptions, component(OPTIMIZERS, "adam")] = field({}, "optimizer of the model")
    schedule: Annotated[ScheduleOptions, component(SCHEDULES)] = field("constant", "learning rate after warm-up")
    ema: Annotated[AverageOptions, component(AVERAGES, "decay")] = field({}, "average of the weights")
    precision: Literal["fp32", "tf32", "bf16", "fp64"] = field(
        "fp32",
        "also on a GPU the default is fp32; tf32: matrix products and convolutions of a GPU in TF32; "
        "bf16: the network in autocast; fp64: weights, images and the network in double",
    )
    compile: bool = field(
        False, "torch.compile, off by default also on a GPU; its autotuning is not bit-exact between machines"
    )
    deterministic: bool | Literal["portable"] = field(
        True, "deterministic algorithms only; portable: equal bits on any x86-64 CPU"
    )
    threads: int = field(1, "computing threads of every job; results differ between thread counts", ge=1)
    device: str = field("auto", "auto: a GPU if there is one", pattern=f"^({DEVICE_PATTERN})$")
    condition_dropout: float = field(0.0, "fraction of samples trained without their conditions", ge=0, lt=1)
    start_from: str | None = field(
        None, "folder of a snapshot whose averaged weights the run starts from; null: random weights"
    )
    augment: float | None = field(
        None,
        "probability of each of EDM's augmentations except x flips, whose probability is 1/2; null: no augmentation",
        ge=0,
        le=1,
    )
    probes: list[_Probe] = field([], "measurements taken during training")

    def model_post_init(self, context: Any) -> None:
        """Check that the processes can share the batch, and that the device supports the settings.

        * `processes` is a multiple of `nodes`, and at most `batch_size`.
        * Every process has at least one micro-batch, see `_check_microbatch`.
        * Several processes share no GPU with other runs, and `device` has no number.
        * ``deterministic: portable`` needs a CPU and no compilation.

        Raises:
            ConfigError: a field does not fit the others.
        """
        processes, batch_size = self.processes, self.batch_size
        demand(processes % self.nodes == 0, "training.processes", processes, f"a multiple of nodes = {self.nodes}")
        demand(processes <= batch_size, "training.processes", processes, f"at most batch_size = {batch_size}")
        self._check_microbatch()
        if processes > 1:
            demand(
                self.trainings_per_gpu == 1,
                "training.trainings_per_gpu",
                f"{self.trainings_per_gpu} with {processes} processes",
                "1 (several training runs share a GPU only if each has one process)",
            )
            demand(
                ":" not in self.device,
                "training.device",
                f"{self.device!r} with {processes} processes",
                "auto, cpu, cuda (each process has a GPU of its own)",
            )
        if self.deterministic == "portable":
            demand(
                self.device == "cpu",
                "training.device",
                f"{self.device!r} with deterministic: portable",
                "cpu (kernels differ between GPUs)",
            )
            demand(
                not self.compile,
                "training.compile",
                "true with deterministic: portable",
                "false (torch.compile generates code for the present CPU)",
            )

    def _check_microbatch(self) -> None:
        """Check that `microbatch` is at most the batch, and leaves at least one micro-batch for every process.

        The caller has checked that the number of processes is at most the batch size.

        Raises:
            ConfigError: `microbatch` is too large.
        """
        microbatch, batch_size, processes = self.microbatch, self.batch_size, self.processes
        if microbatch is None:
            return
        demand(microbatch <= batch_size, "training.microbatch", microbatch, f"at most batch_size = {batch_size}")
        if processes > 1:
            # at least `processes` micro-batches: ceil(batch_size / microbatch) >= processes,
            # that is batch_size / microbatch > processes - 1, or microbatch * (processes - 1) < batch_size;
            # in integers microbatch * (processes - 1) <= batch_size - 1
            largest = (batch_size - 1) // (processes - 1)
            allowed = f"at most {largest}, so that batch_size = {batch_size} has one for each of {processes} processes"
            demand(microbatch <= largest, "training.microbatch", microbatch, allowed)


@dataclass(frozen=True)
class RunSettings:
    """Settings of one training run: all that it reads of an experiment.

    Attributes:
        method_name: name of the method; it decides nothing but names.
        seed: seed of the training run.
        model: the backbone.
        diffusion: forward process, prediction target and losses.
        method: timestep strategy.
        training: lengths, optimizer and hardware.
        train_images: number of training images, which lengths in epochs need.
        plain_experiment: returns the whole resolved experiment as plain values, which records keep; it decides nothing.
    """

    method_name: str
    seed: int
    model: BackboneOptions
    diffusion: DiffusionConfig
    method: MethodConfig
    training: TrainingConfig
    train_images: int | None
    plain_experiment: Callable[[], dict[str, Any]]

    @property
    def sections(self) -> dict[str, Any]:
        """Sections of the experiment that decide the run, by the names of `kairos.stages`."""
        return {
            "model": self.model,
            "diffusion": self.diffusion,
            "method": self.method,
            "training": self.training,
        }


def read_run_settings(config: dict[str, Any], method: str, seed: int) -> RunSettings:
    """Return the settings of a training run from the experiment in the record of one of its snapshots.

    Settings that an earlier version did not record have their present defaults, and `train_images` is None then.

    Args:
        config: the whole experiment as plain values, of this or an earlier version of kairos.
        method: name of the method.
        seed: seed of the training run.

    Raises:
        ConfigError: a section is not valid in this version of kairos.
        KeyError: the experiment does not have the method, or lacks a section.
    """
    return RunSettings(
        method_name=method,
        seed=seed,
        model=BACKBONES.select(config["model"]),
        diffusion=check(DiffusionConfig, config["diffusion"], "diffusion"),
        method=check(MethodConfig, config["methods"][method], f"methods.{method}"),
        training=check(TrainingConfig, config["training"], "training"),
        train_images=config["dataset"].get("train_images"),
        plain_experiment=lambda: config,
    )
