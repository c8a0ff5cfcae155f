"""Functions that numpy and torch do not share, on arrays of either; formulas are written once, for tables and devices.

Tables and checks use numpy, without importing torch. Draws use torch, on the batch's device.
"""

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from kairos_timesteps.lazy import Tensor, torch

if TYPE_CHECKING:
    from typing_extensions import TypeIs  # newer than the typing_extensions that the oldest torch installs

Array = NDArray[np.float64]
Values = TypeVar("Values", Array, Tensor)  # a function of arrays returns an array, of tensors a tensor
Kind = TypeVar("Kind", covariant=True)
Method = TypeVar("Method", bound=Callable[..., Any])


class Namespace(Protocol[Kind]):
    """Module numpy for arrays, module torch for tensors: a function of either has the same name in both."""

    def __getattr__(self, function: str) -> Callable[..., Kind]: ...


def is_numpy(values: Any) -> "TypeIs[Array]":
    """Return True for a number or an array of numpy, False for a tensor."""
    return isinstance(values, (np.ndarray, np.generic, float, int))


def namespace(values: Values) -> Namespace[Values]:
    """Return the module whose functions take `values`: numpy or torch."""
    module: Any = np if is_numpy(values) else torch
    functions: Namespace[Values] = module  # torch.compile cannot trace typing.cast
    return functions


def without_warnings(values: Any) -> AbstractContextManager[Any]:
    """Return a context in which numpy does not warn of infinite results; torch never does."""
    return np.errstate(all="ignore") if is_numpy(values) else nullcontext()


def same_kind(values: Array | Tensor, other: Values) -> Values:
    """Convert an array or tensor to the kind and device of `other`."""
    if is_numpy(other):
        return values if isinstance(values, np.ndarray) else values.cpu().numpy()
    return on_device(torch.as_tensor(values), other.device)


class Tables:
    """Arrays that do not change, moved to each device once."""

    def __init__(self, *arrays: Array | Tensor):
        self._arrays = arrays
        self._by_device: dict[Any, tuple[Any, ...]] = {}

    def like(self, other: Values) -> tuple[Values, ...]:
        """Return the arrays, of the kind and on the device of `other`."""
        device = None if is_numpy(other) else other.device
        if device not in self._by_device:
            self._by_device[device] = tuple(same_kind(array, other) for array in self._arrays)
        return self._by_device[device]


@overload
def integers(values: Array) -> NDArray[np.int64]: ...
@overload
def integers(values: Tensor) -> Tensor: ...
def integers(values: Any) -> Any:
    """Convert to int64, towards 0, elementwise."""
    return values.astype(np.int64) if is_numpy(values) else values.long()


def on_device(values: Tensor, device: "torch.device") -> Tensor:
    """Move a tensor to a device; from the CPU to a GPU without synchronisation, from pinned memory.

    A plain copy from the CPU waits until the GPU has done everything before it. Graphs do without pinned memory, which
    must not be freed as long as they are replayed.
    """
    asynchronous = device.type == "cuda" and values.device.type == "cpu" and not torch.compiler.is_compiling()
    if not asynchronous or torch.cuda.is_current_stream_capturing():
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def in_type_of_argument(method: Method) -> Method:
    """Let an elementwise method of ``(values, **context)`` compute in float64; the result has the type of `values`.

    For integers and lists the result is float64.
    """

    @functools.wraps(method)
    def converting(self: Any, values: Any, **context: Any) -> Any:
        if is_numpy(values) or isinstance(values, (list, tuple)):
            numbers = np.asarray(values)
            result = np.asarray(method(self, numbers.astype(np.float64, copy=False), **context))
            return result.astype(numbers.dtype, copy=False)[()] if numbers.dtype.kind == "f" else result[()]
        if values.dtype == torch.float64:
            return method(self, values, **context)
        result = method(self, values.double(), **context)
        return result.to(values.dtype) if values.is_floating_point() else result

    return converting  # type: ignore[return-value]  # the signature of `method`


def below_one(method: Method) -> Method:
    """Do the same as `in_type_of_argument`, and bound the result by the largest number of its type below 1."""
    converting = in_type_of_argument(method)

    @functools.wraps(method)
    def bounded(self: Any, values: Any, **context: Any) -> Any:
        return bound_below_one(converting(self, values, **context))

    return bounded  # type: ignore[return-value]


def bound_below_one(values: Any) -> Any:
    """Return the values, each bounded by the largest number of their type that is below 1."""
    if is_numpy(values):
        return np.minimum(values, values.dtype.type(1 - np.finfo(values.dtype).eps / 2))
    return values.clamp(max=1 - torch.finfo(values.dtype).eps / 2)


def normal_cdf(x: Values) -> Values:
    """Return the standard normal distribution function, elementwise."""
    if is_numpy(x):
        return 0.5 * np.asarray(np.vectorize(math.erfc, otypes=[float])(-np.asarray(x) / math.sqrt(2)))
    below: Tensor = torch.special.ndtr(x)  # torch declares no type
    return below


def normal_quantile(probability: Values) -> Values:
    """Return the inverse of the standard normal distribution function, elementwise."""
    p = torch.from_numpy(np.asarray(probability, np.float64)) if is_numpy(probability) else probability
    quantiles: Tensor = torch.special.ndtri(p)  # torch declares no type
    return same_kind(quantiles, probability)


def sigmoid(x: Values) -> Values:
    """Return 1/(1 + exp(-x)), elementwise."""
    with without_warnings(x):
        return 1 / (1 + namespace(x).exp(-x))


def logit(x: Values) -> Values:
    """Return the inverse of `sigmoid`, elementwise; infinite at 0 and 1."""
    with without_warnings(x):
        return namespace(x).log(x) - namespace(x).log1p(-x)


def interp(x: Values, positions: Array | Tensor, values: Array | Tensor) -> Values:
    """Interpolate linearly between positions (n,), ascending, and values (n,); constant beyond the ends."""
    nodes, heights = same_kind(positions, x), same_kind(values, x)
    if is_numpy(x):
        return np.asarray(np.interp(x, nodes, heights))
    right = torch.searchsorted(nodes, x.contiguous()).clamp(1, len(nodes) - 1)
    low, high = nodes[right - 1], nodes[right]
    share = ((x - low) / torch.where(high > low, high - low, 1.0)).clamp(0, 1)
    return heights[right - 1] + share * (heights[right] - heights[right - 1])


def bisect(function: Callable[[Values], Values], values: Values, low: float = 0.0, high: float = 1.0) -> Values:
    """Invert a non-decreasing function on [low, high] by 56 bisections, elementwise.

    Values beyond the function's range give an end of the interval, up to rounding. Where the function is constant, the
    result is the upper end of that part.
    """
    lows, highs = 0.0 * values + low, 0.0 * values + high
    for _ in range(56):
        middle = (lows + highs) / 2
        below = function(middle) <= values
        lows, highs = namespace(values).where(below, middle, lows), namespace(values).where(below, highs, middle)
    return (lows + highs) / 2


def spline(positions: Array, knots: Array) -> Array:
    """Evaluate a monotone cubic at positions in [0, 1] (Fritsch and Carlson 1980); its knots are evenly spread.

    There are two knots or more. The result has the shape of `positions`.
    """
    step = 1 / (len(knots) - 1)
    slope = np.diff(knots) / step
    before, after = slope[:-1], slope[1:]
    with np.errstate(divide="ignore", invalid="ignore"):
        # tangents at inner knots: the harmonic mean of both slopes, or 0 at an extremum
        mean = np.where(before * after > 0, 2 * before * after / (before + after), 0.0)
    ends = slope if len(slope) == 1 else [_end(slope[0], slope[1]), _end(slope[-1], slope[-2])]
    tangent = step * np.concatenate([ends[:1], mean, ends[-1:]])
    cell = np.minimum((positions / step).astype(np.int64), len(slope) - 1)
    x, rise = positions / step - cell, np.diff(knots)[cell]
    bend = tangent[cell] * (1 - x) - tangent[cell + 1] * x + rise * (2 * x - 1)
    return np.asarray(knots[cell] + rise * x + x * (1 - x) * bend)


def _end(first: float, second: float) -> float:
    """Return the slope at an end of the spline from three knots, limited so that the cubic stays monotone.

    Args:
        first: slope of the outermost interval between knots.
        second: slope of the next interval.
    """
    slope = (3 * first - second) / 2
    if slope * first <= 0:
        return 0.0
    return 3 * first if first * second < 0 and abs(slope) > 3 * abs(first) else slope
