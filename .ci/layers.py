"""Whether the packages of src/kairos stand in layers: none may need itself by way of another.

Imports inside functions count, and so do the strings by which registries name code; imports for types alone do not.
Prints the layers from bottom to top, or the circles, and then exits with 1.
"""

import ast
import graphlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src"


def unit(module: str) -> str:
    """The package, or the module of the top level, that a module belongs to; nothing for what is not there."""
    parts = module.split(".")
    name = parts[1] if len(parts) > 1 else ""
    return name if (ROOT / "kairos" / name).is_dir() or (ROOT / "kairos" / f"{name}.py").is_file() else ""


def needed(node: ast.AST) -> Iterator[str]:
    """Modules that a piece of code imports or names."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.ImportFrom) and node.module:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.Constant) and re.fullmatch(r"kairos(\.\w+)+(:\w+)?", str(node.value)):
        yield node.value.partition(":")[0]
    for child in ast.iter_child_nodes(node):
        yield from needed(child)


def main() -> None:
    """Read the code and sort it."""
    graph: dict[str, set[str]] = {}
    for path in sorted((ROOT / "kairos").rglob("*.py")):
        own = unit(".".join(path.relative_to(ROOT).with_suffix("").parts))
        found = {unit(name) for name in needed(ast.parse(path.read_text())) if name.startswith("kairos.")}
        graph.setdefault(own, set()).update(found - {own, ""})
    sorter = graphlib.TopologicalSorter(graph)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        sys.exit(f"src/kairos: a circle: {' <- '.join(error.args[1])}")
    while layer := sorter.get_ready():
        print(" ".join(sorted(layer)))
        sorter.done(*layer)


if __name__ == "__main__":
    main()
