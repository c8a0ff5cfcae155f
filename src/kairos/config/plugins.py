"""Plugin files: Python modules of a user that register samplers, weightings and couplings.

``plugins: [my_strategies.py]`` in an experiment file imports the file as module ``my_strategies`` before methods are
checked. Modules in the folder of a plugin file can be imported by it.
"""

import importlib
import importlib.util
import os
import sys
import traceback
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kairos import quick_imports
from kairos.code_hash import PACKAGES, find_file, list_files, set_source
from kairos.files import read_json
from kairos.stage_keys import hash_modules, modules_of
from kairos_timesteps.components import COUPLINGS, SAMPLERS, WEIGHTINGS
from kairos_timesteps.errors import ConfigError, KairosError

if TYPE_CHECKING:
    from kairos.diffusion import MethodConfig

_REGISTRIES = {"sampler": SAMPLERS, "weighting": WEIGHTINGS, "coupling": COUPLINGS}


@dataclass(frozen=True)
class _Plugin:
    """A plugin file that this process has imported.

    Attributes:
        path: absolute path.
        text: content at the import.
    """

    path: Path
    text: str


_plugins: dict[str, _Plugin] = {}  # imported plugins by module name


def load_plugins(paths: Any) -> Any:
    """Import plugin files, each once per content; return `paths` unchanged, as pydantic expects of a validator.

    The import registers the components of a file. With plugins, this process imports diffusers from now on with the
    packages of its pipelines, see `quick_imports`.

    Raises:
        ConfigError: `paths` is not a list of paths, or a file is missing, cannot be imported, or registers a name that
            another component has.
    """
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise ConfigError(f"plugins: got {paths!r}, allowed: a list of Python files, such as [my_strategies.py]")
    for path in paths:
        quick_imports.disable()  # a plugin may use a pipeline of diffusers
        _load(path)
    return paths


def _load(file: str) -> None:
    """Import a plugin file as the module of its name, unless this process has imported the same content before.

    The folder of the file is appended to `sys.path`. A file that was edited since its import replaces its module and
    components. A file that another plugin file has imported is recorded as a plugin, but not executed again.

    Raises:
        ConfigError: the file is missing, another module has its name, or its import fails.
    """
    path = Path(os.path.abspath(file))
    name, text = path.stem, _read(file, path)
    earlier_plugin = _plugins.get(name)
    if earlier_plugin and earlier_plugin.path != path:
        raise ConfigError(f"plugins: {file}: {earlier_plugin.path} is module {name!r} already; rename one of the files")
    folder = str(path.parent)
    if folder not in sys.path:  # for `_find_module` and the imports of the plugin
        sys.path.append(folder)  # last, so that its files replace no installed module
    if earlier_plugin and earlier_plugin.text == text:
        return
    spec = _find_module(file, path)
    if earlier_plugin is None and name in sys.modules:  # another plugin file has imported this one
        _plugins[name] = _Plugin(path, text)
        set_source(path, text.encode())
        return
    forget(name)  # components of the earlier content
    _plugins[name] = _Plugin(path, text)  # `_execute` removes it if the import fails
    _execute(file, text, spec)


def _execute(file: str, text: str, spec: ModuleSpec) -> None:
    """Execute the text of a plugin file as a module in `sys.modules`; the file is not read again.

    Hashes of code refer to the text from now on. If an error is raised, the plugin is forgotten, see `forget`. `file`
    is only for error messages.

    Raises:
        ConfigError: the text raises an error or exits; the message contains its line.
    """
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    source = str(spec.origin)
    set_source(Path(source), text.encode())
    try:
        # not by the loader, which would read the file again: it may have been edited since `text` was read
        exec(compile(text, source, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        forget(spec.name)
        raise ConfigError(f"plugins: {file}{_line_of_error(error, source)}: {_describe(error)}") from None


def _find_module(file: str, path: Path) -> ModuleSpec:
    """Return the import specification of a plugin file as a module; its folder must be in `sys.path`.

    Raises:
        ConfigError: an import of the file's name would import another module, such as an installed one, or none.
    """
    importlib.invalidate_caches()  # the file may be newer than Python's list of files in the folder
    spec = importlib.util.find_spec(path.stem)
    if spec is not None and _comes_from(spec, path):
        return spec
    other = spec.origin if spec else "not importable"
    raise ConfigError(f"plugins: {file}: module {path.stem!r} is {other}; rename the file")


def _comes_from(spec: ModuleSpec, path: Path) -> bool:
    """Return True if the module of a specification is the file `path`, also by a link; False without a file."""
    if spec.loader is None or spec.origin is None:  # a namespace package has no file
        return False
    return os.path.exists(spec.origin) and path.samefile(spec.origin)  # "built-in" is the origin of built-in modules


def _read(file: str, path: Path) -> str:
    """Return the text of a plugin file, after a check of its name.

    Raises:
        ConfigError: the suffix is not ``.py``, the name is not a module's, or the file is missing or not UTF-8.
    """
    if path.suffix != ".py" or not path.stem.isidentifier():
        allowed = "a Python file whose name has letters, digits and _ only, such as my_strategies.py"
        raise ConfigError(f"plugins: got {file!r}, allowed: {allowed}")
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        advice = f"give the path of a Python file, relative to the working directory {Path.cwd()}"
        raise ConfigError(f"plugins: {file}: cannot be read ({error.strerror}); {advice}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"plugins: {file}: not UTF-8 ({error.reason} at byte {error.start})") from None


def _line_of_error(error: BaseException, source: str) -> str:
    """Return ``, line N`` for the line of a plugin file at which an error arose; empty if it is unknown.

    It is the line of a syntax error, or else of the innermost call in the file. `source` is the file's path.
    """
    if isinstance(error, SyntaxError) and error.filename == source and error.lineno:
        return f", line {error.lineno}"
    # frames of the traceback from the outermost to the innermost
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == source]
    return f", line {frames[-1].lineno}" if frames else ""


def _describe(error: BaseException) -> str:
    """Return type and message of an error in one line; only the message if kairos raised it.

    An error without a message has only its type. The message of a syntax error is without its file and line.
    """
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    text = " ".join(message.split())
    if isinstance(error, KairosError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def forget(name: str) -> None:
    """Remove a plugin's module and the components that it registered, so that it can be imported again.

    An unknown module is ignored.

    Args:
        name: name of the module, such as ``my_strategies``.
    """
    _plugins.pop(name, None)
    sys.modules.pop(name, None)
    for registry in _REGISTRIES.values():
        component_names = [component for component, entry in registry.items() if entry.module == name]
        for component_name in component_names:
            del registry[component_name]


def _plugin_modules(method: "MethodConfig") -> list[str]:
    """Return the plugin modules that a method's sampler, weighting and coupling are from, sorted."""
    components = (method.sampler, method.weighting, method.coupling)
    return sorted({module for component in components for module in modules_of(component) if module in _plugins})


def check_listed(plugins: list[str], methods: "dict[str, MethodConfig]") -> None:
    """Check that an experiment lists the plugin files that its methods use.

    A process may have imported more plugin files, for other experiments.

    Args:
        plugins: plugin files that the experiment lists.

    Raises:
        ConfigError: a component of a method is from a plugin file that is not listed.
    """
    if not _plugins:  # saves the search for the code of components
        return
    listed_modules = {Path(path).stem for path in plugins}
    for name, method in methods.items():
        for module in _plugin_modules(method):
            if module not in listed_modules:
                raise ConfigError(f"methods.{name}: uses {_plugins[module].path}; list that file in plugins")


def source_files(paths: list[str]) -> list[str]:
    """Return the files that contain the code of plugins: plugin files, and files that they import from their folder.

    The plugin files come first, each once, with the paths and order of `paths`. The imported files follow, sorted;
    their paths are relative to the working directory. Files of kairos are left out. The caller ensures that this
    process has imported the plugin files.
    """
    plugin_files = list(dict.fromkeys(paths))  # each once
    packages = [file.parent for file in map(find_file, PACKAGES) if file is not None]
    imported_files = []
    for path in list_files(tuple(sorted(Path(path).stem for path in paths))):
        is_of_kairos = any(path.is_relative_to(package) for package in packages)
        if not is_of_kairos and path.stem not in _plugins:
            imported_files.append(os.path.relpath(path))
    return [Path(path).as_posix() for path in plugin_files + imported_files]


def hash_plugins(methods: "dict[str, MethodConfig]") -> dict[str, str]:
    """Return the hash of the code of each plugin that methods use, with its imports, by module."""
    if not _plugins:  # saves the search for the code of components
        return {}
    used_modules = {module for method in methods.values() for module in _plugin_modules(method)}
    return {module: hash_modules([module]) for module in sorted(used_modules)}


def plugin_hashes_file(config: Path) -> Path:
    """Return the path of the JSON file with the `hash_plugins` of a frozen experiment, next to its file."""
    return config.with_suffix(".plugins.json")


def check_unedited(config: Path, name: str, method: "MethodConfig") -> None:
    """Check that the plugin code of a method has the hashes that were recorded when a run began.

    Plugins without a recorded hash pass. Only frozen experiment files have hashes, so all others pass.

    Args:
        config: experiment file; its hashes are in `plugin_hashes_file`.
        name: name of the method, for the error message.

    Raises:
        KairosError: the code was edited since.
    """
    file = plugin_hashes_file(config)
    recorded_hashes = read_json(file) if file.is_file() else {}
    for module, present_hash in hash_plugins({name: method}).items():
        if recorded_hashes.get(module, present_hash) != present_hash:
            path = os.path.relpath(_plugins[module].path)
            advice = "run the same command again to compute all its runs with the edit, or undo the edit"
            raise KairosError(f"{path}: the code of method {name} was edited after this run began; {advice}")
