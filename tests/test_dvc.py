"""Stages of DVC against jobs of Snakemake: commands, outputs and dependencies are equal."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from kairos.config import load
from kairos.workflow.layout import Layout
from workflow_copy import Copy, copy_finished_run

FIRST = "workflow/dvc.yaml:dependencies"  # writes the fingerprints on which all other stages depend
LIST_STAGES = """
import json
from dvc.repo import Repo
stages = {}
repo = Repo(".")
for stage in repo.index.stages:
    inputs = [str(dep) for dep in stage.deps]
    params = {str(dep): dep.params for dep in stage.deps if hasattr(dep, "params")}
    outputs = [str(out) for out in stage.outs]
    stages[stage.addressing] = {"cmd": stage.cmd, "deps": inputs, "params": params, "outs": outputs}
edges = sorted((a.addressing, b.addressing) for a, b in repo.index.graph.edges)
print(json.dumps({"stages": stages, "edges": edges}))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the repository with everything committed."""
    copy = Copy(tmp_path_factory.mktemp("dvc"))
    for command in (["git", "init", "-q"], ["git", "add", "-A"], commit_command("all")):
        subprocess.run(command, cwd=copy.folder, check=True, capture_output=True)
    return copy


def commit_command(message: str) -> list[str]:
    return ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", "commit", "-qam", message]


def list_stages(copy: Copy) -> dict:
    """Return the stages of DVC by their address, and the edges of their graph."""
    ended = copy.run_forked("python", "-c", LIST_STAGES)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_stages_run_the_commands_and_have_the_outputs_of_snakemake_jobs(copy):
    stages = list_stages(copy)["stages"]
    stage_of_output = {name: stage for stage in stages for name in stages[stage]["outs"]}
    assert stages.pop(FIRST)["cmd"].startswith("kairos ledger fingerprints")
    jobs = copy.outputs("params.yaml")
    for output, rule in jobs.items():
        if rule == "track":  # imports results into this machine's MLflow, without outputs to version
            continue
        owners = {stage for out, stage in stage_of_output.items() if output == out or output.startswith(out + "/")}
        assert len(owners) == 1, f"{output} belongs to {owners or 'no stage'}"
        stage = owners.pop()
        assert stage.split("@")[0] == rule
        assert stages[stage]["cmd"].startswith(f"kairos ledger run {rule}")
    for stage, entry in stages.items():
        for out in entry["outs"]:
            inside = [output for output in jobs if output == out or output.startswith(out + "/")]
            assert inside or out.endswith("checkpoint.pt"), f"{stage}: {out} is an output of no job"
    assert {stage.split("@")[0] for stage in stages} == {rule for rule in jobs.values()} - {"track"}


def test_each_stage_depends_on_its_fields_and_on_the_results_that_it_reads(copy):
    graph = list_stages(copy)
    for stage, entry in graph["stages"].items():
        if stage != FIRST:
            name, _, item = stage.partition("@")
            key = f"{name}.{item.rpartition('-')[0]}.fields" if item else name
            assert entry["params"] == {"results/demo/dependencies.yaml": [key]}
    edges = {tuple(edge) for edge in graph["edges"]}
    for edge in (
        ("prepare", FIRST),
        ("train@log_normal-1", "encode"),
        ("sample@log_normal-1", "train@log_normal-1"),
        ("evaluate@log_normal-1", "sample@log_normal-1"),
        ("evaluate@log_normal-1", "reference"),
        ("report", "evaluate@log_normal-1"),
    ):
        assert edge in edges
    assert not any(a.startswith("train@log_normal") and b.startswith("train@") for a, b in edges)


def test_clock_times_are_outputs_of_no_stage(copy):
    layout = Layout(load(copy.folder / "params.yaml"), copy.folder / "params.yaml")
    timing = [f"{layout.training_folder(*training)}/timing.jsonl" for training in layout.trainings]
    timing += [layout.timing_file(stage) for stage in layout.shared_stages]
    timing += [layout.timing_file("train", "uniform_seed1", segment.number) for segment in layout.segments]
    for stage, entry in list_stages(copy)["stages"].items():
        for output in entry["outs"]:
            inside = [path for path in timing if path == output or path.startswith(output + "/")]
            assert not inside, f"{stage}: {output} contains {inside}"
            assert not {"timing", "timing.jsonl"} & set(Path(output).parts), f"{stage}: {output}"


def test_a_method_and_segments_added_to_params_need_no_edit_of_stages(copy):
    with (
        copy.edited("params.yaml", "methods:\n", "methods:\n  vlb: {weighting: vlb}\n"),
        copy.edited("params.yaml", "training:\n", "training:\n  segments: 2\n"),
    ):
        stages = list_stages(copy)["stages"]
        assert "train@vlb-1" in stages
        outs = stages["train@log_normal-1"]["outs"]
        for output, rule in copy.outputs("params.yaml").items():
            if rule.startswith("train_") and "methods/log_normal/seed1/" in output:
                assert any(output == out or output.startswith(out + "/") for out in outs), output


def test_dependencies_change_only_if_results_change(copy, tmp_path):
    def fingerprints() -> dict:
        ended = copy.run_forked("kairos", "ledger", "fingerprints", "--out", str(tmp_path / "table.yaml"))
        assert ended.returncode == 0, ended.stderr
        return yaml.safe_load((tmp_path / "table.yaml").read_text())

    before = fingerprints()
    with copy.edited("src/kairos/training/loop.py", "\n\n\n", "\n\n\n# a comment\n\n"):
        assert fingerprints() == before
    with copy.edited("src/kairos/training/state.py", "import math", "EXTRA = 1\nimport math"):
        after = fingerprints()
        assert {stage for stage in before if before[stage] != after[stage]} == {"train"}
    with copy.edited("params.yaml", "{sampler: log_normal}", "{sampler: {name: log_normal, s: 2}}"):
        after = fingerprints()
        changed = {method for method in before["train"] if before["train"][method] != after["train"][method]}
        assert changed == {"log_normal"}


def test_record_rejects_uncommitted_changes_and_stale_results(copy):
    with copy.edited("params.yaml", "experiment: demo", "experiment: demo "):
        ended = copy.run_forked("kairos", "ledger", "record")
        assert ended.returncode == 1
        assert "params.yaml" in ended.stderr and "commit them first" in ended.stderr
    ended = copy.run_forked("kairos", "ledger", "record")
    assert ended.returncode == 1
    assert "results are stale" in ended.stderr and "evaluate" in ended.stderr


def test_adopt_without_a_remote_reports_the_command_to_run(copy):
    ended = copy.run_forked("kairos", "ledger", "adopt")
    assert ended.returncode == 1
    assert "no DVC remote is configured" in ended.stderr and "dvc remote add --local" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_repository_configures_no_remote_and_no_analytics(copy):
    config = (copy.folder / ".dvc/config").read_text()
    assert "url" not in config
    assert re.search(r"analytics = false", config)


# The following tests run real jobs.


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A copy in which a small experiment has run, is recorded and committed."""
    copy = copy_finished_run(tmp_path_factory)
    git(copy, "init", "-q")
    git(copy, "add", "-A")
    subprocess.run(commit_command("all"), cwd=copy.folder, check=True, capture_output=True)
    gone = {"train@gone-0": {"cmd": "kairos ledger run train --method gone --seed 0"}}
    (copy.folder / "dvc.lock").write_text(yaml.safe_dump({"schema": "2.0", "stages": gone}))
    ended = copy.run_forked("kairos", "ledger", "record")
    assert ended.returncode == 0, ended.stderr
    assert "git add dvc.lock" in ended.stderr
    git(copy, "add", "dvc.lock", "workflow/dvc.lock", "dvc.machines.json")
    subprocess.run(commit_command("recorded"), cwd=copy.folder, check=True, capture_output=True)
    return copy


def git(copy: Copy, *arguments: str) -> None:
    """Run git in a copy."""
    subprocess.run(["git", *arguments], cwd=copy.folder, check=True, capture_output=True)


@pytest.mark.long
def test_after_record_neither_snakemake_nor_dvc_reruns_anything(recorded):
    stages = yaml.safe_load((recorded.folder / "dvc.lock").read_text())["stages"]
    assert "train@adaptive-0" in stages and "train@gone-0" not in stages
    assert recorded.to_do(config="params.yaml") == {}
    assert "up to date" in recorded.run("dvc", "status").stdout
    assert recorded.run("git", "status", "--porcelain").stdout == ""


def set_remote(copy: Copy, location: Path) -> None:
    """Set the location of the recorded data, as `dvc remote add --local --default store LOCATION` does."""
    (copy.folder / ".dvc/config.local").write_text(
        f"[core]\n    remote = store\n['remote \"store\"']\n    url = {location}\n"
    )


@pytest.mark.long
def test_adopt_in_a_clone_leaves_nothing_to_rerun(recorded, tmp_path):
    store, folder = tmp_path / "store", tmp_path / "clone"
    set_remote(recorded, store)
    assert recorded.run("dvc", "push").returncode == 0
    subprocess.run(["git", "clone", "-q", str(recorded.folder), str(folder)], check=True)
    clone = Copy.at(folder)
    set_remote(clone, tmp_path / "moved")
    ended = clone.run_forked("kairos", "ledger", "adopt")
    assert ended.returncode == 1 and "not all at" in ended.stderr
    set_remote(clone, store)
    ended = clone.run_forked("kairos", "ledger", "adopt")
    assert ended.returncode == 0, ended.stderr
    assert clone.to_do(config="params.yaml") == {}
    assert "up to date" in clone.run("dvc", "status").stdout
    assert clone.run("git", "status", "--porcelain").stdout == ""


@pytest.mark.long
def test_a_later_milestone_computes_the_new_steps_and_a_forced_reproduction_all_of_them(recorded):
    """DVC deletes all outputs of the training run before both; the run has two segments here."""
    folder = recorded.folder / "results/tiny/methods/adaptive/seed0"
    before = hash_training(folder)
    with recorded.edited("params.yaml", "[20, 40]", "[20, 50]"):
        assert count_steps(recorded.run("dvc", "repro", "train@adaptive-0")) == 10
        assert (folder / "milestones/0000020/milestone.json").exists()
    git(recorded, "checkout", "dvc.lock")
    assert recorded.run("dvc", "checkout", "--force").returncode == 0
    assert count_steps(recorded.run("dvc", "repro", "--force", "--single-item", "train@adaptive-0")) == 40
    assert hash_training(folder) == before
    assert reproduce(recorded) == []
    assert recorded.to_do(config="params.yaml") == {}


def reproduce(copy: Copy) -> list[str]:
    """Run `dvc repro`; returns the stages that it has run."""
    ended = copy.run("dvc", "repro")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return re.findall(r"Running stage '(.+)'", ended.stdout + ended.stderr)


@pytest.mark.long
def test_an_edit_reruns_its_stages_and_those_that_read_changed_results(recorded, tmp_path):
    """A comment or a message reruns no stage but the first, and leaves dvc.lock as it is.

    The stages of changed code run. Stages after them run only if the results that they read have changed.
    """
    copy = Copy.at(shutil.copytree(recorded.folder, tmp_path / "copy", symlinks=True))
    validation = "src/kairos/evaluation/validation.py"
    before = (copy.folder / "dvc.lock").read_text().splitlines()
    with (
        copy.edited("src/kairos/training/loop.py", "\n\n\n", "\n\n\n# a comment\n\n"),
        copy.edited("library/src/kairos_timesteps/samplers/adaptive.py", '"""', '"""Reworded: '),
        copy.edited("src/kairos/evaluation/evaluate.py", "generated from another", "generated, it seems, from another"),
        copy.edited("params.yaml", "experiment:", "# a comment\ntracking: {enabled: false}\nexperiment:"),
    ):
        assert reproduce(copy) == [FIRST]
        assert (copy.folder / "dvc.lock").read_text().splitlines() == before
        with copy.edited(validation, "\n\n\n", "\n\n\nEXTRA = 1\n\n"):
            assert reproduce(copy) == [FIRST, "evaluate@adaptive-0"]  # with equal results
            after = (copy.folder / "dvc.lock").read_text().splitlines()
            changed = [(old.strip(), new.strip()) for old, new in zip(before, after, strict=True) if old != new]
            assert [old.split(":")[0] for old, _ in changed] == ["code"]
            assert copy.to_do(config="params.yaml") == {}
        with copy.edited(validation, '"vlb": sum(vlb_contributions)', '"vlb": 2 * sum(vlb_contributions)'):
            assert reproduce(copy) == [FIRST, "evaluate@adaptive-0", "report"]
            assert "up to date" in copy.run("dvc", "status").stdout
            assert copy.to_do(config="params.yaml") == {}
    assert reproduce(copy) == []  # DVC's cache of runs has the results
    again = (copy.folder / "dvc.lock").read_text().splitlines()
    assert [line for line in again if "code:" in line] == [line for line in before if "code:" in line]
    assert copy.run("git", "status", "--porcelain").stdout in ("", " M dvc.lock\n")  # the report shows times


def count_steps(ended) -> int:
    """Return the number of training steps that a finished command has computed."""
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output
    return sum(int(steps) for steps in re.findall(r"(\d+) steps computed", output))


def hash_training(folder: Path) -> dict[str, str]:
    """Return the hashes of the files of a training run and of its snapshots."""
    from kairos.files import hash_folder, sha256_file

    files = {name: sha256_file(folder / name) for name in ("checkpoint.pt", "metrics.jsonl", "training.json")}
    return {**files, **hash_folder(folder / "milestones")}
