"""How images are compared: what the reference fixes for every evaluation that uses it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LossSettings:
    """The validation loss: number of held-out images, of strata between the end points, and the seed."""

    images: int
    strata: int
    seed: int
