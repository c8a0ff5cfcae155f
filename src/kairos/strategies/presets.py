"""Timesteps and weights of other trainers, under their names and with their options: what they are here.

docs/trainers.md translates between trainers, option by option.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from kairos.diffusion.adapters import as_process
from kairos.diffusion.schedule import PREDICTIONS, make_schedule
from kairos.errors import ConfigError, demand
from kairos.options import Options, dump, instead, option, parse
from kairos.strategies.base import Sampler, Weighting
from kairos.strategies.names import parts
from kairos.strategies.numeric import bisect
from kairos.strategies.options import Fixed
from kairos.strategies.points import Place
from kairos.strategies.registries import SAMPLERS

# bounds of what presets can be told, beyond those that the samplers and weightings state under the same name
_SHARE = {"ge": 0.0, "le": 1.0}
_BOUNDS = {"mode_scale": {"ge": -1.0, "le": 1.7519}, "mean": {}, "loc": {}, "bias": {}, "weight": {}, "values": {}}
_BOUNDS |= {"times": {}} | dict.fromkeys(("boundary", "min_t", "max_t", "p_low", "p_high", "ratio"), _SHARE)


def _snr_of_sigma(sigma: Any) -> Any:
    return sigma**-2


def _snr_of_step(t: Any) -> Any:
    """Of Stable Diffusion's 1000 timesteps."""
    return torch.from_numpy(make_schedule("scaled_linear").snr).to(t.device)[(1000 * t).round().long().clamp(0, 999)]


def _step(u: Any) -> Any:
    return (1000 * u).floor() / 1000


# what the trainer's time is: of a fraction of a linear flow, or of sigma where the sampler is one of ln SNR; the SNR at
# such a time; whose error the weights are of, ``epsilon`` also where the formula is one for all
_TIMES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "t": (lambda u: u, lambda t: ((1 - t) / t) ** 2, "flow"),
    "sigma": (lambda u: u / (1 - u), _snr_of_sigma, "x0"),
    "law": (lambda sigma: sigma, _snr_of_sigma, "x0"),
    "step": (_step, _snr_of_step, "epsilon"),
    "capped": (_step, lambda t: _snr_of_step(t).clamp(max=1000), "epsilon"),  # as kohya does
    "capped_v": (_step, lambda t: _snr_of_step(t).clamp(max=1000), "v"),
}
_ROWS: dict[str, tuple[str, Callable[..., Any], str]] = {}  # one line, sampler (and weighting) of options, time


def _row(name: str, help: str, made: Callable[..., Any], time: str = "t") -> None:
    _ROWS[name] = help, made, time


def _spec(name: str, **options: Any) -> dict[str, Any]:
    return {"name": name, **options}


def _uniform(weighting: str, **options: Any) -> Any:
    return "uniform", _spec(weighting, **options)


def _normal(m: float = 0.0, s: float = 1.0, **options: Any) -> dict[str, Any]:
    return _spec("log_normal", m=m, s=s, **options)


def _snr(mean: float, std: float) -> dict[str, Any]:
    return _normal(-mean / 2, std / 2)


def _shift(density: Any, alpha: float = 1.0, **options: Any) -> dict[str, Any]:
    return _spec("shift", density=density, alpha=alpha, **options)


def _flux(s: float, last: float = 4096.0, high: float = 1.15, **options: Any) -> dict[str, Any]:
    return _shift(_normal(0.0, s), law="exponential", last=last, high=high, **options)


def _cut(density: Any, low: float, high: float) -> dict[str, Any]:
    return _spec("range", density=density, low=low, high=high)


def _mixed(*parts: Any, per: str = "sample") -> dict[str, Any]:
    return _spec("mixture", parts=[{**density, "share": share} for share, density in parts], per=per)


def _sigma(mean: float, std: float, sigma_data: float) -> Any:
    return _spec("edm_log_normal", mean=mean, std=std), _spec("edm", sigma_data=sigma_data)


def _law(law: str, location: float, scale: float, above: float | None = None) -> dict[str, Any]:
    return _spec("log_snr", law=law, location=location, scale=scale, scale_above=above)


_row("diffusers:logit_normal", "sigmoid(N(-mean, std²))", lambda mean=0.0, std=1.0: _normal(-mean, std))
_row("diffusers:mode", "SD3's mode sampling", lambda mode_scale=1.29: _spec("mode", m=mode_scale))
_row("diffusers:cosmap", "uniform; weight 2/(pi (1 - 2t + 2t²))", lambda: _uniform("cosmap"))
_row("diffusers:sigma_sqrt", "uniform; weight t^-2", lambda: _uniform("power"))
_row("diffusers:ideogram4", "sigmoid(N(mean, std²))", lambda mean=0.0, std=1.5: _normal(mean, std))
_row("kohya:sigmoid", "sigmoid(scale N(0, 1))", lambda sigmoid_scale=1.0: _normal(0.0, sigmoid_scale))
_row(
    "kohya:shift", "the same, shifted", lambda shift=3.0, sigmoid_scale=1.0: _shift(_normal(0.0, sigmoid_scale), shift)
)
_row("kohya:min_snr", "min(SNR, gamma)/SNR", lambda gamma=5.0: _uniform("min_snr", gamma=gamma), "step")
_row("kohya:debiased", "1/sqrt(SNR)", lambda: _uniform("debiased"), "capped")
_row("kohya:debiased_v", "1/(SNR + 1)", lambda: _uniform("debiased"), "capped_v")
_row("kohya:scale_v_pred_loss", "SNR/(SNR + 1)", lambda: _uniform("snr"), "capped_v")
_row("kohya:v_pred_like_loss", "1 + c (SNR + 1)/SNR", lambda c=0.1: _uniform("v_like_loss", c=c), "capped_v")
_row("musubi:flux_shift", "logit-normal, shifted by tokens", lambda sigmoid_scale=1.0: _flux(sigmoid_scale))
_row("musubi:flux2_shift", "the same: tokens h w of the latent", lambda sigmoid_scale=1.0: _flux(sigmoid_scale))
_row("musubi:qwen_shift", "shifted by tokens", lambda sigmoid_scale=1.0: _flux(sigmoid_scale, 8192.0, 0.9))
_row("musubi:krea2_shift", "shifted by tokens", lambda sigmoid_scale=1.0: _flux(sigmoid_scale, 6400.0))
_row("musubi:ideogram4_shift", "by pixels", lambda: _shift(_normal(0.0, 1.5), law="root", last=1024.0, low=0.0))
_row("musubi:logsnr", "ln SNR ~ N(mean, std²)", lambda mean=0.0, std=1.0: _snr(mean, std))
_row(
    "musubi:qinglong_flux",
    "79 % flux_shift, 11 % logsnr, 10 % logsnr of 5.36 and 1",
    lambda sigmoid_scale=1.0, mean=0.0, std=1.0: _mixed(
        (79, _flux(sigmoid_scale)), (11, _snr(mean, std)), (10, _snr(5.36, 1))
    ),
)
_row(
    "musubi:qinglong_qwen",
    "95 % qwen_shift, 5 % logsnr of 5.36 and 1",
    lambda sigmoid_scale=1.0: _mixed((95, _flux(sigmoid_scale, 8192.0, 0.9)), (5, _snr(5.36, 1))),
)
_row(
    "simpletuner:sigmoid",
    "as kohya:shift",
    lambda shift=3.0, sigmoid_scale=1.0: _shift(_normal(0.0, sigmoid_scale), shift),
)
_row("simpletuner:beta", "Beta(alpha, beta)", lambda alpha=2.0, beta=2.0: _spec("beta", a=alpha, b=beta))
_row("simpletuner:mixflow", "1 - sqrt(U)", lambda: _spec("beta", a=1.0, b=2.0))
_row(
    "simpletuner:custom_timesteps", "a list", lambda times=(1.0,) * 7 + (0.75, 0.5, 0.25): _spec("listed", times=times)
)
_row(
    "simpletuner:cubic",
    "cubic through knots",
    lambda values=(1.0, 1.0): _spec("table", values=values, between="spline"),
)
_row("onetrainer:cos_map", "p = 2/(pi (1 - 2t + 2t²))", lambda: "cosmap")
_row(
    "onetrainer:inverted_parabola",
    "max(0, 2 - weight (t - 1/2 - bias)²)",
    lambda weight=0.0, bias=0.0: _spec("parabola", weight=weight, bias=bias),
)
_row(
    "onetrainer:sigmoid",
    "sigmoid(weight (t - 1/2 - bias))",
    lambda weight=0.0, bias=0.0: _spec("slope", weight=weight, bias=bias),
)
_row("onetrainer:heavy_tail", "SD3's mode sampling", lambda mode_scale=0.0: _spec("mode", m=mode_scale))
_row("onetrainer:logit_normal", "std: noising_weight + 1", lambda mean=0.0, std=1.0: _normal(mean, std))
_row("onetrainer:sigma", "uniform; weight t", lambda: _uniform("linear", offset=0.0, slope=1.0))
_row("onetrainer:debiased_v", "1/sqrt(SNR + 1)", lambda: _uniform("p2", gamma=0.5), "step")
_row("onetrainer:p2_v", "(2 + SNR)^-gamma", lambda gamma=1.0: _uniform("p2", k=2.0, gamma=gamma), "step")
_row("ai_toolkit:content", "1 - U³", lambda: _spec("beta", a=1.0, b=1 / 3))
_row("ai_toolkit:style", "U³", lambda: _spec("beta", a=1 / 3, b=1.0))
_row("ai_toolkit:snr_gamma", "gamma/SNR", lambda gamma=5.0: _uniform("snr", power=-1.0, scale=gamma), "step")
_row("ai_toolkit:half_bell", "bell, flat below 1/2", lambda: _uniform("bell", flat=True))
_row("diffsynth:bell", "uniform; exp(-2 (t - 1/2)²) - exp(-1/2), mean 1", lambda: _uniform("bell"))
_row("nemo:linear", "uniform; weight 1 + 3t", lambda: _uniform("linear"))
_row(
    "nemo:mix",
    "a share of batches uniform, the others logit-normal; shifted",
    lambda ratio=0.1, shift=3.0, mean=0.0, std=1.0: _mixed(
        (1 - ratio, _shift(_normal(mean, std), shift)), (ratio, _shift("uniform", shift)), per="batch"
    ),
)
_row("nemo:time_shift_linear", "shifted by tokens", lambda: _flux(1.0, first=1024.0, low=0.6625))
_row("nemo:time_shift_sqrt", "by tokens", lambda: _shift(_normal(), 3.0, law="root", last=16384.0, low=1.0))
_row("chroma:parabola", "2 - 7.7 (t - 1/2)²", lambda: "parabola")
_row(
    "wan:high_noise",
    "uniform, shifted, from the boundary on",
    lambda boundary=0.875, shift=5.0: _cut(_shift("uniform", shift), boundary, 1.0),
)
_row(
    "wan:low_noise",
    "uniform, shifted, up to the boundary",
    lambda boundary=0.875, shift=5.0: _cut(_shift("uniform", shift), 0.0, boundary),
)
_row(
    "diffusion_pipe:logit_normal",
    "sigmoid(scale N(0, 1)), shifted, then cut",
    lambda sigmoid_scale=1.0, shift=1.0, min_t=0.0, max_t=1.0: _cut(
        _shift(_normal(0.0, sigmoid_scale), shift), min_t, max_t
    ),
)
_row(
    "sana:stretched_logit_normal",
    "logit-normal between two quantiles, stretched",
    lambda mean=0.0, std=1.0, p_low=0.005, p_high=0.999: _normal(mean, std, low=p_low, high=p_high),
)
_row(
    "open_sora:shift",
    "alpha linear in tokens, times sqrt(frames)",
    lambda: _shift(_normal(), law="linear", low=1.0, high=3.0),
)
_row(
    "sd3:resolution_shift",
    "alpha sqrt(tokens/base)",
    lambda base=256.0: _shift(_normal(), law="root", last=base, low=0.0),
)
_row(
    "rae:dimension_shift", "uniform, alpha sqrt(dim/4096)", lambda dim=196608.0: _shift("uniform", (dim / 4096) ** 0.5)
)
_row("meanflow:logit_normal", "sigmoid(N(mean, std²))", lambda mean=-0.4, std=1.0: _normal(mean, std))
_row("rfpp:u_shape", "p ~ e^(a t) + e^(a (1 - t))", lambda a=4.0: _spec("u_shape", a=a))
_row(
    "edm:log_normal",
    "ln sigma ~ N(mean, std²); EDM's weight",
    lambda mean=-1.2, std=1.2, sigma_data=0.5: _sigma(mean, std, sigma_data),
    "law",
)
_row("edm2:img512", "ln sigma ~ N(-0.4, 1); EDM's weight", lambda sigma_data=0.5: _sigma(-0.4, 1.0, sigma_data), "law")
_row(
    "edm2:img64", "ln sigma ~ N(-0.8, 1.6²); EDM's weight", lambda sigma_data=0.5: _sigma(-0.8, 1.6, sigma_data), "law"
)
_row("sana_sprint:log_normal", "ln sigma ~ N(mean, std²)", lambda mean=0.2, std=1.6: _sigma(mean, std, 0.5)[0], "law")
_row(
    "laplace:log_snr", "ln SNR ~ Laplace(mean, scale)", lambda mean=0.0, scale=0.5: _law("laplace", mean, scale), "law"
)
_row("cauchy:log_snr", "ln SNR ~ Cauchy(mean, scale)", lambda mean=0.0, scale=1.0: _law("cauchy", mean, scale), "law")
_row(
    "k_diffusion:loglogistic",
    "ln sigma logistic",
    lambda loc=-0.6931, scale=0.5: _law("logistic", -2 * loc, 2 * scale),
    "law",
)
_row(
    "k_diffusion:split_lognormal",
    "ln sigma normal",
    lambda loc=-1.2, scale_1=1.2, scale_2=1.2: _law("normal", -2 * loc, 2 * scale_2, 2 * scale_1),
    "law",
)
_row(
    "k_diffusion:v_diffusion",
    "tan(pi u/2), cut",
    lambda min_value=1e-3, max_value=1e3: _cut("cosmap", *(v / (1 + v) for v in (min_value, max_value))),
    "sigma",
)
_row(
    "k_diffusion:cosine_interpolated",
    "shifted cosines",
    lambda image_d=64.0, noise_d_low=32.0, noise_d_high=64.0: _spec(
        "cosine_interpolated", image=image_d, low=noise_d_high, high=noise_d_low
    ),
    "law",
)


def presets() -> list[str]:
    """The names of all presets, sorted."""
    return sorted(_ROWS)


def preset(name: str, **options: Any) -> "Preset":
    """The timesteps and weights of a trainer, by its name and its own options.

    Raises:
        ConfigError: an unknown name or option, or a value that is not allowed; the message says what is.
    """
    if name not in _ROWS:
        raise ConfigError(f"unknown preset {name!r}{instead(str(name), _ROWS)}")
    found = {key: at.default for key, at in inspect.signature(_ROWS[name][1]).parameters.items()}
    hints = {key: list[float] if isinstance(value, tuple) else float for key, value in found.items()}
    knobs = {key: option(value, _ROWS[name][0], **_BOUNDS.get(key, {"gt": 0})) for key, value in found.items()}
    its = type("PresetOptions", (Options,), {"__annotations__": hints, "__module__": __name__, **knobs})
    return Preset(name, dump(parse(its, options, f"preset {name}")))


class Preset:
    """What `preset` gives. Times are the trainer's own, 1 the end of noise: t or t/T, or sigma.

    Attributes:
        name: of the preset.
        help: what it is, in one line.
        options: the trainer's, with their values.
        sampler: ours, of fractions of a linear flow; `weighting`: ours, of the signal-to-noise ratio.
    """

    def __init__(self, name: str, options: dict[str, Any]):
        self.name, self.options = name, options
        self.help, made, time = _ROWS[name]
        self._time, self._snr, prediction = _TIMES[time]
        both = made(**options)
        specs = [
            _spec(each) if isinstance(each, str) else each
            for each in (both if isinstance(both, tuple) else (both, "none"))
        ]
        try:
            self.sampler = density(**specs[0])
            self.weighting = weighting(**specs[1], prediction=prediction)
        except ConfigError as error:
            raise ConfigError(f"preset {name}: {error}") from None

    def sample(
        self, n: int | tuple[int, ...], seed: int = 0, device: Any = "cpu", step: int = 0, **context: Any
    ) -> torch.Tensor:
        """Draws: float32 (n,), or of a shape, a function of seed and step.

        Args:
            context: what the preset asks for: ``tokens``, ``frames``, each a number or a tensor (n,).

        Raises:
            ConfigError: it was not said.
        """
        count, *times = (n,) if isinstance(n, int) else n
        place = Place(seed, step, 0, None, range(count), count, tuple(times), device, context)
        if hasattr(self.sampler, "level"):
            return self._of(self.sampler.uniforms(place), place).float()
        return self._time(self.sampler.drawn(place)).float()

    def quantile(self, probability: Any, **context: Any) -> Any:
        """The time below which a draw falls with a probability, elementwise, float64; a tensor of a tensor."""
        given = torch.as_tensor(probability, dtype=torch.float64)
        found = self._of(given, Place(device=given.device, context=context))
        return found if isinstance(probability, torch.Tensor) else found.numpy()

    def _of(self, probability: Any, place: Place) -> Any:
        sampler: Any = self.sampler
        if hasattr(sampler, "level"):
            drawn = (-sampler.level(1 - probability) / 2).exp()
        elif sampler.split:
            drawn = bisect(lambda u: sampler.cdf(u, place), probability)
        else:
            drawn = sampler.quantile(probability, place)
        return self._time(drawn)

    def weights(self, t: Any) -> torch.Tensor:
        """What the losses at such times are multiplied with, float32, in the shape of t and where t is.

        Raises:
            ConfigError: a time on the CPU is none, or its weight is not finite.
        """
        t = torch.as_tensor(t)
        found = self.weighting(self._snr(t.double())).float()
        if t.device.type == "cpu":
            last = math.inf if self._snr is _snr_of_sigma else 1.0
            bad = t[~((t >= 0) & (t <= last) & found.isfinite())]
            got = f"time {bad.flatten()[0]:g}" if len(bad) else ""
            demand(not got, f"preset {self.name}: weights", got, f"times from 0 to {last:g} where the weight is finite")
        return found


def density(name: str, process: Any = "flow", **options: Any) -> Sampler:
    """A sampler of a fixed density by its name and options, for those who carry times or sigma through their own code.

    It has `sample`, `pdf`, `cdf` and `quantile` of fractions of the process, 0 the image and 1 noise.

    Raises:
        ConfigError: an unknown name or option, a value that is not allowed, or a sampler that learns.
    """
    demand(issubclass(SAMPLERS.entry(name).options, Fixed), "density", name, "samplers of a fixed density")
    return parts(as_process(process), (name, "none"), options, None)[0]


def weighting(name: str, process: Any = "flow", prediction: str | None = None, **options: Any) -> Weighting:
    """A weighting by its name and options: a call with signal-to-noise ratios gives the factors of losses, elementwise.

    Args:
        prediction: whose squared error is weighted, ``epsilon``, ``x0``, ``v`` or ``flow``; None: the process'.

    Raises:
        ConfigError: an unknown name, prediction or option, or a value that is not allowed.
    """
    allowed = (*PREDICTIONS, "flow")
    demand(prediction in (None, *allowed), "prediction", prediction, ", ".join(allowed))
    found = parts(as_process(process), ("uniform", name), None, options)[1]
    found.prediction = prediction or found.prediction
    return found
