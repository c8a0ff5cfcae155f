"""Sweeps: a method's ``grid: {sampler.k: [1, 2, 5]}`` becomes methods of their own, ``speed-k=1`` ... ``speed-k=5``.

They are written out before the file is checked, so that whatever reads an experiment, Snakemake and DVC too, sees
methods like any others. Several keys make their product.
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

MOST = 1000  # methods of an experiment
PARTS = {"sampler": (SAMPLERS, "uniform"), "weighting": (WEIGHTINGS, "none"), "coupling": (COUPLINGS, "independent")}
_FORM = "lists of different numbers, texts, true, false or null: {sampler.k: [1, 2, 5], ...}"


def written_out(methods: dict[Any, Any]) -> dict[Any, Any]:
    """Methods, as an experiment file has them, without a grid; what else is wrong in them is left to be refused.

    Raises:
        ConfigError: a grid names what a method does not have, or a value twice, or there are too many methods.
    """
    grids = {name: its["grid"] for name, its in methods.items() if isinstance(its, dict) and "grid" in its}
    for name, grid in grids.items():
        lists = list(grid.items()) if isinstance(grid, dict) else []
        demand(lists and all(_usable(*one) for one in lists), f"methods.{name}.grid", repr(grid), _FORM)
    count = sum(math.prod(map(len, grids.get(name, {}).values())) for name in methods)
    demand(count <= MOST, "methods", f"{count:,}, with those of grids", f"at most {MOST:,}")
    found: dict[Any, Any] = {}
    for name, method in methods.items():
        for new, values in _members(name, method, grids[name]) if name in grids else [(name, method)]:
            demand(new not in found, f"methods.{name}", f"a second {new}", "each name once")
            found[new] = values
    return found


def taken_apart(name: str) -> list[tuple[str, str]]:
    """The options of a sweep and their values, as a method's name has them; none of other methods."""
    return re.findall(r"-([A-Za-z][\w.]*)=(.*?)(?=-[A-Za-z][\w.]*=|$)", name)


def _usable(key: Any, values: Any) -> bool:
    good = isinstance(key, str) and isinstance(values, list) and bool(values)
    plain = good and all(value is None or isinstance(value, str | int | float) for value in values)
    return plain and len(set(map(_text, values))) == len(values)


def _members(name: str, method: dict[str, Any], grid: dict[str, list[Any]]) -> Iterator[tuple[str, Any]]:
    """The methods of a grid; an option goes by the last part of its key where that is of one key alone."""
    last = [key.rpartition(".")[2] for key in grid]
    shown = [short if last.count(short) == 1 else key for key, short in zip(grid, last)]
    for chosen in product(*grid.values()):
        new = {part: value for part, value in method.items() if part != "grid"}
        for key, value in sorted(zip(grid, chosen), key=lambda pair: "." in pair[0]):  # whole parts before options
            new = _with(new, key, value, f"methods.{name}.grid")
        yield name + "".join(f"-{key}={_text(value)}" for key, value in zip(shown, chosen)), new


def _with(method: dict[str, Any], key: str, value: Any, where: str) -> dict[str, Any]:
    """A method with another sampler, weighting or coupling, or with another value of one of its options."""
    part, _, option = key.partition(".")
    demand(part in PARTS, where, key, "sampler, weighting, coupling or one of their options, such as sampler.k")
    if option:
        registry, default = PARTS[part]
        given = method.get(part, default)
        value = {"name": "", **(given if isinstance(given, dict) else {"name": given}), option: value}
        registry.parse(*split(value), f"{where}: {part} {value['name']}")
    return {**method, part: value}


def _text(value: Any) -> str:
    """A value as a method's name has it: 5, not 5.0."""
    return value if isinstance(value, str) else json.dumps(value).removesuffix(".0")
