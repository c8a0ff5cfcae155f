"""A training run as a job: it stops early after a checkpoint, reports its progress and locks its state."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from kairos.files import read_json, write_json
from kairos.training.job import ProgressFile, StoppedEarly, StopRequest, read_progress
from kairos.training.run_folder import lock_run_folder
from kairos_timesteps.errors import KairosError
from training_case import experiment, hashes, make_latents, train, train_command, wait_for_steps, write_experiment

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def latents(tmp_path_factory) -> Path:
    return make_latents(tmp_path_factory.mktemp("data"))


@pytest.mark.long
def test_signals_stop_a_run_after_its_step_and_it_resumes(latents, tmp_path, commands):
    case = experiment(training__milestones=[600], training__checkpoint_every=100)
    whole, out = tmp_path / "whole", tmp_path / "out"
    train(case, "adaptive", 0, whole, latents, [0, 600])
    command, log = (
        train_command(write_experiment(tmp_path / "x.yaml", case), "adaptive", out, latents),
        tmp_path / "log",
    )
    for name in ("SIGTERM", "SIGUSR1", "SIGINT"):
        begun = time.time()
        process = commands.start(command, log)
        wait_for_steps(out, begun)
        time.sleep(0.3)
        os.kill(process, getattr(signal, name))
        assert commands.wait(process) == 75
        written = log.read_text()
        assert f"{name}: stopped after step" in written and "Traceback" not in written, written
        assert written.count("run the same command again") == 1
    assert commands.run(command, log) == 0
    assert hashes(out) == hashes(whole)


def test_a_run_stops_before_the_time_limit_of_its_job_and_resumes(latents, tmp_path, monkeypatch):
    case = experiment({"uniform": {}}, training__milestones=[40], training__checkpoint_every=30)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + 20))
    for step in (1, 2):
        with pytest.raises(
            StoppedEarly, match=rf"before the job's time is over: stopped after step {step} of 40"
        ) as stopped:
            train(case, "uniform", 0, tmp_path / "out", latents, [0, 40])
        assert stopped.value.code == 75
    progress = read_json(tmp_path / "out" / ".state" / "progress.json")
    assert (progress["state"], progress["step"], progress["of"], progress["pid"]) == ("stopped", 2, 40, os.getpid())
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + 3600))
    assert train(case, "uniform", 0, tmp_path / "out", latents, [0, 40])["steps_run"] == 38
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    train(case, "uniform", 0, tmp_path / "whole", latents, [0, 40])
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")
    assert read_json(tmp_path / "out" / ".state" / "progress.json")["state"] == "complete"


def test_failed_runs_are_marked_for_a_retry_unless_they_diverged(latents, tmp_path):
    diverging = {"lr": 1e30, "warmup_steps": 0, "grad_clip": None}
    case = experiment({"uniform": {}}, training__optimizer=diverging)
    for folder, error, again in ((latents, "not finite", False), (tmp_path / "missing", "does not exist", True)):
        with pytest.raises(KairosError, match=error):
            train(case, "uniform", 0, tmp_path / "out", folder, [0, 20])
        progress = read_progress(tmp_path / "out")
        assert progress["state"] == "failed" and progress["again"] is again


def test_the_first_failure_of_a_job_is_kept_and_that_of_an_earlier_job_is_not(tmp_path):
    ProgressFile(tmp_path, 10).write_end("failed", "earlier job")
    first, other = ProgressFile(tmp_path, 10), ProgressFile(tmp_path, 10)
    assert not first.has_failed()
    first.write_end("failed", "first")
    other.write_end("failed", "lost connection")
    other.write_end("stopped", "SIGTERM")
    assert other.has_failed() and read_json(tmp_path / "progress.json")["message"] == "first"


def test_a_signal_before_the_first_step_stops_at_once():
    with pytest.raises(StoppedEarly, match="SIGUSR1"), StopRequest():
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(5)
    with StopRequest() as request:
        request.begin()
        os.kill(os.getpid(), signal.SIGINT)
        assert request.reason_to_stop(0.0) == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
    with StopRequest() as request:
        request.begin()
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert request.reason_to_stop(0.0) == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)


def test_an_allocated_gpu_that_cannot_be_used_is_an_error(monkeypatch):
    from kairos import compute

    if torch.cuda.is_available():
        pytest.skip("a GPU is usable here")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert compute.setup(1, "auto").type == "cpu"
    for name in ("SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES"):
        with monkeypatch.context() as context:
            context.setenv(name, "1")
            with pytest.raises(KairosError, match=rf"training.device: got 'auto' in a SLURM job .*{name}=1.*: cpu$"):
                compute.setup(1, "auto")
            assert compute.setup(1, "cpu").type == "cpu"


def test_a_run_on_another_machine_is_detected_without_a_shared_lock(tmp_path):
    state = tmp_path / "run" / ".state"
    with lock_run_folder(state):
        pass
    progress = {"host": "elsewhere", "pid": 3, "state": "running", "updated": time.time()}
    write_json(state / "progress.json", progress)
    timer = threading.Timer(1.5, lambda: write_json(state / "progress.json", progress | {"updated": time.time()}))
    timer.start()
    with pytest.raises(KairosError, match=r"is being trained on elsewhere \(pid 3\)"), lock_run_folder(state):
        pass
    timer.join()
