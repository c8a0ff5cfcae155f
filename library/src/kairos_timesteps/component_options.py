"""What samplers and weightings can be told. No torch here: options are checked before any job, and when listed."""

from collections.abc import Mapping
from typing import Any

from kairos_timesteps.coordinates import POINTS
from kairos_timesteps.errors import Refusal, demand, refusal
from kairos_timesteps.options import Options, but_name, dump, option


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
            why = "those outside are never drawn, so no weight brings back uniform's objective"
            raise Refusal(f"importance: got true with a range of timesteps; {why}; allowed: false, or a floor above 0")

    def check_fits(self, timesteps: int, schedule: str) -> None:
        """Refuse, before any job, what this process cannot have; raises ValueError."""
        demand(self.start < timesteps, "start", self.start, f"0 to T - 1 = {timesteps - 1}")
        demand((self.end or 0) <= timesteps, "end", self.end, f"start + 1 to T = {timesteps}")


class LogNormal(Fixed):
    """t/T = sigmoid(N(m, s²))."""

    m: float = option(0.0, "mean of logit(t/T)")
    s: float = option(1.0, "standard deviation of logit(t/T)", gt=0)
    low: float = option(0.0, "quantile of the normal below which it is cut off, the rest stretched", ge=0, lt=1)
    high: float = option(1.0, "the same above", gt=0, le=1)

    def __post_init__(self) -> None:
        demand(self.low < self.high, "low and high", f"{self.low} and {self.high}", "low < high")


class LogSnr(Fixed):
    """ln SNR by a law."""

    law: str = option("laplace", "of ln SNR", choices=("normal", "laplace", "logistic", "cauchy", "secant"))
    location: float = option(0.0, "middle of ln SNR")
    scale: float = option(0.5, "the law's scale (normal: standard deviation)", gt=0)
    scale_above: float | None = option(None, "scale above the location; null: the same", gt=0)


class EdmLogNormal(Fixed):
    r"""A normal density of ln sigma, sigma² = 1/SNR (Karras et al. 2022, table 1).

    $$\ln \sigma \sim N(\mathrm{mean}, \mathrm{std}^2), \qquad
    p(\sigma) = \frac{1}{\mathrm{std} \sqrt{2 \pi} \, \sigma}
    \exp\left(-\frac{(\ln \sigma - \mathrm{mean})^2}{2 \, \mathrm{std}^2}\right)$$
    """

    mean: float = option(-1.2, "mean of ln sigma, sigma² = 1/SNR")
    std: float = option(1.2, "standard deviation of ln sigma", gt=0)
    law, scale_above = "normal", None

    @property
    def location(self) -> float:
        """Of ln SNR."""
        return -2 * self.mean

    @property
    def scale(self) -> float:
        """Of ln SNR."""
        return 2 * self.std


class CosineInterpolated(Fixed):
    """Shifted cosine schedules of ln SNR, interpolated."""

    image: float = option(64.0, "side of the images", gt=0)
    low: float = option(32.0, "side that the schedule is shifted to at the end of noise", gt=0)
    high: float = option(64.0, "the same at the image's end", gt=0)
    sigma_min: float = option(1e-3, "smallest noise level, over the data's standard deviation", gt=0)
    sigma_max: float = option(1e3, "largest noise level, likewise", gt=0)


class Mode(Fixed):
    """SD3's mode sampling; monotone within the bounds of m, which is what makes it a density of its own."""

    m: float = option(1.29, "scale of the bump: > 0 the middle, < 0 the ends; at most 2/(pi - 2)", ge=-1, le=1.7519)


class Beta(Fixed):
    """t/T ~ Beta(a, b)."""

    a: float = option(0.8, "first parameter; below 1 it prefers small t", gt=0)
    b: float = option(1.0, "second parameter; below 1 it prefers large t", gt=0)


class Parabola(Fixed):
    """p in proportion to max(0, 2 - weight (t/T - 1/2 - bias)²)."""

    weight: float = option(7.7, "of the square; 0 is uniform", ge=0)
    bias: float = option(0.0, "of the middle", gt=-0.5, lt=0.5)


class Slope(Fixed):
    """p in proportion to sigmoid(weight (t/T - 1/2 - bias))."""

    weight: float = option(4.0, "steepness; above 0 it prefers noise", ge=-100, le=100)
    bias: float = option(0.0, "where the sigmoid is 1/2, from the middle", ge=-5, le=5)


class UShape(Fixed):
    """p in proportion to e^(a t) + e^(a (1 - t))."""

    a: float = option(4.0, "how much the ends are preferred", gt=0, le=100)


def one_density(value: Any, where: str, *extra: str) -> dict[str, Any]:
    """A fixed sampler given by its name, or by its name and options, with all its options; `extra` keys stay."""
    from kairos_timesteps.components import SAMPLERS

    named = {"name": value} if isinstance(value, str) else value
    if not isinstance(named, Mapping) or not isinstance(named.get("name"), str):
        raise refusal(where, repr(value), "a sampler's name, or its name and options")
    missing = [key for key in extra if key not in named]
    demand(not missing, f"{where}.{', '.join(missing)}", "nothing", "one for each part")
    if not issubclass(SAMPLERS.entry(named["name"], where).options, Fixed):
        raise refusal(f"{where}.name", named["name"], "samplers of a fixed density")
    kept = {key: named[key] for key in extra}
    its = SAMPLERS.parse(named["name"], {k: v for k, v in but_name(dict(named)).items() if k not in extra}, where)
    demand(not its.importance, f"{where}.importance", "true", "false; the whole has one")
    points = getattr(its, "points", "random")
    demand(points == "random", f"{where}.points", points, "random; the whole sampler has points, its components do not")
    demand(not getattr(its, "in_turn", False), f"{where}.in_turn", "true", "false; a component is drawn at random")
    return {"name": named["name"], **dump(its), **kept}


def _density() -> Any:
    return option({"name": "uniform"}, "a fixed sampler: its name, or its name and options", component=one_density)


def _parts(key: str, kind: type, first: Any, meaning: str) -> Any:
    def check(value: Any, where: str) -> list[dict[str, Any]]:
        demand(isinstance(value, (list, tuple)) and value, where, repr(value), "a list of samplers, one or more")
        found = [one_density(part, f"{where}[{number}]", key) for number, part in enumerate(value)]
        for part in found:
            its = part[key]
            fits = isinstance(its, (int, float)) and not isinstance(its, bool) and its >= 0 if kind is float else True
            demand(fits, f"{where}.{key}", repr(its), "a number, 0 or more")
        numbers = [part[key] for part in found]
        rises = key != "start" or numbers == sorted(numbers)
        each_once = key == "share" or (rises and len({*map(str, numbers)}) == len(found))
        demand(each_once, f"{where}.{key}", numbers, meaning)
        demand(key != "share" or sum(numbers) > 0, f"{where}.share", numbers, "one above 0")
        return found

    said = f"samplers with options, each with its {key}: {meaning}"
    return option([{"name": "uniform", key: first}], said, component=check)


def asked(named: Mapping[str, Any]) -> set[str]:
    """What a call must say for a sampler given by its name and all its options, and for those that it is made of."""
    parts = named.get("parts", ())
    asks = {"by_group": len(parts) > 1, "shift": named.get("law") != "constant"}
    asks["schedule"] = named.get("of") == "progress"
    inside = [part for part in (named.get("density"), *parts) if part]
    told = {"by_group": "group", "shift": "tokens", "schedule": "progress"}.get(named["name"], "")
    return ({told} if asks.get(named["name"]) else set()).union(*map(asked, inside))


class Range(Fixed):
    """A density between two fractions of the process."""

    density: Any = _density()
    low: float = option(0.0, "t/T from which on", ge=0, lt=1)
    high: float = option(1.0, "t/T up to which", gt=0, le=1)
    cut: bool = option(True, "whether what lies outside is cut off; false: all of it is scaled into the range")

    def __post_init__(self) -> None:
        demand(self.low < self.high, "low and high", f"{self.low} and {self.high}", "low < high")
        if self.importance and not self.floor and (self.low, self.high) != (0, 1):
            raise Refusal("importance: got true with a range; allowed: false, or a floor above 0")


class Shift(Fixed):
    """t <- alpha t/(1 + (alpha - 1) t) of a density."""

    density: Any = _density()
    law: str = option("constant", "of alpha", choices=("constant", "exponential", "linear", "root"))
    alpha: float = option(3.0, "of laws constant and root; above 1 it prefers noise", gt=0)
    first: float = option(256.0, "tokens at `low`", gt=0)
    last: float = option(4096.0, "tokens at `high`; of law root those where alpha is `alpha`", gt=0)
    low: float = option(0.5, "mu (exponential) or alpha (linear) at `first` tokens; the least alpha (root)")
    high: float = option(1.15, "the same at `last` tokens")

    def __post_init__(self) -> None:
        if self.law in ("exponential", "linear"):
            demand(self.first != self.last, "first and last", f"{self.first:g} and {self.last:g}", "different numbers")
        if self.law == "linear":
            slope = (self.high - self.low) / (self.last - self.first)
            positive = slope >= 0 and self.low - slope * self.first > 0
            allowed = "an alpha that does not fall with the number of tokens and is above 0 for any number"
            demand(positive, "low and high", f"{self.low:g} and {self.high:g}", allowed)


class Mixture(Fixed):
    """Several densities, each with its share of the draws."""

    parts: Any = _parts("share", float, 1.0, "of the draws, any sum above 0")
    per: str = option("sample", "what is drawn from one part", choices=("sample", "batch"))


class ByGroup(Fixed):
    """A density for each group of the data set."""

    parts: Any = _parts("group", str, "all", "names, each once")


class Schedule(Fixed):
    """Densities one after the other over training."""

    parts: Any = _parts("start", float, 0, "rising")
    of: str = option("steps", "what starts and ramp count", choices=("steps", "progress"))
    ramp: float = option(0.0, "how long a density is blended in before its start", ge=0)


class Table(Fixed):
    """A density by numbers evenly spread over the process."""

    values: list[float] = option([1.0, 1.0], "relative densities, t/T from 0 to 1")
    file: str | None = option(None, "a file of them instead, comma or line separated")
    between: str = option("lines", "numbers are of equal cells, or knots", choices=("cells", "lines", "spline"))

    def __post_init__(self) -> None:
        demand(self.file or self.between == "cells" or len(self.values) > 1, "values", self.values, "two knots or more")


class Listed(Fixed):
    """Times of a list alone."""

    times: list[float] = option([1.0, 0.75, 0.5, 0.25], "fractions t/T of the process")
    in_turn: bool = option(False, "whether sample after sample takes the next one")

    def __post_init__(self) -> None:
        demand(not (self.in_turn and self.floor), "floor", self.floor, "0 with in_turn, which leaves nothing to chance")


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
    """Smoothed over t and in time."""

    floor: float = option(0.1, "share of draws that are uniform instead", gt=0, lt=1)
    width: float = option(0.02, "standard deviation of the smoothing in t, as a share of T", gt=0, le=1)
    decay: float = option(0.999, "decay per step of what was observed", gt=0, lt=1)
    start: int = option(100, "steps before the density is first set", ge=1)
    frequency: int = option(10, "steps between settings of the density", ge=1)


class LossMean(LossRms):
    """p follows the mean weighted loss."""

    importance: bool = option(True, "keep uniform's objective; false: the density changes it (loss map)")


class InfoRate(LossRms):
    """p follows the error of epsilon per ln SNR."""

    importance: bool = option(False, "keep uniform's objective; false, as published: the weights stay")


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


class Auto(Options):
    """Nothing to choose."""

    floor, bins, samples, frequency, decay, start = 0.0, 16, None, 100, 0.8, 3
    norm, points = "preconditioned", "systematic"


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


class Sigmoid(Options):
    """sigmoid(bias - ln SNR) on the squared error of epsilon, of the integral over ln SNR."""

    bias: float = option(0.0, "ln SNR where it is 1/2")
    measure: bool = option(True, "times |d ln SNR/dt|, mean 1: on any process the integral over ln SNR, with uniform t")


class Snr(Options):
    """SNR^power on the squared error of epsilon."""

    power: float = option(0.0, "of the SNR: 0 none, 1 the error of x0, -1 inverse")
    low: float = option(0.0, "the SNR is at least this", ge=0)
    high: float | None = option(None, "and at most this; null: no bound", gt=0)
    scale: float = option(1.0, "times this", gt=0)


class Linear(Options):
    """offset + slope sigma, sigma = 1/(1 + sqrt(SNR)), on the squared error of whatever is predicted."""

    offset: float = option(1.0, "at sigma = 0", ge=0)
    slope: float = option(3.0, "per sigma")

    def __post_init__(self) -> None:
        demand(self.offset + self.slope >= 0, "slope", self.slope, f"at least -{self.offset}: no weight below 0")


class Power(Options):
    """sigma^power likewise."""

    power: float = option(-2.0, "of sigma; -2 is sigma_sqrt of diffusers")
    least: float = option(0.0, "sigma is at least this", ge=0, lt=1)


class Bell(Options):
    """exp(-2 (sigma - 1/2)²) less its value at the ends, mean 1."""

    flat: bool = option(False, "flat at its largest from the middle to the image")


class VLikeLoss(Options):
    """1 + c (SNR + 1)/SNR on the squared error of v."""

    c: float = option(0.1, "how much of it", ge=0)


class TableWeights(Options):
    """Weights by numbers evenly spread over the process."""

    values: list[float] = option([1.0, 1.0], "weights, t/T from 0 to 1")
    file: str | None = option(None, "a file of them instead, comma or line separated")
    between: str = option("lines", "numbers are of equal cells, or knots", choices=("cells", "lines", "spline"))


class Nearest(Options):
    """The nearest of several noises."""

    k: int = option(4, "noises that each image has the choice of", ge=2)


class Robust(Options):
    """1/(loss + c)^p of each sample's own loss."""

    p: float = option(1.0, "power; 0.5 is a pseudo-Huber loss, 1 a logarithm", ge=0)
    c: float = option(1e-3, "what keeps it finite", gt=0)


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
