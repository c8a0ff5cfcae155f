"""Number of kernels that a training step starts on a GPU, besides those of the network.

The GPU is simulated. `benchmarks/launches.py` prints the table of all kernels by function.
"""

import pytest
from launches import Data, count, origins

MOST = 0.05  # other kernels, as a share of the network's


@pytest.mark.long
@pytest.mark.parametrize("name", ["DiT-S/2", "CIFAR-10 U-Net"])
def test_a_step_starts_few_kernels_besides_those_of_the_network(name):
    with Data() as data:
        counted = count(name, data)
    summary = counted.summary()
    assert counted.network > 500  # each of about 150 or more parameters takes several kernels
    assert counted.ordinary["randomness._fused_words", "kernel of Triton"] > 0
    assert summary["share"] <= MOST and summary["mean_share"] <= MOST, origins(counted.ordinary)
