"""Rectified flow: x_t = (1 - t) x0 + t noise with t in [0, 1], the network predicts noise - x0 (Liu et al. 2023).

SD3's density (Esser et al. 2024), SD3's mode sampling shifted as for large images, and a weighting of diffusion that is
converted to this target::

    python examples/flow_matching.py --strategy log_normal
    python examples/flow_matching.py --strategy mode --shift 3
    python examples/flow_matching.py --strategy log_normal+min_snr
"""

import torch
from common import Network, batch, images, parser, progress

import kairos_timesteps


def main(argv: list[str] | None = None) -> list[float]:
    """Train and return the loss of every step."""
    options = parser(__doc__.splitlines()[0], strategy="log_normal")
    options.add_argument("--shift", type=float, default=1.0, help="t = shift u/(1 + (shift - 1) u)")
    arguments = options.parse_args(argv)
    device = arguments.device
    torch.manual_seed(arguments.seed)

    data = images(arguments.images, arguments.size)
    network = Network(data.shape[1], arguments.width, period=1).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=arguments.lr)
    strategy = kairos_timesteps.Strategy(
        arguments.strategy, kairos_timesteps.Flow(shift=arguments.shift), seed=arguments.seed
    )

    losses = []
    for step in range(arguments.steps):
        x0, noise = batch(data, arguments.batch, arguments.seed, step, device)
        draw = strategy.draw(x0)  # draw.t: times (batch,)
        x_t = strategy.process.noised(x0, noise, draw.t)
        error = (network(x_t, draw.t) - (noise - x0)).square().mean((1, 2, 3))  # (batch,)
        loss = strategy.loss(draw, error)
        optimizer.zero_grad()
        loss.backward()
        with strategy.observe(draw, network, optimizer):
            optimizer.step()
        losses.append(loss.item())
        progress(step + 1, arguments.steps, losses)
    return losses


if __name__ == "__main__":
    main()
