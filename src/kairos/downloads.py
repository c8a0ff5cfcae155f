"""Downloads, before jobs start, of everything that the jobs would need a network for: most compute nodes have none.

Downloads go where jobs look with hub access off (``HF_HUB_OFFLINE=1``): the caches of the Hugging Face hub and of
torch. Each download is complete or absent: the hub's client, `datasets` and `evaluation.inception_weights` write files
under temporary names and rename them.
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
from kairos.evaluation.settings import ClipOptions, DinoOptions, InceptionOptions
from kairos.files import DamagedError, read_json, sha256_file
from kairos.pretrained import download_files, is_available, is_hub_id
from kairos.progress import log
from kairos.text_encoders.settings import FILES, PREPROCESSOR, WEIGHTS
from kairos_timesteps.errors import KairosError

OFFLINE = "HF_HUB_OFFLINE"  # environment variable that switches hub access off
_CONFIG = "config.json"
# file of a network's weights, and field of its config.json that contains the kind of network
_DIFFUSERS = ("diffusion_pytorch_model.safetensors", "_class_name")
_TRANSFORMERS = ("model.safetensors", "model_type")
_FORMER_WEIGHTS = WEIGHTS[1]  # older networks of transformers have this file alone


@dataclass(frozen=True)
class Requirement:
    """A data set, network or file that jobs read and that may have to be downloaded.

    Attributes:
        name: name in messages.
        find: function that verifies the files and returns their location, or None if they are missing; raises
            KairosError if they cannot be used.
        download: function that downloads the files; None if the user must provide them.
        advice: advice to the user if the files cannot be downloaded.
        exists: function that returns True if the files exist, without reading them; None: `find` is fast.
    """

    name: str
    find: Callable[[], str | None]
    download: Callable[[], None] | None
    advice: str
    exists: Callable[[], bool] | None = None

    def locate(self, download: bool = False) -> tuple[str | None, str]:
        """Return the location of the files and ""; or None and the message of a KairosError of `find` or `download`.

        The message is "" if the files are missing without an error, also after a download. Other errors are raised.

        Args:
            download: log a message and download missing files, unless the user must provide them.
        """
        try:
            location = self.find()
            if location is None and download and self.download is not None:
                log(f"fetch: {self.name}")
                self.download()
                location = self.find()
        except KairosError as error:
            return None, str(error)
        return location, ""

    def describe_absence(self, problem: str = "") -> str:
        """Return why the files are absent: `problem`, the second result of `locate`, unless it is empty.

        Otherwise the files are missing, and the text contains the remedy, as in ``not here; kairos fetch brings it``.
        """
        if problem:
            return problem
        remedy = "kairos fetch brings it" if self.download else self.advice
        return f"not here; {remedy}"


def list_requirements(experiment: Experiment) -> list[Requirement]:
    """Return the data sets, networks and captions that the jobs of an experiment read from outside the results folder.

    The order is: data sets, a pretrained autoencoder, files of captions, a text encoder, CLIP if the metrics list it,
    and the weights of the extractor (Inception or DINOv2). Digits are part of scikit-learn and not included. Neither
    are lists of images, an ``.npz`` reference, plugins, and the weights of `training.start_from`. The files are not
    looked for.
    """
    sections = [section for section in experiment.dataset.sections if section.source != "digits"]
    requirements = [_dataset(section) for section in sections]
    requirements += _networks_and_captions(experiment)
    extractor = experiment.evaluation.extractor
    if isinstance(extractor, InceptionOptions):
        requirements.append(_inception(extractor.path, experiment.evaluation.needs_logits))
    if isinstance(extractor, DinoOptions):
        requirements.append(_network("DINOv2", extractor.path, "evaluation.extractor.path", _TRANSFORMERS))
    return requirements


def warn_of_missing(experiment: Experiment) -> list[str]:
    """Return a line of text for each missing input of an experiment that `Experiment.resolve` does not check.

    These inputs are held-out images in files, and the requirements of `_networks_and_captions`. Networks are looked for
    but not read, since they may have gigabytes. Held-out images on the hub are not checked.
    """
    _, *heldout_sections = experiment.dataset.sections  # the first section has the training images
    requirements = [_dataset(section) for section in heldout_sections if section.source not in ("digits", "hub")]
    requirements += _networks_and_captions(experiment)
    warnings = []
    for requirement in requirements:
        if requirement.exists is not None:
            is_present = requirement.exists()
        else:
            is_present = requirement.find() is not None
        if not is_present:
            warnings.append(f"warning: {requirement.name}: {requirement.describe_absence()}")
    return warnings


def _networks_and_captions(experiment: Experiment) -> list[Requirement]:
    """Return the requirements of an experiment other than its images and its feature extractor.

    They are, in this order and as far as the experiment has them: a pretrained autoencoder, files of captions, a text
    encoder, and CLIP for a metric. Without configured metrics CLIP is not needed.
    """
    requirements = []
    if experiment.autoencoder.kind == "pretrained":
        path = experiment.autoencoder.path
        requirements.append(_network("autoencoder", path, "autoencoder.path", _DIFFUSERS))
    requirements += [_captions(path) for path in experiment.dataset.caption_files]
    if experiment.text_encoder is not None:
        path = experiment.text_encoder.path
        requirements.append(_network("text encoder", path, "text_encoder.path", _TRANSFORMERS, FILES))
    for metric in experiment.evaluation.metrics or ():
        if isinstance(metric, ClipOptions):
            files = (*FILES, PREPROCESSOR)
            field = "evaluation.metrics: clip.path"
            requirements.append(_network("CLIP", metric.path, field, _TRANSFORMERS, files))
    return requirements


def _captions(path: str) -> Requirement:
    """Return the requirement of a file of captions, which the user must provide; its content is not checked."""
    return Requirement(
        name=f"captions {path}",
        find=lambda: path if os.path.isfile(path) else None,
        download=None,
        advice="put the file there, or set dataset.captions to where it is",
    )


def _dataset(dataset: DatasetConfig) -> Requirement:
    """Return the requirement of a data set, which is on the hub, or in files that the user must provide.

    The path of files may be a pattern such as ``images/*.parquet``. They count as present if the path exists or a file
    matches, and are not read. The caller ensures that the source is not ``digits``, which has no path.
    """
    if dataset.source == "hub":
        return _hub_dataset(str(dataset.path), dataset.split)
    path = str(dataset.path)

    def find() -> str | None:
        return path if os.path.exists(path) or glob.glob(path, recursive=True) else None

    return Requirement(
        name=f"data set {path}",
        find=find,
        download=None,
        advice="put the files there, or set dataset.path to where they are",
    )


def _hub_dataset(path: str, split: str) -> Requirement:
    """Return the requirement of a data set on the hub; `find` and `download` load the data set in another process.

    `find` loads it from the cache alone, and treats any error as missing files. `download` loads it with access to the
    hub, which fills the cache, and raises KairosError with the message of any error.
    """

    def find() -> str | None:  # with hub access off, like a job
        succeeded, row_count = _load_in_subprocess(path, split, offline=True)
        return f"in the Hugging Face cache, {row_count} rows" if succeeded else None

    def download() -> None:
        succeeded, error = _load_in_subprocess(path, split, offline=False)
        if not succeeded:
            raise KairosError(error)

    advice = (
        "on a machine with a network, run kairos fetch and copy its Hugging Face cache (HF_HOME), or fetch the "
        "parquet files and set dataset.source: parquet and dataset.path to them"
    )
    return Requirement(name=f"data set {path} ({split})", find=find, download=download, advice=advice)


# program that prints the number of rows of a data set, or an error in one line
_LOAD_DATASET = """
import sys
try:
    from datasets import load_dataset
    print(len(load_dataset(sys.argv[1], split=sys.argv[2])))
except Exception as error:
    print(" ".join(f"{type(error).__name__}: {error}".split())[:300])
    sys.exit(1)
"""


def _load_in_subprocess(path: str, split: str, offline: bool) -> tuple[bool, str]:
    """Load a split of a hub data set in another process; return True and the number of rows, or False and the error.

    Number and error are texts. The error has at most 300 characters, and is empty if the process was killed. With
    `offline`, the cache alone is used and nothing is shown; otherwise the progress of downloads is on stderr.
    """
    # another process, because hub access can only be switched before `datasets` is imported
    environment = {name: value for name, value in os.environ.items() if name != OFFLINE}
    if offline:
        environment[OFFLINE] = "1"
    command = [sys.executable, "-c", _LOAD_DATASET, path, split]
    stderr = subprocess.DEVNULL if offline else None  # None: stderr of this process, for the progress of a download
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True, check=False)
    return result.returncode == 0, result.stdout.strip()


def _network(
    kind: str, path: str | None, field: str, layout: tuple[str, str], further_files: tuple[str, ...] = ()
) -> Requirement:
    """Return the requirement of a network, which can be downloaded from the hub, or is in a folder of the user.

    This function reads no file. `find` of the result verifies the files (`_verify_network`), and `exists` only looks
    for the configuration.

    Args:
        kind: kind of network, for messages.
        path: the folder, or the hub id; the check of the experiment file ensures that it is not None.
        field: field of the experiment file that contains the path.
        layout: `_DIFFUSERS` or `_TRANSFORMERS`: file of the weights, and field of config.json with the kind of network.
            Existing weights in the older file `_FORMER_WEIGHTS` are accepted too.
        further_files: further files to download, as far as they exist, such as files of a tokenizer. Only with further
            files are weights in the older file downloaded, if the hub has no others.
    """
    path = str(path)
    weights_file, _ = layout
    files = [_CONFIG, weights_file, *further_files]
    needed_files = f"{_CONFIG} and {weights_file}"
    if further_files:
        needed_files += " and its tokenizer"

    def find() -> str | None:
        try:
            folder = download_files(path, files, cached=True) if is_hub_id(path) else Path(path)
        except KairosError:  # the cache has no copy
            return None
        return _verify_network(folder, layout)

    def download() -> None:
        folder = download_files(path, files)
        if further_files and not (folder / weights_file).is_file():
            download_files(path, [_FORMER_WEIGHTS])  # an older network has no weights file of the layout

    return Requirement(
        name=f"{kind} {path}",
        find=find,
        download=download if is_hub_id(path) else None,
        advice=f"put {needed_files} into a folder that jobs can read and set {field} to it",
        exists=lambda: is_available(path),
    )


def _verify_network(folder: Path, layout: tuple[str, str]) -> str | None:
    """Return the folder of a network if its configuration and weights are complete; None if one is missing.

    A file in the hub's cache that does not match the hash in its name is deleted and treated as missing. A folder with
    weights in torch's older format alone is returned without a check. The `layout` is `_DIFFUSERS` or `_TRANSFORMERS`.

    Raises:
        KairosError: a file is damaged, there are no weights in it, or config.json lacks the kind of network.
    """
    from safetensors import SafetensorError, safe_open

    weights_file, kind_field = layout
    if not (folder / weights_file).is_file() and (folder / _FORMER_WEIGHTS).is_file():
        return str(folder)  # a file of pickled tensors, which has no header to verify
    for name in (_CONFIG, weights_file):
        file = (folder / name).resolve()  # in the hub's cache a link to a file that is named by its hash
        if not file.is_file():
            return None
        has_hash_as_name = re.fullmatch(r"[0-9a-f]{64}", file.name) is not None
        if has_hash_as_name and sha256_file(file) != file.name:
            file.unlink()  # the hub's client would consider it complete
            return None
    try:
        with safe_open(folder / weights_file, framework="numpy") as tensors:  # compares the header with the file's size
            is_empty = not tensors.keys()
        kind = read_json(folder / _CONFIG).get(kind_field)
    except (SafetensorError, DamagedError) as error:
        raise KairosError(f"{folder}: damaged: {error}") from None
    if is_empty or not kind:
        raise KairosError(f"{folder}: no network with {kind_field} in its {_CONFIG}, or a damaged one")
    return str(folder)


def _inception(configured: str | None, needs_last_layer: bool) -> Requirement:
    """Return the requirement of the Inception weights at the path `configured`, or at the default path if it is None.

    Only weights at the default path can be downloaded, and only their name contains a hash: a file there with another
    hash is treated as missing. The name of a configured file is not checked, as in `inception_weights.find_weights`,
    since its digits may be a date. Weights without the last layer cannot be used if `needs_last_layer` is True.
    """
    path = Path(configured) if configured else inception_weights.default_path(needs_last_layer)
    advice = f"put the file from {inception_weights.URL} there: {path}"

    def find() -> str | None:
        # a download may change the default path
        current = Path(configured) if configured else inception_weights.default_path(needs_last_layer)
        if not current.is_file():
            return None
        if needs_last_layer and current.name == inception_weights.NAME_WITHOUT_LAST_LAYER:
            raise KairosError(inception_weights.missing_last_layer_message())
        is_accepted = bool(configured) or inception_weights.matches_hash_in_name(current)
        return str(current) if is_accepted else None

    def download() -> None:
        inception_weights.download_weights(needs_last_layer)

    return Requirement(
        name="Inception weights",
        find=find,
        download=None if configured else download,
        advice=advice,
    )
