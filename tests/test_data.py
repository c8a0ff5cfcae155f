"""Stage prepare: sources of images, their conversion to arrays, the split, broken images, kills."""

import multiprocessing
import os
import shutil
import signal
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from kairos.cli import main
from kairos.data.dataset import open_dataset
from kairos.data.decode import read_image, to_pixels
from kairos.data.pixels import to_uint8
from kairos.data.prepare import prepare, write_dataset
from kairos.data.settings import DatasetConfig
from kairos.data.source_statistics import inspect_images
from kairos.data.sources import open_source
from kairos_timesteps.errors import ConfigError, KairosError


def random_image(seed: int, height: int = 8, width: int = 8, channels: int = 3) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels)


def write_images(folder: Path, count: int, **size: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        random_image(index, **size).save(folder / f"{index:03d}.png")
    return folder


def config(**fields) -> DatasetConfig:
    return DatasetConfig.model_validate(fields)


def folder_config(path: Path, **fields) -> DatasetConfig:
    return config(source="folder", path=str(path), **fields)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The data set of digits in grey."""
    out = tmp_path_factory.mktemp("digits")
    prepare(config(color="grey", heldout=0.25), out)
    return open_dataset(out)


def test_digits_equal_those_of_scikit_learn(digits):
    from sklearn.datasets import load_digits

    scans = load_digits()
    assert digits.images.shape == (1797, 8, 8, 1)
    assert np.array_equal(digits.labels, scans.target)
    assert np.array_equal((digits.images[:][..., 0] * (16 / 255)).round(), scans.images)
    assert digits.images[:].max() == 255
    assert digits.record["classes"] == [str(k) for k in range(10)]
    assert digits.record["conditions"]["class"]["num_classes"] == 10


def test_the_split_is_a_partition_of_the_requested_size(digits):
    assert len(digits.heldout) == round(0.25 * 1797)
    assert sorted([*digits.train, *digits.heldout]) == list(range(1797))
    assert digits.train.dtype == np.int64


def test_channel_statistics_are_computed_over_the_training_images(digits):
    pixels = digits.images[digits.train] / 255
    assert digits.record["channel_mean"] == pytest.approx([pixels.mean()])
    assert digits.record["channel_std"] == pytest.approx([pixels.std()])


def test_images_survive_the_conversion_to_tensors_and_back(digits):
    images = digits.load_tensor([3, 1])
    assert images.shape == (2, 1, 8, 8)
    assert float(images.min()) == -1 and float(images.max()) == 1
    assert np.array_equal(to_uint8(images), digits.images[[3, 1]])


def test_the_split_depends_on_its_seed_alone(tmp_path):
    write_images(tmp_path / "in", 30)
    first, again, other = (
        prepare(folder_config(tmp_path / "in", split_seed=seed), tmp_path / name)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert first == again
    assert first["files"]["images.npy"] == other["files"]["images.npy"]
    assert first["files"]["heldout.npy"] != other["files"]["heldout.npy"]


def test_the_content_hash_depends_on_the_images_alone(tmp_path):
    write_images(tmp_path / "in", 10)
    before = prepare(folder_config(tmp_path / "in"), tmp_path / "out")["content_sha256"]
    shutil.copytree(tmp_path / "in", tmp_path / "moved")
    assert prepare(folder_config(tmp_path / "moved"), tmp_path / "out")["content_sha256"] == before
    pixels = np.asarray(Image.open(tmp_path / "in" / "004.png")).copy()
    pixels[0, 0, 0] ^= 1
    Image.fromarray(pixels).save(tmp_path / "in" / "004.png")
    assert prepare(folder_config(tmp_path / "in"), tmp_path / "out")["content_sha256"] != before


def test_a_limit_selects_a_random_subset_by_the_seed(tmp_path):
    write_images(tmp_path / "in", 40)

    def prepared_images(**fields):
        prepare(folder_config(tmp_path / "in", **fields), tmp_path / "out")
        return np.load(tmp_path / "out" / "images.npy")

    whole = prepared_images()
    subset = prepared_images(limit=12)
    other = prepared_images(limit=12, split_seed=5)
    assert len(subset) == len(other) == 12
    present = {image.tobytes() for image in whole}
    assert {image.tobytes() for image in subset} < present
    assert not np.array_equal(subset, other)


def test_each_folder_is_a_class_with_the_images_below_it(tmp_path):
    write_images(tmp_path / "in" / "cat", 3)
    write_images(tmp_path / "in" / "ant" / "deeper", 2)
    (tmp_path / "in" / "cat" / "notes.txt").write_text("not an image")
    record = prepare(folder_config(tmp_path / "in"), tmp_path / "out")
    assert record["classes"] == ["ant", "cat"]
    assert list(open_dataset(tmp_path / "out").labels) == [0, 0, 1, 1, 1]


def test_a_flat_folder_has_no_classes(tmp_path):
    write_images(tmp_path / "in", 4)
    record = prepare(folder_config(tmp_path / "in"), tmp_path / "out")
    assert record["classes"] is None and record["conditions"] == {}
    assert open_dataset(tmp_path / "out").labels is None


def test_a_missing_or_empty_folder_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match=r"dataset.path.*nowhere.*folder that exists"):
        prepare(folder_config(tmp_path / "nowhere"), tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty.*holds no image"):
        prepare(folder_config(tmp_path / "empty"), tmp_path / "out")


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def test_a_broken_image_is_reported_by_name(tmp_path):
    write_images(tmp_path / "in", 6)
    damage(tmp_path / "in" / "003.png")
    with pytest.raises(KairosError, match=r"003\.png is broken.*dataset\.broken: skip"):
        prepare(folder_config(tmp_path / "in"), tmp_path / "out")
    assert not (tmp_path / "out" / "record.json").exists()


def test_broken_images_are_skipped_and_recorded_on_request(tmp_path):
    write_images(tmp_path / "in" / "a", 4)
    write_images(tmp_path / "in" / "b", 4)
    (tmp_path / "in" / "a" / "002.png").write_bytes(b"no image")
    record = prepare(folder_config(tmp_path / "in", broken="skip"), tmp_path / "out")
    dataset = open_dataset(tmp_path / "out")
    assert record["skipped"] == ["a/002.png"]
    assert record["count"] == len(dataset.images) == 7
    assert list(dataset.labels) == [0, 0, 0, 1, 1, 1, 1]
    assert np.array_equal(dataset.images[2], np.asarray(random_image(3)))


def test_a_folder_of_broken_images_is_rejected(tmp_path):
    write_images(tmp_path / "in", 3)
    for file in (tmp_path / "in").iterdir():
        file.write_bytes(b"")
    with pytest.raises(KairosError, match="none of the 3 images is usable"):
        prepare(folder_config(tmp_path / "in", broken="skip"), tmp_path / "out")


def test_images_of_different_sizes_require_a_resolution(tmp_path):
    write_images(tmp_path / "in", 3)
    random_image(9, 16, 16).save(tmp_path / "in" / "odd.png")
    with pytest.raises(ConfigError, match=r"dataset\.resolution.*odd\.png has 16×16.*8×8"):
        prepare(folder_config(tmp_path / "in"), tmp_path / "out")
    record = prepare(folder_config(tmp_path / "in", resolution=8), tmp_path / "out")
    assert (record["count"], record["height"], record["width"]) == (4, 8, 8)


def test_padding_keeps_the_pixels_and_rejects_larger_images():
    pixels = np.random.default_rng(0).integers(0, 256, (28, 26), dtype=np.uint8)
    padded = to_pixels(Image.fromarray(pixels), "grey", "pad", 32, "x.png")
    assert padded.shape == (32, 32, 1) and np.array_equal(padded[2:30, 3:29, 0], pixels)
    assert padded.sum() == pixels.sum()
    with pytest.raises(KairosError, match=r"dataset.resolution: got 16 with crop pad, but x.png is 26×28"):
        to_pixels(Image.fromarray(pixels), "grey", "pad", 16, "x.png")


def test_the_centre_of_wide_images_is_cropped(tmp_path):
    wide = random_image(0, 8, 14)
    assert np.array_equal(to_pixels(wide, "rgb", "center", None, "it"), np.asarray(wide)[:, 3:11])
    assert to_pixels(wide, "rgb", "center", 4, "it").shape == (4, 4, 3)
    with pytest.raises(KairosError, match="it is 14×8 pixels"):
        to_pixels(wide, "rgb", "none", None, "it")


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.new("RGBA", (4, 4), (200, 0, 0, 0)), (255, 255, 255)),
        (Image.new("RGBA", (4, 4), (200, 10, 0, 255)), (200, 10, 0)),
        (Image.new("LA", (4, 4), (7, 255)), (7, 7, 7)),
        (Image.new("P", (4, 4), 0), (0, 0, 0)),
        (Image.new("CMYK", (4, 4), (0, 0, 0, 255)), (0, 0, 0)),
        (Image.new("1", (4, 4), 1), (255, 255, 255)),
        (Image.fromarray(np.full((4, 4), 65535, np.uint16)), (255, 255, 255)),
        (Image.fromarray(np.full((4, 4), 257 * 100, np.uint16)), (100, 100, 100)),
        (Image.fromarray(np.full((4, 4), 0.4, np.float32)), (102, 102, 102)),
    ],
    ids=["transparent", "opaque", "LA", "palette", "cmyk", "bilevel", "white16", "grey16", "float"],
)
def test_images_of_all_modes_are_converted(image, expected):
    assert tuple(to_pixels(image, "rgb", "center", None, "it")[0, 0]) == expected
    assert to_pixels(image, "grey", "center", None, "it").shape == (4, 4, 1)


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_rotated_as_their_exif_orientation_requires(orientation, suffix, tmp_path):
    exif, path = Image.Exif(), tmp_path / f"turned.{suffix}"
    exif[0x0112] = orientation
    random_image(1, 8, 16).save(path, exif=exif)
    with Image.open(path) as image:
        expected = ImageOps.exif_transpose(image)
    pixels = [to_pixels(image, "rgb", "center", None, "it") for image in (read_image(path), expected)]
    assert np.array_equal(*pixels)


def encode_exif(*tags: tuple[int, int, bytes]) -> bytes:
    """Return the EXIF bytes of a JPEG with tags of one value each: number, TIFF's number of the type, four bytes."""
    directory = struct.pack("<H", len(tags))
    for number, value_type, value in tags:
        directory += struct.pack("<HHI4s", number, value_type, 1, value)
    return b"Exif\0\0" + struct.pack("<2sHI", b"II", 42, 8) + directory + bytes(4)


ASCII, SHORT = 2, 3  # numbers of types in TIFF
ORIENTATION, X_RESOLUTION = 0x0112, 0x011A


@pytest.mark.parametrize(
    ("exif", "size"),
    [
        (encode_exif((ORIENTATION, SHORT, b"\6\0"), (X_RESOLUTION, ASCII, b"7")), (8, 16)),
        (encode_exif((ORIENTATION, ASCII, b"6")), (16, 8)),
        (encode_exif((ORIENTATION, SHORT, b"\11\0")), (16, 8)),  # orientation 9 does not exist
    ],
    ids=["resolution is text", "orientation is text", "orientation 9"],
)
def test_only_a_valid_exif_orientation_is_used_and_other_tags_are_ignored(exif, size, tmp_path):
    random_image(1, 8, 16).save(tmp_path / "turned.jpg", exif=exif)
    assert read_image(tmp_path / "turned.jpg").size == size
    for decode in (False, True):
        images = inspect_images(folder_config(tmp_path), decode=decode)
        assert (dict(images.sizes), images.unread) == ({size: 1}, [])


@pytest.mark.parametrize("orientation", [1, 6, 9])
def test_the_sizes_of_rotated_tiff_files_are_read_from_their_headers(orientation, tmp_path):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    random_image(1, 8, 16).save(tmp_path / "turned.tif", exif=exif)
    assert dict(inspect_images(folder_config(tmp_path)).sizes) == {read_image(tmp_path / "turned.tif").size: 1}


@pytest.mark.parametrize("error", [struct.error, TypeError, KeyError])
def test_any_error_of_the_decoder_is_reported_with_the_name_of_the_image(error, tmp_path, monkeypatch):
    write_images(tmp_path / "in", 3)

    def fail(image):
        raise error("damaged")

    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", fail)
    with pytest.raises(KairosError, match=r"000\.png is broken.*damaged"):
        prepare(folder_config(tmp_path / "in"), tmp_path / "out")
    assert len(inspect_images(folder_config(tmp_path / "in"), decode=True).unread) == 3
    monkeypatch.setattr("PIL.Image.open", fail)
    assert "000.png" in inspect_images(folder_config(tmp_path / "in")).unread[0]


def test_sixteen_bit_images_and_exif_rotations_are_read(tmp_path):
    ramp = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    grey = to_pixels(read_image(tmp_path / "ramp.png"), "grey", "center", None, "it")[:, :, 0]
    assert np.abs(grey - ramp / 257).max() <= 0.5
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    random_image(1, 8, 16).save(tmp_path / "turned.png", exif=exif)
    assert read_image(tmp_path / "turned.png").size == (8, 16)


def test_a_wrong_number_of_training_images_is_rejected(tmp_path):
    write_images(tmp_path / "in", 10)
    with pytest.raises(ConfigError, match=r"dataset\.train_images: got 8, allowed: 9"):
        prepare(folder_config(tmp_path / "in", train_images=8), tmp_path / "out")
    assert prepare(folder_config(tmp_path / "in", train_images=9), tmp_path / "out")["train_count"] == 9


def _prepare_until_killed(path: Path, out: Path) -> None:
    settings = folder_config(path)
    source = open_source(settings)

    def read(index):
        if index == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return source.read(index)

    write_dataset(settings, type(source)(source.count, read, source.name), out)


def test_a_killed_prepare_leaves_no_data_set(tmp_path):
    write_images(tmp_path / "in", 10)
    whole = prepare(folder_config(tmp_path / "in"), tmp_path / "out")
    job = multiprocessing.get_context("fork").Process(
        target=_prepare_until_killed, args=(tmp_path / "in", tmp_path / "out")
    )
    job.start()
    job.join()
    assert job.exitcode == -signal.SIGKILL
    with pytest.raises(KairosError, match=r"not complete.*kairos prepare"):
        open_dataset(tmp_path / "out")
    assert prepare(folder_config(tmp_path / "in"), tmp_path / "out") == whole
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        *("conditions", "heldout.npy", "images.npy", "record.json", "train.npy")
    ]


def test_two_processes_cannot_prepare_one_folder_at_once(tmp_path):
    write_images(tmp_path / "in", 10)
    settings = folder_config(tmp_path / "in")
    source = open_source(settings)
    rejected = []

    def read(index):
        if index == 7:  # a second prepare, of fewer images, starts while the first one reads
            with pytest.raises(KairosError, match=r"out: another process") as error:
                prepare(settings.model_copy(update={"limit": 4}), tmp_path / "out")
            rejected.append(error)
        return source.read(index)

    write_dataset(settings, type(source)(source.count, read, source.name), tmp_path / "out")
    assert rejected
    assert len(open_dataset(tmp_path / "out").images) == 10
    assert not list((tmp_path / "out").glob(".tmp-*"))


@pytest.fixture
def full_disk(tmp_path):
    """A file system with room for 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_reported_and_leaves_no_data_set(tmp_path, full_disk, capsys):
    (tmp_path / "demo.yaml").write_text("experiment: demo\nmethods: {uniform: {}}\n")
    out = full_disk / "dataset"
    assert main(["prepare", "--config", str(tmp_path / "demo.yaml"), "--out", str(out)]) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert "images.npy: No space left on device; results that were complete are kept" in message
    with pytest.raises(KairosError, match="not complete"):
        open_dataset(out)


def test_prepare_runs_from_the_command_line_and_reports_bad_paths(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "experiment: small\ndataset: {source: folder, path: in, heldout: 0.5}\nmethods: {uniform: {}}\n"
    Path("small.yaml").write_text(text)
    assert main(["prepare", "--config", "small.yaml"]) == 2
    assert "dataset.path: got 'in'" in capsys.readouterr().err
    write_images(Path("in"), 6)
    assert main(["prepare", "--config", "small.yaml", "--timing", "t.json"]) == 0
    assert "3 training and 3 held-out images of 8×8×3" in capsys.readouterr().err
    assert open_dataset("results/small/dataset").record["count"] == 6
    assert Path("t.json").is_file()
    assert main(["autoencoder", "--config", "small.yaml", "--dataset", "nowhere"]) == 1
    assert "nowhere: does not exist; make it with: kairos prepare" in capsys.readouterr().err
