"""Tests of the systems of both papers: their files, published sizes, and training of small versions."""

import csv
import importlib.util
from pathlib import Path

import pytest
import torch
from papers import FILES, SYSTEMS
from torch._subclasses.fake_tensor import FakeTensorMode

from kairos import models
from kairos.config import load, validate
from kairos.costs.dataset_size import find_dataset_size
from kairos.forward_process import build_process, output_channels
from kairos.sampling.settings import resolve_solver
from kairos.sampling.time_grids import build_time_grid
from marks import mark_long


def test_every_system_has_an_experiment_file_and_every_file_a_system():
    assert {file.stem for file in FILES.glob("*.yaml")} == set(SYSTEMS)


@pytest.mark.parametrize("name", mark_long(SYSTEMS, set(SYSTEMS) - {"adm_imagenet256", "adm_imagenet64"}))
def test_a_system_has_its_published_size(name):
    """Every file has the methods uniform (for EDM the distribution of EDM), speed and adaptive."""
    experiment, system = load(FILES / f"{name}.yaml"), SYSTEMS[name]
    assert experiment.experiment == name and {"speed", "adaptive"} < set(experiment.methods)
    diffusion = experiment.diffusion
    outputs = output_channels(build_process(diffusion.process, diffusion.prediction, 0.5), system.shape[0])
    experiment.model.load()  # import before FakeTensorMode changes torch
    with FakeTensorMode():  # tensors with shapes and without content
        network = models.build(experiment.model, system.shape, system.conditions, outputs)
    assert sum(parameter.numel() for parameter in network.parameters()) == system.parameters


def load_plain(name):
    """Return the experiment of a system as plain values."""
    return load(FILES / f"{name}.yaml").plain()


def grid_times(name):
    """Return the times of a system's solver time grid."""
    config = load(FILES / f"{name}.yaml")
    sampling, diffusion = config.sampling, config.diffusion
    solver = resolve_solver(sampling.scheduler, diffusion.process)
    process = build_process(diffusion.process, diffusion.prediction)
    return [level.t for level in build_time_grid(process, sampling.steps, solver)]


def test_systems_have_the_settings_that_differ_from_the_defaults():
    ldm, fdm, uvit = load_plain("ldm_celebahq"), load_plain("fdm_cifar10"), load_plain("uvit_cifar10")
    assert ldm["training"]["ema"]["count_from"] == 1 and ldm["dataset"]["images"] == 25_000
    assert {method["weighting"]["warmup"] for method in fdm["methods"].values()} == {200}
    assert uvit["sampling"]["scheduler"]["spacing"] == "uniform"  # auto selects EDM's grid
    assert len(set(grid_times("uvit_coco"))) == 51 and grid_times("uvit_coco")[-2:] == [0, 0]
    for name in ("ldm_celebahq", "uvit_imagenet256"):
        assert load_plain(name)["methods"]["adaptive"]["sampler"]["width"] == 256
    # the code of these systems trains in fp16, which kairos lacks; DiT's code in TF32, EDM's without TF32
    for name in (
        "adm_imagenet64",
        "adm_imagenet256",
        "uvit_cifar10",
        "uvit_imagenet256",
        "uvit_coco",
        "vit_imagenet256",
    ):
        assert load_plain(name)["training"]["precision"] == "bf16"
    assert load_plain("dit_imagenet256")["training"]["precision"] == "tf32"
    assert load_plain("edm_cifar10")["training"]["precision"] == "fp32"


@pytest.mark.parametrize("size", [64, "64"])
def test_a_model_size_may_be_a_number(size):
    values = {"experiment": "x", "methods": {"a": {}}, "model": {"name": "adm", "size": size}}
    assert validate(values).plain()["model"]["size"] == "64"


def test_the_size_of_encoded_texts_on_disk_is_known(tmp_path):
    from clip_case import write_text_encoder

    plain = load_plain("uvit_coco")
    plain["text_encoder"]["path"] = str(write_text_encoder(tmp_path / "clip"))
    for dtype, size in (("float16", 2), ("float32", 4)):
        plain["text_encoder"]["dtype"] = dtype
        data = find_dataset_size(validate(plain), tmp_path, (4, 32, 32), None)
        assert data.bytes_per_text == size * 77 * data.conditions["text"]["shape"][1]


@pytest.mark.long
def test_kairos_plan_prints_the_published_size(capsys):
    from kairos.cli import main

    file = str(FILES / "dit_imagenet256.yaml")
    assert main(["plan", file, "--shape", "4", "32", "32", "--classes", "1000"]) == 0
    assert "675,129,632 parameters (675.1 M), 294,912 of them fixed" in capsys.readouterr().out


@pytest.mark.long
def test_a_small_system_learns(tmp_path, monkeypatch):
    """The benchmark trains a small system on digits; `make systems` runs all systems, on CIFAR-10 and COCO."""
    torch.set_num_threads(1)
    # by its path, since benchmarks/gpu has a module of this name too
    path = Path(__file__).parents[1] / "benchmarks/systems.py"
    specification = importlib.util.spec_from_file_location("small_systems", path)
    benchmark = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(benchmark)
    monkeypatch.setattr(benchmark, "DATA", tmp_path / "none")
    arguments = ["edm_cifar10", "--methods", "adaptive", "--steps", "40", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["systems.py", *arguments])
    assert benchmark.main() == 0
    with open(tmp_path / "systems.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert int(row["small_parameters"]) < 1e6
    assert float(row["loss_after"]) < 0.95 * float(row["loss_before"]), row
    assert (tmp_path / "systems" / "edm_cifar10_adaptive.png").is_file()
