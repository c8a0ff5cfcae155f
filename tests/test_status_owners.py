"""Tests of ``kairos status``: a file counts only for its experiment, its identity, its job and its attempt."""

import os
import re
import shutil
import socket
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

import results_tree
from kairos import slurm
from kairos.cli import main
from kairos.config import load
from kairos.files import read_json, write_json, write_record
from kairos.slurm import Job
from kairos.status.render import render_page
from kairos.status.run_progress import RunProgress, list_run_progress, load_outline
from kairos.training.job import ProgressFile, read_progress
from kairos.validity import Validity, state_folder
from test_status import RESULTS, locked, write_experiment, write_log

KILLED = "slurmstepd: error: Detected 1 oom_kill event in StepId=17.batch. Some of the step tasks have been OOM Killed."
SNAKEMAKE = "Building DAG of jobs...\nError in rule train:\n    jobid: 0\nExiting because a job execution failed.\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder with an experiment of two methods, on a machine without SLURM."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    write_experiment(["uniform", "p2"])


def start_run(
    method: str = "uniform", job: str | None = None, monkeypatch: pytest.MonkeyPatch | None = None
) -> ProgressFile:
    """Create what a training process creates when it takes the lock of its run."""
    state = RESULTS / "methods" / method / "seed0/.state"
    state.mkdir(parents=True, exist_ok=True)
    (state / "lock").touch()
    if job is not None and monkeypatch is not None:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    return ProgressFile(state, 200)


def hold_lock(method: str = "uniform") -> AbstractContextManager[None]:
    return locked(RESULTS / "methods" / method / "seed0/.state/lock")


def write_slurm_log(
    job: str, text: str, folder: str = "rule_train/uniform_0", results: Path = RESULTS, age: float = 60
) -> str:
    """Write SLURM's log of a job that ended some seconds ago; return its path."""
    path = Path(".snakemake/slurm_logs") / slurm.job_name(str(results)) / folder / f"{job}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    set_age(path, age)
    return str(path)


def set_age(path: Path, seconds: float) -> None:
    moment = time.time() - seconds
    os.utime(path, (moment, moment))


def write_controller(pid: int) -> None:
    """Write the file by which a controller locks the results."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / ".lock").write_text(f"pid {pid} on {socket.gethostname()}")
    set_age(RESULTS / ".lock", 100)


def assess(method: str = "uniform", jobs: list[Job] | None = None, **options: bool) -> RunProgress:
    """Return the progress of the run of a method."""
    runs = list_run_progress(load_outline(Path("many.yaml")), jobs or [], **options)
    return next(run for run in runs if run.method == method)


def make_job(number: str, begun: float, comment: str) -> Job:
    return Job(number, "RUNNING", "None", begun, "00000000", comment)


def share_jobs() -> None:
    """Let the two runs of the experiment share a job."""
    text = Path("many.yaml").read_text().replace("training: {", "training: {trainings_per_gpu: 2, ")
    Path("many.yaml").write_text(text)


def write_complete_run() -> tuple[Path, Path]:
    """Write an experiment with one complete run of the present identity; return its file and the run's folder."""
    config, results = results_tree.write(Path.cwd(), methods=("uniform",), seeds=(0,))
    run = results / "methods/uniform/seed0"
    write_record(results / "latents/record.json", {"files": {}})
    experiment = load(config)
    results_tree.sign(experiment, results)
    identity, _ = Validity(experiment, results).identities("uniform", 0)  # of a CPU, and of a GPU
    for record in (run / "training.json", *run.glob("snapshots/*/snapshot.json")):
        write_record(record, {**read_json(record), "identity": identity})
    assert list_states(config) == ["complete"]
    return config, run


def list_states(config: Path) -> list[str]:
    return [run.state for run in list_run_progress(load_outline(config), [])]


# ---------------------------------------------------------------------------------------------------- the experiment


def test_logs_of_another_experiment_are_not_shown() -> None:
    write_slurm_log("7", KILLED, results=Path("results/other"))
    plain = Path(".snakemake/slurm_logs/rule_train/uniform_0/8.log")  # of a folder that several experiments share
    plain.parent.mkdir(parents=True)
    plain.write_text(KILLED)
    assert (assess().state, assess().note, assess().logs) == ("waiting", "", ())


def write_pulled_results(methods: tuple[str, ...], missing: str) -> Path:
    """Write results as another machine pulls them: without the experiment file, ``.kairos`` and one method's runs."""
    config, results = results_tree.write(Path.cwd(), methods=methods)
    config.unlink()
    shutil.rmtree(results / "methods" / missing)
    return results.relative_to(Path.cwd())


def test_missing_runs_of_pulled_results_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    results = write_pulled_results(("uniform", "min_snr"), missing="min_snr")
    assert main(["status", str(results)]) == 0
    text = capsys.readouterr().out
    assert "4 training runs: 2 waiting, 2 complete" in text

    assert "evaluations 8 of 16" in text
    assert "recorded with the newest snapshot" in text
    page = render_page(results, 5.0, 0.0)
    assert "<title>50 % tiny</title>" in page and "4 training runs: 2 waiting, 2 complete" in page


def test_runs_that_the_experiment_does_not_list_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    start_run("speed").write_end("complete")
    assert main(["status", "many.yaml"]) == 0
    assert "1 training run in the folder is not of this experiment" in capsys.readouterr().out


def test_an_unknown_experiment_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    start_run()
    assert main(["status", str(RESULTS)]) == 1
    assert "pass the experiment file" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------ the identity


def test_a_run_whose_snapshots_are_missing_is_not_complete() -> None:
    config, run = write_complete_run()
    shutil.rmtree(run / "snapshots/0000100")
    assert list_states(config) == ["waiting"]


def test_the_record_of_an_earlier_identity_does_not_make_a_run_complete() -> None:
    """Pulled results contain no state that would show that the run has restarted."""
    config, run = write_complete_run()
    snapshot = run / "snapshots/0000400/snapshot.json"
    write_record(snapshot, {**read_json(snapshot), "identity": "b" * 64})
    assert list_states(config) == ["waiting"]


def test_a_stopped_run_of_other_settings_does_not_hide_a_valid_one() -> None:
    """Settings were edited, a run with them was stopped, and the edit was undone."""
    config, run = write_complete_run()
    (run / ".state").mkdir()
    progress = ProgressFile(run / ".state", 400)
    progress.set_identity("b" * 64)
    state_folder(run, "b" * 64).mkdir()
    progress.write_end("stopped", "SIGTERM: stopped after step 100")
    assert list_states(config) == ["complete"]


def test_a_discarded_state_does_not_count() -> None:
    progress = start_run()
    progress.set_identity("a" * 64)
    progress.update(150, 1.0)
    progress.write_end("stopped", "SIGTERM: stopped after step 150")
    assert (assess().state, assess().step) == ("waiting", 0)
    state_folder(RESULTS / "methods/uniform/seed0", "a" * 64).mkdir()
    assert (assess().state, assess().step) == ("stopped", 150)


def test_steps_of_an_earlier_identity_are_not_those_of_a_new_one() -> None:
    first = start_run()
    first.set_identity("a" * 64)
    first.update(150, 1.0)
    run = RESULTS / "methods/uniform/seed0"
    second = start_run()
    assert read_progress(run)["identity"] is None  # not known yet, so a failure is not that of the earlier identity
    second.set_identity("b" * 64)
    assert (read_progress(run)["state"], read_progress(run)["step"]) == ("starting", 0)
    third = start_run()
    third.set_identity("b" * 64)
    assert read_progress(run)["identity"] == "b" * 64


def test_the_loss_curve_is_that_of_the_present_identity() -> None:
    progress = start_run()
    progress.set_identity("b" * 64)
    run = RESULTS / "methods/uniform/seed0"
    for identity in ("a" * 64, "b" * 64):
        state_folder(run, identity).mkdir()
    lines = "".join(f'{{"step": {step}, "loss": 0.5}}\n' for step in range(1, 9))
    (state_folder(run, "a" * 64) / "metrics.jsonl").write_text(lines)
    with hold_lock():
        assert "<polyline" not in render_page(Path("many.yaml"), 5.0, 1.0)
        (state_folder(run, "b" * 64) / "metrics.jsonl").write_text(lines)
        assert render_page(Path("many.yaml"), 5.0, 2.0).count("<polyline") == 1


# ------------------------------------------------------------------------------------------------- the job and attempt


def test_a_run_that_has_the_lock_and_no_step_is_starting() -> None:
    write_log("train_uniform_seed0.log", "train uniform seed 0: on the CPU\n")
    progress = start_run()
    with hold_lock():
        assert (assess().state, assess().note) == ("starting", "")
        progress.update(1, 0.1)
        assert assess().state == "running"
    start_run()
    assert assess().state == "dead"  # killed before its first step


@pytest.mark.parametrize(
    "text",
    [
        KILLED,
        "slurmstepd: error: *** JOB 17 ON n1 CANCELLED AT 2026-11-30T12:00:00 DUE TO TIME LIMIT ***",
        "srun: error: n1: task 0: Out Of Memory",
        "/var/spool/slurmd/job00017/slurm_script: line 4:  4711 Killed    python -m snakemake",
        "slurmstepd-n1: error: Exceeded job memory limit",
    ],
)
def test_a_job_that_died_before_its_first_line_has_failed_with_the_line_of_slurm(text: str) -> None:
    write_log("train_uniform_seed0.log", "")  # Snakemake and tee create it before the job's first line
    log = write_slurm_log("17", f"{text}\n{SNAKEMAKE}")
    run = assess()
    assert (run.state, run.note) == ("failed", text)
    assert log in run.logs


def test_a_job_cancelled_before_its_first_line_has_stopped() -> None:
    cancelled = "slurmstepd: error: *** JOB 17 ON n1 CANCELLED AT 2026-11-30T12:00:00 ***\n"
    write_slurm_log("17", cancelled)
    assert assess().state == "stopped"
    write_slurm_log("17", f"{KILLED}\n{cancelled}")
    assert (assess().state, assess().note) == ("failed", KILLED)


def test_a_group_that_died_before_its_first_line_has_failed() -> None:
    share_jobs()
    write_slurm_log("17", KILLED, folder="group_trainings_0_train")
    assert {method: assess(method).state for method in ("uniform", "p2")} == {"uniform": "failed", "p2": "failed"}
    write_experiment(["uniform", "p2"])  # each run is a job
    assert assess().state == "waiting"


def test_a_submission_that_sbatch_rejects_has_failed() -> None:
    """The executor writes sbatch's message into the log of the job."""
    write_log("train_uniform_seed0.log", "kairos: SLURM rejected job train: invalid partition specified\n")
    assert (assess().state, assess().note) == ("failed", "SLURM rejected job train: invalid partition specified")


def test_the_log_of_a_later_job_counts_and_that_of_an_earlier_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    start_run("uniform", "18", monkeypatch).write_end("stopped", "SIGTERM: stopped after step 50")
    write_slurm_log("9", KILLED)
    write_slurm_log("18", SNAKEMAKE)
    assert (assess().state, assess().note) == ("stopped", "SIGTERM: stopped after step 50")
    write_slurm_log("19", KILLED)
    assert (assess().state, assess().note) == ("failed", KILLED)
    write_slurm_log("20", "Finished jobid: 0 (Rule: train)\n1 of 1 steps (100%) done\n")
    assert assess().state == "stopped"


def test_a_dead_run_has_the_reason_of_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    start_run("uniform", "18", monkeypatch).update(5, 1.0)
    write_slurm_log("18", KILLED)
    progress = read_json(RESULTS / "methods/uniform/seed0/.state/progress.json")
    assert assess().state == "dead"
    assert KILLED in assess().note
    assert progress["job"] == "18"


def test_without_an_answer_of_the_queue_a_silent_job_alone_has_failed() -> None:
    log = Path(write_slurm_log("17", KILLED))
    assert assess(queue_is_known=False).state == "starting"
    set_age(log, 1000)
    assert assess(queue_is_known=False).state == "failed"


def test_a_job_that_has_started_since_the_query_of_the_queue_is_starting() -> None:
    write_slurm_log("17", "", age=0)
    assert assess().state == "starting"


def test_runs_that_ended_in_a_job_of_several_runs_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    share_jobs()
    begun = time.time() - 100
    start_run("p2", "17", monkeypatch).write_end("failed", "step 3: loss nan: not finite")
    job = make_job("17", begun, "rule_trainings_0_train")
    assert (assess("uniform", [job]).state, assess("p2", [job]).state) == ("starting", "failed")
    later = make_job("17", time.time() + 5, "rule_trainings_0_train")  # SLURM has requeued the job
    assert assess("p2", [later]).state == "starting"


def test_a_job_that_reports_its_start_is_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    start_run("uniform", "17", monkeypatch)
    job = make_job("17", time.time() - 100, "rule_train_wildcards_uniform_0")
    assert assess(jobs=[job]).state == "starting"


def test_a_resumed_run_is_starting_while_the_controller_runs() -> None:
    start_run().write_end("stopped", "SIGTERM: stopped after step 50")
    write_controller(os.getpid())
    write_log("train_uniform_seed0.log", "kairos: SIGTERM: stopped after step 50; run the same command again to resume")
    assert (assess().state, assess().note) == ("stopped", "SIGTERM: stopped after step 50")
    write_log("train_uniform_seed0.log", "")  # tee has emptied it: the next attempt imports torch
    assert assess().state == "starting"
    write_controller(2**22)  # no such process
    assert assess().state == "stopped"


def test_an_empty_log_without_a_controller_is_of_a_job_that_has_failed() -> None:
    write_log("train_uniform_seed0.log", "")
    write_controller(os.getpid())
    assert assess().state == "starting"
    write_controller(2**22)
    assert (assess().state, assess().note) == ("failed", "its job ended without a message")


def test_logs_from_before_the_start_of_the_controller_are_history() -> None:
    write_slurm_log("17", KILLED)
    write_log("train_p2_seed0.log", "kairos: latents/record.json is missing\n")
    set_age(RESULTS / "logs/train_p2_seed0.log", 50)
    assert (assess("uniform").state, assess("p2").state) == ("failed", "failed")
    write_controller(os.getpid())
    set_age(RESULTS / ".lock", 30)
    assert (assess("uniform").state, assess("p2").state) == ("waiting", "waiting")


def test_a_failure_before_the_lock_is_that_of_the_later_attempt() -> None:
    """The first segment is complete; the job of the second one ends before it takes the lock."""
    start_run().write_end("complete")
    write_log("train_uniform_seed0_1.log", "train uniform seed 0: 100 steps computed\n")
    assert assess().state == "waiting"
    write_log("train_uniform_seed0_2.log", "kairos: code or files outside of the results have changed\n")
    set_age(RESULTS / "logs/train_uniform_seed0_1.log", 5)
    assert (assess().state, assess().note) == ("failed", "code or files outside of the results have changed")


def test_a_log_without_its_results_is_no_failure() -> None:
    write_log("train_uniform_seed0.log", "train uniform seed 0: step 200/200, took 3 s\n")
    assert assess().state == "waiting"


# --------------------------------------------------------------------------------------------------- stages and report


def test_a_report_of_fewer_runs_is_not_complete(capsys: pytest.CaptureFixture[str]) -> None:
    config, results = results_tree.write(Path.cwd(), methods=("uniform", "p2"))
    write_record(results / "report.json", {})
    results_tree.sign(load(config), results)
    assert main(["status", str(config)]) == 0
    assert re.search("complete: .*report", capsys.readouterr().out)
    shutil.rmtree(results / "methods/p2/seed1")
    assert main(["status", str(config)]) == 0
    text = capsys.readouterr().out
    assert re.search("outdated: report", text) and not re.search("complete: [^;]*report", text)


def test_a_stage_that_slurm_ended_has_its_reason_and_a_queued_one_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_log("encode.log", "")
    write_slurm_log("17", KILLED, folder="rule_encode", age=1000)
    write_log("prepare.log", "kairos: a.png is broken\n")
    monkeypatch.setattr(
        slurm, "list_jobs", lambda results: ([Job("18", "PENDING", "", None, "00000000", "rule_prepare")], "")
    )
    assert main(["status", "many.yaml"]) == 0
    text = capsys.readouterr().out
    assert f"encode failed: {KILLED}"[:100] in text
    assert "a.png is broken" not in text


def test_a_damaged_record_is_no_complete_stage(capsys: pytest.CaptureFixture[str]) -> None:
    write_json(RESULTS / "dataset/record.json", {})
    (RESULTS / "dataset/record.json").write_text("{")
    assert main(["status", "many.yaml"]) == 0
    assert "complete: none; missing: prepare" in capsys.readouterr().out
