"""Training loop of a few steps with a tiny network, as users write it with `kairos_timesteps.Strategy`."""

import io
from typing import Any

import torch
from torch import Tensor, nn

from specifications import Call, Specification, context_of

BATCH = 8
IMAGES = torch.randn(BATCH, 1, 4, 4, generator=torch.Generator().manual_seed(0))


class TinyNetwork(nn.Module):
    """1x1 convolution with a shift that depends on time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, 1, 1)
        self.time = nn.Parameter(torch.tensor(0.1))

    def forward(self, x_t: Tensor, t: Tensor) -> Tensor:
        return self.layer(x_t) + self.time * torch.tanh(t.float() / 100).view(-1, 1, 1, 1)


class SmallLoop:
    """Strategy, network and Adam; `step` is one optimizer step over one or several micro-batches.

    Args:
        specification: options of the strategy.
        micro_batches: number of draws in one step.
        times: number of times of each sample, such as one for each frame.
        more: further arguments of `Strategy`.
    """

    def __init__(self, specification: Specification, micro_batches: int = 1, times: int = 0, **more: Any):
        torch.manual_seed(0)
        self.specification, self.micro_batches, self.times = specification, micro_batches, times
        self.strategy = specification.build(**more)
        self.network = TinyNetwork()
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=1e-2)
        self.context = context_of(specification, Call(), BATCH).arguments

    def step(self) -> list[Tensor]:
        """Take one optimizer step; returns times, fractions and weights of its draws."""
        draws = []
        count = BATCH // self.micro_batches
        for number in range(self.micro_batches):
            x0 = IMAGES[number * count : (number + 1) * count]
            context = dict(self.context)
            if "item" in context:
                context |= {"item": context["item"][:count], "epoch": self.strategy.step}
            draw = self.strategy.draw(x0, times=(self.times,) if self.times else (), **context)
            draws += [draw.t, draw.fractions, draw.weights, draw.importance]
            self.strategy.loss(draw, self.errors(draw)).backward()
        with self.strategy.observe(draw, self.network, self.optimizer):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return draws

    def errors(self, draw: Any, noise: Tensor | None = None) -> Tensor:
        """Return the unweighted squared error of each sample at each of its times, in the shape of ``draw.t``."""
        process, t = self.strategy.process, draw.t.flatten()
        x0 = draw.x0.repeat_interleave(len(t) // len(draw.x0), 0)
        if noise is None:
            noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(draw.step))
        x_t = process.noised(x0, noise, t)
        output = process.predict(self.network, x_t, t)
        return ((output - process.target(x0, noise, t)) ** 2).mean((1, 2, 3)).view(draw.t.shape)

    def save(self) -> bytes:
        """Return the content of a checkpoint file."""
        file = io.BytesIO()
        components = {"strategy": self.strategy, "network": self.network, "optimizer": self.optimizer}
        torch.save({name: component.state_dict() for name, component in components.items()}, file)
        return file.getvalue()

    def load(self, content: bytes) -> None:
        """Resume from a checkpoint file."""
        state = torch.load(io.BytesIO(content), weights_only=True)
        for name in ("strategy", "network", "optimizer"):
            getattr(self, name).load_state_dict(state[name])

    def state(self) -> dict[str, Any]:
        """Return the states of strategy and network."""
        return {"strategy": self.strategy.state_dict(), "network": self.network.state_dict()}


def equal_bits(one: Any, other: Any) -> bool:
    """Return True if two nested states are equal to the last bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal_bits(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal_bits, one, other))
    if isinstance(one, Tensor):
        same_kind = one.dtype == other.dtype and one.shape == other.shape
        return same_kind and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    return bool(one == other)
