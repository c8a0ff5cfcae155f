"""Advice for a training run that does not fit into device memory: the largest micro-batch that fits, by measurement."""

import gc
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from kairos.errors import TemporaryError
from kairos.losses.terms import SampleCoordinates
from kairos.training.loop import predict_and_compute_losses
from kairos.training.state import TrainingState


def explain_out_of_memory(training: TrainingState, steps: Iterator[Any]) -> Iterator[Any]:
    """Yield the items of `steps`, and replace an out-of-memory error by one that reports which micro-batch fits.

    The size is measured after the error by trial passes. Other errors are not changed.

    Args:
        training: state that the steps train.
        steps: results of the steps, from `kairos.training.loop.train_steps`.

    Raises:
        TemporaryError: a step does not fit into the device's memory. The message contains a size that fits, or that not
            even one image fits. Or it reports that a pass alone fits, so that something else takes the memory.
    """
    # After an error, the code below the block runs. An except clause would keep the traceback, and with it the tensors
    # of the failed step, alive.
    with suppress(torch.OutOfMemoryError):
        yield from steps
        return
    largest_pass = max(micro_batch.samples.stop - micro_batch.samples.start for micro_batch in training.micro_batches)
    fitting_size = find_fitting_batch(training, largest_pass)  # images; 0: not even one fits
    if fitting_size == largest_pass:
        allowed = (
            f"less memory for everything else, because a pass of {largest_pass} images alone fits (measured): another "
            "sampler, a smaller model, or no other process on the device"
        )
    elif fitting_size:
        allowed = f"training.microbatch: {fitting_size} keeps the batch and fits (measured)"
    else:
        allowed = "a smaller model: with the optimizer's moments not even a pass of 1 image fits (measured)"
    field = "batch_size" if training.settings.microbatch is None else "microbatch"
    problem = f"out of memory on {_describe_device(training.device)} at step {training.step + 1}"
    raise TemporaryError(f"training.{field}: got {getattr(training.settings, field)}: {problem}; allowed: {allowed}")


def _describe_device(device: torch.device) -> str:
    """Return the name of a device, for a GPU with the size of its memory, such as ``cuda:0 (80 GiB)``."""
    if device.type != "cuda":
        return str(device)
    gibibytes = torch.cuda.get_device_properties(device).total_memory / 2**30
    return f"{device} ({gibibytes:.0f} GiB)"


def find_fitting_batch(training: TrainingState, largest: int) -> int:
    """Return a number of images whose forward and backward pass fits into memory; 0 if not even one image fits.

    Tries `largest`, at most this rank's slice of the batch, then falling powers of two below it, and returns the first
    size that fits. If the optimizer has no moments yet, memory for them is reserved meanwhile; the result is 0 if they
    do not fit. Gradients of the parameters are replaced; weights and optimizer are unchanged.
    """
    training.optimizer.zero_grad(set_to_none=True)
    _free_memory()
    reserved: list[torch.Tensor] = []
    if not training.optimizer.state:
        # the optimizer allocates its moments in the first step: Adam keeps two values per parameter
        try:
            reserved = [torch.empty_like(parameter) for parameter in training.parameters for _ in range(2)]
        except torch.OutOfMemoryError:
            return 0
    # all exponents with 2**exponent < largest: largest - 1 has b bits, so it is at least 2**(b - 1) and below 2**b
    exponents = range((largest - 1).bit_length())
    powers_of_two: list[int] = [2**exponent for exponent in reversed(exponents)]
    for size in (largest, *powers_of_two):
        try:
            _try_passes(training, size)
        except torch.OutOfMemoryError:
            training.optimizer.zero_grad(set_to_none=True)
        else:
            del reserved  # until here it takes the memory that the optimizer will need
            return size
        _free_memory()
    return 0


def _try_passes(training: TrainingState, size: int) -> None:
    """Run two forward and backward passes of `size` images; the second one adds to existing gradients.

    Raises:
        OutOfMemoryError: the passes do not fit into the device's memory.
    """
    batch = next(training.batches.steps(training.step, training.step + 1))
    x0 = batch.x0[:size]
    conditions = {name: values[:size] for name, values in batch.conditions.items()}
    u = torch.full((size,), 0.5, dtype=torch.float64)  # any value in [0, 1): all times need equal memory
    t = training.process.times(u).to(training.device)
    samples = SampleCoordinates(training.seed, training.step, range(size))
    # images also serve as noise, and losses have no weights, because only the memory of the passes counts;
    # the backward pass of `ddp_network` would wait for other ranks
    for _ in range(2):
        _, terms = predict_and_compute_losses(
            training, training.model, samples, x0=x0, noise=x0, t=t, conditions=conditions
        )
        torch.stack(list(terms.values())).sum().backward()


def _free_memory() -> None:
    """Delete unreachable tensors, and return cached memory that torch does not use to the device."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing if no GPU is in use
