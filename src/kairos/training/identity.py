"""The identity of a training run: the hash of everything that decides its trajectory, and of nothing else.

The identity does not depend on the number of steps, milestones, segments, logging and paths. A longer run with an equal
identity therefore resumes where the shorter one ended. This module imports no torch, because the workflow uses it.
"""

from pathlib import Path
from typing import Any

from kairos.files import sha256_json
from kairos.fingerprint import fingerprint, roots_of
from kairos.milestones import hash_start_weights

# Settings that do not decide the trajectory. A new setting that is missing here changes identities, which is safe:
# runs are computed again.
_HARDWARE_SETTINGS = ("processes", "nodes", "trainings_per_gpu", "device")
_JOB_SETTINGS = ("milestones", "segments", "checkpoint_every", "log_every")


def trajectory_settings(plain: dict[str, Any], method: str) -> dict[str, Any]:
    """Return the part of section `training` that decides the trajectory of a method.

    The number of processes counts for couplings that each rank applies to its slice of the batch.

    Args:
        plain: the whole resolved experiment.
        method: name of the method.
    """
    from kairos_timesteps.components import COUPLINGS

    coupling = plain["methods"][method].get("coupling", {"name": "independent"})
    ignored = {*_HARDWARE_SETTINGS, *_JOB_SETTINGS}
    if COUPLINGS.entry(coupling["name"]).facts.get("by_rank"):
        ignored.remove("processes")
    return {key: value for key, value in plain["training"].items() if key not in ignored}


def code_roots(plain: dict[str, Any], method: str) -> list[str]:
    """Return the code that a training run starts from: the loop and the components that the experiment selects.

    Args:
        plain: the whole resolved experiment.
        method: name of the method.

    Returns:
        Names of modules, and of functions as ``module:function``.
    """
    from kairos.losses.registries import LOSSES
    from kairos.models.registries import MODELS
    from kairos.training.registries import AVERAGES, OPTIMIZERS, PROBES, SCHEDULES
    from kairos_timesteps.components import COUPLINGS, SAMPLERS, WEIGHTINGS
    from kairos_timesteps.diffusion.registries import PROCESSES

    strategy, training = plain["methods"][method], plain["training"]
    components = [
        (MODELS, plain["model"]),
        (PROCESSES, plain["diffusion"]["process"]),
        (SAMPLERS, strategy["sampler"]),
        (WEIGHTINGS, strategy["weighting"]),
        (OPTIMIZERS, training["optimizer"]),
        (SCHEDULES, training["schedule"]),
        (AVERAGES, training["ema"]),
        *((LOSSES, loss) for loss in plain["diffusion"]["losses"]),
        *((PROBES, probe) for probe in training["probes"]),
    ]
    if "coupling" in strategy:
        components.append((COUPLINGS, strategy["coupling"]))
    roots = ["kairos.training.run"]
    for registry, component in components:
        roots += roots_of(registry, component)
    return roots


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
    snapshot = plain["training"]["start_from"]
    if snapshot:  # the hash of the weights replaces their path
        parts["training"]["start_from"] = hash_start_weights(Path(snapshot), plain["model"])
    return {**parts, "identity": sha256_json(parts)}
