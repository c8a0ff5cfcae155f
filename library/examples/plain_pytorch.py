"""A plain PyTorch loop with a schedule, a network and a checkpoint of its own; the lines of kairos are marked # kairos.

python examples/plain_pytorch.py --strategy adaptive+min_snr --steps 200
python examples/plain_pytorch.py --strategy speed+change_aware --images /data/flowers --checkpoint flowers.pt
"""

from pathlib import Path

import torch
from common import Network, batch, images, parser, progress

import kairos_timesteps


def main(argv: list[str] | None = None) -> list[float]:
    """Train and return the loss of every step."""
    options = parser(__doc__.splitlines()[0], strategy="adaptive+min_snr")
    options.add_argument("--checkpoint", type=Path, help="file to resume from if it exists, and to write at the end")
    arguments = options.parse_args(argv)
    device = arguments.device
    torch.manual_seed(arguments.seed)

    data = images(arguments.images, arguments.size)
    network = Network(data.shape[1], arguments.width, period=1000).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=arguments.lr)
    alphas_cumprod = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0).to(device)  # whatever the script has

    strategy = kairos_timesteps.Strategy(
        arguments.strategy, alphas_cumprod, prediction="epsilon", seed=arguments.seed
    )  # kairos

    if arguments.checkpoint and arguments.checkpoint.exists():
        state = torch.load(arguments.checkpoint, map_location=device)
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        strategy.load_state_dict(state["strategy"], device)

    losses = []
    for step in range(strategy.step, arguments.steps):
        x0, noise = batch(data, arguments.batch, arguments.seed, step, device)
        draw = strategy.draw(x0)  # kairos: draw.t, timesteps (batch,), in the place of torch.randint
        a = alphas_cumprod[draw.t].view(-1, 1, 1, 1)
        x_t = a.sqrt() * x0 + (1 - a).sqrt() * noise
        error = (network(x_t, draw.t) - noise).square().mean((1, 2, 3))  # (batch,)
        loss = strategy.loss(draw, error)  # kairos: in the place of error.mean()
        optimizer.zero_grad()
        loss.backward()
        with strategy.observe(draw, network, optimizer):  # kairos: strategies that learn look at the step
            optimizer.step()
        losses.append(loss.item())
        progress(step + 1, arguments.steps, losses)

    if arguments.checkpoint:
        parts = {"network": network, "optimizer": optimizer, "strategy": strategy}
        torch.save({name: part.state_dict() for name, part in parts.items()}, arguments.checkpoint)
    return losses


if __name__ == "__main__":
    main()
