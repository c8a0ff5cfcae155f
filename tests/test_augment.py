"""EDM's augmentations: flips are exact, the rest is one map of the pixels, and an image is a function of its number."""

import math

import pytest
import torch
from training_case import experiment

from kairos.data import augment
from kairos.data.augment import _mapped, _turn, augmented
from kairos.errors import ConfigError

EYE = torch.eye(2, dtype=torch.float64)


def images(count: int, height: int = 16, width: int = 16) -> torch.Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(0))


def test_without_probability_only_flips_happen_and_they_are_exact():
    x = images(64)
    found, labels = augmented(x, 0.0, 0, 5, range(64))
    flipped = labels[:, 0] == 1
    assert labels.shape == (64, augment.LABELS) and labels.dtype == torch.float32 and not labels[:, 1:].any()
    assert 20 < flipped.sum() < 44
    assert torch.equal(found[flipped], x[flipped].flip(3)) and torch.equal(found[~flipped], x[~flipped])


def test_shares_and_distributions_are_edms():
    labels = augmented(torch.zeros(20_000, 1, 4, 4), 0.12, 1, 0, range(20_000))[1]
    besides = (labels[:, 1:] != 0).any(1).float().mean()
    assert besides == pytest.approx(1 - 0.88**4 * 0.94, abs=0.012)  # 43 %
    assert (labels[:, 0] == 1).float().mean() == pytest.approx(0.5, abs=0.012)
    for column in (2, 7, 8):
        drawn = labels[:, column][labels[:, column] != 0]
        assert len(drawn) / 20_000 == pytest.approx(0.12, abs=0.01)
        assert drawn.mean() == pytest.approx(0, abs=0.08) and drawn.std() == pytest.approx(1, abs=0.06)
    turned = (labels[:, 3] + 1) ** 2 + labels[:, 4] ** 2  # cosine and sine
    assert torch.allclose(turned, torch.ones(20_000), atol=1e-6)
    stretched = labels[(labels[:, 5] != 0)]
    assert (stretched[:, 6] == 0).float().mean() == pytest.approx(0.5, abs=0.05)
    assert ((labels[:, 7] != 0) == (labels[:, 8] != 0)).all()


def test_the_map_undoes_its_filters_turns_and_shifts():
    x = images(2, 8, 12)
    still = _mapped(x, EYE.expand(2, 2, 2), torch.zeros(2, 2, dtype=torch.float64))
    assert torch.allclose(still, x, atol=1e-4)  # the wavelet's halving undoes its doubling
    shift = torch.tensor([[3.0, -2.0], [0.0, 1.0]], dtype=torch.float64)  # right and up, down
    moved = _mapped(x, EYE.expand(2, 2, 2), shift)
    assert torch.allclose(moved[0, :, :6, 3:], x[0, :, 2:, :9], atol=1e-4)
    assert torch.allclose(moved[0, :, :6, 2], x[0, :, 2:, 1], atol=1e-4)  # reflected about the first column
    assert torch.allclose(moved[1, :, 1:], x[1, :, :7], atol=1e-4)


def test_a_quarter_turn_turns():
    smooth = torch.nn.functional.interpolate(images(1, 4, 4), 16, mode="bicubic")
    quarter = torch.full((1,), math.pi / 2, dtype=torch.float64)
    turned = _mapped(smooth, _turn(quarter), torch.zeros(1, 2, dtype=torch.float64))
    off = [(turned - torch.rot90(smooth, k, (2, 3))).abs().mean() / smooth.std() for k in (1, -1)]
    assert off[0] < 0.1 and off[1] > 0.9  # a quarter of a pixel: the wavelet is not symmetric


def test_an_image_depends_on_seed_step_and_number_alone():
    x = images(12)
    whole, labels = augmented(x, 0.9, 3, 7, range(12))
    assert whole.shape == x.shape and whole.isfinite().all() and not torch.equal(whole, x)
    for part in (range(0, 5), range(5, 12)):  # two ranks
        here, told = augmented(x[part.start : part.stop], 0.9, 3, 7, part)
        assert torch.equal(here, whole[part.start : part.stop]) and torch.equal(told, labels[part.start : part.stop])
    assert not torch.equal(augmented(x, 0.9, 3, 8, range(12))[1], labels)
    assert not torch.equal(augmented(x, 0.9, 4, 7, range(12))[1], labels)
    assert augmented(x.double(), 0.9, 3, 7, range(12))[0].sub(whole).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"training__augment": 1.5}, "training.augment: got 1.5"),
        ({"training__augment": 0.1}, "training.augment: got 0.1 with model dit, allowed: null"),
        ({"training__augment": 0.1, "model": {"name": "ddpmpp", "augment": 0}}, "with model ddpmpp, allowed"),
        (
            {"training__augment": 0.1, "model": "ddpmpp", "autoencoder__kind": "train"},
            "autoencoder.kind: got train with training.augment, allowed: none",
        ),
        (
            {
                "training__augment": 0.1, "model": "ddpmpp",
                "dataset": {"source": "folder", "path": "x", "resolution": 8, "flips": True},
            },
            "dataset.flips: got true with training.augment, allowed: false",
        ),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        experiment(**changes)
