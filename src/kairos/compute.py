"""Threads, device and determinism of a job, set explicitly before anything is computed."""

import os
import warnings

import torch

from kairos.errors import KairosError


def setup(threads: int, device: str, deterministic: bool = True) -> torch.device:
    """Set the number of computing threads, choose the device and switch deterministic algorithms on.

    Args:
        threads: computing threads; results differ between thread counts, so it is part of a run's identity.
        device: ``auto`` (a GPU where there is one), ``cpu``, ``cuda`` or ``cuda:N``.
        deterministic: refuse algorithms whose result varies between runs.

    Raises:
        KairosError: a GPU is asked for and none is usable.
    """
    torch.set_num_threads(threads)
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise KairosError(f"training.device: got {device!r}, but no usable GPU is here; allowed here: cpu or auto")
    chosen = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if chosen.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = not deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        warnings.filterwarnings("ignore", message=".*deterministic.*", category=UserWarning)
    # the same as use_deterministic_algorithms, which imports the compiler (4 s of CPU time) to tell it
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs 5 % of a small model's step; nothing reads it
    return chosen
