"""Pages of the repository: code runs as written, commands exist, links lead somewhere, numbers are those measured."""

import argparse
import importlib
import re
import shlex
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import kairos
from kairos.cli import COMMANDS

ROOT = Path(__file__).parents[1]
ON_A_CODE_HOST = (
    "README.md",
    "CONTRIBUTING.md",
    "library/README.md",
    "studies/README.md",
    "studies/adaptive.md",
    "studies/rejected.md",
    "studies/tuned.md",
    "benchmarks/README.md",
)
PAGES = [*ON_A_CODE_HOST, *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))]
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def commands(page: str) -> Iterator[list[str]]:
    """Yield the words of each command in the consoles and in the indented lines of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    consoles = re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^    (kairos .*|make .*)$", text, re.MULTILINE)
    lines += [line for console in consoles for line in console.replace("\\\n", " ").splitlines()]
    for line in lines:
        without_comment = re.sub(r"\s+#\s.*", "", line).removeprefix("$ ")
        for command in re.split(r"&&|\||>", without_comment):
            yield shlex.split(command.replace(".venv/bin/", ""))


def test_the_example_of_the_readme_trains():
    assert EXAMPLES
    for example in EXAMPLES:
        module = types.ModuleType("readme")
        exec(compile(example, "README.md", "exec"), module.__dict__)
        assert module.timesteps.strategy.step == 50


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_are_accepted(page, capsys):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for program, *arguments in filter(None, commands(page)):
        if program == "make":
            assert set(arguments[:1]) <= set(targets), arguments
        if program == "kairos" and not arguments[0].startswith("--"):
            name, *options = arguments
            parser = argparse.ArgumentParser(prog=f"kairos {name}")
            importlib.import_module(COMMANDS[name][0]).add_arguments(name, parser)
            try:
                parser.parse_args(options)
            except SystemExit:
                pytest.fail(f"kairos {' '.join(arguments)}: {capsys.readouterr().err}")


def anchors(page: Path) -> set[str]:
    """Return the anchors that a code host gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ON_A_CODE_HOST)
def test_links_of_a_page_lead_somewhere_on_a_code_host(page):
    links = re.findall(r"\]\((?!https?:)([^)\s]*)\)", (ROOT / page).read_text(encoding="utf-8"))
    assert links or page == "library/README.md"
    for link in links:
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.long
@pytest.mark.parametrize(("module", "page"), [("readme_figure", "README.md"), ("tuned_figure", "docs/choosing.md")])
def test_a_page_contains_the_table_of_the_committed_results(module, page, monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "studies"))
    monkeypatch.setattr("sys.argv", [f"{module}.py", "--out", str(tmp_path / "figure.png")])
    importlib.import_module(module).main()
    assert capsys.readouterr().out.strip() in (ROOT / page).read_text(encoding="utf-8")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_citation_has_the_version_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == kairos.__version__
    assert citation["authors"] and citation["title"] and citation["message"]
