"""Options of components: what an instance keeps, and what a class with options must be."""

import pytest

from kairos_timesteps import Strategy
from kairos_timesteps.components import SAMPLERS, sampler
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.options import Component, default_values, option
from kairos_timesteps.samplers.fixed import FixedDensity


class Rounded(FixedDensity):
    """Density whose constructor replaces its option, as `numpy.asarray` of a list would."""

    power: float = option(2.0, "power of u")
    powers: list[float] = option([1.0], "powers")

    def __init__(self, options, schedule, seed=0):
        super().__init__(options, schedule, seed)
        if self.power > 10:
            raise ValueError("power: too high")
        self.power = round(self.power)

    def quantile(self, p, **context):
        return p**self.power


@pytest.fixture
def registered():
    sampler("rounded", "a power of u")(Rounded)
    yield
    del SAMPLERS["rounded"]


def test_a_component_keeps_the_options_that_it_was_built_with(registered):
    built = Strategy("rounded", sampler={"power": 2.4}).sampler
    built.powers.append(3.0)
    assert built.power == 2 and built.option_values()["power"] == 2.4 and built.option_values()["powers"] == [1.0]
    built.option_values()["powers"].append(3.0)
    assert built.option_values()["powers"] == [1.0]


def test_a_value_error_of_a_constructor_is_reported_as_an_option(registered):
    with pytest.raises(ConfigError, match="power: too high"):
        Strategy("rounded", sampler={"power": 20.0})
    with pytest.raises(ConfigError, match="power: too high"):
        Strategy(
            "mixture",
            sampler={"parts": [{"share": 0.5, "name": "rounded", "power": 20.0}, {"share": 0.5, "name": "uniform"}]},
        )


def test_default_lists_are_not_shared():
    Rounded.powers.append(3.0)
    default_values(Rounded)["powers"].append(4.0)
    assert Rounded.powers == [1.0]


def test_a_class_with_options_must_derive_from_component():
    class Mixin:
        x: float = option(1.0, "a number")

    with pytest.raises(TypeError, match=r"Mixin\.x"):
        type("Mixed", (Mixin, Component), {})
