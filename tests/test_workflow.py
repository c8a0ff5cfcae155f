"""Tests of the workflow: its jobs, and the changes that rerun them."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from kairos import devices
from kairos.cli import main
from kairos.config import load, validate
from kairos.files import read_json
from kairos.training.run_folder import lock_run_folder
from kairos.workflow import controller
from kairos.workflow.layout import PLAN_VARIABLE, Layout
from training_case import experiment
from workflow_copy import Copy, copy_finished_run

TRAININGS = 2  # runs of tests/tiny.yaml: two methods, one seed, in two segments
LAST_STAGES = {"report": 1, "track": 1}


@pytest.fixture(scope="module")
def pretended(tmp_path_factory):
    """Copy of the repository in which everything counts as computed, for dry runs."""
    copy = Copy(tmp_path_factory.mktemp("pretended"))
    copy.pretend()
    return copy


def job_counts(stages: list[str], count: int = TRAININGS) -> dict[str, int]:
    """Return the number of jobs of some stages, for both segments."""
    return {f"{stage}_{segment}": count for stage in stages for segment in (1, 2)}


def test_the_demo_has_one_job_per_stage_and_training_run(pretended):
    counts = pretended.to_do(config="params.yaml")
    shared = dict.fromkeys(("prepare", "autoencoder", "encode", "extractor", "reference", "report", "track"), 1)
    demo = load(pretended.folder / "params.yaml")
    run_count = len(demo.methods) * len(demo.seeds)
    assert counts == {**shared, "train": run_count, "sample": run_count, "evaluate": run_count}


@pytest.mark.long
def test_every_experiment_has_a_training_job_per_run_and_segment(pretended):
    """Dry runs; the data sets and weights are missing, which is a warning."""
    files = sorted((pretended.folder / "experiments").glob("*.yaml"))
    assert len(files) > 5
    for file in files:
        experiment, counts = load(file), pretended.to_do(config=str(file.relative_to(pretended.folder)))
        trainings = sum(count for rule, count in counts.items() if rule.startswith("train"))
        runs = len(experiment.methods) * len(experiment.seeds)
        assert trainings and trainings % runs == 0, f"{file.name}: {trainings} jobs for {runs} training runs"
        assert counts["report"] == 1, file.name


@pytest.mark.long
def test_an_analysis_has_a_job_for_each_snapshot_that_it_measures(pretended):
    with pretended.edited("tests/tiny.yaml", "methods:\n", "analyses: [areas, density]\nmethods:\n"):
        counts = pretended.to_do()
    assert counts == {"measure_areas": 3 * TRAININGS, "analyse_areas": 1, "analyse_density": 1, **LAST_STAGES}


def test_an_experiment_file_takes_nothing_from_params_yaml(pretended):
    text = "experiment: single\nmethods: {only: {}}\ndataset: {source: digits}\n"
    (pretended.folder / "single.yaml").write_text(text)
    counts = pretended.to_do(config="single.yaml")
    assert counts["train"] == 1  # params.yaml has several methods


def test_an_invalid_experiment_gives_one_message(pretended):
    (pretended.folder / "wrong.yaml").write_text("experiment: x\nmethod: {}\n")
    result = pretended.ask_snakemake("--dry-run", config="wrong.yaml")
    assert result.returncode != 0
    assert "method" in result.stderr and "methods" in result.stderr
    assert "Traceback" not in result.stderr + result.stdout
    assert len([line for line in result.stderr.splitlines() if "wrong.yaml" in line]) == 1


def test_a_missing_experiment_gives_one_message(capsys):
    assert main(["check", "experiments/missing.yaml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "experiments/missing.yaml" in line


def test_seeds_follow_each_other_and_evaluations_precede_the_next_training():
    layout = Layout(validate(experiment(seeds=[3, 1, 2])), Path("unused"))
    jobs = [(stage, seed) for seed in (1, 2, 3) for stage in ("train", "sample", "evaluate")]
    priority = {job: layout.priority(job[0])(SimpleNamespace(seed=str(job[1]))) for job in jobs}
    seeds_by_priority = [seed for _, seed in sorted(jobs, key=priority.get, reverse=True)]
    assert seeds_by_priority == [3, 3, 3, 1, 1, 1, 2, 2, 2]
    assert max(priority.values()) < layout.shared_priority
    assert all(priority["train", seed] < priority["sample", seed] == priority["evaluate", seed] for seed in (1, 2, 3))


def test_jobs_read_a_frozen_copy_of_the_experiment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(PLAN_VARIABLE, raising=False)
    file = Path("experiment.yaml")

    def open_with_seed(seed: int) -> Layout:
        workflow = SimpleNamespace(
            config_settings=SimpleNamespace(configfiles=[file], config={}),
            output_settings=SimpleNamespace(dryrun=True),
            dag_settings=None,
        )
        file.write_text(
            f"{{experiment: edited, seeds: [{seed}], dataset: {{source: digits}}, methods: {{only: {{}}}}}}"
        )
        return controller.open_layout(workflow, {})

    first = open_with_seed(1)
    frozen_copy = first.config_file.resolve()
    content = frozen_copy.read_bytes()
    assert re.fullmatch(r"edited-[0-9a-f]{16}\.yaml", frozen_copy.name)
    assert frozen_copy.parent == tmp_path / ".kairos/config"
    assert first.config_argument(None, None) == first.config_file.as_posix()

    in_a_job = open_with_seed(2)  # each job's Snakemake inherits PLAN_VARIABLE from the controller
    assert in_a_job.experiment == first.experiment and in_a_job.experiment.seeds == [1]
    assert in_a_job.config_file == frozen_copy

    monkeypatch.delenv(PLAN_VARIABLE)  # as in the next controller
    second = open_with_seed(2)
    assert second.experiment.seeds == [2] and load(second.config_file) == second.experiment
    assert second.config_file.resolve() != frozen_copy
    assert frozen_copy.read_bytes() == content


def test_comments_and_formatting_rerun_nothing(pretended):
    with (
        pretended.edited("src/kairos/training/loop.py", "\n\n\n", "\n\n\n# a comment\n\n"),
        pretended.edited("library/src/kairos_timesteps/samplers/adaptive.py", '"""', '"""Reworded: '),
        pretended.edited("tests/tiny.yaml", "experiment: tiny", "# a comment\nexperiment:   tiny"),
    ):
        assert pretended.to_do() == {}


def test_an_expression_of_the_training_loop_reruns_all_trainings(pretended):
    with pretended.edited("src/kairos/training/state.py", "import math", "EXTRA = 1\nimport math"):
        assert pretended.to_do() == {**job_counts(["train", "sample", "evaluate"]), **LAST_STAGES}


@pytest.mark.long
@pytest.mark.parametrize(
    ("file", "stages"),
    [
        ("report/ranking.py", []),
        ("evaluation/validation.py", ["evaluate"]),
        ("sampling/generate.py", ["sample", "evaluate"]),
    ],
)
def test_code_after_training_reruns_no_training(pretended, file, stages):
    with pretended.edited(f"src/kairos/{file}", "\n\n\n", "\n\n\nEXTRA = 1\n\n"):
        assert pretended.to_do() == {**job_counts(stages), **LAST_STAGES}


@pytest.mark.long
def test_code_of_one_sampler_reruns_its_methods(pretended):
    with pretended.edited(
        "library/src/kairos_timesteps/samplers/adaptive.py", "reward_scale + 1e-12", "reward_scale + 1e-9"
    ):
        assert pretended.to_do() == {**job_counts(["train", "sample", "evaluate"], 1), **LAST_STAGES}


@pytest.mark.long
def test_code_of_a_sampler_that_no_method_uses_reruns_nothing(pretended):
    with pretended.edited("library/src/kairos_timesteps/samplers/speed.py", "\n\n\n", "\n\n\nEXTRA = 1\n\n"):
        assert pretended.to_do() == {}


def test_options_of_one_method_rerun_that_method(pretended):
    with pretended.edited("tests/tiny.yaml", "frequency: 10", "frequency: 5"):
        assert pretended.to_do() == {**job_counts(["train", "sample", "evaluate"], 1), **LAST_STAGES}


@pytest.mark.long
def test_a_new_method_runs_alone(pretended):
    with pretended.edited("tests/tiny.yaml", "methods:\n", "methods:\n  p2: {weighting: p2}\n"):
        assert pretended.to_do() == {**job_counts(["train", "sample", "evaluate"], 1), **LAST_STAGES}


@pytest.mark.long
def test_a_later_last_milestone_reruns_only_the_last_segment(pretended):
    with pretended.edited("tests/tiny.yaml", "[20, 40]", "[20, 60]"):
        assert pretended.to_do() == {**dict.fromkeys(("train_2", "sample_2", "evaluate_2"), TRAININGS), **LAST_STAGES}


def test_a_deleted_file_is_computed_again_although_the_report_exists(pretended):
    results = pretended.folder / "results/tiny"
    deleted = [results / "reference/record.json", pretended.folder / FOLDER / "training.json"]
    assert (results / "report.html").exists()
    for path in deleted:
        before = path.read_bytes()
        path.unlink()
        assert set(pretended.to_do()) > {"report"}, path
        path.write_bytes(before)
    assert pretended.to_do() == {}


def test_settings_that_change_no_result_rerun_the_report_at_most(pretended):
    with (
        pretended.edited("tests/tiny.yaml", "checkpoint_every: 20", "checkpoint_every: 10"),
        pretended.edited("tests/tiny.yaml", "steps: 5\n", "steps: 5\n  batch_size: 7\n"),
    ):
        assert pretended.to_do() == LAST_STAGES


@pytest.mark.long
def test_a_new_modification_time_reruns_nothing(pretended):
    later = time.time() + 10
    for path in (pretended.folder / "results").rglob("*"):
        if path.name in ("record.json", "snapshot.json") or path.suffix == ".npz":
            os.utime(path, (later, later))
    assert pretended.to_do() == {}


@pytest.mark.long
def test_a_failed_import_and_a_job_with_a_final_error_are_repeated(pretended):
    record = pretended.folder / "results/tiny/tracking.json"
    before = record.read_text()
    record.write_text('{"imported": false}\n')
    final_error = pretended.folder / "results/tiny/logs/sample_uniform_seed0.error.json"
    final_error.parent.mkdir(exist_ok=True)
    final_error.touch()
    try:
        assert pretended.to_do() == {"track": 1}
        pretended.snakemake("--touch", "--", "results/tiny/summary.csv")  # any call except a dry run
        assert not final_error.exists()
    finally:
        record.write_text(before)


@pytest.mark.long
def test_a_second_controller_is_rejected_while_one_runs(pretended, monkeypatch):
    monkeypatch.chdir(pretended.folder)
    with closing(controller.lock_results(Path("results/tiny"))):
        result = pretended.snakemake("--forcerun", "report")
        assert result.returncode == 2
        assert f"pid {os.getpid()} on {socket.gethostname()}" in result.stderr
        assert pretended.to_do() == {}  # dry runs are allowed


# Tests that run jobs


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    """Copy of the repository with computed results."""
    return copy_finished_run(tmp_path_factory)


FOLDER = "results/tiny/methods/adaptive/seed0"
TRAIN = ("--allowed-rules", "train_1", "train_2", "--", f"{FOLDER}/training.json")


def run(copy: Copy, *arguments: str) -> int:
    """Run Snakemake; return the number of computed training steps."""
    result = copy.snakemake(*arguments, config="params.yaml")
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    return sum(int(steps) for steps in re.findall(r"(\d+) steps computed", output))


@pytest.mark.long
def test_the_whole_pipeline_runs(computed):
    results = computed.folder / "results/tiny"
    assert computed.to_do(config="params.yaml") == {}
    assert (results / "report.html").stat().st_size > 10_000
    header, *rows = (results / "summary.csv").read_text().splitlines()
    assert header.startswith("experiment,method,seed,step,images_seen,train_seconds,frechet_classifier16")
    assert len(rows) == 3 + 4  # three milestones, four reference rows
    missing = [name for name in computed.outputs("params.yaml") if not (computed.folder / name).exists()]
    assert missing == []
    result = computed.run(sys.executable, "-m", "kairos", "verify", "results/tiny")
    assert result.returncode == 0, result.stderr
    if sys.platform == "linux" and not devices.has_nvidia_driver():  # jobs are forks of a process with all imports
        imports = read_json(results / "timing/preload.json")["cpu_seconds"]
        records = [read_json(path) for path in results.glob("timing/evaluate/*/*.json")]
        assert records and all(record["startup_cpu_seconds"] < imports / 4 for record in records)


@pytest.mark.long
def test_snakemake_called_by_its_path_finds_kairos(computed, monkeypatch):
    monkeypatch.setitem(computed.environment, "PATH", "/usr/bin:/bin")  # the environment is not active
    page = computed.folder / "results/tiny/report.html"
    before = page.stat().st_mtime_ns
    command = [f"{Path(sys.executable).parent}/snakemake", "--cores", "1", "--configfile", "params.yaml"]
    result = computed.run(*command, "--forcerun", "report", "--", "results/tiny/report.html")
    assert result.returncode == 0, result.stderr
    assert page.stat().st_mtime_ns > before


@pytest.mark.long
def test_deleted_and_forced_results_are_those_of_the_state_until_they_are_discarded(computed):
    def delete() -> None:
        for path in (computed.folder / FOLDER).glob("snapshots/*/snapshot.json"):
            path.unlink()
        (computed.folder / FOLDER / "training.json").unlink()

    before = (computed.folder / FOLDER / "training.json").read_bytes()
    delete()
    assert run(computed, *TRAIN) == 0
    assert run(computed, "--forcerun", "train_1", *TRAIN) == 0
    assert (computed.folder / FOLDER / "training.json").read_bytes() == before
    ended = computed.run("kairos", "discard", "params.yaml", "--stage", "train", "--method", "adaptive")
    assert ended.returncode == 0 and f"{FOLDER}/training.json" in ended.stdout, ended.stderr
    assert run(computed, *TRAIN) == 40
    assert (computed.folder / FOLDER / "training.json").read_bytes() == before


@pytest.mark.long
def test_a_controller_that_is_killed_before_its_metadata_loses_nothing(computed, request):
    """The controller is stopped while a run waits to train, and killed after the first segment is written."""
    before = (computed.folder / FOLDER / "training.json").read_bytes()
    assert computed.run("kairos", "discard", "params.yaml", "--stage", "train").returncode == 0
    command = ["snakemake", "--cores", "1", "--configfile", "params.yaml", *TRAIN]
    # the job waits for the lock of its training run, so the controller is stopped before the job can end
    with open(computed.folder / "controller.log", "w") as log, lock_run_folder(computed.folder / FOLDER / ".state"):
        controller = subprocess.Popen(
            command, cwd=computed.folder, env=computed.environment, stdout=log, stderr=subprocess.STDOUT
        )
        request.addfinalizer(controller.kill)
        wait_for(lambda: running(computed.folder, "--segment 1"))
        # Snakemake starts the job first, and then marks its outputs as incomplete
        wait_for(lambda: any((computed.folder / ".snakemake/incomplete").glob("*")))
        controller.send_signal(signal.SIGSTOP)
    wait_for(lambda: not running(computed.folder, "--segment 1"))
    assert (computed.folder / FOLDER / "snapshots/0000020/snapshot.json").exists()
    controller.kill()
    controller.wait()
    assert "20 steps computed" in (computed.folder / "controller.log").read_text()
    assert run(computed, *TRAIN) == 20  # the second segment alone
    assert computed.to_do("--", f"{FOLDER}/training.json", config="params.yaml") == {}
    assert (computed.folder / FOLDER / "training.json").read_bytes() == before


@pytest.mark.long
def test_a_later_milestone_computes_only_the_new_steps(computed):
    with computed.edited("params.yaml", "[20, 40]", "[20, 50]"):
        assert run(computed, *TRAIN, f"{FOLDER}/snapshots/0000050/snapshot.json") == 10


def running(folder: Path, argument: str) -> bool:
    """Return True if a `kairos train` with the argument in its command line runs in this folder."""
    for process in Path("/proc").iterdir():
        try:
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            is_training = "kairos train" in words and argument in words
            if is_training and Path(os.readlink(process / "cwd")) == folder:
                return True
        except OSError:
            continue
    return False


def wait_for(condition, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)
