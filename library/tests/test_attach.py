"""attach: a strategy in a trainer by hooks on its optimizer, compared with the explicit form."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kairos_timesteps
from attached_training import COUNT, LEARNED, MASK, MEASURING, WEIGHTS, Trainer
from kairos_timesteps import attach
from kairos_timesteps.components import SAMPLERS, WEIGHTINGS
from kairos_timesteps.errors import ConfigError
from marks import mark_long
from small_loop import equal_bits
from specifications import examples, specifications

EVENTS = st.lists(
    st.sampled_from(["train", "train", "masked", "weighted", "lost", "evaluation", "skip", "step", "step", "resume"]),
    min_size=6,
    max_size=14,
)
ARGUMENTS = {
    "train": {},
    "masked": {"mask": MASK},
    "weighted": {"weights": WEIGHTS, "mask": torch.zeros(COUNT, dtype=torch.bool)},
    "lost": {"backward": False},
}


def run(specification, events, attached, build):
    """Train with a sequence of events; only the attached form validates and resumes, which must change nothing."""
    trainer = build(specification, attached)
    pending = 0
    for event in [*events, "train", "step"]:
        if event == "evaluation" and attached:
            trainer.batch(train=False)
        elif event == "resume" and attached and not pending:
            trainer = build(specification, attached).load(trainer.checkpoint(), trainer)
        elif event in ARGUMENTS:
            trainer.batch(**ARGUMENTS[event])
            pending += event != "lost"
        elif event in ("step", "skip") and pending:
            trainer.step(skipped=event == "skip")
            pending = 0
    return trainer.results()


def check_events(specification, events, late, time):
    def build(specification, attached):
        return Trainer(specification, attached, time, late)

    try:
        explicit = run(specification, events, False, build)
    except ConfigError:  # the options do not fit
        return
    results = run(specification, events, True, build)
    for key, values in explicit.items():
        assert equal_bits(results[key], values), key


def draw_time_convention(data, specification):
    """Draw one of the conventions of time of a specification's process."""
    if specification.process in ("flow", "vp"):
        return data.draw(st.sampled_from(["noise_is_one", "data_is_one"]))
    return None


@pytest.mark.parametrize("name", mark_long(sorted(SAMPLERS), [*LEARNED, "uniform", "speed", "mixture"]))
@examples(3)
@given(data=st.data())
def test_a_sampler_attached_equals_the_explicit_form(name, data):
    specification = data.draw(specifications(sampler=name, discrete=name in MEASURING))
    check_events(specification, data.draw(EVENTS), data.draw(st.booleans()), draw_time_convention(data, specification))


@pytest.mark.parametrize("name", mark_long(sorted(WEIGHTINGS), ["none", "min_snr", "coarse_to_fine", "edm2"]))
@examples(2)
@given(data=st.data())
def test_a_weighting_attached_equals_the_explicit_form(name, data):
    specification = data.draw(specifications(sampler="loss_rms", weighting=name))
    check_events(specification, data.draw(EVENTS), data.draw(st.booleans()), draw_time_convention(data, specification))


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(SAMPLERS))
@examples(40)
@given(data=st.data())
def test_a_sampler_attached_equals_the_explicit_form_in_many_combinations(name, data):
    weighting = data.draw(st.sampled_from(["none", "min_snr", "edm2", "coarse_to_fine"]))
    specification = data.draw(specifications(name, weighting, discrete=name in MEASURING))
    check_events(specification, data.draw(EVENTS), data.draw(st.booleans()), draw_time_convention(data, specification))


def test_attach_stays_a_function_when_its_module_is_imported():
    assert kairos_timesteps.attach is attach and callable(kairos_timesteps.attach)
