"""Tests that the SLURM cluster of these tests treats jobs like a production cluster; its jobs only sleep."""

import re
from pathlib import Path

import pytest
from pipeline import Job, all_jobs, details
from slurm import slurm, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

WAIT = "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES >> started; sleep 300"


@pytest.fixture
def folder(cluster: Path, tmp_path: Path):
    """Working folder whose jobs are cancelled after the test."""
    yield tmp_path
    for job in all_jobs(tmp_path):
        slurm("scancel", job.number)


def submit(folder: Path, command: str, *options: str) -> str:
    """Submit a job; return its number."""
    return slurm("sbatch", "--parsable", f"--chdir={folder}", "--output=%j.log", *options, "--wrap", command)


def job_of(folder: Path, number: str) -> Job:
    """Return the job with a number."""
    return {job.number: job for job in all_jobs(folder)}[number]


def starts(folder: Path) -> list[str]:
    """Return node and GPU of every start of a job."""
    started = folder / "started"
    return started.read_text().splitlines() if started.exists() else []


def test_concurrent_jobs_get_different_gpus(folder: Path) -> None:
    numbers = [submit(folder, WAIT, "--gpus=1", "--constraint=steady") for _ in range(2)]
    wait_for(lambda: len(starts(folder)) == 2, 120, "two jobs")
    jobs = [slurm("scontrol", "-d", "show", "job", number) for number in numbers]
    matches = [re.search(r"GRES=gpu:1\(IDX:(\d+)\)", job) for job in jobs]
    assert sorted(starts(folder)) == sorted(f"n1 {match[1]}" for match in matches if match)
    assert len(set(starts(folder))) == 2


def test_a_requeued_job_runs_again_under_its_number(folder: Path) -> None:
    number = submit(folder, WAIT, "--constraint=steady")
    wait_for(lambda: len(starts(folder)) == 1, 120, "the job")
    slurm("scontrol", "requeue", number)
    wait_for(lambda: len(starts(folder)) == 2, 180, "its second start")
    assert details(job_of(folder, number))["Restarts"] == "1"


def test_a_job_leaves_a_node_that_is_set_down(folder: Path) -> None:
    number = submit(folder, WAIT, "--requeue")
    wait_for(lambda: len(starts(folder)) == 1, 120, "the job")
    slurm("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    try:
        wait_for(lambda: len(starts(folder)) == 2, 180, "its second start")
    finally:
        slurm("scontrol", "update", "NodeName=n2", "State=RESUME")
    assert [line.split()[0] for line in starts(folder)] == ["n2", "n1"]
    assert details(job_of(folder, number))["Restarts"] == "1"


def test_a_job_that_exceeds_its_memory_is_killed(folder: Path) -> None:
    command = "srun --ntasks=1 python3 -c 'import time; memory = bytearray(400_000_000); time.sleep(120)'"
    number = submit(folder, command, "--mem=200", "--constraint=steady")
    wait_for(lambda: job_of(folder, number).state in ("FAILED", "OUT_OF_MEMORY"), 120, "the end of the job")
    assert "exceeded memory limit" in (folder / f"{number}.log").read_text()
