"""Tests of ``kairos status`` and ``kairos doctor`` with SLURM's queue."""

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
PLAN = "00000000"
METHODS = ("uniform", "p2", "speed")


@pytest.fixture(autouse=True)
def folder(cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Working folder with an experiment of three methods, whose jobs are cancelled after the test."""
    monkeypatch.chdir(tmp_path)
    methods = "\n".join(f"  {method}: {{}}" for method in METHODS)
    Path("many.yaml").write_text(f"experiment: many\ntraining: {{milestones: [100]}}\nmethods:\n{methods}\n")
    yield
    slurm("scancel", "--name", f"{queue.job_name(RESULTS)}-{PLAN}")


def submit(comment: str, *options: str, command: str = "sleep 300") -> str:
    """Submit a job with the name and comment that the executor uses; return its number."""
    name = f"{queue.job_name(RESULTS)}-{PLAN}"
    fixed_options = ("--parsable", f"--job-name={name}", f"--comment={comment}", "--mem=50", "--output=job.log")
    return slurm("sbatch", *fixed_options, *options, "--wrap", command)


def progress_by_method() -> dict[str, RunProgress]:
    """Return the progress of each method's training run."""
    jobs, error = queue.list_jobs(RESULTS)
    assert error == ""
    return {run.method: run for run in list_run_progress(load_outline(Path("many.yaml")), jobs)}


def test_states_of_queued_and_starting_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SQUEUE_STATES", "RUNNING"), ("SQUEUE_FORMAT", "%j"), ("SLURM_TIME_FORMAT", "relative")):
        monkeypatch.setenv(name, value)  # settings of a user
    held = submit("rule_train_wildcards_uniform_0", "--hold")
    started = submit("rule_train_wildcards_p2_0")
    wait_for(lambda: progress_by_method()["p2"].state == "starting", 60, "the start of a job")
    runs = progress_by_method()
    assert (runs["uniform"].state, runs["uniform"].location) == ("queued", f"job {held}")
    assert runs["uniform"].note == "JobHeldUser"
    assert runs["p2"].location == f"job {started}"
    assert runs["speed"].state == "waiting"
    assert queue.summarize_jobs(queue.list_jobs(RESULTS)[0]) == "in the queue: train 1 run, train 1 wait"
    slurm("scancel", held, started)
    wait_for(lambda: {run.state for run in progress_by_method().values()} == {"waiting"}, 60, "the end of the jobs")


def test_a_requeued_job_is_starting_until_its_run_reports_progress() -> None:
    """A progress file from before the requeue contains the number of this job and does not count."""
    state = RESULTS / "methods/uniform/seed0/.state"
    state.mkdir(parents=True)
    job = submit("rule_train_wildcards_uniform_0", command="sleep 300")
    wait_for(lambda: progress_by_method()["uniform"].state == "starting", 60, "the start of the job")
    progress = {"state": "running", "step": 40, "of": 100, "rate": 5.0, "host": "n2", "job": job}
    write_json(state / "progress.json", {**progress, "updated": time.time()})
    assert progress_by_method()["uniform"].state == "running"
    time.sleep(1)  # the start times of SLURM are whole seconds
    slurm("scontrol", "requeue", job)
    wait_for(lambda: progress_by_method()["uniform"].state == "queued", 60, "the job in the queue")
    wait_for(lambda: progress_by_method()["uniform"].state != "queued", 60, "its second start")
    run = progress_by_method()["uniform"]
    assert (run.state, run.step, run.rate) == ("starting", 40, None)
    write_json(state / "progress.json", {**progress, "updated": time.time()})
    assert progress_by_method()["uniform"].state == "running"


def test_a_job_killed_for_memory_before_its_first_line_has_failed() -> None:
    """SLURM's log alone contains the reason; an experiment with an equally named method has another folder."""
    logs = queue.slurm_logs_folder(RESULTS) / "rule_train/uniform_0"
    logs.mkdir(parents=True)
    code = "import time; data = b'1' * 300_000_000; time.sleep(300)"
    job = submit("rule_train_wildcards_uniform_0", f"--output={logs}/%j.log", command=f'{sys.executable} -c "{code}"')
    wait_for(lambda: progress_by_method()["uniform"].state in ("starting", "failed"), 60, "the start of the job")
    wait_for(lambda: progress_by_method()["uniform"].state == "failed", 120, "the end of the job")
    run = progress_by_method()["uniform"]
    assert run.logs == (f"{logs}/{job}.log",)
    assert "memory" in run.note.lower() or "kill" in run.note.lower()
    assert progress_by_method()["p2"].state == "waiting"
    result = subprocess.run([sys.executable, "-m", "kairos", "status", "many.yaml"], capture_output=True, text=True)
    print(result.stdout)
    assert "3 training runs: 1 failed, 2 waiting" in result.stdout


def test_kairos_doctor_on_a_login_node_and_in_a_job() -> None:
    (passed, name, fact), account = cluster_checks.check_slurm()
    assert (passed, name) == (True, "slurm partitions")
    assert fact.startswith("main* (up, ")
    assert account[0]
    Path("profiles/slurm").mkdir(parents=True)
    Path("profiles/slurm/profile.yaml").write_text("default-resources:\n  slurm_partition: \"'fast'\"\n")
    findings = {name: (passed, fact) for passed, name, fact in cluster_checks.check_slurm()}
    assert findings["slurm partition"] == (False, "fast, as in profiles/slurm, is none of main, wide: edit the profile")

    code = "import json; from kairos.status.cluster_checks import check_job; "
    code += "print(json.dumps([check_job(n) for n in (0, 1)]))"
    job = submit("doctor", "--gpus=1", command=f"{sys.executable} -c '{code}' > findings.json")
    wait_for(lambda: job not in slurm("squeue", "-h", "-o", "%i").split(), 120, "the end of the job")
    without_gpu, with_gpu = (job_findings[0] for job_findings in json.loads(Path("findings.json").read_text()))
    assert without_gpu[0] is False
    assert f"job {job} on " in without_gpu[2]
    assert "torch sees 0" in without_gpu[2]
    assert with_gpu[0] is True
    assert "SLURM_JOB_GPUS=" in with_gpu[2]


def test_an_unreachable_slurm_is_reported_with_the_progress_of_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process listens on the configured port of SLURM's controller."""
    content = Path(os.environ.get("SLURM_CONF", "/etc/slurm/slurm.conf")).read_text()
    lines = [line for line in content.splitlines() if not line.startswith("SlurmctldPort")]
    Path("slurm.conf").write_text("\n".join([*lines, "SlurmctldPort=9", "MessageTimeout=2", ""]))
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_CONF", str(Path("slurm.conf").resolve()))
        jobs, error = queue.list_jobs(RESULTS)
        passed, _, fact = cluster_checks.check_slurm()[0]
        result = subprocess.run([sys.executable, "-m", "kairos", "status", "many.yaml"], capture_output=True, text=True)
    assert jobs == []
    assert error.startswith("squeue: ")
    assert not passed
    assert "is slurmctld reachable" in fact
    assert "squeue: " in result.stdout
    assert "3 waiting" in result.stdout
