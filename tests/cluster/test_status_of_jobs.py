"""``kairos status`` and ``kairos doctor`` beside a real queue."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm import slurm, wait_for

from kairos import slurm as queue
from kairos.files import write_json
from kairos.status import cluster_checks
from kairos.status.run_progress import RunProgress, list_run_progress, load_outline

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
RESULTS = Path("results/many")
METHODS = ("uniform", "p2", "speed")


@pytest.fixture(autouse=True)
def folder(cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working folder with an experiment of three methods; its jobs end with the test."""
    monkeypatch.chdir(tmp_path)
    methods = "\n".join(f"  {method}: {{}}" for method in METHODS)
    Path("many.yaml").write_text(f"experiment: many\ntraining: {{milestones: [100]}}\nmethods:\n{methods}\n")
    yield
    slurm("scancel", "--name", queue.job_name(str(RESULTS)))


def submit(comment: str, *options: str, command: str = "sleep 300") -> str:
    """Submit a job as the plugin does; its number."""
    name = queue.job_name(str(RESULTS))
    fixed = ("--parsable", f"--job-name={name}", f"--comment={comment}", "--mem=50", "--output=job.log")
    return slurm("sbatch", *fixed, *options, "--wrap", command)


def look() -> dict[str, RunProgress]:
    jobs, fault = queue.list_jobs(RESULTS)
    assert fault == ""
    return {training.method: training for training in list_run_progress(load_outline(Path("many.yaml")), jobs)}


def test_queued_and_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SQUEUE_STATES", "RUNNING"), ("SQUEUE_FORMAT", "%j"), ("SLURM_TIME_FORMAT", "relative")):
        monkeypatch.setenv(name, value)  # what a user likes to see
    held = submit("rule_train_wildcards_uniform_0", "--hold")
    shared = submit("rule_trainings")
    write_json(f".kairos/jobs/many/{shared}.json", {"outputs": ["results/many/p2/seed0/training.json"]})
    wait_for(lambda: look()["p2"].state == "starting", 60, "the start of a job")
    found = look()
    assert (found["uniform"].state, found["uniform"].location) == ("queued", f"job {held}")
    assert found["uniform"].note == "JobHeldUser"
    assert found["p2"].location == f"job {shared}"
    assert found["speed"].state == "waiting"
    assert queue.summarize_jobs(queue.list_jobs(RESULTS)[0]) == "in the queue: train 1 wait, trainings 1 run"
    slurm("scancel", held, shared)
    wait_for(lambda: {training.state for training in look().values()} == {"waiting"}, 60, "the end of the jobs")


def test_a_requeued_job_is_starting_until_its_training_speaks() -> None:
    """The word of the run before, with the same job's number, is not taken for it."""
    state = RESULTS / "uniform/seed0/.state"
    state.mkdir(parents=True)
    job = submit("rule_train_wildcards_uniform_0", command="sleep 300")
    wait_for(lambda: look()["uniform"].state == "starting", 60, "the start of the job")
    said = {"state": "running", "step": 40, "of": 100, "rate": 5.0, "host": "n2", "job": job}
    write_json(state / "progress.json", {**said, "updated": time.time()})
    assert look()["uniform"].state == "running"
    time.sleep(1)  # SLURM counts in whole seconds
    slurm("scontrol", "requeue", job)
    wait_for(lambda: look()["uniform"].state == "queued", 60, "the job in the queue")
    wait_for(lambda: look()["uniform"].state != "queued", 60, "its second start")
    found = look()["uniform"]
    assert (found.state, found.step, found.rate) == ("starting", 40, None)
    write_json(state / "progress.json", {**said, "updated": time.time()})
    assert look()["uniform"].state == "running"


def test_doctor_on_a_login_node_and_in_a_job() -> None:
    (good, what, fact), account = cluster_checks.slurm()
    assert (good, what) == (True, "slurm partitions")
    assert fact.startswith("main* (up, ")
    assert account[0]
    Path("profiles/slurm").mkdir(parents=True)
    Path("profiles/slurm/profile.yaml").write_text("default-resources:\n  slurm_partition: \"'fast'\"\n")
    found = {name: (mark, said) for mark, name, said in cluster_checks.slurm()}
    assert found["slurm partition"] == (False, "fast, as in profiles/slurm, is none of main, wide: edit the profile")

    code = "import json; from kairos.status.cluster_checks import job; print(json.dumps([job(n) for n in (0, 1)]))"
    job = submit("doctor", "--gpus=1", command=f"{sys.executable} -c '{code}' > said.json")
    wait_for(lambda: job not in slurm("squeue", "-h", "-o", "%i").split(), 120, "the end of the job")
    without, one = (findings[0] for findings in json.loads(Path("said.json").read_text()))
    assert without[0] is False
    assert f"job {job} on " in without[2]
    assert "torch sees 0" in without[2]
    assert one[0] is True
    assert "SLURM_JOB_GPUS=" in one[2]


def test_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM's controller cannot be reached: said, and the rest is shown all the same."""
    content = Path(os.environ.get("SLURM_CONF", "/etc/slurm/slurm.conf")).read_text()
    lines = [line for line in content.splitlines() if not line.startswith("SlurmctldPort")]
    Path("slurm.conf").write_text("\n".join([*lines, "SlurmctldPort=9", "MessageTimeout=2", ""]))
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_CONF", str(Path("slurm.conf").resolve()))
        jobs, fault = queue.list_jobs(RESULTS)
        good, _, said = cluster_checks.slurm()[0]
        done = subprocess.run([sys.executable, "-m", "kairos", "status", "many.yaml"], capture_output=True, text=True)
    assert jobs == []
    assert fault.startswith("squeue: ")
    assert not good
    assert "is slurmctld reachable" in said
    assert "squeue: " in done.stdout
    assert "3 waiting" in done.stdout
