"""Measure gradient noise, gradient direction and distance from the optimal loss of a training run, by noise level.

    python studies/why/measure.py results/study_first_digits/uniform/seed0 --out studies/why/digits.csv

The table has a row for every snapshot except the first and every level, an equal range of ln SNR. It contains

- signal ||E g||² and noise tr Cov g of the training loss, and their ratio, the simple noise scale (McCandlish et al.
  2018). The last snapshot has further rows in Adam's metric (``loss`` preconditioned). Their ratio is roughly the batch
  size above which larger batches gain little;
- cosines of E g with E g of every other level;
- the error of epsilon by the averaged weights, on training images and on held-out images;
- the error of epsilon by a network that memorised the training images: the posterior mean over all of them (Karras et
  al. 2022, eq. 57).

The script prints the gradient noise that the best density of the training objective would leave, relative to uniform.
"""

import argparse
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from kairos.analyses.noise_levels import log_snr_levels, measure_agreement
from kairos.analyses.settings import AgreementOptions
from kairos.data.latents import open_latents
from kairos.milestones import Snapshot, open_milestone
from kairos_timesteps.randomness import Stream

LEAST, MOST = -7.0, 7.0  # ln SNR; outside, the error or the noise is negligible


def posterior_mean(x_t: Tensor, signal: Tensor, sigma: Tensor, training_images: Tensor) -> Tensor:
    """Return E[x0 | x_t] for x0 uniformly distributed over images.

    Args:
        x_t: noisy images, (batch, ...).
        signal: coefficient of the signal, (batch, 1).
        sigma: coefficient of the noise, (batch, 1).
        training_images: the possible x0, (images, ...).
    """
    images = training_images.flatten(1).double()
    squares = torch.cdist(x_t.flatten(1) / signal, images).square() * (signal / sigma) ** 2
    return (torch.softmax(-squares / 2, dim=1) @ images).view_as(x_t)


def epsilon_errors(
    opened: Snapshot, x0: Tensor, training_images: Tensor, ends: tuple[float, float], level: int
) -> list[float]:
    """Return the mean squared error of epsilon at a noise level: of the network, and of the posterior mean."""
    process, rows = opened.process, range(len(x0))
    t = process.times(ends[0] + (ends[1] - ends[0]) * Stream(0, "why times").uniform(level, rows))
    noise = Stream(0, "why noise").normal(level, rows, tuple(x0.shape[1:]))
    x_t = process.noised(x0, noise.to(x0), t)
    with torch.inference_mode():
        epsilon = process.epsilon(process.predict(opened.model, x_t, t, {}), x_t, t)
    signal, sigma = (each.double().view(-1, 1) for each in process.coefficients(t))
    best = posterior_mean(x_t.double(), signal, sigma, training_images)
    shape = (-1, *[1] * (x_t.ndim - 1))
    least = (x_t - signal.view(shape) * best) / sigma.view(shape)
    return [(each - noise).square().mean().item() for each in (epsilon, least)]


def measure(training: Path, bins: int, images: int, count: int) -> pd.DataFrame:
    """Measure all snapshots of a training run except the first; return the table (see the module).

    Args:
        training: folder of the training run.
        bins: number of noise levels.
        images: images of each level, for gradients.
        count: images of each level, for errors.
    """
    latents = open_latents(training.parents[1] / "latents")
    options = AgreementOptions(bins=bins, images=images, least=LEAST, most=MOST)
    pick = Stream(0, "why images").integers
    x0_by_split = {
        "train": latents.load_x0(latents.train[pick(0, len(latents.train), range(count)).numpy()]),
        "heldout": latents.load_x0(latents.heldout[pick(1, len(latents.heldout), range(count)).numpy()]),
    }
    training_images, tables = latents.load_x0(latents.train), []
    for folder in sorted((training / "milestones").iterdir())[1:]:
        rows, opened = pd.DataFrame(measure_agreement(options, folder, latents, "cpu")), open_milestone(folder)
        levels = [ends for _, ends in log_snr_levels(opened.process, bins, LEAST, MOST)]
        table_rows = []
        for level, ends in enumerate(levels):
            errors_by_split = {
                name: epsilon_errors(opened, x0, training_images, ends, level) for name, x0 in x0_by_split.items()
            }
            table_rows.append(
                {
                    "level": level,
                    **{name: its[0] for name, its in errors_by_split.items()},
                    "by_heart": errors_by_split["train"][1],
                }
            )
        tables.append(rows.merge(pd.DataFrame(table_rows), on="level").assign(step=int(folder.name)))
    return pd.concat(tables)


def relative_noise_of_best_density(table: pd.DataFrame) -> "pd.Series[float]":
    """Return the gradient variance of the best density relative to uniform's, (E sqrt v)² / E v, by step.

    The density has importance weights, so that it keeps the objective.
    """
    rows = table[table["loss"] == "training"]
    share, variance = rows["u_high"] - rows["u_low"], rows["variance"]
    sums = (
        pd.DataFrame({"all": share, "mean": share * variance, "root": share * variance**0.5})
        .groupby(rows["step"])
        .sum()
    )
    return sums["root"] ** 2 / (sums["mean"] * sums["all"])


def main() -> None:
    """Measure a training run, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("training", type=Path, help="folder of a method and seed, with its milestones")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--bins", type=int, default=8)
    parser.add_argument("--images", type=int, default=256, help="of each level, for gradients")
    parser.add_argument("--count", type=int, default=512, help="of each level, for errors")
    a = parser.parse_args()
    table = measure(a.training, a.bins, a.images, a.count)
    table.to_csv(a.out, index=False, float_format="%.5g", lineterminator="\n")
    print(relative_noise_of_best_density(table).to_string(float_format="%.2f"))


if __name__ == "__main__":
    main()
