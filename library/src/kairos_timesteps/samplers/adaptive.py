"""Adaptive samplers after Kim et al. 2025 (CVPR): kairos' variant `Adaptive`, and the paper's text, `AdaptivePaper`.

A policy maps a clean image to a, b > 0; the image's timestep is at fraction u ~ Beta(a, b). Every f_S steps the sampler
measures how one optimizer step changed the VLB. REINFORCE moves the policy towards timesteps whose step lowered it.
The *feature vector* is the change at many timesteps for one image; its mean is the *target*. S are the |S| timesteps
whose changes explain the target best, over a *queue* of measurements. The reward is measured at S for all images.

Three samplers share the code, and differ in their options:

| | `Adaptive` (kairos) | `AdaptivePaper` | `AdaptiveOfficial` (public code) |
|---|---|---|---|
| error of epsilon | mean over pixels | sum over pixels | mean over pixels |
| reward | mean over S, centred and scaled | mean over S | sum over S |
| entropy | a separate bonus | in the reward | in the reward |
| correlation with the target | positive | either sign | either sign |
| S is used | from the next measurement on | at once | from the next measurement on |
| feature vector | 100 timesteps | all T | all T |
| noise after the step, mode | equal, evaluation | equal, evaluation | fresh, training |
| first reward | after three measurements | at the third measurement | at the first one, with S = {0, 1, 2} |

The state contains policy, optimizer, queue and S. With several processes everything is computed for the global batch:
each rank measures its images, and all ranks hold equal policies, queues and S.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kairos_timesteps import distributed
from kairos_timesteps.base import Cost, MeasuresNetwork, Observation, Sampler
from kairos_timesteps.coordinates import RandomCoordinates
from kairos_timesteps.diffusion.schedule import NoiseSchedule
from kairos_timesteps.errors import ConfigError, DivergedError, demand
from kairos_timesteps.incomplete_beta import beta_cdf
from kairos_timesteps.lazy import Tensor, torch
from kairos_timesteps.numeric import Array, Values, on_device
from kairos_timesteps.options import option
from kairos_timesteps.randomness import derived_seed
from kairos_timesteps.registry import sampler

# learning rates of the policy by schedule (Kim et al. 2025, table 7; two text versions of the table differ for cosine,
# 1e-3 and 1e-2: the first one is used)
PUBLISHED_LEARNING_RATES = {"linear": 1e-2, "quadratic": 1e-2, "cosine": 1e-3}
UNPUBLISHED_LEARNING_RATE = 1e-3  # for all other schedules and processes; the paper's value in latents (tables 8, 9)

# choices of options
_ERRORS = ("mean", "sum")
_REWARDS = ("standardised", "mean", "sum")
_ENTROPY_TERMS = ("bonus", "reward")
_CORRELATIONS = ("positive", "any")
_SELECTIONS = ("next", "same")

_EDGE = 1e-6  # fractions are kept this far from 0 and 1, where log-densities diverge
_INITIAL = math.log1p(math.exp(0.5)) + 1e-5  # a and b of a new policy: softplus of its last bias


@sampler("adaptive", "kairos' variant of the learned Beta policy per image (after Kim et al. 2025)")
class Adaptive(MeasuresNetwork, Sampler):
    r"""Adaptive sampler: a policy gives each image a Beta density, and learns by reward (after Kim et al. 2025).

    $$u \sim \mathrm{Beta}(a, b), \quad (a, b) = \pi_\phi(x_0), \qquad
    r = \frac{1}{|S|} \sum_{t \in S} \frac{c_t}{D}
    \left(\|\epsilon - \epsilon_\theta\|^2 - \|\epsilon - \epsilon_{\theta'}\|^2\right)$$

    D is the number of values of an image. $\theta$ and $\theta'$ are the network before and after a step. S are the
    timesteps whose change explains the change of all timesteps best. The reward is centred on a running mean and
    scaled, and the entropy is a separate bonus. The coefficient of the entropy has therefore another meaning than the
    paper's: 0.01 regularises much less here. `AdaptivePaper` is the paper's text.

    Attributes:
        dropout: True if the network is measured in training mode.
        noise_after: random stream of the noise after the step; equal to that before it.
        density_scale: du/df, where u is a draw of the policy and f = to_fraction(u) its fraction of the process.
        features: measured timesteps, int64 (count,).
        feature_weights: share of all timesteps that each measured one represents, float64 (count,).
        least_rows: rows of the queue before S is selected from it; with fewer every F-statistic is 0.

    Raises:
        ConfigError: the feature vector has more timesteps than the process, or fewer than are selected from it.
    """

    frequency: int = option(40, "f_S: model steps between policy updates", ge=1)
    queue: int = option(20, "|Q|: measurements that features are selected from", ge=3)
    selected: int = option(3, "|S|: timesteps that the reward is measured at", ge=1)
    lr: float | None = option(
        None,
        "learning rate of the policy; null: the paper's of table 7, 1e-2 on the linear and quadratic schedule, 1e-3 on "
        "cosine; 1e-3 on all others, for which no value is published. In latents the paper has 1e-3 (tables 8, 9)",
        gt=0,
    )
    entropy: float = option(1e-2, "weight of the policy's entropy", ge=0)
    width: int = option(128, "hidden width of the policy", ge=1)
    depth: int = option(2, "hidden layers of the policy", ge=1)
    grad_clip: float = option(1.0, "largest gradient norm of a policy step", gt=0)
    feature_timesteps: int | None = option(
        100, "timesteps of the feature vector, one of each stratum, see `stratify_timesteps`; null: all T", ge=1
    )
    feature_images: str = option("one", "images that the feature vector is measured on", choices=("one", "batch"))
    c_max: float | None = option(None, "cap on the VLB coefficient c_t in the measured losses; null: none", gt=0)
    reward_decay: float = option(0.9, "decay of the running mean and scale of the rewards", ge=0, lt=1)
    error: str = option("mean", "measured squared error: mean or sum over the values of an image", choices=_ERRORS)
    reward: str = option(
        "standardised",
        "reward of an image: mean or sum of its changes at S; standardised: the mean, centred and scaled",
        choices=_REWARDS,
    )
    entropy_in: str = option(
        "bonus", "entropy as a separate bonus, or added to the reward, which multiplies log pi", choices=_ENTROPY_TERMS
    )
    correlation: str = option(
        "positive", "features that may be selected: only those that rise with the target, or any", choices=_CORRELATIONS
    )
    selection: str = option(
        "next", "measurement whose reward uses a selection of S: the next one, or the same one", choices=_SELECTIONS
    )

    per_image = True
    dropout = False
    noise_after = "measurement"
    density_scale = 1.0
    least_rows = 3

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        timesteps = schedule.timesteps
        self.check_process(options, timesteps, schedule.name)
        count = min(self.feature_timesteps or timesteps, timesteps)
        features, weights = stratify_timesteps(schedule, count)
        self.features, self.feature_weights = torch.from_numpy(features), torch.from_numpy(weights)
        if self.lr is None:
            self.lr = PUBLISHED_LEARNING_RATES.get(schedule.name, UNPUBLISHED_LEARNING_RATE)
        cap = np.inf if self.c_max is None else self.c_max
        self.coefficients = torch.from_numpy(np.minimum(schedule.vlb, cap))
        self.reset()

    def reset(self) -> None:
        """Set the state before the first batch."""
        self.policy: Any = None  # a `Policy` and its Adam, from the first batch on
        self.optimizer: Any = None
        self.changes: list[Tensor] = []  # the queue: feature vectors delta, float64 (count,), on the CPU
        self.reward_timesteps: Tensor | None = None  # S
        self.updates = 0
        self.reward_mean = 0.0
        self.reward_scale = 0.0
        self._shape = torch.full((2, 1), _INITIAL, dtype=torch.float64)  # a and b of this rank's last batch
        self._reward = 0.0

    @staticmethod
    def check_process(options: Any, timesteps: int, schedule: str) -> None:
        """Reject a selection of more timesteps than the feature vector has."""
        feature_timesteps = getattr(options, "feature_timesteps", None)  # a subclass may fix it, then it is no option
        count = min(feature_timesteps or timesteps, timesteps)
        allowed = f"1 to {count}, the timesteps of the feature vector"
        demand(options.selected <= count, "selected", options.selected, allowed)

    def _build(self, channels: int, device: "torch.device", dtype: "torch.dtype") -> Any:
        """Return the policy; build it with its optimizer at first use, when the number of channels is known.

        Its weights depend on the seed alone, and torch's generators are unchanged. The policy is float64 for float64
        images, otherwise float32. Later calls ignore the arguments.
        """
        from kairos_timesteps.optimizers import Adam
        from kairos_timesteps.samplers.policy import Policy

        if self.policy is None:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(derived_seed(self.seed, "policy"))
                self.policy = Policy(channels, self.width, self.depth)
            self.policy.to(device, torch.float64 if dtype == torch.float64 else torch.float32)
            assert self.lr is not None  # set at construction
            self.optimizer = Adam(self.policy.parameters(), lr=self.lr)
        return self.policy

    def cdf(self, u: Values, **context: Any) -> Values:
        """Raise ConfigError: each image has its own distribution function."""
        raise ConfigError("adaptive: each image has its own density; draw with images: Strategy.draw(x0)")

    def draw(self, coordinates: RandomCoordinates, x0: Tensor | None = None) -> Tensor:
        """Draw from each image's Beta distribution, float64 (batch, *times_shape), on the device of the images.

        The first draw builds the policy. `statistics` reports a and b of the last draw.

        Raises:
            ConfigError: `x0` is not a batch of images.
        """
        if x0 is None:
            return super().draw(coordinates)  # raises an error
        allowed = "(batch, channels, height, width)"
        demand(x0.ndim == 4, "adaptive: x0", f"shape {tuple(x0.shape)}", allowed)
        self._build(x0.shape[1], x0.device, x0.dtype)
        with torch.no_grad():
            self._shape = torch.stack(self.policy(x0)).double()  # (2, batch)
        a, b = self._shape
        u = coordinates.stream("timesteps").beta(
            coordinates.step, coordinates.indices_in_step, a, b, coordinates.times_shape
        )
        fractions = self.to_fraction(u.clamp(_EDGE, 1 - _EDGE))
        if not self.floor:
            return fractions
        uniform = coordinates.uniform("floor", 2)
        return torch.where(uniform[..., 0] < self.floor, uniform[..., 1], fractions)

    def to_fraction(self, u: Tensor) -> Tensor:
        """Map draws of the policy to fractions of the process, elementwise."""
        return u

    def from_fraction(self, fractions: Tensor) -> Tensor:
        """Map fractions of the process to draws of the policy, elementwise."""
        return fractions

    def borders(self) -> Array:
        """Return the borders of the timesteps' cells in u, (T + 1,)."""
        return np.arange(self.schedule.timesteps + 1) / self.schedule.timesteps

    def masses(self, x0: Tensor | None = None, **context: Any) -> Array:
        """Return the mean p(t) over the images `x0`, (T,).

        Without images, and before the first draw, it is the p(t) of a new policy.
        """
        if self.policy is None or x0 is None:
            return np.diff(beta_cdf(self.borders(), np.array(_INITIAL), np.array(_INITIAL)))
        with torch.no_grad():
            a, b = (value.double().cpu().numpy()[:, None] for value in self.policy(x0))
        by_image = np.diff(beta_cdf(self.borders()[None], a, b), axis=1)
        return np.asarray(by_image.mean(0))

    def importance_weights(self, x0: Tensor, fractions: Tensor, coordinates: RandomCoordinates) -> Tensor | None:
        """Return 1 over the density of each draw given its image, relative to uniform; None without `importance`.

        The density includes the floor. The weights are float32, in the shape of `fractions`.
        """
        if not self.importance:
            return None
        with torch.no_grad():
            a, b = self.policy(x0)
            return torch.exp(-self._log_density(a, b, fractions)).float()

    def _log_density(self, a: Tensor, b: Tensor, fractions: Tensor) -> Tensor:
        """Return the log density of fractions (batch, *times_shape), floor included, given a and b, each (batch,)."""
        u, per_time = self.from_fraction(fractions), [1] * (fractions.ndim - 1)
        policy = beta_distribution(a.view(-1, *per_time), b.view(-1, *per_time))
        log: Tensor = policy.log_prob(u.clamp(_EDGE, 1 - _EDGE).to(a)) + math.log(self.density_scale)
        if not self.floor:
            return log
        log = torch.where((u >= 0) & (u <= 1), log + math.log1p(-self.floor), -math.inf)
        return torch.logaddexp(log, torch.full_like(log, math.log(self.floor)))

    @contextmanager
    def observe(self, observation: Observation) -> Iterator[None]:
        """Measure the losses around the optimizer step and, every f_S steps, learn from their change.

        Step 0 is measured. The policy learns once S is selected from `least_rows` rows of the queue. With option
        ``selection: same`` a copy of the weights is kept during measured steps, to measure the losses at the new S
        before the step.
        """
        if not self.measures_in_step(observation.step):
            yield
            return
        if self.selection == "same":
            features_before = self._measure_features(observation, "measurement")
            weights_before = observation.meter.copy_weights()
            yield
            self._push(features_before - self._measure_features(observation, self.noise_after))
            if self.reward_timesteps is None:
                return
            after = self._measure_rewards(observation, self.noise_after)
            with observation.meter.weights(weights_before):
                before = self._measure_rewards(observation, "measurement")
            self._learn(observation, before - after)
            return
        features_before = self._measure_features(observation, "measurement")
        before = self._measure_rewards(observation, "measurement")
        yield
        features_after = self._measure_features(observation, self.noise_after)
        after = self._measure_rewards(observation, self.noise_after)
        if before is not None:
            self._learn(observation, before - after)
        self._push(features_before - features_after)

    def _push(self, change: Tensor) -> None:
        """Append a row to the queue and select S from its rows; a row that is not finite is left out."""
        if change.isfinite().all():  # a single NaN in the queue would make every correlation NaN
            self.changes = [*self.changes, change][-self.queue :]
        if len(self.changes) >= self.least_rows:
            self.reward_timesteps = self.features[self.select(torch.stack(self.changes))]

    def measures_in_step(self, step: int) -> bool:
        """Return True in every f_S-th step from step 0 on."""
        return step % self.frequency == 0

    def select(self, changes: Tensor) -> Tensor:
        """Return indices of the selected feature timesteps, given the queue (rows, features)."""
        return select_timesteps(changes, self.selected, self.feature_weights, signed=self.correlation == "positive")

    def _measure_features(self, observation: Observation, noise: str) -> Tensor:
        """Measure the c_t-weighted losses of the feature vector, float64 (count,) on the CPU."""
        coordinates, count = observation.coordinates, len(self.features)
        size = coordinates.batch_size
        if self.feature_images == "one":
            image = coordinates.stream("measured image").integers(coordinates.step, size, range(1))
            index = image.expand(count)
        else:
            index = torch.arange(count) * size // count
        return self._losses(observation, index, self.features, noise)

    def _measure_rewards(self, observation: Observation, noise: str) -> Any:
        """Measure the c_t-weighted losses of all images at S, float64 (global batch, |S|); None without S."""
        if self.reward_timesteps is None:
            return None
        size = observation.coordinates.batch_size
        losses = [
            self._losses(observation, torch.arange(size), t.expand(size), f"{noise} at S {k}")
            for k, t in enumerate(self.reward_timesteps)
        ]
        return torch.stack(losses, 1)

    def cost(self, batch: int, channels: int) -> Cost:
        """Return the cost of the feature vector and the batch at each of S, before and after one step of f_S."""
        from kairos_timesteps.samplers.policy import Policy

        features = len(self.features)
        with torch.device("meta"):
            policy = Policy(channels, self.width, self.depth)
        parameter_count = sum(parameter.numel() for parameter in policy.parameters())
        forward = 2 * (features + self.selected * batch) / self.frequency
        return Cost(forward, state=3 * 4 * parameter_count + 8 * features * self.queue)

    def _losses(self, observation: Observation, index: Tensor, t: Tensor, noise: str) -> Tensor:
        fractions = (t + 0.5).double() / self.schedule.timesteps
        errors: Tensor = observation.meter.errors(index, fractions, noise, self.dropout)  # means over an image
        if self.error == "sum":
            assert observation.x0 is not None  # samplers that measure get images of one shape
            errors = errors * math.prod(observation.x0.shape[1:])
        return errors * self.coefficients[t]

    def _learn(self, observation: Observation, change: Tensor) -> None:
        """Take one REINFORCE step (Kim et al. 2025, eq. 13).

        Gradients are summed over the ranks, which must all call it.

        Args:
            observation: the step.
            change: decrease of the losses at S, (global batch, |S|).

        Raises:
            DivergedError: the gradient of the policy is not finite.
        """
        assert observation.x0 is not None  # samplers that measure get images of one shape
        indices = observation.coordinates.sample_indices
        rows = slice(indices.start, indices.stop, indices.step) if isinstance(indices, range) else indices.cpu()
        advantage = on_device(self.advantage(change)[rows], observation.x0.device).to(self.policy.last.weight.dtype)
        self.optimizer.zero_grad(set_to_none=True)
        a, b = self.policy(observation.x0)
        log_density = self._log_density(a, b, observation.fractions)
        if log_density.ndim > 1:
            log_density = log_density.flatten(1).sum(1)  # over times: (batch,)
        entropy = beta_distribution(a, b).entropy()
        (-self.objective(log_density, entropy, advantage).sum() / observation.coordinates.batch_size).backward()
        gradients = [parameter.grad for parameter in self.policy.parameters() if parameter.grad is not None]
        distributed.sum_tensors(gradients, self.group)
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.grad_clip)
        if not math.isfinite(norm.item()):
            raise DivergedError(
                f"step {observation.step + 1}: the gradient of the adaptive sampler's policy is not finite; "
                f"sampler.lr is {self.lr:g}, a lower one may help"
            )
        self.optimizer.step()
        self.updates += 1

    def advantage(self, change: Tensor) -> Tensor:
        """Return the reward of every sample, (global batch,), from its `change` at each of S, (global batch, |S|).

        With option ``reward: standardised`` it is centred on a running mean and scaled, which are updated first.
        """
        rewards = change.sum(1) if self.reward == "sum" else change.mean(1)
        if self.reward != "standardised":
            self._reward = rewards.mean().item()
            return rewards
        decay = self.reward_decay if self.updates else 0.0
        mean, scale = rewards.mean().item(), rewards.std(unbiased=False).item()
        self.reward_mean = decay * self.reward_mean + (1 - decay) * mean
        self.reward_scale = decay * self.reward_scale + (1 - decay) * max(scale, abs(mean - self.reward_mean))
        self._reward = mean
        return (rewards - self.reward_mean) / (self.reward_scale + 1e-12)

    def objective(self, log_density: Tensor, entropy: Tensor, advantage: Tensor) -> Tensor:
        """Return the objective that is maximised, per sample (batch,).

        Its gradient is (reward + entropy) ∇log pi (Kim et al. 2025, eq. 13) or, with the entropy as a bonus,
        reward ∇log pi + ∇entropy.
        """
        if self.entropy_in == "reward":
            return log_density * (advantage + self.entropy * entropy.detach())
        return log_density * advantage + self.entropy * entropy

    def statistics(self) -> dict[str, float]:
        """Return mean a and b of this rank's last batch, the number of updates and the last mean reward."""
        a, b = self._shape.cpu().T.mean(0).tolist()
        return {"a": a, "b": b, "reward": self._reward, "updates": self.updates}

    def state_dict(self) -> dict[str, Any]:
        """Return the policy, its optimizer, the queue, S and the running statistics of the reward.

        Entry ``queue`` contains `changes`, and ``selected`` contains `reward_timesteps`. The state is empty before the
        first batch.
        """
        if self.policy is None:
            return {}
        state = {
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "queue": torch.stack(self.changes) if self.changes else None,
            "selected": self.reward_timesteps,
            "updates": self.updates,
            "reward": (self.reward_mean, self.reward_scale),
            "last_reward": self._reward,
        }
        return copy.deepcopy(state)  # the policy and the optimizer return the tensors that they update

    def load_state_dict(self, state: dict[str, Any], device: "torch.device | str" = "cpu") -> None:
        """Restore a state that `state_dict` returned; an empty state restores the initial one.

        The policy is built on `device`, with the number of channels in the state. The queue and S stay on the CPU.
        """
        self.reset()
        if not state:
            return
        state = copy.deepcopy(state)  # the optimizer keeps the tensors that it loads
        weight = state["policy"]["convolutions.0.weight"]
        self._build(weight.shape[1], torch.device(device), weight.dtype).load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.changes = [] if state["queue"] is None else list(state["queue"].cpu())
        self.reward_timesteps = None if state["selected"] is None else state["selected"].cpu()
        self.updates = state["updates"]
        self.reward_mean, self.reward_scale = state["reward"]
        self._reward = state["last_reward"]


def beta_distribution(a: Tensor, b: Tensor) -> Any:
    """Return the distribution without torch's check of parameters and arguments, which synchronises with the device."""
    return torch.distributions.Beta(a, b, validate_args=False)


@sampler("adaptive_paper", "the learned Beta policy per image, by the letter of the paper (Kim et al. 2025)")
class AdaptivePaper(Adaptive):
    r"""Adaptive sampler by the letter of the paper: algorithms 1 and 2, with the choices below (Kim et al. 2025).

    $$u \sim \mathrm{Beta}(a, b), \quad (a, b) = \pi_\phi(x_0), \qquad
    \tilde\Delta = \frac{1}{|S|} \sum_{t \in S} c_t
    \left(\|\epsilon - \epsilon_\theta\|^2 - \|\epsilon - \epsilon_{\theta'}\|^2\right)$$

    $$\phi \leftarrow \phi + \gamma \left(\tilde\Delta + \lambda H(\pi_\phi)\right) \nabla_\phi \log \pi_\phi(u | x_0)$$

    - The norm is squared and summed over the values of an image (eq. 10), and the reward of an image is the mean over S
      (algorithm 2, line 7), neither centred nor scaled.
    - "In practice, we also include entropy regularization for the sampler in Delta" (section 5.1): the entropy H is
      part of what multiplies the gradient of log pi (eq. 13).
    - S has the largest F-statistics of all T timesteps, with the mean over all T as target and without the entropy
      (appendix 10). The measurement that selects S uses it (algorithm 2, lines 5 and 7). So a copy of the weights
      before the step is kept in measured steps.

    Choices, where the text leaves one or cannot be computed:

    - The policy takes no step before three rows are in the queue. Algorithm 2 selects from two rows on, for which the
      F-statistic is not defined.
    - The single x0 of the feature vector is an image of the minibatch, since a library sees no data set.
    - One noise is drawn for the losses before and after the step, so that their difference is the effect of the step.
      The network is in evaluation mode, for the same reason.
    - F ignores the sign of a correlation, as printed.
    - The policy has the convolutions of the public code, before the paper's hidden layers ("Hidden Channels" 128,
      "Hidden Depth" 2, table 7). Its optimizer is Adam with betas 0.9 and 0.999, as in the public code; the paper
      names none. Gradients are clipped to norm 1, the only value of "Gradient Norm" in table 7.
    - The policy has an optimizer step per measurement, not per image: gradients are means over the minibatch.
    """

    feature_timesteps = None
    feature_images = "one"
    c_max = None
    error = "sum"
    reward = "mean"
    entropy_in = "reward"
    correlation = "any"
    selection = "same"


def stratify_timesteps(schedule: NoiseSchedule, count: int) -> tuple[NDArray[np.int64], Array]:
    """Divide all timesteps into strata, and return one timestep of each with the share of timesteps in its stratum.

    The first and the last timestep are strata of their own, because a coefficient of the VLB may be largest there. The
    others have about equal shares of two quantities: number of timesteps and fall of the log SNR. So strata are short
    where the loss changes fast, at both ends. The mean over all timesteps is estimated by the weighted mean.

    Args:
        schedule: noise schedule with T timesteps.
        count: number of strata, at most T; with one or two, ends are not separated.

    Returns:
        The middle timesteps of the strata, ascending, int64 (count,), and the shares, float64 (count,).
    """
    timesteps = schedule.timesteps
    log_snr_fall = np.abs(np.gradient(np.log(np.maximum(schedule.snr, 1e-20))))
    share = 1 / timesteps + log_snr_fall / log_snr_fall.sum()  # of each timestep; their sum is 2
    cumulative_share = np.concatenate([[0.0], np.cumsum(share) / 2])
    edges = np.searchsorted(cumulative_share, np.arange(count + 1) / count)
    edges[0], edges[-1] = 0, timesteps
    if count >= 3:
        edges[1], edges[-2] = 1, timesteps - 1
    for index in range(1, count):  # every stratum has a timestep or more
        edges[index] = max(edges[index], edges[index - 1] + 1)
    for index in range(count - 1, 0, -1):
        edges[index] = min(edges[index], edges[index + 1] - 1)
    return (edges[:-1] + edges[1:] - 1) // 2, np.diff(edges) / timesteps


def select_timesteps(queue: Tensor, count: int, weights: Tensor | None = None, signed: bool = True) -> Tensor:
    """Select the features with the largest F-statistics for the target; if `signed`, only those that rise with it.

    The F-statistic of a linear regression on one feature, r²/(1-r²)(n-2), grows with r². The order is therefore that of
    the correlation r with the target, the row mean (Kim et al. 2025, algorithm 2 and appendix 10).

    Args:
        queue: measured changes, float64 (rows, features), 3 rows or more.
        count: number of features to select.
        weights: weights of the features in the target, float64 (features,), with sum 1; None: equal weights.
        signed: True: order by r; False: by r², without correlation 0.

    Returns:
        Indices of the selected features, ascending, int64 (count,).
    """
    target = queue.mean(1) if weights is None else queue @ weights
    centred, centred_target = queue - queue.mean(0), target - target.mean()
    scale = centred.norm(dim=0) * centred_target.norm()
    correlation = (centred * centred_target[:, None]).sum(0) / scale
    score = torch.where(scale > 0, correlation, -torch.inf) if signed else torch.nan_to_num(correlation**2)
    return score.argsort(descending=True, stable=True)[:count].sort().values
