"""MkDocs hooks: insert generated parts, convert formulas to MathML, and add files of the repository to the site.

A comment ``<!-- generated: NAME -->`` in a page is replaced by a part that is generated from the code. Pages link to
files of the repository as they do on a code host: images are copied, and text files become pages.
"""

import html
import posixpath
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gallery
import paper_pages
import reference
from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {  # that lie elsewhere in the repository
    "README.md": "overview.md",
    "benchmarks/README.md": "benchmarks.md",
    "studies/README.md": "study.md",
}
PARTS = (
    gallery.PARTS | reference.PARTS | paper_pages.PARTS
)  # name: function that gives Markdown and pictures by path, beside the page
_PART = re.compile(r"^<!-- generated: (\w+) -->.*", re.MULTILINE)  # what follows is said where the page is not built
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_WORD = re.compile(r"((?<!<msup>)<mi>(?:ln|exp|cos|tan|tanh|cosh)</mi>)(?!<mo)")
_NUMBER = re.compile(r"(</(?:mn|mfrac)>)(?=<mi>(?:ln|exp|cos|tan)</mi>)")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json"}
# browsers stretch brackets with a font that is made for it
_FONT = Path(find_spec("ziamath").origin).parent / "fonts" / "STIXTwoMath-Regular.ttf"
_made: dict[str, str] = {}


def on_files(files: Files, config: Any) -> Files:
    """Add pages that lie elsewhere, files that pages link to, and pictures of the generated parts."""
    for path, uri in PAGES.items():
        if uri in str(config.nav):
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, "assets/STIXTwoMath.ttf", abs_src_path=str(_FONT)))
    for file in list(files.documentation_pages()):
        for name in _PART.findall(file.content_string):
            if name not in PARTS:
                raise PluginError(f"{file.src_uri}: generated: got {name}, allowed: {', '.join(PARTS)}")
            _made[name], pictures = PARTS[name]()
            for path, content in pictures.items():
                beside = posixpath.join(posixpath.dirname(file.src_uri), path)
                files.append(File.generated(config, beside, content=content))
        for link in _LINK.findall(file.content_string):
            path, uri = _place(file.src_uri, link)
            if not path.startswith("docs/") and files.get_file_from_path(uri) is None and (ROOT / path).exists():
                files.append(_added(path, uri, config))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Put the generated parts in their place, and links as the site has them."""

    def linked(found: re.Match[str]) -> str:
        uri = _place(page.file.src_uri, found[1])[1]
        there = files.get_file_from_path(uri) is not None
        return posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".") if there else found[1]

    markdown = _LINK.sub(linked, markdown)
    return _PART.sub(lambda found: _made[found[1]], markdown)


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    """Formulas as MathML, which browsers show by themselves."""

    def mathml(found: re.Match[str]) -> str:
        made = convert(html.unescape(found[2]), display="block" if found[1] == "div" else "inline")
        if "\\" in made:
            raise PluginError(f"{page.file.src_uri}: not understood in a formula: {found[2]}")
        made = made.replace("<mi>&#x0007E;</mi>", "<mo>&#x0223C;</mo>")  # \sim, a relation
        made = _WORD.sub(r'\1<mspace width="0.17em" />', made)  # TeX's space after the name of a function
        return _NUMBER.sub(r'\1<mspace width="0.17em" />', made)

    return _FORMULA.sub(mathml, content)


def _place(page: str, link: str) -> tuple[str, str]:
    """Resolve a link of a page: returns the target's path in the repository and in the site."""
    here = next((path for path, uri in PAGES.items() if uri == page), f"docs/{page}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(here), link))
    if path.startswith("docs/"):
        return path, path.removeprefix("docs/")
    return path, PAGES.get(path, path if path.endswith((".png", ".svg")) else f"files/{path}.md")


def _added(path: str, uri: str, config: Any) -> File:
    if not uri.endswith(".md"):
        return File.generated(config, uri, abs_src_path=str(ROOT / path))
    parts, place = [f"# {path}"], ROOT / path
    for file in sorted(place.glob("*.*")) if place.is_dir() else [place]:
        head = [f"## {file.name}"] if place.is_dir() else []
        language, text = _LANGUAGES.get(file.suffix, "text"), file.read_text(encoding="utf-8")
        parts += [*head, f"`````{language}\n{text}\n`````"]
    return File.generated(config, uri, content="\n\n".join(parts))
