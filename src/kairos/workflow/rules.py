"""Shell arguments and resources of the Snakemake rules in ``workflow/rules``.

Snakemake does not record ``params:`` functions that take ``input`` or ``output``: it compares those files themselves.
Snakemake recognises such functions by the names of their parameters, so those names are fixed.
"""

import os
from collections.abc import Callable
from typing import Any

from kairos.config import Experiment

# functions of a job's wildcards, input and output
PathsFunction = Callable[[Any, Any, Any], list[str]]
TextFunction = Callable[[Any, Any, Any], str]

_TRAINING_MB = 6000  # main memory of one process of a training run
_LARGEST_FACTOR = 3  # retries do not request more than this multiple, so that the job still fits a machine
_TRAINING_MINUTES = 1440  # a day


def paths_of(name: str) -> PathsFunction:
    """Return a ``params:`` function that lists the paths under a name in the rule's output, or else in its input.

    The list is empty if neither has the name. A single path is a list with one element.
    """

    def list_paths(wildcards: Any, input: Any, output: Any) -> list[str]:
        paths = output.get(name) or input.get(name) or []
        if isinstance(paths, str):
            return [paths]
        return list(paths)

    return list_paths


def folders_of(name: str) -> PathsFunction:
    """Return a ``params:`` function that lists the parent folder of each path of `paths_of`, in its order."""
    paths = paths_of(name)
    return lambda wildcards, input, output: [os.path.dirname(path) for path in paths(wildcards, input, output)]


def folder_of(name: str) -> TextFunction:
    """Return a ``params:`` function that returns the parent folder of the first path of `paths_of`.

    The function raises IndexError if the rule has no path of that name.
    """
    folders = folders_of(name)
    return lambda wildcards, input, output: folders(wildcards, input, output)[0]


def stage_options(*stages: str) -> TextFunction:
    """Return a ``params:`` function that returns ``--STAGE FOLDER`` for each stage, as one text.

    The folder contains the rule's output with the name of the stage, or else the input of that name, see `folder_of`.
    An example is ``--dataset results/tiny/dataset --autoencoder results/tiny/autoencoder``. The function raises
    IndexError if the rule has no path for a stage.
    """

    def write_options(wildcards: Any, input: Any, output: Any) -> str:
        options = []
        for stage in stages:
            folder = folder_of(stage)(wildcards, input, output)
            options.append(f"--{stage} {folder}")
        return " ".join(options)

    return write_options


def repeat_option(option: str, paths: PathsFunction) -> TextFunction:
    """Return a ``params:`` function that returns ``OPTION PATH`` for each of a job's paths, as one text; may be empty.

    Args:
        option: the option, with its hyphens, such as ``--merge``.
        paths: function that lists the paths, such as a result of `paths_of`.
    """

    def write_options(wildcards: Any, input: Any, output: Any) -> str:
        return " ".join(f"{option} {path}" for path in paths(wildcards, input, output))

    return write_options


def shard_options(wildcards: Any, input: Any, output: Any) -> str:
    """Return ``--shard K`` for a job that computes a shard, else ``--merge PATH`` for each shard that the job merges.

    The text is empty for a job that does neither. ``K`` is the shard's name, such as ``1of2``.
    """
    if "shard" in wildcards.keys():  # noqa: SIM118  (Snakemake's wildcards are not a dictionary)
        return f"--shard {wildcards.shard}"
    return repeat_option("--merge", paths_of("shards"))(wildcards, input, output)


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
