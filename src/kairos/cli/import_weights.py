"""``kairos import-weights``."""

import argparse
from pathlib import Path
from typing import Any

from kairos.cli.common import demand, yaml_type


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Arguments of ``kairos import-weights``."""
    parser.epilog = (
        "What the weights are of is said by --config, an experiment file, by --model, or by both: --model then takes "
        "the place of the file's. The shape of x0 comes from --latents, from --autoencoder or from --shape."
    )
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="published weights: a .pt, .pth or .ckpt of tensors, or .safetensors")
    add("--config", type=Path, metavar="F", help="experiment file that the weights fit")
    model = yaml_type("model", "a name or {name: ..., options}")
    add("--model", type=model, metavar="MODEL", help="e.g. '{name: dit, size: xl/2, conditions: [class]}'")
    add("--latents", type=Path, metavar="DIR", help="latents or pixels that the weights go with")
    add("--autoencoder", type=Path, metavar="DIR", help="autoencoder that the weights go with")
    add("--shape", metavar="C,H,W", help="shape of x0")
    add("--classes", type=int, metavar="N", help="classes that the model is told")
    add("--step", type=int, default=0, metavar="N", help="steps that the weights were trained for")
    add("--out", type=Path, required=True, metavar="DIR", help="milestone folder to write")


def run(arguments: argparse.Namespace) -> None:
    """Write the milestone."""
    a, shape = arguments, None
    if a.shape is not None:
        parts = a.shape.split(",")
        good = len(parts) == 3 and all(part.isdigit() and int(part) for part in parts)
        demand(good, "shape", a.shape, "C,H,W such as 4,32,32")
        channels, height, width = map(int, parts)
        shape = channels, height, width
    demand(a.classes is None or a.classes > 0, "classes", a.classes, "1 or more")
    demand(a.step >= 0, "step", a.step, "0 or more")
    replaced = a.out.is_dir() and (not any(a.out.iterdir()) or _imported(a.out / "milestone.json"))
    demand(replaced or not a.out.exists(), "out", a.out, "a new folder, or one that import-weights made")
    experiment = _experiment(a)
    from kairos.progress import say
    from kairos.training.import_weights import import_weights

    record = import_weights(a.file, experiment, a.out, a.latents, a.autoencoder, shape, a.classes, a.step)
    weights = "×".join(map(str, record["shape"]))
    draw = f"kairos sample --milestone {a.out} --autoencoder DIR --out F.npz --num N"
    say(f"{a.out}: milestone of {experiment['model']['name']}, x0 of shape {weights}; draw with: {draw}")


def _imported(record: Path) -> bool:
    from kairos.files import read_json

    return record.is_file() and "imported" in read_json(record)


def _experiment(arguments: argparse.Namespace) -> dict[str, Any]:
    """The whole experiment that the weights are said to be of."""
    from kairos.config import load, validate
    from kairos.training.import_weights import published_diffusion

    model = {"name": arguments.model} if isinstance(arguments.model, str) else arguments.model
    demand(model or arguments.config, "model", "neither it nor --config", "one of them")
    if arguments.config is not None:
        config = load(arguments.config).plain()
        return validate({**config, "model": model}, str(arguments.config)).plain() if model else config
    conditions = str(model.get("conditions")) if isinstance(model, dict) else ""
    for name in ("text", "low_resolution"):
        demand(name not in conditions, "config", f"none with a model that is told of {name}", "an experiment file")
    values: dict[str, Any] = {"methods": {"imported": {}}, "model": model, "diffusion": published_diffusion(model)}
    config = validate({"experiment": "imported", **values}, "--model").plain()
    told, named = config["model"].get("conditions"), config["model"]["name"]
    if told and config["model"].get("null_class", named != "ddpmpp"):
        config["training"]["condition_dropout"] = 0.1  # the files' models can be guided, but ADM's and EDM's
    return config
