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

MOST_METHODS = 1000  # limit for an experiment
# registry and name of the default component, by kind of component in a method
METHOD_COMPONENTS = {
    "sampler": (SAMPLERS, "uniform"),
    "weighting": (WEIGHTINGS, "none"),
    "coupling": (COUPLINGS, "independent"),
}
_GRID_FORM = "lists of different numbers, texts, true, false or null: {sampler.k: [1, 2, 5], ...}"


def expand_grids(methods: dict[Any, Any]) -> dict[Any, Any]:
    """Return the methods of an experiment file with each method that has a grid replaced by the methods of its grid.

    The order is kept, and a method without a grid is not changed. Other errors in the methods, such as a method that is
    not a mapping or a name that is not a text, are left to the checks that follow.

    Raises:
        ConfigError: a grid is malformed, or contains an unknown option or a value twice; two methods have equal names;
            or there are more than `MOST_METHODS` methods.
    """
    grids = {}  # grid by name of the method
    for name, method in methods.items():
        if isinstance(name, str) and isinstance(method, dict) and "grid" in method:
            grid = method["grid"]
            demand(_is_valid_grid(grid), f"methods.{name}.grid", repr(grid), _GRID_FORM)
            grids[name] = grid
    # counted before the expansion, which would take long for a huge grid
    count = 0
    for name in methods:
        value_counts = [len(values) for values in grids.get(name, {}).values()]
        count += math.prod(value_counts)  # 1 for a method without a grid: the product of no numbers
    demand(count <= MOST_METHODS, "methods", f"{count:,}, with those of grids", f"at most {MOST_METHODS:,}")

    expanded: dict[Any, Any] = {}
    for name, method in methods.items():
        members = _grid_methods(name, method, grids[name]) if name in grids else [(name, method)]
        for member_name, member in members:
            demand(member_name not in expanded, f"methods.{name}", f"a second {member_name}", "each name once")
            expanded[member_name] = member
    return expanded


def parse_sweep_name(name: str) -> list[tuple[str, str]]:
    """Return the swept options and their values, as text, from a method's name; empty for other methods.

    ``speed-k=1e-3-curve=linear`` results in ``[("k", "1e-3"), ("curve", "linear")]``: a value ends at its last
    character, or before a hyphen that an option and ``=`` follow.
    """
    option = r"-([A-Za-z][\w.]*)="
    next_option_or_end = r"(?=-[A-Za-z][\w.]*=|$)"
    return re.findall(f"{option}(.*?){next_option_or_end}", name)


def _is_valid_grid(grid: Any) -> bool:
    """Return True if a grid is a non-empty mapping from texts to lists that pass `_are_different_scalars`."""
    if not isinstance(grid, dict) or not grid:
        return False
    return all(isinstance(key, str) and _are_different_scalars(values) for key, values in grid.items())


def _are_different_scalars(values: Any) -> bool:
    """Return True for a non-empty list of numbers, texts, booleans or null with different texts in a method's name.

    For example, 5 and 5.0 and "5" are not different.
    """
    if not isinstance(values, list) or not values:
        return False
    if not all(value is None or isinstance(value, str | int | float) for value in values):
        return False
    different_texts = {_value_text(value) for value in values}
    return len(different_texts) == len(values)


def _grid_methods(name: str, method: dict[str, Any], grid: dict[str, list[Any]]) -> Iterator[tuple[str, Any]]:
    """Yield name and entries of a method for each combination of a grid's values; values of the last key change first.

    The name has a suffix such as ``-k=5`` for each key. Further entries of `method` are kept, without ``grid``. `grid`
    contains the values of each key, such as ``sampler.k``.

    Raises:
        ConfigError: a key or a value is not allowed, see `_replace`.
    """
    labels = _option_labels(list(grid))
    # components, whose keys have no dot, before their options: `sampler: speed` would delete the value of sampler.k
    keys_in_order = sorted(grid, key=lambda key: "." in key)
    without_grid = {key: value for key, value in method.items() if key != "grid"}
    for values in product(*grid.values()):
        value_of_key = dict(zip(grid, values))
        member = without_grid
        for key in keys_in_order:
            member = _replace(member, key, value_of_key[key], where=f"methods.{name}.grid")
        suffix = "".join(f"-{label}={_value_text(value)}" for label, value in zip(labels, values))
        yield name + suffix, member


def _option_labels(keys: list[str]) -> list[str]:
    """Return the label of each key in names of methods: its ending after the last dot.

    The label is the whole key if it has no dot, or if two keys have equal endings. Example: the labels of
    ``["sampler.k", "weighting"]`` are ``["k", "weighting"]``.
    """
    endings = [key.rpartition(".")[2] for key in keys]
    labels = []
    for key, ending in zip(keys, endings):
        is_unique = endings.count(ending) == 1
        labels.append(ending if is_unique else key)
    return labels


def _replace(method: dict[str, Any], key: str, value: Any, where: str) -> dict[str, Any]:
    """Return a copy of a method in which `value` replaces a component, or the value of an option of a component.

    A method without the component has the default component. The value of an option is checked, a component is not: the
    check of the experiment follows.

    Args:
        key: ``sampler``, ``weighting`` or ``coupling``, or one of these with an option, such as ``sampler.k``.
        where: field for the error message.

    Raises:
        ConfigError: the key is not allowed; or the method's component does not exist, does not have the option, or does
            not allow the value.
    """
    kind, _, option = key.partition(".")
    demand(
        kind in METHOD_COMPONENTS, where, key, "sampler, weighting, coupling or one of their options, such as sampler.k"
    )
    if not option:
        return {**method, kind: value}
    registry, default_name = METHOD_COMPONENTS[kind]
    component = method.get(kind, default_name)
    if not isinstance(component, dict):
        component = {"name": component}  # the short form, sampler: speed
    component = {"name": "", **component, option: value}  # "": an error reports a component without a name
    component_name, options = split(component)
    registry.parse(component_name, options, where=f"{where}: {kind} {component_name}")
    return {**method, kind: component}


def _value_text(value: Any) -> str:
    """Return a value as text for the name of a method: a text unchanged, other values as JSON, and 5.0 as ``5``."""
    return value if isinstance(value, str) else json.dumps(value).removesuffix(".0")
