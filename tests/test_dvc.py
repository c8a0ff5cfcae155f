"""DVC's stages against Snakemake's jobs: the same commands, the same outputs, the same dependencies."""

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

FIRST = "workflow/dvc.yaml:dependencies"  # writes what the others depend on
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
    copy = Copy(tmp_path_factory.mktemp("dvc"))
    for command in (["git", "init", "-q"], ["git", "add", "-A"], commit("all")):
        subprocess.run(command, cwd=copy.folder, check=True, capture_output=True)
    return copy


def commit(message: str) -> list[str]:
    return ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", "commit", "-qam", message]


def listed(copy: Copy) -> dict:
    ended = copy.run_forked("python", "-c", LIST_STAGES)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_stages_are_snakemake_jobs(copy):
    stages = listed(copy)["stages"]
    made = {name: stage for stage in stages for name in stages[stage]["outs"]}
    assert stages.pop(FIRST)["cmd"].startswith("kairos ledger fingerprints")
    jobs = copy.outputs("params.yaml")
    for output, rule in jobs.items():
        if rule == "track":  # an import into this machine's MLflow: nothing to version
            continue
        owners = {stage for out, stage in made.items() if output == out or output.startswith(out + "/")}
        assert len(owners) == 1, f"{output} belongs to {owners or 'no stage'}"
        stage = owners.pop()
        assert stage.split("@")[0] == rule
        assert stages[stage]["cmd"].startswith(f"kairos ledger run {rule}")
    for stage, facts in stages.items():
        for out in facts["outs"]:
            inside = [output for output in jobs if output == out or output.startswith(out + "/")]
            assert inside or out.endswith("checkpoint.pt"), f"{stage}: {out} is made by no job"
    assert {stage.split("@")[0] for stage in stages} == {rule for rule in jobs.values()} - {"track"}


def test_each_stage_depends_on_its_own_fields_and_on_what_it_reads(copy):
    found = listed(copy)
    for stage, facts in found["stages"].items():
        if stage != FIRST:
            name, _, item = stage.partition("@")
            key = f"{name}.{item.rpartition('-')[0]}.fields" if item else name
            assert facts["params"] == {"results/demo/dependencies.yaml": [key]}
    edges = {tuple(edge) for edge in found["edges"]}
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
    timing += [layout.rule_params(stage)["timing"] for stage in layout.shared_stages]
    timing += [layout.rule_params("train", segment)["timing"] for segment in layout.segments]
    for stage, facts in listed(copy)["stages"].items():
        for output in facts["outs"]:
            inside = [path for path in timing if path == output or path.startswith(output + "/")]
            assert not inside, f"{stage}: {output} contains {inside}"
            assert not {"timing", "timing.jsonl"} & set(Path(output).parts), f"{stage}: {output}"


def test_a_method_and_segments_added_to_params_need_no_edit_of_stages(copy):
    with (
        copy.edited("params.yaml", "methods:\n", "methods:\n  vlb: {weighting: vlb}\n"),
        copy.edited("params.yaml", "training:\n", "training:\n  segments: 2\n"),
    ):
        stages = listed(copy)["stages"]
        assert "train@vlb-1" in stages
        outs = stages["train@log_normal-1"]["outs"]
        for output, rule in copy.outputs("params.yaml").items():
            if rule.startswith("train_") and "log_normal/seed1/" in output:
                assert any(output == out or output.startswith(out + "/") for out in outs), output


def test_dependencies_change_with_results_only(copy, tmp_path):
    def table() -> dict:
        ended = copy.run_forked("kairos", "ledger", "fingerprints", "--out", str(tmp_path / "table.yaml"))
        assert ended.returncode == 0, ended.stderr
        return yaml.safe_load((tmp_path / "table.yaml").read_text())

    before = table()
    with copy.edited("src/kairos/training/loop.py", "\n\n\n", "\n\n\n# a comment\n\n"):
        assert table() == before
    with copy.edited("src/kairos/training/state.py", "import math", "EXTRA = 1\nimport math"):
        after = table()
        assert {stage for stage in before if before[stage] != after[stage]} == {"train"}
    with copy.edited("params.yaml", "{sampler: log_normal}", "{sampler: {name: log_normal, s: 2}}"):
        after = table()
        changed = {method for method in before["train"] if before["train"][method] != after["train"][method]}
        assert changed == {"log_normal"}


def test_record_refuses_a_dirty_tree_and_stale_results(copy):
    with copy.edited("params.yaml", "experiment: demo", "experiment: demo "):
        ended = copy.run_forked("kairos", "ledger", "record")
        assert ended.returncode == 1
        assert "params.yaml" in ended.stderr and "commit them first" in ended.stderr
    ended = copy.run_forked("kairos", "ledger", "record")
    assert ended.returncode == 1
    assert "results are stale" in ended.stderr and "evaluate" in ended.stderr


def test_adopt_says_what_to_do_without_data(copy):
    ended = copy.run_forked("kairos", "ledger", "adopt")
    assert ended.returncode == 1
    assert "dvc remote add --local" in ended.stderr or "nothing was recorded" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_no_remote_and_no_analytics_in_the_repository(copy):
    config = (copy.folder / ".dvc/config").read_text()
    assert "url" not in config
    assert re.search(r"analytics = false", config)


# ------------------------------------------------------------------------------------------- with real computations


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A copy in which a small experiment has run, is recorded and committed."""
    copy = copy_finished_run(tmp_path_factory)
    git(copy, "init", "-q")
    git(copy, "add", "-A")
    subprocess.run(commit("all"), cwd=copy.folder, check=True, capture_output=True)
    gone = {"train@gone-0": {"cmd": "kairos ledger run train --method gone --seed 0"}}
    (copy.folder / "dvc.lock").write_text(yaml.safe_dump({"schema": "2.0", "stages": gone}))
    ended = copy.run_forked("kairos", "ledger", "record")
    assert ended.returncode == 0, ended.stderr
    assert "git add dvc.lock" in ended.stderr
    git(copy, "add", "dvc.lock", "workflow/dvc.lock", "dvc.machines.json")
    subprocess.run(commit("recorded"), cwd=copy.folder, check=True, capture_output=True)
    return copy


def git(copy: Copy, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=copy.folder, check=True, capture_output=True)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_record_leaves_both_ledgers_clean(recorded):
    stages = yaml.safe_load((recorded.folder / "dvc.lock").read_text())["stages"]
    assert "train@adaptive-0" in stages and "train@gone-0" not in stages
    assert recorded.to_do(config="params.yaml") == {}
    assert "up to date" in recorded.run("dvc", "status").stdout
    assert recorded.run("git", "status", "--porcelain").stdout == ""


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_adopt_in_a_clone_leaves_nothing_to_rerun(recorded, tmp_path):
    store, place = tmp_path / "store", tmp_path / "clone"
    recorded.run("dvc", "remote", "add", "--local", "--default", "store", str(store))
    assert recorded.run("dvc", "push").returncode == 0
    subprocess.run(["git", "clone", "-q", str(recorded.folder), str(place)], check=True)
    clone = Copy.at(place)
    ended = clone.run_forked("kairos", "ledger", "adopt")
    assert ended.returncode == 1 and "no DVC remote is configured" in ended.stderr
    clone.run("dvc", "remote", "add", "--local", "--default", "store", str(tmp_path / "moved"))
    ended = clone.run_forked("kairos", "ledger", "adopt")
    assert ended.returncode == 1 and "not all at" in ended.stderr
    clone.run("dvc", "remote", "add", "--force", "--local", "--default", "store", str(store))
    ended = clone.run_forked("kairos", "ledger", "adopt")
    assert ended.returncode == 0, ended.stderr
    assert clone.to_do(config="params.yaml") == {}
    assert "up to date" in clone.run("dvc", "status").stdout
    assert clone.run("git", "status", "--porcelain").stdout == ""


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_later_milestone_computes_the_new_steps_and_a_forced_reproduction_all_of_them(recorded):
    """DVC deletes all outputs of a training before either; it has two segments here."""
    folder = recorded.folder / "results/tiny/adaptive/seed0"
    before = hashes(folder)
    with recorded.edited("params.yaml", "[20, 40]", "[20, 50]"):
        assert steps_run(recorded.run("dvc", "repro", "train@adaptive-0")) == 10
        assert (folder / "milestones/0000020/milestone.json").exists()
    git(recorded, "checkout", "dvc.lock")
    assert recorded.run("dvc", "checkout", "--force").returncode == 0
    assert steps_run(recorded.run("dvc", "repro", "--force", "--single-item", "train@adaptive-0")) == 40
    assert hashes(folder) == before
    assert recorded.run("dvc", "repro").returncode == 0  # the report shows times
    assert recorded.to_do(config="params.yaml") == {}
    assert "up to date" in recorded.run("dvc", "status").stdout


@pytest.fixture
def own(recorded, tmp_path):
    """The recorded copy again, for a test that leaves other results in it."""
    copy = Copy.at(shutil.copytree(recorded.folder, tmp_path / "copy", symlinks=True))
    copy.run(*commit("what other tests have left"))
    assert reproduced(copy) == []
    return copy


def reproduced(copy: Copy) -> list[str]:
    """The stages that a plain `dvc repro` runs."""
    ended = copy.run("dvc", "repro")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "up to date" in copy.run("dvc", "status").stdout
    return re.findall(r"Running stage '(.+)'", ended.stdout + ended.stderr)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_comment_and_a_message_leave_dvc_lock_as_it_is(own):
    before = (own.folder / "dvc.lock").read_bytes()
    with (
        own.edited("src/kairos/training/loop.py", "\n\n\n", "\n\n\n# a comment\n\n"),
        own.edited("library/src/kairos_timesteps/samplers/adaptive.py", '"""', '"""Reworded: '),
        own.edited("src/kairos/evaluation/evaluate.py", "generated from another", "generated, it seems, from another"),
        own.edited("params.yaml", "experiment:", "# a comment\nexperiment:"),
    ):
        assert reproduced(own) == [FIRST]
    assert (own.folder / "dvc.lock").read_bytes() == before
    reproduced(own)
    assert own.run("git", "status", "--porcelain").stdout == ""


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_an_expression_runs_its_stages_and_what_reads_other_results(own):
    """The stages of the code that was edited; those after them only where what they read has changed."""
    before = (own.folder / "dvc.lock").read_text().splitlines()
    with own.edited("src/kairos/evaluation/validation.py", "\n\n\n", "\n\n\nEXTRA = 1\n\n"):
        assert reproduced(own) == [FIRST, "evaluate@adaptive-0"]  # which gave the same
        after = (own.folder / "dvc.lock").read_text().splitlines()
        changed = [(old.strip(), new.strip()) for old, new in zip(before, after, strict=True) if old != new]
        assert [old.split(":")[0] for old, _ in changed] == ["code"]
        assert own.to_do(config="params.yaml") == {}
    with own.edited("src/kairos/evaluation/validation.py", '"loss": sum(mean)', '"loss": 2 * sum(mean)'):
        assert reproduced(own) == [FIRST, "evaluate@adaptive-0", "report"]
        assert own.to_do(config="params.yaml") == {}
    reproduced(own)  # from DVC's cache of runs
    again = (own.folder / "dvc.lock").read_text().splitlines()
    assert [line for line in again if "code:" in line] == [line for line in before if "code:" in line]


def steps_run(ended) -> int:
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output
    return sum(int(steps) for steps in re.findall(r"(\d+) steps computed", output))


def hashes(folder: Path) -> dict[str, str]:
    from kairos.files import hash_folder, sha256_file

    parts = {name: sha256_file(folder / name) for name in ("checkpoint.pt", "metrics.jsonl", "training.json")}
    return {**parts, **hash_folder(folder / "milestones")}
