"""FSDP (fully_shard, two gloo processes on the CPU) with gradient accumulation gives the result of one process."""

import pytest
import torch
from torch import distributed, nn

import rank_groups
from kairos_timesteps import Strategy
from kairos_timesteps.distributed import rank, ranks

NAMES = ("log_normal+min_snr", "speed+change_aware", "uniform")
GLOBAL_BATCH, MICRO, STEPS = 8, 2, 4  # samples of a micro-batch over all ranks, micro-batches, optimizer steps


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(17, 32), nn.Linear(32, 16)

    def forward(self, x, t):
        return self.last(torch.tanh(self.first(torch.cat([x, t[:, None] / 1000], 1))))


def train_all():
    """Return timesteps, weights and state after a short training run by name of the strategy."""
    return {name: train(name) for name in NAMES}


def train(name):
    torch.manual_seed(0)
    network = Network().double()
    if ranks() > 1:
        from torch.distributed.fsdp import fully_shard  # its import takes a second

        for layer in (network.first, network.last, network):
            fully_shard(layer, mesh=distributed.device_mesh.init_device_mesh("cpu", (ranks(),)))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    options = {"points": "stratified"} if name == "uniform" else {}
    strategy = Strategy(name, sampler=options, coupling="nearest")
    images = torch.randn(MICRO * GLOBAL_BATCH, 16, generator=torch.Generator().manual_seed(1)).double()
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(2)).double()
    draws = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO):
            rows = slice(micro * GLOBAL_BATCH + rank(), (micro + 1) * GLOBAL_BATCH, ranks())
            if ranks() > 1:
                network.set_requires_gradient_sync(micro == MICRO - 1)
            draw = strategy.draw(images[rows])
            draws.append(draw.t)
            eps = strategy.couple(draw, noise[rows])
            x_t = strategy.process.noised(images[rows], eps, draw.t)
            error = (network(x_t, draw.t) - eps).square().mean(1)
            (strategy.loss(draw, error) / MICRO).backward()  # FSDP takes the mean over the ranks
        with strategy.observe(draw, network, optimizer):
            optimizer.step()
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in network.parameters()]
    return {"t": torch.stack(draws), "weights": [p.detach() for p in full], "state": strategy.state_dict()}


@pytest.mark.long
@pytest.mark.timeout(150)
def test_two_sharded_processes_equal_one_process(tmp_path):
    if not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
        pytest.skip("this torch has no torch.distributed.fsdp.fully_shard")
    both = rank_groups.run(train_all, tmp_path, 2)
    whole = train_all()
    for name in NAMES:
        alone, first, second = whole[name], both[0][name], both[1][name]
        with rank_groups.case(name):
            assert alone["t"].shape == (STEPS * MICRO, GLOBAL_BATCH)
            assert torch.equal(torch.stack([first["t"], second["t"]], 2).flatten(1), alone["t"])
            assert len({tuple(row.tolist()) for row in alone["t"]}) == STEPS * MICRO  # micro-batches differ
            for one, other, expected in zip(first["weights"], second["weights"], alone["weights"], strict=True):
                assert torch.equal(one, other)
                torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-12)
            assert first["state"] == second["state"] == alone["state"]
