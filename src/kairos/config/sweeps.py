"""Sweeps: expand a method's ``grid: {sampler.k: [1, 2, 5]}`` into methods ``speed-k=1``, ``speed-k=2``, ``speed-k=5``.

Grids are expanded before an experiment is checked. Everything that reads an experiment, including Snakemake and DVC,
therefore reads ordinary methods. Several keys of a grid result in a method for each combination of their values.
"""

import json
import math
import re
from collections.abc import Iterator
from itertools import product
from typing import Any

from kairos_timesteps.components import COUPLINGS, SAMPLERS, WEIGHTINGS
from kairos_timesteps.errors import demand
from kairos_timesteps.registry import split

MOST_METHODS = 1000  # of an experiment
PARTS = {"sampler": (SAMPLERS, "uniform"), "weighting": (WEIGHTINGS, "none"), "coupling": (COUPLINGS, "independent")}
_GRID_FORM = "lists of different numbers, texts, true, false or null: {sampler.k: [1, 2, 5], ...}"


def expand_grids(methods: dict[Any, Any]) -> dict[Any, Any]:
    """Return the methods of an experiment file with each method that has a grid replaced by the methods of its grid.

    Other errors in the methods are left to the checks that follow.

    Args:
        methods: section `methods` as plain values, not checked yet.

    Raises:
        ConfigError: a grid is malformed, contains an unknown option or a value twice, or there are too many methods.
    """
    grids = {}
    for name, method in methods.items():
        if isinstance(method, dict) and "grid" in method:
            grid = grids[name] = method["grid"]
            is_valid = isinstance(grid, dict) and grid and all(map(_is_valid_axis, grid.keys(), grid.values()))
            demand(is_valid, f"methods.{name}.grid", repr(grid), _GRID_FORM)
    count = sum(math.prod(map(len, grids.get(name, {}).values())) for name in methods)
    demand(count <= MOST_METHODS, "methods", f"{count:,}, with those of grids", f"at most {MOST_METHODS:,}")
    expanded: dict[Any, Any] = {}
    for name, method in methods.items():
        members = _grid_methods(name, method, grids[name]) if name in grids else [(name, method)]
        for member_name, member in members:
            demand(member_name not in expanded, f"methods.{name}", f"a second {member_name}", "each name once")
            expanded[member_name] = member
    return expanded


def parse_sweep_name(name: str) -> list[tuple[str, str]]:
    """Return the swept options and their values, as text, from a method's name; empty for other methods."""
    return re.findall(r"-([A-Za-z][\w.]*)=(.*?)(?=-[A-Za-z][\w.]*=|$)", name)


def _is_valid_axis(key: Any, values: Any) -> bool:
    """Return True if a key of a grid is text and its values are a list of different scalars."""
    if not isinstance(key, str) or not isinstance(values, list) or not values:
        return False
    if not all(value is None or isinstance(value, str | int | float) for value in values):
        return False
    return len({_value_text(value) for value in values}) == len(values)


def _grid_methods(name: str, method: dict[str, Any], grid: dict[str, list[Any]]) -> Iterator[tuple[str, Any]]:
    """Yield name and values of each method of a grid.

    In names, an option is the last part of its key, or the whole key if two keys share their last part.
    """
    last_parts = [key.rpartition(".")[2] for key in grid]
    labels = [part if last_parts.count(part) == 1 else key for key, part in zip(grid, last_parts)]
    for values in product(*grid.values()):
        member = {part: value for part, value in method.items() if part != "grid"}
        for key, value in sorted(zip(grid, values), key=lambda pair: "." in pair[0]):  # components before their options
            member = _replace(member, key, value, f"methods.{name}.grid")
        suffix = "".join(f"-{label}={_value_text(value)}" for label, value in zip(labels, values))
        yield name + suffix, member


def _replace(method: dict[str, Any], key: str, value: Any, where: str) -> dict[str, Any]:
    """Return a method with another component or another value of an option.

    Args:
        method: the method as plain values.
        key: ``sampler``, ``weighting`` or ``coupling``, or one of these with an option, such as ``sampler.k``.
        value: the component or the value of the option.
        where: field for the error message.

    Raises:
        ConfigError: there is no such component or option, or the value is not allowed.
    """
    part, _, option = key.partition(".")
    demand(part in PARTS, where, key, "sampler, weighting, coupling or one of their options, such as sampler.k")
    if option:
        registry, default = PARTS[part]
        component = method.get(part, default)
        options = component if isinstance(component, dict) else {"name": component}
        value = {"name": "", **options, option: value}
        registry.parse(*split(value), f"{where}: {part} {value['name']}")
    return {**method, part: value}


def _value_text(value: Any) -> str:
    """Return a value as it is written in the name of a method, such as 5 for 5.0."""
    return value if isinstance(value, str) else json.dumps(value).removesuffix(".0")
