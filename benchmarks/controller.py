"""Measure how the controller's time for reading the Snakefile and planning grows with the number of planned jobs.

    python benchmarks/controller.py --out benchmarks/results/controller.csv

An experiment of each size has `methods` methods with 5 seeds: 3 jobs per training run, and 7 other jobs. It runs in a
folder of its own. Times are CPU seconds (user and system), which other load hardly changes.

Columns:
    read: `snakemake --list-rules`, which starts Snakemake and reads the Snakefile.
    plan: dry run with all jobs to do.
    books: `snakemake --touch`, which writes the metadata of all jobs.
    plan, all done: dry run with all jobs done, as in a controller that is started again.
    per job: cost of a job beyond the smallest experiment, in milliseconds. The growth is linear if it stays equal.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from many_jobs import write_placeholders
from result_file import write_rows

ROOT = Path(__file__).resolve().parent.parent
SIZES = {1: 1, 6: 5, 66: 5}  # methods: seeds
RUNS = {
    "read": ["--list-rules"],
    "plan": ["--dry-run", "--quiet", "all"],
    "books": ["--touch", "--forceall", "--quiet", "all"],
    "plan, all done": ["--dry-run", "--quiet", "all"],
}


def main() -> None:
    """Measure, print a table and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = [measure(methods, seeds) for methods, seeds in SIZES.items()]
    first = rows[0]  # the smallest experiment
    for row in rows[1:]:
        further_jobs = int(row["jobs"]) - int(first["jobs"])
        for run in RUNS:
            further_seconds = float(row[run]) - float(first[run])
            row[f"{run}, per job"] = f"{1000 * further_seconds / further_jobs:.1f}"
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if arguments.out:
        setting = "python benchmarks/controller.py: CPU seconds of a controller; per job in milliseconds"
        write_rows(arguments.out, rows, setting)


def measure(methods: int, seeds: int) -> dict[str, str]:
    """Return ``jobs`` and the CPU seconds of every run in `RUNS`, as texts, for a number of methods and seeds.

    The runs are in a temporary folder. Before the metadata are written, placeholders replace the results.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("Snakefile", "workflow", "profiles", "src", "library", "envs"):
            (folder / part).symlink_to(ROOT / part)
        (folder / "x.yaml").write_text(experiment(methods, seeds))
        row = {"jobs": str(3 * methods * seeds + 7)}
        for run, options in RUNS.items():
            if run == "books":
                write_placeholders(folder, command(["--summary"]), environment())
            row[run] = f"{cpu_seconds(folder, options):.2f}"
        return row


def experiment(methods: int, seeds: int) -> str:
    """Return an experiment file with a number of methods, all different, and a number of seeds."""
    lines = [f"  m{number}: {{sampler: {{name: adaptive, entropy: 0.{number + 1}}}}}" for number in range(methods)]
    head = f"experiment: x\nseeds: {list(range(seeds))}\ndataset: {{source: digits}}\n"
    return head + "training: {milestones: [100, 200, 300]}\nmethods:\n" + "\n".join(lines) + "\n"


def command(options: list[str]) -> list[str]:
    """Return the command line of Snakemake for the experiment in the working directory."""
    return [sys.executable, "-m", "snakemake", "--cores", "2", "--configfile", "x.yaml", *options]


def environment() -> dict[str, str]:
    """Return the environment variables of this process, without KAIROS_EXPERIMENT of a surrounding controller."""
    return {name: value for name, value in os.environ.items() if name != "KAIROS_EXPERIMENT"}


def cpu_seconds(folder: Path, options: list[str]) -> float:
    """Call Snakemake in a folder with some options; return the CPU seconds of the call and of its child processes.

    Raises:
        subprocess.CalledProcessError: Snakemake fails.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command(options), cwd=folder, env=environment(), check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
