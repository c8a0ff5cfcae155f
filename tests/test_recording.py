"""`kairos record` and `kairos verify --against`: results compared with a recording."""

import re
import shutil
from pathlib import Path

import pytest

import results_tree
from kairos.cli import main
from kairos.config import load
from kairos.files import read_json, write_json, write_record


@pytest.fixture
def recorded(tmp_path, monkeypatch) -> Path:
    """Folder of results, recorded in recording.json."""
    monkeypatch.chdir(tmp_path)
    _, results = results_tree.write(Path("."), seeds=(0,), methods=("uniform", "min_snr"))
    for name in ("latents", "extractor"):  # which the tree lacks
        write_record(results / name / "record.json", {"content_sha256": name, "name": name})
    results_tree.sign(load("tiny.yaml"), results)
    write_times(results, processor="Xeon")
    assert main(["record", "--config", "tiny.yaml", "--out", "recording.json"]) == 0
    return results


def write_times(results: Path, processor: str) -> None:
    """Write the times of a job on a machine."""
    times = read_json(results / "timing/prepare-0.json")
    write_json(results / "timing/encode.json", times | {"machine": {"processor": processor, "torch": "2.9"}})


def verify(capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Compare the results with the recording; returns the exit status and both outputs."""
    capsys.readouterr()
    status = main(["verify", "--against", "recording.json", "--config", "tiny.yaml"])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_equal_results_are_the_same(recorded, capsys):
    status, out, _ = verify(capsys)
    assert status == 0 and re.fullmatch(r"results are equal to recording.json: \d+ same\n", out)


def test_metrics_and_curves_have_a_row_for_each_method(recorded):
    metrics = read_json(recorded / "summary/metrics.json")
    assert metrics.keys() == {"uniform", "min_snr"} and metrics["uniform"].keys() == {"distance", "val_loss"}
    lines = (recorded / "summary/curves/min_snr.csv").read_text().splitlines()
    assert lines[0] == "step,distance,val_loss" and [line.split(",")[0] for line in lines[1:]] == [
        "0",
        "100",
        "200",
        "400",
    ]


def test_differences_have_their_causes(recorded, capsys):
    path = recorded / "dataset/record.json"
    write_record(path, read_json(path) | {"content_sha256": "0" * 64})
    write_times(recorded, processor="EPYC")
    status, out, err = verify(capsys)
    assert status == 1 and "1 differs" in err
    assert out == "dataset/record.json: differs, processor: Xeon when recorded, EPYC now\n"

    folder = recorded / "methods/uniform/seed0"
    for step in ("0000200", "0000400"):
        record = read_json(folder / f"samples/{step}.json")
        record["computed_from"]["fields"]["sampling"]["steps"] = 10
        write_record(folder / f"samples/{step}.json", record | {"content_sha256": step})
    evaluation = read_json(folder / "evaluation/0000400.json")
    write_record(folder / "evaluation/0000400.json", evaluation | {"metrics": {}})
    shutil.rmtree(folder / "snapshots/0000200")
    status, out, err = verify(capsys)
    assert status == 1 and "4 differs, 1 missing" in err
    for step in ("0000200", "0000400"):
        assert f"methods/uniform/seed0/samples/{step}.json: differs, settings or code: sampling.steps: 20 → 10" in out
    follows = "follows from methods/uniform/seed0/samples/0000400.json"
    assert f"methods/uniform/seed0/evaluation/0000400.json: differs, {follows}" in out
    assert "methods/uniform/seed0/snapshots/0000200/snapshot.json: missing\n" in out


def test_only_results_that_are_valid_are_recorded(recorded, capsys):
    path = recorded / "extractor/record.json"
    record = read_json(path)
    write_record(path, record | {"computed_from": record["computed_from"] | {"code": "0", "key": "0"}})
    for change in (lambda: None, path.unlink):
        change()
        assert main(["record", "--config", "tiny.yaml", "--out", "other.json"]) == 1
        assert "extractor/record.json: missing, outdated or of other code" in capsys.readouterr().err


def test_a_file_that_is_no_recording_is_rejected(recorded, capsys):
    for text in ("{", "{}", ""):
        Path("recording.json").write_text(text)
        status, _, err = verify(capsys)
        assert status == 1 and "recording.json is no recording" in err
    assert main(["verify", "--against", "absent.json", "--config", "tiny.yaml"]) == 1
