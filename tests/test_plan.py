"""Estimates of ``kairos plan`` equal real networks, strategies and files."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import results_tree
from kairos import devices
from kairos.cli import main
from kairos.config import load, validate
from kairos.costs.estimate import estimate_cost
from kairos.costs.network import count_network_cost
from kairos.costs.rendering import estimate_values, format_bytes, render_estimate
from kairos.costs.step_rate import measured_rate
from kairos.models.settings import BACKBONES
from kairos_timesteps.base import Cost, MeasuresNetwork, Sampler
from kairos_timesteps.components import SAMPLERS
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.options import options_without_name
from kairos_timesteps.registry import Entry
from kairos_timesteps.strategy import Strategy
from marks import mark_long
from training_case import build_model, experiment, make_latents, make_process, train

ROOT = Path(__file__).resolve().parent.parent
CLASS = {"class": {"kind": "class", "num_classes": 1000}}
DIT_S = {"name": "dit", "patch": 2, "width": 384, "depth": 12, "heads": 6, "mlp_ratio": 4.0, "conditions": ["class"]}
DIT_XL = {**DIT_S, "width": 1152, "depth": 28, "heads": 16}
UNET = {
    "name": "unet", "channels": 128, "multipliers": [1, 2, 2, 2], "blocks": 2, "attention": [16], "dropout": 0.1,
    "norm_groups": 32, "pad": True, "conditions": [],
}  # fmt: skip
SMALL = {
    "dit": {"name": "dit", "patch": 2, "width": 48, "depth": 3, "heads": 2, "mlp_ratio": 4.0, "conditions": []},
    "unet": {**UNET, "channels": 16, "norm_groups": 8, "attention": [4]},
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "shape", "conditions", "millions", "gflop"),
    [
        (UNET, (3, 32, 32), {}, 35.7, 12.4),
        (DIT_XL, (4, 32, 32), CLASS, 674.8, 237.3),
    ],
)
def test_published_parameters_and_operations(
    model: Any, shape: Any, conditions: Any, millions: float, gflop: float
) -> None:
    """DDPM's U-Net for CIFAR-10, and DiT-XL/2 at 256x256 with 118.64 Gflops of two operations each."""
    cost = count_network_cost(BACKBONES.select(model), shape, conditions, 2)
    assert cost.parameters / 1e6 == pytest.approx(millions, abs=0.06)
    assert cost.forward_flops / cost.samples / 1e9 == pytest.approx(gflop, rel=0.01)
    assert cost.backward_flops == pytest.approx(2 * cost.forward_flops, rel=0.03)


@pytest.mark.parametrize("name", mark_long(["dit", "unet"], ["dit"]))
def test_counts_equal_those_of_the_real_network(name: str) -> None:
    """Parameters and operations are exact; activation memory agrees with the tensors saved for backward within 2 %."""
    cost = count_network_cost(BACKBONES.select(SMALL[name]), (3, 16, 16), {}, 5)
    network = build_model(SMALL[name], (3, 16, 16), {}).train()
    assert cost.parameters == sum(value.numel() for value in network.parameters() if value.requires_grad)
    assert cost.parameters + cost.fixed_parameters == sum(value.numel() for value in network.parameters())
    assert cost.saved_values == sum(value.numel() for value in network.weights().values())
    assert cost.saved_tensors == len(network.weights())
    parameter_storages = {value.untyped_storage().data_ptr() for value in network.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x, t = torch.randn(5, 3, 16, 16), torch.arange(5)
    with (
        FlopCounterMode(display=False) as forward,
        torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor),
    ):
        output = network(x, t, {})
    with FlopCounterMode(display=False) as backward:
        output.square().mean().backward()
    assert (cost.forward_flops, cost.backward_flops) == (forward.get_total_flops(), backward.get_total_flops())
    bytes_ = sum(
        tensor.untyped_storage().nbytes() for pointer, tensor in saved.items() if pointer not in parameter_storages
    )
    assert cost.activation_bytes == pytest.approx(bytes_, rel=0.02)


@pytest.mark.long
def test_memory_and_operations_scale_with_precision_and_batch() -> None:
    costs = {
        precision: count_network_cost(BACKBONES.select(SMALL["dit"]), (3, 16, 16), {}, 8, precision)
        for precision in ("fp32", "bf16", "fp64")
    }
    assert costs["fp64"].activation_bytes == pytest.approx(2 * costs["fp32"].activation_bytes, rel=0.05)
    assert 0.4 < costs["bf16"].activation_bytes / costs["fp32"].activation_bytes < 0.9
    assert costs["bf16"].forward_flops == costs["fp32"].forward_flops
    twice = count_network_cost(BACKBONES.select(SMALL["dit"]), (3, 16, 16), {}, 16)
    assert twice.forward_flops == 2 * costs["fp32"].forward_flops
    assert twice.activation_bytes == pytest.approx(2 * costs["fp32"].activation_bytes, rel=0.02)


class CountingNetwork(nn.Module):
    """Network with one parameter that counts its input samples."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.samples = [0, 0]  # without and with gradients

    def forward(self, x: torch.Tensor, t: torch.Tensor, conditions: Any) -> torch.Tensor:
        self.samples[torch.is_grad_enabled()] += len(x)
        return x * self.scale


@pytest.mark.parametrize("sampler", list(SAMPLERS))
@pytest.mark.parametrize("batch", [16, 48])
def test_the_cost_of_every_sampler_equals_its_forward_passes(sampler: str, batch: int) -> None:
    """`Sampler.cost` equals the number of samples that pass through the network per period, after the warm-up."""
    plain = experiment({"m": {"sampler": sampler}}, training__batch_size=batch)
    options = options_without_name(plain["methods"]["m"]["sampler"])
    diffusion = plain["diffusion"]
    strategy = Strategy(sampler, make_process(diffusion["process"], diffusion["prediction"]), sampler=options)
    network, x0, period = CountingNetwork(), torch.zeros(batch, 3, 2, 2), getattr(strategy.sampler, "frequency", 1)
    for number in range(5):
        network.samples = [0, 0]
        strategy.step = number * period
        draw = strategy.draw(x0)
        strategy.weighted(draw, torch.zeros(batch))
        with strategy.observe(draw, network, None, {}):
            pass
    cost = strategy.sampler.cost(batch, 3)
    assert [cost.forward * period, cost.gradient * period] == pytest.approx(network.samples)
    assert cost.known
    state = strategy.state_dict()["sampler"]
    if "policy" in state:
        moments = [value["exp_avg"].numel() for value in state["optimizer"]["state"].values()]
        assert cost.state >= 3 * 4 * sum(moments)


class Silent(MeasuresNetwork, Sampler):
    """A new sampler that measures the network and does not report its cost."""

    def quantile(self, p, **context):
        return p


class Honest(Silent):
    def cost(self, batch: int, channels: int) -> Cost:
        return Cost(gradient=batch * channels, state=7)


def test_a_new_sampler_defines_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    for sampler in (Silent, Honest):
        monkeypatch.setitem(SAMPLERS, sampler.__name__.lower(), Entry(sampler))
    methods = {name: {"sampler": name} for name in ("uniform", "silent", "honest")}
    values = {**experiment(methods, dataset__color="grey"), "autoencoder": {"kind": "none"}}
    estimate = estimate_cost(validate(values)).methods
    assert [method.sampler_cost.known for method in estimate.values()] == [True, False, True]
    assert estimate["silent"].flops_per_step == estimate["uniform"].flops_per_step
    assert estimate["honest"].flops_per_step == pytest.approx(2 * estimate["uniform"].flops_per_step)


def test_a_limit_reduces_the_configured_number_of_images() -> None:
    folder = {
        "dataset__source": "folder",
        "dataset__path": "x",
        "dataset__resolution": 32,
        "dataset__images": 1_281_167,
    }
    for limit, heldout, counts in (
        (10_000, 0.1, (10_000, 9_000)),
        (2_000_000, 0.0, (1_281_167, 1_281_167)),
        (10_000, "other", (None, 10_000)),
    ):
        plain = experiment(**folder, dataset__limit=limit, dataset__heldout=heldout)
        data = estimate_cost(validate(plain), x0_shape=(3, 32, 32)).data
        assert (data.image_count, data.train_count) == counts


@pytest.mark.long
def test_the_estimate_equals_files_and_rate_of_a_real_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents, checkpoints and snapshots have the estimated size; the measured time per step is the rate."""
    monkeypatch.chdir(tmp_path)
    results = Path("results/case")
    make_latents(results, count=200)
    plain = experiment(
        autoencoder__kind="train", autoencoder__channels=[8, 8], autoencoder__latent_channels=4,
        dataset__color="grey", dataset__limit=200, dataset__heldout=0.25, model__width=96, model__depth=3,
    )  # fmt: skip
    for method in plain["methods"]:
        train(plain, method, 0, results / "methods" / method / "seed0", results / "latents", [0, 20, 40])
    record = results / "dataset/record.json"
    record.unlink()  # as before kairos prepare
    (results / "latents/record.json").unlink()
    estimate = estimate_cost(validate(plain))
    assert (estimate.data.x0_shape, estimate.data.image_count, estimate.data.train_count) == ((4, 4, 4), 200, 150)
    assert estimate.storage["latents"] == pytest.approx(_measure_size(results / "latents"), rel=0.01)
    assert estimate.storage["dataset"] == pytest.approx((results / "dataset/images.npy").stat().st_size, rel=0.02)
    states = [results / "methods" / method / "seed0/.state" for method in plain["methods"]]
    kept = [path for state in states for path in state.glob("*/checkpoints/*")]
    assert len(kept) == 4
    assert estimate.storage["checkpoints"] == pytest.approx(sum(path.stat().st_size for path in kept), rel=0.02)
    snapshots = sum(_measure_size(folder) for state in states for folder in state.glob("*/snapshots"))
    assert estimate.storage["snapshots"] == pytest.approx(snapshots, rel=0.05)
    lasting = sum(estimate.memory[name] for name in ("weights", "EMA", "optimizer"))
    assert lasting == pytest.approx(kept[0].stat().st_size, rel=0.02)  # of uniform, which has no state
    assert estimate.rate is not None
    assert f"measured in {len(plain['methods'])} training runs" in estimate.rate.source
    line = json.loads((results / "methods/uniform/seed0/timing.jsonl").read_text().splitlines()[-1])
    assert estimate.methods["uniform"].seconds_per_step == pytest.approx(line["seconds"] / 40)
    assert estimate.methods["uniform"].lost_seconds == pytest.approx(line["seconds"] / 40 * 10)
    assert estimate.unit == "CPU"  # the runs were timed on it
    seeds, threads = len(plain["seeds"]), plain["training"]["threads"]
    steps = plain["training"]["milestones"][-1]
    expected_hours = seeds * steps * line["seconds"] / 40 * threads / 3600
    assert estimate.methods["uniform"].training_hours == pytest.approx(expected_hours)
    assert (
        estimate_values(estimate)["gpu_hours"] is None
        and estimate_values(estimate)["cpu_hours"]["uniform"] >= expected_hours
    )
    assert "CPU-hours" in render_estimate(estimate) and "GPU" not in render_estimate(estimate).replace("GPUs each", "")


def test_the_rate_is_that_of_the_newest_state(tmp_path: Path) -> None:
    """A run whose settings have changed keeps the state of the earlier settings."""
    for name, seconds, modified in (("aaaa", 10.0, 1_000), ("ffff", 0.01, 2_000), ("cccc", 5.0, 1_500)):
        file = tmp_path / "methods/uniform/seed0/.state" / name / "timing.jsonl"
        file.parent.mkdir(parents=True)
        line = json.dumps({"step": 1, "seconds": seconds, "machine": results_tree.MACHINE})
        file.write_text(f"{line}\n\0\0\n")  # a power loss damaged the end
        os.utime(file, (modified, modified))
    rate = measured_rate(tmp_path, {"uniform": 1e9}, devices=1)
    assert rate is not None and rate.seconds_per_step["uniform"] == 0.01


def _measure_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_numbers_of_jobs_and_hours_at_a_given_rate() -> None:
    """The expected numbers are computed by hand."""
    changes = {
        "training__device": "cuda",
        "training__segments": 2,
        "training__trainings_per_gpu": 4,
        "seeds": [0, 1, 2],
        "dataset__color": "grey",
    }
    plain = experiment({"uniform": {}, "gradient_norm": {"sampler": "gradient_norm"}}, **changes)
    estimate = estimate_cost(validate({**plain, "autoencoder": {"kind": "none"}}), steps_per_second=10.0)
    stages = {stage.name: (stage.jobs, stage.queued_jobs) for stage in estimate.stages}
    assert stages["train"] == (12, 4)  # 6 runs in 2 segments; one job has 4 of them, one has 2
    assert (stages["sample"], stages["evaluate"], stages["report"]) == ((12, 12), (12, 0), (1, 0))
    uniform, other = estimate.methods["uniform"], estimate.methods["gradient_norm"]
    assert uniform.seconds_per_step == pytest.approx(0.1)
    assert uniform.training_hours == pytest.approx(3 * 40 * 0.1 / 4 / 3600)
    assert other.seconds_per_step == pytest.approx(0.1 * (1 + 32 / 16 / 100))  # 2 in each of 16 bins, every 100 steps
    assert estimate.methods["uniform"].longest_job_hours == pytest.approx(20 * 0.1 / 3600)
    with pytest.raises(ConfigError, match="allowed: one of them"):
        estimate_cost(validate({**plain, "autoencoder": {"kind": "none"}}), steps_per_second=1.0, tflops=1.0)


@pytest.mark.parametrize(("device", "unit"), [("cuda", "GPU"), ("cpu", "CPU")])
def test_hours_are_in_units_of_the_device(device: str, unit: str) -> None:
    plain = experiment(training__device=device, training__threads=2, training__trainings_per_gpu=4)
    changed = validate({**plain, "autoencoder": {"kind": "none"}})
    estimate = estimate_cost(changed, steps_per_second=10.0)
    seconds = len(changed.seeds) * changed.milestones[-1] * 0.1
    assert estimate.unit == unit
    assert estimate.methods["uniform"].training_hours == pytest.approx(seconds / 3600 * (1 / 4 if unit == "GPU" else 2))
    assert f"{unit}-hours" in render_estimate(estimate)
    assert f"{unit}-hours: no training run has been timed" in render_estimate(estimate_cost(changed))
    assert estimate_cost(changed, tflops=100.0).unit == "GPU", "the given speed is that of a GPU"


def test_hours_on_a_machine_without_a_gpu_are_cpu_hours_unless_there_is_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU `device: auto` means CPUs, unless jobs go to a SLURM cluster."""
    if devices.has_nvidia_driver():
        pytest.skip("this machine has a GPU")
    automatic = validate({**experiment(training__device="auto"), "autoencoder": {"kind": "none"}})
    monkeypatch.setenv("PATH", str(tmp_path))
    assert estimate_cost(automatic).unit == "CPU"
    (tmp_path / "sinfo").write_text("#!/bin/sh\n")
    (tmp_path / "sinfo").chmod(0o755)
    assert estimate_cost(automatic).unit == "GPU"


def test_the_sets_of_samples_are_shown() -> None:
    plain = experiment(evaluation__num_samples=10000, evaluation__sets=3)
    assert "3 sets of 10,000 images" in render_estimate(
        estimate_cost(validate({**plain, "autoencoder": {"kind": "none"}}))
    )


def test_numbers_of_bytes_have_no_exponent() -> None:
    sizes = (1023, 12.5 * 2**20, 999.4 * 2**10, 999.5 * 2**10, 5000 * 2**40)
    assert [format_bytes(size) for size in sizes] == ["1023 B", "12.5 MiB", "999 KiB", "1000 KiB", "5000 TiB"]


def test_unknown_quantities_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "x.yaml"
    dataset = "dataset: {source: parquet, path: x.parquet"
    rest = "experiment: x\nmodel: {name: dit, width: 32, depth: 1, heads: 2}\nmethods: {uniform: {}}\n"
    file.write_text(f"{rest}{dataset}}}\n")
    assert main(["plan", str(file)]) == 2
    assert "--shape C H W" in capsys.readouterr().err
    file.write_text(f"{rest}{dataset}, resolution: 16}}\n")
    assert main(["plan", str(file)]) == 0
    output = capsys.readouterr().out
    assert "unknown before kairos prepare" in output
    assert "768 B" in output
    assert "per image" in output
    assert "U-hours: no training run has been timed" in output
    assert max(map(len, output.splitlines())) <= 120
    assert main(["plan", str(file), "--tflops", "100", "--format", "json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert list(numbers) == [
        "parameters",
        "flops_per_step",
        "jobs",
        "memory_bytes",
        "storage_bytes",
        "gpu_hours",
        "cpu_hours",
    ]
    assert numbers["jobs"]["train"] == 1
    assert numbers["memory_bytes"] > 16 * numbers["parameters"]
    assert numbers["storage_bytes"]["dataset"] is None
    assert numbers["storage_bytes"]["checkpoints"] > 32 * numbers["parameters"]
    assert numbers["gpu_hours"]["uniform"] > 0
    assert main(["plan", str(file), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {**numbers, "gpu_hours": None}
    assert main(["plan", str(file), "--tflops", "0"]) == 2


@pytest.mark.long
def test_the_text_shape_of_an_absent_encoder_comes_from_options_or_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = str(ROOT / "experiments/systems/dit_coco.yaml")
    (tmp_path / "less.yaml").write_text(json.dumps({"extends": whole, "known": None}))
    without_text = ["plan", str(tmp_path / "less.yaml"), "--shape", "4", "32", "32"]
    assert main(without_text) == 2
    assert "the shape of text is not known yet" in capsys.readouterr().err
    for arguments in ([*without_text, "--text", "77", "512"], ["plan", whole]):
        assert main(arguments) == 0
        assert "675,895,712 parameters" in capsys.readouterr().out


@pytest.mark.long
def test_a_large_recipe_is_planned_in_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan of 30 methods, 5 seeds and the largest published DiT runs no network."""
    methods = {f"adaptive_{k}": {"sampler": {"name": "adaptive", "lr": 1e-4 * (k + 1)}} for k in range(30)}
    values = {
        "experiment": "large", "seeds": [0, 1, 2, 3, 4], "model": DIT_XL | {"conditions": []}, "methods": methods,
        "dataset": {"source": "parquet", "path": "x", "resolution": 256, "train_images": 1_281_167, "flips": True},
        "autoencoder": {"kind": "train", "channels": [32, 32, 32, 32]},
        "training": {"batch_size": 256, "milestones": [100_000, 400_000], "precision": "bf16"},
    }  # fmt: skip
    file = tmp_path / "large.yaml"
    file.write_text(json.dumps(values))
    begun = time.process_time()
    assert main(["plan", str(file)]) == 0
    assert time.process_time() - begun < 20, "2 s on an idle CPU"
    assert "150 training runs of 400000 steps" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["digits_all_methods", "fashion_mnist_edm", "fashion_mnist_latents"])
def test_experiments_can_be_planned(name: str) -> None:
    """The experiments use every method on latents, EDM's process on pixels, and latents of a trained autoencoder."""
    assert estimate_cost(load(ROOT / f"experiments/{name}.yaml"), tflops=10.0).hours_by_method


def test_a_card_has_its_peak_at_the_precisions_of_the_experiment(capsys):
    """A bf16 peak for an fp32 experiment would print a fifteenth of its hours."""
    experiment = load(ROOT / "recipes/adaptive/table1_linear.yaml")
    assert experiment.training.precision == experiment.sampling.precision == "fp32"

    def hours(**options):
        estimate = estimate_cost(experiment, count_network=lambda *arguments: cost, **options)
        return sum(estimate.hours_by_method.values())

    cost = estimate_cost(experiment).network
    assert hours(card="h100") == pytest.approx(hours(tflops=67.0))
    assert hours(tflops=989.4) == pytest.approx(hours(card="H100") * 67.0 / 989.4)
    mixed = experiment.model_copy(update={"training": experiment.training.model_copy(update={"precision": "bf16"})})
    estimate = estimate_cost(mixed, count_network=lambda *arguments: cost, card="A100")
    method, at_one = (
        estimate.methods["uniform"],
        estimate_cost(mixed, count_network=lambda *arguments: cost, tflops=1.0),
    )
    assert method.training_hours == pytest.approx(at_one.methods["uniform"].training_hours / 312)
    assert method.sampling_hours == pytest.approx(at_one.methods["uniform"].sampling_hours / 19.5)
    for wrong in ({"card": "T800"}, {"card": "A100", "tflops": 1.0}):
        with pytest.raises(ConfigError, match="--card"):
            hours(**wrong)
    assert main(["plan", str(ROOT / "recipes/speed/table5.yaml"), "--card", "H100"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "H100" in out and "training in tf32, 494.7 TFLOP/s, sampling in fp32, 67" in out
