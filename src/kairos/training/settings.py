"""Section `training`: lengths, optimiser, how the training is computed and cut into jobs."""

from typing import Literal

from pydantic import Field, model_validator

from kairos.section import Section, component
from kairos.training.registries import AVERAGES, OPTIMIZERS, PROBES, SCHEDULES


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
    optimizer: component(OPTIMIZERS, "adam") = Field({}, validate_default=True, description="optimiser of the model")  # type: ignore[valid-type]
    schedule: component(SCHEDULES) = Field("constant", validate_default=True, description="learning rate after warm-up")  # type: ignore[valid-type]
    ema: component(AVERAGES, "decay") = Field({}, validate_default=True, description="average of the weights")  # type: ignore[valid-type]
    precision: Literal["fp32", "tf32", "bf16", "fp64"] = Field(
        "fp32", description="tf32: matrix products of a GPU; bf16: the network in autocast; fp64: everything in double"
    )
    compile: bool = Field(False, description="torch.compile; its autotuning is not bit-exact between machines")
    deterministic: bool | Literal["portable"] = Field(
        True, description="deterministic algorithms only; portable: with the same bits on any x86-64 processor"
    )
    threads: int = Field(1, ge=1, description="computing threads of every job; results differ between thread counts")
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto: a GPU where there is one")
    condition_dropout: float = Field(0.0, ge=0, lt=1, description="share of samples trained without their conditions")
    start_from: str | None = Field(None, description="milestone whose averaged weights are trained on; null: none")
    augment: float | None = Field(
        None, ge=0, le=1, description="probability of each of EDM's augmentations, flips always; null: none of them"
    )
    probes: list[component(PROBES)] = Field([], description="measurements taken during training")  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _processes_fit(self) -> "TrainingConfig":
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
        if processes > 1 and ":" in self.device:
            raise ValueError(
                f"training.device: got {self.device!r} with {processes} processes, allowed: auto, cpu, cuda "
                "(each process has a GPU of its own)"
            )
        return self
