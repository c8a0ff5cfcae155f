"""Construction, saving and loading of backbones by registry name.

A backbone is a module ``model(x, t, conditions)``, constructed by ``Class(options, shape, conditions, outputs)``. It
has ``weights()``, ``load_weights(weights)``, and ``config()``, the content of config.json.
"""

from pathlib import Path
from typing import Any

from kairos.files import write_json, write_weights
from kairos.finite import demand_finite
from kairos.models.settings import BackboneOptions
from kairos_timesteps.errors import ConfigError, KairosError

WEIGHTS = "diffusion_pytorch_model.safetensors"
DIVERGED_REMEDY = "the training run diverged, or the imported file is damaged: train or import other weights"


def build(
    model: BackboneOptions,
    shape: tuple[int, int, int],
    conditions: dict[str, dict[str, Any]],
    outputs: int | None = None,
) -> Any:
    """Build the backbone of a `model` section, with random weights from torch's global generator.

    The backbone is in training mode, on the CPU. Conditions that the section does not list are left out.

    Args:
        model: the backbone with its options.
        shape: (channels, height, width) of x0.
        conditions: descriptions of the conditions that the data set has, by name.
        outputs: output channels, see `Process.channels`; None: the channels of x0.

    Raises:
        ConfigError: the backbone does not accept a condition, or a condition is listed twice.
        KairosError: the data set lacks a condition that the section lists, or the backbone does not fit the shape.
    """
    check_conditions_accepted(model)
    missing = [name for name in model.conditions if name not in conditions]
    if missing:
        raise KairosError(
            f"model.conditions: got {missing}, allowed: conditions of the data set: {sorted(conditions) or 'none'}"
        )
    model_conditions = {name: conditions[name] for name in model.conditions}
    return model.build(shape, model_conditions, outputs or shape[0])


def check_conditions_accepted(model: BackboneOptions) -> None:
    """Check that a backbone can be conditioned on the conditions of a `model` section, and that each is listed once.

    A backbone that accepts any condition (`takes` is None) is not checked, not even for duplicates.

    Raises:
        ConfigError: a condition is not allowed or listed twice; the message contains the allowed ones.
    """
    conditions, accepted = model.conditions, model.takes
    if accepted is None:
        return
    has_unaccepted = bool(set(conditions) - set(accepted))
    has_duplicates = len(set(conditions)) < len(conditions)
    if has_unaccepted or has_duplicates:
        allowed = f"{', '.join(accepted)}; each once" if accepted else "none"
        raise ConfigError(f"model.conditions: got {conditions}, allowed with {model.name}: {allowed}")


def save(module: Any, folder: Path, weights: dict[str, Any] | None = None) -> None:
    """Write a backbone in the layout of diffusers: config.json and diffusion_pytorch_model.safetensors.

    The folder is created if it does not exist; existing files are replaced. If `weights`, such as an average, are
    passed, they are saved instead of the module's weights.
    """
    write_weights(folder / WEIGHTS, weights or module.weights())
    write_json(folder / "config.json", module.config())


def load(
    folder: Path,
    model: BackboneOptions,
    shape: tuple[int, int, int],
    conditions: dict[str, dict[str, Any]],
    outputs: int | None = None,
) -> Any:
    """Load a backbone from a folder, in evaluation mode, on the CPU.

    The arguments decide the architecture; config.json is not read. Torch's global generator advances, as in `build`.

    Args:
        folder: folder that `save` wrote.
        model: section `model` of the training run.
        shape: (channels, height, width) of x0.
        conditions: descriptions of the conditions, by name.
        outputs: output channels; None: the channels of x0.

    Raises:
        ConfigError: see `build`.
        KairosError: the folder contains no weights; further cases: see `build`.
        RuntimeError: the weights have other names or shapes than the backbone.
        SafetensorError: the file of weights is damaged.
        NotFiniteError: a weight is not finite.
    """
    from safetensors.torch import load_file

    if not (folder / WEIGHTS).is_file():
        raise KairosError(f"{folder}: no {WEIGHTS}; not a model folder")
    module = build(model, shape, conditions, outputs)
    weights = load_file(folder / WEIGHTS)
    demand_finite(weights, f"{folder / WEIGHTS}: weights", DIVERGED_REMEDY)
    module.load_weights(weights)
    return module.eval()
