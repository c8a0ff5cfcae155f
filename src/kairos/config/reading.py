"""Experiment files as plain values, those that extend another one laid over it.

``extends: ../systems/dit_coco.yaml`` names that file, from the folder of the one that says it. Mappings are laid over
each other key by key, to any depth. All else replaces what was there: lists, `methods`, and a component that is named
anew (``name:``). What is published is of the file that says it, and not handed on.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from kairos_timesteps.errors import ConfigError, demand

_ALONE = ("published", "claim")
_FILE = "the path of an experiment file, from the folder of this one"
_Safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the former is ten times as fast, where it was built


class _Loader(_Safe):  # type: ignore[misc]
    """Safe YAML in which a key given twice is a mistake; YAML itself would quietly keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"key given twice: {', '.join(twice)}", node.start_mark)
        return dict(super().construct_mapping(node, deep))


def read(path: Path, above: tuple[Path, ...] = ()) -> Any:
    """Read an experiment file together with the files that it extends, without further checks.

    Args:
        path: the file.
        above: files that extend this one.

    Raises:
        ConfigError: a file is missing, is not YAML, or extends what cannot be extended.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        advice = "pass an experiment file such as params.yaml"
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); {advice}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not YAML in UTF-8: {' '.join(str(error).split())}") from None
    return extended(values, path, above)


def extended(values: Any, path: Path, above: tuple[Path, ...] = ()) -> Any:
    """The values of the file at `path` laid over those of the file that they extend, if they do."""
    if not isinstance(values, dict) or "extends" not in values:
        return values
    own = {key: value for key, value in values.items() if key != "extends"}
    base, where, files = values["extends"], f"{path}: extends", (*above, path.resolve())
    demand(isinstance(base, str), where, repr(base), _FILE)
    place = (path.parent / base).resolve()
    demand(place not in files, where, repr(base), f"{_FILE}, which does not extend this one")
    demand(place.is_file(), where, repr(base), f"{_FILE}; there is none at {place}")
    below = read(place, files)
    demand(isinstance(below, dict), where, repr(base), "a file that is a mapping")
    return laid_over({key: value for key, value in below.items() if key not in _ALONE}, own)


def laid_over(below: Any, own: Any) -> Any:
    """`own` over `below`, see the head of this file; a component that is but its name is one without options."""
    if isinstance(below, str) and isinstance(own, dict):
        below = {"name": below}
    if not (isinstance(below, dict) and isinstance(own, dict)):
        return own
    if (name := below.get("name")) != own.get("name", name):
        return own
    both = below.keys() & own.keys() - {"methods"}
    return below | own | {key: laid_over(below[key], own[key]) for key in both}


def files_in(folder: Path) -> list[Path]:
    """The experiment files below a folder, numbers in their names as such.

    Raises:
        ConfigError: there is none.
    """

    def by_number(path: Path) -> Any:  # table2 before table10
        return path.parent, [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.stem)]

    found = sorted(folder.rglob("*.yaml"), key=by_number)
    demand(found, "FILE", repr(str(folder)), "an experiment file, or a folder of some (*.yaml)")
    return found
