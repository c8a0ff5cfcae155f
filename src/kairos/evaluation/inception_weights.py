"""Published weights of extractors: the path of torch-fidelity's Inception weights, and downloads.

No torch here. Downloads do not use `torch.hub`, which needs torch and has no time limit.
"""

import http.client
import math
import os
import re
import urllib.error
import urllib.request
from pathlib import Path

from kairos.files import atomic, sha256_file
from kairos.pretrained import is_available, is_hub_id
from kairos.progress import ProgressBar
from kairos_timesteps.errors import KairosError

URL = "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth"
NAME = URL.rsplit("/", 1)[1]
_CHUNK = 2**18  # bytes
_TIMEOUT_S = 60.0  # without a byte until a download fails


def default_path() -> Path:
    """Return the path to which torch-fidelity downloads the weights, in `torch.hub`'s folder; it may be missing."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = Path(os.environ.get("TORCH_HOME", f"{cache}/torch")).expanduser()
    return home / "hub" / "checkpoints" / NAME


def find_weights(configured: str | None) -> tuple[Path, bool]:
    """Return the path of the weights, and True if the file exists; if not, the caller may download it to this path.

    Nothing is downloaded here. `configured` replaces the default path; a missing file there is an error, as it is never
    downloaded.

    Raises:
        KairosError: the file is missing and cannot be downloaded; the message contains URL and path.
    """
    path = Path(configured) if configured else default_path()
    if path.is_file():
        return path, True
    if configured:  # a file of the user is never downloaded
        raise KairosError(missing_weights_message(path, "the file does not exist"))
    if _offline():
        raise KairosError(missing_weights_message(path, "the file does not exist, and HF_HUB_OFFLINE is set"))
    return path, False


def find_network(path: str) -> tuple[str, bool]:
    """Return the path or hub id of a network of transformers, and True if its files are in the folder or hub cache.

    A folder needs config.json, and a network of the cache model.safetensors. Other files are not checked. Nothing is
    downloaded.

    Raises:
        KairosError: files are missing and cannot be downloaded; the message contains the expected files.
    """
    decisive_file = "config.json" if Path(path).is_dir() else "model.safetensors"
    if is_available(path, decisive_file):
        return path, True
    if not is_hub_id(path):
        reason = "the folder has no config.json" if Path(path).is_dir() else "the folder does not exist"
        raise KairosError(missing_network_message(path, reason))
    if _offline():
        reason = "it is not in the Hugging Face cache, and HF_HUB_OFFLINE is set"
        raise KairosError(missing_network_message(path, reason))
    return path, False


def _offline() -> bool:
    """Return True if environment variable HF_HUB_OFFLINE forbids downloads: it is set, and neither empty nor 0."""
    return os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")


def missing_network_message(path: str, reason: str) -> str:
    """Return the error message for a user without the DINOv2 network.

    Args:
        path: folder or hub id of the network.
        reason: clause such as "the folder does not exist".
    """
    return (
        f"evaluation.extractor: dinov2 needs the network {path} (config.json, model.safetensors), but {reason}. Run "
        "`kairos fetch` on a machine with a network, or put the files of facebook/dinov2-large into a folder and set "
        "evaluation.extractor.path to it"
    )


def missing_weights_message(path: Path, reason: str) -> str:
    """Return the error message for a user without the weights of Inception.

    Args:
        path: path of the weights.
        reason: clause such as "the file does not exist".
    """
    return (
        f"evaluation.extractor: inception needs the weights {path}, but {reason}. Run `kairos fetch` on a machine with "
        f"a network; or put the file from {URL} there, or set evaluation.extractor.path to it; extractors classifier "
        "and selfsupervised need no weights"
    )


def matches_hash_in_name(path: Path, name: str = "") -> bool:
    """Return True if the SHA-256 of a file begins with the hex digits in its name, or if the name has no digits.

    The digits, eight or more, have the form ``-6726825d.pth``. `name`, unless it is empty, replaces the file's name.
    """
    digest = re.search(r"-([0-9a-f]{8,})\.", name or path.name)
    return digest is None or sha256_file(path).startswith(digest[1])


def download(url: str, path: Path) -> None:
    """Download a file atomically and check it against the hash in its name, the URL's last part.

    An error leaves `path` as it was. If the server does not send the size, only the hash detects a file that ends
    early; a file whose name has no hash is then accepted. Messages report the progress.

    Raises:
        KairosError: the server does not answer or has no such file, or the file is incomplete or has another hash.
        OSError: the file cannot be written.
    """
    name = url.rsplit("/", 1)[1]
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response, atomic(path) as file:
            size = int(response.headers.get("Content-Length") or 0)  # bytes; 0: unknown
            progress = ProgressBar(_mebibytes(size), f"fetch {name}", "MiB")
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                progress.advance(_mebibytes(file.tell()) - progress.done)  # since the last call
            progress.close()
            # errors inside the context keep the file from appearing at `path`
            file.flush()  # before the file is hashed
            if size and file.tell() != size:
                raise KairosError(f"it ended after {file.tell()} of {size} bytes")
            if not matches_hash_in_name(Path(file.name), name):
                raise KairosError("its content does not match the hash in its name")
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None)  # a URLError has one; its text adds "<urlopen error ...>"
        raise KairosError(f"{reason or error}") from None


def _mebibytes(size: int) -> int:
    """Return a number of bytes in MiB, rounded up."""
    return math.ceil(size / 2**20)
