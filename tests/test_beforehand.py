"""`kairos check` before any job: images, memory and time limits; the counts of `kairos plan`."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from PIL import Image
from sklearn.datasets import load_digits

from kairos import devices
from kairos.cli import main
from kairos.config import validate
from kairos.costs.network import NetworkCost
from kairos.costs.preflight import _check_memory
from kairos.costs.storage import estimate_memory
from kairos_timesteps.errors import ConfigError


def write_digits(folder: Path, sizes: list[tuple[int, int]]) -> Path:
    """Write digits of two classes, ten images of each size; returns the folder."""
    digits = load_digits().images
    for number, size in enumerate(size for size in sizes for _ in range(10)):
        folder_of_class = folder / "ab"[number % 2]
        folder_of_class.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((digits[number] * 15).astype("uint8")).resize(size)
        image.save(folder_of_class / f"{number:03d}.png")
    return folder


@pytest.fixture
def check(tmp_path, capsys, monkeypatch):
    """Function that runs a kairos command on a changed experiment and returns its exit status and its output."""
    monkeypatch.chdir(tmp_path)

    def call(
        command: str, *arguments: str, sizes=((16, 16),), training=None, changes=None, **dataset
    ) -> tuple[int, str]:
        images = tmp_path / f"images{len(sizes)}{sizes[0][0]}"
        if not images.exists():
            write_digits(images, [*sizes])
        values = {"experiment": "x", "dataset": {"source": "folder", "path": str(images), "color": "grey", **dataset}}
        values |= {"model": {"name": "dit", "patch": 2, "width": 32, "depth": 1, "heads": 2, "conditions": ["class"]}}
        values |= {"training": {"milestones": [1000], "batch_size": 16, **(training or {})}, "methods": {"a": {}}}
        values["evaluation"] = {"extractor": {"name": "classifier", "features": 8}}
        for section, fields in (changes or {}).items():
            values[section] = {**values.get(section, {}), **fields}
        (tmp_path / "x.yaml").write_text(yaml.safe_dump(values))
        status = main([command, "x.yaml", *arguments])
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return status, printed.out + printed.err

    return call


def test_check_rejects_images_whose_sizes_do_not_fit_the_resolution(check):
    sizes = ((16, 16), (32, 16), (16, 64))
    status, output = check("check", sizes=sizes, resolution=16)
    assert status == 0 and "images: 30 of 3 sizes; 20 are not square and lose 67% of their area by the crop" in output
    assert "images:" not in check("check", resolution=16)[1]
    status, output = check("check", sizes=((16, 16), (20, 20)))
    assert status == 2 and "dataset.resolution: got null with 2 sizes, allowed: a number" in output
    status, output = check("check", sizes=sizes, resolution=16, crop="none")
    assert status == 2 and "dataset.crop: got none with 20 images that are not square" in output
    status, output = check("check", sizes=sizes, resolution=32, crop="pad")
    assert status == 2 and "dataset.resolution: got 32 with crop pad, allowed: 64, the longest side, or more" in output
    assert "3 sizes; padded" in check("check", sizes=sizes, resolution=64, crop="pad")[1]


@pytest.mark.parametrize(
    ("changes", "sizes", "resolution", "message"),
    [
        ({"model": {"patch": 5}}, [(16, 16)], None, "model.patch: got 5, allowed: a divisor of the input's side, 16"),
        ({"model": {"patch": 5}}, [(16, 20)], None, "model.patch: got 5, allowed: a divisor of the input's side, 16"),
        ({"autoencoder": {"kind": "train", "channels": [8, 8, 8]}}, [(18, 18)], None, "images are 18×18"),
        ({"autoencoder": {"kind": "pretrained", "path": "vae"}}, [(16, 16)], 18, "images are 18×18"),
        ({"autoencoder": {"kind": "pretrained", "path": "vae"}}, [(18, 18)], None, "images are 18×18"),
        # latents of side 5
        ({"autoencoder": {"kind": "pretrained", "path": "vae"}}, [(16, 16)], 20, "model.patch: got 2, allowed: a div"),
        ({"autoencoder": {"kind": "pretrained", "path": "absent"}}, [(16, 16)], 18, None),
        ({"model": {"conditions": ["low_resolution"]}, "dataset": {"low_resolution": 3}}, [(16, 16)], None,
         "dataset.low_resolution: got 3, allowed: a divisor of the images' side, 16"),
        ({"dataset": {"train_images": 8}}, [(16, 16)], 16, "dataset.train_images: got 8, allowed: 9 (or null)"),
        ({"dataset": {"train_images": 9}}, [(16, 16)], 16, None),
        ({"dataset": {"train_images": 8, "broken": "skip"}}, [(16, 16)], 16, None),
        ({"dataset": {"train_images": 10, "broken": "skip"}}, [(16, 16)], 16, "got 10, allowed: at most 9"),
    ],
)  # fmt: skip
def test_check_rejects_settings_that_do_not_fit_the_images(check, tmp_path, changes, sizes, resolution, message):
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae/config.json").write_text('{"block_out_channels": [8, 8, 8], "latent_channels": 4}')
    status, output = check("check", sizes=sizes, resolution=resolution, changes=changes)
    if message is None:
        assert status == 0, output
    else:
        assert status == 2 and message in output


def test_check_counts_the_training_images_of_digits():
    values = {"experiment": "x", "dataset": {"train_images": 100}, "methods": {"a": {}}}
    with pytest.raises(ConfigError, match=r"dataset.train_images: got 100, allowed: 1617 "):
        validate(values).resolve()
    values["dataset"]["train_images"] = 1617
    validate(values).resolve()


def test_check_reports_unreadable_images_by_name(check, tmp_path):
    images = write_digits(tmp_path / "images116", [(16, 16)])
    (images / "a/000.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(20))
    status, output = check("check", resolution=16)
    assert status == 2 and "dataset.broken: got refuse, and cannot be read: a/000.png (" in output
    assert check("check", resolution=16, broken="skip")[0] == 0


@pytest.mark.long
def test_check_rejects_a_batch_that_exceeds_the_gpu_memory(check):
    assert check("check", "--gpu-memory", "80", resolution=16)[0] == 0
    big = {"batch_size": 16384}
    status, output = check("check", "--gpu-memory", "2", resolution=16, training=big)
    assert status == 2 and "training.batch_size: got 16384: about " in output
    fitting = int(output.split("training.microbatch: ")[1].split()[0])
    assert 1 <= fitting < 16384
    assert check("check", "--gpu-memory", "2", resolution=16, training={**big, "microbatch": fitting})[0] == 0
    assert check("check", "--gpu-memory", "2", resolution=16, training={**big, "device": "cpu"})[0] == 0


@pytest.mark.parametrize(
    ("device", "fields", "gpu", "listed"),
    [
        ("cuda", {}, None, "training.precision, sampling.precision"),
        ("auto", {}, (8, 0), "training.precision, sampling.precision"),
        ("auto", {"training": {"precision": "bf16"}}, (8, 0), "sampling.precision"),
        ("auto", {"training": {"precision": "fp64"}, "sampling": {"precision": "tf32"}}, (8, 0), None),
        ("auto", {}, (7, 5), None),  # the GPU has no other precision
        ("cuda", {}, (7, 5), None),
        ("auto", {}, None, None),
        ("cpu", {}, (8, 0), None),
    ],
)
def test_check_reports_fp32_where_networks_run_on_a_gpu_with_faster_precisions(
    device, fields, gpu, listed, check, monkeypatch
):
    properties = gpu and SimpleNamespace(total_memory=80 * 2**30, major=gpu[0], minor=gpu[1])
    monkeypatch.setattr(devices, "has_nvidia_driver", lambda: gpu is not None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    training = {"device": device, **fields.get("training", {})}
    status, output = check("check", resolution=16, training=training, changes={"sampling": fields.get("sampling", {})})
    assert status == 0
    lines = [line for line in output.splitlines() if "precision" in line]
    assert len(lines) == (listed is not None)
    assert all(line.startswith(f"{listed}: fp32") for line in lines)


def test_check_reports_fp32_for_a_gpu_of_another_machine(check):
    """The memory of a GPU, or a cluster's profile, is the sign that jobs with `device: auto` get a GPU."""
    assert "precision: fp32" not in check("check", resolution=16)[1]
    assert "precision: fp32" in check("check", "--gpu-memory", "80", resolution=16)[1]
    profile = str(Path(__file__).parents[1] / "profiles/slurm")
    assert "precision: fp32" in check("check", "--profile", profile, resolution=16)[1]
    assert "precision: fp32" not in check("check", "--profile", profile, resolution=16, training={"device": "cpu"})[1]


def test_a_microbatch_is_advised_only_if_it_fits():
    """The optimizer's copy of the gradients, 20 GiB here, is needed with any micro-batch."""
    gib = 2**30
    training = SimpleNamespace(batch_size=4, trainings_per_gpu=1)
    for activation_gib, available, advice in (
        (16, 121, None),  # 100 GiB of weights, gradients, moments and EMA, 20 of the copy, 1 of the context
        (16, 120.9, "a smaller model"),
        (40, 121, "training.microbatch: 2 keeps the batch"),
        (40, 120.9, "a smaller model"),
        (40, 131.5, "training.microbatch: 3 keeps the batch"),
        (400, 122, "a smaller model"),
    ):
        network = NetworkCost(
            parameters=5 * gib, fixed_parameters=0, saved_values=5 * gib, saved_tensors=1, bytes_per_value=4, samples=4,
            forward_flops=1, backward_flops=1, bytes_moved=1, activation_bytes=activation_gib * gib,
        )  # fmt: skip
        memory = estimate_memory(network, processes=1)
        estimate = SimpleNamespace(experiment=SimpleNamespace(training=training), network=network, memory=memory)
        if advice is None:
            _check_memory(estimate, available)
        else:
            with pytest.raises(ConfigError, match=f"training.batch_size: got 4: about .*, allowed: {advice}$"):
                _check_memory(estimate, available)


@pytest.mark.long
def test_check_rejects_runtimes_above_the_limit_of_the_partition(check, tmp_path):
    profile = tmp_path / "profile"
    profile.mkdir()
    settings = {"retries": 1, "kairos-partition-config": str(profile / "partitions.yaml")}
    (profile / "profile.yaml").write_text(yaml.safe_dump(settings))
    limits = {"cpu": {"max_runtime": "3d"}, "gpu": {"max_runtime": "4h", "max_gpu": 8}}
    (profile / "partitions.yaml").write_text(yaml.safe_dump({"partitions": limits}))
    arguments = ("--profile", str(profile))
    status, output = check("check", *arguments, resolution=16)
    assert status == 2 and "runtime of train: got 1440 minutes, allowed: at most 240, the limit in" in output
    assert check("check", *arguments, resolution=16, training={"device": "cpu"})[0] == 0
    settings["set-resources"] = {"train": {"runtime": "4h"}}
    (profile / "profile.yaml").write_text(yaml.safe_dump(settings))
    assert check("check", *arguments, resolution=16)[0] == 0
    status, output = check("check", *arguments, "--steps-per-second", "0.01", resolution=16)
    assert status == 2 and "training.milestones: got a job of 1667 minutes, allowed: at most 480 with its ret" in output
    assert check("check", *arguments, "--steps-per-second", "1", resolution=16)[0] == 0
    settings["set-resources"] = {"train": {"runtime": "60 * attempt"}}
    (profile / "profile.yaml").write_text(yaml.safe_dump(settings))
    status, output = check("check", *arguments, resolution=16)
    assert status == 0 and "runtime of train is an expression, so time limits are not checked" in output
    (profile / "profile.yaml").write_text("[")
    assert check("check", *arguments, resolution=16)[0] == 1
    assert "a folder that contains a profile.yaml" in check("check", "--profile", str(tmp_path), resolution=16)[1]


def test_the_resources_of_a_profile_may_be_a_list(check, tmp_path):
    profile = tmp_path / "profile"
    profile.mkdir()
    for entries, status in (
        ("[train:runtime=60, train:mem_mb=100, sample:runtime=2000]", 2),
        ("[train:runtime=2000, sample:runtime=60]", 0),
        ("train:runtime=60", 2),
        ("{train: {runtime: 60}}", 2),
        ("{sample: {runtime: 60}}", 0),
    ):
        (profile / "profile.yaml").write_text(f"set-resources: {entries}\n")
        # 1000 steps at 0.02 a second: 833 minutes
        arguments = ("--profile", str(profile), "--steps-per-second", "0.02")
        assert check("check", *arguments, resolution=16)[0] == status
    (profile / "profile.yaml").write_text("set-resources: [train=60]\n")
    status, output = check("check", "--profile", str(profile), resolution=16)
    assert status == 1 and "set-resources: got 'train=60', allowed: RULE:RESOURCE=VALUE" in output


def test_plan_counts_images_and_classes(check):
    status, output = check("plan", resolution=16, sizes=((16, 16), (17, 17)), heldout=0.25)
    assert status == 0 and "15 training images of 20 (counted), 1x16x16" in output
    status, output = check("plan", "--format", "json", resolution=16, sizes=((16, 16), (17, 17)))
    assert json.loads(output)["storage_bytes"]["dataset"] == 20 * 16 * 16
