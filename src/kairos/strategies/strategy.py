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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kairos import distributed
from kairos.diffusion.adapters import as_process
from kairos.strategies.base import Array, Observation
from kairos.strategies.meter import Meter
from kairos.strategies.names import parse_name, parts, table
from kairos.strategies.points import Place


@dataclass(frozen=True)
class Draw:
    """The timesteps of one batch; tensors are (batch,).

    Attributes:
        step: number of the step, from 0.
        x0: the batch.
        fractions: of the process in [0, 1), float64, on the CPU.
        t: the process' own time, on the device of the batch: int64 timesteps, or a continuous process' times.
        fixed_weights: of the weighting, float32, on the device of the batch.
        importance: 1/(T p(t)) where the sampler is corrected, else 1; likewise.
    """

    step: int
    x0: Tensor
    fractions: Tensor
    t: Tensor
    fixed_weights: Tensor
    importance: Tensor

    @property
    def weights(self) -> Tensor:
        """What a sample's loss is multiplied with: weighting times importance."""
        return self.fixed_weights * self.importance


class Strategy:
    """A sampler and a weighting on a forward process.

    Args:
        name: ``sampler+weighting``, or one of the two: the other is then ``uniform`` or ``none``.
        process: what timesteps are of: an object of `kairos.diffusion` (`Discrete`, `Edm`, `Flow`, `Vp`), a noise
            schedule
            (`NoiseSchedule`, one of diffusers' schedulers, or alpha-bar as an array of T numbers), or the name of a
            schedule (linear, cosine, quadratic) or of a process in continuous time (edm, flow, vp).
        timesteps: T, for a schedule given by name.
        prediction: what the network predicts: ``epsilon``, ``x0`` or ``v``; for processes that leave it open.
        sampler: options of the sampler.
        weighting: options of the weighting.
        seed: of everything random.

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
        seed: int = 0,
    ):
        self.name = name
        self.process = as_process(process, timesteps, prediction)
        self.sampler, self.weighting = parts(self.process, parse_name(name), sampler, weighting, seed)
        self.seed = seed
        self.step = 0
        self._drawn = [0, 0]  # samples of all ranks: in this step so far, in the steps before it
        self._losses: tuple[int, Tensor] | None = None

    def draw(self, x0: Tensor) -> Draw:
        """Timesteps and weights for a batch (batch, channels, height, width), or any shape for most samplers.

        The number of the step goes on with each `observe`. Where gradients of several batches are accumulated for one
        step, each has its own draw, and the last is observed.
        """
        self._begin()
        place = Place(self.seed, self.step, self._drawn[0], sum(self._drawn))
        fractions = self.sampler.fractions(x0, place)
        self._drawn[0] += distributed.share(len(x0))[0]
        t = self.process.times(fractions)
        weighting = getattr(self.weighting, "base", self.weighting)  # a learned one's factor is applied with the loss
        fixed = weighting.factors(self.process.snr(t), t)
        importance = self.sampler.importance(x0, fractions)
        importance = torch.ones_like(fixed) if importance is None else importance
        moved = (values.to(x0.device, non_blocking=True) for values in (t, fixed, importance))  # nothing waits
        return Draw(self.step, x0, fractions, *moved)

    def weighted(self, draw: Draw, losses: Tensor) -> Tensor:
        """What is minimised, per sample (batch,): `losses` (batch,) with the weights of their draw."""
        self._losses = draw.step, (losses.detach() * draw.fixed_weights)
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
        """Around the optimiser step: samplers that learn look at the network before and after it.

        Args:
            draw: of this step.
            network: called as ``network(x_t, t)`` by the process (as ``network(x_t, t, conditions)`` with conditions);
                needed by samplers that measure.
            optimizer: of the network, for samplers that look at its state.
            conditions: of the images, each (batch, ...).
            autocast: context that the network is called in.

        Raises:
            ValueError: the sampler measures and there is no network, or it follows losses and `loss` was not called.
        """
        meter, place = None, Place(self.seed, draw.step)
        if self.sampler.measures:
            if network is None:
                raise ValueError(f"strategy {self.name}: its sampler measures the network: pass observe(..., network=)")
            meter = Meter(self.process, network, draw.x0, place, conditions, self.weighting, optimizer, autocast)
        losses = self._losses[1] if self._losses is not None and self._losses[0] == draw.step else None
        observation = Observation(draw.step, draw.x0, draw.fractions, losses, meter, place)
        with self.sampler.observe(observation):
            yield
        self.weighting.step()
        self.step, self._drawn = draw.step + 1, [0, sum(self._drawn)]

    def table(self, x0: Tensor | None = None) -> dict[str, Array]:
        """What the strategy trains on now: ``t``, ``p``, ``w`` and ``effective`` = p w, each (T,)."""
        self._begin()
        return table(self.sampler, self.weighting, x0)

    def _begin(self) -> None:
        self.sampler.begin(self.step)
        self.weighting.begin(self.step)

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
        self.sampler.load_state_dict(state["sampler"], device)
        self.weighting.load_state_dict(state["weighting"], device)
