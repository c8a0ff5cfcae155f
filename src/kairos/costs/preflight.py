"""Find problems before any job: images, GPU memory, time limits of a cluster, and fp32 on a GPU.

All but the last would end a run after hours.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kairos import devices
from kairos.config import Experiment
from kairos.config.consistency import check_input
from kairos.costs.dataset_size import Shape, latent_shape
from kairos.data.settings import MissingDataError
from kairos.data.source_statistics import inspect_images
from kairos.data.values import describe_rule, describe_values
from kairos.status.cluster_checks import profile_file
from kairos.workflow.rules import gpus_per_job, training_resources
from kairos_timesteps.errors import ConfigError, KairosError, demand, rejection

if TYPE_CHECKING:
    from kairos.costs.estimate import CostEstimate

TF32_MAJOR = 8  # the first major compute capability of GPUs that compute TF32 and bfloat16 on tensor cores
_CONTEXT_GIB = 1  # memory of a GPU for its context and the libraries' workspace


def find_warnings(
    experiment: Experiment, profile: Path | None, gpu_memory: float | None, steps_per_second: float | None
) -> Iterator[str]:
    """Yield warnings about an experiment that could fail late: images, memory of a GPU, time limits of a cluster.

    A line on the range of stored values is always yielded. A note reports networks that compute in fp32 on a GPU, see
    `_report_fp32`. Images are read if they are in a folder. Held-out images from another path are listed; they must not
    be training images. Memory is not checked without a GPU's memory or for training on CPUs. If the cost cannot be
    estimated, because a shape is not known yet for example, this is a warning; memory and the duration of jobs are then
    not checked. The checks run, and raise errors, while the caller iterates.

    Args:
        profile: folder of a cluster's profile; None: time limits are not checked.
        gpu_memory: memory of a GPU, GiB; None: the memory of this machine's GPU, if there is one.
        steps_per_second: speed of a training run of the cheapest method; None: the measured speed, if there is one.

    Raises:
        ConfigError: the experiment is certain to fail; the message reports field, value and allowed values.
        KairosError: a file of the profile, or config.json of a pretrained autoencoder, cannot be read.
    """
    if experiment.dataset.side is not None:
        _check_shapes(experiment, experiment.dataset.side)
    if experiment.dataset.source == "folder":
        yield from _check_images(experiment)
    else:
        yield f"values: {describe_rule(experiment.dataset.value_range)}"
    if experiment.dataset.heldout_section is not None:
        from kairos.data.sources import check_heldout

        with suppress(MissingDataError):  # `warn_of_missing` reports missing files
            check_heldout(experiment.dataset)
    is_for_other_machine = profile is not None or gpu_memory is not None
    gpu = _find_gpu()
    if gpu_memory is None and gpu is not None:
        gpu_memory = gpu.total_memory / 2**30
    yield from _report_fp32(experiment, is_for_other_machine, gpu)
    if not (profile or gpu_memory):
        return
    from kairos.costs.estimate import estimate_cost  # imports torch, which takes seconds

    longest_job_hours = 0.0  # 0 if not known: then only the time that the job requests is checked
    try:
        estimate = estimate_cost(experiment, steps_per_second=steps_per_second)
    except ConfigError as error:
        yield f"memory and time are not known yet: {error}"
    else:
        # without a rate the hours of all methods are None
        longest_job_hours = max(method.longest_job_hours or 0 for method in estimate.methods.values())
        if gpu_memory and experiment.training.device != "cpu":
            _check_memory(estimate, gpu_memory)
    if profile:
        yield from _check_time_limits(experiment, profile, needed_minutes=60 * longest_job_hours)


def _find_gpu() -> Any:
    """Return torch's properties of this machine's first GPU; None without a GPU that torch can use."""
    if not devices.has_nvidia_driver():  # saves the seconds that importing torch takes
        return None
    import torch

    return torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None


def _report_fp32(experiment: Experiment, is_for_other_machine: bool, gpu: Any) -> Iterator[str]:
    """Yield a note if networks train or sample in fp32 on a GPU that has TF32 and bfloat16.

    Args:
        is_for_other_machine: jobs with ``device: auto`` compute on GPUs of another machine.
        gpu: properties of this machine's GPU; None without one.
    """
    device = experiment.training.device
    may_use_gpu = device != "cpu" and (device != "auto" or is_for_other_machine or gpu is not None)
    lacks_tf32 = not is_for_other_machine and gpu is not None and gpu.major < TF32_MAJOR
    if not may_use_gpu or lacks_tf32:
        return
    precisions = {"training": experiment.training.precision, "sampling": experiment.sampling.precision}
    fields = [f"{section}.precision" for section, precision in precisions.items() if precision == "fp32"]
    if fields:
        reason = "tf32 or bf16 use the tensor cores of GPUs from compute capability 8.0; see docs/experiments.md"
        yield f"{', '.join(fields)}: fp32 on a GPU; {reason}"


def _check_memory(estimate: "CostEstimate", gpu_memory: float) -> None:
    """Check that training fits the memory of a GPU, `gpu_memory` in GiB, which several training runs may share.

    Raises:
        ConfigError: training needs more; the message reports the micro-batch that fits, if there is one.
    """
    training = estimate.experiment.training
    network = estimate.network
    available_gib = gpu_memory / training.trainings_per_gpu  # training runs that share a GPU have equal parts of it
    needed_gib = sum(estimate.memory.values()) / 2**30 + _CONTEXT_GIB
    # activations are proportional to the micro-batch: find the largest one that fits with the other uses
    other_gib = needed_gib - estimate.memory["activations"] / 2**30
    free_bytes = (available_gib - other_gib) * 2**30
    microbatch = math.floor(free_bytes * network.samples / network.activation_bytes)
    # `activations` are at least the copy of the gradients in the optimizer's step, which no micro-batch reduces
    gradient_bytes = network.parameters * network.bytes_per_value
    microbatch_fits = microbatch > 0 and gradient_bytes <= free_bytes
    advice = f"training.microbatch: {microbatch} keeps the batch" if microbatch_fits else "a smaller model"
    value = f"{training.batch_size}: about {needed_gib:.4g} GiB of {available_gib:.4g} for each training run on a GPU"
    demand(needed_gib <= available_gib, "training.batch_size", value, advice)


def _check_shapes(experiment: Experiment, image_side: int) -> None:
    """Check that autoencoder, model and section `dataset` accept square images of a side.

    Unlike the checks of the experiment file alone, this function reads config.json of a pretrained autoencoder, if it
    is on this machine, and `image_side` may come from the images.

    Raises:
        ConfigError: an option does not fit the side.
        DamagedError: config.json does not contain an object in JSON.
    """
    dataset, autoencoder = experiment.dataset, experiment.autoencoder
    dataset.check_low_resolution(image_side)
    image_shape = (dataset.channels, image_side, image_side)
    input_shape: Shape | None = image_shape
    if autoencoder.kind != "none":
        input_shape, _ = latent_shape(autoencoder, image_shape)
    if input_shape is not None:  # None: config.json is missing
        channels, side, _ = input_shape
        check_input(experiment, channels, side)


def _check_images(experiment: Experiment) -> Iterator[str]:
    """Check that the jobs accept the images, and yield notes on their values, and on different sizes or sides.

    Only the headers of at most 20,000 images are read, and of those of more than 8 bits the values of at most 500. The
    conditions are:

    * Unreadable images need ``broken: skip``.
    * Stored values fit the range of the data set, see `data.values`.
    * ``crop: none`` needs square images.
    * Without a resolution, all images have one size after cropping or padding, which `_check_shapes` accepts.
    * ``crop: pad`` needs a resolution of at least the longest side.

    A missing or empty folder yields the rule for values alone and raises no error, since `count_images` reports it.

    Raises:
        ConfigError: a job would reject the images.
        DamagedError: config.json of a pretrained autoencoder is damaged.
    """
    dataset = experiment.dataset
    try:
        images = inspect_images(dataset)
    except ConfigError:  # a missing or empty folder, which `count_images` reports
        yield f"values: {describe_rule(dataset.value_range)}"
        return
    # unreadable images
    if images.unread and dataset.broken != "skip":
        unread = ", ".join(images.unread[:5]) + (", ..." if len(images.unread) > 5 else "")
        value = f"{dataset.broken}, and cannot be read: {unread}"
        raise rejection("dataset.broken", value, "skip, or repair or remove them")

    # stored values
    images.values.check_range()
    try:
        images.values.check_bits()
    except ConfigError as error:
        if images.all_measured:
            raise
        yield f"warning: {error}"
    yield f"values: {describe_values(images.values.records())}"

    # shapes and sizes
    not_square_count, cropped_area = images.cropping  # the area is a fraction
    if dataset.crop == "none":
        value = f"none with {not_square_count} images that are not square"
        demand(not_square_count == 0, "dataset.crop", value, "another crop")

    pads = dataset.crop == "pad"
    if dataset.resolution is None:
        # padding makes squares of the longer side, cropping makes squares of the shorter side
        sides = {max(size) if pads else min(size) for size in images.sizes}
        demand(len(sides) < 2, "dataset.resolution", f"null with {len(sides)} sizes", "a number")
        for side in sides:  # one; none if no image can be read
            _check_shapes(experiment, side)
    elif pads:
        longest_side = max(map(max, images.sizes), default=0)
        value, allowed = f"{dataset.resolution} with crop pad", f"{longest_side}, the longest side, or more"
        demand(dataset.resolution >= longest_side, "dataset.resolution", value, allowed)

    # note
    if len(images.sizes) > 1 or not_square_count:
        if pads:
            change = "padded"
        else:
            change = f"{not_square_count} are not square and lose {cropped_area:.0%} of their area by the crop"
        yield f"images: {sum(images.sizes.values())} of {len(images.sizes)} sizes; {change}"


def _check_time_limits(experiment: Experiment, profile: Path, needed_minutes: float) -> Iterator[str]:
    """Check that a training job fits the longest partition, and that its attempts together are long enough.

    The job requests the runtime of rule train in the profile, or else of the experiment. If this runtime is an
    expression, only a warning is yielded; otherwise nothing is yielded. The limit is checked only if the profile has
    `kairos-partition-config`, the description of the partitions. `needed_minutes` is the duration of the longest job;
    0 means that it is not known, and the attempts are then not checked.

    Raises:
        ConfigError: there is no profile, the partition allows less than the job requests, or all attempts together
            are shorter than `needed_minutes`.
        KairosError: a file of the profile cannot be read.
    """
    file = profile_file(profile)
    demand(file, "--profile", repr(str(profile)), "a folder that contains a profile.yaml")
    try:
        # `str` is for the type checker: the file is not None here; `or {}`: an empty file
        settings = yaml.safe_load(Path(str(file)).read_text(encoding="utf-8")) or {}
        training_settings = _read_resources(settings.get("set-resources"), rule="train")
        runtime = _read_minutes(training_settings.get("runtime", training_resources(experiment)["runtime"]))
        partitions = settings.get("kairos-partition-config")  # path of a file
        limit = math.inf  # minutes
        if partitions:
            limit = _read_longest_limit(Path(partitions), gpu=gpus_per_job(experiment) > 0)
    except Exception as error:  # errors of YAML, or an unexpected form
        raise KairosError(f"{file}: cannot be read: {' '.join(str(error).split())}") from None
    where = f"{file}: runtime of train"
    if runtime is None:
        yield f"{where} is an expression, so time limits are not checked"
        return
    demand(runtime <= limit, where, f"{runtime:g} minutes", f"at most {limit:g}, the limit in {partitions}")
    minutes_of_attempts = (1 + settings.get("retries", 0)) * runtime  # a retry resumes the training run
    allowed = f"at most {minutes_of_attempts:g} with its retries in {file}"
    allowed += ": raise retries or runtime, or set training.segments"
    is_enough = needed_minutes <= minutes_of_attempts
    demand(is_enough, "training.milestones", f"a job of {needed_minutes:.0f} minutes", allowed)


def _read_longest_limit(partition_file: Path, gpu: bool) -> float:
    """Return the time limit, in minutes, of the longest partition in a partition file; 0 if there is no partition.

    Args:
        partition_file: the SLURM plugin's description of a cluster's partitions.
        gpu: True to consider only partitions with GPUs.
    """
    limits = []
    for partition in yaml.safe_load(partition_file.read_text(encoding="utf-8"))["partitions"].values():
        if partition.get("max_gpu") or not gpu:
            minutes = _read_minutes(partition.get("max_runtime", "no limit"))
            limits.append(math.inf if minutes is None else minutes)
    return max(limits, default=0.0)


def _read_minutes(runtime: int | str) -> float | None:
    """Return a time, such as ``90``, ``2h`` or SLURM's ``1-12:00:00``, in minutes; None for other texts."""
    import pandas as pd

    with suppress(ValueError):
        return float(runtime)
    with suppress(ValueError):
        return float(pd.Timedelta(str(runtime).replace("-", " days ")).total_seconds() / 60)
    return None


def _read_resources(entries: Any, rule: str) -> dict[str, Any]:
    """Return the resources by name that a profile's `set-resources` sets for a rule; empty if it sets none.

    `entries` has one of the forms that Snakemake accepts: nested mappings, or a list of texts ``train:runtime=60`` or
    one such text. None means that the profile has no such option.

    Raises:
        ValueError: a text has another form.
    """
    if entries is None:
        return {}
    if isinstance(entries, dict):
        return dict(entries.get(rule) or {})
    resources = {}
    for entry in [entries] if isinstance(entries, str) else entries:
        entry_rule, colon, assignment = entry.partition(":")
        name, equals_sign, value = assignment.partition("=")
        if not (colon and equals_sign):
            raise ValueError(f"set-resources: got {entry!r}, allowed: RULE:RESOURCE=VALUE")
        if entry_rule == rule:
            resources[name] = value
    return resources
