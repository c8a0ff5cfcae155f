"""Selection of completed training runs that start over when Snakemake requests them again.

A training keeps what it has computed in its own state and gives it out again when it is asked for the same: so a
controller that was killed before it could write a completed job down loses nothing. But who forces a job, or deletes
its outputs, wants it computed: for those jobs, and for them alone, the request in the training's state is marked
``start_over`` before they start, and the training begins at step 0 (see `kairos.training.run_folder`).

Deleted outputs mean that only where every job of the training is asked for what it has given before. DVC deletes all
outputs of a training also where its last segment is new, such as after its last milestone was raised: then the earlier
segments are given out again, and only the new steps are computed.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

from kairos.files import read_json, write_text
from kairos.workflow.snakemake_private import on_the_books

Key = tuple[str, tuple[int, ...]]  # folder of a training, milestones asked for


def mark(workflow: Any, results: Path) -> None:
    """Mark the fulfilled requests of jobs that are forced or whose outputs were deleted, unmark all others."""
    paths = results.glob("*/seed*/.state/*/complete/*.json")  # each what a training has given, by its record
    requests = {path: (path.parents[3].as_posix(), tuple(read_json(path)["milestones"])) for path in paths}
    trainings: dict[str, list[Any]] = defaultdict(list)
    for job in workflow.dag.needrun_jobs():
        if job.rule.name.startswith("train"):
            trainings[job.params.out].append(job)
    wanted: set[Key] = set()
    for jobs in trainings.values():
        known = [job for job in jobs if on_the_books(workflow, job) and _asked(job) in requests.values()]
        again = [job for job in known if _forced(workflow, job) or (len(known) == len(jobs) and _deleted(job))]
        wanted |= {_asked(job) for job in again}
    for path, key in requests.items():
        sign = path.with_suffix(".start_over")
        if key in wanted:
            write_text(sign, "asked for again\n")
        else:
            sign.unlink(missing_ok=True)


def _asked(job: Any) -> Key:
    """Return the request of a training job: its folder and its milestones."""
    return job.params.out, tuple(job.params.steps)


def _forced(workflow: Any, job: Any) -> bool:
    return job.rule in workflow.dag.forcerules or not workflow.dag.forcefiles.isdisjoint(job.output)


def _deleted(job: Any) -> bool:
    return not all(Path(str(output)).exists() for output in job.output)
