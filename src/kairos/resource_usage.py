"""Wall-clock time, CPU time and peak memory of a job, with the start-up (interpreter and imports) listed separately.

A job calls `end_startup` after its imports; the start-up is the time before that call. If another process prepared the
job and handed it over (`workflow.fork_server`), the time and CPU seconds of that process are in `inherited` and are
included.
"""

import gc
import os
import resource
import time
from pathlib import Path
from typing import Any

from kairos.files import write_json

_import_time = time.monotonic()
_startup: dict[str, float] = {}  # "cpu" and "wall" seconds at the end of start-up
inherited: dict[str, float] = {}  # `usage_so_far` of the process that handed this job over


def cpu_seconds() -> float:
    """Return user plus system time, in seconds, of this process, its ended children and the process in `inherited`.

    Children are included as soon as this process has waited for them.
    """
    process = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in (process, children)) + inherited.get("cpu", 0.0)


def wall_seconds() -> float:
    """Return the seconds since this process was started, including the start of the interpreter.

    With `inherited`, they count from the start of the process that handed the job over. On systems without /proc, they
    count from the import of this module.
    """
    if not os.path.exists("/proc/self/stat"):
        return time.monotonic() - _import_time
    # fields of /proc/self/stat, such as "21 (kairos train) S 1 ...": the name in field 2 may contain blanks
    _, text_from_field_3 = Path("/proc/self/stat").read_text().rsplit(")", 1)
    start_ticks = int(text_from_field_3.split()[22 - 3])  # field 22: start of the process, in clock ticks since boot
    process_start = start_ticks / os.sysconf("SC_CLK_TCK")  # seconds since boot
    start = inherited.get("start", process_start)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start


def usage_so_far() -> dict[str, float]:
    """Return the start of this process (``start``, seconds since boot) and the CPU seconds it has used (``cpu``).

    Both include `inherited`, as `wall_seconds` and `cpu_seconds` do.
    """
    return {"start": time.clock_gettime(time.CLOCK_BOOTTIME) - wall_seconds(), "cpu": cpu_seconds()}


def end_startup() -> None:
    """Store the CPU and wall-clock time of start-up, which ends with this call, and switch the garbage collector on.

    The command line and the fork server have switched the collector off, since imports are faster without it. Only the
    first call stores the times; every call switches the garbage collector on.
    """
    gc.enable()
    if not _startup:
        _startup.update(cpu=cpu_seconds(), wall=wall_seconds())


def write_record(path: Path | str, stage: str, **facts: Any) -> None:
    """Write the resource usage of this process so far to a JSON file, in seconds and bytes.

    The CPU and wall-clock times are those of `cpu_seconds` and `wall_seconds`, in total and until `end_startup`. If it
    was not called, the start-up is the whole time. The peak memory does not include children.

    Args:
        path: the file, which is replaced; folders above it are created.
        stage: name of the job's stage.
        facts: further fields of the record, at the same level; they replace fields with equal names.
    """
    cpu, wall = cpu_seconds(), wall_seconds()
    record = {
        "stage": stage,
        "wall_seconds": round(wall, 3),
        "cpu_seconds": round(cpu, 3),
        "startup_wall_seconds": round(_startup.get("wall", wall), 3),
        "startup_cpu_seconds": round(_startup.get("cpu", cpu), 3),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # ru_maxrss is in KiB
        **facts,
    }
    write_json(path, record)
