"""Every method of both papers trains in the pipeline, and resumes exactly."""

import csv
import json
from pathlib import Path

import pytest

from kairos.config import load
from kairos.diffusion import MethodConfig
from kairos_timesteps.components import SAMPLERS, WEIGHTINGS
from marks import mark_long
from training_case import experiment, make_latents, train

PAPERS = load(Path(__file__).parents[1] / "experiments" / "digits_all_methods.yaml").methods
# samplers and weightings of other trainers, which the experiment does not compare: each sampler with a weighting
OTHER_SAMPLERS = sorted(set(SAMPLERS) - {method.sampler.name for method in PAPERS.values()})
OTHER_WEIGHTINGS = sorted(set(WEIGHTINGS) - {method.weighting.name for method in PAPERS.values()})
OTHERS = {
    sampler: MethodConfig(sampler=sampler, weighting=OTHER_WEIGHTINGS[number % len(OTHER_WEIGHTINGS)])
    for number, sampler in enumerate(OTHER_SAMPLERS)
}
METHODS = {**PAPERS, **OTHERS}
QUICK = ["uniform", "adaptive", "speed", "min_snr", "gradient_norm", "loss_second_moment"]


@pytest.fixture(scope="module")
def latents(tmp_path_factory) -> Path:
    return make_latents(tmp_path_factory.mktemp("data"))


def test_the_methods_contain_every_sampler_and_every_weighting():
    assert {method.sampler.name for method in METHODS.values()} == set(SAMPLERS)
    assert {method.weighting.name for method in METHODS.values()} == set(WEIGHTINGS)


@pytest.mark.parametrize("name", mark_long(METHODS, QUICK))
def test_a_method_trains_and_resumes_exactly(name, latents, tmp_path):
    method = METHODS[name].model_dump(mode="json")
    changes = {"frequency": 2, "start": 1, "length": 8, "history": 1}
    method["sampler"] |= {key: value for key, value in changes.items() if key in method["sampler"]}
    plain = experiment({name: method}, diffusion__prediction="v", training__checkpoint_every=3)
    whole = train(plain, name, 0, tmp_path / "whole", latents, [7])
    train(plain, name, 0, tmp_path / "parts", latents, [4])
    parts = train(plain, name, 0, tmp_path / "parts", latents, [7])
    assert (whole["steps_run"], parts["steps_run"]) == (7, 3)
    records = [json.loads((tmp_path / run / "training.json").read_text()) for run in ("whole", "parts")]
    assert records[0]["components"] == records[1]["components"]
    with open(tmp_path / "whole" / "snapshots" / "0000007" / "strategy.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert sum(float(row["p"]) for row in rows) == pytest.approx(1)
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    if SAMPLERS[method["sampler"]["name"]].code.split(":")[0].endswith(("adaptive", "official", "gradients")):
        assert lines[-1]["sampler"]["updates"] >= 1
