"""Functions and classes of users as samplers and weightings: supported forms and validation errors."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import kairos_timesteps
from kairos_timesteps import Strategy, density, weighting
from kairos_timesteps.base import FixedDensity, Weighting
from kairos_timesteps.components import SAMPLERS
from kairos_timesteps.components import sampler as register_sampler
from kairos_timesteps.components import weighting as register_weighting
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.options import Component, option
from kairos_timesteps.registry import Registry

pytestmark = pytest.mark.usefixtures("unregistered_names")
BATCH = torch.zeros(4000, 1)


def test_a_density_by_function_is_a_complete_sampler():
    @density("power", help="a power")
    def quantile(u, a: float = 2):
        return u**a

    assert quantile(0.5) == 0.25 and SAMPLERS["power"].help == "a power"
    options = {"a": 3, "floor": 0.2, "importance": True, "points": "stratified"}
    strategy = Strategy("power+min_snr", "cosine", sampler=options)
    draw = strategy.draw(BATCH)
    inside = 0.8 * 0.5 ** (1 / 3) + 0.2 * 0.5
    assert (draw.t < 500).double().mean().item() == pytest.approx(inside, abs=0.01)
    resumed = Strategy("power+min_snr", "cosine", sampler=options)
    with strategy.observe(draw):
        pass
    resumed.load_state_dict(strategy.state_dict())
    assert torch.equal(resumed.draw(BATCH).t, strategy.draw(BATCH).t)
    u = np.linspace(0.05, 0.95, 19)
    power = density("power", a=3.0)
    np.testing.assert_allclose(power.cdf(u), u ** (1 / 3), atol=1e-12)
    np.testing.assert_allclose(power.pdf(u), u ** (-2 / 3) / 3, rtol=1e-4)
    assert isinstance(power.quantile(torch.from_numpy(u)), torch.Tensor)


def test_context_and_step_are_keyword_parameters_without_a_default():
    @density("by_tokens")
    def quantile(u, *, tokens, step, rate: float = 0.0):
        return u ** (tokens / 256 + rate * step)

    strategy = Strategy("by_tokens", sampler={"rate": 0.1})
    tokens = torch.tensor([256, 1024]).repeat(2000)
    draw = strategy.draw(BATCH, tokens=tokens)
    for count, exponent in ((256, 1), (1024, 4)):
        assert draw.fractions[tokens == count].mean().item() == pytest.approx(1 / (exponent + 1), abs=0.02)
    strategy.step = 10
    assert strategy.draw(BATCH, tokens=256).fractions.mean().item() == pytest.approx(1 / 3, abs=0.02)
    with pytest.raises(ConfigError, match=r"by_tokens.*tokens"):
        strategy.draw(BATCH)
    assert density("by_tokens").quantile(np.array([0.5]), tokens=512) == pytest.approx(0.25)


def test_a_function_of_numpy_alone_works_on_the_cpu():
    knots = np.linspace(0, 1, 9)

    @density("knots")
    def quantile(u):
        return np.interp(u, knots, knots**2)

    assert Strategy("knots").draw(BATCH).fractions.mean().item() == pytest.approx(1 / 3, abs=0.02)


@pytest.mark.parametrize(("error", "factor"), [("epsilon", 1.0), ("x0", 0.25), ("predicted", 1.0), ("v", 1.25)])
def test_a_weighting_by_function_is_converted_from_the_error_that_it_is_stated_for(error, factor):
    @weighting("constant", error=error)
    def weight(snr, value: float = 2.0):
        return value * snr**0

    snr = np.array([4.0])
    assert weighting("constant", prediction="epsilon", value=3.0)(snr) == pytest.approx(3 * factor)
    assert weighting("constant", prediction="epsilon")(4.0) == pytest.approx(2 * factor)


def test_a_cell_that_is_run_again_replaces_its_function():
    def define(power, error):
        @density("cell", help=f"power {power}")
        def quantile(u):
            return u**power

        @weighting("cell_weight", error=error)
        def weight(snr):
            return snr**0

    define(2, "epsilon")
    define(3, "x0")
    assert density("cell").quantile(np.array([0.5])) == pytest.approx(0.125) and SAMPLERS["cell"].help == "power 3"
    assert weighting("cell_weight", prediction="x0")(np.array([4.0])) == pytest.approx(1)


def test_a_distribution_function_may_depend_on_the_step():
    @register_sampler("falls", "falls over training")
    class Falls(FixedDensity):
        context_names = ("step",)

        def cdf(self, u, *, step=0, **context):
            return u ** (1 + step / 10)

    strategy = Strategy("falls")
    strategy.step = 100
    draw = strategy.draw(BATCH)
    assert draw.fractions.mean().item() == pytest.approx(11 / 12, abs=0.01)
    p = strategy.table()["p"]
    assert (draw.t >= 900).double().mean().item() == pytest.approx(p[900:].sum(), abs=0.03)


def lacks_both():
    @register_sampler("lacks", "nothing")
    class Lacks(FixedDensity):
        pass

    Strategy("lacks")


def half_a_density():
    @register_sampler("half", "not one")
    class Half(FixedDensity):
        def cdf(self, u, **context):
            return 0.5 * u

    Strategy("half")


def weighting_without_formula():
    @register_weighting("nothing", "nothing")
    class Nothing(Weighting):
        pass

    Strategy("nothing")


def weighting_of_an_unknown_error():
    @register_weighting("odd", "odd")
    class Odd(Weighting):
        stated_for = "eps"

        def formula(self, snr):
            return snr**0

    Strategy("odd")


@pytest.mark.parametrize(
    ("define", "message"),
    [
        (lacks_both, "Lacks: got neither cdf nor quantile"),
        (half_a_density, "half.*0.5.*allowed: 1"),
        (weighting_without_formula, "Nothing: got neither formula nor weights"),
        (weighting_of_an_unknown_error, "stated_for: got 'eps', allowed: epsilon"),
        (lambda: density("falling")(lambda u: 1 - u) and Strategy("falling"), "falling: got values between 0 and 1"),
        (lambda: density("a+b")(lambda u: u), r"name: got 'a\+b'"),
        (lambda: density(lambda u: u), "density: got .*a name"),
        (lambda: density("none")(lambda: 1), r"none: got .*first parameter"),
        (lambda: density("context")(lambda u, tokens: u), r"tokens: got no default, allowed: a default; or"),
        (lambda: weighting("context")(lambda snr, *, step: snr), r"step: got no default, allowed: a default$"),
        (lambda: density("reserved")(lambda u, floor=1.0: u), "floor.*another name"),
        (lambda: density("log_normal")(lambda u: u), "LogNormal.*choose another"),
        (lambda: density("log_norml").sample(3), "did you mean 'log_normal'"),
        (lambda: weighting("min_snrr")(np.ones(3)), "did you mean 'min_snr'"),
        (lambda: Strategy("min_snr+log_normal"), r"write log_normal\+min_snr"),
    ],
)
def test_what_cannot_be_a_component_is_rejected_with_a_reason(define, message):
    with pytest.raises(ConfigError, match=message):
        define()


def test_a_name_of_another_component_is_rejected():
    registry = Registry("thing")
    first, again, second = (type(name, (Component,), {"__module__": "module"}) for name in ("First", "First", "Second"))
    registry.register("first", help="a")(first)
    registry.register("first", help="b")(again)  # a module that is executed again
    assert registry["first"].help == "b" and registry["first"].component is again
    with pytest.raises(ConfigError, match="thing first: module:First has this name"):
        registry.register("first")(second)
    with pytest.raises(ConfigError, match="thing: name: got 'a thing'"):
        registry.register("a thing")
    assert [*registry] == ["first"] and registry["first"].code == "module:First"


def test_options_cannot_have_reserved_names():
    with pytest.raises(TypeError, match=r"seed.*rename"):

        class Seeded(FixedDensity):
            seed: int = option(3, "seed")

    with pytest.raises(TypeError, match="a type"):

        class Untyped(FixedDensity):
            a = option(3.0, "a number")


def test_names_are_listed_by_kind():
    assert "log_normal" in kairos_timesteps.names("sampler") and "edm2" in kairos_timesteps.names("weighting")
    with pytest.raises(ConfigError, match="kind: got 'samplers', allowed: sampler, weighting, coupling, preset"):
        kairos_timesteps.names("samplers")


THREADS = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor

sys.setswitchinterval(1e-6)
start = threading.Barrier(8)

def read(number):
    start.wait()
    from kairos_timesteps.components import SAMPLERS, WEIGHTINGS

    return SAMPLERS.entry("adaptive").code, WEIGHTINGS.entry("min_snr").code, len(SAMPLERS)

with ThreadPoolExecutor(8) as pool:
    assert len({*pool.map(read, range(8))}) == 1
"""


def test_threads_that_import_the_registries_first_find_all_components():
    subprocess.run([sys.executable, "-c", THREADS], check=True)
