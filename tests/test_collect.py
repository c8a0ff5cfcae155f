"""Collecting results for the report: missing or damaged files are reported, incomparable results are rejected."""

import pytest

import results_tree
from kairos.cli import main
from kairos.config import load
from kairos.files import read_json, write_record
from kairos.report.collect import collect
from kairos_timesteps.errors import KairosError


@pytest.fixture
def small(tmp_path):
    """Results of two methods with one seed, without a report, which a test may change."""
    return results_tree.write(tmp_path, seeds=(0,), methods=("uniform", "adaptive"))


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("methods/uniform/seed0/training.json", "kairos train"),
        ("methods/uniform/seed0/metrics.jsonl", "kairos train"),
        ("methods/uniform/seed0/snapshots/0000100/strategy.csv", "kairos train"),
        ("methods/uniform/seed0/evaluation/0000200.json", "kairos evaluate"),
        ("methods/uniform/seed0/samples/0000400.png", "kairos sample"),
        ("reference/record.json", "kairos reference"),
        ("dataset/record.json", "kairos prepare"),
    ],
)
def test_a_missing_file_is_reported_with_the_command_that_writes_it(small, capsys, name, command):
    config, results = small
    (results / name).unlink()
    assert main(["report", "--config", str(config), "--results", str(results)]) == 1
    message = capsys.readouterr().err
    assert str(results / name) in message and command in message
    assert not (results / "report.html").exists() and not (results / "figures").exists()


def test_a_damaged_record_and_a_missing_folder_are_reported_in_one_line(small, capsys, tmp_path):
    config, results = small
    (results / "methods/uniform/seed0/training.json").write_text('{"identity": ')
    assert main(["report", "--config", str(config), "--results", str(results)]) == 1
    assert "training.json: damaged: not JSON" in capsys.readouterr().err
    assert main(["report", "--config", str(config), "--results", str(tmp_path / "nowhere")]) == 1
    assert "nowhere is not a folder" in capsys.readouterr().err


def test_evaluations_with_other_reference_statistics_are_rejected(small):
    config, results = small
    path = results / "methods/uniform/seed0/evaluation/0000400.json"
    record = read_json(path)
    record["computed_from"]["inputs"]["reference"] = "0" * 64
    write_record(path, record)
    with pytest.raises(KairosError, match=r"result of stage reference \(SHA-256\): 000000000000 → "):
        collect(load(config), results)


def test_only_methods_and_seeds_of_the_experiment_are_collected(tmp_path):
    _, results = results_tree.write(tmp_path / "wide")
    config, _ = results_tree.write(tmp_path / "narrow", seeds=(1,), methods=("uniform", "p2"))
    collected = collect(load(config), results)
    assert [(t.method, t.seed) for t in collected.runs] == [("uniform", 1), ("p2", 1)]


def test_verify_finds_damage_in_every_record_and_file(tmp_path, capsys):
    _, results = results_tree.write(tmp_path, seeds=(0,), methods=("uniform",))
    (results / "methods/uniform/seed0/training.json").unlink()  # of a checkpoint that these results lack
    assert main(["verify", str(results)]) == 0
    assert "snapshot.json: 4 intact" in capsys.readouterr().out
    for name in ("reference/record.json", "dataset/record.json", "methods/uniform/seed0/evaluation/0000400.json"):
        path = results / name
        content = path.read_text()
        path.write_text(content.replace("1", "2", 1))
        assert main(["verify", str(results)]) == 1
        assert f"{path}: damaged: does not match its checksum" in capsys.readouterr().err
        path.write_text(content)
    assert main(["verify", str(tmp_path / "nowhere")]) == 1
