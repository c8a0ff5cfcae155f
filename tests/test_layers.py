"""The packages stand in layers, with the code that registries name by strings, and these strings lead somewhere."""

import graphlib
import importlib
from pathlib import Path

import grimp

from kairos_timesteps.registry import Registry

ROOT = Path(__file__).parents[1]


def named() -> list[tuple[str, str]]:
    """Every module that fills a registry, with each "module:attribute" that it names."""
    modules = []
    for folder in (ROOT / "src", ROOT / "library/src"):
        paths = [path for path in sorted(folder.rglob("*.py")) if "= Registry(" in path.read_text()]
        names = [".".join(path.relative_to(folder).with_suffix("").parts) for path in paths]
        modules += [importlib.import_module(name) for name in names]
    filled = [(module.__name__, value) for module in modules for value in vars(module).values()]
    return [(name, each.code) for name, value in filled if isinstance(value, Registry) for each in value.values()]


def test_every_name_of_a_registry_leads_to_code():
    codes = sorted({code for _, code in named()})
    parts = [code.split(":") for code in codes]
    code = [getattr(importlib.import_module(module), attribute, None) for module, attribute in parts]
    assert [name for name, each in zip(codes, code) if not callable(each)] == []


def package_of(module: str) -> str:
    """The package of the pipeline that contains a module; the library counts as one."""
    root, *names = module.split(".")
    return ".".join([root, *names[:1]]) if root == "kairos" else root


def test_no_package_needs_itself_by_way_of_another():
    graph = grimp.build_graph("kairos", "kairos_timesteps", cache_dir=None)
    needs = [(module, other) for module in graph.modules for other in graph.find_modules_directly_imported_by(module)]
    needs += [(module, code.split(":")[0]) for module, code in named()]
    packages: dict[str, set[str]] = {}
    for one, other in ((package_of(one), package_of(other)) for one, other in needs):
        if one != other and {one, other}.isdisjoint({"kairos"}):
            packages.setdefault(one, set()).add(other)
    assert len(named()) > 40 and "kairos_timesteps.diffusion.registries" in {module for module, _ in named()}
    graphlib.TopologicalSorter(packages).prepare()  # raises at a circle
