"""Lengths of training runs in steps, images or epochs."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kairos.training.lengths import length_in_steps


@pytest.mark.parametrize(
    ("length", "steps"),
    [(500, 500), ("500 steps", 500), ("64k images", 1000), ("2M images", 31250), ("10 epochs", 157)],
)
def test_lengths_in_steps_images_and_epochs(length, steps):
    assert length_in_steps(length, batch_size=64, train_images=1000) == steps


def test_epochs_are_counted_without_rounding_errors():
    assert length_in_steps("16 epochs", batch_size=48, train_images=1437) == 479


@settings(deadline=None, derandomize=True, database=None)
@given(
    amount=st.decimals(min_value=0, max_value=5000, places=3, allow_nan=False).filter(bool),
    factor=st.sampled_from(["", "k", "M"]),
    unit=st.sampled_from(["steps", "images", "epochs"]),
    batch_size=st.integers(1, 4096),
    train_images=st.integers(1, 2_000_000),
)
def test_lengths_are_the_exact_quotient_rounded_up(amount, factor, unit, batch_size, train_images):
    images_per_unit = {"steps": batch_size, "images": 1, "epochs": train_images}[unit]
    multiplier = {"": 1, "k": 1000, "M": 1_000_000}[factor]
    exact = Fraction(amount) * multiplier * images_per_unit / batch_size
    assert length_in_steps(f"{amount:f}{factor} {unit}", batch_size, train_images) == math.ceil(exact)


@pytest.mark.parametrize("length", ["ten steps", 0, "-3 epochs", "5 epoch", "0 images"])
def test_invalid_lengths_are_rejected(length):
    with pytest.raises(ValueError, match=r"training.milestones: .*allowed"):
        length_in_steps(length, 64, 1000)
