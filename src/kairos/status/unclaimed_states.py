"""States with earlier settings or code, which no training run of the experiment uses; nothing else deletes them."""

import fcntl
import shutil
from contextlib import suppress
from pathlib import Path

from kairos.files import read_json
from kairos.status.run_progress import Outline, RunProgress, is_locked, list_names

_ACTIVE = ("running", "starting", "queued")
_DEVICE_TYPES = {"auto": ("cpu", "cuda")}  # device types that a setting may select


def find_unclaimed_states(outline: Outline, runs: list[RunProgress]) -> list[Path]:
    """Return the folders of states whose settings or code differ from the experiment's; sorted for each run.

    States of runs that are active, or whose lock is held, are left out, because such a run may have earlier settings.
    States of methods and seeds that are not in `runs` are not found. The list is empty without latents, since
    identities depend on them, or if only a folder of results is known.

    Raises:
        ConfigError: the weights of ``training.start_from`` are missing, and a run that is not active has states.
    """
    latents_manifest = outline.results / "latents" / "manifest.json"
    if outline.experiment is None or not latents_manifest.is_file():
        return []
    states_by_run: dict[RunProgress, list[Path]] = {}
    for run in runs:
        folder = outline.run_folder(run.method, run.seed) / ".state"
        if run.state not in _ACTIVE and not is_locked(folder / "lock"):
            states = _list_states(folder)
            if states:
                states_by_run[run] = states
    if not states_by_run:
        return []
    from kairos.training.identity import compute_identity  # imports the registries, which most calls do not need

    latents = read_json(latents_manifest)
    device = outline.experiment.training.device.partition(":")[0]  # cuda:1 has type cuda
    device_types = _DEVICE_TYPES.get(device, (device,))
    unclaimed = []
    for run, states in states_by_run.items():
        settings = outline.experiment.run_settings(run.method, run.seed)
        for device_type in device_types:
            if not states:  # most runs have one state, of the first type: the other identity is not needed
                break
            identity = compute_identity(settings, latents, device_type)["identity"]
            # a state's folder is named by the first digits of the identity
            states = [state for state in states if state.name != identity[:16]]
        unclaimed += states
    return unclaimed


def _list_states(folder: Path) -> list[Path]:
    """Return the folders of states in the folder of a run's states, sorted; empty without a folder.

    Names of states have 16 characters.
    """
    states = (folder / name for name in list_names(folder) if len(name) == 16)
    return [state for state in states if state.is_dir()]


def count_freed_bytes(states: list[Path]) -> int:
    """Return the bytes that deleting states frees; published files, which are hard links, remain."""
    files = (file.stat() for state in states for file in state.rglob("*") if file.is_file())
    return sum(file.st_size for file in files if file.st_nlink == 1)


def delete_states(states: list[Path]) -> list[Path]:
    """Delete the folders of states, except states of a run that a process is training; return the deleted ones.

    The lock of the run is held meanwhile, so that no process begins to train it; its file is created if it is missing.
    """
    deleted = []
    for state in states:
        with suppress(BlockingIOError), open(state.parent / "lock", "a") as lock:  # the error: the lock is held
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(state)
            deleted.append(state)
    return deleted
