"""A run that resumes at a random step equals an uninterrupted one, for random strategy specifications."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from kairos_timesteps import Strategy
from kairos_timesteps.base import Learned
from kairos_timesteps.components import SAMPLERS, WEIGHTINGS
from kairos_timesteps.errors import ConfigError
from small_loop import IMAGES, SmallLoop, equal_bits
from specifications import Specification, examples, specifications

STEPS = 7
LONGER = {"coarse_to_fine": 104}  # steps until the weighting has learned: it first changes at step 100


def check_resume(specification: Specification, interrupted: int, micro_batches: int = 1, times: int = 0) -> None:
    """Check that draws, weights, parameters and state after a resume at step `interrupted` equal those without it."""
    steps = STEPS + LONGER.get(specification.weighting["name"], 0)
    try:
        whole = SmallLoop(specification, micro_batches, times)
    except ConfigError:
        event("rejected when it is built")
        return
    for _ in range(steps - STEPS + interrupted):
        whole.step()
    resumed = SmallLoop(specification, micro_batches, times)
    resumed.load(whole.save())
    for step in range(interrupted, STEPS):
        draws, again = whole.step(), resumed.step()
        assert equal_bits(draws, again), f"draws of step {step} differ after a resume at {interrupted}"
    assert equal_bits(whole.state(), resumed.state()), f"state differs after a resume at {interrupted}"


interruptions = st.integers(1, STEPS - 1)
micro_batches = st.sampled_from([1, 1, 2, 4])


@pytest.mark.parametrize("name", sorted(SAMPLERS))
@examples(3)
@given(data=st.data())
def test_a_sampler_resumes_exactly(name, data):
    check_resume(data.draw(specifications(sampler=name)), data.draw(interruptions), data.draw(micro_batches))


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(SAMPLERS))
@examples(30)
@given(data=st.data())
def test_a_sampler_resumes_exactly_in_many_combinations(name, data):
    check_resume(data.draw(specifications(sampler=name)), data.draw(interruptions), data.draw(micro_batches))


@pytest.mark.parametrize("name", sorted(WEIGHTINGS))
@examples(2)
@given(data=st.data())
def test_a_weighting_resumes_exactly(name, data):
    check_resume(data.draw(specifications(weighting=name)), data.draw(interruptions), data.draw(micro_batches))


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(WEIGHTINGS))
@examples(20)
@given(data=st.data())
def test_a_weighting_resumes_exactly_in_many_combinations(name, data):
    check_resume(data.draw(specifications(weighting=name)), data.draw(interruptions), data.draw(micro_batches))


MEASURING = ("gradient_norm", "first_order", "gradient_variance", "auto")


@pytest.mark.parametrize("name", MEASURING)
@pytest.mark.parametrize("interrupted", [1, 4])
def test_samplers_that_measure_with_learned_weights_resume_exactly(name, interrupted):
    options = {} if name == "auto" else {"frequency": 1, "start": 1, "bins": 4}
    check_resume(Specification({"name": name, **options}, {"name": "edm2", "lr": 0.1, "channels": 8}), interrupted)


@pytest.mark.parametrize("sampler", ["loss_rms", "loss_mean", "info_rate", "loss_second_moment"])
def test_samplers_that_follow_losses_at_several_times_resume_exactly(sampler):
    options = {"history": 1} if sampler == "loss_second_moment" else {"frequency": 1, "start": 1}
    check_resume(Specification({"name": sampler, **options}, timesteps=10), interrupted=3, times=3)


@pytest.mark.parametrize("interrupted", range(1, STEPS))
@pytest.mark.parametrize("name", ["gradient_variance", "first_order"])
def test_a_sampler_resumes_exactly_if_no_measured_value_is_positive(name, interrupted):
    """The density is then the prior."""
    check_resume(Specification({"name": name, "bins": 2, "frequency": 1, "decay": 0.0, "start": 1}), interrupted)


LEARNED = sorted(
    {name for name, entry in [*SAMPLERS.items(), *WEIGHTINGS.items()] if issubclass(entry.component, Learned)}
)


def small_loop(name, seed=0):
    """Return a loop whose strategy learns in its first steps."""
    declared = SAMPLERS[name].component.options if name in SAMPLERS else {}
    options = {"frequency": 1, "start": 1, "feature_timesteps": 5, "bins": 4, "min_count": 1, "history": 1}
    loop = SmallLoop(Specification({"name": "uniform"}, {"name": "none"}))
    sampler = {key: value for key, value in options.items() if key in declared}
    loop.strategy = Strategy(name, "cosine", timesteps=20, sampler=sampler, seed=seed)
    return loop


@pytest.mark.parametrize("name", LEARNED)
def test_states_share_no_memory_with_the_strategy(name):
    loop, other = small_loop(name), small_loop(name)
    for _ in range(4):
        loop.step()
    state = loop.strategy.state_dict()
    saved = copy.deepcopy(state)
    other.strategy.load_state_dict(state)
    for _ in range(4):
        loop.step()
        other.step()
    assert equal_bits(state, saved) and not equal_bits(loop.strategy.state_dict(), saved)


@pytest.mark.parametrize("name", LEARNED)
def test_an_initial_state_resets_what_was_learned(name):
    loop = small_loop(name)
    initial = loop.strategy.state_dict()
    before = loop.strategy.table(IMAGES)
    for _ in range(6):
        loop.step()
    loop.strategy.load_state_dict(initial)
    after = loop.strategy.table(IMAGES)
    assert all(np.array_equal(before[column], after[column]) for column in before)
    assert equal_bits(loop.strategy.state_dict(), initial)


@pytest.mark.parametrize(
    ("setting", "other"),
    [
        ("sampler", Strategy("uniform+min_snr", timesteps=100, seed=3)),
        ("weighting", Strategy("speed+p2", timesteps=100, seed=3)),
        ("coupling", Strategy("speed+min_snr", timesteps=100, seed=3, coupling={"name": "nearest", "k": 2})),
        ("sampler options", Strategy("speed+min_snr", timesteps=100, seed=3, sampler={"k": 2})),
        ("weighting options", Strategy("speed+min_snr", timesteps=100, seed=3, weighting={"gamma": 1})),
        ("seed", Strategy("speed+min_snr", timesteps=100)),
        ("timesteps", Strategy("speed+min_snr", timesteps=1000, seed=3)),
        ("prediction", Strategy("speed+min_snr", timesteps=100, seed=3, prediction="v")),
        ("log_snr", Strategy("speed+min_snr", "cosine", timesteps=100, seed=3)),
    ],
)
def test_a_state_of_another_strategy_is_rejected_and_changes_nothing(setting, other):
    strategy = Strategy("speed+min_snr", timesteps=100, seed=3)
    with strategy.observe(strategy.draw(IMAGES)):
        pass
    before = other.state_dict()
    with pytest.raises(ConfigError, match=f"state: {setting}: got "):
        other.load_state_dict(strategy.state_dict())
    assert equal_bits(other.state_dict(), before)
    without_settings = {key: value for key, value in strategy.state_dict().items() if key != "settings"}
    other.load_state_dict(without_settings)  # as saved by earlier versions
    assert other.step == 1


def test_a_repeated_step_draws_the_same_after_changes_in_place():
    strategy = Strategy("uniform+min_snr")
    state, draw = strategy.state_dict(), strategy.draw(IMAGES)
    t, weights = draw.t.clone(), draw.weights.clone()
    draw.t.mul_(1000)
    draw.weights.zero_()
    strategy.load_state_dict(state)
    again = strategy.draw(IMAGES)
    assert equal_bits(again.t, t) and equal_bits(again.weights, weights)


def test_a_load_drops_the_gradient_of_the_learned_uncertainty():
    strategy = Strategy("edm2")
    state = strategy.state_dict()
    strategy.loss(strategy.draw(IMAGES), torch.ones(len(IMAGES))).backward()
    strategy.load_state_dict(state)
    with strategy.observe(strategy.draw(IMAGES)):
        pass
    assert equal_bits(strategy.state_dict()["weighting"], state["weighting"])
