"""Provenance of a training run: the libraries, device and settings that it was computed with."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from kairos.models.settings import BackboneOptions
from kairos.training.settings import TrainingConfig
from kairos_timesteps import distributed


def library_versions() -> dict[str, str | None]:
    """Return the versions of torch and diffusers, which decide the last digits; None if diffusers is not installed."""
    return {"torch": str(torch.__version__), "diffusers": package_version("diffusers")}


def package_version(package: str) -> str | None:
    """Return the version of an installed package; None if it runs from source or is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def build_provenance(
    model: BackboneOptions,
    training: TrainingConfig,
    device: torch.device,
    libraries: dict[str, str | None],
    earlier: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return the provenance of a result: versions, device and processes, and whether the result is exact, with reasons.

    ``inexact_because`` is a list of reasons as texts, and ``exact`` is True if it is empty. ``device`` is the name of
    the GPU, or ``cpu``; ``threads`` and ``processes`` are the present numbers. Unknown versions are None. ``machine``
    is the architecture: the model of the CPU is left out, so that it does not change the provenance.

    Args:
        model: the backbone.
        training: section `training` of the experiment.
        device: computing device.
        libraries: versions from `library_versions`.
        earlier: other versions that computed the first steps: ``torch``, ``diffusers``, and ``steps``, the number of
            steps by then; each makes the result inexact.
    """
    inexact_because = []
    for versions in earlier:
        inexact_because.append(
            f"versions: torch {versions['torch']}, diffusers {versions['diffusers']} to step {versions['steps']}"
        )
    if training.compile:
        inexact_because.append("training.compile: autotuning may choose other kernels on another run")
    if not training.deterministic:
        inexact_because.append("training.deterministic is off")
    # With `microbatch`, a micro-batch has its own dropout stream. Without it, the slice of a process has one, so the
    # number of processes changes the dropout masks.
    has_dropout = getattr(model, "dropout", 0.0) > 0  # some backbones have no option `dropout`
    if distributed.ranks() > 1 and has_dropout and training.microbatch is None:
        inexact_because.append(
            "training.processes: dropout differs between numbers of processes; training.microbatch ends that"
        )
    return {
        "kairos": package_version("kairos"),
        "numpy": package_version("numpy"),
        **libraries,
        "resumed_under": earlier,
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": training.threads,
        "processes": distributed.ranks(),
        "exact": not inexact_because,
        "inexact_because": inexact_because,
    }
