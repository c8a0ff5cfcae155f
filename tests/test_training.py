"""Tests of training: exact resume, identity, snapshots, damaged files, locks, and the number of computed steps."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from kairos import portable
from kairos.cli import main
from kairos.config import validate
from kairos.data.batches import Batch, Batches
from kairos.data.latents import open_latents
from kairos.files import DamagedError, read_json, sha256_bytes, write_text
from kairos.snapshots import check_snapshot, open_snapshot
from kairos.training import checkpoint, loop
from kairos.training.job import StoppedEarly, StopRequest
from kairos.training.provenance import changes_bits, describe_environment
from kairos.training.run_folder import RunFolder
from kairos_timesteps.errors import ConfigError, KairosError
from marks import mark_long
from specifications import Specification, examples, specifications
from training_case import build_training, experiment, make_latents, train, train_command, write_experiment

ENVIRONMENT = describe_environment(validate(experiment()).training, torch.device("cpu"))


@pytest.fixture(scope="module")
def latents(tmp_path_factory) -> Path:
    return make_latents(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def finished(latents, tmp_path_factory) -> Path:
    """Folder of an uninterrupted run with the methods adaptive and Min-SNR, 40 steps."""
    out = tmp_path_factory.mktemp("finished") / "run"
    record = train(experiment(), "adaptive", 0, out, latents, [0, 20, 40])
    assert record["steps_run"] == 40
    return out


@pytest.fixture(scope="module")
def half(latents, tmp_path_factory) -> Path:
    """Folder of the first 20 steps of the run `finished`."""
    out = tmp_path_factory.mktemp("half") / "run"
    assert train(experiment(), "adaptive", 0, out, latents, [0, 20])["steps_run"] == 20
    return out


def components(out: Path) -> dict[str, str]:
    """Return the hashes of the components of a finished run."""
    return read_json(out / "training.json")["components"]


def test_outputs_of_a_training_run_are_complete(finished):
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 41))
    assert lines[-1]["images"] == 640 and lines[-1]["sampler"]["updates"] == 7
    assert set(lines[0]) == {"step", "images", "loss", "mse", "lr", "grad_norm", "sampler"}
    assert lines[0]["lr"] == pytest.approx(2e-4) and lines[-1]["lr"] == 1e-3
    for step in (0, 20, 40):
        record = check_snapshot(finished / "snapshots" / f"{step:07d}")
        assert record["step"] == step and record["config"]["experiment"] == "case"
    assert read_json(finished / "snapshots" / "0000000" / "snapshot.json")["strategy"]["tv_from_start"] == 0
    assert read_json(finished / "snapshots" / "0000040" / "snapshot.json")["strategy"]["tv_from_start"] > 0


def test_two_training_runs_are_equal_to_the_last_byte(finished, latents, tmp_path):
    train(experiment(), "adaptive", 0, tmp_path / "run", latents, [0, 20, 40])
    assert components(tmp_path / "run") == components(finished)
    for name in ("checkpoint.pt", "metrics.jsonl", "training.json", "snapshots/0000040/snapshot.json"):
        assert (tmp_path / "run" / name).read_bytes() == (finished / name).read_bytes(), name


def test_segments_equal_one_training_run(half, finished, latents, tmp_path):
    out = shutil.copytree(half, tmp_path / "run")
    assert train(experiment(), "adaptive", 0, out, latents, [40])["steps_run"] == 20
    assert components(out) == components(finished)
    for name in ("checkpoint.pt", "metrics.jsonl"):
        assert (out / name).read_bytes() == (finished / name).read_bytes(), name


def test_raising_the_last_milestone_computes_only_the_new_steps(half, finished, latents, tmp_path):
    out = shutil.copytree(half, tmp_path / "run")
    shutil.rmtree(out / "snapshots")  # DVC and Snakemake do so before they rerun a job
    assert train(experiment(), "adaptive", 0, out, latents, [0, 20, 40])["steps_run"] == 20
    assert components(out) == components(finished) and check_snapshot(out / "snapshots" / "0000020")


def test_a_first_segment_is_published_again_without_its_checkpoint(finished, latents, tmp_path):
    out = tmp_path / "run"
    train(experiment(), "adaptive", 0, out, latents, [0, 10], snapshots_only=True)
    train(experiment(), "adaptive", 0, out, latents, [30])  # keeps two checkpoints: 20 and 30
    shutil.rmtree(out / "snapshots")
    assert train(experiment(), "adaptive", 0, out, latents, [0, 10], snapshots_only=True)["steps_run"] == 0
    assert check_snapshot(out / "snapshots" / "0000010")
    assert train(experiment(), "adaptive", 0, out, latents, [40])["steps_run"] == 10
    assert components(out) == components(finished)


def test_a_finished_run_without_a_published_record_computes_nothing_again(finished, latents, tmp_path):
    out = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(out / "snapshots")
    (out / "training.json").unlink()
    assert train(experiment(), "adaptive", 0, out, latents, [0, 20, 40])["steps_run"] == 0
    assert components(out) == components(finished) and check_snapshot(out / "snapshots" / "0000040")


@pytest.mark.parametrize("length", mark_long([30, 10], [30]))
def test_lowering_the_last_milestone_gives_the_shorter_run(finished, latents, tmp_path, length):
    """The run has a checkpoint at step 30 and none at step 10."""
    shorter, longer = tmp_path / "shorter", tmp_path / "longer"
    train(experiment(), "adaptive", 0, shorter, latents, [0, length])
    shutil.copytree(finished, longer)
    train(experiment(), "adaptive", 0, longer, latents, [0, length])
    for name in ("checkpoint.pt", "metrics.jsonl", "training.json"):
        assert (longer / name).read_bytes() == (shorter / name).read_bytes()
    records = [check_snapshot(out / f"snapshots/{length:07d}") for out in (longer, shorter)]
    assert records[0]["files"] == records[1]["files"] != {}


def test_a_run_may_have_a_milestone_at_each_of_many_steps(latents, tmp_path):
    steps = list(range(101))
    plain = experiment({"uniform": {}}, training__milestones=steps[1:], training__checkpoint_every=100)
    assert train(plain, "uniform", 0, tmp_path, latents, steps)["steps_run"] == 100
    assert train(plain, "uniform", 0, tmp_path, latents, steps)["steps_run"] == 0


@pytest.mark.parametrize("damaged", [bytes(40), b"\xff\xfe", b"12", b"{}"])
def test_a_run_resumes_after_a_power_loss_damaged_its_times(half, finished, latents, tmp_path, damaged):
    out = shutil.copytree(half, tmp_path / "run")
    (timing,) = out.glob(".state/*/timing.jsonl")
    with open(timing, "ab") as file:
        file.write(damaged + b"\n")
    assert train(experiment(), "adaptive", 0, out, latents, [0, 20, 40])["steps_run"] == 20
    assert components(out) == components(finished)


@pytest.mark.parametrize("damaged", [bytes(40), b"\xff\xfe", b"12", b"{}"])
def test_a_finished_part_is_published_after_a_power_loss_damaged_later_metrics(half, latents, tmp_path, damaged):
    out = shutil.copytree(half, tmp_path / "run")
    complete = components(out)
    (metrics,) = out.glob(".state/*/metrics.jsonl")
    with open(metrics, "ab") as file:
        file.write(damaged + b"\n")
    assert train(experiment(), "adaptive", 0, out, latents, [0, 20])["steps_run"] == 0
    assert components(out) == complete


@pytest.mark.parametrize(
    "change",
    [
        {"training__batch_size": 8},
        {"training__optimizer__lr": 2e-3},
        {"diffusion__prediction": "v"},
        {"model__depth": 2},
        {"training__ema__decay": 0.9},
    ],
)
def test_changed_parameters_never_resume_old_weights(latents, tmp_path, change):
    plain = experiment({"uniform": {}})
    if "model__depth" in change:
        changed = experiment({"uniform": {}}, model={**plain["model"], "depth": 2})
    else:
        base = {"training__milestones": [20, 40]}
        changed = experiment({"uniform": {}}, **base, **change)
    first = train(plain, "uniform", 0, tmp_path / "run", latents, [0, 2])
    second = train(changed, "uniform", 0, tmp_path / "run", latents, [0, 2])
    assert second["steps_run"] == 2 and second["identity"] != first["identity"]


def test_lengths_logging_and_names_do_not_change_the_identity(latents, tmp_path):
    plain = experiment({"uniform": {}})
    renamed = experiment(
        {"other": {}}, training__milestones=[3, 9], training__log_every=2, training__segments=2,
        training__checkpoint_every=7,
    )  # fmt: skip
    first = train(plain, "uniform", 0, tmp_path / "a", latents, [0, 1])
    second = train(renamed, "other", 0, tmp_path / "b", latents, [0, 1])
    assert first["identity"] == second["identity"]


def test_methods_of_a_seed_use_the_same_images_and_noise(latents, tmp_path):
    first_lines = []
    for method in ("uniform", "p2"):
        plain = experiment({"uniform": {}, "p2": {"weighting": "p2"}})
        train(plain, method, 3, tmp_path / method, latents, [0, 1])
        first_lines.append(json.loads((tmp_path / method / "metrics.jsonl").read_text().splitlines()[0]))
    assert first_lines[0]["mse"] == first_lines[1]["mse"] and first_lines[0]["loss"] != first_lines[1]["loss"]


def test_batches_visit_every_image_once_an_epoch_on_any_number_of_ranks(latents):
    opened = open_latents(latents)
    count = len(opened.train)  # 150
    whole = list(Batches(opened, 1, 60, range(60), ("class",)).steps(0, 5))
    halves = [list(Batches(opened, 1, 60, half, ("class",)).steps(0, 5)) for half in (range(17), range(17, 60))]
    for batch, *parts in zip(whole, *halves):
        assert torch.equal(batch.x0, torch.cat([part.x0 for part in parts]))
        assert torch.equal(batch.conditions["class"], torch.cat([part.conditions["class"] for part in parts]))
    labels = torch.cat([batch.conditions["class"] for batch in whole])
    expected = opened.load_conditions(opened.train)["class"].sort().values
    assert torch.equal(labels[:count].sort().values, expected) and torch.equal(labels[count:].sort().values, expected)
    assert not torch.equal(labels[:count], labels[count:])
    later = next(Batches(opened, 1, 60, range(60), ("class",)).steps(3, 5))
    assert later.step == 3 and torch.equal(later.x0, whole[3].x0)


def test_batches_drop_conditions_at_their_rate_and_resample_latents_on_any_number_of_ranks(latents):
    opened = open_latents(latents)
    assert opened.stochastic  # latents are sampled from their moments

    def batches(index: range, dropout: float = 0.3) -> list[Batch]:
        return list(Batches(opened, 1, 60, index, ("class",), dropout).steps(0, 20))

    whole, halves, undropped = batches(range(60)), [batches(range(17)), batches(range(17, 60))], batches(range(60), 0.0)
    dropped = []
    for batch, *parts, kept in zip(whole, *halves, undropped, strict=True):
        assert torch.equal(batch.x0, torch.cat([part.x0 for part in parts])) and torch.equal(batch.x0, kept.x0)
        labels = torch.cat([part.conditions["class"] for part in parts])
        assert torch.equal(batch.conditions["class"], labels)
        dropped.append(labels != kept.conditions["class"])
    share = torch.stack(dropped).double().mean().item()
    assert share == pytest.approx(0.3, abs=4 * (0.3 * 0.7 / 1200) ** 0.5)
    assert not torch.equal(dropped[0], dropped[1])
    by_item = {}
    for batch in whole:
        for item, x0 in zip(batch.visit["item"].tolist(), batch.x0, strict=True):
            by_item.setdefault(item, []).append(x0)
    assert all(not torch.equal(visits[0], visits[1]) for visits in by_item.values())


@pytest.mark.parametrize("damage", mark_long(["flip", "truncated", "empty", "header"], ["flip", "empty"]))
def test_a_damaged_checkpoint_is_detected_and_the_previous_one_used(half, finished, latents, tmp_path, damage, capsys):
    out = shutil.copytree(half, tmp_path / "run")
    last = max(out.glob(".state/*/checkpoints/*.ckpt"))
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 1
    header = content.replace(b"\n", b"x\n", 1)  # the length in the header is not a number
    last.unlink()
    last.write_bytes({"flip": bytes(content), "truncated": content[:-100], "empty": b"", "header": header}[damage])
    record = train(experiment(), "adaptive", 0, out, latents, [0, 20, 40])
    assert record["steps_run"] == 30  # from the checkpoint at step 10
    assert "the one before it is used" in capsys.readouterr().err
    assert components(out) == components(finished)


def test_a_run_whose_metrics_differ_from_the_checkpoint_starts_over(half, finished, latents, tmp_path):
    out = shutil.copytree(half, tmp_path / "run")
    metrics = next(out.glob(".state/*/metrics.jsonl"))
    write_text(metrics, metrics.read_text().replace('"loss": 0', '"loss": 9', 1))
    assert train(experiment(), "adaptive", 0, out, latents, [0, 20, 40])["steps_run"] == 40
    assert components(out) == components(finished)


def test_a_non_finite_loss_stops_at_once_and_keeps_the_last_good_state(latents, tmp_path):
    out = tmp_path / "run"
    plain = experiment({"uniform": {}}, training__optimizer__lr=1e-3)
    train(plain, "uniform", 0, out, latents, [0, 20])
    wild = experiment({"uniform": {}}, training__optimizer={"lr": 1e30, "warmup_steps": 0, "grad_clip": None})
    with pytest.raises(KairosError, match=r"step \d+: loss .* not finite"):
        train(wild, "uniform", 0, out, latents, [0, 20])
    assert check_snapshot(out / "snapshots" / "0000020")


def test_a_snapshot_opens_and_a_damaged_one_is_rejected(finished, tmp_path):
    folder = tmp_path / "0000040"
    shutil.copytree(finished / "snapshots" / "0000040", folder)
    models = {weights: open_snapshot(folder, weights).model for weights in ("ema", "raw")}
    x, t = torch.randn(2, 4, 4, 4), torch.tensor([3, 50])
    assert not torch.equal(models["ema"](x, t, {}), models["raw"](x, t, {}))
    path = folder / "ema" / "diffusion_pytorch_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedError, match="does not match"):
        open_snapshot(folder)
    with pytest.raises(KairosError, match="does not exist; make it with: kairos train"):
        open_snapshot(tmp_path / "nothing")


def test_verify_prints_components_and_finds_damage(finished, tmp_path, capsys):
    assert main(["verify", str(finished)]) == 0
    assert dict(line.split() for line in capsys.readouterr().out.splitlines()) == components(finished)
    for name in ("checkpoint.pt", "metrics.jsonl", "snapshots/0000020/raw/config.json"):
        copy = tmp_path / "copy"
        shutil.copytree(finished, copy, ignore=shutil.ignore_patterns(".state"))
        content = bytearray((copy / name).read_bytes())
        content[len(content) // 2] ^= 4
        (copy / name).write_bytes(content)
        for folder in (copy, tmp_path):  # the folder above is checked as a folder of results
            assert main(["verify", str(folder)]) == 1, name
            assert str(copy) in capsys.readouterr().err
        shutil.rmtree(copy)


def test_two_processes_cannot_train_at_once_and_a_kill_releases_the_lock(latents, tmp_path, commands, capsys):
    plain = experiment({"uniform": {}}, training__milestones=[100_000])
    line = train_command(write_experiment(tmp_path / "x.yaml", plain), "uniform", tmp_path / "run", latents)
    first = commands.start(line, tmp_path / "log")
    lock = tmp_path / "run" / ".state" / "lock"
    while not (lock.exists() and lock.read_text()):
        assert psutil.Process(first).status() != psutil.STATUS_ZOMBIE, (tmp_path / "log").read_text()
        time.sleep(0.05)
    assert main(line[3:]) == 1
    error = capsys.readouterr().err
    assert "another process" in error and f"pid {first}" in error
    os.kill(first, signal.SIGKILL)
    assert commands.wait(first) == -signal.SIGKILL
    assert train(plain, "uniform", 0, tmp_path / "run", latents, [0, 2])["step"] == 2


@pytest.mark.long
def test_a_run_resumes_under_other_versions_only_if_they_are_accepted(latents, tmp_path, monkeypatch):
    out, plain, here = tmp_path / "run", experiment({"uniform": {}}), torch.__version__
    monkeypatch.setattr(torch, "__version__", "2.0.1")
    train(plain, "uniform", 0, out, latents, [0, 20])
    monkeypatch.undo()
    before = {path: path.read_bytes() for path in out.rglob("*.*") if path.name != "progress.json" and path.is_file()}
    with pytest.raises(KairosError) as caught:
        train(plain, "uniform", 0, out, latents, [0, 20, 40])
    for words in ("0000020.ckpt", "torch 2.0.1", f"torch {here}", "--accept-versions", "--restart"):
        assert words in str(caught.value), words
    assert all(path.read_bytes() == content for path, content in before.items())

    assert train(plain, "uniform", 0, out, latents, [0, 20])["steps_run"] == 0  # published again, nothing computed
    assert read_json(out / "training.json")["provenance"]["torch"] == "2.0.1"
    config = write_experiment(tmp_path / "x.yaml", plain)
    assert main(train_command(config, "uniform", out, latents, "--accept-versions")[3:]) == 0
    for record in (out / "training.json", out / "snapshots/0000040/snapshot.json"):
        provenance = read_json(record)["provenance"]
        earlier = [(versions["torch"], versions["steps"]) for versions in provenance["resumed_under"]]
        assert provenance["torch"] == here and earlier == [("2.0.1", 20)]
        assert not provenance["rerun_is_bit_exact"] and "torch 2.0.1" in provenance["inexact_because"][0]
    assert read_json(out / "snapshots/0000020/snapshot.json")["provenance"]["resumed_under"] == []
    raised = experiment({"uniform": {}}, training__milestones=[20, 40, 41])
    train(raised, "uniform", 0, out, latents, [0, 20, 40, 41])  # the checkpoint now has the present versions
    assert len(read_json(out / "training.json")["provenance"]["resumed_under"]) == 1
    assert train(plain, "uniform", 0, out, latents, [0, 20, 40], restart=True)["steps_run"] == 40
    assert read_json(out / "training.json")["provenance"]["resumed_under"] == []


def test_a_checkpoint_hashes_only_new_metrics(tmp_path):
    store = RunFolder(tmp_path, "identity")
    store.state.mkdir(parents=True)
    for step, line in enumerate(("one\n", "two\n"), start=1):
        with open(store.metrics, "a") as metrics:
            metrics.write(line)
        store.save_checkpoint(step, {}, ENVIRONMENT)
        store.metrics.write_text("_" * store.metrics.stat().st_size)  # earlier bytes are not read again
    whole = b"one\ntwo\n"
    assert store.read_checkpoint(2, "cpu")["metrics"] == {"bytes": len(whole), "sha256": sha256_bytes(b"one\ntwo\n")}
    store.metrics.write_bytes(whole)
    assert store.resume(2, "cpu", ENVIRONMENT)["step"] == 2
    store.save_checkpoint(3, {}, ENVIRONMENT)
    assert store.read_checkpoint(3, "cpu")["metrics"] == store.read_checkpoint(2, "cpu")["metrics"]


def test_the_newest_checkpoint_of_ten_million_steps_is_that_with_the_largest_step(tmp_path):
    store = RunFolder(tmp_path, "identity")
    store.state.mkdir(parents=True)
    store.metrics.touch()
    for step in (9_999_000, 9_999_500, 10_000_000):  # the first name with eight digits sorts before the others
        store.save_checkpoint(step, {}, ENVIRONMENT)
    assert store.newest_checkpoint()["step"] == 10_000_000
    assert store.newest_checkpoint(latest_step=9_999_999)["step"] == 9_999_500
    assert len([*store.state.glob("checkpoints/*.ckpt")]) == 2


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_the_precision_changes_the_output_of_the_network_alone(precision, latents, monkeypatch):
    """Draws are those of fp32. Losses, gradients, weights, their average and the optimizer's moments are float32."""
    compute_losses, tensors = loop.predict_and_compute_losses, {}

    def record(training, *arguments, **keywords):
        prediction, terms = compute_losses(training, *arguments, **keywords)
        inputs = (prediction.x0, prediction.noise, prediction.t, prediction.x_t)
        tensors[training.settings.precision] = (inputs, *terms.values())
        return prediction, terms

    monkeypatch.setattr(loop, "predict_and_compute_losses", record)
    for name in ("fp32", precision):
        plain = experiment(training__precision=name)
        training = build_training(plain, "uniform", 0, open_latents(latents), torch.device("cpu"))
        steps = loop.train_steps(training, 1)
        next(steps)
        steps.close()
    (expected, _), (inputs, loss) = tensors["fp32"], tensors[precision]
    assert all(map(torch.equal, inputs, expected))
    state = training.state_dict()
    values = [loss, *state["model"].values(), *state["ema"].values()]
    values += [parameter.grad for parameter in training.parameters]
    values += [moment for moments in state["optimizer"]["state"].values() for moment in moments.values()]
    assert {value.dtype for value in values} == {torch.float32}


def test_bf16_and_condition_dropout_resume_exactly(latents, tmp_path):
    plain = experiment(
        {"uniform": {}},
        model={"name": "dit", "patch": 2, "width": 16, "depth": 1, "heads": 2, "conditions": ["class"]},
        training__precision="bf16",
        training__condition_dropout=0.3,
    )
    train(plain, "uniform", 0, tmp_path / "a", latents, [0, 6])
    train(plain, "uniform", 0, tmp_path / "b", latents, [0, 3])
    train(plain, "uniform", 0, tmp_path / "b", latents, [6])
    assert components(tmp_path / "a") == components(tmp_path / "b")


class StopAfter(StopRequest):
    """Stop request after a number of steps, in place of a signal."""

    def __init__(self, steps: int):
        super().__init__()
        self.steps = steps

    def reason_to_stop(self, saving: float) -> str:
        self.steps -= 1
        return "" if self.steps else "test"


def check_interrupted(specification: Specification, interrupted: int, microbatch: int | None, latents, folder) -> None:
    """Check that a run that stops after some steps and resumes ends with the bits of an uninterrupted run."""
    method = {"sampler": specification.sampler, "weighting": specification.weighting}
    process = {"name": specification.process}
    prediction = specification.prediction if specification.process == "vp" else None
    if specification.discrete:
        process = {"name": "discrete", "schedule": specification.process, "timesteps": specification.timesteps}
        prediction = specification.prediction
    settings = {"diffusion__process": process, "diffusion__prediction": prediction, "sampling__steps": 5}
    try:
        plain = experiment({"method": method}, training__microbatch=microbatch, **settings)
        specification.build()
    except (ConfigError, ValueError) as error:
        assert "got" in str(error)  # for example a sampler that requires the number of tokens
        event("rejected by validation")
        return
    train(plain, "method", 0, folder / "whole", latents, [0, 8])
    with pytest.raises(StoppedEarly):
        train(plain, "method", 0, folder / "parts", latents, [0, 8], stop_request=StopAfter(interrupted))
    assert train(plain, "method", 0, folder / "parts", latents, [0, 8])["steps_run"] == 8 - interrupted
    assert components(folder / "parts") == components(folder / "whole")


interruptions = st.integers(1, 7)
microbatches = st.sampled_from([None, 4, 5])


@examples(5)
@given(specifications(), interruptions, microbatches)
def test_an_interrupted_run_of_any_strategy_resumes_exactly(
    latents, tmp_path_factory, specification, interrupted, microbatch
):
    check_interrupted(specification, interrupted, microbatch, latents, tmp_path_factory.mktemp("runs"))


@pytest.mark.nightly
@examples(50)
@given(specifications(), interruptions, microbatches)
def test_interrupted_runs_of_many_strategies_resume_exactly(
    latents, tmp_path_factory, specification, interrupted, microbatch
):
    check_interrupted(specification, interrupted, microbatch, latents, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"training__compile": True}, "training.compile: autotuning may choose other kernels on another run"),
        ({"training__deterministic": False}, "training.deterministic is off"),
        ({}, None),
    ],
    ids=["compile", "not deterministic", "exact"],
)
def test_provenance_records_settings_that_are_not_exact(latents, tmp_path, monkeypatch, setting, reason):
    monkeypatch.setattr(torch, "compile", lambda model: model)  # the test needs only the setting
    train(experiment({"uniform": {}}, **setting), "uniform", 0, tmp_path, latents, [0, 1])
    for record in (tmp_path / "training.json", tmp_path / "snapshots/0000001/snapshot.json"):
        provenance = read_json(record)["provenance"]
        assert provenance["rerun_is_bit_exact"] is (reason is None)
        assert (provenance["bit_exact_on"] is None) is (reason is not None)
        assert provenance["inexact_because"] == ([reason] if reason else [])


def test_a_resume_on_another_kind_of_cpu_is_not_bit_exact(latents, tmp_path, monkeypatch):
    """A job that computes no step does not change the record of the machine that computed the steps."""
    here = portable.machine()
    plain, out = experiment({"uniform": {}}), tmp_path / "run"
    for processor, last in (("CPU of the first node", 2), ("CPU of the second node", 4)):
        monkeypatch.setattr(portable, "machine", lambda processor=processor: {**here, "processor": processor})
        train(plain, "uniform", 0, out, latents, [0, last])
    monkeypatch.undo()
    assert train(plain, "uniform", 0, out, latents, [0, 4])["steps_run"] == 0
    for record in (out / "training.json", out / "snapshots/0000004/snapshot.json"):
        provenance = read_json(record)["provenance"]
        assert not provenance["rerun_is_bit_exact"] and provenance["bit_exact_on"] is None
        assert "step 2 on CPU of the first node" in provenance["inexact_because"][0]
        assert provenance["device"].startswith("CPU of the second node")
    first = read_json(out / "snapshots/0000002/snapshot.json")["provenance"]
    assert first["rerun_is_bit_exact"] and first["bit_exact_on"].startswith("CPU of the first node")


def test_portable_kernels_promise_equal_bits_on_all_cpus(monkeypatch):
    here = portable.machine()
    environments = []
    for processor in ("first", "second"):
        monkeypatch.setattr(portable, "machine", lambda processor=processor: {**here, "processor": processor})
        training = validate(experiment({"uniform": {}}, training__deterministic="portable")).training
        environments.append(describe_environment(training, torch.device("cpu")))
    assert environments[0] == environments[1] and "AVX2" in environments[0]["device"]
    assert not changes_bits(*environments)
    for change in ({"processes": 2}, {"device": "NVIDIA H100"}, {"numpy": "2.0.0"}):
        assert changes_bits(environments[0], environments[0] | change)


def test_a_file_that_is_not_a_checkpoint_is_rejected():
    with pytest.raises(DamagedError, match="not a checkpoint"):
        checkpoint.read(Path(__file__))
