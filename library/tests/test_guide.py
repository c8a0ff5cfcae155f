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


def rows(heading):
    """Return the names in each row of the tables in a section of the guide, by the row's first cell."""
    section = GUIDE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = dict(re.findall(r"^\| ([^|`][^|]*?) \| (`.*) \|$", section, re.MULTILINE))
    return {kind: re.findall(r"`(\w+)`", names) for kind, names in cells.items()}


@pytest.mark.parametrize(("heading", "registry"), [("Samplers", SAMPLERS), ("Weightings", WEIGHTINGS)])
def test_the_guide_lists_every_sampler_and_weighting_under_one_kind(heading, registry):
    kinds = rows(heading)
    kinds.pop("reweighted", None)
    listed = [name for names in kinds.values() for name in names if name != "tokens"]  # an argument of a draw
    assert sorted(listed) == sorted(registry)


def test_the_guide_lists_every_coupling():
    section = GUIDE.split("\n## Couplings\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(COUPLINGS)


def test_the_guide_lists_the_samplers_that_measure_the_network_and_those_that_are_reweighted():
    kinds = rows("Samplers")
    measuring = {name for name, entry in SAMPLERS.items() if issubclass(entry.component, MeasuresNetwork)}
    reweighted = {name for name in SAMPLERS if kairos_timesteps.Strategy(name).sampler.importance}
    assert set(kinds["measure the network in `observe`"]) == measuring
    assert set(kinds["reweighted"]) == reweighted


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
