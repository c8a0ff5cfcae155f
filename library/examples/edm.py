"""Continuous noise levels with EDM's preconditioning (Karras et al. 2022); sigma and its weight come from a strategy.

python examples/edm.py --strategy edm_log_normal+edm        # EDM as published
python examples/edm.py --strategy edm_log_normal+edm2       # its loss with EDM2's learned uncertainty
python examples/edm.py --strategy loss_rms+edm              # any other sampler: here one that learns
"""

import torch
from common import Network, batch, images, parser, progress

import kairos_timesteps


def main(argv: list[str] | None = None) -> list[float]:
    """Train and return the loss of every step."""
    arguments = parser(__doc__.splitlines()[0], strategy="edm_log_normal+edm").parse_args(argv)
    device = arguments.device
    torch.manual_seed(arguments.seed)

    data = images(arguments.images, arguments.size)
    network = Network(data.shape[1], arguments.width, period=8).to(device)  # called with ln(sigma)/4
    optimizer = torch.optim.Adam(network.parameters(), lr=arguments.lr)
    process = kairos_timesteps.Edm(sigma_data=data.std().item())
    strategy = kairos_timesteps.Strategy(arguments.strategy, process, seed=arguments.seed)

    losses = []
    for step in range(arguments.steps):
        x0, noise = batch(data, arguments.batch, arguments.seed, step, device)
        draw = strategy.draw(x0)  # draw.t: noise levels sigma, (batch,)
        noised = process.noised(x0, noise, draw.t)  # x0 + sigma noise
        denoised = process.predict(network, noised, draw.t)  # c_skip x + c_out F(c_in x, c_noise): an estimate of x0
        error = (denoised - x0).square().mean((1, 2, 3))  # (batch,)
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
