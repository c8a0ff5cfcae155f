"""Whatever is wrong with an argument, a line on stderr says so: no traceback, and status 1 or 2."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from kairos.cli import main

CONTENT = {  # of files that are no experiment, no record, no samples
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
FILES = (*CONTENT, "folder", "missing", "dangling", "circle", "text/below", "x" * 300, "/proc/self/mem", "")
PLACES = ("folder", "text/below", "x" * 300, "/proc/x/y", "")  # where no file can be made
RECORDS = (*("folder", "missing", "text", "text/below", "x" * 300, ""), *(f"of_{name}" for name in CONTENT))
ODD = ("nan", "inf", "-1", "1e999", "x", "")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every kind of wrong file, and an experiment that is right."""
    folder = tmp_path_factory.mktemp("bad")
    for name, content in CONTENT.items():
        (folder / name).write_bytes(content)
        (folder / f"of_{name}").mkdir()
        for record in ("manifest.json", "milestone.json", "training.json", "reference.json"):
            (folder / f"of_{name}" / record).write_bytes(content)
    (folder / "folder").mkdir()
    (folder / "text").write_text("hello\n")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "circle").symlink_to("circle")
    values = {"experiment": "right", "methods": {"uniform": {}}, "training": {"milestones": [1], "device": "cpu"}}
    (folder / "right.yaml").write_text(yaml.safe_dump(values))
    return folder


@pytest.fixture
def refused(place, monkeypatch, capsys):
    """Call kairos; it must refuse in a line that names the argument's value."""
    monkeypatch.chdir(place)

    def call(line: str, value: str) -> str:
        status = main([word.replace("BAD", value) for word in line.split()])
        said = capsys.readouterr().err
        lines = [line for line in said.splitlines() if line.startswith("kairos") and not line.endswith("]")]
        assert status in (1, 2) and len(lines) == 1, said
        assert "Traceback" not in said and (value in said or value in ODD)
        return lines[0]

    return call


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "line",
    [
        "check BAD",
        "plan BAD",
        "status BAD",
        "fetch --config BAD",
        "prepare --config BAD",
        "train --config BAD --method a --seed 0 --out out",
        "report --config BAD",
        "doctor --config BAD",
        "ledger fingerprints --config BAD --out out",
        "ledger run prepare --config BAD",
    ],
)
def test_experiment_file(refused, line, name):
    if (line, name) in (("status BAD", "folder"), ("status BAD", "")):
        assert "no training there" in refused(line, name)
    elif (line, name) in (("check BAD", ""), ("plan BAD", "")):
        assert main([line.split()[0], ""]) == 0  # the folder where one is, of right.yaml
    else:
        refused(line, name)


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize(
    "line",
    [
        "strategies show speed --out BAD",
        "strategies show speed --format png --out BAD",
        "strategies increments --format csv --out BAD",
        "ledger fingerprints --config right.yaml --out BAD",
    ],
)
def test_place_to_write(refused, line, name):
    refused(line, name)


def test_a_device_is_not_replaced(refused, place):
    pipe = place / "pipe"
    os.mkfifo(pipe)
    refused("strategies show speed --out BAD", "pipe")
    assert pipe.is_fifo()


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize(
    "line",
    [
        "verify BAD",
        "autoencoder --config right.yaml --dataset BAD --out out",
        "encode --config right.yaml --dataset BAD --autoencoder BAD --out out",
        "train --config right.yaml --method uniform --seed 0 --out out --latents BAD",
        "sample --milestone BAD --out out.npz --num 1",
        "extractor --config right.yaml --dataset BAD --out out",
        "reference --config right.yaml --dataset BAD --autoencoder BAD --latents BAD --extractor BAD --out out",
        "evaluate --samples BAD --reference BAD --extractor BAD --out out.json",
        "report --config right.yaml --results BAD",
        "strategies show --checkpoint BAD",
    ],
)
def test_record_of_a_stage(refused, line, name):
    refused(line, name)


@pytest.mark.parametrize("name", ["images.npy", "train.npy"])
def test_damaged_array(refused, place, name):
    folder = place / f"damaged_{name}"
    folder.mkdir()
    (folder / "manifest.json").write_text('{"conditions": {}}')
    for array in ("images.npy", "train.npy", "heldout.npy"):
        np.save(folder / array, np.zeros((100, 2, 2, 1), np.uint8))
    for content in (b"", b"x" * 50, (folder / name).read_bytes()[:200]):
        (folder / name).write_bytes(content)
        assert "damaged" in refused("autoencoder --config right.yaml --dataset BAD --out out", folder.name)


@pytest.mark.parametrize("number", ODD)
@pytest.mark.parametrize(
    "line",
    [
        "status right.yaml --watch BAD",
        "plan right.yaml --steps-per-second BAD",
        "plan right.yaml --tflops BAD",
        "strategies show clts --progress BAD",
        "strategies show speed --set k=BAD",
        "strategies show speed --timesteps BAD",
        "strategies increments --timesteps BAD",
        "train --config right.yaml --method uniform --out out --seed BAD",
    ],
)
def test_number(refused, line, number):
    option = line.removesuffix(" BAD").removesuffix("BAD").split()[-1]
    assert option.removesuffix("=").split("=")[-1].lstrip("-") in refused(line, number)


@pytest.mark.parametrize("streams", [">&-", "2>&-", ">/dev/full"])
def test_streams_that_take_nothing(streams):
    line = f"set -o pipefail; {sys.executable} -m kairos strategies show speed --format csv {streams}"
    ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert "Traceback" not in ended.stderr and ended.returncode == (0 if "&-" in streams else 1)


@pytest.mark.parametrize(("command", "meant"), [("chek", "check"), ("evalute", "evaluate"), ("stats", "status")])
def test_a_misspelt_command_gets_the_name_that_was_meant(command, meant, capsys):
    assert main([command, "params.yaml"]) == 2
    message = capsys.readouterr().err
    assert repr(command) in message and f"did you mean '{meant}'" in message
