"""States with earlier settings or code, which no training run of the experiment uses; nothing else deletes them."""

import fcntl
import shutil
from contextlib import suppress
from pathlib import Path

from kairos.files import list_names
from kairos.stages import ENCODE
from kairos.status.run_progress import Outline, RunProgress, is_locked
from kairos.validity import Result, state_folder

_ACTIVE = ("running", "starting", "queued")


def find_unclaimed_states(outline: Outline, runs: list[RunProgress]) -> list[Path]:
    """Return the folders of states whose settings or code differ from the experiment's; in the order of runs and names.

    A state is a folder of checkpoints in ``.state`` of a run, named by the run's identity. States of runs that are
    active, or whose lock is held, are left out: such a run may have earlier settings. The list is empty without
    latents, since identities depend on them, or if only a folder of results is known.

    Raises:
        DamagedError: the record of ``training.start_from`` is damaged.
    """
    validity = outline.validity
    if validity is None or not validity.record(Result(ENCODE.name)):
        return []
    states_by_run: dict[RunProgress, list[Path]] = {}
    for run in runs:
        folder = outline.run_folder(run.method, run.seed) / ".state"
        if run.state not in _ACTIVE and not is_locked(folder / "lock"):
            states = _list_states(folder)
            if states:
                states_by_run[run] = states
    unclaimed_states = []
    for run, states in states_by_run.items():
        identities = validity.identities(run.method, run.seed)
        present_names = {state_folder(Path(), identity).name for identity in identities}
        if present_names:  # otherwise `training.start_from` is missing, and no state is known to be unclaimed
            unclaimed_states += [state for state in states if state.name not in present_names]
    return unclaimed_states


def _list_states(folder: Path) -> list[Path]:
    """Return the folders with a name of 16 characters in ``.state`` of a run: its states, sorted; empty without it."""
    states = (folder / name for name in list_names(folder) if len(name) == 16)
    return [state for state in states if state.is_dir()]


def count_freed_bytes(states: list[Path]) -> int:
    """Return the bytes that deleting states frees: the sizes of all files in their folders without another hard link.

    Published files have a second hard link, outside of the state, and remain.
    """
    freed_bytes = 0
    for state in states:
        for file in state.rglob("*"):
            if file.is_file():
                stat = file.stat()
                if stat.st_nlink == 1:
                    freed_bytes += stat.st_size
    return freed_bytes


def delete_states(states: list[Path]) -> list[Path]:
    """Delete the folders of states, except states of a run that a process is training; return the deleted folders.

    The lock of the run, ``.state/lock``, is held during the deletion, so that no process begins to train the run. The
    file of the lock is created if it is missing.
    """
    deleted = []
    for state in states:
        with suppress(BlockingIOError), open(state.parent / "lock", "a") as lock:  # the error: the lock is held
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(state)
            deleted.append(state)
    return deleted
