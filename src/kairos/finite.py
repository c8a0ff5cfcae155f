"""Reject NaN and infinite values, where latents, pixels, features and weights enter or leave a stage."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kairos_timesteps.errors import NotFiniteError


def demand_finite(values: Any, what: str, remedy: str) -> None:
    """Raise NotFiniteError if an array or tensor, or one of several by name, contains NaN or infinite values.

    Integers and booleans pass. Values on a GPU are reduced there, and the result is read, which synchronises.

    Args:
        values: array of numpy, tensor of torch, or a mapping of names to them, such as the weights of a network.
        what: the values with their file, snapshot or field, for the error message.
        remedy: what the user can do, for the error message.

    Raises:
        NotFiniteError: the message contains the number of values that are not finite, and the first name.
    """
    by_name = values if isinstance(values, Mapping) else {"": values}
    wrong = {name: _upcast_float8(array) for name, array in by_name.items() if not _is_finite(array)}
    if not wrong:
        return
    nan_count = infinite_count = 0
    for array in wrong.values():
        nan_count += int((array != array).sum())  # NaN differs from itself
        infinite_count += int((abs(array) == np.inf).sum())
    total = sum(int(np.prod(array.shape)) for array in by_name.values())
    kinds = [kind for kind, count in (("NaN", nan_count), ("infinite", infinite_count)) if count]
    first, *others = wrong
    where = f", the first in {first}" if others else f", in {first}" if first else ""
    raise NotFiniteError(
        f"{what}: {nan_count + infinite_count:,} of {total:,} values are {' or '.join(kinds)}{where}; {remedy}"
    )


def _is_finite(values: Any) -> bool:
    """Return True if an array or tensor contains neither NaN nor infinite values.

    A sum is not finite if one of its terms is not; the converse does not hold, because large terms overflow. The sum is
    several times faster than a comparison of each value.
    """
    if isinstance(values, np.ndarray):
        if values.dtype.kind != "f":
            return True
        with np.errstate(all="ignore"):
            return bool(np.isfinite(values.sum())) or bool(np.isfinite(values).all())
    if not values.is_floating_point():
        return True
    values = _upcast_float8(values.detach())
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def _upcast_float8(values: Any) -> Any:
    """Return 8-bit floats of torch, which have no sums and comparisons, as float32, and other floats unchanged."""
    return values.float() if values.itemsize == 1 else values
