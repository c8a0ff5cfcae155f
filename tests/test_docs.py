"""The site of the documentation: nothing of the code is missing in it, and a link that leads nowhere ends its build."""

import argparse
import ast
import importlib
import logging
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import gallery
import pytest
import reference
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

import kairos_timesteps
from kairos.cli import COMMANDS
from kairos.costs.network import count_network_cost
from kairos.models.settings import BACKBONES
from kairos_timesteps.components import COUPLINGS, SAMPLERS, WEIGHTINGS
from kairos_timesteps.registry import Registry

ROOT = Path(__file__).parents[1]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Build the site of a few pages, as `make docs` does it; gives the folder."""
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")

    def make(**pages: str) -> Path:
        docs = tmp_path / "docs"
        shutil.copytree(ROOT / "docs/assets", docs / "assets", dirs_exist_ok=True)
        for name, text in pages.items():
            (docs / f"{name}.md").write_text(text)
        return built(tmp_path / "site", docs_dir=str(docs), nav=[f"{name}.md" for name in pages])

    return make


def built(folder: Path, **changed) -> Path:
    logging.getLogger("mkdocs").setLevel(logging.WARNING)
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True, **changed)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    return folder


def test_code_of_the_home_page_fits_its_column():
    """A block shows 88 characters in a window of 1280 pixels; the button that copies it covers the last ones."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", (ROOT / "docs/index.md").read_text(), re.MULTILINE | re.DOTALL)
    assert blocks and max(len(line) for block in blocks for line in block.splitlines()) <= 80


def markers(name: str) -> set[str]:
    """Markers of a test that a page names as ``training::a_name``, and of its file."""
    module, function = name.split("::")
    folder, _, module = module.rpartition("/")
    files = [ROOT / tests / folder / f"test_{module}.py" for tests in ("tests", "library/tests")]
    tree = ast.parse(next(file for file in files if file.is_file()).read_text())
    (test,) = (node for node in tree.body if getattr(node, "name", "") == f"test_{function}")
    of_file = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    marks = [mark for value in of_file for mark in getattr(value, "elts", [value])]
    return {ast.unparse(mark).removeprefix("pytest.mark.") for mark in (*marks, *test.decorator_list)}


def test_promises_name_tests_that_exist_and_say_when_these_run():
    page = (ROOT / "docs/promises.md").read_text().partition("\n\n| ")[2]
    tests_of_promises = re.findall(r"`([\w/]+::\w+)`(?: \((long|cluster)\))?", page)
    assert len(tests_of_promises) > 80
    for name, kind in tests_of_promises:
        (expected,) = markers(name) & {"long", "cluster"} or {""}
        assert kind == expected, name


def component_problems(registry: Registry, name: str) -> list[str]:
    """Return what is wrong with the page of a component."""
    described = reference.described(reference.schema()["$defs"]["MethodConfig"]["properties"][registry.kind])
    options = described[name]["properties"]
    page, _ = gallery.component(registry, name, options, draw=False)
    shown = {option for option in options if f"| `{option}` |" in page} | gallery._COMMON.keys()
    checks = {
        "header": page.startswith(f"## {name}\n"),
        "formula": re.search(r"\$\$.+?\$\$", page, re.DOTALL),
        "docstring sections": not re.search(r"^(Args|Raises):", page, re.MULTILINE),
        "options": shown >= options.keys(),
    }
    return [f"{registry.kind} {name}: {check}" for check, good in checks.items() if not good]


def test_every_component_has_its_formula_and_its_options():
    components = [(registry, name) for registry in (SAMPLERS, WEIGHTINGS, COUPLINGS) for name in registry]
    assert [problem for registry, name in components for problem in component_problems(registry, name)] == []
    common = reference.fields(gallery._COMMON)
    assert [option for option in gallery._COMMON if f"| `{option}` |" not in common] == []


@pytest.mark.long
def test_pictures_show_what_the_terminal_shows_and_say_that_a_sampler_learns():
    text, pictures = gallery.pictured("edm_log_normal")
    assert [path.rpartition("-")[2] for path in pictures] == ["edm.svg", "discrete.svg"]
    assert all(picture.startswith(b"<?xml") and path in text for path, picture in pictures.items())
    assert len({*pictures.values()}) == 2
    assert "this sampler learns" in gallery.shown("adaptive", "discrete")[1]
    assert gallery.shown("shift", "flow")[0] != gallery.shown("uniform", "flow")[0]


def test_every_command_and_argument_is_there():
    text = reference.commands()
    for name, (module, _) in COMMANDS.items():
        part = text.partition(f"\n## kairos {name}\n")[2] if f"\n## kairos {name}\n" in text else text
        part = re.split(r"\n## ", part)[0]
        parser = argparse.ArgumentParser(prog=f"kairos {name}")
        importlib.import_module(module).add_arguments(name, parser)
        parsers = [parser]
        for one in parsers:
            inner = [action for action in one._actions if isinstance(action, argparse._SubParsersAction)]
            for action in inner:
                parsers += action.choices.values()
            assert f" {one.prog}\n" in text
            for option in (string for action in one._actions for string in action.option_strings):
                assert option in ("-h", "--help") or f"`{option}" in part or f", {option}" in part, (name, option)


def test_every_field_of_an_experiment_file_is_there():
    text, schema = reference.experiment(), reference.schema()
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))
    for name, node in schema["properties"].items():
        section = reference._section(node)
        if section is None:
            assert f"| `{name}` |" in sections["The"] if "The" in sections else f"| `{name}` |" in text
            continue
        part = sections[name if name != "methods" else "methods.NAME"]
        for field, its in schema["$defs"][section]["properties"].items():
            assert f"| `{field}` |" in part
            if field not in reference._ELSEWHERE:
                assert all(f"### {field}: {name}\n" in part for name in reference.described(its))
    assert "| `microbatch` | integer at least 1 or `null` | `null` |" in sections["training"]
    uniform = reference.described(schema["$defs"]["MethodConfig"]["properties"]["sampler"])["uniform"]
    assert "| `end` | integer at least 1 or `null` | `null` |" in reference.fields(uniform["properties"])
    assert "| `batch_size` | integer at least 1 | `128` |" in sections["training"]


def test_every_preset_and_every_public_name_is_there():
    text = reference.presets()
    assert all(f"| `{name}` |" in text for name in kairos_timesteps.names("preset"))
    assert "[shift](samplers.md#shift)" in text
    assert {f"::: kairos_timesteps.{name}" for name in {*kairos_timesteps.__all__} - {"__version__"}} <= {
        *reference.api().splitlines()
    }


def test_formulas_become_mathml_and_files_of_the_repository_pages(site):
    index = "# Home\n\n$\\ln \\sigma$ costs \\$5\n\n[a file](../experiments/fashion_mnist.yaml) [it](two.md#part)\n"
    folder = site(index=index, two="# Two\n\n## Part\n\n```console\n$ ls $HOME\n```\n")
    page = (folder / "index.html").read_text()
    assert 'href="assets/site.css"' in page  # wraps long lines of code
    assert page.count("<math") == 1 and "<mi>ln</mi><mspace" in page
    assert 'href="files/experiments/fashion_mnist.yaml.html"' in page
    assert "fashion" in (folder / "files/experiments/fashion_mnist.yaml.html").read_text()
    assert "<math" not in (folder / "two.html").read_text()


def test_links_that_lead_nowhere_end_the_build(site, caplog):
    links = ["missing.md", "two.md#missing", "#missing", "../nowhere.yaml", "/absolute.md"]
    lines = [f"[a link]({link})" for link in links]
    with pytest.raises(Abort, match=f"{len(links)} warnings"):
        site(index="# Home\n\n" + "\n\n".join(lines) + "\n", two="# Two\n")
    assert [link for link in links if f"'{link}'" not in caplog.text] == []


def test_a_formula_that_is_not_understood_ends_the_build(site, caplog):
    with pytest.raises(Abort):
        site(index="# Home\n\n$\\nosuchcommand x$\n")
    assert "index.md: not understood in a formula: \\nosuchcommand x" in caplog.text


class Page(HTMLParser):
    """Anchors of a page, what it links to, and what a browser loads for it."""

    def __init__(self, path: Path):
        super().__init__()
        self.anchors, self.links, self.loads = {"", "__skip"}, [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        its = dict(attributes)
        self.anchors |= {its[key] for key in ("id", "name") if its.get(key)}
        if tag == "a" and its.get("href"):
            self.links.append(its["href"])
        elif its.get("src"):
            self.loads.append(its["src"])
        elif tag == "link" and its.get("rel") != "canonical":
            self.loads.append(its["href"])


@pytest.mark.long
def test_the_whole_site_is_built_without_warnings_needs_no_network_and_all_links_lead_somewhere(tmp_path, monkeypatch):
    """The costs of all recipes are those of one small network, as counting the networks of all recipes takes a minute.

    tests/test_recipes.py runs the networks of all recipes and tests the costs on a page.
    """
    small = BACKBONES.select({"name": "dit", "patch": 2, "width": 16, "depth": 1, "heads": 2})
    cost = count_network_cost(small, (3, 8, 8), {}, 2)
    monkeypatch.setattr("recipe_costs.count_network_cost", lambda *arguments: cost)
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    monkeypatch.chdir(ROOT)
    folder = built(tmp_path / "site")
    pages = {path: Page(path) for path in folder.rglob("*.html")}
    assert len(pages) > 20
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links are those of a server
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                assert link in page.links, f"{path}: loads {link}"
                continue
            target = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), f"{path}: {link}"
            if target in pages:
                assert unquote(parts.fragment) in pages[target].anchors, f"{path}: {link}"
    for style in folder.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", style.read_text()), style
    for name in (*SAMPLERS, *WEIGHTINGS):
        assert list((folder / "reference/pictures").glob(f"{name}-*.svg")), name
    samplers = (folder / "reference/samplers.html").read_text()
    assert samplers.count('<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">') >= len(SAMPLERS)
    assert "generated:" not in samplers
