"""Hash of the code that computes a result: parsed files, without docstrings, comments and annotations.

`list_files` finds the files of a result by their imports, with `ast` alone. Files of components, such as samplers and
backbones, belong to a result only if its method selects them, or if a selected component's file imports them.
"""

import ast
import functools
import hashlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("kairos", "kairos_timesteps")
_imported: dict[Path, bytes] = {}  # content of files at their import, see `set_source`


def hash_code(modules: Iterable[str], left_out: frozenset[str] = frozenset()) -> str:
    """Return the hash of the code of `modules` and of all that they import, 16 hex digits; see `list_files`."""
    digests = (hash_file(path) for path in list_files(tuple(sorted(modules)), left_out))
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()[:16]


@functools.cache
def list_files(modules: tuple[str, ...], left_out: frozenset[str] = frozenset()) -> tuple[Path, ...]:
    """Return the files of modules and of the modules that they import, transitively, sorted by path.

    Imports are followed within kairos, its library, and below the folder of a plugin.
    Imports under TYPE_CHECKING are ignored. A file ``NAME.html.jinja`` or ``NAME.mplstyle`` belongs to module NAME.

    Args:
        modules: dotted names.
        left_out: dotted names of modules that are neither included nor followed, unless `modules` contains them.

    Raises:
        ModuleNotFoundError: a module has no source file.
    """
    waiting, seen, files = list(modules), set[str](), set[Path]()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        path = find_file(module)
        if path is None:
            raise ModuleNotFoundError(f"module {module!r} has no source file")
        files |= {path, *path.parent.glob(f"{path.stem}.*.jinja"), *path.parent.glob(f"{path.stem}.mplstyle")}
        waiting += [name for name in _list_imports(module, path) if name not in left_out]
    return tuple(sorted(files))


def set_source(path: Path, content: bytes) -> None:
    """Hash `content` for a file from now on, instead of the file on disk, which users may edit after its import."""
    _imported[path] = content
    for function in (find_file, _find_module, list_files, _list_imports, _summarise):
        function.cache_clear()


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a parsed Python file, see the module's docstring, or of the bytes of any other file.

    This process reads a file once.
    """
    return _summarise(path).digest


class _Import(NamedTuple):
    """An import: of modules by `names`, or ``from source import names`` with the number of leading dots as `level`."""

    source: str | None
    level: int
    names: tuple[str, ...]


class _Summary(NamedTuple):
    """Hash of a file, and its imports; a syntax tree takes too much memory to be kept."""

    digest: str
    imports: tuple[_Import, ...] = ()


@functools.cache
def _summarise(path: Path) -> _Summary:
    content = _imported[path] if path in _imported else path.read_bytes()
    if path.suffix != ".py":
        return _Summary(hashlib.sha256(content).hexdigest())
    tree = _Stripped().visit(ast.parse(content))
    imports = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports.append(_Import(None, 0, tuple(alias.name for alias in node.names)))
        elif isinstance(node, ast.ImportFrom):
            imports.append(_Import(node.module or "", node.level, tuple(alias.name for alias in node.names)))
    return _Summary(hashlib.sha256(ast.dump(tree).encode()).hexdigest(), tuple(imports))


class _Stripped(ast.NodeTransformer):
    """Removes docstrings, annotations and code under TYPE_CHECKING from a syntax tree."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)  # the target stays: a field without a default has its place in a class
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.AST]:
        if _is_type_checking(node):
            return [self.visit(statement) for statement in node.orelse]
        return self.generic_visit(node)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


@functools.cache
def find_file(module: str) -> Path | None:
    """Return the source file of a module, without importing its packages; None if it has none."""
    package, *names = module.split(".")
    loaded = getattr(sys.modules.get(package), "__file__", None)
    spec = None if loaded else importlib.util.find_spec(package)
    if spec is not None and spec.origin is None and spec.submodule_search_locations:  # a folder without __init__.py
        path = Path(next(iter(spec.submodule_search_locations)), "__init__.py")
    else:
        path = Path(loaded or (spec.origin if spec else None) or "")
    if path.suffix != ".py":
        return None
    if not names:
        return path if path.is_file() else None
    base = path.parent.joinpath(*names)
    return next((file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()), None)


@functools.cache
def _list_imports(module: str, path: Path) -> frozenset[str]:
    """Return the modules that a file imports and whose files `list_files` follows."""
    imported: set[str] = set()
    for source, level, names in _summarise(path).imports:
        if source is None:
            imported |= set(names)
        else:
            parents = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
            prefix = parents[: len(parents) + 1 - level] if level else []
            absolute = ".".join([*prefix, *filter(None, [source])])
            imported |= {_find_module(absolute, name) for name in names}
    depth = module.count(".") + (path.name == "__init__.py")
    folder = path.parents[depth]  # of the plugin, for modules of other packages than kairos
    with_packages = {".".join(parts[:count]) for parts in map(_split, imported) for count in range(1, len(parts) + 1)}
    followed = imported if module.partition(".")[0] in PACKAGES else with_packages
    return frozenset(name for name in followed if _is_followed(name, folder))


def _split(module: str) -> list[str]:
    return module.split(".")


@functools.cache
def _find_module(source: str, name: str) -> str:
    """Return the module of ``from source import name``: ``source.name``, or the one from which `source` imports it."""
    if find_file(f"{source}.{name}") is not None:
        return f"{source}.{name}"
    path = find_file(source) if source.partition(".")[0] in PACKAGES else None
    if path is not None and path.name == "__init__.py":
        for node in ast.walk(ast.parse(path.read_bytes())):  # with TYPE_CHECKING, where lazy packages list their names
            is_import = isinstance(node, ast.ImportFrom) and node.level == 0 and node.module != source
            if is_import and name in {alias.asname or alias.name for alias in node.names}:  # type: ignore[attr-defined]
                return _find_module(str(node.module), name)  # type: ignore[attr-defined]
    return source


def _is_followed(module: str, folder: Path) -> bool:
    path = find_file(module)
    if path is None or module in PACKAGES:
        return False
    is_installed = "site-packages" in path.parts  # in an environment below the plugin's folder
    return module.partition(".")[0] in PACKAGES or (path.is_relative_to(folder) and not is_installed)
