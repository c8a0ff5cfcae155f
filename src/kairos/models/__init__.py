"""Backbones by registry name.

A backbone is a module ``model(x, t, conditions)`` made by ``Class(options, shape, conditions, outputs)``, with
``weights()`` and ``load_weights(weights)``, and ``config()`` for the config.json that others open.
"""

from pathlib import Path
from typing import Any

from kairos.files import write_json, write_weights
from kairos.models.registries import MODELS
from kairos_timesteps.errors import ConfigError, KairosError
from kairos_timesteps.registry import split

WEIGHTS = "diffusion_pytorch_model.safetensors"


def build(
    model: dict[str, Any],
    shape: tuple[int, int, int],
    conditions: dict[str, dict[str, Any]],
    outputs: int | None = None,
) -> Any:
    """The backbone of a `model` section, for images or latents of `shape` (channels, height, width).

    Args:
        model: ``{"name": ..., option: ...}``.
        shape: of x0.
        conditions: descriptions of the conditions that the data set has, by name.
        outputs: channels of what it gives, see `Process.channels`; None: as many as x0 has.

    Raises:
        KairosError: the model asks for a condition that the data set lacks.
    """
    wanted = model.get("conditions") or []
    check_conditions_accepted(model)
    missing = [name for name in wanted if name not in conditions]
    if missing:
        raise KairosError(
            f"model.conditions: got {missing}, allowed: what the data set has: {sorted(conditions) or 'none'}"
        )
    described = {name: conditions[name] for name in wanted}
    return MODELS.build(*split(model), shape, described, outputs or shape[0])


def check_conditions_accepted(model: dict[str, Any]) -> None:
    """Refuse conditions that a backbone cannot be told of, and one named twice.

    Raises:
        ConfigError: names what is allowed.
    """
    wanted, takes = model.get("conditions") or [], MODELS.entry(model["name"]).facts.get("takes")
    if takes is not None and (set(wanted) - set(takes) or len(set(wanted)) < len(wanted)):
        known = f"{', '.join(takes)}; each once" if takes else "none"
        raise ConfigError(f"model.conditions: got {wanted}, allowed with {model['name']}: {known}")


def save(module: Any, folder: Path, weights: dict[str, Any] | None = None) -> None:
    """Write ``config.json`` and safetensors as diffusers does; `weights` stands in for the module's own (EMA)."""
    write_weights(folder / WEIGHTS, weights or module.weights())
    write_json(folder / "config.json", module.config())


def load(folder: Path, *built: Any) -> Any:
    """The model that a folder holds, in evaluation mode.

    Args:
        folder: what `save` wrote.
        built: the arguments that it was built with, see `build`.

    Raises:
        KairosError: not a model folder.
    """
    from safetensors.torch import load_file

    if not (folder / WEIGHTS).is_file():
        raise KairosError(f"{folder}: no {WEIGHTS}; not a model folder")
    module = build(*built)
    module.load_weights(load_file(folder / WEIGHTS))
    return module.eval()
