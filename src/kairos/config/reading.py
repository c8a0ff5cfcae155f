"""Read experiment files as plain values, with ``extends`` applied.

``extends: ../systems/dit_coco.yaml`` names a base file, relative to the folder of the file that extends it. Mappings
are merged key by key, to any depth. Everything else replaces the value of the base file: lists, `methods`, and a
component with another ``name``. Sections `published` and `claim` of the base file are dropped, since they describe that
file alone.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from kairos_timesteps.errors import ConfigError, demand

_NOT_INHERITED = ("published", "claim")
_EXPECTED = "the path of an experiment file, from the folder of this one"
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # CSafeLoader is ten times as fast


class _Loader(_SafeLoader):
    """Loader of safe YAML that rejects a key that occurs twice, where YAML would silently keep the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        repeated = sorted({str(key) for key in keys if keys.count(key) > 1})
        if repeated:
            problem = f"repeated key: {', '.join(repeated)}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return dict(super().construct_mapping(node, deep))


def _describe(error: Exception) -> str:
    """Return the message of an error of YAML on one line, with the line of the file where YAML noticed it."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    context, problem = (getattr(error, name) for name in ("context", "problem"))
    return f"line {mark.line + 1}, column {mark.column + 1}: {'; '.join(filter(None, (context, problem)))}"


def read_experiment_file(path: Path, extending: tuple[Path, ...] = ()) -> Any:
    """Read an experiment file and the files that it extends, without checking fields.

    Args:
        path: path of the file.
        extending: files that extend this one, to detect cycles.

    Raises:
        ConfigError: a file is missing, is not YAML, or has an invalid ``extends``.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        advice = "pass an experiment file such as params.yaml"
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); {advice}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not YAML in UTF-8: {_describe(error)}") from None
    return apply_extends(values, path, extending)


def apply_extends(values: Any, path: Path, extending: tuple[Path, ...] = ()) -> Any:
    """Merge the values of an experiment file into those of the file that it extends; without one, return them.

    The result has no field ``extends``.

    Args:
        values: content of the experiment file.
        path: path of the experiment file.
        extending: files that extend this one, to detect cycles.

    Raises:
        ConfigError: the file that is extended is missing or invalid, or extends this one.
    """
    if not isinstance(values, dict) or "extends" not in values:
        return values
    base, where = values["extends"], f"{path}: extends"
    demand(isinstance(base, str), where, repr(base), _EXPECTED)
    base_path = (path.parent / base).resolve()
    extending = (*extending, path.resolve())
    demand(base_path not in extending, where, repr(base), f"{_EXPECTED}, which does not extend this one")
    demand(base_path.is_file(), where, repr(base), f"{_EXPECTED}; {base_path} does not exist")
    base_values = read_experiment_file(base_path, extending)
    demand(isinstance(base_values, dict), where, repr(base), "a file that is a mapping")
    inherited = {key: value for key, value in base_values.items() if key not in _NOT_INHERITED}
    overrides = {key: value for key, value in values.items() if key != "extends"}
    return _merge(inherited, overrides)


def _merge(base: Any, values: Any) -> Any:
    """Return values merged into the values of a base file, by the rules of ``extends`` in the module's docstring.

    A component that the base file writes as text, such as ``model: dit``, is a name without options.
    """
    if isinstance(base, str) and isinstance(values, dict):
        base = {"name": base}
    if not (isinstance(base, dict) and isinstance(values, dict)):
        return values
    base_name = base.get("name")
    is_other_component = values.get("name", base_name) != base_name
    if is_other_component:
        return values
    merged_keys = (base.keys() & values.keys()) - {"methods"}  # section methods replaces that of the base file
    return base | values | {key: _merge(base[key], values[key]) for key in merged_keys}


def find_experiment_files(folder: Path) -> list[Path]:
    """Return the experiment files below a folder, sorted by folder and name, with table2 before table10.

    Raises:
        ConfigError: there is none.
    """

    def natural_order(path: Path) -> Any:
        # table10 is ["table", 10, ""]: text and numbers alternate, so that keys of two files can be compared
        pieces = re.split(r"(\d+)", path.stem)
        return path.parent, [int(piece) if piece.isdigit() else piece for piece in pieces]

    files = sorted(folder.rglob("*.yaml"), key=natural_order)
    demand(files, "FILE", repr(str(folder)), "an experiment file, or a folder with some (*.yaml)")
    return files
