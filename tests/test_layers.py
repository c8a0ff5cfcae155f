"""Packages form layers, also with the code that registries contain as strings, and each string leads to code."""

import graphlib
import importlib
import re
import tomllib
from pathlib import Path

import grimp

from kairos.components import Components
from kairos_timesteps.registry import Registry

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "library/src/kairos_timesteps"
DECLARATION = re.compile(r"= (Registry|Components)\(")  # of the components of one kind


def list_registered_code() -> list[tuple[str, str]]:
    """Return each module that registers components, with the "module:attribute" of each component."""
    modules = []
    for folder in (ROOT / "src", ROOT / "library/src"):
        paths = [path for path in sorted(folder.rglob("*.py")) if DECLARATION.search(path.read_text())]
        names = [".".join(path.relative_to(folder).with_suffix("").parts) for path in paths]
        modules += [importlib.import_module(name) for name in names]
    registered = []
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, Registry):
                registered += [(module.__name__, entry.code) for entry in value.values()]
            elif isinstance(value, Components):
                registered += [(component.__module__, component.code) for component in value.values()]
    return registered


def test_every_name_of_a_registry_leads_to_code():
    codes = sorted({code for _, code in list_registered_code()})
    parts = [code.split(":") for code in codes]
    imported = [getattr(importlib.import_module(module), attribute, None) for module, attribute in parts]
    assert [code for code, attribute in zip(codes, imported) if not callable(attribute)] == []


def find_package(module: str) -> str:
    """Return the package of the pipeline that contains a module; the library counts as one package."""
    root, *names = module.split(".")
    return ".".join([root, *names[:1]]) if root == "kairos" else root


def test_no_package_imports_itself_through_others():
    graph = grimp.build_graph("kairos", "kairos_timesteps", cache_dir=None)
    needs = [
        (module, imported) for module in graph.modules for imported in graph.find_modules_directly_imported_by(module)
    ]
    needs += [(module, code.split(":")[0]) for module, code in list_registered_code()]
    packages: dict[str, set[str]] = {}
    for importer, imported in ((find_package(importer), find_package(imported)) for importer, imported in needs):
        if importer != imported and {importer, imported}.isdisjoint({"kairos"}):
            packages.setdefault(importer, set()).add(imported)
    declaring = {module for module, _ in list_registered_code()}
    assert {"kairos_timesteps.registry", "kairos.models.settings", "kairos.training.settings"} <= declaring
    assert len(list_registered_code()) > 80
    graphlib.TopologicalSorter(packages).prepare()  # raises CycleError if there is a cycle


def test_each_module_of_the_library_is_public_or_forbidden_to_the_pipeline():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    listed = re.search(r"Public modules of the library:(.+?)\.\n", page, re.DOTALL)
    assert listed
    public = set(re.findall(r"`(\w+)`", listed[1]))
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    name = "the pipeline imports public modules of the library alone"
    (contract,) = (contract for contract in settings["contracts"] if contract["name"] == name)
    forbidden = {module.removeprefix("kairos_timesteps.") for module in contract["forbidden_modules"]}
    modules = {path.relative_to(LIBRARY).parts[0].removesuffix(".py") for path in LIBRARY.rglob("*.py")} - {"__init__"}
    assert public | forbidden == modules and not public & forbidden
