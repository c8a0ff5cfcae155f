"""A copy of the repository in which tests run Snakemake and DVC, and edit what they like."""

import fcntl
import json
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
    def __init__(self, folder: Path):
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
        )
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_symlink() or (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
        self._prepare(folder)

    @classmethod
    def at(cls, folder: Path) -> "Copy":
        """A clone that is there already."""
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
        self.environment.pop("KAIROS_EXPERIMENT", None)

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, text=True)

    def snakemake(self, *arguments: str, config: str = "tests/tiny.yaml") -> "subprocess.CompletedProcess[str]":
        return self.run("snakemake", "--cores", "2", "--configfile", config, *arguments)

    def run_forked(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Run a short command, ``kairos ...`` or ``python -c CODE``, in a fork of a process that has imported much."""
        return forked_programs.run([*command], self.folder, self.environment)

    def ask_snakemake(self, *arguments: str, config: str) -> "subprocess.CompletedProcess[str]":
        """Run Snakemake for what starts no jobs, in a fork of a process that has imported it."""
        command = ["snakemake", "--cores", "2", "--configfile", config, *arguments]
        return forked_programs.run(command, self.folder, self.environment)

    def outputs(self, config: str = "tests/tiny.yaml") -> dict[str, str]:
        """Every output of every job with its rule, as Snakemake lists them."""
        done = self.ask_snakemake("--summary", config=config)
        assert done.returncode == 0, done.stderr
        rows = [line.split("\t") for line in done.stdout.splitlines() if "\t" in line]
        return {row[0]: row[2] for row in rows[1:]}

    def to_do(self, *arguments: str, config: str = "tests/tiny.yaml") -> dict[str, int]:
        """Number of jobs that Snakemake would run, by rule; the target `all` left out."""
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
        path = self.folder / name
        before = path.read_text()
        assert before.count(old) >= 1, f"{name} does not hold {old!r}"
        path.write_text(before.replace(old, new, 1))
        try:
            yield
        finally:
            path.write_text(before)

    def pretend(self, config: str = "tests/tiny.yaml") -> None:
        """Put empty results into Snakemake's ledger as computed: enough to ask what would run again."""
        for name in self.outputs(config):
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.name == "figures":
                path.mkdir()
            else:
                path.write_text(json.dumps({"imported": True, "uri": self.environment["MLFLOW_TRACKING_URI"]}))
        done = self.ask_snakemake("--touch", "--forceall", config=config)
        assert done.returncode == 0, done.stderr


def finished(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A copy of its own whose params.yaml has run: tests/tiny.yaml with the method `adaptive` alone, in two segments.

    It is computed once for all test files and all of pytest's processes.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    made, complete = shared / "finished", shared / "finished.ok"
    with open(shared / "finished.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not complete.exists():
            shutil.rmtree(made, ignore_errors=True)
            copy = Copy(made)
            tiny = (made / "tests/tiny.yaml").read_text()
            (made / "params.yaml").write_text(tiny.replace("  uniform: {sampler: uniform}\n", ""))
            for lock in ("dvc.lock", "workflow/dvc.lock"):
                (made / lock).unlink(missing_ok=True)
            ended = copy.snakemake(config="params.yaml")
            assert ended.returncode == 0, ended.stdout + ended.stderr
            complete.touch()
    return Copy.at(shutil.copytree(made, tmp_path_factory.mktemp("finished") / "copy", symlinks=True))
