"""Uniform points that draws are made from: random, or spread evenly so that a batch covers the process better.

Each point on its own is uniform in [0, 1), so a density drawn through its inverse stays exact; only the variance falls.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kairos_timesteps import distributed
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.randomness import Stream

if TYPE_CHECKING:
    from torch import Tensor

POINTS = ("random", "stratified", "systematic", "sobol", "epochs")
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class Place:
    """Where samples stand in everything random.

    Attributes:
        seed: of the training.
        step: its number, from 0; an int64 tensor () on the device, where a graph is to be replayed; or a range, which
            gives everything a leading axis of steps.
        first: samples of the step that were drawn before, where gradients of several batches are accumulated.
        before: samples of the training that were drawn before the step and in it; None: as many in each step as in
            this one.
        index: numbers of these samples in the global batch, a range or an int64 tensor (n,); None: see `of`.
        total: size of the global batch.
        shape: of the times of one sample: (), or (frames,), (tokens,).
        device: where numbers are made.
        context: what else the caller says of these samples, such as ``tokens``; each a number or a tensor that
            broadcasts with (n, *shape).
    """

    seed: int = 0
    step: Any = 0
    first: int = 0
    before: int | None = None
    index: Any = None
    total: int = 1
    shape: tuple[int, ...] = ()
    device: Any = "cpu"
    context: Mapping[str, Any] = field(default_factory=dict)

    def of(self, batch: "Tensor", group: Any = None) -> "Place":
        """Complete for a batch: its device and, unless they are known, sample indices and global batch size.

        Args:
            batch: this rank's part of the global batch, to which each rank brings equally many samples.
            group: process group of the ranks over which the batch is split; None: all ranks.
        """
        if self.index is not None:
            return self.but(device=batch.device)
        count = len(batch)
        begin = distributed.rank(group) * count
        index, total = range(begin, begin + count), distributed.ranks(group) * count
        return self.but(index=index, total=total, device=batch.device)

    def but(self, **changes: Any) -> "Place":
        """The same with changes; a graph of torch 2.4 cannot hold dataclasses.replace."""
        return Place(**{name: changes.get(name, getattr(self, name)) for name in _FIELDS})

    @property
    def steps(self) -> Any:
        """The step as what broadcasts with numbers of samples."""
        if not isinstance(self.step, range):
            return self.step
        import torch

        return torch.arange(self.step.start, self.step.stop, device=self.device).view(-1, 1, *[1] * len(self.shape))

    @property
    def now(self) -> Any:
        """The same as real numbers, in double precision."""
        return self.steps if isinstance(self.step, int) else self.steps.double()

    def stream(self, name: str) -> Stream:
        """The random numbers of one purpose."""
        return Stream(self.seed, name)

    def uniform(self, name: str, *shape: int, index: Any = None) -> "Tensor":
        """A number in [0, 1) for each time of each sample, float64 (n, *self.shape, *shape)."""
        place = self if index is None else self.but(index=index)
        return self.stream(name).uniform(self.step, place.numbers, (*self.shape, *shape), self.device)

    @property
    def numbers(self) -> "range | Tensor":
        """Numbers of these samples among all of the step."""
        index, first = self.index, self.first
        return range(index.start + first, index.stop + first) if isinstance(index, range) else index + first

    def said(self, name: str, who: str) -> Any:
        """What the context holds under a name: a number, a word, or a tensor that broadcasts with times of samples.

        Raises:
            ConfigError: nothing, or not a number for each sample.
        """
        value = self.context.get(name)
        if value is None:
            raise ConfigError(f"{who}: needs {name}, and the call did not say it; allowed: draw(..., {name}=)")
        if isinstance(value, (int, float, str)):
            return value
        import torch

        value = torch.as_tensor(value, device=self.device)
        counts = value.shape[:1] if self.index is None else (1, len(self.index))
        if value.ndim > 1 + len(self.shape) or (value.ndim and value.shape[0] not in counts):
            shape, count = tuple(value.shape), counts[-1]
            raise ConfigError(f"{name}: got shape {shape}, allowed: a number, or one for each of {count} samples")
        return value.reshape(*value.shape, *[1] * (1 + len(self.shape) - value.ndim)) if value.ndim else value


_FIELDS = tuple(Place.__dataclass_fields__)


def points(kind: str, place: Place) -> "Tensor":
    """Numbers in [0, 1) for the samples of a place, float64 (n, *place.shape); even ones in random order.

    Args:
        kind: ``random``; of `place.total` equal cells one number each: anywhere in its cell (``stratified``), or at the
            same place of every cell (``systematic``); ``sobol``: the next points of the one-dimensional Sobol sequence
            (van der Corput, base 2), which goes on from batch to batch, all shifted by one number that depends on the
            seed; ``epochs``: even over each epoch's samples, and over the epochs of each sample, from the context's
            ``item`` of ``items`` (number of the sample in the data set and their number) and ``epoch``.
        place: where they stand.
    """
    if kind == "random":
        return place.uniform("timesteps")
    import torch

    if kind == "epochs":
        item, items, epoch = (place.said(name, "points: epochs") for name in ("item", "items", "epoch"))
        shift = place.stream("sobol").uniform(0, range(1), place.shape, place.device)  # (1, *shape)
        even = (item / items + epoch * _GOLDEN + shift) % 1.0
        return even.expand(len(place.index), *place.shape)
    whole = place.but(index=range(place.total))
    keys, axis = whole.uniform("order of timesteps"), -1 - len(place.shape)
    order = keys.argsort(dim=axis, stable=True)  # of the global batch, which every rank computes
    index = place.index
    mine = torch.arange(index.start, index.stop, device=place.device) if isinstance(index, range) else index
    order = order.index_select(axis, mine)
    if kind == "sobol":
        before = place.steps * place.total if place.before is None else place.before
        shift = place.stream("sobol").uniform(0, range(1), (), place.device)
        return (van_der_corput(before + order) + shift) % 1.0
    if kind == "systematic":
        return (order + place.uniform("timesteps", index=range(1))) / place.total
    return (order + whole.uniform("timesteps").gather(axis, order)) / place.total


def van_der_corput(index: "Tensor") -> "Tensor":
    """The lower 53 bits of each index mirrored at the binary point, elementwise, float64."""
    value = 0.0 * index
    for bit in range(53):
        value = value + (index >> bit & 1) * 2.0 ** -(bit + 1)
    return value
