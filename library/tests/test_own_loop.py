"""Monitoring in a custom training loop: loss by noise level, validation loss, preview of the draws."""

import math
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import kairos_timesteps
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.randomness import Stream


def digits(count):
    """Return images of digits (count, 1, 8, 8)."""
    from sklearn.datasets import load_digits

    return torch.from_numpy(load_digits().images[:count] / 8 - 1).float()[:, None]  # (count, 1, 8, 8)


class Network(nn.Module):
    """Small network with dropout, which a validation must switch off."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Dropout(0.5), nn.Conv2d(4, 1, 1))

    def forward(self, x, t):
        return self.body(x)


# Loss by level


def fill(levels, count=3000, steps=7):
    """Update `levels` with random losses; returns the ln SNR and the losses."""
    strategy = kairos_timesteps.Strategy("uniform", "cosine")
    snr, losses = [], []
    for step in range(steps):
        strategy.step = step
        draw = strategy.draw(torch.zeros(count // steps, 1))
        snr.append(strategy.process.snr(draw.t))
        losses.append(Stream(0, "losses").normal(step, range(count // steps)).exp())
        levels.update(snr[-1], losses[-1])
    return torch.cat(snr).log().numpy(), torch.cat(losses).double().numpy()


@pytest.mark.parametrize("bins", [24, 1, [-8.0, -1.0, 0.0, 0.5, 6.0]])
def test_loss_by_level_equals_the_binning_of_numpy(bins):
    levels = kairos_timesteps.LossByLevel(bins)
    level, losses = fill(levels)
    table = levels.table()
    edges = np.append(table["low"], table["high"][-1])
    inside = level.clip(edges[0], edges[-1])  # values beyond the edges belong to the outer bins
    count, total, squares = (np.histogram(inside, edges, weights=losses**power)[0] for power in (0, 1, 2))
    np.testing.assert_array_equal(table["count"], count)
    assert count.sum() == len(losses)
    with np.errstate(invalid="ignore", divide="ignore"):
        np.testing.assert_allclose(table["mean"], total / count, rtol=1e-12)
        standard_error = np.sqrt((squares - total**2 / count) / (count - 1) / count)
    np.testing.assert_allclose(table["standard_error"][count > 2], standard_error[count > 2], rtol=1e-6)
    assert np.isnan(table["mean"][count == 0]).all()


def test_loss_by_level_counts_values_on_edges_and_several_times_of_a_sample():
    levels = kairos_timesteps.LossByLevel([0.0, 1.0, 2.0])
    levels.update(torch.tensor([[-9.0, 0.0, 1.0], [2.0, 3.0, -math.inf]], dtype=torch.float64).exp(), torch.ones(2, 3))
    assert levels.table()["count"].tolist() == np.histogram([0, 0, 1, 2, 2, 0], [0, 1, 2])[0].tolist() == [3, 3]


def test_a_loss_that_is_not_finite_affects_only_its_bin():
    levels = kairos_timesteps.LossByLevel([-1.0, 0.0, 1.0])
    levels.update(torch.tensor([0.5, 2.0]), torch.tensor([math.nan, 3.0]))
    assert np.isnan(levels.table()["mean"][0]) and levels.table()["mean"][1] == 3


def test_loss_by_level_resumes_from_a_state(tmp_path):
    levels = kairos_timesteps.LossByLevel()
    fill(levels)
    torch.save(levels.state_dict(), tmp_path / "state")
    again = kairos_timesteps.LossByLevel()
    again.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    for one in (levels, again):
        one.update(torch.tensor([1.0]), torch.tensor([2.0]))
    for name, values in levels.table().items():
        np.testing.assert_array_equal(again.table()[name], values)
    with pytest.raises(ConfigError, match="state: got 24 bins, allowed: the 3 bins"):
        kairos_timesteps.LossByLevel(3).load_state_dict(levels.state_dict())


@pytest.mark.parametrize("bins", [0, -3, [1.0], [0.0, 0.0], [2.0, 1.0], [0.0, math.inf]])
def test_bad_bins_are_rejected(bins):
    with pytest.raises(ConfigError, match=r"bins: got .*, allowed: 1 or more, or edges that rise$"):
        kairos_timesteps.LossByLevel(bins)


def test_losses_of_another_shape_are_rejected():
    with pytest.raises(ConfigError, match=r"losses: got shape \(2,\), allowed: that of snr, \(3,\)"):
        kairos_timesteps.LossByLevel().update(torch.ones(3), torch.ones(2))


# A validation loss


def test_a_validation_loss_does_not_depend_on_the_batch_size():
    network, images = Network(), digits(40)
    losses = [kairos_timesteps.ValidationLoss(images, "cosine", kind=kind, batch=batch)(network) for kind, batch in
              (("even", 128), ("even", 7), ("mlperf8", 128), ("mlperf8", 7))]  # fmt: skip
    for one, other in (losses[:2], losses[2:]):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
    assert network.training, "the training mode is restored"


@pytest.mark.parametrize(("kind", "offset"), [("mlperf8", 0.0), ("middle8", 0.5)])
@pytest.mark.parametrize("process", ["cosine", "edm", "flow", "vp"])
def test_validation_at_eight_times_equals_a_plain_loop(process, kind, offset):
    network, images = Network().eval(), digits(20)
    validation = kairos_timesteps.ValidationLoss(images, process, kind=kind, seed=5)
    results, forward_process = validation(network), validation.process
    noise = Stream(5, "validation noise").normal(0, range(20), (1, 8, 8))
    losses = []
    for i in range(20):
        x0, eps = images[i : i + 1], noise[i : i + 1]
        t = forward_process.times(torch.tensor([(i % 8 + offset) / 8], dtype=torch.float64))
        with torch.no_grad():
            x_t = forward_process.noised(x0, eps, t)
            losses.append(
                float((forward_process.predict(network, x_t, t) - forward_process.target(x0, eps, t)).square().mean())
            )
    np.testing.assert_allclose(results["by_image"], losses, rtol=1e-4)
    assert results["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    np.testing.assert_allclose(results["level_loss"], [np.mean(losses[k::8]) for k in range(8)], rtol=1e-4)
    for k in range(8):
        assert results["level_standard_error"][k] == pytest.approx(
            np.std(losses[k::8], ddof=1) / len(losses[k::8]) ** 0.5, rel=1e-3
        )
    np.testing.assert_allclose(results["t"], forward_process.times((np.arange(8) + offset) / 8))


def test_an_even_validation_has_the_mean_of_uniform_draws():
    """The error of v of a network that predicts 0 is the mean of alpha-bar + (1 - alpha-bar) x0² at every timestep."""
    images = digits(64)
    process = kairos_timesteps.Strategy("uniform", "cosine", timesteps=64, prediction="v").process
    validation = kairos_timesteps.ValidationLoss(images, process, strata=8)
    results = validation(lambda x, t: 0 * x)
    a = process.schedule.alphas_cumprod
    expected = (a + (1 - a) * float(images.square().mean())).mean()
    assert abs(results["loss"] - expected) < 5 * results["standard_error"] < 0.05
    assert results["level_loss"].mean() == pytest.approx(results["loss"]) == pytest.approx(results["by_image"].mean())


@pytest.mark.long
def test_the_standard_error_of_a_validation_is_close_to_that_over_seeds():
    images, network = digits(64), Network().eval()
    for kind in ("even", "mlperf8"):
        runs = []
        for seed in range(60):
            selected = Stream(seed, "some").uniform(0, range(64)).argsort()[:32]
            runs.append(kairos_timesteps.ValidationLoss(images[selected], kind=kind, seed=seed)(network))
        standard_deviation = np.std([run["loss"] for run in runs])
        mean_standard_error = np.mean([run["standard_error"] for run in runs])
        assert 0.6 < mean_standard_error / standard_deviation < 2.2  # half of the images are shared


def test_validations_of_two_networks_are_paired():
    """For similar networks the difference by image has a much lower standard error than either loss."""
    images, one, other = digits(64), Network(), Network()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.01)
    validation = kairos_timesteps.ValidationLoss(images, "cosine")
    first, second, again = validation(one), validation(other), kairos_timesteps.ValidationLoss(images, "cosine")(one)
    assert first["loss"] == again["loss"] and np.array_equal(first["by_image"], again["by_image"])
    difference = first["by_image"] - second["by_image"]
    assert difference.std() / 8 < 0.1 * first["standard_error"]
    assert kairos_timesteps.ValidationLoss(images, "cosine", seed=1)(one)["loss"] != first["loss"]


def test_losses_of_epsilon_agree_for_networks_of_different_predictions():
    images = digits(16)
    losses = []
    for prediction in ("epsilon", "v"):
        process = kairos_timesteps.Strategy("uniform", "cosine", prediction=prediction).process

        def network(x, t, process=process, prediction=prediction):  # predicts x as the noise
            a, s = (part.view(-1, 1, 1, 1).float() for part in process.coefficients(t))
            return x if prediction == "epsilon" else (x - s * x) / a  # eps = s x + a v

        losses.append(kairos_timesteps.ValidationLoss(images, process, of="epsilon", strata=4)(network)["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_conditions_are_passed_with_their_images():
    images, seen = digits(10), []

    def network(x, t, conditions):
        seen.append(conditions["class"])
        return 0 * x

    kairos_timesteps.ValidationLoss(images, kind="mlperf8", batch=4, conditions={"class": torch.arange(10)})(network)
    assert torch.cat(seen).tolist() == list(range(10))


@pytest.mark.parametrize(
    ("by_name", "message"),
    [
        ({"kind": "odd"}, "kind: got 'odd', allowed: even, mlperf8, middle8"),
        ({"of": "x0"}, "of: got 'x0', allowed: prediction, epsilon"),
        ({"strata": 0}, "strata and batch: got 0 and 128, allowed: 1 or more"),
        ({"images": torch.zeros(0, 1)}, "images: got none, allowed: one or more"),
        ({"conditions": {"class": torch.zeros(3)}}, "conditions.class: got 3 rows, allowed: 4"),
        ({"process": "bosine"}, "schedule: got 'bosine', allowed: "),
    ],
)
def test_bad_arguments_of_a_validation_loss_are_rejected(by_name, message):
    with pytest.raises(ConfigError, match=message):
        kairos_timesteps.ValidationLoss(**{"images": torch.zeros(4, 1), **by_name})


# Preview of draws


@pytest.mark.parametrize("name", ["uniform", "log_normal", "speed", "speed_official", "clts", "loss_rms", "adaptive"])
def test_counts_of_a_preview_follow_the_density(name):
    results = kairos_timesteps.Strategy(name, seed=4).preview(draws=40_000, bins=40)
    assert results["count"].sum() == pytest.approx(results["expected"].sum()) and results["count"].sum() >= 40_000
    some = results["expected"] > 5
    chi = ((results["count"] - results["expected"])[some] ** 2 / results["expected"][some]).sum()
    assert chi < some.sum() + 6 * (2 * some.sum()) ** 0.5
    assert (results["count"][results["expected"] == 0] == 0).all()
    assert (np.diff(results["t"]) > 0).all() and results["low"][0] == 0 and results["high"][-1] == 1


def test_a_preview_contains_the_draws_of_the_next_steps_and_changes_nothing():
    strategy, other = kairos_timesteps.Strategy("log_normal", seed=2), kairos_timesteps.Strategy("log_normal", seed=2)
    results, samples = strategy.preview(draws=512, bins=10, batch=64), []
    for _ in range(8):
        samples.append((draw := strategy.draw(torch.zeros(64, 1))).fractions)
        assert torch.equal(draw.t, other.draw(torch.zeros(64, 1)).t)
        for one in (strategy, other):
            with one.observe(draw):
                pass
    assert results["count"].tolist() == np.histogram(torch.cat(samples).numpy(), np.linspace(0, 1, 11))[0].tolist()


def test_a_preview_requires_the_context_of_a_draw():
    strategy = kairos_timesteps.Strategy("shift", "flow", sampler={"law": "exponential"})
    with pytest.raises(ConfigError, match=r"shift: needs tokens"):
        strategy.preview()
    few, many = (strategy.preview(draws=5000, tokens=tokens)["count"] for tokens in (256, 4096))
    assert few[:25].sum() > many[:25].sum()
    with pytest.raises(ConfigError, match="draws, bins, batch: got 0, 50, 256, allowed: 1 or more"):
        strategy.preview(draws=0, tokens=256)


# Pictures


def test_loss_by_level_and_previews_write_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    levels = kairos_timesteps.LossByLevel()
    fill(levels)
    levels.picture(tmp_path / "levels.png")
    kairos_timesteps.LossByLevel().picture(tmp_path / "nothing.svg")
    kairos_timesteps.Strategy("log_normal+min_snr").preview(tmp_path / "drawn.png", draws=2000)
    for name in ("levels.png", "drawn.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "nothing.svg").read_text()


def test_a_picture_without_matplotlib_is_rejected_and_the_rest_works(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    strategy = kairos_timesteps.Strategy("log_normal")
    strategy.preview(draws=100)
    for call in (kairos_timesteps.LossByLevel().picture, strategy.preview):
        with pytest.raises(ConfigError, match=r"matplotlib.*pictures"):
            call(tmp_path / "x.png")


# On the device


class Synchronisations(TorchDispatchMode):
    """Collects operations that would synchronise with a device."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, arguments=(), by_name=None):
        if function.overloadpacket._qualified_op_name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal"):
            self.operations.append(function)
        return function(*arguments, **(by_name or {}))


def test_loss_by_level_and_nearest_do_not_synchronise_with_a_device():
    strategy, levels, x0 = (
        kairos_timesteps.Strategy("loss_rms", coupling="nearest"),
        kairos_timesteps.LossByLevel(),
        digits(16),
    )
    with Synchronisations() as synchronisations:
        draw = strategy.draw(x0)
        noise = strategy.couple(draw, torch.randn_like(x0))
        levels.update(strategy.process.snr(draw.t), noise.square().mean((1, 2, 3)))
    assert synchronisations.operations == []
    with Synchronisations() as synchronisations:
        float(noise[0, 0, 0, 0])
    assert len(synchronisations.operations) == 1


def test_losses_without_gradients_are_not_learned_from():
    """A validation loss between two steps does not change the statistics of the sampler."""
    states = []
    for validates in (False, True):
        strategy = kairos_timesteps.Strategy("loss_rms", timesteps=10, sampler={"start": 1, "frequency": 1})
        draw = strategy.draw(torch.zeros(4, 1))
        strategy.loss(draw, torch.ones(4))
        if validates:
            with torch.no_grad():
                strategy.loss(strategy.draw(torch.zeros(4, 1)), torch.full((4,), 9.0))
        with strategy.observe(draw):
            pass
        states.append(strategy.state_dict()["sampler"])
    assert all(torch.equal(torch.as_tensor(states[0][name]), torch.as_tensor(states[1][name])) for name in states[0])
