"""Pretrained networks in a folder or in the Hugging Face cache of this machine, and their download from the hub."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kairos.files import read_json
from kairos_timesteps.errors import ConfigError, KairosError


def is_hub_id(path: str) -> bool:
    """Return True if a text has the form of a hub id, OWNER/NAME, and there is no folder with this path."""
    if path.count("/") != 1 or Path(path).is_dir():
        return False
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(path)  # rejects ./folder and ../folder, too
    except HFValidationError:
        return False
    return True


def download_files(path: str, files: Iterable[str], cached: bool = False) -> Path:
    """Download files of a network into the Hugging Face cache, and return their folder there.

    Files that the cache has already are not downloaded again. If the hub cannot be reached, a copy in the cache is
    returned, which may lack files.

    Args:
        path: hub id of the network.
        files: names of the files; files that do not exist on the hub are skipped.
        cached: download nothing, and return the folder in the cache, which may lack files.

    Raises:
        KairosError: the cache has no copy, and the hub cannot be reached, rejects the request, or `cached` is set.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=list(files), local_files_only=cached))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        one_line = " ".join(str(error).split())
        raise KairosError(one_line[:300]) from None


def find_network_folder(path: str, field: str, files: Iterable[str], needed: str) -> Path:
    """Return `path` if it is a folder; otherwise download the files of this hub id, and return their folder.

    The function does not check that the folder contains the files.

    Args:
        path: a folder, or a hub id.
        field: field of the experiment file that contains the path, for error messages.
        files: names of the files to download, as far as they exist.
        needed: description of the files that must be in the folder, for error messages.

    Raises:
        ConfigError: the path is neither a folder nor a hub id.
        KairosError: the cache has no copy, and the hub cannot be reached or rejects the request. The message contains
            the advice to run `kairos fetch`.
    """
    if Path(path).is_dir():
        return Path(path)
    if not is_hub_id(path):
        raise ConfigError(
            f"{field}: got {path!r}, allowed: a folder that exists, or a hub id OWNER/NAME; with {needed}"
        )
    try:
        return download_files(path, files)
    except KairosError as error:
        raise KairosError(
            f"{field}: {path!r} is not a folder and cannot be downloaded from the hub ({error}). `kairos fetch` "
            f"brings it where there is a network; or put {needed} into a folder and set {field} to it"
        ) from None


def is_available(path: str, file: str = "config.json") -> bool:
    """Return True if a network's folder, or the Hugging Face cache for a hub id, contains a file.

    The file is not read, and nothing is downloaded.
    """
    return _find_file(path, file) is not None


def read_network_config(path: str) -> dict[str, Any]:
    """Return the content of a network's config.json; empty if the file is absent. Nothing is downloaded.

    `path` is a local folder, or a hub id, whose file is read in the Hugging Face cache.

    Raises:
        DamagedError: the file does not contain an object in JSON.
    """
    file = _find_file(path, "config.json")
    return {} if file is None else read_json(file)


def _find_file(path: str, file: str) -> Path | None:
    """Return the path of a file in a network's folder, or in the Hugging Face cache for a hub id; None without it."""
    if not is_hub_id(path):
        in_folder = Path(path, file)
        return in_folder if in_folder.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(path, file)  # the path; or None, or a mark that the hub has no such file
    return Path(cached) if isinstance(cached, str) and Path(cached).is_file() else None
