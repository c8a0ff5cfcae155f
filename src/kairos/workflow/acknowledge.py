"""Which completed trainings start over when Snakemake asks for them again.

A training keeps what it has computed in its own state and gives it out again when it is asked for the same: so a
controller that was killed before it could write a completed job down loses nothing. But who forces a job, or deletes
its outputs, wants it computed: for those jobs, and for them alone, the request in the training's state is marked
``acknowledged`` before they start, and the training begins at step 0 (see `kairos.training.store`).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kairos.files import read_json, write_text


def acknowledge(workflow: Any, results: Path) -> None:
    """Mark the fulfilled requests of jobs that are forced or whose outputs were deleted, unmark all others."""
    wanted = {str(output) for job in workflow.dag.needrun_jobs() if _again(workflow, job) for output in job.output}
    for request in results.glob("*/seed*/.state/*/complete/*.json"):
        mark = request.with_suffix(".acknowledged")
        if set(_records(request)) & wanted:
            write_text(mark, "asked for again\n")
        else:
            mark.unlink(missing_ok=True)


def _records(request: Path) -> Iterable[str]:
    """The milestone records that a request is for, as Snakemake names them."""
    training = request.parents[3]
    for step in read_json(request)["milestones"]:
        yield str(training / "milestones" / f"{step:07d}" / "milestone.json")


def _again(workflow: Any, job: Any) -> bool:
    """Whether a training job that Snakemake has on its books as done is forced, or its outputs were deleted."""
    if not job.rule.name.startswith("train"):
        return False
    books = workflow.persistence
    if not books.has_metadata(job) or books._filter_incomplete_keys([str(output) for output in job.output]):
        return False
    forced = job.rule in workflow.dag.forcerules or not workflow.dag.forcefiles.isdisjoint(job.output)
    return forced or not all(Path(str(output)).exists() for output in job.output)
