"""Examples of training loops on real images, and strategies in an environment with only torch and numpy."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import kairos_timesteps
from marks import mark_long

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def example(monkeypatch):
    """Function that imports an example by name."""
    from importlib import import_module

    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield import_module
    for name in [
        name for name, module in sys.modules.items() if str(EXAMPLES) in (getattr(module, "__file__", 0) or "")
    ]:
        del sys.modules[name]


SMALL = ["--width", "8", "--batch", "16", "--device", "cpu"]


def assert_decrease(losses, share):
    """Assert that losses are finite and that the last ones are below a share of the first ones."""
    assert np.isfinite(losses).all()
    first, last = np.mean(losses[:10]), np.mean(losses[-50:])
    assert last < share * first, (first, last)


@pytest.mark.parametrize(
    "strategy",
    [
        "speed+change_aware",
        pytest.param("log_normal+min_snr", marks=pytest.mark.long),
        pytest.param("loss_rms", marks=pytest.mark.long),
    ],
)
def test_the_plain_loop_learns_digits(example, capsys, strategy):
    losses = example("plain_pytorch").main([*SMALL, "--strategy", strategy, "--steps", "150"])
    assert len(losses) == 150
    assert_decrease(losses, 0.5)
    assert re.search(r"step 150/150  loss 0\.\d+\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("strategy", "share"),
    [("edm_log_normal+edm", 0.75), pytest.param("edm_log_normal+edm2", 0.75, marks=pytest.mark.long)],
)
def test_the_edm_loop_learns_digits(example, strategy, share):
    assert_decrease(example("edm").main([*SMALL, "--strategy", strategy, "--steps", "150"]), share)


@pytest.mark.parametrize("more", mark_long([[], ["--strategy", "mode+min_snr", "--shift", "3"]], [[]]))
def test_the_flow_loop_learns_digits(example, more):
    assert_decrease(example("flow_matching").main([*SMALL, "--steps", "150", *more]), 0.75)


@pytest.mark.long
def test_the_example_compare_reports_a_paired_difference(example, capsys, tmp_path):
    losses = example("compare").main([*SMALL, "--steps", "120", "--coupling", "nearest", "--pictures", str(tmp_path)])
    assert_decrease(losses, 0.95)
    message = capsys.readouterr().out
    values = [
        re.search(rf"{name}: validation loss (0\.\d+|1\.\d+) ± (0\.\d+)", message) for name in ("uniform", "log_normal")
    ]
    errors = [float(value[2]) for value in values]
    difference = re.search(r"difference: ([+-]0\.\d+) ± (0\.\d+)", message)
    assert float(difference[1]) == pytest.approx(float(values[1][1]) - float(values[0][1]), abs=2e-4)
    assert float(difference[2]) < 0.5 * min(errors), "paired"
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{name} {what}.png" for name in ("uniform", "log_normal") for what in ("losses", "draws")
    }


@pytest.mark.parametrize("name", ["plain_pytorch", "edm", "flow_matching"])
@pytest.mark.parametrize("strategy", ["adaptive+min_snr", "gradient_norm", "first_order+p2", "speed+debiased"])
def test_any_strategy_runs_in_any_loop(example, name, strategy):
    losses = example(name).main([*SMALL, "--strategy", strategy, "--steps", "3"])
    assert len(losses) == 3 and np.isfinite(losses).all()


@pytest.mark.parametrize("strategy", ["loss_second_moment+edm2", "adaptive+min_snr", "clts"])
def test_the_plain_loop_resumes_exactly(example, tmp_path, strategy):
    run = lambda steps, name: example("plain_pytorch").main(  # noqa: E731
        [*SMALL, "--strategy", strategy, "--steps", str(steps), "--checkpoint", str(tmp_path / name)]
    )
    whole = run(6, "whole.pt")
    assert run(4, "parts.pt") + run(6, "parts.pt") == whole
    first, second = (torch.load(tmp_path / name)["network"] for name in ("whole.pt", "parts.pt"))
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "prediction"), [("adaptive+min_snr", "v_prediction"), ("speed+change_aware", "epsilon")]
)
def test_diffusers_training_script_saves_a_pipeline_and_samples(example, tmp_path, strategy, prediction):
    DDPMPipeline = pytest.importorskip("diffusers").DDPMPipeline
    from PIL import Image

    arguments = ["--strategy", strategy, "--prediction", prediction, "--output", str(tmp_path), "--sampling-steps", "3"]
    losses = example("diffusers_unconditional").main([*SMALL, "--steps", "30", *arguments])
    assert len(losses) == 30 and np.isfinite(losses).all() and np.mean(losses[-10:]) < np.mean(losses[:10])
    assert Image.open(tmp_path / "samples.png").size == (32, 16)
    assert DDPMPipeline.from_pretrained(tmp_path).scheduler.config.prediction_type == prediction


def test_an_example_trains_on_a_folder_of_images_from_the_command_line(tmp_path, monkeypatch, capsys):
    from PIL import Image
    from sklearn.datasets import load_digits

    (tmp_path / "class").mkdir()
    for k, digit in enumerate(load_digits().images[:20]):
        Image.fromarray((digit * 15.9).astype(np.uint8)).resize((20, 30)).save(tmp_path / "class" / f"{k}.png")
    arguments = [*SMALL, "--images", str(tmp_path), "--size", "16", "--steps", "2"]
    monkeypatch.setattr(sys, "argv", ["plain_pytorch.py", *arguments])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / "plain_pytorch.py"), run_name="__main__")
    assert re.search(r"step 2/2  loss \d\.\d+\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    "name",
    [
        "plain_pytorch",
        "edm",
        "flow_matching",
        pytest.param("compare", marks=pytest.mark.long),
        "diffusers_unconditional",
    ],
)
def test_examples_have_help_and_reject_unknown_strategies(example, capsys, name):
    if name.startswith("diffusers"):
        pytest.importorskip("diffusers")
    with pytest.raises(SystemExit) as stopped:
        example(name).main(["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert "--strategy" in shown and "--images" in shown
    with pytest.raises(kairos_timesteps.errors.ConfigError, match=r"unknown strategy 'sped'.*speed_official"):
        example(name).main([*SMALL, "--strategy", "sped"])


# Unusual loops


def test_accumulated_micro_batches_draw_different_timesteps_and_resume_exactly():
    def draws(strategy, count):
        return [strategy.draw(torch.zeros(8, 1)) for _ in range(count)]

    strategy = kairos_timesteps.Strategy("log_normal", seed=3)
    first = draws(strategy, 3)
    assert len({tuple(draw.t.tolist()) for draw in first}) == 3 and {draw.step for draw in first} == {0}
    with strategy.observe(first[-1]):
        pass
    second = draws(strategy, 2)
    assert {draw.step for draw in second} == {1}
    resumed = kairos_timesteps.Strategy("log_normal", seed=3)
    resumed.load_state_dict(strategy.state_dict())
    assert torch.equal(draws(resumed, 1)[0].t, draws(strategy, 1)[0].t)
    alone = kairos_timesteps.Strategy("log_normal", seed=3)
    assert torch.equal(draws(alone, 1)[0].t, first[0].t)
    with alone.observe(first[0]):
        pass
    assert torch.equal(draws(alone, 1)[0].t, second[0].t)  # independent of earlier micro-batches


def test_a_loop_that_never_observes_draws_different_timesteps():
    strategy = kairos_timesteps.Strategy("uniform")
    assert len({tuple(strategy.draw(torch.zeros(4, 1)).t.tolist()) for _ in range(20)}) == 20


# An environment with only torch and numpy


BARE = """
import sys

for name in "pydantic diffusers snakemake mlflow datasets sklearn scipy pandas yaml matplotlib safetensors".split():
    sys.modules[name] = None
for name in "torchvision torch_fidelity tqdm PIL transformers accelerate psutil".split():
    sys.modules[name] = None

import kairos_timesteps
assert not {"torch", "numpy"} & set(sys.modules), "import kairos is not free"

from kairos_timesteps.components import SAMPLERS, WEIGHTINGS
from kairos_timesteps.diffusion.schedule import make_schedule
schedule = make_schedule("cosine", 100)
learned = ("loss", "info", "gradient", "first_order", "adaptive", "edm2", "auto")
fixed = [name for name in SAMPLERS if not name.startswith(learned)]
for name in fixed:
    assert abs(SAMPLERS.build(name, {}, schedule).probabilities().sum() - 1) < 1e-9
for name in WEIGHTINGS:
    name in ("edm2", "coarse_to_fine") or WEIGHTINGS.build(name, {}, schedule, "epsilon").weights()
assert "torch" not in sys.modules, "densities need torch"

import kairos_timesteps.errors
import torch
from torch import nn

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x, t):
        return self.convolution(x)

network = Network()
optimizer = torch.optim.Adam(network.parameters())
often = {"adaptive": {"frequency": 1}, "gradient": {"frequency": 1}, "first": {"frequency": 1}}

def train(name, process):
    strategy = kairos_timesteps.Strategy(name, process, sampler=often.get(name.split("_")[0].split("+")[0]))
    for step in range(2):
        x0 = torch.randn(8, 1, 4, 4)
        draw = strategy.draw(x0)
        loss = strategy.loss(draw, (network(x0, draw.t) - x0).square().mean((1, 2, 3)))
        optimizer.zero_grad()
        loss.backward()
        with strategy.observe(draw, network, optimizer):
            optimizer.step()
    strategy.load_state_dict(strategy.state_dict())

def packages():
    return {name.split(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)

optimizer.step()
before = packages()
for number, name in enumerate(SAMPLERS):
    weighting = list(WEIGHTINGS)[number % len(WEIGHTINGS)]
    for process in ("linear", "edm", kairos_timesteps.Flow(shift=3), "vp"):
        try:
            train(f"{name}+{weighting}", process)
        except kairos_timesteps.errors.ConfigError as error:
            assert "public code" in str(error) and process != "linear"
print("extra:", *sorted(packages() - before))
"""


@pytest.mark.long
def test_strategies_require_only_torch_and_numpy():
    done = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["extra:"]
