"""``training.deterministic: portable``: CPU kernels that give the same bits on every x86-64 processor with AVX2.

Libraries choose kernels by processor, and their sums then differ in order. `hold` caps them all at one instruction set,
by variables that they read when they are loaded or first used; `benchmarks/portable.py` has what that costs. Two things
no variable reaches, and `replace_kernels` does: MKL's vector mathematics, whose square root and some others start from
approximations (rsqrtps, rcpps) that are each maker's own, and MKL's matrix product, held to SSE2 where it is to agree
between makers: oneDNN's does with AVX2, twice as fast.
"""

import ctypes
import functools
import json
import os
import platform
import re
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kairos.progress import log
from kairos_timesteps.errors import KairosError

if TYPE_CHECKING:
    import argparse

VARIABLES = {
    "ATEN_CPU_CAPABILITY": "avx2",  # torch's own kernels
    "ONEDNN_MAX_CPU_ISA": "AVX2",  # convolutions
    "MKL_CBWR": "COMPATIBLE",  # the one mode of MKL that holds on processors of all makers
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL",
    "OPENBLAS_CORETYPE": "Haswell",  # numpy's and scipy's matrices
    "OPENBLAS_NUM_THREADS": "1",  # else one for each core of the machine
}
# torch's name: numpy's, of those in MKL that use approximations
ELEMENTWISE = {
    **{name: name for name in ("sqrt", "log", "log2", "log10", "tan")},
    **{f"a{name}": f"arc{name}" for name in ("cos", "sin", "tan")},
}
_COMPATIBLE = 3  # MKL_CBWR_COMPATIBLE


def machine() -> dict[str, str]:
    """Processor, instruction set and versions that decide the bits; of no record whose hash machines should share."""
    info, torch = Path("/proc/cpuinfo"), sys.modules.get("torch")
    model = re.search(r"^model name\s*: (.*)", info.read_text() if info.exists() else "", re.MULTILINE)
    held = all(os.environ.get(name) == value for name, value in VARIABLES.items())
    return {
        "processor": model[1] if model else platform.processor() or platform.machine(),
        "instruction_set": "AVX2 (portable)" if held else torch.backends.cpu.get_cpu_capability() if torch else "any",
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "numpy")},
    }


def asked(arguments: "argparse.Namespace") -> bool:
    """Return True if the experiment file, or the milestone, of a command sets ``deterministic: portable``.

    Returns False for a file that cannot be read, is damaged, or extends itself: the command reports what is wrong.
    """
    import yaml

    config, milestones = getattr(arguments, "config", None), getattr(arguments, "milestone", None)
    try:
        if milestones:
            plain = json.loads((milestones[0] / "milestone.json").read_text(encoding="utf-8"))["config"]
        else:
            path = Path(config or "")
            plain = yaml.safe_load(path.read_text(encoding="utf-8"))
            read = {path.resolve()}
            while "extends" in plain and "deterministic" not in plain.get("training", {}):
                path = (path.parent / plain["extends"]).resolve()
                if path in read:  # files that extend each other
                    return False
                read.add(path)
                plain = yaml.safe_load(path.read_text(encoding="utf-8"))
        return bool(plain["training"]["deterministic"] == "portable")
    except (OSError, LookupError, TypeError, ValueError, RecursionError, yaml.YAMLError):
        return False  # the command itself says what is wrong


def hold() -> None:
    """Set the variables, before torch and numpy are imported; what they were set to otherwise does not count."""
    for name, value in VARIABLES.items():
        if os.environ.get(name, value) != value:
            log(f"training.deterministic: portable sets {name}={value}, in place of {os.environ[name]}")
        os.environ[name] = value


def check() -> None:
    """Check that this process has the limits on CPU instructions that make results portable.

    Raises:
        KairosError: the limits were set too late, or the CPU lacks AVX2.
    """
    import torch
    from numpy._core._multiarray_umath import __cpu_features__ as numpy_features

    what = "training.deterministic: got 'portable'"
    if not torch.cpu._is_avx2_supported():
        raise KairosError(f"{what}, but this processor has no AVX2; allowed here: true, false")
    mkl = getattr(ctypes.CDLL(torch._C.__file__), "mkl_serv_cbwr_get", None)
    wrong = [name for name, value in VARIABLES.items() if os.environ.get(name) != value]
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        wrong.append("ATEN_CPU_CAPABILITY")
    if numpy_features.get("X86_V4") or numpy_features.get("AVX512_SKX"):
        wrong.append("NPY_DISABLE_CPU_FEATURES")
    if mkl is not None and mkl(1) != _COMPATIBLE:
        wrong.append("MKL_CBWR")
    if wrong:
        raise KairosError(
            f"{what}, but torch or numpy were loaded without it; the `kairos` command sets what they read, a program "
            "of your own starts with: " + " ".join(f"{name}='{VARIABLES[name]}'" for name in dict.fromkeys(wrong))
        )


@functools.cache
def replace_kernels() -> Any:
    """Take the place of the CPU kernels that no variable makes portable; returns what must live on."""
    import numpy as np
    import torch
    from torch import Tensor

    library = torch.library.Library("aten", "IMPL")
    floats = (torch.float32, torch.float64)

    def replace(name: str, kernel: Callable[..., Any]) -> None:
        original = torch.library.get_kernel(f"aten::{name}", "CPU")

        def run(keys: Any, *arguments: Any, **named: Any) -> Any:
            done = kernel(*arguments, **named)
            return original.call_boxed(keys, *arguments, **named) if done is None else done

        library.impl(name, run, "CPU", with_keyset=True, allow_override=True)

    def elementwise(function: Any) -> Callable[..., Tensor | None]:
        def kernel(x: Tensor, out: Tensor | None = None) -> Tensor | None:
            if x.dtype not in floats or (out is not None and out.dtype != x.dtype):
                return None
            result = torch.empty_like(x)  # numpy's own memory is aligned otherwise
            with np.errstate(all="ignore"):
                function(x.detach().numpy(), out=result.numpy())
            return result if out is None else out.resize_(x.shape).copy_(result)

        return kernel

    def power(x: Tensor, exponent: Any, out: Tensor | None = None) -> Tensor | None:
        return root(x, out) if exponent == 0.5 else None

    root = elementwise(np.sqrt)
    kernels = {name: elementwise(getattr(np, other)) for name, other in ELEMENTWISE.items()}
    for name, kernel in kernels.items():
        replace(name, kernel)
        replace(f"{name}_", lambda x, kernel=kernel: kernel(x, x))
        replace(f"{name}.out", kernel)
    replace("pow.Tensor_Scalar", power)
    replace("pow_.Scalar", lambda x, exponent: power(x, exponent, x))
    replace("pow.Tensor_Scalar_out", power)

    def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor | None:
        if a.dtype != torch.float32 or b.dtype != torch.float32 or not (a.numel() and b.numel()):
            return None
        return torch.ops.mkldnn._linear_pointwise(a, b.t(), bias, "none", [], "")

    def affine(bias: Tensor, a: Tensor, b: Tensor, beta: Any = 1, alpha: Any = 1) -> Tensor | None:
        return product(a, b, bias) if bias.dim() == 1 and len(bias) == b.shape[1] and beta == alpha == 1 else None

    replace("mm", product)
    replace("addmm", affine)
    return library


def setup() -> None:
    """Check the caps and replace kernels; once torch is loaded, before anything is computed.

    Raises:
        KairosError: the caps do not hold.
    """
    check()
    replace_kernels()
