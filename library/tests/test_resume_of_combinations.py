"""A run that resumes at a random step equals an uninterrupted one, for random strategy specifications."""

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from kairos_timesteps.components import SAMPLERS, WEIGHTINGS
from kairos_timesteps.errors import ConfigError
from small_loop import SmallLoop, equal_bits
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
    """The density then keeps its previous value, which cannot be derived from the measured values."""
    check_resume(Specification({"name": name, "bins": 2, "frequency": 1, "decay": 0.0, "start": 1}), interrupted)
