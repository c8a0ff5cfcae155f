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
_ALLOWED_EXTENDS = "the path of an experiment file, from the folder of this one"
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # CSafeLoader is ten times as fast


class _Loader(_SafeLoader):
    """Loader of safe YAML that also rejects repeated keys, and reports the position of values that cannot be read.

    PyYAML would silently keep the last value of a repeated key.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the value of a YAML node.

        Raises:
            ConstructorError: the value does not fit its type, such as date 2024-13-01, or is a number of thousands of
                digits; the message contains the position of the value.
        """
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int):
                str(value)  # fails for thousands of digits, which later messages and files could not contain either
            return value
        except (ValueError, LookupError, AttributeError, OverflowError):  # not wrapped by PyYAML
            text = str(node.value)
            shown_text = text if len(text) <= 40 else text[:37] + "..."
            value_type = node.tag.rpartition(":")[2]
            problem = f"got {shown_text!r}, which cannot be read as {value_type}; quote it if it is a text"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping of a YAML node as a dictionary.

        Raises:
            ConstructorError: a key occurs twice; the message lists such keys, at the position of the mapping.
        """
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        repeated = sorted({str(key) for key in keys if keys.count(key) > 1})
        if repeated:
            problem = f"repeated key: {', '.join(repeated)}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _describe(error: Exception) -> str:
    """Return the message of an error of YAML on one line, with line and column, from 1, where YAML noticed it.

    The message of an error without a position, such as an encoding error, has no line.
    """
    mark = getattr(error, "problem_mark", None)  # position in the file, from 0
    if mark is None:
        return " ".join(str(error).split())
    sentences = [getattr(error, name) for name in ("context", "problem")]  # either may be None
    message = "; ".join(filter(None, sentences))
    return f"line {mark.line + 1}, column {mark.column + 1}: {message}"


def read_experiment_file(path: Path, extending: tuple[Path, ...] = ()) -> Any:
    """Return the content of an experiment file, merged with the files that it extends; fields are not checked.

    The result is a mapping without ``extends``; or any other value of YAML, if the file does not contain a mapping.
    `extending` are files that extend this one, to detect cycles.

    Raises:
        ConfigError: a file is missing, is not YAML in UTF-8, contains a key twice or a value that cannot be read, or
            has an invalid ``extends``.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        advice = "pass an experiment file such as params.yaml"
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); {advice}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML in UTF-8: {_describe(error)}") from None
    return apply_extends(values, path, extending)


def apply_extends(values: Any, path: Path, extending: tuple[Path, ...] = ()) -> Any:
    """Return the values of an experiment file, merged into the values of the file that it extends, see `merge`.

    The result has no field ``extends``; ``published`` and ``claim`` of the extended file are left out. Values that are
    not a mapping, or have no such field, are returned unchanged. `path` is the path of the file, and `extending` are
    files that extend it, to detect cycles.

    Raises:
        ConfigError: the file that is extended is missing or invalid, or extends this one.
    """
    if not isinstance(values, dict) or "extends" not in values:
        return values
    extends, where = values["extends"], f"{path}: extends"
    demand(isinstance(extends, str), where, repr(extends), _ALLOWED_EXTENDS)
    base_path = (path.parent / extends).resolve()
    extending = (*extending, path.resolve())
    demand(base_path not in extending, where, repr(extends), f"{_ALLOWED_EXTENDS}, which does not extend this one")
    demand(base_path.is_file(), where, repr(extends), f"{_ALLOWED_EXTENDS}; {base_path} does not exist")
    base_values = read_experiment_file(base_path, extending)
    demand(isinstance(base_values, dict), where, repr(extends), "a file that is a mapping")
    inherited = {key: value for key, value in base_values.items() if key not in _NOT_INHERITED}
    overrides = {key: value for key, value in values.items() if key != "extends"}
    return merge(inherited, overrides)


def merge(base: Any, values: Any) -> Any:
    """Return values merged into the values of a base file, by the rules of ``extends`` in the module's docstring.

    Two mappings are merged key by key, to any depth. Other `values`, a component with another name, and the value of
    key ``methods`` replace the base. Text in the base file, such as ``model: dit``, is merged with a mapping as the
    name of a component without options. The arguments are not changed.
    """
    if isinstance(base, str) and isinstance(values, dict):
        base = {"name": base}
    if not isinstance(base, dict) or not isinstance(values, dict):
        return values
    base_name = base.get("name")
    name = values.get("name", base_name)
    if name != base_name:
        return values  # another component: options of the base do not fit it
    shared_keys = (base.keys() & values.keys()) - {"methods"}
    merged = {key: merge(base[key], values[key]) for key in shared_keys}
    return base | values | merged


def find_experiment_files(folder: Path) -> list[Path]:
    """Return the files ``*.yaml`` in a folder and its subfolders, sorted by folder and name, table2 before table10.

    Raises:
        ConfigError: there is none.
    """
    files = sorted(folder.rglob("*.yaml"), key=_natural_order)
    demand(files, "FILE", repr(str(folder)), "an experiment file, or a folder with some (*.yaml)")
    return files


def _natural_order(path: Path) -> Any:
    """Return the key that sorts files by folder and then by name without suffix, with numbers compared as numbers.

    The key of table10 is ``["table", 10, ""]``: text and numbers alternate, so that keys of two files can be compared.
    """
    pieces = re.split(r"(\d+)", path.stem)
    return path.parent, [int(piece) if piece.isdecimal() else piece for piece in pieces]
