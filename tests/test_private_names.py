"""Private names of Snakemake and its SLURM plugin that kairos uses exist; `.ci/nightly` checks new releases, too.

It needs nothing of kairos, so that it runs where only these two are installed.
"""

import importlib
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULE = ROOT / "src/kairos/workflow/snakemake_private.py"
NAMES = runpy.run_path(str(MODULE))["NAMES"]


@pytest.mark.parametrize(("owner", "name", "lost"), NAMES, ids=[f"{owner} {name}" for owner, name, _ in NAMES])
def test_a_private_attribute_exists(owner, name, lost):
    module, _, owner_name = owner.partition(":")
    content = importlib.import_module(module)
    assert hasattr(getattr(content, owner_name) if owner_name else content, name), f"{owner} has no {name}: {lost}"


def test_no_module_imports_or_changes_snakemake():
    """Only the executor plugin imports Snakemake or its plugins, and no module assigns an attribute of a workflow."""
    texts = {path: path.read_text() for path in sorted((ROOT / "src/kairos").rglob("*.py"))}
    assert [path for path, text in texts.items() if re.search(r"^ *(?:from|import) snakemake", text, re.M)] == []
    assigned = re.compile(r"\bworkflow(\.\w+)+ [|+]?= |setattr\(workflow")
    assert not [path for path, text in texts.items() if assigned.search(text)]
