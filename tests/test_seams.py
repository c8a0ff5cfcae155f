"""Tests of the extension points: a component of each kind, registered here, works without a change elsewhere."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from kairos.autoencoders.codec import load_codec
from kairos.autoencoders.encode import encode
from kairos.autoencoders.train_or_load import make_autoencoder
from kairos.cli import main
from kairos.conditions import CONDITIONS
from kairos.config import validate
from kairos.data.dataset import open_dataset
from kairos.data.prepare import write_dataset
from kairos.data.sources import open_source
from kairos.files import read_json
from kairos.losses.settings import LOSSES, LossOptions
from kairos.losses.terms import per_sample
from kairos.milestones import open_milestone
from kairos.models.settings import BACKBONES
from kairos.training.settings import PROBES
from kairos_timesteps.base import Sampler, Weighting
from kairos_timesteps.components import COUPLINGS, SAMPLERS, WEIGHTINGS
from kairos_timesteps.couplings import Coupling
from kairos_timesteps.diffusion.processes import Process
from kairos_timesteps.diffusion.registries import PROCESSES
from kairos_timesteps.options import Options, option
from training_case import experiment, make_latents, train


@pytest.fixture(scope="module")
def latents(tmp_path_factory) -> Path:
    return make_latents(tmp_path_factory.mktemp("data"))


@pytest.fixture
def register_component(monkeypatch):
    """Function that registers a component for the duration of a test."""

    def register(registry, name, attribute, options=None):
        monkeypatch.setitem(registry, name, None)
        registry.add(name, f"test_seams:{attribute}", *([options] if options else []))

    return register


def read_metrics(out: Path) -> list[dict]:
    """Return the metrics of each logged step of a training run."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


class Edges(Sampler):
    """Draws the two ends of the process with probability 1/2 each."""

    def cdf(self, u, **context):
        return 0.5 * (u > 0) + 0.5 * (u >= 1)

    def quantile(self, p, **context):
        return 1.0 * (p >= 0.5)


class Ramp(Weighting):
    def weights(self, step=0):
        return np.linspace(0, 2, self.schedule.timesteps)


def test_a_registered_sampler_and_weighting_are_used(register_component, latents, tmp_path):
    register_component(SAMPLERS, "edges", "Edges")
    register_component(WEIGHTINGS, "ramp", "Ramp")
    train(experiment({"new": {"sampler": "edges", "weighting": "ramp"}}), "new", 0, tmp_path, latents, [0, 2])
    table = (tmp_path / "milestones" / "0000002" / "strategy.csv").read_text().splitlines()
    assert table[-1].split(",")[2:] == ["2", repr(2 * float(table[-1].split(",")[1])).removesuffix(".0")]


class Mirrored(Coupling):
    """Negates the noise."""

    def __call__(self, x0, noise, fractions, coordinates):
        return -noise


def test_a_registered_coupling_changes_loss_and_identity(register_component, latents, tmp_path):
    register_component(COUPLINGS, "mirrored", "Mirrored")
    plain = experiment({"new": {"coupling": "mirrored"}, "uniform": {}})
    identities = {train(plain, name, 0, tmp_path / name, latents, [0, 3])["identity"] for name in ("new", "uniform")}
    first, second = (read_metrics(tmp_path / name)[-1]["mse"] for name in ("new", "uniform"))
    assert first != second and len(identities) == 2


class Angle(Process):
    """A continuous process: x_t = cos(u) x0 + sin(u) noise, u up to a right angle; the network predicts v."""

    prediction, time_symbol = "v", "angle"

    def __init__(self, options, prediction):
        assert prediction is None

    def times(self, fractions):
        return (fractions * np.pi / 2).clip(1e-4, np.pi / 2 - 1e-4)

    def fractions(self, t):
        return t / (np.pi / 2)

    def coefficients(self, t):
        return (np.cos(t), np.sin(t)) if isinstance(t, np.ndarray) else (t.cos(), t.sin())

    def embedded(self, t):
        return 600 * t


@pytest.mark.parametrize("method", ["uniform", "adaptive"])
def test_a_run_trains_on_a_registered_continuous_process(register_component, latents, tmp_path, method):
    register_component(PROCESSES, "angle", "Angle")
    plain = experiment(
        {"uniform": {}, "adaptive": {"sampler": {"name": "adaptive", "frequency": 1}}}, diffusion={"process": "angle"}
    )
    train(plain, method, 0, tmp_path, latents, [0, 5])
    milestone = open_milestone(tmp_path / "milestones" / "0000005")
    assert isinstance(milestone.process, Angle)
    assert read_metrics(tmp_path)[-1]["mse"] < 3
    table = (tmp_path / "milestones" / "0000005" / "strategy.csv").read_text().splitlines()
    assert float(table[-1].split(",")[0]) == pytest.approx(np.pi / 2 * 0.9995)


def test_a_registered_loss_term_without_weighting_is_logged(register_component, latents, tmp_path):
    register_component(LOSSES, "magnitude", "magnitude", LossOptions)
    losses = ["mse", {"name": "magnitude", "scale": 0.5, "weighted": False}]
    plain = experiment({"p2": {"weighting": "p2"}}, diffusion={"process": {"name": "discrete"}, "losses": losses})
    train(plain, "p2", 0, tmp_path, latents, [0, 3])
    assert read_metrics(tmp_path)[-1]["magnitude"] > 0


def magnitude(options, prediction):
    return per_sample(prediction.output**2)


class Linear(nn.Module):
    """A backbone that scales its input."""

    def __init__(self, options, shape, conditions, outputs):
        super().__init__()
        self.factor = nn.Parameter(torch.full((), options.start))

    def forward(self, x, t, conditions):
        return self.factor * x

    def config(self):
        return {"_class_name": "Linear"}

    def weights(self):
        return dict(self.state_dict())

    def load_weights(self, weights):
        self.load_state_dict(weights)


class LinearOptions(Options):
    start: float = option(0.5, "initial factor", gt=0)


def test_a_registered_backbone_is_trained(register_component, latents, tmp_path):
    register_component(BACKBONES, "linear", "Linear", LinearOptions)
    train(experiment({"uniform": {}}, model={"name": "linear", "start": 0.25}), "uniform", 0, tmp_path, latents, [0, 3])
    raw = open_milestone(tmp_path / "milestones" / "0000003", "raw").model
    assert raw.factor.item() != 0.25


class TextUNet(Linear):
    """A backbone that is conditioned on a sequence per image."""

    def forward(self, x, t, conditions):
        assert conditions["sequence"].shape[1:] == (3, 2)
        return self.factor * x + 0 * conditions["sequence"].mean()


def null_sequence(values, description):
    return torch.full_like(values, -1)


class TextOptions(LinearOptions):
    conditions: list[str] = option(["sequence"], "conditions")


def test_a_registered_condition_with_a_sequence_per_image_reaches_training_and_sampling(
    register_component, monkeypatch, tmp_path
):
    monkeypatch.setitem(CONDITIONS, "sequence", null_sequence)
    register_component(BACKBONES, "text_unet", "TextUNet", TextOptions)
    plain = experiment({"uniform": {}}, model={"name": "text_unet"}, training__condition_dropout=0.5)
    config = validate(plain)
    digits = open_source(config.dataset)
    tokens = np.zeros((digits.count, 3, 2), np.float32)
    folders = dataset, autoencoder, latents = [tmp_path / name for name in ("dataset", "autoencoder", "latents")]
    write_dataset(
        config.dataset, replace(digits, other_conditions={"sequence": ({"kind": "sequence"}, tokens)}), dataset
    )
    make_autoencoder(config.autoencoder, open_dataset(dataset), autoencoder, torch.device("cpu"), False)
    encode(open_dataset(dataset), load_codec(autoencoder, "cpu"), latents, False, 64)
    run = tmp_path / "text" / "seed0"
    train(plain, "uniform", 0, run, latents, [0, 2])
    description = {"kind": "sequence", "file": "conditions/sequence.npy"}
    milestone = run / "milestones" / "0000002"
    assert all(read_json(folder / "manifest.json") for folder in folders)
    images = tmp_path / "images.npz"
    assert main(["sample", "--milestone", str(milestone), "--out", str(images), "--num", "3", "--seed", "0"]) == 0
    assert np.load(images)["images"].shape == (3, 8, 8, 3)
    assert read_json(milestone / "milestone.json")["conditions"] == {"sequence": description}


def test_a_probe_changes_nothing_but_the_log(register_component, latents, tmp_path):
    register_component(PROBES, "gradient_size", "gradient_size")
    probed = experiment({"uniform": {}}, training__probes=["gradient_size"])
    first = train(probed, "uniform", 0, tmp_path / "a", latents, [0, 4])
    second = train(experiment({"uniform": {}}), "uniform", 0, tmp_path / "b", latents, [0, 4])
    assert all(line["gradient_size"]["largest"] > 0 for line in read_metrics(tmp_path / "a"))
    weights = [tmp_path / run / "milestones" / "0000004" / "raw" for run in "ab"]
    name = "diffusion_pytorch_model.safetensors"
    assert (weights[0] / name).read_bytes() == (weights[1] / name).read_bytes()
    assert first["identity"] != second["identity"]  # its code runs in the training, so the fingerprint covers it


def gradient_size(options):
    def measure(training, draw, computed):
        assert draw.weights.shape == computed.terms["mse"].shape == (16,)
        return {"largest": max(p.grad.abs().max().item() for p in training.model.parameters() if p.grad is not None)}

    return measure
