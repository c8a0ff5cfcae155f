"""Lengths of training runs in steps, images or epochs."""

import math
import re
from fractions import Fraction

_LENGTH = re.compile(r"\s*(\d+(?:\.\d*)?)\s*([kM]?)\s*(steps|images|epochs)\s*")
_FACTORS = {"": 1, "k": 1_000, "M": 1_000_000}


def length_in_steps(length: int | str, batch_size: int, train_images: int | None) -> int:
    """Return the number of steps of a length given in steps, images or epochs; a part of a step counts as one.

    Computes with exact fractions: 16 epochs of 1,437 images in batches of 48 are 479 steps, which floats miss.

    Raises:
        ValueError: not a length, not positive, or epochs of a data set whose size is not stated.
    """
    where = "training.milestones:"
    if isinstance(length, int):
        steps = Fraction(length)
    else:
        match = _LENGTH.fullmatch(length)
        if not match:
            allowed = "a number of steps, or text like '500 steps', '64k images', '2M images', '10 epochs'"
            raise ValueError(f"{where} got {length!r}, allowed: {allowed}")
        number, factor, unit = match.groups()
        amount = Fraction(number) * _FACTORS[factor]
        if unit == "steps":
            steps = amount
        elif unit == "images":
            steps = amount / batch_size
        elif train_images is None:
            raise ValueError(f"{where} {length!r} needs dataset.train_images, the number of training images")
        else:
            steps = amount * train_images / batch_size
    if steps <= 0:
        raise ValueError(f"{where} got {length!r}, allowed: more than 0 steps (step 0 is always evaluated)")
    return math.ceil(steps)


def log_interval(log_every: int | None, device: str) -> int:
    """Return the number of steps between two lines of metrics.jsonl.

    A line reads values, for which the training waits for its device. By default a CPU, which has nothing to wait for,
    writes a line in every step, and a GPU in every 10th.

    Args:
        log_every: `training.log_every`; None: the default of the device.
        device: type of the computing device, such as ``cpu`` or ``cuda``.
    """
    if log_every is not None:
        return log_every
    return 1 if device == "cpu" else 10
