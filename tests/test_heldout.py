"""Held-out images: none, a share of the data set, or a separate folder, file or split."""

import re
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kairos.autoencoders.codec import load_codec
from kairos.autoencoders.encode import encode
from kairos.autoencoders.settings import AutoencoderConfig
from kairos.autoencoders.train_or_load import make_autoencoder
from kairos.config import validate
from kairos.costs.dataset_size import find_dataset_size
from kairos.costs.preflight import find_warnings
from kairos.data.dataset import open_dataset
from kairos.data.latents import open_latents
from kairos.data.prepare import prepare
from kairos.data.sources import OPENERS, check_heldout, open_source
from kairos.downloads import list_requirements
from kairos.evaluation import classifier
from kairos.evaluation.settings import ClassifierOptions
from kairos.report.collect import load_real_images
from kairos.validity import Validity, expand_path, list_outside_paths
from kairos.workflow.layout import Layout
from kairos_timesteps.errors import ConfigError, KairosError
from test_data import config, folder_config, write_images
from test_tables import hub_cache, write_parquet  # noqa: F401  (a fixture)

CPU = torch.device("cpu")


def make_layout(**dataset):
    return Layout(validate({"experiment": "e", "dataset": dataset, "methods": {"u": {}}}), Path("unused"))


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"heldout": 1}, r"dataset\.heldout: got 1\.0, allowed: a share from 0, below 1$"),
        (
            {"heldout": -0.1, "source": "folder", "path": "in"},
            r"got -0\.1, allowed: .*or where the images to hold out are",
        ),
        ({"heldout": float("nan")}, r"dataset\.heldout"),
        ({"heldout": "test"}, r"dataset\.heldout: got 'test', allowed: a share from 0, below 1$"),
        ({"heldout": None}, r"dataset\.heldout: got None"),
        ({"heldout": "1e-1", "source": "folder", "path": "in"}, r"dataset\.heldout: got '1e-1'.*write 1\.0e-1"),
        ({"heldout": "0.1", "source": "folder", "path": "in"}, r"dataset\.heldout: got '0\.1'.*in YAML this is text"),
        ({"heldout": "in", "source": "folder", "path": "in"}, r"dataset\.heldout: got 'in'"),
        ({"heldout": "train", "source": "hub", "path": "a/b"}, r"dataset\.heldout: got 'train'"),
        ({"heldout": "l", "files": "l", "source": "zip", "path": "x.zip"}, r"dataset\.heldout: got 'l'"),
        ({"source": "hub", "path": "/data/x"}, r"dataset\.path: got '/data/x'"),
    ],
    ids=str,
)
def test_an_invalid_heldout_setting_is_rejected(dataset, message):
    with pytest.raises(ConfigError, match=message):
        make_layout(**dataset)


def test_an_experiment_without_heldout_images_passes_every_stage(tmp_path, capsys):
    """Run every stage that reads held-out images if there are any."""
    record = prepare(config(color="grey", limit=120, heldout=0), tmp_path / "dataset")
    dataset = open_dataset(tmp_path / "dataset")
    assert (record["train_count"], record["heldout_count"]) == (len(dataset.train), len(dataset.heldout)) == (120, 0)
    assert dataset.heldout.dtype == np.int64
    settings = AutoencoderConfig(kind="train", channels=[8, 8], steps=3, batch_size=8)
    autoencoder = make_autoencoder(settings, dataset, tmp_path / "autoencoder", CPU)
    assert autoencoder["psnr"] > 0 and autoencoder["psnr_of"] == "training images"
    encode(dataset, load_codec(tmp_path / "autoencoder"), tmp_path / "latents", False, 32)
    assert len(open_latents(tmp_path / "latents").heldout) == 0
    (tmp_path / "extractor").mkdir()
    options = ClassifierOptions(features=8, channels=4, steps=3, batch_size=8)
    assert classifier.train(options, dataset, tmp_path / "extractor")["accuracy"] is None
    name, images = load_real_images(tmp_path, 9)
    assert name == "real, trained on" and np.array_equal(images, dataset.images[dataset.train[:9]])


def test_heldout_images_are_used_for_psnr_and_shown_in_the_report(tmp_path):
    prepare(config(color="grey", limit=40), tmp_path / "dataset")
    dataset = open_dataset(tmp_path / "dataset")
    settings = AutoencoderConfig(kind="train", channels=[8, 8], steps=2, batch_size=8)
    assert make_autoencoder(settings, dataset, tmp_path / "autoencoder", CPU)["psnr_of"] == "held-out images"
    name, images = load_real_images(tmp_path, 9)
    assert name == "real, held out" and np.array_equal(images, dataset.images[dataset.heldout])


def test_conditions_of_a_source_are_kept_with_heldout_images_from_a_separate_folder(tmp_path, monkeypatch):
    """No source of kairos has conditions other than the class; sources of other projects may have some."""
    write_images(tmp_path / "train", 6)
    write_images(tmp_path / "test", 3)
    open_folder, kinds = OPENERS["folder"], {"train": "sequence", "test": "sequence"}

    def open_with_condition(settings):
        source, name = open_folder(settings), Path(settings.path).name
        values = np.arange(source.count * 2).reshape(-1, 2) + (100 if name == "test" else 0)
        return replace(source, other_conditions={"tokens": ({"kind": kinds[name]}, values)})

    monkeypatch.setitem(OPENERS, "folder", open_with_condition)
    settings = folder_config(tmp_path / "train", heldout=str(tmp_path / "test"))
    description, values = open_source(settings).conditions["tokens"]
    assert description == {"kind": "sequence"}
    assert values.tolist() == [*np.arange(12).reshape(-1, 2).tolist(), *(np.arange(6).reshape(-1, 2) + 100).tolist()]
    kinds["test"] = "field"
    with pytest.raises(ConfigError, match=r"dataset\.heldout: .*'field'.*allowed: .*'sequence'"):
        open_source(settings)


def test_heldout_images_from_a_separate_folder(tmp_path):
    for split, classes in (("train", {"a": 6, "b": 6}), ("test", {"b": 2, "a": 3})):
        for name, count in classes.items():
            write_images(tmp_path / split / name, count)
    settings = folder_config(tmp_path / "train", heldout=str(tmp_path / "test"))
    prepare(settings, tmp_path / "out")
    dataset = open_dataset(tmp_path / "out")
    assert dataset.train.tolist() == list(range(12)) and dataset.heldout.tolist() == list(range(12, 17))
    assert dataset.labels.tolist() == [0] * 6 + [1] * 6 + [0] * 3 + [1] * 2
    assert np.array_equal(dataset.images[12], dataset.images[0])
    limited = prepare(settings.model_copy(update={"limit": 4, "train_images": 4}), tmp_path / "out")
    assert (limited["train_count"], limited["heldout_count"]) == (4, 5)
    for file in (tmp_path / "train").rglob("*.png"):
        file.write_bytes(b"")
    with pytest.raises(KairosError, match=r"5 usable image.*5 held out.*one to train on"):
        prepare(settings.model_copy(update={"broken": "skip"}), tmp_path / "out")


@pytest.mark.parametrize(
    ("dataset", "file"),
    [
        ({"source": "folder", "path": "in", "heldout": "in/val"}, "in/val/000.png"),
        ({"source": "folder", "path": "in/val", "heldout": "./in"}, "in/val/000.png"),
        ({"source": "folder", "path": "in", "heldout": "linked"}, "in/val/000.png"),
        ({"source": "folder", "path": "with_link", "heldout": "in/val"}, "in/val/000.png"),
        ({"source": "folder", "path": "in", "files": "a.txt", "heldout": "b.txt"}, "in/val/000.png"),
        ({"source": "zip", "path": "x.zip", "heldout": "./x.zip"}, "x.zip/000.png"),
        ({"source": "parquet", "path": "tables/*.parquet", "heldout": "tables/test.parquet"}, "tables/test.parquet"),
        ({"source": "parquet", "path": "tables", "heldout": "./tables"}, "tables/test.parquet"),
    ],
    ids=str,
)
def test_heldout_images_that_are_trained_on_are_rejected(tmp_path, monkeypatch, hub_cache, dataset, file):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    write_images(Path("in/train"), 3)
    write_images(Path("in/val"), 2)
    Path("linked").symlink_to("in/val")
    write_images(Path("with_link/train"), 2)
    Path("with_link/val").symlink_to("../in/val")
    Path("a.txt").write_text("train/000.png\nval/000.png\n")
    Path("b.txt").write_text("val/000\nval/001\n")
    with zipfile.ZipFile("x.zip", "w") as archive:
        archive.write("in/val/000.png", "000.png")
    Path("tables").mkdir()
    for name in ("train", "test"):
        write_parquet(Path(f"tables/{name}.parquet"), 2)
    settings = config(**dataset)
    message = rf"dataset\.heldout: got '{re.escape(dataset['heldout'])}'.*{re.escape(str(tmp_path / file))}"
    with pytest.raises(ConfigError, match=message):
        open_source(settings)
    with pytest.raises(ConfigError, match=message):
        check_heldout(settings)
    experiment = validate({"experiment": "e", "dataset": dataset, "methods": {"u": {}}})
    with pytest.raises(ConfigError, match=message):
        list(find_warnings(experiment, profile=None, gpu_memory=None, steps_per_second=None))


@pytest.mark.parametrize(
    ("source", "path", "heldout"), [("folder", "a", "ab"), ("folder", "a", "gone"), ("parquet", "a/x.parquet", "gone")]
)
def test_separate_or_missing_heldout_images_pass_the_check(tmp_path, monkeypatch, source, path, heldout):
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "ab"):
        write_images(Path(folder), 2)
    Path("a/x.parquet").touch()
    dataset = {"source": source, "path": path, "heldout": heldout}
    experiment = validate({"experiment": "e", "dataset": dataset, "methods": {"u": {}}})
    messages = find_warnings(experiment, profile=None, gpu_memory=None, steps_per_second=None)
    assert all(message.startswith("values: ") for message in messages)


def test_heldout_images_from_separate_parquet_files(tmp_path, hub_cache):  # noqa: F811
    write_parquet(tmp_path / "train-0.parquet", 4)
    write_parquet(tmp_path / "train-1.parquet", 3)
    write_parquet(tmp_path / "test-0.parquet", 5, broken=1)
    settings = config(
        source="parquet",
        path=str(tmp_path / "train-*.parquet"),
        heldout=str(tmp_path / "test-*.parquet"),
        broken="skip",
    )
    record = prepare(settings, tmp_path / "out")
    dataset = open_dataset(tmp_path / "out")
    assert record["skipped"] == ["row 1 of test-0.parquet"]
    assert dataset.labels.tolist() == [0, 1, 0, 1, 0, 1, 0, 0, 0, 1, 0]
    assert (len(dataset.train), dataset.heldout.tolist()) == (7, [7, 8, 9, 10])


def test_the_workflow_depends_on_separate_heldout_files(tmp_path):
    for name in ("train-0", "train-1", "test-0"):
        (tmp_path / f"{name}.parquet").touch()
    paths = {"path": str(tmp_path / "train-*.parquet"), "heldout": str(tmp_path / "test-*.parquet")}
    parquet = make_layout(source="parquet", **paths)
    paths_of_files = [file for path in list_outside_paths(parquet.experiment, "prepare") for file in expand_path(path)]
    names = [file.rsplit("/")[-1] for file in paths_of_files]
    assert names == ["train-0.parquet", "train-1.parquet", "test-0.parquet"]
    assert [need.name.rsplit("/")[-1] for need in list_requirements(parquet.experiment)[:2]] == [
        "train-*.parquet",
        "test-*.parquet",
    ]
    assert all(need.find() for need in list_requirements(parquet.experiment)[:2])
    write_images(tmp_path / "in", 2)
    write_images(tmp_path / "held", 2)
    with_heldout = make_layout(source="folder", path=str(tmp_path / "in"), heldout=str(tmp_path / "held"))
    without_heldout = make_layout(source="folder", path=str(tmp_path / "in"))

    def hash_files(layout: Layout) -> str:
        return Validity(layout.experiment, tmp_path, reads_outside=True).describe_stage("prepare", None)["outside"]

    hashes = [hash_files(with_heldout)]
    before_without_heldout = hash_files(without_heldout)
    write_images(tmp_path / "held", 3)
    hashes.append(hash_files(with_heldout))
    write_images(tmp_path / "elsewhere", 1)
    (tmp_path / "held/linked").symlink_to(tmp_path / "elsewhere")
    hashes.append(hash_files(with_heldout))
    write_images(tmp_path / "elsewhere", 2)
    hashes.append(hash_files(with_heldout))
    assert len(set(hashes)) == 4
    assert hash_files(without_heldout) == before_without_heldout


def test_both_splits_of_a_hub_data_set_are_fetched():
    requirements = list_requirements(make_layout(source="hub", path="someone/images", heldout="test").experiment)
    assert [need.name for need in requirements[:2]] == [
        "data set someone/images (train)",
        "data set someone/images (test)",
    ]


@pytest.mark.parametrize(
    ("dataset", "images", "train"),
    [
        ({"heldout": 0}, 1797, 1797),
        ({"heldout": 0.25, "limit": 100}, 100, 75),
        ({"source": "folder", "path": "in", "resolution": 8, "train_images": 90}, 100, 90),
        ({"source": "folder", "path": "in", "resolution": 8, "train_images": 90, "heldout": 0}, 90, 90),
        ({"source": "folder", "path": "in", "resolution": 8, "train_images": 90, "heldout": "test"}, None, 90),
    ],
)
def test_costs_count_all_images_and_training_images(tmp_path, dataset, images, train):
    size = find_dataset_size(make_layout(**dataset).experiment, tmp_path, None, None)
    assert (size.image_count, size.train_count) == (images, train)
