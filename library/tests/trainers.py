"""Reference implementation of other trainers' timesteps and weights in numpy and scipy, from their formulas.

Each preset has options that reveal errors of sign, the context of the draw, the elementwise quantile function of the
trainer's time, and the weight at such a time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import integrate, interpolate, special, stats


@dataclass(frozen=True)
class Trainer:
    """Formulas of one preset; if `steps` is True, its times are multiples of 1/1000."""

    quantile: Callable[[Any], Any]
    weight: Callable[[Any], Any] = np.ones_like
    options: dict[str, Any] = field(default_factory=dict)
    context: dict[str, Any] = field(default_factory=dict)
    sigma: bool = False
    steps: bool = False


def logit_normal(mean, std):
    return lambda p: special.expit(stats.norm.ppf(p, mean, std))


def shifted(quantile, alpha):
    def shift(p):
        t = quantile(p)
        return alpha * t / (1 + (alpha - 1) * t)

    return shift


def by_tokens(tokens, first, last, low, high, scale=1.0):
    """Return the quantile function of Flux' shift, t -> e^mu/(e^mu + 1/t - 1) with mu linear in the tokens."""
    mu = (high - low) / (last - first) * tokens + low - (high - low) / (last - first) * first
    return lambda p: np.exp(mu) / (np.exp(mu) + 1 / logit_normal(0, scale)(p) - 1)


def inverse(cdf):
    """Return the inverse of a smooth distribution function on [0, 1], by bisection."""

    def quantile(p):
        low, high = np.zeros_like(p), np.ones_like(p)
        for _ in range(60):
            middle = (low + high) / 2
            below = cdf(middle) < p
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        return (low + high) / 2

    return quantile


def of_density(density, cells=2**20):
    """Return the quantile function of an unnormalised density on [0, 1], integrated by Simpson's rule in every cell."""
    edges = np.linspace(0, 1, cells + 1)
    middles = (edges[1:] + edges[:-1]) / 2
    mass = density(edges[:-1]) + 4 * density(middles) + density(edges[1:])
    cdf = np.concatenate([[0.0], np.cumsum(mass)]) / mass.sum()
    return lambda p: np.interp(p, cdf, edges)


def mixture(*parts):
    """Return the quantile function of a mixture of components, each a share and a distribution function."""
    return inverse(lambda t: sum(share * cdf(t) for share, cdf in parts))


def logit_normal_cdf(mean, std):
    def cdf(t):
        with np.errstate(divide="ignore"):
            return stats.norm.cdf(special.logit(t), mean, std)

    return cdf


def cut(quantile, cdf, low, high):
    first, last = cdf(low), cdf(high)
    return lambda p: quantile(first + (last - first) * p)


def mode(scale):
    def quantile(p):
        u = 1 - p
        return 1 - u - scale * (np.cos(np.pi * u / 2) ** 2 - 1 + u)

    return quantile


def cosmap(t):
    return 2 / (np.pi - 2 * np.pi * t + 2 * np.pi * t**2)


_BELL = integrate.quad(lambda t: np.exp(-2 * (t - 0.5) ** 2) - np.exp(-0.5), 0, 1)[0]


def bell(t):
    return (np.exp(-2 * (t - 0.5) ** 2) - np.exp(-0.5)) / _BELL


def edm(sigma_data):
    return lambda s: (s**2 + sigma_data**2) / (s * sigma_data) ** 2


def uniform(p):
    return p


def steps(p):
    return np.floor(1000 * p) / 1000


_BETAS = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
_ALPHAS = np.cumprod(1 - _BETAS)
_SNR = _ALPHAS / (1 - _ALPHAS)


def of_snr(formula, cap=np.inf):
    return lambda t: formula(np.minimum(_SNR[np.rint(1000 * t).astype(int)], cap))


def wan_t(shift):
    return lambda p: shift * p / (1 + (shift - 1) * p)


def wan_cdf(shift):
    return lambda t: t / (shift - (shift - 1) * t)


def split_normal(loc, below, above):
    """Return the quantile function of a split normal distribution, below `loc` with probability below/(below+above)."""
    share = below / (below + above)

    def quantile(p):
        left = loc + below * stats.norm.ppf(np.minimum(p, share) / share / 2)
        right = loc - above * stats.norm.ppf((1 - np.maximum(p, share)) / (1 - share) / 2)
        return np.exp(np.where(p < share, left, right))

    return quantile


def cosine_interpolated(side, low, high, p):
    """Return quantiles of simple diffusion's interpolated cosine, shifted to `high` at u = 0 and to `low` at u = 1."""

    def logsnr(d, u):
        shift = 2 * np.log(d / side)
        clean, noise = -2 * np.log(1e-3) - shift, -2 * np.log(1e3) - shift
        first, last = np.arctan(np.exp(-clean / 2)), np.arctan(np.exp(-noise / 2))
        return -2 * np.log(np.tan(first + u * (last - first))) + shift

    return np.exp(-(p * logsnr(low, p) + (1 - p) * logsnr(high, p)) / 2)


def slope(weight, bias):
    return lambda t: 1 / (1 + np.exp(-weight * (t - 0.5 - bias)))


def parabola(weight, bias):
    return lambda t: np.maximum(0, 2 - weight * (t - 0.5 - bias) ** 2)


def stretched(low, high):
    ends = special.expit(stats.norm.ppf([low, high]))

    def quantile(p):
        u = special.expit(stats.norm.ppf(low + p * (high - low)))
        return (u - ends[0]) / (ends[1] - ends[0])

    return quantile


_KNOTS = [0.5, 2.0, 1.0, 3.0]
_FLUX = dict(first=256, last=4096, low=0.5, high=1.15)
_QWEN = dict(first=256, last=8192, low=0.5, high=0.9)


def _flux_cdf(tokens, first, last, low, high):
    mu = low + (high - low) * (tokens - first) / (last - first)
    return logit_normal_cdf(mu, 1.0)


TRAINERS = {
    "diffusers:logit_normal": Trainer(lambda p: 1 - logit_normal(0.7, 0.8)(1 - p), options={"mean": 0.7, "std": 0.8}),
    "diffusers:mode": Trainer(lambda p: 1 - mode(1.29)(1 - p)),
    "diffusers:cosmap": Trainer(uniform, cosmap),
    "diffusers:sigma_sqrt": Trainer(uniform, lambda t: t**-2),
    "diffusers:ideogram4": Trainer(logit_normal(0.3, 1.5), options={"mean": 0.3}),
    "kohya:sigmoid": Trainer(logit_normal(0.0, 1.7), options={"sigmoid_scale": 1.7}),
    "kohya:shift": Trainer(shifted(logit_normal(0, 0.9), 2.5), options={"shift": 2.5, "sigmoid_scale": 0.9}),
    "kohya:min_snr": Trainer(steps, of_snr(lambda s: np.minimum(s, 4) / s), options={"gamma": 4.0}, steps=True),
    "kohya:debiased": Trainer(steps, of_snr(lambda s: 1 / np.sqrt(s), 1000), steps=True),
    "kohya:debiased_v": Trainer(steps, of_snr(lambda s: 1 / (s + 1), 1000), steps=True),
    "kohya:scale_v_pred_loss": Trainer(steps, of_snr(lambda s: s / (s + 1), 1000), steps=True),
    "kohya:v_pred_like_loss": Trainer(
        steps, of_snr(lambda s: 1 + 0.3 / (s / (s + 1)), 1000), options={"c": 0.3}, steps=True
    ),
    "musubi:flux_shift": Trainer(
        by_tokens(2304, **_FLUX, scale=1.2), options={"sigmoid_scale": 1.2}, context={"tokens": 2304}
    ),
    "musubi:flux2_shift": Trainer(by_tokens(4096, **_FLUX), context={"tokens": 4096}),
    "musubi:qwen_shift": Trainer(by_tokens(2304, **_QWEN), context={"tokens": 2304}),
    "musubi:krea2_shift": Trainer(by_tokens(2304, 256, 6400, 0.5, 1.15), context={"tokens": 2304}),
    "musubi:ideogram4_shift": Trainer(
        logit_normal(0.5 * np.log(1024 * 768 / 512**2), 1.5), context={"tokens": 64 * 48}
    ),
    "musubi:logsnr": Trainer(
        lambda p: special.expit(-stats.norm.ppf(1 - p, -1.5, 2.0) / 2), options={"mean": -1.5, "std": 2.0}
    ),
    "musubi:qinglong_flux": Trainer(
        mixture(
            (0.79, _flux_cdf(2304, **_FLUX)),
            (0.11, lambda t: 1 - stats.norm.cdf(-2 * special.logit(t), -6.0, 2.0)),
            (0.10, lambda t: 1 - stats.norm.cdf(-2 * special.logit(t), 5.36, 1.0)),
        ),
        options={"mean": -6.0, "std": 2.0},
        context={"tokens": 2304},
    ),
    "musubi:qinglong_qwen": Trainer(
        mixture(
            (0.95, _flux_cdf(1024, **_QWEN)),
            (0.05, lambda t: 1 - stats.norm.cdf(-2 * special.logit(t), 5.36, 1.0)),
        ),
        context={"tokens": 1024},
    ),
    "simpletuner:beta": Trainer(shifted(stats.beta(3.0, 1.5).ppf, 3.0), options={"alpha": 3.0, "beta": 1.5}),
    "simpletuner:mixflow": Trainer(shifted(lambda p: 1 - np.sqrt(1 - p), 3.0)),
    "simpletuner:fast_schedule": Trainer(
        lambda p: np.sort([1.0] * 7 + [0.75, 0.5, 0.25])[np.floor(10 * p).astype(int).clip(max=9)]
    ),
    "simpletuner:cubic": Trainer(
        shifted(of_density(interpolate.PchipInterpolator(np.linspace(0, 1, 4), _KNOTS)), 3.0),
        options={"values": _KNOTS},
    ),
    "onetrainer:cos_map": Trainer(
        shifted(lambda p: 1 - 1 / (np.tan(np.pi * p / 2) + 1), 2.0), options={"timestep_shift": 2.0}
    ),
    "onetrainer:inverted_parabola": Trainer(of_density(parabola(7.7, 0.2)), options={"weight": 7.7, "bias": 0.2}),
    "onetrainer:sigmoid": Trainer(of_density(slope(6.0, 0.1)), options={"weight": 6.0, "bias": 0.1}),
    "onetrainer:heavy_tail": Trainer(mode(-0.6), options={"mode_scale": -0.6}),
    "onetrainer:sigma": Trainer(uniform, lambda t: t),
    "onetrainer:debiased_v": Trainer(steps, of_snr(lambda s: 1 / np.sqrt(s + 1), 1000), steps=True),
    "onetrainer:p2_v": Trainer(steps, of_snr(lambda s: (2 + s) ** -0.7), options={"gamma": 0.7}, steps=True),
    # index u³ or 1 - u³ of falling times, which are sorted logit-normal draws
    "ai_toolkit:content": Trainer(lambda p: logit_normal(0, 1)(1 - (1 - p) ** 3)),
    "ai_toolkit:style": Trainer(lambda p: logit_normal(0, 1)(p**3)),
    "ai_toolkit:snr_gamma": Trainer(steps, of_snr(lambda s: 4 / s), options={"gamma": 4.0}, steps=True),
    "ai_toolkit:half_bell": Trainer(uniform, lambda t: bell(np.maximum(t, 0.5))),
    "diffsynth:bell": Trainer(uniform, bell),
    "nemo:linear": Trainer(uniform, lambda t: 1 + 3 * t),
    "nemo:mix": Trainer(
        mixture((0.75, logit_normal_cdf(np.log(2.0), 1)), (0.25, wan_cdf(2.0))), options={"ratio": 0.25, "shift": 2.0}
    ),
    "nemo:time_shift_linear": Trainer(by_tokens(3000, 0, 4096, 0.5, 1.15), context={"tokens": 3000}),
    "nemo:time_shift_sqrt": Trainer(logit_normal(np.log(3 * np.sqrt(4096 / 16384)), 1), context={"tokens": 4096}),
    "chroma:parabola": Trainer(of_density(parabola(7.7, 0.0))),
    "wan:high_noise": Trainer(cut(wan_t(5.0), wan_cdf(5.0), 0.875, 1.0)),
    "wan:low_noise": Trainer(cut(wan_t(3.0), wan_cdf(3.0), 0.0, 0.9), options={"boundary": 0.9, "shift": 3.0}),
    "sana:stretched": Trainer(stretched(0.01, 0.9), options={"p_low": 0.01, "p_high": 0.9}),
    "open_sora:shift": Trainer(
        shifted(logit_normal(0, 1), (1 + 2 * (2304 - 256) / 3840) * np.sqrt(9)), context={"tokens": 2304, "frames": 9}
    ),
    "sd3:shift": Trainer(
        shifted(logit_normal(0, 1), np.sqrt(2304 / 1024)), options={"base": 1024.0}, context={"tokens": 2304}
    ),
    "rae:shift": Trainer(wan_t(np.sqrt(768 * 16 * 16 / 4096))),
    "meanflow:logit_normal": Trainer(logit_normal(-0.4, 1.0)),
    "rfpp:u_shape": Trainer(of_density(lambda t: np.exp(3 * t) + np.exp(3 * (1 - t))), options={"a": 3.0}),
    "edm:log_normal": Trainer(stats.lognorm(1.2, scale=np.exp(-1.2)).ppf, edm(0.5), sigma=True),
    "edm2:img512": Trainer(stats.lognorm(1.0, scale=np.exp(-0.4)).ppf, edm(0.5), sigma=True),
    "edm2:img64": Trainer(
        stats.lognorm(1.6, scale=np.exp(-0.8)).ppf, edm(0.7), options={"sigma_data": 0.7}, sigma=True
    ),
    "sana_sprint:log_normal": Trainer(stats.lognorm(1.6, scale=np.exp(0.2)).ppf, sigma=True),
    "laplace:log_snr": Trainer(lambda p: special.expit(-stats.laplace.ppf(1 - p, 1.0, 0.5) / 2), options={"mean": 1.0}),
    "cauchy:log_snr": Trainer(
        lambda p: special.expit(-stats.cauchy.ppf(1 - p, 1.0, 0.7) / 2), options={"mean": 1.0, "scale": 0.7}
    ),
    "k_diffusion:loglogistic": Trainer(
        lambda p: np.exp(-0.7 + 0.5 * special.logit(p)), options={"loc": -0.7}, sigma=True
    ),
    "k_diffusion:split_lognormal": Trainer(
        split_normal(-1.2, 0.6, 1.9), options={"scale_1": 0.6, "scale_2": 1.9}, sigma=True
    ),
    "k_diffusion:v_diffusion": Trainer(
        lambda p: np.tan(np.arctan(1e-3) + p * (np.arctan(1e3) - np.arctan(1e-3))), sigma=True
    ),
    "k_diffusion:cosine": Trainer(lambda p: cosine_interpolated(256, 32, 256, p), options={"side": 256.0}, sigma=True),
}
