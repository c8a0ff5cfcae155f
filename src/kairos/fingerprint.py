"""A hash of the code that computes something, taken from the parsed modules; layout, comments, messages do not count.

The modules are found by following the imports of kairos modules from a stage's entry module. Configuration models and
registries are left out: they decide *which* code runs with *which* values, and both are hashed as values; the code of
the components named is passed in as further roots.
"""

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_PACKAGES = ("kairos", "kairos_timesteps")
# they decide which code runs with which values, or keep and show what others compute; nothing is computed in them
_LEFT_OUT = (
    *(f"kairos.{name}" for name in ("config", "progress", "clock", "cli", "files", "section")),
    *(f"kairos.{name}" for name in ("fingerprint", "training.identity", "training.store", "training.checkpoint")),
    *(f"kairos.{name}" for name in ("training.job", "training.launch", "training.provenance")),
    *(f"kairos_timesteps.{name}" for name in ("registry", "options", "errors", "component_options", "components")),
    "kairos_timesteps.monitoring",
    "kairos.data.referred",  # gives the pixels that stage prepare saw, or none
)
_SAYING = ("say", "warn")  # functions that tell the user something

_BESIDE = (".html.jinja", ".mplstyle")


def fingerprint(roots: Iterable[str]) -> str:
    """Hash of the modules that `roots` (dotted names) reach, 16 hex digits."""
    return _fingerprint(tuple(sorted(set(roots))))


@functools.cache
def _fingerprint(roots: tuple[str, ...]) -> str:
    lines = (f"{module} {_hash_module(module)}\n" for module in modules(roots))
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def modules(roots: Iterable[str]) -> list[str]:
    """All kairos modules that `roots` reach through imports, anywhere in the code, sorted."""
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        if module not in found and not _is_left_out(module):
            found.add(module)
            waiting += _imports(module)
    return sorted(found)


def _is_left_out(module: str) -> bool:
    """Return True if a module, or a package that contains it, computes nothing."""
    packages = tuple(f"{name}." for name in _LEFT_OUT)
    return module in _LEFT_OUT or module.startswith(packages) or module.endswith((".registries", ".settings"))


def _folder(package: str) -> Path:
    """Return the folder of a package's modules."""
    if package == __name__.partition(".")[0]:
        return Path(__file__).parent
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _path(module: str) -> Path | None:
    """Return the source file of a module; None if the module has none."""
    package, *names = module.split(".")
    if package not in _PACKAGES:  # a component from another package
        spec = importlib.util.find_spec(module)
        return Path(spec.origin) if spec and spec.origin else None
    base = _folder(package).joinpath(*names)
    candidates = (base.with_suffix(".py"), base / "__init__.py")
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _parsed(module: str) -> ast.Module:
    path = _path(module)
    if path is None:
        raise ModuleNotFoundError(f"no source for module {module}")
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def _hash_module(module: str) -> str:
    """Of a module, and of the template or style of its name beside it."""
    path, text = _path(module), _text(_parsed(module))
    beside = [path.with_suffix(suffix) for suffix in _BESIDE] if path else []
    text += "".join(file.read_text(encoding="utf-8") for file in beside if file.is_file())
    return hashlib.sha256(text.encode()).hexdigest()


def _text(node: Any, message: bool = False) -> str:
    """A syntax tree as text: no positions, no docstrings, no empty fields (which differ between versions of Python).

    Of an error that is raised and of what is only said the strings are left out.
    """
    if isinstance(node, list):
        return "[" + ",".join(_text(item, message) for item in node) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    message = message or isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and _called(node) in _SAYING)
    if message and (isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)):
        return "message"
    fields = dict(ast.iter_fields(node))
    if isinstance(node, ast.Call) and _called(node) == "option":  # an option's value counts, its help does not
        fields["args"] = fields["args"][:1] + fields["args"][2:]
        fields["keywords"] = [keyword for keyword in fields["keywords"] if keyword.arg != "help"]
    if isinstance(node, ast.Call) and _called(node) == "demand":  # what it demands counts, its words do not
        fields["args"] = fields["args"][:1]
    may_have = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    if may_have and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = fields["body"][1:]
    counted = {name: value for name, value in fields.items() if value not in (None, []) and name != "kind"}
    text = ",".join(f"{name}={_text(value, message)}" for name, value in counted.items())
    return f"{type(node).__name__}({text})"


def _called(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below a node, without what is there for type checkers only."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING"):
            yield from _executed(child)


@functools.cache
def _imports(module: str) -> tuple[str, ...]:
    names: set[str] = set()
    for node in _executed(_parsed(module)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    inside = {name for name in names if name.split(".")[0] in _PACKAGES}
    return tuple(sorted(name for name in inside if name not in _PACKAGES and _path(name) is not None))
