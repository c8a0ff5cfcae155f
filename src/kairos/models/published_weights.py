"""Reading of published weight files, without executing code in them."""

from pathlib import Path
from typing import Any

from torch import Tensor

from kairos.finite import demand_finite
from kairos_timesteps.errors import KairosError

Weights = dict[str, Tensor]


def read_published(path: Path) -> tuple[Weights, Weights]:
    """Return the averaged and the raw weights of a file by their published names; equal if the file has one of them.

    The weights are on the CPU. Entries that are not tensors are left out.

    A file is a pickle of torch or safetensors, in one of these layouts: a state dict (DiT, U-ViT, MDT, ADM);
    ``{model, ema, ...}`` (DiT, SpeeD); ``{model, ema: {shadow}}`` (ddpm-torch); ``{state_dict}`` with ``model_ema``
    (LDM).

    Raises:
        NotFiniteError: a weight is not finite.
        KairosError: the file is missing or damaged, contains more than tensors and numbers, or contains no weights.
            Also if the averaged or the raw weights are present without a tensor.
    """
    content = _open_weights(path)
    average, raw = _find_state_dicts(content)
    present = [_select_tensors(state_dict) for state_dict in (average, raw) if state_dict]
    if not present or not all(present):  # no state dict, or one without tensors
        keys = ", ".join(map(str, list(content)[:8])) or "none"
        raise KairosError(f"{path}: contains no weights; its keys: {keys}")
    for weights in present:
        demand_finite(weights, f"{path}: weights", "download or export the file again")
    return present[0], present[-1]  # the only one twice, if there is no average or no raw weights


def _find_state_dicts(content: dict[str, Any]) -> tuple[Any, Any]:
    """Return the state dicts of the averaged and of the raw weights in a file's content; empty or None if absent.

    `read_published` lists the layouts. A content in none of them is treated as a state dict of raw weights. The state
    dicts may contain entries that are not tensors.
    """
    if isinstance(content.get("state_dict"), dict):  # latent diffusion
        return _split_latent_diffusion(content["state_dict"])
    raw, average = content.get("model"), content.get("ema")
    if not isinstance(raw, dict):
        raw = None
    if not isinstance(average, dict):
        average = None
    elif isinstance(average.get("shadow"), dict):  # ddpm-torch
        return average["shadow"], raw
    if average is None and raw is None:  # the file is a state dict itself
        return None, content
    return average, raw


def _select_tensors(state_dict: dict[str, Any]) -> Weights:
    """Return the entries of a state dict that are tensors."""
    return {name: value for name, value in state_dict.items() if isinstance(value, Tensor)}


def _open_weights(path: Path) -> dict[str, Any]:
    """Return the content of a file of weights, with tensors on the CPU, without executing code in the file.

    The suffix ``.safetensors`` selects that format; any other file is opened as a pickle of torch.

    Raises:
        KairosError: the file is missing or damaged, or contains more than tensors and numbers.
    """
    import pickle
    import re
    import warnings
    from argparse import Namespace

    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.exists():
        raise KairosError(f"{path}: no such file")
    if not path.is_file():
        raise KairosError(f"{path}: a folder, allowed: a file")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with (
            warnings.catch_warnings(action="ignore"),  # about the pickle's protocol, which the user cannot change
            torch.serialization.safe_globals([Namespace]),  # DiT's checkpoints contain their command-line arguments
        ):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # torch's message names the first object that is not allowed, such as "GLOBAL torch_utils.persistence ..."
        imported = re.search(r"GLOBAL (\S+)", str(error))
        content_name = imported[1] if imported else "more than tensors and numbers"
        raise KairosError(
            f"{path}: not opened, because it contains {content_name}, and such a pickle runs code when it is opened. "
            "Files of EDM are of this kind: if you trust the file, save the state_dict of its network as safetensors"
        ) from None
    except (SafetensorError, RuntimeError, EOFError, ValueError, OSError) as error:
        raise KairosError(f"{path}: damaged, or not a file of weights ({' '.join(str(error).split())[:200]})") from None
    if not isinstance(content, dict):
        raise KairosError(f"{path}: contains {type(content).__name__}, allowed: a dictionary of weights")
    return content


def _split_latent_diffusion(state: Weights) -> tuple[Weights | None, Weights]:
    """Return the averages of LDM's weights, None if the file has no averages, and the raw ``model.diffusion_model``.

    Both have names without the prefix. LDM stores the average of a weight under ``model_ema`` and the weight's name
    without dots. A weight without an average is used as its average.
    """
    prefix = "model.diffusion_model."
    raw = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    average_names = {}  # such as model_ema.diffusion_modelout2bias for the weight out.2.bias
    for name in raw:
        average_names[name] = "model_ema." + f"diffusion_model.{name}".replace(".", "")
    if not any(average_name in state for average_name in average_names.values()):
        return None, raw
    average = {name: state.get(average_name, raw[name]) for name, average_name in average_names.items()}
    return average, raw
