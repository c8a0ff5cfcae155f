"""An estimate as text for people and as values for programs."""

import textwrap
from typing import Any

from kairos.costs.estimate import Estimate
from kairos.costs.storage import checkpoint_bytes
from kairos.progress import duration
from kairos.workflow.resources import gpus, of_training

_WIDTH, _INDENT = 120, " " * 12


def values(found: Estimate) -> dict[str, Any]:
    """What scripts rely on: bytes, floating-point operations of a step without what strategies add to it, GPU-hours of
    every method's trainings and samples, None without a rate.
    """
    return {
        "parameters": found.network.parameters,
        "flops_per_step": found.operations,
        "jobs": {stage.name: stage.jobs for stage in found.stages},
        "memory_bytes": sum(found.memory.values()),
        "storage_bytes": found.storage,
        "gpu_hours": found.hours,
    }


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
    elsewhere = {"evaluate": "with sample", "report": "here", "track": "here"}
    rows = [(one.name, one.jobs, elsewhere.get(one.name, one.queued), one.gpus or "") for one in found.stages]
    totals = (sum(stage.jobs for stage in found.stages), sum(stage.queued for stage in found.stages))
    return _table([("stage", "jobs", "in the queue", "GPUs each"), *rows, ("all", *totals, "")])


def _network(found: Estimate) -> list[str]:
    network, data, training = found.network, found.data, found.experiment.training
    each = found.operations / training.batch_size
    passes = f"{found.microbatches} passes of {network.samples}" if found.microbatches > 1 else "one pass"
    read = data.latent_bytes // (1 + found.experiment.dataset.flips) or data.image_bytes or 0
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
        f"per step    {found.operations / 1e12:.4g} TFLOP; {_size(found.traffic)} moved in a GPU "
        f"({passes}), {_size(training.batch_size * read)} read from disk",
    ]  # fmt: skip


def _memory(found: Estimate) -> list[str]:
    peak, share = sum(found.memory.values()), found.experiment.training.trainings_per_gpu
    shown = found.memory | {"activations": found.network.activations}
    listed = ", ".join(f"{name} {_size(value)}" for name, value in shown.items())
    several = f"; {share} trainings on a GPU: {_size(share * peak)}" if share > 1 else ""
    return [
        f"memory      {_size(peak)} per training and GPU, about{several}; with 1 GiB for context and workspace",
        f"            {listed} for {found.network.samples} images",
    ]


def _storage(found: Estimate) -> list[str]:
    parts, data = found.storage, found.data
    checkpoint = checkpoint_bytes(found.network) + max(method.passes.state for method in found.methods.values())
    notes = {
        "checkpoints": f"2 of {_size(checkpoint)} per training",
        "milestones": "raw and averaged weights",
        "latents": "" if data.latent_bytes else "pixels",
    }
    rows = [("storage", "bytes", "")]
    for name, size in parts.items():
        each = {"dataset": data.image_bytes, "latents": data.latent_bytes}.get(name)
        shown, note = "none" if size == 0 else _size(size or 0), notes.get(name, "")
        if size is None and each:
            shown, note = _size(each), "per image, whose number is not known"
        elif size is None:
            shown, note = "?", "the size of an image is not known"
        rows.append(("prepared images" if name == "dataset" else name, shown, note))
    known = sum(size or 0 for size in parts.values())
    incomplete = None in (parts["dataset"], parts["samples"])
    return _table([*rows, ("all", _size(known), "without what is not known" if incomplete else "")])


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
    unit, hours = "GPU" if gpus(found.experiment) else "processor", sum((found.hours or {}).values())
    total = f"all         {hours:,.4g} {unit}-hours at {found.rate.operations / 1e12:.3g} TFLOP/s each"
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
