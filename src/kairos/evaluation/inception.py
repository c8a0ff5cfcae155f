"""torch-fidelity's Inception-v3 as feature extractor, for FID, Inception score and KID as published."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3, BasicConv2d, FeatureExtractorInceptionV3

from kairos.data.dataset import PreparedDataset
from kairos.evaluation import inception_weights
from kairos.evaluation.extractors import Extractor
from kairos.evaluation.settings import InceptionOptions
from kairos.files import link_file, sha256_file
from kairos.shapes import FeatureMaps, LayerFeatures, Pixels
from kairos_timesteps.errors import KairosError

WEIGHTS = inception_weights.NAME


def prepare(options: InceptionOptions, dataset: PreparedDataset | None, folder: Path) -> dict[str, Any]:
    """Put the weights into `folder`, after downloading them if they are missing, and return the manifest fields.

    The file in `folder` is a hard link if possible, otherwise a copy. Field ``metric`` is the column of the Fréchet
    distance, and ``sha256`` the hash of the file. `dataset` is not used.

    Raises:
        KairosError: the weights are missing and cannot be downloaded; the message contains their URL and path.
    """
    path, is_present = inception_weights.find_weights(options.path)
    if not is_present:
        try:
            inception_weights.download(URL_INCEPTION_V3, path)
        except (KairosError, OSError) as error:
            raise KairosError(
                inception_weights.missing_weights_message(path, f"the download failed ({error})")
            ) from None
    link_file(path, folder / WEIGHTS)
    digest = sha256_file(folder / WEIGHTS)
    return {"name": "inception", "metric": "fid", "features": 2048, "sha256": digest, "files": {WEIGHTS: digest}}


class Inception(FeatureExtractorInceptionV3):
    """torch-fidelity's Inception-v3 that also takes grey images, as RGB, and also returns the layer ``spatial``.

    ADM's evaluator computes sFID of this layer: the first 7 channels of the first convolution of mixed_6.

    The weights of convolutions include the normalisations after them. Together with the layout of `to`, this saves
    time on a CPU. Features differ from those of torch-fidelity by rounding (benchmarks/frechet.py).
    """

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        for layer in list(self.modules()):  # a list, because the loop replaces modules
            if isinstance(layer, BasicConv2d):
                layer.conv = fuse_conv_bn_eval(layer.conv, layer.bn)
                layer.bn = nn.Identity()
        # torchvision's name of TensorFlow's mixed_6
        self.Mixed_6d.branch1x1.register_forward_hook(self._keep_spatial)

    def _keep_spatial(self, module: Any, inputs: Any, output: FeatureMaps) -> None:
        """Store the layer ``spatial`` of a batch, (batch, 17 * 17 * 7), for `forward`, as a forward hook of torch."""
        self.spatial = output[:, :7].permute(0, 2, 3, 1).flatten(1)

    def to(self, *arguments: Any, **keywords: Any) -> Any:
        """Move the network as torch does; on a CPU, weights get the layout whose convolutions are fastest there."""
        super().to(*arguments, **keywords)
        is_on_cpu = self.fc.weight.device.type == "cpu"
        return super().to(memory_format=torch.channels_last if is_on_cpu else torch.contiguous_format)

    def forward(self, images: Pixels) -> tuple[LayerFeatures, ...]:
        """Return the requested layers of uint8 images (batch, 1 or 3, height, width), ``spatial`` last."""
        # `expand` makes RGB of grey images; the inner call runs the hook, which sets `self.spatial`
        return (*super().forward(images.expand(-1, 3, -1, -1)), self.spatial)


def load(folder: Path, manifest: dict[str, Any]) -> Extractor:
    """Open the extractor in a folder that `prepare` filled.

    Its layers are ``features`` (n, 2048), ``logits`` (n, 1008) and ``spatial`` (n, 2023).

    Raises:
        KairosError: the file is missing or contains no Inception weights.
    """
    # torch-fidelity's names of features and logits; `Inception.forward` appends ``spatial``
    fidelity_layers = ["2048", "logits_unbiased"]
    path = str(folder / WEIGHTS)
    try:
        module = Inception("inception", fidelity_layers, feature_extractor_weights_path=path, verbose=False)
    except Exception as error:  # unpickling and loading raise many kinds
        raise KairosError(f"{folder / WEIGHTS}: not torch-fidelity's Inception weights ({error})") from None
    return Extractor(manifest, module, layers=("features", "logits", "spatial"))
