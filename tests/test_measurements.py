"""Measurements of images: equal for every number of threads, and after a kill."""

import threading
import time

import numpy as np
import pytest
import torch

from kairos.evaluation import measurements
from kairos.evaluation.measurements import BATCH, iterate_rows, measure, measure_resumably


class Extractor:
    """An extractor of 6 features; its attributes are those that `measure` reads.

    Attributes:
        fails_at: number of the call that raises KeyboardInterrupt; 0: none.
        threads: identifiers of the threads that called it.
    """

    device = torch.device("cpu")

    def __init__(self, fails_at: int = 0):
        self.fails_at, self.calls = fails_at, 0
        self.threads: set[int] = set()
        self.weights = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))

    def compute_layers(self, images):
        self.calls += 1
        if self.calls == self.fails_at:
            raise KeyboardInterrupt
        self.threads.add(threading.get_ident())
        time.sleep(0.002)  # slow enough for threads
        features = torch.from_numpy(images).flatten(1).float() @ self.weights
        return {"features": features, "spatial": features.square()}


@pytest.fixture
def images(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return np.random.default_rng(0).integers(0, 256, (9 * BATCH + 5, 2, 2, 3), dtype=np.uint8)


NEEDS = {"moments", "spatial", "features"}
STORED = np.array([0, 3, 5 * BATCH, 9 * BATCH + 4])


def assert_equal(first, second):
    assert first.count == second.count and np.array_equal(first.features[:], second.features[:])
    for layer in ("features", "spatial"):
        for one, other in zip(first.gaussians[layer], second.gaussians[layer], strict=True):
            assert np.array_equal(one, other)


def test_measurements_do_not_depend_on_the_number_of_threads(images, monkeypatch):
    alone = measure(Extractor(), iterate_rows(images, range(len(images))), NEEDS)
    monkeypatch.setattr(measurements, "count_job_threads", lambda: 3 * torch.get_num_threads())
    extractor = Extractor()
    assert_equal(measure(extractor, iterate_rows(images, range(len(images))), NEEDS), alone)
    assert len(extractor.threads) > 1


@pytest.mark.parametrize("threads", [1, 3])
def test_interrupted_measurements_of_real_images_resume_bit_for_bit(images, threads, tmp_path, monkeypatch):
    indices = np.random.default_rng(1).permutation(len(images))
    whole = measure(Extractor(), iterate_rows(images, indices), NEEDS, STORED)
    monkeypatch.setattr(measurements, "_SAVE_SECONDS", 0.0)
    monkeypatch.setattr(measurements, "count_job_threads", lambda: threads * torch.get_num_threads())
    partial = tmp_path / "cache/x.partial.npz"
    for fails_at in (4, 5):
        with pytest.raises(KeyboardInterrupt):
            measure_resumably(Extractor(fails_at), images, indices, NEEDS, STORED, partial)
    extractor = Extractor()
    assert_equal(measure_resumably(extractor, images, indices, NEEDS, STORED, partial), whole)
    assert extractor.calls < 6, "10 batches, of which at least 5 were kept"


def test_a_damaged_file_of_partial_sums_is_ignored(images, tmp_path, capsys):
    whole = measure(Extractor(), iterate_rows(images, range(len(images))), NEEDS, STORED)
    partial = tmp_path / "x.partial.npz"
    partial.write_bytes(b"PK")
    assert_equal(measure_resumably(Extractor(), images, range(len(images)), NEEDS, STORED, partial), whole)
    assert "computed again" in capsys.readouterr().err
