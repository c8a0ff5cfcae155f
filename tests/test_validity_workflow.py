"""Which jobs Snakemake runs: records of results decide, in a copy with computed results."""

import os
import re
import shutil
import time
from pathlib import Path

import pytest

from kairos.files import read_json, write_record
from workflow_copy import Copy, copy_finished_run

pytestmark = pytest.mark.long
FOLDER = "results/tiny/methods/adaptive/seed0"
LAST = {"report": 1, "track": 1}
EVALUATED = {"evaluate_1": 1, "evaluate_2": 1, **LAST}
SAMPLED = {"sample_1": 1, "sample_2": 1, **EVALUATED}
TRAINED = {"train_1": 1, "train_2": 1, **SAMPLED}
EVERYTHING = {"prepare": 1, "autoencoder": 1, "encode": 1, "extractor": 1, "reference": 1, **TRAINED}
SAMPLING = ("params.yaml", "  steps: 5\n", "  steps: 6\n")
DATA = ("params.yaml", "heldout: 0.25}", "heldout: 0.25, broken: skip}")
CODE = ("src/kairos/sampling/generate.py", "\n\n\n", "\n\n\nEXTRA = 1\n\n")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Copy:
    return copy_finished_run(tmp_path_factory)


@pytest.fixture
def copy(finished: Copy, tmp_path: Path) -> Copy:
    return Copy.at(shutil.copytree(finished.folder, tmp_path / "copy", symlinks=True))


def to_do(copy: Copy) -> dict[str, int]:
    return copy.to_do(config="params.yaml")


def run(copy: Copy, *arguments: str) -> str:
    ended = copy.snakemake(*arguments, config="params.yaml")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def forget_metadata(copy: Copy) -> None:
    shutil.rmtree(copy.folder / ".snakemake")


def change_times(copy: Copy) -> None:
    """Give files times in an order that contradicts the stages."""
    now = time.time() - 1000
    for index, path in enumerate(sorted((copy.folder / "results").rglob("*"), reverse=True)):
        os.utime(path, (now + index % 500, now + index % 500))


def make_older(copy: Copy) -> None:
    for path in (copy.folder / "results").rglob("*"):
        os.utime(path, (10**9, 10**9))


CIRCUMSTANCES = {"nothing else": lambda copy: None, "no metadata": forget_metadata, "other times": change_times}
CIRCUMSTANCES["years older"] = make_older


@pytest.mark.parametrize("circumstance", CIRCUMSTANCES)
def test_results_are_valid_by_their_records_alone(copy, circumstance):
    """An edit reruns what depends on it, whatever Snakemake's metadata and the files' times are."""
    CIRCUMSTANCES[circumstance](copy)
    assert to_do(copy) == {}
    with copy.edited(*SAMPLING):
        assert to_do(copy) == SAMPLED
    with copy.edited(*DATA):
        assert to_do(copy) == EVERYTHING
    with copy.edited(*CODE):
        assert to_do(copy) == SAMPLED
    assert to_do(copy) == {}


def test_an_edit_that_gives_equal_data_ends_at_the_data_set(copy):
    """All later jobs find their inputs unchanged; with other images they compute."""
    with copy.edited(*DATA):
        output = run(copy)
        assert output.count("nothing to compute") >= 3 + 4 and "0 steps to do" in output
        assert not re.search(r"[1-9]\d* steps computed", output) and "images in results" not in output
        assert to_do(copy) == {}
    assert "autoencoder" in to_do(copy), "the record says what the data set was computed from"


def test_a_deleted_or_damaged_record_is_computed_again(copy):
    for name, jobs in (
        ("evaluation/0000040.json", {"evaluate_2": 1, **LAST}),
        ("samples/0000040.npz", {"sample_2": 1, "evaluate_2": 1, **LAST}),
        ("samples/0000020.png", {"sample_1": 1, "evaluate_1": 1, **LAST}),
    ):
        path = copy.folder / FOLDER / name
        before = path.read_bytes()
        path.unlink()
        assert to_do(copy) == jobs, name
        if path.suffix == ".json":
            path.write_bytes(before[:-40] + b"9" + before[-39:])
            assert to_do(copy) == jobs, f"{name}: damaged"
        path.write_bytes(before)
    assert to_do(copy) == {}


def test_a_record_that_is_dated_in_the_future_is_an_error(copy):
    later = time.time() + 10_000
    os.utime(copy.folder / FOLDER / "evaluation/0000040.json", (later, later))
    ended = copy.snakemake("--dry-run", config="params.yaml")
    output = ended.stdout + ended.stderr
    assert ended.returncode != 0 and re.search(r"0000040\.json: dated \d+ s in the future", output)


def test_results_of_other_code_are_accepted_or_computed_again(copy):
    """Accepted results stay valid with what is computed later, and their records list the code."""
    with copy.edited("src/kairos/training/state.py", "import math", "EXTRA = 1\nimport math"):
        assert to_do(copy) == TRAINED
        status = copy.run("kairos", "status", "params.yaml").stdout
        assert "differ by code only" in status and "outdated" not in status
        with copy.edited(*SAMPLING):
            ended = copy.run("kairos", "accept", "params.yaml")
            assert (
                ended.returncode == 2
                and "sampling.steps: 5 → 6 changed, and accept is for changes of code" in ended.stderr
            )
            assert to_do(copy) == TRAINED
        ended = copy.run("kairos", "accept", "params.yaml")
        assert ended.returncode == 0, ended.stderr
        assert to_do(copy) in ({}, LAST)
        record = read_json(copy.folder / FOLDER / "snapshots/0000040/snapshot.json")
        assert len(record["computed_from"]["accepted"]) == 1
        page = copy.run("kairos", "report", "params.yaml")
        assert page.returncode == 0, page.stderr
        assert "Computed with other code: adaptive seed 0." in (copy.folder / "results/tiny/report.html").read_text()
        with copy.edited("params.yaml", "[20, 40]", "[20, 40, 50]"):
            assert re.findall(r"(\d+) steps computed", run(copy)) == ["10"], "it resumes from the accepted state"
            assert to_do(copy) == {}
    assert "train_1" in to_do(copy), "the earlier code is another one now"
    output = run(copy)
    assert "steps computed" not in output and to_do(copy) == {}, "its own state"
    record = read_json(copy.folder / FOLDER / "snapshots/0000040/snapshot.json")
    assert "accepted" not in record["computed_from"]


def test_valid_training_runs_without_a_state_are_not_trained_again(copy):
    """A pulled run has no state. A damaged one is trained."""
    shutil.rmtree(copy.folder / FOLDER / ".state")
    output = run(copy, "--forcerun", "train_1", "train_2", "--until", "train_2")
    assert output.count("unchanged, 0 steps to do") == 2 and "steps computed" not in output
    with copy.edited(*DATA):
        assert "steps computed" not in run(copy) and to_do(copy) == {}
    weights = copy.folder / FOLDER / "snapshots/0000040/ema/diffusion_pytorch_model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(before[:-4] + b"bad!")
    output = run(copy, "--forcerun", "train_2", "--until", "train_2")
    assert "40 steps computed" in output and weights.read_bytes() == before


def test_samples_that_do_not_fit_their_record_are_not_evaluated(copy):
    """A job that is killed between its samples and their record leaves them so."""
    shutil.copy(copy.folder / FOLDER / "samples/0000020.npz", copy.folder / FOLDER / "samples/0000040.npz")
    (copy.folder / FOLDER / "evaluation/0000040.json").unlink()
    ended = copy.snakemake(config="params.yaml")
    output = ended.stdout + ended.stderr
    remedy = re.search(r"0000040\.npz: damaged.*--forcerun (\S+)", output)
    assert ended.returncode != 0 and remedy, output
    run(copy, "--forcerun", remedy[1])
    assert to_do(copy) == {}


def test_an_edit_of_the_results_of_one_stage_reruns_what_reads_them(copy):
    """Latents that somebody replaced, with a record that fits them, are other inputs."""
    path = copy.folder / "results/tiny/latents/record.json"
    record = read_json(path)
    write_record(path, {**record, "content_sha256": "0" * 64})
    assert to_do(copy).keys() >= {"train_1", "train_2", "sample_1", "evaluate_2", "reference"}


def test_a_setting_of_a_shared_stage_counts_without_metadata_and_methods(copy):
    """The autoencoder is trained again although nothing but its own record tells its settings."""
    forget_metadata(copy)
    shutil.rmtree(copy.folder / "results/tiny/methods")
    (copy.folder / "results/tiny/report.html").unlink()
    with copy.edited("params.yaml", "channels: [16], steps: 30", "channels: [16], steps: 35"):
        assert to_do(copy)["autoencoder"] == 1
        status = copy.run("kairos", "status", "params.yaml").stdout
        assert "autoencoder.steps: 30 → 35" in status


def test_a_forced_job_replaces_damaged_files(copy):
    """The record is valid, so Snakemake plans nothing by itself; `kairos verify` finds the damage."""
    path = copy.folder / "results/tiny/latents/mean.npy"
    before = path.read_bytes()
    path.write_bytes(before[:-4] + b"bad!")
    assert to_do(copy) == {}
    ended = copy.run("kairos", "verify", "results/tiny")
    assert ended.returncode == 1 and "mean.npy" in ended.stderr
    assert "mean.npy" in run(copy, "--forcerun", "encode", "--until", "encode")
    assert path.read_bytes() == before and copy.run("kairos", "verify", "results/tiny").returncode == 0
    assert to_do(copy) == {}
