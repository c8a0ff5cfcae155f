"""The identity of a training run: the hash of the settings, inputs and code that decide its trajectory.

The identity does not depend on the number of steps, segments, logging, paths or versions of packages. A longer run
with an equal identity therefore resumes where the shorter one ended. If the learning-rate schedule ends at
the last milestone, the identity includes this step, and a longer run starts from step 0.
This module imports no torch, because the workflow uses it.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kairos.components import ComponentOptions
from kairos.files import sha256_json
from kairos.fingerprint import fingerprint, roots_of
from kairos.library_components import LibraryComponent
from kairos.milestones import hash_start_weights

if TYPE_CHECKING:
    from kairos.diffusion import MethodConfig
    from kairos.training.settings import RunSettings, TrainingConfig

# Settings that do not decide the trajectory. A new setting that is missing here changes identities, which is safe:
# runs are computed again.
# `device` is here since `compute_identity` includes the type of the device in use.
_HARDWARE_SETTINGS = ("processes", "nodes", "trainings_per_gpu", "device")
_JOB_SETTINGS = ("milestones", "segments", "checkpoint_every", "log_every")


def trajectory_settings(training: "TrainingConfig", method: "MethodConfig") -> dict[str, Any]:
    """Return the settings of section `training` that decide the trajectory of a method, as plain values.

    Milestones, segments, checkpoints, logging and hardware are left out. The number of processes is included only if
    the method's coupling declares the fact `by_rank`: each rank then couples its slice of the batch. The path
    `start_from` is included; `compute_identity` replaces it. The length of a schedule is as in `set_schedule_length`.
    """
    ignored = {*_HARDWARE_SETTINGS, *_JOB_SETTINGS}
    if method.coupling.facts.get("by_rank"):
        ignored.remove("processes")
    values = set_schedule_length(training.model_dump(mode="json"))
    return {name: value for name, value in values.items() if name not in ignored}


def set_schedule_length(training: dict[str, Any]) -> dict[str, Any]:
    """Return plain values of section `training` in which a schedule that ends at the last milestone has this length.

    Such a schedule has an option ``length``, which is None. Its new value is the last milestone as the experiment file
    states it, so ``10 epochs`` differs from the equal number of steps. Other sections are returned unchanged.
    """
    schedule = training.get("schedule", {})
    if "length" not in schedule or schedule["length"] is not None:
        return training
    return {**training, "schedule": {**schedule, "length": training["milestones"][-1]}}


def code_roots(run: "RunSettings") -> list[str]:
    """Return the code that a training run starts from: the loop and the components that the experiment selects.

    The names are modules, or functions and classes as ``module:name``; a name may occur twice.
    """
    training = run.training
    components: list[ComponentOptions | LibraryComponent] = [
        run.model,
        run.diffusion.process,
        *run.method.components,
        training.optimizer,
        training.schedule,
        training.ema,
        *run.diffusion.losses,
        *training.probes,
    ]
    roots = ["kairos.training.run"]
    for component in components:
        roots += roots_of(component)
    return roots


def compute_identity(run: "RunSettings", latents: dict[str, Any], device: str) -> dict[str, Any]:
    """Return everything that decides the trajectory of a run, as plain values with their hash under ``identity``.

    The data, the autoencoder and the code are hashes. Section ``training`` contains a hash of the initial weights
    instead of the path `start_from`; only the record of the snapshot is read for it. The name of the method does not
    change the identity.

    Args:
        run: settings of the training run.
        latents: manifest of the training data.
        device: type of the computing device.

    Raises:
        ConfigError: `training.start_from` is not a snapshot of this backbone.
        DamagedError: the record of that snapshot is damaged.
    """
    parts = {
        "data": latents["content_sha256"],
        "autoencoder": latents["autoencoder_sha256"],
        "model": run.model.plain(),
        "diffusion": run.diffusion.model_dump(mode="json"),
        "method": run.method.model_dump(mode="json"),
        "seed": run.seed,
        "training": trajectory_settings(run.training, run.method),
        "device": device,
        "code": fingerprint(code_roots(run)),
    }
    start_folder = run.training.start_from
    if start_folder:
        parts["training"]["start_from"] = hash_start_weights(Path(start_folder), run.model)
    return {**parts, "identity": sha256_json(parts)}
