"""The GPU benchmark kit in its short form, on a machine that has little more than torch, numpy and pydantic."""

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

KIT = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu"
ABSENT = {
    "datasets", "diffusers", "dvc", "matplotlib", "mlflow", "pandas", "PIL", "sklearn", "snakemake",
    "torch_fidelity", "torchvision", "yaml",
}  # fmt: skip
BLOCK = f"""
import sys
class Bare:  # hides these packages, and all metadata except that of torch, numpy and jaxtyping
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in {ABSENT} else self.finder.find_spec(name, path, target)
    def find_distributions(self, *context):
        distributions = getattr(self.finder, "find_distributions", lambda *_: ())(*context)
        return (each for each in distributions if each.name in ("torch", "numpy", "jaxtyping"))
sys.meta_path[:] = map(Bare, sys.meta_path)
"""


def run(parts, folder, *arguments, bare=True):
    """Run the short forms of parts, each with its arguments, in one process; return the contents of their JSON files.

    Args:
        parts: arguments of each part.
        folder: where the parts write their JSON files.
        arguments: passed to all parts.
        bare: hide the packages in `ABSENT`.
    """
    path = [str(KIT), str(KIT.parents[1] / "src"), str(KIT.parents[1] / "library/src")]
    if bare:
        (folder / "sitecustomize.py").write_text(BLOCK)
        path.insert(0, str(folder))
    lines = [[str(KIT / f"{part}.py"), "--short", "--device", "cpu", *more, *arguments] for part, more in parts.items()]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "OUT": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN, json.dumps(lines)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return {part: json.loads((folder / f"{part}.json").read_text()) for part in parts}


RUN = """
import json, runpy, sys
for line in json.loads(sys.argv[1]):
    sys.argv = line
    try:
        runpy.run_path(line[0], run_name="__main__")
    except SystemExit as end:
        assert not end.code, (line, end.code)
"""
PARTS = ("correct", "step", "strategies", "sample")


@pytest.mark.long
def test_all_rows_run_with_little_more_than_torch(tmp_path):
    """Rows with a U-Net report why they are skipped; a killed run resumes exactly."""
    contents = run({part: ["--budget", "240"] for part in PARTS}, tmp_path)
    for part, content in contents.items():
        assert content["complete"] and not content["not_reached"], part
        rows = {row["row"]: row for row in content["rows"]}
        unet = {name for name in rows if name.startswith("unet")}
        assert all("diffusers" in rows[name]["skipped"] for name in unet)
        skipped = [name for name in rows.keys() - unet if "skipped" in rows[name]]
        assert len(rows) > len(unet) and skipped == ["out of memory"] * (part == "correct"), part
    (resumed,) = [row for row in contents["correct"]["rows"] if row["row"] == "resume after a kill"]
    assert resumed["bit_exact"]


@pytest.mark.long
def test_rows_that_need_more_than_torch_run_and_a_part_ends_within_its_budget(tmp_path):
    """Rows that were not reached are listed, and the file is complete."""
    unets = {part: ["--only", "unet"] for part in ("correct", "step", "sample")}
    limited = {"systems": ["--only", "dit_coco", "edm"], "strategies": ["--budget", "0.2"]}
    contents = run(unets | limited, tmp_path, bare=False)
    strategies = contents.pop("strategies")
    assert not strategies["complete"] and "speed" in strategies["not_reached"]
    assert {row["row"] for row in contents["systems"]["rows"]} == {"dit_coco", "edm_cifar10"}
    for content in contents.values():
        assert content["complete"] and not any("skipped" in row or "failed" in row for row in content["rows"])


def test_a_failing_row_does_not_stop_the_other_rows(tmp_path, monkeypatch):
    """The failed row is reported with its message, and the exit status is not 0."""
    monkeypatch.syspath_prepend(str(KIT))
    from gpu_kit import Part, Skipped, arguments

    monkeypatch.setattr(sys, "argv", ["part", "--short", "--device", "cpu", "--out", str(tmp_path)])

    def fail(error):
        raise error

    rows = {"bad": lambda: fail(ValueError("why")), "not here": lambda: fail(Skipped("no")), "good": lambda: {"a": 1}}
    assert Part("part", "a test", arguments("A test.")).run(rows) == 1
    bad, skipped, good = json.loads((tmp_path / "part.json").read_text())["rows"]
    assert (bad["failed"], skipped["skipped"], good["a"]) == ("ValueError: why", "no", 1)


def test_a_part_whose_time_runs_out_between_rows_ends_normally(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(KIT))
    import gpu_kit

    monkeypatch.setattr(sys, "argv", ["part", "--device", "cpu", "--out", str(tmp_path)])
    monkeypatch.setattr(gpu_kit, "free", lambda device: signal.raise_signal(signal.SIGALRM))
    part = gpu_kit.Part("part", "a test", gpu_kit.arguments("A test."))
    assert part.run({"first": lambda: {"a": 1}, "second": lambda: {"a": 2}}) == 0
    content = json.loads((tmp_path / "part.json").read_text())
    assert [row["row"] for row in content["rows"]] == ["first"] and content["not_reached"] == ["second"]
    assert not content["complete"]


def test_packages_of_wheels_can_be_imported(tmp_path):
    with zipfile.ZipFile(tmp_path / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "here = 1")
    environment = os.environ | {"WHEELS": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    packages = [sys.executable, str(KIT / "packages.py")]
    folder = subprocess.run(packages, env=environment, check=True, capture_output=True, text=True).stdout.strip()
    subprocess.run([sys.executable, "-c", "import carried"], env={**os.environ, "PYTHONPATH": folder}, check=True)


def test_a_folder_without_wheels_is_rejected(tmp_path):
    environment = os.environ | {"WHEELS": str(tmp_path)}
    ended = subprocess.run([sys.executable, str(KIT / "packages.py")], env=environment, capture_output=True, text=True)
    assert ended.returncode and str(tmp_path) in ended.stderr
