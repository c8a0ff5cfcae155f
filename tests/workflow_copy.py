"""Copies of the repository in which tests run Snakemake and DVC and edit files."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import forked_programs

ROOT = Path(__file__).resolve().parent.parent


class Copy:
    """Copy of the repository's files in a folder."""

    def __init__(self, folder: Path):
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
        )
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_symlink() or (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
        # compiled modules, which Python uses as long as size and time of their source are those of ROOT's
        for compiled in (path for name in ("src", "library/src") for path in (ROOT / name).rglob("*.pyc")):
            target = folder / compiled.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(compiled, target)
        self._prepare(folder)

    @classmethod
    def at(cls, folder: Path) -> "Copy":
        """Return the copy that a folder already contains."""

        copy = cls.__new__(cls)
        copy._prepare(folder)
        return copy

    def _prepare(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join((str(folder / "src"), str(folder / "library/src"))),
            "OMP_NUM_THREADS": "1",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "DVC_NO_ANALYTICS": "1",
            "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db",
        }
        self.environment.pop("KAIROS_PLAN", None)

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, text=True)

    def snakemake(self, *arguments: str, config: str = "tests/tiny.yaml") -> "subprocess.CompletedProcess[str]":
        return self.run("snakemake", "--cores", "2", "--configfile", config, *arguments)

    def run_forked(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Run a short command, ``kairos ...`` or ``python -c CODE``, in a fork that has imported Snakemake and DVC."""
        return forked_programs.run([*command], self.folder, self.environment)

    def ask_snakemake(self, *arguments: str, config: str) -> "subprocess.CompletedProcess[str]":
        """Run Snakemake without jobs, as in a dry run, in a fork of a process that has imported Snakemake."""
        command = ["snakemake", "--cores", "2", "--configfile", config, *arguments]
        return forked_programs.run(command, self.folder, self.environment)

    def outputs(self, config: str = "tests/tiny.yaml") -> dict[str, str]:
        """Return the rule of each output of each job, as Snakemake lists them."""
        done = self.ask_snakemake("--summary", config=config)
        assert done.returncode == 0, done.stderr
        rows = [line.split("\t") for line in done.stdout.splitlines() if "\t" in line]
        return {row[0]: row[2] for row in rows[1:]}

    def to_do(self, *arguments: str, config: str = "tests/tiny.yaml") -> dict[str, int]:
        """Return the number of jobs that Snakemake would run by rule, without the target `all`."""
        done = self.ask_snakemake("--dry-run", *arguments, config=config)
        output = done.stdout + done.stderr
        assert done.returncode == 0, output
        if "Nothing to be done" in output:
            return {}
        table = output[output.index("Job stats:") :].split("\n\n")[0]
        counts = dict(re.findall(r"^(\w+) +(\d+)$", table, flags=re.MULTILINE))
        return {rule: int(count) for rule, count in counts.items() if rule not in ("all", "total")}

    @contextmanager
    def edited(self, name: str, old: str, new: str) -> Iterator[None]:
        """Replace the first occurrence of a text in a file, and restore the file at the end."""
        path = self.folder / name
        before = path.read_text()
        assert before.count(old) >= 1, f"{name} does not contain {old!r}"
        path.write_text(before.replace(old, new, 1))
        try:
            yield
        finally:
            path.write_text(before)

    def pretend(self, config: str = "tests/tiny.yaml") -> None:
        """Write empty results whose records say that the present experiment computed them, as a basis of dry runs."""
        for name in self.outputs(config):
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.name == "figures":
                path.mkdir(exist_ok=True)
            else:
                path.touch()
        done = self.run_forked("python", "-c", f"{PRETEND}\npretend({config!r})")
        assert done.returncode == 0, done.stderr


PRETEND = """
import os
from kairos.config import load
from kairos.files import write_record
from kairos.validity import Validity
from kairos.workflow.layout import create_layout

def pretend(config):
    layout = create_layout(load(config))
    validity = Validity(layout.experiment, layout.results, reads_outside=True)
    for stage in validity.stages:
        for result in validity.list_results(stage):
            fields = {"imported": True, "uri": os.environ["MLFLOW_TRACKING_URI"], "content_sha256": stage}
            if stage == "train":
                fields |= {"identity": "identity", "step": int(result.snapshot)}
                folder = layout.training_folder(result.method, result.seed)
                write_record(f"{folder}/training.json", {"identity": "identity", "steps": int(result.snapshot)})
            write_record(validity.path(result), fields)
            run = {"seed": result.seed, "device": "cpu"} if stage == "train" else {}
            validity.add_computed_from(result, {**validity.describe(result), **run})
"""


def copy_finished_run(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """Return a new copy whose params.yaml has run: tests/tiny.yaml with the method `adaptive` alone, in two segments.

    The results are computed once for all test files and all of pytest's processes.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder, complete = shared / "finished", shared / "finished.ok"
    with open(shared / "finished.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not complete.exists():
            shutil.rmtree(folder, ignore_errors=True)
            copy = Copy(folder)
            tiny = (folder / "tests/tiny.yaml").read_text()
            (folder / "params.yaml").write_text(tiny.replace("  uniform: {sampler: uniform}\n", ""))
            (folder / "dvc.lock").unlink(missing_ok=True)
            ended = copy.snakemake(config="params.yaml")
            assert ended.returncode == 0, ended.stdout + ended.stderr
            complete.touch()
    return Copy.at(shutil.copytree(folder, tmp_path_factory.mktemp("finished") / "copy", symlinks=True))
