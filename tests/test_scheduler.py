"""Tests of the jobs that a cluster's scheduler receives: their resources, grouped jobs, and the SLURM profile."""

import json
import re

import pytest
import yaml
from snakemake_executor_plugin_slurm.partitions import read_partition_file

from kairos.config import validate
from kairos.workflow.rules import training_resources
from snakemake_executor_plugin_kairos.executor import TEMPORARY_SBATCH_ERRORS
from workflow_copy import Copy


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """Copy of the repository for dry runs."""
    return Copy(tmp_path_factory.mktemp("copy"))


GROUPS = """
import json, os, sys
from pathlib import Path
import smart_open
import kairos.workflow.layout
from kairos.stage_keys import hash_modules
from snakemake.api import SnakemakeApi
from snakemake.settings.types import ConfigSettings, OutputSettings, ResourceSettings

def write_jobs(name):
    with SnakemakeApi(OutputSettings(dryrun=True)) as api:
        workflow = api.workflow(ResourceSettings(cores=64), ConfigSettings(configfiles=[Path(f"{name}.yaml")]))
        workflow.dag().execute_workflow(executor="dryrun")
        dag = workflow._workflow.dag
        jobs = {dag.get_job_group(job) or job for job in dag.jobs}  # all are needed
        rules = [sorted(single.rule.name for single in (job if job.is_group() else [job])) for job in jobs]
        resources = [dict(job.resources.items()) for job in jobs]
    Path(f"{name}.json").write_text(json.dumps(list(zip(rules, resources))))

hash_modules(["kairos.report.build", "kairos.training.run"])  # hash the modules once for all forks
for name in sys.argv[1:]:  # each in a fork: a process has one experiment
    child = os.fork()
    if child == 0:
        write_jobs(name)
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0, name
"""
Jobs = list[tuple[list[str], dict]]  # rules and resources of each job


def write_experiment(copy: Copy, name: str, shards: int = 1, **training: str) -> None:
    """Write an experiment `name`: tests/tiny.yaml with other shards and fields of the section `training`."""
    lines = "".join(f"\n  {field}: {value}" for field, value in training.items())
    text = (copy.folder / "tests/tiny.yaml").read_text().replace("\n  segments: 2", lines)
    text = text.replace("sampling:\n", f"sampling:\n  batch_size: 50\n  shards: {shards}\n")
    text = text.replace("autoencoder: {", f"autoencoder: {{shards: {shards}, ")
    (copy.folder / f"{name}.yaml").write_text(text.replace("experiment: tiny", f"experiment: {name}"))


@pytest.fixture(scope="module")
def jobs(copy) -> dict[str, Jobs]:
    """Jobs of four experiments."""
    write_experiment(copy, "plain")
    write_experiment(copy, "sharded", shards=3)
    write_experiment(copy, "shared", trainings_per_gpu="3")
    write_experiment(copy, "diverged", trainings_per_gpu="3")
    state = copy.folder / "results/diverged/methods/uniform/seed0/.state/progress.json"
    state.parent.mkdir(parents=True)
    state.write_text(json.dumps({"state": "failed", "again": False}))
    names = ("plain", "sharded", "shared", "diverged")
    result = copy.run_forked("python", "-c", GROUPS, *names)
    assert result.returncode == 0, result.stderr
    return {name: json.loads((copy.folder / f"{name}.json").read_text()) for name in names}


def gpu_rules(jobs: Jobs) -> set[str]:
    """Return the rules of the jobs that request a GPU."""
    return {rule for rules, resources in jobs if resources.get("gpu") for rule in rules}


def test_sampling_and_evaluation_share_a_job_and_every_job_has_memory_and_time(jobs):
    plain = jobs["plain"]
    assert sorted(rules for rules, _ in plain if "sample" in rules) == [["evaluate", "sample"]] * 2
    assert gpu_rules(plain) == {"autoencoder", "encode", "reference", "train", "sample", "evaluate"}
    assert all(resources["mem_mb"] and resources["runtime"] for rules, resources in plain if rules != ["all"])


def test_each_shard_is_a_job_and_the_job_that_merges_shards_evaluates_the_images(jobs):
    sharded = jobs["sharded"]
    assert sorted(rules for rules, _ in sharded if "sample" in rules) == [["evaluate", "sample"]] * 2
    assert [rules for rules, _ in sharded if "sample_shards" in rules] == [["sample_shards"]] * 6
    assert [rules for rules, _ in sharded if "encode_shards" in rules] == [["encode_shards"]] * 3
    expected = {"autoencoder", "encode_shards", "reference", "train", "sample", "sample_shards", "evaluate"}
    assert gpu_rules(sharded) == expected


def test_training_runs_that_share_a_gpu_are_one_job_that_requests_one_gpu(jobs):
    [(rules, resources)] = [job for job in jobs["shared"] if "train" in job[0]]
    assert rules == ["train", "train"]
    requested = {name: resources.get(name) for name in ("gpu", "gres", "_cores", "mem_mb", "runtime")}
    assert requested == {"gpu": None, "gres": "gpu:1", "_cores": 2, "mem_mb": 12000, "runtime": 1440}


def test_a_training_run_that_has_diverged_shares_no_job(jobs):
    assert [rules for rules, _ in jobs["diverged"] if "train" in rules] == [["train"], ["train"]]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"gpu": 1}),
        ({"device": "cpu"}, {}),
        ({"processes": 4}, {"nodes": 1, "gpu": 4}),
        ({"processes": 4, "nodes": 2}, {"nodes": 2, "gres": "gpu:2"}),
        ({"processes": 4, "nodes": 2, "device": "cpu"}, {"nodes": 2, "tasks": 2}),
        ({"trainings_per_gpu": 3}, {"gres": "gpu:1"}),
    ],
)
def test_the_resources_of_a_training_run_follow_its_settings(fields, expected):
    experiment = validate({"experiment": "x", "methods": {"a": {}}, "training": fields}, "x.yaml")
    resources = training_resources(experiment)
    per_node = fields.get("processes", 1) // fields.get("nodes", 1)
    assert [resources["mem_mb"]({}, attempt) for attempt in (1, 2, 6)] == [6000 * per_node * k for k in (1, 2, 3)]
    assert {name: value for name, value in resources.items() if name not in ("mem_mb", "runtime")} == expected


@pytest.mark.parametrize(
    ("error", "is_temporary"),
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
def test_a_job_is_submitted_again_only_after_temporary_errors_of_sbatch(error, is_temporary):
    message = f"SLURM sbatch failed. The error message was 'sbatch: error: {error}'."
    assert bool(TEMPORARY_SBATCH_ERRORS.search(message)) is is_temporary


EDITED = {"default-resources", "slurm_account", "slurm_partition", "slurm_extra", "kairos-partition-config"}
EDITED |= {"set-resources", "train", "sample", "evaluate"}


@pytest.mark.long
def test_every_editable_line_of_the_slurm_profile_is_valid(copy):
    lines = (copy.folder / "profiles/slurm/profile.yaml").read_text().splitlines()
    matches = {line: re.match(r"# ( *([a-z_-]+):.*)", line) for line in lines}
    examples = {line: match for line, match in matches.items() if match and match[2] in EDITED}
    assert {match[2] for match in examples.values()} == EDITED
    (copy.folder / "profiles/edited").mkdir()
    edited = "\n".join(examples[line][1] if line in examples else line for line in lines)
    (copy.folder / "profiles/edited/profile.yaml").write_text(edited)
    result = copy.snakemake("--dry-run", "--workflow-profile", "profiles/edited")  # tests/cluster runs jobs with it
    assert result.returncode == 0, result.stderr
    assert "profile profiles/edited" in result.stderr
    path = copy.folder / "profiles/slurm/partitions.yaml"
    assert [partition.name for partition in read_partition_file(path)] == [
        *yaml.safe_load(path.read_text())["partitions"]
    ]
