"""The shell of the report: style sheet, page, and the few elements that the sections are made of.

It is Python, not a template file, so that the code fingerprint of the report covers it.
"""

import base64
import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from kairos.report.canvas import DPI

STYLE = """
:root { --ink: #1f2328; --muted: #667079; --line: #dfe3e6; --soft: #f5f7f8; --warn: #8a5300; --warn-soft: #fff6e5; }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: #fff;
  font: 16px/1.55 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1140px; margin: 0 auto; padding: 2.2rem 1.5rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.3rem; margin: 3rem 0 .6rem; padding-top: .6rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.8rem 0 .4rem; }
p { margin: .5rem 0; max-width: 46rem; }
.lead { color: var(--muted); }
.verdict { background: var(--soft); border-left: 4px solid #0072B2; padding: .7rem 1.1rem; margin: 1.2rem 0; }
.verdict p { max-width: none; font-size: 1.05rem; margin: .35rem 0; }
nav { font-size: .93rem; margin: 1rem 0; }
nav a { display: inline-block; margin-right: 1.1rem; }
a { color: #0059a0; text-decoration: none; } a:hover { text-decoration: underline; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; margin: .6rem 0; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; vertical-align: bottom; border-bottom: 2px solid var(--line); }
th, td { padding: .38rem .8rem .38rem 0; }
td:last-child:not(.n) { min-width: 11rem; }
td { border-bottom: 1px solid var(--line); vertical-align: top; }
th.n, td.n { text-align: right; white-space: nowrap; }
tr.total td { font-weight: 600; border-bottom: 0; }
small, .muted { color: var(--muted); }
th small { display: block; font-weight: 400; }
td small { display: block; font-size: .8rem; line-height: 1.35; }
.mark { display: inline-block; padding: 0 .45em; border-radius: .8em; font-size: .78rem; white-space: nowrap;
  background: #e3eef6; color: #004a77; }
.mark.warn { background: var(--warn-soft); color: var(--warn); }
.name { white-space: nowrap; }
.name i { display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .45em; }
.warnings { background: var(--warn-soft); border-left: 4px solid #d99000; padding: .5rem 1.1rem; margin: 1rem 0; }
.warnings ul { margin: .2rem 0; padding-left: 1.1rem; }
figure { margin: 1.2rem 0 1.8rem; } figure img { max-width: 100%; height: auto; display: block; }
figcaption { color: var(--muted); font-size: .88rem; max-width: 46rem; margin-top: .4rem; }
code { font: .86em ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.4rem; font-size: .92rem; margin: .6rem 0; }
dt { color: var(--muted); } dd { margin: 0; }
@media (max-width: 640px) { dl { grid-template-columns: 1fr; } dt { margin-top: .4rem; } }
@media print {
  @page { margin: 14mm; }
  body { font-size: 10.5pt; } main { padding: 0; max-width: none; } nav { display: none; }
  figure, table, .verdict, .warnings { break-inside: avoid; } h2, h3 { break-after: avoid; }
  .scroll { overflow: visible; } table { font-size: 8.5pt; }
}
"""


@dataclass(frozen=True)
class Section:
    """A section of the page; `body` is HTML."""

    name: str
    title: str
    body: str


@dataclass(frozen=True)
class Table:
    """A table whose cells are HTML; `numeric` columns are aligned to the right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: frozenset[int] = field(default_factory=frozenset)
    total: bool = False  # the last row is a sum


def escape(text: object) -> str:
    """Text as HTML."""
    return html.escape(str(text))


def page(title: str, head: str, sections: Iterable[Section]) -> str:
    """The whole document."""
    parts = list(sections)
    links = "".join(f'<a href="#{part.name}">{escape(part.title)}</a>' for part in parts)
    body = "\n".join(f'<h2 id="{part.name}">{escape(part.title)}</h2>\n{part.body}' for part in parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"{head}\n<nav>{links}</nav>\n{body}\n</main>\n</body>\n</html>\n"
    )


def table(content: Table) -> str:
    """A table, scrolled sideways where it is wider than the page."""

    def line(cells: Sequence[str], tag: str, attributes: str = "") -> str:
        marks = [' class="n"' if k in content.numeric else "" for k in range(len(cells))]
        return f"<tr{attributes}>" + "".join(f"<{tag}{m}>{c}</{tag}>" for c, m in zip(cells, marks)) + "</tr>"

    last = len(content.rows) - 1
    rows = "\n".join(
        line(cells, "td", ' class="total"' if content.total and k == last else "")
        for k, cells in enumerate(content.rows)
    )
    head = f"<thead>{line(content.header, 'th')}</thead>"
    return f'<div class="scroll"><table>\n{head}\n<tbody>\n{rows}\n</tbody></table></div>'


def definitions(items: Iterable[tuple[str, str]]) -> str:
    """Terms and what they are; the definitions are HTML."""
    return "<dl>" + "".join(f"<dt>{escape(term)}</dt><dd>{meaning}</dd>" for term, meaning in items) + "</dl>"


def picture(path: Path, title: str, caption: str) -> str:
    """A figure with its image inside the page; SVG or PNG by suffix."""
    kind = {".svg": "image/svg+xml", ".png": "image/png"}[path.suffix]
    data = base64.b64encode(path.read_bytes()).decode()
    size = ""
    if path.suffix == ".png":  # as large as it was drawn, so that all figures have letters of one size
        with Image.open(path) as image:
            size = f' width="{round(image.width * 96 / DPI)}"'
    return (
        f'<figure><h3>{escape(title)}</h3><img alt="{escape(title)}"{size} src="data:{kind};base64,{data}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def digest(value: str | None) -> str:
    """The beginning of a hash; all of it on hovering."""
    return f'<code title="{escape(value)}">{escape(value[:12])}</code>' if value else "–"


def small(text: str) -> str:
    """A remark under a value."""
    return f"<small>{escape(text)}</small>" if text else ""
