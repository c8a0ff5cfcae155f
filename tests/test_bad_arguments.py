"""A bad argument is reported in one line on stderr, without a traceback and with exit status 1 or 2."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from kairos.cli import main
from kairos.files import write_record

CONTENT = {  # of files that are neither experiments nor records nor samples
    "latin1": b"experiment: caf\xe9\nmethods: {a: {}}\n",
    "utf16": "experiment: x\n".encode("utf-16"),
    "binary": bytes(range(256)) * 10,
    "png": b"\x89PNG\r\n\x1a\n" + bytes(20),
    "zip": b"PK\x03\x04" + bytes(50),
    "empty": b"",
    "mapping": b"{}",
    "list": b"[1, 2]",
    "number": b"3",
    "cut": b'{"a": ',
    "deep": b"[" * 1500,
}
FILES = (*CONTENT, "folder", "missing", "dangling", "circle", "text/below", "x" * 300, "/proc/self/mem")
UNWRITABLE = ("folder", "text/below", "x" * 300, "/proc/x/y", "")  # paths at which no file can be written
RECORDS = (*("folder", "missing", "text", "text/below", "x" * 300, ""), *(f"of_{name}" for name in CONTENT))
NUMBERS = ("nan", "inf", "-1", "x", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every kind of unusable file, and a valid experiment."""
    folder = tmp_path_factory.mktemp("bad")
    for name, content in CONTENT.items():
        (folder / name).write_bytes(content)
        (folder / f"of_{name}").mkdir()
        for record in ("record.json", "snapshot.json", "training.json"):
            (folder / f"of_{name}" / record).write_bytes(content)
    (folder / "folder").mkdir()
    (folder / "text").write_text("hello\n")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "circle").symlink_to("circle")
    values = {"experiment": "right", "methods": {"uniform": {}}, "training": {"milestones": [1], "device": "cpu"}}
    values["model"] = {"name": "dit", "width": 16, "depth": 1, "heads": 2}
    (folder / "right.yaml").write_text(yaml.safe_dump(values))
    return folder


def find_problem(capsys: pytest.CaptureFixture[str], line: str, value: str) -> str:
    """Run a command line with `value` for BAD; returns the problem with its exit status or messages, or ""."""
    try:
        status = main([word.replace("BAD", value) for word in line.split()])
    except Exception as error:
        return f"{line}, {value!r}: raised {error!r}"
    printed = capsys.readouterr().err
    messages = [line for line in printed.splitlines() if line.startswith("kairos") and not line.endswith("]")]
    good = status in (1, 2) and len(messages) == 1 and value in messages[0] and "Traceback" not in printed
    return "" if good else f"{line}, {value!r}: exit status {status}, printed {printed!r}"


@pytest.fixture
def problems(folder, monkeypatch, capsys):
    """Function that runs command lines with each of several values and lists those not rejected in one message."""
    monkeypatch.chdir(folder)

    def call(lines: list[str], values: tuple[str, ...]) -> list[str]:
        results = [find_problem(capsys, line, value) for line in lines for value in values]
        return [problem for problem in results if problem]

    return call


def test_a_bad_experiment_file_is_rejected_in_one_message(problems):
    assert problems(["check BAD"], FILES) == []
    others = [
        "plan BAD",
        "status BAD",
        "fetch --config BAD",
        "prepare --config BAD",
        "train --config BAD --method a --seed 0 --out out",
        "report --config BAD",
        "doctor --config BAD",
        "record --config BAD --out out",
        "accept BAD",
        "discard BAD",
    ]
    assert problems(others, ("missing", "binary", "folder")) == []


def test_an_output_path_that_cannot_be_written_is_rejected_in_one_message(problems):
    assert problems(["strategies show speed --out BAD"], UNWRITABLE) == []
    others = [
        "strategies show speed --format png --out BAD",
        "strategies increments --format csv --out BAD",
    ]
    assert problems(others, ("folder", "text/below", "/proc/x/y")) == []


def test_a_named_pipe_is_not_replaced(problems, folder):
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    assert problems(["strategies show speed --out BAD"], ("pipe",)) == []
    assert pipe.is_fifo()


def test_a_bad_record_of_a_stage_is_rejected_in_one_message(problems):
    assert problems(["verify BAD", "sample --snapshot BAD --out out.npz --num 1"], RECORDS) == []
    others = [
        "autoencoder --config right.yaml --dataset BAD --out out",
        "encode --config right.yaml --dataset BAD --autoencoder BAD --out out",
        "train --config right.yaml --method uniform --seed 0 --out out --latents BAD",
        "extractor --config right.yaml --dataset BAD --out out",
        "reference --config right.yaml --dataset BAD --autoencoder BAD --latents BAD --extractor BAD --out out",
        "evaluate --samples BAD --reference BAD --extractor BAD --out out.json",
        "report --config right.yaml --results BAD",
        "strategies show --checkpoint BAD",
    ]
    assert problems(others, ("missing", "of_cut", "of_list")) == []


@pytest.mark.parametrize("name", ["images.npy", "train.npy"])
def test_a_damaged_array_is_reported_as_damaged(folder, monkeypatch, capsys, name):
    monkeypatch.chdir(folder)
    dataset = folder / f"damaged_{name}"
    dataset.mkdir()
    write_record(dataset / "record.json", {"conditions": {}})
    for array in ("images.npy", "train.npy", "heldout.npy"):
        np.save(dataset / array, np.zeros((100, 2, 2, 1), np.uint8))
    for content in (b"", b"x" * 50, (dataset / name).read_bytes()[:200]):
        (dataset / name).write_bytes(content)
        assert main(["autoencoder", "--config", "right.yaml", "--dataset", dataset.name, "--out", "out"]) == 1
        message = capsys.readouterr().err
        assert "damaged" in message and f"{dataset.name}/{name}" in message and "Traceback" not in message


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("status right.yaml --watch BAD", "watch"),
        ("plan right.yaml --steps-per-second BAD", "steps-per-second"),
        ("plan right.yaml --tflops BAD", "tflops"),
        ("strategies show clts --progress BAD", "progress"),
        ("strategies show speed --set k=BAD", "k"),
        ("strategies show speed --timesteps BAD", "timesteps"),
        ("strategies increments --timesteps BAD", "timesteps"),
        ("train --config right.yaml --method uniform --out out --seed BAD", "seed"),
    ],
)
def test_a_number_out_of_range_is_rejected_with_the_name_of_its_option(folder, monkeypatch, capsys, line, option):
    monkeypatch.chdir(folder)
    for number in NUMBERS:
        assert main([word.replace("BAD", number) for word in line.split()]) in (1, 2), number
        printed = capsys.readouterr().err
        messages = [text for text in printed.splitlines() if text.startswith("kairos") and not text.endswith("]")]
        assert len(messages) == 1 and option in messages[0] and "Traceback" not in printed, (number, printed)


@pytest.mark.parametrize("streams", [">&-", "2>&-", ">/dev/full"])
def test_a_closed_or_full_stream_causes_no_traceback(streams):
    line = f"set -o pipefail; {sys.executable} -m kairos strategies show speed --format csv {streams}"
    ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert "Traceback" not in ended.stderr and ended.returncode == (0 if "&-" in streams else 1)


@pytest.mark.parametrize(("command", "correction"), [("chek", "check"), ("evalute", "evaluate"), ("stats", "status")])
def test_the_message_on_a_misspelt_command_suggests_the_correct_name(command, correction, capsys):
    assert main([command, "params.yaml"]) == 2
    message = capsys.readouterr().err
    assert repr(command) in message and f"did you mean '{correction}'" in message
