"""Tables and code blocks of the guide, ``docs/strategies.md``, and of ``docs/trainers.md`` against the library."""

import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import kairos_timesteps
from kairos_timesteps.base import MeasuresNetwork
from kairos_timesteps.components import COUPLINGS, SAMPLERS, WEIGHTINGS

DOCS = Path(__file__).parents[2] / "docs"
if not DOCS.exists():
    pytest.skip("the source distribution does not contain docs/", allow_module_level=True)
GUIDE = (DOCS / "strategies.md").read_text(encoding="utf-8")


def names_in_table(heading):
    """Return the names in the first column of the table in a section of the guide."""
    section = GUIDE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)


@pytest.mark.parametrize(
    ("heading", "registry"), [("Samplers", SAMPLERS), ("Weightings", WEIGHTINGS), ("Couplings", COUPLINGS)]
)
def test_the_guide_lists_every_sampler_weighting_and_coupling(heading, registry):
    assert names_in_table(heading) == list(registry), f"docs/strategies.md, {heading}: one row for each, in this order"


def test_the_guide_lists_the_arguments_that_observe_requires():
    section = GUIDE.split("\n## Samplers\n")[1].split("\n## ")[0]
    needs = dict(re.findall(r"^\| `(\w+)` \|.*\| ([\w, ]*)\|$", section, re.MULTILINE))
    for name, entry in SAMPLERS.items():
        assert ("network" in needs[name]) == issubclass(entry.load(), MeasuresNetwork), name
        assert ("reweighted" in section.split(f"| `{name}` |")[1].split("\n")[0]) == (
            kairos_timesteps.Strategy(name).sampler.importance
        ), name


def test_the_code_of_the_guide_runs(monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert len(blocks) == 7
    module = types.ModuleType("guide")
    monkeypatch.setitem(sys.modules, "guide", module)
    convolution = nn.Conv2d(1, 1, 3, padding=1)
    module.batches = [torch.randn(4, 1, 8, 8) for _ in range(2)]
    module.convolution = convolution
    module.network, module.heldout = lambda x, t: convolution(x), torch.randn(16, 1, 8, 8)
    module.optimizer = torch.optim.SGD(convolution.parameters(), 0.1)
    known = set(SAMPLERS), set(WEIGHTINGS)
    try:
        for block in blocks:
            exec(compile(block, "docs/strategies.md", "exec"), module.__dict__)
            if "for x0 in" in block:
                assert module.strategy.step == 2
    finally:
        for registry, names in zip((SAMPLERS, WEIGHTINGS), known):
            for name in set(registry) - names:
                del registry[name]
    table = module.strategy.table()
    assert table["p"].sum() == pytest.approx(1) and table["p"][0] > table["p"][-1] >= 0.05 / 1000
    snr = module.strategy.process.schedule.snr
    np.testing.assert_allclose(table["w"], np.maximum(snr, 1) / snr * snr / (snr + 1))
    draw = module.strategy.draw(torch.zeros(100_000, 1))
    assert (draw.t < 125).double().mean() == pytest.approx(0.95 * 0.125 ** (1 / 3) + 0.05 * 0.125, abs=0.01)


def test_the_page_of_trainers_lists_exactly_the_presets():
    text = (DOCS / "trainers.md").read_text(encoding="utf-8")
    presets = set(kairos_timesteps.names("preset"))
    trainers = {name.split(":")[0] for name in presets}
    by_name = {name for name in re.findall(r"`(\w+:\w+)`", text) if name.split(":")[0] in trainers}
    assert by_name == presets
