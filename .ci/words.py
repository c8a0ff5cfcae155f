"""Check names, docstrings, comments, documentation and messages against the word lists in ``.ci/words.toml``.

That file also contains the number of problems that each folder has. The check fails if a number is above the recorded
one, and also if it is below until the lower number is recorded. ``--list FOLDER`` prints the problems of a folder or
file. ``--record`` writes the numbers that have fallen.
"""

import argparse
import ast
import inspect
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / ".ci/words.toml"
LISTS = tomllib.loads(FILE.read_text(encoding="utf-8"))
RULES = ("openings", "names", "sentences", "messages", "prose")
PHRASES = re.compile(r"\b({})\b".format("|".join(LISTS["phrases"]).replace(" ", r"\s+")), re.IGNORECASE)
OPENING = re.compile(r"\W*({})\b".format("|".join(LISTS["openings"])))
NAMES = re.compile(r"_({})(?=_)".format("|".join(LISTS["names"])))
ALLOWED_NAMES = re.compile(r"_({})(?=_)".format("|".join(LISTS["allowed_names"])))
BLOCK_OF_CODE = re.compile(r"(?ms)^ *(```|~~~).*?^ *\1[^\n]*$|(?<=\n\n)(?: {4}[^\n]*(?:\n|\Z))+")
CODE = re.compile(r"<!--(?s:.*?)-->|\$\$(?s:.+?)\$\$|`+(?:[^`\n]|\n(?! *\n))+`+|\$(?:[^$\n]|\n(?! *\n))+\$")
NO_SENTENCE = re.compile(r"(?m)^ *(?:\||#+ |>>> |\.\.\. |={3,}|-{3,}).*|^[A-Z]\w*:$")  # tables, headings, examples
ITEM = r" *(?:[-*+]|\d+\.) |  +\*{0,2}\w+(?: \([^)\n]*\))?: "  # of a list, or of the arguments in a docstring
PARAGRAPH = re.compile(rf"(?m)^ *\S.*(?:\n(?!{ITEM}) *\S.*)*")
SENTENCE_END = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!cf\.)(?<!vs\.)(?<! al\.)[\"')\]*_]*\s+")
DEFINES = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.alias: "asname", ast.ExceptHandler: "name"}
DEFINES |= {ast.FunctionDef: "name", ast.AsyncFunctionDef: "name", ast.ClassDef: "name"}
Problems = Iterator[tuple[int, str, str]]  # line, rule, explanation
Counts = dict[str, dict[str, int]]  # by folder and rule


def folder_of(file: str) -> str:
    """Return the folder whose counts include a file: a package of kairos, or a folder or file at the top."""
    parts = file.split("/")
    depth = {"src": 3, "library": 2}.get(parts[0], 1)
    return "/".join(parts[: max(1, min(depth, len(parts) - 1))])


def without_code(text: str) -> str:
    """Remove blocks of code, write X for code, formulas and comments within text, and keep the line numbers."""
    text = BLOCK_OF_CODE.sub(lambda match: "\n" * match[0].count("\n"), text)
    return CODE.sub(lambda match: "X" + "\n" * match[0].count("\n"), text)


def check_prose(text: str, rule: str = "prose") -> Problems:
    """Yield line number, rule and explanation of each banned phrase in a text."""
    for match in PHRASES.finditer(text := without_code(text)):
        better = LISTS["phrases"][" ".join(match[0].lower().split())]
        yield text.count("\n", 0, match.start()) + 1, rule, f'"{match[0]}": write {better}'


def check_document(text: str) -> Problems:
    """Yield the banned phrases and the long sentences of a docstring or a page."""
    yield from check_prose(text)
    text = NO_SENTENCE.sub("", without_code(text))
    for paragraph in PARAGRAPH.finditer(text):
        for sentence in SENTENCE_END.split(paragraph[0]):
            words = [word for word in sentence.split() if re.search(r"\w", word)]
            if len(words) > LISTS["longest_sentence"]:
                shown = " ".join(words[:8])
                yield text.count("\n", 0, paragraph.start()) + 1, "sentences", f"{len(words)} words: {shown} ..."


def check_name(name: str) -> Problems:
    """Yield the banned words between the underscores or capitals of an identifier; names of tests are sentences."""
    words = "_" + "_".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)).lower() + "_"
    if words.startswith("_test_"):
        yield from check_prose(words.replace("_", " "))
        return
    for match in NAMES.finditer(ALLOWED_NAMES.sub("", words)):
        yield 1, "names", f"{name}: write {LISTS['names'][match[1]]}"


def check_node(node: ast.AST) -> Problems:
    """Yield the problems of a docstring, a message or a definition; lines count from the line of the node."""
    called = getattr(node, "func", None)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        text = inspect.cleandoc(node.value.value)
        yield from check_document(text)
        if match := OPENING.match(text):
            yield 1, "openings", f'the docstring starts with "{match[1]}"'
    elif isinstance(node, ast.Raise) or getattr(called, "attr", getattr(called, "id", None)) in LISTS["messages"]:
        for part in ast.walk(node):
            if isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value:
                yield from ((part.lineno - node.lineno + 1, *rest) for _, *rest in check_prose(part.value, "messages"))
    elif type(node) in DEFINES and isinstance(getattr(node, "ctx", ast.Store()), ast.Store):
        yield from check_name(getattr(node, DEFINES[type(node)]) or "")


def check_file(file: str, text: str) -> Problems:
    """Yield the problems of a file; of Snakemake's rules, which are no plain Python, only those of the comments."""
    if file.endswith((".md", ".rst")):
        return (yield from check_document(text))
    yield from check_name(Path(file).stem)
    for node in ast.walk(ast.parse(text if file.endswith(".py") else "", file)):
        yield from ((node.lineno - 1 + line, *rest) for line, *rest in check_node(node))
    if any(PHRASES.search(line.partition("#")[2]) for line in text.splitlines()):  # most files need no slow tokenizing
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield from ((token.start[0], *rest) for _, *rest in check_prose(token.string))


def compare(recorded: Counts, counts: Counts) -> tuple[list[str], Counts]:
    """Return a line for each count that differs from the recorded one, and the counts with those that have fallen."""
    lines, lowered = [], {folder: {} for folder in sorted(counts)}
    for folder, rule in ((folder, rule) for folder in lowered for rule in RULES):
        allowed, now = recorded.get(folder, {}).get(rule, 0), counts[folder].get(rule, 0)
        lowered[folder][rule] = min(allowed, now)
        if now > allowed:
            lines.append(f"{folder}: {now} {rule}, allowed: {allowed}; python .ci/words.py --list {folder}")
        elif now < allowed:
            lines.append(f"{folder}: {now} {rule}, recorded: {allowed}; lower it: python .ci/words.py --record")
    return lines, lowered


def main() -> None:
    """Check the files that git tracks, or list the problems of a folder, or record the counts that have fallen."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", metavar="FOLDER")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    counts: dict[str, Counter[str]] = {}
    for file in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        if file.endswith((".py", ".smk", ".md", ".rst", "Snakefile")) and (ROOT / file).is_file():
            problems = sorted(set(check_file(file, (ROOT / file).read_text(encoding="utf-8"))))
            counts.setdefault(folder_of(file), Counter()).update(rule for _, rule, _ in problems)
            if options.list in (file, folder_of(file)):
                print("".join(f"{file}:{line}: {rule}: {text}\n" for line, rule, text in problems), end="")
    lines, lowered = compare(LISTS["counts"], counts)
    if options.record:
        rows = "".join(f'"{folder}" = {row}\n' for folder, row in lowered.items())
        head = FILE.read_text(encoding="utf-8").partition("[counts]\n")[0]
        FILE.write_text(head + "[counts]\n" + rows.replace("'", "").replace(":", " ="), encoding="utf-8")
        lines, _ = compare(lowered, counts)
    sys.exit("\n".join(lines) if lines and not options.list else 0)


if __name__ == "__main__":
    main()
