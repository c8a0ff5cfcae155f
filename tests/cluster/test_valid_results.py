"""Tests that records alone decide which jobs run on SLURM: after edits, damage, kills, and in clones.

Jobs that a test names have the names of their logs, without the method and seed of the finished run.
"""

import os
import random
import shutil
import time
from pathlib import Path

import pytest
import yaml
from pipeline import CONFIG, RESULTS, Pipeline, all_jobs
from slurm import clean, slurm, wait_for

from kairos.files import read_json

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

RUN = f"{RESULTS}/methods/uniform/seed0"
REPORT = {"report"}
EVALUATED = {"evaluate_1", "evaluate_2", *REPORT}
SAMPLED = {"sample_1", "sample_2", *EVALUATED}
TRAINED = {"train_1", "train_2", *SAMPLED}
EVERYTHING = {"prepare", "autoencoder", "encode", "extractor", "reference", *TRAINED}
WITHOUT_REPORT = ("--until", "evaluate_1", "evaluate_2")
HOLD_TRAINING = ("--set-resources", "train_1:slurm_extra='--hold'")  # the job waits in the queue until its release

# edits of the experiment and of code: file, text, other text
METHOD = (CONFIG, "    sampler: uniform\n", "    sampler: uniform\n    weighting: min_snr\n")
SAMPLING = (CONFIG, "\n  steps: 5\n", "\n  steps: 6\n")
EQUAL_DATA = (CONFIG, "  color: grey\n", "  broken: skip\n  color: grey\n")
OTHER_DATA = (CONFIG, "  heldout: 0.25\n", "  heldout: 0.3\n")
LATER_MILESTONE = (CONFIG, "  - 40\n", "  - 40\n  - 60\n")
DATA_CODE = ("src/kairos/data/prepare.py", "\n\n\n", "\n\n\nEXTRA = 1\n\n\n")
TRAINING_CODE = ("src/kairos/training/state.py", "import math", "EXTRA = 1\nimport math")
SAMPLING_CODE = ("src/kairos/sampling/generate.py", "\n\n\n", "\n\n\nEXTRA = 1\n\n\n")


@pytest.fixture(scope="module")
def finished(cluster: Path, tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """A pipeline of one training run in two segments, after its run on SLURM."""
    clean()
    pipeline = Pipeline(tmp_path_factory.mktemp("valid") / "kairos")
    values = {**pipeline.tiny, "methods": {"uniform": {"sampler": "uniform"}}, "tracking": {"enabled": False}}
    values["training"] |= {"milestones": [20, 40], "segments": 2, "checkpoint_every": 20}
    (pipeline.folder / CONFIG).write_text(yaml.safe_dump(values))
    assert run(pipeline) == (EVERYTHING, set())
    return pipeline


@pytest.fixture
def pipeline(finished: Pipeline, tmp_path: Path) -> Pipeline:
    """A copy of the finished pipeline, which a test may change."""
    clean()
    return Pipeline(shutil.copytree(finished.folder, tmp_path / "kairos", symlinks=True))


def run(pipeline: Pipeline, *arguments: str) -> tuple[set[str], set[str]]:
    """Run the pipeline on SLURM; return the jobs that computed results, and those that found all results unchanged."""
    shutil.rmtree(pipeline.folder / RESULTS / "logs", ignore_errors=True)
    pipeline.run(*arguments)
    return read_logs(pipeline)


def read_logs(pipeline: Pipeline) -> tuple[set[str], set[str]]:
    """Return the jobs whose logs report a computation, and those whose logs report unchanged results alone."""
    computed, unchanged = set(), set()
    for log in (pipeline.folder / RESULTS / "logs").glob("*.log"):
        lines = log.read_text().splitlines()
        is_unchanged = bool(lines) and all("settings, code and inputs are unchanged" in line for line in lines)
        (unchanged if is_unchanged else computed).add(log.stem.replace("_uniform_seed0", ""))
    return computed, unchanged


def to_do(pipeline: Pipeline, *arguments: str) -> set[str]:
    """Return the rules of the jobs that the pipeline would run on SLURM, each of which has one job."""
    counts = pipeline.to_do(*arguments)
    assert set(counts.values()) <= {1}, counts
    return set(counts)


def submitted_rules(pipeline: Pipeline) -> list[str]:
    """Return the rules, with wildcards, of the jobs that SLURM has completed, sorted; there must be no other jobs."""
    jobs = all_jobs(pipeline.folder)
    assert all(job.state == "COMPLETED" for job in jobs), jobs
    return sorted(job.rule.removeprefix("rule_") for job in jobs)


def is_submitted(pipeline: Pipeline) -> bool:
    """Return True if SLURM has a job of the pipeline that waits or runs."""
    return any(job.state in ("PENDING", "RUNNING") for job in all_jobs(pipeline.folder))


def forget_metadata(pipeline: Pipeline) -> None:
    """Delete everything that is no result: Snakemake's metadata and the files of earlier controllers."""
    shutil.rmtree(pipeline.folder / ".snakemake")
    shutil.rmtree(pipeline.folder / ".kairos")


def change_times(pipeline: Pipeline) -> None:
    """Give the results modification times in random order."""
    paths = sorted((pipeline.folder / RESULTS).rglob("*"))
    random.Random(0).shuffle(paths)
    now = time.time() - 1000
    for index, path in enumerate(paths):
        os.utime(path, (now + index % 500, now + index % 500))


def damage(pipeline: Pipeline, name: str) -> bytes:
    """Change the last bytes of a file of the training run or the results, and return its earlier content."""
    path = pipeline.folder / name
    before = path.read_bytes()
    path.write_bytes(before[:-4] + b"bad!")
    return before


def test_each_job_of_a_finished_run_has_run_once(finished: Pipeline) -> None:
    images = [f"images_uniform_seed0_{number}_evaluate_{number}_sample_{number}" for number in (1, 2)]
    trainings = ["train_1_wildcards_uniform_0", "train_2_wildcards_uniform_0"]
    shared = ["autoencoder", "encode", "extractor", "prepare", "reference"]
    assert submitted_rules(finished) == sorted([*shared, *trainings, *images])
    assert to_do(finished) == set()


def test_an_edit_of_settings_or_code_reruns_what_depends_on_it(pipeline: Pipeline) -> None:
    for edit, jobs in (
        (METHOD, TRAINED),
        (SAMPLING, SAMPLED),
        (OTHER_DATA, EVERYTHING),
        (LATER_MILESTONE, {"train_2", "sample_2", "evaluate_2", "report"}),
        (DATA_CODE, EVERYTHING),
        (TRAINING_CODE, TRAINED),
        (SAMPLING_CODE, SAMPLED),
    ):
        with pipeline.copy.edited(*edit):
            assert to_do(pipeline) == jobs, edit
    assert to_do(pipeline) == set(), "dry runs change nothing"


def test_metadata_and_times_of_files_do_not_count(pipeline: Pipeline) -> None:
    change_times(pipeline)
    assert to_do(pipeline) == set()
    forget_metadata(pipeline)
    assert to_do(pipeline) == set()
    with pipeline.copy.edited(*METHOD):
        assert to_do(pipeline) == TRAINED


def test_results_in_another_clone_are_valid_until_an_edit(pipeline: Pipeline, tmp_path: Path) -> None:
    """Results that are copied back are compared by their records too, although metadata are of later ones."""
    forget_metadata(pipeline)
    change_times(pipeline)
    assert to_do(pipeline) == set()
    earlier = shutil.copytree(pipeline.folder / RESULTS, tmp_path / "earlier")
    with pipeline.copy.edited(*SAMPLING):
        assert to_do(pipeline) == SAMPLED
        assert to_do(pipeline) == SAMPLED, "a dry run changes nothing"
        assert run(pipeline, *WITHOUT_REPORT) == (SAMPLED - REPORT, set())
        assert len(submitted_rules(pipeline)) == 2
        assert to_do(pipeline) == REPORT
        shutil.rmtree(pipeline.folder / RESULTS)
        shutil.copytree(earlier, pipeline.folder / RESULTS)
        change_times(pipeline)
        assert to_do(pipeline) == SAMPLED
    assert to_do(pipeline) == set()


def test_equal_data_after_an_edit_end_all_later_jobs_at_once(pipeline: Pipeline) -> None:
    with pipeline.copy.edited(*EQUAL_DATA):
        assert to_do(pipeline) == EVERYTHING
        assert run(pipeline, *WITHOUT_REPORT) == ({"prepare"}, EVERYTHING - {"prepare"} - REPORT)
        assert len(submitted_rules(pipeline)) == 9
        assert to_do(pipeline) == REPORT
    assert to_do(pipeline) == EVERYTHING, "the record contains the settings of the data set"


def test_deleted_and_damaged_results_are_computed_again(pipeline: Pipeline) -> None:
    """Jobs whose inputs are computed again with equal content compute nothing."""
    deleted = [f"{RUN}/samples/0000020.npz", f"{RUN}/snapshots/0000040/snapshot.json"]
    damaged = f"{RUN}/evaluation/0000040.json"
    before = {name: (pipeline.folder / name).read_bytes() for name in deleted}
    for name in deleted:
        (pipeline.folder / name).unlink()
    before[damaged] = damage(pipeline, damaged)
    assert to_do(pipeline) == TRAINED - {"train_1"}
    assert run(pipeline, *WITHOUT_REPORT) == ({"train_2", "sample_1", "evaluate_2"}, {"sample_2", "evaluate_1"})
    assert len(submitted_rules(pipeline)) == 3
    assert to_do(pipeline) == set()
    for name, content in before.items():
        assert (pipeline.folder / name).read_bytes() == content, name


def test_a_forced_job_replaces_damaged_files(pipeline: Pipeline) -> None:
    """Nothing else plans the job, because the record is unchanged. Forced jobs of intact results compute nothing."""
    samples = f"{RUN}/samples/0000040.npz"
    before = damage(pipeline, samples)
    assert to_do(pipeline) == set()
    assert to_do(pipeline, "--forceall", "--", f"{RESULTS}/latents/record.json") == {"prepare", "autoencoder", "encode"}
    forced = ("--forcerun", "sample_2", "evaluate_1", "--until", "evaluate_1", "evaluate_2")
    assert to_do(pipeline, *forced) == {"sample_2", "evaluate_1", "evaluate_2"}
    assert run(pipeline, *forced) == ({"sample_2"}, {"evaluate_1", "evaluate_2"})
    assert len(submitted_rules(pipeline)) == 2
    assert (pipeline.folder / samples).read_bytes() == before
    assert to_do(pipeline) == set()


def test_a_job_whose_code_differs_from_the_plan_fails(pipeline: Pipeline) -> None:
    """The code is edited while the job waits in SLURM's queue."""
    with pipeline.copy.edited(*METHOD):
        with pipeline.controller("--retries", "0", *HOLD_TRAINING, "--until", "train_1") as controller:
            wait_for(lambda: is_submitted(pipeline), 120, "the job")
            with pipeline.copy.edited(*TRAINING_CODE):
                slurm("scontrol", "release", *(job.number for job in all_jobs(pipeline.folder)))
                assert controller.process.wait(300) == 1
        log = (pipeline.folder / RESULTS / "logs/train_uniform_seed0_1.log").read_text()
        assert "train.uniform: code or files outside of the results have changed since this run began; run again" in log
        assert to_do(pipeline) == TRAINED


def test_jobs_of_an_interrupted_controller_are_taken_over_and_valid_until_an_edit(pipeline: Pipeline) -> None:
    """The controller of a new method is killed; the next one has other settings of sampling."""
    values = yaml.safe_load((pipeline.folder / CONFIG).read_text())
    methods = {**values["methods"], "added": {"sampler": "speed"}}
    (pipeline.folder / CONFIG).write_text(yaml.safe_dump({**values, "methods": methods}))
    assert to_do(pipeline) == TRAINED, "those of the new method alone"
    with pipeline.controller(*HOLD_TRAINING) as controller:
        wait_for(lambda: is_submitted(pipeline), 120, "the job")
        controller.process.kill()
    (held,) = all_jobs(pipeline.folder)
    target = f"{RESULTS}/methods/added/seed0/evaluation/0000020.json"
    with pipeline.copy.edited(*SAMPLING):
        assert to_do(pipeline, "--", target) == {"train_1", "sample_1", "evaluate_1"}
        shutil.rmtree(pipeline.folder / RESULTS / "logs")
        with pipeline.controller("--", target) as controller:
            wait_for(lambda: "waiting for it" in controller.log.read_text(), 120, "the job of the earlier controller")
            slurm("scontrol", "release", held.number)
            controller.wait_for_success()
        assert read_logs(pipeline) == ({f"{stage}_added_seed0_1" for stage in ("train", "sample", "evaluate")}, set())
        assert len(submitted_rules(pipeline)) == 2
        both = {"sample_2": 2, "evaluate_2": 2}
        assert pipeline.to_do() == {**dict.fromkeys(TRAINED - {"train_1"}, 1), **both}, "all of the finished method"
    assert to_do(pipeline) == TRAINED - {"train_1"}, "those of the new method alone"
    with pipeline.copy.edited(CONFIG, "    sampler: speed\n", "    sampler: speed\n    weighting: min_snr\n"):
        assert to_do(pipeline) == TRAINED


def test_accepted_results_stay_valid_and_are_resumed_at_a_later_milestone(pipeline: Pipeline) -> None:
    with pipeline.copy.edited(*TRAINING_CODE):
        assert to_do(pipeline) == TRAINED
        accepted = pipeline.copy.run_forked("kairos", "accept", CONFIG)
        assert accepted.returncode == 0, accepted.stderr
        assert to_do(pipeline) == set()
        with pipeline.copy.edited(*LATER_MILESTONE):
            assert run(pipeline, *WITHOUT_REPORT) == ({"train_2", "sample_2", "evaluate_2"}, set())
            assert len(submitted_rules(pipeline)) == 2
            log = (pipeline.folder / RESULTS / "logs/train_uniform_seed0_2.log").read_text()
            assert "20 steps computed" in log, log
            assert to_do(pipeline) == REPORT
    assert to_do(pipeline) == TRAINED


def test_discarded_results_are_computed_anew(pipeline: Pipeline) -> None:
    """The state of the training run is deleted too; what follows stays valid, because the new results are equal."""
    record = pipeline.folder / RUN / "snapshots/0000040/snapshot.json"
    before = read_json(record)["files"]
    discarded = pipeline.copy.run_forked("kairos", "discard", CONFIG, "--stage", "train")
    assert discarded.returncode == 0, discarded.stderr
    assert to_do(pipeline) == TRAINED
    assert run(pipeline, "--until", "train_2") == ({"train_1", "train_2"}, set())
    for number in (1, 2):
        log = (pipeline.folder / RESULTS / f"logs/train_uniform_seed0_{number}.log").read_text()
        assert "20 steps computed" in log, log
    assert read_json(record)["files"] == before
    assert to_do(pipeline) == set()
