"""Trainer with an option for timestep strategies of any installed package; without the option it needs none.

python examples/trainer_option.py                               # the trainer's own timesteps
python examples/trainer_option.py --timestep_strategy kairos:loss_rms --timestep_strategy_args "sampler={'floor': 0.1}"
"""

import argparse
import ast
import importlib.metadata
from pathlib import Path
from typing import Any

import torch
from common import Network, batch, images, progress


def build_strategy(option: str, **arguments: Any) -> Any:
    """Return a strategy by the option ``PROVIDER:NAME``.

    Providers are entry points of installed packages, so the option imports nothing else.

    Raises:
        SystemExit: no installed package has this provider.
    """
    provider, _, name = option.partition(":")
    entries = {entry.name: entry for entry in importlib.metadata.entry_points(group="timestep_strategies")}
    if provider not in entries:
        raise SystemExit(f"--timestep_strategy: got {option!r}, allowed: {', '.join(sorted(entries)) or 'none'}:NAME")
    return entries[provider].load()(name, **arguments)


def parsed(settings: list[str]) -> dict[str, Any]:
    """Parse settings ``name=value``; a value that is no Python literal is a text."""
    values: dict[str, Any] = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        try:
            values[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            values[name] = text
    return values


def main(argv: list[str] | None = None) -> list[float]:
    """Train a rectified flow, x_t = (1 - t) x0 + t noise, on digits, and return the loss of every step."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=300, help="optimizer steps")
    options.add_argument("--batch", type=int, default=64, help="images of a step")
    options.add_argument("--width", type=int, default=32, help="channels of the network, a multiple of 8")
    options.add_argument("--seed", type=int, default=0, help="seed of all random numbers")
    options.add_argument("--checkpoint", type=Path, help="file to resume from if it exists, and to write at the end")
    options.add_argument("--timestep_strategy", metavar="PROVIDER:NAME", help="timestep strategy")
    options.add_argument("--timestep_strategy_args", nargs="*", default=[], metavar="NAME=VALUE", help="its arguments")
    arguments = options.parse_args(argv)

    torch.manual_seed(arguments.seed)
    data = images(None, 8)
    network = Network(data.shape[1], arguments.width, period=1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)

    strategy = None  # the option, part 1: build
    if arguments.timestep_strategy:
        strategy = build_strategy(
            arguments.timestep_strategy, process="flow", time="noise_is_one", seed=arguments.seed,
            predict=network, **parsed(arguments.timestep_strategy_args),
        )  # fmt: skip

    first = 0
    if arguments.checkpoint and arguments.checkpoint.exists():
        state = torch.load(arguments.checkpoint, weights_only=True)
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        if strategy:  # part 5: resume
            strategy.load_state_dict(state["strategy"])

    losses = []
    for step in range(first, arguments.steps):
        x0, noise = batch(data, arguments.batch, arguments.seed, step, "cpu")
        uniform = torch.rand(len(x0), generator=torch.Generator().manual_seed(step))
        t = strategy.sample(x0) if strategy else uniform  # part 2: draw
        at = t.view(-1, 1, 1, 1)
        errors = (network((1 - at) * x0 + at * noise, t) - (noise - x0)).square().mean((1, 2, 3))  # (batch,)
        loss = strategy.record(errors) if strategy else errors.mean()  # part 3: weight
        optimizer.zero_grad()
        loss.backward()
        if strategy:  # part 4: the step
            strategy.begin_step(network, optimizer)
        optimizer.step()
        if strategy:
            strategy.refresh()
        losses.append(loss.item())
        progress(step + 1, arguments.steps, losses)

    if arguments.checkpoint:
        state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "step": arguments.steps}
        if strategy:
            state["strategy"] = strategy.state_dict()
        torch.save(state, arguments.checkpoint)
    return losses


if __name__ == "__main__":
    main()
