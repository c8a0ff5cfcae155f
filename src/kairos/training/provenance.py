"""Provenance of a training run: the libraries, machine and settings that computed it, and what is bit-exact."""

import os
import platform
import socket
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from kairos import portable
from kairos.models.settings import BackboneOptions
from kairos.training.settings import TrainingConfig
from kairos_timesteps import distributed

# facts of an environment that decide the last digits; the number of threads is part of the identity
_ROUNDING = ("torch", "diffusers", "numpy", "machine", "device", "processes")


def library_versions() -> dict[str, str | None]:
    """Return the versions with which a checkpoint resumes unasked: torch, and diffusers or None if it is missing."""
    return {"torch": str(torch.__version__), "diffusers": package_version("diffusers")}


def package_version(package: str) -> str | None:
    """Return the version of an installed package; None if it runs from source or is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def describe_environment(training: TrainingConfig, device: torch.device) -> dict[str, Any]:
    """Return the environment that computes steps: versions, device, threads and processes; unknown versions are None.

    ``device`` is the name of the GPU, or the model of the CPU with its instruction set. Portable kernels give equal
    bits on all CPUs with AVX2, so the model is then left out. ``machine`` is the architecture of the CPU.
    """
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    elif training.deterministic == "portable":
        device_name = "x86-64 CPU with AVX2 (portable)"
    else:
        facts = portable.machine()
        device_name = f"{facts['processor']} ({facts['instruction_set']})"
    return {
        "kairos": package_version("kairos"),
        "numpy": package_version("numpy"),
        **library_versions(),
        "machine": platform.machine(),
        "device": device_name,
        "threads": training.threads,
        "processes": distributed.ranks(),
    }


def describe_clock(training: TrainingConfig, device: torch.device) -> dict[str, Any]:
    """Return the machine that training times are measured on: host, CPU, GPU or None, usable CPUs, threads, processes.

    ``cpu`` and ``gpu`` are the names of the models.
    """
    return {
        "host": socket.gethostname(),
        "cpu": portable.machine()["processor"],
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cpus": len(os.sched_getaffinity(0)),
        "threads": training.threads,
        "processes": distributed.ranks(),
    }


def changes_bits(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Return True if steps after a resume may differ in their last digits, by two results of `describe_environment`."""
    return any(before[name] != now[name] for name in _ROUNDING)


def build_provenance(
    model: BackboneOptions,
    training: TrainingConfig,
    environment: dict[str, Any],
    earlier: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return the provenance of a result: its environment, and whether another run of it gives equal bits.

    ``rerun_is_bit_exact`` is True if every run of these settings in the environment ``bit_exact_on`` has equal bits,
    with and without interruptions. Otherwise ``bit_exact_on`` is None, and ``inexact_because`` lists the reasons.

    Args:
        model: the backbone.
        training: section `training` of the experiment.
        environment: result of `describe_environment` for the last steps.
        earlier: other environments that computed the first steps, each with ``steps``, the number of steps by then.
    """
    inexact_because = []
    for before in earlier:
        inexact_because.append(f"resumed: to step {before['steps']} on {_describe_rounding(before)}")
    if training.compile:
        inexact_because.append("training.compile: autotuning may choose other kernels on another run")
    if not training.deterministic:
        inexact_because.append("training.deterministic is off")
    # With `microbatch`, a micro-batch has its own dropout stream. Without it, the slice of a process has one, so the
    # number of processes changes the dropout masks.
    has_dropout = getattr(model, "dropout", 0.0) > 0  # some backbones have no option `dropout`
    if environment["processes"] > 1 and has_dropout and training.microbatch is None:
        inexact_because.append(
            "training.processes: dropout differs between numbers of processes; training.microbatch ends that"
        )
    return {
        **environment,
        "resumed_under": earlier,
        "rerun_is_bit_exact": not inexact_because,
        "bit_exact_on": None if inexact_because else _describe_rounding(environment),
        "inexact_because": inexact_because,
    }


def _describe_rounding(environment: dict[str, Any]) -> str:
    """Return the facts of an environment that decide the last digits, as text."""
    threads = f"{environment['threads']} thread" + ("s" if environment["threads"] != 1 else "")
    processes = f"{environment['processes']} process" + ("es" if environment["processes"] != 1 else "")
    versions = ", ".join(f"{name} {environment[name]}" for name in (*library_versions(), "numpy"))
    return f"{environment['device']}, {versions}, {threads}, {processes}"
