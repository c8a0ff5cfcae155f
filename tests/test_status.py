"""``kairos status``: what is said of trainings in every state, and how quickly it is said of a thousand."""

import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kairos import slurm
from kairos.cli import main
from kairos.files import hash_folder, write_json
from kairos.status.run_progress import RunProgress, list_run_progress, load_outline
from kairos.training.job import ProgressFile
from kairos.training.run import train
from training_case import experiment, make_latents
from training_case import write_experiment as write_case

RESULTS = Path("results/many")
METHODS = ("uniform", "p2", "min_snr", "speed", "adaptive", "log_normal", "beta", "mode")
_HOLD = """
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
    lines = [f"  {method}: {{}}" for method in methods]
    text = f"experiment: many\nseeds: {seeds}\ntraining: {{milestones: {milestones}}}\nmethods:\n"
    Path("many.yaml").write_text(text + "\n".join(lines) + "\n")


@contextmanager
def held(lock: Path) -> Iterator[None]:
    """Another process holds a training's lock."""
    with subprocess.Popen([sys.executable, "-c", _HOLD, lock], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield
        process.communicate("")


def progress(method: str, step: int, of: int = 200) -> ProgressFile:
    """The word of a training that is at `step`."""
    state = RESULTS / method / "seed0/.state"
    state.mkdir(parents=True)
    (state / "lock").touch()
    said = ProgressFile(state, of)
    said.update(step, step / 10)
    return said


def write_log(name: str, text: str) -> None:
    (RESULTS / "logs").mkdir(parents=True, exist_ok=True)
    (RESULTS / "logs" / name).write_text(text)


def look() -> dict[str, RunProgress]:
    return {training.method: training for training in list_run_progress(load_outline(Path("many.yaml")), [])}


def test_every_state_of_a_training_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    progress("uniform", 120)
    progress("p2", 60)
    progress("min_snr", 80).write_end("failed", "step 80: loss nan, gradient norm nan: not finite\nand more")
    write_log("train_min_snr_seed0_1.log", "start\n")
    progress("speed", 150).write_end("stopped", "SIGTERM: state written after step 150")
    progress("adaptive", 200).write_end("complete")
    write_json(RESULTS / "adaptive/seed0/training.json", {"steps": 200})
    progress("log_normal", 100, of=100).write_end("complete")  # the first of two segments
    write_log("train_beta_seed0.log", "kairos: latents/manifest.json is missing\n\n")
    write_log("train_mode_seed0.log", "")  # Snakemake makes the log, and folders of outputs, before the job
    (RESULTS / "mode/seed0/milestones/0000200").mkdir(parents=True)

    with held(RESULTS / "uniform/seed0/.state/lock"):
        found = look()
        assert main(["status", "many.yaml"]) == 0
    assert {name: (training.state, training.step, training.last_step) for name, training in found.items()} == {
        "uniform": ("running", 120, 200),
        "p2": ("dead", 60, 200),
        "min_snr": ("failed", 80, 200),
        "speed": ("stopped", 150, 200),
        "adaptive": ("complete", 200, 200),
        "log_normal": ("waiting", 100, 200),
        "beta": ("failed", 0, 200),
        "mode": ("starting", 0, 200),
    }
    assert found["min_snr"].logs == ("results/many/logs/train_min_snr_seed0_1.log",)
    assert found["beta"].note == "kairos: latents/manifest.json is missing"
    assert "no process holds its lock" in found["p2"].note

    text = capsys.readouterr().out
    assert "1 running, 1 starting, 2 failed, 1 dead, 1 stopped, 1 waiting, 1 complete" in text
    assert "there: nothing; not yet: prepared, autoencoder, latents" in text
    assert "samples 0 of 24, evaluations 0 of 24" in text
    assert "step 80: loss nan" in text
    assert "log: results/many/logs/train_beta_seed0.log" in text
    assert max(map(len, text.splitlines())) <= 120
    assert look()["uniform"].state == "dead"  # whoever held the lock has gone
    os.utime(RESULTS / "logs/train_mode_seed0.log", (0, 0))
    assert look()["mode"].state == "failed"  # it never said a word


def test_rate_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kairos.training.job._WRITE_INTERVAL", 0.0)
    said = progress("uniform", 100)
    said.update(110, 11.0)
    with held(RESULTS / "uniform/seed0/.state/lock"):
        training = look()["uniform"]
    assert training.rate is not None
    assert training.seconds_left == pytest.approx(90 / training.rate)
    assert training.location


def test_a_job_in_the_queue_goes_before_what_was_said_last() -> None:
    progress("uniform", 50)  # died, and was put into the queue again
    write_json(".kairos/jobs/many/18.json", {"outputs": ["results/many/p2/seed0/milestones/0000100/milestone.json"]})
    write_json(".kairos/jobs/many/19.json", {"outputs": ["results/many/p2/seed0/samples/0000100.npz"]})
    lines = (
        "17|PENDING|Priority|N/A|rule_train_1_wildcards_uniform_0",
        "18|RUNNING|None|2026-01-31T12:00:00|rule_trainings_1",
        "19|PENDING|Dependency|N/A|rule_images_p2_seed0_1",
        "20|PENDING|Resources|2026-02-01T12:00:00|rule_train_wildcards_log_normal_0",
    )
    jobs = [slurm._parse_job(RESULTS, line) for line in lines]
    found = {training.method: training for training in list_run_progress(load_outline(Path("many.yaml")), jobs)}
    states = {
        name: (training.state, training.step, training.location, training.note) for name, training in found.items()
    }
    assert states["uniform"] == ("queued", 50, "job 17", "Priority")
    assert states["p2"] == ("starting", 0, "job 18", "")
    assert states["log_normal"] == ("queued", 0, "job 20", "Resources")
    assert states["mode"] == ("waiting", 0, "", "")
    assert slurm.summarize_jobs(jobs) == "in the queue: images 1 wait, train 2 wait, trainings 1 run"


def test_methods_seeds_and_milestones_come_from_the_file_or_the_folder(capsys: pytest.CaptureFixture[str]) -> None:
    write_experiment(["uniform"], "['12800 images', 400]", "[0, 3]")
    assert load_outline(Path("many.yaml")).milestones == (0, 100, 400)
    assert load_outline(Path("many.yaml")).trainings == [("uniform", 0), ("uniform", 3)]
    progress("p2", 5)
    assert load_outline(RESULTS).trainings == [("p2", 0)]
    for given, said in (("nowhere.yaml", "cannot be read"), ("many.yaml", "unknown field")):
        Path("many.yaml").write_text("experiment: many\nmethod: {}\n")
        assert main(["status", given]) == 2
        assert said in capsys.readouterr().err
    assert main(["status", "."]) == 1
    assert "no training run there" in capsys.readouterr().err


def test_a_thousand_trainings_in_a_moment() -> None:
    write_experiment([f"method_{number}" for number in range(200)], seeds="[0, 1, 2, 3, 4]")
    for number in range(200):
        for seed in range(5):
            training = RESULTS / f"method_{number}" / f"seed{seed}"
            (training / ".state").mkdir(parents=True)
            (training / ".state/lock").touch()
            ProgressFile(training / ".state", 200).update(100, 10.0)
            for step in ("0000000", "0000100"):
                (training / "milestones" / step).mkdir(parents=True)
    code = "import sys; from kairos.cli import main; main(['status', 'many.yaml']); print(sorted(sys.modules))"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "1000 trainings: 1000 dead" in done.stdout
    assert "'torch'" not in done.stdout.splitlines()[-1].strip("[]").split(", ")
    taken = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert taken < 1.5, f"{taken:.2f} s of CPU time; a third of that on an idle processor"
    print(f"{taken:.2f} s")


def test_states_of_earlier_settings_are_listed_and_deleted_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    latents = make_latents(Path("results/case"))
    seeds = {"uniform": (0, 1), "p2": (0,)}
    earlier, now = (
        {**experiment({name: {} for name in seeds}, training__batch_size=size), "seeds": [0, 1]} for size in (8, 16)
    )
    for name, numbers in seeds.items():
        for seed in numbers:
            train(earlier, name, seed, Path(f"results/case/{name}/seed{seed}"), latents, [0, 2])
    kept = train(now, "uniform", 0, Path("results/case/uniform/seed0"), latents, [0, 2])["identity"][:16]
    file = write_case(Path("case.yaml"), now)
    states = set(Path("results/case").glob("*/seed?/.state/" + "?" * 16))
    outputs = hash_folder(Path("results/case/uniform/seed0/milestones"))
    assert len(states) == 4
    (Path("results/case/uniform/seed0/.state") / ("0" * 15)).mkdir()  # no identity

    (Path("results/case/latents/manifest.json")).rename("manifest.json")
    assert "earlier settings" not in told(capsys, file)  # what is trained on is not known
    Path("manifest.json").rename("results/case/latents/manifest.json")
    with held(Path("results/case/p2/seed0/.state/lock")):
        said = told(capsys, file)
        assert re.search(r"\n2 states of earlier settings, [\d.]+ MB: kairos status case.yaml --remove-uncl", said), (
            said
        )
        assert "2 states of earlier settings, " in told(capsys, file, "--remove-unclaimed")
        left = set(Path("results/case").glob("*/seed?/.state/" + "?" * 16))
        assert {path.parts[2:4] for path in left} == {("uniform", "seed0"), ("p2", "seed0")} and len(left) == 2
    assert "\n1 state of earlier settings, " in told(capsys, file, "--remove-unclaimed")
    assert [path.name for path in Path("results/case").glob("*/seed?/.state/" + "?" * 16)] == [kept]
    assert "earlier settings" not in told(capsys, file)
    assert hash_folder(Path("results/case/uniform/seed0/milestones")) == outputs
    assert train(now, "uniform", 0, Path("results/case/uniform/seed0"), latents, [0, 2])["steps_run"] == 0

    file.write_text(file.read_text().replace("batch_size: 16", "batch_size: many"))
    assert main(["status", str(file), "--remove-unclaimed"]) == 2
    assert "training.batch_size" in capsys.readouterr().err


def told(capsys: pytest.CaptureFixture[str], file: Path, *more: str) -> str:
    assert main(["status", str(file), *more]) == 0
    return capsys.readouterr().out
