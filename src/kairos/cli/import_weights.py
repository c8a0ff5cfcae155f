"""``kairos import-weights``: write a snapshot from published weights."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kairos.cli.common import demand_option, yaml_type

if TYPE_CHECKING:
    from kairos.config import Experiment


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `kairos import-weights`."""
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
    """Read published weights, write them as a snapshot to ``--out``, and log the command that generates images.

    Files read: the weights, and the experiment file, latents or autoencoder that describe the input of the network. An
    imported snapshot in ``--out`` is replaced.

    Raises:
        ConfigError: an argument is not allowed, the options do not describe the model, or the latents lack a condition
            of the model.
        KairosError: the weights cannot be read, or do not fit the model.
    """
    out: Path = arguments.out
    shape = None if arguments.shape is None else _parse_shape(arguments.shape)
    demand_option(arguments.classes is None or arguments.classes > 0, "classes", arguments.classes, "1 or more")
    demand_option(arguments.step >= 0, "step", arguments.step, "0 or more")
    demand_option(_accepts_import(out), "out", out, "a new folder, or a folder that import-weights has written")
    experiment = _experiment_of_weights(arguments)

    # imported after the checks of the arguments, since it takes seconds
    from kairos.progress import log
    from kairos.training.import_weights import import_weights

    if arguments.latents is not None:
        _check_conditions_of_latents(arguments.latents, experiment.conditions)
    any_method = next(iter(experiment.methods))  # the model does not depend on the method
    record = import_weights(
        arguments.file,
        experiment.run_settings(any_method, seed=0),
        out,
        latents=arguments.latents,
        autoencoder=arguments.autoencoder,
        shape=shape,
        classes=arguments.classes,
        step=arguments.step,
    )
    x0_shape = "×".join(map(str, record["shape"]))
    command = f"kairos sample --snapshot {out} --autoencoder DIR --out F.npz --num N"
    log(f"{out}: snapshot of {experiment.model.name}, x0 of shape {x0_shape}; generate images: {command}")


def _parse_shape(text: str) -> tuple[int, int, int]:
    """Return channels, height and width from a text ``C,H,W``, which contains no blanks.

    Raises:
        ConfigError: the text is not three positive integers.
    """
    sizes = text.split(",")
    is_shape = len(sizes) == 3 and all(size.isdecimal() and int(size) > 0 for size in sizes)
    demand_option(is_shape, "shape", text, "C,H,W such as 4,32,32")
    channels, height, width = map(int, sizes)
    return channels, height, width


def _check_conditions_of_latents(latents: Path, conditions: list[str]) -> None:
    """Check that latents describe every condition of the model; ``--classes`` is ignored with latents.

    Raises:
        ConfigError: a condition is missing in the latents.
        KairosError: the latents are missing or damaged.
    """
    from kairos.data.latents import open_latents

    described = list(open_latents(latents).condition_kinds)
    missing = [name for name in conditions if name not in described]
    got = f"{latents} with {', '.join(described) or 'no conditions'}"
    allowed = f"latents with {', '.join(missing)}, on which the model is conditioned"
    if "class" in missing:
        allowed += ", or --autoencoder or --shape, with --classes, instead of --latents"
    demand_option(not missing, "latents", got, allowed)


def _accepts_import(folder: Path) -> bool:
    """Return True if a snapshot may be written to a folder: it does not exist, is empty, or is an imported snapshot.

    Return False for a file, and for any other folder. Permissions are not checked.

    Raises:
        DamagedError: snapshot.json in the folder is damaged.
    """
    from kairos.files import read_record

    if not folder.exists():
        return True
    if not folder.is_dir():
        return False
    if not any(folder.iterdir()):
        return True
    record = folder / "snapshot.json"
    return record.is_file() and "imported" in read_record(record)


def _experiment_of_weights(arguments: argparse.Namespace) -> "Experiment":
    """Return the experiment in ``--config``, with the model in ``--model`` if it is set.

    Without ``--config``, the experiment has only a model, see `_experiment_of_model`.

    Raises:
        ConfigError: both are missing, or their content is not valid.
    """
    from kairos.config import load, validate

    # `--model dit` is short for `--model "{name: dit}"`
    model = {"name": arguments.model} if isinstance(arguments.model, str) else arguments.model
    demand_option(model or arguments.config, "model", "no value, and no --config", "one of the two")
    if arguments.config is None:
        return _experiment_of_model(model)
    experiment = load(arguments.config)
    if model:
        experiment = validate({**experiment.plain(), "model": model}, str(arguments.config))
    return experiment


def _experiment_of_model(model: Any) -> "Experiment":
    """Return an experiment ``imported`` with a model and one method, ``imported``, which has the default strategy.

    Process and prediction target are those with which the model's published weights were trained, or else the defaults.
    A conditional model with a null class has a condition dropout of 0.1, so that sampling accepts guidance.

    Args:
        model: content of section `model`, which is not checked yet.

    Raises:
        ConfigError: the model is not valid, or is conditioned on text or low-resolution images, which only an
            experiment file describes.
    """
    from kairos.config import validate
    from kairos.training.import_weights import published_diffusion

    # converted to text, since `validate` checks the model below: until then, the conditions may be any YAML
    conditions_text = str(model.get("conditions")) if isinstance(model, dict) else ""
    for condition in ("text", "low_resolution"):  # their data are described only by an experiment file
        got = f"none with a model conditioned on {condition}"
        demand_option(condition not in conditions_text, "config", got, "an experiment file")
    values: dict[str, Any] = {
        "experiment": "imported",
        "methods": {"imported": {}},
        "model": model,
        "diffusion": published_diffusion(model),
    }
    experiment = validate(values, "--model")
    # published models are trained for guidance, except ADM's (null_class: false) and EDM's (ddpmpp)
    is_edm = experiment.model.name == "ddpmpp"
    has_null_class = getattr(experiment.model, "null_class", not is_edm)  # models may lack the option null_class
    if experiment.conditions and has_null_class:
        training = experiment.training.model_copy(update={"condition_dropout": 0.1})
        experiment = experiment.model_copy(update={"training": training})
    return experiment
