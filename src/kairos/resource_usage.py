"""Wall and CPU time of a job, its start-up (interpreter and imports) apart, and its peak memory.

A job calls `work_begins` when its imports are done; what came before counts as start-up. What another process has used
for the job before it was handed over (`workflow.fork_server`) counts too.
"""

import gc
import os
import resource
import time
from pathlib import Path
from typing import Any

from kairos.files import write_json

_marks: dict[str, float] = {}
before: dict[str, float] = {}  # what the process that has handed this job over has `used`


def cpu_seconds() -> float:
    """User and system time of this process and of its ended children."""
    usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + before.get("cpu", 0.0)


def wall_seconds() -> float:
    """Seconds since this process was started, its interpreter's start included."""
    if not os.path.exists("/proc/self/stat"):
        return time.monotonic() - _imported
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    start = before.get("start", ticks / os.sysconf("SC_CLK_TCK"))
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start


_imported = time.monotonic()


def used() -> dict[str, float]:
    """When this process was started, in seconds since the machine was, and the CPU seconds that it has used."""
    return {"start": time.clock_gettime(time.CLOCK_BOOTTIME) - wall_seconds(), "cpu": cpu_seconds()}


def work_begins() -> None:
    """Mark the end of start-up; the first call counts. The garbage collector, off until then, is switched on."""
    gc.enable()
    if not _marks:
        _marks.update(cpu=cpu_seconds(), wall=wall_seconds())


def write(path: Path | str, stage: str, **facts: Any) -> None:
    """Write down what this process has used so far, in seconds and bytes."""
    cpu, wall = cpu_seconds(), wall_seconds()
    record = {
        "stage": stage,
        "wall_seconds": round(wall, 3),
        "cpu_seconds": round(cpu, 3),
        "startup_wall_seconds": round(_marks.get("wall", wall), 3),
        "startup_cpu_seconds": round(_marks.get("cpu", cpu), 3),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        **facts,
    }
    write_json(path, record)
