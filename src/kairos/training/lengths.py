"""Lengths of trainings in steps, images or epochs."""

import re

_LENGTH = re.compile(r"^\s*(\d+(?:\.\d*)?)\s*([kM]?)\s*(steps|images|epochs)\s*$")


def length_in_steps(length: int | str, batch_size: int, train_images: int | None) -> int:
    """Steps of a length given in steps, images or epochs; a part of a step counts as one.

    Raises:
        ValueError: not a length, not positive, or epochs of a data set whose size is not stated.
    """
    where = "training.milestones:"
    if isinstance(length, int):
        steps = float(length)
    else:
        match = _LENGTH.match(length)
        if not match:
            allowed = "a number of steps, or text like '500 steps', '64k images', '2M images', '10 epochs'"
            raise ValueError(f"{where} got {length!r}, allowed: {allowed}")
        amount = float(match[1]) * {"": 1, "k": 1e3, "M": 1e6}[match[2]]
        if match[3] == "epochs" and train_images is None:
            raise ValueError(f"{where} {length!r} needs dataset.train_images, the number of training images")
        steps = amount / {"steps": 1, "images": batch_size, "epochs": batch_size / (train_images or 1)}[match[3]]
    if steps <= 0:
        raise ValueError(f"{where} got {length!r}, allowed: more than 0 steps (step 0 is always evaluated)")
    return int(-(-steps // 1))
