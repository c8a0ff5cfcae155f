"""Random coordinates of a batch, and the uniform points in [0, 1) that timesteps are drawn from.

Every point alone is uniform, so a density drawn through its inverse distribution function stays exact. Even points
cover the process better within a batch, which lowers the variance of its gradient.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kairos_timesteps import distributed
from kairos_timesteps.errors import ConfigError, rejection
from kairos_timesteps.lazy import Tensor, torch
from kairos_timesteps.randomness import Device, Stream

POINTS = ("random", "stratified", "systematic", "sobol", "epochs")
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class RandomCoordinates:
    """Random coordinates of a batch: seed, step and sample indices. All random numbers are functions of these.

    Attributes:
        seed: seed of the training run.
        step: training step from 0; an int64 tensor () on the device, for graphs that are replayed; or a range of steps:
            results then have a leading axis of steps.
        offset: number of samples drawn earlier in this step, by previous micro-batches.
        samples_before: number of samples drawn before this step and earlier in it; None: `step` times `batch_size`.
        sample_indices: indices in the global batch, a rising range or an int64 tensor (n,); None: see `for_batch`.
        batch_size: size of the global batch.
        times_shape: shape of the times of one sample: (), (frames,) or (tokens,).
        device: device of the random numbers.
        context: further properties of the samples, such as ``tokens``: each a number, or a tensor that broadcasts with
            (n, *times_shape).
    """

    seed: int = 0
    step: Any = 0
    offset: int = 0
    samples_before: int | None = None
    sample_indices: Any = None
    batch_size: int = 1
    times_shape: tuple[int, ...] = ()
    device: Device = "cpu"
    context: Mapping[str, Any] = field(default_factory=dict)

    def for_batch(self, batch: Tensor, group: distributed.Group = None) -> "RandomCoordinates":
        """Return coordinates with the device of a batch and, unless they are set, its sample indices and global size.

        Samples are dealt to the ranks in turn, as PyTorch's DistributedSampler deals them: sample i of rank r has index
        ``i * ranks + r``. So ranks never share an index, also if one has fewer samples than another.

        Args:
            batch: this rank's part of the global batch.
            group: process group of the ranks that share the global batch; None: all ranks.
        """
        if self.sample_indices is not None:
            return self.replace(device=batch.device)
        ranks = distributed.ranks(group)
        size = ranks * len(batch)
        rank = distributed.rank(group)
        indices = range(rank, max(rank, size), ranks)
        return self.replace(sample_indices=indices, batch_size=size, device=batch.device)

    def replace(self, **changes: Any) -> "RandomCoordinates":
        """Return a changed copy. dataclasses.replace cannot be compiled by torch 2.4.

        Raises:
            TypeError: there is no field of a name.
        """
        return RandomCoordinates(**{**{name: getattr(self, name) for name in _FIELDS}, **changes})

    @property
    def broadcast_step(self) -> Any:
        """The step, or a tensor of steps that broadcasts with (steps, n, *times_shape)."""
        if not isinstance(self.step, range):
            return self.step
        steps = torch.arange(self.step.start, self.step.stop, device=self.device)
        return steps.view(-1, 1, *[1] * len(self.times_shape))

    @property
    def float_step(self) -> Any:
        """The step as an int, or as a float64 tensor that broadcasts with (steps, n, *times_shape)."""
        return self.step if isinstance(self.step, int) else self.broadcast_step.double()

    @property
    def earlier_samples(self) -> Any:
        """Number of samples drawn before the batch, in a shape that broadcasts with (steps, n, *times_shape)."""
        return self.broadcast_step * self.batch_size if self.samples_before is None else self.samples_before

    @property
    def indices_in_step(self) -> range | Tensor:
        """Sample indices among all samples of the step, earlier micro-batches included."""
        indices, offset = self.sample_indices, self.offset
        if isinstance(indices, range):
            return range(indices.start + offset, indices.stop + offset, indices.step)
        return torch.add(indices, offset)

    def index_tensor(self) -> Tensor:
        """Return the sample indices as an int64 tensor (n,) on the device."""
        indices = self.sample_indices
        if isinstance(indices, range):
            return torch.arange(indices.start, indices.stop, indices.step, device=self.device)
        return torch.as_tensor(indices)

    def stream(self, name: str) -> Stream:
        """Return the random stream `name` of the seed."""
        return Stream(self.seed, name)

    def uniform(self, name: str, *shape: int, sample_indices: Any = None) -> Tensor:
        """Return uniform numbers in [0, 1) from a named stream, float64 (n, *times_shape, *shape)."""
        at = self if sample_indices is None else self.replace(sample_indices=sample_indices)
        return self.stream(name).uniform(self.step, at.indices_in_step, (*self.times_shape, *shape), self.device)

    def arguments(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the step and the context values under `names` that exist, ready to broadcast with times of samples.

        Raises:
            ConfigError: a value has the wrong length.
        """
        values = {name: self._broadcast(name) for name in names if self.context.get(name) is not None}
        return {**values, "step": self.float_step} if "step" in names else values

    def _broadcast(self, name: str) -> Any:
        """Return a context value, ready to broadcast with times of samples.

        A number or text is returned as it is. Other values become tensors on the device, with axes of size 1 for the
        times.

        Raises:
            ConfigError: the value is neither a number nor one for each sample.
        """
        value = self.context[name]
        if isinstance(value, (int, float, str)):
            return value
        value, axes = torch.as_tensor(value, device=self.device), 1 + len(self.times_shape)
        counts = value.shape[:1] if self.sample_indices is None else (1, len(self.sample_indices))
        if value.ndim > axes or (value.ndim and value.shape[0] not in counts):
            shape, count = tuple(value.shape), counts[-1]
            raise ConfigError(f"{name}: got shape {shape}, allowed: a number, or one for each of {count} samples")
        return value.reshape(*value.shape, *[1] * (axes - value.ndim)) if value.ndim else value


_FIELDS = tuple(RandomCoordinates.__dataclass_fields__)


def required(name: str, value: Any, user: str) -> Any:
    """Return a context value that `user` requires.

    Raises:
        ConfigError: the value is None.
    """
    if value is None:
        raise ConfigError(f"{user}: needs {name}; pass {name}= to draw, sample or quantile")
    return value


def points(kind: str, coordinates: RandomCoordinates) -> Tensor:
    """Return uniform numbers in [0, 1) for the samples of a batch, float64 (n, *times_shape), in random order.

    ``random``: independent numbers. ``stratified``: one number in each of `batch_size` equal cells. ``systematic``: one
    number in each cell, at a common offset within the cells. ``sobol``: the next points of the one-dimensional Sobol
    sequence (van der Corput, base 2), continued from batch to batch and shifted by a number that depends on the seed.
    ``epochs``: evenly spread over the samples of each epoch, and over the epochs of each sample. The context then
    contains ``item`` (index of the sample in the data set), ``items`` (size of the data set) and ``epoch``.

    Raises:
        ConfigError: context of ``epochs`` is missing; or, for even points, a range of sample indices is not within the
            global batch.
    """
    if kind == "random":
        return coordinates.uniform("timesteps")
    shape, device, size = coordinates.times_shape, coordinates.device, coordinates.batch_size
    if kind == "epochs":
        values = coordinates.arguments(("item", "items", "epoch"))
        item, items, epoch = (required(name, values.get(name), "points: epochs") for name in ("item", "items", "epoch"))
        shift = coordinates.stream("sobol").uniform(0, range(1), shape, device)  # (1, *shape)
        # float64, independent of torch's default type
        of_epoch, of_item = torch.as_tensor(epoch).double() * _GOLDEN, torch.as_tensor(item).double() / items
        even: Tensor = (of_item + of_epoch + shift) % 1.0
        return even.expand(len(coordinates.sample_indices), *shape)
    indices = coordinates.sample_indices
    if isinstance(indices, range) and (indices.start < 0 or indices.stop > size):
        raise rejection("index", indices, f"indices from 0 to {size - 1}; pass total=, the size of the global batch")
    whole = coordinates.replace(sample_indices=range(size))
    keys, axis = whole.uniform("order of timesteps"), -1 - len(shape)
    order = keys.argsort(dim=axis, stable=True)  # of the global batch: every rank computes the whole order
    order = order.index_select(axis, coordinates.index_tensor())
    if kind == "sobol":
        shift = coordinates.stream("sobol").uniform(0, range(1), (), device)
        return (van_der_corput(coordinates.earlier_samples + order) + shift) % 1.0
    if kind == "systematic":
        return (order + coordinates.uniform("timesteps", sample_indices=range(1))) / size
    # the number within a cell belongs to the cell, not to the sample
    return (order + whole.uniform("timesteps").gather(axis, order)) / size


def van_der_corput(index: Tensor) -> Tensor:
    """Mirror the lower 53 bits of each index at the binary point, elementwise, float64."""
    value = 0.0 * index.double()
    for bit in range(53):
        value = value + (index >> bit & 1) * 2.0 ** -(bit + 1)
    return value
