"""Results that are not valid: report and `kairos compare` exclude them, `kairos status` counts them as outdated."""

import contextlib
import copy
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml

import results_tree
from kairos.cli import main
from kairos.config import load, validate
from kairos.evaluation import reference
from kairos.files import read_json, write_record
from kairos.report.collect import collect
from kairos.snapshots import step_name
from kairos.status.render import render_page
from kairos.status.run_progress import list_run_progress, load_outline
from kairos.validity import Validity
from kairos_timesteps.errors import KairosError
from report_page import page_of

TINY = Path(__file__).with_name("tiny.yaml")
RESULTS = "results/tiny"
METHODS = ("uniform", "adaptive")


def kairos(*arguments: object) -> None:
    """Run a kairos command in this process."""
    torch.set_num_threads(1)
    assert main([str(argument) for argument in arguments]) == 0, arguments


def write_experiment(**autoencoder: object) -> None:
    """Write tests/tiny.yaml, reduced to a few steps and images, with changed settings of the autoencoder."""
    values = yaml.safe_load(TINY.read_text())
    values["dataset"]["limit"] = 200
    values["autoencoder"] |= {"steps": 3, **autoencoder}
    values["training"] |= {"milestones": [1, 2], "segments": 1, "device": "cpu"}
    values["sampling"] |= {"steps": 2, "grid": 4}
    values["evaluation"] |= {"num_samples": 40, "sets": 1, "loss_images": 256}
    values["evaluation"]["extractor"] |= {"steps": 3}
    Path("tiny.yaml").write_text(yaml.safe_dump(values))


SHARED = ("prepare", "autoencoder", "encode", "extractor", "reference")


def make_shared(*stages: str) -> None:
    """Run some of the stages that all training runs share."""
    for stage in stages:
        kairos(stage, "--config", "tiny.yaml")


def train_and_evaluate(method: str) -> None:
    """Train a method, sample its milestones and evaluate the samples."""
    for stage in ("train", "sample", "evaluate"):
        kairos(stage, "--config", "tiny.yaml", "--method", method, "--seed", 0)


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the complete tiny experiment; read-only."""
    folder = tmp_path_factory.mktemp("complete")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_experiment()
        make_shared(*SHARED)
        for method in METHODS:
            train_and_evaluate(method)
    return folder


@pytest.fixture
def experiment(complete: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the complete tiny experiment as the working folder."""
    copy = Path(shutil.copytree(complete, tmp_path / "copy"))
    monkeypatch.chdir(copy)
    monkeypatch.setenv("PATH", "/nowhere")  # no SLURM of the machine
    return copy


@pytest.fixture
def interrupted(experiment: Path) -> Path:
    """The experiment with another autoencoder, interrupted when only the method `uniform` had been retrained."""
    write_experiment(steps=4)
    make_shared("autoencoder", "encode", "reference")
    train_and_evaluate("uniform")
    return experiment


@pytest.mark.long
def test_compare_excludes_results_of_the_earlier_autoencoder(
    interrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kairos("compare", "tiny.yaml", "--format", "csv")
    printed = capsys.readouterr()
    assert [line.split(",")[1] for line in printed.out.splitlines()[1:]] == ["uniform"]
    (note,) = [line for line in printed.err.splitlines() if "autoencoder.steps" in line]
    assert "adaptive seed 0" in note and "3" in note and "4" in note
    assert "uniform seed 0" not in note


@pytest.mark.long
def test_statistics_of_real_images_are_measured_again_by_changed_code(
    experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count_cached() -> int:
        Path(RESULTS, "reference/record.json").unlink()
        make_shared("reference")
        return len(list(Path(".kairos/cache").glob("statistics-*.npz")))

    before = count_cached()
    assert before > 0
    monkeypatch.setattr(reference, "hash_modules", lambda modules: "0" * 16)
    assert count_cached() == before + 1
    monkeypatch.undo()
    monkeypatch.chdir(experiment)
    assert count_cached() == before + 1


def test_a_changed_setting_is_reported_before_its_consequences(interrupted: Path) -> None:
    """A missing evaluation, or one with another extractor, does not hide the setting that has changed."""
    folder = Path(RESULTS, "methods/adaptive/seed0/evaluation")
    (folder / "0000001.json").unlink()
    record = read_json(folder / "0000002.json")
    record["protocol"]["extractor_hash"] = "0" * 64
    write_record(folder / "0000002.json", record)
    collected = collect(load("tiny.yaml"), Path(RESULTS), unfinished=True)
    assert collected.missing == (
        "adaptive seed 0: not evaluated yet; computed with other settings (autoencoder.steps: 3 → 4)",
    )


@pytest.mark.long
def test_the_report_lists_the_results_that_it_excludes(interrupted: Path) -> None:
    page = page_of(Path("tiny.yaml"), Path(RESULTS), unfinished=True)
    missing = re.findall(r"<li>(adaptive seed 0: .*?)</li>", page)
    assert len(missing) == 1 and "autoencoder.steps: 3 → 4" in missing[0]
    assert main(["report", "--config", "tiny.yaml"]) == 1  # the complete report needs all results


@pytest.mark.parametrize(
    ("section", "setting", "field"),
    [
        ("dataset", {"heldout": 0.3}, "dataset.heldout: 0.1 → 0.3"),
        ("dataset", {"color": "grey"}, "dataset.color: rgb → grey"),
        ("autoencoder", {"seed": 1}, "autoencoder.seed: 0 → 1"),
        ("model", {"name": "dit", "depth": 2}, "model.depth: 12 → 2"),
        ("diffusion", {"process": {"name": "discrete", "timesteps": 50}}, "diffusion.process.timesteps: 100 → 50"),
        ("methods", {"uniform": {"weighting": "p2"}}, "methods.uniform.weighting.name: none → p2"),
        ("training", {"batch_size": 32}, "training.batch_size: 64 → 32"),
        ("training", {"optimizer": {"lr": 0.5}}, "training.optimizer.lr: 0.0002 → 0.5"),
    ],
)
def test_a_setting_that_changes_results_excludes_them(tmp_path: Path, section: str, setting: dict, field: str) -> None:
    config, results = results_tree.write(tmp_path, seeds=(0,), methods=("uniform",))
    values = yaml.safe_load(config.read_text())
    values[section] = {**values[section], **setting} if isinstance(values.get(section), dict) else setting
    config.write_text(yaml.safe_dump(values))
    for unfinished in (False, True):
        with pytest.raises(KairosError, match=re.escape(field)):
            collect(load(config), results, unfinished)


@pytest.mark.parametrize(
    ("record", "name"), [("dataset/record.json", "content_sha256"), ("autoencoder/record.json", "sha256")]
)
def test_results_of_other_data_are_excluded_even_if_no_setting_differs(tmp_path: Path, record: str, name: str) -> None:
    config, results = results_tree.write(tmp_path, seeds=(0,), methods=("uniform",))
    write_record(results / record, read_json(results / record) | {name: "0" * 64})
    with pytest.raises(KairosError, match=r"result of stage (prepare|autoencoder) .* → "):
        collect(load(config), results, unfinished=True)


def test_results_of_another_seed_are_excluded(tmp_path: Path) -> None:
    config, results = results_tree.write(tmp_path, seeds=(0, 1), methods=("uniform",))
    shutil.rmtree(results / "methods/uniform/seed1")
    shutil.copytree(results / "methods/uniform/seed0", results / "methods/uniform/seed1")
    collected = collect(load(config), results, unfinished=True)
    assert [training.seed for training in collected.runs] == [0]
    assert collected.outdated == ("seed: 0 → 1 (uniform seed 1)",)


def test_evaluations_with_other_sampling_are_not_compared(tmp_path: Path) -> None:
    config, results = results_tree.write(tmp_path, seeds=(0,), methods=("uniform", "min_snr"))

    for path in (results / "methods" / "min_snr").glob("seed0/samples/*.json"):
        record = read_json(path)
        record["computed_from"]["fields"]["sampling"]["steps"] = 10
        write_record(path, record)
    collected = collect(load(config), results, unfinished=True)
    assert collected.methods == ["uniform"] and collected.outdated == ("sampling.steps: 10 → 20 (min_snr seed 0)",)


@pytest.mark.long
def test_status_counts_results_of_the_earlier_autoencoder_as_outdated(
    interrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kairos("status", "tiny.yaml")
    printed = capsys.readouterr().out
    assert "samples 3 of 6 (3 outdated), evaluations 3 of 6 (3 outdated)" in printed
    assert "1 outdated, 1 complete" in printed
    (line,) = [line for line in printed.splitlines() if line.startswith("adaptive seed 0")]
    assert "0/2" in line and "autoencoder.steps: 3 → 4" in line


@pytest.mark.long
def test_the_status_page_shows_no_distance_of_the_earlier_autoencoder(interrupted: Path) -> None:
    page = render_page(Path("tiny.yaml"), 5.0, 0.0)
    shown = {method: f"/methods/{method}/seed0/evaluation/0000002.json" in page for method in METHODS}
    assert shown == {"uniform": True, "adaptive": False}
    assert "/methods/uniform/seed0/samples/0000002.png" in page and "/methods/adaptive/seed0/samples" not in page
    assert "<title>50 % tiny</title>" in page and page.count("<polyline") == 1


def test_status_does_not_report_a_restarted_run_as_complete(experiment: Path) -> None:
    """The record of a run with earlier settings does not count for the run that has restarted with other settings."""
    write_experiment(steps=4)
    make_shared("autoencoder", "encode")
    folder = f"{RESULTS}/methods/adaptive/seed0"
    options = ("--method", "adaptive", "--seed", 0, "--milestones", 0, 1, "--snapshots-only")
    kairos("train", "--config", "tiny.yaml", *options)
    assert read_json(Path(folder, "training.json"))["steps"] == 2
    progress = list_run_progress(load_outline(Path("tiny.yaml")), [])
    (training,) = [run for run in progress if run.method == "adaptive"]
    assert (training.state, training.step, training.last_step) == ("waiting", 1, 2)


def test_results_count_again_when_the_setting_is_restored(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_experiment(steps=4)
    kairos("status", "tiny.yaml")
    printed = capsys.readouterr().out
    assert "samples 0 of 6 (6 outdated)" in printed and "2 outdated" in printed
    assert main(["compare", "tiny.yaml"]) == 1
    assert "autoencoder.steps: 3 → 4" in capsys.readouterr().err
    write_experiment()
    kairos("status", "tiny.yaml")
    printed = capsys.readouterr().out
    assert "samples 6 of 6, evaluations 6 of 6" in printed and "outdated" not in printed


def test_results_of_other_code_count_with_a_warning(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in Path(RESULTS, "methods/adaptive/seed0").rglob("snapshot.json"):
        record = read_json(path)
        record["computed_from"] |= {"code": "0" * 16, "key": "0" * 64}
        write_record(path, record)
    kairos("compare", "tiny.yaml", "--format", "csv")
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 1 + len(METHODS)
    (note,) = [line for line in printed.err.splitlines() if "other code" in line]
    assert "adaptive seed 0" in note and "uniform seed 0" not in note


def test_settings_that_change_no_result_leave_results_as_they_are(
    experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = yaml.safe_load(Path("tiny.yaml").read_text())
    values["training"] |= {"checkpoint_every": 7, "log_every": 2}
    values["sampling"] |= {"batch_size": 13, "shards": 2}
    Path("tiny.yaml").write_text(yaml.safe_dump(values))
    kairos("compare", "tiny.yaml", "--format", "csv")
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 1 + len(METHODS)
    assert "left out" not in printed.err
    kairos("status", "tiny.yaml")
    assert "samples 6 of 6, evaluations 6 of 6" in capsys.readouterr().out


def test_data_prepared_again_with_equal_images_leave_results_valid(
    experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The resampling filter does not change digits, because they are not resized."""
    values = yaml.safe_load(Path("tiny.yaml").read_text())
    values["dataset"] |= {"resample": "lanczos"}
    Path("tiny.yaml").write_text(yaml.safe_dump(values))
    kairos("status", "tiny.yaml")
    assert "samples 0 of 6 (6 outdated)" in capsys.readouterr().out  # the images are not known to be equal yet
    make_shared("prepare")
    kairos("status", "tiny.yaml")
    assert "samples 6 of 6" in capsys.readouterr().out
    assert set(collect(load("tiny.yaml"), Path(RESULTS)).methods) == set(METHODS)  # as the report reads them


def list_leaves(value: object, *names: str) -> list[tuple[str, ...]]:
    """Return the names of the fields of nested sections that are no sections themselves."""
    if isinstance(value, dict) and value:
        return [leaf for name, item in value.items() for leaf in list_leaves(item, *names, name)]
    return [names]


OTHER_VALUES = (
    True,
    False,
    1,
    2,
    3,
    7,
    0.25,
    0.5,
    1.5,
    "none",
    "bf16",
    "float16",
    "raw",
    "train",
    "all",
    "linear",
    None,
)


def change_leaf(plain: dict, names: tuple[str, ...]) -> list[dict]:
    """Return the experiments with another value of a field that are valid, at most two."""
    experiments: list[dict] = []
    for value in OTHER_VALUES:
        changed = copy.deepcopy(plain)
        section = changed
        for name in names[:-1]:
            section = section[name]
        if section[names[-1]] == value or len(experiments) == 2:
            continue
        section[names[-1]] = value
        with contextlib.suppress(KairosError):
            validate(changed)
            experiments.append(changed)
    return experiments


@pytest.mark.long
def test_all_views_and_the_workflow_agree_on_what_any_changed_field_makes_outdated(tmp_path: Path) -> None:
    """Jobs run exactly for the results that the views call outdated, and `collect` leaves out exactly these."""
    config, results = results_tree.write(tmp_path, seeds=(0,), methods=("uniform", "speed"))
    for name in ("latents", "extractor"):  # which the tree lacks
        write_record(results / name / "record.json", {"content_sha256": name, "name": name})
    results_tree.sign(load(config), results)
    plain = load(config).plain()
    stages = ("prepare", "autoencoder", "reference", "train", "sample", "evaluate")
    effects = {}
    for names in list_leaves(plain):
        for changed in change_leaf(plain, names) if names[0] not in ("experiment", "methods") else ():
            if changed["training"]["start_from"]:  # a folder that does not exist
                continue
            experiment_config = validate(changed)
            workflow = Validity(experiment_config, results, reads_outside=True)
            view = Validity(experiment_config, results)
            outdated = set()
            for stage in stages:
                for result in workflow.list_results(stage):
                    if not workflow.record(result):  # a later snapshot, or another seed
                        continue
                    changes = view.find_changes(result)
                    assert bool(changes) != workflow.is_valid(result), (names, stage, changes)
                    if changes:
                        outdated.add(stage)
            effects[names] = effects.get(names, set()) | outdated
            evaluations = [result for result in view.list_results("evaluate") if view.record(result)]
            left_out = {result for result in evaluations if view.find_changes(result)}
            try:
                collected = collect(experiment_config, results, unfinished=True)
                kept = {(run.method, run.seed, step_name(snapshot.step)) for run, snapshot in collected.run_snapshots}
            except KairosError:
                kept = set()
            assert not kept & {(result.method, result.seed, result.snapshot) for result in left_out}, names
    assert len(effects) > 70
    assert effects["sampling", "steps"] == {"sample", "evaluate"}
    assert effects["training", "log_every"] == set() and effects["dataset", "limit"] == set(stages)
