"""The recipes of a paper for the site: file, published numbers, GPU-hours, what differs, and how the small form ran."""

import csv
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from recipe_costs import Recipe, describe_claims, load_recipes
from reference import plain, table

from kairos.config.published_results import PublishedConfig
from kairos.costs.cards import PEAKS
from kairos.costs.rendering import format_bytes
from kairos.report.formatting import DASH, format_number

ROOT = Path(__file__).resolve().parent.parent
UTILISATION = 0.4
SMALL = ROOT / "benchmarks/results/recipes.csv"  # recipe, seconds, result: a row for each small form that has run
_DIFFERS = "Known to differ: "


def paper(name: str) -> str:
    """Describe all recipes in the folder of a paper."""
    recipes, small_runs = load_recipes(ROOT / "recipes" / name), _ran()
    heads = ["recipe", "published", *(f"{gpu} h" for gpu in PEAKS), "small form, s", "its result"]
    rows = []
    for one in recipes:
        path = one.file.relative_to(ROOT).as_posix()
        count = sum(len(list(block.numbers())) for block in one.experiment.published)
        hours = map(format_number, one.gpu_hours_by_gpu(UTILISATION).values())
        small_run = small_runs.get(path, {"seconds": DASH, "result": DASH})
        rows.append(
            [
                f"[{one.file.stem}](#{one.file.stem})",
                f"{count} numbers" if count else DASH,
                *hours,
                small_run["seconds"],
                plain(small_run["result"]),
            ]
        )
    lines = [line.replace(f"{ROOT}/", "").strip().replace("\n ", "") for line in describe_claims(recipes, UTILISATION)]
    claims = "\n".join(f"* {plain(line)}." for line in lines)
    return "\n\n".join([table(heads, rows), claims, *(part for one in recipes for part in _recipe(one))])


def read_header(file: Path) -> tuple[str, list[str]]:
    """Read the header comment of a recipe; returns its description and the known differences from the paper."""
    comments = re.match(r"(?:#.*\n)+", file.read_text(encoding="utf-8"))[0].splitlines()[1:]  # type: ignore[index]
    text = " ".join(line.removeprefix("#").strip() for line in comments)
    description, *differences = text.split(_DIFFERS)
    return description.strip(), [each.strip() for each in differences]


def _recipe(one: Recipe) -> Iterator[str]:
    path = one.file.relative_to(ROOT).as_posix()
    description, differences = read_header(one.file)
    yield f"## {one.file.stem}"
    yield plain(description)
    memory, stored = (
        format_bytes(sum(part or 0 for part in each.values())) for each in (one.estimate.memory, one.estimate.storage)
    )
    runs = f"{len(one.experiment.methods)} training runs of {one.experiment.milestones[-1]:,} steps for each seed"
    shown = f"files/{one.file.parent.relative_to(ROOT).as_posix()}.md#{one.file.name.replace('.', '')}"  # a page of all
    yield f"[{path}]({shown}): {runs}, {memory} of a GPU's memory, {stored} on disk."
    yield from map(_numbers, one.experiment.published)
    if differences:
        yield "Known to differ:\n\n" + "\n".join(f"* {plain(each)}" for each in differences)


def _numbers(block: PublishedConfig) -> str:
    """Return a published table, with the method that corresponds to each row."""
    heads = [f"table {block.table}, {block.metric}", "method here"]
    heads += [f"{step:,}" if isinstance(step, int) else step for step in block.printed or block.steps]
    rows = []
    for row, values in block.rows.items():
        method = f"none: {block.missing[row]}" if row in block.missing else f"`{block.methods.get(row, row)}`"
        rows.append([plain(row), method, *(DASH if value is None else f"{value:g}" for value in values)])
    return table(heads, rows) + (f"\n\nNot compared: {plain(block.differs)}." if block.differs else "")


def _ran() -> dict[str, dict[str, str]]:
    """Read the recorded runs of small forms, by recipe; an empty dictionary if there is no record."""
    if not SMALL.is_file():
        return {}
    with open(SMALL, newline="", encoding="utf-8") as file:
        return {row["recipe"]: row for row in csv.DictReader(file)}


def _part(name: str) -> tuple[str, dict[str, bytes]]:
    return paper(name), {}


PARTS = {f"recipes_{name}": partial(_part, name) for name in ("adaptive", "speed")}
