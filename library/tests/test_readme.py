"""The examples of the library's README run as written, each in a new namespace."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from kairos_timesteps import density
from kairos_timesteps.components import SAMPLERS

pytestmark = pytest.mark.usefixtures("unregistered_names")
README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_an_example_runs_as_written(number, monkeypatch):
    import types

    module = types.ModuleType("readme")
    monkeypatch.setitem(__import__("sys").modules, "readme", module)
    exec(compile(BLOCKS[number], f"{README.name}, example {number + 1}", "exec"), module.__dict__)
    if "triangle" in SAMPLERS:
        u, peak = np.linspace(0.01, 0.99, 50), 0.3
        triangle = density("triangle", peak=peak)
        np.testing.assert_allclose(triangle.cdf(triangle.quantile(u)), u, atol=1e-4)
        np.testing.assert_allclose(
            triangle.pdf(u), np.where(u < peak, 2 * u / peak, 2 * (1 - u) / (1 - peak)), atol=1e-3
        )
        assert torch.allclose(triangle.cdf(torch.from_numpy(u)), torch.from_numpy(triangle.cdf(u)))
    if "power_of_u" in SAMPLERS:
        assert density("power_of_u", a=3.0).quantile(np.array([0.5])) == pytest.approx(0.125)


def test_the_readme_has_at_least_four_examples():
    assert len(BLOCKS) >= 4
