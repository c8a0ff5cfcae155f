"""Find problems that would end a run after hours, before any job: images, GPU memory, time limits of a cluster."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from kairos.config import Experiment
from kairos.data.settings import DatasetConfig
from kairos.data.source_statistics import inspect_images
from kairos.status.cluster_checks import profile_file
from kairos.workflow.rules import gpus_per_job, training_resources
from kairos_timesteps.errors import ConfigError, KairosError, demand

if TYPE_CHECKING:
    from kairos.costs.estimate import CostEstimate

_CONTEXT_GIB = 1  # memory of a GPU for its context and the libraries' workspace


def find_warnings(
    experiment: Experiment, profile: Path | None, gpu_memory: float | None, steps_per_second: float | None
) -> Iterator[str]:
    """Yield warnings about an experiment that could fail late.

    Args:
        experiment: the checked experiment.
        profile: folder of a cluster's profile; None: time limits are not checked.
        gpu_memory: memory of a GPU, GiB; None: the memory of this machine's GPU, if there is one.
        steps_per_second: speed of a training run of the cheapest method; None: the measured speed, if there is one.

    Raises:
        ConfigError: the experiment is certain to fail; the message reports field, value and allowed values.
    """
    if experiment.dataset.source == "folder":
        yield from _check_images(experiment.dataset)
    if gpu_memory is None:
        gpu_memory = _find_gpu_memory()
    if not (profile or gpu_memory):
        return
    from kairos.costs.estimate import estimate_cost

    estimate = None
    try:
        estimate = estimate_cost(experiment, steps_per_second=steps_per_second)
    except ConfigError as error:
        yield f"memory and time are not known yet: {error}"
    if gpu_memory and estimate and experiment.training.device != "cpu":
        _check_memory(estimate, gpu_memory)
    if profile:
        job_hours = [method.longest_job_hours or 0 for method in estimate.methods.values()] if estimate else [0]
        _check_time_limits(experiment, profile, 60 * max(job_hours))


def _find_gpu_memory() -> float | None:
    """Return the memory of this machine's GPU in GiB; None without a GPU."""
    if not Path("/dev/nvidiactl").exists():  # saves the seconds that importing torch takes
        return None
    import torch

    return torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else None


def _check_memory(estimate: "CostEstimate", gpu_memory: float) -> None:
    """Check that training fits the memory of a GPU.

    Args:
        estimate: cost of the experiment.
        gpu_memory: memory of a GPU, GiB.

    Raises:
        ConfigError: training needs more; the message reports the micro-batch that fits.
    """
    training, network = estimate.experiment.training, estimate.network
    available = gpu_memory / training.trainings_per_gpu
    needed = sum(estimate.memory.values()) / 2**30 + _CONTEXT_GIB
    bytes_per_sample = network.activation_bytes / network.samples
    microbatch = network.samples + math.floor((available - needed) * 2**30 / bytes_per_sample)
    advice = f"training.microbatch: {microbatch} keeps the batch" if microbatch > 0 else "a smaller model"
    value = f"{training.batch_size}: about {needed:.3g} GiB of {available:.3g} for each training run on a GPU"
    demand(needed <= available, "training.batch_size", value, advice)


def _check_images(dataset: DatasetConfig) -> Iterator[str]:
    """Check that stage prepare accepts the images, and yield a note on the images that it crops or pads.

    Raises:
        ConfigError: stage prepare would reject the images.
    """
    try:
        images = inspect_images(dataset)
    except ConfigError:  # a missing or empty folder, which the survey of the data set reports
        return
    unread = ", ".join(images.unread[:5]) + (", ..." if len(images.unread) > 5 else "")
    accepts_unread = not images.unread or dataset.broken == "skip"
    value = f"{dataset.broken}, and cannot be read: {unread}"
    demand(accepts_unread, "dataset.broken", value, "skip, or repair or remove them")

    not_square, cropped_area = images.cropping
    value = f"none with {not_square} images that are not square"
    demand(not not_square or dataset.crop != "none", "dataset.crop", value, "another crop")

    pads = dataset.crop == "pad"
    sides = {max(size) if pads else min(size) for size in images.sizes}
    has_one_side = dataset.resolution or len(sides) < 2
    demand(has_one_side, "dataset.resolution", f"null with {len(sides)} sizes", "a number")

    longest_side = max(map(max, images.sizes), default=0)
    has_room = not pads or (dataset.resolution or longest_side) >= longest_side
    value = f"{dataset.resolution} with crop pad"
    demand(has_room, "dataset.resolution", value, f"{longest_side}, the longest side, or more")
    if len(images.sizes) > 1 or not_square:
        change = f"{not_square} are not square and lose {cropped_area:.0%} of their area by the crop"
        yield f"images: {sum(images.sizes.values())} of {len(images.sizes)} sizes; {'padded' if pads else change}"


def _check_time_limits(experiment: Experiment, profile: Path, needed: float) -> None:
    """Check that a training job fits the time limit of its partition, and that all its attempts suffice.

    Args:
        experiment: the checked experiment.
        profile: folder of a cluster's profile.
        needed: duration of the longest job, minutes.

    Raises:
        ConfigError: there is no profile, the partition allows less than the job requests, or all attempts of the job
            are shorter than `needed`.
        KairosError: a file of the profile cannot be read.
    """
    from kairos.workflow.snakemake_private import read_longest_limit

    file = profile_file(profile)
    demand(file, "--profile", repr(str(profile)), "a folder that contains a profile.yaml")
    try:
        settings = yaml.safe_load(Path(str(file)).read_text(encoding="utf-8")) or {}
        training_settings = (settings.get("set-resources") or {}).get("train", {})
        runtime = training_settings.get("runtime", training_resources(experiment)["runtime"])
        partitions = settings.get("kairos-partition-config")
        limit = read_longest_limit(Path(partitions), bool(gpus_per_job(experiment))) if partitions else math.inf
    except Exception as error:  # errors of YAML and of the plugin's reader
        raise KairosError(f"{file}: cannot be read: {' '.join(str(error).split())}") from None
    where = f"{file}: runtime of train"
    demand(runtime <= limit, where, f"{runtime} minutes", f"at most {limit:g}, the limit in {partitions}")
    total = (1 + settings.get("retries", 0)) * runtime
    advice = f"at most {total} with its retries in {file}: raise retries or runtime, or set training.segments"
    demand(needed <= total, "training.milestones", f"a job of {needed:.0f} minutes", advice)
