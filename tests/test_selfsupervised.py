"""The extractor for images without labels: made without them, the same each time, and in order on known damage."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kairos.data.dataset import open_dataset
from kairos.data.prepare import prepare
from kairos.data.settings import DatasetConfig
from kairos.evaluation import classifier, extractors

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
benchmark = importlib.import_module("extractors")
DATA = Path(__file__).parent.parent.parent / "shared" / "data"


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("digits")
    prepare(DatasetConfig(color="grey", heldout=0.25), folder)
    return open_dataset(folder)


def test_the_same_each_time_and_without_labels(digits, tmp_path):
    options = {"name": "selfsupervised", "features": 16, "channels": 8, "steps": 20}
    made = [
        extractors.build_extractor(options, dataset, tmp_path / str(number))
        for number, dataset in enumerate((digits, replace(digits, conditions={})))
    ]
    assert made[0]["sha256"] == made[1]["sha256"]
    assert made[0]["metric"] == "frechet_selfsupervised16" and made[0]["kind"] == "selfsupervised"
    opened = extractors.open_extractor(tmp_path / "0")
    layers = opened.compute_layers(digits.images[:5])
    assert set(layers) == {"features"} and layers["features"].shape == (5, 16)
    assert extractors.build_extractor({**options, "seed": 1}, digits, tmp_path / "2")["sha256"] != made[0]["sha256"]


@pytest.mark.long
def test_it_learns_its_task(digits, tmp_path):
    made = extractors.build_extractor({"name": "selfsupervised", "features": 32, "steps": 300}, digits, tmp_path)
    assert made["accuracy"] > 0.7


def test_turns():
    images = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(4, -1, -1, -1)
    turned = classifier.rotate_images(images, torch.arange(4))
    assert torch.equal(turned[0], images[0])
    assert np.array_equal(turned[1, 0].numpy(), np.rot90(images[0, 0].numpy()))


@pytest.mark.long
@pytest.mark.skipif(not (DATA / "fashion_mnist").is_dir(), reason="shared/data beside the project is absent")
def test_known_damage_is_in_order(monkeypatch):
    """A third of the steps, and none of the weakest blur, which takes all of them; the benchmark has the whole."""
    torch.set_num_threads(1)
    monkeypatch.setattr(benchmark, "BLUR", benchmark.BLUR[1:])
    dataset = benchmark.load(DATA, "fashion_mnist", 3000, 2400)
    extractor, _ = benchmark.trained("selfsupervised", dataset, features=32, steps=200)
    found = benchmark.measure(extractor, dataset, 400)
    assert min(found, key=found.__getitem__) == "floor", found
    assert all(benchmark.ordered(found, kind) for kind in benchmark.KINDS), found
