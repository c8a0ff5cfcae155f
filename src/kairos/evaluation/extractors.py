"""Feature extractors: made once per experiment in a folder of their own, run by torch-fidelity.

The folder's manifest says what the extractor is called, how wide its features are, and which column its Fréchet
distance goes into: `frechet_<name>` for our own, `fid` for Inception alone.
"""

import dataclasses
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kairos import compute
from kairos.data.dataset import PreparedDataset
from kairos.evaluation.registries import EXTRACTORS
from kairos.files import check_files, open_record, write_json
from kairos.section import build
from kairos_timesteps.errors import KairosError

_OF_OTHERS = {"accuracy": None, "shape": None, "dataset_sha256": None}  # those not trained here take any image


@dataclass(frozen=True)
class Extractor:
    """An opened extractor.

    Attributes:
        manifest: kind, name, metric (column of the Fréchet distance), features (width), accuracy, sha256, shape.
        module: torch-fidelity's feature extractor.
        layers: what it gives, in order: ``features``, which are compared, and maybe ``spatial`` and ``logits``.
        device: where features are computed.
        precision: what they are computed in, see `compute.precision`.
    """

    manifest: dict[str, Any]
    module: Any
    layers: tuple[str, ...]
    device: torch.device = torch.device("cpu")
    precision: str = "fp32"

    @property
    def name(self) -> str:
        """Name with width, e.g. classifier32."""
        return self.manifest["name"]

    @property
    def hash(self) -> str:
        """SHA-256 of the weights."""
        return self.manifest["sha256"]

    @property
    def width(self) -> int:
        """Number of features."""
        return self.manifest["features"]

    def compute_layers(self, images: NDArray[np.uint8]) -> dict[str, torch.Tensor]:
        """Features of images (n, height, width, channels) by layer, each float32 (n, width) on the CPU.

        Raises:
            KairosError: the extractor takes images of another size.
        """
        shape = self.manifest["shape"]
        if shape is not None and list(images.shape[1:]) != shape:
            raise KairosError(
                f"images: got {images.shape[1:]} (height, width, channels), allowed: {tuple(shape)}, the images that "
                f"{self.name} was trained on"
            )
        # a copy, since strides of a grey image are ambiguous, and kernels choose by them
        pixels = torch.from_numpy(np.array(images.transpose(0, 3, 1, 2), order="C"))
        with compute.precision(self.precision, self.device), torch.inference_mode():
            found = self.module(pixels.to(self.device))
        return {name: values.float().flatten(1).cpu() for name, values in zip(self.layers, found)}


def build_extractor(extractor: dict[str, Any], dataset: PreparedDataset | None, folder: Path) -> dict[str, Any]:
    """Stage `extractor`: fill the folder, write its manifest last and return it.

    Args:
        extractor: field `evaluation.extractor` of the experiment.
        dataset: what the classifier is trained on; Inception needs none.
        folder: where it goes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").unlink(missing_ok=True)
    manifest = {"kind": extractor["name"], "options": extractor, **_OF_OTHERS}
    manifest |= build(EXTRACTORS, extractor, dataset, folder)
    write_json(folder / "manifest.json", manifest)
    return manifest


def open_extractor(folder: Path, device: torch.device | str = "cpu", precision: str = "fp32") -> Extractor:
    """Open the folder that stage `extractor` filled, for computing on `device` in `precision`.

    Raises:
        KairosError: it is not there.
        DamagedError: a file is missing or has changed.
    """
    manifest = open_record(folder, f"extractor --config F --dataset DIR --out {folder}")
    check_files(folder, manifest["files"], "make it again with: kairos extractor")
    module = importlib.import_module(EXTRACTORS.entry(manifest["kind"]).module)
    opened: Extractor = module.load(folder, manifest)
    opened.module.to(torch.device(device))
    return dataclasses.replace(opened, device=torch.device(device), precision=precision)
