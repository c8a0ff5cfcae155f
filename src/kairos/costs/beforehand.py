"""What would fail hours after the start, found before any job: images, a GPU's memory, the time limits of a profile."""

import math
from collections.abc import Iterator
from pathlib import Path

import yaml

from kairos.config import Experiment
from kairos.data.settings import DatasetConfig
from kairos.data.survey import look
from kairos.status.machine import profile_file
from kairos.workflow.resources import gpus, of_training
from kairos_timesteps.errors import ConfigError, KairosError, demand

_CONTEXT = 1  # GiB of a GPU for its context and the libraries' workspace


def remarks(experiment: Experiment, profile: Path | None, memory: float | None, rate: float | None) -> Iterator[str]:
    """What is to be said of an experiment that could fail late.

    Args:
        experiment: the checked experiment.
        profile: folder of a cluster's profile; None: no time limit is looked at.
        memory: of a GPU, GiB; None: that of this machine's, if there is one.
        rate: steps per second of a training of the cheapest method; None: as measured before, if it was.

    Raises:
        ConfigError: it is known to fail; the message names the field, its value and what is allowed.
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
    """What a crop takes away, where images have several sizes; what stage prepare would refuse is refused."""
    try:
        seen = look(dataset)
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
    """Whether a partition takes a training, and its attempts together are as long as the longest job, in minutes."""
    from snakemake_executor_plugin_kairos.private import longest  # it imports pandas

    file = profile_file(profile)
    demand(file, "--profile", repr(str(profile)), "a folder that holds a profile.yaml")
    try:
        settings = yaml.safe_load(Path(str(file)).read_text(encoding="utf-8")) or {}
        own = (settings.get("set-resources") or {}).get("train", {}).get("runtime", of_training(experiment)["runtime"])
        listed = settings.get("kairos-partition-config")
        limit = longest(Path(listed), bool(gpus(experiment))) if listed else math.inf
    except Exception as error:  # YAML's, and those of the plugin's own reader
        raise KairosError(f"{file}: cannot be read: {' '.join(str(error).split())}") from None
    demand(own <= limit, f"{file}: runtime of train", f"{own} minutes", f"at most {limit:g}, as {listed} has it")
    together = (1 + settings.get("retries", 0)) * own
    allowed = f"at most {together} with its retries in {file}: raise these or runtime, or set training.segments"
    demand(needed <= together, "training.milestones", f"a job of {needed:.0f} minutes", allowed)
