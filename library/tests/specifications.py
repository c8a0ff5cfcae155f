"""Random strategy specifications and random ways to call them, for tests with hypothesis.

Values come from the metadata of the options (type, choices, bounds), so that new samplers, weightings and options are
included without a change here. A specification differs from `Strategy("uniform+none", "linear", timesteps=20)` in one
or two of sampler, weighting and process; a call differs from ``draw(x0)`` in one or two arguments.
"""

import os
import types
import typing
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

import kairos_timesteps.samplers.combined
import kairos_timesteps.samplers.speed
import kairos_timesteps.weightings.change_aware
import kairos_timesteps.weightings.fixed
from kairos_timesteps.base import FixedDensity
from kairos_timesteps.components import SAMPLERS, WEIGHTINGS
from kairos_timesteps.coordinates import POINTS
from kairos_timesteps.options import Option, options_without_name
from kairos_timesteps.registry import Registry
from kairos_timesteps.samplers.adaptive import Adaptive
from kairos_timesteps.samplers.fixed import Clts
from kairos_timesteps.samplers.gradients import FollowsGradients
from kairos_timesteps.samplers.info_noise import InfoNoise
from kairos_timesteps.samplers.losses import LossSecondMoment, SmoothedLosses
from kairos_timesteps.strategy import Strategy
from kairos_timesteps.weightings.uncertainty import Uncertainty

FIXED = sorted(name for name, entry in SAMPLERS.items() if issubclass(entry.component, FixedDensity))
COMBINED = ("range", "shift", "mixture", "by_group", "schedule")
LEARNED = sorted(set(SAMPLERS) - set(FIXED))
DEPENDS_ON_IMAGES = ("adaptive", "adaptive_official", "adaptive_paper")
DISCRETE = ("linear", "cosine", "quadratic")
CONTINUOUS = ("edm", "fdm", "flow", "vp")
SMALLEST_T = 10  # options that are timesteps are below this number

# options whose default is too large for a test of a few steps; every specification sets them
SMALL: dict[str, SearchStrategy[Any]] = {
    "frequency": st.integers(1, 2),
    "start": st.integers(1, 2),
    "bins": st.sampled_from([2, 4]),
    "samples": st.sampled_from([None, 2, 4]),
    "history": st.integers(1, 2),
    "queue": st.just(3),
    "selected": st.integers(1, 3),
    "width": st.sampled_from([4, 8]),
    "depth": st.integers(1, 2),
    "feature_timesteps": st.sampled_from([5, 10]),
    "length": st.integers(1, 10),
    "channels": st.just(8),
    "min_count": st.integers(1, 2),
}
SMALL_IN = (LossSecondMoment, SmoothedLosses, InfoNoise, FollowsGradients, Adaptive, Clts, Uncertainty)

# options that several fields or the process restrict
TABLE = st.lists(st.sampled_from([0.0, 0.2, 1.0, 3.0]), min_size=2, max_size=5)
TAU = st.sampled_from([None, 1, 5, SMALLEST_T - 1])
RESTRICTED: dict[tuple[type, str], SearchStrategy[Any]] = {
    (kairos_timesteps.samplers.fixed.Uniform, "start"): st.integers(0, 4),
    (kairos_timesteps.samplers.fixed.Uniform, "end"): st.sampled_from([None, 5, 7, SMALLEST_T]),
    (kairos_timesteps.samplers.fixed.LogNormal, "low"): st.sampled_from([0.0, 0.1, 0.4]),
    (kairos_timesteps.samplers.fixed.LogNormal, "high"): st.sampled_from([0.6, 0.9, 1.0]),
    (kairos_timesteps.samplers.combined.Range, "low"): st.sampled_from([0.0, 0.13, 0.4]),
    (kairos_timesteps.samplers.combined.Range, "high"): st.sampled_from([0.5, 0.77, 1.0]),
    (kairos_timesteps.samplers.combined.Table, "values"): TABLE,
    (kairos_timesteps.samplers.combined.Table, "file"): st.none(),
    (kairos_timesteps.samplers.combined.Listed, "times"): st.lists(
        st.sampled_from([0.0, 0.21, 0.5, 0.83, 1.0]), min_size=1, max_size=5
    ),
    (kairos_timesteps.samplers.combined.Schedule, "ramp"): st.sampled_from([0.0, 0.3, 3.0]),
    (kairos_timesteps.samplers.speed.Speed, "tau"): TAU,
    (kairos_timesteps.samplers.speed.SpeedOfficial, "tau"): TAU,
    (Adaptive, "lr"): st.sampled_from([0.001, 0.01]),  # a policy that diverges draws at the clamped ends
    (SmoothedLosses, "width"): st.sampled_from([0.02, 0.1, 0.5]),
    (kairos_timesteps.weightings.change_aware.ChangeAwareOfficial, "tau"): TAU,
    (kairos_timesteps.weightings.fixed.EdmWeighting, "warmup"): st.sampled_from([None, 1, 6]),
    (kairos_timesteps.weightings.fixed.TableWeighting, "values"): TABLE,
    (kairos_timesteps.weightings.fixed.TableWeighting, "file"): st.none(),
    (Uncertainty, "lr"): st.sampled_from([0.001, 0.01, 0.1]),
}


@dataclass(frozen=True)
class Specification:
    """Options of a strategy; the ``repr`` is the call that builds the strategy.

    Attributes:
        sampler: name and options of the sampler.
        weighting: name and options of the weighting.
        process: name of a noise schedule or of a process in continuous time.
        timesteps: T of a noise schedule.
        prediction: parametrisation of the network's output.
    """

    sampler: dict[str, Any] = field(default_factory=lambda: {"name": "uniform"})
    weighting: dict[str, Any] = field(default_factory=lambda: {"name": "none"})
    process: str = "linear"
    timesteps: int = 20
    prediction: str | None = None

    def __repr__(self) -> str:
        name = f"{self.sampler['name']}+{self.weighting['name']}"
        process = f"{self.process!r}, timesteps={self.timesteps}, prediction={self.prediction!r}"
        sampler, weighting = options_without_name(self.sampler), options_without_name(self.weighting)
        return f"Strategy({name!r}, {process}, sampler={sampler}, weighting={weighting})"

    def build(self, **more: Any) -> Strategy:
        """Build the strategy with further arguments of `Strategy`."""
        return Strategy(
            f"{self.sampler['name']}+{self.weighting['name']}",
            self.process,
            timesteps=self.timesteps,
            prediction=self.prediction,
            sampler=options_without_name(self.sampler),
            weighting=options_without_name(self.weighting),
            **more,
        )

    @property
    def discrete(self) -> bool:
        """True for a noise schedule of T timesteps."""
        return self.process in DISCRETE

    @property
    def learned(self) -> bool:
        """True if the sampler learns from its observations."""
        return self.sampler["name"] in LEARNED

    @property
    def needs(self) -> set[str]:
        """Names of the context that a draw requires."""
        by_epochs = self.sampler.get("points") == "epochs"
        name = self.sampler["name"]
        required = SAMPLERS[name].component.required_context(SAMPLERS.parse(name, options_without_name(self.sampler)))
        return required | ({"item", "items", "epoch"} if by_epochs else set())

    def holds(self, key: str, value: Any) -> bool:
        """Return True if the sampler, or a component of it, has this option."""
        return any(component.get(key) == value for component in components_of(self.sampler))


def components_of(sampler: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the sampler and its components of all levels."""
    inner = [sampler["density"]] if "density" in sampler else sampler.get("parts", [])
    results = [sampler]
    for component in inner:
        results += components_of({"name": component} if isinstance(component, str) else component)
    return results


def _numbers(bounds: dict[str, float], integer: bool) -> SearchStrategy[Any]:
    """Return numbers within the bounds of an option, on a coarse grid, so that a failing example is readable."""
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    if integer:
        first = 0 if low is None else int(low) + ("gt" in bounds)
        return st.integers(first, first + 8 if high is None else int(high) - ("lt" in bounds))
    if low is not None and high is not None:
        steps = st.integers(1 if "gt" in bounds else 0, 19 if "lt" in bounds else 20)
        return steps.map(lambda step: round(low + (high - low) * step / 20, 6))
    if low is None:
        return st.sampled_from([-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0])
    above = [low + step for step in (0.1, 0.5, 1.0, 4.0, 20.0)]
    return st.sampled_from(above if "gt" in bounds else [low, *above])


def _values(hint: Any, one: Option) -> SearchStrategy[Any]:
    """Return values that an option's type, choices and bounds allow."""
    if one.choices:
        return st.sampled_from(list(one.choices))
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return st.one_of(*(_values(member, one) for member in typing.get_args(hint)))
    if hint is type(None):
        return st.none()
    if hint is bool:
        return st.booleans()
    if hint in (int, float):
        return _numbers(one.bounds, hint is int)
    raise TypeError(f"no values for an option of type {hint}: add it to RESTRICTED")


def _restricted(kind: type, name: str) -> SearchStrategy[Any] | None:
    """Return the values of an option that depends on other options or must be small; None for any other option."""
    for base in kind.__mro__:
        if (base, name) in RESTRICTED:
            return RESTRICTED[base, name]
    return SMALL.get(name) if issubclass(kind, SMALL_IN) else None


@st.composite
def options_of(draw: Any, registry: Registry, name: str, depth: int, top: bool) -> dict[str, Any]:
    """Draw options of a component; combinations are nested up to `depth` levels.

    Importance weights and points belong to the whole sampler, so that only the `top` level gets them.
    """
    component, values = registry[name].component, {}
    for one in component.options.values():
        key = one.public_name
        if key in ("importance", "points") and not top:
            continue
        small = issubclass(component, SMALL_IN) and key in SMALL
        combines = key in ("density", "parts")
        if not (small or combines or draw(st.booleans())):
            continue
        if combines:
            values[key] = draw(_density(depth - 1) if key == "density" else _parts(name, values, depth - 1))
        else:
            selected = _restricted(component, one.name)
            values[key] = draw(_values(one.type, one) if selected is None else selected)
    if name == "schedule":  # the unit of the starts depends on their values
        values["of"] = "progress" if values["parts"][-1]["start"] < 1 and len(values["parts"]) > 1 else "steps"
    return values


@st.composite
def _density(draw: Any, depth: int) -> dict[str, Any]:
    """Draw a fixed sampler with options, as a component of another sampler."""
    name = draw(st.sampled_from(FIXED if depth > 0 else [name for name in FIXED if name not in COMBINED]))
    return {"name": name, **draw(options_of(SAMPLERS, name, depth, top=False))}


@st.composite
def _parts(draw: Any, name: str, values: dict[str, Any], depth: int) -> list[dict[str, Any]]:
    """Draw the components of a mixture, of groups or of a schedule."""
    count = draw(st.integers(1, 3))
    if name == "mixture":
        shares = st.sampled_from([0.0, 0.5, 1.0, 3.0])
        keys = [*draw(st.lists(shares, min_size=count - 1, max_size=count - 1)), 1.0]
    elif name == "by_group":
        keys = ["a", "b", "c"][:count]
    else:
        keys = [0.0, *draw(st.sampled_from([[0.25, 0.75], [2.0, 5.0]]))][:count]
    word = {"mixture": "share", "by_group": "group", "schedule": "start"}[name]
    return [{**draw(_density(depth)), word: key} for key in keys]


@st.composite
def samplers(draw: Any, names: typing.Sequence[str] = tuple(sorted(SAMPLERS)), depth: int = 3) -> dict[str, Any]:
    """Draw a sampler's name and options; combinations are nested up to `depth` levels."""
    name = draw(st.sampled_from(list(names)))
    return {"name": name, **draw(options_of(SAMPLERS, name, draw(st.integers(1, depth)), top=True))}


@st.composite
def weightings(draw: Any, names: typing.Sequence[str] = tuple(sorted(WEIGHTINGS))) -> dict[str, Any]:
    """Draw a weighting's name and options."""
    name = draw(st.sampled_from(list(names)))
    return {"name": name, **draw(options_of(WEIGHTINGS, name, 1, top=True))}


PROCESSES = st.one_of(
    st.fixed_dictionaries(
        {
            "process": st.sampled_from(DISCRETE),
            "timesteps": st.sampled_from([SMALLEST_T, 20, 40]),
            "prediction": st.sampled_from(["epsilon", "x0", "v"]),
        }
    ),
    st.fixed_dictionaries({"process": st.sampled_from(CONTINUOUS)}),
)


@st.composite
def specifications(
    draw: Any, sampler: str | None = None, weighting: str | None = None, discrete: bool = False
) -> Specification:
    """Draw a specification in which one or two of sampler, weighting and process differ from the default.

    Args:
        sampler: name of the sampler; None: any.
        weighting: name of the weighting; None: any.
        discrete: only noise schedules with T timesteps.
    """
    by_name = {"sampler": sampler, "weighting": weighting}
    fixed = [axis for axis, name in by_name.items() if name]
    free = [axis for axis in ("sampler", "weighting", "process") if axis not in fixed]
    more = draw(
        st.lists(st.sampled_from(free), unique=True, min_size=0 if fixed else 1, max_size=max(2 - len(fixed), 0))
    )
    changed = {*fixed, *more}
    values: dict[str, Any] = {}
    if "sampler" in changed:
        values["sampler"] = draw(samplers([sampler] if sampler else tuple(sorted(SAMPLERS))))
    if "weighting" in changed:
        values["weighting"] = draw(weightings([weighting] if weighting else tuple(sorted(WEIGHTINGS))))
    if "process" in changed:
        values |= draw(PROCESSES.filter(lambda selected: selected["process"] in DISCRETE) if discrete else PROCESSES)
    return Specification(**values)


@dataclass(frozen=True)
class Call:
    """Form of a call of `Strategy.draw`.

    Attributes:
        split: ``whole``: one draw for the batch; ``range`` and ``tensor``: two draws with `index` and `total`;
            ``micro``: four micro-batches of one step; ``ranks``: one draw on each of two ranks of torch.distributed.
        times: shape of one sample's times.
        shared_time: one time for the whole batch.
        context: type of tokens, frames, group and progress: ``number``, ``tensor`` or ``list``.
        frames: True to pass the optional number of frames.
    """

    split: str = "whole"
    times: tuple[int, ...] = ()
    shared_time: bool = False
    context: str = "number"
    frames: bool = False


_CALLS: dict[str, SearchStrategy[Any]] = {
    "split": st.sampled_from(["range", "tensor", "micro", "ranks"]),
    "times": st.sampled_from([(3,), (2, 2)]),
    "shared_time": st.just(True),
    "context": st.sampled_from(["tensor", "list"]),
    "frames": st.just(True),
}


@st.composite
def calls(draw: Any) -> Call:
    """Draw a call in which at most two arguments differ from the default."""
    changed = draw(st.lists(st.sampled_from(sorted(_CALLS)), unique=True, max_size=2))
    values = {axis: draw(_CALLS[axis]) for axis in changed}
    if "shared_time" in values:  # one time for all samples requires one context
        values.pop("context", None)
    return Call(**values)


# two contexts; each sample of a batch has one of them
_CONTEXTS: tuple[dict[str, Any], dict[str, Any]] = (
    {"tokens": 1024, "frames": 4, "group": "a", "progress": 0.3},
    {"tokens": 300, "frames": 1, "group": "b", "progress": 0.9},
)


@dataclass(frozen=True)
class Context:
    """Context of a batch: the arguments of `draw`, and the samples that share a context.

    Attributes:
        arguments: arguments of `draw` for the whole batch.
        scalars: the contexts that occur, as arguments of `table`.
        member: index in `scalars` of the context of each sample, int64 (batch,).
    """

    arguments: dict[str, Any]
    scalars: list[dict[str, Any]]
    member: torch.Tensor

    def rows(self, rows: slice) -> dict[str, Any]:
        """Return the arguments of `draw` for some samples of the batch."""
        per_sample = (torch.Tensor, list)
        return {name: value[rows] if isinstance(value, per_sample) else value for name, value in self.arguments.items()}


def context_of(specification: Specification, call: Call, batch: int, step: int = 0) -> Context:
    """Return the context that the sampler of a specification requires, for a batch of images."""
    needs = specification.needs | ({"frames"} if call.frames and "tokens" in specification.needs else set())
    names = sorted(needs & set(_CONTEXTS[0]))
    groups = min((len(c["parts"]) for c in components_of(specification.sampler) if c["name"] == "by_group"), default=1)
    arguments: dict[str, Any] = {}
    if {"item", "items", "epoch"} <= needs:
        shuffled = torch.randperm(batch, generator=torch.Generator().manual_seed(step))
        arguments = {"item": 0 if call.shared_time else shuffled, "items": batch, "epoch": step}
    if call.context == "number" or not names:
        scalar = {name: _CONTEXTS[0][name] for name in names}
        return Context({**arguments, **scalar}, [scalar], torch.zeros(batch, dtype=torch.int64))
    member = torch.randint(2, (batch,), generator=torch.Generator().manual_seed(1))
    scalars = [{name: context[name] for name in names} for context in _CONTEXTS]
    if groups == 1:
        scalars = [{**scalar, **({"group": "a"} if "group" in scalar else {})} for scalar in scalars]
    for name in names:
        pair = [("a", "b").index(scalar[name]) if name == "group" else scalar[name] for scalar in scalars]
        values = torch.tensor(pair)[member]
        arguments[name] = values.tolist() if call.context == "list" else values
    return Context(arguments, scalars, member)


def examples(count: int) -> settings:
    """Return settings of a test that runs a fixed set of `count` examples, or of $KAIROS_EXAMPLES if that is less."""
    count = min(count, int(os.environ.get("KAIROS_EXAMPLES", count)))
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    return settings(
        max_examples=count, derandomize=True, deadline=None, database=None, suppress_health_check=slow, print_blob=False
    )


NOT_RANDOM = [kind for kind in POINTS if kind != "random"]
