"""Short training runs of a small network for several strategies, on one rank or on ranks that share the batch."""

import torch
from torch import nn

from kairos_timesteps.base import Learned
from kairos_timesteps.components import SAMPLERS
from kairos_timesteps.distributed import gather_objects, rank, ranks
from kairos_timesteps.strategy import Strategy

GLOBAL_BATCH = 7
STEPS, STEPS_WITHOUT_STATE = 14, 3  # of strategies that learn, and of all others


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 1))

    def forward(self, x, t):
        return self.body(x)


def train_all(names):
    """Return timesteps, state and network after a short training run by name of the strategy."""
    return {name: train(name) for name in names}


def train(name):
    """Train with a strategy; returns its timesteps, its state and the state of the network."""
    torch.manual_seed(0)
    network = Network().double()
    module = nn.parallel.DistributedDataParallel(network) if ranks() > 1 else network
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    small_options = {
        "frequency": 2,
        "start": 1,
        "history": 1,
        "length": 10,
        "feature_timesteps": 10,
        "floor": 0.1,
        "min_count": 1,
    }
    fields = SAMPLERS[name.split("+")[0]].component.options
    options = {key: value for key, value in small_options.items() if key in fields}
    strategy = Strategy(name, "cosine", timesteps=20, sampler=options)
    images = torch.randn(GLOBAL_BATCH, 2, 4, 4, dtype=torch.float64)
    borders = [0, 3, GLOBAL_BATCH] if ranks() == 2 else [0, GLOBAL_BATCH]  # unequal slices
    rows = slice(borders[rank()], borders[rank() + 1])
    draws = []
    learned = isinstance(strategy.sampler, Learned) or isinstance(strategy.weighting, Learned)
    for k in range(STEPS if learned else STEPS_WITHOUT_STATE):
        draw = strategy.draw(images[rows], index=range(rows.start, rows.stop), total=GLOBAL_BATCH)
        draws.append(torch.cat(gather_objects(draw.t)).tolist())
        noise = torch.randn(images.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(k))[rows]
        x_t = strategy.process.noised(images[rows], noise, draw.t)
        losses = ((module(x_t, draw.t) - noise) ** 2).mean((1, 2, 3))
        optimizer.zero_grad()
        # DistributedDataParallel averages gradients over ranks; the gradient should be that of the global mean
        (strategy.weighted(draw, losses).sum() * ranks() / GLOBAL_BATCH).backward()
        with strategy.observe(draw, module, optimizer):
            optimizer.step()
    return {"t": draws, "state": strategy.state_dict(), "network": network.state_dict()}


def observe_one_of_two_micro_batches(name, ranks_of_batch):
    """Return the state of a sampler after steps whose second micro-batch has no loss, on any number of ranks.

    The micro-batches that count are rows 0 to 3 of a global batch of 8, whatever the number of ranks.
    """
    torch.manual_seed(0)
    network = Network().double()
    options = {"frequency": 1, "start": 1, "feature_timesteps": 5, "bins": 4, "min_count": 1, "floor": 0.1}
    fields = SAMPLERS[name].component.options
    strategy = Strategy(name, "cosine", timesteps=20, sampler={k: v for k, v in options.items() if k in fields})
    images = torch.randn(8, 2, 4, 4, dtype=torch.float64)
    count = 4 // ranks_of_batch
    for _ in range(4):
        draws = []
        for begin in (0, 4):  # first sample of the micro-batch in the global batch
            rows = range(begin + rank() * count, begin + (rank() + 1) * count)
            draw = strategy.draw(images[rows.start : rows.stop], index=rows, total=8)
            strategy.loss(draw, 1 + draw.fractions.sin())
            draws.append(draw)
        with strategy.observe(draws[:1], network), torch.no_grad():
            network.body[0].bias += 0.01
    return strategy.state_dict()["sampler"]


def observe_half_of_all(names, ranks_of_batch):
    return {name: observe_one_of_two_micro_batches(name, ranks_of_batch) for name in names}
