"""Draws in one graph, of slices of a batch, of any shape and with context; combined samplers; validation errors."""

import numpy as np
import pytest
import torch

import kairos_timesteps
from components_by_name import make_sampler
from kairos_timesteps.base import FixedDensity
from kairos_timesteps.components import SAMPLERS
from kairos_timesteps.coordinates import POINTS, RandomCoordinates
from kairos_timesteps.diffusion.schedule import SCHEDULES, make_schedule
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.numeric import spline
from kairos_timesteps.registry import sampler
from marks import mark_long

FIXED = sorted(name for name, entry in SAMPLERS.items() if issubclass(entry.component, FixedDensity))
BATCH = torch.zeros(16, 1, 2, 2)
U = np.linspace(0, 1, 1001)


def make_strategy(name, process="cosine", weighting="none", **options):
    """Return a strategy whose sampler has options."""
    prediction = "v" if process in SCHEDULES else None  # others state it
    return kairos_timesteps.Strategy(f"{name}+{weighting}", process, sampler=options, prediction=prediction)


def flow_sampler(name, **options):
    """Return a sampler on the schedule of flow matching."""
    return make_sampler({"name": name, **options}, kairos_timesteps.Flow().schedule)


def agree(first, second):
    """Return True if two draws have equal times, fractions and weights."""
    return all(torch.equal(getattr(first, name), getattr(second, name)) for name in ("t", "weights", "fractions"))


def check_one_graph(name, backend):
    """Check that a draw compiles to one graph, which returns the numbers of an eager draw at any step."""
    torch._dynamo.reset()
    strategy = make_strategy(name, weighting="min_snr", floor=0.1, points="random")
    compiled = torch.compile(lambda x0, step: strategy.draw(x0, step=step), fullgraph=True, backend=backend)
    strategy.draw(BATCH)  # copies tables to the device
    for number in (0, 5, 2**33):
        step = torch.tensor(number)
        graph, plain = compiled(BATCH, step), strategy.draw(BATCH, step=step)
        torch.testing.assert_close(graph.fractions, plain.fractions, rtol=1e-12, atol=1e-12)
        by_number = make_strategy(name, weighting="min_snr", floor=0.1)
        by_number.load_state_dict({**by_number.state_dict(), "step": number, "drawn": [0, number * len(BATCH)]})
        assert agree(plain, by_number.draw(BATCH)), number


@pytest.mark.parametrize(
    "name", mark_long(sorted({SAMPLERS[name].module: name for name in FIXED}.values()), ["speed_v1"])
)
def test_a_draw_of_a_sampler_of_each_module_is_one_graph_with_the_same_numbers(name):
    check_one_graph(name, "eager")


def test_a_draw_with_tokens_as_a_tensor_is_one_graph():
    strategy, tokens = make_strategy("shift", law="exponential"), torch.full((len(BATCH),), 1024)
    compiled = torch.compile(
        lambda x0, step, tokens: strategy.draw(x0, step=step, tokens=tokens), fullgraph=True, backend="eager"
    )
    step = torch.tensor(3)
    plain = strategy.draw(BATCH, step=step, tokens=tokens)
    torch.testing.assert_close(compiled(BATCH, step, tokens).fractions, plain.fractions)


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_quantiles_and_probabilities_have_the_type_of_their_argument(name, kind):
    density = make_strategy(name).sampler
    context = dict.fromkeys(density.requires_context, 1000)
    p = torch.tensor([0.01, 0.3, 0.5, 0.9, 1 - torch.finfo(kind).eps / 2], dtype=kind)
    exact = density.quantile(p.double(), **context)
    quantiles, probabilities = density.quantile(p, **context), density.cdf(p, **context)
    assert quantiles.dtype == probabilities.dtype == kind and (quantiles < 1).all() and (exact < 1).all()
    torch.testing.assert_close(quantiles.double(), exact, rtol=torch.finfo(kind).eps, atol=torch.finfo(kind).tiny)
    assert density.quantile(np.float32([0.5]), **context).dtype == np.float32
    expected = density.quantile(np.array([0.0, 1.0]), **context)
    for numbers in ([0, 1], np.array([0, 1]), torch.tensor([0, 1])):
        np.testing.assert_allclose(np.asarray(density.quantile(numbers, **context)), expected, rtol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("name", FIXED)
def test_a_draw_of_every_sampler_is_one_graph_with_the_same_numbers(name):
    check_one_graph(name, "aot_eager")


@pytest.mark.parametrize("points", ["random", "stratified", "systematic", "sobol"])
@pytest.mark.parametrize("name", ["uniform", "log_normal", "mixture", "speed_official", "listed"])
def test_draws_of_slices_equal_the_draw_of_the_whole_batch(name, points):
    options = {"points": points} | ({"in_turn": True} if name == "listed" else {})
    whole, draws = make_strategy(name, **options).draw(BATCH), []
    for index in (range(5), torch.tensor([5, 6, 7]), range(8, 16)):
        draws.append(make_strategy(name, **options).draw(BATCH[: len(index)], index=index, total=16))
    assert torch.equal(torch.cat([draw.t for draw in draws]), whole.t)
    strategy = make_strategy(name, **options)  # draws the micro-batches of one step
    halves = [strategy.draw(BATCH[:8], index=part, total=16) for part in (range(8), range(8, 16))]
    assert torch.equal(torch.cat([half.t for half in halves]), whole.t)


def test_a_range_of_every_second_sample_draws_for_these_samples():
    whole = make_strategy("uniform", "cosine").draw(BATCH, index=range(16), total=16).t
    odd = make_strategy("uniform", "cosine").draw(BATCH[1::2], index=range(1, 16, 2), total=16).t
    assert torch.equal(odd, whole[1::2])
    assert len(make_strategy("uniform", "cosine").draw(BATCH[:0], index=range(16, 16, 2), total=16).t) == 0


@pytest.mark.parametrize("name", FIXED)
def test_prefetched_draws_equal_single_draws_also_after_a_resume(name, monkeypatch):
    importance = name != "listed"  # most timesteps are never drawn from a list
    ahead, alone = make_strategy(name, importance=importance), make_strategy(name, importance=importance)
    monkeypatch.setattr(alone, "_depends_on_step_alone", lambda coordinates: False)  # raises if there is no such method
    for step in range(20):
        draws = ahead.draw(BATCH), alone.draw(BATCH)
        assert agree(*draws), step
        for strategy, draw in zip((ahead, alone), draws):
            with strategy.observe(draw):
                pass
    assert not alone._blocks
    resumed = make_strategy(name, importance=importance)
    resumed.load_state_dict(ahead.state_dict())
    assert agree(resumed.draw(BATCH), ahead.draw(BATCH))


def test_draws_have_a_time_for_each_frame_or_one_time_for_the_batch():
    strategy = make_strategy("log_normal", "flow")
    frames = strategy.draw(BATCH, times=(5,))
    assert frames.t.shape == frames.weights.shape == (16, 5) and len(frames.t.unique()) == 80
    one = make_strategy("log_normal", "flow").draw(BATCH, shared_time=True)
    assert one.t.shape == (16,) and len(one.t.unique()) == 1
    even = make_strategy("uniform", "flow", points="stratified").draw(BATCH, times=(3,)).fractions
    assert (even.sort(0).values * 16).floor().eq(torch.arange(16.0)[:, None]).all()


@pytest.mark.parametrize("name", ["loss_rms", "loss_mean", "info_rate"])
def test_samplers_learn_from_several_times_of_a_sample(name):
    strategy = kairos_timesteps.Strategy(name, "flow", sampler={"start": 1, "frequency": 1})
    draw = strategy.draw(BATCH, times=(3,))
    strategy.loss(draw, torch.ones(16, 3))
    with strategy.observe(draw):
        pass
    assert strategy.sampler.statistics() == {"updates": 1}


@pytest.mark.parametrize("density", ["log_normal", "beta", "mixture", {"name": "clts", "length": 10}])
def test_a_range_cuts_or_rescales_its_density(density):
    low, high = 0.25, 0.75
    if density == "mixture":
        density = {"name": density, "parts": [{"name": "log_normal", "share": 3}, {"name": "beta", "a": 4, "share": 1}]}
    whole = flow_sampler(
        *([density] if isinstance(density, str) else [density["name"]]),
        **({} if isinstance(density, str) else {k: v for k, v in density.items() if k != "name"}),
    )
    cut = flow_sampler("range", density=density, low=low, high=high)
    ends = whole.cdf(np.array([low, high]), step=5)
    wanted = (whole.cdf(U.clip(low, high), step=5) - ends[0]) / (ends[1] - ends[0])
    np.testing.assert_allclose(cut.cdf(U, step=5), wanted, atol=1e-12)
    draws = cut.draw(RandomCoordinates(0, 5, sample_indices=range(4000), batch_size=4000))
    assert draws.min() >= low and draws.max() <= high
    assert np.abs(cut.cdf(draws.sort().values.numpy(), step=5) - np.arange(4000) / 4000).max() < 0.04
    scaled = flow_sampler("range", density=density, low=low, high=high, cut=False)
    np.testing.assert_allclose(scaled.cdf(low + (high - low) * U, step=5), whole.cdf(U, step=5), atol=1e-9)


def test_shifts_depend_on_tokens():
    flux = flow_sampler("shift", density="log_normal", law="exponential")
    for tokens, alpha in ((1024, 1.878), (2304, 2.332), (4096, 3.158)):  # 512², 768², 1024²
        u = flux.sample(5000, tokens=tokens)
        assert torch.allclose(u, flow_sampler("log_normal", m=np.log(alpha)).sample(5000), atol=2e-4)
    many = torch.full((5000,), 1024)
    assert torch.allclose(flux.sample(5000, tokens=many), flux.sample(5000, tokens=1024), atol=1e-12)
    open_sora = flow_sampler("shift", law="linear", low=1, high=3)
    assert open_sora.shift(tokens=4096, frames=4) == pytest.approx(6)
    assert flow_sampler("shift", law="root", alpha=1.0, last=4096).shift(tokens=9216) == pytest.approx(1.5)
    with pytest.raises(ConfigError, match=r"shift.*tokens"):
        flux.sample(3)
    with pytest.raises(ConfigError, match=r"tokens: got shape \(2,\), allowed: a number, or one for each of 3 samples"):
        flux.sample(3, tokens=torch.ones(2))
    with pytest.raises(ConfigError, match="tokens: got -4, allowed: a number above 0"):
        flux.sample(3, tokens=-4)


def test_mixtures_schedules_and_groups_draw_from_their_components():
    parts = [{"name": "range", "high": 0.5, "share": 1}, {"name": "range", "low": 0.5, "share": 3}]
    mixed = flow_sampler("mixture", parts=parts)
    assert (mixed.sample(40_000) < 0.5).double().mean().item() == pytest.approx(0.25, abs=0.01)
    whole = flow_sampler("mixture", parts=parts, per="batch")
    below = torch.stack([whole.sample(64, step=k) < 0.5 for k in range(300)]).double().mean(1)
    assert set(below.tolist()) == {0.0, 1.0} and below.mean().item() == pytest.approx(0.25, abs=0.08)
    parts = [{"name": "range", "high": 0.5, "group": "a"}, {"name": "range", "low": 0.5, "group": "b"}]
    grouped = flow_sampler("by_group", parts=parts)
    assert (grouped.sample(100, group="a") < 0.5).all() and (grouped.sample(100, group="b") >= 0.5).all()
    numbers = torch.arange(100) % 2
    assert torch.equal(grouped.sample(100, group=numbers) >= 0.5, numbers.bool())
    with pytest.raises(ConfigError, match="group: got 'c', allowed: a, b"):
        grouped.sample(3, group="c")
    parts = [{"name": "range", "high": 0.5, "start": 0}, {"name": "range", "low": 0.5, "start": 100}]
    for ramp, shares in ((0, {0: 1, 99: 1, 100: 0}), (50, {0: 1, 50: 1, 75: 0.5, 100: 0})):
        over = flow_sampler("schedule", parts=parts, ramp=ramp)
        for step, share in shares.items():
            assert (over.sample(4000, step=step) < 0.5).double().mean().item() == pytest.approx(share, abs=0.03)
    over = flow_sampler("schedule", parts=[parts[0], {**parts[1], "start": 0.5}], of="progress")
    assert (over.sample(100, progress=0.4) < 0.5).all() and (over.sample(100, progress=0.6) >= 0.5).all()


def test_a_schedule_draws_equal_times_for_several_steps_at_once():
    parts = [{"name": "log_normal", "start": 0}, {"name": "beta", "a": 4, "start": 100}]
    over = flow_sampler("schedule", parts=parts, ramp=50)
    together = over.sample(64, step=range(200))
    for step in (0, 50, 51, 75, 99, 100, 150):
        torch.testing.assert_close(together[step], over.sample(64, step=step), rtol=0, atol=1e-12)


def test_tables_and_lists_draw_from_their_values():
    cells = flow_sampler("table", values=[1, 0, 3], between="cells")
    assert cells.cdf(np.array([1 / 3, 2 / 3])) == pytest.approx([0.25, 0.25], abs=1e-3)
    from scipy.interpolate import PchipInterpolator

    knots = [0.2, 1.0, 0.4, 0.0, 0.7]
    wanted = PchipInterpolator(np.linspace(0, 1, 5), knots).integrate
    areas = np.array([float(wanted(0, u)) for u in U[::100]]) / float(wanted(0, 1))
    assert np.abs(flow_sampler("table", values=knots, between="spline").cdf(U[::100]) - areas).max() < 0.03
    times = [1.0, 0.9, 0.5]
    timesteps = flow_sampler("listed", times=times).sample(3000)
    assert timesteps.float().unique().tolist() == pytest.approx(sorted(times), abs=1e-6)
    block = flow_sampler("listed", times=times, in_turn=True)
    assert block.sample(6).tolist() == pytest.approx([0.5, 0.9, 1.0] * 2)
    assert block.sample((3, 2)).flatten().tolist() == pytest.approx([0.5, 0.9, 1.0] * 2)
    assert block.sample((2, 2), step=1).flatten().tolist() == pytest.approx([0.9, 1.0, 0.5, 0.9])


@pytest.mark.parametrize(
    "knots", [[0.2, 1.0, 0.4, 0.0, 0.7], [0.0, 1.0, 1.5, 1.6], [3.0, 1.0, 2.0, 2.0, 0.1], [0.0, 1.0, -4.0, -4.5]]
)
def test_a_spline_through_knots_equals_scipys_monotone_cubic(knots):
    from scipy.interpolate import PchipInterpolator

    wanted = PchipInterpolator(np.linspace(0, 1, len(knots)), knots)
    np.testing.assert_allclose(spline(U, np.array(knots)), wanted(U), atol=1e-9)


def test_points_of_epochs_are_even_over_items_and_over_visits():
    sampler = flow_sampler("uniform", points="epochs")
    items = torch.randperm(100)
    epochs = torch.stack([sampler.sample(100, item=items, items=100, epoch=e)[items.argsort()] for e in range(100)])
    assert (epochs.sort(1).values.diff(dim=1) < 1.01 / 100).all()  # over an epoch's items
    assert (epochs.sort(0).values.diff(dim=0) < 3 / 100).all()  # over an item's visits


@pytest.mark.parametrize(
    ("by_name", "message"),
    [
        ({"name": "range", "density": "adaptive"}, "density.name: got adaptive, allowed: samplers of a fixed density"),
        ({"name": "range", "density": {"name": "beta", "c": 1}}, "density: unknown option 'c'"),
        ({"name": "range", "density": 3}, "density: got 3, allowed: a sampler's name"),
        ({"name": "range", "low": 0.5, "high": 0.5}, "low < high"),
        ({"name": "range", "density": {"name": "uniform", "end": 100}, "low": 0.5}, "where the density has mass"),
        ({"name": "mixture", "parts": []}, r"parts: got \[\], allowed: a list of samplers"),
        ({"name": "mixture", "parts": [{"name": "beta"}]}, r"parts\[0\].share: got nothing"),
        ({"name": "mixture", "parts": [{"name": "beta", "share": 0}]}, r"share: got \[0\]"),
        ({"name": "mixture", "parts": [{"name": "beta", "share": -1}]}, "share: got -1, allowed: a number, 0 or more"),
        (
            {"name": "schedule", "parts": [{"name": "beta", "start": 5}, {"name": "beta", "start": 1}]},
            r"start: got \[5, 1\]",
        ),
        ({"name": "table", "values": [0, 0]}, "values: got 2 numbers from 0 to 0, allowed"),
        ({"name": "table", "values": [1, -1]}, "none below 0"),
        ({"name": "table", "file": "nowhere.csv"}, "file: got nowhere.csv"),
        ({"name": "listed", "times": [1.5]}, r"times: got \[1.5\], allowed"),
        ({"name": "log_normal", "low": 0.9, "high": 0.1}, "low < high"),
        ({"name": "log_snr", "distribution": "levy"}, "distribution: got 'levy', allowed: one of normal"),
    ],
)
def test_bad_options_of_samplers_are_rejected(by_name, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        make_sampler(by_name, make_schedule())


def test_infinite_weights_are_rejected_when_the_strategy_is_built():
    table = torch.linspace(0.99, 1e-3, 10, dtype=torch.float64)
    with pytest.raises(ConfigError, match="infinite"):
        kairos_timesteps.Strategy("uniform+snr", table, weighting={"power": -400.0})


def largest_gap(draws):
    """Return the largest distance between neighbouring fractions on the circle."""
    fractions = torch.cat([draw.fractions for draw in draws]).sort().values
    return torch.cat([fractions, fractions[:1] + 1]).diff().max()


@pytest.mark.parametrize(("points", "even"), [("random", False), ("stratified", False), ("sobol", True)])
def test_only_sobol_points_are_even_over_micro_batches_of_one_sample(points, even):
    strategy = make_strategy("uniform", "flow", points=points)
    for _ in range(4):
        draws = [strategy.draw(BATCH[:1]) for _ in range(16)]
        assert (largest_gap(draws) <= 2 / 16) == even
        with strategy.observe(draws[-1]):
            pass


@pytest.mark.parametrize("points", ["stratified", "systematic", "sobol"])
def test_micro_batches_with_indices_are_even_over_the_step(points):
    strategy = make_strategy("uniform", "flow", points=points)
    draws = [strategy.draw(BATCH[:1], index=range(number, number + 1), total=16) for number in range(16)]
    assert largest_gap(draws) <= 2 / 16


def test_context_of_an_unknown_name_is_rejected():
    with pytest.raises(ConfigError, match=r"unknown context 'token'; did you mean 'tokens'\?"):
        make_strategy("uniform").draw(torch.zeros(4, 1), token=256)
    make_strategy("uniform").draw(torch.zeros(4, 1), tokens=256)  # another sampler uses it


HALVES = [{"name": "range", "high": 0.5, "share": 1}, {"name": "range", "low": 0.5, "share": 1}]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mixture", {"parts": HALVES, "per": "batch", "floor": 0.2}),
        ("range", {"density": {"name": "mixture", "parts": HALVES, "per": "batch"}, "cut": False, "floor": 0.2}),
        ("shift", {"density": {"name": "mixture", "parts": HALVES, "per": "batch", "floor": 0.2}, "alpha": 1.0}),
    ],
)
def test_batches_from_one_component_have_the_share_of_the_floor(name, options):
    below = [(flow_sampler(name, **options).sample(20_000, step=step) < 0.5).double().mean() for step in range(8)]
    assert {round(share.item(), 1) for share in below} == {0.1, 0.9}
    assert all(min(abs(share - 0.1), abs(share - 0.9)) < 0.01 for share in below)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("range", {"density": {"name": "mixture", "per": "batch"}}),
        ("range", {"density": {"name": "shift", "density": {"name": "mixture", "per": "batch"}}}),
        ("schedule", {"parts": [{"name": "mixture", "per": "batch", "start": 0}]}),
        ("by_group", {"parts": [{"name": "mixture", "per": "batch", "group": "a"}]}),
        ("mixture", {"parts": [{"name": "mixture", "per": "batch", "share": 1}]}),
    ],
)
def test_batches_from_one_component_are_rejected_within_other_densities(name, options):
    with pytest.raises(ConfigError, match="per: batch"):
        flow_sampler(name, **options)


def test_a_ramp_longer_than_the_time_between_two_starts_is_rejected():
    parts = [{"name": "uniform", "start": start} for start in (0, 100_000, 100_010)]
    with pytest.raises(ConfigError, match=r"ramp: got 100\.0, allowed: at most 10"):
        flow_sampler("schedule", parts=parts, ramp=100)
    for step in range(99_900, 100_100, 7):
        assert flow_sampler("schedule", parts=parts, ramp=10).cdf(np.ones(1), step=step) == pytest.approx(1)
    flow_sampler("schedule", parts=parts[:2], ramp=1_000_000)  # the first density is there from the beginning
    fractions = [{"name": "uniform", "start": start} for start in (0, 0.3, 0.6, 0.9)]
    flow_sampler("schedule", parts=fractions, ramp=0.3, of="progress")


@pytest.mark.parametrize(
    "density",
    [
        {"name": "schedule", "parts": [{"name": "uniform", "start": 0}, {"name": "range", "high": 0.5, "start": 9}]},
        {
            "name": "by_group",
            "parts": [{"name": "uniform", "group": "a"}, {"name": "range", "high": 0.5, "group": "b"}],
        },
        {"name": "clts", "mu": 0.1, "s": 0.01},
        {"name": "shift", "alpha": 1.0, "density": {"name": "clts", "mu": 0.1, "s": 0.01}},
        {"name": "mixture", "parts": [{"name": "uniform", "share": 0}, {"name": "range", "high": 0.5, "share": 1}]},
    ],
)
def test_a_range_in_which_a_density_loses_its_mass_is_rejected(density):
    with pytest.raises(ConfigError, match="an interval where the density has mass"):
        flow_sampler("range", low=0.8, density=density)
    flow_sampler("range", low=0.05, density=density)
    flow_sampler("range", low=0.8, density={**density, "floor": 0.1})


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
@pytest.mark.parametrize("of", [np.asarray, torch.as_tensor])
def test_functions_of_a_density_by_group_take_groups_of_any_kind(kind, of):
    parts = [{"name": "range", "high": 0.5, "group": "a"}, {"name": "range", "low": 0.5, "group": "b"}]
    grouped = flow_sampler("by_group", parts=parts)
    p, group = of(np.array([0.5, 0.5])), kind([0, 1])
    assert grouped.quantile(p, group=group).tolist() == pytest.approx([0.25, 0.75])
    assert grouped.cdf(p, group=group).tolist() == pytest.approx([1.0, 0.0])
    assert grouped.quantile(p, group="b").tolist() == pytest.approx([0.75, 0.75])
    scaled = flow_sampler("range", high=0.5, cut=False, density={"name": "by_group", "parts": parts})
    assert scaled.quantile(p, group=group).tolist() == pytest.approx([0.125, 0.375])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("uniform", {"end": 10}),
        ("listed", {"times": [0.5]}),
        ("table", {"values": [0, 0, 1], "between": "cells"}),
        ("parabola", {"weight": 30.0}),
        ("range", {"low": 0.5}),
        ("shift", {"density": {"name": "range", "high": 0.5}}),
        ("schedule", {"parts": [{"name": "uniform", "start": 0}, {"name": "range", "high": 0.5, "start": 9}]}),
        ("schedule", {"parts": [{"name": "range", "high": 0.5, "start": 0}, {"name": "uniform", "start": 9}]}),
        (
            "schedule",
            {
                "parts": [
                    {"name": "uniform", "start": 0},
                    {"name": "range", "high": 0.5, "start": 9},
                    {"name": "uniform", "start": 20},
                ],
                "ramp": 5,
            },
        ),
        ("clts", {"mu": 0.1, "s": 0.001}),
    ],
)
def test_importance_weights_of_timesteps_that_are_never_drawn_are_rejected(name, options):
    with pytest.raises(ConfigError, match=r"importance: got true, but .* never drawn"):
        make_strategy(name, importance=True, **options)
    make_strategy(name, importance=True, floor=0.1, **options)
    make_strategy("uniform", importance=True, end=make_strategy("uniform").sampler.schedule.timesteps)
    shifted = {"name": "shift", "law": "exponential"}  # requires context, so p(t) is unknown
    with pytest.raises(ConfigError, match="importance: got true, allowed: false with a range"):
        make_strategy("range", importance=True, low=0.5, density=shifted)


@pytest.mark.parametrize("name", [*FIXED, "adaptive", "loss_second_moment", "loss_rms"])
@pytest.mark.parametrize("total", [None, 8])
def test_an_empty_batch_has_an_empty_draw(name, total):
    strategy = make_strategy(name)
    draw = strategy.draw(torch.zeros(0, 1, 4, 4), total=total, index=None if total is None else range(3, 3))
    assert len(draw.t) == len(draw.weights) == 0
    strategy.loss(draw, torch.zeros(0))
    with strategy.observe(draw, torch.nn.Conv2d(1, 1, 1)):
        pass
    assert strategy.table()["p"].sum() == pytest.approx(1)


@pytest.mark.parametrize("name", ["speed_official", "speed_v1"])
def test_previews_keep_the_batch_size_and_a_resume_restores_it(name):
    strategy, resumed = make_strategy(name), make_strategy(name)
    strategy.draw(BATCH)
    p = strategy.table()["p"]
    strategy.preview(draws=300, batch=3)
    strategy.sample(5)
    assert np.array_equal(strategy.table()["p"], p)
    assert not np.array_equal(resumed.table()["p"], p)
    resumed.load_state_dict(strategy.state_dict())
    assert np.array_equal(resumed.table()["p"], p)
    resumed.load_state_dict({**strategy.state_dict(), "sampler": {}})  # as saved by earlier versions


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("points", POINTS)
def test_the_points_of_draws_do_not_depend_on_torchs_default_type(points, kind):
    sampler = make_strategy("uniform", points=points).sampler
    context = {"item": torch.arange(256) + 1000, "items": 10_007, "epoch": 3} if points == "epochs" else {}
    draws = sampler.sample(256, **context)
    default = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        again = sampler.sample(256, **context)
    finally:
        torch.set_default_dtype(default)
    assert torch.equal(draws, again)


class _Late(FixedDensity):
    """Density that never draws the upper half from step 100 on."""

    context_names = ("step",)

    def cdf(self, u, *, step=0, **context):
        return u if step < 100 else (2 * u).clip(0, 1)


def test_a_plugin_curriculum_is_checked_at_its_end():
    sampler("late", "a curriculum that ends in half of the process")(_Late)
    try:
        make_strategy("late")
        with pytest.raises(ConfigError, match="importance"):
            make_strategy("late", importance=True)
        with pytest.raises(ConfigError, match="an interval where the density has mass"):
            make_strategy("range", low=0.6, density="late")
    finally:
        del SAMPLERS["late"]
