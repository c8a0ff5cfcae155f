"""Published processes, losses and ramps have their check values, and training runs use MDT's second forward pass."""

import json
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import kairos_timesteps
import rank_groups
from components_by_name import make_weighting
from kairos.cli import main
from kairos.config import validate
from kairos.costs import estimate as costs
from kairos.forward_process import build_process, scheduler_config
from kairos.library_components import LibraryComponent
from kairos.losses import terms as losses
from kairos.losses.settings import MseOptions, VbOptions
from kairos.models.settings import BACKBONES, BackboneOptions
from kairos.section import field
from kairos.snapshots import open_snapshot
from kairos.training.settings import AVERAGES
from kairos_timesteps.components import PROCESSES
from kairos_timesteps.errors import ConfigError
from marks import mark_long
from training_case import (
    build_training,
    difference,
    experiment,
    hashes,
    make_latents,
    train,
    train_command,
    write_experiment,
)

LEARNED = {"name": "discrete", "timesteps": 100, "variance": "learned_range"}
MASKED = {"process": LEARNED, "losses": ["mse", "vb", "masked_mse", "masked_vb"]}


@pytest.fixture(scope="module")
def latents(tmp_path_factory) -> Path:
    return make_latents(tmp_path_factory.mktemp("data"))


def make_process(name="discrete", prediction="epsilon", **options):
    options = {"sigma_data": 0.5, **options} if name in ("edm", "fdm") else options
    return build_process(LibraryComponent.select(PROCESSES, {"name": name, **options}), prediction)


# Schedules and inputs of the network


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.9999, 0.895142, 0.0777966, 4.03583e-5]),
        (
            {"schedule": "scaled_linear", "beta_start": 0.0015, "beta_end": 0.0195},
            [0.9985, 0.823117, 0.114922, 1.42304e-4],
        ),
        ({"schedule": "scaled_linear"}, [0.99915, 0.894223, 0.276333, 0.0046601]),
        ({"beta_start": 1e-4, "beta_end": 0.02}, [0.9999, 0.895142, 0.0777966, 4.03583e-5]),
    ],
)  # fmt: skip
def test_schedules_have_the_published_values(options, expected, recwarn):
    schedule = make_process(**options).schedule
    assert schedule.alphas_cumprod[[0, 100, 500, 999]] == pytest.approx(expected, rel=2e-6)
    assert not recwarn


def test_scaled_linear_equals_diffusers():
    from diffusers import DDPMScheduler

    reference = DDPMScheduler(1000, beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
    np.testing.assert_allclose(
        make_process(schedule="scaled_linear").schedule.betas, reference.betas.numpy(), rtol=1e-6
    )


@pytest.mark.parametrize("first", [0, 1])
def test_the_network_receives_indices_from_first_index(first):
    process, seen = make_process(first_index=first), []
    process.predict(lambda x, t: seen.append(t) or x, torch.zeros(2, 4, 2, 2), torch.tensor([0, 999]))
    assert seen[0].tolist() == [first, 999 + first] and seen[0].dtype == torch.int64
    assert (scheduler_config(process, False) is None) == bool(first)


# Learned variance


def make_prediction(t, process, output=None):
    x0, noise = torch.linspace(-1, 1, 16).view(1, 4, 2, 2), torch.linspace(1, -1, 16).view(1, 4, 2, 2)
    if output is None:
        output = torch.cat([torch.full_like(x0, 0.1), torch.full_like(x0, 0.2)], 1)
    t = torch.tensor([t])
    return losses.Prediction(process, x0, noise, t, process.noised(x0, noise, t), output)


@pytest.mark.parametrize(("t", "expected"), [(0, 1.8336), (1, 0.278381), (500, 0.00308354), (999, 0.00570884)])
def test_vb_has_the_published_values(t, expected):
    prediction = make_prediction(t, make_process(variance="learned_range"))
    assert losses.mse(MseOptions(), prediction).item() == pytest.approx(0.387778, abs=1e-6)
    assert losses.vb(VbOptions(), prediction).item() == pytest.approx(expected, rel=3e-5)


def test_vb_does_not_depend_on_the_prediction_type():
    values = []
    for prediction_type in ("epsilon", "x0", "v"):
        process = make_process(prediction=prediction_type, variance="learned_range")
        prediction = make_prediction(500, process)
        epsilon = torch.full_like(prediction.x0, 0.1)
        x0 = make_process().estimate(epsilon, prediction.x_t, prediction.t)
        a, s = process._shaped_coefficients(prediction.t, x0)
        network_mean = {"epsilon": epsilon, "x0": x0, "v": a * epsilon - s * x0}[prediction_type]
        output = torch.cat([network_mean, torch.full_like(network_mean, 0.2)], 1)
        values.append(losses.vb(VbOptions(), make_prediction(500, process, output)).item())
    assert values == pytest.approx([0.00308354] * 3, rel=1e-4)


@pytest.mark.parametrize("t", [0, 1, 500, 999])
def test_vb_has_gradients_for_the_variance_only(t):
    output = torch.randn(1, 8, 2, 2, generator=torch.Generator().manual_seed(t)).requires_grad_()
    losses.vb(VbOptions(), make_prediction(t, make_process(variance="learned_range"), output)).sum().backward()
    assert output.grad[:, :4].abs().max() == 0 < output.grad[:, 4:].abs().min()
    assert output.grad.isfinite().all()


def test_vb_equals_torchs_kl_divergence():
    from torch.distributions import Normal, kl_divergence

    process, t = make_process(variance="learned_range"), 37
    prediction, schedule = make_prediction(t, process), process.schedule
    beta, bar, before = schedule.betas[t], schedule.alphas_cumprod[t], schedule.alphas_cumprod[t - 1]
    mean = lambda x0: (  # noqa: E731
        np.sqrt(before) * beta / (1 - bar) * x0 + np.sqrt(1 - beta) * (1 - before) / (1 - bar) * prediction.x_t
    )
    small = np.log(schedule.posterior_variance[t])
    scale = np.exp((0.6 * np.log(beta) + 0.4 * small) / 2)
    x0 = process.estimate(prediction.mean, prediction.x_t, prediction.t)
    expected = kl_divergence(Normal(mean(prediction.x0), np.exp(small / 2)), Normal(mean(x0), scale)).mean() / np.log(2)
    assert losses.vb(VbOptions(), prediction).item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize(
    ("diffusion", "message"),
    [
        ({"process": LEARNED, "losses": ["vb"]}, "diffusion.losses: got vb, allowed: .* that strategies weigh"),
        ({"process": LEARNED}, r"diffusion.losses: got mse with variance learned_range, allowed: .*: vb, masked_vb"),
        ({"losses": ["mse", "vb"]}, r"diffusion.losses: got vb with process discrete and variance fixed_large"),
        ({"process": "edm", "losses": ["mse", "vb"]}, r"diffusion.losses: got vb with process edm"),
        (MASKED, r"diffusion.losses: got masked_mse, masked_vb with model unet, allowed: with a model that masks"),
        ({"process": {"name": "discrete", "schedule": "cosine", "beta_end": 0.1}}, r"beta_end: got None and 0.1 with"),
        ({"process": {"name": "discrete", "beta_start": 0.1}}, r"beta_start: got 0.1, allowed: less than beta_end = 0"),
        ({"process": {"name": "discrete", "first_index": 2}}, r"first_index: got 2, allowed: one of 0, 1"),
        ({"process": {"name": "fdm", "multiplier": 0}}, r"multiplier: got 0, allowed: number > 0"),
    ],
)  # fmt: skip
def test_invalid_diffusion_settings_are_rejected(diffusion, message):
    with pytest.raises(ConfigError, match=message):
        validate({"experiment": "x", "methods": {"a": {}}, "diffusion": diffusion})


METHODS = {
    "speed": {"sampler": "speed", "weighting": "change_aware"},
    "adaptive": {
        "sampler": {"name": "adaptive", "frequency": 2, "feature_timesteps": 10, "selected": 2},
        "weighting": "min_snr",
    },
    "gradient_norm": {"sampler": {"name": "gradient_norm", "frequency": 2, "bins": 4, "start": 1}},
    "loss_rms": {"sampler": {"name": "loss_rms", "start": 2, "frequency": 1}, "weighting": "edm2"},
}


@pytest.mark.parametrize("method", mark_long(METHODS, ["adaptive"]))
def test_strategies_train_a_learned_variance(method, latents, tmp_path):
    from kairos.data.latents import open_latents
    from kairos.evaluation.settings import LossSettings
    from kairos.evaluation.validation import epsilon_loss, mlperf8

    plain = experiment(METHODS, diffusion={"process": LEARNED, "losses": ["mse", "vb"]})
    train(plain, method, 0, tmp_path, latents, [0, 12])
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(np.isfinite(row["vb"]) for row in rows) and rows[-1]["mse"] < 2
    snapshot = open_snapshot(tmp_path / "snapshots" / "0000012")
    assert snapshot.model.weights()["final_layer.linear.weight"].shape[0] == 2 * 2 * 8
    settings = LossSettings(images=20, strata=4, seed=0)
    assert epsilon_loss(snapshot, open_latents(latents), settings)["loss_epsilon"] < 3
    assert mlperf8(snapshot, open_latents(latents), settings)["mlperf8_epsilon"] < 3
    scheduler = json.loads((tmp_path / "snapshots/0000012/scheduler/scheduler_config.json").read_text())
    assert scheduler["variance_type"] == "learned_range"


def test_costs_count_the_channels_of_the_learned_variance():
    parameter_counts = [
        costs.estimate_cost(
            validate(experiment(diffusion=diffusion)), x0_shape=(4, 8, 8), classes=10
        ).network.parameters
        for diffusion in ({}, {"process": LEARNED, "losses": ["mse", "vb"]})
    ]
    assert parameter_counts[1] - parameter_counts[0] == (16 + 1) * 2 * 2 * 4


# Masked forward pass


class MaskedBackbone(nn.Module):
    """Tiny backbone with a mask token, and with a block that only the masked pass uses."""

    calls: list = []  # noqa: RUF012

    def __init__(self, options, shape, conditions, outputs):
        super().__init__()
        self.convolution = nn.Conv2d(shape[0], outputs, 3, padding=1)
        self.token = nn.Parameter(torch.zeros(shape[0], 1, 1))
        self.side = nn.Conv2d(outputs, outputs, 1)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("order", torch.arange(shape[1]))

    def forward(self, x, t, conditions):
        mask = conditions.get("mask")
        if self.training:
            self.calls.append((x.detach().clone(), t, None if mask is None else mask.clone()))
        if mask is None:
            return self.convolution(self.dropout(x))[:, :, self.order]
        assert mask.shape == (len(x), *x.shape[2:]) and mask.min() >= 0 and mask.max() < 1
        hidden = torch.where(mask[:, None] > 0.7, self.token, x)
        return self.side(self.convolution(self.dropout(hidden)))[:, :, self.order]

    def config(self):
        return {"_class_name": "MaskedBackbone"}

    def weights(self):
        return dict(self.state_dict())

    def load_weights(self, weights):
        self.load_state_dict(weights)


class MaskedBackboneOptions(BackboneOptions):
    code: ClassVar[str] = "test_published_diffusion:MaskedBackbone"
    masks: ClassVar[bool] = True

    name: str = "masked_backbone"
    width: int = field(8, "without effect", ge=1)


@pytest.fixture
def make_masked_experiment(monkeypatch):
    monkeypatch.setitem(BACKBONES, "masked_backbone", MaskedBackboneOptions)
    monkeypatch.setattr(MaskedBackbone, "calls", [])

    def case(methods=None, **changes):
        return experiment(methods or METHODS, model={"name": "masked_backbone"}, **{"diffusion": MASKED, **changes})

    return case


@pytest.mark.parametrize("method", ["speed", "adaptive"])
def test_a_masked_pass_is_one_further_forward_pass_and_resumes_exactly(
    method, make_masked_experiment, latents, tmp_path
):
    train(make_masked_experiment(), method, 0, tmp_path / "whole", latents, [0, 8])
    calls = MaskedBackbone.calls
    assert len(calls) == 2 * 8
    for (x, t, none), (masked, again, mask) in zip(calls[::2], calls[1::2]):
        assert none is None and mask.dtype == torch.float32 and torch.equal(t, again)
        assert not torch.equal(x, masked)  # independent noise
    assert not torch.equal(calls[1][2], calls[3][2])
    train(make_masked_experiment(), method, 0, tmp_path / "parts", latents, [0, 3], snapshots_only=True)
    train(make_masked_experiment(), method, 0, tmp_path / "parts", latents, [0, 8])
    parts = {**hashes(tmp_path / "parts"), "metrics": None}
    assert parts == {**hashes(tmp_path / "whole"), "metrics": None}
    row = json.loads((tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()[-1])
    assert all(np.isfinite(row[name]) for name in ("mse", "vb", "masked_mse", "masked_vb"))


def test_the_masked_pass_uses_the_x0_of_the_batch_with_independent_noise(make_masked_experiment, latents, tmp_path):
    plain = make_masked_experiment({"uniform": {}}, training__batch_size=64)
    train(plain, "uniform", 0, tmp_path, latents, [0, 1])
    (x, t, _), (masked, _, mask) = MaskedBackbone.calls
    process = make_process(timesteps=100, variance="learned_range")
    _, s = process._shaped_coefficients(t, x)
    off = (x - masked) / s  # the difference of two standard normals
    assert off.std().item() == pytest.approx(2**0.5, rel=0.03)
    assert mask.mean().item() == pytest.approx(0.5, abs=0.03) and len(mask.unique()) > 0.99 * mask.numel()


def test_weights_multiply_both_squared_errors(make_masked_experiment, latents, tmp_path, monkeypatch):
    seen = []
    original = kairos_timesteps.Strategy.loss
    monkeypatch.setattr(
        kairos_timesteps.Strategy, "loss", lambda self, draw, terms: seen.append(terms) or original(self, draw, terms)
    )
    train(make_masked_experiment({"p2": {"weighting": "p2"}}), "p2", 0, tmp_path, latents, [0, 1])
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert seen[0].mean().item() == pytest.approx(row["mse"] + row["masked_mse"], rel=1e-5)


def test_the_mask_token_and_side_block_learn_from_the_masked_pass_alone(make_masked_experiment, latents, tmp_path):
    for name, terms in (("both", MASKED["losses"]), ("one", ["mse", "vb"])):
        plain = make_masked_experiment({"uniform": {}}, diffusion={"process": LEARNED, "losses": terms})
        train(plain, "uniform", 0, tmp_path / name, latents, [0, 3])
    token = {n: open_snapshot(tmp_path / n / "snapshots/0000003", "raw").model.token for n in ("both", "one")}
    assert token["both"].abs().max() > 0 and token["one"].abs().max() == 0


def test_microbatches_equal_the_whole_batch_with_a_masked_pass(make_masked_experiment, latents, tmp_path):
    folders = []
    for microbatch in (None, 5):
        plain = make_masked_experiment(
            {"speed": METHODS["speed"]}, training__microbatch=microbatch, training__precision="fp64"
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn.Dropout, "forward", lambda self, x: x)  # dropout is drawn per micro-batch
            train(plain, "speed", 0, tmp_path / str(microbatch), latents, [0, 6])
        folders.append(tmp_path / str(microbatch))
    models = [open_snapshot(out / "snapshots/0000006", "raw").model.state_dict() for out in folders]
    assert difference(*models) < 1e-6  # the files contain float32


def train_rank(config: Path, out: Path, latents: Path) -> None:
    """Run one rank of a training run with the tiny backbone, without dropout, which is drawn per micro-batch."""
    BACKBONES.register(MaskedBackboneOptions)
    nn.Dropout.forward = lambda self, x: x
    assert main([*train_command(config, "speed", out, latents)[3:]]) == 0


@pytest.mark.long
def test_two_processes_equal_one_with_a_masked_pass(make_masked_experiment, latents, tmp_path, monkeypatch):
    models = []
    for processes, microbatch in ((1, None), (2, 4)):
        plain = make_masked_experiment(
            {"speed": METHODS["speed"]}, training__precision="fp64", training__processes=processes,
            training__milestones=[6], training__microbatch=microbatch,
        )  # fmt: skip
        out = tmp_path / f"{processes} {microbatch}"
        if processes == 1:
            monkeypatch.setattr(nn.Dropout, "forward", lambda self, x: x)  # dropout is drawn per micro-batch
            train(plain, "speed", 0, out, latents, [0, 6])
        else:
            config = write_experiment(tmp_path / "two.yaml", plain)
            rank_groups.run(train_rank, tmp_path, processes, config, out, latents, join=False)
        models.append(open_snapshot(out / "snapshots/0000006", "raw").model.state_dict())
    assert difference(*models) < 1e-6


@pytest.mark.long
def test_the_memory_guard_runs_both_passes(make_masked_experiment, latents):
    from kairos.data.latents import open_latents
    from kairos.training.memory import find_fitting_batch

    training = build_training(
        make_masked_experiment({"uniform": {}}), "uniform", 0, open_latents(latents), torch.device("cpu")
    )
    training.model.train()
    assert find_fitting_batch(training, 16) == 16
    assert [mask is None for _, _, mask in MaskedBackbone.calls] == [True, False] * 2


# Ramps


def compute_decay(name, step, batch_size=512, **options):
    return AVERAGES.select({"name": name, **options}).build(step, batch_size)


def test_edms_average_has_the_published_decay():
    for step, expected in ((0, 0), (100, 0.87055), (1953.125, 0.992927), (19531.25, 0.9992905), (10**6, 0.9992905)):
        assert compute_decay("half_life", step) == pytest.approx(expected, abs=5e-6)


def test_the_decay_of_the_average_warms_up():
    assert [compute_decay("decay", step) for step in (0, 1, 10**7)] == pytest.approx([1 / 10, 2 / 11, 0.9999])
    assert [compute_decay("decay", step, count_from=1) for step in (0, 1)] == pytest.approx([2 / 11, 3 / 12])
    assert compute_decay("decay", 0, warmup=False) == 0.9999


@pytest.mark.parametrize(
    ("from_zero", "expected"), [(True, [0, 0.25, 0.5, 0.75, 1, 1]), (False, [0.25, 0.5, 0.75, 1, 1, 1])]
)
def test_the_warmup_starts_at_zero_or_at_its_first_fraction(from_zero, expected, latents, tmp_path):
    optimizer = {"lr": 1.0e-3, "warmup_steps": 4, "warmup_from_zero": from_zero}
    train(experiment({"u": {}}, training__optimizer=optimizer), "u", 0, tmp_path, latents, [0, 6])
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["lr"] for row in rows] == pytest.approx([1e-3 * factor for factor in expected])


# FDM


def test_fdms_input_scale_has_the_published_values():
    process, seen = make_process("fdm"), []
    sigma = torch.tensor([2.0, 5.0, 10.0, 20.0, 40.0], dtype=torch.float64)
    x = torch.ones(5, 3, 4, 4)
    denoised = process.predict(lambda x, t: seen.append((x, t)) or torch.zeros_like(x), x, sigma)
    assert seen[0][0][:, 0, 0, 0].tolist() == pytest.approx([0.99985, 0.996, 0.955, 0.629, 0.038], abs=5e-4)
    edm = make_process("edm")
    torch.testing.assert_close(denoised, edm.predict(lambda x, t: torch.zeros_like(x), x, sigma))
    assert seen[0][1].tolist() == pytest.approx((400 * sigma.log() / 4).tolist(), rel=1e-6)
    assert make_process("fdm", multiplier=1.0)._input_scale(torch.tensor(20.0)) > 0.629


def test_the_upper_bound_of_weights_warms_up():
    weighting = make_weighting({"name": "edm", "warmup": 200, "sigma_data": 0.5}, make_process("fdm").schedule, "x0")
    snr = np.array([1e-4, 10.0, 1e5])
    for step, cap in ((0, 5), (100, 50), (199, 5 * 100 ** (199 / 200))):
        assert weighting(snr, step) == pytest.approx(np.minimum(4 + snr, cap))
    assert weighting(snr, 200) == pytest.approx(4 + snr)


def test_fdm_trains_and_its_warmup_resumes_exactly(latents, tmp_path):
    method = {"fdm": {"sampler": "edm_log_normal", "weighting": {"name": "edm", "warmup": 6}}}
    plain = experiment(method, diffusion={"process": "fdm", "losses": [{"name": "mse", "scale": 64.0}]})
    train(plain, "fdm", 0, tmp_path / "whole", latents, [0, 8])
    train(plain, "fdm", 0, tmp_path / "parts", latents, [0, 3], snapshots_only=True)
    train(plain, "fdm", 0, tmp_path / "parts", latents, [0, 8])
    parts = {**hashes(tmp_path / "parts"), "metrics": None}
    assert parts == {**hashes(tmp_path / "whole"), "metrics": None}
    first, last = (
        np.loadtxt(tmp_path / "whole" / "snapshots" / step / "strategy.csv", delimiter=",", skiprows=1)[:, 2].max()
        for step in ("0000000", "0000008")
    )
    assert first == pytest.approx(5) and last > 1000
