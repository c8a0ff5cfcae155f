"""Checks before any job for problems that would end a run after hours: images, GPU memory, time limits of a profile."""

import math
from collections.abc import Iterator
from pathlib import Path

import yaml

from kairos.config import Experiment
from kairos.data.settings import DatasetConfig
from kairos.data.source_statistics import inspect_images
from kairos.status.machine import profile_file
from kairos.workflow.rules import gpus_per_job, training_resources
from kairos_timesteps.errors import ConfigError, KairosError, demand

_CONTEXT = 1  # GiB of a GPU for its context and the libraries' workspace


def remarks(experiment: Experiment, profile: Path | None, memory: float | None, rate: float | None) -> Iterator[str]:
    """Yield warnings about an experiment that could fail late.

    Args:
        experiment: the checked experiment.
        profile: folder of a cluster's profile; None: time limits are not checked.
        memory: memory of a GPU, GiB; None: the memory of this machine's GPU, if there is one.
        rate: steps per second of a training run of the cheapest method; None: the rate measured before, if any.

    Raises:
        ConfigError: the experiment is certain to fail; the message contains field, value and allowed values.
    """
    if experiment.dataset.source == "folder":
        yield from _images(experiment.dataset)
    if memory is None and Path("/dev/nvidiactl").exists():  # torch takes seconds to be imported
        import torch

        memory = torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else None
    if not (profile or memory):
        return
    from kairos.costs.estimate import estimate

    found = None
    try:
        found = estimate(experiment, steps_per_second=rate)
    except ConfigError as error:
        yield f"memory and time are not known yet: {error}"
    if memory and found and experiment.training.device != "cpu":
        training, network = experiment.training, found.network
        most = memory / training.trainings_per_gpu
        needed = sum(found.memory.values()) / 2**30 + _CONTEXT
        fitting = network.samples + math.floor((most - needed) * 2**30 / (network.activations / network.samples))
        advice = f"training.microbatch: {fitting} keeps the batch" if fitting > 0 else "a smaller model"
        got = f"{training.batch_size}: about {needed:.3g} GiB of {most:.3g} for each training on a GPU"
        demand(needed <= most, "training.batch_size", got, advice)
    if profile:
        longest_job = max(method.longest or 0 for method in found.methods.values()) if found else 0
        _check_limits(experiment, profile, 60 * longest_job)


def _images(dataset: DatasetConfig) -> Iterator[str]:
    """Check the images for everything that stage prepare would reject, and yield a note on cropping or padding.

    The note is for images that are not square, or that have several sizes.

    Raises:
        ConfigError: stage prepare would reject the images.
    """
    try:
        seen = inspect_images(dataset)
    except ConfigError:  # said elsewhere
        return
    (cut, lost), longer, padded = seen.cut, max(map(max, seen.sizes), default=0), dataset.crop == "pad"
    sides = {max(size) if padded else min(size) for size in seen.sizes}
    unread = f"refuse, and cannot be read: {', '.join(seen.unread[:5])}" + ", ..." * (len(seen.unread) > 5)
    demand(not seen.unread or dataset.broken == "skip", "dataset.broken", unread, "skip, or repair or remove them")
    demand(not cut or dataset.crop != "none", "dataset.crop", f"none with {cut} images that are not square", "another")
    demand(dataset.resolution or len(sides) < 2, "dataset.resolution", f"null with {len(sides)} sizes", "a number")
    short, got = padded and (dataset.resolution or longer) < longer, f"{dataset.resolution} with crop pad"
    demand(not short, "dataset.resolution", got, f"{longer}, the longest side, or more")
    if len(seen.sizes) > 1 or cut:
        less = "padded" if padded else f"{cut} are not square and lose {lost:.0%} of their area by the crop"
        yield f"images: {sum(seen.sizes.values())} of {len(seen.sizes)} sizes; {less}"


def _check_limits(experiment: Experiment, profile: Path, needed: float) -> None:
    """Check the time limits of a training job: its partition's, and the sum over its attempts.

    Args:
        experiment: the checked experiment.
        profile: folder of a cluster's profile.
        needed: duration of the longest job, minutes.

    Raises:
        ConfigError: there is no profile, the partition's limit is below the job's, or all attempts together are shorter
            than `needed`.
        KairosError: a file of the profile cannot be read.
    """
    from kairos.workflow.snakemake_private import longest  # it imports pandas

    file = profile_file(profile)
    demand(file, "--profile", repr(str(profile)), "a folder that holds a profile.yaml")
    try:
        settings = yaml.safe_load(Path(str(file)).read_text(encoding="utf-8")) or {}
        own = (
            (settings.get("set-resources") or {})
            .get("train", {})
            .get("runtime", training_resources(experiment)["runtime"])
        )
        listed = settings.get("kairos-partition-config")
        limit = longest(Path(listed), bool(gpus_per_job(experiment))) if listed else math.inf
    except Exception as error:  # YAML's, and those of the plugin's own reader
        raise KairosError(f"{file}: cannot be read: {' '.join(str(error).split())}") from None
    demand(own <= limit, f"{file}: runtime of train", f"{own} minutes", f"at most {limit:g}, as {listed} has it")
    together = (1 + settings.get("retries", 0)) * own
    allowed = f"at most {together} with its retries in {file}: raise these or runtime, or set training.segments"
    demand(needed <= together, "training.milestones", f"a job of {needed:.0f} minutes", allowed)
