"""Networks in a folder, or in the Hugging Face hub's cache on this machine, into which the hub brings them."""

import re
from collections.abc import Iterable
from pathlib import Path

from kairos_timesteps.errors import ConfigError, KairosError


def is_hub_id(path: str) -> bool:
    """Return True if a path is no existing folder and has the form of a hub id, OWNER/NAME."""
    return not Path(path).is_dir() and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path) is not None


def download_files(path: str, files: Iterable[str], cached: bool = False) -> Path:
    """The folder of the hub's cache with files of a network, brought unless what is `cached` is asked for.

    Raises:
        KairosError: the hub cannot be reached, or refuses, and the cache has no copy.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=list(files), local_files_only=cached))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise KairosError(" ".join(str(error).split())[:300]) from None


def find_network_folder(path: str, field: str, files: Iterable[str], needed: str) -> Path:
    """The folder that a field of the experiment names.

    Args:
        path: a folder, or a hub id.
        field: its name in messages.
        files: what is fetched where the cache lacks it.
        needed: what must be in the folder, in words.

    Raises:
        ConfigError: the path is neither a folder nor a hub id.
        KairosError: the hub cannot be reached and its cache has no copy.
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
            f"{field}: {path!r} is no folder here and cannot be had from the hub ({error}). `kairos fetch` brings it "
            f"where there is a network; or put {needed} into a folder and set {field} to it"
        ) from None


def is_available(path: str, file: str = "config.json") -> bool:
    """Return True if the folder, or the hub's cache, contains `file` of a network; the file is not read."""
    if not is_hub_id(path):
        return Path(path, file).is_file()
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(path, file), str)
