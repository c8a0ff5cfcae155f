"""Tests of the extension points: a component of each kind, registered here, works without a change elsewhere.

The metric, the solver and the extractor that a test registers are in test_evaluation.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from kairos.analyses import tables
from kairos.analyses.noise_levels import load_optimizer_state
from kairos.analyses.settings import (
    ANALYSES,
    AnalysisOptions,
    Reads,
    SnapshotOptions,
    analysed_snapshots,
    snapshot_table_path,
)
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
from kairos.models import WEIGHTS
from kairos.models.settings import BACKBONES, BackboneOptions
from kairos.section import field
from kairos.snapshots import open_snapshot
from kairos.training.settings import (
    AVERAGES,
    OPTIMIZERS,
    PROBES,
    SCHEDULES,
    AverageOptions,
    OptimizerOptions,
    ProbeOptions,
    ScheduleOptions,
)
from kairos_timesteps.base import Sampler, Weighting
from kairos_timesteps.components import COUPLINGS, PROCESSES, SAMPLERS, WEIGHTINGS
from kairos_timesteps.couplings import Coupling
from kairos_timesteps.diffusion.processes import Process
from kairos_timesteps.errors import ConfigError
from training_case import experiment, make_latents, train


@pytest.fixture(scope="module")
def latents(tmp_path_factory) -> Path:
    return make_latents(tmp_path_factory.mktemp("data"))


@pytest.fixture
def register_component(monkeypatch):
    """Function that registers a component of the pipeline for the duration of a test."""

    def register(components, component):
        monkeypatch.setitem(components, component.model_fields["name"].default, None)  # removed after the test
        assert components.register(component) is component

    return register


@pytest.fixture
def register_library_component(monkeypatch):
    """Function that registers a component of the library for the duration of a test."""

    def register(registry, name, component):
        monkeypatch.setitem(registry, name, None)  # removed after the test
        registry.register(name)(component)

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


def test_a_registered_sampler_and_weighting_are_used(register_library_component, latents, tmp_path):
    register_library_component(SAMPLERS, "edges", Edges)
    register_library_component(WEIGHTINGS, "ramp", Ramp)
    train(experiment({"new": {"sampler": "edges", "weighting": "ramp"}}), "new", 0, tmp_path, latents, [0, 2])
    table = (tmp_path / "snapshots" / "0000002" / "strategy.csv").read_text().splitlines()
    assert table[-1].split(",")[2:] == ["2", repr(2 * float(table[-1].split(",")[1])).removesuffix(".0")]


class Mirrored(Coupling):
    """Negates the noise."""

    def __call__(self, x0, noise, fractions, coordinates):
        return -noise


def test_a_registered_coupling_changes_loss_and_identity(register_library_component, latents, tmp_path):
    register_library_component(COUPLINGS, "mirrored", Mirrored)
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
def test_a_run_trains_on_a_registered_continuous_process(register_library_component, latents, tmp_path, method):
    register_library_component(PROCESSES, "angle", Angle)
    plain = experiment(
        {"uniform": {}, "adaptive": {"sampler": {"name": "adaptive", "frequency": 1}}}, diffusion={"process": "angle"}
    )
    train(plain, method, 0, tmp_path, latents, [0, 5])
    snapshot = open_snapshot(tmp_path / "snapshots" / "0000005")
    assert isinstance(snapshot.process, Angle)
    assert read_metrics(tmp_path)[-1]["mse"] < 3
    table = (tmp_path / "snapshots" / "0000005" / "strategy.csv").read_text().splitlines()
    assert float(table[-1].split(",")[0]) == pytest.approx(np.pi / 2 * 0.9995)


class MagnitudeOptions(LossOptions):
    """Mean square of the network's output."""

    code: ClassVar[str] = "test_seams:magnitude"

    name: str = "magnitude"


def magnitude(options, prediction):
    return per_sample(prediction.output**2)


def test_a_registered_loss_term_without_weighting_is_logged(register_component, latents, tmp_path):
    register_component(LOSSES, MagnitudeOptions)
    losses = ["mse", {"name": "magnitude", "scale": 0.5, "weighted": False}]
    plain = experiment({"p2": {"weighting": "p2"}}, diffusion={"process": {"name": "discrete"}, "losses": losses})
    train(plain, "p2", 0, tmp_path, latents, [0, 3])
    assert read_metrics(tmp_path)[-1]["magnitude"] > 0


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


class LinearOptions(BackboneOptions):
    """A backbone that scales its input."""

    code: ClassVar[str] = "test_seams:Linear"

    name: str = "linear"
    start: float = field(0.5, "initial factor", gt=0)


def test_a_registered_backbone_is_trained(register_component, latents, tmp_path):
    register_component(BACKBONES, LinearOptions)
    train(experiment({"uniform": {}}, model={"name": "linear", "start": 0.25}), "uniform", 0, tmp_path, latents, [0, 3])
    raw = open_snapshot(tmp_path / "snapshots" / "0000003", "raw").model
    assert raw.factor.item() != 0.25
    with pytest.raises(ConfigError, match=r"model.start: got 0, allowed: greater than 0 \(initial factor\)"):
        experiment(model={"name": "linear", "start": 0})


class TextUNet(Linear):
    """A backbone that is conditioned on a sequence per image."""

    def forward(self, x, t, conditions):
        assert conditions["sequence"].shape[1:] == (3, 2)
        return self.factor * x + 0 * conditions["sequence"].mean()


def null_sequence(values, description):
    return torch.full_like(values, -1)


class TextOptions(LinearOptions):
    """A backbone that is conditioned on a sequence per image."""

    code: ClassVar[str] = "test_seams:TextUNet"

    name: str = "text_unet"
    conditions: list[str] = field(["sequence"], "conditions")


def test_a_registered_condition_with_a_sequence_per_image_reaches_training_and_sampling(
    register_component, monkeypatch, tmp_path
):
    monkeypatch.setitem(CONDITIONS, "sequence", null_sequence)
    register_component(BACKBONES, TextOptions)
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
    run = tmp_path / "methods" / "text" / "seed0"
    train(plain, "uniform", 0, run, latents, [0, 2])
    description = {"kind": "sequence", "file": "conditions/sequence.npy"}
    snapshot = run / "snapshots" / "0000002"
    assert all(read_json(folder / "record.json") for folder in folders)
    images = tmp_path / "images.npz"
    assert main(["sample", "--snapshot", str(snapshot), "--out", str(images), "--num", "3", "--seed", "0"]) == 0
    assert np.load(images)["images"].shape == (3, 8, 8, 3)
    assert read_json(snapshot / "snapshot.json")["conditions"] == {"sequence": description}


class MomentumOptions(OptimizerOptions):
    """Gradient descent with momentum."""

    code: ClassVar[str] = "test_seams:descend"

    name: str = "momentum"
    momentum: float = field(0.5, "decay rate of the momentum", ge=0, lt=1)


def descend(options, parameters):
    return torch.optim.SGD(parameters, lr=options.lr, momentum=options.momentum)


class StopOptions(ScheduleOptions):
    """Constant learning rate that ends."""

    code: ClassVar[str] = "test_seams:stop"

    name: str = "stop"
    after: int = field(1, "steps with the full learning rate", ge=1)


def stop(options, step, length):
    return float(step < options.after)


class LatestOptions(AverageOptions):
    """The weights themselves."""

    code: ClassVar[str] = "test_seams:keep_nothing"

    name: str = "latest"


def keep_nothing(options, step, batch_size):
    return 0.0


def test_a_registered_optimizer_schedule_and_average_are_used(register_component, latents, tmp_path):
    register_component(OPTIMIZERS, MomentumOptions)
    register_component(SCHEDULES, StopOptions)
    register_component(AVERAGES, LatestOptions)
    plain = experiment({"uniform": {}})
    plain["training"] |= {"optimizer": "momentum", "schedule": {"name": "stop", "after": 2}, "ema": "latest"}
    plain = validate(plain).plain()
    assert plain["training"]["optimizer"]["momentum"] == 0.5
    train(plain, "uniform", 0, tmp_path, latents, [0, 2, 4])
    milestones = [tmp_path / "snapshots" / f"{step:07d}" for step in (0, 2, 4)]
    raw = [(folder / "raw" / WEIGHTS).read_bytes() for folder in milestones]
    assert raw[0] != raw[1] == raw[2]
    assert [(folder / "ema" / WEIGHTS).read_bytes() for folder in milestones] == raw
    optimizer = load_optimizer_state(milestones[-1], open_snapshot(milestones[-1]), torch.device("cpu"))
    assert set(optimizer["state"][0]) == {"momentum_buffer"}


class WeightNormOptions(SnapshotOptions):
    """Norm of the weights of a snapshot."""

    code: ClassVar[str] = "test_seams:measure_norm"
    title: ClassVar[str] = "Norm of the weights"

    name: str = "weight_norm"


def measure_norm(options, folder, latents, device):
    weights = open_snapshot(folder).model.weights().values()
    return [{"images": options.images, "norm": float(sum(values.square().sum() for values in weights) ** 0.5)}]


class SeedsOptions(AnalysisOptions):
    """Seeds of an experiment."""

    code: ClassVar[str] = "test_seams:list_seeds"
    title: ClassVar[str] = "Seeds"
    reads: ClassVar[Reads] = "nothing"

    name: str = "seeds"


def list_seeds(options, experiment, results):
    return [{"seed": seed} for seed in experiment.seeds]


def test_the_tables_of_registered_analyses_are_written(register_component, latents, tmp_path):
    register_component(ANALYSES, WeightNormOptions)
    register_component(ANALYSES, SeedsOptions)
    config = validate(
        experiment({"uniform": {}}, analyses=[{"name": "weight_norm", "images": 2, "milestones": [20]}, "seeds"])
    )
    train(config.plain(), "uniform", 0, tmp_path / "methods/uniform/seed0", latents, [0, 20])
    weight_norm, seeds = config.analyses
    for _, _, step in analysed_snapshots(weight_norm, config):
        snapshot = tmp_path / f"methods/uniform/seed0/snapshots/{step:07d}"
        out = Path(snapshot_table_path(tmp_path, "weight_norm", "uniform", 0, step))
        tables.measure_snapshot(weight_norm, snapshot, latents, out, torch.device("cpu"))
    (row,) = tables.build_table(weight_norm, config, tmp_path).to_dict("records")
    assert (row["step"], row["images"]) == (20, 2) and row["norm"] > 0
    assert tables.build_table(seeds, config, tmp_path)["seed"].tolist() == list(config.seeds)


class GradientSizeOptions(ProbeOptions):
    """Largest gradient of a step."""

    code: ClassVar[str] = "test_seams:gradient_size"

    name: str = "gradient_size"


def test_a_probe_changes_nothing_but_the_log(register_component, latents, tmp_path):
    register_component(PROBES, GradientSizeOptions)
    probed = experiment({"uniform": {}}, training__probes=["gradient_size"])
    first = train(probed, "uniform", 0, tmp_path / "a", latents, [0, 4])
    second = train(experiment({"uniform": {}}), "uniform", 0, tmp_path / "b", latents, [0, 4])
    assert all(line["gradient_size"]["largest"] > 0 for line in read_metrics(tmp_path / "a"))
    weights = [tmp_path / run / "snapshots" / "0000004" / "raw" for run in "ab"]
    assert (weights[0] / WEIGHTS).read_bytes() == (weights[1] / WEIGHTS).read_bytes()
    assert first["identity"] != second["identity"]  # its code runs in the training, so it belongs to the code


def gradient_size(options):
    def measure(training, draw, computed):
        assert draw.weights.shape == computed.terms["mse"].shape == (16,)
        return {"largest": max(p.grad.abs().max().item() for p in training.model.parameters() if p.grad is not None)}

    return measure
