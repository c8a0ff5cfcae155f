"""The learned timestep sampler of Kim et al. 2025 (CVPR), algorithms 1 and 2, with its public code's faults mended.

A policy maps a clean image to a, b > 0; its timestep is at fraction u ~ Beta(a, b). Every f_S steps the sampler
measures how one optimiser step changed the VLB, and moves the policy by REINFORCE to timesteps whose step lowered it.

What differs from the public code (which `AdaptiveOfficial` follows): the same noise before and after the step;
evaluation mode; one network pass per loss; |Q| of 3 or more; only timesteps whose change goes *with* the target's are
selected (the F-statistic has no sign); the reward is the mean over S, centred on a running mean and scaled; the entropy
is a term of its own; all of it is in the state. S chosen at one measurement is used from the next one on.

With several processes everything is done for the global batch: each rank measures its images, all ranks hold the same
policy, queue and S.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Beta

from kairos_timesteps import distributed
from kairos_timesteps.base import NOTHING, Cost, Observation, Sampler
from kairos_timesteps.coordinates import Place
from kairos_timesteps.diffusion.schedule import NoiseSchedule
from kairos_timesteps.errors import DivergedError, demand
from kairos_timesteps.incomplete_beta import beta_cdf
from kairos_timesteps.numeric import Array, on_device
from kairos_timesteps.randomness import derived_seed

_EDGE = 1e-6  # fractions are kept this far from 0 and 1, where log-densities diverge

_START = math.log1p(math.exp(0.5)) + 1e-5  # a and b of a new policy: softplus of the last layer's bias


def _beta(a: Tensor, b: Tensor) -> Beta:
    """Return the distribution without torch's check of its parameters and arguments, which waits for the device."""
    return Beta(a, b, validate_args=False)


class Policy(nn.Module):
    """From images (batch, channels, height, width) of any size to a, b > 0, each (batch,).

    Three convolutions, pooled as long as there is something to pool, a mean over what is left, an MLP. The last layer
    starts at weight 0 and bias 0.5, so a = b = 0.974 for every image: close to uniform.
    """

    def __init__(self, channels: int, width: int, depth: int):
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, 3, padding=1) for before, after in ((channels, 32), (32, 64), (64, 128))
        )
        sizes = [128] + [width] * depth
        self.hidden = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(sizes))
        self.last = nn.Linear(sizes[-1], 2)
        nn.init.zeros_(self.last.weight)
        nn.init.constant_(self.last.bias, 0.5)

    def forward(self, x0: Tensor) -> tuple[Tensor, Tensor]:
        """Each image's a and b."""
        x = x0.to(self.last.weight.dtype)
        for convolution in self.convolutions:
            x = torch.relu(convolution(x))
            if min(x.shape[-2:]) > 1:
                x = nn.functional.max_pool2d(x, 2)
        x = x.mean((2, 3))  # (batch, 128)
        for layer in self.hidden:
            x = torch.relu(layer(x))
        a, b = (nn.functional.softplus(self.last(x)) + 1e-5).unbind(1)
        return a, b


class Adaptive(Sampler):
    r"""The adaptive sampler: a policy gives each image a Beta density, and learns by reward (Kim et al. 2025).

    $$u \sim \mathrm{Beta}(a, b), \quad (a, b) = \pi_\phi(x_0), \qquad
    r = \frac{1}{|S|} \sum_{t \in S} c_t
    \left(\|\epsilon - \epsilon_\theta\|^2 - \|\epsilon - \epsilon_{\theta'}\|^2\right)$$

    $\theta$ and $\theta'$ are the network before and after a step, S the timesteps whose change says most of all.

    Args:
        options: `strategies.options.Adaptive`.
        schedule: gives T and the VLB coefficients c_t.
        seed: of the policy's initial weights.

    Raises:
        ValueError: the feature vector has more timesteps than the process, or fewer than are selected from it.
    """

    learned = measures = per_image = True
    dropout = False  # whether the network is measured in training mode
    noise_after = "measurement"  # the random stream of the noise after the step: the same as before it
    density_scale = 1.0  # du/df, where u is a draw of the policy and f = to_fraction(u) its fraction of the process
    rows = 3  # of the queue, before S is selected from it: with fewer every F-statistic is 0

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        timesteps = schedule.timesteps
        options.check_fits(timesteps, schedule.name)
        count = min(options.feature_timesteps or timesteps, timesteps)
        self.features = torch.from_numpy(((np.arange(count) + 0.5) * timesteps / count).astype(np.int64))
        cap = np.inf if options.c_max is None else options.c_max
        self.coefficients = torch.from_numpy(np.minimum(schedule.vlb, cap))
        self.policy: Any = None  # a `Policy` and its Adam, from the first batch on
        self.optimizer: Any = None
        self.queue: list[Tensor] = []  # feature vectors delta, float64 (count,), on the CPU
        self.selected: Tensor | None = None  # S, indices of timesteps
        self.updates = 0
        self.reward_mean = 0.0
        self.reward_scale = 0.0
        self._shape = torch.full((2, 1), _START, dtype=torch.float64)  # a and b of this rank's last batch
        self._reward = 0.0

    def _build(self, channels: int, device: torch.device, dtype: torch.dtype) -> Policy:
        """Make the policy at first use, when the number of channels is known."""
        if self.policy is None:
            with torch.random.fork_rng(devices=[]):
                torch.random.default_generator.manual_seed(derived_seed(self.seed, "policy"))
                self.policy = Policy(channels, self.options.width, self.options.depth)
            self.policy.to(device, torch.float64 if dtype == torch.float64 else torch.float32)
            self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=self.options.lr)
        return self.policy

    def fractions(self, x0: Tensor, place: Place) -> Tensor:
        """Draws from each image's Beta distribution, float64 (batch, *times), where the images are.

        Raises:
            ConfigError: `x0` is not a batch of images.
        """
        allowed = "(batch, channels, height, width)"
        demand(x0.ndim == 4, "adaptive: x0", f"shape {tuple(x0.shape)}", allowed)
        self._build(x0.shape[1], x0.device, x0.dtype)
        place = place.of(x0, self.group)
        with torch.no_grad():
            self._shape = torch.stack(self.policy(x0)).double()  # (2, batch)
        a, b = self._shape
        u = place.stream("timesteps").beta(place.step, place.numbers, a, b, place.shape)
        fractions = self.to_fraction(u.clamp(_EDGE, 1 - _EDGE))
        if not self.floor:
            return fractions
        even = place.uniform("floor", 2)
        return torch.where(even[..., 0] < self.floor, even[..., 1], fractions)

    def to_fraction(self, u: Tensor) -> Tensor:
        """The fraction of the process that a draw u of the policy stands for, elementwise."""
        return u

    def from_fraction(self, fractions: Tensor) -> Tensor:
        """Map fractions of the process to draws of the policy, elementwise: the inverse of `to_fraction`."""
        return fractions

    def borders(self) -> Array:
        """Where the cells of the timesteps begin and end in u, (T + 1,)."""
        return np.arange(self.schedule.timesteps + 1) / self.schedule.timesteps

    def masses(self, x0: Tensor | None = None, place: Place = NOTHING) -> Array:
        """p(t), (T,): the mean over the images `x0`; without images, or before the first draw, the start's."""
        if self.policy is None or x0 is None:
            return np.diff(beta_cdf(self.borders(), np.array(_START), np.array(_START)))
        with torch.no_grad():
            a, b = (value.double().cpu().numpy()[:, None] for value in self.policy(x0))
        return np.diff(beta_cdf(self.borders()[None], a, b), axis=1).mean(0)

    def importance(self, x0: Tensor, fractions: Tensor, place: Place = NOTHING) -> Tensor | None:
        """1 over the density of each draw given its image, relative to uniform, float32 (batch, *times)."""
        if not self.corrected:
            return None
        with torch.no_grad():
            a, b = self.policy(x0)
            return torch.exp(-self._log_density(a, b, fractions)).float()

    def _log_density(self, a: Tensor, b: Tensor, fractions: Tensor) -> Tensor:
        """Logarithm of the density of fractions (batch, *times), floor included, given a and b, each (batch,)."""
        u, per_time = self.from_fraction(fractions), [1] * (fractions.ndim - 1)
        policy = _beta(a.view(-1, *per_time), b.view(-1, *per_time))
        log = policy.log_prob(u.clamp(_EDGE, 1 - _EDGE).to(a)) + math.log(self.density_scale)
        if not self.floor:
            return log
        log = torch.where((u >= 0) & (u <= 1), log + math.log1p(-self.floor), -math.inf)
        return torch.logaddexp(log, torch.full_like(log, math.log(self.floor)))

    @contextmanager
    def observe(self, observation: Observation) -> Iterator[None]:
        """Measure the losses around the optimiser step and, every f_S steps, learn from their change."""
        if observation.step % self.options.frequency:
            yield
            return
        before = self._measure(observation, "measurement")
        yield
        after = self._measure(observation, self.noise_after)
        if before[1] is not None and after[1] is not None:
            self._learn(observation, before[1] - after[1])
        self.queue = [*self.queue, before[0] - after[0]][-self.options.queue :]
        if len(self.queue) >= self.rows:
            self.selected = self.features[self.select(torch.stack(self.queue))]

    def select(self, queue: Tensor) -> Tensor:
        """Indices into the feature timesteps, from the queue (rows, features)."""
        return select(queue, self.options.selected)

    def _measure(self, observation: Observation, noise: str) -> tuple[Tensor, Tensor | None]:
        """c_t-weighted losses, float64: of one image at the feature timesteps (count,), and of the batch at S,
        (global batch, |S|).
        """
        place, size, count = observation.place, observation.place.total, len(self.features)
        if self.options.feature_images == "one":
            index = place.stream("measured image").integers(place.step, size, range(1)).expand(count)
        else:
            index = torch.arange(count) * size // count
        features = self._losses(observation, index, self.features, noise)
        if self.selected is None:
            return features, None
        rewards = [
            self._losses(observation, torch.arange(size), t.expand(size), f"{noise} at S {k}")
            for k, t in enumerate(self.selected)
        ]
        return features, torch.stack(rewards, 1)

    def cost(self, batch: int, channels: int) -> Cost:
        """Before and after one step of f_S: the feature vector, and the batch at each of S; policy, its Adam, queue."""
        options, features = self.options, len(self.features)
        with torch.device("meta"):
            policy = sum(each.numel() for each in Policy(channels, options.width, options.depth).parameters())
        forward = 2 * (features + options.selected * batch) / options.frequency
        return Cost(forward, state=3 * 4 * policy + 8 * features * options.queue)

    def _losses(self, observation: Observation, index: Tensor, t: Tensor, noise: str) -> Tensor:
        fractions = (t + 0.5).double() / self.schedule.timesteps
        return observation.meter.errors(index, fractions, noise, self.dropout) * self.coefficients[t]

    def _learn(self, observation: Observation, change: Tensor) -> None:
        """One REINFORCE step (Kim et al. 2025, eq. 13); `change` is how far the losses fell, (global batch, |S|)."""
        place = observation.place
        mine = slice(place.index.start, place.index.stop) if isinstance(place.index, range) else place.index.cpu()
        advantage = on_device(self.advantage(change)[mine], observation.x0.device).to(self.policy.last.weight.dtype)
        self.optimizer.zero_grad(set_to_none=True)
        a, b = self.policy(observation.x0)
        log_density = self._log_density(a, b, observation.fractions).reshape(len(a), -1).sum(1)  # over times: (batch,)
        entropy = _beta(a, b).entropy()
        (-self.objective(log_density, entropy, advantage).sum() / place.total).backward()
        gradients = [each.grad for each in self.policy.parameters() if each.grad is not None]
        distributed.sum_tensors(gradients, self.group)
        norm = nn.utils.clip_grad_norm_(self.policy.parameters(), self.options.grad_clip)
        if not math.isfinite(norm.item()):
            raise DivergedError(
                f"step {observation.step + 1}: the gradient of the adaptive sampler's policy is not finite; "
                f"sampler.lr is {self.options.lr:g}, a lower one may help"
            )
        self.optimizer.step()
        self.updates += 1

    def advantage(self, change: Tensor) -> Tensor:
        """The reward of every sample, (global batch,): the mean over S, centred on a running mean and scaled."""
        rewards = change.mean(1)
        decay = self.options.reward_decay if self.updates else 0.0
        mean, scale = rewards.mean().item(), rewards.std(unbiased=False).item()
        self.reward_mean = decay * self.reward_mean + (1 - decay) * mean
        self.reward_scale = decay * self.reward_scale + (1 - decay) * max(scale, abs(mean - self.reward_mean))
        self._reward = mean
        return (rewards - self.reward_mean) / (self.reward_scale + 1e-12)

    def objective(self, log_density: Tensor, entropy: Tensor, advantage: Tensor) -> Tensor:
        """What is maximised, per sample (batch,): the reward's term and an entropy bonus apart from it."""
        return log_density * advantage + self.options.entropy * entropy

    def statistics(self) -> dict[str, float]:
        """Mean a and b of the last batch, of all ranks; number of policy updates, last mean reward."""
        a, b = distributed.gather(self._shape.T, self.group).mean(0).tolist()
        return {"a": a, "b": b, "reward": self._reward, "updates": self.updates}

    def state_dict(self) -> dict[str, Any]:
        """Policy, its optimiser, the queue, S and the running reward statistics."""
        if self.policy is None:
            return {}
        return {
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "queue": torch.stack(self.queue) if self.queue else None,
            "selected": self.selected,
            "updates": self.updates,
            "reward": (self.reward_mean, self.reward_scale),
            "last_reward": self._reward,
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device | str = "cpu") -> None:
        """Restore what `state_dict` gave; the policy is put on `device`."""
        if not state:
            return
        weight = state["policy"]["convolutions.0.weight"]
        self._build(weight.shape[1], torch.device(device), weight.dtype).load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.queue = [] if state["queue"] is None else list(state["queue"].cpu())
        self.selected = None if state["selected"] is None else state["selected"].cpu()
        self.updates = state["updates"]
        self.reward_mean, self.reward_scale = state["reward"]
        self._reward = state["last_reward"]


def select(queue: Tensor, count: int, signed: bool = True) -> Tensor:
    """The `count` features that explain the target best: largest F-statistic among those that go with it.

    The F-statistic of a linear regression on one feature, r²/(1-r²)(n-2), grows with r², so the order is that of the
    correlation r with the target, the row mean (Kim et al. 2025, algorithm 2 and appendix 10); its sign counts here.

    Args:
        queue: measured changes, float64 (rows, features), 3 rows or more.
        count: number of features.
        signed: whether the sign counts; without, what has no correlation is at 0.
    """
    target = queue.mean(1)
    centred, aim = queue - queue.mean(0), target - target.mean()
    scale = centred.norm(dim=0) * aim.norm()
    correlation = (centred * aim[:, None]).sum(0) / scale
    score = torch.where(scale > 0, correlation, -torch.inf) if signed else torch.nan_to_num(correlation**2)
    return score.argsort(descending=True, stable=True)[:count].sort().values
