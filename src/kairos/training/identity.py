"""The identity of a training: the hash of what decides its trajectory, and nothing else.

Number of steps, milestones, segments, logging and paths are not in it: a longer training of the same identity
goes on where the shorter one ended. No torch here: the workflow asks for code fingerprints too.
"""

from pathlib import Path
from typing import Any

from kairos.files import sha256_json
from kairos.fingerprint import fingerprint, roots_of
from kairos.milestones import hash_start_weights

# All settings count but these: one that is new and forgotten here makes another identity, not a wrong one.
_PLACE = ("processes", "nodes", "trainings_per_gpu", "device")  # where it is computed
_CUT = ("milestones", "segments", "checkpoint_every", "log_every")  # and in which pieces


def trajectory_settings(plain: dict[str, Any], method: str) -> dict[str, Any]:
    """The part of section `training` that decides the trajectory of a method of an experiment."""
    from kairos_timesteps.components import COUPLINGS

    coupling = plain["methods"][method].get("coupling", {"name": "independent"})["name"]
    place = _PLACE[1:] if COUPLINGS.entry(coupling).facts.get("by_rank") else _PLACE  # each rank couples its own part
    return {key: value for key, value in plain["training"].items() if key not in place + _CUT}


def code_roots(plain: dict[str, Any], method: str) -> list[str]:
    """The modules that a training of `method` starts from: the loop and the components that its configuration names."""
    from kairos.losses.registries import LOSSES
    from kairos.models.registries import MODELS
    from kairos.training.registries import AVERAGES, OPTIMIZERS, PROBES, SCHEDULES
    from kairos_timesteps.components import COUPLINGS, SAMPLERS, WEIGHTINGS
    from kairos_timesteps.diffusion.registries import PROCESSES

    chosen, training = plain["methods"][method], plain["training"]
    components = [
        (MODELS, plain["model"]),
        (PROCESSES, plain["diffusion"]["process"]),
        (SAMPLERS, chosen["sampler"]),
        (WEIGHTINGS, chosen["weighting"]),
        *([(COUPLINGS, chosen["coupling"])] if "coupling" in chosen else []),
        (OPTIMIZERS, training["optimizer"]),
        (SCHEDULES, training["schedule"]),
        (AVERAGES, training["ema"]),
        *((LOSSES, loss) for loss in plain["diffusion"]["losses"]),
        *((PROBES, probe) for probe in training["probes"]),
    ]
    return ["kairos.training.run", *(root for registry, named in components for root in roots_of(registry, named))]


def compute_identity(
    plain: dict[str, Any], method: str, seed: int, latents: dict[str, Any], device: str
) -> dict[str, Any]:
    """Return everything that decides the trajectory of a run, as plain values with their hash under ``identity``.

    Args:
        plain: the whole resolved experiment.
        method: name of the method; its content counts, not its name.
        seed: seed of the training run.
        latents: manifest of the training data.
        device: type of the computing device.
    """
    parts = {
        "data": latents["content_sha256"],
        "autoencoder": latents["autoencoder_sha256"],
        "model": plain["model"],
        "diffusion": plain["diffusion"],
        "method": plain["methods"][method],
        "seed": seed,
        "training": trajectory_settings(plain, method),
        "device": device,
        "code": fingerprint(code_roots(plain, method)),
    }
    if start := plain["training"]["start_from"]:  # which weights, wherever they lie
        parts["training"]["start_from"] = hash_start_weights(Path(start), plain["model"])
    return {**parts, "identity": sha256_json(parts)}
