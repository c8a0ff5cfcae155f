"""A whole strategy in anyone's training loop: which timesteps, and what their losses weigh.

    strategy = Strategy("adaptive+min_snr", schedule="cosine", prediction="v")
    draw = strategy.draw(x0)                                # draw.t: timesteps of the batch, draw.weights
    loss = strategy.loss(draw, per_sample_squared_error)    # the mean of weight x error
    loss.backward()
    with strategy.observe(draw, network=model, optimizer=optimizer):
        optimizer.step()

Everything random in step k is a function of (seed, k), and `state_dict` holds the rest: a resumed training draws what
an uninterrupted one would have drawn. Under torch.distributed each rank passes its part of the global batch.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairos_timesteps import distributed
from kairos_timesteps.base import Observation, Sampler, Weighting
from kairos_timesteps.component_options import Fixed
from kairos_timesteps.components import COUPLINGS
from kairos_timesteps.coordinates import Place
from kairos_timesteps.diffusion.adapters import as_process
from kairos_timesteps.errors import ConfigError, demand
from kairos_timesteps.lookup import parse_name, parts, table
from kairos_timesteps.meter import Meter
from kairos_timesteps.numeric import Array
from kairos_timesteps.randomness import Stream
from kairos_timesteps.registry import split

_TURN, _PARTS = (
    16,
    64,
)  # steps that fixed strategies draw at a time: a small draw costs its calls, which they share; parts of a batch kept


@dataclass(frozen=True)
class Draw:
    """The timesteps of one batch, where the batch is; tensors are (batch,), or (batch, times) where so many are asked.

    Attributes:
        place: where the samples stand in everything random.
        x0: the batch.
        fractions: of the process in [0, 1), float64.
        t: the process' own time: int64 timesteps, or a continuous process' times, float64.
        fixed_weights: of the weighting, float32.
        importance: 1/(T p(t)) where the sampler is corrected, else 1; likewise.
    """

    place: Place
    x0: Tensor
    fractions: Tensor
    t: Tensor
    fixed_weights: Tensor
    importance: Tensor

    @property
    def step(self) -> Any:
        """Number of the step, from 0."""
        return self.place.step

    @property
    def weights(self) -> Tensor:
        """What a sample's loss is multiplied with: weighting times importance."""
        return self.fixed_weights * self.importance

    def rows(self, start: int, stop: int) -> "Draw":
        """The samples `start` to `stop` - 1 of this draw: a micro-batch, with random coordinates of its own."""
        index = self.place.index[start:stop]
        tensors = (self.x0, self.fractions, self.t, self.fixed_weights, self.importance)
        return Draw(self.place.but(index=index), *(values[start:stop] for values in tensors))


@dataclass(frozen=True)
class _MicroBatch:
    """A draw of the present step with the losses that were computed for it."""

    draw: Draw
    losses: Tensor | None = None  # with the weighting's weights
    errors: Tensor | None = None  # without any weight


class Strategy:
    """A sampler and a weighting on a forward process, and a coupling of noise with images.

    Args:
        name: ``sampler+weighting``, or one of the two: the other is then ``uniform`` or ``none``.
        process: the forward process: a `Discrete`, `Edm`, `Flow` or `Vp`; a noise schedule (`NoiseSchedule`, one of
            diffusers' schedulers, or alpha-bar as an array of T numbers); or the name of a schedule (linear, cosine,
            quadratic) or of a process in continuous time (edm, flow, vp).
        timesteps: T, for a schedule given by name.
        prediction: what the network predicts: ``epsilon``, ``x0`` or ``v``; for processes that leave it open.
        sampler: options of the sampler.
        weighting: options of the weighting.
        coupling: name of the coupling, or its name and options, ``{"name": "nearest", "k": 8}``; see `couple`.
        seed: of everything random.
        process_group: ranks of torch.distributed over which the batch is split: a process group, or one dimension of a
            `DeviceMesh`, such as ``mesh["dp"]``; None: all ranks. With context, tensor or pipeline parallelism several
            ranks hold the same samples; the errors given to `loss` are then those of whole samples.

    Raises:
        ConfigError: an unknown name or option, or a value that is not allowed; the message says what is.
    """

    def __init__(
        self,
        name: str = "uniform",
        process: Any = "linear",
        *,
        timesteps: int = 1000,
        prediction: str = "epsilon",
        sampler: Mapping[str, Any] | None = None,
        weighting: Mapping[str, Any] | None = None,
        coupling: str | Mapping[str, Any] = "independent",
        seed: int = 0,
        process_group: Any = None,
    ):
        self.name = name
        self.process = as_process(process, timesteps, prediction)
        self.sampler, self.weighting = parts(self.process, parse_name(name), sampler, weighting, seed)
        named = {"name": "independent", **coupling} if isinstance(coupling, Mapping) else {"name": coupling}
        self.coupling = COUPLINGS.build(*split(named))
        self.seed = seed
        self.step = 0
        self.group = distributed.batch_group(process_group)
        self.sampler.group = self.weighting.group = self.group
        self._drawn = [0, 0]  # samples of all ranks: in this step so far, in the steps before it
        sampler_observes = type(self.sampler).observe is not Sampler.observe
        self._learns = sampler_observes or type(self.weighting).step is not Weighting.step
        self._micro_batches: list[_MicroBatch] = []  # of the present step, those with losses
        self._turns: dict[Any, tuple[int, list[Tensor]]] = {}  # of each part of a batch that is asked for
        if not (self.sampler.asks or np.isfinite(self.weighting.weights()[self.sampler.density() > 0]).all()):
            raise ConfigError(
                f"strategy {name}: its weights are not finite at timesteps that it draws; allowed: a range"
            )
        for purpose in ("timesteps", "order of timesteps", "sobol", "floor", "part", "coupling"):
            Stream(seed, purpose)  # whose keys a compiled graph cannot make

    def draw(
        self,
        x0: Tensor,
        *,
        times: tuple[int, ...] = (),
        same: bool = False,
        step: Tensor | None = None,
        index: "range | Tensor | None" = None,
        total: int | None = None,
        **context: Any,
    ) -> Draw:
        """Timesteps and weights for a batch (batch, channels, height, width), or any shape for most samplers.

        Each `observe` ends a step. Where gradients of several micro-batches are accumulated for one step, each has its
        own draw and its own call of `loss`; `observe` takes the last draw and sees them all. Ranks of torch.distributed
        share a global batch, to which each brings equally many samples; no rank communicates with another one.

        Args:
            x0: the batch.
            times: shape of one sample's times, such as ``(frames,)``.
            same: one time for the whole batch; not with samplers that give each image its own density.
            step: its number as a tensor on the device, for graphs that are replayed; None: `self.step`.
            index: numbers of the samples in the global batch, where the ranks' parts are not alike.
            total: size of the global batch, with `index`.
            context: what samplers ask for: ``tokens``, ``frames``, ``group``, ``progress``, ``item``, ``items``,
                ``epoch``, each a number or a tensor (batch,).

        Raises:
            ConfigError: the sampler needs context that is missing, or gives each image its own density, with `same`.
        """
        sampler_name = self.name.partition("+")[0]
        allowed = f"false: {sampler_name} gives each image a density of its own"
        demand(not (same and self.sampler.per_image), "draw: same", "true", allowed)
        total = total or len(x0) * distributed.ranks(self.group)
        now, (first, earlier) = self.step if step is None else step, self._drawn
        first = first if index is None else 0  # who says where the samples lie says it of the whole step
        place = Place(self.seed, now, first, first + earlier, index, total, times, context=context).of(x0, self.group)
        if step is None:
            self._drawn[0] = first + total
        if step is not None:
            place = place.but(first=0, before=None)
        mine = place
        if same:  # one draw; Sobol points continue from the number of draws before, not of samples
            draws_before = None if place.before is None else place.before // total
            place = place.but(index=range(1), total=1, before=draws_before)
        made = self._ahead(place) if self._steady(place) else self._made(x0, place)
        return Draw(mine, x0, *(values.expand(len(x0), *times) if same else values for values in made))

    @property
    def _drawn_weighting(self) -> Any:
        """What gives the weights of a draw: the factor that `edm2` learns is applied with the loss."""
        return getattr(self.weighting, "base", self.weighting)

    def _steady(self, place: Place) -> bool:
        """Whether the draws of a step depend on its number alone: they can be made before it."""
        if isinstance(place.step, Tensor) or torch.compiler.is_compiling():
            return False
        if getattr(self.sampler.options, "points", "") == "epochs":  # which depend on the epoch
            return False
        regular = not place.first and place.before == place.step * place.total and isinstance(place.index, range)
        said = all(isinstance(value, (int, str)) for value in place.context.values())
        return regular and said and isinstance(self.sampler.options, Fixed) and not self._drawn_weighting.learned

    def _ahead(self, place: Place) -> list[Tensor]:
        """Of a turn of steps at once."""
        turn, row = divmod(place.step, _TURN)
        key = place.index, place.total, place.shape, str(place.device), tuple(place.context.items())
        if self._turns.get(key, (None,))[0] != turn:
            if len(self._turns) >= _PARTS:
                self._turns.clear()
            steps = range(turn * _TURN, (turn + 1) * _TURN)
            self._turns[key] = turn, self._made(None, place.but(step=steps, before=None))
        return [values[row] for values in self._turns[key][1]]

    def _made(self, x0: Any, place: Place) -> list[Tensor]:
        """Fractions, times, weights and importance of a place's samples."""
        fractions = self.sampler.drawn(place) if x0 is None else self.sampler.fractions(x0, place)
        t = self.process.times(fractions)
        fixed = self._drawn_weighting.at(self.process, t, place.now)
        importance = self.sampler.importance(x0, fractions, place)
        return [fractions, t, fixed, torch.ones_like(fixed) if importance is None else importance]

    def sample(self, shape: int | tuple[int, ...], step: Any = 0, device: Any = "cpu", **context: Any) -> Tensor:
        """The process' own times without a batch or a state; see `Sampler.sample`."""
        return self.process.times(self.sampler.sample(shape, self.seed, step, device, **context))

    def couple(self, draw: Draw, noise: Tensor) -> Tensor:
        """The noise that each image of a draw gets, (batch, ...): what was drawn, in another order, or nearer.

        Args:
            draw: of this batch.
            noise: standard normal, shape of x0. Ranks of torch.distributed couple their own parts.

        Raises:
            ConfigError: it has another shape.
        """
        shape = tuple(draw.x0.shape)
        demand(noise.shape == shape, "couple: noise", f"shape {tuple(noise.shape)}", f"that of x0, {shape}")
        return self.coupling(draw.x0, noise, draw.fractions, draw.place)

    def weighted(self, draw: Draw, losses: Tensor) -> Tensor:
        """What is minimised, (batch,): weight x loss, and whatever a learned weighting adds.

        Args:
            draw: of this batch.
            losses: errors of the samples without any weight, shape of ``draw.t``: (batch,), or (batch, times).

        Samplers and weightings that learn take the losses in, unless gradients are disabled (``torch.no_grad``).

        Raises:
            ConfigError: `losses` have another shape.
        """
        allowed = f"the shape of draw.t, {tuple(draw.t.shape)}: one unweighted error per sample"
        demand(losses.shape == draw.t.shape, "losses", f"shape {tuple(losses.shape)}", allowed)
        if self._learns and torch.is_grad_enabled():  # losses for validation teach nothing
            errors = losses.detach()
            others = [one for one in self._micro_batches if one.draw is not draw]
            self._micro_batches = [*others, _MicroBatch(draw, errors * draw.fixed_weights, errors)]
        return self.weighting.apply(losses, draw.fixed_weights, draw.importance, draw.fractions)

    def loss(self, draw: Draw, losses: Tensor) -> Tensor:
        """The mean of `weighted`: what to call ``backward`` on."""
        return self.weighted(draw, losses).mean()

    @contextmanager
    def observe(
        self,
        draw: Draw,
        network: Any = None,
        optimizer: torch.optim.Optimizer | None = None,
        conditions: dict[str, Tensor] | None = None,
        autocast: AbstractContextManager[Any] | None = None,
    ) -> Iterator[None]:
        """Surround the optimiser step: samplers that learn look at the network before and after it.

        The sampler learns from all draws since the last `observe` for which `loss` was called: those of the step's
        micro-batches.

        Args:
            draw: the last draw of this step.
            network: called as ``network(x_t, t)`` by the process (as ``network(x_t, t, conditions)`` with conditions);
                needed by samplers that measure.
            optimizer: optimizer of the network, for samplers that look at its state.
            conditions: conditions of the step's images, each (batch, ...), the micro-batches' one after the other.
            autocast: context that the network is called in.

        Raises:
            ConfigError: the sampler measures and there is no network, or conditions are not of the step's images.
            ValueError: the sampler follows losses and `loss` was not called.
        """
        seen = self._step_so_far(draw)
        meter = None
        if self.sampler.measures:
            allowed = "the network, which the sampler measures: pass observe(..., network=)"
            demand(network is not None, f"strategy {self.name}: network", "none", allowed)
            for name, values in (conditions or {}).items():
                rows, allowed = f"{len(values)} rows", f"{len(seen.x0)}, one for each image of the step"
                demand(len(values) == len(seen.x0), f"observe: conditions.{name}", rows, allowed)
            meter = Meter(
                self.process, network, seen.x0, seen.place, conditions, self.weighting, optimizer, autocast, self.group,
                pass_size=len(draw.x0),
            )  # fmt: skip
        observation = replace(seen, meter=meter)
        with self.sampler.observe(observation):
            yield
        self.weighting.step(observation)
        self._micro_batches = []
        self.step, self._drawn = self.step + 1, [0, sum(self._drawn)]

    def _step_so_far(self, last: Draw) -> Observation:
        """The draws of the present step whose losses are known as one batch; without any, the draw `last` alone."""
        parts = self._micro_batches or [_MicroBatch(last)]
        draws = [part.draw for part in parts]

        def joined(values: list[Any]) -> Any:
            return values[0] if len(values) == 1 else torch.cat(values)

        return Observation(
            step=last.step,
            x0=joined([draw.x0 for draw in draws]),
            fractions=joined([draw.fractions for draw in draws]),
            losses=joined([part.losses for part in parts]),
            meter=None,
            place=_joined_place([draw.place for draw in draws], distributed.ranks(self.group)),
            errors=joined([part.errors for part in parts]),
            prediction=self.process.prediction,
        )

    def table(self, x0: Tensor | None = None, **context: Any) -> dict[str, Array]:
        """What the strategy trains on now: ``t``, ``p``, ``w`` and ``effective`` = p w, each (T,)."""
        return table(self.sampler, self.weighting, x0, Place(self.seed, self.step, context=context))

    def preview(
        self, path: str | Path | None = None, *, draws: int = 100_000, bins: int = 50, batch: int = 256, **context: Any
    ) -> dict[str, Array]:
        """A histogram of what the next steps will draw, before anything runs; the strategy stays as it is.

        Args:
            path: of a picture of it, in the format of the file's name.
            draws: how many, in batches of `batch`; of samplers that move with the step, in one batch.
            bins: of equal width in u.
            batch: size of the global batch.
            context: what samplers ask for, as in `draw`.

        Returns:
            ``low`` and ``high`` (fractions u of the process), ``t`` (its own time in the middle), ``count`` and
            ``expected``, what the density says, each (bins,). Samplers that look at images: as they are without any.

        Raises:
            ConfigError: a context is missing, or matplotlib, for a picture.
        """
        from kairos_timesteps.monitoring import preview

        return preview(self, path, draws, bins, batch, context)

    def state_dict(self) -> dict[str, Any]:
        """Everything a resume needs."""
        return {
            "step": self.step,
            "drawn": list(self._drawn),
            "sampler": self.sampler.state_dict(),
            "weighting": self.weighting.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device | str = "cpu") -> None:
        """Restore what `state_dict` gave, tensors on `device`."""
        self.step, self._drawn = state["step"], list(state["drawn"])
        self._micro_batches = []
        self.sampler.load_state_dict(state["sampler"], device)
        self.weighting.load_state_dict(state["weighting"], device)


def _joined_place(places: list[Place], ranks: int) -> Place:
    """Random coordinates of a step's draws as one batch, samples numbered without gaps.

    Draws whose numbers of samples before them differ are different micro-batches of all ranks; draws with equal numbers
    are slices of one.
    """
    last = places[-1]
    if ranks == 1:
        count = sum(len(place.index) for place in places)
        return last.but(first=0, index=range(count), total=count)
    if len(places) == 1:
        return last
    offsets: dict[int, int] = {}
    total = 0
    for place in places:
        if place.first not in offsets:
            offsets[place.first] = total
            total += place.total
    indices = [_shifted(place.index, offsets[place.first]) for place in places]
    return last.but(first=0, index=_joined_index(indices, last.device), total=total)


def _shifted(index: "range | Tensor", offset: int) -> "range | Tensor":
    return range(index.start + offset, index.stop + offset) if isinstance(index, range) else index + offset


def _joined_index(indices: "list[range | Tensor]", device: Any) -> "range | Tensor":
    """Sample indices one after the other: a range where ranges adjoin, which no measurement must copy to the CPU."""
    ranges = [index for index in indices if isinstance(index, range)]
    adjoin = all(before.stop == after.start for before, after in pairwise(ranges))
    if len(ranges) == len(indices) and adjoin:
        return range(ranges[0].start, ranges[-1].stop)
    return torch.cat([_as_tensor(index, device) for index in indices])


def _as_tensor(index: "range | Tensor", device: Any) -> Tensor:
    return torch.arange(index.start, index.stop, device=device) if isinstance(index, range) else index
