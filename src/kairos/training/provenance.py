"""Provenance of a training run: the libraries, device and settings that it was computed with."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from kairos_timesteps import distributed


def versions() -> dict[str, str | None]:
    """Return the versions of the libraries that decide the last digits of a trajectory; None: not installed."""
    return {"torch": str(torch.__version__), "diffusers": version_of("diffusers")}


def version_of(package: str) -> str | None:
    """Return the version of a package; None if it runs from source or is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def provenance(
    plain: dict[str, Any], device: torch.device, libraries: dict[str, str | None], earlier: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the provenance of a result: versions, device and processes, and whether the result is exact, with reasons.

    `earlier` lists the versions that computed the first steps. The provenance contains nothing that differs between
    machines with the same packages: the CPU is recorded with the times.
    """
    settings = plain["training"]
    said = "versions: torch {torch}, diffusers {diffusers} to step {steps}"
    inexact = [said.format(**old) for old in earlier]
    dropped = distributed.ranks() > 1 and plain["model"].get("dropout") and settings["microbatch"] is None
    reasons = {
        "training.compile: autotuning may choose other kernels on another run": settings["compile"],
        "training.deterministic is off": not settings["deterministic"],
        "training.processes: dropout differs between numbers of processes; training.microbatch ends that": dropped,
    }
    inexact += [reason for reason, holds in reasons.items() if holds]
    return {
        "kairos": version_of("kairos"),
        "numpy": version_of("numpy"),
        **libraries,
        "resumed_under": earlier,
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": settings["threads"],
        "processes": distributed.ranks(),
        "exact": not inexact,
        "inexact_because": inexact,
    }
