"""Resources of the Snakemake rules in ``workflow/rules``."""

from collections.abc import Callable
from typing import Any

from kairos.config import Experiment

_TRAINING_MB = 6000  # main memory of one process of a training run
_LARGEST_FACTOR = 3  # retries do not request more than this multiple, so that the job still fits a machine
_TRAINING_MINUTES = 1440  # a day


def scaled_by_attempt(amount: int) -> Callable[..., int]:
    """Return a resource function: `amount` at attempt 1, twice `amount` at attempt 2, three times at later attempts."""
    return lambda wildcards, attempt: amount * min(attempt, _LARGEST_FACTOR)


def gpus_per_job(experiment: Experiment) -> int:
    """Return the number of GPUs that a computing job requests from a scheduler: 0 for ``device: cpu``, else 1."""
    return int(experiment.training.device != "cpu")


def processes_per_node(experiment: Experiment) -> int:
    """Return the number of processes of one training run on each of its machines."""
    return experiment.training.processes // experiment.training.nodes  # a whole number: the experiment is checked


def training_resources(experiment: Experiment) -> dict[str, Any]:
    """Return the ``resources:`` of a training job, for all its processes on one machine together.

    - ``mem_mb``, a function that grows with each attempt, and ``runtime``, a constant number of minutes.
    - ``nodes`` for a training run with several processes.
    - ``tasks`` for jobs without a GPU on several machines.
    - ``gres``, a text such as ``gpu:4``, for jobs on GPUs of several machines and for runs that share a GPU; else
      ``gpu``, the number of GPUs.
    """
    training = experiment.training
    processes = processes_per_node(experiment)
    # the time does not grow with the attempts, since a training run resumes
    resources: dict[str, Any] = {"mem_mb": scaled_by_attempt(_TRAINING_MB * processes), "runtime": _TRAINING_MINUTES}
    if training.processes > 1:  # without `nodes`, SLURM may spread the GPUs of one machine over several
        resources["nodes"] = training.nodes
    if gpus_per_job(experiment) == 0:
        if training.nodes > 1:
            resources["tasks"] = training.nodes  # the default is 1, and SLURM allocates no machine without a task
    elif training.nodes > 1 or training.trainings_per_gpu > 1:
        # in a group job of runs that share a GPU, Snakemake sums numbers but keeps a text once; with several machines,
        # `gres` applies to each machine
        resources["gres"] = f"gpu:{processes}"
    else:
        resources["gpu"] = processes
    return resources
