"""Training batches: x0 and conditions of every step, as a function of seed, step, batch size and training images.

Each epoch is a random permutation of the N training images, and steps cut the sequence of epochs into batches. Sample i
of step k is at position q = k · size + i of the sequence. Its image in the data set is::

    latents.train[random_order(Stream(seed, "order"), N, epoch=q // N)[q % N]]

So the order depends on seed and N, and not on method, batch size or number of ranks. No random state is stored: a
resumed run draws the batches from the step in its checkpoint on.

A thread reads the data of the next steps ahead of time, unless the CPU computes and all data are in memory. They are
copied to the device asynchronously, and all random numbers that x0 depends on are drawn on the device.
"""

import functools
import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairos import conditions as conditioning
from kairos.array_shapes import IntegerArray
from kairos.data.augment import augment_images
from kairos.data.latents import Latents
from kairos.data.random_order import random_order
from kairos.shapes import Bytes, Images, Integers, Rows
from kairos_timesteps.randomness import Stream

_PREFETCHED_STEPS = 2
_ALIGNMENT = 64  # bytes; torch's CPU allocator uses the same alignment


@dataclass(frozen=True)
class Batch:
    """Training data of one step, on the device: the slice of the global batch that this rank computes.

    Attributes:
        step: index of the step, from 0.
        sample_indices: indices of the samples in the global batch.
        x0: images in model space, (n, c, h, w).
        conditions: conditions by name, each (n, ...).
        visit: ``item``, the position of each sample's image in `Latents.train`; ``items``, the number of training
            images; ``epoch``, the epoch of the visit; each (n,).
    """

    step: int
    sample_indices: range
    x0: Images
    conditions: dict[str, Rows]
    visit: dict[str, Integers]


@dataclass(frozen=True)
class Batches:
    """All batches of a training run.

    Args:
        latents: training data.
        seed: seed of the training run.
        size: size of the global batch.
        sample_indices: indices of this rank's samples in the global batch.
        conditions: names of the conditions that the model takes.
        dropout: probability that a sample loses its conditions.
        device: device of x0.
        dtype: data type of x0.
        augment: probability of each of EDM's augmentations, whose labels become condition ``augment``; None: no
            augmentations.
    """

    latents: Latents
    seed: int
    size: int
    sample_indices: range
    conditions: tuple[str, ...] = ()
    dropout: float = 0.0
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    augment: float | None = None

    def steps(self, first: int, end: int) -> Iterator[Batch]:
        """Yield the batches of steps `first` ... `end` - 1 in order.

        A thread reads the data of the next two steps, unless training runs on the CPU with all data in memory.
        """
        on_cpu = self.device.type == "cpu"
        if on_cpu and self.latents.are_in_memory:
            for step in range(first, end):
                yield self._compute_batch(step, *self._read(step))
            return
        read = self._read if on_cpu else self._read_packed  # `PackedTensors` are copied to a GPU at once
        with ThreadPoolExecutor(1) as reader:
            pending: deque[Future[Any]] = deque()  # data of the next steps
            for step in range(first, min(first + _PREFETCHED_STEPS, end)):
                pending.append(reader.submit(read, step))
            for step in range(first, end):
                data = pending.popleft().result()
                if step + _PREFETCHED_STEPS < end:
                    pending.append(reader.submit(read, step + _PREFETCHED_STEPS))
                if isinstance(data, PackedTensors):
                    yield self._compute_batch(step, *data.to(self.device))
                else:
                    yield self._compute_batch(step, *data)

    def _read_packed(self, step: int) -> "PackedTensors":
        """Read the data of a step, see `_read`, into one buffer on the CPU, which is pinned if the device is CUDA."""
        return PackedTensors.pack(self._read(step), pin=self.device.type == "cuda")

    def _read(self, step: int) -> list[dict[str, Rows]]:
        """Read the data of a step on the CPU, and return three dictionaries: rows, conditions and visits.

        Rows are the result of `Latents.read_rows`, where each image is flipped with probability 1/2 if the latents can
        flip. Conditions are the stored ones among `self.conditions`; ``text`` is a random caption of the image. Visits
        have the form of `Batch.visit`.
        """
        # Torch computes nothing here: this may run in the reader's thread, and torch's thread pool belongs to the main
        # thread. On the CPU, `Stream` computes with numpy.
        visit_arrays = self._visit(step)
        image_indices = self.latents.train[visit_arrays["item"]]
        flips = None
        if self.latents.can_flip:
            flips = Stream(self.seed, "flips").uniform(step, self.sample_indices).numpy() < 0.5
        caption_numbers = None
        if "text" in self.conditions:  # `Captions.caption_indices` takes them modulo the image's number of captions
            caption_numbers = Stream(self.seed, "captions").integers(step, 2**32, self.sample_indices).numpy()

        rows = self.latents.read_rows(image_indices, flips)
        stored = self.latents.load_stored_conditions(image_indices, flips, caption_numbers)
        conditions = {name: stored[name] for name in self.conditions if name in stored}
        visit = {name: torch.from_numpy(values) for name, values in visit_arrays.items()}
        return [rows, conditions, visit]

    def _visit(self, step: int) -> dict[str, IntegerArray]:
        """Return ``item``, ``epoch`` and ``items`` of this rank's samples of a step, int64 (n,); see `Batch.visit`.

        All samples of a run form one sequence of epochs, each in its own random order. With 10 training images, sample
        23 of the sequence is image 3 in the order of epoch 2. All numbers begin at 0.
        """
        train_count = len(self.latents.train)
        # positions in the sequence of all samples of the run
        positions = step * self.size + np.arange(self.sample_indices.start, self.sample_indices.stop)
        epochs = positions // train_count
        items = np.empty_like(positions)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            order = _image_order_of_epoch(self.seed, int(epoch), train_count)
            items[in_epoch] = order[positions[in_epoch] % train_count]
        return {"item": items, "epoch": epochs, "items": np.full_like(items, train_count)}

    def _compute_batch(
        self, step: int, rows: dict[str, Rows], conditions: dict[str, Rows], visit: dict[str, Integers]
    ) -> Batch:
        """Compute the batch of a step, x0 and conditions, from the data of `_read`, which must be on the device.

        Condition ``low_resolution`` is computed from the images before augmentation. Stochastic latents are sampled
        with noise of the step. A sample loses all its conditions with probability `dropout`. Augmentation comes last
        and adds condition ``augment``, which is never dropped. The dictionary `conditions` may be modified.
        """
        if "low_resolution" in self.conditions:
            conditions["low_resolution"] = self.latents.compute_low_resolution(rows)
        noise = None
        if self.latents.stochastic:
            noise = Stream(self.seed, "latents").normal(step, self.sample_indices, self.latents.shape, self.device)
        if conditions and self.dropout:
            u = Stream(self.seed, "condition_dropout").uniform(step, self.sample_indices, (), self.device)
            conditions = conditioning.drop(conditions, self.latents.condition_kinds, u < self.dropout)
        x0 = self.latents.compute_x0(rows, noise).to(self.dtype)
        if self.augment is not None:
            x0, conditions["augment"] = augment_images(x0, self.augment, self.seed, step, self.sample_indices)
        return Batch(step=step, sample_indices=self.sample_indices, x0=x0, conditions=conditions, visit=visit)


@dataclass(frozen=True)
class PackedTensors:
    """Tensors in one buffer, so that one copy moves all of them to a device.

    Attributes:
        buffer: bytes of the tensors, uint8 (bytes,).
        layout: offset in the buffer, type and shape of each tensor by name, in one dictionary for each group.
    """

    buffer: Bytes
    layout: list[dict[str, tuple[int, torch.dtype, torch.Size]]]

    @staticmethod
    def pack(groups: list[dict[str, Tensor]], pin: bool) -> "PackedTensors":
        """Copy groups of tensors by name, which are on the CPU, to a new buffer.

        With `pin` the buffer is in pinned memory: only then can a GPU copy it asynchronously.
        """
        # select the offset of each tensor, a multiple of `_ALIGNMENT`
        layout: list[dict[str, tuple[int, torch.dtype, torch.Size]]] = []
        size = 0  # bytes so far
        for tensors in groups:
            slots = {}
            for name, values in tensors.items():
                slots[name] = (size, values.dtype, values.shape)
                size += math.ceil(values.nbytes / _ALIGNMENT) * _ALIGNMENT
            layout.append(slots)
        # copy the tensors to views of the buffer
        packed = PackedTensors(torch.empty(size, dtype=torch.uint8, pin_memory=pin), layout)
        for tensors, copies in zip(groups, packed.unpack(), strict=True):
            for name, values in tensors.items():
                # by numpy: torch's threads belong to the main thread
                view_of_buffer = copies[name].numpy()
                view_of_buffer[...] = values.numpy()
        return packed

    def to(self, device: torch.device) -> list[dict[str, Tensor]]:
        """Return all tensors on a device, grouped and named as in `pack`; one copy, asynchronous from pinned memory."""
        return PackedTensors(self.buffer.to(device, non_blocking=True), self.layout).unpack()

    def unpack(self) -> list[dict[str, Tensor]]:
        """Return the tensors as views of the buffer, in the groups and under the names of `layout`."""
        groups = []
        for slots in self.layout:
            tensors = {}
            for name, (offset, dtype, shape) in slots.items():
                tensors[name] = self._view(offset, dtype, shape)
            groups.append(tensors)
        return groups

    def _view(self, start: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        """Return the tensor that begins at byte `start` of the buffer, as a view."""
        end = start + dtype.itemsize * shape.numel()
        return self.buffer[start:end].view(dtype).view(shape)


@functools.lru_cache(maxsize=4)
def _image_order_of_epoch(seed: int, epoch: int, count: int) -> Any:
    """Return the random order of the `count` training images in an epoch: a permutation, int64 (count,) of numpy.

    The four results that were used last are cached.
    """
    return random_order(Stream(seed, "order"), count, epoch).numpy()
