"""Files of published weights: opened without running what is in them, and their averaged weights found."""

from pathlib import Path
from typing import Any

from torch import Tensor

from kairos_timesteps.errors import KairosError

Weights = dict[str, Tensor]


def read_published(path: Path) -> tuple[Weights, Weights]:
    """The averaged and the raw weights of a file under their published names; where it holds one of them, that twice.

    Known are a state dict alone (DiT, U-ViT, MDT, ADM), DiT's and SpeeD's ``{model, ema, ...}``, ddpm-torch's
    ``{model, ema: {shadow}}`` and LDM's ``{state_dict}`` with ``model_ema``, as a pickle of torch or safetensors.

    Raises:
        KairosError: there is no such file, it holds more than tensors and numbers, or no weights.
    """
    found = _open_weights(path)
    raw, average = found.get("model"), found.get("ema")
    if isinstance(found.get("state_dict"), dict):
        raw, average = _split_latent_diffusion(found["state_dict"])
    elif isinstance(average, dict) and isinstance(average.get("shadow"), dict):
        average = average["shadow"]
    elif not isinstance(raw, dict) and not isinstance(average, dict):
        raw = found
    chosen = [{k: v for k, v in part.items() if isinstance(v, Tensor)} for part in (average, raw) if part]
    if not chosen or not all(chosen):
        raise KairosError(f"{path}: no weights found; its keys: {', '.join(map(str, list(found)[:8])) or 'none'}")
    return chosen[0], chosen[-1]


def _open_weights(path: Path) -> dict[str, Any]:
    import pickle
    import re
    import warnings
    from argparse import Namespace

    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise KairosError(f"{path}: no such file" if not path.exists() else f"{path}: a folder, allowed: a file")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with (
            warnings.catch_warnings(action="ignore"),  # of a pickle's protocol, about which nobody can do anything
            torch.serialization.safe_globals([Namespace]),  # DiT's own checkpoints hold their arguments
        ):
            found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        holds = re.search(r"GLOBAL (\S+)", str(error))
        raise KairosError(
            f"{path}: not opened, for it holds {holds[1] if holds else 'more than tensors and numbers'}, and such a "
            "pickle runs code when it is opened. EDM's files are of this kind: save the state_dict of their network as "
            "safetensors where you trust the file"
        ) from None
    except (SafetensorError, RuntimeError, EOFError, ValueError, OSError) as error:
        raise KairosError(f"{path}: damaged, or no file of weights ({' '.join(str(error).split())[:200]})") from None
    if not isinstance(found, dict):
        raise KairosError(f"{path}: holds {type(found).__name__}, allowed: a dictionary of weights")
    return found


def _split_latent_diffusion(state: Weights) -> tuple[Weights, Weights | None]:
    """Weights of LDM's ``model.diffusion_model`` and their averages, whose names have lost their dots."""
    first = "model.diffusion_model."
    raw = {name.removeprefix(first): value for name, value in state.items() if name.startswith(first)}
    averages = {name: "model_ema." + f"diffusion_model.{name}".replace(".", "") for name in raw}
    if not any(name in state for name in averages.values()):
        return raw, None
    return raw, {name: state.get(average, raw[name]) for name, average in averages.items()}
