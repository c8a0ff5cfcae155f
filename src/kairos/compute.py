"""Threads, device and determinism of a job, set explicitly before anything is computed."""

import contextlib
import os
import warnings
from collections.abc import Iterator

import torch

from kairos import portable
from kairos_timesteps.errors import KairosError


def setup(
    threads: int, device: str, deterministic: bool | str = True, local_rank: int | None = None, precision: str = "fp32"
) -> torch.device:
    """Set the number of computing threads, choose the device and switch deterministic algorithms on.

    Args:
        threads: computing threads; results differ between thread counts, so it is part of a run's identity.
        device: ``auto`` (a GPU where there is one), ``cpu``, ``cuda`` or ``cuda:N``.
        deterministic: refuse algorithms whose result varies between runs; ``portable``: between processors too.
        local_rank: number of this process among those on this machine, each of which has the GPU of its number.
        precision: ``tf32`` allows its matrix products and convolutions on a GPU.

    Raises:
        KairosError: a GPU is asked for, or was given to the job, and none is usable; portable kernels are not.
    """
    torch.set_num_threads(threads)
    if deterministic == "portable":
        portable.setup()
    usable = torch.cuda.is_available()
    given = _given_by_slurm()
    if not usable and device != "cpu" and (given or device != "auto"):
        asked = f"got {device!r}" + (f" in a SLURM job that was given GPUs ({given})" if given else "")
        raise KairosError(
            f"training.device: {asked}, but no usable GPU is here; allowed here: cpu" + " or auto" * (not given)
        )
    chosen = torch.device(("cuda" if usable else "cpu") if device == "auto" else device)
    if chosen.type == "cuda" and local_rank is not None:
        if local_rank >= torch.cuda.device_count():
            raise KairosError(
                f"training.processes: process {local_rank} of this machine has no GPU, {torch.cuda.device_count()} "
                "are usable; ask for as many GPUs as processes on a machine"
            )
        chosen = torch.device("cuda", local_rank)
        torch.cuda.set_device(chosen)
    if chosen.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
        torch.backends.cudnn.benchmark = not deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        warnings.filterwarnings("ignore", message=".*deterministic.*", category=UserWarning)
    # the same as use_deterministic_algorithms, which imports the compiler (4 s of CPU time) to tell it
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs 5 % of a small model's step; nothing reads it
    return chosen


@contextlib.contextmanager
def precision(name: str, device: torch.device) -> Iterator[None]:
    """Set the precision in which a network computes inside the context, on one device.

    ``fp32``: full precision. ``tf32``: matrix products and convolutions on a GPU round their inputs to 11 significant
    bits. ``bf16``: autocast.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = name == "tf32"
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=name == "bf16"):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def _given_by_slurm() -> str:
    """The variable that says that this SLURM job has GPUs, with its value; empty where it has none."""
    if "SLURM_JOB_ID" in os.environ:
        for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES"):
            value = os.environ.get(name, "")
            if value not in ("", "-1", "NoDevFiles") and (name, value) != ("SLURM_GPUS_ON_NODE", "0"):
                return f"{name}={value}"
    return ""


def describe(device: torch.device) -> str:
    """A device as people know it, and which ones this process was allowed to see."""
    name = f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "the CPU"
    return f"{name}, CUDA_VISIBLE_DEVICES {os.environ.get('CUDA_VISIBLE_DEVICES') or 'not set'}"
