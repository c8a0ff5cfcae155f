"""Under FSDP (fully_shard, two gloo processes on the CPU) with gradient accumulation: times and network of one process.

As a script: python test_fsdp.py RANK RANKS FILE OUT
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

from kairos import Strategy

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:
    fully_shard = None
NAMES = ("log_normal+min_snr", "speed+change_aware", "uniform")
GLOBAL_BATCH, MICRO, STEPS = 8, 2, 4  # samples of a micro-batch over all ranks, micro-batches, optimiser steps
pytestmark = pytest.mark.skipif(fully_shard is None, reason="this torch has no torch.distributed.fsdp.fully_shard")


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(17, 32), nn.Linear(32, 16)

    def forward(self, x, t):
        return self.last(torch.tanh(self.first(torch.cat([x, t[:, None] / 1000], 1))))


def train(name, rank, ranks):
    torch.manual_seed(0)
    network = Network().double()
    if ranks > 1:
        for layer in (network.first, network.last, network):
            fully_shard(layer, mesh=distributed.device_mesh.init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    options = {"points": "stratified"} if name == "uniform" else {}
    strategy = Strategy(name, sampler=options, coupling="nearest")
    images = torch.randn(MICRO * GLOBAL_BATCH, 16, generator=torch.Generator().manual_seed(1)).double()
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(2)).double()
    share, drawn = GLOBAL_BATCH // ranks, []
    for _ in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO):
            mine = slice(micro * GLOBAL_BATCH + rank * share, micro * GLOBAL_BATCH + (rank + 1) * share)
            if ranks > 1:
                network.set_requires_gradient_sync(micro == MICRO - 1)
            draw = strategy.draw(images[mine])
            drawn.append(draw.t)
            eps = strategy.couple(draw, noise[mine])
            x_t = strategy.process.noised(images[mine], eps, draw.t)
            error = (network(x_t, draw.t) - eps).square().mean(1)
            (strategy.loss(draw, error) / MICRO).backward()  # FSDP takes the mean over the ranks
        with strategy.observe(draw, network, optimizer):
            optimizer.step()
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in network.parameters()]
    return {"t": torch.stack(drawn), "weights": [p.detach() for p in full], "state": strategy.state_dict()}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What one process computes, and each of two that share its batch."""
    folder = tmp_path_factory.mktemp("fsdp")
    started = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(ranks), folder / "group", folder / f"{ranks}.{rank}"]
        )
        for ranks in (1, 2)
        for rank in range(ranks)
    ]
    assert [process.wait(timeout=120) for process in started] == [0, 0, 0]
    return [torch.load(folder / name, weights_only=True) for name in ("1.0", "2.0", "2.1")]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", NAMES)
def test_two_sharded_processes_draw_and_learn_what_one_does(results, name):
    alone, first, second = (result[name] for result in results)
    assert alone["t"].shape == (STEPS * MICRO, GLOBAL_BATCH)
    assert torch.equal(torch.cat([first["t"], second["t"]], 1), alone["t"])
    assert len({tuple(row.tolist()) for row in alone["t"]}) == STEPS * MICRO  # each micro-batch its own
    for one, other, whole in zip(first["weights"], second["weights"], alone["weights"], strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, whole, rtol=1e-9, atol=1e-12)
    assert first["state"] == second["state"] == alone["state"]


def main():
    rank, ranks, file, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    if ranks > 1:
        distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    torch.save({name: train(name, rank, ranks) for name in NAMES}, out)
    if ranks > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
