"""Marks of parametrised tests."""

from collections.abc import Iterable, Iterator

import pytest


def mark_long(values: Iterable[object], quick: Iterable[object] = ()) -> Iterator[object]:
    """Mark the values of a parameter as long tests, except those that `quick` contains.

    Args:
        values: values of ``pytest.mark.parametrize``; a tuple has one value per argument.
        quick: values that stay in the quick tests.
    """
    quick = list(quick)
    for value in values:
        arguments = value if isinstance(value, tuple) else (value,)
        yield value if value in quick else pytest.param(*arguments, marks=pytest.mark.long)
