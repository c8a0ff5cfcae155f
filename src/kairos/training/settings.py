"""Section `training` of an experiment: lengths, optimiser, hardware, and the split into jobs."""

from typing import Any, Literal

from kairos.section import Section, component, field
from kairos.training.registries import AVERAGES, OPTIMIZERS, PROBES, SCHEDULES
from kairos_timesteps.errors import demand


class TrainingConfig(Section):
    """Lengths, optimiser, and hardware of training runs."""

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
    optimizer: component(OPTIMIZERS, "adam") = field({}, "optimiser of the model")
    schedule: component(SCHEDULES) = field("constant", "learning rate after warm-up")
    ema: component(AVERAGES, "decay") = field({}, "average of the weights")
    precision: Literal["fp32", "tf32", "bf16", "fp64"] = field(
        "fp32", "tf32: matrix products of a GPU; bf16: the network in autocast; fp64: everything in double"
    )
    compile: bool = field(False, "torch.compile; its autotuning is not bit-exact between machines")
    deterministic: bool | Literal["portable"] = field(
        True, "deterministic algorithms only; portable: equal bits on any x86-64 CPU"
    )
    threads: int = field(1, "computing threads of every job; results differ between thread counts", ge=1)
    device: str = field("auto", "auto: a GPU if there is one", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    condition_dropout: float = field(0.0, "fraction of samples trained without their conditions", ge=0, lt=1)
    start_from: str | None = field(
        None, "folder of a snapshot whose averaged weights the run starts from; null: random weights"
    )
    augment: float | None = field(
        None,
        "probability of each of EDM's augmentations except flips, which always apply; null: no augmentation",
        ge=0,
        le=1,
    )
    probes: list[component(PROBES)] = field([], "measurements taken during training")

    def model_post_init(self, context: Any) -> None:
        """Check that the processes can share the batch, and that the device supports the settings."""
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
        """Check that every process has at least one micro-batch of the batch."""
        microbatch, batch_size, processes = self.microbatch or 1, self.batch_size, self.processes
        demand(microbatch <= batch_size, "training.microbatch", microbatch, f"at most batch_size = {batch_size}")
        if processes > 1:
            # at least `processes` micro-batches: ceil(batch_size / microbatch) >= processes
            largest = (batch_size - 1) // (processes - 1)
            allowed = f"at most {largest}, so that batch_size = {batch_size} has one for each of {processes} processes"
            demand(microbatch <= largest, "training.microbatch", microbatch, allowed)
