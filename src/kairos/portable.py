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

from kairos.errors import TemporaryError
from kairos.progress import log
from kairos_timesteps.errors import KairosError

if TYPE_CHECKING:
    import argparse

    from torch import Tensor

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
_CBWR_BRANCH = 1  # MKL_CBWR_BRANCH of mkl.h, argument of mkl_cbwr_get: return the instruction set of kernels
_COMPATIBLE = 3  # MKL_CBWR_COMPATIBLE of mkl.h


def machine() -> dict[str, str]:
    """Return CPU model, instruction set and versions of libraries, on which the bits of results depend.

    The keys are ``processor``, ``instruction_set``, ``libc``, ``python``, ``torch`` and ``numpy``. Records whose hashes
    should agree between machines must not contain them. The instruction set is ``AVX2 (portable)`` if the environment
    has the values of `VARIABLES`. Otherwise torch reports it; ``any`` if torch is not imported.
    """
    cpu_info = Path("/proc/cpuinfo")
    text = cpu_info.read_text() if cpu_info.exists() else ""
    model = re.search(r"^model name\s*: (.*)", text, re.MULTILINE)
    if model:
        processor = model[1]
    else:
        processor = platform.processor() or platform.machine()  # the first is empty on many systems
    torch = sys.modules.get("torch")  # None in commands that do not import it
    is_limited = all(os.environ.get(name) == value for name, value in VARIABLES.items())
    if is_limited:
        instruction_set = "AVX2 (portable)"
    else:
        instruction_set = torch.backends.cpu.get_cpu_capability() if torch else "any"
    return {
        "processor": processor,
        "instruction_set": instruction_set,
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "numpy")},
    }


def is_requested(arguments: "argparse.Namespace") -> bool:
    """Return True if the experiment file, or the first snapshot, of a command sets ``deterministic: portable``.

    Returns False for a file that cannot be read, is damaged, extends itself or lacks the field, and for a command with
    neither argument.

    Args:
        arguments: arguments of the command; `config` is the path of the experiment file. If it is None or missing,
            `snapshot` contains the paths of snapshots, of which the first is read.
    """
    import yaml

    config = getattr(arguments, "config", None)
    snapshots = getattr(arguments, "snapshot", None)
    try:
        if config is None and snapshots:
            values = json.loads((snapshots[0] / "snapshot.json").read_text(encoding="utf-8"))["config"]
        else:
            values = _read_file_with_determinism(Path(config or ""))  # without an argument, an OSError: "" is a folder
        return bool(values["training"]["deterministic"] == "portable")
    except (OSError, LookupError, TypeError, ValueError, RecursionError, yaml.YAMLError):
        return False  # the command reports the problem


def _read_file_with_determinism(path: Path) -> dict[str, Any]:
    """Return the values of an experiment file, or of the first file it extends that sets `training.deterministic`.

    If no file sets the field, they are the values of the last file. They are not checked.

    Raises:
        OSError: a file cannot be read.
        TypeError: a file does not contain a mapping.
        ValueError: files extend each other.
        YAMLError: a file is not YAML.
    """
    values = _read_mapping(path)
    read_paths = {path.resolve()}
    while "extends" in values and "deterministic" not in values.get("training", {}):
        path = (path.parent / values["extends"]).resolve()
        if path in read_paths:
            raise ValueError(f"{path} extends itself")
        read_paths.add(path)
        values = _read_mapping(path)
    return values


def _read_mapping(path: Path) -> dict[str, Any]:
    """Return the content of a YAML file.

    Raises:
        OSError: the file cannot be read.
        TypeError: the file does not contain a mapping.
        YAMLError: the file is not YAML.
        UnicodeDecodeError: the file is not UTF-8.
    """
    import yaml

    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise TypeError(f"{path}: got {type(values).__name__}, allowed: a mapping")
    return values


def set_variables() -> None:
    """Set the environment variables `VARIABLES`, before torch and numpy are imported; other values are overwritten.

    A message reports each value that is overwritten.
    """
    for name, value in VARIABLES.items():
        if os.environ.get(name, value) != value:
            log(f"training.deterministic: portable sets {name}={value}, in place of {os.environ[name]}")
        os.environ[name] = value


def check() -> None:
    """Check that this process has the limits on CPU instructions that make results portable.

    The variables `VARIABLES` must have been set before the first import of torch and numpy, which this function imports
    if nothing else has.

    Raises:
        TemporaryError: the CPU lacks AVX2.
        KairosError: a variable is unset, has another value or was set too late. The message lists these variables with
            the values to set.
    """
    import torch
    from numpy._core._multiarray_umath import __cpu_features__ as numpy_features

    setting = "training.deterministic: got 'portable'"
    if not torch.cpu._is_avx2_supported():
        raise TemporaryError(f"{setting}, but this CPU has no AVX2; allowed here: true, false")

    # variables that are not set, or that were set after the import that reads them
    mkl_mode = getattr(ctypes.CDLL(torch._C.__file__), "mkl_serv_cbwr_get", None)  # function; None without MKL
    ineffective = [name for name, value in VARIABLES.items() if os.environ.get(name) != value]
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        ineffective.append("ATEN_CPU_CAPABILITY")
    # names of AVX-512 in different releases of numpy
    if numpy_features.get("X86_V4") or numpy_features.get("AVX512_SKX"):
        ineffective.append("NPY_DISABLE_CPU_FEATURES")
    if mkl_mode is not None and mkl_mode(_CBWR_BRANCH) != _COMPATIBLE:
        ineffective.append("MKL_CBWR")
    if ineffective:
        raise KairosError(
            f"{setting}, but torch or numpy were loaded without it; the `kairos` command sets their environment "
            "variables, other programs must start with: "
            + " ".join(f"{name}='{VARIABLES[name]}'" for name in dict.fromkeys(ineffective))  # each name once
        )


@functools.cache
def replace_kernels() -> Any:
    """Replace the CPU kernels that no environment variable makes portable.

    They are the functions in `ELEMENTWISE` with their in-place and ``out`` variants, the power 0.5, and the matrix
    products ``mm`` and ``addmm``. The first call in a process replaces them, and further calls do nothing.

    Returns:
        The library of operators, whose deletion would restore the old kernels.
    """
    import numpy as np
    import torch

    library = torch.library.Library("aten", "IMPL")
    for torch_name, numpy_name in ELEMENTWISE.items():
        kernel = _elementwise_kernel(getattr(np, numpy_name))
        _replace_kernel(library, torch_name, kernel)
        # in-place variant, such as x.sqrt_(); the default binds the kernel of this iteration
        _replace_kernel(library, f"{torch_name}_", lambda x, kernel=kernel: kernel(x, out=x))
        _replace_kernel(library, f"{torch_name}.out", kernel)

    square_root = _elementwise_kernel(np.sqrt)

    def power(x: "Tensor", exponent: Any, out: "Tensor | None" = None) -> "Tensor | None":
        """Compute x ** 0.5 as torch does, by a square root; None for other exponents: torch's kernel is used."""
        return square_root(x, out) if exponent == 0.5 else None

    _replace_kernel(library, "pow.Tensor_Scalar", power)
    _replace_kernel(library, "pow_.Scalar", lambda x, exponent: power(x, exponent, out=x))
    _replace_kernel(library, "pow.Tensor_Scalar_out", power)
    _replace_kernel(library, "mm", _matrix_product)
    _replace_kernel(library, "addmm", _affine_product)
    return library


def _replace_kernel(library: Any, name: str, kernel: Callable[..., Any]) -> None:
    """Replace the CPU kernel of an operator of torch.

    Args:
        library: `torch.library.Library` that holds the new kernels.
        name: name of the operator, with its overload, such as ``sqrt.out``.
        kernel: the new kernel; where it returns None, the old kernel computes the result.
    """
    import torch

    original = torch.library.get_kernel(f"aten::{name}", "CPU")

    def run(keys: Any, *arguments: Any, **keywords: Any) -> Any:
        """Call the new kernel, and the old one if the result is None; torch passes the dispatch keys."""
        result = kernel(*arguments, **keywords)
        if result is None:
            return original.call_boxed(keys, *arguments, **keywords)
        return result

    library.impl(name, run, "CPU", with_keyset=True, allow_override=True)


def _elementwise_kernel(function: Any) -> "Callable[..., Tensor | None]":
    """Return a kernel that applies a function of numpy, with an argument `out`, to each element of a tensor.

    The kernel ``kernel(x, out=None)`` returns a new tensor, or `out` with the result and resized to the shape of x. It
    returns None, so that torch's kernel is used, for tensors that are not float32 or float64, and for an `out` of
    another type than x.
    """
    import numpy as np
    import torch

    def kernel(x: "Tensor", out: "Tensor | None" = None) -> "Tensor | None":
        if x.dtype not in (torch.float32, torch.float64):
            return None
        if out is not None and out.dtype != x.dtype:
            return None
        result = torch.empty_like(x)  # memory of numpy has another alignment
        with np.errstate(all="ignore"):  # torch does not warn of values such as sqrt(-1)
            function(x.detach().numpy(), out=result.numpy())
        if out is None:
            return result
        return out.resize_(x.shape).copy_(result)

    return kernel


def _matrix_product(a: "Tensor", b: "Tensor", bias: "Tensor | None" = None) -> "Tensor | None":
    """Return a @ b + bias, computed by oneDNN; None for empty matrices and for data types other than float32.

    Args:
        a: matrix, (n, k).
        b: matrix, (k, m).
        bias: bias of each column, (m,); None: no bias.
    """
    import torch

    if a.dtype != torch.float32 or b.dtype != torch.float32:
        return None
    if a.numel() == 0 or b.numel() == 0:
        return None
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), bias, "none", [], "")  # "none": no activation
    return product


def _affine_product(bias: "Tensor", a: "Tensor", b: "Tensor", beta: Any = 1, alpha: Any = 1) -> "Tensor | None":
    """Return a @ b + bias by `_matrix_product` for a bias per column; None for other biases and for factors.

    It has the arguments of `torch.addmm`, which returns beta bias + alpha a @ b. None also if `_matrix_product` returns
    None.
    """
    is_bias_per_column = bias.dim() == 1 and len(bias) == b.shape[1]
    if not is_bias_per_column or beta != 1 or alpha != 1:
        return None
    return _matrix_product(a, b, bias)


def setup() -> None:
    """Check the limits on CPU instructions and replace kernels.

    The caller ensures that the process has computed nothing with torch before, since results could have other bits.

    Raises:
        KairosError: the limits are not in force.
    """
    check()
    replace_kernels()
