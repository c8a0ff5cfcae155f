"""Threads, device, precision and determinism of a job, which are set before anything is computed."""

import contextlib
import os
import warnings
from collections.abc import Iterator

import torch

from kairos import portable
from kairos.errors import TemporaryError


def setup(
    threads: int,
    device: str,
    deterministic: bool | str = True,
    local_rank: int | None = None,
    precision: str = "fp32",
    device_field: str = "training.device",
) -> torch.device:
    """Set the number of threads and deterministic algorithms, and return the selected device.

    All settings apply to the whole process, and the caller must not have computed anything before. Determinism sets
    ``CUBLAS_WORKSPACE_CONFIG`` unless it is set, and hides torch's warnings about determinism. An operation without a
    deterministic algorithm then raises an error. Without determinism, cuDNN selects algorithms by
    measurements. Torch's filling of uninitialised memory is turned off in any case.

    Args:
        threads: number of CPU threads; results depend on it, so it is part of the identity of a training run.
        device: ``auto`` (a GPU if one is usable), ``cpu``, ``cuda`` or ``cuda:N``.
        deterministic: reject algorithms whose results vary between runs; ``portable``: or between CPU models.
        local_rank: index of this process on this machine; on GPUs it replaces the index in `device`, on the CPU it has
            no effect. None: a single process.
        precision: ``tf32`` allows TF32 in matrix products and convolutions on a GPU; any other value forbids it. The
            caller also uses the context `precision` for ``bf16``.
        device_field: field or option that sets `device`, for the error message.

    Raises:
        TemporaryError: a GPU is configured, or was allocated to the SLURM job, and none is usable; or the machine has
            no GPU with the index `local_rank`.
        KairosError: portable kernels cannot be used.
    """
    torch.set_num_threads(threads)
    if deterministic == "portable":
        portable.setup()
    selected = _select_device(device, device_field)
    if selected.type == "cuda" and local_rank is not None:
        selected = _select_gpu_of_rank(local_rank)
    if selected.type == "cuda":
        _allow_tf32(precision == "tf32")
        torch.backends.cudnn.benchmark = not deterministic  # selects algorithms by measurements
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # a fixed workspace makes cuBLAS deterministic
        warnings.filterwarnings("ignore", message=".*deterministic.*", category=UserWarning)
    # has the effect of use_deterministic_algorithms, which imports the compiler (4 s of CPU time)
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
    # new memory is not filled, which saves 5 % of a small model's step; torch defines the attribute in a class that
    # replaces the module
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return selected


def _select_device(device: str, device_field: str) -> torch.device:
    """Return the configured device; for ``auto`` torch's current GPU if one is usable, otherwise the CPU.

    Every value other than ``cpu`` and ``auto`` is treated as a configured GPU. The error message begins with
    `device_field`.

    Raises:
        TemporaryError: a GPU is configured, or `device` is ``auto`` and GPUs were allocated to the SLURM job; and none
            is usable.
    """
    has_usable_gpu = torch.cuda.is_available()
    slurm_variable = _find_slurm_gpu_variable()
    is_gpu_configured = device not in ("cpu", "auto")
    is_gpu_allocated = device == "auto" and slurm_variable != ""
    if (is_gpu_configured or is_gpu_allocated) and not has_usable_gpu:
        where = f" in a SLURM job that was given GPUs ({slurm_variable})" if slurm_variable else ""
        allowed = "cpu" if slurm_variable else "cpu or auto"
        raise TemporaryError(
            f"{device_field}: got {device!r}{where}, but no usable GPU is here; allowed here: {allowed}"
        )
    if device == "auto":
        return torch.device("cuda" if has_usable_gpu else "cpu")
    return torch.device(device)


def _select_gpu_of_rank(local_rank: int) -> torch.device:
    """Return the GPU with the index of this process on this machine, and make it torch's current GPU.

    Raises:
        TemporaryError: the machine has too few usable GPUs.
    """
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise TemporaryError(
            f"training.processes: process {local_rank} of this machine has no GPU, {count} are usable; request one GPU "
            "per process"
        )
    gpu = torch.device("cuda", local_rank)
    torch.cuda.set_device(gpu)
    return gpu


def _allow_tf32(allowed: bool) -> None:
    """Allow or forbid TF32 in matrix products and convolutions on GPUs."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


@contextlib.contextmanager
def precision(name: str, device: torch.device) -> Iterator[None]:
    """Set the precision in which a network computes inside the context.

    Afterwards TF32 is forbidden, even if it was allowed before the context.

    Args:
        name: ``fp32``: full precision. ``tf32``: matrix products and convolutions on all GPUs round their inputs to 11
            significant bits. ``bf16``: autocast.
        device: device of the autocast.
    """
    _allow_tf32(name == "tf32")
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=name == "bf16"):
            yield
    finally:
        _allow_tf32(False)


def _find_slurm_gpu_variable() -> str:
    """Return the first environment variable that shows that this SLURM job has GPUs, as ``NAME=value``.

    The result is empty outside of SLURM jobs, and if the job has no GPUs. ``CUDA_VISIBLE_DEVICES`` is read last, after
    three variables that only SLURM sets.
    """
    if "SLURM_JOB_ID" not in os.environ:
        return ""
    for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES"):
        value = os.environ.get(name, "")
        if name == "SLURM_GPUS_ON_NODE" and value == "0":  # a count; in the other variables 0 is the index of a GPU
            continue
        if value not in ("", "-1", "NoDevFiles"):  # SLURM's values for no GPU
            return f"{name}={value}"
    return ""


def describe(device: torch.device) -> str:
    """Return a text with a device's name and CUDA_VISIBLE_DEVICES: ``the CPU, CUDA_VISIBLE_DEVICES not set``."""
    name = f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "the CPU"
    visible_gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or "not set"  # also if it is empty
    return f"{name}, CUDA_VISIBLE_DEVICES {visible_gpus}"
