"""Feature extractors: built once per experiment in a folder.

The folder's record contains the extractor's name, the number of its features and the column of its Fréchet distance.
The column is `frechet_<name>` for extractors that kairos trains, and `fid` for Inception alone.
"""

import dataclasses
import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kairos import compute
from kairos.array_shapes import ImageArray
from kairos.data.dataset import PreparedDataset
from kairos.evaluation.inception_weights import missing_last_layer_message
from kairos.evaluation.settings import EXTRACTORS, ExtractorOptions, MetricOptions
from kairos.files import check_files, open_record, write_record
from kairos.finite import demand_finite
from kairos.progress import log
from kairos.shapes import LayerFeatures
from kairos_timesteps.errors import ConfigError, KairosError

_REMEDY = "use other weights of the extractor or another evaluation.extractor, and evaluation.precision fp32"
# record fields of published extractors, which take images of any size; extractors that kairos trains replace them
_FIELDS_OF_PUBLISHED: dict[str, Any] = {
    "accuracy": None,
    "check": None,
    "warnings": [],
    "shape": None,
    "dataset_sha256": None,
}


@dataclass(frozen=True)
class Extractor:
    """An opened feature extractor.

    Attributes:
        record: kind, name, metric (column of the Fréchet distance), features (width), accuracy, warnings, sha256,
            shape.
        module: torch module that maps uint8 images (n, channels, height, width) to a tuple of layers.
        layers: names of the module's outputs in order: ``features``, and for some extractors ``spatial``, ``logits``.
        device: device on which features are computed.
        precision: precision in which features are computed, see `compute.precision`.
    """

    record: dict[str, Any]
    module: Any
    layers: tuple[str, ...]
    device: torch.device = torch.device("cpu")
    precision: str = "fp32"

    @property
    def name(self) -> str:
        """Name of the extractor with its width, e.g. classifier32."""
        return str(self.record["name"])

    @property
    def hash(self) -> str:
        """SHA-256 of the extractor's weights."""
        return str(self.record["sha256"])

    @property
    def width(self) -> int:
        """Number of features of an image."""
        return int(self.record["features"])

    def check_layers(self, metrics: Iterable[MetricOptions]) -> None:
        """Raise ConfigError if a metric needs logits, which weights of Inception without the last layer do not have."""
        if "logits" not in self.layers and any("logits" in metric.needs for metric in metrics):
            raise ConfigError(missing_last_layer_message())

    def compute_layers(self, images: ImageArray) -> dict[str, LayerFeatures]:
        """Return the values of all layers of the images by name, each flattened to float32 (n, width), on the CPU.

        TF32 is forbidden in this process afterwards, see `compute.precision`.

        Args:
            images: uint8 (n, height, width, channels).

        Raises:
            KairosError: the extractor takes images of another size.
            NotFiniteError: a value of a layer is not finite.
        """
        shape = self.record["shape"]
        if shape is not None and list(images.shape[1:]) != shape:
            raise KairosError(
                f"images: got {images.shape[1:]} (height, width, channels), allowed: {tuple(shape)}, the images that "
                f"{self.name} was trained on"
            )
        # a copy in C order: strides of a grey image are ambiguous, and torch selects kernels by strides
        pixels = torch.from_numpy(np.array(images.transpose(0, 3, 1, 2), order="C"))
        with compute.precision(self.precision, self.device), torch.inference_mode():
            outputs = self.module(pixels.to(self.device))
        layers = {name: values.float().flatten(1).cpu() for name, values in zip(self.layers, outputs)}
        demand_finite(layers, f"evaluation.extractor: {self.name}: layers of {len(images)} images", _REMEDY)
        return layers


def build_extractor(extractor: ExtractorOptions, dataset: PreparedDataset | None, folder: Path) -> dict[str, Any]:
    """Run stage `extractor`: fill the extractor's folder, write the record last and return it.

    An earlier record is deleted first, so that a folder with a record is complete. The folder is created if
    necessary. An extractor with warnings is replaced by its `replacement`, if it has one.

    The fields of the record are ``kind``, ``options`` and the fields that the extractor's code returns. ``warnings``
    is empty, and ``accuracy``, ``check``, ``shape`` and ``dataset_sha256`` are None, if its code does not return them.
    The record of a replacement also has ``replaces``, with the name, kind, options and warnings of the replaced one.

    Args:
        extractor: field `evaluation.extractor` of the experiment.
        dataset: data set on which a classifier is trained; None for published extractors.
        folder: folder to fill.

    Raises:
        KairosError: the extractor cannot be trained on the data set, or its weights cannot be downloaded.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "record.json").unlink(missing_ok=True)
    record = _fill_folder(extractor, dataset, folder)
    replacement = extractor.replacement
    if record["warnings"] and replacement is not None:
        replaced = {key: record[key] for key in ("name", "kind", "options", "check", "warnings")}
        record = {**_fill_folder(replacement, dataset, folder), "replaces": replaced}
    for message in [*describe_replacement(record), *record["warnings"]]:
        log(f"warning: {message}")
    write_record(folder / "record.json", record)
    return record


def _fill_folder(extractor: ExtractorOptions, dataset: PreparedDataset | None, folder: Path) -> dict[str, Any]:
    """Fill an extractor's folder, except for the record, and return the record; see `build_extractor`."""
    record = {"kind": extractor.name, "options": extractor.plain(), **_FIELDS_OF_PUBLISHED}
    record.update(extractor.build(dataset, folder))
    return record


def describe_replacement(record: dict[str, Any]) -> list[str]:
    """Return a list with a sentence if an extractor's record is of a replacement, else an empty list."""
    replaced = record.get("replaces")
    if replaced is None:
        return []
    return [f"{record['name']} replaces {replaced['name']} as extractor: {' '.join(replaced['warnings'])}"]


def open_extractor(folder: Path, device: torch.device | str = "cpu", precision: str = "fp32") -> Extractor:
    """Open the folder of stage `extractor`, after a comparison of its files with their hashes, and load the network.

    Raises:
        KairosError: the folder contains no extractor, or its network cannot be loaded.
        DamagedError: a file is missing or has changed.
    """
    record = open_record(folder, f"extractor --config F --dataset DIR --out {folder}")
    check_files(folder, record["files"], "build it again with: kairos extractor")
    module = importlib.import_module(EXTRACTORS.find(record["kind"]).module())
    extractor: Extractor = module.load(folder, record)
    extractor.module.to(torch.device(device))
    return dataclasses.replace(extractor, device=torch.device(device), precision=precision)
