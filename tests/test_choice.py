"""The extractor that `auto` selects, and the settings that are rejected before any job."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from kairos.cli import main
from kairos.data.settings import DatasetConfig
from kairos.data.source_statistics import ImageCounts, count_images
from kairos.evaluation import inception_weights
from kairos.evaluation.extractor_choice import choose_extractor
from kairos.evaluation.settings import EvaluationConfig
from kairos_timesteps.errors import ConfigError, KairosError
from workflow_copy import Copy


@pytest.fixture(autouse=True)
def empty_caches(tmp_path, monkeypatch):
    """Empty caches and therefore no weights, in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("TORCH_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(name, raising=False)


def write_images(folder: Path, **classes: int) -> DatasetConfig:
    """Write a number of images of each class; images of class `flat` are in the folder itself."""
    for name, count in classes.items():
        folder_of_class = folder if name == "flat" else folder / name
        folder_of_class.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = np.random.default_rng(number).integers(0, 256, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(folder_of_class / f"{number}.png")
    return DatasetConfig(source="folder", path=str(folder), heldout=0.25)


def write_table(path: Path, labels: list | None, name: str = "label") -> DatasetConfig:
    """Write a table of 400 empty images, with a column of labels unless `labels` is None."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"image": [b""] * 400, **({name: labels} if labels else {})}
    pq.write_table(pa.table(columns), path)
    return DatasetConfig(source="parquet", path=str(path))


def test_count_images_returns_training_images_and_the_smallest_class(tmp_path):
    assert count_images(DatasetConfig()) == ImageCounts(1617, 174)
    assert count_images(DatasetConfig(limit=180)) == ImageCounts(162, 17)
    assert count_images(write_images(tmp_path / "flat", flat=40)) == ImageCounts(30, None)
    assert count_images(write_images(tmp_path / "kinds", cat=30, dog=10)) == ImageCounts(30, 10)
    assert count_images(write_table(tmp_path / "a.parquet", [0] * 397 + [3] * 3)) == ImageCounts(360, 3)
    assert count_images(write_table(tmp_path / "b.parquet", ["x", "y"] * 200)) == ImageCounts(360, 200)
    assert count_images(write_table(tmp_path / "c.parquet", [0, 1] * 200, "kind")) == ImageCounts(360, None)
    labelled = write_table(tmp_path / "c.parquet", [0, 1] * 200, "kind")
    assert count_images(labelled.model_copy(update={"label_column": "kind"})) == ImageCounts(360, 200)
    for source, path in (("folder", "none"), ("parquet", "none*"), ("zip", "none"), ("hub", "someone/[Images]")):
        assert count_images(DatasetConfig(source=source, path=path)).unknown, path
    flat = {"source": "folder", "path": str(tmp_path / "flat")}
    assert "none.txt" in count_images(DatasetConfig(**flat, files="none.txt")).unknown


def write_unusable_data(folder: Path, kind: str) -> DatasetConfig:
    """Write data that exist but cannot be used; kinds zip, parquet and folder are a text file with this source."""
    if kind == "list":
        (folder / "list.txt").write_text("missing.png\n")
        return write_images(folder / "images", flat=3).model_copy(update={"files": str(folder / "list.txt")})
    if kind == "label column":
        table = write_table(folder / "x.parquet", [0] * 400, name="kind")
        return table.model_copy(update={"label_column": "foo"})
    if kind == "labels":
        return write_table(folder / "x.parquet", [[0, 1]] * 400)
    if kind == "empty folder":
        (folder / "empty").mkdir()
        return DatasetConfig(source="folder", path=str(folder / "empty"))
    (folder / "x").write_text("text")
    return DatasetConfig(source=kind, path=str(folder / "x"))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("list", r"dataset\.files: .*missing\.png"),
        ("zip", r"dataset\.path: .*zip"),
        ("parquet", r"dataset\.path: .*parquet"),
        ("folder", r"dataset\.path: .*folder"),
        ("empty folder", r"dataset\.path: .*empty"),
        ("label column", r"dataset\.label_column: got 'foo'.*image, kind"),
        ("labels", r"dataset\.label_column: 'label' holds \[0, 1\]"),
    ],
)
def test_data_that_are_present_but_unusable_are_rejected_by_check(tmp_path, capsys, kind, message):
    dataset = write_unusable_data(tmp_path, kind)
    with pytest.raises(ConfigError, match=message):
        count_images(dataset)
    assert main(["check", str(write_experiment(tmp_path, dataset=dataset.model_dump()))]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_count_images_reads_the_cache_of_the_hub(tmp_path):
    import datasets
    import pyarrow as pa

    folder = tmp_path / "HF_HOME/datasets/someone___my_images/default/0.0.0/abc"
    folder.mkdir(parents=True)
    for number in range(2):
        shard = datasets.Dataset.from_dict({"label": [0] * 8 + [number] * 2}).data.table
        name = str(folder / f"images-train-0000{number}-of-00002.arrow")
        with pa.OSFile(name, "wb") as file, pa.ipc.new_stream(file, shard.schema) as stream:
            stream.write_table(shard)
    assert count_images(DatasetConfig(source="hub", path="someone/MyImages")) == ImageCounts(18, 2)
    assert count_images(DatasetConfig(source="hub", path="someone/MyImages", split="test")).unknown


def test_auto_selects_the_best_extractor_that_the_images_allow(tmp_path):
    def auto(dataset: DatasetConfig, **changes) -> tuple[str, str]:
        config, notes = choose_extractor(EvaluationConfig(**changes), dataset)
        assert EvaluationConfig(**config.model_dump()) == config
        return config.extractor.name, notes[0]

    assert auto(DatasetConfig())[0] == "classifier"
    name, reason = auto(write_images(tmp_path / "flat", flat=100))
    assert name == "selfsupervised"
    weights = inception_weights.default_path()
    assert reason == (f"extractor: selfsupervised (auto: no Inception weights at {weights}; the images have no labels)")
    name, reason = auto(write_images(tmp_path / "kinds", cat=100, dog=4))
    assert name == "selfsupervised" and "the smallest class has 4 images" in reason
    assert auto(write_images(tmp_path / "kinds", dog=5))[0] == "classifier"
    name, reason = auto(DatasetConfig(source="folder", path="none"))
    assert name == "selfsupervised" and "assumed" in reason

    inception_weights.default_path().parent.mkdir(parents=True)
    inception_weights.default_path().touch()
    large = write_table(tmp_path / "x.parquet", [0] * 400).model_copy(update={"limit": None})
    assert auto(large, num_samples=3000)[0] == "classifier", "360 images are too few for 2,048 features"
    assert auto(DatasetConfig(source="folder", path="none"), num_samples=3000)[0] == "inception"
    assert auto(DatasetConfig(source="folder", path="none"), num_samples=2048)[0] == "selfsupervised"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"extractor": "classifier"},
            "evaluation.extractor: got classifier, but the images have no labels; allowed: self",
        ),
        ({"num_samples": 64}, "evaluation.num_samples: got 64 images a set, allowed: more than 64, .*features sets it"),
        (
            {"extractor": {"name": "selfsupervised", "features": 75}},
            "dataset: got 75 training images, allowed: more than 75",
        ),
        ({"extractor": "inception"}, r"evaluation.num_samples: got 450 .*2048(.|\n)*dataset: got 75"),
        ({"extractor": {"name": "inception", "path": "none.pth"}}, "weights none.pth, but the file does not exist"),
    ],
)
def test_an_extractor_that_the_images_do_not_allow_is_rejected(tmp_path, changes, message):
    dataset = write_images(tmp_path / "flat", flat=100)
    with pytest.raises(ConfigError if "path" not in str(changes) else KairosError, match=message):
        choose_extractor(EvaluationConfig(**changes), dataset)


@pytest.mark.parametrize(
    ("features", "heldout", "rejected"),
    [
        (99, None, None),
        (100, None, "got 100 images with the held-out ones, allowed: more than 100"),
        (129, 30, None),  # 100 training images and 30 held-out images
        (130, 30, "got 130 images with the held-out ones, allowed: more than 130"),
        (130, 0, None),  # the held-out images are missing
    ],
)
def test_reference_all_needs_more_images_than_features(tmp_path, features, heldout, rejected):
    dataset = write_images(tmp_path / "flat", flat=100)
    if heldout is not None:
        dataset = dataset.model_copy(update={"heldout": str(tmp_path / "heldout")})
    if heldout:
        write_images(tmp_path / "heldout", flat=heldout)
    extractor = {"name": "selfsupervised", "features": features}
    evaluation = EvaluationConfig(extractor=extractor, reference="all")
    if rejected is None:
        assert choose_extractor(evaluation, dataset)[0].reference == "all"
    else:
        with pytest.raises(ConfigError, match=f"dataset: {rejected}"):
            choose_extractor(evaluation, dataset)


def test_the_limit_of_the_data_set_does_not_limit_separate_heldout_images(tmp_path):
    dataset = write_images(tmp_path / "flat", flat=100)
    write_images(tmp_path / "heldout", flat=60)
    dataset = dataset.model_copy(update={"heldout": str(tmp_path / "heldout"), "limit": 50})
    extractor = {"name": "selfsupervised", "features": 110}
    with pytest.raises(ConfigError, match="dataset: got 110 images with the held-out ones"):
        choose_extractor(EvaluationConfig(extractor=extractor, reference="all"), dataset)


def test_a_classifier_is_rejected_if_a_class_is_too_small(tmp_path):
    with pytest.raises(ConfigError, match=r"the smallest class has 4 images; allowed: .*5 or more of each class"):
        choose_extractor(EvaluationConfig(extractor="classifier"), write_images(tmp_path / "kinds", cat=100, dog=4))


def test_missing_inception_weights_are_downloaded_or_rejected_without_a_network(tmp_path, monkeypatch):
    """With a network a job downloads the weights, and `check` reports it; with HF_HUB_OFFLINE no job starts."""
    dataset = DatasetConfig(source="folder", path="none")
    inception = EvaluationConfig(extractor="inception", num_samples=3000)
    _, notes = choose_extractor(inception, dataset)
    assert "unknown before kairos prepare" in notes[0]
    assert str(inception_weights.default_path()) in notes[1] and "download" in notes[1]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(KairosError, match=r"weights-inception.*HF_HUB_OFFLINE.*selfsupervised"):
        choose_extractor(inception, dataset)


def write_experiment(folder: Path, **sections) -> Path:
    """Write an experiment file with some sections; returns its path."""
    values = {"experiment": "one", "methods": {"only": {}}, **sections}
    path = folder / "one.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_check_reports_the_extractor(tmp_path, capsys):
    flat = write_images(tmp_path / "flat", flat=100).model_dump()
    assert main(["check", str(write_experiment(tmp_path, dataset=flat))]) == 0
    assert "\nextractor: selfsupervised (auto: no Inception" in capsys.readouterr().out
    assert (
        main(
            ["check", str(write_experiment(tmp_path, evaluation={"extractor": {"name": "classifier", "features": 7}}))]
        )
        == 0
    )
    assert "\nextractor: classifier (features 7" in capsys.readouterr().out
    assert main(["check", str(write_experiment(tmp_path, dataset=flat, evaluation={"extractor": "classifier"}))]) == 2
    assert "no labels" in capsys.readouterr().err


@pytest.mark.long
def test_the_frozen_experiment_of_a_dry_run_contains_the_extractor(tmp_path_factory):
    copy = Copy(tmp_path_factory.mktemp("copy"))
    write_experiment(copy.folder, dataset=write_images(copy.folder / "flat", flat=100).model_dump())
    ended = copy.ask_snakemake("--dry-run", config="one.yaml")
    assert ended.returncode == 0 and "extractor: selfsupervised (auto" in ended.stderr
    frozen = next((copy.folder / ".kairos/config").glob("one-*.yaml"))
    assert yaml.safe_load(frozen.read_text())["evaluation"]["extractor"]["name"] == "selfsupervised"


@pytest.mark.long
def test_images_without_labels_run_through_the_pipeline_to_the_report(tmp_path, tmp_path_factory):
    """The images are in one folder, without a folder per class; the test above shows what `auto` selects for them."""
    from sklearn.datasets import load_digits

    copy = Copy(tmp_path_factory.mktemp("copy"))
    (copy.folder / "flat").mkdir()
    for number, pixels in enumerate(load_digits().images[:500]):
        Image.fromarray((pixels * 15.9).astype(np.uint8)).save(copy.folder / f"flat/{number}.png")
    values = yaml.safe_load((copy.folder / "tests/tiny.yaml").read_text())
    values["dataset"] = {"source": "folder", "path": "flat", "color": "grey", "heldout": 0.25}
    values |= {"autoencoder": {"kind": "none"}, "tracking": {"enabled": False}}
    values["training"] |= {"milestones": [20], "segments": 1}
    values["evaluation"]["extractor"] = {"name": "selfsupervised", "features": 16, "channels": 8, "steps": 60}
    del values["methods"]["adaptive"]
    (copy.folder / "flat.yaml").write_text(yaml.safe_dump(values))
    ended = copy.snakemake(config="flat.yaml")
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    results = copy.folder / "results/tiny"
    assert "selfsupervised16" in (results / "report.html").read_text()
    assert "frechet_selfsupervised16" in (results / "summary.csv").read_text().splitlines()[0]
    record = json.loads((results / "reference/record.json").read_text())
    rows = {name: row["frechet_selfsupervised16"] for name, row in record["rows"].items()}
    assert min(rows, key=rows.__getitem__) == "floor" and rows["noise"] > 5 * rows["floor"], rows
    assert copy.to_do(config="flat.yaml") == {}


@pytest.mark.parametrize(
    ("extractor", "calls"), [({"name": "selfsupervised", "features": 4, "steps": 2}, 0), ("auto", 1)]
)
def test_stage_extractor_lists_the_images_only_for_auto(tmp_path, monkeypatch, extractor, calls):
    dataset = write_images(tmp_path / "images", flat=120)
    values = {
        "experiment": "e",
        "dataset": dataset.model_dump(mode="json", include={"source", "path", "heldout"}),
        "autoencoder": {"kind": "none"},
        "model": {"name": "dit", "patch": 4, "width": 16, "depth": 1, "heads": 2},
        "methods": {"uniform": {}},
        "evaluation": {"extractor": extractor, "num_samples": 100},
    }
    Path("e.yaml").write_text(yaml.safe_dump(values))
    assert main(["prepare", "--config", "e.yaml", "--out", "dataset"]) == 0
    counted = []
    monkeypatch.setattr(
        "kairos.evaluation.extractor_choice.count_images", lambda config: counted.append(1) or count_images(config)
    )
    assert main(["extractor", "--config", "e.yaml", "--dataset", "dataset", "--out", "extractor"]) == 0
    assert len(counted) == calls
