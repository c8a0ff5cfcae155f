"""Marks of parametrised tests."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mark_long(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return the values of a parameter for ``pytest.mark.parametrize``; those that are not in `quick` are long tests.

    Args:
        values: values of the parameter; a tuple has one value per parameter.
        quick: values that stay in the quick tests.

    Raises:
        ValueError: a value of `quick` is not in `values`; the quick tests would silently lose it.
    """
    values = list(values)
    if missing := [value for value in quick if value not in values]:
        raise ValueError(f"quick: got {missing}, allowed: {values}")
    marked = []
    for value in values:
        arguments = value if isinstance(value, tuple) else (value,)
        marked.append(value if value in quick else pytest.param(*arguments, marks=pytest.mark.long))
    return marked
