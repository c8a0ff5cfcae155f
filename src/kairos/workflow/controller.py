"""Functions of the Snakefile other than its rules: they read the experiment, and begin and end a run.

Only the controller writes here. The processes that it starts for single jobs parse the Snakefile too, and read the copy
of the experiment that the controller froze.
"""

import glob
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import yaml

from kairos.config import apply_extends, load, validate
from kairos.files import locked, read_json, sha256_json
from kairos.progress import duration, say
from kairos.slurm import books
from kairos.tracking.store import tracking_uri, without_credentials
from kairos.training.job import read_progress
from kairos.workflow import fork_server, interrupts, start_over
from kairos.workflow.layout import FROZEN_VARIABLE, Layout, Segment, create_layout, load_frozen_layout
from kairos.workflow.snakemake_private import together
from kairos_timesteps.errors import KairosError, rejection

_DEFAULT = "params.yaml"
_held: list[IO[str]] = []  # the lock file, open as long as this process lives
_began = time.time()


def open_layout(workflow: Any, config: dict[str, Any]) -> Layout:
    """The experiment that Snakemake was called for, checked and frozen; ends the process where it cannot be used."""
    with _ending():
        if FROZEN_VARIABLE in os.environ:
            return load_frozen_layout()
        found = create_layout(_experiment(workflow, config))
        os.environ[FROZEN_VARIABLE] = str(found.config_file.resolve())
        if not workflow.output_settings.dryrun:
            _tidy(found)
        for line in found.notes:
            say(line)
        return found


def _experiment(workflow: Any, config: dict[str, Any]) -> Any:
    files = workflow.config_settings.configfiles
    if len(files) < 2 and not workflow.config_settings.config:
        return load(files[0] if files else _DEFAULT)
    if files:
        return validate(apply_extends(dict(config), Path(files[-1])), " + ".join(map(str, files)))
    load(_DEFAULT)
    values = yaml.safe_load(Path(_DEFAULT).read_text(encoding="utf-8"))
    return validate({**values, **config}, f"{_DEFAULT} with --config")


@contextmanager
def _ending() -> Iterator[None]:
    """End with one message where something is wrong; Snakemake would add a traceback to an exception."""
    try:
        yield
    except (KairosError, OSError) as error:
        print(f"kairos: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


def _lock(results: Path) -> IO[str]:
    """Hold the experiment while the file that is returned is open; locks of Snakemake's would outlive its process.

    Raises:
        KairosError: another Snakemake works on these results.
    """
    path = Path(".kairos") / f"{results.name}.lock"
    path.parent.mkdir(exist_ok=True)
    file = open(path, "a+", encoding="utf-8")  # noqa: SIM115
    if not locked(file, 0, "runs from working at once; put this folder on"):
        file.seek(0)
        raise KairosError(f"{results}: another run ({file.read().strip()}) is at work there; wait for it")
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def _tidy(layout: Layout) -> None:
    """Clear what the last run left, before Snakemake reads it; do nothing while another run is at work.

    An import into MLflow that failed is tried again; so is one into elsewhere. A job that has ended well without its
    controller is on Snakemake's books.
    """
    results = Path(layout.results)
    with suppress(KairosError), _lock(results):
        record = results / "tracking.json"
        if record.exists():
            done, uri = read_json(record), tracking_uri(layout.experiment.tracking.uri)
            if not done.get("imported") or done.get("uri") != without_credentials(uri):
                record.unlink()
        for note in books(results).glob("*.done"):
            note.with_suffix(".json").unlink(missing_ok=True)
            note.unlink()


def sharing(workflow: Any, layout: Layout, segment: Segment) -> Callable[[Any], str] | None:
    """`Layout.sharing`, as one job for each group."""
    group = layout.training_group(segment)
    number = layout.experiment.training.trainings_per_gpu
    return group and (lambda wildcards: together(workflow, group(wildcards), number))


def data_files(layout: Layout) -> list[str]:
    """The files of a data set that are not images, as far as they exist; `kairos prepare` says what is missing."""
    dataset = layout.experiment.dataset
    lists = [re.sub(r":\d+$", "", part.files) for part in dataset.sections if part.files]
    found = sorted({path for path in (*lists, *dataset.caption_files) if os.path.isfile(path)})
    for part in dataset.sections if dataset.source in ("parquet", "zip") else ():
        path = str(part.path)
        inside = os.path.isdir(path)
        found += sorted(map(str, Path(path).rglob("*.parquet")) if inside else glob.glob(path, recursive=True))
    return found


def listing(layout: Layout) -> str | list[str] | None:
    """Names of a data set's files; of folders of images, too many files to be inputs each, a hash with their sizes."""
    dataset = layout.experiment.dataset
    if dataset.source != "folder":
        return data_files(layout) or None
    roots = [Path(str(part.path)) for part in dataset.sections]
    found = [
        sorted((file.relative_to(root).as_posix(), file.stat().st_size) for file in root.rglob("*") if file.is_file())
        for root in roots
    ]
    return sha256_json(found)


def starts(workflow: Any, layout: Layout) -> None:
    """Before the first job: hold the results; see `start_over` and `interrupts`."""
    with _ending():
        if workflow.executor_plugin.name == "slurm":
            raise rejection("executor", "'slurm'", "'kairos', whose settings are kairos-… instead of slurm-…")
        _held.append(_lock(Path(layout.results)))
    if not workflow.touch:
        start_over.mark(workflow, Path(layout.results))
    if workflow.local_exec:
        interrupts.obey(workflow.scheduler)
        stages = [job.rule.name.split("_")[0] for job in workflow.dag.needrun_jobs()]
        fork_server.start(layout.config_file, layout.experiment.training.threads, stages)


def succeeded(workflow: Any, layout: Layout) -> None:
    """After the last job: parts whose joining ended without a controller go too."""
    if workflow.touch:
        return
    for path in {path for job in workflow.dag.jobs for path in job.input.get("parts", ())}:
        shutil.rmtree(path) if os.path.isdir(path) else Path(path).unlink(missing_ok=True)
    made = any(job.rule.name == "report" for job in workflow.dag.jobs)
    report = f"; the report is {layout.results}/report.html" if made else ""
    say(f"{layout.experiment.experiment}: done in {duration(time.time() - _began)}{report}")


def failed(workflow: Any, layout: Layout) -> None:
    """Name the failed jobs' log files with what they say last, or say that the run was told to end."""
    for job in workflow.scheduler.failed:  # Snakemake books its deleted outputs as made: as if a user had deleted them
        workflow.persistence.cleanup(job)
    if interrupts.told_at:
        words = [read_progress(Path(layout.training_folder(*training))) for training in layout.trainings]
        written = sum(word.get("state") == "stopped" and word["updated"] > interrupts.told_at[0] for word in words)
        whose = "training has written its" if written == 1 else "trainings have written their"
        say(f"interrupted: {written} {whose} state; the same command goes on")
        return
    say("Not everything could be computed; what is complete stays, and the same command goes on from there.")
    for job in workflow.dag.needrun_jobs():
        log = Path(str(job.log[0])) if job.log else None
        if log and not workflow.dag.finished(job) and log.exists() and log.stat().st_mtime >= _began:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            say(f"  {log}: {lines[-1] if lines else 'no message'}")
