"""Files of a training run: its lock, and its private state ``D/.state/<identity>/``.

    checkpoints/0000400.ckpt     the last two checkpoints
    metrics.jsonl timing.jsonl   lines beyond the checkpoint that a job resumes from are cut off
    snapshots/0000400/          every snapshot reached so far

``D/.state`` also contains ``lock``, held by the process that trains, and ``progress.json``, with step, rate and state
of the run for `kairos status`.

The run's outputs in ``D`` are links to the state. The state is not a declared output of a workflow, so it survives when
a workflow deletes the outputs of failed jobs.
"""

import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kairos.errors import TemporaryError
from kairos.files import (
    DamagedError,
    atomic_folder,
    glance,
    link_file,
    list_by_step,
    read_entries,
    read_json,
    read_record,
    set_missing_filename,
    sha256_bytes,
    try_lock,
    write_record,
    write_text,
)
from kairos.progress import log
from kairos.snapshots import check_snapshot, step_name
from kairos.training import checkpoint
from kairos.training.job import ACTIVE_STATES
from kairos.training.provenance import changes_bits, library_versions
from kairos.validity import state_folder
from kairos_timesteps.errors import KairosError

# fields of a line of metrics.jsonl with their meaning; loss terms and probes add fields under their names
METRICS_FIELDS = {
    "step": "completed training steps",
    "images": "images in these steps: steps times the batch size",
    "loss": "objective of the step, with the strategy's weights, mean over the global batch",
    "grad_norm": "norm of the gradient before it is clipped",
    "lr": "learning rate of the step",
    "sampler": "object with numbers of a sampler that learns; else empty",
    "sampler.updates": "changes of the learned density so far",
    "sampler.a": "`adaptive`: a of the Beta density, mean over the last batch",
    "sampler.b": "`adaptive`: b of the Beta density, mean over the last batch",
    "sampler.reward": "`adaptive`: last mean reward",
    "sampler.pivot": "`info_noise`: noise level at the middle of the gate",
}
# fields of a line of timing.jsonl, which is written with each checkpoint
TIMING_FIELDS = {
    "identity": "identity of the training run that was measured; lines of another run are ignored",
    "step": "completed training steps at the checkpoint",
    "seconds": "seconds of training steps so far, over all jobs of the run, without saving",
    "steps_run": "steps that the job has computed so far",
    "started": "UTC time at which the job started, ISO 8601",
    "saved": "UTC time of this line, ISO 8601",
    "machine": "object with the machine that the job was measured on",
    "machine.host": "name of the machine",
    "machine.cpu": "model of its CPU",
    "machine.gpu": "model of the GPU; None: the CPU computes",
    "machine.cpus": "CPUs that the job may use",
    "machine.threads": "CPU threads of each process",
    "machine.processes": "processes of the training run",
}

_RECORD = "snapshot.json"  # of a snapshot
_KEPT_CHECKPOINTS = 2  # if the last one is damaged, the one before it is used
_WATCH_SECONDS = 12  # for which a progress file is watched; a running job writes it every 5 s
_STALE_SECONDS = 60  # age from which a progress file is treated as abandoned


@contextmanager
def lock_run_folder(state_folder: Path, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a training run, so that one process at a time trains it; `state_folder` is created.

    The kernel releases the lock when its holder dies. If the file system's locks end at the machine, the progress file
    shows whether a job on another machine is training; watching it may take 12 s. The file ``lock`` describes the last
    holder, for the messages of other processes.

    Args:
        state_folder: ``.state`` of the run's folder.
        wait: wait for another process that holds the lock instead of failing.

    Raises:
        KairosError: another process trains this run, or the file system has no locks.
        DamagedError: the progress file lacks a field.
    """
    state_folder.mkdir(parents=True, exist_ok=True)
    with open(state_folder / "lock", "a+", encoding="utf-8") as file:  # unlike "w+", keeps the holder's description
        # flock also works between machines on NFS (Linux 2.6.12 and later) and other file systems mounted with locks;
        # try for 1 s, because `kairos status` takes the lock for moments
        if not try_lock(file, timeout=1.0, conflict="two jobs training here at once", to_move="results"):
            file.seek(0)  # "a+" opens a file at its end
            holder = file.read().strip()  # written below by the process that holds the lock
            problem = f"{state_folder.parent}: another process ({holder}) is training here"
            if not wait:
                raise TemporaryError(problem)
            log(f"{problem}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        _reject_job_on_another_machine(state_folder)
        this_process = f"pid {os.getpid()} on {socket.gethostname()}"
        job = os.environ.get("SLURM_JOB_ID")
        if job:
            this_process += f", SLURM job {job}"
        file.truncate(0)
        file.write(this_process)
        file.flush()  # other processes read it during the block
        yield


def _reject_job_on_another_machine(state_folder: Path) -> None:
    """Raise an error if the progress file shows that a job on another machine is training here now.

    The lock of such a job may not reach this machine. The function returns at once if the file is missing, damaged or
    older than 60 s, if this machine wrote it, or if its job has ended. Otherwise it watches the file for 12 s, and
    returns if nothing changes.

    Raises:
        KairosError: the file is updated while it is watched.
        DamagedError: the file is JSON but lacks a field.
    """
    path = state_folder / "progress.json"
    first_update = None  # time of the update that the first reading shows
    for _ in range(_WATCH_SECONDS):  # one reading per second
        try:
            progress = read_json(path)
        except (OSError, DamagedError):
            return
        # a missing field raises DamagedError, see `read_json`
        is_on_this_machine = progress["host"] == socket.gethostname()
        has_ended = progress["state"] not in ACTIVE_STATES
        is_stale = time.time() - progress["updated"] > _STALE_SECONDS
        if is_on_this_machine or has_ended or is_stale:
            return
        if first_update is not None and progress["updated"] != first_update:
            raise TemporaryError(
                f"{state_folder.parent}: is being trained on {progress['host']} (pid {progress['pid']}), and the file "
                "system's lock does not reach this machine; mount it with locks between machines (NFS: without nolock "
                "or local_lock)"
            )
        first_update = progress["updated"]
        time.sleep(1)


class RunFolder:
    """Files of one training run.

    Args:
        out: folder of the run, which receives the outputs.
        identity: hash of everything that decides the trajectory; it selects the state.

    Attributes:
        state: folder of the private state.
        metrics: metrics.jsonl of the state.
        timing: timing.jsonl of the state.
        resumed_under: other environments that computed the first steps, each with the number of steps by then.
    """

    def __init__(self, out: Path, identity: str):
        self.out = out
        self.identity = identity
        self.state = state_folder(out, identity)
        self.metrics = self.state / "metrics.jsonl"
        self.timing = self.state / "timing.jsonl"
        self.resumed_under: list[dict[str, Any]] = []
        # size and hash of the part of metrics.jsonl that the last checkpoint covers
        self._metrics_size = 0
        self._metrics_digest = hashlib.sha256()

    def prepare(self, milestones: list[int], snapshots_only: bool = False) -> list[int]:
        """Prepare the state for a request, and return the milestones up to which steps have to be computed.

        These are the milestones without an intact snapshot. The last milestone is returned if only the last checkpoint
        is missing, unless `snapshots_only` is set. Temporary files of killed jobs are deleted. Messages report a
        start from step 0 and damaged files. The caller holds the lock of the run.

        Args:
            milestones: steps whose snapshots are requested, increasing.
            snapshots_only: the request does not include the last checkpoint.
        """
        self._report_other_states()
        self.state.mkdir(parents=True, exist_ok=True)
        self._delete_temporary_files()
        missing = [step for step in milestones if not _is_intact(self.snapshot_folder(step))]
        if missing or snapshots_only:
            return missing
        last_milestone = milestones[-1]
        newest_checkpoint = self.newest_checkpoint(latest_step=last_milestone)
        has_last_checkpoint = newest_checkpoint is not None and newest_checkpoint["step"] == last_milestone
        return [] if has_last_checkpoint else [last_milestone]

    def _report_other_states(self) -> None:
        """Log that a new run starts if this identity has no state, but other identities here have checkpoints."""
        other_states = [path for path in self.state.parent.glob("*/checkpoints") if any(path.iterdir())]
        if other_states and not self.state.exists():
            differences = "settings (also the end of the learning-rate schedule), data or code"
            reason = f"{differences} differ from those of the existing state, which is kept"
            log(f"{self.out}: starts a new run from step 0: {reason}")

    def _delete_temporary_files(self) -> None:
        """Delete the temporary files and folders that killed jobs left; the caller holds the lock."""
        for leftover in self.state.rglob(".tmp-*"):
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()

    def newest_checkpoint(self, latest_step: int | None = None, device: Any = "cpu") -> dict[str, Any] | None:
        """Return the content of the newest intact checkpoint that fits metrics.jsonl; None: there is none.

        Newer checkpoints that are damaged or do not fit are logged and kept.

        Args:
            latest_step: ignore later checkpoints; None: consider all.
            device: device of its tensors.
        """
        paths = self._checkpoints()[::-1]
        if latest_step is not None:
            paths = [path for path in paths if int(path.stem) <= latest_step]
        for path in paths:
            try:
                content = checkpoint.read(path, device)
                self._check_belongs_here(content, path)
            except DamagedError as error:
                is_oldest = path == paths[-1]
                log(f"{error}; {'no earlier one exists' if is_oldest else 'the one before it is used'}")
            else:
                return content
        return None

    def _check_belongs_here(self, content: dict[str, Any], path: Path) -> None:
        """Check that a checkpoint is of this run and that metrics.jsonl begins with the bytes that it covers.

        Raises:
            DamagedError: the checkpoint is of another run, or lines are missing or changed.
        """
        if content["identity"] != self.identity:
            raise DamagedError(f"{path}: of another training run ({content['identity'][:16]})")
        metrics = self.metrics.read_bytes() if self.metrics.exists() else b""  # a missing file covers 0 bytes
        # the part of the file that had been written when the checkpoint was saved
        size = content["metrics"]["bytes"]
        digest = content["metrics"]["sha256"]
        if len(metrics) < size or sha256_bytes(metrics[:size]) != digest:
            raise DamagedError(f"{self.metrics}: does not contain the lines that belong to {path.name}")

    def clear(self) -> None:
        """Delete the state of this run, and create its empty folder.

        The published outputs stay.
        """
        if self.state.exists():
            shutil.rmtree(self.state)
        self.state.mkdir(parents=True)

    def _checkpoint_path(self, step: int) -> Path:
        """Return the file of the checkpoint after `step` steps."""
        return self.state / "checkpoints" / f"{step_name(step)}.ckpt"

    def snapshot_folder(self, step: int) -> Path:
        """Return the folder of the snapshot at a step."""
        return self.state / "snapshots" / step_name(step)

    def append_times(self, times: dict[str, Any]) -> None:
        """Append a line to timing.jsonl, with the identity of the run; `times` has the other `TIMING_FIELDS`."""
        with set_missing_filename(self.timing), open(self.timing, "a", encoding="utf-8") as file:
            file.write(json.dumps({"identity": self.identity, **times}) + "\n")

    def save_checkpoint(self, step: int, state: dict[str, Any], environment: dict[str, Any]) -> None:
        """Write a checkpoint after `step` steps, with the hash of metrics.jsonl so far; keep only the last two files.

        Args:
            step: number of completed steps.
            state: result of `kairos.training.state.TrainingState.state_dict`.
            environment: result of `kairos.training.provenance.describe_environment`.
        """
        self._hash_new_metrics()
        content = {
            **state,
            "step": step,
            "identity": self.identity,
            "environment": environment,
            "resumed_under": self.resumed_under,
            "metrics": {"bytes": self._metrics_size, "sha256": self._metrics_digest.hexdigest()},
        }
        path = self._checkpoint_path(step)
        checkpoint.write(path, content)
        for old_checkpoint in self._checkpoints()[:-_KEPT_CHECKPOINTS]:
            old_checkpoint.unlink()

    def _checkpoints(self) -> list[Path]:
        """Return the paths of all checkpoints by ascending step."""
        return list_by_step(self.state / "checkpoints", ".ckpt")

    def _hash_new_metrics(self) -> None:
        """Add the bytes of metrics.jsonl that are not hashed yet to size and hash; a missing file adds none."""
        if self.metrics.exists():
            with open(self.metrics, "rb") as file:
                file.seek(self._metrics_size)
                self._metrics_digest.update(file.read())
                self._metrics_size = file.tell()

    def read_checkpoint(self, step: int, device: Any) -> dict[str, Any]:
        """Return the content of the checkpoint after `step` steps, without a comparison with metrics.jsonl.

        Ranks other than 0 call this, after rank 0 has made the comparison in `resume`.

        Raises:
            DamagedError: the file is damaged.
            OSError: the file is missing or cannot be read.
        """
        return checkpoint.read(self._checkpoint_path(step), device)

    def resume(
        self, latest_step: int, device: Any, environment: dict[str, Any], accept_versions: bool = False
    ) -> dict[str, Any] | None:
        """Return the newest intact checkpoint's content, and cut metrics and timing back to it; None: there is none.

        Checkpoints of later steps are deleted, also damaged ones. Without a checkpoint, the run starts from step 0, and
        metrics and timing become empty. A start from step 0 also deletes all snapshots. Attribute `resumed_under`
        becomes the checkpoint's. The checkpoint's environment is added to it if its last digits may differ. All files
        are unchanged if a KairosError is raised.

        Args:
            latest_step: ignore later checkpoints.
            device: device of its tensors.
            environment: environment of the next steps, see `kairos.training.provenance.describe_environment`.
            accept_versions: accept a checkpoint that other library versions computed.

        Raises:
            KairosError: other library versions computed the checkpoint, and `accept_versions` is False.
        """
        content = self.newest_checkpoint(latest_step, device)
        if content is None:
            self.resumed_under = []
            self._cut_back(metrics_size=0, step=0)
            return None
        self.resumed_under = list(content["resumed_under"])
        before = content["environment"]
        has_other_versions = any(before[name] != environment[name] for name in library_versions())
        if has_other_versions and not accept_versions:
            raise self._version_error(content)
        if changes_bits(before, environment):
            self.resumed_under.append({**before, "steps": content["step"]})
        self._cut_back(content["metrics"]["bytes"], content["step"])
        return content

    def _version_error(self, content: dict[str, Any]) -> KairosError:
        """Return the error for the content of a checkpoint that other library versions computed."""
        now = library_versions()
        before = {name: content["environment"][name] for name in now}
        return KairosError(
            f"{self._checkpoint_path(content['step'])}: computed under {_list_versions(before)}, but "
            f"{_list_versions(now)} is installed, which rounds differently; allowed: the same versions, "
            "--accept-versions (recorded in the provenance), or --restart"
        )

    def _cut_back(self, metrics_size: int, step: int) -> None:
        """Delete metrics, times and checkpoints after the checkpoint at `step`; at step 0, also all snapshots.

        timing.jsonl is created if it is missing.

        Args:
            metrics_size: bytes of metrics.jsonl that the checkpoint covers.
            step: step of the checkpoint; 0 without a checkpoint.
        """
        if self.metrics.exists():
            os.truncate(self.metrics, metrics_size)
        # the next checkpoint hashes the whole file
        self._metrics_size = 0
        self._metrics_digest = hashlib.sha256()
        write_text(self.timing, _lines_up_to(step, self.timing))
        for path in self._checkpoints():
            if int(path.stem) > step:
                path.unlink()
        if step == 0:
            shutil.rmtree(self.state / "snapshots", ignore_errors=True)

    def publish(self, milestones: list[int], record: dict[str, Any] | None, computed_from: dict[str, Any]) -> None:
        """Link the outputs of a request into the run's folder; the record is written last.

        An intact published snapshot with an equal record is left as it is. If there is a record, the outputs include
        the checkpoint as ``checkpoint.pt``, and copies of metrics and times up to its step. The caller ensures that the
        snapshots and the checkpoint exist.

        Args:
            milestones: steps whose snapshots are requested.
            record: content of training.json; ``steps`` selects the checkpoint. None: publish snapshots only.
            computed_from: see `kairos.validity.describe_training`. The records of published snapshots contain it. If
                other code, which was accepted, computed a snapshot, they list the hash of this code under ``accepted``.
        """
        for step in milestones:
            _publish_snapshot(self.snapshot_folder(step), self.out / "snapshots" / step_name(step), computed_from)
        if record is None:
            return
        link_file(self._checkpoint_path(record["steps"]), self.out / "checkpoint.pt")
        # copies, because later jobs append to the originals
        write_text(self.out / self.metrics.name, _lines_up_to(record["steps"], self.metrics))
        write_text(self.out / self.timing.name, _lines_up_to(record["steps"], self.timing))
        write_record(self.out / "training.json", record)


def _list_versions(versions: dict[str, str | None]) -> str:
    """Return library versions as text, such as ``torch 2.4.0, diffusers None``."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _publish_snapshot(snapshot: Path, target: Path, computed_from: dict[str, Any]) -> None:
    """Link the files of a snapshot to `target`, with a record of its own, unless they are there and intact."""
    record = read_record(snapshot / _RECORD)
    in_state = record["computed_from"]
    codes = {*in_state.get("accepted", ()), in_state["code"]} - {computed_from["code"]}
    accepted = {"accepted": sorted(codes)} if codes else {}
    published = {**record, "computed_from": {**computed_from, **accepted}}
    present = glance(target / _RECORD)
    if {**present, "checksum": None} == {**published, "checksum": None} and _is_intact(target):
        return
    with atomic_folder(target) as folder:
        for name in record["files"]:
            link_file(snapshot / name, folder / name)
        # no link: Snakemake may restore an earlier record in place
        write_record(folder / _RECORD, published)


def _is_intact(snapshot: Path) -> bool:
    """Return True if a snapshot exists and is undamaged, by the hashes of its files.

    Damage is logged. A folder without a record is treated as missing, and is not logged.
    """
    if not (snapshot / _RECORD).exists():
        return False
    try:
        check_snapshot(snapshot)
    except KairosError as error:
        log(f"{error}; it is replaced")
        return False
    return True


def _lines_up_to(step: int, path: Path) -> str:
    """Return the text of the entries of metrics.jsonl or timing.jsonl whose step is at most `step`.

    Damaged lines are left out: a power loss may damage the end of a file. Lines of metrics up to a checkpoint are
    intact, because the checkpoint contains their hash.
    """
    return "".join(f"{json.dumps(entry)}\n" for entry in read_entries(path) if entry["step"] <= step)
