"""Hash of the code that computes a result, from parsed modules without layout, comments and messages.

Modules of package `kairos` are hashed as a whole. Modules of other packages are hashed by definition: the root
``"module:Name"`` reaches the top-level definition `Name` and the definitions that it uses. An edit of one sampler
therefore leaves the hashes of other samplers unchanged. Imports are followed within `kairos` and `kairos_timesteps`,
and between plugin files of one folder.

Configuration models and registries are left out: they select code and values. The values are hashed elsewhere, and the
code of the selected components is passed in as further roots.

The user's cache keeps a summary of each module of kairos by the hash of its source, because parsing takes most of a
short command's time. A summary that is missing or damaged is computed again.
"""

import ast
import functools
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kairos_timesteps.errors import KairosError

if TYPE_CHECKING:
    from kairos.components import ComponentOptions
    from kairos.library_components import LibraryComponent
    from kairos_timesteps.registry import Registry

_PIPELINE = "kairos"
_LIBRARY = "kairos_timesteps"
_PACKAGES = (_PIPELINE, _LIBRARY)
# these modules select code and values, or store and show results; they compute nothing
_LEFT_OUT = (
    *(f"kairos.{name}" for name in ("config", "progress", "resource_usage", "cli", "files", "section")),
    *(f"kairos.{name}" for name in ("components", "library_components", "quick_imports", "shapes", "array_shapes")),
    *(f"kairos.{name}" for name in ("fingerprint", "training.identity", "training.run_folder", "training.checkpoint")),
    *(f"kairos.{name}" for name in ("training.job", "training.launch", "training.provenance")),
    *(f"kairos_timesteps.{name}" for name in ("registry", "options", "errors", "components")),
    "kairos_timesteps.monitoring",
    "kairos.data.linked_images",  # returns the pixels of stage prepare, or none
)
_MESSAGES = ("log", "warn")  # functions that print a message
_REGISTERING = ("sampler", "weighting", "coupling", "density", "process")  # decorators that register a component
_imported: dict[Path, str] = {}  # texts of plugin files, see `set_source`
_DATA_SUFFIXES = (".html.jinja", ".mplstyle")  # a template or style with a module's name is part of the module
# read at the import, with the code that runs: the file may be edited later
_HASH_OF_THIS_MODULE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
_CACHE_FILE = "kairos/modules.json"  # below the user's cache folder
_MOST_SUMMARIES = 1000  # in the file; the oldest are dropped


def fingerprint(roots: Iterable[str]) -> str:
    """Return the hash of the code that `roots` reach, 16 hex digits.

    New summaries of modules are saved in the user's cache.

    Args:
        roots: modules by dotted name, or definitions as ``"module:Name"``, in any order.

    Raises:
        ModuleNotFoundError: the module of a root has no source.
        ImportError: the code uses a name that package `kairos_timesteps` lacks, see `_resolve`.
    """
    return _fingerprint(tuple(sorted(set(roots))))


@functools.cache
def _fingerprint(roots: tuple[str, ...]) -> str:
    """Return the fingerprint of sorted roots, see `fingerprint`; this process computes it once."""
    lines = [f"{_without_file_name(code)} {digest}\n" for code, digest in reached(roots).items()]
    _summaries.save()
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()[:16]


def _without_file_name(code: str) -> str:
    """Return ``"module:Name"`` for kairos' packages and ``"Name"`` for plugin files, which may be renamed.

    A module as a whole is ``"module"``, or ``""`` for a plugin file.
    """
    module, _, name = code.partition(":")
    if _top(module) in _PACKAGES:
        return code
    return name


def roots_of(component: "ComponentOptions | LibraryComponent") -> list[str]:
    """Return the roots of a component's fingerprint, for `fingerprint`.

    A component of the pipeline has one root: the dotted name of its module. A component of the library has the root
    ``"module:Class"`` of its class, and the roots of the components that its options name, see `_library_roots`.
    """
    registry = getattr(component, "registry", None)  # only components of the library have one
    if registry is None:
        return [component.module()]
    return _library_roots(registry, component.plain())


def _library_roots(registry: "Registry", component: dict[str, Any]) -> list[str]:
    """Return the roots ``"module:Class"`` of a component of the library and of the components that its options name.

    The components that options name are in `registry` too. Their own options are followed likewise.

    Args:
        registry: registry of the component.
        component: key ``name`` and plain options; options that it lacks have their defaults.
    """
    entry = registry.entry(component["name"])
    roots = [entry.code]
    for option in entry.component.options.values():
        if not option.component:
            continue
        value = component.get(option.public_name, option.default)
        selected = value if isinstance(value, list) else [value]
        for choice in selected:  # a name, or a dictionary of name and options
            selected_component = {"name": choice} if isinstance(choice, str) else choice
            roots += _library_roots(registry, selected_component)
    return roots


def modules(roots: Iterable[str]) -> list[str]:
    """Return the dotted names of all modules of which `roots` reach at least one definition, sorted; see `reached`."""
    return sorted({code.partition(":")[0] for code in reached(roots)})


def reached(roots: Iterable[str]) -> dict[str, str]:
    """Return the hash of every module and definition that `roots` reach, by ``"module"`` or ``"module:Name"``.

    The result includes the code that each root stands for (`_resolve`), unless it is left out of fingerprints. The
    order of the result has no meaning.

    Raises:
        ModuleNotFoundError: the module of a root has no source.
        ImportError: the code uses a name that package `kairos_timesteps` lacks, see `_resolve`.
    """
    waiting = list(roots)  # dotted names to follow
    for root in waiting:
        # raises an error if the module has no source; `_resolve` would follow the package of a missing module instead
        _summary(root.partition(":")[0])
    hashes: dict[str, str] = {}
    seen: set[str] = set()
    while waiting:
        target = waiting.pop()
        if target in seen:
            continue
        seen.add(target)
        code = _resolve(target)
        if code is None or code in hashes:  # left out, or reached by another name
            continue
        module, _, name = code.partition(":")
        hashes[code], used_names = _summary(module).code[name]
        waiting += used_names
    return hashes


def _resolve(target: str) -> str | None:
    """Return the ``"module"`` or ``"module:Name"`` that a dotted name stands for; None if the module is left out.

    A name of a module of package `kairos` stands for the whole module. In another module, a name that the module
    defines stands for the definition, and an imported name for what is imported. Any other name stands for the whole
    module: an unknown one, one such as ``__name__``, and one with several imports, see `_imports`.

    * ``kairos.data.batches.Batches`` stands for ``kairos.data.batches``.
    * ``kairos_timesteps.errors.demand`` is left out.
    * ``kairos_timesteps.randomness.Stream.uniform`` stands for ``kairos_timesteps.randomness:Stream``.
    * ``kairos_timesteps.Strategy`` stands for ``kairos_timesteps.strategy:Strategy``.

    Raises:
        ImportError: package `kairos_timesteps` neither defines nor imports the name, not even under TYPE_CHECKING.
    """
    module, *names = target.replace(":", ".").split(".")  # roots and a module's own definitions are "module:Name"
    while names and _path(f"{module}.{names[0]}"):  # the first names are modules, the others attributes
        module = f"{module}.{names.pop(0)}"
    if module == _PIPELINE or _is_left_out(module):  # the file of package `kairos` contains only the version
        return None
    counts_as_whole = module.startswith(f"{_PIPELINE}.")
    if counts_as_whole or not names or names[0].startswith("__"):  # such as __name__, an attribute of the module
        return module
    summary = _summary(module)
    name, *attributes = names
    if name in summary.code:
        return f"{module}:{name}"
    imported_names = summary.imports.get(name, [])
    if len(imported_names) == 1:
        return _resolve(".".join([imported_names[0], *attributes]))
    # a name that is neither defined nor imported once: other modules bind it by a statement, which the whole module
    # includes; package `kairos_timesteps` imports its public names lazily, from its imports under TYPE_CHECKING
    if module == _LIBRARY:
        raise ImportError(f"{target}: {module} does not define {name!r}; import the name there under TYPE_CHECKING")
    return module


def _is_left_out(module: str) -> bool:
    """Return True if a module computes nothing and is therefore left out of fingerprints.

    Modules in packages with a name in `_LEFT_OUT` are left out too, and the modules ``settings`` of kairos' packages.
    """
    is_settings = _top(module) in _PACKAGES and module.endswith(".settings")
    is_in_left_out_package = module.startswith(tuple(f"{name}." for name in _LEFT_OUT))
    return is_settings or module in _LEFT_OUT or is_in_left_out_package


def _path(module: str) -> Path | None:
    """Return the source file of a module, without importing its package; None if it has none or does not exist.

    For a module that is already imported and is not part of kairos' packages, it is the file of the import.
    """
    package, *names = module.split(".")
    if package in _PACKAGES:
        return _file_in_package(module, __file__)
    imported_file = getattr(sys.modules.get(module), "__file__", None)
    if imported_file:
        return Path(imported_file)
    if package in sys.modules:
        spec = sys.modules[package].__spec__  # may be None; then `find_spec` raises an error
    else:
        spec = importlib.util.find_spec(package)
    if spec is None:
        return None
    if spec.submodule_search_locations is None:  # a module in one file, which has no submodules
        if names or spec.origin is None or not spec.has_location:
            return None
        return Path(spec.origin)
    for folder in spec.submodule_search_locations:
        file = _source_file(Path(folder).joinpath(*names))
        if file:
            return file
    return None


@functools.cache
def _file_in_package(module: str, this_file: str) -> Path | None:
    """Return the source file of a module of kairos' packages; None if there is none.

    `this_file` is a file in package `kairos`, and an argument because tests replace ``__file__``.
    """
    package, *names = module.split(".")
    if package == _PIPELINE:
        folder = Path(this_file).parent
    else:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            return None
        folder = Path(spec.origin).parent
    return _source_file(folder.joinpath(*names))


@functools.cache
def _source_file(path: Path) -> Path | None:
    """Return the file ``<path>.py`` of a module, else ``<path>/__init__.py`` of a package; None without either.

    This process looks for it once.
    """
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((candidate for candidate in candidates if candidate.is_file()), None)


@functools.cache
def _source(path: Path) -> str:
    """Return the text that `set_source` has set for a file, or else the file's text; this process reads it once.

    Tests replace this function to edit the text.
    """
    return _imported.get(path) or path.read_text(encoding="utf-8")  # an empty text that is set is read again


def set_source(path: Path, text: str) -> None:
    """Set the text of a plugin file to the text that this process imports; the file may be edited later.

    The fingerprints that this process has computed before are dropped.
    """
    _imported[path] = text
    _source.cache_clear()
    _fingerprint.cache_clear()


@dataclass(eq=False)
class _Parsed:
    """A parsed module.

    Attributes:
        module: dotted name of the module.
        path: its source file.
        tree: its syntax tree, without code under TYPE_CHECKING.
        definitions: statements that define a name, by name.
        imports: dotted names that its imports make available, by the name that each gets.
        typing_imports: dotted names of the imports under TYPE_CHECKING.
        statements: statements that are neither definitions, imports nor docstrings.
    """

    module: str
    path: Path
    tree: ast.Module
    definitions: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imports: dict[str, list[str]] = field(default_factory=dict)
    typing_imports: dict[str, list[str]] = field(default_factory=dict)
    statements: list[ast.stmt] = field(default_factory=list)


@dataclass(frozen=True)
class _Summary:
    """Imports, hashes and used names of a module, from which fingerprints are computed.

    Attributes:
        imports: dotted names that the module imports, by the name that each gets; imports under TYPE_CHECKING only
            for names that no other import binds.
        code: hash, and dotted names that the code uses, of the whole module under "" and of each definition by name. A
            module that is hashed as a whole has no definitions here.
    """

    imports: dict[str, list[str]]
    code: dict[str, tuple[str, list[str]]]


class _Summaries:
    """Summaries of kairos' modules in a file of the user's cache; the key of a summary is the hash of its inputs."""

    def __init__(self) -> None:
        user_cache = os.environ.get("XDG_CACHE_HOME", "")
        folder = user_cache if os.path.isabs(user_cache) else "~/.cache"  # the XDG rules exclude relative paths
        self._path = Path(folder, _CACHE_FILE)
        self._loaded: dict[str, Any] | None = None
        self._new: dict[str, Any] = {}

    def find(self, key: str) -> _Summary | None:
        """Return the summary under a key; None if there is none, or the file or the entry is damaged.

        The first call reads the file.
        """
        if self._loaded is None:
            self._loaded = self._read()
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            imports, code = self._loaded[key]  # in the form that `add` writes; tuples have become lists in JSON
            imports = {name: list(sources) for name, sources in imports.items()}
            code = {name: (str(digest), list(targets)) for name, (digest, targets) in code.items()}
            if "" in code:  # the whole module, which every intact summary contains
                return _Summary(imports, code)
        return None

    def add(self, key: str, summary: _Summary) -> None:
        """Keep a summary for `save`; only processes that read the file after that find it under the key."""
        self._new[key] = [summary.imports, summary.code]

    def save(self) -> None:
        """Add the new summaries to the file, which keeps the newest 1,000.

        Without new summaries the file is not written. If its folder cannot be written, the new summaries are lost
        without an error.
        """
        if not self._new:
            return
        from kairos.files import atomic

        summaries = self._read() | self._new  # read again, since another process may have added summaries
        self._new = {}
        newest = dict(list(summaries.items())[-_MOST_SUMMARIES:])  # new ones are at the end
        # a RuntimeError: the user has no home; a KairosError: the path is not a file
        with suppress(OSError, RuntimeError, KairosError), atomic(self._path.expanduser(), "w") as file:
            json.dump(newest, file, separators=(",", ":"))

    def _read(self) -> dict[str, Any]:
        """Return the content of the file, values by key; empty without a file, or if it is damaged."""
        with suppress(OSError, ValueError, RuntimeError):  # a RuntimeError: the user has no home
            content = json.loads(self._path.expanduser().read_text(encoding="utf-8"))
            if isinstance(content, dict):
                return content
        return {}


_summaries = _Summaries()


def _summary(module: str) -> _Summary:
    """Return the summary of a module; raise ModuleNotFoundError if it has no source."""
    path = _path(module)
    if path is None:
        raise ModuleNotFoundError(f"no source for module {module}")
    return _summarise(module, path, _source(path))


@functools.cache
def _summarise(module: str, path: Path, text: str) -> _Summary:
    """Return the summary of a module, from the cache if the module belongs to kairos' packages.

    A summary that the cache lacks is computed and kept for `_Summaries.save`. The cache has no summaries of plugins,
    which depend on the other files of the plugin's folder.
    """
    if _top(module) not in _PACKAGES:
        return _compute_summary(module, path, text)
    # this module and Python's parser determine the summary of a text; the file's name decides about relative imports
    inputs = [_HASH_OF_THIS_MODULE, sys.version, module, path.name, text, _data_of(path)]
    key = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()
    summary = _summaries.find(key)
    if summary is None:
        summary = _compute_summary(module, path, text)
        _summaries.add(key, summary)
    return summary


def _data_of(path: Path) -> str:
    """Return the joined text of the template and the style that have the module's name; empty if it has neither."""
    files = [path.with_suffix(suffix) for suffix in _DATA_SUFFIXES]
    return "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())


def _compute_summary(module: str, path: Path, text: str) -> _Summary:
    """Parse a module and return its summary, without reading or changing the cache.

    For a module of package `kairos`, the summary contains only the whole module.
    """
    parsed = _parse(module, path, text)
    counts_as_whole = module.startswith(f"{_PIPELINE}.")
    names = [""] if counts_as_whole else ["", *parsed.definitions]
    code = {}
    for name in names:
        digest, used_names = _hash_and_used_names(parsed, name)
        code[name] = digest, sorted(used_names)
    imports = parsed.typing_imports | parsed.imports  # an executed import replaces one under TYPE_CHECKING
    return _Summary(imports, code)


def _parse(module: str, path: Path, text: str) -> _Parsed:
    """Parse a module, and sort its top-level statements into definitions, imports and others.

    A star import is one of the others, and so is a statement that contains imports, such as `try`. Docstrings are left
    out. Code under TYPE_CHECKING never runs: its imports are kept apart, and its statements are left out. The code
    under `else` is kept.
    """
    parsed = _Parsed(module, path, ast.parse(text))

    # separate the code under TYPE_CHECKING
    executed: list[ast.stmt] = []
    for node in parsed.tree.body:
        if isinstance(node, ast.If) and _last_name(node.test) == "TYPE_CHECKING":
            body = ast.Module(node.body, [])  # `_nodes` takes one node; nested imports are included
            parsed.typing_imports |= _imports(_nodes(body), module, path)
            executed += node.orelse
        else:
            executed.append(node)
    parsed.tree.body = executed

    # sort the executed statements; a star import is one of the others, because it binds unknown names
    # imports within definitions and statements, such as in `try`, are left to `_hash_and_used_names`
    for node in executed:
        names = _defined_names(node)
        for name in names:
            parsed.definitions.setdefault(name, []).append(node)
        if isinstance(node, (ast.Import, ast.ImportFrom)) and node.names[0].name != "*":
            for name, sources in _imports([node], module, path).items():
                parsed.imports.setdefault(name, []).extend(sources)
        elif not names and not _is_docstring(node):
            parsed.statements.append(node)
    return parsed


def _is_docstring(node: ast.stmt) -> bool:
    """Return True for a statement that is only a constant, such as a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _last_name(node: ast.AST) -> str:
    """Return the last name of a variable or attribute: ``log`` for ``log`` and for ``np.log``; "" for other nodes."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _defined_names(node: ast.stmt) -> list[str]:
    """Return the names that a class, a function or an assignment binds; an empty list for any other statement.

    The list is also empty for an assignment that changes an object, such as ``name, options["k"] = 1, 2``.
    """
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return [node.name]
    if not isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        return []
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]  # several in `a = b = 1`
    target_nodes = [target_node for target in targets for target_node in ast.walk(target)]
    if any(isinstance(target_node, (ast.Attribute, ast.Subscript)) for target_node in target_nodes):
        return []
    return [target_node.id for target_node in target_nodes if isinstance(target_node, ast.Name)]


def _nodes(code: ast.AST) -> list[ast.AST]:
    """Return all nodes of a syntax tree, in no particular order; `ast.walk` takes three times as long."""
    nodes: list[ast.AST] = []
    waiting = [code]
    while waiting:
        node = waiting.pop()
        nodes.append(node)
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                waiting += [item for item in value if isinstance(item, ast.AST)]
            elif isinstance(value, ast.AST):
                waiting.append(value)
    return nodes


def _imports(nodes: Iterable[ast.AST], module: str, path: Path) -> dict[str, list[str]]:
    """Return the dotted names that a module's code imports, by the name that the import binds.

    Only imports that `_is_followed` accepts are included. An import may run the code of several modules, so a name may
    have several dotted names. Examples:

    * ``import kairos.data.arrays`` gives `kairos` two names: ``kairos.data.arrays`` and ``kairos``.
    * ``import kairos.data.arrays as arrays`` gives `arrays` the name ``kairos.data.arrays``.
    * ``from kairos.files import atomic`` gives `atomic` two names: ``kairos.files.atomic`` and ``kairos.files``.
    * ``from .schedules import linear`` in ``plugin.noise`` gives `linear` the name ``plugin.schedules.linear``.
    * ``from kairos_timesteps.numeric import *`` gives `*` the name ``kairos_timesteps.numeric``.
    """
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    pairs: list[tuple[str, str]] = []  # name that an import binds, and dotted name
    for node in nodes:
        if isinstance(node, ast.Import):
            pairs += [(alias.asname or _top(alias.name), alias.name) for alias in node.names]
            pairs += [(_top(alias.name), _top(alias.name)) for alias in node.names if not alias.asname]
        elif isinstance(node, ast.ImportFrom):
            dots = "." * node.level  # of a relative import
            source = importlib.util.resolve_name(dots + (node.module or ""), package)
            for alias in node.names:
                bound = alias.asname or alias.name
                pairs.append((bound, f"{source}.{alias.name}".removesuffix(".*")))
                if _top(source) == _PIPELINE:  # the name may be a module: then the import also runs its package
                    pairs.append((bound, source))
    imports: dict[str, list[str]] = {}
    for bound, dotted in pairs:
        if _is_followed(_top(dotted), module, path):
            imports.setdefault(bound, []).append(dotted)
    return imports


def _top(dotted: str) -> str:
    """Return the first part of a dotted name."""
    return dotted.partition(".")[0]


def _is_followed(package: str, importer: str, path: Path) -> bool:
    """Return True if the imported code counts towards the fingerprint of the importing module.

    Imports of kairos' packages count in every module. In a plugin file, imports of its own package and of module files
    in its folder count too, but not imports of other packages in that folder. A plugin file is a module outside of
    kairos' packages, the standard library and folders ``site-packages``.

    Args:
        package: first part of the imported name.
        importer: name of the importing module.
        path: file of the importing module.
    """
    if package in _PACKAGES:
        return True
    importing_package = _top(importer)
    is_of_kairos = importing_package in _PACKAGES
    is_installed = importing_package in sys.stdlib_module_names or "site-packages" in path.parts
    is_plugin_file = not is_of_kairos and not is_installed
    if not is_plugin_file or package in sys.stdlib_module_names:
        return False
    if package == importing_package:
        return True
    file = _path(package)
    return file is not None and file.parent == path.parent  # the file of a package is in a folder of its own


def _hash_and_used_names(parsed: _Parsed, name: str) -> tuple[str, set[str]]:
    """Return the hash of a definition and the dotted names that it uses; with the name "", of the whole module.

    Statements that are neither definitions nor imports always run, so every definition includes them. The names are the
    imports that `_is_followed` accepts, and the module's own definitions as ``"module:Name"``.
    """
    code = ast.Module([*parsed.definitions[name], *parsed.statements], []) if name else parsed.tree
    nodes = _nodes(code)
    used = _used_names(nodes)
    first_names = {_top(dotted) for dotted in used}

    # definitions and imports of this module that the code uses, and imports within the code
    imports = list(_imports(nodes, parsed.module, parsed.path).items())
    names_to_follow = {parsed.module} if "globals" in first_names else set()  # globals() may return any definition
    if name:
        names_to_follow |= {f"{parsed.module}:{first}" for first in first_names if first in parsed.definitions}
        imports += [(bound, sources) for bound, sources in parsed.imports.items() if bound in first_names]
    elif parsed.module == _LIBRARY:
        imports += parsed.typing_imports.items()  # the public names, which are imported lazily

    # imported names, each with the attributes that the code reads from it
    for bound, sources in imports:
        # `import numpy as np` and a use of `np.linalg.norm` have the attributes ".linalg.norm"
        attributes = {dotted.removeprefix(bound) for dotted in used if _top(dotted) == bound}
        for source in sources:  # `import kairos_timesteps` leads to the public names that are used, not to all
            suffixes = attributes if source == _LIBRARY else {"", *attributes}
            names_to_follow |= {source + suffix for suffix in suffixes}

    text = _text(code)
    if not name:
        text += _data_of(parsed.path)
    return hashlib.sha256(text.encode()).hexdigest(), names_to_follow


def _used_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names that the nodes of a syntax tree use, with the attributes read from them: ``np.linalg.norm``."""
    nodes = [node for node in nodes if isinstance(node, (ast.Name, ast.Attribute))]
    # `a.b.c` is an attribute of `a.b`, which is an attribute of `a`: use only the outermost node
    inner_ids = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    return {_dotted(node) for node in nodes if id(node) not in inner_ids}


def _dotted(node: ast.AST) -> str:
    """Return the dotted name that a chain of attributes reads, such as ``np.linalg.norm``.

    The start is missing if it is not a name: ``.mean`` for ``load(path).mean``.
    """
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _text(node: Any, in_message: bool = False) -> str:
    """Return a syntax tree as text without positions and docstrings.

    Empty fields are left out: they differ between versions of Python. The word "message" replaces the strings of raised
    errors and of printed messages. The help of options and components is left out.

    Args:
        node: node, list of nodes, or value of a field.
        in_message: the node is within a raised error or a printed message.
    """
    if isinstance(node, list):
        return "[" + ",".join(_text(item, in_message) for item in node) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.Call):
        in_message = in_message or _prints_message(node)
    elif isinstance(node, ast.Raise):
        in_message = True
    is_string = isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)
    if in_message and is_string:
        return "message"
    fields_without_help = _fields_without_help(node)
    field_texts = []
    for name in node._fields:
        value = fields_without_help[name] if name in fields_without_help else getattr(node, name, None)
        # `kind` of a constant is "u" for u"text", which is equal to "text"
        if value is not None and value != [] and name != "kind":
            field_texts.append(f"{name}={_text(value, in_message)}")
    return f"{type(node).__name__}({','.join(field_texts)})"


def _fields_without_help(node: ast.AST) -> dict[str, Any]:
    """Return replacements of a node's fields that contain a docstring, help or a message, by the name of the field.

    The replacements lack these texts. Fields that are not in the result stay unchanged.
    """
    fields: dict[str, Any] = {}
    if isinstance(node, ast.Call):
        called = _called(node)
        if called == "option":  # option(default, help, ...): keep the default and the limits
            fields["args"] = node.args[:1] + node.args[2:]
            fields["keywords"] = [keyword for keyword in node.keywords if keyword.arg != "help"]
        elif called == "demand":  # demand(condition, where, got, allowed): keep the condition
            fields["args"] = node.args[:1]
    elif isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            fields["decorator_list"] = [_without_help(decorator) for decorator in node.decorator_list]
        has_docstring = ast.get_docstring(node, clean=False) is not None
        if has_docstring:
            fields["body"] = node.body[1:]
    return fields


def _without_help(decorator: ast.expr) -> ast.expr:
    """Return a registering decorator with its name argument alone; return any other decorator unchanged."""
    if isinstance(decorator, ast.Call) and _called(decorator) in _REGISTERING:
        return ast.Call(decorator.func, decorator.args[:1], [])
    return decorator


def _prints_message(node: ast.Call) -> bool:
    """Return True for a call ``log(...)``, ``warn(...)`` or ``x.warn(...)``; ``numpy.log(...)`` computes."""
    called = _called(node)
    if called == "log":
        return isinstance(node.func, ast.Name)
    return called in _MESSAGES


def _called(call: ast.Call) -> str:
    """Return the name of the called function or method; empty for other callables."""
    return _last_name(call.func)
