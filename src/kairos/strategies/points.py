"""Uniform points that draws are made from: random, or spread evenly so that a batch covers the process better.

Each point on its own is uniform in [0, 1), so a density drawn through its inverse stays exact; only the variance falls.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kairos.randomness import derived_seed

if TYPE_CHECKING:
    import torch

POINTS = ("random", "stratified", "sobol")


def points(kind: str, count: int, generator: "torch.Generator", step: int, seed: int) -> NDArray[np.float64]:
    """`count` numbers in [0, 1), in random order, float64.

    Args:
        kind: ``random``; ``stratified``: one in each of `count` equal cells; ``sobol``: the next points of the
            one-dimensional Sobol sequence (van der Corput, base 2), which goes on from step to step, all shifted by one
            number that depends on the seed.
        count: size of the global batch.
        generator: of this step, on the CPU.
        step: number of the step, from 0; steps before it drew as many points each.
        seed: of the training.
    """
    import torch

    if kind == "random":
        return torch.rand(count, generator=generator, dtype=torch.float64).numpy()
    if kind == "stratified":
        inside = torch.rand(count, generator=generator, dtype=torch.float64).numpy()
        even = (np.arange(count) + inside) / count
    else:
        shift = derived_seed(seed, "sobol") / 2**63
        even = (van_der_corput(np.arange(step * count, (step + 1) * count)) + shift) % 1.0
    return even[torch.randperm(count, generator=generator).numpy()]


def van_der_corput(index: NDArray[np.int64]) -> NDArray[np.float64]:
    """The bits of each index mirrored at the binary point, elementwise."""
    value, bits = np.zeros(len(index)), index.astype(np.uint64)
    for place in range(1, 53):
        value += (bits & np.uint64(1)) * 2.0**-place
        bits = bits >> np.uint64(1)
        if not bits.any():
            break
    return value
