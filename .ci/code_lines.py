"""Print the number of code lines by package, without blank lines, comments and docstrings.

    python .ci/code_lines.py [FOLDER]

A line counts if a token of code begins or ends on it.
"""

import ast
import collections
import io
import sys
import tokenize
from pathlib import Path

_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def docstring_lines(text: str) -> set[int]:
    """Return the line numbers of all docstrings; empty if the text is no plain Python, such as a Snakefile."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return set()
    numbers: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                numbers.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return numbers


def count_lines(text: str) -> tuple[int, int]:
    """Return the number of lines of code and the number of docstring lines."""
    documented = docstring_lines(text)
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NOT_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - documented), len(documented)


def main() -> None:
    """Print a table of the packages of ``library``, of ``src`` and of ``workflow``."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    files = [
        *sorted((root / "library/src").rglob("*.py")),
        *sorted((root / "src").rglob("*.py")),
        *sorted((root / "workflow").rglob("*.smk")),
        root / "Snakefile",
    ]
    sums: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0, 0])
    for path in files:
        parts = path.relative_to(root).parts
        if parts[0] == "library":
            package = "/".join(["kairos_timesteps", *parts[3:-1]])
        elif parts[0] != "src":
            package = "workflow (rules)"
        elif parts[1] != "kairos":  # the executor plugin
            package = parts[1]
        else:
            package = parts[2] if len(parts) > 3 else "(top level)"
        for number, value in enumerate((1, *count_lines(path.read_text(encoding="utf-8")))):
            sums[package][number] += value
    rows = [(package, *values) for package, values in sorted(sums.items())]
    rows.append(("all", *(sum(column) for column in zip(*sums.values(), strict=True))))
    for package, number, code, documented in rows:
        print(f"{package:33}{number:4} files{code:7} code lines{documented:6} docstring lines")


if __name__ == "__main__":
    main()
