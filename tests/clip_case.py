"""Tiny CLIP models for tests: the rules of the real tokenizer on a small vocabulary, and networks of random weights."""

import json
from pathlib import Path
from typing import Any

import torch

WORDS = ("a", "the", "of", "photo", "cat", "dog", "man", "in", "on")


def write_tokenizer(folder: Path, length: int = 77) -> int:
    """Write a byte-level BPE tokenizer as CLIP uses it; returns the size of its vocabulary.

    The vocabulary contains 256 bytes, each also in its form at the end of a word, the merges, start and end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = [chr(byte) for byte in printable]
    symbols += [chr(256 + number) for number in range(256 - len(printable))]
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        symbols_of_word = [*word[:-1], f"{word[-1]}</w>"]
        while len(symbols_of_word) > 1:
            merges.append((symbols_of_word[0], symbols_of_word[1]))
            symbols_of_word[:2] = ["".join(symbols_of_word[:2])]
    merges = list(dict.fromkeys(merges))
    names = [*symbols, *(f"{symbol}</w>" for symbol in symbols), *map("".join, merges)]
    names = [*dict.fromkeys(names), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({name: number for number, name in enumerate(names)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in merges))
    config = {"tokenizer_class": "CLIPTokenizer", "model_max_length": length}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return len(names)


def text_settings(folder: Path, width: int = 32, length: int = 77, positions: int | None = None) -> dict[str, Any]:
    """Write a tokenizer into the folder; returns the configuration of a text model that uses it."""
    size = write_tokenizer(folder, length)
    return {
        "vocab_size": size, "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": positions or length, "projection_dim": 16,
        "bos_token_id": size - 2, "eos_token_id": size - 1, "pad_token_id": size - 1,
    }  # fmt: skip


def write_text_encoder(folder: Path, **settings: Any) -> Path:
    """Write a CLIPTextModel and its tokenizer into the folder; returns the folder."""
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    CLIPTextModel(CLIPTextConfig(**text_settings(folder, **settings))).save_pretrained(folder)
    return folder


def make_clip(folder: Path, side: int = 32) -> Any:
    """Return a CLIPModel, and write its tokenizer and preprocessor, but not its weights, into the folder."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    torch.manual_seed(0)
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": side, "patch_size": 8, "projection_dim": 16,
    }  # fmt: skip
    model = CLIPModel(CLIPConfig(text_config=text_settings(folder), vision_config=vision, projection_dim=16))
    sides = {"height": side, "width": side}
    CLIPImageProcessor(size={"shortest_edge": side}, crop_size=sides).save_pretrained(folder)
    return model
