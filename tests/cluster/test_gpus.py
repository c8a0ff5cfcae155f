"""Tests that a training run uses the GPU that SLURM allocates, and fails if that GPU is not usable."""

import re
from pathlib import Path

import pytest
import yaml
from pipeline import CONFIG, RESULTS, Job, Pipeline, all_jobs, details
from slurm import slurm, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]


def submit(pipeline: Pipeline, name: str, config: str) -> tuple[str, Path]:
    """Submit a training run with one GPU; return the number of the job and its log file."""
    log = pipeline.folder / f"{name}.log"
    train = f"kairos train --config {config} --method uniform --seed 0 --out {name} --latents {RESULTS}/latents"
    options = ["--parsable", "--gpus=1", "--mem=3000", "--constraint=steady", f"--output={log}"]
    exports = ",".join(f"{key}={pipeline.copy.environment[key]}" for key in ("PATH", "PYTHONPATH", "OMP_NUM_THREADS"))
    return slurm("sbatch", *options, f"--chdir={pipeline.folder}", f"--export=ALL,{exports}", "--wrap", train), log


def job_of(pipeline: Pipeline, number: str) -> Job:
    """Return the job with a number."""
    return {job.number: job for job in all_jobs(pipeline.folder)}[number]


def wait_for_end(pipeline: Pipeline, number: str) -> Job:
    """Wait until a job has ended; return it."""
    wait_for(lambda: job_of(pipeline, number).state in ("COMPLETED", "FAILED"), 300, f"the end of job {number}")
    return job_of(pipeline, number)


def allocated_gpu(job: Job) -> str:
    """Return the index of the GPU that SLURM has allocated to a running job."""
    match = re.search(r"IDX:(\d+)", details(job)["GRES"])
    assert match
    return match[1]


def test_two_training_runs_use_their_allocated_gpus(pipeline: Pipeline) -> None:
    submitted = [submit(pipeline, name, CONFIG) for name in ("first", "second")]
    for number, _ in submitted:
        wait_for(lambda number=number: job_of(pipeline, number).state == "RUNNING", 60, f"job {number}")
    gpus = [allocated_gpu(job_of(pipeline, number)) for number, _ in submitted]
    assert len(set(gpus)) == 2  # both jobs run on one node
    assert {wait_for_end(pipeline, number).state for number, _ in submitted} == {"COMPLETED"}  # training.device is cpu
    visible = [re.findall(r"CUDA_VISIBLE_DEVICES (\S+)", log.read_text()) for _, log in submitted]
    assert visible == [[gpu] for gpu in gpus]


def test_an_unusable_gpu_is_an_error(pipeline: Pipeline) -> None:
    values = yaml.safe_load((pipeline.folder / CONFIG).read_text())
    values["training"]["device"] = "auto"
    (pipeline.folder / "auto.yaml").write_text(yaml.safe_dump(values))
    number, log = submit(pipeline, "auto", "auto.yaml")
    assert wait_for_end(pipeline, number).state == "FAILED"
    lines = log.read_text().strip().splitlines()
    assert "training.device: got 'auto'" in lines[-1]
    assert "no usable GPU" in lines[-1]
    assert not any("Traceback" in line for line in lines)
