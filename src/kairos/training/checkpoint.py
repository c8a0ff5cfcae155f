"""Checkpoints: the resumable state of a training run in one file, whose damage is detected.

A file is the line ``kairos-checkpoint 1 <sha256 of the rest> <length of the rest>``, followed by the output of
torch.save. It contains no time and no path, so equal runs give equal bytes.
"""

import hashlib
import io
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kairos.files import DamagedError, atomic

_MAGIC = "kairos-checkpoint 1"  # begins every file: name and version of the format
_LONGEST_HEADER = 200  # bytes; a file that is not a checkpoint may lack a newline
# keys of a checkpoint's content whose values decide the next steps; other keys hold metadata
COMPONENTS = ("model", "ema", "optimizer", "strategy")


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint atomically: temporary file, fsync, rename. Equal contents give equal bytes.

    Args:
        path: file of the checkpoint; missing parent folders are created.
        content: nested dictionaries, lists and tuples of tensors, numbers, texts and None.
    """
    buffer = io.BytesIO()
    torch.save(_intern_strings(content), buffer)
    payload = buffer.getbuffer()
    digest = hashlib.sha256(payload).hexdigest()
    with atomic(path) as file:
        file.write(f"{_MAGIC} {digest} {len(payload)}\n".encode())
        file.write(payload)


def _intern_strings(value: Any) -> Any:
    """Return a copy of a nested value with equal strings as one object, so that equal content pickles to equal bytes.

    pickle writes a string object once and refers to it later, but writes two equal objects, such as restored ones,
    twice. Every dictionary, such as torch's OrderedDict, becomes a plain one. Tensors are not copied.
    """
    if isinstance(value, dict):
        return {_intern_strings(key): _intern_strings(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_intern_strings(item) for item in value)
    return sys.intern(value) if isinstance(value, str) else value


def read(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return the content of a checkpoint after checking its length and hash; code in the file is not executed.

    Args:
        path: file of the checkpoint.
        device: device of the tensors.

    Raises:
        DamagedError: the file is not a checkpoint, ends early, or its content does not match its checksum.
        OSError: the file is missing or cannot be read.
    """
    with open(path, "rb") as file:
        header_words = file.readline(_LONGEST_HEADER).decode("ascii", errors="replace").split()
        payload = file.read()
    # "kairos-checkpoint", "1", digest, length
    has_header = len(header_words) == 4 and header_words[:2] == _MAGIC.split() and header_words[3].isdigit()
    if not has_header:
        raise DamagedError(f"{path}: not a checkpoint of kairos")
    digest, length = header_words[2:]
    if len(payload) != int(length):
        raise DamagedError(f"{path}: damaged: {len(payload)} bytes of {length}")
    if hashlib.sha256(payload).hexdigest() != digest:
        raise DamagedError(f"{path}: damaged: the content does not match its checksum")
    content: dict[str, Any] = torch.load(io.BytesIO(payload), map_location=device, weights_only=True)
    return content


def component_hashes(content: dict[str, Any]) -> dict[str, str]:
    """Return the SHA-256 of each component of a checkpoint, over names, types, shapes and bytes of all its values.

    The components are ``model``, ``ema``, ``optimizer`` and ``strategy``. Equal values on different devices have equal
    hashes.
    """
    return {name: _hash_value(content[name]) for name in COMPONENTS}


def _hash_value(value: Any) -> str:
    """Return the SHA-256 of a nested value, in hex digits, see `_add_to_digest`; the order of keys does not matter."""
    digest = hashlib.sha256()
    _add_to_digest(digest, value)
    return digest.hexdigest()


def _add_to_digest(digest: Any, value: Any) -> None:
    """Add a nested value to a digest: tensors by type, shape and bytes, dictionaries in the sorted order of their keys.

    A list and a tuple of equal items add equal bytes. Keys are added as text, and other values, such as numbers, by
    their `repr`.
    """
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        array = value.detach().cpu().contiguous()
        digest.update(array.reshape(-1).view(torch.uint8).numpy().tobytes())  # numpy has no bfloat16
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            digest.update(f"{{{key}:".encode())  # the brackets here and below keep different nestings apart
            _add_to_digest(digest, value[key])
    elif isinstance(value, (list, tuple)):
        digest.update(f"[{len(value)}".encode())
        for item in value:
            _add_to_digest(digest, item)
    else:
        digest.update(repr(value).encode())
