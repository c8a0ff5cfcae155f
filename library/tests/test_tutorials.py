"""The code of the tutorials ``docs/own-loop.md`` and ``docs/own-strategy.md`` runs as written."""

import re
import sys
import types
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("unregistered_names")
DOCS = Path(__file__).parents[2] / "docs"
if not DOCS.exists():
    pytest.skip("the source distribution does not contain docs/", allow_module_level=True)


def run(page: str, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Run the Python blocks of a page in one module."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    module = types.ModuleType("tutorial")
    monkeypatch.setitem(sys.modules, "tutorial", module)
    for block in blocks:
        exec(compile(block, f"docs/{page}", "exec"), module.__dict__)
    return module


@pytest.mark.long
def test_the_strategies_of_the_tutorial_train_and_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tutorial = run("own-loop.md", monkeypatch)
    untrained = tutorial.validation(tutorial.Network())["loss"]
    assert {*tutorial.losses} == {"uniform", "log_normal", "auto"}
    assert all(result["loss"] < 0.9 * untrained for result in tutorial.losses.values())
    trained = tutorial.validation(tutorial.train_uniform(150))["loss"]
    assert 0.9 < trained / tutorial.losses["uniform"]["loss"] < 1.1  # the first loop trains like the strategy uniform
    assert tutorial.again.strategy.step == tutorial.timesteps.strategy.step == 20


def test_the_strategy_of_the_tutorial_has_the_density_of_its_formula(monkeypatch):
    tutorial = run("own-strategy.md", monkeypatch)
    counts = tutorial.np.histogram(tutorial.paper, tutorial.edges)[0] / len(tutorial.v)
    tutorial.np.testing.assert_allclose(counts, tutorial.np.diff(tutorial.mine.cdf(tutorial.edges)), atol=0.01)
    assert tutorial.strategy.name == "my_mode+my_min_snr"
