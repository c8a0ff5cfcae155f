"""Hashes of the library's outputs and of a finished experiment; they stay equal under a refactoring.

    python benchmarks/behaviour.py record before.json [--results results/demo]
    python benchmarks/behaviour.py compare before.json [--results results/demo]

A record has two sections. ``library``: draws, times, weights, tables and states of each sampler, weighting and
coupling on three processes, with default options; of selected combinations; and all presets. A combination that a
process rejects has the name of the error. ``results``: component hashes of all training runs (`kairos verify`), sample
arrays and distances of a finished experiment.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # the number of threads changes the order of sums

import numpy as np
import torch

import kairos_timesteps as library
from kairos_timesteps.errors import ConfigError

PROCESSES = ("linear", "edm", "flow")
CONTEXT = {"tokens": 300, "group": 0, "progress": 0.3}


def digest(value) -> str:
    """Return the first 16 hex digits of a SHA-256 of arrays, tensors and plain values, nested or not.

    Types, shapes and values of arrays count; the order of a dictionary's keys does not.
    """
    hashed = hashlib.sha256()

    def add(item):
        if isinstance(item, dict):
            for key in sorted(item):
                hashed.update(str(key).encode())
                add(item[key])
        elif isinstance(item, (list, tuple)):
            for element in item:
                add(element)
        elif isinstance(item, torch.Tensor):
            add(item.detach().cpu().numpy())
        elif isinstance(item, np.ndarray):
            hashed.update(f"{item.dtype}{item.shape}".encode() + np.ascontiguousarray(item).tobytes())
        else:
            hashed.update(repr(item).encode())

    add(value)
    return hashed.hexdigest()[:16]


def strategies() -> dict[str, list[str]]:
    """Return the names of samplers, weightings and couplings by kind: ``sampler``, ``weighting``, ``coupling``."""
    return {kind: library.names(kind) for kind in ("sampler", "weighting", "coupling")}


def trained(name: str, process: str, **options) -> list:
    """Train a small network for three steps with a strategy; return a list of everything that the strategy computes.

    The list has times, fractions, weights, noise and loss of each step. The strategy's table, its state and, unless the
    sampler is adaptive, a sample of five follow.

    Raises:
        ConfigError: the process rejects the strategy.
    """
    strategy = library.Strategy(name, process, seed=3, **options)
    torch.manual_seed(0)
    network = torch.nn.Conv2d(2, 2, 3, padding=1)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    values = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x0, noise = torch.randn(2, 8, 2, 4, 4, generator=generator)
        context = {**CONTEXT, "group": torch.zeros(8, dtype=torch.int64)}  # the group of each image
        draw = strategy.draw(x0, **context)
        eps = strategy.couple(draw, noise)
        x_t = strategy.process.noised(x0, eps, draw.t)
        output = strategy.process.predict(lambda x, t: network(x), x_t, draw.t)
        errors = (output - strategy.process.target(x0, eps, draw.t)).square().flatten(1).mean(1)
        loss = strategy.loss(draw, errors)
        optimizer.zero_grad()
        loss.backward()
        with strategy.observe(draw, network=lambda x, t: network(x), optimizer=optimizer):
            optimizer.step()
        values += [draw.t, draw.fractions, draw.weights, eps, loss]
    table = strategy.table(**{**CONTEXT, "group": "all"}) if "by_group" in name else strategy.table(**CONTEXT)
    sampled = [] if name.startswith("adaptive") else [strategy.sample(5, **CONTEXT)]  # a policy needs images
    return [*values, table, strategy.state_dict(), *sampled]


def hash_library() -> dict[str, str]:
    """Return the hash of the outputs of each strategy and preset, by name; a rejected strategy has the error's name."""
    hashes = {}
    names = strategies()
    cases: list[tuple[str, dict]] = [(f"{name}+none", {}) for name in names["sampler"]]
    cases += [(f"uniform+{name}", {}) for name in names["weighting"]]
    for name in ("log_normal", "beta", "mixture", "table", "speed", "clts"):
        for points in ("stratified", "systematic", "sobol"):
            cases.append((f"{name}+min_snr", {"sampler": {"points": points, "floor": 0.1, "importance": True}}))
    cases += [("uniform", {"coupling": name}) for name in names["coupling"]]
    cases += [("gradient_norm+edm2", {}), ("auto+auto", {}), ("auto+coarse_to_fine", {}), ("loss_rms+edm", {})]
    for process in PROCESSES:
        for name, options in cases:
            key = f"{process} {name} {json.dumps(options)}"
            try:
                hashes[key] = digest(trained(name, process, **options))
            except ConfigError as error:  # a strategy that the process rejects
                hashes[key] = type(error).__name__
    for name in library.names("preset"):
        preset = library.preset(name)
        timesteps = preset.sample(100, seed=1, tokens=1024, frames=1)
        middle = timesteps.clip(0.01, 0.99)
        hashes[f"preset {name}"] = digest([timesteps, preset.weights(middle)])
    return hashes


def hash_results(results: Path) -> dict[str, str]:
    """Return hashes of a finished experiment: components of training runs, array files, samples, and metrics.

    Keys are paths relative to the folder of results; the name of a component follows the path of its training run.
    """
    from kairos.cli.verify import run

    hashes = {}
    for record in sorted(results.glob("methods/*/seed*/training.json")):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            run(argparse.Namespace(folder=record.parent, against=None))
        for line in printed.getvalue().splitlines():
            name, value = line.rsplit(" ", 1)
            hashes[f"{record.parent.relative_to(results)} {name}"] = value
    for path in sorted(results.glob("methods/*/seed*/**/*.npy")):
        hashes[str(path.relative_to(results))] = hashlib.sha256(path.read_bytes()).hexdigest()
    for path in sorted(results.glob("methods/*/seed*/**/*.npz")):
        with np.load(path) as arrays:
            hashes[str(path.relative_to(results))] = digest(arrays["images"])  # without the protocol's identity
    for path in sorted(results.glob("methods/*/seed*/evaluation/*.json")):
        hashes[str(path.relative_to(results))] = digest(json.loads(path.read_text(encoding="utf-8"))["metrics"])
    return hashes


def main() -> None:
    """Record the hashes, or print the differences from a record; the exit status is then 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    record = {"library": hash_library(), "results": hash_results(arguments.results) if arguments.results else {}}
    if arguments.what == "record":
        arguments.file.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        print(f"{arguments.file}: {len(record['library'])} hashes of the library, {len(record['results'])} of results")
        return
    before = json.loads(arguments.file.read_text(encoding="utf-8"))
    differing = [
        f"{section}: {key}: {before[section].get(key)} before, {record[section].get(key)} now"
        for section in record
        if record[section]
        for key in sorted({*before[section], *record[section]})
        if before[section].get(key) != record[section].get(key)
    ]
    print(*differing, f"{sum(map(len, record.values()))} hashes, {len(differing)} differ", sep="\n")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
