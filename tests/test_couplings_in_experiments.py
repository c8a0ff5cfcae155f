"""Couplings of noise with images in experiments: identities, validation errors, sweeps, exact resume."""

import numpy as np
import pytest
import torch

from kairos.data.latents import open_latents
from kairos.training.loop import train_steps
from kairos_timesteps.errors import ConfigError
from training_case import build_training, experiment, make_latents

METHODS = {
    "uniform": {},
    "usual": {"coupling": "independent"},
    "assignment": {"coupling": "assignment"},
    "nearest": {"sampler": "loss_rms", "coupling": {"name": "nearest", "k": 3}},
}


def test_the_default_coupling_may_be_left_out():
    plain = experiment(METHODS)
    assert plain["methods"]["uniform"] == plain["methods"]["usual"]
    assert plain["methods"]["nearest"]["coupling"] == {"name": "nearest", "k": 3}


def test_a_bad_option_of_a_coupling_is_rejected():
    with pytest.raises(ConfigError, match=r"methods.x.coupling.*nearest.k: got 0, allowed: integer >= 2"):
        experiment({"x": {"coupling": {"name": "nearest", "k": 0}}})


@pytest.mark.parametrize("method", ["assignment", "nearest"])
def test_a_run_with_a_coupling_resumes_exactly(method, tmp_path):
    latents = open_latents(make_latents(tmp_path))
    plain = experiment(METHODS)

    def training(name=method):
        return build_training(plain, name, 0, latents, torch.device("cpu"))

    def weights(state):
        return torch.cat([value.flatten() for value in state.model.state_dict().values()])

    whole, first, second, usual = training(), training(), training(), training("uniform")
    for state, end in ((whole, 8), (first, 5), (usual, 8)):
        list(train_steps(state, end))
    second.load_state_dict(first.state_dict(), 5)
    list(train_steps(second, 8))
    assert torch.equal(weights(second), weights(whole))
    assert not torch.equal(weights(usual), weights(whole)) and np.isfinite(weights(whole)).all()


def test_a_coupling_can_be_swept():
    plain = experiment({"near": {"grid": {"coupling.k": [2, 8]}, "coupling": "nearest"}})
    assert {name: method["coupling"]["k"] for name, method in plain["methods"].items()} == {
        "near-k=2": 2,
        "near-k=8": 8,
    }
