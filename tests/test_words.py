"""Tests of `.ci/words.py`: it reports banned words, names, openings and long sentences, and counts may only fall."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / ".ci/words.py"
SPECIFICATION = importlib.util.spec_from_file_location("words", SCRIPT)
words = importlib.util.module_from_spec(SPECIFICATION)
SPECIFICATION.loader.exec_module(words)

LONG = "one two three four five " * 7


def rules(text: str, file: str = "module.py") -> list[str]:
    """Return the rule of each problem, in the order of the lines."""
    return [rule for _, rule, _ in sorted(set(words.check_file(file, text)))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"""Of a batch."""', ["openings"]),
        ('"""Offset of a batch."""', []),
        ('"""The same images."""', ["openings"]),
        ('def draw():\n    """Whether it draws."""', ["openings"]),
        ('class Batch:\n    size: int\n    """What fits."""', ["openings"]),
        ('text = "What is no docstring"', []),
        ("found = 1", ["names"]),
        ("print(found)", []),
        ("from os import path as place", ["names"]),
        ("def draw(own_time, *, placed, replace, in_place): pass", ["names"]),
        ("class Place:\n    def __init__(self):\n        self.place_of = _TURN", ["names", "names"]),
        ("class Replacement: pass", []),
        ("def test_a_place_that_is_found(): pass", []),
        ("def test_a_value_is_refused(): pass", ["prose"]),
        ('raise ValueError(f"{name} goes on")', ["messages"]),
        ('raise ValueError(f"{name} resumes")', []),
        ('log("waits " "beside it")', ["messages"]),
        ('print(text["told"], "besides")', []),
        ('table = {"so many": 1}', []),
        ("size = 1  # as many as fit", ["prose"]),
        ("size = 1  # `told` is an argument", []),
        ('size = "# so many"', []),
        ('"""Return so\nmany images."""', ["prose"]),
        (f'"""Return {LONG}."""', ["sentences"]),
        (f'"""Return {LONG[:90]}. Then {LONG[:90]}."""', []),
        (f'"""Return it.\n\nArgs:\n    size: {LONG[:90]}\n    step: {LONG[:90]}\n"""', []),
    ],
)
def test_problems_in_code_are_reported(text, expected):
    assert rules(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LONG, ["sentences"]),
        ("# " + LONG, []),
        (f"| {LONG} | {LONG} |", []),
        (f"```\n{LONG}\ngoes on\n```\n", []),
        (f"A command:\n\n    kairos {LONG}\n\nThat is all.", []),
        (f"Few words, `{LONG}` and $x {LONG}$ are few.", []),
        (f"- {LONG[:90]}\n- {LONG[:90]}\n", []),
        (f"| it says |\n\n{LONG[:90]}\n{LONG[:90]}", ["prose", "sentences"]),
    ],
)
def test_problems_in_a_page_are_reported(text, expected):
    assert rules(text, "page.md") == expected


def test_problems_have_line_numbers():
    text = '"""Numbers.\n\nThey are\ntold.\n"""\n\nraise ValueError(\n    "a file goes on"\n)\n'
    assert [line for line, *_ in words.check_file("module.py", text)] == [4, 8]


def test_the_name_of_a_file_is_checked():
    assert rules("", "src/kairos/drawn_images.py") == ["names"]


@pytest.mark.parametrize(
    ("file", "folder"),
    [
        ("src/kairos/files.py", "src/kairos"),
        ("src/kairos/cli/strategies/output.py", "src/kairos/cli"),
        ("library/src/kairos_timesteps/base.py", "library/src"),
        ("docs/reference/api.md", "docs"),
        ("README.md", "README.md"),
    ],
)
def test_files_are_counted_by_folder(file, folder):
    assert words.folder_of(file) == folder


def test_a_higher_count_is_rejected_and_a_lower_one_must_be_recorded():
    recorded = {"docs": {"names": 2, "prose": 3}, "gone": {"names": 1}}
    lines, lowered = words.compare(recorded, {"docs": {"names": 3, "prose": 1}, "new": {"names": 1}})
    assert [("--list" in line, "--record" in line) for line in lines] == [(True, False), (False, True), (True, False)]
    assert (lowered["docs"]["names"], lowered["docs"]["prose"], lowered["new"]["names"]) == (2, 1, 0)
    assert "gone" not in lowered
    assert words.compare(lowered, lowered)[0] == []


def test_only_lower_counts_are_recorded(tmp_path):
    (tmp_path / ".ci").mkdir()
    lists = tmp_path / ".ci/words.toml"
    head = SCRIPT.with_suffix(".toml").read_text(encoding="utf-8").partition("[counts]")[0]
    lists.write_text(head + '[counts]\n"docs" = {prose = 2}\n')
    (tmp_path / ".ci/words.py").write_text(SCRIPT.read_text(encoding="utf-8"))
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs/page.md"
    page.write_text("It goes on.")
    for command in (["init", "--quiet"], ["add", "docs"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)

    def status(*options: str) -> int:
        return subprocess.run([sys.executable, ".ci/words.py", *options], cwd=tmp_path, capture_output=True).returncode

    assert [status(), status("--record"), status()] == [1, 0, 0]
    page.write_text("It goes on.\nIt goes on.")
    recorded = lists.read_text()
    assert [status(), status("--record"), status()] == [1, 1, 1]
    assert lists.read_text() == recorded
    page.write_text("It resumes.")
    assert [status("--record"), status()] == [0, 0]
