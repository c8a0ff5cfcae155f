"""Samplers and weightings by name; sampler x weighting, any with any."""

from dataclasses import dataclass

from kairos.options import option
from kairos.registry import NoOptions, Registry


@dataclass(frozen=True)
class LogNormalOptions:
    """t/T = sigmoid(N(m, s²))."""

    m: float = option(0.0, "mean of logit(t/T)")
    s: float = option(1.0, "standard deviation of logit(t/T)", gt=0)


@dataclass(frozen=True)
class SpeedOptions:
    """SpeeD's step function."""

    k: float = option(5.0, "how much more often timesteps before tau are drawn", gt=0)
    tau: int | None = option(None, "first timestep of the convergence area; null: 0.7 T", ge=1)
    r: float | None = option(None, "magnitude that tau is derived from instead, linear schedule", gt=1)

    def __post_init__(self) -> None:
        if self.tau is not None and self.r is not None:
            raise ValueError(f"tau and r: got {self.tau} and {self.r}, allowed: one of them")

    def check_fits(self, timesteps: int, schedule: str) -> None:
        """Refuse, before any job, what this process cannot have; raises ValueError."""
        if self.tau is not None and self.tau >= timesteps:
            raise ValueError(f"tau: got {self.tau}, allowed: 1 to T - 1 = {timesteps - 1}")
        if self.r is not None and schedule != "linear":
            raise ValueError(f"r: got {self.r} with schedule {schedule}, allowed: schedule linear, or give tau")


@dataclass(frozen=True)
class AdaptiveOptions:
    """The learned sampler of Kim et al. (2025), with the repairs named in `strategies.adaptive`."""

    frequency: int = option(40, "f_S: model steps between policy updates", ge=1)
    queue: int = option(20, "|Q|: measurements that features are selected from", ge=3)
    selected: int = option(3, "|S|: timesteps that the reward is measured at", ge=1)
    lr: float = option(1e-2, "learning rate of the policy (the paper: 1e-2 linear and quadratic, 1e-3 cosine)", gt=0)
    entropy: float = option(1e-2, "weight of the entropy bonus", ge=0)
    width: int = option(128, "hidden width of the policy", ge=1)
    depth: int = option(2, "hidden layers of the policy", ge=1)
    grad_clip: float = option(1.0, "largest gradient norm of a policy step", gt=0)
    feature_timesteps: int | None = option(None, "timesteps of the feature vector, evenly spread; null: all T", ge=3)
    c_max: float | None = option(None, "cap on the VLB coefficient c_t in the measured losses; null: none", gt=0)
    reward_decay: float = option(0.9, "decay of the running mean and scale of the rewards", ge=0, lt=1)

    def check_fits(self, timesteps: int, schedule: str) -> None:
        """Refuse, before any job, what this process cannot have; raises ValueError."""
        count = self.feature_timesteps or timesteps
        if count > timesteps or self.selected > count:
            raise ValueError(
                f"feature_timesteps {self.feature_timesteps} and selected {self.selected}, "
                f"allowed: selected <= feature_timesteps <= T = {timesteps}"
            )


SAMPLERS = Registry("sampler")
SAMPLERS.add("uniform", "kairos.strategies.fixed:Uniform", NoOptions, "every timestep alike (DDPM)")
SAMPLERS.add("log_normal", "kairos.strategies.fixed:LogNormal", LogNormalOptions, "logit-normal, middle timesteps")
SAMPLERS.add("speed", "kairos.strategies.fixed:Speed", SpeedOptions, "SpeeD, eq. 6: k times more often before tau")
SAMPLERS.add("adaptive", "kairos.strategies.adaptive:Adaptive", AdaptiveOptions, "a learned Beta policy per image")


@dataclass(frozen=True)
class P2Options:
    """(k + SNR)^-gamma on the squared error of epsilon."""

    k: float = option(1.0, "offset of the SNR", gt=0)
    gamma: float = option(1.0, "exponent; 0 switches the weighting off", ge=0)


@dataclass(frozen=True)
class MinSnrOptions:
    """min(SNR, gamma)/SNR on the squared error of epsilon."""

    gamma: float = option(5.0, "cap of the SNR", gt=0)


@dataclass(frozen=True)
class ChangeAwareOptions:
    """SpeeD's weights: the change of the process, rescaled to [1 - lambda, lambda]."""

    lam: float = option(0.6, "largest weight; 1 - lambda is the smallest", ge=0.5, le=1, alias="lambda")


WEIGHTINGS = Registry("weighting")
WEIGHTINGS.add("none", "kairos.strategies.weightings:Unweighted", NoOptions, "every timestep alike")
WEIGHTINGS.add("vlb", "kairos.strategies.weightings:Vlb", NoOptions, "the variational bound's own c_t")
WEIGHTINGS.add("p2", "kairos.strategies.weightings:P2", P2Options, "perception prioritised (Choi et al. 2022)")
WEIGHTINGS.add("min_snr", "kairos.strategies.weightings:MinSnr", MinSnrOptions, "Min-SNR-gamma (Hang et al. 2023)")
WEIGHTINGS.add("change_aware", "kairos.strategies.weightings:ChangeAware", ChangeAwareOptions, "SpeeD, section 2.4")
