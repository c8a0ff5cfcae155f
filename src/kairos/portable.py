"""``training.deterministic: portable``: CPU kernels with bitwise equal results on every x86-64 CPU with AVX2.

Libraries select kernels by CPU model, and the kernels add numbers in different orders. `set_variables` limits them
to one instruction set, by environment variables that they read when they are loaded or first used. The costs are in
`benchmarks/portable.py`.

`replace_kernels` replaces two groups of kernels that no variable makes portable:

* MKL's vector mathematics: the square root and some other functions start from approximations (rsqrtps, rcpps) that
  differ between CPU manufacturers.
* MKL's matrix product: it agrees between manufacturers only with SSE2. The product of oneDNN agrees with AVX2, and is
  twice as fast.
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
    "MKL_CBWR": "COMPATIBLE",  # the only mode of MKL with equal results on CPUs of all manufacturers
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL",
    "OPENBLAS_CORETYPE": "Haswell",  # matrix products of numpy and scipy
    "OPENBLAS_NUM_THREADS": "1",  # the default is one per core of the machine
}
# functions for which MKL uses approximations: name in torch, and name in numpy
ELEMENTWISE = {
    **{name: name for name in ("sqrt", "log", "log2", "log10", "tan")},
    **{f"a{name}": f"arc{name}" for name in ("cos", "sin", "tan")},
}
_COMPATIBLE = 3  # MKL_CBWR_COMPATIBLE


def machine() -> dict[str, str]:
    """Return CPU model, instruction set and versions of libraries, on which the bits of results depend.

    Records whose hashes should agree between machines must not contain them.
    """
    info, torch = Path("/proc/cpuinfo"), sys.modules.get("torch")
    model = re.search(r"^model name\s*: (.*)", info.read_text() if info.exists() else "", re.MULTILINE)
    is_limited = all(os.environ.get(name) == value for name, value in VARIABLES.items())
    if is_limited:
        instruction_set = "AVX2 (portable)"
    else:
        instruction_set = torch.backends.cpu.get_cpu_capability() if torch else "any"
    return {
        "processor": model[1] if model else platform.processor() or platform.machine(),
        "instruction_set": instruction_set,
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "numpy")},
    }


def is_requested(arguments: "argparse.Namespace") -> bool:
    """Return True if the experiment file, or the snapshot, of a command sets ``deterministic: portable``.

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
        return False  # the command reports the problem


def set_variables() -> None:
    """Set the environment variables `VARIABLES`, before torch and numpy are imported; other values are overwritten."""
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

    setting = "training.deterministic: got 'portable'"
    if not torch.cpu._is_avx2_supported():
        raise KairosError(f"{setting}, but this CPU has no AVX2; allowed here: true, false")
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
            f"{setting}, but torch or numpy were loaded without it; the `kairos` command sets their environment "
            "variables, other programs must start with: "
            + " ".join(f"{name}='{VARIABLES[name]}'" for name in dict.fromkeys(wrong))
        )


@functools.cache
def replace_kernels() -> Any:
    """Replace the CPU kernels that no variable makes portable.

    Returns:
        The library of operators, whose deletion would restore the old kernels.
    """
    import numpy as np
    import torch
    from torch import Tensor

    library = torch.library.Library("aten", "IMPL")
    floats = (torch.float32, torch.float64)

    def replace(name: str, kernel: Callable[..., Any]) -> None:
        """Replace the CPU kernel of an operator, except for arguments for which the new kernel returns None."""
        original = torch.library.get_kernel(f"aten::{name}", "CPU")

        def run(keys: Any, *arguments: Any, **keywords: Any) -> Any:
            result = kernel(*arguments, **keywords)
            return original.call_boxed(keys, *arguments, **keywords) if result is None else result

        library.impl(name, run, "CPU", with_keyset=True, allow_override=True)

    def elementwise(function: Any) -> Callable[..., Tensor | None]:
        """Return a kernel that applies a function of numpy to each element of a tensor of floats."""

        def kernel(x: Tensor, out: Tensor | None = None) -> Tensor | None:
            if x.dtype not in floats or (out is not None and out.dtype != x.dtype):
                return None
            result = torch.empty_like(x)  # memory of numpy has another alignment
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
    """Check the limits on CPU instructions and replace kernels, after the import of torch and before any computation.

    Raises:
        KairosError: the limits are not in force.
    """
    check()
    replace_kernels()
