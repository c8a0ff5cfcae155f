"""Strategy for a training loop: which timesteps to train on, and how to weight their losses.

    strategy = Strategy("adaptive+min_snr", "cosine", prediction="v")
    draw = strategy.draw(x0)                                # draw.t: timesteps of the batch, draw.weights
    loss = strategy.loss(draw, per_sample_squared_error)    # mean of weight x error
    loss.backward()
    with strategy.observe(draw, network=model, optimizer=optimizer):
        optimizer.step()

All random numbers of step k are functions of (seed, k), and `state_dict` contains the rest: a resumed training run
draws what an uninterrupted one would have drawn. Under torch.distributed each rank passes its slice of the batch.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairos_timesteps import distributed
from kairos_timesteps.base import FixedDensity, Learned, MeasuresNetwork, Observation, Weighting
from kairos_timesteps.components import COUPLINGS
from kairos_timesteps.coordinates import RandomCoordinates
from kairos_timesteps.couplings import Coupling
from kairos_timesteps.diffusion.adapters import as_process
from kairos_timesteps.errors import ConfigError, demand, rejection
from kairos_timesteps.lookup import build_pair, parse_name, table
from kairos_timesteps.meter import Meter, demand_independent_calls
from kairos_timesteps.monitoring import preview
from kairos_timesteps.numeric import Array, on_device
from kairos_timesteps.options import allowed_names_hint
from kairos_timesteps.randomness import Device, Step, Stream
from kairos_timesteps.registry import split

LOG = logging.getLogger("kairos_timesteps")
_BLOCK_STEPS = 16  # steps of a prefetch block: a small draw costs its calls, which the steps share
_DEVICES_WITHOUT_FLOAT64 = ("mps",)
_MANY_MICRO_BATCHES = 256  # of one step; more suggest that observe is never called
_CONTEXT_NAMES = ("tokens", "frames", "group", "progress", "item", "items", "epoch")  # allowed with any sampler
_CACHED_BLOCKS = 64  # prefetch blocks that are kept, one per slice of the batch


@dataclass(frozen=True)
class Draw:
    """Timesteps of one batch, on the device of the batch; tensors are (batch,), or (batch, *times).

    Attributes:
        coordinates: random coordinates of the batch.
        x0: the batch.
        fractions: fractions of the process in [0, 1), float64.
        t: times of the process: int64 timesteps, or float64 times of a continuous process.
        fixed_weights: factors of the weighting, float32.
        importance: importance weights 1/(T p(t)), float32; 1 unless the sampler has them.
        weights: factors of the samples' losses: fixed weights times importance weights.
    """

    coordinates: RandomCoordinates
    x0: Tensor
    fractions: Tensor
    t: Tensor
    fixed_weights: Tensor
    importance: Tensor
    weights: Tensor

    @property
    def step(self) -> Any:
        """Training step from 0."""
        return self.coordinates.step

    def is_same(self, other: "Draw") -> bool:
        """Return True if both are one draw, with or without its images."""
        return self.coordinates is other.coordinates

    def without_images(self) -> "Draw":
        """Return the draw with an empty `x0` of the same shape, for components that need no images."""
        return replace(self, x0=self.x0.new_empty((0, *self.x0.shape[1:])))

    def rows(self, start: int, stop: int) -> "Draw":
        """Return samples `start` to `stop` - 1 as a separate draw, such as a micro-batch."""
        indices = self.coordinates.sample_indices[start:stop]
        tensors = (self.x0, self.fractions, self.t, self.fixed_weights, self.importance, self.weights)
        return Draw(self.coordinates.replace(sample_indices=indices), *(values[start:stop] for values in tensors))


@dataclass(frozen=True)
class _MicroBatch:
    """A draw of the current step with the unweighted errors that were computed for it."""

    draw: Draw
    errors: Tensor
    mask: Tensor | None = None  # samples that components learn from; None: all


class Strategy:
    """A sampler and a weighting on a forward process, and a coupling of noise with images.

    Args:
        name: ``sampler+weighting``, or a bare name: the sampler and the weighting of that name. If only one exists, the
            other is ``uniform`` or ``none``.
        process: forward process. It is a `Discrete`, `Edm`, `Flow` or `Vp`, or the name of a process in continuous time
            (edm, fdm, flow, vp). Or it is a noise schedule: a `NoiseSchedule`, one of diffusers' schedulers, alpha-bar
            as an array of T numbers, or a name (linear, cosine, quadratic, scaled_linear).
        timesteps: T, for a schedule given by name.
        prediction: what the network predicts, ``epsilon`` (also None), ``x0`` or ``v``, for processes that leave it
            open.
        sampler: options of the sampler.
        weighting: options of the weighting.
        coupling: name of the coupling, or its name and options, ``{"name": "nearest", "k": 8}``; see `couple`.
        seed: seed of all random numbers.
        process_group: ranks of torch.distributed that share the global batch: a process group, or one dimension of a
            `DeviceMesh`, such as ``mesh["dp"]``; None: all ranks. With context, tensor or pipeline parallelism several
            ranks hold the same samples; the errors given to `loss` are then those of whole samples.

    Raises:
        ConfigError: an unknown name or option, or a value that is not allowed; the message lists what is.
    """

    def __init__(
        self,
        name: str = "uniform",
        process: Any = "linear",
        *,
        timesteps: int = 1000,
        prediction: str | None = None,
        sampler: Mapping[str, Any] | None = None,
        weighting: Mapping[str, Any] | None = None,
        coupling: str | Mapping[str, Any] = "independent",
        seed: int = 0,
        process_group: Any = None,
    ):
        self.name = name
        self.process = as_process(process, timesteps, prediction)
        names = parse_name(name)
        self.sampler, self.weighting = build_pair(self.process, names, sampler, weighting, seed)
        component = {"name": "independent", **coupling} if isinstance(coupling, Mapping) else {"name": coupling}
        self.coupling: Coupling = COUPLINGS.build(*split(component))
        self._coupling_name: str = component["name"]
        self.seed = seed
        self.step = 0
        self.group = distributed.batch_group(process_group)
        self.sampler.group = self.weighting.group = self.group
        self._samples = [0, 0]  # samples of all ranks: in this step so far, in the steps before it
        self._context_names = {*_CONTEXT_NAMES, *self.sampler.context_names}
        self._learns = isinstance(self.sampler, Learned) or isinstance(self.weighting, Learned)
        self._micro_batches: list[_MicroBatch] = []  # of the current step, those with losses
        self.is_attached = False  # True if hooks of `attach` call `observe`
        self._indices_given = False  # True if a training draw of the current step had `index`
        self._calls_are_checked = False  # calls of the network wait for no other rank
        self._blocks: dict[Any, tuple[int, list[Tensor]]] = {}  # prefetch block of each slice of the batch
        if not self.sampler.requires_context:
            finite = np.isfinite(self.weighting.weights()[self.sampler.probabilities() > 0]).all()
            if not finite:
                raise ConfigError(
                    f"strategy {name}: weights are infinite or NaN at timesteps that are drawn; exclude these, for "
                    "example with sampler range"
                )
            total = self.sampler.probabilities().sum()
            demand(abs(total - 1) < 1e-6, f"sampler {names[0]}: sum of p(t)", f"{total:g}", "1: cdf(0) = 0, cdf(1) = 1")
        for purpose in ("timesteps", "order of timesteps", "sobol", "floor", "part", "coupling"):
            Stream(seed, purpose)  # compute their keys now, because a compiled graph cannot

    def draw(
        self,
        x0: Tensor,
        *,
        times: tuple[int, ...] = (),
        shared_time: bool = False,
        step: Tensor | None = None,
        index: "range | Tensor | None" = None,
        total: int | None = None,
        **context: Any,
    ) -> Draw:
        """Draw timesteps and weights for a batch (batch, channels, height, width), or any shape for most samplers.

        `observe` ends a step. With gradient accumulation every micro-batch of a step has its own draw and its own call
        of `loss`; `observe` takes the last draw and uses all of them. Ranks of torch.distributed share a global batch
        and do not communicate here: sample i of rank r is sample ``i * ranks + r`` of it. If a rank has fewer samples,
        the draws of all ranks stay independent. Then only even points (option ``points``) need `index` and `total`.
        All ranks pass these in a step, or none does.

        Args:
            x0: the batch.
            times: shape of the timesteps of one sample, such as ``(frames,)`` for diffusion forcing; (): one timestep.
            shared_time: one time for the whole batch; not with samplers that give each image its own density.
            step: training step as a tensor on the device, for graphs that are replayed; None: `self.step`. With a
                tensor, draws of one step are equal: pass `index` for micro-batches.
            index: indices of the samples in the global batch of the step, all micro-batches included; None: the ranks
                take turns, after earlier micro-batches.
            total: size of the global batch; None: the length of `x0` times the number of ranks.
            context: properties that samplers require, each a number or a tensor (batch,). ``tokens`` and ``frames``
                are sizes of a sample. ``group`` is its group of the data set, one name or integers (batch,); integers
                on a GPU are not checked. ``progress`` is the fraction of the training run. ``item`` is its index in the
                data set, ``items`` the size of it. ``epoch`` counts from 0.

        Raises:
            ConfigError: required context is missing or not allowed, no sampler has context of that name, or
                `shared_time` is True for a sampler with a density per image. Or `x0` is no tensor, or its device has no
                float64.
        """
        demand(isinstance(x0, Tensor), "draw: x0", type(x0).__name__, "a tensor (batch, ...)")
        allowed = "a device with float64, such as cpu or cuda"
        demand(x0.device.type not in _DEVICES_WITHOUT_FLOAT64, "draw: device of x0", x0.device, allowed)
        for key, value in context.items():
            if key not in self._context_names:
                raise ConfigError(f"draw: unknown context {key!r}{allowed_names_hint(key, self._context_names)}")
            if isinstance(value, str) and key != "group" and key in _CONTEXT_NAMES:
                raise rejection(f"draw: {key}", repr(value), "a number, or a tensor (batch,)")
        sampler_name = self.name.partition("+")[0]
        allowed = f"False: sampler {sampler_name} has one density per image"
        demand(not (shared_time and self.sampler.per_image), "draw(shared_time=)", "True", allowed)
        total = total or len(x0) * distributed.ranks(self.group)
        now, (offset, earlier) = self.step if step is None else step, self._samples
        offset = offset if index is None else 0  # indices given by the caller count from the start of the step
        coordinates = RandomCoordinates(self.seed, now, offset, offset + earlier, index, total, times, context=context)
        coordinates = coordinates.for_batch(x0, self.group)
        if step is None:
            self._indices_given |= index is not None
            self._samples[0] = offset + total
        else:
            coordinates = coordinates.replace(offset=0, samples_before=None)
        draw_coordinates = coordinates
        if shared_time:  # one draw; Sobol points continue from the number of draws before, not of samples
            before = coordinates.samples_before
            draws_before = None if before is None else before // total
            draw_coordinates = coordinates.replace(sample_indices=range(1), batch_size=1, samples_before=draws_before)
        can_prefetch = self._depends_on_step_alone(draw_coordinates)
        tensors = self._prefetched_draws(draw_coordinates) if can_prefetch else self._draw(x0, draw_coordinates)
        return Draw(coordinates, x0, *(values.expand(len(x0), *times) if shared_time else values for values in tensors))

    @property
    def _fixed_weighting(self) -> Weighting:
        """Weighting of a draw: the factor that `edm2` learns is applied with the loss."""
        fixed: Weighting = getattr(self.weighting, "base_weighting", self.weighting)
        return fixed

    def _depends_on_step_alone(self, coordinates: RandomCoordinates) -> bool:
        """Return True if the draws of a step are a function of its number, so that they can be made ahead.

        This excludes steps as tensors, torch.compile, points ``epochs``, samplers and weightings that learn, context by
        sample, micro-batches, and batches of changing size.
        """
        if isinstance(coordinates.step, Tensor) or torch.compiler.is_compiling():
            return False
        if self.sampler.points == "epochs":
            return False
        size, indices = coordinates.batch_size, coordinates.sample_indices
        # a block assumes that every step before it drew `size` samples, in one micro-batch
        regular = not coordinates.offset and coordinates.samples_before == coordinates.step * size
        constant = all(isinstance(value, (int, str)) for value in coordinates.context.values())
        fixed = isinstance(self.sampler, FixedDensity) and not isinstance(self._fixed_weighting, Learned)
        return regular and isinstance(indices, range) and constant and fixed

    def _prefetched_draws(self, coordinates: RandomCoordinates) -> list[Tensor]:
        """Return the result of `_draw` for a step, from the prefetch block of 16 steps that contains it.

        Each slice of the batch keeps its last block.
        """
        block, row = divmod(coordinates.step, _BLOCK_STEPS)
        key = (
            coordinates.sample_indices,
            coordinates.batch_size,
            coordinates.times_shape,
            str(coordinates.device),
            tuple(coordinates.context.items()),
        )
        # the slice has no block yet, or that of earlier steps
        if self._blocks.get(key, (None,))[0] != block:
            if len(self._blocks) >= _CACHED_BLOCKS:
                self._blocks.clear()
            steps = range(block * _BLOCK_STEPS, (block + 1) * _BLOCK_STEPS)
            self._blocks[key] = block, self._draw(None, coordinates.replace(step=steps, samples_before=None))
        return [values[row] for values in self._blocks[key][1]]

    def _draw(self, x0: Any, coordinates: RandomCoordinates) -> list[Tensor]:
        """Return fractions, times, weights, importance weights and their products, of the samples.

        Importance weights are 1 if the sampler has none.
        """
        fractions = self.sampler.draw(coordinates, x0)
        t = self.process.times(fractions)
        fixed = self._fixed_weighting.at(self.process, t, coordinates.float_step)
        importance = self.sampler.importance_weights(x0, fractions, coordinates)
        if importance is None:
            return [fractions, t, fixed, torch.ones_like(fixed), fixed]
        return [fractions, t, fixed, importance, fixed * importance]

    def sample(self, shape: int | tuple[int, ...], step: Step = 0, device: Device = "cpu", **context: Any) -> Tensor:
        """Draw times of the process without a batch or a state; see `Sampler.sample`."""
        return self.process.times(self.sampler.sample(shape, self.seed, step, device, **context))

    def couple(self, draw: Draw, noise: Tensor) -> Tensor:
        """Return the noise to use for each image, (batch, ...): permuted or selected by the coupling.

        Args:
            draw: draw of this batch.
            noise: standard normal noise, shape of x0. Ranks of torch.distributed couple their own slices.

        Raises:
            ConfigError: the noise has another shape.
        """
        shape = tuple(draw.x0.shape)
        demand(noise.shape == shape, "couple: noise", f"shape {tuple(noise.shape)}", f"that of x0, {shape}")
        return self.coupling(draw.x0, noise, draw.fractions, draw.coordinates)

    def weighted(self, draw: Draw, errors: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return weighted losses, with the terms of a learned weighting, shape of ``draw.t``.

        The weights and importance weights are those of `draw`. If the sampler or the weighting learns, the errors are
        also kept until `observe`, unless gradients are disabled (``torch.no_grad``). A second call for a draw replaces
        its errors.

        Args:
            draw: draw of this batch.
            errors: unweighted errors of the samples, shape of ``draw.t``: (batch,), or (batch, times).
            mask: samples that samplers and weightings learn from, bool (batch,); None: all. The result does not depend
                on it. All ranks pass a mask in a step, or none does.

        Raises:
            ConfigError: `errors` or `mask` have another shape.
        """
        allowed = f"the shape of draw.t, {tuple(draw.t.shape)}: one unweighted error per sample"
        demand(isinstance(errors, Tensor), "errors", type(errors).__name__, f"a tensor of {allowed}")
        demand(errors.shape == draw.t.shape, "errors", f"shape {tuple(errors.shape)}", allowed)
        if mask is not None:
            demand(isinstance(mask, Tensor), "mask", type(mask).__name__, f"a tensor, bool, ({len(draw.t)},)")
            got = f"{mask.dtype}, shape {tuple(mask.shape)}"
            demand(mask.dtype == torch.bool and mask.shape == draw.t.shape[:1], "mask", got, f"bool, ({len(draw.t)},)")
        if self._learns and torch.is_grad_enabled():  # validation losses are not learned from
            others = [micro_batch for micro_batch in self._micro_batches if not micro_batch.draw.is_same(draw)]
            kept = draw if isinstance(self.sampler, MeasuresNetwork) else draw.without_images()
            self._micro_batches = [*others, _MicroBatch(kept, errors.detach(), mask)]
            if len(self._micro_batches) == _MANY_MICRO_BATCHES and not self.is_attached:
                LOG.warning(
                    "strategy %s: %d losses in step %d; it learns when `observe` ends the step",
                    self.name,
                    _MANY_MICRO_BATCHES,
                    self.step,
                )
        if self.weighting.is_factor:
            return draw.weights * errors  # the product of both weights is computed ahead, with the timesteps
        return self.weighting.apply(errors, draw.fixed_weights, draw.importance, draw.fractions)

    def loss(self, draw: Draw, errors: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the mean of `weighted`: call ``backward`` on it."""
        return self.weighted(draw, errors, mask).mean()

    @contextmanager
    def observe(
        self,
        draw: Draw | Sequence[Draw],
        network: Any = None,
        optimizer: torch.optim.Optimizer | None = None,
        conditions: dict[str, Tensor] | None = None,
        autocast: AbstractContextManager[Any] | None = None,
    ) -> Iterator[None]:
        """Surround the optimizer step, so that samplers that learn can measure the network before and after it.

        The sampler learns from all draws since the last `observe` for which `loss` was called: the micro-batches of the
        step. The weighting learns after the block. The losses of the step are then dropped, and `step` is counted up.
        After an error in the block nothing of this happens.

        Ranks first exchange their sample counts, which waits for the device, if the strategy measures the network in
        this step, or learns and `index` was not passed to `draw`.

        Args:
            draw: last draw of this step; or a list of the draws whose gradients the optimizer applies. A list drops
                the losses of other draws, such as those of a step that GradScaler skipped.
            network: called as ``network(x_t, t)`` by the process (``network(x_t, t, conditions)`` with conditions);
                samplers that measure the network need it.
            optimizer: optimizer of the network, for samplers that use its state.
            conditions: conditions of the step's images, each (batch, ...), concatenated over micro-batches.
            autocast: context that the network is called in.

        Raises:
            ConfigError: the network or the losses that the sampler needs are missing, conditions do not match the
                images, or images of micro-batches have different shapes.
        """
        if not isinstance(draw, Draw):
            draws = draw
            micro_batches_of_draws = []
            for micro_batch in self._micro_batches:
                if any(micro_batch.draw.is_same(other_draw) for other_draw in draws):
                    micro_batches_of_draws.append(micro_batch)
            self._micro_batches = micro_batches_of_draws
            draw = draws[-1]
        observation = self._observation(draw)
        if isinstance(self.sampler, MeasuresNetwork):
            demand_one_time(self, observation.fractions.shape[1:])
            allowed = "the network, which the sampler measures: pass observe(..., network=)"
            demand(network is not None, f"strategy {self.name}: network", "none", allowed)
            for name, values in ({} if conditions is None else conditions).items():
                demand(isinstance(values, Tensor), f"observe: conditions.{name}", type(values).__name__, "a tensor")
                count, rows = len(observation.fractions), f"{len(values)} rows"
                demand(len(values) == count, f"observe: conditions.{name}", rows, f"{count}, one for each image")
            if not self._calls_are_checked and self.sampler.measures_in_step(observation.step):
                assert observation.x0 is not None
                first_conditions = conditions and {name: values[:1] for name, values in conditions.items()}
                demand_independent_calls(self.process, network, observation.x0[:1], first_conditions, autocast)
                self._calls_are_checked = True
        if any(micro_batch.mask is not None for micro_batch in self._micro_batches):
            learned_rows = self._rows_to_learn_from()
            observation = self._renumbered(observation, learned_rows)
            conditions = conditions and {name: values[learned_rows] for name, values in conditions.items()}
        elif self._must_exchange_counts(observation.step):
            observation = self._renumbered(observation)
        if isinstance(self.sampler, MeasuresNetwork):
            assert observation.x0 is not None
            meter = Meter(
                self.process, network, observation.x0, observation.coordinates, conditions, self.weighting, optimizer,
                autocast, self.group, pass_size=len(draw.x0),
            )  # fmt: skip
            observation = replace(observation, meter=meter)
        is_empty = observation.coordinates.batch_size == 0  # the mask of every sample of the step is False
        with nullcontext() if is_empty else self.sampler.observe(observation):
            yield
        self.weighting.step(observation)
        self._micro_batches = []
        self.step, self._samples = self.step + 1, [0, sum(self._samples)]
        self._indices_given = False

    def _must_exchange_counts(self, step: int) -> bool:
        """Return True if the ranks must exchange their sample counts before the strategy learns from the step.

        Their indices may not cover the global batch. Components that follow losses ignore indices without a loss, so
        they need no counts if the caller has given `index` and `total`. Samplers that measure the network measure
        samples by index.
        """
        if distributed.ranks(self.group) == 1:
            return False
        if isinstance(self.sampler, MeasuresNetwork) and self.sampler.measures_in_step(step):
            return True
        return self._learns and not self._indices_given

    def _renumbered(self, observation: Observation, rows: Tensor | None = None) -> Observation:
        """Restrict an observation to some rows of this rank, and give the samples of all ranks indices without gaps.

        All ranks must call it. Without `rows` the indices stay if they cover the global batch. They do not if ranks
        have different sample counts, or if a micro-batch has no loss. Losses and errors are None if no rank has a row.

        Args:
            observation: the step.
            rows: int64 (n,); None: all rows.
        """
        count = len(observation.fractions) if rows is None else len(rows)
        sizes_of_rank = count, observation.coordinates.batch_size, self._samples[0]
        counts, sizes, samples = zip(*distributed.gather_objects(sizes_of_rank, self.group))
        if not self._indices_given:  # each rank has counted its own samples, times the number of ranks
            self._samples[0] = sum(samples) // len(samples)
        total = sum(counts)
        if rows is None and set(sizes) == {total}:
            return observation
        first = sum(counts[: distributed.rank(self.group)])
        coordinates = observation.coordinates.replace(sample_indices=range(first, first + count), batch_size=total)

        def select(values: Tensor | None) -> Tensor | None:
            return values if values is None or rows is None else values[rows]

        return replace(
            observation,
            coordinates=coordinates,
            x0=select(observation.x0),
            fractions=observation.fractions if rows is None else observation.fractions[rows],
            losses=select(observation.losses) if total else None,
            errors=select(observation.errors) if total else None,
        )

    def _observation(self, last: Draw) -> Observation:
        """Join the draws of the current step whose errors are known; without any, return the draw `last` alone.

        Losses and errors are None if no errors are known. `x0` is None unless the sampler measures the network.

        Raises:
            ConfigError: the images have several shapes, and the sampler measures the network.
        """
        micro_batches = self._micro_batches
        draws = [micro_batch.draw for micro_batch in micro_batches] or [last]
        measures = isinstance(self.sampler, MeasuresNetwork)

        def join(values: list[Tensor]) -> Tensor:
            return values[0] if len(values) == 1 else torch.cat(values)

        losses = [micro_batch.errors * micro_batch.draw.fixed_weights for micro_batch in micro_batches]
        errors = [micro_batch.errors for micro_batch in micro_batches]
        shapes = {tuple(draw.x0.shape[1:]) for draw in draws}
        shapes_are_valid = len(shapes) == 1 or not measures
        allowed = "one shape in a step: the sampler measures the network"
        demand(shapes_are_valid, "observe: x0", f"shapes {sorted(shapes)}", allowed)
        return Observation(
            step=last.step,
            x0=join([draw.x0 for draw in draws]) if measures else None,
            fractions=join([draw.fractions for draw in draws]),
            losses=join(losses) if losses else None,
            meter=None,
            coordinates=_join_coordinates([draw.coordinates for draw in draws], distributed.ranks(self.group)),
            errors=join(errors) if errors else None,
            prediction=self.process.prediction,
            weighting=self._fixed_weighting,
        )

    def _rows_to_learn_from(self) -> Tensor:
        """Return the rows of the step's samples whose mask is True, int64 (n,), on the device of the draws.

        Rows count through the micro-batches. A micro-batch without a mask counts in full.
        """
        masks = []
        for micro_batch in self._micro_batches:
            mask = micro_batch.mask
            masks.append(torch.ones(len(micro_batch.draw.t), dtype=torch.bool) if mask is None else mask)
        device = self._micro_batches[-1].draw.t.device
        if all(mask.device.type == "cpu" for mask in masks):  # without synchronisation
            return on_device(torch.cat(masks).nonzero()[:, 0], device)
        return torch.cat([mask.to(device) for mask in masks]).nonzero()[:, 0]

    def table(self, x0: Tensor | None = None, **context: Any) -> dict[str, Array]:
        """Return what the strategy trains on now: ``t``, ``p``, ``w`` and ``effective`` = p w, each (T,)."""
        return table(self.sampler, self.weighting, x0, self.step, **context)

    preview = preview

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resume needs, as copies, and ``settings``, which `load_state_dict` compares.

        Losses of the current step are not included.
        """
        return {
            "settings": self._settings(),
            "step": self.step,
            "drawn": list(self._samples),
            "sampler": self.sampler.state_dict(),
            "weighting": self.weighting.state_dict(),
        }

    def _settings(self) -> dict[str, Any]:
        """Return the settings that a state must match, as plain values.

        ``log_snr`` are ln SNR of the first, the middle and the last timestep, which differ between noise schedules.
        They are rounded, because last bits of logarithms differ between CPU models, and checkpoints are compared by
        their hashes.
        """
        sampler, weighting = parse_name(self.name)
        with np.errstate(divide="ignore"):  # without signal, ln SNR is -inf
            log_snr = np.log(self.process.schedule.snr)
        return {
            "sampler": sampler,
            "weighting": weighting,
            "coupling": self._coupling_name,
            "sampler options": self.sampler.option_values(),
            "weighting options": self.weighting.option_values(),
            "seed": self.seed,
            "prediction": self.process.prediction,
            "timesteps": len(log_snr),
            "log_snr": log_snr[[0, len(log_snr) // 2, -1]].round(3).tolist(),
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device | str = "cpu") -> None:
        """Restore a state that `state_dict` returned, with its tensors on `device`.

        Losses of the current step and the gradient of a trained weighting are dropped. Settings that a state lacks,
        because an earlier version saved it, are not compared.

        Raises:
            ConfigError: the state is from a strategy of another sampler, weighting or coupling, with other options,
                seed, prediction or number of timesteps, or of a process with other noise levels. Nothing is restored.
        """
        saved = state.get("settings", {})
        for key, present in self._settings().items():
            value = saved.get(key, present)
            is_equal = np.allclose(value, present, atol=0.01) if key == "log_snr" else value == present
            demand(is_equal, f"state: {key}", repr(value), repr(present))
        self.step, self._samples = state["step"], list(state["drawn"])
        self._micro_batches, self._indices_given = [], False
        self._blocks.clear()
        self.weighting.zero_grad()
        self.sampler.load_state_dict(state["sampler"], device)
        self.weighting.load_state_dict(state["weighting"], device)


def demand_one_time(strategy: Strategy, times: tuple[int, ...]) -> None:
    """Raise ConfigError if samples have several times; for strategies that measure the network at one per sample."""
    allowed = "(): the sampler measures the network at one time per sample"
    demand(not times, f"strategy {strategy.name}: times", tuple(times), allowed)


def _join_coordinates(coordinates_by_draw: list[RandomCoordinates], ranks: int) -> RandomCoordinates:
    """Join random coordinates of a step's draws into those of one batch, with samples numbered without gaps.

    Draws with different offsets are different micro-batches of all ranks; draws with equal offsets are slices of one.
    Everything but the samples is that of the last draw.
    """
    last = coordinates_by_draw[-1]
    if ranks == 1:
        count = sum(len(coordinates.sample_indices) for coordinates in coordinates_by_draw)
        return last.replace(offset=0, sample_indices=range(count), batch_size=count)
    if len(coordinates_by_draw) == 1:
        return last
    starts: dict[int, int] = {}  # by offset
    total = 0
    for coordinates in coordinates_by_draw:
        if coordinates.offset not in starts:
            starts[coordinates.offset] = total
            total += coordinates.batch_size
    merged = last.replace(offset=0, batch_size=total)
    indices: list[Any] = []
    for coordinates in coordinates_by_draw:
        indices.append(coordinates.replace(offset=starts[coordinates.offset]).indices_in_step)
    are_ranges = all(isinstance(sample_indices, range) for sample_indices in indices)
    if are_ranges and all(_continues(before, after) for before, after in pairwise(indices)):
        first, last_indices = indices[0], indices[-1]
        merged_range = range(first.start, last_indices[-1] + 1, first.step)  # needs no copy to the CPU
        return merged.replace(sample_indices=merged_range)
    tensors = [merged.replace(sample_indices=sample_indices).index_tensor() for sample_indices in indices]
    return merged.replace(sample_indices=torch.cat(tensors))


def _continues(before: range, after: range) -> bool:
    """Return True if two ranges that are not empty join to one of the same step."""
    return bool(before and after) and before.step == after.step and before[-1] + before.step == after.start
