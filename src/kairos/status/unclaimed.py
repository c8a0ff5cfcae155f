"""States of trainings that no setting of an experiment leads to any more; nothing else ever deletes them."""

import fcntl
import shutil
from contextlib import suppress
from pathlib import Path

from kairos.files import read_json
from kairos.status.outline import Outline
from kairos.status.trainings import Training, held

_IN_USE = ("running", "starting", "queued")
_DEVICES = {"auto": ("cpu", "cuda")}  # which one it was is not known here


def unclaimed(outline: Outline, trainings: list[Training]) -> list[Path]:
    """Folders of states that are of other settings than the experiment file's, or of other code.

    Those of trainings that run or wait in a queue, maybe with earlier settings, are not among them. Before there are
    latents nothing is known.
    """
    record = outline.results / "latents" / "manifest.json"
    states: dict[Training, list[Path]] = {}
    for each in trainings:
        folder = outline.results / each.method / f"seed{each.seed}" / ".state"
        if each.state not in _IN_USE and not held(folder / "lock"):
            states[each] = [path for path in folder.glob("?" * 16) if path.is_dir()]
    if outline.experiment is None or not record.is_file() or not any(states.values()):
        return []
    from kairos.training.identity import compute_identity

    plain, latents = outline.experiment.plain(), read_json(record)
    device = plain["training"]["device"].partition(":")[0]
    kinds, found = _DEVICES.get(device, (device,)), []
    for each, paths in states.items():
        claimed = [compute_identity(plain, each.method, each.seed, latents, kind)["identity"][:16] for kind in kinds]
        found += [path for path in paths if path.name not in claimed]
    return found


def freed(states: list[Path]) -> int:
    """Bytes that deleting them frees: what is published by hard link stays."""
    files = (file.stat() for state in states for file in state.rglob("*") if file.is_file())
    return sum(file.st_size for file in files if file.st_nlink == 1)


def remove(states: list[Path]) -> None:
    """Delete states, but those of a training that a process works on."""
    for state in states:
        with suppress(BlockingIOError), open(state.parent / "lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(state)
