"""Helpers of the tests on SLURM: the small pipeline, its controller, its jobs and its training runs."""

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from slurm import slurm

from kairos.slurm import slurm_logs_folder
from workflow_copy import Copy

CONFIG = "experiment.yaml"
RESULTS = "results/cluster"
KAIROS = ("--kairos-init-seconds-before-status-checks", "1")


@dataclass(frozen=True)
class Job:
    """A job in SLURM's queue."""

    number: str
    state: str
    node: str
    rule: str  # the comment of the executor, with rule and wildcards: rule_train_wildcards_uniform_0


class Pipeline:
    """A copy of the repository whose experiment runs on SLURM."""

    def __init__(self, folder: Path):
        self.copy = Copy.at(folder) if folder.exists() else Copy(folder)
        self.folder = self.copy.folder
        self.tiny: dict[str, Any] = yaml.safe_load((folder / "tests/cluster/tiny.yaml").read_text())
        self._runs = 0

    def configure(self, methods: dict[str, Any] | None = None, seeds: int = 1, **training: Any) -> None:
        """Write the small experiment with other methods, seeds or training settings; earlier results stay valid."""
        values = {**self.tiny, "methods": methods or self.tiny["methods"], "seeds": list(range(seeds))}
        values["training"] = {**self.tiny["training"], **training}
        (self.folder / CONFIG).write_text(yaml.safe_dump(values))

    @contextmanager
    def controller(self, *arguments: str, executor: tuple[str, ...] = KAIROS) -> Iterator["Controller"]:
        """Run Snakemake with the SLURM profile in the background, and kill it at the end of the context.

        `executor` contains the options of the executor.
        """
        self._runs += 1
        command = [
            "snakemake", "--profile", "profiles/slurm", "--configfile", CONFIG, "--jobs", "16", *executor, *arguments,
        ]  # fmt: skip
        log = self.folder / f"controller{self._runs}.log"
        with open(log, "w") as out:
            process = subprocess.Popen(
                command, cwd=self.folder, env=self.copy.environment, stdout=out, stderr=subprocess.STDOUT,
                preexec_fn=_interruptible,
            )  # fmt: skip
        try:
            yield Controller(process, log)
        finally:
            process.kill()
            process.wait()

    def run(self, *arguments: str, seconds: float = 900) -> str:
        """Run Snakemake, which must succeed; return its output."""
        with self.controller(*arguments) as controller:
            controller.wait_for_success(seconds)
            return controller.log.read_text()

    def training(self, method: str, seed: int = 0) -> "Training":
        """Return a training run of the pipeline."""
        return Training(self.folder, method, seed)

    def to_do(self, *arguments: str) -> dict[str, int]:
        """Return the number of jobs that Snakemake would run with the SLURM profile, by rule."""
        return self.copy.to_do("--profile", "profiles/slurm", *arguments, config=CONFIG)


def _interruptible() -> None:
    """Restore the default action of SIGINT, which a background process of a shell ignores and its children inherit."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass(frozen=True)
class Controller:
    """A running Snakemake."""

    process: "subprocess.Popen[bytes]"
    log: Path

    def wait_for_success(self, seconds: float = 900) -> None:
        """Wait until Snakemake ends, which must succeed."""
        assert self.process.wait(seconds) == 0, self.log.read_text()[-6000:]


@dataclass(frozen=True)
class Training:
    """A training run of the pipeline in any state."""

    root: Path
    method: str
    seed: int

    @property
    def target(self) -> str:
        """Target of Snakemake for the complete run."""
        return f"{RESULTS}/methods/{self.method}/seed{self.seed}/training.json"

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self.root / RESULTS / "methods" / self.method / f"seed{self.seed}"

    @property
    def log(self) -> str:
        """Log of the last job of the run."""
        return (self.root / RESULTS / "logs" / f"train_{self.method}_seed{self.seed}.log").read_text()

    def log_of(self, job: Job) -> str:
        """Return the log of an earlier, failed job of the run."""
        logs = self.root / slurm_logs_folder(self.root / RESULTS)
        return (logs / "rule_train" / f"{self.method}_{self.seed}" / f"{job.number}.log").read_text()

    def complete(self) -> bool:
        """Return True if the run has written its record."""
        return (self.folder / "training.json").exists()

    def has_checkpoint(self) -> bool:
        """Return True if the run has a checkpoint."""
        return any(self.folder.glob(".state/*/checkpoints/*.ckpt"))

    def is_resumed(self, after: int) -> bool:
        """Return True if a process other than `after` has written a checkpoint of the run."""
        lock = self.folder / ".state/lock"
        if not lock.exists() or re.fullmatch(rf"(pid {after}\b.*)?", lock.read_text()):  # empty: being written
            return False
        start = lock.stat().st_mtime_ns
        return any(path.stat().st_mtime_ns > start for path in self.folder.glob(".state/*/checkpoints/*.ckpt"))

    def pid(self) -> int:
        """Return the id of the training process; both nodes are on this machine."""
        match = re.search(r"pid (\d+)", (self.folder / ".state/lock").read_text())
        assert match
        return int(match[1])

    def jobs(self) -> list[Job]:
        """Return the jobs of the run, oldest first."""
        return [job for job in all_jobs(self.root) if job.rule == f"rule_train_wildcards_{self.method}_{self.seed}"]

    def components(self) -> dict[str, str]:
        """Compute the hashes of the components of the complete run from its files."""
        from kairos.files import sha256_file
        from kairos.training.checkpoint import component_hashes, read

        hashes = component_hashes(read(self.folder / "checkpoint.pt"))
        return {**hashes, "metrics": sha256_file(self.folder / "metrics.jsonl")}

    def steps_of_jobs(self) -> list[int]:
        """Return the number of steps of each job that remain in the result; jobs without a checkpoint have none."""
        steps: dict[str, int] = {}
        for line in (self.folder / "timing.jsonl").read_text().splitlines():
            entry = json.loads(line)
            steps[entry["started"]] = entry["steps_run"]
        return list(steps.values())


def all_jobs(folder: Path) -> list[Job]:
    """Return all jobs that were submitted from a folder since the cluster was started, oldest first."""
    rows = slurm("squeue", "-h", "--states=all", "--sort=i", "-o", "%Z|%i|%T|%N|%k").splitlines()
    return [Job(*row.split("|", 4)[1:]) for row in rows if row.startswith(f"{folder}|")]


def details(job: Job) -> dict[str, str]:
    """Return the fields of `scontrol show job` by name, such as Restarts, TimeLimit, GRES."""
    words = slurm("scontrol", "--details", "show", "job", job.number).split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def environment(pid: int) -> dict[str, str]:
    """Return the environment with which a process was started."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def term_is_pending(pid: int) -> bool:
    """Return True if a stopped process has a pending SIGTERM, or if the process is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True
    pending = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))]
    return any(mask >> (signal.SIGTERM - 1) & 1 for mask in pending)
