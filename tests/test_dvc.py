"""DVC as the store of results: one stage around Snakemake, whose outputs stay in place."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from kairos.files import hash_folder
from workflow_copy import Copy, copy_finished_run

NOT_STORED = ("report", "track")  # rules whose results contain clock times, or are in this machine's MLflow


def git(copy: Copy, *arguments: str) -> None:
    """Run git in a copy."""
    identity = ("-c", "user.name=t", "-c", "user.email=t@localhost")
    subprocess.run(["git", *identity, *arguments], cwd=copy.folder, check=True, capture_output=True)


def commit(copy: Copy, message: str) -> None:
    git(copy, "add", "-A")
    git(copy, "commit", "-qm", message)


def dvc(copy: Copy, *arguments: str) -> str:
    """Run DVC in a copy; returns its output."""
    ended = copy.run("dvc", *arguments)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def jobs_of(output: str) -> dict[str, int]:
    """Return the number of finished jobs by rule, without those that are not stored, from the output of Snakemake."""
    rules = re.findall(r"Finished jobid: \d+ \(Rule: (\w+)\)", output)
    return {rule: rules.count(rule) for rule in dict.fromkeys(rules) if rule not in (*NOT_STORED, "all")}


def to_do(copy: Copy) -> dict[str, int]:
    """Return the jobs that Snakemake would run, without those that are not stored."""
    return {rule: count for rule, count in copy.to_do(config="params.yaml").items() if rule not in NOT_STORED}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Copy:
    """A copy in which a small experiment has run, is recorded by `dvc repro`, committed and pushed."""
    copy = copy_finished_run(tmp_path_factory)
    git(copy, "init", "-q")
    commit(copy, "code")
    assert jobs_of(dvc(copy, "repro")) == {}, "Snakemake had computed everything"
    commit(copy, "recorded")
    set_remote(copy, tmp_path_factory.mktemp("store"))
    dvc(copy, "push")
    return copy


def set_remote(copy: Copy, location: Path) -> None:
    """Set the location of the stored data, as `dvc remote add --local --default store LOCATION` does."""
    text = f"[core]\n    remote = store\n['remote \"store\"']\n    url = {location}\n"
    (copy.folder / ".dvc/config.local").write_text(text)


@pytest.fixture
def clone(recorded: Copy, tmp_path: Path) -> Copy:
    """A clone of the recorded copy, without data."""
    subprocess.run(["git", "clone", "-q", str(recorded.folder), str(tmp_path / "clone")], check=True)
    copy = Copy.at(tmp_path / "clone")
    shutil.copy(recorded.folder / ".dvc/config.local", copy.folder / ".dvc/config.local")
    return copy


def test_every_output_of_snakemake_is_stored(tmp_path):
    copy = Copy(tmp_path)
    experiment = yaml.safe_load((tmp_path / "params.yaml").read_text())["experiment"]
    (stage,) = yaml.safe_load((tmp_path / "dvc.yaml").read_text())["stages"].values()
    outs = [next(iter(out)).replace("${experiment}", experiment) for out in stage["outs"]]
    missing = []
    for output, rule in copy.outputs("params.yaml").items():
        if rule not in NOT_STORED and not any(output.startswith(f"{out}/") for out in outs):
            missing.append(output)
    assert missing == []
    assert all(options["persist"] for out in stage["outs"] for options in out.values())


def test_the_repository_configures_no_remote_and_no_analytics(tmp_path):
    config = (Copy(tmp_path).folder / ".dvc/config").read_text()
    assert "url" not in config
    assert re.search(r"analytics = false", config)


@pytest.mark.long
def test_after_repro_nothing_reruns_and_the_recording_is_equal(recorded):
    assert "up to date" in dvc(recorded, "status")
    assert recorded.to_do(config="params.yaml") == {}
    assert recorded.run("git", "status", "--porcelain").stdout == ""
    ended = recorded.run("kairos", "verify", "--against", "dvc.results.json")
    assert ended.returncode == 0 and re.search(r"equal to dvc.results.json: \d+ same", ended.stdout), ended.stderr
    metrics = json.loads(dvc(recorded, "metrics", "show", "--json"))
    (values,) = metrics[""]["data"].values()
    assert values["data"]["adaptive"].keys() == {"distance", "val_loss"}
    assert "dvc_plots" in dvc(recorded, "plots", "show")


@pytest.mark.long
def test_pulled_results_are_valid(clone):
    dvc(clone, "pull", "results/tiny/latents")
    assert {path.name for path in (clone.folder / "results/tiny").iterdir()} == {"latents"}
    (clone.folder / "mine.yaml").write_text("an untracked file")
    dvc(clone, "pull")
    assert to_do(clone) == {} and "up to date" in dvc(clone, "status")
    assert clone.run("kairos", "verify", "--against", "dvc.results.json").returncode == 0
    assert clone.run("kairos", "verify", "results/tiny").returncode == 0
    status = clone.run("kairos", "status", "params.yaml").stdout
    assert "1 complete" in status and "outdated" not in status


@pytest.mark.long
def test_an_empty_clone_computes_equal_results(clone, recorded):
    shutil.rmtree(clone.folder / ".dvc/cache", ignore_errors=True)
    assert jobs_of(dvc(clone, "repro"))["train_2"] == 1
    ended = clone.run("kairos", "verify", "--against", str(recorded.folder / "dvc.results.json"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    folder = "results/tiny/methods/adaptive/seed0/snapshots/0000040/ema"
    assert hash_folder(clone.folder / folder) == hash_folder(recorded.folder / folder)


@pytest.mark.long
def test_an_edit_computes_its_results_alone_and_a_checkout_restores_the_earlier_ones(clone):
    dvc(clone, "pull")
    before = clone.folder / "params.yaml"
    text = before.read_text()
    before.write_text(text.replace("  steps: 5\n", "  steps: 6\n"))
    assert re.search(r"sampling.steps +5 +6", dvc(clone, "params", "diff"))
    assert "sampling" in dvc(clone, "status") and "Running stage" in dvc(clone, "repro", "--dry")
    assert jobs_of(dvc(clone, "repro")) == {"sample_1": 1, "sample_2": 1, "evaluate_1": 1, "evaluate_2": 1}
    ended = clone.run("kairos", "verify", "--against", "dvc.results.json")
    assert ended.returncode == 0, "the recording is of the new results"
    git(clone, "diff", "--exit-code", "--", "src")
    commit(clone, "six steps")
    git(clone, "checkout", "-q", "HEAD~1")
    ended = clone.run("kairos", "verify", "--against", "dvc.results.json")
    assert ended.returncode == 1 and "settings or code: sampling.steps: 5 → 6" in ended.stdout
    dvc(clone, "checkout")
    assert to_do(clone) == {} and "up to date" in dvc(clone, "status")
    git(clone, "checkout", "-q", "-")
    dvc(clone, "checkout")
    assert to_do(clone) == {} and "up to date" in dvc(clone, "status")


@pytest.mark.long
def test_experiments_of_dvc_run_in_place_and_in_a_temporary_folder(clone):
    dvc(clone, "pull")
    option = "methods.adaptive.sampler={name: adaptive, frequency: 5, queue: 5}"
    output = dvc(clone, "exp", "run", "-S", option)
    assert jobs_of(output)["train_2"] == 1 and "autoencoder" not in jobs_of(output)
    git(clone, "checkout", "-q", "--", ".")
    dvc(clone, "checkout")
    assert to_do(clone) == {}
    output = dvc(clone, "exp", "run", "--temp", "-S", "methods.adaptive.weighting=p2")
    assert jobs_of(output)["train_2"] == 1
    assert to_do(clone) == {}
    table = dvc(clone, "exp", "show", "--csv").splitlines()
    assert len(table) >= 4 and len(table[0].split(",")) < 80


@pytest.mark.long
def test_a_later_milestone_computes_the_new_steps_alone(clone):
    dvc(clone, "pull")
    with clone.edited("params.yaml", "[20, 40]", "[20, 40, 50]"):
        output = dvc(clone, "repro")
    steps = sum(int(steps) for steps in re.findall(r"(\d+) steps computed", output))
    assert steps in (10, 50), "a clone has no state of training, from which it could resume"


@pytest.mark.long
def test_a_pull_without_the_data_reports_the_remote(clone, tmp_path):
    set_remote(clone, tmp_path / "moved")
    ended = clone.run("dvc", "pull")
    assert ended.returncode != 0 and "Missing cache files" in ended.stdout + ended.stderr
