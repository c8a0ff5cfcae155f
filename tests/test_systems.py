"""The systems of both papers: their files, their published sizes, and small forms of them that learn."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from kairos import models
from kairos.config import load, validate
from kairos.costs.dataset_size import find_dataset_size
from kairos.forward_process import build_process
from kairos.models.registries import MODELS
from kairos.sampling.registries import resolve_solver
from kairos.sampling.time_grids import build_time_grid

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))

from papers import FILES, SYSTEMS  # noqa: E402


def test_every_file_is_a_system_and_the_reverse():
    assert {file.stem for file in FILES.glob("*.yaml")} == set(SYSTEMS)


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_has_its_published_size(name):
    """Every file has the methods uniform (for EDM the distribution of EDM), speed and adaptive."""
    experiment, system = load(FILES / f"{name}.yaml"), SYSTEMS[name]
    assert experiment.experiment == name and {"speed", "adaptive"} < set(experiment.methods)
    plain = experiment.plain()
    outputs = build_process(plain["diffusion"], 0.5).channels(system.shape[0])
    MODELS.entry(plain["model"]["name"]).load()  # imports must find torch as it is
    with FakeTensorMode():  # shapes without content
        network = models.build(plain["model"], system.shape, system.conditions, outputs)
    assert sum(parameter.numel() for parameter in network.parameters()) == system.parameters


def of(name):
    return load(FILES / f"{name}.yaml").plain()


def grid_of(name):
    plain = of(name)
    sampling, process = plain["sampling"], plain["diffusion"]["process"]
    found = build_time_grid(
        build_process(plain["diffusion"]), sampling["steps"], resolve_solver(sampling["scheduler"], process)
    )
    return [place.t for place in found]


def test_settings_that_no_default_gives():
    ldm, fdm, uvit = of("ldm_celebahq"), of("fdm_cifar10"), of("uvit_cifar10")
    assert ldm["training"]["ema"]["count_from"] == 1 and ldm["dataset"]["images"] == 25_000
    assert {method["weighting"]["warmup"] for method in fdm["methods"].values()} == {200}
    assert uvit["sampling"]["scheduler"]["spacing"] == "uniform"  # auto is EDM's grid
    assert len(set(grid_of("uvit_coco"))) == 51 and grid_of("uvit_coco")[-2:] == [0, 0]
    for name in ("ldm_celebahq", "uvit_imagenet256"):
        assert of(name)["methods"]["adaptive"]["sampler"]["width"] == 256


@pytest.mark.parametrize("size", [64, "64"])
def test_sizes_that_yaml_takes_for_numbers(size):
    values = {"experiment": "x", "methods": {"a": {}}, "model": {"name": "adm", "size": size}}
    assert validate(values).plain()["model"]["size"] == "64"


def test_what_texts_take_on_the_disk(tmp_path):
    from clip_case import write_text_encoder

    plain = of("uvit_coco")
    plain["text_encoder"]["path"] = str(write_text_encoder(tmp_path / "clip"))
    for dtype, size in (("float16", 2), ("float32", 4)):
        plain["text_encoder"]["dtype"] = dtype
        data = find_dataset_size(validate(plain), tmp_path, (4, 32, 32), None)
        assert data.bytes_per_text == size * 77 * data.conditions["text"]["shape"][1]


@pytest.mark.long
def test_the_plan_says_the_published_size(capsys):
    from kairos.cli import main

    file = str(FILES / "dit_imagenet256.yaml")
    assert main(["plan", file, "--shape", "4", "32", "32", "--classes", "1000"]) == 0
    assert "675,129,632 parameters (675.1 M), 294,912 of them fixed" in capsys.readouterr().out


@pytest.mark.long
def test_small_forms_learn(tmp_path):
    """A system through the pipeline's own commands, on digits; `make systems` runs all, on CIFAR-10 and COCO."""
    benchmark, arguments = str(ROOT / "benchmarks" / "systems.py"), ["edm_cifar10", "--methods", "adaptive"]
    command = [sys.executable, benchmark, *arguments, "--steps", "40", "--out", str(tmp_path)]
    environment = os.environ | {"DATA": str(tmp_path / "none"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    with open(tmp_path / "systems.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert int(row["small_parameters"]) < 1e6
    assert float(row["loss_after"]) < 0.95 * float(row["loss_before"]), row
    assert (tmp_path / "systems" / "edm_cifar10_adaptive.png").is_file()
