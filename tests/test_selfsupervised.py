"""Tests of the extractor for images without labels: it is reproducible, and ranks images by known damage."""

from dataclasses import replace
from pathlib import Path

import extractors as benchmark
import numpy as np
import pytest
import torch

from kairos.data.dataset import open_dataset
from kairos.data.prepare import prepare
from kairos.data.settings import DatasetConfig
from kairos.evaluation import classifier, extractors
from kairos.evaluation.settings import SelfsupervisedOptions

DATA = Path(__file__).parent.parent.parent / "shared" / "data"


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("digits")
    prepare(DatasetConfig(color="grey", heldout=0.25), folder)
    return open_dataset(folder)


def test_the_extractor_is_reproducible_and_needs_no_labels(digits, tmp_path):
    options = SelfsupervisedOptions(features=16, channels=8, steps=20)
    records = [
        extractors.build_extractor(options, dataset, tmp_path / str(number))
        for number, dataset in enumerate((digits, replace(digits, conditions={})))
    ]
    assert records[0]["sha256"] == records[1]["sha256"]
    assert records[0]["metric"] == "frechet_selfsupervised16" and records[0]["kind"] == "selfsupervised"
    extractor = extractors.open_extractor(tmp_path / "0")
    layers = extractor.compute_layers(digits.images[:5])
    assert set(layers) == {"features"} and layers["features"].shape == (5, 16)
    other_seed = options.model_copy(update={"seed": 1})
    assert extractors.build_extractor(other_seed, digits, tmp_path / "2")["sha256"] != records[0]["sha256"]


@pytest.mark.long
def test_the_extractor_learns_its_task(digits, tmp_path):
    record = extractors.build_extractor(SelfsupervisedOptions(features=32, steps=300), digits, tmp_path)
    assert record["accuracy"] > 0.7


def test_images_are_rotated_by_quarter_turns():
    images = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(4, -1, -1, -1)
    rotated = classifier.rotate_images(images, torch.arange(4))
    assert torch.equal(rotated[0], images[0])
    assert np.array_equal(rotated[1, 0].numpy(), np.rot90(images[0, 0].numpy()))


@pytest.mark.long
@pytest.mark.skipif(not (DATA / "fashion_mnist").is_dir(), reason="Fashion-MNIST is not in ../shared/data")
def test_distances_increase_with_known_damage(monkeypatch):
    """The extractor trains on a sixth of the benchmark's images, so the weakest blur, which needs all, is left out."""
    torch.set_num_threads(1)
    monkeypatch.setattr(benchmark, "BLUR", benchmark.BLUR[1:])
    dataset = benchmark.load(DATA, "fashion_mnist", 1500, 1600)
    extractor, _ = benchmark.trained("selfsupervised", dataset, features=32, steps=200, batch_size=64)
    distances = benchmark.measure(extractor, dataset, 260)
    assert min(distances, key=distances.__getitem__) == "floor", distances
    assert all(benchmark.ordered(distances, kind) for kind in benchmark.KINDS), distances
