"""The configurations of the papers' systems: all can be used, and say what the public code says."""

from pathlib import Path

import pytest

from kairos.config import load, validate
from kairos.costs.data import describe
from kairos.diffusion.processes import build_process
from kairos.sampling.places import places
from kairos.sampling.registries import resolved

FILES = sorted((Path(__file__).parents[1] / "experiments/systems").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_can_be_used(path):
    experiment = load(path)
    assert (
        experiment.experiment == path.stem and path.stem in (FILES[0].parents[2] / "benchmarks/systems.py").read_text()
    )


def of(name):
    return load(FILES[0].with_name(f"{name}.yaml")).plain()


def grid_of(name):
    plain = of(name)
    sampling, process = plain["sampling"], plain["diffusion"]["process"]
    found = places(build_process(plain["diffusion"]), sampling["steps"], resolved(sampling["scheduler"], process))
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
        data = describe(validate(plain), tmp_path, (4, 32, 32), None)
        assert data.text_bytes == size * 77 * data.conditions["text"]["shape"][1]


def test_the_plan_says_the_published_size(capsys):
    from kairos.cli import main

    file = str(FILES[0].with_name("dit_imagenet256.yaml"))
    assert main(["plan", file, "--shape", "4", "32", "32", "--classes", "1000"]) == 0
    assert "674,834,720 parameters (674.8 M), 675,129,632 with fixed positions" in capsys.readouterr().out
