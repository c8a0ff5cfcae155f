"""`kairos export`: other tools read the measured values, and results that cannot be exported are rejected."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import results_tree
import training_case
from kairos import cli
from kairos.config import load
from kairos.files import read_json, write_record
from kairos.report.collect import collect


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Results of two methods with one seed."""
    config, results = results_tree.write(tmp_path_factory.mktemp("export"), seeds=(0,), methods=("uniform", "adaptive"))
    return results, collect(load(config), results)


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory):
    """A snapshot, with an evaluation, of a U-Net trained on digits, in the folders of an experiment."""
    root = tmp_path_factory.mktemp("hub")
    latents = training_case.make_latents(root / "results" / "case")
    unet = {"name": "unet", "channels": 8, "multipliers": [1, 1], "blocks": 1, "attention": [], "norm_groups": 4}
    config = training_case.write_experiment(root / "case.yaml", training_case.experiment(model=unet))
    out = root / "results" / "case" / "methods" / "adaptive" / "seed0"
    assert cli.main(training_case.train_command(config, "adaptive", out, latents)[3:]) == 0
    path = root / "results" / "case" / "dataset" / "record.json"
    facts = {"source": "digits", "width": 8, "height": 8, "channels": 1, "train_count": 150, "heldout_count": 50}
    write_record(path, read_json(path) | facts)
    folder = out / "snapshots" / "0000040"
    metrics = {"fid": 12.34, "fid_spread": 0.5, "fid_sets": [1.0]}
    protocol = {"identity": read_json(folder / "snapshot.json")["identity"], "scheduler": "ddim", "steps": 20}
    record = {"step": 40, "metrics": metrics, "protocol": protocol, "warnings": []}
    write_record(out / "evaluation" / "0000040.json", record)
    return folder


def rejection(capsys, *arguments):
    """Run `kairos export` with arguments that it rejects; returns its message of one line."""
    assert cli.main(["export", *map(str, arguments)]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.long
def test_tensorboard_reads_the_curves_at_their_times_and_the_grids(tree, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, results = tree
    assert cli.main(["export", "tensorboard", str(folder), "--out", str(tmp_path / "events")]) == 0
    for training in results.runs:
        events = EventAccumulator(str(tmp_path / "events" / training.method / "seed0")).Reload()
        distances = events.Scalars(results.distance_metric)
        assert [event.step for event in distances] == [0, 100, 200, 400]
        expected = [snapshot.measured_values[results.distance_metric] for snapshot in training.snapshots]
        assert [event.value for event in distances] == pytest.approx(expected, rel=1e-6)
        assert distances[-1].wall_time - distances[0].wall_time == pytest.approx(
            training.seconds_by_step[400], abs=0.01
        )
        assert [event.step for event in events.Images("samples")] == [0, 100, 200, 400]


@pytest.mark.long
def test_wandb_gets_an_offline_run_per_training_run(tree, tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    folder, results = tree
    out = tmp_path / "runs"
    subprocess.run([sys.executable, "-m", "kairos", "export", "wandb", str(folder), "--out", str(out)], check=True)
    files = {path: path.read_bytes() for path in out.glob("wandb/offline-run-*/*.wandb")}
    assert len(files) == len(results.runs)
    for content in files.values():
        assert results.distance_metric.encode() in content and b"sampler.name" in content


def test_a_missing_tool_is_reported_with_what_installs_it(tree, tmp_path, monkeypatch, capsys):
    folder, _ = tree
    for name, module in (("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")):
        monkeypatch.setitem(sys.modules, module, None)
        message = rejection(capsys, name, folder, "--out", tmp_path / "new")
        assert name in message and "make setup" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_snapshot_with_its_card_opens_in_diffusers_and_samples(snapshot, tmp_path):
    from diffusers import DDPMScheduler, UNet2DModel

    from kairos.snapshots import open_snapshot

    out = tmp_path / "model"
    assert cli.main(["export", "hub", str(snapshot), "--out", str(out)]) == 0
    card = (out / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["library_name"] == "diffusers" and front["tags"] == ["diffusion", "kairos"]
    record = read_json(snapshot / "snapshot.json")
    for text in ("# case: adaptive, seed 0, 40 steps", "| fid | 12.34 | 0.50 |", "scheduler: ddim", record["identity"]):
        assert text in card
    model = next(yaml.safe_load(block)["model"] for block in re.findall("```yaml\n(.*?)```", card, re.DOTALL))
    assert model["channels"] == 8 and "size" not in model  # the published size has 128 channels
    assert record["dataset_sha256"] in card and "frequency: 4" in card and "None" not in card
    for block in re.findall("```yaml\n(.*?)```", card, re.DOTALL):
        assert isinstance(yaml.safe_load(block), dict)
    (code,) = [block for block in re.findall("```python\n(.*?)```", card, re.DOTALL) if "UNet2DModel" in block]
    scope = {"folder": str(out)}
    exec(code, scope)  # the example of the card
    assert isinstance(scope["model"], UNet2DModel)
    assert DDPMScheduler.from_pretrained(out, subfolder="scheduler").config.num_train_timesteps == 100
    assert open_snapshot(out).record["files"] == record["files"]


@pytest.mark.long
def test_the_card_excludes_evaluations_of_another_training_run(snapshot, tmp_path):
    path = snapshot.parents[1] / "evaluation" / "0000040.json"
    before = path.read_text()
    path.write_text(before.replace(read_json(snapshot / "snapshot.json")["identity"], "0" * 64))
    try:
        assert cli.main(["export", "hub", str(snapshot), "--out", str(tmp_path / "model")]) == 0
    finally:
        path.write_text(before)
    card = (tmp_path / "model" / "README.md").read_text()
    assert "Not evaluated." in card and "12.34" not in card


def test_published_weights_have_a_card_too(snapshot, tmp_path):
    alone = tmp_path / "weights"
    shutil.copytree(snapshot, alone)
    unknown = dict.fromkeys(("autoencoder_sha256", "dataset_sha256"))
    record = {"method": "imported", "imported": {"file": "model.pt", "sha256": "1" * 64}, "images_seen": 0, **unknown}
    write_record(alone / "snapshot.json", read_json(alone / "snapshot.json") | record)
    assert cli.main(["export", "hub", str(alone), "--out", str(tmp_path / "model")]) == 0
    card = (tmp_path / "model" / "README.md").read_text()
    assert "Published weights of a diffusion model, `model.pt`" in card and "Not evaluated." in card
    assert "draws images of shape 4×4×4" in card and not (tmp_path / "model" / "autoencoder").exists()


def test_hub_lists_the_snapshots_in_a_folder_of_results(tree, monkeypatch, capsys):
    results, collected = tree
    expected = sorted(
        str(results / "methods" / run.method / f"seed{run.seed}" / "snapshots" / f"{snapshot.step:07}")
        for run in collected.runs
        for snapshot in run.snapshots
    )
    for path in (results, results.parent):
        assert cli.main(["export", "hub", str(path)]) == 0
        assert capsys.readouterr().out.splitlines() == expected
    run = results / "methods" / "uniform" / "seed0"
    for path in (results / "methods/uniform", run, run / "snapshots"):
        assert cli.main(["export", "hub", str(path)]) == 0
        assert capsys.readouterr().out.splitlines() == [line for line in expected if line.startswith(str(run))]
    monkeypatch.chdir(results.parents[1])
    assert cli.main(["export", "hub", "tiny.yaml"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(expected)


def test_hub_with_out_and_several_snapshots_lists_them_and_exports_nothing(tree, tmp_path, capsys):
    results, _ = tree
    out = tmp_path / "new"
    assert cli.main(["export", "hub", str(results), "--out", str(out)]) == 2
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 8 and all("/snapshots/" in line for line in printed.out.splitlines())
    assert "PATH" in printed.err and str(results) in printed.err and printed.err.count("\n") == 1
    assert not out.exists()


def test_an_export_requires_out(tree, snapshot, capsys):
    for words in (("hub", snapshot), ("tensorboard", tree[0])):
        assert "--out" in rejection(capsys, *words)


def test_what_cannot_be_exported_is_rejected_in_one_line(tree, snapshot, tmp_path, capsys):
    folder, _ = tree
    new, existing = tmp_path / "new", tmp_path / "existing"
    existing.mkdir()
    assert f"--out: got {existing}, which exists" in rejection(capsys, "hub", snapshot, "--out", existing)
    for path in (folder, folder / "methods" / "uniform" / "seed0", Path("nowhere")):
        assert f"PATH: got {path}, allowed: a snapshot's folder" in rejection(capsys, "hub", path, "--out", new)
    assert "nowhere" in rejection(capsys, "wandb", "nowhere", "--out", new)
    assert "no training run there" in rejection(capsys, "tensorboard", existing, "--out", new)
    weights = snapshot / "ema" / "diffusion_pytorch_model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(before[:-1] + b"x")
    try:
        assert "diffusion_pytorch_model.safetensors" in rejection(capsys, "hub", snapshot, "--out", new)
    finally:
        weights.write_bytes(before)
    assert [path.name for path in tmp_path.iterdir()] == ["existing"]
