"""Learning-rate schedules and averages of weights: values of their formulas, and rejected options."""

import math

import numpy as np
import pytest
import torch

from kairos.files import read_json
from kairos.training import optim
from kairos.training.settings import AVERAGES, SCHEDULES
from kairos_timesteps.errors import KairosError
from training_case import experiment, hashes, make_latents, train


def compute_factor(name, step, length=0, **options):
    return SCHEDULES.select({"name": name, **options}).build(step, length)


def compute_decay(name, step, batch_size=1, **options):
    return AVERAGES.select({"name": name, **options}).build(step, batch_size)


def test_schedules_equal_their_formulas():
    assert [compute_factor("constant", step) for step in (0, 10**6)] == [1, 1]
    assert [compute_factor("cosine", step, 100) for step in (0, 50, 100, 200)] == pytest.approx([1, 0.5, 0, 0])
    assert compute_factor("cosine", 100, 100, final=0.1) == pytest.approx(0.1)
    assert [compute_factor("inverse_sqrt", step, reference=100) for step in (0, 100, 400)] == pytest.approx([1, 1, 0.5])


def test_the_rate_decays_before_each_evaluated_step():
    rates = [
        compute_factor("decays", step, at=[100, 200], share=0.2)
        for step in (0, 80, 90, 99, 100, 160, 180, 199, 200, 900)
    ]
    assert rates == pytest.approx([1, 1, 0.5, 0.05, 1, 1, 0.5, 0.025, 1, 1])
    for wrong in ([], [0, 5], [5, 5], [6, 5]):
        with pytest.raises(KairosError, match=r"training.schedule.at: got .*, allowed: steps, 1 or more, increasing"):
            experiment(training__schedule={"name": "decays", "at": wrong})


def test_half_life_counts_images_and_grows_with_them():
    assert compute_decay("half_life", 10**6, 64, images=6400.0, rampup=None) ** 100 == pytest.approx(0.5)
    assert compute_decay("half_life", 10, 64, images=1e9, rampup=0.05) == pytest.approx(0.5 ** (1 / (10 * 0.05)))


@pytest.mark.parametrize("width", [0.05, 0.1, 0.2])
def test_the_profile_of_the_power_function_has_the_requested_width(width):
    """The width is the standard deviation of the profile relative to the length of the run (Karras et al. 2024)."""
    steps = 4000
    weights, left = np.empty(steps), 1.0
    for step in reversed(range(steps)):
        beta = compute_decay("power", step, width=width)
        weights[step], left = left * (1 - beta), left * beta
    t = (np.arange(steps) + 1) / steps
    mean = (weights * t).sum()
    assert weights.sum() == pytest.approx(1) and left == 0  # the initial weights have no share
    assert math.sqrt((weights * (t - mean) ** 2).sum()) == pytest.approx(width, rel=5e-3)


def test_an_average_copies_integers():
    live = {"w": torch.zeros(2), "count": torch.tensor(3)}
    average = optim.Average(live, lambda step: 0.75)
    live["w"] += 1
    live["count"] += 1
    average.update(0)
    assert average.weights["w"].tolist() == [0.25, 0.25] and average.weights["count"].item() == 4


@pytest.fixture(scope="module")
def latents(tmp_path_factory):
    return make_latents(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("milestones", [[20], [20, 80]])
def test_a_cosine_ends_at_the_last_milestone_after_other_milestones_too(latents, tmp_path, milestones):
    first = experiment({"uniform": {}}, training__schedule="cosine", training__milestones=[20, 40])
    changed = experiment({"uniform": {}}, training__schedule="cosine", training__milestones=milestones)
    train(first, "uniform", 0, tmp_path / "extended", latents, [20, 40])
    for name in ("extended", "fresh"):
        assert train(changed, "uniform", 0, tmp_path / name, latents, milestones)["steps_run"] == milestones[-1]
    records = [read_json(tmp_path / name / "training.json") for name in ("extended", "fresh")]
    assert records[0]["identity"] == records[1]["identity"]
    assert hashes(tmp_path / "extended") == hashes(tmp_path / "fresh")


def test_a_schedule_with_a_length_continues_to_a_later_milestone(latents, tmp_path):
    schedule = {"name": "cosine", "length": 80}
    for milestones in ([20], [20, 40]):
        plain = experiment({"uniform": {}}, training__schedule=schedule, training__milestones=milestones)
        assert train(plain, "uniform", 0, tmp_path, latents, milestones)["steps_run"] == 20


def test_the_logging_interval_changes_no_result(latents, tmp_path):
    for every in (1, 7):
        plain = experiment({"edm2": {"sampler": "loss_rms", "weighting": "edm2"}}, training__log_every=every)
        train(plain, "edm2", 0, tmp_path / str(every), latents, [0, 21])
    seldom, often = ((tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("7", "1"))
    assert seldom == often[6::7]
    parts = [read_json(tmp_path / name / "training.json")["components"] for name in ("1", "7")]
    assert {**parts[0], "metrics": None} == {**parts[1], "metrics": None}
