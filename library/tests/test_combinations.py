"""Random strategy specifications and calls: draws follow the density of `table`, with documented shapes and weights.

A specification either works, or its construction raises a `ConfigError` that contains the name of a field.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import event, given, reject
from hypothesis import strategies as st
from torch import Tensor, distributed

import kairos_timesteps
from kairos_timesteps.base import Learned
from kairos_timesteps.components import SAMPLERS, WEIGHTINGS
from kairos_timesteps.errors import ConfigError
from small_loop import BATCH, IMAGES, SmallLoop
from specifications import (
    DEPENDS_ON_IMAGES,
    Call,
    Context,
    Specification,
    calls,
    components_of,
    context_of,
    examples,
    options_without_name,
    samplers,
    specifications,
    weightings,
)

X0 = IMAGES
LARGE = 2048  # images of a batch whose draws are counted
DRAW_FIELDS = ("t", "fractions", "fixed_weights", "importance", "weights")


# ---------------------------------------------------------------------------------------------------------------------
# Random specifications
# ---------------------------------------------------------------------------------------------------------------------


def build(specification: Specification) -> kairos_timesteps.Strategy | None:
    """Build a strategy, and train it for a few steps if it learns; None if its options are rejected."""
    try:
        strategy = specification.build()
    except ConfigError as error:
        assert names_a_field(str(error), specification), f"the message contains no field: {error}"
        return None
    if specification.learned or isinstance(strategy.weighting, Learned):
        loop = SmallLoop(specification)
        for _ in range(4):
            loop.step()
        return loop.strategy
    return strategy


def may_be_rejected(specification: Specification, call: Call) -> bool:
    """Return True if the construction cannot detect that the call is impossible."""
    by_image = specification.sampler["name"] in DEPENDS_ON_IMAGES and (call.times or call.shared_time)
    alpha_by_tokens = specification.holds("law", "linear") or specification.holds("law", "root")
    return bool(by_image or alpha_by_tokens)  # alpha may be negative at the number of tokens


def names_a_field(message: str, specification: Specification) -> bool:
    """Return True if a message contains the name of an option that is set, or of a component."""
    components = [*components_of(specification.sampler), specification.weighting]
    words = {word for component in components for word in [*component, component["name"]]} - {"name"}
    return any(word in message for word in words)


def images_for(specification: Specification, count: int) -> Tensor:
    """Return a batch of images, which differ for samplers that depend on images."""
    if specification.sampler["name"] in DEPENDS_ON_IMAGES:
        return IMAGES.repeat(-(-count // BATCH), 1, 1, 1)[:count]
    return torch.zeros(count, 1, 1, 1)


@contextlib.contextmanager
def rank_of(rank: int, ranks: int) -> Iterator[None]:
    """Make this process one of several ranks in torch's fake process group, which does not communicate."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def draw_batch(make_strategy: Any, x0: Tensor, call: Call, context: Context) -> dict[str, Tensor]:
    """Draw for a whole batch, split as the call requires; ``make_strategy()`` returns a strategy for each rank."""
    count, more = len(x0), {"times": call.times, "shared_time": call.shared_time}
    quarters = [slice(count * k // 4, count * (k + 1) // 4) for k in range(4)]
    halves = [slice(0, count // 2), slice(count // 2, count)]
    results = []
    if call.split == "whole":
        results = [make_strategy().draw(x0, **more, **context.arguments)]
    elif call.split == "micro":
        strategy = make_strategy()
        for rows in quarters:
            results.append(
                strategy.draw(x0[rows], index=range(rows.start, rows.stop), total=count, **more, **context.rows(rows))
            )
    elif call.split == "ranks":
        for rank in range(2):
            rows = slice(rank, None, 2)  # samples are dealt to the ranks in turn
            with rank_of(rank, 2):
                results.append(make_strategy().draw(x0[rows], **more, **context.rows(rows)))
        in_turn = (torch.arange(count) % 2) * (count // 2) + torch.arange(count) // 2
        return {name: torch.cat([getattr(draw, name) for draw in results])[in_turn] for name in DRAW_FIELDS}
    else:
        for rows in halves:
            index = range(rows.start, rows.stop)
            if call.split == "tensor":
                index = torch.arange(rows.start, rows.stop)
            results.append(make_strategy().draw(x0[rows], index=index, total=count, **more, **context.rows(rows)))
    return {name: torch.cat([getattr(draw, name) for draw in results]) for name in DRAW_FIELDS}


def check_values(values: dict[str, Tensor], strategy: kairos_timesteps.Strategy, batch: int, call: Call) -> None:
    """Check shapes and types against those that `Draw` documents, and that values are finite and within the process."""
    discrete = isinstance(strategy.process, kairos_timesteps.Discrete)
    types = dict.fromkeys(DRAW_FIELDS, torch.float32) | {"fractions": torch.float64}
    types["t"] = torch.int64 if discrete else torch.float64
    for name, value in values.items():
        assert value.shape == (batch, *call.times), name
        assert value.dtype == types[name], name
        assert value.isfinite().all(), name
    assert values["fractions"].min() >= 0 and values["fractions"].max() < 1
    torch.testing.assert_close(values["t"], strategy.process.times(values["fractions"]))
    assert values["importance"].min() >= 0
    torch.testing.assert_close(values["weights"], values["fixed_weights"] * values["importance"])
    if call.shared_time:
        assert (values["fractions"] == values["fractions"][:1]).all()


def check_weights(values: dict[str, Tensor], strategy: kairos_timesteps.Strategy) -> None:
    """Check that draws of a discrete process have the weights of the weighting, also after it has learned."""
    weighting, step = strategy.weighting, strategy.step
    by_timestep = torch.from_numpy(weighting.weights(step)).float()
    at_draws = weighting.at(strategy.process, values["t"], step)
    torch.testing.assert_close(at_draws, by_timestep[values["t"]], rtol=1e-5, atol=1e-7)
    if not hasattr(weighting, "base"):  # the factor that edm2 learns is applied with the loss
        torch.testing.assert_close(values["fixed_weights"], by_timestep[values["t"]], rtol=1e-5, atol=1e-7)


def tolerance(p: Any, independent: float) -> float:
    """Return a total variation that independent draws from p exceed with a probability of less than 1e-6."""
    mean = 0.5 * np.sqrt((p * (1 - p)).clip(0) / independent).sum()  # an upper bound
    return float(mean + math.sqrt(math.log(1e6) / (2 * independent)))  # McDiarmid's inequality


def pool(p: Any, cells: int = 40) -> Any:
    """Sum masses over groups of neighbouring timesteps, (groups, ...) with at most `cells` groups."""
    return np.stack([group.sum(0) for group in np.array_split(p, min(cells, len(p)))])


def check_draws(specification: Specification, call: Call) -> None:
    """Check everything that holds for any specification and any call."""
    strategy = build(specification)
    if strategy is None:
        event("rejected when it is built")
        return
    small = images_for(specification, BATCH)
    context = context_of(specification, call, BATCH)
    state = strategy.state_dict()

    def copy() -> kairos_timesteps.Strategy:
        strategy_built = specification.build()
        strategy_built.load_state_dict(state)
        return strategy_built

    whole_call = dataclasses.replace(call, split="whole")
    try:
        whole = draw_batch(copy, small, whole_call, context)
    except ConfigError as error:
        assert may_be_rejected(specification, call), error
        event("rejected when it is called")
        return
    check_values(whole, copy(), BATCH, call)
    if specification.discrete:
        check_weights(whole, strategy)
    if call.split != "whole":
        parts = draw_batch(copy, small, call, context)
        for name in ("t", "fractions"):
            torch.testing.assert_close(parts[name], whole[name], rtol=1e-5, atol=1e-6)
    check_density(specification, strategy, call)


def stated_densities(
    specification: Specification, strategy: kairos_timesteps.Strategy, context: Context
) -> Iterator[tuple[Tensor, Any]]:
    """Yield masks (batch,) of the samples that share a density, with the density in the strategy's table."""
    if specification.sampler["name"] in DEPENDS_ON_IMAGES:
        image = torch.arange(len(context.member)) % BATCH
        for number in range(BATCH):
            yield image == number, strategy.table(IMAGES[number : number + 1])["p"]
    else:
        for number, scalar in enumerate(context.scalars):
            yield context.member == number, strategy.table(**scalar)["p"]


def check_density(specification: Specification, strategy: kairos_timesteps.Strategy, call: Call) -> None:
    """Check that many draws have the density of the table, and that importance weights restore uniform's objective."""
    one_number = call.shared_time or specification.holds("per", "batch")  # of a whole batch
    batch, steps = (16, 256) if one_number else (LARGE, 8)
    timesteps = strategy.sampler.schedule.timesteps
    by_image = specification.sampler["name"] in DEPENDS_ON_IMAGES
    x0 = images_for(specification, batch)
    counts, expected = np.zeros(timesteps), np.zeros(timesteps)
    inverse, objective, variance = np.zeros(timesteps), np.zeros(timesteps), np.zeros(timesteps)
    total, least = 0, np.ones(timesteps)
    for step in range(steps):
        context = context_of(specification, call, batch, step)
        draw = strategy.draw(x0, times=call.times, shared_time=call.shared_time, **context.arguments)
        cells = (draw.fractions * timesteps).long().clamp(0, timesteps - 1).reshape(batch, -1)
        importance = draw.importance.double().reshape(batch, -1)
        for local, p in stated_densities(specification, strategy, context):
            here, weights = cells[local], importance[local]
            assert p.min() >= 0 and p.sum() == pytest.approx(1, abs=1e-6)
            reached = np.maximum(p, 1e-300)
            counts += np.bincount(here.flatten(), minlength=timesteps)
            expected += p * here.numel()
            inverse += np.bincount(here.flatten(), weights.flatten(), timesteps)
            objective += here.numel() / timesteps * (p > 0)
            variance += here.numel() / (timesteps**2 * reached)
            least = np.where(p > 0, np.minimum(least, p), least)
            if strategy.sampler.importance and not by_image:
                stated = torch.from_numpy(1 / (timesteps * reached)).float()[here]
                torch.testing.assert_close(weights.float(), stated, rtol=1e-3, atol=1e-6)
        total += cells.numel()
        state = strategy.state_dict()  # without `observe`, so that the density does not change
        strategy.load_state_dict({**state, "step": state["step"] + 1, "drawn": [0, sum(state["drawn"])]})
    independent = steps if one_number else total / 2  # SpeeD's public code draws the second half from the first
    p, share = pool(expected / total), pool(counts / total)
    variation = 0.5 * abs(share - p).sum()
    assert variation <= tolerance(p, independent), f"total variation {variation:.3f} from the stated density"
    if strategy.sampler.importance:
        bias, error = pool(inverse - objective), np.sqrt(pool(variance) * total / independent)
        often = np.array([part.min() for part in np.array_split(least, len(p))]) * independent > 30
        factor = 3 if by_image else 1  # the density of an image is not constant within a cell
        assert (abs(bias) <= 6 * factor * error + 1e-3 * pool(objective))[often].all(), "importance weights are biased"


@pytest.mark.parametrize("name", sorted(SAMPLERS))
@examples(3)
@given(data=st.data())
def test_draws_of_a_sampler_follow_its_density(name, data):
    check_draws(data.draw(specifications(sampler=name)), data.draw(calls()))


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(SAMPLERS))
@examples(30)
@given(data=st.data())
def test_draws_of_a_sampler_follow_its_density_in_many_combinations(name, data):
    check_draws(data.draw(specifications(sampler=name)), data.draw(calls()))


@pytest.mark.parametrize("name", sorted(WEIGHTINGS))
@examples(1)
@given(data=st.data())
def test_draws_with_a_weighting_have_its_weights(name, data):
    check_draws(data.draw(specifications(weighting=name)), data.draw(calls()))


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(WEIGHTINGS))
@examples(10)
@given(data=st.data())
def test_draws_with_a_weighting_have_its_weights_in_many_combinations(name, data):
    check_draws(data.draw(specifications(weighting=name)), data.draw(calls()))


# ---------------------------------------------------------------------------------------------------------------------
# Specifications with one wrong option
# ---------------------------------------------------------------------------------------------------------------------


@st.composite
def wrong_values(draw: Any, kind: type) -> tuple[str, Any]:
    """Draw an option's public name and a value that its type, choices or bounds do not allow."""
    one = draw(st.sampled_from([*kind.options.values()]))
    wrong = [{"no": "option"}, lambda: None]
    bounds, choices = one.bounds, one.choices
    if bounds and not choices:
        wrong += [math.nan, math.inf, "many"]
        outside = {"ge": -1, "gt": 0, "le": 1, "lt": 0}
        wrong += [bound + outside[side] for side, bound in bounds.items()]
    if choices:
        wrong += ["none of them"]
    return one.public_name, draw(st.sampled_from(wrong))


@st.composite
def wrong_specifications(draw: Any) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Draw a sampler and a weighting with one wrong option, perhaps of a component, and the name of the option."""
    sampler, weighting = draw(samplers()), draw(weightings())
    try:
        Specification(sampler, weighting).build()
    except ConfigError:
        reject()  # incompatible options
    with_options = [c for c in components_of(sampler) if SAMPLERS[c["name"]].component.options]
    selected = draw(st.sampled_from([*with_options, weighting]))
    registry = WEIGHTINGS if selected is weighting else SAMPLERS
    kind = registry[selected["name"]].component
    if not kind.options or draw(st.integers(0, 4)) == 0:
        key, value = "no_such_option", 1
    else:
        key, value = draw(wrong_values(kind))
    selected[key] = value
    return sampler, weighting, key


def check_rejection(sampler: dict[str, Any], weighting: dict[str, Any], key: str) -> None:
    """Check that the construction of a strategy rejects a wrong option by its name."""
    with pytest.raises(ConfigError) as raised:
        Specification(sampler, weighting).build()
    assert key in str(raised.value)


@examples(100)
@given(wrong_specifications())
def test_wrong_options_are_rejected_by_name(wrong):
    check_rejection(*wrong)


@pytest.mark.nightly
@examples(1000)
@given(wrong_specifications())
def test_many_wrong_options_are_rejected_by_name(wrong):
    check_rejection(*wrong)


@pytest.mark.parametrize(
    ("name", "rejected", "allowed"),
    [
        ("uniform", {"end": 101}, {"end": 100}),
        ("uniform", {"start": 100}, {"start": 99}),
        ("log_normal", {"low": 0.5, "high": 0.5}, {"low": 0.5, "high": 0.6}),
        ("listed", {"times": [0.5, 1.5]}, {"times": [0.0, 1.0]}),
        ("listed", {"times": [-0.1, 0.5]}, {"times": [0.5]}),
    ],
)
def test_options_at_their_bounds_are_accepted_and_beyond_them_rejected(name, rejected, allowed):
    kairos_timesteps.Strategy(name, timesteps=100, sampler=allowed)
    with pytest.raises(ConfigError, match=next(iter(rejected))):
        kairos_timesteps.Strategy(name, timesteps=100, sampler=rejected)


# ---------------------------------------------------------------------------------------------------------------------
# Weights that follow what a weighting has learned
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["gradient_norm", "first_order", "gradient_variance", "auto"])
def test_measurements_use_the_weights_that_the_weighting_has_learned(sampler):
    options = {} if sampler == "auto" else {"frequency": 1, "start": 1, "bins": 4}
    loop = SmallLoop(Specification({"name": sampler, **options}, {"name": "edm2", "lr": 0.1, "channels": 8}))
    strategy, t = loop.strategy, torch.arange(20)
    before = strategy.weighting.at(strategy.process, t).clone()
    for _ in range(3):
        loop.step()
    after = strategy.weighting.at(strategy.process, t)
    torch.testing.assert_close(after, torch.from_numpy(strategy.weighting.weights()).float())
    assert (after - before).abs().max() > 0.01 * before.abs().max()


@pytest.mark.parametrize("process", ["linear", "flow"])
def test_draws_and_resumes_use_the_weights_that_coarse_to_fine_has_learned(process):
    def strategy() -> kairos_timesteps.Strategy:
        return kairos_timesteps.Strategy("uniform+coarse_to_fine", process, timesteps=20)

    strategy_built = strategy()
    before = strategy_built.weighting.weights().copy()
    for _ in range(100):
        draw = strategy_built.draw(X0)
        snr = strategy_built.process.snr(draw.t)
        unpredicted = 0.2 + 0.6 * (1 - draw.fractions)  # of the error of a guess by the noise level alone
        epsilon = unpredicted * snr / (1 + snr)
        ratio = 1.0 if process == "linear" else (1 + snr**0.5) ** 2  # from the error of epsilon to that of the flow
        strategy_built.loss(draw, (epsilon * ratio).float())
        with strategy_built.observe(draw):
            pass
    after = strategy_built.weighting.weights()
    assert abs(after / before - 1).max() > 0.1
    resumed = strategy()
    resumed.load_state_dict(strategy_built.state_dict())
    draws = strategy_built.draw(X0), resumed.draw(X0)
    assert torch.equal(draws[0].weights, draws[1].weights)
    if process == "linear":
        torch.testing.assert_close(draws[0].weights, torch.from_numpy(after)[draws[0].t].float())


# ---------------------------------------------------------------------------------------------------------------------
# Options of a component
# ---------------------------------------------------------------------------------------------------------------------

HALF_UNIFORM = {"name": "log_normal", "s": 0.5, "floor": 0.5}
WITH_FLOOR = {
    "mixture": {"parts": [{**HALF_UNIFORM, "share": 1.0}]},
    "by_group": {"parts": [{**HALF_UNIFORM, "group": "a"}]},
    "schedule": {"parts": [{**HALF_UNIFORM, "start": 0}]},
    "range": {"density": HALF_UNIFORM},
    "shift": {"density": HALF_UNIFORM, "alpha": 1.0},
}


@pytest.mark.parametrize("name", WITH_FLOOR)
def test_a_component_s_floor_is_part_of_density_and_draws(name):
    specification = Specification({"name": name, **WITH_FLOOR[name]}, timesteps=10)
    strategy = specification.build()
    alone = Specification(HALF_UNIFORM, timesteps=10).build()
    np.testing.assert_allclose(strategy.table()["p"], alone.table()["p"], atol=1e-6)
    check_density(specification, strategy, Call())


@pytest.mark.parametrize("cut", [True, False])
def test_a_range_cuts_or_rescales_a_density_with_a_floor(cut):
    density = {"name": "uniform", "end": 5, "floor": 0.5}  # 0.75 of the draws in the first half
    specification = Specification(
        {"name": "range", "density": density, "low": 0.4, "high": 0.9, "cut": cut}, timesteps=10
    )
    strategy = specification.build()
    wanted = [0, 0, 0, 0, 3, 1, 1, 1, 1, 0] if cut else [0, 0, 0, 0, 6, 6, 4, 2, 2, 0]
    np.testing.assert_allclose(strategy.table()["p"], np.array(wanted) / sum(wanted), atol=1e-6)
    check_density(specification, strategy, Call())


def test_a_range_of_a_shifted_density_with_a_floor_follows_its_density():
    shift = {"name": "shift", "density": HALF_UNIFORM, "alpha": 3.0}
    specification = Specification({"name": "range", "density": shift, "low": 0.4, "high": 0.9}, timesteps=10)
    check_density(specification, specification.build(), Call())


@pytest.mark.parametrize("name", WITH_FLOOR)
@pytest.mark.parametrize("points", ["stratified", "systematic", "sobol", "epochs"])
def test_a_component_s_points_are_rejected(name, points):
    options = WITH_FLOOR[name]
    if "parts" in options:
        options = {"parts": [{**options["parts"][0], "points": points}]}
    else:
        options = {**options, "density": {**options["density"], "points": points}}
    with pytest.raises(ConfigError, match="points") as raised:
        kairos_timesteps.Strategy(name, "linear", sampler=options)
    assert points in str(raised.value)


@pytest.mark.parametrize("name", WITH_FLOOR)
def test_a_component_s_default_points_may_be_written_out(name):
    options = WITH_FLOOR[name]
    if "parts" in options:
        options = {"parts": [{**options["parts"][0], "points": "random"}]}
    else:
        options = {**options, "density": {**options["density"], "points": "random"}}
    kairos_timesteps.Strategy(name, "linear", sampler=options)


# ---------------------------------------------------------------------------------------------------------------------
# Ways to call `draw`
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DEPENDS_ON_IMAGES)
def test_adaptive_draws_the_samples_of_an_index(name):
    whole = kairos_timesteps.Strategy(name, "linear", timesteps=20).draw(X0)
    parts = []
    for index in (torch.tensor([0, 1, 2]), range(3, 5), torch.tensor([5, 6, 7])):
        rows = X0[torch.tensor([*index])]
        parts.append(kairos_timesteps.Strategy(name, "linear", timesteps=20).draw(rows, index=index, total=8))
    torch.testing.assert_close(torch.cat([part.fractions for part in parts]), whole.fractions)
    shuffled = kairos_timesteps.Strategy(name, "linear", timesteps=20).draw(
        X0[[6, 1]], index=torch.tensor([6, 1]), total=8
    )
    torch.testing.assert_close(shuffled.fractions, whole.fractions[[6, 1]])


@pytest.mark.parametrize("name", DEPENDS_ON_IMAGES)
@pytest.mark.parametrize("importance", [False, True])
@pytest.mark.parametrize("arguments", [{"shared_time": True}, {"times": (5,)}, {"shared_time": True, "times": (5,)}])
def test_adaptive_draws_one_time_for_all_and_several_times(name, importance, arguments):
    strategy = kairos_timesteps.Strategy(name, "linear", timesteps=20, sampler={"importance": importance, "floor": 0.2})
    shape = (8, *arguments.get("times", ()))
    try:
        draw = strategy.draw(X0, **arguments)
    except ConfigError as error:
        assert any(word in str(error) for word in arguments)
        return
    assert draw.t.shape == draw.fractions.shape == draw.weights.shape == draw.importance.shape == shape
    if "shared_time" in arguments:
        assert (draw.fractions == draw.fractions[:1]).all()
    else:
        assert len(draw.fractions.unique()) > 5
    strategy.loss(draw, torch.ones(shape))
    several = pytest.raises(ConfigError, match="one time per sample") if "times" in arguments else nullcontext()
    with several, strategy.observe(draw, SmallLoop(Specification()).network):
        pass


def test_listed_times_in_turn_have_the_shape_of_the_times():
    options = {"times": [0.1, 0.4, 0.7], "in_turn": True}
    draw = kairos_timesteps.Strategy("listed", "flow", sampler=options).draw(X0, times=(8,))
    assert draw.t.shape == draw.weights.shape == (8, 8)
    assert draw.fractions.unique().tolist() == pytest.approx([0.1, 0.4, 0.7])


@pytest.mark.parametrize("times", [(), (3,), (2, 3)])
@pytest.mark.parametrize("tokens", [1024, [1024] * 8, torch.full((8,), 1024)])
@pytest.mark.parametrize("frames", [4, [4] * 8, torch.full((8,), 4)])
def test_shift_takes_frames_and_tokens_as_number_list_or_tensor(frames, tokens, times):
    options = {"law": "linear", "low": 1.0, "high": 3.0}
    draws = []
    for context in ({"frames": frames, "tokens": tokens}, {"frames": 4, "tokens": 1024}):
        strategy = kairos_timesteps.Strategy("shift", "flow", sampler=options)
        draws.append(strategy.draw(X0, times=times, **context))
    assert draws[0].t.shape == (8, *times)
    torch.testing.assert_close(draws[0].t, draws[1].t)


# ---------------------------------------------------------------------------------------------------------------------
# Gradient accumulation
# ---------------------------------------------------------------------------------------------------------------------

FOLLOWERS = {
    "loss_rms": {"start": 1, "frequency": 1},
    "loss_mean": {"start": 1, "frequency": 1},
    "info_rate": {"start": 1, "frequency": 1},
    "loss_second_moment": {"history": 1},
    "uniform+coarse_to_fine": {},
}


def train_on_known_losses(name: str, micro_batches: int, steps: int = 2) -> dict[str, Any]:
    """Return the state of a strategy after steps in micro-batches whose losses depend on the time alone."""
    strategy = kairos_timesteps.Strategy(name, "linear", timesteps=10, sampler=FOLLOWERS[name])
    for _ in range(steps):
        count = 4 // micro_batches
        for _ in range(micro_batches):
            draw = strategy.draw(X0[:count])
            strategy.loss(draw, 1 + draw.t.float())
        with strategy.observe(draw):
            pass
    return strategy.state_dict()


@pytest.mark.parametrize("name", FOLLOWERS)
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_all_micro_batches_of_a_step_are_observed(name, micro_batches):
    assert_close(train_on_known_losses(name, micro_batches), train_on_known_losses(name, 1))


@pytest.mark.parametrize("name", FOLLOWERS)
def test_micro_batches_cut_by_index_are_observed_once_each(name):
    """Each draw has `index` and `total`, as in the pipeline."""
    strategy = kairos_timesteps.Strategy(name, "linear", timesteps=10, sampler=FOLLOWERS[name])
    for _ in range(2):
        for start in range(4):
            draw = strategy.draw(X0[:1], index=range(start, start + 1), total=4)
            strategy.loss(draw, 1 + draw.t.float())
        with strategy.observe(draw):
            pass
    state, whole = strategy.state_dict(), train_on_known_losses(name, 1)
    assert_close(state["sampler"], whole["sampler"])
    assert_close(state["weighting"], whole["weighting"])


@pytest.mark.parametrize("name", FOLLOWERS)
def test_a_loss_that_is_computed_again_counts_once(name):
    strategy = kairos_timesteps.Strategy(name, "linear", timesteps=10, sampler=FOLLOWERS[name])
    for _ in range(2):
        draw = strategy.draw(X0[:4])
        for _ in range(2):
            strategy.loss(draw, 1 + draw.t.float())
        with strategy.observe(draw):
            pass
    assert_close(strategy.state_dict(), train_on_known_losses(name, 1))


def assert_close(one: Any, other: Any) -> None:
    """Assert that nested states are equal up to the order of sums."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_close(one[key], other[key])
    elif one is None or isinstance(one, str):
        assert one == other
    else:
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other))


# ---------------------------------------------------------------------------------------------------------------------
# Errors of the wrong shape
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["loss", "weighted"])
@pytest.mark.parametrize("name", ["uniform+min_snr", "uniform+edm2", "uniform+robust", "loss_rms+p2"])
@pytest.mark.parametrize("shape", [(), (1,), (8, 1), (4,), (8, 3, 4, 4), (1, 8)])
def test_errors_of_another_shape_are_rejected(method, name, shape):
    strategy = kairos_timesteps.Strategy(name, "cosine", timesteps=20)
    draw = strategy.draw(X0)
    with pytest.raises(ConfigError) as raised:
        getattr(strategy, method)(draw, torch.ones(shape))
    assert str(tuple(shape)) in str(raised.value) and "(8,)" in str(raised.value)


def test_errors_of_several_times_have_the_shape_of_the_times():
    strategy = kairos_timesteps.Strategy("uniform+min_snr", "cosine", timesteps=20)
    draw = strategy.draw(X0, times=(3,))
    assert strategy.loss(draw, torch.ones(8, 3)).shape == ()
    with pytest.raises(ConfigError) as raised:
        strategy.loss(draw, torch.ones(8))
    assert "(8, 3)" in str(raised.value)


# ---------------------------------------------------------------------------------------------------------------------
# Regression tests of faults that random specifications have found
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("process", ["linear", "vp"])
@pytest.mark.parametrize("sampler", ["uniform", "loss_rms"])
def test_the_warm_up_of_edm_weights_caps_them_in_every_draw(sampler, process):
    options = {"warmup": 4, "sigma_data": 0.5}
    strategy = kairos_timesteps.Strategy(f"{sampler}+edm", process, timesteps=20, prediction="x0", weighting=options)
    for cap in (5, 5 * 100**0.25, 50, 5 * 100**0.75, math.inf):
        assert strategy.weighting.weights(strategy.step).max() <= cap
        for arguments in ({}, {"index": torch.arange(8), "total": 8}):
            draw = strategy.draw(X0, **arguments)
            wanted = (4 + strategy.process.snr(draw.t)).clamp(max=cap)
            torch.testing.assert_close(draw.fixed_weights, wanted.float())
        strategy.loss(draw, torch.ones(8))
        with strategy.observe(draw):
            pass


@pytest.mark.parametrize("times", [(3,), (2, 3)])
def test_points_that_are_even_over_epochs_have_the_shape_of_the_times(times):
    strategy = kairos_timesteps.Strategy("uniform", "flow", sampler={"points": "epochs"})
    draw = strategy.draw(X0, times=times, item=torch.arange(8), items=8, epoch=0)
    assert draw.t.shape == (8, *times)
    cells = (draw.fractions * 8 % 8).reshape(8, -1)
    assert (cells.sort(0).values.diff(dim=0) - 1).abs().max() < 1e-6  # even over the items, at each time


@pytest.mark.parametrize("arguments", [{}, {"shared_time": True}, {"times": (3,)}])
def test_points_that_are_even_over_epochs_take_the_item_as_a_number(arguments):
    strategy, results = kairos_timesteps.Strategy("uniform", "flow", sampler={"points": "epochs"}), []
    for epoch in range(50):
        draw = strategy.draw(X0, item=3, items=8, epoch=epoch, **arguments)
        assert draw.t.shape == (8, *arguments.get("times", ()))
        results.append(draw.fractions[0])
        with strategy.observe(draw):
            pass
    assert (torch.stack(results).sort(0).values.diff(dim=0) < 3 / 50).all()  # even over the visits of the item


@pytest.mark.parametrize("weight", [-100.0, -50.0, 50.0, 100.0])
@pytest.mark.parametrize("bias", [-3.0, 0.0, 3.0])
def test_slopes_of_any_steepness_follow_their_density(weight, bias):
    specification = Specification({"name": "slope", "weight": weight, "bias": bias})
    check_density(specification, specification.build(), Call())


def test_sobol_points_with_one_time_for_a_batch_cover_the_process():
    strategy, results = kairos_timesteps.Strategy("uniform", "flow", sampler={"points": "sobol"}), []
    for _ in range(64):
        draw = strategy.draw(torch.zeros(16, 1), shared_time=True)
        results.append(draw.fractions[0])
        with strategy.observe(draw):
            pass
    even = torch.stack(results).sort().values - (torch.arange(64) + 0.5) / 64
    assert even.abs().max() < 1.5 / 64


@pytest.mark.parametrize("law", ["exponential", "linear"])
def test_a_shift_needs_two_numbers_of_tokens(law):
    with pytest.raises(ConfigError) as raised:
        kairos_timesteps.Strategy("shift", "flow", sampler={"law": law, "first": 256, "last": 256})
    assert "first" in str(raised.value) and "last" in str(raised.value) and "256" in str(raised.value)


@pytest.mark.parametrize("tokens", [4096, torch.full((8,), 4096)])
def test_a_shift_below_zero_is_rejected(tokens):
    options = {"law": "linear", "first": 256, "last": 1024, "low": 3.0, "high": 1.0}  # alpha is -7 at 4,096 tokens
    with pytest.raises(ConfigError, match="tokens"):
        kairos_timesteps.Strategy("shift", "flow", sampler=options).draw(X0, tokens=tokens)


GROUPS = [{"name": "range", "high": 0.5, "group": "a"}, {"name": "range", "low": 0.5, "group": "b"}]
GROUPED = [
    {"name": "by_group", "parts": GROUPS},
    {"name": "shift", "density": {"name": "by_group", "parts": GROUPS}},
    {"name": "mixture", "parts": [{"name": "by_group", "parts": GROUPS, "share": 1}]},
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("sampler", GROUPED)
@pytest.mark.parametrize(
    ("group", "value"),
    [
        ("c", "'c'"),
        (2, "2"),
        (-1, "-1"),
        (0.5, "0.5"),
        ([0, 1] * 3 + [0, 2], "2"),
        (["a", "b"] * 4, "a"),
        (np.array([0, 1] * 3 + [-1, 1]), "-1"),
        (torch.tensor([0, 1] * 3 + [7, 1]), "7"),
        (torch.tensor([0.0, 1.0] * 4), "float32"),
    ],
)
def test_groups_that_do_not_exist_are_rejected(sampler, device, group, value):
    """A batch on the device meta stands for one on a GPU: the groups are on the CPU."""
    strategy = kairos_timesteps.Strategy(sampler["name"], "flow", sampler=options_without_name(sampler))
    x0 = X0.to(device)
    assert strategy.draw(x0, group=[0, 1] * 4).t.shape == (8,)
    with pytest.raises(ConfigError, match=f"group: got .*{value}.*allowed: a, b, or integers from 0 to 1"):
        strategy.draw(x0, group=group)


def test_a_table_of_a_group_that_does_not_exist_is_rejected():
    strategy = kairos_timesteps.Strategy("by_group", "flow", sampler={"parts": GROUPS})
    assert strategy.table(group=1)["p"].sum() == pytest.approx(1)
    np.testing.assert_array_equal(strategy.table(group=np.int64(1))["p"], strategy.table(group="b")["p"])
    with pytest.raises(ConfigError, match="group: got 7"):
        strategy.table(group=7)


@pytest.mark.parametrize("name", [1, 0.5, True, None, ["a"]])
def test_names_of_groups_are_texts(name):
    with pytest.raises(ConfigError, match=r"group: got .*, allowed: a text"):
        kairos_timesteps.Strategy(
            "by_group", "flow", sampler={"parts": [GROUPS[0], {"name": "uniform", "group": name}]}
        )


def test_groups_as_numbers_equal_groups_by_name_with_a_floor():
    parts = [{"name": "listed", "times": [0.3], "group": "a"}, {"name": "uniform", "group": "b"}]
    options = {"floor": 0.5, "points": "sobol", "parts": parts}
    draw = kairos_timesteps.Strategy("by_group", "flow", sampler=options).draw(X0, group=torch.tensor([0, 1] * 4))
    assert draw.fractions.isfinite().all()
    draws = [
        kairos_timesteps.Strategy("by_group", "flow", sampler=options).draw(X0, group=name).fractions for name in "ab"
    ]
    torch.testing.assert_close(draw.fractions[::2], draws[0][::2])
    torch.testing.assert_close(draw.fractions[1::2], draws[1][1::2])


@pytest.mark.parametrize(
    "sampler",
    [
        {"name": "listed", "floor": 0.4},
        {"name": "range", "density": {"name": "listed"}, "low": 0.3, "high": 0.9},
        {"name": "range", "density": {"name": "listed", "floor": 0.4}, "low": 0.3, "high": 0.9},
        {"name": "range", "floor": 0.4, "density": {"name": "listed"}, "low": 0.3, "high": 0.9, "cut": False},
        {"name": "shift", "density": {"name": "listed"}},
        {"name": "shift", "floor": 0.4, "density": {"name": "listed"}},
        {"name": "mixture", "parts": [{"name": "listed", "share": 1}, {"name": "uniform", "share": 1}]},
    ],
)
def test_listed_times_in_turn_follow_the_density_or_are_rejected(sampler):
    for component in components_of(sampler):
        if component["name"] == "listed":
            component |= {"times": [0.83, 1.0, 0.0, 0.5], "in_turn": True}
    specification = Specification(sampler)
    strategy = build(specification)
    if strategy is not None:
        check_density(specification, strategy, Call())


def test_weights_that_are_all_zero_are_rejected():
    with pytest.raises(ConfigError, match="values"):
        kairos_timesteps.Strategy("table_weight", "linear", weighting={"values": [0.0, 0.0]})


@pytest.mark.parametrize("options", [{"floor": 0.85}, {"importance": True}, {"importance": True, "floor": 0.3}])
@pytest.mark.parametrize("name", DEPENDS_ON_IMAGES)
def test_adaptive_draws_follow_the_density_with_floor_and_importance_weights(name, options):
    specification = Specification({"name": name, **options}, timesteps=10)
    check_density(specification, specification.build(), Call())


def test_a_schedule_with_a_floor_draws_of_a_component_that_has_ended():
    """The ended component's share is a float32 zero, and no uniform number is divided by it, not even 0."""
    parts = [{"name": "listed", "start": 0.0, "times": [0.25]}, {"name": "uniform", "start": 2.0}]
    strategy = kairos_timesteps.Strategy("schedule", timesteps=20, sampler={"floor": 0.5, "parts": parts})
    for step in range(4):
        strategy.step, strategy._samples = step, [0, step * 64]
        fractions = strategy.draw(torch.zeros(64, 1)).fractions
        listed = (fractions == 0.25).sum()
        assert 16 <= listed <= 48 if step < 2 else listed == 0
