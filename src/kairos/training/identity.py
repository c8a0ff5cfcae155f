"""The identity of a training run: the hash of the settings, inputs and code that decide its trajectory.

The identity does not depend on the number of steps, segments, logging, paths or versions of packages. A longer run
with an equal identity therefore resumes where the shorter one ended. If the learning-rate schedule ends at
the last milestone, the identity includes this step, and a longer run starts from step 0.
This module imports no torch, because the workflow uses it.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kairos.files import sha256_json
from kairos.milestones import hash_start_weights
from kairos.stages import TRAIN, hash_stage_code, select_fields

if TYPE_CHECKING:
    from kairos.training.settings import RunSettings


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
        **select_fields(TRAIN, run.sections),
        "seed": run.seed,
        "device": device,
        "code": hash_stage_code(TRAIN, run.sections),
    }
    start_folder = run.training.start_from
    if start_folder:
        parts["training"]["start_from"] = hash_start_weights(Path(start_folder), run.model)
    return {**parts, "identity": sha256_json(parts)}
