"""Stage text: all captions of a data set go through the text encoder once, so that trainings never run it.

A killed stage goes on where it was, see `resumable_arrays`.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from kairos import resource_usage
from kairos.data.dataset import PreparedDataset
from kairos.data.resumable_arrays import fill_arrays, prepare_folder, publish_arrays
from kairos.files import sha256_file, sha256_json, sync_folder
from kairos.fingerprint import fingerprint
from kairos.progress import say
from kairos.text_encoders.encoder import load_encoder
from kairos.text_encoders.settings import TextEncoderConfig
from kairos_timesteps.errors import KairosError

_COUNTED = 4096  # texts whose tokens are counted at a time


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
    resource_usage.end_startup()
    captions, count = dataset.captions, len(dataset.captions)
    parts = (captions.texts(range(start, min(start + _COUNTED, count))) for start in range(0, count, _COUNTED))
    lengths = np.concatenate([encoder.tokens(texts) for texts in parts])
    over = np.flatnonzero(lengths > encoder.length)
    if len(over):
        said = f"{len(over)} of {count} captions have more than {encoder.length} tokens"
        if config.too_long == "refuse":
            example = captions.texts(over[:1])[0]
            raise KairosError(
                f"text_encoder.too_long: got refuse, but {said}, the first: {example!r}; allowed: truncate"
            )
        say(f"text: {said} and are cut off")
    empty = encoder([""]).numpy()
    shape, dtype = empty.shape[1:], np.dtype(config.dtype)
    identity = {
        "encoder": encoder.sha256,
        "dataset": dataset.manifest["content_sha256"],
        **config.model_dump(include={"output", "batch_size", "dtype"}),
        "length": encoder.length,
        "threads": torch.get_num_threads(),
        "device": device.type,
        "torch": torch.__version__,
        "code": fingerprint([__name__]),
    }
    partial = prepare_folder(out, ("states.npy", "empty.npy"))

    def compute(numbers: np.ndarray) -> dict[str, np.ndarray]:
        return {"states": encoder(captions.texts(numbers)).numpy().astype(dtype)}

    arrays = {"states": (shape, dtype)}
    files = fill_arrays(partial, identity, arrays, range(count), config.batch_size, compute, "text", "caption")
    np.save(partial / "empty.npy", empty)
    sync_folder(partial / "empty.npy")
    files["empty.npy"] = sha256_file(partial / "empty.npy")
    manifest = {
        "count": count,
        "condition": {"kind": "text", "shape": list(shape), "null": config.dropped, "encoder": encoder.sha256},
        "dtype": config.dtype,
        "output": config.output,
        "dataset_sha256": dataset.manifest["content_sha256"],
        "files": files,
    }
    manifest["content_sha256"] = sha256_json(manifest)  # everything above decides what a training reads
    manifest |= {"length": encoder.length, "longest": int(lengths.max()), "truncated": len(over)}
    publish_arrays(out, manifest)
    return manifest
