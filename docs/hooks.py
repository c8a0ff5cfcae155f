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
PAGES = {  # files outside of docs/, and their addresses in the site
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
    "studies/README.md": "study.md",
    "studies/rejected.md": "rejected.md",
}
# name: function that returns Markdown, and pictures by their path relative to the page
PARTS = gallery.PARTS | reference.PARTS | paper_pages.PARTS
_PART = re.compile(r"^<!-- generated: (\w+) -->.*", re.MULTILINE)  # the rest of the line is for readers of the source
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_WORD = re.compile(r"((?<!<msup>)<mi>(?:ln|exp|cos|tan|tanh|cosh)</mi>)(?!<mo)")
_NUMBER = re.compile(r"(</(?:mn|mfrac)>)(?=<mi>(?:ln|exp|cos|tan)</mi>)")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json"}
# a font for formulas, with which browsers stretch brackets
_FONT = Path(find_spec("ziamath").origin).parent / "fonts" / "STIXTwoMath-Regular.ttf"
_generated: dict[str, str] = {}  # Markdown of the generated parts by name


def on_files(files: Files, config: Any) -> Files:
    """Add pages from outside of docs/, files that pages link to, and pictures of the generated parts."""
    for path, uri in PAGES.items():
        if uri in str(config.nav):
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, "assets/STIXTwoMath.ttf", abs_src_path=str(_FONT)))
    for file in list(files.documentation_pages()):
        for name in _PART.findall(file.content_string):
            if name not in PARTS:
                raise PluginError(f"{file.src_uri}: generated: got {name}, allowed: {', '.join(PARTS)}")
            _generated[name], pictures = PARTS[name]()
            for path, content in pictures.items():
                uri = posixpath.join(posixpath.dirname(file.src_uri), path)
                if (existing := files.get_file_from_path(uri)) is not None:  # another page has the picture too
                    files.remove(existing)
                files.append(File.generated(config, uri, content=content))
        for link in _LINK.findall(file.content_string):
            path, uri = _resolve_link(file.src_uri, link)
            if not path.startswith("docs/") and files.get_file_from_path(uri) is None and (ROOT / path).exists():
                files.append(_repository_file(path, uri, config))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Insert the generated parts, and replace links to files of the repository by links within the site."""

    def replace_link(match: re.Match[str]) -> str:
        uri = _resolve_link(page.file.src_uri, match[1])[1]
        if files.get_file_from_path(uri) is None:
            return match[1]
        return posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")

    markdown = _LINK.sub(replace_link, markdown)
    return _PART.sub(lambda match: _generated[match[1]], markdown)


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    """Convert formulas to MathML, which browsers display without JavaScript."""

    def to_mathml(match: re.Match[str]) -> str:
        mathml = convert(html.unescape(match[2]), display="block" if match[1] == "div" else "inline")
        if "\\" in mathml:
            raise PluginError(f"{page.file.src_uri}: not understood in a formula: {match[2]}")
        mathml = mathml.replace("<mi>&#x0007E;</mi>", "<mo>&#x0223C;</mo>")  # \sim, a relation
        mathml = _WORD.sub(r'\1<mspace width="0.17em" />', mathml)  # TeX's space after the name of a function
        return _NUMBER.sub(r'\1<mspace width="0.17em" />', mathml)

    return _FORMULA.sub(to_mathml, content)


def _resolve_link(page: str, link: str) -> tuple[str, str]:
    """Resolve a link of a page: returns the target's path in the repository and in the site."""
    here = next((path for path, uri in PAGES.items() if uri == page), f"docs/{page}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(here), link))
    if path.startswith("docs/"):
        return path, path.removeprefix("docs/")
    return path, PAGES.get(path, path if path.endswith((".png", ".svg")) else f"files/{path}.md")


def _repository_file(path: str, uri: str, config: Any) -> File:
    """Add a file of the repository to the site, or a page with the content of a text file or a folder."""
    if not uri.endswith(".md"):
        return File.generated(config, uri, abs_src_path=str(ROOT / path))
    parts, source = [f"# {path}"], ROOT / path
    for file in sorted(source.glob("*.*")) if source.is_dir() else [source]:
        head = [f"## {file.name}"] if source.is_dir() else []
        language, text = _LANGUAGES.get(file.suffix, "text"), file.read_text(encoding="utf-8")
        parts += [*head, f"`````{language}\n{text}\n`````"]
    return File.generated(config, uri, content="\n\n".join(parts))
