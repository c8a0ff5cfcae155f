"""Calls are checked against the shapes in signatures, see checked_modules.py."""

import importlib
import inspect
import pkgutil
import re
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
    """Delete ``__pycache__`` if this fails for a newly listed module: jaxtyping may have cached its unchecked code."""
    modules = []
    for name in CHECKED_MODULES:
        path = getattr(importlib.import_module(name), "__path__", None)
        modules += [name] if path is None else [module.name for module in pkgutil.iter_modules(path, f"{name}.")]
    assert [name for name in modules if not is_checked(name)] == []


def test_every_module_with_shapes_is_listed():
    source = Path(conditions.__file__).parents[1]
    imports_shapes = re.compile(r"^\s*from (jaxtyping|kairos\.(array_)?shapes) import", re.MULTILINE)
    unlisted = []
    for path in sorted(source.rglob("*.py")):
        name = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        is_listed = any(name == listed or name.startswith(f"{listed}.") for listed in CHECKED_MODULES)
        if imports_shapes.search(path.read_text(encoding="utf-8")) and not is_listed:
            unlisted.append(name)
    assert unlisted == ["kairos.array_shapes", "kairos.shapes"]
