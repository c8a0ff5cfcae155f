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

PACKAGES = ("kairos", "kairos_timesteps")
# ``from source import names`` as source, number of leading dots and names; ``import a.b`` as "", 0 and ("a.b",)
_Import = tuple[str, int, tuple[str, ...]]
_imported: dict[Path, bytes] = {}  # content of files at their import, see `set_source`


def hash_code(modules: Iterable[str], left_out: frozenset[str] = frozenset()) -> str:
    """Return the hash of the code of `modules` and of all that they import, 16 hex digits; see `list_files`."""
    digests = (_summarise(path)[0] for path in list_files(tuple(sorted(modules)), left_out))
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
        if module not in seen:
            seen.add(module)
            path = find_file(module)
            if path is None:
                raise ModuleNotFoundError(f"module {module!r} has no source file")
            files |= {path, *path.parent.glob(f"{path.stem}.*.jinja"), *path.parent.glob(f"{path.stem}.mplstyle")}
            waiting += _list_imports(module, path) - left_out
    return tuple(sorted(files))


def set_source(path: Path, content: bytes) -> None:
    """Hash `content` for a file from now on, instead of the file on disk, which users may edit after its import."""
    _imported[path] = content
    for function in (find_file, list_files, _list_imports, _summarise):
        function.cache_clear()


@functools.cache
def find_file(module: str) -> Path | None:
    """Return the source file of a module, without importing its packages; None if it has none."""
    package, *names = module.split(".")
    origin = getattr(sys.modules.get(package), "__file__", None)
    spec = None if origin else importlib.util.find_spec(package)
    if spec is not None:  # a folder without __init__.py has a location and no origin
        origin = spec.origin or str(Path(next(iter(spec.submodule_search_locations or [""])), "__init__.py"))
    if origin is None or not origin.endswith(".py"):
        return None
    base = Path(origin).parent.joinpath(*names)
    candidates = [base.with_suffix(".py"), base / "__init__.py"] if names else [Path(origin)]
    return next((file for file in candidates if file.is_file()), None)


@functools.cache
def _summarise(path: Path) -> tuple[str, tuple[_Import, ...]]:
    """Return the hash of a file and its imports; a syntax tree takes too much memory to be kept."""
    content = _imported[path] if path in _imported else path.read_bytes()
    if path.suffix != ".py":
        return hashlib.sha256(content).hexdigest(), ()
    tree = _Stripped().visit(ast.parse(content))
    imports: list[_Import] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports.append(("", 0, tuple(alias.name for alias in node.names)))
        elif isinstance(node, ast.ImportFrom):
            imports.append((node.module or "", node.level, tuple(alias.name for alias in node.names)))
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), tuple(imports)


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
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            return [self.visit(statement) for statement in node.orelse]
        return self.generic_visit(node)


@functools.cache
def _list_imports(module: str, path: Path) -> frozenset[str]:
    """Return the modules that a file imports and whose files `list_files` follows."""
    parents = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    imported: set[str] = set()
    for source, level, names in _summarise(path)[1]:
        absolute = ".".join([*(parents[: len(parents) + 1 - level] if level else []), *filter(None, [source])])
        imported |= {_find_module(absolute, name) for name in names}
    if module.partition(".")[0] not in PACKAGES:  # packages of a plugin's folder run their __init__.py, too
        imported |= {name[:position] for name in imported for position, sign in enumerate(name) if sign == "."}
    folder = path.parents[len(parents)]  # of the plugin, for modules of other packages than kairos
    return frozenset(name for name in imported if _is_followed(name, folder))


def _find_module(source: str, name: str) -> str:
    """Return the module of ``from source import name``: ``source.name``, or the module that defines the name."""
    module = ".".join(filter(None, [source, name]))
    if not source or find_file(module) is not None:
        return module
    module_of_name = getattr(importlib.import_module(source), "MODULE_OF", {}) if source in PACKAGES else {}
    return f"{source}.{module_of_name[name]}" if name in module_of_name else source


def _is_followed(module: str, folder: Path) -> bool:
    path = find_file(module)
    if path is None or module in PACKAGES:
        return False
    is_installed = "site-packages" in path.parts  # in an environment below the plugin's folder
    return module.partition(".")[0] in PACKAGES or (path.is_relative_to(folder) and not is_installed)
