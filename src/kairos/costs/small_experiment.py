"""The small form of an experiment: the same parts, with a network under a million parameters, on real images at hand.

It shows that an experiment runs from images to its table, within minutes and on a processor; its numbers say nothing
of the methods.
"""

from pathlib import Path
from typing import Any

from kairos.config import Experiment, validate
from kairos_timesteps.errors import demand

MOST = 100  # steps
_UNET = {"channels": 32, "multipliers": [1, 2], "blocks": 1, "attention": [8, 4]}
_HEADS = {"norm_groups": 8, "head_channels": 16}
_TRANSFORMER = {"width": 96, "depth": 4, "heads": 4, "patch": 2}
_MODELS: dict[str, dict[str, Any]] = {
    "unet": _UNET | {"norm_groups": 8}, "ldm_unet": _UNET | _HEADS, "adm": _UNET | _HEADS, "ddpmpp": _UNET,
    "dit": _TRANSFORMER, "uvit": _TRANSFORMER, "vit": _TRANSFORMER, "mdt": _TRANSFORMER | {"width": 64},
}  # fmt: skip
_BATCH = 16


def two_methods(experiment: Experiment) -> list[str]:
    """The two that the paper is about: those of its claim, or the first and the one of the table's last row."""
    if claim := experiment.claim:
        return [claim.baseline, claim.method]
    first, *others = experiment.methods
    stand = [row.method for block in experiment.published[:1] for row in block.numbers() if row.method in others]
    return [first, *(stand or others)[-1:]]


def small(experiment: Experiment, data: Path, encoder: str | None, methods: list[str], steps: int) -> dict[str, Any]:
    """The values of its file.

    Args:
        experiment: the experiment itself.
        data: folder of ``cifar10``, ``fashion_mnist``, ``coco_mini`` and the autoencoder ``taesd``, as far as there;
            where neither of the first two is, the embedded digits stand in.
        encoder: a text encoder's folder; None: the experiment's own.
        methods: which ones.
        steps: optimiser steps, of the autoencoder and the extractor too.

    Raises:
        ConfigError: an argument cannot be used, or the images that the experiment needs are not there.
    """
    unknown = [name for name in methods if name not in experiment.methods]
    demand(not unknown, "--methods", ", ".join(unknown), f"some of {', '.join(experiment.methods)}")
    demand(2 <= steps <= MOST, "--steps", steps, f"2 to {MOST}")
    plain = experiment.plain()
    model, training, name = plain["model"], plain["training"], experiment.model["name"]
    kept, rate = ("augment", "condition_dropout"), {"lr": 2.0e-3, "warmup_steps": steps // 5}
    measured = {"metrics": ["frechet", "psnr"]} if "low_resolution" in experiment.conditions else {}
    rows = (_with_rows(block, methods) for block in plain.get("published", ()))
    values = {
        "experiment": f"{experiment.experiment}_small", **_data(plain, data, encoder, steps),
        "model": {**model, **{key: value for key, value in _MODELS[name].items() if key in model}},
        "diffusion": plain["diffusion"], **({"plugins": plain["plugins"]} if plain.get("plugins") else {}),
        "training": {key: training[key] for key in kept} | {
            "batch_size": _BATCH, "milestones": [steps // 2, steps], "checkpoint_every": steps, "log_every": 10,
            "optimizer": training["optimizer"] | rate, "ema": {"decay": 0.98},
        },
        "methods": {method: _shortened(plain["methods"][method], steps) for method in methods},
        "sampling": plain["sampling"] | {"steps": 10, "batch_size": _BATCH, "grid": _BATCH},
        "evaluation": measured | {
            "extractor": {"name": "selfsupervised", "features": 16, "steps": steps}, "num_samples": 32, "sets": 1,
            "strata": 4, "loss_images": 32,
        },
        "tracking": {"enabled": False},
        "published": [block for block in rows if block["rows"]],
    }  # fmt: skip
    if experiment.claim and {experiment.claim.method, experiment.claim.baseline} <= {*methods}:
        values["claim"] = plain["claim"]
    validate(values, f"small form of {experiment.experiment}")
    return values


def _shortened(method: dict[str, Any], steps: int) -> dict[str, Any]:
    """A method whose own lengths in steps are parts of these."""
    tenth = steps // 10 or 1
    lengths = {"sampler": {"frequency": tenth, "length": steps}, "weighting": {"warmup": tenth}}
    return {
        part: {key: lengths.get(part, {}).get(key, value) if value else value for key, value in its.items()}
        for part, its in method.items()
    }


def _with_rows(block: dict[str, Any], methods: list[str]) -> dict[str, Any]:
    rows = {row: values for row, values in block["rows"].items() if block["methods"].get(row, row) in methods}
    return {**block, "rows": rows, "missing": {}}


def _data(plain: dict[str, Any], data: Path, encoder: str | None, steps: int) -> dict[str, Any]:
    """Sections dataset, autoencoder and text_encoder: images of 16 pixels, or of 64 where they become latents."""
    pixels, text = plain["autoencoder"]["kind"] == "none", plain["text_encoder"]
    factor, taesd = plain["dataset"]["low_resolution"], data / "taesd"
    if text or factor:
        coco = data / "coco_mini"
        demand(coco.is_dir() and taesd.is_dir(), "--data", repr(str(data)), "a folder with coco_mini and taesd")
        images: dict[str, Any] = {"source": "folder", "path": f"{coco}/train2017", "heldout": f"{coco}/val2017"}
        images |= {"crop": "adm", "resolution": 64, "low_resolution": factor}
        further = {"text_encoder": text | {"path": encoder or text["path"]}} if text else {}
        if text:
            named = (("captions", "train"), ("heldout_captions", "val"))
            images |= {field: f"{coco}/annotations/captions_{part}2017.json" for field, part in named}
        return {"dataset": images, "autoencoder": {"kind": "pretrained", "path": str(taesd)}, **further}
    found = next((name for name in ("cifar10", "fashion_mnist") if (data / name).is_dir()), None)
    large = bool(found) and taesd.is_dir() and not pixels
    images = {"heldout": 0.2, "resolution": 64 if large else 16}
    if found:
        images |= {"source": "parquet", "path": f"{data}/{found}/train-*.parquet", "limit": 600}
    ours = {"kind": "none"} if pixels else {"kind": "train", "channels": [16, 32], "steps": steps}
    return {"dataset": images, "autoencoder": {"kind": "pretrained", "path": str(taesd)} if large else ours}
