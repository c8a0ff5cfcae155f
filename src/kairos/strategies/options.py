"""What samplers and weightings can be told. No torch here: options are checked before any job, and when listed."""

from kairos.errors import Refusal, demand
from kairos.options import Options, option
from kairos.strategies.points import POINTS


class Mixed(Options):
    """What every sampler can be told."""

    floor: float = option(0.0, "share of draws that are uniform instead", ge=0, lt=1)
    importance: bool = option(False, "weight each loss by 1/(T p(t)): uniform's objective, another noise")


class Fixed(Mixed):
    """What every sampler of a fixed density can be told."""

    points: str = option("random", "uniform numbers that draws are made from", choices=POINTS)


class Uniform(Fixed):
    """Timesteps start ... end - 1."""

    start: int = option(0, "first timestep drawn", ge=0)
    end: int | None = option(None, "timestep after the last one drawn; null: T", ge=1)

    def __post_init__(self) -> None:
        start, end = self.start, self.end
        demand(end is None or start < end, "start and end", f"{start} and {end}", "start < end")
        if self.importance and not self.floor and (start or end is not None):
            raise Refusal(
                "importance: got true with a range of timesteps; those outside are never drawn, so no weight brings "
                "back uniform's objective; allowed: false, or a floor above 0"
            )

    def check_fits(self, timesteps: int, schedule: str) -> None:
        """Refuse, before any job, what this process cannot have; raises ValueError."""
        demand(self.start < timesteps, "start", self.start, f"0 to T - 1 = {timesteps - 1}")
        demand((self.end or 0) <= timesteps, "end", self.end, f"start + 1 to T = {timesteps}")


class LogNormal(Fixed):
    """t/T = sigmoid(N(m, s²))."""

    m: float = option(0.0, "mean of logit(t/T)")
    s: float = option(1.0, "standard deviation of logit(t/T)", gt=0)


class EdmLogNormal(Fixed):
    """ln sigma ~ N(mean, std²)."""

    mean: float = option(-1.2, "mean of ln sigma, sigma² = 1/SNR")
    std: float = option(1.2, "standard deviation of ln sigma", gt=0)


class Mode(Fixed):
    """SD3's mode sampling; monotone within the bounds of m, which is what makes it a density of its own."""

    m: float = option(1.29, "scale of the bump: > 0 the middle, < 0 the ends; at most 2/(pi - 2)", ge=-1, le=1.7519)


class Beta(Fixed):
    """t/T ~ Beta(a, b)."""

    a: float = option(0.8, "first parameter; below 1 it prefers small t", gt=0)
    b: float = option(1.0, "second parameter; below 1 it prefers large t", gt=0)


class Clts(Fixed):
    """From uniform to N(mu, s²) over training."""

    mu: float = option(0.3, "mean of t/T at the end of the curriculum", ge=0, le=1)
    s: float = option(0.2, "its standard deviation; not published, this is our choice", gt=0)
    length: int = option(50_000, "steps until the density is normal alone", ge=1)


class Speed(Fixed):
    """SpeeD's step function."""

    k: float = option(5.0, "how much more often timesteps before tau are drawn", gt=0)
    tau: int | None = option(None, "first timestep of the convergence area; null: 0.7 T", ge=1)
    r: float | None = option(None, "magnitude that tau is derived from instead, linear schedule", gt=1)

    def __post_init__(self) -> None:
        demand(self.tau is None or self.r is None, "tau and r", f"{self.tau} and {self.r}", "one of them")

    def check_fits(self, timesteps: int, schedule: str) -> None:
        """Refuse, before any job, what this process cannot have; raises ValueError."""
        check_tau(self.tau, timesteps)
        check_linear(self.r, schedule)


def check_linear(r: float | None, schedule: str) -> None:
    """The closed form of a magnitude's timestep holds for one schedule; raises ValueError."""
    demand(r is None or schedule == "linear", "r", f"{r} with schedule {schedule}", "schedule linear, or give tau")


def check_tau(tau: int | None, timesteps: int) -> None:
    """A timestep that has others before and behind it, or none; raises ValueError."""
    demand(tau is None or 0 < tau < timesteps, "tau", tau, f"1 to T - 1 = {timesteps - 1}")


class Public:
    """What SpeeD's public code cannot do: its forms stand on the increments of a discrete process."""

    tau: int | None = None

    def check_fits(self, timesteps: int, schedule: str) -> None:
        """Refuse, before any job, what this process cannot have; raises ValueError."""
        discrete = schedule not in ("edm", "fdm", "flow", "vp")
        demand(discrete, "process", schedule, "discrete, which the public code's form is of")
        check_tau(self.tau, timesteps)


class SpeedOfficial(Fixed, Public):
    """SpeeD's public code."""

    k: float = option(5.0, "how much more often timesteps before tau are drawn, in the half that is drawn", gt=0)
    tau: int | None = option(None, "first timestep of the convergence area; null: 0.7 T", ge=1)


class SpeedV1(Fixed, Public):
    """SpeeD's first public code."""


class LossSecondMoment(Options):
    """Improved DDPM's; its importance weights are a part of it."""

    floor: float = option(0.001, "share of draws that are uniform instead", gt=0, lt=1)
    history: int = option(10, "losses kept per timestep; uniform until each has them", ge=1)


class LossRms(Options):
    """Smoothed over t and in time; its importance weights are a part of it."""

    floor: float = option(0.1, "share of draws that are uniform instead", gt=0, lt=1)
    width: float = option(0.02, "standard deviation of the smoothing in t, as a share of T", gt=0, le=1)
    decay: float = option(0.999, "decay per step of what was observed", gt=0, lt=1)
    start: int = option(100, "steps before the density is first set", ge=1)
    frequency: int = option(10, "steps between settings of the density", ge=1)


class Measured(Options):
    """What is measured in bins of t."""

    floor: float = option(0.1, "share of draws that are uniform instead", ge=0, lt=1)
    bins: int = option(16, "bins of t that gradients are measured in", ge=2)
    samples: int | None = option(None, "samples per bin and measurement; null: about a batch in all", ge=2)
    frequency: int = option(100, "steps between measurements", ge=1)
    decay: float = option(0.8, "decay of earlier measurements", ge=0, lt=1)
    start: int = option(3, "measurements before the density is first set", ge=1)


class GradientNorm(Measured):
    """Its importance weights are a part of it."""

    norm: str = option("preconditioned", "metric of the gradient's size", choices=("plain", "preconditioned"))


class GradientVariance(Mixed, Measured):
    """As published: without a floor and without importance weights."""


class FirstOrder(Mixed, Measured):
    """The floor keeps timesteps alive that would raise the target for now."""

    floor: float = option(0.2, "share of draws that are uniform instead", gt=0, lt=1)


class Adaptive(Mixed):
    """The learned sampler of Kim et al. (2025), with the repairs named in `strategies.adaptive`."""

    frequency: int = option(40, "f_S: model steps between policy updates", ge=1)
    queue: int = option(20, "|Q|: measurements that features are selected from", ge=3)
    selected: int = option(3, "|S|: timesteps that the reward is measured at", ge=1)
    lr: float = option(1e-2, "learning rate of the policy (the paper: 1e-2 linear and quadratic, 1e-3 cosine)", gt=0)
    entropy: float = option(1e-2, "weight of the entropy bonus", ge=0)
    width: int = option(128, "hidden width of the policy", ge=1)
    depth: int = option(2, "hidden layers of the policy", ge=1)
    grad_clip: float = option(1.0, "largest gradient norm of a policy step", gt=0)
    feature_timesteps: int | None = option(100, "timesteps of the feature vector, evenly spread; null: all T", ge=1)
    feature_images: str = option("one", "images that the feature vector is measured on", choices=("one", "batch"))
    c_max: float | None = option(None, "cap on the VLB coefficient c_t in the measured losses; null: none", gt=0)
    reward_decay: float = option(0.9, "decay of the running mean and scale of the rewards", ge=0, lt=1)

    def check_fits(self, timesteps: int, schedule: str) -> None:
        """Refuse, before any job, what this process cannot have; raises ValueError."""
        count = min(self.feature_timesteps or timesteps, timesteps)
        demand(self.selected <= count, "selected", self.selected, f"1 to {count}, the timesteps of the feature vector")


class AdaptiveOfficial(Adaptive):
    """Its public code: all T timesteps in the feature vector, a queue of 2 or more."""

    queue: int = option(20, "|Q|: measurements that features are selected from", ge=2)
    feature_timesteps: int | None = option(None, "timesteps of the feature vector, evenly spread; null: all T", ge=1)


class P2(Options):
    """(k + SNR)^-gamma on the squared error of epsilon."""

    k: float = option(1.0, "offset of the SNR", gt=0)
    gamma: float = option(1.0, "exponent; 0 switches the weighting off", ge=0)


class MinSnr(Options):
    """min(SNR, gamma)/SNR, or gamma/(SNR + gamma), on the squared error of epsilon."""

    gamma: float = option(5.0, "cap of the SNR", gt=0)


class Debiased(Options):
    """1/sqrt(SNR) on the squared error of epsilon."""

    convert: bool = option(False, "for v: convert the epsilon form instead of the published 1/(SNR + 1)")


class Edm(Options):
    """(sigma² + sigma_data²)/(sigma sigma_data)² on the squared error of x0."""

    sigma_data: float | None = option(
        None, "standard deviation of the data; null: that of process edm, else 0.5, as of pixels", gt=0
    )
    warmup: int | None = option(None, "steps in which a cap of 5 grows to 500 and goes (FDM); null: no cap", ge=1)


_BASES = ("none", "vlb", "p2", "min_snr", "soft_min_snr", "debiased", "edm", "change_aware")


class Uncertainty(Options):
    """w/exp(u) times the loss, plus u, where u is trained."""

    base: str = option("edm", "w", choices=_BASES, component=True)
    sigma_data: float | None = option(None, "standard deviation of the data, for base edm", gt=0)
    channels: int = option(128, "Fourier features of ln sigma that u is linear in", ge=1)
    lr: float = option(1e-2, "learning rate of u", gt=0)


class ChangeAware(Options):
    """SpeeD's weights: the change of the process, rescaled to [1 - lambda, lambda]."""

    lam: float = option(0.6, "largest weight; 1 - lambda is the smallest", ge=0.5, le=1, alias="lambda")


class ChangeAwareOfficial(ChangeAware, Public):
    """... and 1 from tau on."""

    tau: int | None = option(None, "timestep from which the weight is 1; null: 0.7 T", ge=1)
