"""Augmentations of EDM: exact flips, one warp for all others; an augmented image depends on its sample index."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kairos.data.augment import _rotation, _warp, augment_images
from kairos.data.batches import Batch, Batches
from kairos.data.latents import open_latents
from kairos.files import read_json, write_record
from kairos.models import WEIGHTS
from kairos_timesteps.errors import ConfigError
from training_case import experiment, hashes, make_latents, train

EYE = torch.eye(2, dtype=torch.float64)


def random_images(count: int, height: int = 16, width: int = 16) -> torch.Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(0))


def test_with_probability_zero_images_are_only_flipped_and_exactly():
    x = random_images(64)
    augmented, labels = augment_images(x, 0.0, 0, 5, range(64))
    flipped = labels[:, 0] == 1
    assert labels.shape == (64, 9) and labels.dtype == torch.float32 and not labels[:, 1:].any()
    assert 20 < flipped.sum() < 44
    assert torch.equal(augmented[flipped], x[flipped].flip(3)) and torch.equal(augmented[~flipped], x[~flipped])


@pytest.mark.long
def test_probabilities_and_distributions_equal_those_of_edm():
    labels = augment_images(torch.zeros(20_000, 1, 4, 4), 0.12, 1, 0, range(20_000))[1]
    not_only_flipped = (labels[:, 1:] != 0).any(1).float().mean()
    assert not_only_flipped == pytest.approx(1 - 0.88**4 * 0.94, abs=0.012)  # 43 %
    assert (labels[:, 0] == 1).float().mean() == pytest.approx(0.5, abs=0.012)
    for column in (2, 7, 8):
        nonzero = labels[:, column][labels[:, column] != 0]
        assert len(nonzero) / 20_000 == pytest.approx(0.12, abs=0.01)
        assert nonzero.mean() == pytest.approx(0, abs=0.08) and nonzero.std() == pytest.approx(1, abs=0.06)
    squared_norm = (labels[:, 3] + 1) ** 2 + labels[:, 4] ** 2  # of the cosine and sine of a rotation
    assert torch.allclose(squared_norm, torch.ones(20_000), atol=1e-6)
    stretched = labels[(labels[:, 5] != 0)]
    assert (stretched[:, 6] == 0).float().mean() == pytest.approx(0.5, abs=0.05)
    assert ((labels[:, 7] != 0) == (labels[:, 8] != 0)).all()


def test_the_warp_without_motion_keeps_images_and_translations_shift_them():
    x = random_images(2, 8, 12)
    still = _warp(x, EYE.expand(2, 2, 2), torch.zeros(2, 2, dtype=torch.float64))
    assert torch.allclose(still, x, atol=1e-4)  # downsampling by the wavelet inverts upsampling
    shift = torch.tensor([[3.0, -2.0], [0.0, 1.0]], dtype=torch.float64)  # right and up, down
    moved = _warp(x, EYE.expand(2, 2, 2), shift)
    assert torch.allclose(moved[0, :, :6, 3:], x[0, :, 2:, :9], atol=1e-4)
    assert torch.allclose(moved[0, :, :6, 2], x[0, :, 2:, 1], atol=1e-4)  # reflected about the first column
    assert torch.allclose(moved[1, :, 1:], x[1, :, :7], atol=1e-4)


def test_a_rotation_by_ninety_degrees_rotates_the_image():
    smooth = torch.nn.functional.interpolate(random_images(1, 4, 4), 16, mode="bicubic")
    angle = torch.full((1,), math.pi / 2, dtype=torch.float64)
    rotated = _warp(smooth, _rotation(angle), torch.zeros(1, 2, dtype=torch.float64))
    errors = [(rotated - torch.rot90(smooth, k, (2, 3))).abs().mean() / smooth.std() for k in (1, -1)]
    assert errors[0] < 0.1 and errors[1] > 0.9  # the asymmetric wavelet shifts by a quarter of a pixel


def test_an_augmented_image_depends_on_seed_step_and_sample_index_alone():
    x = random_images(12)
    whole, labels = augment_images(x, 0.9, 3, 7, range(12))
    assert whole.shape == x.shape and whole.isfinite().all() and not torch.equal(whole, x)
    for indices in (range(0, 5), range(5, 12)):  # two ranks
        rows = slice(indices.start, indices.stop)
        augmented, labels_of_rank = augment_images(x[rows], 0.9, 3, 7, indices)
        assert torch.equal(augmented, whole[rows]) and torch.equal(labels_of_rank, labels[rows])
    assert not torch.equal(augment_images(x, 0.9, 3, 8, range(12))[1], labels)
    assert not torch.equal(augment_images(x, 0.9, 4, 7, range(12))[1], labels)
    assert augment_images(x.double(), 0.9, 3, 7, range(12))[0].sub(whole).abs().max() < 1e-3


def make_pixels(folder: Path) -> Path:
    """Write digits as a training run in pixel space reads them; returns their folder."""
    latents = make_latents(folder)
    moments = read_json(latents / "record.json")
    pixels = {"kind": "pixels", "shape": [1, 8, 8], "scaling_factor": 1.0, "shift_factor": 0.0, "files": {}}
    write_record(latents / "record.json", {**moments, **pixels})
    return latents


def test_augmented_batches_do_not_depend_on_the_number_of_ranks_or_on_a_resume(tmp_path):
    def batches(index: range, first: int, augment: float | None = 0.5) -> list[Batch]:
        loader = Batches(open_latents(pixels), 3, 8, index, ("class",), dropout=0.5, augment=augment)
        return list(loader.steps(first, 5))

    pixels = make_pixels(tmp_path)
    whole, plain = batches(range(8), 0), batches(range(8), 0, None)
    for resumed, batch in zip(batches(range(8), 2), whole[2:], strict=True):
        assert torch.equal(resumed.x0, batch.x0) and torch.equal(
            resumed.conditions["augment"], batch.conditions["augment"]
        )
    for indices in (range(3), range(3, 8)):
        for batch_of_rank, batch in zip(batches(indices, 0), whole, strict=True):
            rows = slice(indices.start, indices.stop)
            # the rounding of convolutions depends on the number of images
            assert torch.allclose(batch_of_rank.x0, batch.x0[rows], atol=2e-6)
            for name, value in batch_of_rank.conditions.items():
                assert torch.equal(value, batch.conditions[name][rows])
    labels, classes = (torch.cat([batch.conditions[name] for batch in whole]) for name in ("augment", "class"))
    dropped = classes == 10
    assert 0 < dropped.sum() < len(dropped) and (labels[dropped] != 0).any()  # labels of augmentations are kept
    assert "augment" not in plain[0].conditions
    still = (labels == 0).all(1)
    assert still.any() and torch.equal(
        torch.cat([batch.x0 for batch in whole])[still], torch.cat([batch.x0 for batch in plain])[still]
    )


def test_an_interrupted_run_with_augmentation_equals_an_uninterrupted_one(tmp_path):
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
    train(plain, "edm", 0, tmp_path / "parts", latents, [0, 3], snapshots_only=True)
    train(plain, "edm", 0, tmp_path / "parts", latents, [0, 3, 6])
    assert hashes(tmp_path / "whole") == hashes(tmp_path / "parts")
    weights = load_file(tmp_path / "whole" / "snapshots" / "0000006" / "raw" / WEIGHTS)
    start = load_file(tmp_path / "whole" / "snapshots" / "0000000" / "raw" / WEIGHTS)
    assert not torch.equal(weights["map_augment.weight"], start["map_augment.weight"])  # the model is conditioned on it


@pytest.mark.parametrize(
    ("changes", "message"),
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
def test_settings_that_exclude_augmentation_are_rejected(changes, message):
    with pytest.raises(ConfigError, match=message):
        experiment(**changes)
