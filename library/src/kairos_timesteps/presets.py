"""Timesteps and weights of other trainers, under their names and with their options: what they are here.

docs/trainers.md translates between trainers, option by option.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from kairos_timesteps.build import density, weighting
from kairos_timesteps.coordinates import RandomCoordinates
from kairos_timesteps.diffusion.schedule import make_schedule
from kairos_timesteps.errors import ConfigError, demand
from kairos_timesteps.options import Options, dump, instead, option, parse

# bounds of what presets can be told, beyond those that the samplers and weightings state under the same name
_BOUNDS: dict[str, Any] = {key: {} for key in ("mean", "loc", "bias", "weight", "values")}
_BOUNDS |= {"mode_scale": {"ge": -1, "le": 1.7519}, "ratio": {"ge": 0, "le": 1}, "boundary": {"gt": 0, "lt": 1}}


def _snr_of_sigma(sigma: Any) -> Any:
    return sigma**-2


def _snr_of_step(t: Any) -> Any:
    """Of Stable Diffusion's 1000 timesteps."""
    return torch.from_numpy(make_schedule("scaled_linear").snr).to(t.device)[(1000 * t).round().long().clamp(0, 999)]


def _step(u: Any) -> Any:
    return (1000 * u).floor() / 1000


# what the trainer's time is of a fraction of a linear flow, or of sigma where the sampler is one of ln SNR; the SNR at
# such a time; whose error is weighted: epsilon's too where the formula holds for all
_TIMES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "t": (lambda u: u, lambda t: ((1 - t) / t) ** 2, "flow"),
    "sigma": (lambda u: u / (1 - u), _snr_of_sigma, "x0"),
    "law": (lambda sigma: sigma, _snr_of_sigma, "x0"),
    "law_t": (lambda sigma: 1 / (1 + 1 / sigma), lambda t: ((1 - t) / t) ** 2, "flow"),
    "step": (_step, _snr_of_step, "epsilon"),
    "capped": (_step, lambda t: _snr_of_step(t).clamp(max=1000), "epsilon"),  # as kohya does
    "capped_v": (_step, lambda t: _snr_of_step(t).clamp(max=1000), "v"),
}
_ROWS: dict[str, tuple[str, Callable[..., Any], str]] = {}  # what it is; sampler (and weighting) of options; time


def _row(name: str, help: str, made: Callable[..., Any], time: str = "t") -> None:
    _ROWS[name] = help, made, time


def _as(name: str, **options: Any) -> dict[str, Any]:
    return {"name": name, **options}


def _even(weighting: str, **options: Any) -> Any:
    return _as("uniform"), _as(weighting, **options)


def _normal(m: float = 0.0, s: float = 1.0, low: float = 0.0, high: float = 1.0) -> dict[str, Any]:
    return _as("log_normal", m=m, s=s, low=low, high=high)


def _snr(mean: float, std: float) -> dict[str, Any]:
    return _normal(-mean / 2, std / 2)


def _shift(density: Any, alpha: float = 1.0, **options: Any) -> dict[str, Any]:
    return _as("shift", density=density, alpha=alpha, **options)


def _flux(s: float = 1.0, last: float = 4096.0, high: float = 1.15, **options: Any) -> dict[str, Any]:
    return _shift(_normal(0.0, s), law="exponential", last=last, high=high, **options)


def _cut(density: Any, low: float, high: float) -> dict[str, Any]:
    return _as("range", density=density, low=low, high=high)


def _mixed(*parts: Any, per: str = "sample") -> dict[str, Any]:
    return _as("mixture", parts=[{**density, "share": share} for share, density in parts], per=per)


def _edm(mean: float, std: float, sigma_data: float) -> Any:
    return _as("edm_log_normal", mean=mean, std=std), _as("edm", sigma_data=sigma_data)


def _law(law: str, loc: float, scale: float, above: float | None = None) -> dict[str, Any]:  # of ln sigma
    return _as("log_snr", law=law, location=-2 * loc, scale=2 * (above or scale), scale_above=2 * scale)


def _split(loc: float = -1.2, scale_1: float = 1.2, scale_2: float = 1.2) -> dict[str, Any]:
    return _law("normal", loc, scale_1, scale_2)


def _batches(ratio: float = 0.1, shift: float = 3.0) -> dict[str, Any]:
    return _mixed((1 - ratio, _shift(_normal(), shift)), (ratio, _shift("uniform", shift)), per="batch")


_LAST = (10, _snr(5.36, 1.0))
# "uniform" before a weight is left out
_row("diffusers:logit_normal", "sigmoid(N(-mean, std²))", lambda mean=0.0, std=1.0: _normal(-mean, std))
_row("diffusers:mode", "SD3's mode sampling", lambda mode_scale=1.29: _as("mode", m=mode_scale))
_row("diffusers:cosmap", "weight 2/(pi (1 - 2t + 2t²))", lambda: _even("cosmap_weight"))
_row("diffusers:sigma_sqrt", "weight t^-2", lambda: _even("power"))
_row("diffusers:ideogram4", "sigmoid(N(mean, std²))", lambda mean=0.0, std=1.5: _normal(mean, std))
_row("kohya:sigmoid", "sigmoid(scale N(0, 1))", lambda sigmoid_scale=1.0: _normal(0.0, sigmoid_scale))
_row("kohya:shift", "shifted", lambda shift=3.0, sigmoid_scale=1.0: _shift(_normal(0.0, sigmoid_scale), shift))
_row("kohya:min_snr", "weight min(SNR, gamma)/SNR", lambda gamma=5.0: _even("min_snr", gamma=gamma), "step")
_row("kohya:debiased", "weight 1/sqrt(SNR)", lambda: _even("debiased"), "capped")
_row("kohya:debiased_v", "weight 1/(SNR + 1)", lambda: _even("debiased"), "capped_v")
_row("kohya:scale_v_pred_loss", "weight SNR/(SNR + 1)", lambda: _even("snr"), "capped_v")
_row("kohya:v_pred_like_loss", "weight 1 + c (SNR + 1)/SNR", lambda c=0.1: _even("v_like_loss", c=c), "capped_v")
_row("musubi:flux_shift", "logit-normal, shifted by tokens", lambda sigmoid_scale=1.0: _flux(sigmoid_scale))
_row("musubi:flux2_shift", "the same; tokens: h w of the latent", lambda sigmoid_scale=1.0: _flux(sigmoid_scale))
_row("musubi:qwen_shift", "shifted by tokens", lambda sigmoid_scale=1.0: _flux(sigmoid_scale, 8192.0, 0.9))
_row("musubi:krea2_shift", "shifted by tokens", lambda sigmoid_scale=1.0: _flux(sigmoid_scale, 6400.0))
_row("musubi:ideogram4_shift", "by tokens", lambda: _shift(_normal(0.0, 1.5), law="root", last=1024.0, low=0.0))
_row("musubi:logsnr", "ln SNR ~ N(mean, std²)", lambda mean=0.0, std=1.0: _snr(mean, std))
_row("musubi:qinglong_flux", "mixed", lambda mean=0.0, std=1.0: _mixed((79, _flux()), (11, _snr(mean, std)), _LAST))
_row("musubi:qinglong_qwen", "mixed", lambda: _mixed((95, _flux(1.0, 8192.0, 0.9)), (5, _snr(5.36, 1.0))))
_row("simpletuner:beta", "Beta(alpha, beta)", lambda alpha=2.0, beta=2.0: _as("beta", a=alpha, b=beta))
_row("simpletuner:mixflow", "1 - sqrt(U)", lambda: _as("beta", a=1.0, b=2.0))
_row("simpletuner:fast_schedule", "a list", lambda: _as("listed", times=[1.0] * 7 + [0.75, 0.5, 0.25]))
_row("simpletuner:cubic", "knots", lambda values=(1.0, 1.0): _as("table", values=values, between="spline"))
_row("onetrainer:cos_map", "p = 2/(pi (1 - 2t + 2t²))", lambda: _as("cosmap"))
_row("onetrainer:inverted_parabola", "2 - w x²", lambda weight=0.0, bias=0.0: _as("parabola", weight=weight, bias=bias))
_row("onetrainer:sigmoid", "rising with t", lambda weight=0.0, bias=0.0: _as("slope", weight=weight, bias=bias))
_row("onetrainer:heavy_tail", "SD3's mode sampling", lambda mode_scale=0.0: _as("mode", m=mode_scale))
_row("onetrainer:sigma", "weight t", lambda: _even("linear", offset=0.0, slope=1.0))
_row("onetrainer:debiased_v", "weight 1/sqrt(SNR + 1)", lambda: _even("p2", gamma=0.5), "step")
_row("onetrainer:p2_v", "weight (2 + SNR)^-gamma", lambda gamma=1.0: _even("p2", k=2.0, gamma=gamma), "step")
_row("ai_toolkit:content", "1 - U³", lambda: _as("beta", a=1.0, b=1 / 3))
_row("ai_toolkit:style", "U³", lambda: _as("beta", a=1 / 3, b=1.0))
_row("ai_toolkit:snr_gamma", "weight gamma/SNR", lambda gamma=5.0: _even("snr", power=-1.0, scale=gamma), "step")
_row("ai_toolkit:half_bell", "bell, flat below 1/2", lambda: _even("bell", flat=True))
_row("diffsynth:bell", "weight exp(-2 (t - 1/2)²) - exp(-1/2), mean 1", lambda: _even("bell"))
_row("nemo:linear", "weight 1 + 3t", lambda: _even("linear"))
_row("nemo:time_shift_linear", "shifted by tokens", lambda: _flux(1.0, first=1024.0, low=0.6625))
_row("nemo:time_shift_sqrt", "by tokens", lambda: _shift(_normal(), 3.0, law="root", last=16384.0, low=1.0))
_row("chroma:parabola", "p ~ 2 - 7.7 (t - 1/2)²", lambda: _as("parabola"))
_row("wan:high_noise", "cut", lambda boundary=0.875, shift=5.0: _cut(_shift("uniform", shift), boundary, 1.0))
_row("wan:low_noise", "cut", lambda boundary=0.875, shift=5.0: _cut(_shift("uniform", shift), 0.0, boundary))
_row("sana:stretched", "between quantiles", lambda p_low=0.005, p_high=0.999: _normal(0.0, 1.0, p_low, p_high))
_row("open_sora:shift", "by tokens, frames", lambda: _shift(_normal(), law="linear", low=1.0, high=3.0))
_row("sd3:shift", "sqrt(tokens/base)", lambda base=256.0: _shift(_normal(), law="root", last=base, low=0.0))
_row("rae:shift", "sqrt(dim/4096)", lambda dim=196608.0: _shift("uniform", (dim / 4096) ** 0.5))
_row("meanflow:logit_normal", "sigmoid(N(mean, std²))", lambda mean=-0.4, std=1.0: _normal(mean, std))
_row("rfpp:u_shape", "p ~ e^(a t) + e^(a (1 - t))", lambda a=4.0: _as("u_shape", a=a))
_row("edm:log_normal", "EDM", lambda mean=-1.2, std=1.2, sigma_data=0.5: _edm(mean, std, sigma_data), "law")
_row("edm2:img512", "ln sigma ~ N(-0.4, 1)", lambda sigma_data=0.5: _edm(-0.4, 1.0, sigma_data), "law")
_row("edm2:img64", "ln sigma ~ N(-0.8, 1.6²)", lambda sigma_data=0.5: _edm(-0.8, 1.6, sigma_data), "law")
_row("sana_sprint:log_normal", "ln sigma ~ N(mean, std²)", lambda mean=0.2, std=1.6: _edm(mean, std, 0.5)[0], "law")
_row("laplace:log_snr", "ln SNR", lambda mean=0.0, scale=0.5: _law("laplace", -mean / 2, scale / 2), "law_t")
_row("cauchy:log_snr", "ln SNR", lambda mean=0.0, scale=1.0: _law("cauchy", -mean / 2, scale / 2), "law_t")
_row("k_diffusion:loglogistic", "ln sigma", lambda loc=0.0, scale=0.5: _law("logistic", loc, scale), "law")
_row("k_diffusion:v_diffusion", "tan(pi u/2), 1e-3 to 1e3", lambda: _cut("cosmap", 1 / 1001, 1000 / 1001), "sigma")
_row("k_diffusion:split_lognormal", "ln sigma normal, with two scales", _split, "law")
_row("nemo:mix", "a share of batches uniform, the others logit-normal; shifted", _batches)
_row("k_diffusion:cosine", "cosine", lambda side=64.0: _as("cosine_interpolated", image=side, low=32, high=side), "law")


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
        found = made(**options)
        sampler, weight = found if isinstance(found, tuple) else (found, _as("none"))
        try:
            self.sampler = density(**sampler)
            self.weighting = weighting(**weight, prediction=prediction)
        except ConfigError as error:
            raise ConfigError(f"preset {name}: {error}") from None

    def sample(self, n: int, seed: int = 0, device: Any = "cpu", step: int = 0, **context: Any) -> torch.Tensor:
        """Draws: float32 (n,), a function of seed and step.

        Args:
            context: what the preset asks for: ``tokens``, ``frames``, each a number or a tensor (n,).

        Raises:
            ConfigError: it was not said.
        """
        at = RandomCoordinates(seed, step, 0, None, range(n), n, (), device, context)
        if hasattr(self.sampler, "level"):
            return self._of(self.sampler.uniforms(at), at).float()
        return self._time(self.sampler.draw(at)).float()

    def quantile(self, probability: Any, **context: Any) -> Any:
        """The time below which a draw falls with a probability, elementwise, float64; a tensor of a tensor."""
        given = torch.as_tensor(probability, dtype=torch.float64)
        found = self._of(given, RandomCoordinates(device=given.device, context=context))
        return found if isinstance(probability, torch.Tensor) else found.numpy()

    def _of(self, probability: Any, at: RandomCoordinates) -> Any:
        sampler: Any = self.sampler
        if hasattr(sampler, "level"):
            return self._time((-sampler.level(1 - probability) / 2).exp())
        return self._time(sampler.quantile(probability, **at.arguments(sampler.context_names)))

    def weights(self, t: Any) -> torch.Tensor:
        """What the losses at such times are multiplied with, float32, in the shape of t and where t is.

        Raises:
            ConfigError: a time on the CPU is none, or its weight is not finite.
        """
        t = torch.as_tensor(t)
        found = self.weighting(self._snr(t.double())).float()
        if t.device.type == "cpu":
            last = float("inf") if self._snr is _snr_of_sigma else 1.0
            bad = t[~((t >= 0) & (t <= last) & found.isfinite())]
            got = f"times such as {bad[:3].tolist()}"
            demand(not len(bad), f"preset {self.name}: weights", got, f"0 to {last:g} where the weight is finite")
        return found
