"""An estimate as text for people and as values for programs."""

import textwrap
from functools import partial
from pathlib import Path
from typing import Any

from kairos.costs.estimate import Estimate
from kairos.costs.storage import checkpoint_bytes
from kairos.progress import duration, table
from kairos.report.formatting import sample_sets, template
from kairos.workflow.rules import training_resources


def values(found: Estimate) -> dict[str, Any]:
    """Values for scripts: bytes, and floating-point operations of a step without what strategies add to it.

    `gpu_hours` and `cpu_hours` map each method to its hours of training and sampling. Only the one that matches the
    computing device is set; both are None without a rate.
    """
    return {
        "parameters": found.network.parameters + found.network.fixed,
        "flops_per_step": found.operations,
        "jobs": {stage.name: stage.jobs for stage in found.stages},
        "memory_bytes": sum(found.memory.values()),
        "storage_bytes": found.storage,
        "gpu_hours": found.hours if found.unit == "GPU" else None,
        "cpu_hours": found.hours if found.unit == "CPU" else None,
    }


def text(found: Estimate) -> str:
    """The template beside this file, filled; at most 120 columns wide."""
    filled = template(Path(__file__).with_suffix(".txt.jinja")).render(
        found=found,
        jobs=_jobs(found),
        storage=_storage(found),
        methods=_methods(found),
        samples=sample_sets(found.experiment.evaluation),
        limit=training_resources(found.experiment)["runtime"] / 60,
        size=in_bytes,
        duration=duration,
    )
    wrap = partial(textwrap.wrap, width=120, subsequent_indent=" " * 12)
    return "\n".join(part for line in filled.splitlines() for part in wrap(line) or [""])


def _jobs(found: Estimate) -> str:
    elsewhere = {"evaluate": "with sample", "report": "here", "track": "here"}
    elsewhere |= {one.name: "here" for one in found.stages if one.name.startswith("analyse_")}
    rows = []
    for one in found.stages:
        gpus = one.gpus if found.unit == "GPU" and one.gpus else ""
        rows.append((one.name, one.jobs, elsewhere.get(one.name, one.queued), gpus))
    totals = (sum(stage.jobs for stage in found.stages), sum(stage.queued for stage in found.stages))
    return table([("stage", "jobs", "in the queue", "GPUs each"), *rows, ("all", *totals, "")], _right)


def _storage(found: Estimate) -> str:
    parts, data = found.storage, found.data
    checkpoint = checkpoint_bytes(found.network) + max(method.passes.state for method in found.methods.values())
    notes = {
        "checkpoints": f"2 of {in_bytes(checkpoint)} per training",
        "milestones": "raw and averaged weights",
        "latents": "" if data.latent_bytes_per_image else "pixels",
    }
    rows = [("storage", "bytes", "")]
    for name, size in parts.items():
        each = {
            "dataset": data.bytes_per_image,
            "latents": data.latent_bytes_per_image,
            "text": data.bytes_per_text,
        }.get(name)
        shown, note = "none" if size == 0 else in_bytes(size or 0), notes.get(name, "")
        if size is None and each:
            shown, note = in_bytes(each), f"per {'caption' if name == 'text' else 'image'}, whose number is not known"
        elif size is None:
            shown, note = "?", "the size of an image is not known"
        rows.append(("prepared images" if name == "dataset" else name, shown, note))
    known = sum(size or 0 for size in parts.values())
    incomplete = None in (parts["dataset"], parts["samples"])
    return table([*rows, ("all", in_bytes(known), "without what is not known" if incomplete else "")], _right)


def _methods(found: Estimate) -> str:
    least = min(method.operations for method in found.methods.values())
    times = ("seconds", "hours", "sampling", "longest") if found.rate else ()
    heads = ("s/step", f"training {found.unit}-h", f"sampling {found.unit}-h", "longest job h")[: len(times)]
    rows = [("method", "passes", "TFLOP/step", "cost", *heads)]
    for name, method in found.methods.items():
        extra = (method.passes.forward + 3 * method.passes.gradient) / found.experiment.training.batch_size
        own = f"{3 + extra:.3f}" + "?" * (not method.passes.known)
        shown = (f"{getattr(method, time):.3g}" for time in times)
        rows.append((name, own, f"{method.operations / 1e12:.4g}", f"{method.operations / least:.3f}", *shown))
    return table(rows, _right)


def in_bytes(number: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            return f"{number:{'.0f' if unit == 'B' or number >= 1000 else '.3g'}} {unit}"
        number /= 1024
    raise AssertionError


def _right(head: bool, column: int, cell: str) -> bool:
    """All but the first column, where they are numbers, and what stands above them."""
    return column > 0 and (head or cell[:1].isdigit())
