"""Start and end of a run of the workflow: functions that the Snakefile calls before, between and after its rules.

The controller is the Snakemake process that the user starts. It freezes the experiment, locks the results, decides
which results are valid, and ends the run on a signal. The Snakemake processes that it starts for single jobs parse the
Snakefile too, but only read the frozen experiment.
"""

import base64
import dataclasses
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

import psutil

from kairos.config import Experiment, apply_extends, load, validate
from kairos.config.reading import merge, read_experiment_file
from kairos.files import read_json, try_lock
from kairos.progress import duration, log
from kairos.tracking.mlflow_store import tracking_uri, without_credentials
from kairos.training.job import read_progress
from kairos.workflow import fork_server
from kairos.workflow.final_errors import list_error_files
from kairos.workflow.layout import (
    PLAN_VARIABLE,
    Layout,
    Segment,
    create_layout,
    load_planned_layout,
    write_plan,
)
from kairos.workflow.snakemake_private import set_jobs_per_group
from kairos_timesteps.errors import KairosError

_DEFAULT_EXPERIMENT = "params.yaml"
_SECONDS_TO_END = 45.0  # after a signal, jobs are killed after this time
_lock_files: list[IO[str]] = []  # open, and so locked, as long as this process lives
_opened: list[tuple[Any, Layout]] = []  # workflows of this controller with their layouts
_interruption_times: list[float] = []  # Unix time of the signal that ended this run; empty if none did
_start_time = time.time()  # Unix time at which this process began


# --------------------------------------------------------------------------------------------------- the experiment


def open_layout(workflow: Any, config: dict[str, Any], mark_ancient: Callable[[str], Any] = str) -> Layout:
    """Return the layout of the experiment that Snakemake was called for, checked and frozen.

    The controller writes the frozen experiment and its plan, sets `PLAN_VARIABLE` to the path of the plan, and logs the
    notes of the layout. Unless it is a dry run, it removes outdated records of an earlier run. A process for single
    jobs only loads the frozen experiment. Both ensure that the rules find the command ``kairos``, see
    `_complete_search_path`. An invalid experiment ends the process with one message and status 2.

    Args:
        workflow: Snakemake's workflow.
        config: Snakemake's merge of all configuration files and values.
        mark_ancient: see `Layout`.
    """
    _complete_search_path()
    for opened, layout in _opened:
        if opened is workflow:  # a Snakefile that loads this one as a module
            return layout
    with _exit_on_error():
        if PLAN_VARIABLE in os.environ:  # this process runs single jobs: the controller has set the variable
            return dataclasses.replace(load_planned_layout(), mark_ancient=mark_ancient)
        layout = write_plan(create_layout(_load_experiment(workflow, config)))
        results = layout.results
        # Snakemake sets the options of the jobs after it has read the Snakefile
        ignores_age = cache(lambda: not _forces_jobs(workflow, results))
        layout = dataclasses.replace(layout, ignores_age=ignores_age, mark_ancient=mark_ancient)
        os.environ[PLAN_VARIABLE] = str(layout.plan_file)
        if not workflow.output_settings.dryrun:
            _remove_leftovers(layout)
        for note in layout.notes:
            log(note)
        _opened.append((workflow, layout))
        return layout


def _forces_jobs(workflow: Any, results: str) -> bool:
    """Return True if Snakemake may run a job whose results are valid: one that is forced, or was killed."""
    settings = workflow.dag_settings
    if settings is not None and (settings.forceall or settings.forcetargets or settings.forcerun):
        return True
    # Snakemake's marks of killed jobs have the paths of outputs as names, in base 64; long names are split into folders
    folder = Path(".snakemake/incomplete")
    marks = ("".join(file.relative_to(folder).parts) for file in folder.rglob("*") if file.is_file())
    prefix = f"{results}/".encode()
    return any(base64.urlsafe_b64decode(mark.replace("@", "") + "==").startswith(prefix) for mark in marks)


def _complete_search_path() -> None:
    """Append the folder of this Python interpreter to PATH if PATH lacks the command ``kairos``, which the rules call.

    It is missing if Snakemake is called as ``.venv/bin/snakemake`` and the environment is not active.
    """
    if shutil.which("kairos") is None:
        environment_folder = str(Path(sys.executable).parent)
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), environment_folder])


def _load_experiment(workflow: Any, config: dict[str, Any]) -> Experiment:
    """Return the checked experiment of the files of ``--configfile``, or else of params.yaml.

    Values of ``--config`` are merged into those of params.yaml by the rules of ``extends``. With ``--configfile``,
    Snakemake has merged all values section by section: methods are added, not replaced. If Snakemake has merged several
    files, ``extends`` is relative to the last one.

    Raises:
        ConfigError: the experiment is not valid, or a file is missing.
    """
    files = workflow.config_settings.configfiles
    has_values = bool(workflow.config_settings.config)  # values of --config
    if len(files) < 2 and not has_values:
        # read again: `load` rejects repeated keys, of which Snakemake has kept the last ones in `config`
        return load(files[0] if files else _DEFAULT_EXPERIMENT)
    if files:
        merged = apply_extends(dict(config), Path(files[-1]))
        source = " + ".join(map(str, files))  # for error messages
        return validate(merged, source)
    # --config without --configfile: Snakemake has not read params.yaml
    load(_DEFAULT_EXPERIMENT)  # raises the errors of the file before those of --config
    values = merge(read_experiment_file(Path(_DEFAULT_EXPERIMENT)), dict(config))
    merged = apply_extends(values, Path(_DEFAULT_EXPERIMENT))  # --config may contain `extends`
    return validate(merged, f"{_DEFAULT_EXPERIMENT} with --config")


@contextmanager
def _exit_on_error() -> Iterator[None]:
    """Print a KairosError or OSError of the block as one message to stderr, and exit with status 2."""
    try:
        yield
    except (KairosError, OSError) as error:  # Snakemake would print a traceback
        print(f"kairos: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


def lock_results(results: Path) -> IO[str]:
    """Lock an experiment's results until the returned file, ``.lock`` in their folder, is closed.

    The file is created if it is missing. This process's id and host are written into it, for the error message of
    another run. `results` is the folder of the results, whose name is the experiment's.

    Raises:
        KairosError: another run of the workflow holds the lock, or the file system has no locks.
    """
    # Snakemake's own locks do not serve: they outlive its process
    path = results / ".lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a+", encoding="utf-8")  # noqa: SIM115  (a+: keeps the content, the process that has the lock)
    if not try_lock(file, timeout=0, conflict="two runs working at once", to_move="results"):
        file.seek(0)
        holder = file.read().strip()  # such as "pid 4711 on node1"
        raise KairosError(f"{results}: another run ({holder}) computes these results; wait for its end")
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def _remove_leftovers(layout: Layout) -> None:
    """Remove outdated records that an earlier run has left, unless another run of the workflow is active.

    1. The record of an import into MLflow (tracking.json) that failed, or went to another server, is removed, so that
       the import is repeated. A record without the field ``imported`` or ``uri`` is treated as a failed import; a
       damaged record stays.
    2. The records of final errors are removed, so that the jobs are tried again.

    Nothing is removed if the results cannot be locked; no error is raised then.
    """
    results = Path(layout.results)
    if not results.is_dir():
        return
    # an error of the lock, a damaged tracking.json, or results that cannot be written
    with suppress(KairosError, OSError), lock_results(results):
        for path in list_error_files(results):
            path.unlink()
        tracking_file = results / "tracking.json"
        if tracking_file.exists():
            tracking = read_json(tracking_file)
            uri = without_credentials(tracking_uri(layout.experiment.tracking.uri))
            if not tracking.get("imported") or tracking.get("uri") != uri:
                tracking_file.unlink()


# ------------------------------------------------------------------------------------------- inputs, params and groups


def training_group(workflow: Any, layout: Layout, segment: Segment) -> Callable[[Any], str] | None:
    """Return a function from wildcards to the name of the group of training runs that share a GPU as one job.

    Each call of the returned function also sets the group's size in Snakemake to `training.trainings_per_gpu`, unless
    the user has set it. None: the experiment has no groups, because each training run has a separate GPU.
    """
    name_group = layout.training_group(segment)
    if name_group is None:
        return None
    trainings_per_gpu = layout.experiment.training.trainings_per_gpu
    # `set_jobs_per_group` returns the name of the group
    return lambda wildcards: set_jobs_per_group(workflow, name_group(wildcards), trainings_per_gpu)


# ------------------------------------------------------------------------------------------------- start of the jobs


def starts(workflow: Any, layout: Layout) -> None:
    """Prepare a run before its first job: lock the results, and start the fork server.

    The process ends with a message and status 2 if another run works on the results, or if the file system has no
    locks. The lock lasts until this process ends. Signal handlers are set (`_end_on_signals`),
    and the fork server is started, only if this process runs the jobs itself.
    """
    with _exit_on_error():
        _lock_files.append(lock_results(Path(layout.results)))
    if workflow.local_exec:
        _end_on_signals(workflow.scheduler)
    if workflow.local_exec and not workflow.touch:
        stages = [job.rule.name.split("_")[0] for job in workflow.dag.needrun_jobs()]  # rule train_2: stage train
        fork_server.start_server(layout.config_file, layout.experiment.training.threads, stages)


# ----------------------------------------------------------------------------------------------------------- signals


def _end_on_signals(scheduler: Any) -> None:
    """Set signal handlers, and start a thread, that end the run on SIGINT, SIGTERM and SIGHUP.

    SIGHUP is left alone if it is ignored, as with nohup. After the first signal, no further job starts, and the running
    jobs get SIGTERM, on which training runs write a checkpoint. The processes that remain after `_SECONDS_TO_END` are
    killed. Further signals have no effect.
    """
    # Snakemake waits on SIGTERM until its jobs are done. It relies on a terminal to send SIGINT to the jobs too, and
    # ignores SIGINT if a script has started it in the background.
    signal_queue: SimpleQueue[int] = SimpleQueue()  # unlike Queue, its `put` may interrupt any code, also itself
    handled_signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        handled_signals.append(signal.SIGHUP)
    for handled_signal in handled_signals:
        signal.signal(handled_signal, lambda number, frame: signal_queue.put(number))
    threading.Thread(target=_end_after_signal, args=(scheduler, signal_queue), daemon=True).start()


def _end_after_signal(scheduler: Any, signal_queue: "SimpleQueue[int]") -> None:
    """Wait for a signal; then stop the scheduler, and terminate and later kill all processes below this one.

    The processes get SIGTERM at once, and SIGKILL after `_SECONDS_TO_END`. The signal's time is appended to
    `_interruption_times`, and module `logging` is switched off. The function does not return: its thread ends with this
    process.
    """
    signal_queue.get()  # waits
    _interruption_times.append(time.time())
    logging.disable()  # Snakemake would report each of its jobs as failed
    scheduler.exit_gracefully()
    terminated: set[psutil.Process] = set()
    while True:  # until this process ends, because jobs may start further processes
        is_late = time.time() - _interruption_times[0] > _SECONDS_TO_END
        # these include the fork server and its jobs
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if is_late:
                    process.kill()
                elif process not in terminated:
                    terminated.add(process)
                    process.terminate()
        time.sleep(0.2)


# --------------------------------------------------------------------------------------------------------------- end


def succeeded(workflow: Any, layout: Layout) -> None:
    """Finish a successful run: delete leftover shards, and log its duration and the report's path.

    The path is logged only if the report was requested. With ``--touch`` the function does nothing.
    """
    if workflow.touch:  # nothing was computed
        return
    # shards are left over if the controller that would have deleted them was killed, or of other settings
    for folder in [layout.results, *(layout.training_folder(method, seed) for method, seed in layout.trainings)]:
        shutil.rmtree(Path(folder, ".shards"), ignore_errors=True)
    has_report = any(job.rule.name == "report" for job in workflow.dag.jobs)
    report = f"; the report is {layout.results}/report.html" if has_report else ""
    log(f"{layout.experiment.experiment}: done in {duration(time.time() - _start_time)}{report}")


def failed(workflow: Any, layout: Layout) -> None:
    """Finish a failed run: log the failed jobs' log files, or after an interruption the number of saved training runs.

    An interruption is a signal that ended the run.
    """
    if _interruption_times:
        _report_interruption(layout)
    else:
        _report_failed_jobs(workflow)


def _report_interruption(layout: Layout) -> None:
    """Log the number of training runs that have stopped with a checkpoint since this process began; it may be 0."""
    # a signal that reaches all processes may stop a training run before this process has noticed it, so the time of
    # the signal does not matter
    stopped_count = 0
    for method, seed in layout.trainings:
        progress = read_progress(Path(layout.training_folder(method, seed)))
        if progress.get("state") == "stopped" and progress["updated"] > _start_time:
            stopped_count += 1
    noun = "training run" if stopped_count == 1 else "training runs"
    log(f"interrupted: {stopped_count} {noun} wrote a checkpoint; run the same command again to resume")


def _report_failed_jobs(workflow: Any) -> None:
    """Log how to continue, and the first log file and its last line of each unfinished job that has started.

    Jobs whose first log file is missing, or older than this process, are skipped.
    """
    log("Some jobs failed. Complete results are kept; run the same command again to continue.")
    for job in workflow.dag.needrun_jobs():
        if workflow.dag.finished(job) or not job.log:
            continue
        file = Path(str(job.log[0]))
        if file.exists() and file.stat().st_mtime >= _start_time:  # older: the job has not started in this run
            lines = file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            last_line = lines[-1] if lines else "no message"
            log(f"  {file}: {last_line}")
