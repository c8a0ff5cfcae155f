"""The packages stand in layers, with the code that registries name by strings, and these strings lead somewhere."""

import graphlib
import importlib
from pathlib import Path

import grimp

from kairos.registry import Registry

SOURCE = Path(__file__).parents[1] / "src"


def named() -> list[tuple[str, str]]:
    """Every module that fills a registry, with each "module:attribute" that it names."""
    files = [path for path in sorted((SOURCE / "kairos").rglob("*.py")) if "= Registry(" in path.read_text()]
    modules = [importlib.import_module(".".join(path.relative_to(SOURCE).with_suffix("").parts)) for path in files]
    filled = [(module.__name__, value) for module in modules for value in vars(module).values()]
    return [(name, each.code) for name, value in filled if isinstance(value, Registry) for each in value.values()]


def test_every_name_of_a_registry_leads_to_code():
    codes = sorted({code for _, code in named()})
    parts = [code.split(":") for code in codes]
    code = [getattr(importlib.import_module(module), attribute, None) for module, attribute in parts]
    assert [name for name, each in zip(codes, code) if not callable(each)] == []


def test_no_package_needs_itself_by_way_of_another():
    graph = grimp.build_graph("kairos", cache_dir=None)
    needs = [(module, other) for module in graph.modules for other in graph.find_modules_directly_imported_by(module)]
    needs += [(module, code.split(":")[0]) for module, code in named()]
    packages: dict[str, set[str]] = {}
    for one, other in ((one.split("."), other.split(".")) for one, other in needs):
        if len(one) > 1 and one[1:2] != other[1:2] and other[1:]:
            packages.setdefault(one[1], set()).add(other[1])
    assert len(named()) > 40 and "kairos.diffusion.registries" in {module for module, _ in named()}
    graphlib.TopologicalSorter(packages).prepare()  # raises at a circle
