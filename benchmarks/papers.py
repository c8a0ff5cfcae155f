"""Describe the systems that the two papers train: `experiments/systems/<name>.yaml`, and what no file contains."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

FILES = Path(__file__).resolve().parents[1] / "experiments" / "systems"
PIXELS, KL, VQ, COCO = "pixels", "kl", "vq", "coco"  # what the small forms are trained on


@dataclass(frozen=True)
class System:
    """A system: `experiments/systems/<name>.yaml`.

    Attributes:
        parameters: published number, fixed position embeddings included; counted for super-resolution, which has none.
        shape: shape of the published x0.
        conditions: conditions of the published model, described as in the record of latents.
        data: data set of the small form.
        small: fields of the small form's model.
    """

    parameters: int
    shape: tuple[int, int, int]
    data: str
    small: dict[str, Any]
    conditions: dict[str, dict[str, Any]] = field(default_factory=dict)


def classes(number: int) -> dict[str, dict[str, Any]]:
    """Return the description of condition ``class`` with a number of classes."""
    return {"class": {"kind": "class", "num_classes": number}}


def text(*shape: int, null: str) -> dict[str, dict[str, Any]]:
    """Return the description of condition ``text``; `null` is what replaces a dropped text."""
    return {"text": {"kind": "text", "shape": list(shape), "null": null}}


def image(*shape: int) -> dict[str, dict[str, Any]]:
    """Return the description of condition ``low_resolution``, an image."""
    return {"low_resolution": {"kind": "image", "shape": list(shape)}}


_UNET = {"channels": 32, "multipliers": [1, 2], "blocks": 1, "attention": [8], "norm_groups": 8}
_DDPMPP = {"channels": 32, "multipliers": [1, 2], "blocks": 1, "attention": [8]}
_ADM = {**_UNET, "head_channels": 16}
_DIT = {"width": 96, "depth": 4, "heads": 4, "patch": 2}
SYSTEMS = {
    "ddpm_cifar10": System(35_746_307, (3, 32, 32), PIXELS, _UNET),
    "ldm_celebahq": System(274_056_163, (3, 64, 64), VQ, _ADM),
    "adm_imagenet64": System(295_904_454, (3, 64, 64), PIXELS, _ADM, classes(1000)),
    "adm_imagenet256": System(553_838_086, (3, 256, 256), PIXELS, _ADM, classes(1000)),
    "uvit_cifar10": System(44_255_328, (3, 32, 32), PIXELS, _DIT),
    "uvit_imagenet256": System(500_832_016, (4, 32, 32), KL, _DIT, classes(1000)),
    "vit_imagenet256": System(448_934_416, (4, 32, 32), KL, _DIT, classes(1000)),
    "dit_imagenet256": System(675_129_632, (4, 32, 32), KL, _DIT, classes(1000)),
    "unet_ffhq": System(35_876_104, (4, 32, 32), KL, {**_UNET, "attention": [4]}),
    "dit_metfaces512": System(674_861_216, (4, 64, 64), KL, _DIT),
    "dit_super_resolution": System(674_879_648, (4, 64, 64), COCO, _DIT, image(4, 64, 64)),
    "mdt_imagenet256": System(35_797_208, (4, 32, 32), KL, {**_DIT, "width": 64}, classes(1000)),
    "edm_cifar10": System(55_735_299, (3, 32, 32), PIXELS, _DDPMPP, classes(10)),
    "fdm_cifar10": System(55_735_299, (3, 32, 32), PIXELS, _DDPMPP, classes(10)),
    "dit_coco": System(675_895_712, (4, 32, 32), COCO, _DIT, text(512, null="random")),
    "uvit_coco": System(44_692_644, (4, 32, 32), COCO, _DIT, text(77, 768, null="empty")),
}


def published(name: str) -> dict[str, Any]:
    """Return the configuration of a system from `experiments/systems/<name>.yaml`, as plain values."""
    values: dict[str, Any] = yaml.safe_load((FILES / f"{name}.yaml").read_text())
    return values
