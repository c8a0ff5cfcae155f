"""Random orders of images: fixed values, uniform and independent between epochs."""

import numpy as np
import scipy.stats
import torch

from kairos.data.random_order import random_order
from kairos_timesteps.randomness import Stream

NOISE = Stream(1, "noise")


def test_orders_have_fixed_values():
    assert random_order(NOISE, 12).tolist() == [0, 4, 8, 11, 6, 1, 5, 3, 7, 10, 9, 2]
    assert random_order(NOISE, 12, 5).tolist() == [11, 10, 1, 0, 6, 9, 8, 2, 4, 5, 3, 7]


def test_orders_are_random_and_independent():
    for count in (0, 1, 2, 1000, 2**16 + 3):
        assert torch.equal(random_order(NOISE, count).sort().values, torch.arange(count))
    first, second = random_order(NOISE, 10**5, 0), random_order(NOISE, 10**5, 1)
    assert (first == second).sum() < 10
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.015 and abs(np.corrcoef(first, np.arange(10**5))[0, 1]) < 0.015
    firsts = torch.bincount(torch.stack([random_order(NOISE, 6, epoch)[0] for epoch in range(3000)]), minlength=6)
    assert scipy.stats.chisquare(firsts).pvalue > 0.01
