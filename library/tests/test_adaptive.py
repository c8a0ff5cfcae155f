"""The adaptive sampler: selection of timesteps, measurement, learning, state, and the variant of the public code."""

import copy
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from components_by_name import make_sampler
from kairos_timesteps.base import Observation
from kairos_timesteps.coordinates import RandomCoordinates
from kairos_timesteps.diffusion.schedule import make_schedule
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.randomness import Stream
from kairos_timesteps.samplers.adaptive import select_timesteps, stratify_timesteps
from kairos_timesteps.strategy import Strategy


def test_selection_equals_that_of_f_regression_among_positive_correlations():
    from sklearn.feature_selection import f_regression

    random = np.random.default_rng(0)
    for _ in range(20):
        queue = random.normal(size=(12, 40)) + random.normal(size=(12, 1)) * random.uniform(-1, 2, 40)
        target = queue.mean(1)
        statistic, _ = f_regression(queue, target)
        positive = [i for i in range(40) if np.corrcoef(queue[:, i], target)[0, 1] > 0]
        wanted = sorted(positive, key=lambda i: -statistic[i])[:3]
        assert select_timesteps(torch.from_numpy(queue), 3).tolist() == sorted(wanted)


def test_selection_excludes_timesteps_that_correlate_negatively_with_the_target():
    target = torch.linspace(-1, 1, 10, dtype=torch.float64)
    queue = torch.stack([-5 * target, 8 * target + torch.sin(9 * target), 6 * target + torch.cos(9 * target)], 1)
    assert 0 not in select_timesteps(queue, 2).tolist()


class Bandit:
    """Model whose loss at t decreases by a known amount at each optimizer step that has trained on t."""

    def __init__(self, sampler, better, batch=64, shape=(2, 5, 3)):
        self.sampler, self.better, self.after = sampler, better, False
        self.x0 = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0))
        self.calls = []

    def errors(self, index, t, noise, dropout=False):
        self.calls.append((index.clone(), t.clone(), noise, dropout, self.after))
        timesteps = Stream(0, noise).normal(self.number, range(len(index)), self.x0.shape[1:])
        return (1.0 - (self.gain[index] if self.after else 0.0) + 0.01 * timesteps.flatten(1).mean(1)).double()

    def copy_weights(self):
        return self.after

    @contextmanager
    def weights(self, after):
        present, self.after = self.after, after
        yield
        self.after = present

    def step(self, k):
        fractions = self.sampler.draw(RandomCoordinates(step=k).for_batch(self.x0), self.x0)
        self.gain = torch.where(fractions < 0.5, self.better[0], self.better[1]).float()
        self.after = False
        self.number = k
        random = RandomCoordinates(step=1000 + k).for_batch(self.x0)
        with self.sampler.observe(Observation(k, self.x0, fractions, None, self, random)):
            self.after = True
        return fractions


def adaptive(**options):
    return make_sampler({"name": "adaptive", "frequency": 1, **options}, make_schedule("linear", 50))


def test_adaptive_starts_almost_uniform_for_any_shape():
    for shape in ((1, 1, 1), (3, 32, 32), (4, 7, 5)):
        sampler = adaptive()
        x0 = torch.randn(3, *shape)
        sampler.draw(RandomCoordinates().for_batch(x0), x0)
        a, b = sampler.policy(torch.randn(3, *shape))
        torch.testing.assert_close(a, torch.full((3,), 0.97409), atol=1e-4, rtol=0)
        torch.testing.assert_close(a, b)


def test_adaptive_uses_the_same_noise_before_and_after_and_needs_no_policy_step_before_three_rows():
    sampler = adaptive()
    bandit = Bandit(sampler, (0.1, 0.0), batch=16)
    for k in range(4):
        bandit.calls.clear()
        bandit.step(k)
        half = len(bandit.calls) // 2
        for before, after in zip(bandit.calls[:half], bandit.calls[half:], strict=True):
            assert all(torch.equal(x, y) for x, y in zip(before[:2], after[:2], strict=True)) and before[2] == after[2]
            assert not before[3] and not after[3]
            assert not before[4] and after[4]
        assert sampler.updates == max(0, k - 2)
    assert len(sampler.reward_timesteps) == 3


def test_adaptive_counts_one_network_pass_per_loss():
    sampler = adaptive()
    bandit = Bandit(sampler, (0.1, 0.0), batch=16)
    for k in range(3):
        bandit.step(k)
    bandit.calls.clear()
    bandit.step(3)
    # T timesteps of one image and |S| = 3 of each of the batch, before and after
    assert sum(len(call[0]) for call in bandit.calls) == 2 * (50 + 3 * 16)


@pytest.mark.long
def test_adaptive_moves_towards_timesteps_whose_step_lowers_the_loss():
    """Four seeds end at 0.03 to 0.14 where early steps help, and at 0.81 to 0.87 where late ones do."""

    def mean_fraction(better):
        bandit = Bandit(adaptive(lr=2e-3), better, batch=16)
        for k in range(80):
            bandit.step(k)
        return (bandit.sampler.probabilities(bandit.x0) * np.arange(50)).sum() / 50

    assert mean_fraction((0.1, 0.0)) < 0.3 and mean_fraction((0.0, 0.1)) > 0.7


@pytest.mark.long
def test_adaptive_density_with_images_matches_its_draws():
    bandit = Bandit(adaptive(), (0.1, 0.0), batch=16)
    for k in range(30):
        bandit.step(k)
    p = bandit.sampler.probabilities(bandit.x0)
    assert p.sum() == pytest.approx(1)
    repeated = bandit.x0.repeat(250, 1, 1, 1)
    draws = torch.cat([bandit.sampler.draw(RandomCoordinates(step=k).for_batch(repeated), repeated) for k in range(30)])
    share = np.bincount((draws * 50).long().numpy(), minlength=50) / len(draws)
    np.testing.assert_allclose(share, p, atol=4 * np.sqrt(p.max() / len(draws)) + 1e-3)


def test_adaptive_resumes_exactly_from_its_state(tmp_path):
    def run(steps, sampler=None, start=0):
        bandit = Bandit(sampler or adaptive(), (0.1, 0.0), batch=8)
        return bandit, [bandit.step(k) for k in range(start, steps)]

    _, straight = run(12)
    first, early = run(5)
    torch.save(first.sampler.state_dict(), tmp_path / "state.pt")
    restored = adaptive()
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    _, late = run(12, restored, 5)
    assert all(torch.equal(x, y) for x, y in zip(straight, early + late, strict=True))


def test_adaptive_cap_limits_the_vlb_coefficients():
    sampler = make_sampler({"name": "adaptive", "c_max": 1.0}, make_schedule("cosine"))
    assert sampler.coefficients.max() == 1.0


def test_adaptive_works_with_a_batch_of_one_and_feature_timesteps():
    sampler = adaptive(feature_timesteps=7)
    bandit = Bandit(sampler, (0.1, 0.0), batch=1)
    for k in range(6):
        bandit.step(k)
    assert sampler.updates == 3 and all(np.isfinite(sampler.probabilities(bandit.x0)))


def official(**options):
    return make_sampler({"name": "adaptive_official", "frequency": 1, **options}, make_schedule("linear", 50))


def test_official_measures_with_other_noise_dropout_and_from_the_first_step():
    sampler = official()
    bandit = Bandit(sampler, (0.1, 0.0), batch=16)
    assert sampler.reward_timesteps.tolist() == [0, 1, 2]
    bandit.step(0)
    half = len(bandit.calls) // 2
    for before, after in zip(bandit.calls[:half], bandit.calls[half:], strict=True):
        assert torch.equal(before[0], after[0]) and before[2] != after[2]
        assert before[3] and after[3]
    assert sampler.updates == 1


def test_official_rounds_and_has_half_cells_at_the_ends():
    sampler = official()
    p = sampler.probabilities()
    assert p[0] / p[1] == pytest.approx(0.5, abs=0.05) and p.sum() == pytest.approx(1)
    x0 = torch.zeros(50_000, 1, 2, 2)
    draws = sampler.draw(RandomCoordinates(step=0).for_batch(x0), x0)
    share = np.bincount((draws * 50).long().numpy(), minlength=50) / len(draws)
    np.testing.assert_allclose(share, p, atol=5e-3)
    assert share[0] < 0.7 * share[1]


def test_official_reward_is_a_raw_sum_with_the_entropy_inside():
    sampler = official()
    change = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.5, 0.0]])
    assert sampler.advantage(change).tolist() == [6.0, 0.5]
    log = torch.tensor([2.0, -1.0])
    objective = sampler.objective(log, torch.tensor([5.0, 5.0]), torch.tensor([6.0, 0.5]))
    torch.testing.assert_close(objective, log * (torch.tensor([6.0, 0.5]) + 0.05))


def test_official_selection_ignores_the_sign_and_takes_the_first_timesteps_for_two_rows():
    target = torch.linspace(-1, 1, 10, dtype=torch.float64)
    wave = 3 * torch.sin(20 * target)
    queue = torch.stack([-5 * target, 8 * target + wave, 6 * target - wave, 6 * target + 0.1 * wave], 1)
    sampler = make_sampler({"name": "adaptive_official", "selected": 2}, make_schedule("linear", 4))
    assert 0 in sampler.select(queue).tolist() and 0 not in select_timesteps(queue, 2).tolist()
    paper = make_sampler({"name": "adaptive_paper", "selected": 2}, make_schedule("linear", 4))
    assert paper.select(queue).tolist() == sampler.select(queue).tolist(), "F has no sign, as printed"
    assert sampler.select(queue[:2]).tolist() == [0, 1]


def test_rewards_are_centred_scaled_and_a_mean():
    sampler = adaptive()
    change = 1e-3 * torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.5, 0.1]], dtype=torch.float64)
    advantage = sampler.advantage(change)
    torch.testing.assert_close(advantage, torch.tensor([1.0, -1.0], dtype=torch.float64), atol=1e-6, rtol=0)
    wide = adaptive().advantage(change.repeat(1, 4))  # does not depend on |S|
    torch.testing.assert_close(wide, advantage)


@pytest.mark.long
def test_entropy_bonus_alone_moves_towards_uniform_whatever_the_density():
    """The public code multiplies the entropy into log pi, so its sign flips where the density is under 1."""
    sampler = adaptive(entropy=1.0, lr=1e-2)
    bandit = Bandit(sampler, (0.0, 0.0))
    sampler.draw(RandomCoordinates().for_batch(bandit.x0), bandit.x0)
    with torch.no_grad():
        sampler.policy.last.bias.copy_(torch.tensor([2.0, 4.0]))
    x0 = bandit.x0
    far = abs(sampler.probabilities(x0) - 1 / 50).sum()
    for k in range(60):
        bandit.step(k)
    assert abs(sampler.probabilities(x0) - 1 / 50).sum() < 0.5 * far


def test_the_policy_reaches_the_beta_nearest_to_the_optimum_for_fixed_rewards():
    """For rewards R(u) and entropy weight l the best density is exp(R/l); the policy gets near its best Beta."""
    reward, weight = lambda u: 1.0 - (u - 0.3) ** 2 * 4, 0.5
    grid = (np.arange(2000) + 0.5) / 2000
    optimum = np.exp(reward(grid) / weight)
    optimum /= optimum.mean()

    def divergence(a, b):  # KL of a Beta from the optimum
        from scipy.stats import beta

        density = beta(a, b).pdf(grid)
        return (density * np.log(np.maximum(density, 1e-300) / optimum)).mean()

    best = min(divergence(a, b) for a in np.linspace(0.5, 6, 12) for b in np.linspace(0.5, 8, 16))
    sampler = adaptive(entropy=weight, lr=1e-2, reward_decay=0.0)
    sampler.advantage = lambda change: change.mean(1)  # unscaled, so that the weight has its nominal effect
    x0 = torch.randn(64, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    for k in range(100):
        u = sampler.draw(RandomCoordinates(step=k).for_batch(x0), x0)
        centred = reward(u) - reward(u).mean()
        sampler._learn(Observation(k, x0, u, None, None, RandomCoordinates(step=k).for_batch(x0)), centred[:, None])
    with torch.no_grad():
        a, b = (value.mean().item() for value in sampler.policy(x0))
    assert divergence(a, b) < best + 0.03 and divergence(0.974, 0.974) > best + 0.3


def test_a_floor_keeps_every_timestep_alive_and_importance_weights_fit_each_image():
    sampler = adaptive(floor=0.2, importance=True)
    bandit = Bandit(sampler, (0.1, 0.0))
    for k in range(30):
        bandit.step(k)
    p = sampler.probabilities(bandit.x0)
    assert p.min() >= 0.2 / 50 * 0.999 and p.sum() == pytest.approx(1)
    means = []
    for k in range(200):
        u = sampler.draw(RandomCoordinates(step=k).for_batch(bandit.x0), bandit.x0)
        means.append((sampler.importance_weights(bandit.x0, u, RandomCoordinates()).double() * u).mean().item())
    assert np.mean(means) == pytest.approx(0.5, abs=4 * np.std(means) / 200**0.5)


@pytest.mark.parametrize("name", ["adaptive", "adaptive_official"])
def test_a_policy_requires_images(name):
    strategy = Strategy(name)
    with pytest.raises(ConfigError, match="images"):
        strategy.sample(3)
    with pytest.raises(ConfigError, match="images"):
        strategy.sampler.quantile(np.array([0.5]))
    assert strategy.table()["p"].sum() == pytest.approx(1)


@pytest.mark.parametrize(
    "schedule,lr",
    [("linear", 1e-2), ("quadratic", 1e-2), ("cosine", 1e-3), ("scaled_linear", 1e-3)],
)
@pytest.mark.parametrize("name", ["adaptive", "adaptive_official", "adaptive_paper"])
def test_the_learning_rate_is_that_of_the_papers_table_for_its_schedules(name, schedule, lr):
    """Kim et al. 2025, table 7: 1e-2 (linear, quad), 1e-3 (cosine)."""
    sampler = make_sampler({"name": name}, make_schedule(schedule))
    x0 = torch.zeros(2, 1, 4, 4)
    sampler.draw(RandomCoordinates().for_batch(x0), x0)
    assert sampler.optimizer.param_groups[0]["lr"] == lr
    assert Strategy(name, "flow").sampler.lr == 1e-3
    assert make_sampler({"name": name, "lr": 0.5}, make_schedule(schedule)).lr == 0.5


@pytest.mark.parametrize("schedule", ["linear", "cosine", "quadratic"])
@pytest.mark.parametrize("timesteps,count", [(1000, 100), (1000, 10), (1000, 3), (50, 49), (50, 50), (7, 1), (2, 2)])
def test_strata_cover_all_timesteps_once_and_contain_the_measured_one(schedule, timesteps, count):
    measured, shares = stratify_timesteps(make_schedule(schedule, timesteps), count)
    sizes = shares * timesteps
    edges = np.concatenate([[0], np.cumsum(sizes)])
    assert len(measured) == count and edges[-1] == pytest.approx(timesteps) and (sizes > 0.999).all()
    assert (measured >= edges[:-1] - 1e-9).all() and (measured < edges[1:]).all()
    if count >= 3:
        assert measured[0] == 0 and measured[-1] == timesteps - 1


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_strata_estimate_the_vlb_of_a_linear_predictor(schedule):
    """For Gaussian data of unit variance the least error of epsilon is alpha-bar, and the VLB's terms c_t alpha-bar.

    The middles of 100 equal intervals miss more than a tenth of it.
    """
    process = make_schedule(schedule)
    terms = process.vlb * process.alphas_cumprod
    measured, shares = stratify_timesteps(process, 100)
    estimate = (terms[measured] * shares).sum()
    assert estimate == pytest.approx(terms.mean(), rel=0.02)
    even = terms[5::10].mean()
    assert abs(even / terms.mean() - 1) > 0.1


class Network(torch.nn.Module):
    """A small network with a buffer, whose prediction depends on both."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Conv2d(1, 1, 3, padding=1)
        self.register_buffer("offset", torch.zeros(1))

    def forward(self, x_t, t):
        return self.layer(x_t) * (1 + t.view(-1, 1, 1, 1) / 1000) + self.offset


def test_the_paper_by_its_letter():
    """An independent implementation of algorithms 1 and 2 gives equal S, rewards and policies.

    It takes the network's weights before and after each step, and all losses from these.
    """
    from sklearn.feature_selection import f_regression

    torch.manual_seed(0)
    timesteps, batch, frequency, entropy, lr = 20, 8, 2, 0.3, 0.05
    options = {"frequency": frequency, "entropy": entropy, "lr": lr}
    strategy = Strategy("adaptive_paper", make_schedule("linear", timesteps), sampler=options)
    sampler, network = strategy.sampler, Network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    coefficients = torch.from_numpy(strategy.process.schedule.vlb)
    queue, reference = [], None
    for step in range(12):
        x0 = torch.randn(batch, 1, 4, 4)
        draw = strategy.draw(x0)
        if reference is None:
            reference = copy.deepcopy(sampler.policy)
            reference_optimizer = torch.optim.Adam(reference.parameters(), lr=lr)
        noise = torch.randn_like(x0)
        x_t = strategy.process.noised(x0, noise, draw.t)
        strategy.loss(draw, (network(x_t, draw.t) - noise).square().mean((1, 2, 3))).backward()
        before = copy.deepcopy(network)
        with strategy.observe(draw, network=network):
            optimizer.step()
        optimizer.zero_grad()
        if step % frequency:
            continue

        # algorithm 2
        coordinates = RandomCoordinates(step=step).for_batch(x0)
        image = coordinates.stream("measured image").integers(step, batch, range(1)).item()

        def loss_at(model, images, t, name, step=step):
            times = torch.as_tensor(t).expand(len(images))
            epsilon = RandomCoordinates(step=step).stream(name).normal(step, torch.arange(len(images)), (1, 4, 4))
            with torch.no_grad():
                error = model(strategy.process.noised(images, epsilon, times), times) - epsilon
            return coefficients[times] * error.square().flatten(1).sum(1).double()

        all_t = torch.arange(timesteps)
        repeated = x0[image].expand(timesteps, 1, 4, 4)
        queue.append(loss_at(before, repeated, all_t, "measurement") - loss_at(network, repeated, all_t, "measurement"))
        if len(queue) < 3:
            assert sampler.updates == 0
            continue
        rows = torch.stack(queue).numpy()
        statistic, _ = f_regression(rows, rows.mean(1))
        selected = sorted(np.argsort(-statistic)[:3].tolist())
        assert sampler.reward_timesteps.tolist() == selected
        reward = torch.stack(
            [
                loss_at(before, x0, t, f"measurement at S {k}") - loss_at(network, x0, t, f"measurement at S {k}")
                for k, t in enumerate(selected)
            ]
        ).mean(0)

        # algorithm 1, line 8, with the entropy in the reward
        a, b = reference(x0)
        density = torch.distributions.Beta(a, b)
        advantage = (reward + entropy * density.entropy()).detach()
        u = draw.fractions.clamp(1e-6, 1 - 1e-6).float()
        reference_optimizer.zero_grad()
        (-(advantage * density.log_prob(u)).mean()).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        reference_optimizer.step()
        for measured, expected in zip(sampler.policy.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(measured, expected, rtol=0, atol=1e-4)
    assert sampler.updates == 4


def test_weights_before_the_step_are_measured_and_those_after_it_are_restored_bit_for_bit():
    torch.manual_seed(0)
    network = Network()
    strategy = Strategy("adaptive_paper", make_schedule("linear", 20), sampler={"frequency": 1})
    optimizer = torch.optim.Adam(network.parameters(), lr=0.1)
    plain = copy.deepcopy(network)
    plain_optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    for _ in range(6):
        x0 = torch.randn(4, 1, 4, 4)
        draw = strategy.draw(x0)
        noise = torch.randn_like(x0)
        x_t = strategy.process.noised(x0, noise, draw.t)
        for model, model_optimizer in ((network, optimizer), (plain, plain_optimizer)):
            model_optimizer.zero_grad()
            (model(x_t, draw.t) - noise).square().mean().backward()
            model.offset += 0.1  # a buffer that changes in training, after the losses
        strategy.loss(draw, torch.ones(4))
        with strategy.observe(draw, network=network):
            optimizer.step()
        plain_optimizer.step()
        assert all(map(torch.equal, network.state_dict().values(), plain.state_dict().values()))
    assert strategy.sampler.updates == 4
