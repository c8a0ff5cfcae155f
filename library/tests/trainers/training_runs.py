"""Training runs of other projects' trainers, and the plain loops around `Strategy` that they are compared with."""

import copy
import importlib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kairos_timesteps import Strategy
from kairos_timesteps.base import MeasuresNetwork
from kairos_timesteps.components import SAMPLERS
from kairos_timesteps.diffusion.adapters import as_process
from kairos_timesteps.time_convention import TimeConvention
from small_loop import equal_bits

PAGES = Path(__file__).parents[3] / "docs/trainers"
FIXED, LOSSES = "log_normal+cosmap_weight", "loss_rms"
STRATEGIES = (FIXED, LOSSES, "adaptive", "auto")
STEPS = 24


def released(module: str) -> Any:
    """Import a module of a released package; without KAIROS_TRAINERS, skip the tests of the file if it is absent."""
    if os.environ.get("KAIROS_TRAINERS"):
        return importlib.import_module(module)
    return pytest.importorskip(module, reason=f"{module} is not installed; .ci/trainers installs it")


def new_process() -> None:
    """Reset what accelerate keeps in a process: gradient accumulation continues with the next Accelerator."""
    state = released("accelerate.state")
    state.GradientState._reset_state()
    state.AcceleratorState._reset_state(reset_partial_state=True)


def digits(count: int) -> Tensor:
    """Return images of handwritten digits in [-1, 1], (count, 1, 8, 8)."""
    images = pytest.importorskip("sklearn.datasets").load_digits().images[:count]
    return torch.from_numpy(images / 8 - 1).float()[:, None]


def page(name: str) -> str:
    """Return a page of the documentation."""
    path = PAGES / f"{name}.md"
    if not path.exists():
        pytest.skip("the documentation is not part of the library's source distribution")
    return path.read_text(encoding="utf-8")


def blocks(name: str) -> list[str]:
    """Return the Python code of a page of the documentation."""
    return re.findall(r"```python\n(.*?)```", page(name), re.DOTALL)


def measures(name: str) -> bool:
    """Return True if a strategy measures the network."""
    return issubclass(SAMPLERS[name.partition("+")[0]].component, MeasuresNetwork)


def with_strategy(code: str, name: str) -> str:
    """Replace the strategy that a block attaches."""
    return re.sub(r'((?:attach|Callback)\(\s*)"[a-z_+]+"', rf'\1"{name}"', code, count=1)


def quicken(strategy: Strategy) -> Strategy:
    """Let a sampler learn every second step, or measure every eighth; its density changes within a short run."""
    for option, value in (("frequency", 8 if measures(strategy.name) else 2), ("start", 2)):
        if hasattr(strategy.sampler, option):
            setattr(strategy.sampler, option, value)
    return strategy


@dataclass
class Run:
    """Results of a training run: the trainer's t and the loss of every micro-batch, and states at the end."""

    t: list[Tensor] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    strategy: dict[str, Any] = field(default_factory=dict)
    network: dict[str, Tensor] = field(default_factory=dict)

    def __eq__(self, other: Any) -> bool:
        return equal_bits(vars(self), vars(other))


def differences(one: Run, other: Run) -> list[str]:
    """Return which results differ in any bit, and from which micro-batch on."""
    names = [name for name in ("strategy", "network") if not equal_bits(getattr(one, name), getattr(other, name))]
    for name in ("t", "losses"):
        pairs = zip(getattr(one, name), getattr(other, name))
        names += [f"{name}[{k}]" for k, pair in enumerate(pairs) if not equal_bits(*pair)][:1]
        if len(getattr(one, name)) != len(getattr(other, name)):
            names.append(f"number of {name}")
    return names


def explicit(
    name: str,
    process: Any,
    time: str | None,
    network: Any,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Tensor],
    errors: Callable[[int, Tensor, Tensor], Tensor],
    accumulate: int = 1,
    predict: Callable[..., Tensor] | None = None,
    conditions: Callable[[int], dict[str, Tensor]] = lambda number: {},
    clip: float | None = None,
    after_step: Callable[[], None] = lambda: None,
) -> Run:
    """Train with `Strategy.draw`, `loss` and `observe`.

    Args:
        name: name of the strategy.
        process: forward process, as for `Strategy`.
        time: convention of the trainer's t.
        network: network that is trained.
        optimizer: its optimizer.
        batches: micro-batches.
        errors: ``errors(number of the micro-batch, x0, trainer's t)``: unweighted errors of the samples.
        accumulate: micro-batches of a step.
        predict: ``predict(x_t, t, **conditions)``, for strategies that measure the network.
        conditions: ``conditions(number of the micro-batch)``, for `predict`.
        clip: largest norm of the gradient.
        after_step: called after each step of the optimizer, such as the step of a learning-rate schedule.
    """
    convention = TimeConvention(as_process(process), time)
    called = copy.copy(convention.process)
    if predict:

        def predict_at_times_of_process(_: Any, x_t: Tensor, t: Tensor, by_name: Any = None) -> Tensor:
            return predict(x_t, convention.to_trainer(t), **(by_name or {}))

        called.predict = predict_at_times_of_process
    strategy, run = quicken(Strategy(name, called)), Run()
    draws, step_conditions = [], []
    for number, x0 in enumerate(batches):
        draws.append(strategy.draw(x0))
        step_conditions.append(conditions(number))
        run.t.append(convention.to_trainer(draws[-1].t))
        loss = strategy.loss(draws[-1], errors(number, x0, run.t[-1]))
        run.losses.append(loss.detach())
        (loss / accumulate).backward()
        if (number + 1) % accumulate:
            continue
        if clip:
            torch.nn.utils.clip_grad_norm_(network.parameters(), clip)
        joined = {}
        if predict:
            for key in step_conditions[0]:
                joined[key] = torch.cat([micro_batch_conditions[key] for micro_batch_conditions in step_conditions])
        with strategy.observe(draws, network, optimizer, joined or None):
            optimizer.step()
        after_step()
        optimizer.zero_grad()
        draws, step_conditions = [], []
    run.strategy, run.network = strategy.state_dict(), copy.deepcopy(network.state_dict())
    return run
