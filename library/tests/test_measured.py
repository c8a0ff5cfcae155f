"""Samplers that learn from losses and gradients: known densities, unchanged objectives, exact resume."""

from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

from components_by_name import make_sampler
from kairos_timesteps.base import Observation
from kairos_timesteps.components import SAMPLERS
from kairos_timesteps.coordinates import RandomCoordinates
from kairos_timesteps.diffusion.schedule import make_schedule
from kairos_timesteps.meter import Meter, evaluating
from kairos_timesteps.strategy import Strategy
from kairos_timesteps.validation import ValidationLoss
from marks import mark_long

T = 40


def follow(name, loss_at, steps=400, batch=32, **options):
    """Train a sampler on `steps` batches whose loss at fraction u is loss_at(u)."""
    sampler = make_sampler({"name": name, **options}, make_schedule("linear", T))
    x0 = torch.zeros(batch, 1)
    for k in range(steps):
        u = sampler.draw(RandomCoordinates(step=k).for_batch(x0), x0)
        with sampler.observe(Observation(k, x0, u, loss_at(u), None, RandomCoordinates().for_batch(x0))):
            pass
    return sampler


def test_loss_second_moment_is_the_root_of_the_mean_of_the_last_ten_squared_losses():
    sampler = follow("loss_second_moment", lambda u: torch.where(u < 0.5, 3.0, 1.0))
    p = sampler.masses()
    assert p[: T // 2] == pytest.approx(3 / (4 * T / 2)) and p[T // 2 :] == pytest.approx(1 / (4 * T / 2))
    density = sampler.probabilities()
    assert density == pytest.approx(0.999 * p + 0.001 / T)


def test_loss_second_moment_is_uniform_until_every_timestep_has_ten_losses():
    sampler = follow("loss_second_moment", lambda u: 1 + u, steps=9)
    assert sampler.probabilities() == pytest.approx(1 / T) and sampler.updates == 0


def test_loss_second_moment_forgets_all_but_the_last_losses():
    sampler = make_sampler({"name": "loss_second_moment", "history": 2}, make_schedule("linear", 2))
    for loss in (100.0, 1.0, 2.0):
        sampler.add_losses(torch.tensor([0, 1]), torch.tensor([loss, 1.0], dtype=torch.float64))
    assert sampler.masses()[0] / sampler.masses()[1] == pytest.approx(np.sqrt((1 + 4) / 2))


def test_loss_second_moment_replaces_the_oldest_losses_also_by_several_of_one_batch():
    sampler = make_sampler({"name": "loss_second_moment", "history": 3}, make_schedule("linear", 2))
    for first, second in ((1.0, 2.0), (3.0, 4.0), (5.0, 6.0)):
        losses = torch.tensor([first, 1.0, second, 1.0], dtype=torch.float64)
        sampler.add_losses(torch.tensor([0, 1, 0, 1]), losses)
    assert sampler.masses()[0] / sampler.masses()[1] == pytest.approx(np.sqrt((4**2 + 5**2 + 6**2) / 3))


def test_loss_second_moment_keeps_the_last_losses_of_each_timestep_in_batches_of_any_timesteps():
    sampler = make_sampler({"name": "loss_second_moment", "history": 3}, make_schedule("linear", 5))
    kept = [deque(maxlen=3) for _ in range(5)]
    random = np.random.default_rng(0)
    for _ in range(30):
        cells, losses = random.integers(0, 5, 4), random.uniform(1, 9, 4)
        sampler.add_losses(torch.from_numpy(cells), torch.from_numpy(losses))
        for cell, loss in zip(cells, losses, strict=True):
            kept[cell].append(loss)
        if all(len(losses_of_cell) == 3 for losses_of_cell in kept):
            roots = np.sqrt([np.mean(np.square(losses_of_cell)) for losses_of_cell in kept])
            np.testing.assert_allclose(sampler.masses(), roots / roots.sum())
    assert sampler.updates > 10


def test_loss_rms_is_the_root_of_the_smoothed_mean_of_squared_losses():
    timesteps, width, decay = 16, 0.125, 0.9
    options = {"width": width, "decay": decay, "start": 1, "frequency": 1}
    sampler = make_sampler({"name": "loss_rms", **options}, make_schedule("linear", timesteps))
    squares, counts = np.zeros(timesteps), np.zeros(timesteps)
    distances = np.subtract.outer(np.arange(timesteps), np.arange(timesteps)) / (width * timesteps)
    kernel = np.where(np.abs(distances) <= 3, np.exp(-(distances**2) / 2), 0)
    random = np.random.default_rng(0)
    for _ in range(30):
        cells, losses = random.integers(0, timesteps, 16), random.uniform(1, 9, 16)  # several at one timestep
        sampler.add_losses(torch.from_numpy(cells), torch.from_numpy(losses))
        squares, counts = decay * squares, decay * counts
        np.add.at(squares, cells, losses**2)
        np.add.at(counts, cells, 1)
    roots = np.sqrt(kernel @ squares / (kernel @ counts))
    np.testing.assert_allclose(sampler.masses(), roots / roots.sum())


def test_loss_rms_finds_a_smooth_profile_with_few_losses():
    profile = lambda u: 1 + 2 * torch.exp(-(((u - 0.3) / 0.15) ** 2))  # noqa: E731
    sampler = follow("loss_rms", profile, steps=200, start=50, width=0.05)
    wanted = profile((torch.arange(T) + 0.5) / T).numpy()
    np.testing.assert_allclose(sampler.masses(), wanted / wanted.sum(), rtol=0.12)
    assert sampler.probabilities().min() >= 0.1 / T


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
def test_info_rate_follows_the_error_of_epsilon_per_log_signal_to_noise_ratio(prediction):
    noise = make_schedule("linear", T)
    options = {"name": "info_rate", "start": 1, "frequency": 1, "width": 1e-6}
    sampler = make_sampler(options, noise)
    u = (torch.arange(T, dtype=torch.float64) + 0.5) / T
    errors = 1 + u
    x0 = torch.zeros(T, 1)
    with sampler.observe(Observation(0, x0, u, errors, None, RandomCoordinates().for_batch(x0), errors, prediction)):
        pass
    of_epsilon = errors.numpy() * (noise.alphas_cumprod if prediction == "v" else 1)
    wanted = of_epsilon * -np.gradient(np.log(noise.snr))
    np.testing.assert_allclose(sampler.masses(), wanted / wanted.sum(), rtol=1e-6)


class Known(nn.Module):
    """Network whose gradients have known sizes: epsilon = size(t) w, at w = 0."""

    def __init__(self, sizes):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.sizes = sizes
        self.dropout = nn.Dropout(0.5)

    def forward(self, x, t):
        return self.sizes[t].view(-1, 1, 1, 1) * self.w * torch.ones_like(x)


def train_on_known_gradients(name, sizes, steps, noise_images=True, **options):
    """Train a strategy with a `Known` network, whose gradient for a sample is -2 size(t) mean(noise)."""
    network = Known(sizes)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-9)
    strategy = Strategy(name, make_schedule("linear", T), sampler={"frequency": 1, "start": 1, "decay": 0.9, **options})
    x0 = torch.randn(64, 1, 2, 2)
    for _ in range(steps):
        draw = strategy.draw(x0)
        strategy.loss(draw, torch.ones(64))
        with strategy.observe(draw, network, optimizer):
            pass
    return strategy


@pytest.mark.parametrize("norm", mark_long(["plain", "preconditioned"], ["preconditioned"]))
def test_gradient_norm_follows_the_size_of_the_gradient(norm):
    sizes = torch.linspace(0.5, 4, T)
    strategy = train_on_known_gradients("gradient_norm", sizes, 60, bins=8, samples=64, norm=norm)
    p = strategy.sampler.masses()
    wanted = sizes.numpy() / sizes.numpy().sum()
    np.testing.assert_allclose(p[5:-5], wanted[5:-5], rtol=0.2)
    assert strategy.table()["effective"] == pytest.approx(1 / T)  # importance weights keep the objective


def test_gradient_variance_follows_the_variance_and_changes_the_objective():
    sizes = torch.linspace(0.5, 4, T)
    strategy = train_on_known_gradients("gradient_variance", sizes, 60, bins=8, samples=64)
    wanted = sizes.numpy() ** 2
    np.testing.assert_allclose(strategy.sampler.masses()[4:-2], (wanted / wanted.sum())[4:-2], rtol=0.4)
    assert strategy.table()["w"] == pytest.approx(1.0)


class Opposed(nn.Module):
    """Network whose early timesteps pull its parameter to 1, late ones to -0.25; the target pulls it to above 0."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, x, t):
        wanted = torch.where(t < T // 2, 1.0, -0.25).view(-1, 1, 1, 1)
        return x / x.detach().clamp(min=1e9) + self.w - wanted  # the loss is (w - wanted)² where the noise is 0


def test_first_order_draws_timesteps_whose_gradients_agree_with_the_target():
    class Clean(Meter):
        def noise(self, name, rows):
            return torch.zeros_like(super().noise(name, rows))

    network = Opposed()
    sampler = make_sampler({"name": "first_order", "frequency": 1, "start": 1, "bins": 8}, make_schedule("linear", T))
    process = Strategy("uniform", make_schedule("linear", T)).process
    x0 = torch.zeros(32, 1, 2, 2)
    for k in range(4):
        meter = Clean(process, network, x0, RandomCoordinates(step=k))
        u = sampler.draw(RandomCoordinates(step=k).for_batch(x0), x0)
        with sampler.observe(Observation(k, x0, u, None, meter, RandomCoordinates(step=k).for_batch(x0))):
            pass
    p = sampler.probabilities()
    assert p[: T // 2].sum() > 0.85 and p.min() >= 0.2 / T * 0.999


def test_a_measurement_does_not_change_the_network_or_the_random_state():
    network = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Dropout(0.5), nn.Conv2d(4, 1, 1))
    network[2].eval()
    process = Strategy("uniform").process
    meter = Meter(process, _Timeless(network), torch.randn(4, 1, 5, 5), RandomCoordinates())
    network[0].weight.grad = torch.ones_like(network[0].weight)
    before, state = network[0].weight.detach().clone(), torch.get_rng_state()
    index, u = torch.arange(4), torch.full((4,), 0.3, dtype=torch.float64)
    state = torch.get_rng_state()
    first, second = meter.errors(index, u, "noise"), meter.errors(index, u, "noise")
    gradients = meter.gradient(index, u, "noise", torch.ones(4))
    assert torch.equal(first, second) and torch.equal(torch.get_rng_state(), state)  # no dropout
    assert not torch.equal(meter.errors(index, u, "noise", dropout=True), first)
    assert torch.equal(network[0].weight, before) and (network[0].weight.grad == 1).all()
    assert network.training and not network[2].training and len(gradients) == 4
    with evaluating(network):
        assert not network[1].training
    with pytest.raises(KeyError), evaluating(network):
        raise KeyError
    assert network.training and network[1].training and not network[2].training


class _Averaged(nn.Module):
    """Network whose ``train(False)`` stores its weights and uses averaged ones, as the EMA of flow_matching does."""

    def __init__(self, network):
        super().__init__()
        self.network, self.stored = network, []

    def train(self, mode=True):
        if mode != self.training:
            with torch.no_grad():
                if not mode:
                    self.stored = [parameter.clone() for parameter in self.network.parameters()]
                for parameter, stored in zip(self.network.parameters(), self.stored, strict=True):
                    parameter.copy_(stored if mode else torch.zeros_like(stored))
        return super().train(mode)

    def forward(self, x, t):
        assert self.network.weight.any()  # never the averages
        return self.network(x)


@pytest.mark.parametrize("name", ["adaptive", "gradient_norm", "auto", "adaptive_official", "validation"])
def test_measuring_leaves_the_weights_of_modules_whose_train_does_more(name):
    torch.manual_seed(0)
    network = _Averaged(nn.Conv2d(2, 2, 1))
    before = [parameter.detach().clone() for parameter in network.parameters()]
    x0 = torch.randn(4, 2, 5, 5)
    if name == "validation":
        measured = ValidationLoss(x0, "linear")(network)["loss"]
        reference = ValidationLoss(x0, "linear")(lambda x, t: network.network(x))["loss"]
        assert measured == reference  # of the weights that it has, not of the averages
    else:
        strategy = Strategy(name, "linear", sampler=None if name == "auto" else {"frequency": 1})
        for _ in range(30):
            draw = strategy.draw(x0)
            strategy.loss(draw, (network(x0, draw.t) ** 2).mean((1, 2, 3)))
            with strategy.observe(draw, network, torch.optim.SGD(network.parameters(), lr=0.0)):
                pass
    assert all(torch.equal(*pair) for pair in zip(network.parameters(), before, strict=True)) and network.training


class _Timeless(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x, t):
        return self.network(x)


def test_sums_of_gradients_equal_those_of_autograd():
    torch.manual_seed(0)
    network = _Timeless(nn.Conv2d(1, 1, 3, padding=1))
    strategy = Strategy("uniform+min_snr", "cosine", prediction="v")
    x0 = torch.randn(6, 1, 4, 4)
    u = torch.linspace(0.05, 0.95, 6, dtype=torch.float64)
    factors = torch.tensor([1.0, -1, 1, 1, -1, 0.5])
    meter = Meter(strategy.process, network, x0, RandomCoordinates(), weighting=strategy.weighting)
    results, noise = meter.gradient(torch.arange(6), u, "noise", factors), meter.noise("noise", torch.arange(6))
    t = strategy.process.times(u)
    output = network(strategy.process.noised(x0, noise, t), t)
    error = ((output - strategy.process.target(x0, noise, t)) ** 2).mean((1, 2, 3))
    wanted = torch.autograd.grad(
        (factors * strategy.weighting.at(strategy.process, t) * error).sum(), list(network.parameters())
    )
    for one, other in zip(results, wanted, strict=True):
        torch.testing.assert_close(one, other)


def train(strategy, network, optimizer, steps, x0):
    """Train for some steps with noise that depends on the step; returns losses and timesteps."""
    lines = []
    for _ in range(steps):
        k = strategy.step
        draw = strategy.draw(x0)
        noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(k))
        x_t = strategy.process.noised(x0, noise, draw.t)
        loss = strategy.loss(draw, ((network(x_t, draw.t) - noise) ** 2).mean((1, 2, 3)))
        optimizer.zero_grad()
        loss.backward()
        with strategy.observe(draw, network, optimizer):
            optimizer.step()
        lines.append((loss.item(), draw.t.tolist()))
    return lines


def build(name, batch=8, prediction="epsilon"):
    """Return a strategy that learns in its first steps, a network, its optimizer and images."""
    torch.manual_seed(0)
    network = _Timeless(nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Dropout(0.2), nn.Conv2d(4, 2, 1)))
    small_options = {"frequency": 2, "start": 1, "history": 1, "length": 10, "feature_timesteps": 10, "divide": False}
    known_options = SAMPLERS[name.split("+")[0]].component.options
    options = {key: value for key, value in small_options.items() if key in known_options}
    strategy = Strategy(name, "cosine", timesteps=20, prediction=prediction, sampler=options)
    return strategy, network, torch.optim.Adam(network.parameters(), lr=1e-2), torch.randn(batch, 2, 5, 3)


# quick tests of test_resume_of_combinations.py resume the other samplers
QUICK_NAMES = ("adaptive", "auto", "gradient_norm", "loss_rms", "adaptive+edm2")


@pytest.mark.parametrize("name", mark_long([*sorted(SAMPLERS), "uniform+edm2", "adaptive+edm2"], QUICK_NAMES))
def test_every_strategy_resumes_exactly_from_its_state(name, tmp_path):
    strategy, network, optimizer, x0 = build(name)
    torch.manual_seed(1)
    straight = train(strategy, network, optimizer, 16, x0)
    assert len({tuple(t) for _, t in straight}) == 16

    strategy, network, optimizer, _ = build(name)
    torch.manual_seed(1)
    early = train(strategy, network, optimizer, 9, x0)
    saved = [part.state_dict() for part in (strategy, network, optimizer)]
    torch.save([saved, torch.get_rng_state()], tmp_path / "state.pt")
    fresh = build(name)[:3]
    states, random = torch.load(tmp_path / "state.pt", weights_only=True)
    for part, state in zip(fresh, states, strict=True):
        part.load_state_dict(state)
    torch.set_rng_state(random)
    late = train(*fresh, 7, x0)
    assert early + late == straight


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", sorted(SAMPLERS))
def test_strategies_work_with_odd_and_tiny_batches(name, batch):
    strategy, network, optimizer, x0 = build(name, batch)
    for loss, t in train(strategy, network, optimizer, 8, x0):
        assert np.isfinite(loss) and len(t) == batch and all(0 <= value < 20 for value in t)
    p = strategy.table(x0)["p"]
    assert p.sum() == pytest.approx(1) and (p >= 0).all() and np.isfinite(p).all()


@pytest.mark.parametrize("name", ["adaptive", "gradient_norm", "loss_rms", "uniform+edm2"])
def test_strategies_work_with_networks_in_bf16(name):
    strategy, network, optimizer, x0 = build(name)
    for _ in range(6):
        draw = strategy.draw(x0)
        x_t = strategy.process.noised(x0, torch.randn_like(x0), draw.t)
        with torch.autocast("cpu", torch.bfloat16):
            output = network(x_t, draw.t)
        loss = strategy.loss(draw, (output.float() ** 2).mean((1, 2, 3)))
        optimizer.zero_grad()
        loss.backward()
        with strategy.observe(draw, network, optimizer, autocast=torch.autocast("cpu", torch.bfloat16)):
            optimizer.step()
        assert torch.isfinite(loss)


def test_the_learned_uncertainty_reaches_the_logarithm_of_the_weighted_loss():
    """The minimum of w L/exp(u) + u is at u = ln(w L)."""
    strategy = Strategy("edm2", "linear", timesteps=50, weighting={"base": "none", "lr": 0.02})
    level = lambda t: torch.exp(2.0 * t / 50 - 1)  # noqa: E731
    x0 = torch.zeros(256, 1)
    for _ in range(600):
        draw = strategy.draw(x0)
        strategy.loss(draw, level(draw.t)).backward()
        with strategy.observe(draw):
            pass
    wanted = np.log(level(torch.arange(50)).numpy())
    np.testing.assert_allclose(strategy.weighting.expected().detach().numpy(), wanted, atol=0.15)
    assert strategy.table()["w"] == pytest.approx(np.exp(-wanted), rel=0.2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["loss_second_moment", "loss_rms", "loss_mean", "info_rate", "info_noise"])
def test_losses_that_are_not_finite_are_ignored(name, bad):
    options = {"history": 2, "frequency": 1, "start": 1, "min_count": 1}
    declared = SAMPLERS[name].component.options
    options = {key: value for key, value in options.items() if key in declared}
    all_losses, finite_losses = (make_sampler({"name": name, **options}, make_schedule("linear", 4)) for _ in range(2))
    cells = torch.tensor([0, 1, 2, 3, 3, 0, 2, 1])
    for step in range(4):
        losses = torch.linspace(1, 2, 8, dtype=torch.float64) + step
        losses[[1, 6]] = bad if step == 2 else losses[[1, 6]]
        is_finite = losses.isfinite()
        all_losses.add_losses(cells, losses)
        finite_losses.add_losses(cells[is_finite], losses[is_finite])
        p = all_losses.probabilities()
        assert np.isfinite(p).all() and np.array_equal(p, finite_losses.probabilities())
    state, expected = all_losses.state_dict(), finite_losses.state_dict()
    assert all(torch.equal(torch.as_tensor(state[key]), torch.as_tensor(expected[key])) for key in expected)


def test_a_density_of_no_finite_loss_at_all_is_uniform():
    sampler = make_sampler({"name": "loss_rms", "frequency": 1, "start": 1}, make_schedule("linear", 4))
    sampler.add_losses(torch.arange(4), torch.full((4,), torch.nan, dtype=torch.float64))
    assert sampler.probabilities() == pytest.approx(1 / 4)


@pytest.mark.parametrize("name", ["auto", "gradient_norm", "gradient_variance", "first_order"])
def test_measured_gradients_that_are_not_finite_change_nothing(name, monkeypatch):
    strategy, network, optimizer, x0 = build(name)
    train(strategy, network, optimizer, 8, x0)
    before = strategy.sampler.state_dict()
    bins = strategy.sampler.bin_count
    monkeypatch.setattr(strategy.sampler, "measure", lambda observation: np.where(np.arange(bins), 1.0, np.nan))
    monkeypatch.setattr(strategy.sampler, "frequency", 1)
    train(strategy, network, optimizer, 1, x0)
    after = strategy.sampler.state_dict()
    assert torch.equal(before["values"], after["values"]) and before["updates"] == after["updates"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_learned_uncertainty_ignores_losses_that_are_not_finite(bad):
    strategy, plain = (Strategy("edm2", "linear", timesteps=50) for _ in range(2))
    x0 = torch.zeros(8, 1)
    for step in range(3):
        errors = torch.linspace(1, 2, 8, dtype=torch.float64)
        draw, plain_draw = strategy.draw(x0), plain.draw(x0)
        if step == 1:
            errors[:4] = bad
            loss = strategy.loss(draw, errors)
            assert not loss.isfinite()
            loss.backward()
            rows = plain_draw.rows(4, 8)
            (plain.weighted(rows, errors[4:]).sum() / 8).backward()
        else:
            strategy.loss(draw, errors).backward()
            plain.loss(plain_draw, errors).backward()
        for trained, last in ((strategy, draw), (plain, plain_draw)):
            with trained.observe(last):
                pass
    torch.testing.assert_close(strategy.weighting.linear, plain.weighting.linear)
    assert strategy.weighting.linear.isfinite().all()


def test_the_learned_uncertainty_is_float32_under_autocast():
    strategy = Strategy("edm2", "linear", timesteps=50)
    with torch.no_grad():
        strategy.weighting.linear.fill_(0.1)
    fractions = torch.linspace(0, 0.99, 20, dtype=torch.float64)
    u, expected = strategy.weighting.uncertainty(fractions), strategy.weighting.expected()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(strategy.weighting.uncertainty(fractions), u)
        assert torch.equal(strategy.weighting.expected(), expected)


def test_missing_networks_losses_and_image_dimensions_are_reported():
    x0 = torch.zeros(4, 1, 3, 3)
    strategy = Strategy("adaptive")
    with (
        pytest.raises(ValueError, match=r"adaptive.*network.*observe"),
        strategy.observe(strategy.draw(x0)),
    ):
        pass
    strategy = Strategy("loss_rms")
    with pytest.raises(ValueError, match="losses"), strategy.observe(strategy.draw(x0)):
        pass
    with pytest.raises(ValueError, match=r"\(4, 3\), allowed: \(batch, channels, height, width\)"):
        Strategy("adaptive").draw(torch.zeros(4, 3))
