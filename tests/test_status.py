"""Tests of ``kairos status``: training runs in every state, and the CPU time for a thousand runs."""

import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kairos import slurm
from kairos.cli import main
from kairos.config import freeze, load, validate
from kairos.files import hash_folder, write_record
from kairos.slurm import Job
from kairos.status.run_progress import RunProgress, list_run_progress, load_outline
from kairos.training.job import ProgressFile
from kairos.validity import Result, Validity
from training_case import experiment, make_latents, train
from training_case import write_experiment as write_case

RESULTS = Path("results/many")
METHODS = ("uniform", "p2", "min_snr", "speed", "adaptive", "log_normal", "beta", "mode")
_HOLD_LOCK = """
import fcntl, sys
with open(sys.argv[1], "a+") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder with an experiment of eight methods."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")  # no SLURM of the machine
    write_experiment(list(METHODS))


def write_experiment(methods: list[str], milestones: str = "[100, 200]", seeds: str = "[0]") -> None:
    """Write many.yaml with the given methods."""
    lines = [f"  {method}: {{}}" for method in methods]
    text = f"experiment: many\nseeds: {seeds}\ntraining: {{milestones: {milestones}}}\nmethods:\n"
    Path("many.yaml").write_text(text + "\n".join(lines) + "\n")


@contextmanager
def locked(lock: Path) -> Iterator[None]:
    """Let another process hold the lock of a training run."""
    with subprocess.Popen([sys.executable, "-c", _HOLD_LOCK, lock], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield
        process.communicate("")


def write_progress(method: str, step: int, last_step: int = 200) -> ProgressFile:
    """Write the progress file of a training run that is at `step`."""
    state = RESULTS / "methods" / method / "seed0/.state"
    state.mkdir(parents=True)
    (state / "lock").touch()
    progress = ProgressFile(state, last_step)
    progress.update(step, step / 10)
    return progress


def write_log(name: str, text: str) -> None:
    (RESULTS / "logs").mkdir(parents=True, exist_ok=True)
    (RESULTS / "logs" / name).write_text(text)


def write_complete_results(method: str) -> None:
    """Write record and snapshots of a complete run."""
    validity = load_outline(Path("many.yaml")).validity
    for result in validity.list_results("train"):
        if result.method == method:
            write_record(validity.path(result), {})
            validity.add_computed_from(result, {**validity.describe(result), "seed": 0, "device": "cpu"})
    write_record(RESULTS / "methods" / method / "seed0/training.json", {"steps": 200})


def progress_by_method() -> dict[str, RunProgress]:
    """Return the progress of each method's training run, without SLURM jobs."""
    return {training.method: training for training in list_run_progress(load_outline(Path("many.yaml")), [])}


def test_every_state_of_a_training_run_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    write_progress("uniform", 120)
    write_progress("p2", 60)
    write_progress("min_snr", 80).write_end("failed", "step 80: loss nan, gradient norm nan: not finite\nand more")
    write_log("train_min_snr_seed0_1.log", "start\n")
    write_progress("speed", 150).write_end("stopped", "SIGTERM: state written after step 150")
    write_progress("adaptive", 200).write_end("complete")
    write_complete_results("adaptive")
    write_progress("log_normal", 100, last_step=100).write_end("complete")  # the first of two segments
    write_log("train_beta_seed0.log", "kairos: latents/record.json is missing\n\n")
    write_log("train_mode_seed0.log", "")  # Snakemake creates the log and the folders of outputs before the job
    (RESULTS / ".lock").write_text(f"pid {os.getpid()} on {socket.gethostname()}")  # of a controller
    os.utime(RESULTS / ".lock", (0, 0))
    (RESULTS / "methods/mode/seed0/snapshots/0000200").mkdir(parents=True)
    (RESULTS / "methods/mode/seed0/evaluation").mkdir()
    (RESULTS / "methods/mode/seed0/evaluation/0000200-old.json").write_text("{}")  # a user's copy: its name is no step

    with locked(RESULTS / "methods/uniform/seed0/.state/lock"):
        runs = progress_by_method()
        assert main(["status", "many.yaml"]) == 0
    assert {name: (run.state, run.step, run.last_step) for name, run in runs.items()} == {
        "uniform": ("running", 120, 200),
        "p2": ("dead", 60, 200),
        "min_snr": ("failed", 80, 200),
        "speed": ("stopped", 150, 200),
        "adaptive": ("complete", 200, 200),
        "log_normal": ("waiting", 100, 200),
        "beta": ("failed", 0, 200),
        "mode": ("starting", 0, 200),
    }
    assert runs["min_snr"].logs == ("results/many/logs/train_min_snr_seed0_1.log",)
    assert runs["beta"].note == "latents/record.json is missing"
    assert "no process holds its lock" in runs["p2"].note

    text = capsys.readouterr().out
    assert "1 running, 1 starting, 2 failed, 1 dead, 1 stopped, 1 waiting, 1 complete" in text
    assert "missing: prepare, autoencoder, encode" in text
    assert "samples 0 of 24, evaluations 0 of 24" in text
    assert "step 80: loss nan" in text
    assert "log: results/many/logs/train_beta_seed0.log" in text
    assert max(map(len, text.splitlines())) <= 120
    assert progress_by_method()["uniform"].state == "dead"  # the process that held the lock has ended
    os.utime(RESULTS / "logs/train_mode_seed0.log", (1, 1))
    assert progress_by_method()["mode"].state == "failed"  # an old empty log: the job ended without a message


def test_the_progress_or_error_of_a_stage_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    write_log("prepare.log", "complete\n")
    write_record(RESULTS / "dataset/record.json", {"content_sha256": "d" * 64})
    write_log("extractor.log", "interrupted\n")
    os.utime(RESULTS / "logs/extractor.log", (0, 0))
    write_log("encode.log", "encode: 64 of 90 images\nkairos: dataset: a.png is broken\n  b.png is broken\n")
    os.utime(RESULTS / "logs/encode.log", (0, 0))
    write_log("reference.log", "")
    write_log("autoencoder.log", "autoencoder: step 5/800\nautoencoder: step 16/800, 8:31 left\n")
    assert main(["status", "many.yaml"]) == 0
    assert re.findall("(?:now|failed): .*", capsys.readouterr().out) == [
        "now: autoencoder: step 16/800, 8:31 left",
        "failed: dataset: a.png is broken b.png is broken",
    ]


def test_rate_and_remaining_time_of_a_running_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kairos.training.job._WRITE_INTERVAL", 0.0)
    progress = write_progress("uniform", 100)
    progress.update(110, 11.0)
    with locked(RESULTS / "methods/uniform/seed0/.state/lock"):
        training = progress_by_method()["uniform"]
    assert training.rate is not None
    assert training.seconds_left == pytest.approx(90 / training.rate)
    assert training.location


def test_a_job_in_the_queue_takes_precedence_over_the_progress_file() -> None:
    write_progress("uniform", 50)  # its process ended, and SLURM queued the job again
    jobs = [
        Job("17", "PENDING", "Priority", None, "00000000", "rule_train_wildcards_uniform_0"),
        Job("18", "RUNNING", "None", time.time() - 60, "00000000", "rule_trainings_1_alone_p2_seed0_train"),
        Job("19", "PENDING", "Dependency", None, "00000000", "rule_images_uniform_seed0_evaluate_sample"),
        Job("20", "PENDING", "Resources", None, "00000000", "rule_train_wildcards_log_normal_0"),
    ]
    runs = list_run_progress(load_outline(Path("many.yaml")), jobs)
    states = {run.method: (run.state, run.step, run.location, run.note) for run in runs}
    assert states["uniform"] == ("queued", 50, "job 17", "Priority")
    assert states["p2"] == ("starting", 0, "job 18", "")
    assert states["log_normal"] == ("queued", 0, "job 20", "Resources")
    assert states["mode"] == ("waiting", 0, "", "")
    assert slurm.summarize_jobs(jobs) == "in the queue: images 1 wait, train 2 wait, trainings 1 run"


def test_jobs_in_the_queue_are_counted_by_stage() -> None:
    rules = ["sample_1_wildcards_p2_0", "sample_shards_wildcards_p2_0_1of2", "encode_shards_wildcards_1of2", "encode"]
    rules += [f"measure_gradient_variance_wildcards_p2_{seed}_0000100" for seed in (0, 1)]
    rules += ["measure_agreement_wildcards_p2_0_0000100", "analyse_gradient_variance", "trainings_1_0"]
    lines = [f"{number}|PENDING|N/A|N/A|{slurm.job_name(RESULTS)}-0|rule_{rule}" for number, rule in enumerate(rules)]
    jobs = [slurm._parse_job(line) for line in lines]
    assert Counter(job.stage for job in jobs) == {
        "sample": 2, "encode": 2, "measure_gradient_variance": 2, "measure_agreement": 1,
        "analyse_gradient_variance": 1, "trainings": 1,
    }  # fmt: skip
    assert "measure_gradient_variance 2 wait" in slurm.summarize_jobs(jobs)


def test_methods_seeds_and_milestones_come_from_the_file_or_the_folder(capsys: pytest.CaptureFixture[str]) -> None:
    write_experiment(["uniform"], "['12800 images', 400]", "[0, 3]")
    assert load_outline(Path("many.yaml")).milestones == (0, 100, 400)
    assert load_outline(Path("many.yaml")).trainings == [("uniform", 0), ("uniform", 3)]
    for file, error in (("nowhere.yaml", "cannot be read"), ("many.yaml", "unknown field")):
        Path("many.yaml").write_text("experiment: many\nmethod: {}\n")
        assert main(["status", file]) == 2
        assert error in capsys.readouterr().err
    assert main(["status", "."]) == 1
    assert "no training run there" in capsys.readouterr().err


def test_the_folder_of_results_has_the_experiment_that_was_frozen_last() -> None:
    """Two edits of a file, and back to the first."""
    RESULTS.mkdir(parents=True)
    first, second = (validate({"experiment": "many", "seeds": [seed], "methods": {"uniform": {}}}) for seed in (0, 1))
    for age, version in ((20, first), (10, second)):
        time_of_freeze = time.time() - age
        os.utime(freeze(version), (time_of_freeze, time_of_freeze))
    assert load_outline(RESULTS).trainings == [("uniform", 1)]
    freeze(first)
    assert load_outline(RESULTS).trainings == [("uniform", 0)]


COUNT_OPENED_FILES = """
import sys
from kairos.cli import main

opened = 0

def count(event, arguments):
    global opened
    opened += event in ("open", "os.listdir", "os.scandir") and "results/" in str(arguments[0])

sys.addaudithook(count)
main(["status", "many.yaml"])
print(opened)
print(sorted(sys.modules))
"""


@pytest.mark.long
def test_a_thousand_training_runs_are_read_with_few_operations() -> None:
    write_experiment([f"method_{number}" for number in range(200)], seeds="[0, 1, 2, 3, 4]")
    for number in range(200):
        for seed in range(5):
            training = RESULTS / "methods" / f"method_{number}" / f"seed{seed}"
            (training / ".state").mkdir(parents=True)
            (training / ".state/lock").touch()
            ProgressFile(training / ".state", 200).update(100, 10.0)
            for step in ("0000000", "0000100"):
                (training / "snapshots" / step).mkdir(parents=True)
    result = subprocess.run([sys.executable, "-c", COUNT_OPENED_FILES], capture_output=True, text=True, check=True)
    assert "1000 training runs: 1000 dead" in result.stdout
    *_, opened, modules = result.stdout.splitlines()
    assert "'torch'" not in modules.strip("[]").split(", ")
    assert 1000 < int(opened) < 9000  # at most eight for each training run


def test_states_of_earlier_settings_are_deleted_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    latents = make_latents(Path("results/case"))
    seeds = {"uniform": (0, 1), "p2": (0,)}
    earlier, now = (
        {
            **experiment({name: {} for name in seeds}, training__batch_size=size, evaluation__num_samples=100),
            "seeds": [0, 1],
        }
        for size in (8, 16)
    )
    for name, numbers in seeds.items():
        for seed in numbers:
            train(earlier, name, seed, Path(f"results/case/methods/{name}/seed{seed}"), latents, [0, 2])
    kept = train(now, "uniform", 0, Path("results/case/methods/uniform/seed0"), latents, [0, 2])["identity"][:16]
    file = write_case(Path("case.yaml"), now)
    states = set(Path("results/case").glob("methods/*/seed?/.state/" + "?" * 16))
    outputs = hash_folder(Path("results/case/methods/uniform/seed0/snapshots"))
    assert len(states) == 4
    (Path("results/case/methods/uniform/seed0/.state") / ("0" * 15)).mkdir()  # no state: an identity has 16 digits

    assert "0 deleted" in discard_unused(capsys, file)  # the latents are not those of the experiment
    write_record(Path("results/case/autoencoder/record.json"), {})
    for result in map(Result, ("prepare", "autoencoder", "encode")):
        validity = Validity(load(file), "results/case")  # reads a record once
        validity.add_computed_from(result, validity.describe(result))
    with locked(Path("results/case/methods/p2/seed0/.state/lock")):
        assert "2 deleted" in discard_unused(capsys, file)  # of uniform alone
    assert "1 deleted" in discard_unused(capsys, file, "--method", "p2")
    assert [path.name for path in Path("results/case").glob("methods/*/seed?/.state/" + "?" * 16)] == [kept]
    assert hash_folder(Path("results/case/methods/uniform/seed0/snapshots")) == outputs
    assert train(now, "uniform", 0, Path("results/case/methods/uniform/seed0"), latents, [0, 2])["steps_run"] == 0


def discard_unused(capsys: pytest.CaptureFixture[str], file: Path, *more: str) -> str:
    """Run ``kairos discard --unused-states``; return its output."""
    assert main(["discard", str(file), "--unused-states", *more]) == 0
    return capsys.readouterr().out


def show_status(capsys: pytest.CaptureFixture[str], file: Path, *more: str) -> str:
    """Run ``kairos status``; return its output."""
    assert main(["status", str(file), *more]) == 0
    return capsys.readouterr().out
