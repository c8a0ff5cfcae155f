"""Tests of Parquet files and data sets of the Hugging Face hub as sources."""

import io
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from kairos.data.dataset import open_dataset
from kairos.data.prepare import prepare
from kairos.data.settings import DatasetConfig
from kairos.data.sources import open_source
from kairos_timesteps.errors import ConfigError, KairosError

SHARED = Path(__file__).parents[2] / "shared" / "data"


def random_image(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8))


def config(**fields) -> DatasetConfig:
    return DatasetConfig.model_validate(fields)


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """Cache of `datasets` in the test's folder instead of the user's home."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write_parquet(path: Path, count: int, broken: int | None = None, column: str = "image", label="label") -> Path:
    """Write a Parquet file of images and labels; the row `broken` has a truncated image."""
    import datasets

    rows = [{"bytes": _png(index), "path": None} for index in range(count)]
    if broken is not None:
        rows[broken]["bytes"] = rows[broken]["bytes"][:30]
    data = {column: rows, label: [index % 2 for index in range(count)]}
    features = datasets.Features(
        {column: datasets.Image(decode=False), label: datasets.ClassLabel(names=["no", "yes"])}
    )
    datasets.Dataset.from_dict(data, features=features).to_parquet(str(path))
    return path


def _png(seed: int) -> bytes:
    buffer = io.BytesIO()
    random_image(seed).save(buffer, format="png")
    return buffer.getvalue()


def test_images_and_labels_of_parquet_files_are_read_in_order(tmp_path, hub_cache):
    write_parquet(tmp_path / "one.parquet", 5)
    write_parquet(tmp_path / "two.parquet", 3)
    record = prepare(config(source="parquet", path=str(tmp_path / "*.parquet")), tmp_path / "out")
    dataset = open_dataset(tmp_path / "out")
    assert record["classes"] == ["no", "yes"]
    assert list(dataset.labels) == [0, 1, 0, 1, 0, 0, 1, 0]
    for row, seed in enumerate([0, 1, 2, 3, 4, 0, 1, 2]):
        assert np.array_equal(dataset.images[row], np.asarray(random_image(seed)))


@pytest.mark.parametrize(("nearby_rows", "openings"), [(64, 2), (0, 11)])
def test_a_table_is_reopened_when_reads_have_mapped_more_than_the_limit(
    tmp_path, hub_cache, monkeypatch, nearby_rows, openings
):
    """Reads of rows far from the one before map further pages."""
    monkeypatch.setattr("kairos.data.sources._MAPPED_BYTES", int(3.5 * len(_png(0))))
    monkeypatch.setattr("kairos.data.sources._NEARBY_ROWS", nearby_rows)
    opened = []
    counted = SimpleNamespace(dumps=pickle.dumps, loads=lambda content: opened.append(1) or pickle.loads(content))
    monkeypatch.setattr("kairos.data.sources.pickle", counted)
    path = write_parquet(tmp_path / "one.parquet", 10)
    source = open_source(config(source="parquet", path=str(path)))
    for seed in (*range(10), 4, 0):
        assert np.array_equal(np.asarray(source.read(seed)), np.asarray(random_image(seed)))
    assert len(opened) == openings


def test_a_broken_row_of_a_parquet_file_is_reported_or_skipped(tmp_path, hub_cache):
    write_parquet(tmp_path / "one.parquet", 5)
    write_parquet(tmp_path / "two.parquet", 4, broken=2)
    both = config(source="parquet", path=str(tmp_path / "*.parquet"))
    with pytest.raises(KairosError, match=r"row 2 of two\.parquet is broken"):
        prepare(both, tmp_path / "out")
    record = prepare(both.model_copy(update={"broken": "skip"}), tmp_path / "out")
    assert record["skipped"] == ["row 2 of two.parquet"] and record["count"] == 8


def test_parquet_files_and_columns_that_cannot_be_used_are_rejected(tmp_path, hub_cache):
    with pytest.raises(ConfigError, match=r"dataset\.path.*none\.parquet"):
        open_source(config(source="parquet", path=str(tmp_path / "none.parquet")))
    (tmp_path / "text.parquet").write_text("hello")
    with pytest.raises(ConfigError, match="not a parquet file"):
        open_source(config(source="parquet", path=str(tmp_path / "text.parquet")))
    path = str(write_parquet(tmp_path / "good.parquet", 3, column="photo", label="kind"))
    assert open_source(config(source="parquet", path=path)).labels is None
    assert list(open_source(config(source="parquet", path=path, label_column="kind")).labels) == [0, 1, 0]
    with pytest.raises(ConfigError, match=r"dataset\.image_column: got 'img'.*photo"):
        open_source(config(source="parquet", path=path, image_column="img"))
    with pytest.raises(ConfigError, match=r"dataset\.label_column: got 'tag'.*photo, kind"):
        open_source(config(source="parquet", path=path, label_column="tag"))


def test_a_table_without_images_is_rejected(tmp_path, hub_cache):
    import datasets

    datasets.Dataset.from_dict({"x": [1, 2]}).to_parquet(str(tmp_path / "x.parquet"))
    with pytest.raises(ConfigError, match="has 0 image columns"):
        open_source(config(source="parquet", path=str(tmp_path / "x.parquet")))


def test_text_labels_become_sorted_classes(tmp_path, hub_cache):
    import datasets

    rows = {"data": [_png(0), _png(1), _png(2)], "label": ["b", "a", "b"]}
    datasets.Dataset.from_dict(
        rows, features=datasets.Features(data=datasets.Value("binary"), label=datasets.Value("string"))
    ).to_parquet(str(tmp_path / "t.parquet"))
    source = open_source(config(source="parquet", path=str(tmp_path / "t.parquet")))
    assert source.classes == ["a", "b"] and list(source.labels) == [1, 0, 1]
    assert source.read(1).size == (8, 8)


def test_the_hub_without_network_gives_an_error_with_advice(tmp_path, hub_cache, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(KairosError, match=r"someone/images.*cannot be loaded.*source: parquet"):
        open_source(config(source="hub", path="someone/images"))


@pytest.mark.skipif(not (SHARED / "cifar10").is_dir(), reason="CIFAR-10 is not in ../shared/data")
def test_cifar10_is_prepared_with_its_classes_and_channel_means(tmp_path, hub_cache):
    path = str(SHARED / "cifar10" / "*.parquet")
    record = prepare(config(source="parquet", path=path, limit=500), tmp_path)
    assert (record["count"], record["height"], record["channels"]) == (500, 32, 3)
    assert record["classes"][3] == "cat" and record["conditions"]["class"]["num_classes"] == 10
    assert record["channel_mean"] == pytest.approx([0.4914, 0.4822, 0.4465], abs=0.02)


@pytest.mark.skipif(not (SHARED / "fashion_mnist").is_dir(), reason="Fashion-MNIST is not in ../shared/data")
def test_fashion_mnist_is_prepared_at_another_resolution(tmp_path, hub_cache):
    path = str(SHARED / "fashion_mnist" / "test-*.parquet")
    record = prepare(config(source="parquet", path=path, limit=500, color="grey", resolution=32), tmp_path)
    assert (record["count"], record["height"], record["channels"]) == (500, 32, 1)
