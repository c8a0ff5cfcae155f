"""What one looks at in a training loop of one's own: the loss by noise level, and what will be drawn."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kairos_timesteps import distributed
from kairos_timesteps.base import NOTHING, Sampler
from kairos_timesteps.errors import demand, needed
from kairos_timesteps.numeric import Array

if TYPE_CHECKING:
    from kairos_timesteps.strategy import Strategy


class LossByLevel:
    """Means and counts of losses by bins of ln SNR, as a training goes on: kept where the losses are, without waiting.

    Args:
        bins: how many between `low` and `high`, or their edges, rising. The two at the ends take what lies beyond.
        low: ln SNR at which they begin.
        high: and end.
        process_group: ranks over which the batch is split, as in `Strategy`; None: all ranks.

    Raises:
        ConfigError: these are no bins.
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
        """Take in losses at signal-to-noise ratios, tensors of one shape, such as ``process.snr(draw.t)``.

        Raises:
            ConfigError: their shapes differ.
        """
        demand(snr.shape == losses.shape, "losses", f"shape {tuple(losses.shape)}", f"that of snr, {tuple(snr.shape)}")
        level, values = snr.detach().double().flatten().log(), losses.detach().double().flatten()
        self._sums, self.edges = self._sums.to(values.device), self.edges.to(values.device)
        place = torch.searchsorted(self.edges[1:-1], level, right=True)
        inside = place == torch.arange(self._sums.shape[1], device=values.device)[:, None]  # (bins, batch)
        powers = torch.stack([torch.ones_like(values), values, values**2])[:, None]
        self._sums += torch.where(inside, powers, 0.0).sum(2)  # a loss that is not finite spoils its own bin alone

    def table(self) -> dict[str, Array]:
        """``low`` and ``high`` in ln SNR, ``count``, ``mean`` and its standard ``error``, nan without losses, each
        (bins,); of all ranks, all of which ask or none.
        """
        distributed.sum_tensors([sums := self._sums.clone()], self.group)
        count, total, squares = sums.cpu().numpy()
        edges = self.edges.cpu().numpy()
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = total / count
            error = np.sqrt(np.maximum(squares / count - mean**2, 0) / np.where(count > 1, count - 1, np.nan))
        return {"low": edges[:-1], "high": edges[1:], "count": count, "mean": mean, "error": error}

    def picture(self, path: str | Path) -> None:
        """Draw it, in the format of the file's name; raises ConfigError where matplotlib is not installed."""
        found = self.table()
        middle = (found["low"] + found["high"]) / 2
        with _picture(path) as axes:
            axes.errorbar(middle, found["mean"], found["error"], marker=".")
            scale = "log" if np.nanmin(found["mean"], initial=1) > 0 else "linear"
            axes.set(xlabel="ln SNR", ylabel="loss", yscale=scale)

    def state_dict(self) -> dict[str, Any]:
        """Edges and sums."""
        return {"edges": self.edges.clone(), "sums": self._sums.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave; raises ConfigError if it is of other bins."""
        same = torch.equal(state["edges"].cpu(), self.edges.cpu())
        demand(same, "state", f"{len(state['edges']) - 1} bins", f"the {len(self.edges) - 1} that these are")
        self._sums = state["sums"].clone().to(self._sums.device)


def preview(
    strategy: "Strategy", path: str | Path | None, draws: int, bins: int, batch: int, context: Mapping[str, Any]
) -> dict[str, Array]:
    """See `Strategy.preview`."""
    demand(draws >= 1 and bins >= 1 and batch >= 1, "draws, bins, batch", f"{draws}, {bins}, {batch}", "1 or more")
    sampler, edges = strategy.sampler, np.linspace(0, 1, bins + 1)
    below = np.concatenate([[0.0], np.cumsum(strategy.table(**context)["p"])])
    cells = np.linspace(0, 1, len(below))
    if type(sampler).fractions is Sampler.fractions:
        steps = range(strategy.step, strategy.step + -(-draws // batch))
        size, step = (draws, strategy.step) if sampler.moving else (batch, steps)
        u = sampler.sample(size, strategy.seed, step, **context).numpy()
    else:  # it looks at images: from the density that it has without them
        u = np.interp(NOTHING.stream("timesteps").uniform(0, range(draws)).numpy(), below, cells)
    count = np.histogram(u, edges)[0]
    middle = strategy.process.times((edges[1:] + edges[:-1]) / 2)
    expected = u.size * np.diff(np.interp(edges, cells, below))
    found = {"low": edges[:-1], "high": edges[1:], "t": middle, "count": count, "expected": expected}
    if path is not None:
        with _picture(path) as axes:
            axes.stairs(count, edges, fill=True, alpha=0.4, label=f"{u.size} draws")
            axes.stairs(expected, edges, label="density")
            axes.set(xlabel="u, fraction of the process: 0 image, 1 noise", ylabel="draws", title=strategy.name)
            axes.legend()
    return found


@contextmanager
def _picture(path: str | Path) -> Iterator[Any]:
    """Axes of a figure that is then written to a file."""
    figure = needed("matplotlib.figure", "pictures", "picture").Figure((6, 4), layout="constrained")
    yield figure.subplots()
    figure.savefig(path)
