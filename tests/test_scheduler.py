"""Tests of the jobs that a scheduler receives: their resources, grouped jobs, and the SLURM profile."""

import json
import os
import re
import subprocess
import sys

import pytest
import yaml
from snakemake_executor_plugin_slurm.partitions import read_partition_file

from kairos.config import validate
from kairos.workflow import batch_script
from kairos.workflow.rules import training_resources
from snakemake_executor_plugin_kairos.executor import LATER
from workflow_copy import Copy


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A copy in which only dry runs make sense."""
    return Copy(tmp_path_factory.mktemp("done"))


GROUPS = """
import json, os, sys
from pathlib import Path
import smart_open
import kairos.workflow.layout
from kairos.fingerprint import fingerprint
from snakemake.api import SnakemakeApi
from snakemake.settings.types import ConfigSettings, OutputSettings, ResourceSettings

def write_jobs(name):
    with SnakemakeApi(OutputSettings(dryrun=True)) as api:
        workflow = api.workflow(ResourceSettings(cores=64), ConfigSettings(configfiles=[Path(f"{name}.yaml")]))
        workflow.dag().execute_workflow(executor="dryrun")
        dag = workflow._workflow.dag
        jobs = {dag.get_job_group(job) or job for job in dag.jobs}  # all are needed
        rules = [sorted(one.rule.name for one in (job if job.is_group() else [job])) for job in jobs]
        asked = [dict(job.resources.items()) for job in jobs]
    Path(f"{name}.json").write_text(json.dumps(list(zip(rules, asked))))

fingerprint(["kairos.cli"])  # hashes the modules once for all forks
for name in sys.argv[1:]:  # each in a fork: a process has one experiment
    child = os.fork()
    if child == 0:
        write_jobs(name)
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0, name
"""
Jobs = list[tuple[list[str], dict]]  # jobs that a scheduler gets: their rules and resources


def write(copy: Copy, name: str, shards: int = 1, **training: str) -> None:
    """Write tests/tiny.yaml with other fields of the section `training` as experiment `name`."""
    lines = "".join(f"\n  {field}: {value}" for field, value in training.items())
    text = (copy.folder / "tests/tiny.yaml").read_text().replace("\n  segments: 2", lines)
    text = text.replace("sampling:\n", f"sampling:\n  batch_size: 50\n  shards: {shards}\n")
    text = text.replace("autoencoder: {", f"autoencoder: {{shards: {shards}, ")
    (copy.folder / f"{name}.yaml").write_text(text.replace("experiment: tiny", f"experiment: {name}"))


@pytest.fixture(scope="module")
def jobs(done) -> dict[str, Jobs]:
    """The jobs of four experiments."""
    write(done, "plain")
    write(done, "sharded", shards=3)
    write(done, "shared", trainings_per_gpu="3")
    write(done, "diverged", trainings_per_gpu="3")
    state = done.folder / "results/diverged/uniform/seed0/.state/progress.json"
    state.parent.mkdir(parents=True)
    state.write_text(json.dumps({"state": "failed", "again": False}))
    names = ("plain", "sharded", "shared", "diverged")
    ended = done.run_forked("python", "-c", GROUPS, *names)
    assert ended.returncode == 0, ended.stderr
    return {name: json.loads((done.folder / f"{name}.json").read_text()) for name in names}


def on_gpu(jobs: Jobs) -> set[str]:
    """Rules of the jobs that request a GPU."""
    return {rule for rules, resources in jobs if resources.get("gpu") for rule in rules}


def test_jobs_as_a_scheduler_gets_them(jobs):
    plain = jobs["plain"]
    assert sorted(rules for rules, _ in plain if "sample" in rules) == [["evaluate", "sample"]] * 2
    assert on_gpu(plain) == {"autoencoder", "encode", "reference", "train", "sample", "evaluate"}
    assert all(resources["mem_mb"] and resources["runtime"] for rules, resources in plain if rules != ["all"])


def test_shards_are_jobs_of_their_own_and_what_joins_images_evaluates_them(jobs):
    sharded = jobs["sharded"]
    assert sorted(rules for rules, _ in sharded if "sample" in rules) == [["evaluate", "sample"]] * 2
    assert [rules for rules, _ in sharded if "sample_parts" in rules] == [["sample_parts"]] * 6
    assert [rules for rules, _ in sharded if "encode_parts" in rules] == [["encode_parts"]] * 3
    wanted = {"autoencoder", "encode_parts", "reference", "train", "sample", "sample_parts", "evaluate"}
    assert on_gpu(sharded) == wanted


def test_trainings_that_share_a_gpu_are_one_job_that_asks_for_one(jobs):
    [(rules, resources)] = [job for job in jobs["shared"] if "train" in job[0]]
    assert rules == ["train", "train"]
    asked = {name: resources.get(name) for name in ("gpu", "gres", "_cores", "mem_mb", "runtime")}
    assert asked == {"gpu": None, "gres": "gpu:1", "_cores": 2, "mem_mb": 12000, "runtime": 1440}


def test_a_training_that_has_diverged_takes_no_others_down(jobs):
    assert [rules for rules, _ in jobs["diverged"] if "train" in rules] == [["train"], ["train"]]


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({}, {"gpu": 1}),
        ({"device": "cpu"}, {}),
        ({"processes": 4}, {"nodes": 1, "gpu": 4}),
        ({"processes": 4, "nodes": 2}, {"nodes": 2, "gres": "gpu:2"}),
        ({"processes": 4, "nodes": 2, "device": "cpu"}, {"nodes": 2, "tasks": 2}),
        ({"trainings_per_gpu": 3}, {"gres": "gpu:1"}),
    ],
)
def test_what_a_training_asks_for(fields, asked):
    experiment = validate({"experiment": "x", "methods": {"a": {}}, "training": fields}, "x.yaml")
    found = training_resources(experiment)
    per_node = fields.get("processes", 1) // fields.get("nodes", 1)
    assert [found["mem_mb"]({}, attempt) for attempt in (1, 2, 6)] == [6000 * per_node * k for k in (1, 2, 3)]
    assert {name: value for name, value in found.items() if name not in ("mem_mb", "runtime")} == asked


@pytest.mark.parametrize(
    ("said", "later"),
    [
        ("Unable to contact slurm controller (connect failure)", True),
        ("Socket timed out on send/recv operation", True),
        ("Slurm temporarily unable to accept job, sleeping and retrying.", True),
        ("AssocMaxSubmitJobLimit\nsbatch: error: Job violates accounting/QOS policy", True),
        ("QOSMaxSubmitJobPerUserLimit", True),
        ("invalid partition specified: nowhere", False),
        ("Invalid account or account/partition combination specified. Please contact support.", False),
        ("Memory specification can not be satisfied", False),
    ],
)
def test_which_words_of_sbatch_a_job_waits_for(said, later):
    assert bool(LATER.search(f"SLURM sbatch failed. The error message was 'sbatch: error: {said}'.")) is later


@pytest.mark.parametrize(("status", "noted"), [(0, ["7.done"]), (3, [])])
def test_a_job_says_that_it_has_ended_well(tmp_path, status, noted):
    line = [sys.executable, "-m", batch_script.__name__, "books", sys.executable, "-c", f"raise SystemExit({status})"]
    (tmp_path / "books").mkdir()
    environment = {**os.environ, "SLURM_JOB_ID": "7"}
    assert subprocess.run(line, cwd=tmp_path, env=environment).returncode == status
    assert [path.name for path in (tmp_path / "books").iterdir()] == noted


EDITED = {"default-resources", "slurm_account", "slurm_partition", "slurm_extra", "kairos-partition-config"}
EDITED |= {"set-resources", "train", "sample", "evaluate"}


@pytest.mark.long
def test_profile_of_slurm_is_read_with_every_line_that_can_be_edited(done):
    lines = (done.folder / "profiles/slurm/profile.yaml").read_text().splitlines()
    examples = {
        line: found for line in lines if (found := re.match(r"# ( *([a-z_-]+):.*)", line)) and found[2] in EDITED
    }
    assert {found[2] for found in examples.values()} == EDITED
    (done.folder / "profiles/edited").mkdir()
    edited = "\n".join(examples[line][1] if line in examples else line for line in lines)
    (done.folder / "profiles/edited/profile.yaml").write_text(edited)
    ended = done.snakemake(
        "--dry-run", "--workflow-profile", "profiles/edited"
    )  # tests/cluster runs the profile itself
    assert ended.returncode == 0, ended.stderr
    assert "profile profiles/edited" in ended.stderr
    path = done.folder / "profiles/slurm/partitions.yaml"
    assert [part.name for part in read_partition_file(path)] == [*yaml.safe_load(path.read_text())["partitions"]]
