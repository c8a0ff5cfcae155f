"""Monitoring of a training loop: the loss by noise level, and a preview of the draws."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairos_timesteps import distributed
from kairos_timesteps.coordinates import RandomCoordinates
from kairos_timesteps.errors import demand, optional_module
from kairos_timesteps.numeric import Array


class LossByLevel:
    """Means and counts of losses by bins of ln SNR, kept on the device of the losses, without synchronisation.

    Args:
        bins: number of bins between `low` and `high`, or their rising edges. The outer bins take what lies beyond.
        low: ln SNR where the bins begin.
        high: ln SNR where the bins end.
        process_group: ranks over which the batch is split, as in `Strategy`; None: all ranks.

    Raises:
        ConfigError: the edges do not rise, or there is no bin.
    """

    def __init__(
        self, bins: int | Sequence[float] = 24, low: float = -12.0, high: float = 12.0, process_group: Any = None
    ):
        edges = np.linspace(low, high, max(bins, 0) + 1) if isinstance(bins, int) else np.array(bins, np.float64)
        rising = np.isfinite(edges).all() and (np.diff(edges) > 0).all()
        demand(len(edges) > 1 and rising, "bins", f"{bins} from {low:g} to {high:g}", "1 or more, or edges that rise")
        self.edges = torch.from_numpy(edges)
        self.group = distributed.batch_group(process_group)
        self._sums = torch.zeros(3, len(edges) - 1, dtype=torch.float64)  # of 1, losses and their squares

    def update(self, snr: Tensor, losses: Tensor) -> None:
        """Add losses at signal-to-noise ratios, tensors of one shape, such as ``process.snr(draw.t)``.

        Raises:
            ConfigError: their shapes differ.
        """
        demand(snr.shape == losses.shape, "losses", f"shape {tuple(losses.shape)}", f"that of snr, {tuple(snr.shape)}")
        level, values = snr.detach().double().flatten().log(), losses.detach().double().flatten()
        self._sums, self.edges = self._sums.to(values.device), self.edges.to(values.device)
        bin = torch.searchsorted(self.edges[1:-1], level, right=True)
        inside = bin == torch.arange(self._sums.shape[1], device=values.device)[:, None]  # (bins, batch)
        powers = torch.stack([torch.ones_like(values), values, values**2])[:, None]
        self._sums += torch.where(inside, powers, 0.0).sum(2)  # a loss that is not finite spoils its own bin alone

    def table(self) -> dict[str, Array]:
        """Return ``low`` and ``high`` in ln SNR, ``count``, ``mean`` and its ``standard_error``, each (bins,).

        The values are those of all ranks. ``mean`` is nan in bins without losses, ``standard_error`` also in bins with
        one loss.
        Call it on all ranks or on none.
        """
        distributed.sum_tensors([sums := self._sums.clone()], self.group)
        count, total, squares = sums.cpu().numpy()
        edges = self.edges.cpu().numpy()
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = total / count
            standard_error = np.sqrt(np.maximum(squares / count - mean**2, 0) / np.where(count > 1, count - 1, np.nan))
        return {"low": edges[:-1], "high": edges[1:], "count": count, "mean": mean, "standard_error": standard_error}

    def picture(self, path: str | Path) -> None:
        """Write a picture of the table, in the format of the file's name.

        Call it on all ranks or on none. Each of them writes the file.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        table = self.table()
        middle = (table["low"] + table["high"]) / 2
        with _picture(path) as axes:
            axes.errorbar(middle, table["mean"], table["standard_error"], marker=".")
            scale = "log" if np.nanmin(table["mean"], initial=1) > 0 else "linear"
            axes.set(xlabel="ln SNR", ylabel="loss", yscale=scale)

    def state_dict(self) -> dict[str, Any]:
        """Return edges and sums."""
        return {"edges": self.edges.clone(), "sums": self._sums.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned.

        Raises:
            ConfigError: the state has other bins.
        """
        has_equal_bins = torch.equal(state["edges"].cpu(), self.edges.cpu())
        demand(
            has_equal_bins, "state", f"{len(state['edges']) - 1} bins", f"the {len(self.edges) - 1} bins of this object"
        )
        self._sums = state["sums"].clone().to(self._sums.device)


def preview(
    strategy: Any,
    path: str | Path | None = None,
    *,
    draws: int = 100_000,
    bins: int = 50,
    batch: int = 256,
    **context: Any,
) -> dict[str, Array]:
    """Return a histogram of the draws of the next steps; the strategy does not change.

    Args:
        strategy: a `Strategy`.
        path: file of a picture of the histogram, in the format of the file's name.
        draws: number of draws, rounded up to batches of `batch`; in one batch if the density depends on the step.
        bins: number of bins of equal width in u.
        batch: size of the global batch.
        context: properties that samplers require, as in `Strategy.draw`.

    Returns:
        ``low`` and ``high`` (fractions u of the process), ``t`` (time of the process in the middle), ``count`` and
        ``expected`` (from the density), each (bins,). A density per image is shown as it is without images.

    Raises:
        ConfigError: context is missing, or matplotlib, for a picture.
    """
    demand(draws >= 1 and bins >= 1 and batch >= 1, "draws, bins, batch", f"{draws}, {bins}, {batch}", "1 or more")
    sampler, edges = strategy.sampler, np.linspace(0, 1, bins + 1)
    below = np.concatenate([[0.0], np.cumsum(strategy.table(**context)["p"])])
    cells = np.linspace(0, 1, len(below))
    if not sampler.per_image:
        steps = range(strategy.step, strategy.step + -(-draws // batch))
        size, step = (draws, strategy.step) if "step" in sampler.context_names else (batch, steps)
        u = sampler.sample(size, strategy.seed, step, **context).numpy()
    else:  # from the density without images
        u = np.interp(RandomCoordinates().stream("timesteps").uniform(0, range(draws)).numpy(), below, cells)
    count = np.histogram(u, edges)[0]
    middle = strategy.process.times((edges[1:] + edges[:-1]) / 2)
    expected = u.size * np.diff(np.interp(edges, cells, below))
    histogram = {"low": edges[:-1], "high": edges[1:], "t": middle, "count": count, "expected": expected}
    if path is not None:
        with _picture(path) as axes:
            axes.stairs(count, edges, fill=True, alpha=0.4, label=f"{u.size} draws")
            axes.stairs(expected, edges, label="density")
            axes.set(xlabel="u, fraction of the process: 0 image, 1 noise", ylabel="draws", title=strategy.name)
            axes.legend()
    return histogram


@contextmanager
def _picture(path: str | Path) -> Iterator[Any]:
    """Yield the axes of a figure and write it to a file; after an error in the block no file is written.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = optional_module("matplotlib.figure", "pictures", "picture").Figure((6, 4), layout="constrained")
    yield figure.subplots()
    figure.savefig(path)
