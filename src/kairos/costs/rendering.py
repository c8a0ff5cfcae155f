"""Render a cost estimate as tables for people and as values for programs."""

import textwrap
from pathlib import Path
from typing import Any

from kairos.costs.estimate import CostEstimate
from kairos.costs.storage import checkpoint_bytes
from kairos.progress import duration, table
from kairos.report.formatting import describe_sample_sets, load_template
from kairos.workflow.rules import training_resources

_ROW_NAMES = {"dataset": "prepared images"}  # names of kinds of files; default: the kind


def estimate_values(estimate: CostEstimate) -> dict[str, Any]:
    """Return the main numbers of an estimate for scripts, as `kairos plan --format json` prints them.

    ``parameters`` includes parameters that are not trained. ``flops_per_step`` does not include further passes of
    samplers. ``jobs`` are by stage. ``memory_bytes`` is for a training run on a GPU. ``storage_bytes`` is by kind of
    file, with None for unknown kinds. ``gpu_hours`` or ``cpu_hours`` is for training and sampling, by method; the key
    of the other device is None. Both are None without a rate.
    """
    return {
        "parameters": estimate.network.parameters + estimate.network.fixed_parameters,
        "flops_per_step": estimate.flops_per_step,
        "jobs": {stage.name: stage.jobs for stage in estimate.stages},
        "memory_bytes": sum(estimate.memory.values()),
        "storage_bytes": estimate.storage,
        "gpu_hours": estimate.hours_by_method if estimate.unit == "GPU" else None,
        "cpu_hours": estimate.hours_by_method if estimate.unit == "CPU" else None,
    }


def render_estimate(estimate: CostEstimate) -> str:
    """Return an estimate as text for the terminal, from the template ``rendering.txt.jinja``.

    Lines of more than 120 columns are wrapped, and continued with an indent of 12 blanks.
    """
    rendered = load_template(Path(__file__).with_suffix(".txt.jinja")).render(
        estimate=estimate,
        job_table=_job_table(estimate),
        storage_table=_storage_table(estimate),
        method_table=_method_table(estimate),
        sample_sets=describe_sample_sets(estimate.experiment.evaluation),
        time_limit_hours=training_resources(estimate.experiment)["runtime"] / 60,
        format_bytes=format_bytes,
        duration=duration,
    )
    lines = []
    for line in rendered.splitlines():
        # 12 blanks: the width of the labels at the beginning of lines; an empty line stays
        lines += textwrap.wrap(line, width=120, subsequent_indent=" " * 12) or [""]
    return "\n".join(lines)


def _job_table(estimate: CostEstimate) -> str:
    """Return the table of stages: jobs, jobs that are submitted to the queue, GPUs of a job; the last row has the sums.

    A stage that submits no job has text instead of a number: ``with sample`` if it runs in the jobs of stage sample,
    ``here`` if it runs on the controller's machine. The column of GPUs is empty for stages without a GPU, and for an
    experiment on CPUs.
    """
    rows: list[tuple[Any, ...]] = [("stage", "jobs", "in the queue", "GPUs each")]
    for stage in estimate.stages:
        gpus = stage.gpus if estimate.unit == "GPU" and stage.gpus else ""
        where = "with sample" if stage.name == "evaluate" else "here"
        rows.append((stage.name, stage.jobs, stage.queued_jobs or where, gpus))
    all_jobs = sum(stage.jobs for stage in estimate.stages)
    all_queued_jobs = sum(stage.queued_jobs for stage in estimate.stages)
    return table([*rows, ("all", all_jobs, all_queued_jobs, "")])


def _storage_table(estimate: CostEstimate) -> str:
    """Return the table of bytes on disk by kind of file, with a note where a number is not known.

    A kind without bytes has ``none``. If the number of images or captions is not known, the row has the bytes of one
    image or caption, or a question mark if they are not known either. The last row has the sum of the known bytes, with
    a note if others are not known.
    """
    storage, data = estimate.storage, estimate.data
    largest_state = max(method.sampler_cost.state for method in estimate.methods.values())  # bytes
    largest_checkpoint = checkpoint_bytes(estimate.network) + largest_state
    notes = {
        "checkpoints": f"2 of {format_bytes(largest_checkpoint)} per training run",
        "snapshots": "snapshots: raw and averaged weights",
        "latents": "" if data.latent_bytes_per_image else "pixels",
    }
    bytes_per_item = {
        "dataset": data.bytes_per_image,
        "latents": data.latent_bytes_per_image,
        "text": data.bytes_per_text,
    }
    rows = [("storage", "bytes", "")]
    for kind, size in storage.items():
        item_bytes = bytes_per_item.get(kind)
        if size is not None:
            size_text, note = format_bytes(size) if size else "none", notes.get(kind, "")
        elif item_bytes:
            item = "caption" if kind == "text" else "image"
            size_text, note = format_bytes(item_bytes), f"per {item}; the number of {item}s is not known"
        else:
            size_text, note = "?", "the size of an image is not known"
        rows.append((_ROW_NAMES.get(kind, kind), size_text, note))
    total = sum(size for size in storage.values() if size is not None)
    is_incomplete = None in storage.values()
    rows.append(("all", format_bytes(total), "without unknown sizes" if is_incomplete else ""))
    return table(rows, left=(0, 2))


def _method_table(estimate: CostEstimate) -> str:
    """Return the table of methods: forward passes, operations, relative cost and, with a rate, times.

    The column of passes contains forward passes of a batch per step; a backward pass is equivalent to two. The second
    pass of a masked loss is included in the operations only. A question mark follows the passes of a sampler that does
    not report its cost. The cost is relative to the cheapest method.
    """
    lowest_flops = min(method.flops_per_step for method in estimate.methods.values())
    time_columns: dict[str, str] = {}  # attribute of `MethodCost`: header
    if estimate.rate:
        time_columns = {
            "seconds_per_step": "s/step",
            "training_hours": f"training {estimate.unit}-h",
            "sampling_hours": f"sampling {estimate.unit}-h",
            "longest_job_hours": "longest job h",
        }
    rows = [("method", "passes", "TFLOP/step", "cost", *time_columns.values())]
    for name, method in estimate.methods.items():
        sampler_cost = method.sampler_cost
        # a pass with gradients is a forward and a backward pass, and a backward pass costs two
        further_passes = sampler_cost.forward + 3 * sampler_cost.gradient  # passes of single images
        passes = 3 + further_passes / estimate.experiment.training.batch_size  # batches; 3 without the sampler
        passes_text = f"{passes:.3f}" + ("" if sampler_cost.known else "?")
        times = (f"{getattr(method, attribute):.3g}" for attribute in time_columns)
        relative_cost = method.flops_per_step / lowest_flops
        rows.append((name, passes_text, f"{method.flops_per_step / 1e12:.4g}", f"{relative_cost:.3f}", *times))
    return table(rows)


def format_bytes(size: float) -> str:
    """Return a number of bytes with a binary unit, at most TiB, and three significant digits, such as ``1.23 GiB``.

    From 1000 units on, and below 1024 bytes, the number is rounded to an integer.
    """
    if size < 1024:
        return f"{size:.0f} B"
    units = ["KiB", "MiB", "GiB", "TiB"]
    size /= 1024
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    digits = ".0f" if size >= 999.5 else ".3g"  # .3g rounds 999.5 to 1000 and writes 1e+03
    return f"{size:{digits}} {units[0]}"
