"""Resources of jobs, in names that any scheduler of Snakemake understands; a cluster's profile has special ones."""

from collections.abc import Callable
from typing import Any

from kairos.config import Experiment

_TRAINING_MB = 6000  # main memory of one process of a training


def growing(amount: int) -> Callable[..., int]:
    """Return a resource function: `amount` at the first attempt, twice at the second, then three times.

    A job that exceeded a limit is retried with more. The factor stops at three, so that the job still fits a machine.
    """
    return lambda wildcards, attempt: amount * min(attempt, 3)


def gpus(experiment: Experiment) -> int:
    """GPUs of a job that computes on one: none only where the experiment says ``device: cpu``.

    A machine of one's own is not asked for any, so that ``auto`` still takes a GPU where there is one.
    """
    return int(experiment.training.device != "cpu")


def processes_per_node(experiment: Experiment) -> int:
    """Processes of one training on each of its machines."""
    return experiment.training.processes // experiment.training.nodes


def of_training(experiment: Experiment) -> dict[str, Any]:
    """Return the resources of a training job, with all its processes.

    A training run resumes, so its time limit need not grow. Numbers are those of the whole job, and Snakemake adds up
    the numbers of jobs that run as one. A text is the same for all jobs. Training runs that share a GPU therefore
    request it as text. So do runs on several machines, where the text applies to each machine.
    """
    settings, each = experiment.training, processes_per_node(experiment)
    asked: dict[str, Any] = {"mem_mb": growing(_TRAINING_MB * each), "runtime": 1440}
    if settings.processes > 1:  # else SLURM may spread the GPUs of one machine over several
        asked["nodes"] = settings.nodes
    if not gpus(experiment):
        return asked | ({"tasks": settings.nodes} if settings.nodes > 1 else {})
    as_text = settings.nodes > 1 or settings.trainings_per_gpu > 1
    return asked | ({"gres": f"gpu:{each}"} if as_text else {"gpu": each})
