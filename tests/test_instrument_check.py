"""Extractors that have learned nothing: they are replaced, or their warning is stored with the results."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from kairos.data.dataset import open_dataset
from kairos.data.prepare import prepare
from kairos.data.settings import DatasetConfig
from kairos.evaluation import extractors
from kairos.evaluation.classifier import BalancedImages
from kairos.evaluation.instrument_check import check_instrument, effective_rank
from kairos.evaluation.settings import ClassifierOptions, SelfsupervisedOptions


@pytest.fixture(scope="module")
def imbalanced(tmp_path_factory):
    """Prepared folder of digits in which 90 % of the images are of one class."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("imbalanced")
    digits = load_digits()
    for digit, count in ((8, 170), (3, 10), (5, 10)):
        for number, pixels in enumerate(digits.images[digits.target == digit][:count]):
            file = root / f"images/{digit}/{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((pixels * 15.9).astype(np.uint8)).save(file)
    dataset = DatasetConfig(source="folder", path=str(root / "images"), color="grey", heldout=0.3)
    prepare(dataset, root / "dataset")
    return open_dataset(root / "dataset")


def build(options, dataset, folder: Path) -> dict:
    return extractors.build_extractor(options, dataset, folder)


def test_a_classifier_of_imbalanced_classes_learns_more_than_the_largest_class(imbalanced, tmp_path):
    record = build(ClassifierOptions(features=16, channels=8, steps=40), imbalanced, tmp_path)
    assert record["check"]["balanced_accuracy"] > 0.6 and record["warnings"] == []


def test_an_extractor_that_learned_nothing_has_a_warning_with_its_accuracy(imbalanced, tmp_path):
    record = build(ClassifierOptions(features=16, channels=8, steps=1), imbalanced, tmp_path)
    (warning,) = record["warnings"]
    assert "balanced accuracy" in warning and "classifier16" in warning and record["kind"] == "classifier"


def test_a_fallback_replaces_a_classifier_that_learned_nothing(imbalanced, tmp_path):
    options = ClassifierOptions(features=16, channels=8, steps=1, fallback="selfsupervised")
    record = build(options, imbalanced, tmp_path)
    assert (record["kind"], record["metric"]) == ("selfsupervised", "frechet_selfsupervised16")
    assert record["replaces"]["options"] == options.plain() and record["replaces"]["warnings"]
    equal = build(SelfsupervisedOptions(features=16, channels=8, steps=1), imbalanced, tmp_path / "equal")
    assert equal["sha256"] == record["sha256"] and equal["options"] == record["options"]
    assert record["warnings"], "the fallback has not learned its task either"
    assert extractors.open_extractor(tmp_path).name == "selfsupervised16"


def test_every_class_is_drawn_equally_often():
    labels = np.array([0] * 50 + [1] * 7 + [3] * 3)  # no image of class 2
    images = np.random.default_rng(0).permutation(60)
    balanced = BalancedImages(images, labels)
    selected = balanced[np.arange(len(balanced))]
    assert np.array_equal(selected[:60], images)
    assert np.bincount(labels[selected]).tolist() == [50, 50, 0, 50]
    repetitions = np.bincount(selected)
    for label in (0, 1, 3):
        assert np.ptp(repetitions[labels == label]) <= 1
    even = np.array([4, 2, 0, 5, 3, 1])
    assert np.array_equal(BalancedImages(even, np.array([0, 0, 1, 1, 2, 2]))[np.arange(6)], even)


def test_features_and_predictions_decide_the_check():
    random = np.random.default_rng(0)
    classes = np.repeat([0, 1, 2], (900, 50, 50))
    features = random.normal(size=(1000, 8))
    numbers, warnings = check_instrument("net", features, classes, np.zeros(1000, int))
    assert numbers["accuracy"] == numbers["largest_class"] == 0.9 and len(warnings) == 1
    assert check_instrument("net", features, classes, classes)[1] == []
    one_direction = random.normal(size=(1000, 1)) * np.ones(8)
    assert effective_rank(one_direction) == pytest.approx(1) and effective_rank(features) > 7
    assert len(check_instrument("net", one_direction, classes, classes)[1]) == 1
    assert effective_rank(np.zeros((10, 8))) == 1
