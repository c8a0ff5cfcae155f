"""Presets: timesteps and weights of other trainers, under the names and options of these trainers.

The presets are rows of the table in `preset_table`. docs/trainers.md translates between trainers, option by option.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kairos_timesteps.build import density, weighting
from kairos_timesteps.coordinates import RandomCoordinates
from kairos_timesteps.diffusion.schedule import make_schedule
from kairos_timesteps.errors import ConfigError, demand
from kairos_timesteps.lazy import Tensor, torch
from kairos_timesteps.numeric import Array, bisect, bound_below_one, sigmoid
from kairos_timesteps.options import Component, allowed_names_hint, dump, option, parse
from kairos_timesteps.preset_table import BOUNDS, CONVENTIONS, TABLE
from kairos_timesteps.randomness import Device
from kairos_timesteps.registry import split

_ROWS = {row.name: row for row in TABLE}
_OPERATORS = {ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Pow: operator.pow}


def evaluate(specification: str, options: Mapping[str, Any]) -> Any:
    """Return the value of a specification of the table; a component becomes a dictionary of its name and options.

    Raises:
        KeyError: the specification contains the name of an option that the preset does not have.
    """

    def value(node: Any) -> Any:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return {"name": node.func.id, **{keyword.arg: value(keyword.value) for keyword in node.keywords}}
        if isinstance(node, ast.BinOp):
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp):
            return -value(node.operand)
        if isinstance(node, ast.List):
            return [value(item) for item in node.elts]
        return options[node.id] if isinstance(node, ast.Name) else node.value

    return value(ast.parse(specification, mode="eval").body)


def _snr_of_step(time: Tensor) -> Tensor:
    snr = torch.from_numpy(make_schedule("scaled_linear").snr).to(time.device)
    return snr[(1000 * time).round().long().clamp(0, 999)]


# By unit of time: the time at a fraction u of a linear flow, the time at a sigma, and the SNR at a time
_OfTime = dict[str, Callable[[Tensor], Tensor]]
_OF_FRACTION: _OfTime = {"t": lambda u: u, "sigma": lambda u: u / (1 - u), "step": lambda u: (1000 * u).floor() / 1000}
_OF_SIGMA: _OfTime = {"t": lambda sigma: 1 / (1 + 1 / sigma), "sigma": lambda sigma: sigma}
_SNR: _OfTime = {"t": lambda t: ((1 - t) / t) ** 2, "sigma": lambda sigma: sigma**-2, "step": _snr_of_step}


def presets() -> list[str]:
    """Return the names of all presets, sorted."""
    return sorted(_ROWS)


def preset(name: str, **options: Any) -> "Preset":
    """Return timesteps and weights of a trainer, by the name of the preset and the trainer's options.

    Omitted options have the trainer's defaults.

    Raises:
        ConfigError: a name or option is unknown, or a value is not allowed; the message lists the allowed ones.
    """
    if name not in _ROWS:
        raise ConfigError(f"unknown preset {name!r}{allowed_names_hint(str(name), _ROWS)}")
    row = _ROWS[name]
    # a class with the options of the row, by which `parse` checks names, types and bounds
    hints = {key: list[float] if isinstance(value, list) else float for key, value in row.options.items()}
    fields = {key: option(value, row.help, **BOUNDS.get(key, {"gt": 0})) for key, value in row.options.items()}
    declared = type("PresetOptions", (Component,), {"__annotations__": hints, "__module__": __name__, **fields})
    return Preset(name, dump(declared, parse(declared, options, f"preset {name}")))


class Preset:
    """Timesteps and weights of a trainer. Times increase with noise: t or step 1, or an infinite sigma.

    Attributes:
        name: name of the preset.
        trainer: name of the trainer, or of the paper.
        help: formula or description, in one line.
        source: repository and file, or paper, that states the formula.
        convention: unit and direction of the trainer's time, and its signs.
        options: options of the trainer with their values.
        sampler: sampler of fractions of a linear flow, or of ln SNR.
        weighting: weighting as a function of the signal-to-noise ratio.
    """

    def __init__(self, name: str, options: dict[str, Any]):
        row = _ROWS[name]
        convention = CONVENTIONS[row.convention]
        self.name, self.trainer, self.options = name, row.trainer, options
        self.help, self.source, self.convention = row.help, row.source, convention.meaning
        self._unit = convention.time
        try:
            self.sampler = density(**evaluate(row.sampler, options))
            self.weighting = weighting(**evaluate(row.weighting, options), prediction=convention.prediction)
        except ConfigError as error:
            raise ConfigError(f"preset {name}: {error}") from None

    def attach_call(self) -> str:
        """Return the call of `kairos_timesteps.attach` with this preset, as code with `optimizer` and `network`.

        For flow models ``time`` is ``noise_is_one``; change it if t = 1 is data in the trainer. Otherwise t is sigma,
        or an index of Stable Diffusion's schedule (``scaled_linear``).
        """
        row = _ROWS[self.name]
        (sampler, sampler_options), (weighting_name, weighting_options) = (
            split(evaluate(specification, self.options)) for specification in (row.sampler, row.weighting)
        )
        process = {"t": '"flow"', "sigma": '"edm"', "step": '"scaled_linear"'}[self._unit]
        if "sigma_data" in self.options:
            process = f"kairos_timesteps.Edm(sigma_data={self.options['sigma_data']!r})"
        arguments = [f'"{sampler}+{weighting_name}"', process, "optimizer", "network"]
        if self._unit == "t":
            arguments.append('time="noise_is_one"')
        if self._unit == "step":
            arguments.append(f'prediction="{CONVENTIONS[row.convention].prediction}"')
        for argument, options in (("sampler", sampler_options), ("weighting", weighting_options)):
            if options:
                arguments.append(f"{argument}={options!r}")
        return f"kairos_timesteps.attach({', '.join(arguments)})"

    def sample(self, n: int, seed: int = 0, device: Device = "cpu", step: int = 0, **context: Any) -> Tensor:
        """Draw times, float32 (n,), a function of seed and step.

        Args:
            n: number of times.
            seed: seed of the training run.
            device: device of the times.
            step: training step.
            context: values that the preset requires: ``tokens``, ``frames``, each a number or a tensor (n,).

        Raises:
            ConfigError: a required value is missing.
        """
        coordinates = RandomCoordinates(seed, step, 0, None, range(n), n, (), device, context)
        if hasattr(self.sampler, "log_snr_quantile"):
            return self._quantile(self.sampler.uniforms(coordinates), coordinates).float()
        return _OF_FRACTION[self._unit](self.sampler.draw(coordinates)).float()

    def quantile(self, probability: Any, **context: Any) -> Any:
        """Return the time below which a draw falls with a probability, elementwise.

        The result has the kind and type of `probability`, and is below 1 unless it is a sigma.
        """
        p = torch.as_tensor(probability, dtype=torch.float64)
        times: Any = self._quantile(p, RandomCoordinates(device=p.device, context=context))
        if isinstance(probability, torch.Tensor):
            times = times.to(probability.dtype if probability.is_floating_point() else torch.float64)
        else:
            kind = np.asarray(probability).dtype
            times = times.numpy().astype(kind if kind.kind == "f" else np.float64)
        return times if self._unit == "sigma" else bound_below_one(times)

    def cdf(self, t: Any, **context: Any) -> Array:
        """Return the probability of a draw below each time, float64, by bisection of `quantile`.

        The bisection is one of the logit, so that small probabilities have a small relative error.
        """
        low, high = -700.0, 40.0  # of probabilities from 1e-304 to 1
        below = np.nextafter(np.asarray(t, np.float64), -np.inf)
        logits = bisect(lambda logit: self.quantile(sigmoid(logit), **context), below, low, high)
        # where the bisection ends at its lower end, no draw is below t
        return np.where(logits > low + 1e-6, sigmoid(logits), 0.0)

    def _quantile(self, p: Tensor, coordinates: RandomCoordinates) -> Tensor:
        sampler: Any = self.sampler
        if hasattr(sampler, "log_snr_quantile"):
            return _OF_SIGMA[self._unit]((-sampler.log_snr_quantile(1 - p) / 2).exp())
        return _OF_FRACTION[self._unit](sampler.quantile(p, **coordinates.arguments(sampler.context_names)))

    def weights(self, t: Any) -> Tensor:
        """Return the factors of losses at times, float32, with the shape and the device of the times.

        Raises:
            ConfigError: a time on the CPU is out of range, or its weight is not finite.
        """
        t = torch.as_tensor(t)
        snr = _SNR[self._unit](t.double())
        factors: Tensor = self.weighting(snr).float()
        if t.device.type == "cpu":
            last = float("inf") if self._unit == "sigma" else 1.0
            invalid = t[~((t >= 0) & (t <= last) & factors.isfinite())]
            got = f"times such as {invalid[:3].tolist()}"
            demand(not len(invalid), f"preset {self.name}: weights", got, f"0 to {last:g} where the weight is finite")
        return factors
