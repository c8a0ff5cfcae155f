"""A training that a device has not the memory for: refused with a microbatch that fits, found by trying."""

import gc
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from kairos.losses.terms import LossBatch
from kairos.training.loop import predicted
from kairos.training.state import TrainingState
from kairos_timesteps.errors import KairosError


def guarded(training: TrainingState, lines: Iterator[Any]) -> Iterator[Any]:
    """Yield the items of `lines`, the steps of a training run, and replace an out-of-memory error by advice.

    Raises:
        KairosError: a step does not fit into the device's memory; the message contains the microbatch that fits.
    """
    with suppress(torch.OutOfMemoryError):  # with its traceback go the tensors of the step
        yield from lines
        return
    field = "batch_size" if training.settings["microbatch"] is None else "microbatch"
    whole = max(place.stop - place.start for _, place in training.passes)
    fitting = largest_fitting(training, whole)
    if fitting == whole:
        allowed = (
            f"less beside it, for {whole} images fit into a pass of their own (measured): another sampler, a "
            "smaller model, or no other process on the device"
        )
    elif fitting:
        allowed = f"training.microbatch: {fitting} keeps the batch and fits (measured)"
    else:
        allowed = "a smaller model: a pass of 1 image does not fit (measured)"
    device = str(training.device)
    if training.device.type == "cuda":
        device += f" ({torch.cuda.get_device_properties(training.device).total_memory / 2**30:.0f} GiB)"
    where = f"out of memory on {device} at step {training.step + 1}"
    raise KairosError(f"training.{field}: got {training.settings[field]}: {where}; allowed: {allowed}")


def largest_fitting(training: TrainingState, whole: int) -> int:
    """The images of a pass that fit: `whole`, or the largest power of two below it that does; 0: not one does."""
    training.optimizer.zero_grad(set_to_none=True)
    _free()
    # what the optimiser keeps from its first step on: as much again, twice for Adam
    held = [] if training.optimizer.state else [torch.empty_like(p) for p in training.parameters for _ in range(2)]
    for size in (whole, *(2**n for n in reversed(range((whole - 1).bit_length())))):
        try:
            _pass(training, size)
        except torch.OutOfMemoryError:
            training.optimizer.zero_grad(set_to_none=True)
        else:
            del held
            return size
        _free()
    return 0


def _pass(training: TrainingState, size: int) -> None:
    """Two forward and backward passes of `size` images: the second adds to gradients that are there."""
    batch = next(training.batches.steps(training.step, training.step + 1))
    x0, conditions = batch.x0[:size], {name: values[:size] for name, values in batch.conditions.items()}
    t = training.process.times(torch.full((size,), 0.5, dtype=torch.float64)).to(training.device)
    samples = LossBatch(training.seed, training.step, range(size))
    for _ in range(2):
        _, terms = predicted(training, training.model, samples, x0, x0, t, conditions)
        torch.stack([*terms.values()]).sum().backward()


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where no GPU is in use
