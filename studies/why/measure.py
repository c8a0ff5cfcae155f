"""Measure gradient noise, gradient direction and distance from the optimal loss of a training run, by noise level.

    python studies/why/measure.py results/study_first_digits/methods/uniform/seed0 --out studies/why/digits.csv

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
from kairos.snapshots import Snapshot, open_snapshot
from kairos_timesteps.randomness import Stream

LEAST, MOST = -7.0, 7.0  # ln SNR; outside, the error or the noise is negligible


def posterior_mean(x_t: Tensor, signal: Tensor, sigma: Tensor, training_images: Tensor) -> Tensor:
    """Return E[x0 | x_t] for x0 uniformly distributed over images, with the shape of `x_t`.

    Args:
        x_t: noisy images, float64 (batch, ...).
        signal: coefficient of the signal, (batch, 1).
        sigma: coefficient of the noise, (batch, 1).
        training_images: the possible x0, (images, ...).
    """
    images = training_images.flatten(1).double()
    # squared distances in units of the noise, (batch, images); exp(-squares / 2) is proportional to the posterior
    squares = torch.cdist(x_t.flatten(1) / signal, images).square() * (signal / sigma) ** 2
    posterior = torch.softmax(-squares / 2, dim=1)
    return (posterior @ images).view_as(x_t)


def epsilon_errors(
    opened: Snapshot, x0: Tensor, training_images: Tensor, ends: tuple[float, float], level: int
) -> list[float]:
    """Return the mean squared error of epsilon at a noise level: of the network, and of the posterior mean.

    Args:
        opened: snapshot with the network.
        x0: images whose noise is estimated, (batch, ...).
        training_images: images of the posterior mean, (images, ...).
        ends: fractions of the process between which times are drawn.
        level: number of the noise level, from which times and noise are drawn.
    """
    process = opened.process
    rows = range(len(x0))
    t = process.times(ends[0] + (ends[1] - ends[0]) * Stream(0, "why times").uniform(level, rows))
    noise = Stream(0, "why noise").normal(level, rows, tuple(x0.shape[1:]))
    x_t = process.noised(x0, noise.to(x0), t)
    with torch.inference_mode():
        epsilon = process.epsilon(process.predict(opened.model, x_t, t, {}), x_t, t)
    signal, sigma = (coefficient.double().view(-1, 1) for coefficient in process.coefficients(t))
    best_x0 = posterior_mean(x_t.double(), signal, sigma, training_images)
    shape = (-1, *[1] * (x_t.ndim - 1))  # broadcasts over the images
    best_epsilon = (x_t - signal.view(shape) * best_x0) / sigma.view(shape)
    return [(estimate - noise).square().mean().item() for estimate in (epsilon, best_epsilon)]


def measure(training: Path, bins: int, images: int, count: int) -> pd.DataFrame:
    """Measure all snapshots of a training run except the first; return the table that the module describes.

    Args:
        training: folder of the training run, with the latents of its experiment two folders above.
        bins: number of noise levels.
        images: images of each level, for gradients.
        count: images of each level, for errors.
    """
    latents = open_latents(training.parents[2] / "latents")
    options = AgreementOptions(bins=bins, images=images, least=LEAST, most=MOST)
    pick = Stream(0, "why images").integers
    x0_by_split = {
        "train": latents.load_x0(latents.train[pick(0, len(latents.train), range(count)).numpy()]),
        "heldout": latents.load_x0(latents.heldout[pick(1, len(latents.heldout), range(count)).numpy()]),
    }
    training_images = latents.load_x0(latents.train)
    tables = []
    for folder in sorted((training / "snapshots").iterdir())[1:]:
        gradient_rows = pd.DataFrame(measure_agreement(options, folder, latents, "cpu"))
        opened = open_snapshot(folder)
        levels = [ends for _, ends in log_snr_levels(opened.process, bins, LEAST, MOST)]
        error_rows = []
        for level, ends in enumerate(levels):
            row: dict[str, float] = {"level": level}
            for split, x0 in x0_by_split.items():
                network_error, posterior_error = epsilon_errors(opened, x0, training_images, ends, level)
                row[split] = network_error
                if split == "train":  # the error of a network that memorised the training images
                    memorised_error = posterior_error
            row["by_heart"] = memorised_error
            error_rows.append(row)
        tables.append(gradient_rows.merge(pd.DataFrame(error_rows), on="level").assign(step=int(folder.name)))
    return pd.concat(tables)


def relative_noise_of_best_density(table: pd.DataFrame) -> "pd.Series[float]":
    """Return the gradient variance of the best density relative to uniform's, (E sqrt v)² / E v, by step.

    The expectation is over all levels; a level counts by its share of the process. The density has importance weights,
    so that it keeps the objective. `table` is the result of `measure`, of which rows of loss ``training`` are used.
    """
    rows = table[table["loss"] == "training"]
    share = rows["u_high"] - rows["u_low"]  # of the process, by level
    variance = rows["variance"]
    weighted = pd.DataFrame({"all": share, "mean": share * variance, "root": share * variance**0.5})
    sums = weighted.groupby(rows["step"]).sum()
    return sums["root"] ** 2 / (sums["mean"] * sums["all"])


def main() -> None:
    """Measure a training run, write the table, and print the relative gradient noise of the best density."""
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
