"""Stage text: encode all captions of a data set once, so that training runs never run the text encoder.

An interrupted stage resumes, see `resumable_arrays`. ``states.npy`` contains a row per caption, of shape
(tokens, width) or (width,), and ``empty.npy`` the row of the empty caption.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from kairos import resource_usage
from kairos.array_shapes import IntegerArray, RowArray
from kairos.data.captions import Captions
from kairos.data.dataset import PreparedDataset
from kairos.data.resumable_arrays import fill_arrays, prepare_folder, publish_arrays
from kairos.files import lock_folder, sha256_file, sha256_json, sync_to_disk
from kairos.finite import demand_finite
from kairos.progress import log
from kairos.stage_keys import hash_modules
from kairos.text_encoders.encoder import TextEncoder, load_encoder
from kairos.text_encoders.settings import TextEncoderConfig
from kairos_timesteps.errors import KairosError

_TOKENIZED_AT_ONCE = 4096  # texts
_REMEDY = "use another text encoder, or download its weights again"


def encode_captions(
    config: TextEncoderConfig, dataset: PreparedDataset, out: Path, device: torch.device
) -> dict[str, Any]:
    """Encode the captions of a data set, write the folder and return its record.

    The folder contains ``states.npy`` (a row per caption, of `text_encoder.dtype`), ``empty.npy`` (the state of the
    empty caption, float32, with one row) and the record. Older results there are deleted before the captions are
    encoded, and an interrupted call resumes. The end of start-up is marked when the encoder is loaded.

    In the record, ``length`` is the number of tokens to which the encoder pads, ``longest`` the tokens of the longest
    caption, and ``truncated`` the number of truncated captions. ``content_sha256`` is the hash of all fields but these.

    Args:
        config: section `text_encoder`, without ``auto``.
        dataset: a prepared data set with captions, at least one.
        out: folder to write; it is created if it is missing.
        device: device of the text encoder.

    Raises:
        KairosError: the data set has no captions, the encoder cannot be loaded, a caption is too long and
            `text_encoder.too_long` is ``refuse``, or another process is writing the folder.
        NotFiniteError: a state is not finite, or too large for `text_encoder.dtype`.
    """
    if dataset.captions is None:
        raise KairosError(f"{dataset.folder}: has no captions; set dataset.captions and make it again: kairos prepare")
    encoder = load_encoder(config, device)
    resource_usage.end_startup()
    captions = dataset.captions
    longest, truncated_count = _check_lengths(captions, encoder, config.too_long)
    empty_states = encoder([""]).numpy()  # states of the empty caption, (1, *shape)
    demand_finite(empty_states, f"text_encoder.path: {config.path}: state of the empty caption", _REMEDY)
    shape = empty_states.shape[1:]
    dtype = np.dtype(config.dtype)

    # write the states into the private folder; a run with equal identity resumes there
    identity = {
        "encoder": encoder.sha256,
        "dataset": dataset.record["content_sha256"],
        **config.model_dump(include={"output", "batch_size", "dtype"}),
        "length": encoder.length,
        "threads": torch.get_num_threads(),
        "device": device.type,
        "torch": torch.__version__,
        "code": hash_modules([__name__]),
    }
    with lock_folder(out):
        partial = prepare_folder(out, ("states.npy", "empty.npy"))

        def compute(indices: IntegerArray) -> dict[str, RowArray]:
            states = encoder(captions.texts(indices)).numpy()
            demand_finite(states, f"text_encoder.path: {config.path}: states of {len(indices)} captions", _REMEDY)
            with np.errstate(over="ignore"):  # the next line reports it
                converted = states.astype(dtype)
            demand_finite(converted, f"text_encoder.dtype: states of {len(indices)} captions as {dtype}", "set float32")
            return {"states": converted}

        files = fill_arrays(
            partial,
            identity,
            arrays={"states": (shape, dtype)},
            rows=range(len(captions)),
            batch_size=config.batch_size,
            compute=compute,
            label="text",
            unit="caption",
        )
        np.save(partial / "empty.npy", empty_states)
        sync_to_disk(partial / "empty.npy")
        files["empty.npy"] = sha256_file(partial / "empty.npy")

        # publish the files with the record
        record = {
            "count": len(captions),
            "condition": {"kind": "text", "shape": list(shape), "null": config.dropped, "encoder": encoder.sha256},
            "dtype": config.dtype,
            "output": config.output,
            "dataset_sha256": dataset.record["content_sha256"],
            "files": files,
        }
        record["content_sha256"] = sha256_json(record)  # the fields above determine the training data
        record |= {"length": encoder.length, "longest": longest, "truncated": truncated_count}
        publish_arrays(out, record)
    return record


def _check_lengths(captions: Captions, encoder: TextEncoder, too_long: str) -> tuple[int, int]:
    """Return the number of tokens of the longest caption, and the number of captions that the encoder truncates.

    Tokens are counted before truncation, with start and end tokens. A message reports the number of captions that will
    be truncated. The caller ensures that there is a caption.

    Raises:
        KairosError: captions would be truncated, and `too_long` is ``refuse``.
    """
    count = len(captions)
    lengths: list[int] = []
    for start in range(0, count, _TOKENIZED_AT_ONCE):
        end = min(start + _TOKENIZED_AT_ONCE, count)
        lengths += encoder.count_tokens(captions.texts(range(start, end)))
    truncated = [index for index, length in enumerate(lengths) if length > encoder.length]
    if truncated:
        fact = f"{len(truncated)} of {count} captions have more than {encoder.length} tokens"
        if too_long == "refuse":
            [example] = captions.texts(truncated[:1])
            raise KairosError(
                f"text_encoder.too_long: got {too_long}, but {fact}, the first: {example!r}; allowed: truncate"
            )
        log(f"text: {fact} and are cut off")
    return max(lengths), len(truncated)
