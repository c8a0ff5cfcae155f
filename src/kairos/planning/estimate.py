"""An experiment's cost as a whole: jobs, operations, memory, storage, time, and what an interruption takes."""

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from kairos.config import Experiment
from kairos.planning import rate as rates
from kairos.planning.data import Data, Shape, describe
from kairos.planning.network import Network, measure
from kairos.planning.rate import Rate
from kairos.planning.storage import Memory, Storage, memory, storage
from kairos.planning.strategies import Passes, passes
from kairos.workflow.plan import Plan
from kairos.workflow.resources import gpus


@dataclass(frozen=True)
class Stage:
    """Jobs of a stage: Snakemake's, those that a cluster's queue gets, GPUs of one of these."""

    name: str
    jobs: int
    queued: int
    gpus: int


@dataclass(frozen=True)
class Method:
    """A method's cost.

    Attributes:
        passes: samples through the network beside the batch, per step.
        operations: floating-point operations of a step.
        seconds: of a step; None without a rate.
        hours: GPU-hours of its trainings, all seeds.
        sampling: GPU-hours of drawing its images.
        longest: hours of its longest training job.
        lost: seconds of training that a killed job can lose.
    """

    passes: Passes
    operations: float
    seconds: float | None = None
    hours: float | None = None
    sampling: float | None = None
    longest: float | None = None
    lost: float | None = None


@dataclass(frozen=True)
class Estimate:
    """All there is to say before anything runs."""

    experiment: Experiment = field(repr=False)
    results: str
    stages: list[Stage]
    data: Data
    network: Network
    microbatches: int
    bytes_per_step: int
    memory: Memory
    storage: Storage
    rate: Rate | None
    methods: dict[str, Method]

    @property
    def hours(self) -> float | None:
        """GPU-hours of all trainings and samples."""
        each = [(method.hours, method.sampling) for method in self.methods.values()]
        return sum((training or 0) + (sampling or 0) for training, sampling in each) if self.rate else None


def estimate(
    experiment: Experiment,
    x0: Shape | None = None,
    classes: int | None = None,
    steps_per_second: float | None = None,
    tflops: float | None = None,
    utilisation: float = 0.4,
) -> Estimate:
    """Count what an experiment will take.

    Args:
        experiment: the checked experiment.
        x0: shape of what is trained on, where it cannot be known yet.
        classes: number of classes, likewise.
        steps_per_second: of one training of the cheapest method; None, and no `tflops`: as measured before, if it was.
        tflops: speed of a GPU instead, in 10^12 operations per second.
        utilisation: share of `tflops` that is reached.

    Raises:
        ConfigError: an argument or a field cannot be used, or a shape is not known.
    """
    plan = Plan(experiment, Path())
    training, plain, results = experiment.training, experiment.plain(), Path(plan.results)
    data = describe(experiment, results, x0, classes)
    share = -(-training.batch_size // training.processes)
    samples = min(training.microbatch or share, share)
    network = measure(experiment.model, data.x0, data.conditions, samples, training.precision)
    microbatches = -(-share // samples)
    forward, both = network.forward / samples, (network.forward + network.backward) / samples
    methods: dict[str, Method] = {}
    known: dict[str, Passes] = {}
    for name, method in experiment.methods.items():
        key = f"{method.sampler} {method.weighting}"
        known[key] = known.get(key) or passes(plain, name, data.x0[0])
        extra = known[key]
        methods[name] = Method(extra, (training.batch_size + extra.gradient) * both + extra.forward * forward)
    operations = {name: method.operations for name, method in methods.items()}
    speed = rates.given(operations, training.processes, steps_per_second, tflops, utilisation)
    speed = speed or rates.measured(results, operations, training.processes)
    if speed is not None:
        methods = {name: _timed(experiment, method, speed, name, forward) for name, method in methods.items()}
    # Adam reads weights, gradients and two moments and writes all but the gradients; the norm and the EMA: six more
    moved = network.traffic * microbatches + 13 * network.parameters * network.value_bytes
    states = {name: method.passes.state for name, method in methods.items()}
    return Estimate(
        experiment, plan.results, _stages(plan), data, network, microbatches, moved,
        memory(network, training.processes), storage(experiment, data, network, states), speed, methods,
    )  # fmt: skip


def _timed(experiment: Experiment, method: Method, speed: Rate, name: str, forward: float) -> Method:
    """A method with its times."""
    training, seconds, seeds = experiment.training, speed.seconds[name], len(experiment.seeds)
    shared = training.processes / training.trainings_per_gpu
    guided = 2 if experiment.sampling.guidance_scale != 1 else 1
    images = experiment.evaluation.num_samples * experiment.evaluation.sets * len(experiment.milestones)
    ends = [0, *(segment[-1] for segment in experiment.segments)]
    longest = max(end - start for start, end in pairwise(ends))
    return Method(
        method.passes,
        method.operations,
        seconds,
        hours=seeds * experiment.milestones[-1] * seconds * shared / 3600,
        sampling=seeds * images * experiment.sampling.nfe * guided * forward / speed.operations / 3600,
        longest=longest * seconds / 3600,
        lost=training.checkpoint_every * seconds,
    )


def _stages(plan: Plan) -> list[Stage]:
    """Jobs by stage; a segment's samples and their evaluation are one in the queue, report and tracking none."""
    experiment, jobs = plan.experiment, plan.jobs()
    training, gpu = experiment.training, gpus(experiment)
    shared = len(plan.segments) * -(-len(plan.methods) * len(plan.seeds) // training.trainings_per_gpu)
    asked = {
        "autoencoder": gpu * (experiment.autoencoder.kind != "none"),
        "encode": gpu * (experiment.autoencoder.kind != "none"),
        "train": gpu * training.processes,
        "sample": gpu,
        "reference": gpu,
    }
    queued = {**jobs, "train": shared, "evaluate": 0, "report": 0, "track": 0}
    return [Stage(name, number, queued[name], asked.get(name, 0)) for name, number in jobs.items()]
