"""Downloads of everything that jobs would need a network for, before they start: compute nodes mostly have none.

Everything goes where the jobs look for it with hub access off (``HF_HUB_OFFLINE=1``): the caches of the Hugging Face
hub and of torch. Each download is whole or not there: the hub's own client, `datasets` and
`evaluation.inception_weights` write under other names and rename.
"""

import glob
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kairos.config import Experiment
from kairos.data.settings import DatasetConfig
from kairos.evaluation import inception_weights
from kairos.files import read_json, sha256_file
from kairos.pretrained import download_files, is_available, is_hub_id
from kairos.progress import say
from kairos.text_encoders.settings import FILES, PREPROCESSOR, WEIGHTS
from kairos_timesteps.errors import DamagedError, KairosError

OFFLINE = "HF_HUB_OFFLINE"
_CONFIG = "config.json"
_DIFFUSERS = ("diffusion_pytorch_model.safetensors", "_class_name")  # a network's weights, and what describes its kind
_TRANSFORMERS = ("model.safetensors", "model_type")


@dataclass(frozen=True)
class Need:
    """Something that jobs read.

    Attributes:
        what: its name.
        find: where it is, checked, or None where it is not here; raises KairosError where what is here cannot be used.
        bring: download it; None where that is for the user to do.
        by_hand: what to do where it cannot be brought.
        there: whether something is where it should be, which is not read; None: `find` is as quick.
    """

    what: str
    find: Callable[[], str | None]
    bring: Callable[[], None] | None
    by_hand: str
    there: Callable[[], bool] | None = None

    def look(self, bring: bool = False) -> tuple[str | None, str]:
        """Return the path, after a download if `bring` is set and the file is missing; or None and the problem."""
        try:
            place = self.find()
            if place is None and bring and self.bring is not None:
                say(f"fetch: {self.what}")
                self.bring()
                place = self.find()
        except KairosError as error:
            return None, str(error)
        return place, ""

    def lack(self, fault: str = "") -> str:
        """Return the fault that `look` found; without one, a message that the file is missing, and what to do."""
        return fault or "not here; " + ("kairos fetch brings it" if self.bring else self.by_hand)


def needs(experiment: Experiment) -> list[Need]:
    """Return what an experiment's jobs read from outside its results folder, in the order in which they read it."""
    found = [_dataset(part) for part in experiment.dataset.sections if part.source != "digits"] + _further(experiment)
    extractor = experiment.evaluation.extractor
    if extractor["name"] == "inception":
        found.append(_inception(extractor["path"]))
    if extractor["name"] == "dinov2":
        found.append(_network("DINOv2", extractor["path"], "evaluation.extractor.path", _TRANSFORMERS))
    return found


def lacking(experiment: Experiment) -> list[str]:
    """Return a warning for each missing network or file that `Experiment.resolve` does not check.

    Networks of gigabytes are not read for that.
    """
    parts = [_dataset(part) for part in experiment.dataset.sections[1:] if part.source not in ("digits", "hub")]
    looked = parts + _further(experiment)
    return [f"warning: {need.what}: {need.lack()}" for need in looked if not (need.there or need.find)()]


def _further(experiment: Experiment) -> list[Need]:
    """Return the needs of an experiment other than its images and its feature extractor."""
    found = []
    if experiment.autoencoder.kind == "pretrained":
        found.append(_network("autoencoder", experiment.autoencoder.path, "autoencoder.path", _DIFFUSERS))
    found += map(_captions, experiment.dataset.caption_files)
    if experiment.text_encoder is not None:
        found.append(_network("text encoder", experiment.text_encoder.path, "text_encoder.path", _TRANSFORMERS, FILES))
    for metric in experiment.evaluation.metrics or ():
        if metric["name"] == "clip":
            files = (*FILES, PREPROCESSOR)
            found.append(_network("CLIP", metric["path"], "evaluation.metrics: clip.path", _TRANSFORMERS, files))
    return found


def _captions(path: str) -> Need:
    advice = "put the file there, or set dataset.captions to where it is"
    return Need(f"captions {path}", lambda: path if os.path.isfile(path) else None, None, advice)


def _dataset(dataset: DatasetConfig) -> Need:
    path, split = str(dataset.path), dataset.split
    if dataset.source != "hub":

        def find_files() -> str | None:
            return path if os.path.exists(path) or glob.glob(path, recursive=True) else None

        return Need(f"data set {path}", find_files, None, "put the files there, or set dataset.path to where they are")

    def find() -> str | None:
        """Ask as a job will, with hub access off."""
        good, answer = _rows(path, split, offline=True)
        return f"in the Hugging Face cache, {answer} rows" if good else None

    def bring() -> None:
        good, answer = _rows(path, split, offline=False)
        if not good:
            raise KairosError(answer)

    advice = (
        "on a machine with a network, run kairos fetch and copy its Hugging Face cache (HF_HOME), or fetch the "
        "parquet files and set dataset.source: parquet and dataset.path to them"
    )
    return Need(f"data set {path} ({split})", find, bring, advice)


_ROWS = """
import sys
try:
    from datasets import load_dataset
    print(len(load_dataset(sys.argv[1], split=sys.argv[2])))
except Exception as error:
    sys.exit(print(" ".join(f"{type(error).__name__}: {error}".split())[:300]) or 1)
"""


def _rows(path: str, split: str, offline: bool) -> tuple[bool, str]:
    """Load a hub data set in a process of its own: whether that works, and the number of rows or the error."""
    environment = {name: value for name, value in os.environ.items() if name != OFFLINE}
    environment |= {OFFLINE: "1"} if offline else {}
    command = [sys.executable, "-c", _ROWS, path, split]
    progress = subprocess.DEVNULL if offline else None
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=progress, text=True, check=False)
    return done.returncode == 0, done.stdout.strip()


def _network(kind: str, path: str | None, field: str, form: tuple[str, str], more: tuple[str, ...] = ()) -> Need:
    """A network in a folder, or on the hub, in the form of diffusers or of transformers; `more` where it is there."""
    path = str(path)
    what, files = f"{kind} {path}", [_CONFIG, form[0], *more]
    tokenizer = " and its tokenizer" if more else ""
    advice = f"put {' and '.join(files[:2])}{tokenizer} into a folder that jobs can read and set {field} to it"

    def find() -> str | None:
        try:
            folder = download_files(path, files, cached=True) if is_hub_id(path) else Path(path)
        except KairosError:
            return None
        return _whole(folder, form)

    def bring() -> None:
        folder = download_files(path, files)
        if more and not (folder / form[0]).is_file():
            download_files(path, [WEIGHTS[1]])

    return Need(what, find, bring if is_hub_id(path) else None, advice, lambda: is_available(path))


def _whole(folder: Path, form: tuple[str, str]) -> str | None:
    """The folder, if configuration and weights are there and whole; a blob of the hub's cache is named by its hash."""
    weights_file, described = form
    if not (folder / weights_file).is_file() and (folder / WEIGHTS[1]).is_file():
        return str(folder)
    for name in (_CONFIG, weights_file):
        file = (folder / name).resolve()
        if not file.is_file():
            return None
        if re.fullmatch(r"[0-9a-f]{64}", file.name) and sha256_file(file) != file.name:
            file.unlink()  # the hub's client would take it for whole
            return None
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / weights_file, framework="numpy") as tensors:  # compares its head with its size
            empty = not tensors.keys()
        kind = read_json(folder / _CONFIG).get(described)
    except (SafetensorError, DamagedError) as error:
        raise KairosError(f"{folder}: damaged: {error}") from None
    if empty or not kind:
        raise KairosError(f"{folder}: no network with {described} in its {_CONFIG}, or a damaged one")
    return str(folder)


def _inception(configured: str | None) -> Need:
    path = Path(configured) if configured else inception_weights.default_path()
    advice = f"put the file from {inception_weights.URL} there: {path}"

    def find() -> str | None:
        return str(path) if path.is_file() and inception_weights.matches_hash_in_name(path) else None

    return Need(
        "Inception weights",
        find,
        None if configured else lambda: inception_weights.download(inception_weights.URL, path),
        advice,
    )
