"""Text encoders of transformers, which convert texts of any length to states of one shape.

CLIP's text model is causal and was trained on texts padded with the end-of-text token. It gets no attention mask. The
states of the padding are among its tokens, as U-ViT's models, which attend to all tokens, were trained. Its pooled
state is the state of the first end-of-text token, after the last norm and before the projection.

Other encoders, such as T5, get the mask. Their pooled state is the mean over the tokens that are not padding.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kairos.files import read_json, sha256_file, sha256_json
from kairos.pretrained import find_network_folder
from kairos.shapes import EncodedTexts
from kairos.text_encoders.settings import FILES, TOKENIZERS, WEIGHTS, TextEncoderConfig
from kairos_timesteps.errors import ConfigError, KairosError

_CLIP = ("clip", "clip_text_model")  # model_type of CLIP, and of its text model alone
_FORMER_CLIP_END = 2  # wrong end-of-text token in configurations of early CLIP models, which transformers handles
_UNLIMITED = 10**6  # tokenizers without a limit report a larger one


def network_folder(path: str, field: str, files: tuple[str, ...] = FILES) -> Path:
    """Return the folder of a network and its tokenizer, after a download from the hub if necessary.

    The folder has config.json, weights in either file of `WEIGHTS`, and the files of a tokenizer. They are not read.

    Args:
        path: a folder, or a hub id.
        field: field of the experiment file that contains the path, for error messages.
        files: files to download, as far as they exist; ``pytorch_model.bin`` is downloaded only in place of
            ``model.safetensors``.

    Raises:
        ConfigError: the folder lacks config.json, weights or a tokenizer, or the path is neither a folder nor a hub id.
        KairosError: the cache has no copy, and the hub cannot be reached or rejects the request.
    """
    needed = "config.json, model.safetensors and tokenizer.json (or vocab.json and merges.txt)"
    weights, former_weights = WEIGHTS
    folder = find_network_folder(path, field, files, needed)
    if not (folder / weights).is_file():  # an older network; both downloads are in one folder of the cache
        folder = find_network_folder(path, field, [former_weights], needed)
    existing = {file.name for file in folder.iterdir() if file.is_file()}
    missing = []
    if "config.json" not in existing:
        missing.append("config.json")
    if weights not in existing and former_weights not in existing:
        missing.append(weights)
    if not any(existing.issuperset(tokenizer_files) for tokenizer_files in TOKENIZERS):
        missing.append("a tokenizer")
    if missing:
        raise ConfigError(f"{field}: {path!r} lacks {' and '.join(missing)}; allowed: a folder with {needed}")
    return folder


def load_pretrained(path: Any, cls: Any, field: str, weights: bool = False) -> Any:
    """Load a model or tokenizer of transformers from a folder, without access to the hub.

    A model is returned in evaluation mode, on the CPU. Progress bars of transformers stay off for this process.

    Args:
        path: the folder.
        cls: class of transformers with a method `from_pretrained`.
        field: field of the experiment file that contains the path, for the error message.
        weights: the class is a model, which must have all weights; False for a class without weights.

    Raises:
        KairosError: the folder cannot be read, or lacks weights of the model, which would be random.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()  # loading takes a second, and the bar would fill the logs of jobs
    try:
        if not weights:
            return cls.from_pretrained(path, local_files_only=True)
        model, loading = cls.from_pretrained(path, local_files_only=True, output_loading_info=True)
        if loading["missing_keys"]:
            # transformers would initialise them at random; the error is caught below
            raise ValueError(f"lacks weights: {', '.join(sorted(loading['missing_keys'])[:3])} ...")
        return model.eval()
    except Exception as error:  # damaged folders raise errors of many types
        raise KairosError(f"{field}: {path} cannot be opened ({' '.join(str(error).split())[:300]})") from None


@dataclass(frozen=True)
class TextEncoder:
    """A text encoder of transformers with its tokenizer.

    Attributes:
        model: the network.
        tokenizer: the tokenizer.
        output: ``tokens`` (a state per token) or ``pooled`` (one state per text).
        length: number of tokens to which texts are padded or truncated.
        sha256: hash of the files of network and tokenizer.
        device: device of the computation.
    """

    model: Any
    tokenizer: Any
    output: str
    length: int
    sha256: str
    device: torch.device

    def count_tokens(self, texts: list[str]) -> list[int]:
        """Return the number of tokens of each text, with start and end tokens, without padding or truncation."""
        token_ids = self.tokenizer(texts, verbose=False)["input_ids"]  # verbose would warn of long texts
        return [len(ids) for ids in token_ids]

    @torch.no_grad()
    def __call__(self, texts: list[str]) -> EncodedTexts:
        """Return the states of texts, float32 on the CPU.

        With output ``tokens`` they are (n, length, width), including the states of padding. With ``pooled`` they are
        (n, width): CLIP's pooled state, or else the mean over the tokens that are not padding. Texts of more than
        `length` tokens are truncated without a message.
        """
        options = {"padding": "max_length", "truncation": True, "max_length": self.length, "return_tensors": "pt"}
        tokens = self.tokenizer(texts, **options)
        ids = tokens["input_ids"].to(self.device)
        mask = tokens["attention_mask"].to(self.device)  # (n, length), 0 for padding
        if self.model.config.model_type in _CLIP:  # without the mask, see the docstring of this module
            outputs = self.model(input_ids=ids)
            states: Tensor = outputs.last_hidden_state if self.output == "tokens" else outputs.pooler_output
            return states.float().cpu()
        states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state.float()  # (n, length, width)
        if self.output == "pooled":
            states = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return states.cpu()


def load_encoder(config: TextEncoderConfig, device: torch.device) -> TextEncoder:
    """Load the network and the tokenizer of section `text_encoder`, in which the caller has replaced ``auto``.

    A network on the hub is downloaded if necessary. The network is in evaluation mode.

    Args:
        config: section `text_encoder`.
        device: device to which the network is moved.

    Raises:
        ConfigError: the path lacks a file or has a tokenizer of another network, or the length is not allowed.
        KairosError: the encoder cannot be loaded.
    """
    from transformers import AutoModelForTextEncoding, AutoTokenizer, CLIPTextModel

    field = "text_encoder.path"
    folder = network_folder(config.path, field)
    is_clip = read_json(folder / "config.json").get("model_type") in _CLIP
    model = load_pretrained(folder, CLIPTextModel if is_clip else AutoModelForTextEncoding, field, weights=True)
    tokenizer = load_pretrained(folder, AutoTokenizer, field)
    _check_tokenizer(tokenizer, model.config, is_clip, config.path)
    length = _select_length(config, tokenizer, model.config)
    existing_files = [name for name in {*FILES, *WEIGHTS} if (folder / name).is_file()]
    hashes = {name: sha256_file(folder / name) for name in existing_files}  # `sha256_json` sorts the names
    return TextEncoder(
        model=model.to(device),
        tokenizer=tokenizer,
        output=config.output,
        length=length,
        sha256=sha256_json(hashes),
        device=device,
    )


def _select_length(config: TextEncoderConfig, tokenizer: Any, network_config: Any) -> int:
    """Return the number of tokens to which texts are padded.

    It is the configured number, or else the smaller of the limits of tokenizer and network. A configured number may
    exceed the limit of the tokenizer, but not the limit of the network. A network that declares no limit, such as T5,
    takes any number below a million. `network_config` is the network's configuration of transformers.

    Raises:
        ConfigError: the configured number is too large, or none is configured and the encoder has no limit.
    """
    longest = getattr(network_config, "max_position_embeddings", _UNLIMITED)  # T5 has relative positions and no limit
    length = config.length
    if length is None:
        length = min(tokenizer.model_max_length, longest)
    if length > longest or length >= _UNLIMITED:
        limit = "a number" if longest == _UNLIMITED else f"at most {longest}"
        raise ConfigError(f"text_encoder.length: got {config.length or 'null'}, allowed with {config.path!r}: {limit}")
    return length


def _check_tokenizer(tokenizer: Any, network_config: Any, is_clip: bool, path: str) -> None:
    """Check that a tokenizer can belong to a network.

    It must not have more tokens than the network, and needs a padding token. With CLIP, which pools the state of the
    end token, the end tokens must be equal; the wrong one in configurations of early CLIP networks is accepted.
    `network_config` is the network's configuration of transformers.

    Raises:
        ConfigError: the tokenizer does not belong to the network.
    """
    end = tokenizer.eos_token_id
    has_unknown_tokens = len(tokenizer) > network_config.vocab_size
    has_wrong_end = is_clip and network_config.eos_token_id not in (_FORMER_CLIP_END, end)
    if has_unknown_tokens or has_wrong_end or tokenizer.pad_token is None:
        properties = f"{len(tokenizer)} tokens, padding {tokenizer.pad_token}, end {end}"
        raise ConfigError(
            f"text_encoder.path: {path!r} has a tokenizer ({properties}) that does not belong to its network"
        )
