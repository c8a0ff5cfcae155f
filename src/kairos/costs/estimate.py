"""Estimate the cost of an experiment: jobs, floating-point operations, memory, storage and time."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from kairos.config import Experiment
from kairos.costs import step_rate
from kairos.costs.dataset_size import DatasetSize, Shape, find_dataset_size
from kairos.costs.network import NetworkCost, count_network_cost
from kairos.costs.step_rate import StepRate
from kairos.costs.storage import estimate_memory, estimate_storage
from kairos.forward_process import build_process, output_channels
from kairos.stages import TRAIN
from kairos.workflow.layout import Layout
from kairos_timesteps.base import Cost


@dataclass(frozen=True)
class StageJobs:
    """Jobs of a stage.

    Attributes:
        name: name of the stage.
        jobs: number of Snakemake's jobs.
        queued_jobs: number of jobs in a cluster's queue; several jobs of Snakemake may share one.
        gpus: number of GPUs of a queued job.
    """

    name: str
    jobs: int
    queued_jobs: int
    gpus: int


@dataclass(frozen=True)
class MethodCost:
    """Cost of a method; all times are None without a rate, and all are set with a rate.

    Attributes:
        sampler_cost: further forward and backward passes of the method's timestep sampler.
        flops_per_step: floating-point operations of a training step.
        seconds_per_step: duration of a training step.
        training_hours: GPU-hours of the training runs of all seeds; CPU-hours if CPUs compute.
        sampling_hours: GPU-hours or CPU-hours of sampling from all snapshots of all seeds.
        longest_job_hours: duration of the longest training job.
        lost_seconds: training time that is repeated, at most, after a job is killed.
    """

    sampler_cost: Cost
    flops_per_step: float
    seconds_per_step: float | None = None
    training_hours: float | None = None
    sampling_hours: float | None = None
    longest_job_hours: float | None = None
    lost_seconds: float | None = None


@dataclass(frozen=True)
class CostEstimate:
    """Estimated cost of an experiment.

    Attributes:
        experiment: the checked experiment.
        stages: jobs by stage.
        data: shapes and numbers of the data.
        network: size of the backbone, and cost of a pass of a micro-batch. With a masked loss, `bytes_moved` and
            `activation_bytes` are for two passes.
        microbatches: micro-batches per step and process.
        flops_per_step: floating-point operations of a step, without further passes of samplers.
        bytes_moved_per_step: bytes that a step reads and writes in the memory of a GPU.
        memory: bytes in the memory of a GPU, by use.
        storage: bytes on disk, by kind of file; None if not known.
        rate: speed of training; None if no training run was timed and no speed was passed.
        unit: ``GPU`` or ``CPU``, the unit of all hours.
        methods: cost of each method.
    """

    experiment: Experiment
    stages: list[StageJobs]
    data: DatasetSize
    network: NetworkCost
    microbatches: int
    flops_per_step: float
    bytes_moved_per_step: int
    memory: dict[str, int]
    storage: dict[str, int | None]
    rate: StepRate | None
    unit: str
    methods: dict[str, MethodCost]

    @property
    def hours_by_method(self) -> dict[str, float] | None:
        """Hours of each method's training and sampling, all seeds together, by name; None without a rate.

        The hours are GPU-hours or CPU-hours, see `unit`.
        """
        hours: dict[str, float] = {}
        for name, method in self.methods.items():
            if method.training_hours is None or method.sampling_hours is None:
                return None  # there is no rate, hence no method has hours
            hours[name] = method.training_hours + method.sampling_hours
        return hours


def estimate_cost(
    experiment: Experiment,
    x0_shape: Shape | None = None,
    classes: int | None = None,
    steps_per_second: float | None = None,
    tflops: float | None = None,
    utilisation: float = 0.4,
    text_shape: Sequence[int] | None = None,
    count_network: Callable[..., NetworkCost] = count_network_cost,
    card: str | None = None,
) -> CostEstimate:
    """Estimate the cost of an experiment without running it. Times are of training and sampling only.

    The experiment's folder of results in the working directory is read if it exists: it contains the shapes of prepared
    data and the times of earlier training runs. Without a speed, the estimate has no times.

    Args:
        x0_shape: channels, height and width of the network's input; None: read from the data or the experiment file.
        classes: number of classes, if data and file do not give it.
        steps_per_second: speed of a training run of the cheapest method. Without it and `tflops`, the speed is measured
            in earlier training runs of the experiment, if there are any.
        tflops: peak speed of a GPU, 10^12 floating-point operations per second; the alternative to `steps_per_second`.
        utilisation: fraction of `tflops` that training reaches.
        text_shape: tokens and width of an encoded text; None: read from the data or the experiment file.
        count_network: function that counts the cost of the backbone, with the arguments of `count_network_cost`.
        card: name of a card in `cards.PEAKS`, whose peaks at the precisions are used; the third alternative.

    Raises:
        ConfigError: an argument or a field is not allowed, or a shape is not known.
    """
    layout = Layout(experiment, Path())
    training = experiment.training
    results = Path(layout.results)
    data = find_dataset_size(experiment, results, x0_shape=x0_shape, classes=classes, text_shape=text_shape)
    channels, _, _ = data.x0_shape
    # costs do not depend on sigma_data
    process = build_process(experiment.diffusion.process, experiment.diffusion.prediction, sigma_data=1.0)

    # cost of a micro-batch; without training.microbatch it contains all images of a process
    images_per_process = math.ceil(training.batch_size / training.processes)
    microbatch = min(training.microbatch or images_per_process, images_per_process)
    microbatches = math.ceil(images_per_process / microbatch)
    # positional, because `count_network` may use the arguments as a key
    outputs = output_channels(process, channels)
    network = count_network(experiment.model, data.x0_shape, data.conditions, microbatch, training.precision, outputs)
    forward_flops = network.forward_flops / microbatch  # operations for one image
    training_flops = (network.forward_flops + network.backward_flops) / microbatch  # for one image

    # operations of a step
    passes = training.batch_size  # number of images that pass the network in a step, without the samplers' passes
    if any(loss.masks_tokens for loss in experiment.diffusion.losses):
        # a second pass with masked tokens, which costs at most as much as the first
        passes *= 2
        network = replace(network, activation_bytes=2 * network.activation_bytes, bytes_moved=2 * network.bytes_moved)
    sampler_costs: dict[str, Cost] = {}  # cost by method
    flops: dict[str, float] = {}  # operations of a step, by method
    for name, method in experiment.methods.items():
        cost = method.sampler.build(process.schedule).cost(training.batch_size, channels)
        sampler_costs[name] = cost
        # `cost.gradient` and `cost.forward` are numbers of images per step
        flops[name] = (passes + cost.gradient) * training_flops + cost.forward * forward_flops

    # times; options take precedence over measured times
    unit = step_rate.unit_of(training.device)
    rate = step_rate.rate_from_options(
        flops,
        devices=training.processes,
        steps_per_second=steps_per_second,
        tflops=tflops,
        utilisation=utilisation,
        unit=unit,
        card=card,
        precisions=(training.precision, experiment.sampling.precision),
    )
    if rate is None:
        rate = step_rate.measured_rate(results, flops, devices=training.processes)
    methods = {}
    for name, cost in sampler_costs.items():
        times = _estimate_times(experiment, rate, name, forward_flops) if rate else {}
        methods[name] = MethodCost(cost, flops[name], **times)

    # Adam reads weights, gradients and two moments and writes all but the gradients: 7 values per parameter.
    # The gradient norm and the exponential moving average read and write 6 more.
    optimizer_bytes = (7 + 6) * network.parameters * network.bytes_per_value
    return CostEstimate(
        experiment=experiment,
        stages=_count_jobs(layout),
        data=data,
        network=network,
        microbatches=microbatches,
        flops_per_step=passes * training_flops,
        bytes_moved_per_step=network.bytes_moved * microbatches + optimizer_bytes,
        memory=estimate_memory(network, training.processes),
        storage=estimate_storage(experiment, data, network, [cost.state for cost in sampler_costs.values()]),
        rate=rate,
        unit=rate.unit if rate else unit,
        methods=methods,
    )


def _estimate_times(experiment: Experiment, rate: StepRate, method: str, forward_flops: float) -> dict[str, float]:
    """Return the times of training and sampling of a method, as keyword arguments of `MethodCost`.

    ``training_hours`` and ``sampling_hours`` are hours of a CPU or GPU, summed over seeds and devices.
    ``longest_job_hours`` is wall time. ``lost_seconds`` is the time between two checkpoints, the training time that a
    kill costs at most. `forward_flops` are the operations for one image.
    """
    training, sampling, evaluation = experiment.training, experiment.sampling, experiment.evaluation
    seconds_per_step = rate.seconds_per_step[method]
    seed_count = len(experiment.seeds)
    # CPUs or GPUs whose hours a job costs
    if rate.unit == "CPU":  # each process uses `threads` CPUs, and training runs share none of them
        training_devices: float = training.processes * training.threads
        sampling_devices = training.threads
    else:  # training runs that share a GPU share its hours
        training_devices = training.processes / training.trainings_per_gpu
        sampling_devices = 1

    # sampling
    images_per_run = evaluation.num_samples * evaluation.sets * len(experiment.milestones)  # step 0 is sampled too
    passes_per_nfe = 2 if sampling.guidance_scale != 1 else 1  # guidance needs a pass without conditions
    forward_passes = seed_count * images_per_run * sampling.nfe * passes_per_nfe  # passes of one image
    sampling_seconds = forward_passes * forward_flops / rate.sampling_speed

    # longest job; a job trains one segment
    job_ends = [0, *(segment[-1] for segment in experiment.segments)]  # steps
    steps_of_longest_job = max(end - start for start, end in pairwise(job_ends))
    return {
        "seconds_per_step": seconds_per_step,
        "training_hours": seed_count * experiment.milestones[-1] * seconds_per_step * training_devices / 3600,
        "sampling_hours": sampling_seconds * sampling_devices / 3600,
        "longest_job_hours": steps_of_longest_job * seconds_per_step / 3600,
        "lost_seconds": training.checkpoint_every * seconds_per_step,
    }


def _count_jobs(layout: Layout) -> list[StageJobs]:
    """Return the jobs of each stage, the jobs in a cluster's queue, and the GPUs of a queued job.

    Training runs that share a GPU (`training.trainings_per_gpu`) share a queued job in each segment, the part of a run
    between two jobs. Evaluations run in the queued jobs of sampling. Reports, tracking and analyses run outside the
    queue. These stages have no queued jobs. Merging shards and latents in pixel space need no GPU.
    """
    training = layout.experiment.training
    jobs_per_segment = math.ceil(len(layout.trainings) / training.trainings_per_gpu)  # runs on a GPU share a job
    jobs = []
    for rule, count in layout.count_jobs().items():
        row = layout.stages[rule.removesuffix("_shards")]
        gpus = layout.gpus(row.name, is_shard=rule != row.name)
        queued_count = count
        if row.name == TRAIN.name:
            queued_count, gpus = len(layout.segments) * jobs_per_segment, gpus * training.processes
        elif row.name == "evaluate":
            queued_count, gpus = 0, 0
        elif row.is_summary or (row.per_analysis and not row.per_snapshot):
            queued_count = 0
        jobs.append(StageJobs(rule, jobs=count, queued_jobs=queued_count, gpus=gpus))
    return jobs
