"""Stage text: all captions of a data set go through the text encoder once, so that trainings never run it.

A killed stage goes on where it was, see `growing`.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kairos import clock
from kairos.data.dataset import PreparedDataset
from kairos.data.growing import PARTIAL, grow
from kairos.errors import KairosError
from kairos.files import sha256_file, sha256_json, sync_folder, write_json
from kairos.fingerprint import fingerprint
from kairos.progress import say
from kairos.text.encoder import TextEncoder, load_encoder
from kairos.text.settings import TextEncoderConfig

_COUNTED = 4096  # texts whose tokens are counted at a time
_NAMES = ("states.npy", "empty.npy")


def encode_texts(
    config: TextEncoderConfig, dataset: PreparedDataset, out: Path, device: torch.device
) -> dict[str, Any]:
    """Encode the captions of a data set, write the folder and return its manifest.

    Args:
        config: the section, without ``auto``.
        dataset: with captions.
        out: the folder.
        device: where the encoder computes.

    Raises:
        KairosError: there are no captions or no such encoder, or a caption is too long where that is refused.
    """
    if dataset.captions is None:
        raise KairosError(f"{dataset.folder}: has no captions; set dataset.captions and make it again: kairos prepare")
    encoder = load_encoder(config, device)
    clock.work_begins()
    captions, count = dataset.captions, len(dataset.captions)
    longest, truncated = _too_long(config, encoder, captions, count)
    empty = encoder([""]).numpy()
    shape, dtype = empty.shape[1:], np.dtype(config.dtype)
    identity = {
        "encoder": encoder.sha256,
        "dataset": dataset.manifest["content_sha256"],
        **config.model_dump(include={"output", "batch_size", "dtype"}),
        "length": encoder.length,
        "threads": torch.get_num_threads(),
        "device": device.type,
        "code": fingerprint([__name__]),
    }
    out.mkdir(parents=True, exist_ok=True)
    partial = out / PARTIAL
    if (out / "manifest.json").exists():  # complete and asked for again: computed again
        shutil.rmtree(partial, ignore_errors=True)
        (out / "manifest.json").unlink()
    for name in _NAMES:
        (out / name).unlink(missing_ok=True)

    def compute(numbers: np.ndarray) -> dict[str, np.ndarray]:
        return {"states": encoder(captions.texts(numbers)).numpy().astype(dtype)}

    grow(partial, identity, {"states": (shape, dtype)}, range(count), config.batch_size, compute, "text", "caption")
    np.save(partial / "empty.npy", empty)
    for name in _NAMES:
        os.replace(partial / name, out / name)
        sync_folder(out / name)
    sync_folder(out)
    manifest = {
        "count": count,
        "condition": {"kind": "text", "shape": list(shape), "null": config.null},
        "dtype": config.dtype,
        "output": config.output,
        "encoder_sha256": encoder.sha256,
        "dataset_sha256": dataset.manifest["content_sha256"],
        "files": {name: sha256_file(out / name) for name in _NAMES},
    }
    manifest["content_sha256"] = sha256_json(manifest)  # everything above decides what a training reads
    manifest |= {"length": encoder.length, "longest": longest, "truncated": truncated}
    write_json(out / "manifest.json", manifest)
    shutil.rmtree(partial, ignore_errors=True)
    return manifest


def _too_long(config: TextEncoderConfig, encoder: TextEncoder, captions: Any, count: int) -> tuple[int, int]:
    """Tokens of the longest caption and how many captions are cut off, which is said, or refused."""
    longest, over, first = 0, 0, 0
    for start in range(0, count, _COUNTED):
        lengths = np.array(encoder.tokens(captions.texts(range(start, min(start + _COUNTED, count)))))
        if not over and (lengths > encoder.length).any():
            first = start + int((lengths > encoder.length).argmax())
        longest, over = max(longest, int(lengths.max())), over + int((lengths > encoder.length).sum())
    if over and config.too_long == "refuse":
        raise KairosError(
            f"text_encoder.too_long: got refuse, but {over} of {count} captions have over {encoder.length} tokens, "
            f"the first: {captions.texts([first])[0]!r}; allowed: truncate"
        )
    if over:
        say(f"text: {over} of {count} captions have more than {encoder.length} tokens and are cut off")
    return longest, over
