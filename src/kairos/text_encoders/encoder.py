"""Text encoders of transformers: texts of any length to states of one shape.

CLIP's text model is causal and was trained on texts that are padded with their end: it gets no mask, and the states of
the padding are among its tokens, as models that attend to all of them saw it (U-ViT). Its pooled state is that of the
first end of text, behind the last norm and before the projection. Other encoders (T5 and its like) get the mask, and
their pooled state is the mean over it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kairos.files import read_json, sha256_file, sha256_json
from kairos.pretrained import find_network_folder
from kairos.text_encoders.settings import FILES, TOKENIZERS, WEIGHTS, TextEncoderConfig
from kairos_timesteps.errors import ConfigError, KairosError

_CLIP = ("clip", "clip_text_model")
_ENDLESS = 10**6  # what tokenizers without a length of their own say is longer


def network_folder(path: str, field: str, files: tuple[str, ...] = FILES) -> Path:
    """The folder with a network and its tokenizer that a field names, from the hub where it is none here.

    Raises:
        ConfigError: the folder lacks a file, or the path is neither a folder nor a hub id.
        KairosError: the hub cannot be reached and its cache has no copy.
    """
    needed = "config.json, model.safetensors and tokenizer.json (or vocab.json and merges.txt)"
    folder = find_network_folder(path, field, files, needed)
    if not (folder / WEIGHTS[0]).is_file():
        folder = find_network_folder(path, field, WEIGHTS[1:], needed)
    wanted = {"config.json": [["config.json"]], WEIGHTS[0]: [[name] for name in WEIGHTS], "a tokenizer": TOKENIZERS}
    there = {file.name for file in folder.iterdir() if file.is_file()}
    if lacks := [name for name, kinds in wanted.items() if not any(map(there.issuperset, kinds))]:
        raise ConfigError(f"{field}: {path!r} lacks {' and '.join(lacks)}; allowed: a folder with {needed}")
    return folder


def opened(path: Any, kind: Any, field: str, weights: bool = False) -> Any:
    """Open a folder with a class of transformers; any of the many errors of a damaged folder becomes a KairosError.

    Raises:
        KairosError: the folder cannot be opened, or lacks weights, which transformers would initialise at random.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()  # of a network that is read in a second, in a job's log
    try:
        if not weights:
            return kind.from_pretrained(path, local_files_only=True)
        model, found = kind.from_pretrained(path, local_files_only=True, output_loading_info=True)
        if found["missing_keys"]:
            raise ValueError(f"lacks weights: {', '.join(sorted(found['missing_keys'])[:3])} ...")
        return model.eval()
    except Exception as error:
        raise KairosError(f"{field}: {path} cannot be opened ({' '.join(str(error).split())[:300]})") from None


@dataclass(frozen=True)
class TextEncoder:
    """A text encoder ready for use.

    Attributes:
        model, tokenizer: of transformers.
        output: ``tokens`` or ``pooled``.
        length: tokens that texts are padded to.
        sha256: of its files.
        device: where it computes.
    """

    model: Any
    tokenizer: Any
    output: str
    length: int
    sha256: str
    device: torch.device

    def tokens(self, texts: list[str]) -> list[int]:
        """Numbers of tokens, with those around the text, before any is cut off."""
        return [len(ids) for ids in self.tokenizer(texts, verbose=False)["input_ids"]]

    @torch.no_grad()
    def __call__(self, texts: list[str]) -> Tensor:
        """States, float32 (n, length, width) or (n, width)."""
        cut = {"padding": "max_length", "truncation": True, "max_length": self.length, "return_tensors": "pt"}
        told = self.tokenizer(texts, **cut)
        ids, mask = told["input_ids"].to(self.device), told["attention_mask"].to(self.device)
        if self.model.config.model_type in _CLIP:
            found = self.model(input_ids=ids)
            return (found.last_hidden_state if self.output == "tokens" else found.pooler_output).float().cpu()
        states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state.float()  # (n, length, width)
        if self.output == "pooled":
            states = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return states.cpu()


def load_encoder(config: TextEncoderConfig, device: torch.device) -> TextEncoder:
    """The encoder that a settled section names.

    Raises:
        ConfigError: no text encoder with a tokenizer is there, or it does not take texts of that length.
        KairosError: it cannot be opened.
    """
    from transformers import AutoModelForTextEncoding, AutoTokenizer, CLIPTextModel

    field = "text_encoder.path"
    folder = network_folder(config.path, field)
    kind = read_json(folder / "config.json").get("model_type")
    model = opened(folder, CLIPTextModel if kind in _CLIP else AutoModelForTextEncoding, field, weights=True)
    tokenizer = opened(folder, AutoTokenizer, field)
    network, end = model.config, tokenizer.eos_token_id
    found = kind in _CLIP and network.eos_token_id not in (2, end)  # by the pooled state; 2: CLIP's former mistake
    if len(tokenizer) > network.vocab_size or tokenizer.pad_token is None or found:
        what = f"{len(tokenizer)} tokens, padding {tokenizer.pad_token}, end {end}"
        raise ConfigError(f"{field}: {config.path!r} has a tokenizer ({what}) that does not belong to its network")
    most = getattr(network, "max_position_embeddings", _ENDLESS)
    length = config.length or min(tokenizer.model_max_length, most)
    if length > most or length >= _ENDLESS:
        limit = "a number" if most == _ENDLESS else f"at most {most}"
        raise ConfigError(f"text_encoder.length: got {config.length or 'null'}, allowed with {config.path!r}: {limit}")
    sha256 = sha256_json({name: sha256_file(folder / name) for name in {*FILES, *WEIGHTS} if (folder / name).is_file()})
    return TextEncoder(model.to(device), tokenizer, config.output, length, sha256, device)
