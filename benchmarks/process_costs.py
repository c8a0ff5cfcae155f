"""CPU time around the work of a job: imports, and the end of its process, before and after a change.

    python benchmarks/process_costs.py --out benchmarks/results/process_costs.csv

Columns: part; CPU seconds before and after, medians of the rounds; their ratio. Parts:

- ``end``: the end of a process that has imported what a training job imports, by the teardown of the interpreter
  (before) and by `kairos.process_exit` (after).
- ``end of a fork``: the end of a fork of that process, as jobs of the fork server are.
- ``autoencoder``: the import of the autoencoder's module after torch, with the packages of diffusers' pipelines and, as
  in commands, without them (`kairos.quick_imports`).
"""

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
from pathlib import Path

from result_file import write_rows

ROOT = Path(__file__).resolve().parents[1]
IMPORTS = "import kairos.training.run, kairos.training.loop, torch, kairos.evaluation.metrics"
QUICK = "from kairos import process_exit; process_exit.skip_teardown()"
# prints the CPU seconds of a fork that does nothing
FORK = f"""
import os, resource, sys
{{start}}
{IMPORTS}
before = resource.getrusage(resource.RUSAGE_CHILDREN)
sys.stdout.flush()
if os.fork() == 0:
    {{end}}
os.wait()
after = resource.getrusage(resource.RUSAGE_CHILDREN)
print(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, flush=True)
os._exit(0)
"""


def cpu_seconds(command: list[str]) -> float:
    """Run a command in the root of the repository with one thread; return the CPU seconds of its processes.

    Raises:
        subprocess.CalledProcessError: the command fails.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure_end() -> tuple[float, float]:
    """Return the CPU seconds of the end of a process, by teardown and by `process_exit`."""
    imports_alone = cpu_seconds([sys.executable, "-c", f"{IMPORTS}; import os; os._exit(0)"])
    with_teardown = cpu_seconds([sys.executable, "-c", IMPORTS])
    with_quick_end = cpu_seconds([sys.executable, "-c", f"{QUICK}; {IMPORTS}; process_exit.end_process(0)"])
    return with_teardown - imports_alone, max(with_quick_end - imports_alone, 0.0)


def measure_autoencoder() -> tuple[float, float]:
    """Return the CPU seconds of the import of the autoencoder's module, with and without packages of pipelines.

    The import of torch is not included.
    """
    start, end = "import torch, kairos.quick_imports", "import os; os._exit(0)"
    module = "import kairos.autoencoders.train"
    without_module = cpu_seconds([sys.executable, "-c", f"{start}; {end}"])
    complete = cpu_seconds([sys.executable, "-c", f"{start}; {module}; {end}"])
    quick = cpu_seconds([sys.executable, "-c", f"{start}; kairos.quick_imports.enable(); {module}; {end}"])
    return complete - without_module, quick - without_module


def measure_fork() -> tuple[float, float]:
    """Return the CPU seconds of a fork that ends at once, by teardown and by `process_exit`."""
    seconds = []
    for start, end in (("", "sys.exit(0)"), (QUICK, "process_exit.end_process(0)")):
        command = [sys.executable, "-c", FORK.format(start=start, end=end)]
        output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        seconds.append(float(output.split()[-1]))
    return seconds[0], seconds[1]


def main() -> None:
    """Measure every part in rounds; print and write a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    parts = {
        "end": measure_end,
        "end of a fork": measure_fork,
        "autoencoder": measure_autoencoder,
    }
    rows = []
    for part, measure in parts.items():
        seconds_of_rounds = [measure() for _ in range(arguments.rounds)]  # pairs: before and after
        before, after = (statistics.median(seconds) for seconds in zip(*seconds_of_rounds))
        ratio = f"{after / before:.2f}"
        rows.append({"part": part, "before_s": f"{before:.2f}", "after_s": f"{after:.2f}", "ratio": ratio})
        print(rows[-1], flush=True)
    if arguments.out:
        setting = f"python {platform.python_version()}, {arguments.rounds} rounds, cpu {platform.machine()}"
        write_rows(arguments.out, rows, f"python benchmarks/process_costs.py --out {arguments.out}; {setting}")


if __name__ == "__main__":
    main()
