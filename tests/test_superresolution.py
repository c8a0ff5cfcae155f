"""Tests of super-resolution: low-resolution images as a condition, in pixels and latents, and PSNR on pairs."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from kairos.autoencoders.codec import load_codec
from kairos.autoencoders.encode import encode
from kairos.autoencoders.settings import AutoencoderConfig
from kairos.autoencoders.train_or_load import make_autoencoder
from kairos.cli import main
from kairos.conditions import nulls
from kairos.config import validate
from kairos.costs.dataset_size import find_dataset_size
from kairos.data.batches import Batches
from kairos.data.dataset import open_dataset
from kairos.data.latents import open_latents
from kairos.data.pixels import reduce_resolution
from kairos.data.prepare import prepare
from kairos.evaluation.evaluate import pair_with_real_images
from kairos.evaluation.measurements import ImageStatistics
from kairos.evaluation.metrics import Comparison, RealStatistics, psnr
from kairos.evaluation.settings import metrics_with_options
from kairos.files import read_json
from kairos.sampling.conditions import load_conditions, select_condition_sources
from kairos.sampling.samples_file import open_samples, write_samples
from kairos.shards import Shard
from kairos_timesteps.errors import ConfigError, KairosError
from test_data import folder_config, write_images
from training_case import write_experiment

SHARED = Path(__file__).parents[2] / "shared" / "data"
CPU = torch.device("cpu")
STRATEGIES = {
    "uniform": {},
    "speed": {"sampler": "speed"},
    "adaptive": {"sampler": {"name": "adaptive", "frequency": 5, "feature_timesteps": 20}},
}


@pytest.fixture(scope="module", autouse=True)
def deterministic_setup():
    from kairos.compute import setup

    setup(1, "cpu")


@pytest.fixture(scope="module")
def encoded(tmp_path_factory):
    """Folder of random images of side 16, as pixels and latents, with low-resolution images of factor 4."""
    root = tmp_path_factory.mktemp("encoded")
    write_images(root / "in", 20, height=16, width=16)
    prepare(folder_config(root / "in", heldout=0.25), root / "dataset")
    dataset = open_dataset(root / "dataset")
    for name, kind in (("pixels", "none"), ("latents", "train")):
        make_autoencoder(AutoencoderConfig(kind=kind, channels=[8, 8], steps=5), dataset, root / f"{name}-ae", CPU)
        encode(dataset, load_codec(root / f"{name}-ae"), root / name, True, 4, factor=4)
    return root


def test_the_resolution_is_reduced_by_area_and_restored_bilinearly():
    images = torch.rand(2, 3, 8, 8)
    small = torch.stack([images[..., i::4, j::4] for i in range(4) for j in range(4)]).mean(0)
    reduced = reduce_resolution(images, 4)
    weights = torch.tensor(
        [1, 1, 0.875, 0.625, 0.375, 0.125, 0, 0]
    )  # weight of the first of two pixels, with half-pixel centres
    across = small[..., :1] * weights + small[..., 1:] * (1 - weights)
    torch.testing.assert_close(
        reduced, across[..., :1, :] * weights[:, None] + across[..., 1:, :] * (1 - weights)[:, None]
    )
    torch.testing.assert_close(reduce_resolution(images.flip(3), 4), reduced.flip(3))
    torch.testing.assert_close(reduce_resolution(torch.full((1, 1, 8, 8), 0.3), 2), torch.full((1, 1, 8, 8), 0.3))


def test_low_resolution_images_in_pixels_are_reduced_flipped_images(encoded):
    latents = open_latents(encoded / "pixels")
    assert latents.condition_kinds["low_resolution"] == {"kind": "image", "shape": [3, 16, 16], "factor": 4}
    flips = np.array([True, False])
    images = latents.dataset.load_tensor([3, 4])
    images[0] = images[0].flip(2)
    assert torch.equal(latents.load_conditions([3, 4], flips)["low_resolution"], reduce_resolution(images, 4))
    assert "low_resolution" not in latents.load_stored_conditions([3])


def test_low_resolution_images_in_latents_are_encoded_reduced_images(encoded):
    latents, codec = open_latents(encoded / "latents"), load_codec(encoded / "latents-ae")
    assert latents.condition_kinds["low_resolution"]["shape"] == list(latents.shape) == [4, 8, 8]
    assert {"low_mean.npy", "low_mean_flipped.npy"} <= set(latents.record["files"])
    images = latents.dataset.load_tensor([3, 4])
    images[0] = images[0].flip(2)
    expected = codec.to_model_space(codec.encode(reduce_resolution(images, 4))[0])
    low = latents.load_conditions([3, 4], np.array([True, False]))["low_resolution"]
    torch.testing.assert_close(
        low, expected, atol=1e-5, rtol=1e-5
    )  # the latents were encoded in batches of another size


def test_latents_of_different_factors_differ(encoded, tmp_path):
    dataset, codec = open_dataset(encoded / "dataset"), load_codec(encoded / "pixels-ae")
    hashes = [encode(dataset, codec, tmp_path / str(k), False, 4, factor=k)["content_sha256"] for k in (None, 2, 4)]
    assert len(set(hashes)) == 3
    with pytest.raises(ConfigError, match=r"dataset\.low_resolution: got 5, allowed: a divisor of both sides.*16×16"):
        encode(dataset, codec, tmp_path / "5", False, 4, factor=5)


def test_merged_shards_equal_one_job(encoded, tmp_path):
    dataset, codec = open_dataset(encoded / "dataset"), load_codec(encoded / "latents-ae")
    shards = [tmp_path / f"shard{k}" for k in (1, 2)]
    for k, shard in enumerate(shards, 1):
        encode(dataset, codec, shard, True, 4, Shard(k, 2), factor=4)
    merged = encode(dataset, codec, tmp_path / "merged", True, 4, shard_folders=shards, factor=4)
    assert merged["files"] == read_json(encoded / "latents" / "record.json")["files"]
    with pytest.raises(KairosError):
        encode(dataset, codec, tmp_path / "other", True, 4, shard_folders=shards, factor=2)


@pytest.mark.parametrize("space", ["pixels", "latents"])
def test_batches_contain_the_low_resolution_of_their_flipped_images(encoded, space):
    latents = open_latents(encoded / space)
    batches = Batches(latents, 0, 8, range(8), ("low_resolution",), 0.5)
    dropped_count = 0
    for batch in batches.steps(0, 3):
        low = batch.conditions["low_resolution"]
        assert low.shape == batch.x0.shape and low.dtype == torch.float32
        dropped = low.flatten(1).abs().sum(1) == 0
        dropped_count += int(dropped.sum())
        if space == "pixels":
            torch.testing.assert_close(low[~dropped], reduce_resolution(batch.x0, 4)[~dropped])
    assert 4 <= dropped_count <= 20
    assert not nulls({"low_resolution": low}, latents.condition_kinds)["low_resolution"].any()


def test_sampling_is_conditioned_on_heldout_images(encoded, tmp_path):
    latents = open_latents(encoded / "pixels")
    kinds = {"low_resolution": latents.condition_kinds["low_resolution"]}
    heldout = latents.heldout
    assert select_condition_sources(latents, range(2, 7), kinds).tolist() == heldout[[2, 3, 4, 0, 1]].tolist()
    sources = select_condition_sources(latents, range(40), kinds, "data", 3)
    assert set(sources) == set(heldout)
    assert select_condition_sources(latents, range(5, 9), kinds, "data", 3).tolist() == sources[5:9].tolist()
    low = load_conditions(["low_resolution"], kinds, encoded / "pixels")(range(2, 4))["low_resolution"]
    assert torch.equal(low, reduce_resolution(latents.dataset.load_tensor(heldout[[2, 3]]), 4))
    assert set(select_condition_sources(latents, range(40), {"class": {"kind": "class"}}, "data")) <= set(latents.train)
    with pytest.raises(KairosError, match=r"'low_resolution' is taken from real images.*--latents"):
        load_conditions(["low_resolution"], kinds, tmp_path / "absent")
    for other in ({"factor": 2}, {"kind": "tensor"}):
        with pytest.raises(KairosError, match=r"condition 'low_resolution': got .*, expected .*--latents"):
            load_conditions(
                ["low_resolution"], {"low_resolution": {**kinds["low_resolution"], **other}}, encoded / "pixels"
            )
    prepare(folder_config(encoded / "in", heldout=0.0), tmp_path / "dataset")
    make_autoencoder(AutoencoderConfig(), open_dataset(tmp_path / "dataset"), tmp_path / "ae", CPU)
    encode(open_dataset(tmp_path / "dataset"), load_codec(tmp_path / "ae"), tmp_path / "latents", False, 4, factor=2)
    assert select_condition_sources(open_latents(tmp_path / "latents"), range(18, 22), kinds).tolist() == [18, 19, 0, 1]


def test_a_class_with_image_conditions_is_the_class_of_their_image(tmp_path):
    for number in range(3):
        write_images(tmp_path / "in" / str(number), 8, height=8, width=8)
    prepare(folder_config(tmp_path / "in", heldout=0.5), tmp_path / "dataset")
    dataset = open_dataset(tmp_path / "dataset")
    make_autoencoder(AutoencoderConfig(), dataset, tmp_path / "ae", CPU)
    encode(dataset, load_codec(tmp_path / "ae"), tmp_path / "latents", False, 4, factor=2)
    kinds = open_latents(tmp_path / "latents").condition_kinds
    conditions = load_conditions(["class", "low_resolution"], kinds, tmp_path / "latents")(range(9))
    assert conditions["class"].tolist() == dataset.labels[dataset.heldout[:9]].tolist()
    alone = load_conditions(["class"], kinds, tmp_path / "absent")(range(9))
    assert alone["class"].tolist() == [0, 1, 2] * 3


def test_psnr_compares_samples_with_the_images_of_their_conditions(encoded, tmp_path):
    latents = open_latents(encoded / "pixels")
    kinds = {"low_resolution": latents.condition_kinds["low_resolution"]}
    true = latents.dataset.images[select_condition_sources(latents, range(100), kinds)]
    inexact = true.astype(int)
    inexact[::2] = np.where(inexact[::2] < 128, inexact[::2] + 3, inexact[::2] - 3)
    inexact[1::2] = np.where(inexact[1::2] < 128, inexact[1::2] + 9, inexact[1::2] - 9)
    expected = [10 * np.log10(255**2 / 9), 10 * np.log10(255**2 / 81)]

    (options,) = metrics_with_options(["psnr"])
    comparison = Comparison("fid", RealStatistics({}), (options,))

    def compute_psnr(images, indices, protocol):
        write_samples(tmp_path / "samples.npz", images, protocol)
        pairs = pair_with_real_images(open_samples(tmp_path / "samples.npz"), indices, latents, kinds)
        return psnr(options, ImageStatistics(len(indices), {}, pairs=pairs), comparison)["psnr"]

    images, protocol = inexact.astype(np.uint8), {"labels": "balanced", "seed": 0}
    assert compute_psnr(images, range(100), protocol) == pytest.approx(np.mean(expected))
    assert compute_psnr(images, range(70, 80), protocol) == pytest.approx(np.mean(expected))
    assert compute_psnr(images, range(1, 2), protocol) == pytest.approx(expected[1])
    assert compute_psnr(true, range(100), protocol) > 150
    with pytest.raises(KairosError, match=r"psnr needs samples .* kairos sample"):
        compute_psnr(true, range(100), {})


def experiment_values(**changes):
    """Return the values of an experiment; `changes` replace fields of its sections."""
    values = {
        "experiment": "sr",
        "dataset": {"source": "folder", "path": "in", "resolution": 32, "low_resolution": 4, "flips": True},
        "model": {
            "name": "dit", "patch": 4, "width": 32, "depth": 2, "heads": 2, "conditions": ["low_resolution"],
        },
        "diffusion": {"process": {"name": "discrete", "timesteps": 100}},
        "training": {
            "batch_size": 8, "milestones": [20], "device": "cpu", "ema": {"decay": 0.9}, "condition_dropout": 0.1,
            "optimizer": {"lr": 1e-3},
        },
        "methods": STRATEGIES,
        "sampling": {"steps": 5, "batch_size": 20, "guidance_scale": 1.5, "scheduler": {"name": "ddim", "clip": True}},
        "evaluation": {
            "extractor": {"name": "selfsupervised", "features": 8, "channels": 8, "steps": 5},
            "metrics": ["frechet", "psnr"], "num_samples": 20, "sets": 2, "loss_images": 8, "strata": 2,
        },
        "tracking": {"enabled": False},
    }  # fmt: skip
    for name, fields in changes.items():
        values[name] = {**values[name], **fields}
    return values


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": {"low_resolution": 5}}, r"low_resolution: got 5, allowed: a divisor of the images' side, 32"),
        ({"dataset": {"low_resolution": None}}, r"dataset\.low_resolution: got null, allowed: a number, since model"),
        ({"model": {"conditions": []}, "training": {"condition_dropout": 0.0}, "sampling": {"guidance_scale": 1.0}},
         r"dataset\.low_resolution: got 4, allowed: null, unless model\.conditions contains low_resolution"),
        ({"dataset": {"source": "digits", "path": None, "resolution": None, "flips": False, "low_resolution": 3}},
         r"got 3, allowed: a divisor of the images' side, 8"),
        ({"dataset": {"low_resolution": 1}}, "greater than or equal to 2"),
        ({"dataset": {"low_resolution": None}, "model": {"conditions": []}, "sampling": {"guidance_scale": 1.0}},
         r"evaluation\.metrics: got psnr, allowed: other metrics, unless model\.conditions contains low_resolution"),
    ],
    ids=str,
)  # fmt: skip
def test_invalid_settings_are_rejected(changes, message):
    with pytest.raises(ConfigError, match=message):
        validate(experiment_values(**changes))


def test_the_dataset_size_includes_low_resolution_images(tmp_path):
    values = {**experiment_values(), "autoencoder": {"kind": "train", "channels": [8, 8]}}
    size = find_dataset_size(validate(values), tmp_path, None, None)
    assert size.conditions == {"low_resolution": {"kind": "image", "shape": [4, 16, 16]}} and size.latent_arrays == 6


def kairos(*arguments) -> None:
    assert main([str(argument) for argument in arguments]) == 0


def run_pipeline(root: Path, values: dict, report: bool = False) -> dict[str, dict]:
    """Run the commands of all stages as the pipeline does; return the metrics of each method's snapshots."""
    path, results = write_experiment(root / "sr.yaml", values), root / "results" / "sr"
    for stage in ("prepare", "autoencoder", "encode", "extractor", "reference"):
        kairos(stage, "--config", path)
    metrics = {}
    for method in values["methods"]:
        for stage in ("train", "sample", "evaluate"):
            kairos(stage, "--config", path, "--method", method, "--seed", 0)
        for record in (results / "methods" / method / "seed0" / "evaluation").glob("*.json"):
            metrics[method, record.stem] = json.loads(record.read_text())["metrics"]
    if report:
        (root / "Snakefile").touch()
        kairos("report", "--config", path, "--results", results)
    return metrics


@pytest.mark.long
@pytest.mark.skipif(not (SHARED / "cifar10").is_dir(), reason="CIFAR-10 is not in ../shared/data")
@pytest.mark.timeout(300)
def test_super_resolution_of_cifar10_in_pixels(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    source = {"source": "parquet", "path": str(SHARED / "cifar10" / "*.parquet"), "limit": 100, "heldout": 0.4}
    metrics = run_pipeline(tmp_path, experiment_values(dataset=source), report=True)
    for values in metrics.values():
        assert 0 < values["psnr"] < 40 and len(values["psnr_sets"]) == 2
    run = tmp_path / "results" / "sr" / "methods" / "uniform" / "seed0"
    samples = open_samples(run / "samples" / "0000020.npz")
    assert samples.images.shape == (40, 32, 32, 3) and samples.conditions == {}
    latents = open_latents(tmp_path / "results" / "sr" / "latents")
    true = latents.dataset.images[latents.heldout]  # 40 images are held out
    error = ((true.astype(float) - samples.images[:]) ** 2).mean((1, 2, 3))
    assert metrics["uniform", "0000020"]["psnr"] == pytest.approx(float(np.mean(10 * np.log10(255**2 / error))))
    assert "psnr" in (tmp_path / "results" / "sr" / "summary.csv").read_text().splitlines()[0]
    print({key: round(values["psnr"], 2) for key, values in metrics.items()})

    other = run / "other.npz"  # the samples of another snapshot
    write_samples(other, samples.images[:], {**samples.protocol, "step": 0})
    evaluated = ["--snapshot", run / "snapshots" / "0000020", "--samples", other, "--out", tmp_path / "x.json"]
    arguments = ["evaluate", *evaluated, "--reference", tmp_path / "results" / "sr" / "reference"]
    assert main([str(argument) for argument in arguments]) != 0


@pytest.mark.long
@pytest.mark.skipif(not (SHARED / "coco_mini").is_dir(), reason="coco_mini is not in ../shared/data")
@pytest.mark.skipif(not (SHARED / "taesd").is_dir(), reason="taesd is not in ../shared/data")
@pytest.mark.timeout(300)
def test_super_resolution_of_coco_in_latents(tmp_path, monkeypatch):
    """Images of side 32 are encoded by taesd; the held-out images are those of COCO."""
    monkeypatch.chdir(tmp_path)
    coco = SHARED / "coco_mini"
    source = {"path": str(coco / "train2017"), "heldout": str(coco / "val2017"), "resolution": 32, "crop": "adm"}
    values = experiment_values(dataset=source, model={"patch": 2})
    values["autoencoder"] = {"kind": "pretrained", "path": str(SHARED / "taesd")}
    values["methods"] = {"uniform": {}}
    metrics = run_pipeline(tmp_path, values)
    assert all(0 < measured["psnr"] < 40 for measured in metrics.values())
    latents = open_latents(tmp_path / "results" / "sr" / "latents")
    assert set(latents.moments) == {"mean", "low_mean", "mean_flipped", "low_mean_flipped"}
    record = read_json(
        tmp_path / "results" / "sr" / "methods" / "uniform" / "seed0" / "snapshots" / "0000020" / "snapshot.json"
    )
    assert record["conditions"] == {"low_resolution": {"kind": "image", "shape": [4, 4, 4], "factor": 4}}
