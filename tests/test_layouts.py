"""Published layouts of data sets: zips, partitions and file lists, ADM's crop, and image counts."""

import io
import json
import multiprocessing
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kairos.config import validate
from kairos.data.dataset import open_dataset
from kairos.data.decode import to_pixels
from kairos.data.linked_images import delete_temporary_copy
from kairos.data.prepare import prepare
from kairos.data.source_statistics import count_images
from kairos.data.sources import open_source
from kairos.downloads import list_requirements
from kairos.files import DamagedError
from kairos.validity import list_outside_paths
from kairos.workflow.layout import Layout
from kairos_timesteps.errors import ConfigError, KairosError
from test_data import config, folder_config, random_image, write_images

SHARED = Path(__file__).parents[2] / "shared" / "data"
coco = pytest.mark.skipif(not (SHARED / "coco_mini").is_dir(), reason="coco_mini is not in ../shared/data")
cifar = pytest.mark.skipif(not (SHARED / "cifar10").is_dir(), reason="CIFAR-10 is not in ../shared/data")


def encode_png(image: Image.Image) -> bytes:
    content = io.BytesIO()
    image.save(content, format="png")
    return content.getvalue()


def write_zip(path: Path, images: dict[str, bytes], labels=..., compression=zipfile.ZIP_STORED) -> Path:
    """Write a zip of images, and last dataset.json if there are labels, as EDM's and StyleGAN's dataset_tool do."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in images.items():
            archive.writestr(name, content)
        if labels is not ...:
            archive.writestr("dataset.json", labels if isinstance(labels, str) else json.dumps({"labels": labels}))
    return path


def make_edm_names(count: int) -> list[str]:
    return [f"{index // 4:05d}/img{index:08d}.png" for index in range(count)]


def write_edm_zip(path: Path, count: int = 10, **fields) -> Path:
    names = make_edm_names(count)
    labels = [[name, index % 3] for index, name in reversed(list(enumerate(names)))]
    return write_zip(
        path, {name: encode_png(random_image(index)) for index, name in enumerate(names)}, labels, **fields
    )


def make_zip_config(path: Path, **fields):
    return config(source="zip", path=str(path), **fields)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_zip_has_the_pixels_labels_and_counts_of_its_images(tmp_path, compression):
    path = write_edm_zip(tmp_path / "edm.zip", compression=compression)
    record = prepare(make_zip_config(path, heldout=0.2), tmp_path / "out")
    dataset = open_dataset(tmp_path / "out")
    assert record["classes"] == ["0", "1", "2"] and dataset.labels.tolist() == [k % 3 for k in range(10)]
    for index in range(10):
        assert np.array_equal(dataset.images[index], np.asarray(random_image(index)))
    counts = count_images(make_zip_config(path, heldout=0.2))
    assert (counts.train, counts.smallest) == (8, 3)


@pytest.mark.parametrize("labels", [None, [], ...], ids=str)
def test_a_zip_without_labels_has_no_conditions(tmp_path, labels):
    images = {name: encode_png(random_image(index)) for index, name in enumerate(make_edm_names(5))}
    path = write_zip(tmp_path / "ffhq.zip", {**images, "__MACOSX/00000/._img00000000.png": b"junk"}, labels)
    source = open_source(make_zip_config(path))
    assert source.count == 5 and source.labels is None and source.conditions == {}
    assert (count_images(make_zip_config(path)).train, count_images(make_zip_config(path)).smallest) == (4, None)


@pytest.mark.long
def test_a_zip_is_read_by_several_processes_at_once(tmp_path):
    source = open_source(make_zip_config(write_edm_zip(tmp_path / "edm.zip", 40)))
    assert np.array_equal(np.asarray(source.read(0)), np.asarray(random_image(0)))  # opens the zip before the fork

    def read_all(queue):
        queue.put(
            all(np.array_equal(np.asarray(source.read(k % 40)), np.asarray(random_image(k % 40))) for k in range(400))
        )

    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    jobs = [context.Process(target=read_all, args=(queue,)) for _ in range(4)]
    for job in jobs:
        job.start()
    assert all(queue.get(timeout=60) for _ in jobs)
    for job in jobs:
        job.join()


def test_linked_images_in_a_zip_are_read_and_changes_are_detected(tmp_path):
    path = write_edm_zip(tmp_path / "edm.zip")
    copied, linked = (
        prepare(make_zip_config(path, store=store), tmp_path / store) and open_dataset(tmp_path / store)
        for store in ("copy", "refer")
    )
    assert not (tmp_path / "refer" / "images.npy").exists()
    assert np.array_equal(copied.images[:], linked.images[:])
    write_edm_zip(path, 9)
    delete_temporary_copy(tmp_path / "refer")
    with pytest.raises(DamagedError, match=r"was .*00002/img00000009\.png"):
        open_dataset(tmp_path / "refer").images[0]


def test_the_workflow_depends_on_zips_and_lists(tmp_path):
    (tmp_path / "list.txt").touch()
    for name in ("train[1]", "test"):
        write_edm_zip(tmp_path / f"{name}.zip", 4)
    paths = {"path": str(tmp_path / "train[1].zip"), "heldout": str(tmp_path / "test.zip")}

    def make_layout(**dataset):
        return Layout(validate({"experiment": "e", "dataset": dataset, "methods": {"u": {}}}), Path("unused"))

    zips = make_layout(source="zip", **paths)
    assert list_outside_paths(zips.experiment, "prepare") == [paths["path"], paths["heldout"]]
    assert [need.find() for need in list_requirements(zips.experiment)[:2]] == [paths["path"], paths["heldout"]]
    lists = make_layout(source="folder", path="in", files=f"{tmp_path}/list.txt:0", heldout=f"{tmp_path}/list.txt:1")
    assert set(list_outside_paths(lists.experiment, "prepare")) == {"in", str(tmp_path / "list.txt")}
    assert validate(
        {
            "experiment": "e",
            "dataset": {"source": "zip", "path": "x.zip"},
            "autoencoder": {"kind": "pretrained", "path": "vae"},
            "methods": {"u": {}},
        }
    ).dataset.store == "refer"  # fmt: skip


PAIRS = [[name, 0] for name in make_edm_names(3)]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (PAIRS[:2], r"dataset\.json in .*x\.zip' holds 2 names and the zip 3 images.*has '00000/img00000002\.png'"),
        ([*PAIRS, ["gone.png", 1]], r"holds 4 names and the zip 3 images.*'gone\.png'"),
        ([[name, [0.0, 1.0]] for name, _ in PAIRS], r"holds the class \[0\.0, 1\.0\], allowed: integers from 0"),
        ([*PAIRS[:2], [PAIRS[2][0], -1]], r"holds the class -1"),
        ([*PAIRS[:2], [PAIRS[2][0], True]], r"holds the class True"),
        ([1, 2, 3], r"is not \{\"labels\": \[\[name, class\], \.\.\.\]\} or null"),
        ("{", r"is not \{\"labels\""),
        ("[]", r"is not \{\"labels\""),
    ],
    ids=str,
)
def test_invalid_labels_in_a_zip_are_rejected(tmp_path, labels, message):
    images = {name: encode_png(random_image(index)) for index, (name, _) in enumerate(PAIRS)}
    path = write_zip(tmp_path / "x.zip", images, labels)
    with pytest.raises(ConfigError, match=message):
        open_source(make_zip_config(path))
    with pytest.raises(ConfigError, match=message):
        count_images(make_zip_config(path))


def test_invalid_zips_are_rejected(tmp_path):
    (tmp_path / "text.zip").write_text("no zip")
    (tmp_path / "cut.zip").write_bytes(write_edm_zip(tmp_path / "whole.zip").read_bytes()[:-30])
    write_zip(tmp_path / "empty.zip", {"readme.txt": b""})
    for name in ("text.zip", "cut.zip", "absent.zip", "."):
        with pytest.raises(ConfigError, match=r"dataset\.path: got .*allowed: a zip of images"):
            open_source(make_zip_config(tmp_path / name))
    with pytest.raises(ConfigError, match=r"empty\.zip' holds no image"):
        open_source(make_zip_config(tmp_path / "empty.zip"))
    with pytest.raises(ConfigError, match=r"dataset\.heldout: got .*text\.zip"):
        open_source(make_zip_config(tmp_path / "whole.zip", heldout=str(tmp_path / "text.zip")))


def test_broken_images_in_a_zip_are_reported_or_skipped(tmp_path):
    names, whole = make_edm_names(4), [encode_png(random_image(index)) for index in range(4)]
    path = write_zip(tmp_path / "x.zip", dict(zip(names, [whole[0], whole[1][:60], whole[2], whole[3]])))
    content = bytearray(path.read_bytes())
    content[content.index(whole[3]) + 50] ^= 1  # the checksum in the zip does not match
    path.write_bytes(content)
    with pytest.raises(KairosError, match=r"img00000001\.png is broken \(.*set dataset\.broken: skip"):
        prepare(make_zip_config(path), tmp_path / "out")
    record = prepare(make_zip_config(path, broken="skip"), tmp_path / "out")
    assert record["skipped"] == [names[1], names[3]] and record["count"] == 2


@pytest.fixture
def celeba(tmp_path) -> Path:
    """CelebA in the layout of torchvision."""
    write_images(tmp_path / "celeba" / "img_align_celeba", 9)
    lines = [f"{k:03d}.png {k % 3}\n" for k in range(9)]
    (tmp_path / "celeba" / "list_eval_partition.txt").write_text("".join(lines))
    return tmp_path / "celeba"


def test_celeba_is_split_by_its_partition(celeba, tmp_path):
    partition = celeba / "list_eval_partition.txt"
    parts = {"files": f"{partition}:0", "heldout": f"{partition}:2"}
    settings = folder_config(celeba / "img_align_celeba", images=3, **parts)
    prepare(settings, tmp_path / "out")
    dataset = open_dataset(tmp_path / "out")
    shown = [*range(0, 9, 3), *range(2, 9, 3)]
    assert dataset.train.tolist() == [0, 1, 2] and dataset.heldout.tolist() == [3, 4, 5]
    assert all(np.array_equal(dataset.images[k], np.asarray(random_image(number))) for k, number in enumerate(shown))
    assert count_images(settings).train == 3
    prepare(settings.model_copy(update={"store": "refer"}), tmp_path / "refer")
    assert np.array_equal(open_dataset(tmp_path / "refer").images[:], dataset.images[:])


def test_lists_select_files_by_their_names_without_extension(tmp_path):
    """The CelebA-HQ lists of taming-transformers contain .npy files; images here have other extensions."""
    write_images(tmp_path / "hq", 6)
    (tmp_path / "train.txt").write_text("003.npy\n000.npy\n\n005.png\n")
    (tmp_path / "validation.txt").write_text("001.npy\n")
    lists = {"files": str(tmp_path / "train.txt"), "heldout": str(tmp_path / "validation.txt")}
    source = open_source(folder_config(tmp_path / "hq", **lists))
    assert [source.name(k) for k in range(source.count)] == ["003.png", "000.png", "005.png", "001.png"]
    assert source.heldout_count == 1
    write_zip(tmp_path / "hq.zip", {f"{k:03d}.png": encode_png(random_image(k)) for k in range(6)})
    source = open_source(make_zip_config(tmp_path / "hq.zip", **lists))
    assert np.array_equal(np.asarray(source.read(0)), np.asarray(random_image(3))) and source.count == 4


def test_lists_of_files_keep_the_classes(tmp_path):
    for name in "ab":
        write_images(tmp_path / "in" / name, 3)
    (tmp_path / "list").write_text("b/001.png\na/000.png\nb/001\n")  # names a file twice
    source = open_source(folder_config(tmp_path / "in", files=str(tmp_path / "list")))
    assert source.classes == ["a", "b"] and source.labels.tolist() == [1, 0]


def test_unusable_lists_are_rejected(tmp_path):
    write_images(tmp_path / "in", 3)
    (tmp_path / "list.txt").write_text("000.png\n004.png\n005.png\n")
    (tmp_path / "good.txt").write_text("000.png\n001.png\n")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")

    def open_list(name, **fields):
        return open_source(folder_config(tmp_path / "in", files=str(tmp_path / name), **fields))

    with pytest.raises(ConfigError, match=r"dataset\.files: .*list\.txt lists 2 of 3 files.*such as '004\.png'"):
        open_list("list.txt")
    with pytest.raises(ConfigError, match=r"dataset\.heldout: .*list\.txt lists 2 of 3 files"):
        open_list("good.txt", heldout=str(tmp_path / "list.txt"))
    (tmp_path / "same.txt").write_text("000\n002\n")
    with pytest.raises(ConfigError, match=r"dataset\.heldout: .*same\.txt.*shares 1 .*dataset\.files.*000\.png"):
        open_list("good.txt", heldout=str(tmp_path / "same.txt"))
    for name in ("gone.txt", "binary.txt"):
        with pytest.raises(ConfigError, match=rf"{name} cannot be read.*allowed: a text file with a name in each line"):
            open_list(name)
    with pytest.raises(ConfigError, match=r"empty\.txt has no line, allowed"):
        open_list("empty.txt")
    with pytest.raises(ConfigError, match=r"good\.txt has no line that ends in 7"):
        open_list("good.txt:7")
    with pytest.raises(ValueError, match=r"dataset\.files: got 'x', allowed: null with source digits"):
        config(files="x")


def test_a_wrong_number_of_images_is_rejected(tmp_path):
    write_images(tmp_path / "in", 5)
    write_images(tmp_path / "held", 2)
    settings = folder_config(tmp_path / "in", images=5, heldout=str(tmp_path / "held"), limit=4)
    assert prepare(settings, tmp_path / "out")["count"] == 6
    wrong = settings.model_copy(update={"images": 202_599})
    with pytest.raises(ConfigError, match=r"dataset\.images: got 202599, but .*in holds 5 images"):
        prepare(wrong, tmp_path / "out")
    experiment = {"experiment": "e", "dataset": wrong.model_dump(), "methods": {"u": {}}}
    with pytest.raises(ConfigError, match=r"dataset\.images: got 202599"):  # as kairos check does
        validate(experiment).resolve()


def crop_like_adm(image: Image.Image, side: int) -> np.ndarray:
    """Crop the centre like ADM, implemented from its description."""
    while min(image.size) >= 2 * side:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    wide, high = (round(length * (side / min(image.size))) for length in image.size)
    pixels = np.asarray(image.resize((wide, high), Image.Resampling.BICUBIC))
    top, left = (high - side) // 2, (wide - side) // 2
    return pixels[top : top + side, left : left + side]


@pytest.mark.parametrize("size", [(640, 480), (427, 640), (131, 64), (64, 64), (63, 97), (200, 65), (40, 30)], ids=str)
@pytest.mark.parametrize("side", [32, 50, 64])
def test_the_crop_of_adm_equals_its_description(size, side):
    noise = np.random.default_rng(size[0]).integers(0, 256, (size[1], size[0], 3), np.uint8)
    image = Image.fromarray(noise)
    assert np.array_equal(to_pixels(image, "rgb", "adm", side, "it"), crop_like_adm(image, side))


@coco
def test_the_crop_of_adm_on_real_images_equals_its_description(tmp_path):
    settings = folder_config(SHARED / "coco_mini" / "train2017", crop="adm", resolution=64, images=26, heldout=0.2)
    prepare(settings, tmp_path / "out")
    dataset = open_dataset(tmp_path / "out")
    files = sorted((SHARED / "coco_mini" / "train2017").glob("*.jpg"))
    for k, file in enumerate(files):
        assert np.array_equal(dataset.images[k], crop_like_adm(Image.open(file).convert("RGB"), 64))
    prepare(settings.model_copy(update={"store": "refer"}), tmp_path / "refer")
    assert np.array_equal(open_dataset(tmp_path / "refer").images[:], dataset.images[:])


def test_images_are_resampled_with_the_selected_filter():
    image = random_image(3, width=50, height=40)
    cut = image.crop((5, 0, 45, 40))
    for name, filter in (("lanczos", Image.Resampling.LANCZOS), ("bicubic", Image.Resampling.BICUBIC)):
        expected = np.asarray(cut.resize((16, 16), filter))
        assert np.array_equal(to_pixels(image, "rgb", "center", 16, "it", name), expected)


def test_the_crop_of_adm_needs_a_resolution():
    with pytest.raises(ValueError, match=r"dataset\.resolution: got null, allowed: a number with crop adm"):
        folder_config(Path("in"), crop="adm")


@coco
def test_coco_is_read_as_a_plain_folder(tmp_path):
    """The validation folder of COCO contains the held-out images; annotations are next to the folders."""
    folders = {"path": str(SHARED / "coco_mini" / "train2017"), "heldout": str(SHARED / "coco_mini" / "val2017")}
    settings = config(source="folder", resolution=32, resample="lanczos", images=26, **folders)
    record = prepare(settings, tmp_path / "out")
    assert (record["train_count"], record["heldout_count"]) == (26, 25)


@cifar
def test_cifar_in_a_zip_equals_cifar_in_parquet_files(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    parquet = config(source="parquet", path=str(SHARED / "cifar10" / "*.parquet"), limit=60, heldout=0.0, images=50_000)
    prepare(parquet, tmp_path / "parquet")
    first = open_dataset(tmp_path / "parquet")
    names = make_edm_names(60)
    images = {name: encode_png(Image.fromarray(first.images[k])) for k, name in enumerate(names)}
    path = write_zip(tmp_path / "cifar.zip", images, list(zip(names, first.labels.tolist())))
    prepare(make_zip_config(path, heldout=0.0), tmp_path / "zip")
    second = open_dataset(tmp_path / "zip")
    assert np.array_equal(first.images[:], second.images[:]) and np.array_equal(first.labels, second.labels)


def test_only_class_numbers_that_occur_are_classes(tmp_path):
    names = make_edm_names(4)
    labels = [[name, 7 + 2**63 * (index % 2)] for index, name in enumerate(names)]
    path = write_zip(tmp_path / "gaps.zip", {name: encode_png(random_image(0)) for name in names}, labels)
    source = open_source(make_zip_config(path))
    assert source.classes == ["7", str(2**63 + 7)] and source.labels.tolist() == [0, 1, 0, 1]
