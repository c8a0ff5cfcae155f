"""The private state of a training, ``D/.state/<identity>/``: what it resumes from and what its outputs are linked from.

    checkpoints/0000400.ckpt     the last two
    metrics.jsonl timing.jsonl   lines beyond the checkpoint that is resumed from are cut off
    milestones/0000400/          every milestone reached so far
    complete/0-400.json          a request (its milestones) that has been fulfilled
    complete/0-400.start_over    ... and that is to be computed again

It is no declared output of anything, so it survives what a workflow does to the outputs of failed jobs.
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

from kairos.files import link_file, link_tree, locked, read_json, read_lines, sha256_bytes, write_json, write_text
from kairos.milestones import check_milestone, step_name
from kairos.progress import say
from kairos.training import checkpoint
from kairos.training.provenance import versions
from kairos_timesteps.errors import DamagedError, KairosError

KEPT = 2  # checkpoints: a damaged last one leaves the one before it
_SIGNS = 12  # seconds of watching for signs of life, which a training gives every 5


@contextmanager
def lock_run_folder(folder: Path, wait: bool = False) -> Iterator[None]:
    """Let one process at a time work on a training; the kernel frees the lock when its holder dies, however it dies.

    flock works between processes of a machine, and between machines on NFS (Linux 2.6.12 and later) and other shared
    file systems that were mounted with locks. Where there are none this is an error; where they do not reach to other
    machines, the signs of life of a training on another machine are.

    Args:
        folder: the training's ``.state``.
        wait: wait for another process that trains here instead of refusing.

    Raises:
        KairosError: another process trains here, or the file system has no locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "a+", encoding="utf-8") as file:
        if not locked(file, 1.0, "jobs from training here at once; put results on"):  # onlookers hold it for moments
            file.seek(0)
            other = f"{folder.parent}: another process ({file.read().strip()}) is training here"
            if not wait:
                raise KairosError(other)
            say(f"{other}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        _refuse_another_machine(folder)
        file.truncate(0)
        job = os.environ.get("SLURM_JOB_ID")
        file.write(f"pid {os.getpid()} on {socket.gethostname()}" + (f", SLURM job {job}" if job else ""))
        file.flush()
        yield


def _refuse_another_machine(folder: Path) -> None:
    """Look whether a training on another machine, which did not keep us from the lock, goes on writing.

    Raises:
        KairosError: it does.
    """
    path, seen = folder / "progress.json", 0.0
    for _ in range(_SIGNS):
        try:
            last = read_json(path)
        except (OSError, DamagedError):
            return
        if last["host"] == socket.gethostname() or last["state"] != "running" or time.time() - last["updated"] > 60:
            return
        if seen and seen != last["updated"]:
            other = f"is being trained on {last['host']} (pid {last['pid']})"
            fault = "the file system's lock does not reach this machine; mount it with locks between machines"
            raise KairosError(f"{folder.parent}: {other}, and {fault} (NFS: without nolock or local_lock)")
        seen = last["updated"]
        time.sleep(1)


class RunFolder:
    """The state of one training on disk."""

    def __init__(self, out: Path, identity: str):
        self.out, self.identity = out, identity
        self.folder = out / ".state" / identity[:16]
        self.metrics, self.timing = self.folder / "metrics.jsonl", self.folder / "timing.jsonl"
        self.resumed_under: list[dict[str, Any]] = []  # other versions, with the number of steps computed by then
        self._size, self._digest = 0, hashlib.sha256()  # of the metrics that the last checkpoint goes with

    def start(self, milestones: list[int], part: bool = False) -> list[int]:
        """Prepare for a request; returns those of its milestones that have still to be reached.

        A request that was fulfilled before and is marked, and that is made again, is meant to be computed again.
        Where all milestones are there, the last one's checkpoint is needed too, but not for a `part` of a training.
        """
        self._report_other_states()
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.rglob(".tmp-*"):  # of killed writers; the lock says that none is at work
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        request = self._request(milestones)
        if request.exists() and request.with_suffix(".start_over").exists():
            say(f"{self.out}: complete before and asked for again: starts from step 0")
            self.clear()
        missing = [step for step in milestones if not _whole(self.milestone(step))]
        if missing or part or (self.newest(milestones[-1]) or {}).get("step") == milestones[-1]:
            return missing
        return milestones[-1:]

    def _report_other_states(self) -> None:
        """Say that a new run begins where there are states of other settings, data or code and none of this run."""
        others = [path for path in self.folder.parent.glob("*/checkpoints") if any(path.iterdir())]
        if others and not self.folder.exists():
            what = "settings, data or code differ from those of the state that is here, which is kept"
            say(f"{self.out}: starts a new run from step 0: {what}")

    def newest(self, at_most: int | None = None, device: Any = "cpu") -> dict[str, Any] | None:
        """The newest whole checkpoint (up to step `at_most`) that goes with the metrics; damaged ones are said."""
        for path in sorted((self.folder / "checkpoints").glob("*.ckpt"), reverse=True):
            if at_most is None or int(path.stem) <= at_most:
                try:
                    return self._usable(checkpoint.read(path, device), path)
                except DamagedError as error:
                    say(f"{error}; the one before it is used")
        return None

    def clear(self) -> None:
        """Forget everything about this training."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def _request(self, milestones: list[int]) -> Path:
        return self.folder / "complete" / ("-".join(str(step) for step in milestones) + ".json")

    def milestone(self, step: int) -> Path:
        """Folder of a milestone."""
        return self.folder / "milestones" / step_name(step)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint after `step` steps; the metrics up to here become part of it."""
        if self.metrics.exists():
            with open(self.metrics, "rb") as file:
                file.seek(self._size)
                self._digest.update(file.read())
                self._size = file.tell()
        content = {**state, "step": step, "identity": self.identity}
        content |= {"versions": versions(), "resumed_under": self.resumed_under}
        content["metrics"] = {"bytes": self._size, "sha256": self._digest.hexdigest()}
        path = self._checkpoint(step)
        checkpoint.write(path, content)
        for old in sorted(path.parent.glob("*.ckpt"))[:-KEPT]:
            old.unlink()

    def _checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"{step_name(step)}.ckpt"

    def at(self, step: int, device: Any) -> dict[str, Any]:
        """The checkpoint after `step` steps, which another rank has found whole."""
        return checkpoint.read(self._checkpoint(step), device)

    def resume(self, at_most: int, device: Any, accept_versions: bool = False) -> dict[str, Any] | None:
        """The newest whole checkpoint up to step `at_most`; metrics and timing are cut back to it. None: step 0.

        Raises:
            KairosError: it was computed under other versions, and those are not accepted.
        """
        found = self.newest(at_most, device)
        step = found["step"] if found else 0
        self.resumed_under = list(found["resumed_under"]) if found else []
        if found and found["versions"] != versions():
            if not accept_versions:
                both = (found["versions"], versions())
                before, now = (", ".join(f"{name} {number}" for name, number in each.items()) for each in both)
                allowed = "the same versions, --accept-versions, which the provenance will say, or --restart"
                fault = f"computed under {before}; here is {now}, which rounds differently"
                raise KairosError(f"{self._checkpoint(step)}: {fault}; allowed: {allowed}")
            self.resumed_under.append({**found["versions"], "steps": step})
        self._cut_back(found["metrics"]["bytes"] if found else 0, step)
        return found

    def _usable(self, content: dict[str, Any], path: Path) -> dict[str, Any]:
        if content["identity"] != self.identity:
            raise DamagedError(f"{path}: of another training ({content['identity'][:16]})")
        metrics = self.metrics.read_bytes() if self.metrics.exists() else b""
        size, digest = content["metrics"]["bytes"], content["metrics"]["sha256"]
        if len(metrics) < size or sha256_bytes(metrics[:size]) != digest:
            raise DamagedError(f"{self.metrics}: does not hold the lines that {path.name} goes with")
        return content

    def _cut_back(self, size: int, step: int) -> None:
        """Drop what lies beyond the checkpoint that the training goes on from."""
        if self.metrics.exists():
            os.truncate(self.metrics, size)
        self._size, self._digest = 0, hashlib.sha256()
        write_text(self.timing, _until(step, self.timing))
        for newer in (self.folder / "checkpoints").glob("*.ckpt"):
            if int(newer.stem) > step:
                newer.unlink()
        if step == 0:
            shutil.rmtree(self.folder / "milestones", ignore_errors=True)

    def publish(self, milestones: list[int], record: dict[str, Any] | None) -> None:
        """Write down that a request is fulfilled, and link what it asked for into the training's folder.

        Records come last; without one it is the milestones only.
        """
        write_json(self._request(milestones), {"identity": self.identity, "milestones": milestones})
        for step in milestones:
            target = self.out / "milestones" / step_name(step)
            if not _same(self.milestone(step), target):
                link_tree(self.milestone(step), target)
        if record is None:
            return
        link_file(self._checkpoint(record["steps"]), self.out / "checkpoint.pt")
        for path in (self.metrics, self.timing):  # copies: the state's own go on growing
            write_text(self.out / path.name, _until(record["steps"], path))
        write_json(self.out / "training.json", record)


def _same(source: Path, target: Path) -> bool:
    """Return True if `target` is a complete copy of the milestone `source`, with an equal record."""
    record = target / "milestone.json"
    return record.exists() and record.read_bytes() == (source / "milestone.json").read_bytes() and _whole(target)


def _whole(folder: Path) -> bool:
    """Return True if a milestone exists and is undamaged; log any damage."""
    if not (folder / "milestone.json").exists():
        return False
    try:
        check_milestone(folder)
    except KairosError as error:
        say(f"{error}; it is made again")
        return False
    return True


def _until(step: int, path: Path) -> str:
    """The complete lines of a file that are of no later step."""
    return "".join(f"{line}\n" for line in read_lines(path) if json.loads(line)["step"] <= step)


def read_timing(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a timing file."""
    return [json.loads(line) for line in read_lines(path)]
