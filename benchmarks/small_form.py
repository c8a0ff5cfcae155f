"""The small form of an experiment: its components with a network of under a million parameters, on available images.

The small form shows within minutes, on a CPU, that an experiment runs from images to its table. Its numbers do not rank
methods.
"""

from pathlib import Path
from typing import Any

from kairos.config import Experiment, validate
from kairos_timesteps.errors import demand

_MOST_STEPS = 100
_UNET = {"channels": 32, "multipliers": [1, 2], "blocks": 1, "attention": [8, 4]}
_HEADS = {"norm_groups": 8, "head_channels": 16}
_TRANSFORMER = {"width": 96, "depth": 4, "heads": 4, "patch": 2}
_MODELS: dict[str, dict[str, Any]] = {
    "unet": _UNET | {"norm_groups": 8}, "ldm_unet": _UNET | _HEADS, "adm": _UNET | _HEADS, "ddpmpp": _UNET,
    "dit": _TRANSFORMER, "uvit": _TRANSFORMER, "vit": _TRANSFORMER, "mdt": _TRANSFORMER | {"width": 64},
}  # fmt: skip
_BATCH_SIZE = 16


def _select_methods(experiment: Experiment) -> list[str]:
    """Return the two methods that a paper compares; only one if the experiment has one.

    They are the methods of the paper's claim. Without a claim they are the first method, and the method of the
    published table's last row, or the last method. Analysis subset_size needs the first and the last two methods.
    """
    if "subset_size" in [analysis.name for analysis in experiment.analyses]:
        first, *others = experiment.methods
        return [first, *others[-2:]]
    if claim := experiment.claim:
        return [claim.baseline, claim.method]
    first, *others = experiment.methods
    published = []
    if experiment.published:
        published = [number.method for number in experiment.published[0].numbers() if number.method in others]
    return [first, *(published or others)[-1:]]  # one method if the experiment has only one


def shrink_experiment(experiment: Experiment, data: Path, encoder: str, steps: int) -> dict[str, Any]:
    """Return the small form of an experiment as the plain values of an experiment file.

    Args:
        experiment: the experiment.
        data: folder of small data sets and of an autoencoder: ``cifar10``, ``fashion_mnist``, ``coco_mini``, ``taesd``.
            Without ``cifar10`` and ``fashion_mnist``, the small form uses the embedded digits.
        encoder: folder of a text encoder.
        steps: optimizer steps of the methods, the autoencoder and the extractor.

    Raises:
        ConfigError: the number of steps is not allowed, or the folder lacks the images that the experiment needs.
    """
    demand(2 <= steps <= _MOST_STEPS, "--steps", steps, f"2 to {_MOST_STEPS}")
    methods = _select_methods(experiment)
    plain = experiment.plain()
    training, model_name = plain["training"], experiment.model.name
    small_options = {option: value for option, value in _MODELS[model_name].items() if option in plain["model"]}
    optimizer = training["optimizer"] | {"lr": 2.0e-3, "warmup_steps": steps // 5}
    metrics = {"metrics": ["frechet", "psnr"]} if "low_resolution" in experiment.conditions else {}
    published = [_select_rows(block, methods) for block in plain.get("published", ())]
    values = {
        "experiment": f"{experiment.experiment}_small",
        **_small_data(plain, data=data, encoder=encoder, steps=steps),
        "model": plain["model"] | small_options,
        "diffusion": plain["diffusion"],
    }
    if plain.get("plugins"):
        values["plugins"] = plain["plugins"]
    values |= {
        "training": {
            "augment": training["augment"], "condition_dropout": training["condition_dropout"],
            "batch_size": _BATCH_SIZE, "milestones": [steps // 2, steps], "checkpoint_every": steps, "log_every": 10,
            "optimizer": optimizer, "ema": {"decay": 0.98},
        },
        "methods": {method: _shorten(plain["methods"][method], steps) for method in methods},
        "sampling": plain["sampling"] | {"steps": min(steps, 10), "batch_size": _BATCH_SIZE, "grid": _BATCH_SIZE},
        "evaluation": metrics | {
            "extractor": {"name": "selfsupervised", "features": 16, "steps": steps}, "num_samples": 32, "sets": 1,
            "strata": 4, "loss_images": 32,
        },
        "tracking": {"enabled": False},
        "analyses": [_shrink_analysis(analysis, methods) for analysis in plain.get("analyses", ())],
        "published": [block for block in published if block["rows"]],
    }  # fmt: skip
    if experiment.claim:
        values["claim"] = plain["claim"]
    validate(values, f"small form of {experiment.experiment}")  # raises an error if the small form is not valid
    return values


def _shrink_analysis(analysis: dict[str, Any], methods: list[str]) -> dict[str, Any]:
    """Return an analysis of all snapshots with few images and steps, and of the remaining methods."""
    small = {"images": 8, "steps": 2, "bins": 5, "milestones": None}
    if analysis.get("methods"):
        small["methods"] = [method for method in analysis["methods"] if method in methods]
    return analysis | {option: value for option, value in small.items() if option in analysis}


def _shorten(method: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return a method whose options that are lengths in steps fit a training run of `steps` steps."""
    tenth = max(steps // 10, 1)
    lengths = {"sampler": {"frequency": tenth, "length": steps}, "weighting": {"warmup": tenth}}  # by kind and option
    shortened = {}
    for kind, component in method.items():
        shortened[kind] = dict(component)
        for option, length in lengths.get(kind, {}).items():
            if component.get(option):  # the component has the option, and it is set
                shortened[kind][option] = length
    return shortened


def _select_rows(block: dict[str, Any], methods: list[str]) -> dict[str, Any]:
    """Return a published table with only the rows of some methods.

    Args:
        block: a section of `published` as plain values.
        methods: names of the methods.
    """
    method_of_row = {row: block["methods"].get(row, row) for row in block["rows"]}  # by default, the row's name
    rows = {row: numbers for row, numbers in block["rows"].items() if method_of_row[row] in methods}
    return {**block, "rows": rows, "missing": {}}


def _small_data(plain: dict[str, Any], data: Path, encoder: str, steps: int) -> dict[str, Any]:
    """Return sections dataset and autoencoder of a small form; also text_encoder if the experiment has one.

    Images have 16 pixels a side, or 64 if a pretrained autoencoder encodes them.

    Args:
        plain: the experiment as plain values.
        data: folder of small data sets and of an autoencoder.
        encoder: folder of a text encoder.
        steps: optimizer steps of an autoencoder that is trained.

    Raises:
        ConfigError: the folder does not contain the images that the experiment needs.
    """
    if plain["text_encoder"] or plain["dataset"]["low_resolution"]:
        return _small_coco(plain, data, encoder)
    taesd = data / "taesd"
    available = [name for name in ("cifar10", "fashion_mnist") if (data / name).is_dir()]
    if plain["autoencoder"]["kind"] == "none":
        autoencoder: dict[str, Any] = {"kind": "none"}
    elif available and taesd.is_dir():
        autoencoder = {"kind": "pretrained", "path": str(taesd)}
    else:
        autoencoder = {"kind": "train", "channels": [16, 32], "steps": steps}
    dataset: dict[str, Any] = {"heldout": 0.2, "resolution": 64 if autoencoder["kind"] == "pretrained" else 16}
    if available:  # else the embedded digits, which are the default of section dataset
        dataset |= {"source": "parquet", "path": f"{data}/{available[0]}/train-*.parquet", "limit": 600}
    return {"dataset": dataset, "autoencoder": autoencoder}


def _small_coco(plain: dict[str, Any], data: Path, encoder: str) -> dict[str, Any]:
    """Return sections dataset and autoencoder of a small form with captions or low resolution, on images of COCO.

    Section text_encoder is included if the experiment has a text encoder.

    Args:
        plain: the experiment as plain values.
        data: folder that contains ``coco_mini``, images with captions, and autoencoder ``taesd``.
        encoder: folder of a text encoder.

    Raises:
        ConfigError: the folder does not contain both.
    """
    coco, taesd = data / "coco_mini", data / "taesd"
    demand(coco.is_dir() and taesd.is_dir(), "DATA", repr(str(data)), "a folder with coco_mini and taesd")
    dataset: dict[str, Any] = {"source": "folder", "path": f"{coco}/train2017", "heldout": f"{coco}/val2017"}
    dataset |= {"crop": "adm", "resolution": 64, "low_resolution": plain["dataset"]["low_resolution"]}
    sections: dict[str, Any] = {"dataset": dataset, "autoencoder": {"kind": "pretrained", "path": str(taesd)}}
    text_encoder = plain["text_encoder"]
    if text_encoder:
        dataset["captions"] = f"{coco}/annotations/captions_train2017.json"
        dataset["heldout_captions"] = f"{coco}/annotations/captions_val2017.json"
        sections["text_encoder"] = text_encoder | {"path": encoder}
    return sections
