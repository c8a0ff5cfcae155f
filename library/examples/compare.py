"""Two strategies compared by a validation loss: the same held-out images, noise and times for both trainings.

python examples/compare.py --strategy log_normal                                # against uniform
python examples/compare.py --strategy mode --coupling nearest --pictures out    # both with coupled noise; with pictures
"""

from pathlib import Path

import torch
from common import Network, batch, images, parser, progress

import kairos_timesteps


def train(
    arguments, data: torch.Tensor, name: str
) -> tuple[Network, kairos_timesteps.Strategy, kairos_timesteps.LossByLevel, list]:
    """One training: network, strategy, losses by noise level and step by step."""
    torch.manual_seed(arguments.seed)
    network = Network(data.shape[1], arguments.width, period=1).to(arguments.device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=arguments.lr)
    strategy = kairos_timesteps.Strategy(
        name, kairos_timesteps.Flow(), coupling=arguments.coupling, seed=arguments.seed
    )
    levels, losses = kairos_timesteps.LossByLevel(bins=16, low=-8, high=8), []
    for step in range(arguments.steps):
        x0, noise = batch(data, arguments.batch, arguments.seed, step, arguments.device)
        draw = strategy.draw(x0)
        noise = strategy.couple(draw, noise)  # which noise each image gets
        x_t = strategy.process.noised(x0, noise, draw.t)
        error = (network(x_t, draw.t) - (noise - x0)).square().mean((1, 2, 3))  # (batch,)
        loss = strategy.loss(draw, error)
        optimizer.zero_grad()
        loss.backward()
        with strategy.observe(draw, network, optimizer):
            optimizer.step()
        levels.update(strategy.process.snr(draw.t), error)  # waits for nothing
        losses.append(loss.item())
        progress(step + 1, arguments.steps, losses)
    return network, strategy, levels, losses


def main(argv: list[str] | None = None) -> list[float]:
    """Train with both strategies, compare their validation losses, and return the losses of the second run."""
    options = parser(__doc__.splitlines()[0], strategy="log_normal")
    options.add_argument("--baseline", default="uniform", help="strategy to compare with")
    options.add_argument("--coupling", default="independent", help="coupling of noise with images: assignment, nearest")
    options.add_argument("--pictures", type=Path, help="folder for pictures, which need matplotlib")
    arguments = options.parse_args(argv)
    data = images(arguments.images, arguments.size)
    held_out, data = data[::10], data[[k for k in range(len(data)) if k % 10]]

    validation_losses = []
    for name in (arguments.baseline, arguments.strategy):
        network, strategy, levels, losses = train(arguments, data, name)
        validation = kairos_timesteps.ValidationLoss(held_out, strategy.process, device=arguments.device)
        measured = validation(network)
        validation_losses.append(measured)
        print(f"{name}: validation loss {measured['loss']:.4f} ± {measured['standard_error']:.4f}")
        if arguments.pictures:
            arguments.pictures.mkdir(parents=True, exist_ok=True)
            levels.picture(arguments.pictures / f"{name} losses.png")
            strategy.preview(arguments.pictures / f"{name} draws.png")
    difference = (
        validation_losses[1]["by_image"] - validation_losses[0]["by_image"]
    )  # of the same images, noise and times
    print(f"difference: {difference.mean():+.4f} ± {difference.std(ddof=1) / len(difference) ** 0.5:.4f}")
    return losses


if __name__ == "__main__":
    main()
