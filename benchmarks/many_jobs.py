"""Measure planning, status, comparison, report and import of experiments with thousands of jobs.

    python benchmarks/many_jobs.py --label after --out benchmarks/results/many_jobs.csv

Rows are appended to the file, so that a second call with ``--checkout`` compares another commit that has
`Experiment.run_settings`:

    git worktree add /tmp/earlier COMMIT
    python benchmarks/many_jobs.py --label before --checkout /tmp/earlier --out benchmarks/results/many_jobs.csv

`tests/tiny.yaml` is trained once. An experiment with hundreds of methods then gets copies of these results, with the
names, settings and identities of its own runs, so that every reader accepts them as complete. Each copy's measured
values are multiplied by a factor of its method and seed. Weights are hard links.

Measurements (each is a new process):
    start: ``python -c "import snakemake.cli"``, as a calibration of the machine.
    plan, all to do: ``snakemake --dry-run`` without any result.
    plan, all done: ``snakemake --dry-run`` with placeholders of results, whose records are valid.
    plan, outdated: the same after an edit of the number of sampling steps.
    status: ``kairos status`` in the terminal.
    page, page again: first and second request of the page of ``kairos status --serve``, without the server's start.
    compare: ``kairos compare``.
    report: ``kairos report``; its page's size is in the column `megabytes`.
    track: ``kairos track`` into an empty SQLite database; track again: the same import a second time.
"""

import argparse
import csv
import json
import math
import os
import random
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SEEDS = 5
COLUMNS = ("label", "measurement", "runs", "jobs", "wall_seconds", "cpu_seconds", "peak_megabytes", "megabytes")
SIZES = {"plan": 666, "status": 400, "results": 200}  # number of methods of each group of measurements
SHARED_FOLDERS = ("dataset", "autoencoder", "latents", "extractor", "reference")
LINKED = (".safetensors", ".ckpt", ".pt", ".png")  # files without names and identities: copies are hard links
Row = dict[str, Any]


def main() -> None:
    """Measure the selected groups of commands, print the rows and append them to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(SIZES)}; default: all")
    parser.add_argument("--label", default="after", help="name of the measured code, in the first column")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="repository whose code is measured")
    parser.add_argument("--methods", type=int, help="number of methods, instead of each group's own")
    parser.add_argument("--folder", type=Path, help="folder that keeps the results; default: a temporary one")
    parser.add_argument("--out", type=Path, help="CSV file that rows are appended to")
    parser.add_argument("--build", type=Path, help=argparse.SUPPRESS)  # used by this program itself
    arguments = parser.parse_args()
    if arguments.build:
        build_results(arguments.build, Path.cwd())
        return
    with tempfile.TemporaryDirectory() as temporary:
        work = (arguments.folder or Path(temporary)).absolute()
        workplace = Workplace(work, arguments.checkout.absolute(), arguments.label, arguments.out)
        workplace.measure("start", [sys.executable, "-c", "import snakemake.cli"], work, runs=0)
        for group in arguments.groups or SIZES:
            MEASUREMENTS[group](workplace, arguments.methods or SIZES[group])


class Workplace:
    """Folder of the measured experiments, and the rows of measurements.

    Args:
        folder: folder for the trained experiment and for the experiments of copies.
        checkout: repository whose code is measured.
        label: name of this code in the rows.
        out: CSV file that rows are appended to, or None.
    """

    def __init__(self, folder: Path, checkout: Path, label: str, out: Path | None):
        self.folder, self.checkout, self.label, self.out = folder, checkout, label, out
        folder.mkdir(parents=True, exist_ok=True)
        search_path = os.pathsep.join((str(checkout / "src"), str(checkout / "library/src")))
        self.environment = {
            **os.environ,
            "PYTHONPATH": search_path,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        for name in ("KAIROS_PLAN", "MLFLOW_TRACKING_URI"):
            self.environment.pop(name, None)

    def train_once(self) -> Path:
        """Train the small experiment, unless its report exists already, and return its working directory."""
        folder = self.create_pipeline("trained", small_experiment())
        if not (folder / "results/trained/report.html").exists():
            self.run(snakemake("trained", "--quiet", "all"), folder)
        return folder

    def create_pipeline(self, name: str, experiment: str) -> Path:
        """Create a working directory with links to the pipeline and an experiment's file ``<name>.yaml``; return it.

        `experiment` is the text of the file. An existing directory keeps its other files.
        """
        folder = self.folder / f"{name}-{self.label}"
        folder.mkdir(exist_ok=True)
        for part in ("Snakefile", "workflow", "profiles", "src", "library", "envs"):
            link = folder / part
            if not link.is_symlink():
                link.symlink_to(self.checkout / part)
        (folder / f"{name}.yaml").write_text(experiment)
        return folder

    def copy_results(self, trained: Path, folder: Path) -> None:
        """Write copies of the trained results into the experiment in `folder`, in a process with the measured code.

        `trained` is the working directory of the trained experiment. Existing copies are kept.
        """
        if not (folder / "results/many/methods").exists():
            self.run([sys.executable, __file__, "--build", str(trained)], folder)

    def run(self, command: list[str], folder: Path) -> None:
        """Run a command in a folder with the measured code.

        Raises:
            SystemExit: the command fails; the message contains the end of its output.
        """
        process = subprocess.run(command, cwd=folder, env=self.environment, capture_output=True, text=True)
        if process.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{process.stdout[-3000:]}\n{process.stderr[-3000:]}")

    def measure(self, name: str, command: list[str], folder: Path, runs: int, page: Path | None = None) -> None:
        """Run a command and write a row with its times and its peak memory; exit with its output if it fails.

        Args:
            name: name of the measurement.
            command: the command.
            folder: its working directory.
            runs: number of training runs of the experiment.
            page: file whose size is written into the row, or None.
        """
        with_peak = ["/usr/bin/env", sys.executable, "-c", _REPORT_PEAK, *command]
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        process = subprocess.run(with_peak, cwd=folder, env=self.environment, capture_output=True, text=True)
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        if process.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{process.stdout[-3000:]}\n{process.stderr[-3000:]}")
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        peak = float(process.stderr.rstrip().rpartition("peak ")[2])
        size = page.stat().st_size / 1e6 if page else ""
        self.write_row(name, runs, wall, cpu, peak, size)

    def write_row(self, name: str, runs: int, wall: float, cpu: float, peak: float, size: float | str = "") -> None:
        """Print a row and append it to the file `self.out`, if there is one; a new file gets a header.

        Args:
            name: name of the measurement.
            runs: number of training runs, from which the number of jobs follows; 0: no experiment.
            wall, cpu: seconds.
            peak: peak memory, megabytes.
            size: size of a page, megabytes; empty: no page.
        """
        row = {
            "label": self.label,
            "measurement": name,
            "runs": runs,
            "jobs": 3 * runs + 7 if runs else "",
            "wall_seconds": f"{wall:.2f}",
            "cpu_seconds": f"{cpu:.2f}",
            "peak_megabytes": f"{peak:.0f}",
            "megabytes": f"{size:.2f}" if size else "",
        }
        print("  ".join(f"{column} {value}" for column, value in row.items() if value != ""), flush=True)
        if self.out is None:
            return
        is_new = not self.out.exists()
        with open(self.out, "a", newline="") as file:
            if is_new:
                file.write("# python benchmarks/many_jobs.py --label LABEL [--checkout FOLDER]\n")
            writer = csv.DictWriter(file, COLUMNS)
            if is_new:
                writer.writeheader()
            writer.writerow(row)


# program that runs a command and prints its peak memory in megabytes to standard error; Linux counts ru_maxrss in KiB
_REPORT_PEAK = """
import resource, subprocess, sys
status = subprocess.run(sys.argv[1:]).returncode
print("peak", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1000, file=sys.stderr)
sys.exit(status)
"""


def snakemake(name: str, *options: str) -> list[str]:
    """Return the command line of Snakemake for an experiment in the working directory."""
    return [sys.executable, "-m", "snakemake", "--cores", "1", "--configfile", f"{name}.yaml", *options]


def kairos(*arguments: str) -> list[str]:
    """Return a command line of kairos."""
    return [sys.executable, "-m", "kairos", *arguments]


# ------------------------------------------------------------------------------------------------ the experiments


def small_experiment() -> str:
    """Return the text of the experiment that is trained: tests/tiny.yaml under the name ``trained``, in one segment."""
    text = (ROOT / "tests/tiny.yaml").read_text(encoding="utf-8")
    return text.replace("experiment: tiny", "experiment: trained").replace("segments: 2", "segments: 1")


def many_methods(count: int) -> str:
    """Return the text of the experiment of copies, ``many``, with `count` methods and five seeds.

    A fifth of the methods are single ones. The others are two grids: one of a fixed sampler, one of a learning sampler.
    """
    # sections before and after the methods
    head, _, after_head = small_experiment().partition("methods:\n")
    tail = after_head[after_head.index("sampling:") :]
    head = head.replace("experiment: trained", "experiment: many")
    head = re.sub(r"(?m)^seeds: .*$", f"seeds: {list(range(SEEDS))}", head)

    # single methods
    methods_per_grid = 2 * count // 5
    single_count = count - 2 * methods_per_grid - 3  # besides the first three
    lines = ["  uniform: {sampler: uniform}", "  p2: {sampler: uniform, weighting: p2}"]
    lines += ["  min_snr: {sampler: uniform, weighting: min_snr}"]
    for number in range(single_count):
        weighting = f"{{name: min_snr, gamma: {1 + 0.1 * number:.1f}}}"
        lines.append(f"  min_snr_{number}: {{sampler: uniform, weighting: {weighting}}}")

    # grids of two options, as square as possible
    columns = max(divisor for divisor in range(1, math.isqrt(methods_per_grid) + 1) if methods_per_grid % divisor == 0)
    row_count = methods_per_grid // columns
    means = json.dumps([round(-1 + 0.01 * index, 2) for index in range(row_count)])
    deviations = json.dumps([round(0.5 + 0.05 * index, 2) for index in range(columns)])
    entropies = json.dumps([round(0.001 * (index + 1), 3) for index in range(row_count)])
    frequencies = json.dumps([2 + index for index in range(columns)])
    lines.append(f"  log_normal: {{sampler: log_normal, grid: {{sampler.m: {means}, sampler.s: {deviations}}}}}")
    lines.append("  adaptive:")
    lines.append("    sampler: {name: adaptive, frequency: 10, queue: 5}")
    lines.append("    weighting: min_snr")
    lines.append(f"    grid: {{sampler.entropy: {entropies}, sampler.frequency: {frequencies}}}")
    return head + "methods:\n" + "\n".join(lines) + "\n\n" + tail


# ------------------------------------------------------------------------------------------------ copies of results


def build_results(trained: Path, folder: Path) -> None:
    """Write the results of many.yaml in `folder` as copies of the trained results.

    Methods with sampler adaptive are copies of the trained method ``adaptive``, the others copies of ``uniform``.

    Args:
        trained: working directory of the trained experiment.
        folder: working directory of the experiment of copies.
    """
    from kairos.config import load
    from kairos.files import read_json
    from kairos.validity import describe_training, training_identity

    experiment = load(folder / "many.yaml")
    plain = experiment.plain()
    source, results = trained / "results/trained", folder / "results/many"
    for name in SHARED_FOLDERS:
        shutil.copytree(source / name, results / name)
    shutil.copytree(source / "timing", results / "timing", ignore=shutil.ignore_patterns("*_seed0"))
    latents = read_json(results / "latents" / "record.json")
    for method, settings in plain["methods"].items():
        template = "adaptive" if settings["sampler"]["name"] == "adaptive" else "uniform"
        for seed in experiment.seeds:
            computed_from = describe_training(experiment.run_settings(method, seed), latents, "cpu")
            run = Run(method, seed, training_identity(computed_from), plain)
            run.copy(source, template, results)
    write_common_outputs(source, results)
    sys.path.insert(0, str(ROOT / "tests"))
    from results_tree import sign

    sign(experiment, results)


class Run:
    """Names, settings and identity of a training run that gets copies of a trained run's files.

    Args:
        method, seed: the training run.
        identity: its identity.
        config: the whole resolved experiment.
    """

    def __init__(self, method: str, seed: int, identity: str, config: Row):
        self.method, self.seed, self.identity, self.config = method, seed, identity, config
        generator = random.Random(f"{method} {seed}")
        quality = random.Random(method).gauss(0, 0.06)
        self.factor = math.exp(quality + 0.02 * generator.gauss(0, 1))

    def copy(self, source: Path, template: str, results: Path) -> None:
        """Write all files of this run as copies of those of the trained run with method `template` and seed 0.

        Args:
            source: folder of the trained experiment's results.
            template: method of the trained run.
            results: folder of results that gets the copies.
        """
        trained_folder = source / "methods" / template / "seed0"
        trained_identity = json.loads((trained_folder / "training.json").read_text())["identity"]
        run_folder = results / "methods" / self.method / f"seed{self.seed}"
        copies: dict[int, Path] = {}  # by inode: files of the state are hard links of published files
        for file in sorted(path for path in trained_folder.rglob("*") if path.is_file()):
            relative = file.relative_to(trained_folder).as_posix().replace(trained_identity[:16], self.identity[:16])
            target = run_folder / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            inode = file.stat().st_ino
            if inode in copies:
                os.link(copies[inode], target)
            else:
                self._copy_file(file, target, trained_identity)
            copies[inode] = target
        for stage in ("train", "sample", "evaluate"):
            name, old_name = f"{self.method}_seed{self.seed}", f"{template}_seed0"
            timing = results / "timing" / stage / name
            shutil.copytree(source / "timing" / stage / old_name, timing)

    def _copy_file(self, file: Path, target: Path, trained_identity: str) -> None:
        """Copy a file of the trained run, with this run's names, settings, identity and measured values."""
        from kairos.files import write_record

        if file.suffix in LINKED:
            os.link(file, target)
        elif file.suffix == ".npz":
            self._copy_samples(file, target)
        elif file.suffix == ".json" and "config" not in file.name and "scheduler" not in file.name:
            record = json.loads(file.read_text().replace(trained_identity, self.identity))
            self._adapt(record, step=int(file.stem) if file.parent.name == "evaluation" else None)
            write_record(target, record)
        else:
            shutil.copyfile(file, target)

    def _adapt(self, record: Row, step: int | None) -> None:
        """Replace method, seed, hashed values and measured values in a record of the trained run by this run's.

        `step` is the step of an evaluation; None: the record is no evaluation.
        """
        for name, value in (("method", self.method), ("seed", self.seed), ("config", self.config)):
            if name in record:
                record[name] = value
        if step:  # at step 0 all methods are equal
            metrics = record["metrics"]
            for name, value in metrics.items():
                if isinstance(value, list):
                    metrics[name] = [self.factor * number for number in value]
                else:
                    metrics[name] = self.factor * value

    def _copy_samples(self, file: Path, target: Path) -> None:
        """Copy a file of samples with this run's identity in its protocol."""
        import numpy as np

        with np.load(file, allow_pickle=False) as content:
            arrays = dict(content)
        protocol = json.loads(str(arrays["protocol"])) | {"identity": self.identity}
        arrays["protocol"] = np.array(json.dumps(protocol))
        with open(target, "wb") as out:
            np.savez(out, **arrays)


def write_common_outputs(source: Path, results: Path) -> None:
    """Copy the outputs of report and tracking, so that all jobs of the experiment of copies have outputs."""
    for name in ("report.html", "summary.csv", "tracking.json"):
        shutil.copyfile(source / name, results / name)
    shutil.copytree(source / "figures", results / "figures")


# ------------------------------------------------------------------------------------------------ the measurements


def measure_plan(workplace: Workplace, methods: int) -> None:
    """Measure dry runs with everything to do, with everything done, and with outdated samples.

    Earlier results and metadata of the experiment are deleted. Placeholders replace the results of jobs.
    """
    runs = SEEDS * methods
    folder = workplace.create_pipeline("many", many_methods(methods))
    shutil.rmtree(folder / "results", ignore_errors=True)
    shutil.rmtree(folder / ".snakemake", ignore_errors=True)
    dry_run = snakemake("many", "--dry-run", "--quiet", "all")
    workplace.measure("plan, all to do", dry_run, folder, runs)
    write_placeholders(folder, snakemake("many", "--summary"), workplace.environment)
    workplace.measure("plan, all done", dry_run, folder, runs)
    file = folder / "many.yaml"
    file.write_text(file.read_text().replace("  steps: 5\n", "  steps: 6\n"))
    workplace.measure("plan, outdated", dry_run, folder, runs)


def write_placeholders(folder: Path, summary: list[str], environment: dict[str, str]) -> None:
    """Write a small file for every output of an experiment's jobs, and records that make them valid.

    Args:
        folder: working directory of the experiment.
        summary: command that lists the outputs, ``snakemake --summary``.
        environment: environment variables of the command.
    """
    listed = subprocess.run(summary, cwd=folder, env=environment, capture_output=True, text=True)
    for line in listed.stdout.splitlines()[1:]:
        path = folder / line.split("\t")[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.name == "figures":
            path.mkdir()
        else:
            path.write_text("{}")
    sys.path.insert(0, str(ROOT / "tests"))
    from workflow_copy import PRETEND

    code = f"{PRETEND}\npretend('many.yaml')"
    environment = {"MLFLOW_TRACKING_URI": "sqlite:///mlflow.db", **environment}
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, check=True)


def measure_status(workplace: Workplace, methods: int) -> None:
    """Measure the status in the terminal and as a page."""
    runs = SEEDS * methods
    folder = workplace.create_pipeline("many", many_methods(methods))
    shutil.rmtree(folder / "results", ignore_errors=True)
    workplace.copy_results(workplace.train_once(), folder)
    workplace.measure("status", kairos("status", "many.yaml"), folder, runs)
    with serve(workplace, folder) as (process, address):
        for name in ("page", "page again"):
            cpu_before, start = cpu_seconds_of(process), time.perf_counter()
            with urllib.request.urlopen(address) as answer:
                size = len(answer.read()) / 1e6
            wall, cpu = time.perf_counter() - start, cpu_seconds_of(process) - cpu_before
            peak = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
            workplace.write_row(name, runs, wall, cpu, int(peak[1]) / 1000 if peak else 0, size)
            time.sleep(4)  # more than half the refresh interval of 5 s, within which one page is sent twice


@contextmanager
def serve(workplace: Workplace, folder: Path) -> Iterator[tuple[int, str]]:
    """Run the server of the status page; yields its process id and the address of the page."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = kairos("status", "many.yaml", "--serve", "--port", str(port))
    process = subprocess.Popen(command, cwd=folder, env=workplace.environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.pid, process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


def cpu_seconds_of(process: int) -> float:
    """Return user and system time of a running process in seconds; `process` is its id."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_results(workplace: Workplace, methods: int) -> None:
    """Measure comparison, report and import into MLflow."""
    runs = SEEDS * methods
    folder = workplace.create_pipeline("many", many_methods(methods))
    shutil.rmtree(folder / "results", ignore_errors=True)
    for database in folder.glob("mlflow.db*"):
        database.unlink()
    workplace.copy_results(workplace.train_once(), folder)
    results = "results/many"
    workplace.measure("compare", kairos("compare", results), folder, runs)
    report = kairos("report", "--config", "many.yaml", "--results", results)
    workplace.measure("report", report, folder, runs, page=folder / results / "report.html")
    track = kairos("track", "--config", "many.yaml", "--results", results, "--out", f"{results}/tracking.json")
    for name in ("track", "track again"):
        workplace.measure(name, track, folder, runs)
        record = json.loads((folder / results / "tracking.json").read_text())
        if not record["imported"]:
            sys.exit(f"the import failed: {record}")


MEASUREMENTS = {
    "plan": measure_plan,
    "status": measure_status,
    "results": measure_results,
}


if __name__ == "__main__":
    main()
