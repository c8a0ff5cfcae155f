"""Evaluation from the command line: extractor, reference rows, samples, records, validation errors, extensions."""

import dataclasses
import json
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
import yaml

from kairos.cli import main
from kairos.config import validate
from kairos.data.dataset import open_dataset
from kairos.evaluation import evaluate, extractors
from kairos.evaluation.external_reference import read_moments
from kairos.evaluation.measurements import FeatureBuffer
from kairos.evaluation.settings import EXTRACTORS, METRICS, ExtractorOptions, MetricOptions
from kairos.files import DamagedError, read_record, write_record
from kairos.sampling.samples_file import open_samples, write_samples
from kairos.sampling.settings import SOLVERS, SolverOptions
from kairos_timesteps.errors import ConfigError, KairosError


def read_samples(path: Path) -> tuple[np.ndarray, dict]:
    """Return the images and the protocol of a file of samples."""
    opened = open_samples(path)
    return opened.images[:], opened.protocol


EXPERIMENT = {
    "experiment": "tiny",
    "dataset": {"source": "digits", "color": "grey", "heldout": 0.25},
    "model": {"name": "dit", "patch": 2, "width": 32, "depth": 1, "heads": 2},
    "training": {"batch_size": 16, "milestones": [2], "device": "cpu", "optimizer": {"lr": 1e-3}},
    "methods": {"uniform": {}},
    "sampling": {"steps": 3, "batch_size": 100, "grid": 9},
    "evaluation": {
        "extractor": {"name": "classifier", "features": 32, "steps": 400},
        "num_samples": 330,
        "sets": 2,
        "loss_images": 40,
        "strata": 4,
    },
}


def write_config(folder: Path, **changes) -> Path:
    """Write the experiment with changes of its section `evaluation`; returns the path."""
    values = json.loads(json.dumps(EXPERIMENT))
    values["evaluation"].update(changes)
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def kairos(*arguments) -> int:
    """Run a kairos command in this process; returns its exit status."""
    torch.set_num_threads(1)
    return main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of all stages up to evaluation on the digits in pixel space."""
    root = tmp_path_factory.mktemp("chain")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        config = write_config(root)
        assert kairos("prepare", "--config", config, "--out", "r/dataset") == 0
        shared = ("--config", config, "--dataset", "r/dataset")
        assert kairos("autoencoder", *shared, "--out", "r/autoencoder") == 0
        assert kairos("encode", *shared, "--autoencoder", "r/autoencoder", "--out", "r/latents") == 0
        assert kairos("extractor", *shared, "--out", "r/extractor") == 0
        folders = ("--autoencoder", "r/autoencoder", "--latents", "r/latents", "--extractor", "r/extractor")
        assert kairos("reference", *shared, *folders, "--out", "r/reference") == 0
        train = ("--method", "uniform", "--seed", 0, "--out", "r/methods/uniform/seed0", "--latents", "r/latents")
        assert kairos("train", "--config", config, *train) == 0
        milestones = [f"r/methods/uniform/seed0/snapshots/{step:07d}" for step in (0, 2)]
        sample, evaluation = ["--num", 660, "--seed", 0], ["--reference", "r/reference/record.json"]
        for k, snapshot in enumerate(milestones):
            sample += ["--snapshot", snapshot, "--out", f"r/{k}.npz", "--grid", f"r/{k}.png"]
            evaluation += ["--snapshot", snapshot, "--samples", f"r/{k}.npz", "--out", f"r/{k}.json"]
        assert kairos("sample", *sample, "--timing", "r/sample.json") == 0
        assert kairos("evaluate", *evaluation, "--timing", "r/evaluate.json") == 0
    return root / "r"


@pytest.mark.long
def test_the_trained_classifier_is_an_accurate_extractor(results):
    record = json.loads((results / "extractor/record.json").read_text())
    assert record["name"] == "classifier32" and record["metric"] == "frechet_classifier32"
    assert record["features"] == 32 and record["accuracy"] > 0.97
    opened = extractors.open_extractor(results / "extractor")
    images = open_dataset(results / "dataset").images
    features = opened.compute_layers(images[:50])["features"]
    assert features.shape == (50, 32) and features.dtype == torch.float32
    with pytest.raises(KairosError, match="allowed"):
        opened.compute_layers(np.zeros((3, 8, 8, 3), np.uint8))


@pytest.mark.long
def test_torch_fidelity_computes_the_same_distance_with_the_classifier(results):
    import torch_fidelity

    opened = extractors.open_extractor(results / "extractor")

    class Classifier(torch_fidelity.FeatureExtractorBase):
        """The classifier in torch-fidelity's interface."""

        def __init__(self, name, features_list, **_):
            super().__init__(name, features_list)
            self.model = opened.module

        @staticmethod
        def get_provided_features_list():
            return ("features",)

        @staticmethod
        def get_default_feature_layer_for_metric(metric):
            return "features"

        @staticmethod
        def can_be_compiled():
            return False

        def forward(self, images):
            return self.model(images)

    torch_fidelity.register_feature_extractor("kairos-classifier", Classifier)
    dataset = open_dataset(results / "dataset")
    subsets = []
    for rows in (dataset.train, dataset.heldout[:330]):
        images = torch.from_numpy(np.array(dataset.images[rows])).permute(0, 3, 1, 2)
        subsets.append(torch.utils.data.Subset(images, range(len(images))))
    real, held_out = subsets
    metrics = torch_fidelity.calculate_metrics(
        input1=held_out, input2=real, fid=True, cuda=False, cache=False, verbose=False, save_cpu_ram=True,
        feature_extractor="kairos-classifier",
    )  # fmt: skip
    row = json.loads((results / "reference/record.json").read_text())["rows"]["floor"]
    assert row["frechet_classifier32"] == pytest.approx(metrics["frechet_inception_distance"], rel=1e-3)


def test_the_training_of_the_classifier_is_deterministic(results, tmp_path):
    torch.set_num_threads(1)
    options = json.loads((results / "extractor/record.json").read_text())["options"]
    dataset = open_dataset(results / "dataset")
    extractor = EXTRACTORS.select({**options, "steps": 5})
    hashes = [extractors.build_extractor(extractor, dataset, tmp_path / str(k))["sha256"] for k in range(2)]
    assert hashes[0] == hashes[1]


def test_a_damaged_extractor_is_reported(results, tmp_path):
    folder = shutil.copytree(results / "extractor", tmp_path / "extractor")
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(500)
        file.write(b"\0\1\2\3")
    with pytest.raises(DamagedError, match=r"model\.safetensors"):
        extractors.open_extractor(folder)


def test_a_classifier_requires_classes(results, tmp_path):
    dataset = dataclasses.replace(open_dataset(results / "dataset"), conditions={})
    options = json.loads((results / "extractor/record.json").read_text())["options"]
    with pytest.raises(KairosError, match="no classes"):
        extractors.build_extractor(EXTRACTORS.select(options), dataset, tmp_path / "x")
    assert not (tmp_path / "x/record.json").exists()


def test_reference_rows_have_the_expected_order(results):
    record = json.loads((results / "reference/record.json").read_text())
    rows = {name: row["frechet_classifier32"] for name, row in record["rows"].items()}
    assert rows["floor"] < 10 and 3 * rows["floor"] < rows["gaussian"] and 5 * rows["gaussian"] < rows["noise"]
    assert rows["reconstruction"] == rows["floor"], "without an autoencoder the reconstructions are the images"
    assert all(row["frechet_classifier32_spread"] > 0 and "kid" in row for row in record["rows"].values())
    assert set(record["spread_of"]) == set(rows)
    assert record["accuracy"] > 0.97 and record["num_samples"] == 330
    assert record["metric"] == "frechet_classifier32"


def test_samples_and_records_contain_their_protocol_and_metrics(results):
    images, protocol = read_samples(results / "1.npz")
    assert images.shape == (660, 8, 8, 1) and protocol["step"] == 2 and protocol["scheduler"]["name"] == "ddim"
    assert (results / "0.png").stat().st_size > 100
    records = [json.loads((results / f"{k}.json").read_text()) for k in (0, 1)]
    for step, record in zip((0, 2), records):
        metrics, protocol = record["metrics"], record["protocol"]
        assert record["step"] == step
        assert len(metrics["frechet_classifier32_sets"]) == 2
        assert metrics["frechet_classifier32"] == pytest.approx(np.mean(metrics["frechet_classifier32_sets"]))
        assert metrics["frechet_classifier32_spread"] == pytest.approx(
            np.std(metrics["frechet_classifier32_sets"], ddof=1)
        )
        assert (
            protocol["n_samples"] == 330 and protocol["steps"] == protocol["nfe"] == 3 and protocol["weights"] == "ema"
        )
        for name in ("extractor_hash", "reference_hash", "spacing", "clip", "sample_seed", "eval_seed", "scheduler"):
            assert protocol[name] is not None, name
        assert len(record["warnings"]) == 1 and "not below" in record["warnings"][0]  # after few steps
        # the output of an untrained DiT is zero
        assert record["validation"]["loss_epsilon"] == pytest.approx(1.0, abs=0.1)
        assert protocol["sample_precision"] == protocol["eval_precision"] == "fp32"
    assert records[0]["validation"]["per_timestep"][0]["u"] == [0, 0.001]


def test_samples_do_not_depend_on_the_batch_size_or_number(results, tmp_path):
    snapshot = results / "methods/uniform/seed0/snapshots/0000002"
    arguments = ("--snapshot", snapshot, "--out", tmp_path / "x.npz", "--seed", 0, "--num", 40, "--batch-size", 17)
    assert kairos("sample", *arguments) == 0
    assert np.array_equal(read_samples(tmp_path / "x.npz")[0], read_samples(results / "1.npz")[0][:40])
    assert kairos("sample", *arguments, "--scheduler", "{name: ddpm, clip: true}", "--weights", "raw") == 0
    images, protocol = read_samples(tmp_path / "x.npz")
    assert protocol["scheduler"]["clip"] is True and protocol["weights"] == "raw"
    assert set(protocol["model_files"]) == {"raw/config.json", "raw/diffusion_pytorch_model.safetensors"}
    assert not np.array_equal(images, read_samples(results / "1.npz")[0][:40])


@pytest.mark.long
@pytest.mark.parametrize("process,noise_level", [("edm", "sigma"), ("flow", "t")])
def test_a_continuous_process_is_sampled_and_evaluated_in_half_precision(
    results, tmp_path, monkeypatch, process, noise_level
):
    """Sampling with Heun's method and evaluation of snapshots of EDM and flow matching run in bf16."""
    monkeypatch.chdir(tmp_path)
    config = write_config(tmp_path, precision="bf16", loss_images=16)
    values = {**yaml.safe_load(config.read_text()), "diffusion": {"process": process}}
    values["sampling"] |= {"scheduler": "heun", "precision": "bf16", "steps": 4}
    config.write_text(yaml.safe_dump(values))
    folders = {part: results / part for part in ("dataset", "autoencoder", "latents", "extractor")}
    options = [value for part, folder in folders.items() for value in (f"--{part}", folder)]
    assert kairos("reference", "--config", config, *options, "--out", "reference") == 0
    train = ("--method", "uniform", "--seed", 0, "--out", "methods/u/seed0", "--latents", results / "latents")
    assert kairos("train", "--config", config, *train) == 0
    snapshot = ("--snapshot", "methods/u/seed0/snapshots/0000002")
    sample = ("--num", 330, "--autoencoder", results / "autoencoder", "--out")
    assert kairos("sample", *snapshot, *sample, "x.npz") == 0
    assert kairos("sample", *snapshot, *sample, "y.npz", "--precision", "fp32") == 0
    assert not np.array_equal(read_samples(Path("x.npz"))[0], read_samples(Path("y.npz"))[0])
    latents = ("--latents", results / "latents", "--extractor", results / "extractor")
    assert kairos("evaluate", "--samples", "x.npz", *snapshot, *latents, "--reference", "reference", "--out", "x") == 0
    record = json.loads(Path("x").read_text())
    protocol = record["protocol"]
    assert protocol["scheduler"] == "heun" and (protocol["steps"], protocol["nfe"]) == (4, 7)
    assert protocol["spacing"] == {"edm": "karras", "flow": "uniform"}[process]
    assert protocol["sample_precision"] == protocol["eval_precision"] == "bf16"
    times = [row["t"] for row in record["validation"]["per_timestep"]]
    assert times == sorted(times) and times[0] > 0 and (times[-1] > 70) == (noise_level == "sigma")
    loss = record["validation"][{"edm": "loss_x0", "flow": "loss_velocity"}[process]]
    assert record["metrics"]["frechet_classifier32"] > 0 and loss > 0


def test_bad_arguments_of_sample_are_rejected(results, tmp_path, capsys):
    snapshot = results / "methods/uniform/seed0/snapshots/0000002"
    arguments = ("sample", "--snapshot", snapshot, "--out", tmp_path / "x.npz", "--num", 4)
    for extra, status, message in (
        (("--steps", 1001), 2, "sampling.steps"),
        (("--scheduler", "{name: heun, s_churn: 1.0}"), 2, "sampling.scheduler.s_churn"),
        (("--scheduler", "dddim"), 2, "ddim"),
        (("--guidance-scale", 2.0), 2, "guidance_scale"),
        (("--autoencoder", tmp_path), 1, "--autoencoder"),
    ):
        assert kairos(*arguments, *extra) == status
        assert message in capsys.readouterr().err
    assert not (tmp_path / "x.npz").exists()


def test_images_of_other_programs_can_be_evaluated(results, tmp_path, monkeypatch, capsys):
    """An npz of images is evaluated against the experiment's reference, and against another npz."""
    monkeypatch.chdir(tmp_path)
    dataset = open_dataset(results / "dataset")
    np.savez(tmp_path / "own.npz", images=dataset.images[dataset.heldout[:340]])
    np.savez(tmp_path / "real.npz", images=dataset.images[dataset.train])
    arguments = ("evaluate", "--samples", "own.npz", "--out", "a.json")
    assert kairos(*arguments, "--reference", results / "reference") == 0
    record = json.loads((tmp_path / "a.json").read_text())
    floor = json.loads((results / "reference/record.json").read_text())["rows"]["floor"]["frechet_classifier32"]
    assert record["metrics"]["frechet_classifier32"] == pytest.approx(floor, rel=1e-6)
    assert record["metrics"]["frechet_classifier32_spread"] is None and "last 10 images" in record["warnings"][0]
    assert record["protocol"]["scheduler"] is None and record["step"] is None
    assert "validation" not in record

    assert kairos(*arguments, "--reference", "real.npz", "--extractor", results / "extractor", "--sets", 2) == 0
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["protocol"]["n_samples"] == 170 and record["protocol"]["sets"] == 2
    assert any("10 times" in warning for warning in record["warnings"])
    assert "10 times" in capsys.readouterr().err

    np.savez(tmp_path / "own.npz", images=dataset.images[:20])
    assert kairos(*arguments, "--reference", results / "reference") == 1
    assert "allowed: at least 330" in capsys.readouterr().err
    assert kairos(*arguments, "--reference", "real.npz", "--extractor", results / "extractor") == 1
    assert "allowed: more than 32" in capsys.readouterr().err
    assert kairos(*arguments, "--reference", "real.npz") == 2
    assert "--extractor" in capsys.readouterr().err


def make_reference(results, folder, **changes) -> dict:
    """Run stage reference with changes of the section `evaluation`; returns its record."""
    arguments = ["reference", "--config", write_config(folder, **changes), "--out", folder / "reference"]
    for part in ("dataset", "autoencoder", "latents", "extractor"):
        arguments += [f"--{part}", results / part]
    assert kairos(*arguments) == 0
    return json.loads((folder / "reference/record.json").read_text())


def test_the_held_out_images_can_be_the_reference(results, tmp_path):
    """COCO is compared with its validation images; the row floor would compare them with themselves."""
    record = make_reference(results, tmp_path, reference="heldout", sets=1)
    dataset = open_dataset(results / "dataset")
    assert record["reference"] == "heldout" and record["real_images"] == len(dataset.heldout)
    assert {*record["rows"]} == {"reconstruction", "gaussian", "noise"}
    statistics = np.load(tmp_path / "reference/statistics.npz")
    others = np.load(results / "reference/statistics.npz")
    assert not np.array_equal(statistics["mu"], others["mu"])


def test_a_reference_of_held_out_images_needs_some():
    values = {**EXPERIMENT, "dataset": {**EXPERIMENT["dataset"], "heldout": 0}}
    values["evaluation"] = {**EXPERIMENT["evaluation"], "reference": "heldout"}
    with pytest.raises(ConfigError, match=r"dataset\.heldout: got 0 held-out images with"):
        validate(values).resolve()


BIAS = "10 times the 32 features"


def test_the_bias_of_few_samples_is_reported_by_the_stage_reference_alone(results, tmp_path, capsys):
    """Evaluations keep the warning in their records, for the report."""
    record = make_reference(results, tmp_path, num_samples=200, sets=1)
    assert capsys.readouterr().err.count(BIAS) == 1 and BIAS in record["warnings"][0]
    jobs = [evaluate.EvaluationJob(results / f"{k}.npz", tmp_path / f"{k}.json") for k in (0, 1)]
    evaluate.run(jobs, tmp_path / "reference", results / "extractor")
    assert BIAS not in capsys.readouterr().err
    for job in jobs:
        assert any(BIAS in warning for warning in json.loads(job.out.read_text())["warnings"])


def test_the_bias_of_several_files_is_reported_once(results, tmp_path, capsys):
    images = open_dataset(results / "dataset").images
    np.savez(tmp_path / "real.npz", images=images)
    jobs = []
    for k in range(3):
        np.savez(tmp_path / f"{k}.npz", images=images[200 * k : 200 * (k + 1)])
        jobs.append(evaluate.EvaluationJob(tmp_path / f"{k}.npz", tmp_path / f"{k}.json"))
    evaluate.run(jobs, tmp_path / "real.npz", results / "extractor")
    warnings = [line for line in capsys.readouterr().err.splitlines() if BIAS in line]
    assert len(warnings) == 1 and "0.npz" in warnings[0] and "2 other" in warnings[0]


def test_reference_rows_use_at_most_all_held_out_images(results, tmp_path, capsys):
    """The rows floor and reconstruction use all held-out images if fewer images than samples are held out."""
    record = make_reference(results, tmp_path, num_samples=600, sets=1)
    assert "rows floor and reconstruction are of 449 images, all that are held out" in capsys.readouterr().err
    assert {name: row["n_samples"] for name, row in record["rows"].items()} == {
        "floor": 449, "reconstruction": 449, "gaussian": 600, "noise": 600,
    }  # fmt: skip
    evaluate.run(
        [evaluate.EvaluationJob(results / "1.npz", tmp_path / "x.json")], tmp_path / "reference", results / "extractor"
    )
    assert json.loads((tmp_path / "x.json").read_text())["protocol"]["n_samples"] == 600


@pytest.mark.long
def test_the_reference_can_be_a_split_or_a_file(results, tmp_path, monkeypatch):
    """References from training images, all images, and files of images or of moments have consistent distances."""
    monkeypatch.chdir(tmp_path)
    records = {which: make_reference(results, tmp_path, reference=which, sets=1) for which in ("train", "all")}
    assert [records[which]["real_images"] for which in ("train", "all")] == [1348, 1797]
    images = open_dataset(results / "dataset").images
    np.savez(tmp_path / "adm.npz", arr_0=np.array(images))
    np.savez_compressed(tmp_path / "own.npz", images=np.array(images))
    with np.load(tmp_path / "reference/statistics.npz") as file:
        np.savez(tmp_path / "edm.npz", mu=file["mu"], sigma=file["sigma"])
    metric = "frechet_classifier32"
    floor = records["all"]["rows"]["floor"][metric]
    assert floor != records["train"]["rows"]["floor"][metric]
    for name, changes in (("adm", {}), ("own", {}), ("edm", {"metrics": ["frechet", "validation"]})):
        record = make_reference(results, tmp_path, reference=f"{name}.npz", sets=1, **changes)
        assert record["rows"]["floor"][metric] == pytest.approx(floor, rel=1e-9), name
        assert record["reference"] == f"{name}.npz" and record["real_images"] == (0 if name == "edm" else 1797)
        has_hash_of_all_images = record["reference_hash"] == records["all"]["reference_hash"]
        assert has_hash_of_all_images == (name != "edm"), "the hash covers the moments and the number of images"
    half = make_reference(results, tmp_path, reference="adm.npz", sets=1, precision="bf16")
    assert half["reference_hash"] != records["all"]["reference_hash"], "the hash covers the precision"


@pytest.mark.parametrize(
    "arrays,message",
    [
        ({"mu": np.zeros(8), "sigma": np.eye(8)}, r"sigma in x\.npz has shape \(8, 8\), allowed: \(32, 32\)"),
        (
            {"mu": np.zeros(32), "sigma": np.eye(32)},
            r"x\.npz contains mu, sigma; the metrics need features of real images",
        ),
        ({"arr_0": np.zeros((40, 9, 9, 1), np.uint8)}, r"got \(9, 9, 1\).*allowed: \(8, 8, 1\)"),
        ({"arr_0": np.zeros((20, 8, 8, 1), np.uint8)}, r"x\.npz: got 20 images, allowed: more than 32"),
    ],
)
def test_incompatible_reference_files_are_rejected(results, tmp_path, monkeypatch, arrays, message):
    monkeypatch.chdir(tmp_path)
    np.savez("x.npz", **arrays)
    job = evaluate.EvaluationJob(results / "1.npz", Path("x.json"))
    with pytest.raises(KairosError, match=message):
        evaluate.run([job], Path("x.npz"), results / "extractor")
    Path("x.npz").write_bytes(b"no zip")
    with pytest.raises(KairosError, match=r"x\.npz: cannot be read as npz"):
        evaluate.run([job], Path("x.npz"), results / "extractor")


def test_a_full_disk_is_reported_with_the_file_of_the_features(monkeypatch):
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", partial(open, "/dev/full", "w+b", buffering=0))
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        FeatureBuffer().add(torch.zeros(4, 3))


def test_a_damaged_compressed_reference_is_reported(tmp_path):
    path = tmp_path / "real.npz"
    np.savez_compressed(path, mu=np.zeros(8), sigma=np.random.default_rng(0).normal(size=(8, 8)))
    content = bytearray(path.read_bytes())
    for position in range(40, len(content) // 2):  # bytes of the compressed arrays and their headers
        content[position] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(KairosError, match=r"^--reference: .*real\.npz: cannot be read as npz \(.+\)"):
        read_moments(path, 8, {"moments"}, "--reference")
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(KairosError, match=r"one\.npy: cannot be read as npz"):
        read_moments(tmp_path / "one.npy", 8, {"moments"}, "--reference")


def test_only_the_selected_metrics_are_computed(results, tmp_path):
    selected = ["frechet", {"name": "kid", "subsets": 5}, "precision", {"name": "recall", "neighbours": 5}, "mlperf8"]
    record = make_reference(results, tmp_path, metrics=selected, sets=1)
    columns, kinds = ("frechet_classifier32", "kid", "precision", "recall"), ("", "_spread", "_sets")
    assert {*record["rows"]["gaussian"]} - {"n_samples"} == {name + kind for name in columns for kind in kinds}
    assert record["rows"]["floor"]["precision"] > 0.7 > 0.1 > record["rows"]["noise"]["precision"]
    snapshot = results / "methods/uniform/seed0/snapshots/0000002"
    job = evaluate.EvaluationJob(results / "1.npz", tmp_path / "x.json", snapshot)
    evaluate.run([job], tmp_path / "reference", results / "extractor")
    evaluation = json.loads((tmp_path / "x.json").read_text())
    assert set(evaluation["validation"]) == {"mlperf8_epsilon"}
    assert evaluation["validation"]["mlperf8_epsilon"] == pytest.approx(1, abs=0.2)
    kairos_reference = ("--reference", tmp_path / "reference", "--metrics", "frechet")
    assert kairos("evaluate", "--samples", results / "1.npz", "--out", tmp_path / "y.json", *kairos_reference) == 2
    outside = ("--reference", results / "0.npz", "--extractor", results / "extractor", "--metrics", "frechet,recall")
    assert kairos("evaluate", "--samples", results / "1.npz", "--out", tmp_path / "y.json", *outside) == 0
    assert {"frechet_classifier32", "recall"} <= set(json.loads((tmp_path / "y.json").read_text())["metrics"])


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"metrics": ["fid"]}, "evaluation.metrics: fid needs evaluation.extractor inception, got classifier"),
        ({"metrics": ["frechet", "isc"]}, "isc needs evaluation.extractor inception"),
        ({"metrics": ["kid"]}, "got kid, allowed: exactly one of frechet, fid, fd_dinov2, by which"),
        ({"metrics": ["frechet", "kid", {"name": "kid", "subsets": 3}]}, "got kid twice"),
        ({"metrics": ["frechet", "fids"]}, "unknown metric 'fids'; did you mean 'fid'"),
        ({"metrics": ["frechet", {"name": "recall", "neighbours": 0}]}, "neighbours: got 0"),
        ({"reference": "test"}, "evaluation.reference: got 'test', allowed: train, heldout, all or the path of an npz"),
    ],
)
def test_check_rejects_metrics_that_lack_their_requirements(tmp_path, capsys, changes, message):
    assert kairos("check", write_config(tmp_path, **changes)) == 2
    assert message in capsys.readouterr().err


def test_samples_of_another_snapshot_are_rejected(results, tmp_path):
    record = json.loads((results / "methods/uniform/seed0/snapshots/0000002/snapshot.json").read_text())
    images, protocol = read_samples(results / "0.npz")
    write_samples(tmp_path / "x.npz", images, {**protocol, "identity": record["identity"], "step": 0})
    job = evaluate.EvaluationJob(
        tmp_path / "x.npz", tmp_path / "x.json", results / "methods/uniform/seed0/snapshots/0000002"
    )
    with pytest.raises(KairosError, match="another snapshot"):
        evaluate.run([job], results / "reference")


def brightness(options, measured, comparison):
    """Compute a metric of an extension."""
    return {"mean_feature": float(measured.features[:].mean())}


class MeanFeatureOptions(MetricOptions):
    """The metric of an extension."""

    code: ClassVar[str] = f"{__name__}:brightness"
    needs: ClassVar[tuple[str, ...]] = ("features",)

    name: str = "mean_feature"


def test_a_metric_is_added_by_name(results, tmp_path, monkeypatch):
    monkeypatch.setitem(METRICS, "mean_feature", MeanFeatureOptions)
    reference = shutil.copytree(results / "reference", tmp_path / "reference")
    record = read_record(reference / "record.json")
    metrics = [{"name": "mean_feature"}, *record["metrics"]]
    write_record(reference / "record.json", {**record, "metrics": metrics})
    job = evaluate.EvaluationJob(results / "1.npz", tmp_path / "x.json")
    evaluate.run([job], reference, results / "extractor")
    metrics = json.loads((tmp_path / "x.json").read_text())["metrics"]
    assert metrics["mean_feature"] > 0 and len(metrics["mean_feature_sets"]) == 2


def blank(options, process, grid, estimate, noise):
    """Return black images, as the solver of an extension."""
    return estimate(noise(0), grid[0]) * 0 - 1


class BlankOptions(SolverOptions):
    """The solver of an extension."""

    code: ClassVar[str] = f"{__name__}:blank"

    name: str = "blank"


def test_a_solver_is_added_by_name(results, tmp_path, monkeypatch):
    monkeypatch.setitem(SOLVERS, "blank", BlankOptions)
    snapshot = results / "methods/uniform/seed0/snapshots/0000002"
    arguments = ("--snapshot", snapshot, "--out", tmp_path / "x.npz", "--num", 3, "--scheduler", "blank")
    assert kairos("sample", *arguments) == 0
    images, protocol = read_samples(tmp_path / "x.npz")
    assert images.max() == 0 and protocol["scheduler"]["name"] == "blank"


def make_pixels(options, dataset, folder):
    """Return the record of an extractor of an extension: mean and standard deviation of the pixels of an image."""
    facts = {"name": "pixels2", "metric": "frechet_pixels2", "features": 2, "accuracy": None, "shape": None}
    return {**facts, "sha256": "pixels", "dataset_sha256": None, "files": {}}


def load(folder, record):
    from torch_fidelity import FeatureExtractorBase

    class Pixels(FeatureExtractorBase):
        @staticmethod
        def get_provided_features_list():
            return ("pixels",)

        def forward(self, images):
            values = images.float().flatten(1)
            return (torch.stack([values.mean(1), values.std(1)], dim=1),)

    return extractors.Extractor(record, Pixels("pixels", ["pixels"]), ("features",))


class PixelsOptions(ExtractorOptions):
    """The extractor of an extension."""

    code: ClassVar[str] = f"{__name__}:make_pixels"

    name: str = "pixels"


def test_an_extractor_is_added_by_name(results, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(EXTRACTORS, "pixels", PixelsOptions)
    config = write_config(tmp_path, extractor="pixels")
    shared = ("--config", config, "--dataset", results / "dataset")
    assert kairos("extractor", *shared, "--out", "extractor") == 0
    folders = ("--autoencoder", results / "autoencoder", "--latents", results / "latents", "--extractor", "extractor")
    assert kairos("reference", *shared, *folders, "--out", "reference") == 0
    assert kairos("evaluate", "--samples", results / "1.npz", "--reference", "reference", "--out", "x.json") == 0
    assert json.loads(Path("x.json").read_text())["metrics"]["frechet_pixels2"] > 0


def test_few_samples_give_the_requested_number_of_sets():
    sets, warnings = evaluate.split_into_sets(9, None, 5, "samples.npz")
    assert [*map(len, sets)] == [1] * 5 and "4 images" in warnings[0]
    assert len(evaluate.split_into_sets(9, 2, 5, "samples.npz")[0]) == 4
    with pytest.raises(KairosError, match="got 4 images, allowed: at least 5"):
        evaluate.split_into_sets(4, None, 5, "samples.npz")
