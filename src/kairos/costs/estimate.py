"""An experiment's cost as a whole: jobs, operations, memory, storage, time, and what an interruption takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from kairos.config import Experiment
from kairos.costs import step_rate as rates
from kairos.costs.dataset_size import DatasetSize, Shape, find_dataset_size
from kairos.costs.network import Network, measure
from kairos.costs.step_rate import Rate
from kairos.costs.storage import memory, storage
from kairos.forward_process import build_process
from kairos.losses.registries import LOSSES
from kairos.section import build
from kairos.workflow.layout import Layout
from kairos.workflow.rules import gpus_per_job
from kairos_timesteps.base import Cost
from kairos_timesteps.components import SAMPLERS


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
        passes: what its sampler sends through the network beside the batch.
        operations: floating-point operations of a step.
        seconds: of a step; None without a rate.
        hours: GPU-hours of its trainings, all seeds; CPU-hours where CPUs compute.
        sampling: GPU-hours or CPU-hours of drawing its images.
        longest: hours of its longest training job.
        lost: seconds of training that a killed job can lose.
    """

    passes: Cost
    operations: float
    seconds: float | None = None
    hours: float | None = None
    sampling: float | None = None
    longest: float | None = None
    lost: float | None = None


@dataclass(frozen=True)
class Estimate:
    """All there is to say before anything runs; bytes, seconds, floating-point operations.

    Attributes:
        experiment, stages, data, network, methods: what the numbers are of.
        microbatches: passes of the network per step.
        operations: of a step without what strategies add.
        traffic: bytes that a step moves in a GPU.
        memory, storage: bytes by what they hold.
        rate: None where no training has been timed and nothing is given.
        unit: ``GPU`` or ``CPU``, whose hours are counted.
    """

    experiment: Experiment
    stages: list[Stage]
    data: DatasetSize
    network: Network
    microbatches: int
    operations: float
    traffic: int
    memory: dict[str, int]
    storage: dict[str, int | None]
    rate: Rate | None
    unit: str
    methods: dict[str, Method]

    @property
    def hours(self) -> dict[str, float] | None:
        """GPU-hours or CPU-hours of every method's trainings and samples."""
        if self.rate is None:
            return None
        return {name: (method.hours or 0) + (method.sampling or 0) for name, method in self.methods.items()}


def estimate(
    experiment: Experiment,
    x0: Shape | None = None,
    classes: int | None = None,
    steps_per_second: float | None = None,
    tflops: float | None = None,
    utilisation: float = 0.4,
    text: Sequence[int] | None = None,
    count: Callable[..., Network] = measure,
) -> Estimate:
    """Count what an experiment will take.

    Args:
        experiment: the checked experiment.
        x0: shape of what is trained on, where it cannot be known yet.
        classes: number of classes, likewise.
        steps_per_second: of one training of the cheapest method; None, and no `tflops`: as measured before, if it was.
        tflops: speed of a GPU instead, in 10^12 operations per second.
        utilisation: share of `tflops` that is reached.
        text: tokens and width of a text's states, where they cannot be known yet.
        count: what counts a pass of the network.

    Raises:
        ConfigError: an argument or a field cannot be used, or a shape is not known.
    """
    layout = Layout(experiment, Path())
    training, plain, results = experiment.training, experiment.plain(), Path(layout.results)
    data = find_dataset_size(experiment, results, x0, classes, text)
    share = -(-training.batch_size // training.processes)
    samples = min(training.microbatch or share, share)
    process, channels = build_process(plain["diffusion"], sigma_data=1.0), data.x0_shape[0]
    outputs = process.channels(channels)
    network = count(experiment.model, data.x0_shape, data.conditions, samples, training.precision, outputs)
    microbatches, batch = -(-share // samples), training.batch_size
    samplers = {name: build(SAMPLERS, method.sampler, process.schedule) for name, method in experiment.methods.items()}
    extras = {name: sampler.cost(batch, channels) for name, sampler in samplers.items()}
    if any(LOSSES.entry(loss["name"]).facts.get("masked") for loss in plain["diffusion"]["losses"]):  # at most twice
        batch, network = 2 * batch, replace(network, activations=2 * network.activations, traffic=2 * network.traffic)
    forward, both = network.forward / samples, (network.forward + network.backward) / samples
    operations = {name: (batch + extra.gradient) * both + extra.forward * forward for name, extra in extras.items()}
    unit = rates.unit_of(training.device)
    rate = rates.given(operations, training.processes, steps_per_second, tflops, utilisation, unit)
    rate = rate or rates.measured(results, operations, training.processes, unit)
    times = {name: _times(experiment, rate, name, forward) for name in extras} if rate else {}
    return Estimate(
        experiment=experiment,
        stages=_stages(layout),
        data=data,
        network=network,
        microbatches=microbatches,
        operations=batch * both,
        # Adam reads weights, gradients and two moments and writes all but the gradients; the norm and the EMA: six more
        traffic=network.traffic * microbatches + 13 * network.parameters * network.value_bytes,
        memory=memory(network, training.processes),
        storage=storage(experiment, data, network, [extra.state for extra in extras.values()]),
        rate=rate,
        unit=rate.unit if rate else unit,
        methods={name: Method(extra, operations[name], **times.get(name, {})) for name, extra in extras.items()},
    )


def _times(experiment: Experiment, rate: Rate, name: str, forward: float) -> dict[str, float]:
    """The times of a method."""
    training, seconds, seeds = experiment.training, rate.seconds[name], len(experiment.seeds)
    on_cpus = rate.unit == "CPU"  # each process computes with `threads` of them, and trainings share none
    of_training = training.processes * training.threads if on_cpus else training.processes / training.trainings_per_gpu
    of_sampling = training.threads if on_cpus else 1
    guided = 2 if experiment.sampling.guidance_scale != 1 else 1
    images = experiment.evaluation.num_samples * experiment.evaluation.sets * len(experiment.milestones)
    ends = [0, *(segment[-1] for segment in experiment.segments)]
    return {
        "seconds": seconds,
        "hours": seeds * experiment.milestones[-1] * seconds * of_training / 3600,
        "sampling": seeds * images * experiment.sampling.nfe * guided * forward / rate.operations * of_sampling / 3600,
        "longest": max(end - start for start, end in pairwise(ends)) * seconds / 3600,
        "lost": training.checkpoint_every * seconds,
    }


def _stages(layout: Layout) -> list[Stage]:
    """Jobs by stage; a segment's samples and their evaluation are one in the queue, report and tracking none."""
    experiment, jobs = layout.experiment, layout.jobs()
    training, gpu = experiment.training, gpus_per_job(experiment)
    shared = len(layout.segments) * -(-len(layout.trainings) // training.trainings_per_gpu)
    latent = gpu * (experiment.autoencoder.kind != "none")
    asked = dict.fromkeys(("text", "sample", "sample_parts", "reference"), gpu)
    asked |= dict.fromkeys(("autoencoder", "encode_parts"), latent)
    asked |= {"encode": latent * (not layout.shards("encode")), "train": gpu * training.processes}
    asked |= {name: gpu for name in jobs if name.startswith("measure_")}
    queued = {**jobs, "train": shared, "evaluate": 0, "report": 0, "track": 0}
    queued |= {name: 0 for name in jobs if name.startswith("analyse_")}
    return [Stage(name, number, queued[name], asked.get(name, 0)) for name, number in jobs.items()]
