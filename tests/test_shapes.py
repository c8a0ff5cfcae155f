"""Calls are checked against the shapes in signatures, see checked_modules.py."""

import importlib
import inspect
import pkgutil
from itertools import chain
from pathlib import Path

import jaxtyping
import pytest
import torch

from checked_modules import CHECKED_MODULES
from kairos import conditions


def is_checked(name):
    """Return True if jaxtyping has replaced a function or method of a module by one that checks its calls."""
    module = importlib.import_module(name)
    classes = [value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == name]
    members = chain(vars(module).values(), *(vars(cls).values() for cls in classes))
    files = [Path(member.__code__.co_filename) for member in members if inspect.isfunction(member)]
    return any(file.parent.name == "jaxtyping" for file in files)


def test_a_call_with_a_wrong_shape_fails():
    values, descriptions = {"class": torch.arange(4)}, {"class": {"kind": "class", "num_classes": 10}}
    assert conditions.drop(values, descriptions, torch.tensor([True] * 4))["class"].tolist() == [10] * 4
    with pytest.raises(jaxtyping.TypeCheckError):
        conditions.drop(values, descriptions, torch.tensor([True] * 3))


def test_calls_of_every_listed_module_are_checked():
    """A module listed since its last import may be unchecked until ``__pycache__`` is deleted: jaxtyping's cache."""
    modules = []
    for name in CHECKED_MODULES:
        path = getattr(importlib.import_module(name), "__path__", None)
        modules += [name] if path is None else [module.name for module in pkgutil.iter_modules(path, f"{name}.")]
    assert [name for name in modules if not is_checked(name)] == []
