"""What the Snakefile does besides its rules: reads the experiment, and looks after a run's beginning and end.

Only the controller writes here; the processes that Snakemake starts for single jobs parse the Snakefile too, and find
the experiment as the controller froze it.
"""

import fcntl
import glob
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from snakemake.persistence import PersistenceBase

from kairos.config import load, validate
from kairos.errors import KairosError
from kairos.files import read_json, sha256_json
from kairos.progress import duration, say
from kairos.tracking.store import tracking_uri, without_credentials
from kairos.training.job import last_word
from kairos.workflow import interrupts, start_over
from kairos.workflow.layout import PARTS, Layout, lay_out

_FROZEN = "KAIROS_EXPERIMENT"  # how a job's own Snakemake process finds the controller's frozen experiment
_DEFAULT = "params.yaml"
# on a cluster, whose jobs find what `kairos fetch` has brought
_OFFLINE = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
_held: list[Any] = []  # the lock file, open as long as this process lives
_began = time.time()


def open_layout(workflow: Any, config: dict[str, Any]) -> Layout:
    """The experiment that Snakemake was called for, checked and frozen; ends the process where it cannot be used."""
    with _ending():
        if not workflow.is_main_process and _FROZEN in os.environ:
            return Layout(load(os.environ[_FROZEN]), Path(os.environ[_FROZEN]))
        found = lay_out(_experiment(workflow, config))
        if workflow.is_main_process:
            os.environ[_FROZEN] = str(found.config.resolve())
            _before_execution(workflow, found)
            for line in found.said:
                say(line)
        return found


def _experiment(workflow: Any, config: dict[str, Any]) -> Any:
    files = workflow.config_settings.configfiles
    if len(files) < 2 and not workflow.config_settings.config:
        return load(files[0] if files else _DEFAULT)
    if files:
        return validate(dict(config), " + ".join(map(str, files)))
    load(_DEFAULT)
    values = yaml.safe_load(Path(_DEFAULT).read_text(encoding="utf-8"))
    return validate({**values, **config}, f"{_DEFAULT} with --config")


def _before_execution(workflow: Any, layout: Layout) -> None:
    """Lock the results when Snakemake begins to execute, before it looks at any file; on a cluster prepare for it.

    Its own hook (onstart) comes after its locks; and while the Snakefile is read it is not known yet whether anything
    will be executed: a dry run, a summary or a lint must work beside a run.
    """
    execute, listed = workflow.execute, PersistenceBase._input
    # of what a result was made from, its books leave the parts out: it is the same from many, few or none
    PersistenceBase._input = lambda books, job: [path for path in listed(books, job) if PARTS not in path.split("/")]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background ignores it

    def locked(*arguments: Any, executor_plugin: Any, **keywords: Any) -> Any:
        groups = workflow.group_settings
        groups.group_components = {**layout.sharing_groups(), **groups.group_components}
        if not executor_plugin.common_settings.dryrun_exec:
            with _ending():
                _lock(Path(layout.results))
            _forget_failed_import(Path(layout.results), layout.experiment.tracking.uri)
        if not executor_plugin.common_settings.local_exec:
            os.environ |= _OFFLINE
        if executor_plugin.name == "slurm":
            from kairos.workflow import takeover

            executor_plugin = takeover.attach(workflow, executor_plugin, layout)
        return execute(*arguments, executor_plugin=executor_plugin, **keywords)

    workflow.execute = locked


@contextmanager
def _ending() -> Iterator[None]:
    """End with one message where something is wrong; Snakemake would add a traceback to an exception."""
    try:
        yield
    except (KairosError, OSError) as error:
        print(f"kairos: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


def _lock(results: Path) -> None:
    """Hold the experiment for this process, and remove the locks of a Snakemake that was killed.

    Snakemake's own lock files outlive a killed controller and would stop the next one. This lock falls with its
    process, so whoever holds it knows that Snakemake's locks on the same results are left over.

    Raises:
        KairosError: another Snakemake works on these results.
    """
    path = Path(".kairos") / f"{results.name}.lock"
    path.parent.mkdir(exist_ok=True)
    file = open(path, "a+", encoding="utf-8")  # noqa: SIM115  (held until the process ends)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise KairosError(f"{results}: another run ({file.read().strip()}) is at work there; wait for it") from None
    except OSError as error:
        raise KairosError(
            f"{path}: this file system has no locks ({error.strerror}), so nothing would keep two runs from working at "
            "once; put this folder on another one, or mount it with locks (Lustre: flock)"
        ) from None
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {socket.gethostname()}")
    file.flush()
    _held.append(file)
    for left in Path(".snakemake/locks").glob("*.lock"):
        if any(line.startswith(f"{results}/") for line in left.read_text().splitlines()):
            left.unlink()


def _forget_failed_import(results: Path, configured: str | None) -> None:
    """An import into MLflow that failed stops nothing, and is tried again by the next run; so is one into elsewhere."""
    record = results / "tracking.json"
    if record.exists():
        done = read_json(record)
        if not done.get("imported") or done.get("uri") != without_credentials(tracking_uri(configured)):
            record.unlink()


def data_files(layout: Layout) -> list[str]:
    """The files of a data set that are not images, as far as they exist; `kairos prepare` says what is missing."""
    dataset = layout.experiment.dataset
    lists = [re.sub(r":\d+$", "", part.files) for part in dataset.parts if part.files]
    found = sorted({path for path in (*lists, *dataset.caption_files) if os.path.isfile(path)})
    for part in dataset.parts if dataset.source in ("parquet", "zip") else ():
        path = str(part.path)
        inside = os.path.isdir(path)
        found += sorted(map(str, Path(path).rglob("*.parquet")) if inside else glob.glob(path, recursive=True))
    return found


def listing(layout: Layout) -> str | None:
    """Hash of the names and sizes in folders of images: too many files to be inputs each."""
    dataset = layout.experiment.dataset
    if dataset.source != "folder":
        return None
    roots = [Path(str(part.path)) for part in dataset.parts]
    found = [
        sorted((file.relative_to(root).as_posix(), file.stat().st_size) for file in root.rglob("*") if file.is_file())
        for root in roots
    ]
    return sha256_json(found)


def starts(workflow: Any, layout: Layout) -> None:
    """Before the first job: see `start_over` and `interrupts`."""
    if not workflow.touch:
        start_over.mark(workflow, Path(layout.results))
    if workflow.local_exec:
        interrupts.obey(workflow.scheduler)


def succeeded(workflow: Any, layout: Layout) -> None:
    """After the last job."""
    made = any(job.rule.name == "report" for job in workflow.dag.jobs)
    report = f"; the report is {layout.results}/report.html" if made else ""
    if not workflow.touch:
        say(f"{layout.experiment.experiment}: done in {duration(time.time() - _began)}{report}")


def failed(workflow: Any, layout: Layout) -> None:
    """Name the failed jobs' log files with what they say last, or say that the run was told to end."""
    for job in workflow.scheduler.failed:  # Snakemake books its deleted outputs as made: as if a user had deleted them
        for one in job.jobs if job.is_group() else [job]:
            workflow.persistence.cleanup(one)
    if interrupts.told_at:
        words = [last_word(Path(layout.training(*training))) for training in layout.trainings]
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
