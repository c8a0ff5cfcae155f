"""``kairos import-weights``: write a snapshot from published weights."""

import argparse
from pathlib import Path
from typing import Any

from kairos.cli.common import demand, yaml_type


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = (
        "--config, --model or both describe the model of the weights; --model overrides the model of --config. The "
        "shape of the network's input is that of --latents or --autoencoder, or --shape."
    )
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="published weights: .pt, .pth or .ckpt with tensors, or .safetensors")
    add("--config", type=Path, metavar="F", help="experiment file with the model of the weights")
    model = yaml_type("model", "a name or {name: ..., options}")
    add("--model", type=model, metavar="MODEL", help="e.g. '{name: dit, size: xl/2, conditions: [class]}'")
    add("--latents", type=Path, metavar="DIR", help="latents or pixels that the model was trained on")
    add("--autoencoder", type=Path, metavar="DIR", help="autoencoder of the latents that the model was trained on")
    add("--shape", metavar="C,H,W", help="shape of the network's input")
    add("--classes", type=int, metavar="N", help="number of classes of a class-conditional model")
    add("--step", type=int, default=0, metavar="N", help="number of training steps of the weights")
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the snapshot to write")


def run(arguments: argparse.Namespace) -> None:
    """Write the snapshot."""
    a, shape = arguments, None
    if a.shape is not None:
        parts = a.shape.split(",")
        is_shape = len(parts) == 3 and all(part.isdigit() and int(part) for part in parts)
        demand(is_shape, "shape", a.shape, "C,H,W such as 4,32,32")
        channels, height, width = map(int, parts)
        shape = channels, height, width
    demand(a.classes is None or a.classes > 0, "classes", a.classes, "1 or more")
    demand(a.step >= 0, "step", a.step, "0 or more")
    is_replaceable = a.out.is_dir() and (not any(a.out.iterdir()) or _is_imported(a.out / "milestone.json"))
    allowed = "a new folder, or a folder that import-weights has written"
    demand(is_replaceable or not a.out.exists(), "out", a.out, allowed)
    experiment = _experiment(a)
    from kairos.progress import log
    from kairos.training.import_weights import import_weights

    record = import_weights(a.file, experiment, a.out, a.latents, a.autoencoder, shape, a.classes, a.step)
    x0_shape = "×".join(map(str, record["shape"]))
    command = f"kairos sample --milestone {a.out} --autoencoder DIR --out F.npz --num N"
    log(f"{a.out}: snapshot of {experiment['model']['name']}, x0 of shape {x0_shape}; generate images: {command}")


def _is_imported(record: Path) -> bool:
    """Return True if a snapshot's record exists and is from import-weights."""
    from kairos.files import read_json

    return record.is_file() and "imported" in read_json(record)


def _experiment(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the experiment of the weights as plain values, from ``--config`` and ``--model``.

    Raises:
        ConfigError: both are missing, or the model needs an experiment file.
    """
    from kairos.config import load, validate
    from kairos.training.import_weights import published_diffusion

    model = {"name": arguments.model} if isinstance(arguments.model, str) else arguments.model
    demand(model or arguments.config, "model", "no value, and no --config", "one of the two")
    if arguments.config is not None:
        config = load(arguments.config).plain()
        return validate({**config, "model": model}, str(arguments.config)).plain() if model else config
    conditions = str(model.get("conditions")) if isinstance(model, dict) else ""
    for name in ("text", "low_resolution"):
        demand(name not in conditions, "config", f"none with a model conditioned on {name}", "an experiment file")
    values: dict[str, Any] = {"methods": {"imported": {}}, "model": model, "diffusion": published_diffusion(model)}
    config = validate({"experiment": "imported", **values}, "--model").plain()
    conditions, name = config["model"].get("conditions"), config["model"]["name"]
    if conditions and config["model"].get("null_class", name != "ddpmpp"):
        # published models are trained for guidance, except ADM's and EDM's
        config["training"]["condition_dropout"] = 0.1
    return config
