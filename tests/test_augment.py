"""EDM's augmentations: flips are exact, the rest is one map of the pixels, and an image is a function of its number."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kairos.data.augment import _rotation, _warp, augment_images
from kairos.data.batches import Batch, Batches
from kairos.data.latents import open_latents
from kairos.files import read_json, write_json
from kairos.models import WEIGHTS
from kairos.training.run import train
from kairos_timesteps.errors import ConfigError
from training_case import experiment, hashes, make_latents

EYE = torch.eye(2, dtype=torch.float64)


def images(count: int, height: int = 16, width: int = 16) -> torch.Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(0))


def test_without_probability_only_flips_happen_and_they_are_exact():
    x = images(64)
    found, labels = augment_images(x, 0.0, 0, 5, range(64))
    flipped = labels[:, 0] == 1
    assert labels.shape == (64, 9) and labels.dtype == torch.float32 and not labels[:, 1:].any()
    assert 20 < flipped.sum() < 44
    assert torch.equal(found[flipped], x[flipped].flip(3)) and torch.equal(found[~flipped], x[~flipped])


def test_shares_and_distributions_are_edms():
    labels = augment_images(torch.zeros(20_000, 1, 4, 4), 0.12, 1, 0, range(20_000))[1]
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
    still = _warp(x, EYE.expand(2, 2, 2), torch.zeros(2, 2, dtype=torch.float64))
    assert torch.allclose(still, x, atol=1e-4)  # the wavelet's halving undoes its doubling
    shift = torch.tensor([[3.0, -2.0], [0.0, 1.0]], dtype=torch.float64)  # right and up, down
    moved = _warp(x, EYE.expand(2, 2, 2), shift)
    assert torch.allclose(moved[0, :, :6, 3:], x[0, :, 2:, :9], atol=1e-4)
    assert torch.allclose(moved[0, :, :6, 2], x[0, :, 2:, 1], atol=1e-4)  # reflected about the first column
    assert torch.allclose(moved[1, :, 1:], x[1, :, :7], atol=1e-4)


def test_a_quarter_turn_turns():
    smooth = torch.nn.functional.interpolate(images(1, 4, 4), 16, mode="bicubic")
    quarter = torch.full((1,), math.pi / 2, dtype=torch.float64)
    turned = _warp(smooth, _rotation(quarter), torch.zeros(1, 2, dtype=torch.float64))
    off = [(turned - torch.rot90(smooth, k, (2, 3))).abs().mean() / smooth.std() for k in (1, -1)]
    assert off[0] < 0.1 and off[1] > 0.9  # a quarter of a pixel: the wavelet is not symmetric


def test_an_image_depends_on_seed_step_and_number_alone():
    x = images(12)
    whole, labels = augment_images(x, 0.9, 3, 7, range(12))
    assert whole.shape == x.shape and whole.isfinite().all() and not torch.equal(whole, x)
    for part in (range(0, 5), range(5, 12)):  # two ranks
        here, told = augment_images(x[part.start : part.stop], 0.9, 3, 7, part)
        assert torch.equal(here, whole[part.start : part.stop]) and torch.equal(told, labels[part.start : part.stop])
    assert not torch.equal(augment_images(x, 0.9, 3, 8, range(12))[1], labels)
    assert not torch.equal(augment_images(x, 0.9, 4, 7, range(12))[1], labels)
    assert augment_images(x.double(), 0.9, 3, 7, range(12))[0].sub(whole).abs().max() < 1e-3


def make_pixels(folder: Path) -> Path:
    """The case's digits as a training in pixel space reads them."""
    latents = make_latents(folder)
    moments = read_json(latents / "manifest.json")
    pixels = {"kind": "pixels", "shape": [1, 8, 8], "scaling_factor": 1.0, "shift_factor": 0.0, "files": {}}
    write_json(latents / "manifest.json", {**moments, **pixels})
    return latents


def test_batches_are_those_of_any_number_of_ranks_and_of_a_resume(tmp_path):
    def batches(index: range, first: int, augment: float | None = 0.5) -> list[Batch]:
        made = Batches(open_latents(make), 3, 8, index, ("class",), dropout=0.5, augment=augment)
        return list(made.steps(first, 5))

    make = make_pixels(tmp_path)
    whole, plain = batches(range(8), 0), batches(range(8), 0, None)
    for resumed, batch in zip(batches(range(8), 2), whole[2:], strict=True):
        assert torch.equal(resumed.x0, batch.x0) and torch.equal(
            resumed.conditions["augment"], batch.conditions["augment"]
        )
    for part in (range(3), range(3, 8)):
        for here, batch in zip(batches(part, 0), whole, strict=True):
            rows = slice(part.start, part.stop)
            assert torch.allclose(here.x0, batch.x0[rows], atol=2e-6)  # convolutions round by the number of images
            assert all(torch.equal(value, batch.conditions[name][rows]) for name, value in here.conditions.items())
    labels, classes = (torch.cat([batch.conditions[name] for batch in whole]) for name in ("augment", "class"))
    dropped = classes == 10
    assert 0 < dropped.sum() < len(dropped) and (labels[dropped] != 0).any()  # no class, and yet the labels
    assert "augment" not in plain[0].conditions
    still = (labels == 0).all(1)
    assert still.any() and torch.equal(
        torch.cat([batch.x0 for batch in whole])[still], torch.cat([batch.x0 for batch in plain])[still]
    )


def test_a_training_with_augmentation_goes_on_as_if_it_had_not_stopped(tmp_path):
    latents = make_pixels(tmp_path)
    model = {
        "name": "ddpmpp",
        "channels": 16,
        "multipliers": [1, 1],
        "blocks": 1,
        "attention": [],
        "conditions": ["class"],
    }
    plain = experiment(
        {"edm": {"sampler": "edm_log_normal", "weighting": "edm"}}, model=model, training__augment=0.5,
        diffusion__process={"name": "edm", "time_scale": 1.0}, training__milestones=[3, 6],
        training__checkpoint_every=3, training__condition_dropout=0.1,
    )  # fmt: skip
    train(plain, "edm", 0, tmp_path / "whole", latents, [0, 3, 6])
    train(plain, "edm", 0, tmp_path / "parts", latents, [0, 3], milestones_only=True)
    train(plain, "edm", 0, tmp_path / "parts", latents, [0, 3, 6])
    assert hashes(tmp_path / "whole") == hashes(tmp_path / "parts")
    weights = load_file(tmp_path / "whole" / "milestones" / "0000006" / "raw" / WEIGHTS)
    start = load_file(tmp_path / "whole" / "milestones" / "0000000" / "raw" / WEIGHTS)
    assert not torch.equal(weights["map_augment.weight"], start["map_augment.weight"])  # it is told


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
