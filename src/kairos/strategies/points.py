"""Uniform points that draws are made from: random, or spread evenly so that a batch covers the process better.

Each point on its own is uniform in [0, 1), so a density drawn through its inverse stays exact; only the variance falls.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kairos.randomness import Stream

POINTS = ("random", "stratified", "sobol")


@dataclass(frozen=True)
class Place:
    """Where a global batch stands in everything random.

    Attributes:
        seed: of the training.
        step: number of the step, from 0.
        first: samples of the step that were drawn before, where gradients of several batches are accumulated.
        before: samples of the training that were drawn before; None: as many in each step as in this one.
    """

    seed: int = 0
    step: int = 0
    first: int = 0
    before: int | None = None

    def stream(self, name: str) -> Stream:
        """The random numbers of one purpose."""
        return Stream(self.seed, name)

    def index(self, samples: slice) -> range:
        """The numbers, within the step, of some samples of the global batch."""
        return range(self.first + samples.start, self.first + samples.stop)

    def uniform(self, name: str, count: int, *shape: int) -> NDArray[np.float64]:
        """A number in [0, 1) for each sample of the global batch, (count, *shape)."""
        return self.stream(name).uniform(self.step, self.index(slice(0, count)), shape).numpy()


def points(kind: str, count: int, place: Place) -> NDArray[np.float64]:
    """`count` numbers in [0, 1), in random order, float64.

    Args:
        kind: ``random``; ``stratified``: one in each of `count` equal cells; ``sobol``: the next points of the
            one-dimensional Sobol sequence (van der Corput, base 2), which goes on from batch to batch, all shifted by
            one number that depends on the seed.
        count: size of the global batch.
        place: where it stands.
    """
    if kind == "random":
        return place.uniform("timesteps", count)
    if kind == "stratified":
        even = (np.arange(count) + place.uniform("timesteps", count)) / count
    else:
        before = place.step * count if place.before is None else place.before
        shift = float(place.stream("sobol").uniform(0, range(1)))
        even = (van_der_corput(np.arange(before, before + count)) + shift) % 1.0
    return even[np.argsort(place.uniform("order of timesteps", count), kind="stable")]


def van_der_corput(index: NDArray[np.int64]) -> NDArray[np.float64]:
    """The bits of each index mirrored at the binary point, elementwise."""
    bits = np.unpackbits(index.astype(">u8").view(np.uint8).reshape(-1, 8), axis=1)  # (n, 64), the highest first
    return np.asarray(bits @ 2.0 ** -np.arange(64.0, 0.0, -1.0))
