"""Checkpoints: everything a training goes on from, in one file that is whole or recognised as damaged.

A file is one line, ``kairos-checkpoint 1 <sha256 of the rest> <length of the rest>``, and what torch.save writes. It
holds no clock and no path, so the same training gives the same bytes.
"""

import hashlib
import io
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kairos.files import atomic
from kairos_timesteps.errors import DamagedError

_MAGIC = "kairos-checkpoint 1"
COMPONENTS = ("model", "ema", "optimizer", "strategy")


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint atomically: temporary file, fsync, rename."""
    buffer = io.BytesIO()
    torch.save(_alike(content), buffer)
    payload = buffer.getbuffer()
    digest = hashlib.sha256(payload).hexdigest()
    with atomic(path) as file:
        file.write(f"{_MAGIC} {digest} {len(payload)}\n".encode())
        file.write(payload)


def _alike(value: Any) -> Any:
    """Equal content as equal bytes: pickle tells one text twice from two equal ones, such as those that were read."""
    if isinstance(value, dict):
        return {_alike(key): _alike(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_alike(each) for each in value)
    return sys.intern(value) if isinstance(value, str) else value


def read(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read a checkpoint and check it.

    Raises:
        DamagedError: it is no checkpoint, ends early, or its content does not match its checksum.
    """
    with open(path, "rb") as file:
        head = file.readline(200).decode("ascii", errors="replace").split()
        payload = file.read()
    if head[:2] != _MAGIC.split() or len(head) != 4 or not head[3].isdigit():
        raise DamagedError(f"{path}: not a checkpoint of kairos")
    if len(payload) != int(head[3]):
        raise DamagedError(f"{path}: damaged: {len(payload)} bytes of {head[3]}")
    if hashlib.sha256(payload).hexdigest() != head[2]:
        raise DamagedError(f"{path}: damaged: the content does not match its checksum")
    return torch.load(io.BytesIO(payload), map_location=device, weights_only=True)


def component_hashes(content: dict[str, Any]) -> dict[str, str]:
    """SHA-256 of each component of a checkpoint, over names, types, shapes and bytes of all its values."""
    return {name: _hash_value(content[name]) for name in COMPONENTS}


def _hash_value(value: Any) -> str:
    digest = hashlib.sha256()
    _feed(digest, value)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        array = value.detach().cpu().contiguous()
        digest.update(array.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            digest.update(f"{{{key}:".encode())
            _feed(digest, value[key])
    elif isinstance(value, (list, tuple)):
        digest.update(f"[{len(value)}".encode())
        for item in value:
            _feed(digest, item)
    else:
        digest.update(repr(value).encode())
