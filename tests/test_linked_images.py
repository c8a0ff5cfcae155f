"""Linked images have the latents of copied images, and every change since `kairos prepare` is reported."""

import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from kairos.autoencoders.codec import load_codec
from kairos.autoencoders.encode import encode
from kairos.autoencoders.settings import AutoencoderConfig
from kairos.autoencoders.train_or_load import make_autoencoder
from kairos.cli import main
from kairos.config import validate
from kairos.data.dataset import open_dataset
from kairos.data.decode import read_image
from kairos.data.latents import open_latents
from kairos.data.linked_images import TEMPORARY_COPY, delete_temporary_copy
from kairos.data.prepare import prepare
from kairos.data.sources import open_source
from kairos.files import DamagedError, check_files, sha256_file
from kairos.staging import staged
from kairos_timesteps.errors import ConfigError, KairosError
from test_data import folder_config, random_image, write_images
from test_tables import config, hub_cache, write_parquet  # noqa: F401  (a fixture)

CPU = torch.device("cpu")


@pytest.fixture
def pictures(tmp_path):
    """Folder of 12 pictures in two classes, one of them broken."""
    write_images(tmp_path / "in" / "a", 7)
    write_images(tmp_path / "in" / "b", 5)
    (tmp_path / "in" / "a" / "002.png").write_bytes(b"no image")
    return tmp_path / "in"


def prepare_both(settings, tmp_path):
    """Prepare a data set with copied and with linked images, and open both."""
    for store in ("copy", "refer"):
        prepare(settings.model_copy(update={"store": store}), tmp_path / store)
    return open_dataset(tmp_path / "copy"), open_dataset(tmp_path / "refer")


def prepare_without_copy(folder, out):
    """Prepare a data set of linked images whose temporary copy is gone, as after stage reference."""
    prepare(folder_config(folder, store="refer"), out)
    delete_temporary_copy(out)


def check_equal(copied, linked, tmp_path):
    assert not (linked.folder / "images.npy").exists() and not (copied.folder / "names.npy").exists()
    for index in (slice(None), [3, 0, 3], 2, np.array([], np.int64)):
        assert np.array_equal(copied.images[index], linked.images[index])
    assert copied.images.shape == linked.images.shape and len(copied.images) == len(linked.images)
    different = {"content_sha256", "files", "refers"}
    equal_fields = []
    for dataset in (copied, linked):
        equal_fields.append({key: value for key, value in dataset.record.items() if key not in different})
    assert equal_fields[0] == equal_fields[1]
    check_files(linked.folder, linked.record["files"], "")
    make_autoencoder(
        AutoencoderConfig(kind="train", channels=[8, 8], steps=3, batch_size=4), copied, tmp_path / "ae", CPU
    )
    for dataset in (copied, linked):
        encode(dataset, load_codec(tmp_path / "ae"), tmp_path / f"latents-{dataset.folder.name}", True, 4)
    for name in ("mean", "logvar", "mean_flipped", "logvar_flipped"):
        copy, refer = (sha256_file(tmp_path / f"latents-{kind}" / f"{name}.npy") for kind in ("copy", "refer"))
        assert copy == refer


def test_a_linked_folder_equals_its_copy(pictures, tmp_path):
    copied, linked = prepare_both(folder_config(pictures, broken="skip", heldout=0.3, flips=True), tmp_path)
    assert len(linked.images) == 11 and linked.record["skipped"] == ["a/002.png"]
    check_equal(copied, linked, tmp_path)


def test_linked_parquet_files_with_a_limit_and_a_heldout_file_equal_their_copy(tmp_path, hub_cache):  # noqa: F811
    write_parquet(tmp_path / "train.parquet", 20)
    write_parquet(tmp_path / "test.parquet", 5)
    paths = {"path": str(tmp_path / "train.parquet"), "heldout": str(tmp_path / "test.parquet")}
    copied, linked = prepare_both(config(source="parquet", limit=9, **paths), tmp_path)
    assert (len(copied.train), len(copied.heldout)) == (9, 5)
    check_equal(copied, linked, tmp_path)


def test_an_autoencoder_trained_on_linked_images_has_equal_weights(tmp_path):
    write_images(tmp_path / "in", 9)
    copied, linked = prepare_both(folder_config(tmp_path / "in"), tmp_path)
    settings = AutoencoderConfig(kind="train", channels=[8, 8], steps=3, batch_size=4)
    one, other = (make_autoencoder(settings, dataset, tmp_path / "ae", CPU) for dataset in (copied, linked))
    assert one == other


def test_the_content_hash_depends_on_the_pixels_alone(tmp_path):
    write_images(tmp_path / "in", 6)
    settings = folder_config(tmp_path / "in", store="refer")
    before = prepare(settings, tmp_path / "out")["content_sha256"]
    shutil.copytree(tmp_path / "in", tmp_path / "moved")
    assert prepare(folder_config(tmp_path / "moved", store="refer"), tmp_path / "out")["content_sha256"] == before
    random_image(77).save(tmp_path / "in" / "004.png")
    assert prepare(settings, tmp_path / "out")["content_sha256"] != before


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: random_image(99).save(folder / "003.png"), r"003\.png, which has changed since kairos prepare"),
        (lambda folder: random_image(3, 16, 16).save(folder / "003.png"), r"003\.png, which has changed"),
        (lambda folder: truncate(folder / "003.png"), r"003\.png, which cannot be read any more"),
        (lambda folder: (folder / "003.png").unlink(), r"was 003\.png.*is 004\.png"),
        (lambda folder: (folder / "009.png").unlink(), r"was 009\.png.*is nothing"),
        (lambda folder: random_image(9).save(folder / "0025.png"), r"was 003\.png.*is 0025\.png"),
        (lambda folder: folder.rename(folder.parent / "away"), r"cannot be read from here.*dataset\.store: copy"),
    ],
    ids=["pixels", "size", "truncated", "gone", "last one gone", "one more", "all gone"],
)
def test_changed_and_missing_images_are_reported(tmp_path, change, message):
    folder = write_images(tmp_path / "in", 10)
    prepare_without_copy(folder, tmp_path / "out")
    change(folder)
    images = open_dataset(tmp_path / "out").images  # opening alone reads no image
    with pytest.raises(KairosError, match=message):
        images[3]


def test_a_temporary_copy_serves_the_pixels_that_were_prepared(tmp_path):
    folder = write_images(tmp_path / "in", 10)
    prepare(folder_config(folder, store="refer"), tmp_path / "out")
    expected = np.stack([np.asarray(random_image(index)) for index in range(10)])
    shutil.rmtree(folder)
    images = open_dataset(tmp_path / "out").images
    assert np.array_equal(images[:], expected)
    delete_temporary_copy(tmp_path / "out")
    assert np.array_equal(images[[7, 2]], expected[[7, 2]])  # a job that has the copy open continues
    with pytest.raises(KairosError, match="cannot be read from here"):
        open_dataset(tmp_path / "out").images[0]


@pytest.mark.parametrize("damage", ["pixels", "short", "empty", "no array", "other shape"])
def test_a_damaged_temporary_copy_is_replaced_by_decoding(tmp_path, damage):
    folder = write_images(tmp_path / "in", 10)
    prepare(folder_config(folder, store="refer"), tmp_path / "out")
    copy = tmp_path / "out" / TEMPORARY_COPY
    content = copy.read_bytes()
    if damage == "pixels":
        copy.write_bytes(content[:-500] + bytes(500))
    elif damage == "other shape":
        np.save(tmp_path / "other.npy", np.zeros((9, 8, 8, 3), np.uint8))
        shutil.copy(tmp_path / "other.npy", copy)
    else:
        copy.write_bytes({"short": content[:-1], "empty": b"", "no array": b"text" * 100}[damage])
    images = open_dataset(tmp_path / "out").images
    assert np.array_equal(images[:], np.stack([np.asarray(random_image(index)) for index in range(10)]))
    copy.write_bytes(content[: len(content) // 2])  # while the file is open
    assert np.array_equal(images[9], np.asarray(random_image(9)))


def test_a_disk_with_little_space_gets_no_temporary_copy(tmp_path, monkeypatch):
    monkeypatch.setattr("kairos.data.linked_images.shutil.disk_usage", lambda folder: shutil._ntuple_diskusage(0, 0, 9))
    folder = write_images(tmp_path / "in", 10)
    record = prepare(folder_config(folder, store="refer"), tmp_path / "out")
    assert not (tmp_path / "out" / TEMPORARY_COPY).exists() and TEMPORARY_COPY not in record["files"]
    assert np.array_equal(open_dataset(tmp_path / "out").images[3], np.asarray(random_image(3)))


def test_the_pipeline_decodes_each_image_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_images(Path("in") / name, 20)
    prepare(folder_config(Path("in")), Path("ae-data"))
    settings = AutoencoderConfig(kind="train", channels=[8, 8], steps=3, batch_size=4)
    make_autoencoder(settings, open_dataset("ae-data"), Path("ae"), CPU)
    extractor = {"name": "classifier", "features": 4, "channels": 8, "steps": 10}
    experiment = make_experiment("pretrained", source="folder", path="in", heldout=0.3, flips=True)
    experiment["autoencoder"] |= {"path": "ae", "scaling": 1.0}
    experiment["evaluation"] = {"extractor": extractor, "num_samples": 12, "sets": 1, "reference": "all"}
    Path("e.yaml").write_text(yaml.safe_dump(experiment))

    decoded = Counter()

    def read_and_count(data):
        decoded[str(data)] += 1
        return read_image(data)

    monkeypatch.setattr("kairos.data.sources.read_image", read_and_count)
    for stage in ("prepare", "autoencoder", "encode"):
        assert main([stage, "--config", "e.yaml"]) == 0
    folders = {stage: f"results/e/{stage}" for stage in ("dataset", "autoencoder", "latents", "extractor")}
    data = ["--config", "e.yaml", "--dataset", folders["dataset"]]
    assert main(["extractor", *data, "--out", folders["extractor"]]) == 0
    inputs = [text for stage in ("autoencoder", "latents", "extractor") for text in (f"--{stage}", folders[stage])]
    assert main(["reference", *data, *inputs, "--out", "results/e/reference"]) == 0
    assert len(decoded) == 40 and set(decoded.values()) == {1}
    assert not list(Path("results").rglob(".tmp-*"))


def test_an_image_deleted_while_a_stage_reads_is_reported(tmp_path):
    folder = write_images(tmp_path / "in", 10)
    prepare_without_copy(folder, tmp_path / "out")
    images = open_dataset(tmp_path / "out").images
    assert np.array_equal(images[2], np.asarray(random_image(2)))
    (folder / "003.png").unlink()
    with pytest.raises(DamagedError, match=r"003\.png, which cannot be read any more \(.*No such file"):
        images[3]


def test_a_job_in_another_folder_reports_that_it_cannot_read_the_images(tmp_path, monkeypatch):
    write_images(tmp_path / "in", 5)
    monkeypatch.chdir(tmp_path)
    prepare_without_copy(Path("in"), tmp_path / "out")
    assert len(open_dataset("out").images[:]) == 5
    (tmp_path / "elsewhere").mkdir()
    os.chdir(tmp_path / "elsewhere")
    with pytest.raises(
        KairosError, match=r"out: refers to images that cannot be read from here \(dataset.path: got 'in'"
    ):
        open_dataset("../out").images[0]


def test_training_reads_no_image(tmp_path):
    folder = write_images(tmp_path / "in", 9)
    _, linked = prepare_both(folder_config(folder), tmp_path)
    make_autoencoder(
        AutoencoderConfig(kind="train", channels=[8, 8], steps=2, batch_size=4), linked, tmp_path / "ae", CPU
    )
    encode(linked, load_codec(tmp_path / "ae"), tmp_path / "latents", False, 4)
    shutil.rmtree(folder)
    latents = open_latents(tmp_path / "latents")
    assert latents.load_x0(latents.train).shape == (8, 4, 4, 4) and latents.load_conditions([0]) == {}


def make_experiment(kind, **dataset):
    autoencoder = {"kind": kind, **({"path": "some/where"} if kind == "pretrained" else {})}
    methods = {"uniform": {}}
    return {"experiment": "e", "dataset": dataset, "autoencoder": autoencoder, "methods": methods}


@pytest.mark.parametrize(
    ("kind", "dataset", "store"),
    [
        ("pretrained", {"source": "folder", "path": "in"}, "refer"),
        ("pretrained", {"source": "folder", "path": "in", "store": "copy"}, "copy"),
        ("pretrained", {}, "copy"),
        ("train", {"source": "hub", "path": "a/b"}, "copy"),
        ("train", {"source": "hub", "path": "a/b", "store": "refer"}, "refer"),
        ("none", {"source": "parquet", "path": "p"}, "copy"),
    ],
)
def test_store_auto_is_resolved_with_the_experiment(kind, dataset, store):
    checked = validate(make_experiment(kind, **dataset))
    assert checked.dataset.store == checked.plain()["dataset"]["store"] == store
    assert validate(checked.plain()) == checked


def test_training_on_pixels_rejects_linked_images():
    with pytest.raises(ConfigError, match=r"dataset\.store: got refer, allowed: copy or auto"):
        validate(make_experiment("none", source="folder", path="in", store="refer"))


def test_classes_of_held_out_images_agree_by_name(tmp_path):
    for folder, classes in (("train", "abc"), ("test", "cb"), ("odd", "ad"), ("flat", "")):
        for class_name in classes or [""]:
            write_images(tmp_path / folder / class_name, 2)
    opened = open_source(folder_config(tmp_path / "train", heldout=str(tmp_path / "test")))
    assert opened.labels.tolist() == [0, 0, 1, 1, 2, 2, 1, 1, 2, 2] and opened.classes == ["a", "b", "c"]
    with pytest.raises(ConfigError, match=r"dataset\.heldout.*classes \['a', 'd'\].*\['a', 'b', 'c'\].*unknown: d"):
        open_source(folder_config(tmp_path / "train", heldout=str(tmp_path / "odd")))
    with pytest.raises(ConfigError, match=r"dataset\.heldout: its images have the classes None"):
        open_source(folder_config(tmp_path / "train", heldout=str(tmp_path / "flat")))
    with pytest.raises(ConfigError, match=r"dataset\.heldout: its images have the classes \['b', 'c'\], allowed.*None"):
        open_source(folder_config(tmp_path / "flat", heldout=str(tmp_path / "test")))
    with pytest.raises(ConfigError, match=r"dataset\.heldout: got '.*nowhere', allowed: a folder that exists"):
        open_source(folder_config(tmp_path / "train", heldout=str(tmp_path / "nowhere")))


def test_latents_copied_to_a_local_disk_find_the_linked_images(tmp_path, monkeypatch):
    folder = write_images(tmp_path / "in", 9)
    _, linked = prepare_both(folder_config(folder), tmp_path)
    settings = AutoencoderConfig(kind="train", channels=[8, 8], steps=2, batch_size=4)
    make_autoencoder(settings, linked, tmp_path / "ae", CPU)
    encode(linked, load_codec(tmp_path / "ae"), tmp_path / "latents", False, 4)
    monkeypatch.setenv("KAIROS_LOCAL", str(tmp_path))
    with staged(tmp_path / "latents") as local_folder:
        copy = open_latents(local_folder)
        assert local_folder != tmp_path / "latents" and np.array_equal(copy.dataset.images[:], linked.images[:])
        assert torch.equal(copy.load_x0(copy.train), open_latents(tmp_path / "latents").load_x0(copy.train))
