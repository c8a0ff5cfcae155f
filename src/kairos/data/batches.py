"""The source of a training's batches: x0 and conditions of every step, a function of (seed, step) alone.

A thread reads the rows of the steps to come, each once; they are moved to the device without waiting, and what is
random in x0 is drawn there. Epochs are permutations of the training images, steps cut them into batches.
"""

import functools
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairos import conditions as conditioning
from kairos.data.augment import augment_images
from kairos.data.latents import Latents
from kairos_timesteps.randomness import Stream

_AHEAD = 2  # steps that are read before they are asked for


@dataclass(frozen=True)
class Batch:
    """Training data of a step, on the device: this rank's slice of the global batch.

    Attributes:
        step: number of the step, from 0.
        sample_indices: indices of the samples in the global batch.
        x0: images in model space, (n, c, h, w).
        conditions: conditions by name, each (n, ...).
        visit: ``item``, the index of each sample among the training images; ``items``, the number of training images;
            ``epoch``, the epoch of the visit; each (n,).
    """

    step: int
    sample_indices: range
    x0: Tensor
    conditions: dict[str, Tensor]
    visit: dict[str, Tensor]


@dataclass(frozen=True)
class Batches:
    """The batches of a training.

    Args:
        latents: what is trained on.
        seed: of the training.
        size: of the global batch.
        index: numbers of this rank's samples in it.
        conditions: names of those that the model takes.
        dropout: share of samples that lose their conditions.
        device: where x0 goes.
        dtype: of x0.
        augment: probability of each of EDM's augmentations, whose labels are condition ``augment``; None: as it is.
    """

    latents: Latents
    seed: int
    size: int
    index: range
    conditions: tuple[str, ...] = ()
    dropout: float = 0.0
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    augment: float | None = None

    def steps(self, first: int, end: int) -> Iterator[Batch]:
        """The batches of steps `first` ... `end` - 1."""
        with ThreadPoolExecutor(1) as reader:
            waiting = deque(reader.submit(self._read, step) for step in range(first, min(first + _AHEAD, end)))
            for step in range(first, end):
                read = waiting.popleft().result()
                if step + _AHEAD < end:
                    waiting.append(reader.submit(self._read, step + _AHEAD))
                yield self._on_device(step, *read)

    def _read(self, step: int) -> tuple[dict[str, Tensor], ...]:
        """Rows and conditions of a step in this machine's memory. No arithmetic here: torch's threads are another's."""
        positions = np.arange(step * self.size + self.index.start, step * self.size + self.index.stop)
        count, epochs = len(self.latents.train), positions // len(self.latents.train)
        items = np.concatenate(
            [_order(self.seed, int(epoch), count)[positions[epochs == epoch] % count] for epoch in np.unique(epochs)]
        )
        index, flips = self.latents.train[items], None
        if self.latents.can_flip:
            flips = Stream(self.seed, "flips").uniform(step, self.index).numpy() < 0.5
        which = None
        if "text" in self.conditions:  # a caption per visit
            which = Stream(self.seed, "captions").integers(step, 2**32, self.index).numpy()
        rows, stored = self.latents.read_rows(index, flips), self.latents.load_stored_conditions(index, flips, which)
        conditions = {name: stored[name] for name in self.conditions if name in stored}
        visit = {"item": items, "epoch": epochs, "items": np.full_like(items, count)}
        held = rows, conditions, {name: torch.from_numpy(values) for name, values in visit.items()}
        return tuple(_pinned(part, self.device) for part in held)

    def _on_device(self, step: int, *read: dict[str, Tensor]) -> Batch:
        rows, conditions, visit = (
            {name: values.to(self.device, non_blocking=True) for name, values in part.items()} for part in read
        )
        if "low_resolution" in self.conditions:
            conditions["low_resolution"] = self.latents.compute_low_resolution(rows)
        noise = None
        if self.latents.stochastic:
            noise = Stream(self.seed, "latents").normal(step, self.index, self.latents.shape, self.device)
        if conditions and self.dropout:
            dropped = Stream(self.seed, "condition_dropout").uniform(step, self.index, (), self.device) < self.dropout
            conditions = conditioning.drop(conditions, self.latents.condition_kinds, dropped)
        x0 = self.latents.compute_x0(rows, noise).to(self.dtype)
        if self.augment is not None:
            x0, conditions["augment"] = augment_images(x0, self.augment, self.seed, step, self.index)
        return Batch(step, self.index, x0, conditions, visit)


@functools.lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> Any:
    return Stream(seed, "order").permutation(count, epoch).numpy()


def _pinned(rows: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: values.pin_memory() for name, values in rows.items()} if device.type == "cuda" else rows
