"""The CLIP score of images and their captions (Hessel et al. 2021): 100 times the mean cosine of their embeddings.

torchmetrics clamps this score at 0, which would hide how negative a mean is; here it is not clamped. Scores of
different CLIP networks are not comparable. Published scores near 0.24 are the cosine itself.
"""

import functools
from typing import Any

import torch

from kairos.array_shapes import ImageArray
from kairos.evaluation.measurements import ImageStatistics
from kairos.evaluation.settings import ClipOptions
from kairos.files import read_json
from kairos.finite import demand_finite
from kairos.shapes import PerSample
from kairos.text_encoders.encoder import load_pretrained, network_folder
from kairos.text_encoders.settings import FILES, PREPROCESSOR
from kairos_timesteps.errors import ConfigError

FIELD = "evaluation.metrics: clip.path"  # begins error messages

Network = tuple[Any, Any, Any]  # CLIP, its tokenizer and its image processor


def clip(options: ClipOptions, statistics: ImageStatistics, comparison: Any) -> dict[str, float]:
    """Return the CLIP score of a set of images as column ``clip_score``; no column if the images have no captions.

    The captions of `statistics` can be iterated once. The network is loaded with the first call.
    """
    if statistics.captioned is None:
        return {}
    network = _load_network(options.path, statistics.device)
    cosines = [compute_cosines(network, images, texts) for images, texts in statistics.captioned]
    demand_finite(torch.cat(cosines), f"{FIELD}: {options.path}: cosines", "use another CLIP, or download it again")
    return {"clip_score": 100 * float(torch.cat(cosines).double().mean())}


@torch.no_grad()
def compute_cosines(network: Network, images: ImageArray, texts: list[str]) -> PerSample:
    """Return the cosine between the embeddings of each image and its text, float32 (n,), on the CPU.

    Texts that are too long are truncated. Grey images are converted to RGB.

    Args:
        network: CLIP, its tokenizer and its image processor.
        images: uint8 (n, height, width, 1 or 3).
        texts: one text for each image.
    """
    model, tokenizer, processor = network
    rgb = [image.repeat(3, axis=2) if image.shape[2] == 1 else image for image in images]
    pixels = processor(images=rgb, return_tensors="pt", input_data_format="channels_last")["pixel_values"]
    max_tokens = model.config.text_config.max_position_embeddings
    tokens = tokenizer(texts, padding="max_length", truncation=True, max_length=max_tokens, return_tensors="pt")
    device = next(model.parameters()).device
    output = model(input_ids=tokens["input_ids"].to(device), pixel_values=pixels.to(device))
    return torch.cosine_similarity(output.image_embeds.float(), output.text_embeds.float()).cpu()


@functools.lru_cache(maxsize=1)
def _load_network(path: str, device: torch.device) -> Network:
    """Load CLIP, its tokenizer and its image processor from a folder or hub id, after a download if necessary.

    The last network stays in memory for further calls.

    Raises:
        ConfigError: the network is not a CLIP, or the preprocessor's file is missing.
        KairosError: the network cannot be downloaded or opened.
    """
    from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

    folder = network_folder(path, FIELD, (*FILES, PREPROCESSOR))
    model_type = read_json(folder / "config.json").get("model_type")
    if model_type != "clip" or not (folder / PREPROCESSOR).is_file():
        raise ConfigError(f"{FIELD}: got a {model_type} in {path!r}, allowed: a clip with {PREPROCESSOR}")
    tokenizer = load_pretrained(folder, AutoTokenizer, FIELD)
    processor = load_pretrained(folder, CLIPImageProcessor, FIELD)
    model = load_pretrained(folder, CLIPModel, FIELD, weights=True).to(device)
    return model, tokenizer, processor
