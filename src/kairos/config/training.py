"""Sections `diffusion`, `training` and `methods`: what decides a training's trajectory, and how it is cut into jobs."""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from kairos.config.base import Section, component
from kairos.diffusion.registries import LOSSES, PROCESSES
from kairos.strategies.registries import SAMPLERS, WEIGHTINGS
from kairos.training.registries import PROBES

Pair = Annotated[tuple[float, float], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]


class DiffusionConfig(Section):
    """The forward process and what the network predicts."""

    process: component(PROCESSES) = Field("discrete", validate_default=True, description="forward process")  # type: ignore[valid-type]
    prediction: Literal["epsilon", "x0", "v"] = Field("epsilon", description="what the network predicts")
    losses: list[component(LOSSES)] = Field(  # type: ignore[valid-type]
        ["mse"], validate_default=True, min_length=1, description="per-sample loss terms; their sum is minimised"
    )


class OptimizerConfig(Section):
    """The optimiser of the model."""

    name: Literal["adam", "adamw"] = Field("adam", description="optimiser")
    lr: float = Field(2e-4, gt=0, description="learning rate after warm-up")
    betas: Pair = Field((0.9, 0.999), description="decay rates of the moment estimates, each in [0, 1)")
    eps: float = Field(1e-8, gt=0, description="term added to the denominator")
    weight_decay: float = Field(0.0, ge=0, description="weight decay (decoupled for adamw)")
    warmup_steps: int = Field(0, ge=0, description="steps of linear warm-up")
    grad_clip: float | None = Field(1.0, gt=0, description="largest gradient norm; null: no clipping")

    @field_validator("betas")
    @classmethod
    def _betas_in_range(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("each in [0, 1)")
        return value


class EmaConfig(Section):
    """The exponential moving average of the weights."""

    decay: float = Field(0.9999, ge=0, lt=1, description="decay per step")
    warmup: bool = Field(
        True, description="decay min(decay, (1 + step) / (10 + step)), so that early averages are not initial"
    )


class TrainingConfig(Section):
    """Lengths, optimiser, and how the training is computed."""

    batch_size: int = Field(128, ge=1, description="images per step, over all processes")
    microbatch: int | None = Field(
        None, ge=1, description="images per forward pass and process, gradients add up; null: all at once"
    )
    processes: int = Field(1, ge=1, description="processes of one training, a GPU each; changes no result")
    nodes: int = Field(1, ge=1, description="machines that these processes are spread over evenly")
    trainings_per_gpu: int = Field(1, ge=1, description="trainings that share a GPU, where one cannot fill it")
    milestones: list[int | str] = Field(
        [1000],
        min_length=1,
        description="lengths at which weights are kept and evaluated: 500, '64k images', '10 epochs'",
    )
    segments: int = Field(
        1, ge=1, description="jobs that a training is split into, each starts from the previous one's state"
    )
    checkpoint_every: int = Field(500, ge=1, description="steps between checkpoints a killed training resumes from")
    log_every: int = Field(1, ge=1, description="steps between lines of metrics.jsonl")
    optimizer: OptimizerConfig = OptimizerConfig()
    ema: EmaConfig = EmaConfig()
    precision: Literal["fp32", "bf16", "fp64"] = Field(
        "fp32", description="bf16: the network in autocast; fp64: weights, images and noise in double precision"
    )
    compile: bool = Field(False, description="torch.compile; its autotuning is not bit-exact between machines")
    deterministic: bool | Literal["portable"] = Field(
        True, description="deterministic algorithms only; portable: the same bits on every x86-64 processor with AVX2"
    )
    threads: int = Field(1, ge=1, description="computing threads of every job; results differ between thread counts")
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto: a GPU where there is one")
    condition_dropout: float = Field(0.0, ge=0, lt=1, description="share of samples trained without their conditions")
    probes: list[component(PROBES)] = Field([], description="measurements taken during training")  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _processes_fit(self) -> "TrainingConfig":
        if self.deterministic == "portable" and self.device != "cpu":
            raise ValueError(
                f"training.device: got {self.device!r} with deterministic: portable, allowed: cpu "
                "(every GPU has kernels of its own)"
            )
        if self.deterministic == "portable" and self.compile:
            raise ValueError(
                "training.compile: got true with deterministic: portable, allowed: false "
                "(it compiles for the processor that it finds)"
            )
        processes, microbatch, batch = self.processes, self.microbatch, self.batch_size
        if processes % self.nodes:
            raise ValueError(f"training.processes: got {processes}, allowed: a multiple of nodes = {self.nodes}")
        if processes > batch:
            raise ValueError(f"training.processes: got {processes}, allowed: at most batch_size = {batch}")
        if microbatch is not None and microbatch > batch:
            raise ValueError(f"training.microbatch: got {microbatch}, allowed: at most batch_size = {batch}")
        if microbatch is not None and processes > 1 and microbatch > (most := (batch - 1) // (processes - 1)):
            raise ValueError(
                f"training.microbatch: got {microbatch}, allowed: at most {most}, so that batch_size = {batch} has one "
                f"for each of {processes} processes"
            )
        if processes > 1 and self.trainings_per_gpu > 1:
            raise ValueError(
                f"training.trainings_per_gpu: got {self.trainings_per_gpu} with {processes} processes, allowed: 1 "
                "(several trainings share a GPU only where each has one process)"
            )
        if processes > 1 and ":" in self.device:
            raise ValueError(
                f"training.device: got {self.device!r} with {processes} processes, allowed: auto, cpu, cuda "
                "(each process has a GPU of its own)"
            )
        return self


class MethodConfig(Section):
    """A timestep strategy: a sampler and a weighting."""

    sampler: component(SAMPLERS) = Field("uniform", validate_default=True, description="how timesteps are drawn")  # type: ignore[valid-type]
    weighting: component(WEIGHTINGS) = Field("none", validate_default=True, description="how their losses are weighted")  # type: ignore[valid-type]


_LENGTH = re.compile(r"^\s*(\d+(?:\.\d*)?)\s*([kM]?)\s*(steps|images|epochs)\s*$")


def length_in_steps(length: int | str, batch_size: int, train_images: int | None) -> int:
    """Steps of a length given in steps, images or epochs; a part of a step counts as one.

    Raises:
        ValueError: not a length, not positive, or epochs of a data set whose size is not stated.
    """
    allowed = "a number of steps, or text like '500 steps', '64k images', '2M images', '10 epochs'"
    if isinstance(length, int):
        steps = float(length)
    else:
        match = _LENGTH.match(length)
        if not match:
            raise ValueError(f"training.milestones: got {length!r}, allowed: {allowed}")
        amount = float(match[1]) * {"": 1, "k": 1e3, "M": 1e6}[match[2]]
        if match[3] == "epochs" and train_images is None:
            raise ValueError(
                f"training.milestones: {length!r} needs dataset.train_images, the number of training images"
            )
        steps = amount / {"steps": 1, "images": batch_size, "epochs": batch_size / (train_images or 1)}[match[3]]
    if steps <= 0:
        raise ValueError(
            f"training.milestones: got {length!r}, allowed: more than 0 steps (step 0 is always evaluated)"
        )
    return int(-(-steps // 1))


def describe_method(method: MethodConfig) -> dict[str, Any]:
    """Sampler and weighting with all options: what is logged and hashed."""
    return {"sampler": dict(method.sampler), "weighting": dict(method.weighting)}


__all__ = [
    "DiffusionConfig",
    "EmaConfig",
    "MethodConfig",
    "OptimizerConfig",
    "TrainingConfig",
    "describe_method",
    "length_in_steps",
]
