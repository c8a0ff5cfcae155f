"""Report, comparison, export, MLflow and sampling still read results of version 0.1.0 (November 2026).

``fixtures/results_2026_11.tar.xz`` holds a complete experiment of two methods: a tiny DiT, 8 steps, 200 digits. It was
made by Snakemake from the experiment file that it contains, ``results/kept.yaml``.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from kairos.cli import main
from kairos.config.experiment import load
from kairos.files import read_json
from kairos.strategy_file import parse_strategy_csv

ARCHIVE = Path(__file__).with_name("fixtures") / "results_2026_11.tar.xz"
METHODS = {"uniform", "loss_rms"}
RUN = Path("results/kept/loss_rms/seed0")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with the results, which is the working directory during the tests."""
    folder = tmp_path_factory.mktemp("kept")
    shutil.unpack_archive(ARCHIVE, folder)
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def test_comparison_and_report_read_every_method_and_value(project, capsys):
    assert main(["compare", "results/kept", "--format", "json"]) == 0
    text = capsys.readouterr().out
    assert all(method in text for method in METHODS)
    distance = read_json(RUN / "evaluation" / "0000008.json")["metrics"]["frechet_classifier8"]
    shown = {row["method"]: row["value"] for row in json.loads(text)}
    assert shown["loss_rms"] == pytest.approx(distance)
    assert main(["report", "results/kept"]) == 0
    page = Path("results/kept/report.html").read_text(encoding="utf-8")
    assert all(method in page for method in METHODS) and "data:image/png" in page


@pytest.mark.parametrize("method", sorted(METHODS))
def test_checkpoints_and_snapshots_pass_verification(project, capsys, method):
    assert main(["verify", f"results/kept/{method}/seed0"]) == 0
    hashes = dict(line.split() for line in capsys.readouterr().out.splitlines())
    recorded = read_json(Path(f"results/kept/{method}/seed0/training.json"))["components"]
    assert hashes == recorded
    assert main(["verify", f"results/kept/{method}/seed0/milestones/0000008"]) == 0


def test_damage_in_a_checkpoint_is_detected(project, tmp_path, capsys):
    shutil.copytree(RUN, tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoint.pt"
    content = bytearray(checkpoint.read_bytes())
    content[len(content) // 2] ^= 1
    checkpoint.write_bytes(content)
    assert main(["verify", str(tmp_path / "run")]) == 1
    assert "checkpoint.pt" in capsys.readouterr().err


def test_samples_of_a_snapshot_have_the_recorded_pixels(project, tmp_path):
    recorded = np.load(RUN / "samples" / "0000008.npz")["images"]
    arguments = ["--milestone", str(RUN / "milestones" / "0000008"), "--out", str(tmp_path / "again.npz")]
    settings = ["--num", str(len(recorded)), "--steps", "4", "--scheduler", "{name: ddim, spacing: trailing}"]
    folders = ["--autoencoder", "results/kept/autoencoder", "--latents", "results/kept/latents"]
    assert main(["sample", *arguments, *settings, *folders]) == 0
    again = np.load(tmp_path / "again.npz")["images"]
    assert np.abs(again.astype(int) - recorded.astype(int)).max() <= 1  # another CPU may round differently


def test_a_snapshot_is_exported_for_the_hub_and_curves_for_tensorboard(project, tmp_path):
    assert main(["export", "hub", str(RUN / "milestones" / "0000008"), "--out", str(tmp_path / "hub")]) == 0
    assert (tmp_path / "hub" / "README.md").is_file() and list((tmp_path / "hub").rglob("*.safetensors"))
    assert main(["export", "tensorboard", "results/kept", "--out", str(tmp_path / "curves")]) == 0
    assert list((tmp_path / "curves").rglob("events.*"))


@pytest.mark.long
def test_results_are_imported_into_mlflow(project, tmp_path, monkeypatch):
    import mlflow

    address = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    assert main(["track", "results/kept", "--out", str(tmp_path / "tracking.json")]) == 0
    experiment_ids = [experiment.experiment_id for experiment in _list_experiments(address)]
    runs = mlflow.MlflowClient(address).search_runs(experiment_ids)
    assert {run.data.params.get("method", run.data.tags.get("method")) for run in runs} >= METHODS


def _list_experiments(address):
    import mlflow

    return mlflow.MlflowClient(address).search_experiments()


def test_the_strategy_state_of_the_checkpoint_is_loaded(project):
    from kairos.training.checkpoint import read
    from kairos_timesteps.strategy import Strategy

    state = read(RUN / "checkpoint.pt")["strategy"]
    options = {"start": 2, "frequency": 2}
    strategy = Strategy("loss_rms+min_snr", "linear", timesteps=50, sampler=options)
    strategy.load_state_dict(state)
    assert strategy.step == 8 and strategy.sampler.statistics()["updates"] == 4
    table = parse_strategy_csv((RUN / "milestones" / "0000008" / "strategy.csv").read_text(encoding="utf-8"))
    np.testing.assert_allclose(strategy.table()["p"], table["p"], rtol=1e-12)


def test_training_under_other_code_starts_a_new_run_and_reports_it(project, tmp_path, capsys):
    """The identity of a run contains its code: the state of other code is neither resumed nor deleted."""
    folder = tmp_path / "seed0"
    shutil.copytree(RUN, folder)
    state = next(path for path in (folder / ".state").iterdir() if path.is_dir())
    renamed = state.with_name("0123456789abcdef")  # the identity of a run of other code
    state.rename(renamed)
    record = json.loads((folder / "training.json").read_text())
    (folder / "training.json").write_text(json.dumps(record | {"identity": renamed.name}))
    arguments = ["--config", "results/kept.yaml", "--method", "loss_rms", "--seed", "0", "--out", str(folder)]
    assert main(["train", *arguments, "--latents", "results/kept/latents"]) == 0
    output = capsys.readouterr()
    assert "new run" in output.err and "code" in output.err and "8 steps computed" in output.err
    assert renamed.is_dir() and load("results/kept.yaml").methods.keys() == METHODS
