"""The CLIP score of images and their captions (Hessel et al. 2021): 100 times the mean cosine of their embeddings.

As torchmetrics has it, but for its clamp of the mean at 0, which would hide how far below that is. Which CLIP decides
the number; published scores near 0.24 are the cosine itself.
"""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairos.evaluation.moments import ImageStatistics
from kairos.evaluation.registries import ClipOptions
from kairos.files import read_json
from kairos.text_encoders.encoder import network_folder, opened
from kairos.text_encoders.settings import FILES, PREPROCESSOR
from kairos_timesteps.errors import ConfigError

FIELD = "evaluation.metrics: clip.path"

Network = tuple[Any, Any, Any]  # CLIP, its tokenizer, and what brings images into its form


def clip(options: ClipOptions, measured: ImageStatistics, target: Any) -> dict[str, float]:
    """The score of a set of images; no column where they have no captions. (`clip` is a sampling scheme's option.)"""
    if measured.captioned is None:
        return {}
    network = _network(options.path, measured.device)
    found = [compute_cosines(network, images, texts) for images, texts in measured.captioned]
    return {"clip_score": 100 * float(torch.cat(found).double().mean())}


@torch.no_grad()
def compute_cosines(network: Network, images: np.ndarray, texts: list[str]) -> Tensor:
    """Cosine of each image, uint8 (n, height, width, 1 or 3), with its own text, float32 (n,)."""
    model, tokenizer, processor = network
    rgb = [image.repeat(3, 2) if image.shape[2] == 1 else image for image in images]
    pixels = processor(images=rgb, return_tensors="pt", input_data_format="channels_last")["pixel_values"]
    length = model.config.text_config.max_position_embeddings
    told = tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    device = next(model.parameters()).device
    found = model(input_ids=told["input_ids"].to(device), pixel_values=pixels.to(device))
    return torch.cosine_similarity(found.image_embeds.float(), found.text_embeds.float()).cpu()


@functools.lru_cache(maxsize=1)
def _network(path: str, device: torch.device) -> Network:
    """Open CLIP.

    Raises:
        ConfigError: there is another network, or it lacks a file.
        KairosError: it cannot be had or opened.
    """
    from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

    folder = network_folder(path, FIELD, (*FILES, PREPROCESSOR))
    kind = read_json(folder / "config.json").get("model_type")
    if kind != "clip" or not (folder / PREPROCESSOR).is_file():
        raise ConfigError(f"{FIELD}: got a {kind} in {path!r}, allowed: a clip with {PREPROCESSOR}")
    tokenizer, processor = (opened(folder, kind, FIELD) for kind in (AutoTokenizer, CLIPImageProcessor))
    return opened(folder, CLIPModel, FIELD, weights=True).to(device), tokenizer, processor
