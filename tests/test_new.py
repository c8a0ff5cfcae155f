"""kairos new writes an experiment file for an unknown folder of images and estimates its time."""

import os
import re
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import torch
import yaml
from PIL import Image
from sklearn.datasets import load_digits

from fake_cuda import DEVICE, fake_cuda
from kairos import compute, devices
from kairos.cli import main
from kairos.config import load, validate
from kairos.costs import new_experiment
from kairos.data.latents import open_latents
from kairos.training.loop import train_steps
from test_beforehand import write_digits
from test_schema import SCHEMA
from training_case import build_training, make_latents
from workflow_copy import Copy

A100 = SimpleNamespace(name="A100", total_memory=80 * 2**30, major=8, minor=0)
T4 = SimpleNamespace(name="T4", total_memory=16 * 2**30, major=7, minor=5)  # neither TF32 nor bfloat16


@pytest.fixture
def write_for(tmp_path, monkeypatch, capsys):
    """Function that writes a file for a folder of images without measuring; returns its values and its text.

    Its `gpu` are the properties of a GPU that the machine seems to have.
    """
    monkeypatch.chdir(tmp_path)

    def call(images: Path, gpu: SimpleNamespace | None = None) -> tuple[dict, str]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: gpu)
        monkeypatch.setattr(devices, "has_nvidia_driver", lambda: gpu is not None)
        monkeypatch.setattr(new_experiment, "_find_steps", lambda experiment, facts: (2600, 1800.0))
        (tmp_path / "mine.yaml").unlink(missing_ok=True)
        assert main(["new", "mine.yaml", "--data", str(images), "--minutes", "30"]) == 0
        assert "about 30:00 on this machine" in capsys.readouterr().out
        text = (tmp_path / "mine.yaml").read_text()
        values = yaml.safe_load(text)
        jsonschema.validate(values, SCHEMA)
        assert load("mine.yaml").experiment == "mine"
        assert main(["check", "mine.yaml"]) == 0
        assert "precision: fp32" not in capsys.readouterr().out, "the proposal leaves nothing to report"
        bare = [line for line in text.splitlines() if line and "#" not in line and not line.endswith(":")]
        assert not bare, "each line needs a comment with its reason"
        return values, text

    return call


def estimated_seconds(printed: str) -> int:
    """Return the time that `kairos new` printed: "54 s" below a minute, otherwise such as "1:05"."""
    minutes, seconds = re.search(r"about (?:(\d+):)?(\d+)(?: s)? on this machine", printed).groups(default="0")
    return 60 * int(minutes) + int(seconds)


def test_classes_and_image_sizes_determine_the_experiment(write_for, tmp_path):
    values, text = write_for(write_digits(tmp_path / "x", [(28, 28)] * 30 + [(40, 28)] * 3))
    assert values["dataset"]["resolution"] == 32 and values["dataset"]["color"] == "grey"
    assert values["model"]["conditions"] == ["class"] and values["training"]["milestones"] == [650, 1300, 2600]
    assert "330 images in 2 folders, which are classes; the smallest has 165" in text
    assert "2 sizes; the median of the shorter side is 28" in text
    assert "30 are not square and lose 30 % of their area" in text
    assert values["evaluation"]["extractor"] == {
        "name": "classifier",
        "features": 32,
        "steps": 30,
        "fallback": "selfsupervised",
    }
    assert values["evaluation"]["num_samples"] == 66


def test_few_colour_images_without_classes_get_a_selfsupervised_extractor(write_for, tmp_path):
    (tmp_path / "flat").mkdir()
    for number, pixels in enumerate(load_digits().images[:40]):
        grey = Image.fromarray((pixels * 15).astype("uint8"))
        Image.merge("RGB", (grey, grey.transpose(0), grey)).save(tmp_path / f"flat/{number}.png")
    values, text = write_for(tmp_path / "flat")
    assert values["dataset"]["resolution"] == 8 and values["autoencoder"] == {"kind": "none"}
    assert values["dataset"]["color"] == "rgb" and values["model"]["conditions"] == []
    assert values["evaluation"]["extractor"]["name"] == "selfsupervised" and "without labels" in text


@pytest.mark.parametrize(("white", "kind"), [(4095, "uint16"), (65535, "float32"), (1, "float32"), (65535, "uint16")])
def test_the_range_of_stored_values_is_proposed_unless_it_is_the_default(write_for, tmp_path, white, kind):
    (tmp_path / "flat").mkdir()
    for number, pixels in enumerate(load_digits().images[:40]):
        Image.fromarray((pixels / 16 * white).astype(kind)).save(tmp_path / f"flat/{number}.tiff")
    values, _ = write_for(tmp_path / "flat")
    is_default = (white, kind) in ((1, "float32"), (65535, "uint16"))
    assert values["dataset"].get("value_range") == (None if is_default else [0, white])


@pytest.mark.parametrize("name", ["2026-11-03", "2026-13-40", "2024", "on", "null"])
def test_names_that_yaml_would_convert_and_folders_of_any_characters_are_quoted(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(new_experiment, "_find_steps", lambda experiment, facts: (500, 60.0))
    images = write_digits(tmp_path / '📷 \x85\n"é', [(8, 8)] * 4)
    assert main(["new", f"{name}.yaml", "--data", str(images)]) == 0
    experiment = load(f"{name}.yaml")
    assert experiment.experiment == name and experiment.dataset.path == str(images)


@pytest.mark.parametrize(
    ("data", "folder", "option"), [(b"images\xff", "", "--data"), (b"images", "with\nbreak", "FILE")]
)
def test_paths_that_no_experiment_file_can_contain_are_rejected_before_images_are_read(
    data, folder, option, tmp_path, monkeypatch, capsys
):
    (tmp_path / folder).mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / folder)
    monkeypatch.setattr(new_experiment, "inspect_images", None)
    images = write_digits(tmp_path / os.fsdecode(data), [(8, 8)] * 4)
    assert main(["new", str(tmp_path / "mine.yaml"), "--data", str(images)]) == 2
    assert f"{option}: got '" in capsys.readouterr().err


def test_the_short_run_accepts_a_class_of_few_images(tmp_path, monkeypatch):
    facts_of = []
    monkeypatch.setattr(new_experiment, "_find_steps", lambda experiment, facts: facts_of.append(facts) or (500, 60.0))
    monkeypatch.setitem(new_experiment._SHORT_RUN, "images", 40)
    monkeypatch.chdir(tmp_path)
    images = write_digits(tmp_path / "x", [(8, 8)] * 9)
    for file in sorted((images / "b").iterdir())[5:]:  # 45 images of class a, 5 of class b
        file.unlink()
    assert main(["new", "mine.yaml", "--data", str(images)]) == 0
    experiment = load("mine.yaml")
    assert experiment.evaluation.extractor.name == "classifier"
    short_form, factors = new_experiment._shorten(experiment, *facts_of)
    assert factors["prepare"] == 50 / 40
    validate(short_form).resolve()


@pytest.mark.long
def test_a_gpu_gets_larger_images_and_networks(write_for, tmp_path):
    values, text = write_for(write_digits(tmp_path / "x", [(300, 300)] * 20), gpu=A100)
    assert values["dataset"]["resolution"] == 256 and values["model"]["size"] == "s/2" and "A100, 80 GiB" in text


@pytest.mark.parametrize(("gpu", "precision"), [(A100, "tf32"), (T4, "fp32"), (None, "fp32")])
def test_networks_use_tf32_on_a_gpu_that_has_it(gpu, precision, write_for, tmp_path):
    values, text = write_for(write_digits(tmp_path / "x", [(8, 8)] * 4), gpu)
    proposed = load("mine.yaml")
    assert proposed.training.precision == proposed.sampling.precision == precision
    assert proposed.evaluation.precision == "fp32"
    assert ("precision" in values["training"]) == (gpu is not None), "without a GPU there is no choice"
    assert ("compute capability 7.5" in text) == (gpu is T4)


def test_the_experiment_proposed_for_a_gpu_trains_there_in_its_precision(write_for, tmp_path, monkeypatch):
    write_for(write_digits(tmp_path / "x", [(8, 8)] * 4), A100)
    plain = load("mine.yaml").plain()
    plain["model"] |= {"depth": 1}
    latents = open_latents(make_latents(tmp_path / "latents"))
    try:
        compute.setup(1, "cuda", deterministic=False, precision=plain["training"]["precision"])
        assert torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a simulated device needs no driver
        with fake_cuda():
            training = build_training(plain, "uniform", 0, latents, DEVICE)
            steps = train_steps(training, 2)
            next(steps)
            steps.close()
            state = [*training.parameters, *training.average.weights.values()]
            assert {(tensor.dtype, tensor.device) for tensor in state} == {(torch.float32, DEVICE)}
    finally:
        torch.backends.cudnn.benchmark = False
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


@pytest.mark.long
def test_few_images_are_ranked_by_the_validation_loss_and_many_by_the_distance(write_for, tmp_path):
    few, _ = write_for(write_digits(tmp_path / "few", [(8, 8)] * 20))
    assert few["evaluation"]["primary_metric"] == "validation"
    many, _ = write_for(write_digits(tmp_path / "many", [(8, 8)] * 130))
    assert many["evaluation"].get("primary_metric", "distance") == "distance"
    assert few["evaluation"]["extractor"]["steps"] < many["evaluation"]["extractor"]["steps"] < 600


def test_an_experiment_that_takes_longer_than_requested_is_reported_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    images = write_digits(tmp_path / "x", [(8, 8)] * 4)

    def list_warnings(seconds: float) -> list[str]:
        monkeypatch.setattr(new_experiment, "_find_steps", lambda experiment, facts: (500, seconds))
        (tmp_path / "mine.yaml").unlink(missing_ok=True)
        assert main(["new", "mine.yaml", "--data", str(images), "--minutes", "30"]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if "--minutes" in line]

    assert list_warnings(29 * 60) == []
    (line,) = list_warnings(50 * 60)
    assert "30" in line and "50:00" in line and "500" in line


def test_progress_lines_show_jobs_rate_and_remaining_time():
    output = """Job stats:
job            count
-----------  -------
prepare            1
train              4
total             10

rule prepare:
    output: x
Finished jobid: 7 (Rule: prepare)
1 of 10 steps (10%) done
rule train:
rule train:
4 of 10 steps (40%) done
rule evaluate:
"""
    clock = 0.0

    def snakemake_output():
        nonlocal clock
        for line in output.splitlines():
            clock += {"1 of 10 steps (10%) done": 10, "4 of 10 steps (40%) done": 30}.get(line, 0)
            yield line

    first, second, third = new_experiment.progress_lines(snakemake_output(), lambda: clock)
    assert "prepare" in first and "0 of 10" in first
    assert "train" in second and "1 of 10" in second and "1:30 left" in second
    assert "evaluate" in third and "4 of 10" in third and "0.1 jobs/s" in third and "1:00 left" in third


def test_images_and_files_that_cannot_be_used_are_rejected_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    images = write_digits(tmp_path / "x", [(8, 8)] * 5)
    (images / "a/000.png").write_bytes(b"")
    (images / "b/001.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(20))
    (tmp_path / "empty").mkdir()
    (tmp_path / "there.yaml").write_text("mine")
    write_digits(tmp_path / "few", [(8, 8)] * 3)

    def read_rejection(line: str) -> str:
        assert main(["new", *line.split()]) in (1, 2)
        errors = capsys.readouterr().err
        assert "Traceback" not in errors
        return errors

    assert "there.yaml already exists" in read_rejection("there.yaml --data x")
    assert "no/mine.yaml" in read_rejection("no/mine.yaml --data x")
    assert "empty" in read_rejection("mine.yaml --data empty")
    assert "none" in read_rejection("mine.yaml --data none")
    unreadable = read_rejection("mine.yaml --data x")
    assert all(name in unreadable for name in ("2 images", "a/000.png", "b/001.png"))
    assert re.search("30 images.*allowed: 40", read_rejection("mine.yaml --data few"))
    assert "--minutes: got nan" in read_rejection("mine.yaml --data few --minutes nan")
    assert (tmp_path / "there.yaml").read_text() == "mine" and not (tmp_path / "mine.yaml").exists()
    for name in ("a/000.png", "b/001.png"):
        (images / name).unlink()
    assert "no Snakefile in" in read_rejection("mine.yaml --data x")


@pytest.mark.long
def test_every_stage_is_measured_by_real_jobs(tmp_path):
    """test_own_images.py compares the estimated time with that of the run."""
    copy = Copy(tmp_path / "copy")
    images = write_digits(tmp_path / "x", [(8, 8)] * 6)
    with copy.edited("src/kairos/costs/new_experiment.py", '_SHORT_RUN = {"steps": 120', '_SHORT_RUN = {"steps": 20'):
        ended = copy.run_forked("kairos", "new", "mine.yaml", "--data", str(images), "--minutes", "0.1")
    assert ended.returncode == 0, ended.stderr
    for stage in ("prepare", "extractor", "train", "evaluate"):
        assert re.search(rf"timing {stage}; \d+ of \d+ jobs", ended.stderr), ended.stderr
    assert estimated_seconds(ended.stdout) > 0
    assert "--minutes: got 0.1" in ended.stdout + ended.stderr  # the smallest experiment takes longer
    assert copy.to_do(config="mine.yaml")["train"] == len(load(copy.folder / "mine.yaml").methods)
