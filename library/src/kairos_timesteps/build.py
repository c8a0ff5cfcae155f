"""Samplers and weightings by name, and functions that are registered as such.

A function is the simplest form of a component::

    @density("power_of_u")
    def quantile(u, a: float = 2.0):
        return u**a

    @weighting("truncated")
    def weight(snr, limit: float = 1.0):
        return snr.clip(limit, None) / snr

Parameters with a default are options. A keyword-only parameter without a default is context that a draw must pass, such
as ``tokens``; ``step`` is the training step.
"""

import inspect
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from kairos_timesteps.base import FixedDensity, Weighting
from kairos_timesteps.components import SAMPLERS, WEIGHTINGS
from kairos_timesteps.coordinates import required
from kairos_timesteps.diffusion.schedule import PREDICTIONS, NoiseSchedule
from kairos_timesteps.errors import demand, rejection
from kairos_timesteps.lookup import build_pair
from kairos_timesteps.numeric import Values, same_kind
from kairos_timesteps.options import option
from kairos_timesteps.registry import Registry

F = TypeVar("F", bound=Callable[..., Any])
ERRORS = (*PREDICTIONS, "flow", "predicted")  # errors that a weighting can be stated for


def density(name: str, process: Any = "flow", *, help: str = "", **options: Any) -> Any:
    """Return a fixed density by name, or a decorator that registers a quantile function under a new name.

    A density has the methods `sample`, `pdf`, `cdf` and `quantile` of fractions of the process, 0 the image and 1
    noise. Arguments are numpy arrays or tensors; context is passed as keywords, ``quantile(u, tokens=1024)``.

    Args:
        name: name of a sampler, or a new name for the decorated function ``quantile(u, option=default, ...)``. It
            maps [0, 1] to [0, 1] without decreasing. It is elementwise, for numpy arrays and tensors.
        process: forward process, as for `Strategy`; it matters for densities of the signal-to-noise ratio.
        help: one line on what the decorated function is.
        options: options of the sampler.

    Raises:
        ConfigError: an unknown option, a value that is not allowed, a sampler that learns, or a name that is taken. Or
            options are given with a new name.
    """
    demand(isinstance(name, str), "density", repr(name), 'a name: @density("mine")')
    decorator = _Decorator(SAMPLERS, name, help, _FunctionDensity, {})
    if name not in SAMPLERS and name not in SAMPLERS.unavailable and not options:
        return decorator
    from kairos_timesteps.diffusion.adapters import as_process  # imports torch

    demand(issubclass(SAMPLERS.entry(name).component, FixedDensity), "density", name, "samplers of a fixed density")
    built = build_pair(as_process(process), (name, "none"), options, None)[0]
    built.decorator = decorator  # for a module or a notebook cell that is executed again
    return built


def weighting(
    name: str, process: Any = "flow", prediction: str | None = None, *, error: str = "", help: str = "", **options: Any
) -> Any:
    """Return a weighting by name, or a decorator that registers a function of the signal-to-noise ratio.

    A weighting is called with signal-to-noise ratios, numpy arrays or tensors, and returns factors of losses.

    Args:
        name: name of a weighting, or a new name for the decorated function ``weight(snr, option=default, ...)``.
        process: forward process, as for `Strategy`; it matters for weightings of timesteps.
        prediction: prediction type whose squared error the factors multiply, ``epsilon``, ``x0``, ``v`` or ``flow``;
            None: that of the process. A formula that is stated for another error is converted.
        error: error that the decorated function is stated for, ``epsilon`` (default), ``x0``, ``v``, ``flow`` or
            ``predicted`` (whatever the network predicts); it is converted to other predictions.
        help: one line on what the decorated function is.
        options: options of the weighting.

    Raises:
        ConfigError: an unknown name, prediction or option, a value that is not allowed, or a name that is taken.
    """
    demand(isinstance(name, str), "weighting", repr(name), 'a name: @weighting("mine")')
    demand(error in ("", *ERRORS), "error", repr(error), ", ".join(ERRORS))
    decorator = _Decorator(WEIGHTINGS, name, help, _FunctionWeighting, {"stated_for": error or "epsilon"})
    if name not in WEIGHTINGS and not options and prediction is None:
        return decorator
    from kairos_timesteps.diffusion.adapters import as_process

    allowed = (*PREDICTIONS, "flow")
    demand(prediction in (None, *allowed), "prediction", prediction, ", ".join(allowed))
    built = build_pair(as_process(process), ("uniform", name), None, options)[1]
    built.prediction = prediction or built.prediction
    built.decorator = decorator
    return built


class _FunctionDensity(FixedDensity):
    """Base of densities whose quantile is a function."""

    function: Callable[..., Any]
    parameters: tuple[str, ...] = ()  # of the function that are options
    required: tuple[str, ...] = ()  # context that the function needs

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed)
        if self.required:
            return
        name, values = type(self).__name__, np.asarray(self.quantile(np.linspace(0, 1, 1001)))
        demand(values.shape == (1001,), name, f"shape {values.shape}", "an elementwise function: a number per number")
        rises = bool((np.diff(values) >= 0).all() and values[0] >= 0 and values[-1] <= 1)  # False with NaN
        got = f"values between {values.min():g} and {values.max():g}, {'rising' if rises else 'not all rising'}"
        demand(rises, name, got, "a function that maps [0, 1] to [0, 1] and does not decrease")

    @classmethod
    def required_context(cls, options: Any) -> set[str]:
        """Return the keyword parameters without a default."""
        return set(cls.required)

    def quantile(self, p: Values, **context: Any) -> Values:
        """Call the function with its options and the context that it names."""
        user, available = f"sampler {type(self).__name__}", {"step": 0, **context}
        selected = {name: required(name, available.get(name), user) for name in self.context_names}
        values = self.function(p, **{name: getattr(self, name) for name in self.parameters}, **selected)
        return same_kind(values, p)  # a function of numpy alone returns an array for a tensor on the CPU

    def __call__(self, function: F) -> F:
        """Register the function of a module or a notebook cell that is executed again."""
        self.decorator(function)
        return function


class _FunctionWeighting(Weighting):
    """Base of weightings by a function of the signal-to-noise ratio."""

    function: Callable[..., Any]
    parameters: tuple[str, ...] = ()

    def formula(self, snr: Values) -> Values:
        """Call the function with its options."""
        factors: Values = self.function(snr, **{name: getattr(self, name) for name in self.parameters})
        return factors

    def __call__(self, snr: Any, step: Any = 0) -> Any:
        """Return factors of losses; or register the function of a module or notebook cell that is executed again."""
        if inspect.isfunction(snr):
            return self.decorator(snr)
        return super().__call__(snr, step)


class _Decorator:
    """Decorator that registers a function as a component; any other use reports that the name is unknown."""

    def __init__(self, registry: Registry, name: str, help: str, base: type, attributes: dict[str, Any]):
        self._arguments = registry, name, help, base, attributes

    def __call__(self, function: F) -> F:
        registry, name, help, base, attributes = self._arguments
        if not inspect.isfunction(function):
            registry.entry(name)  # reports the unknown name
        attributes = {**attributes, **_declaration(name, function, base), "function": staticmethod(function)}
        declared = type(name, (base,), attributes)
        registry.register(name, help or (inspect.getdoc(function) or "").partition("\n")[0])(declared)
        return function

    def __getattr__(self, attribute: str) -> Any:
        self._arguments[0].entry(self._arguments[1])
        raise AttributeError(attribute)


def _declaration(name: str, function: Callable[..., Any], base: type) -> dict[str, Any]:
    """Return the attributes of a component class that the signature of a function declares.

    * The function has at least one parameter. The others are options with a default, or context of a density.
    * Context is keyword-only, without a default.
    * No parameter has * or **, or the name of an attribute of `base`.

    Raises:
        ConfigError: a parameter cannot be an option or context.
    """
    hints = typing.get_type_hints(function)
    parameters = [*inspect.signature(function).parameters.values()]
    demand(parameters, name, f"{function.__name__}()", "a function whose first parameter is u, or the SNR")
    attributes: dict[str, Any] = {"__annotations__": {}, "__doc__": inspect.getdoc(function) or name}
    context = []
    for parameter in parameters[1:]:
        where = f"{name}: parameter {parameter.name}"
        is_context = base is _FunctionDensity and parameter.kind == parameter.KEYWORD_ONLY
        if parameter.default is parameter.empty and not is_context:
            allowed = "a default; or, for context, keyword-only: (u, *, tokens)"
            raise rejection(where, "no default", allowed if base is _FunctionDensity else "a default")
        has_keyword = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        is_allowed = has_keyword and not hasattr(base, parameter.name)
        demand(is_allowed, where, str(parameter), "another name, which kairos does not use, without * or **")
        if parameter.default is parameter.empty:
            context.append(parameter.name)
            continue
        hint = hints.get(parameter.name, type(parameter.default))
        default = float(parameter.default) if hint is float else parameter.default
        attributes["__annotations__"][parameter.name] = hint
        attributes[parameter.name] = option(default, f"parameter of {function.__name__}")
    attributes["parameters"] = tuple(attributes["__annotations__"])
    if base is _FunctionDensity:
        attributes |= {"context_names": tuple(context), "required": tuple(set(context) - {"step"})}
    return attributes | {"__module__": function.__module__, "__qualname__": function.__qualname__}
