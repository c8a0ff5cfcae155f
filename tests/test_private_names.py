"""Private names of Snakemake and its SLURM plugin that kairos uses exist; `.ci/nightly` checks new releases, too.

It needs nothing of kairos, so that it runs where only these two are installed.
"""

import importlib
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PLUGIN = ROOT / "src/snakemake_executor_plugin_kairos"
NAMES = runpy.run_path(str(PLUGIN / "private.py"))["NAMES"]


@pytest.mark.parametrize(("owner", "name", "lost"), NAMES, ids=[f"{owner} {name}" for owner, name, _ in NAMES])
def test_an_attribute_is_there(owner, name, lost):
    module, _, owner_name = owner.partition(":")
    assert hasattr(getattr(importlib.import_module(module), owner_name), name), f"{owner} has no {name}: {lost}"


def test_nothing_else_touches_snakemake():
    """Outside of the package nothing of Snakemake or its plugins is imported, so nothing is subclassed or assigned."""
    texts = {path.name: path.read_text() for path in sorted((ROOT / "src/kairos").rglob("*.py"))}
    imports = {name: re.findall(r"^ *(?:from|import) (snakemake\S*)", text, re.M) for name, text in texts.items()}
    assert {name for names in imports.values() for name in names} == {"snakemake_executor_plugin_kairos.private"}
    assert not [
        name for name, text in texts.items() if re.search(r"\bworkflow(\.\w+)+ [|+]?= |setattr\(workflow", text)
    ]
