"""Section `training`: lengths, optimiser, how the training is computed and cut into jobs."""

from typing import Any, Literal

from kairos.section import Section, component, field
from kairos.training.registries import AVERAGES, OPTIMIZERS, PROBES, SCHEDULES
from kairos_timesteps.errors import demand


class TrainingConfig(Section):
    """Lengths, optimiser, and how the training is computed."""

    batch_size: int = field(128, "images per step, over all processes", ge=1)
    microbatch: int | None = field(
        None, "images per forward pass and process, gradients add up; null: all at once", ge=1
    )
    processes: int = field(1, "processes of one training, a GPU each; changes no result but assignment's", ge=1)
    nodes: int = field(1, "machines that these processes are spread over evenly", ge=1)
    trainings_per_gpu: int = field(1, "trainings that share a GPU, where one cannot fill it", ge=1)
    milestones: list[int | str] = field(
        [1000], "lengths at which weights are kept and evaluated: 500, '64k images', '10 epochs'", min_length=1
    )
    segments: int = field(1, "jobs that a training is split into, each starts from the previous one's state", ge=1)
    checkpoint_every: int = field(500, "steps between checkpoints a killed training resumes from", ge=1)
    log_every: int | None = field(
        None, "steps between lines of metrics.jsonl, which wait for the device; null: 1 on a CPU, 10 on a GPU", ge=1
    )
    optimizer: component(OPTIMIZERS, "adam") = field({}, "optimiser of the model")
    schedule: component(SCHEDULES) = field("constant", "learning rate after warm-up")
    ema: component(AVERAGES, "decay") = field({}, "average of the weights")
    precision: Literal["fp32", "tf32", "bf16", "fp64"] = field(
        "fp32", "tf32: matrix products of a GPU; bf16: the network in autocast; fp64: everything in double"
    )
    compile: bool = field(False, "torch.compile; its autotuning is not bit-exact between machines")
    deterministic: bool | Literal["portable"] = field(
        True, "deterministic algorithms only; portable: with the same bits on any x86-64 processor"
    )
    threads: int = field(1, "computing threads of every job; results differ between thread counts", ge=1)
    device: str = field("auto", "auto: a GPU where there is one", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    condition_dropout: float = field(0.0, "share of samples trained without their conditions", ge=0, lt=1)
    start_from: str | None = field(None, "milestone whose averaged weights are trained on; null: none")
    augment: float | None = field(
        None, "probability of each of EDM's augmentations, flips always; null: none of them", ge=0, le=1
    )
    probes: list[component(PROBES)] = field([], "measurements taken during training")

    def model_post_init(self, context: Any) -> None:
        """Check that the processes can share the batch, and that the device supports the settings."""
        processes, microbatch, batch, device = self.processes, self.microbatch or 1, self.batch_size, self.device
        where, several = "training.processes", f"with {processes} processes"
        demand(processes % self.nodes == 0, where, processes, f"a multiple of nodes = {self.nodes}")
        demand(processes <= batch, where, processes, f"at most batch_size = {batch}")
        demand(microbatch <= batch, "training.microbatch", microbatch, f"at most batch_size = {batch}")
        if processes > 1:
            most = (batch - 1) // (processes - 1)
            allowed = f"at most {most}, so that batch_size = {batch} has one for each of {processes} processes"
            demand(microbatch <= most, "training.microbatch", microbatch, allowed)
            sharing, allowed = self.trainings_per_gpu, "several trainings share a GPU only where each has one process"
            demand(sharing == 1, "training.trainings_per_gpu", f"{sharing} {several}", f"1 ({allowed})")
        if self.deterministic == "portable":
            got, allowed = f"{device!r} with deterministic: portable", "cpu (every GPU has kernels of its own)"
            demand(device == "cpu", "training.device", got, allowed)
            got, allowed = "true with deterministic: portable", "false (it compiles for the processor that it finds)"
            demand(not self.compile, "training.compile", got, allowed)
        allowed = "auto, cpu, cuda (each process has a GPU of its own)"
        demand(processes == 1 or ":" not in device, "training.device", f"{device!r} {several}", allowed)
