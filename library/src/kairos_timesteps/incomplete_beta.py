"""The Beta distribution's cumulative function in numpy, so that densities need neither scipy nor torch."""

import math

import numpy as np

from kairos_timesteps.numeric import Array

_log_gamma = np.vectorize(math.lgamma, otypes=[float])


def beta_cdf(x: Array, a: Array, b: Array) -> Array:
    """Return the regularised incomplete beta function I_x(a, b), elementwise with broadcasting, float64.

    The continued fraction of Lentz (Numerical Recipes, section 6.4), on the side of the mean where it converges fast.
    The fraction x is in [0, 1], and a and b are above 0.
    """
    x, a, b = (np.asarray(value, dtype=np.float64) for value in np.broadcast_arrays(x, a, b))
    mirrored = x > (a + 1) / (a + b + 2)
    p, q, y = np.where(mirrored, b, a), np.where(mirrored, a, b), np.where(mirrored, 1 - x, x)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_front = p * np.log(y) + q * np.log1p(-y) - np.log(p) + _log_gamma(p + q) - _log_gamma(p) - _log_gamma(q)
    front = np.where((y > 0) & (y < 1), np.exp(log_front), 0.0)
    value = front / _fraction(y, p, q)
    return np.where(mirrored, 1 - value, value)


def _fraction(x: Array, a: Array, b: Array) -> Array:
    """Return the denominator of the continued fraction, to relative accuracy 1e-15."""
    tiny = 1e-300  # in place of a denominator of 0 (Lentz)
    c, d = np.ones_like(x), 1 - (a + b) * x / (a + 1)
    d = 1 / np.where(np.abs(d) < tiny, tiny, d)
    h = d
    for m in range(1, 500):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 + numerator * d
            d = 1 / np.where(np.abs(d) < tiny, tiny, d)
            c = 1 + numerator / c
            c = np.where(np.abs(c) < tiny, tiny, c)
            h = h * d * c
        if np.all(np.abs(d * c - 1) < 1e-15):
            break
    return 1 / h
