"""An estimate as text for people and as values for programs."""

import dataclasses
import textwrap
from collections.abc import Iterable
from typing import Any

from kairos.planning.estimate import Estimate
from kairos.progress import duration
from kairos.workflow.resources import gpus, of_training

_WIDTH, _INDENT = 120, " " * 12


def values(found: Estimate) -> dict[str, Any]:
    """Everything as plain values; bytes, seconds, floating-point operations."""
    shown = {name: getattr(found, name) for name in _names(found) if name not in ("experiment", "methods", "stages")}
    plain = {
        name: dataclasses.asdict(item) if dataclasses.is_dataclass(item) and not isinstance(item, type) else item
        for name, item in shown.items()
    }
    plain["memory"]["peak"], plain["storage"]["total"] = found.memory.peak, found.storage.total
    return {
        "experiment": found.experiment.experiment,
        **plain,
        "stages": {stage.name: _without(dataclasses.asdict(stage), "name") for stage in found.stages},
        "methods": {name: dataclasses.asdict(method) for name, method in found.methods.items()},
        "gpu_hours": found.hours,
        "checkpoint_every": found.experiment.training.checkpoint_every,
    }  # fmt: skip


def _names(found: Any) -> Iterable[str]:
    return (item.name for item in dataclasses.fields(found))


def _without(items: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in items.items() if key != name}


def text(found: Estimate) -> str:
    """Tables, at most 120 columns wide."""
    experiment, training = found.experiment, found.experiment.training
    trainings = len(found.methods) * len(experiment.seeds)
    lines = [f"{experiment.experiment}: {len(found.methods)} methods x {len(experiment.seeds)} seeds = {trainings} "
             f"trainings of {experiment.milestones[-1]} steps, batch {training.batch_size}", ""]  # fmt: skip
    for part in (_jobs, _network, _memory, _storage, _methods, _interruptions):
        lines += [*part(found), ""]
    return "\n".join(
        part for line in lines[:-1] for part in textwrap.wrap(line, _WIDTH, subsequent_indent=_INDENT) or [""]
    )


def _jobs(found: Estimate) -> list[str]:
    rows = [(stage.name, stage.jobs, _queued(stage.name, stage.queued), stage.gpus or "") for stage in found.stages]
    totals = (sum(stage.jobs for stage in found.stages), sum(stage.queued for stage in found.stages))
    return _table([("stage", "jobs", "in the queue", "GPUs each"), *rows, ("all", *totals, "")])


def _queued(stage: str, number: int) -> str | int:
    return {"evaluate": "with sample", "report": "here", "track": "here"}.get(stage, number)


def _network(found: Estimate) -> list[str]:
    network, data, training = found.network, found.data, found.experiment.training
    each = (network.forward + network.backward) / network.samples
    passes = f"{found.microbatches} passes of {network.samples}" if found.microbatches > 1 else "one pass"
    read = training.batch_size * (data.moments and data.moments // (1 + found.experiment.dataset.flips)) * 4
    read = read * data.x0[0] * data.x0[1] * data.x0[2] or training.batch_size * (data.image_bytes or 0)
    images = (
        f"{data.train} training images of {data.images}" if data.train is not None else "training images: not known"
    )
    shape = "x".join(map(str, data.image)) if data.image else "size not known"
    name, size = found.experiment.model["name"], network.parameters
    return [
        f"data        {images} ({data.known}), {shape}; the network sees {'x'.join(map(str, data.x0))}",
        f"network     {name}: {size:,} parameters ({size / 1e6:.1f} M)",
        f"per image   {each / 1e9:.4g} GFLOP: forward {network.forward / network.samples / 1e9:.4g}, "
        f"backward {network.backward / network.samples / 1e9:.4g}",
        f"per step    {each * training.batch_size / 1e12:.4g} TFLOP; {_size(found.bytes_per_step)} moved in a GPU "
        f"({passes}), {_size(read)} read from disk",
    ]  # fmt: skip


def _memory(found: Estimate) -> list[str]:
    parts, share = found.memory, found.experiment.training.trainings_per_gpu
    names = {"weights": parts.weights, "gradients": parts.gradients, "optimiser": parts.optimizer, "EMA": parts.average}
    listed = ", ".join(f"{name} {_size(value)}" for name, value in names.items())
    several = f"; {share} trainings on a GPU: {_size(share * parts.peak)}" if share > 1 else ""
    return [
        f"memory      {_size(parts.peak)} per training and GPU, about{several}; with {_size(2**30)} for context and "
        "workspace",
        f"            {listed}, activations {_size(parts.activations)} for {found.network.samples} images",
    ]


def _storage(found: Estimate) -> list[str]:
    parts, images = found.storage, found.data.images
    unknown = "per image, whose number is not known" if images is None else ""
    pictures = ("?", "the size of an image is not known") if parts.samples is None else (_size(parts.samples), "")
    rows = [
        ("prepared images", *(_or_each(parts.dataset, parts.image, unknown))),
        ("latents", *(_or_each(parts.latents, parts.latent, unknown) if parts.latent else ("none", "pixels"))),
        ("checkpoints", _size(parts.checkpoints), f"2 of {_size(parts.checkpoint)} per training"),
        ("milestones", _size(parts.milestones), "raw and averaged weights"),
        ("samples", *pictures),
        ("metrics", _size(parts.metrics), ""),
        ("all", _size(parts.total), "without what is not known" if None in (parts.dataset, parts.samples) else ""),
    ]  # fmt: skip
    return _table([("storage", "bytes", ""), *rows])


def _or_each(total: int | None, each: int | None, unknown: str) -> tuple[str, str]:
    if total is not None:
        return _size(total), ""
    return ("?", "the size of an image is not known") if each is None else (_size(each), unknown)


def _methods(found: Estimate) -> list[str]:
    least = min(method.operations for method in found.methods.values())
    head = ("method", "passes", "TFLOP/step", "cost", "s/step", "training h", "sampling h", "longest job h")
    rows: list[tuple[Any, ...]] = [head]
    for name, method in found.methods.items():
        extra = (method.passes.forward + 3 * method.passes.gradient) / found.experiment.training.batch_size
        times = (method.seconds, method.hours, method.sampling, method.longest)
        shown = ("" if time is None else f"{time:.3g}" for time in times)
        own = f"{3 + extra:.3f}" + "?" * (not method.passes.known)
        rows.append((name, own, f"{method.operations / 1e12:.4g}", f"{method.operations / least:.3f}", *shown))
    if found.rate is None:
        how = "GPU-hours: no training has been timed; give --steps-per-second R, or --tflops X with --utilisation U"
        return [*_table([row[:4] for row in rows]), how]
    shared = found.experiment.training.trainings_per_gpu
    sharing = f"; {shared} trainings share a GPU's hours" if shared > 1 else ""
    long = max(method.longest or 0 for method in found.methods.values())
    limit = of_training(found.experiment)["runtime"] / 60
    advice = (
        f"A job of {long:.3g} h meets the time limit of rule train, {limit:.0f} h, and goes on in its next attempt."
    )
    unit = "GPU" if gpus(found.experiment) else "processor"
    total = f"all         {found.hours:,.4g} {unit}-hours at {found.rate.operations / 1e12:.3g} TFLOP/s each"
    return [*_table(rows), f"{total}: {found.rate.source}{sharing}", *([advice] if long > limit else [])]


def _interruptions(found: Estimate) -> list[str]:
    every = found.experiment.training.checkpoint_every
    times = [method.lost for method in found.methods.values() if method.lost is not None]
    lost = f" ({duration(max(times))} at most)" if times else ""
    return [
        "interrupted A job that is told to end (time limit, preemption, scancel) writes its state and loses nothing.",
        f"            One that is killed (node, memory, SIGKILL) loses up to {every} steps{lost} of its training;",
        "            what was sampled or evaluated of a segment is done again. training.checkpoint_every sets it.",
    ]


def _size(number: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            return f"{number:{'.0f' if unit == 'B' or number >= 1000 else '.3g'}} {unit}"
        number /= 1024
    raise AssertionError


def _table(rows: list[tuple[Any, ...]]) -> list[str]:
    """Rows in columns, the first a head; all but the first column to the right where they are numbers."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return ["  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) if _number(cell) or row is cells[0] else
            cell.ljust(width) for cell, width in zip(row[1:], widths[1:]))]).rstrip() for row in cells]  # fmt: skip


def _number(cell: str) -> bool:
    return cell[:1].isdigit()
