"""Lengths of training runs in steps, images or epochs."""

import math
import re
from fractions import Fraction

_LENGTH = re.compile(r"\s*(\d+(?:\.\d*)?)\s*([kM]?)\s*(steps|images|epochs)\s*")  # such as 2.5M images
_FACTORS = {"": 1, "k": 1_000, "M": 1_000_000}  # by the letter before the unit
_FIELD = "training.milestones"  # with which all error messages begin


def length_in_steps(length: int | str, batch_size: int, train_images: int | None) -> int:
    """Return the number of steps of a length in steps, images or epochs, rounded up; it is at least 1.

    Args:
        length: number of steps, or a text such as ``500 steps``, ``64k images`` or ``10 epochs``.
        batch_size: images per step.
        train_images: number of training images; None: unknown.

    Raises:
        ValueError: `length` is not a length or not positive, or it is in epochs and `train_images` is None.
    """
    # exact fractions: 16 epochs of 1,437 images in batches of 48 are 479 steps, which floats miss
    if isinstance(length, int):
        amount, unit = Fraction(length), "steps"
    else:
        amount, unit = _parse_length(length)
    if unit == "steps":
        steps = amount
    elif unit == "images":
        steps = amount / batch_size
    elif train_images is None:
        raise ValueError(f"{_FIELD}: {length!r} needs dataset.train_images, the number of training images")
    else:
        steps = amount * train_images / batch_size
    if steps <= 0:
        raise ValueError(f"{_FIELD}: got {length!r}, allowed: more than 0 steps (step 0 is always evaluated)")
    return math.ceil(steps)


def _parse_length(text: str) -> tuple[Fraction, str]:
    """Return amount and unit of a length given as text: ``64k images`` gives 64,000 and ``images``.

    Raises:
        ValueError: the text is not a length.
    """
    match = _LENGTH.fullmatch(text)
    if not match:
        allowed = "a number of steps, or text like '500 steps', '64k images', '2M images', '10 epochs'"
        raise ValueError(f"{_FIELD}: got {text!r}, allowed: {allowed}")
    number, factor, unit = match.groups()
    return Fraction(number) * _FACTORS[factor], unit


def log_interval(log_every: int | None, device: str) -> int:
    """Return the number of steps between two lines of metrics.jsonl: `log_every`, or by default 1 (CPU) or 10 (GPU).

    Every `device` type other than ``cpu`` is treated as a GPU.
    """
    if log_every is not None:
        return log_every
    return 1 if device == "cpu" else 10  # a step that logs synchronises with the device
