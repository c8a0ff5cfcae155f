"""DINOv2 through transformers, for the Fréchet distance of its features (Stein et al. 2023, "Exposing flaws").

The published protocol is ViT-L/14 on images that PIL's bicubic filter resizes to 224 x 224, normalised by ImageNet's
mean and standard deviation. The features are the class token after the last normalisation, which transformers calls the
pooled output. Transformers interpolates the position embeddings in another way than the original code.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from kairos.data.dataset import PreparedDataset
from kairos.evaluation.extractors import Extractor
from kairos.evaluation.inception_weights import missing_network_message
from kairos.evaluation.settings import DinoOptions
from kairos.files import hash_folder, sha256_json
from kairos.shapes import Features, Pixels
from kairos_timesteps.errors import KairosError

SIDE = 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # statistics of ImageNet's RGB values in [0, 1]


def prepare(options: DinoOptions, dataset: PreparedDataset | None, folder: Path) -> dict[str, Any]:
    """Put the network into subfolder ``model`` of `folder`, and return the extractor's record fields.

    A network on the hub is downloaded if necessary. An earlier network in the subfolder is deleted first. Field
    ``metric`` is the column of the Fréchet distance, and ``sha256`` the hash of ``files``. `dataset` is not used.

    Raises:
        KairosError: the network is missing or is not a DINOv2; the message contains the expected files.
    """
    from transformers import AutoModel

    try:
        model = AutoModel.from_pretrained(options.path)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())  # on one line
        raise KairosError(missing_network_message(options.path, reason)) from None
    model_type = model.config.model_type
    if model_type != "dinov2":
        raise KairosError(f"evaluation.extractor.path: got a {model_type} in {options.path!r}, allowed: a dinov2")
    shutil.rmtree(folder / "model", ignore_errors=True)
    model.save_pretrained(folder / "model")
    files = {f"model/{name}": digest for name, digest in hash_folder(folder / "model").items()}
    width = model.config.hidden_size
    return {"name": "dinov2", "metric": "fd_dinov2", "features": width, "sha256": sha256_json(files), "files": files}


def load(folder: Path, record: dict[str, Any]) -> Extractor:
    """Open the extractor in a folder that `prepare` filled."""
    from transformers import AutoModel

    return Extractor(record, module=Dino(AutoModel.from_pretrained(folder / "model")), layers=("features",))


class Dino(nn.Module):
    """DINOv2 with its preprocessing: from uint8 images to features."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model.eval()

    def forward(self, images: Pixels) -> tuple[Features]:
        """Return the features, (batch, width), of uint8 images (batch, 1 or 3, height, width).

        Images are resized on the CPU by PIL. The network computes on the device of the images.
        """
        rgb = images.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).cpu().numpy()
        resized = [np.asarray(Image.fromarray(image).resize((SIDE, SIDE), Image.Resampling.BICUBIC)) for image in rgb]
        pixels = torch.from_numpy(np.stack(resized)).to(images.device) / 255
        pixels = (pixels - pixels.new_tensor(MEAN)) / pixels.new_tensor(STD)
        return (self.model(pixel_values=pixels.permute(0, 3, 1, 2)).pooler_output,)
