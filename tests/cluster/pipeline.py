"""The tiny pipeline on the test's SLURM: its controller, its jobs, and what its trainings leave."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from slurm import slurm

from workflow_copy import Copy

CONFIG = "experiment.yaml"
RESULTS = "results/cluster"


@dataclass(frozen=True)
class Job:
    """A job as SLURM has it."""

    number: str
    state: str
    node: str
    rule: str  # and wildcards, as the executor's comment has them: rule_train_wildcards_uniform_0


class Pipeline:
    """A copy of the repository whose experiment runs through SLURM."""

    def __init__(self, folder: Path):
        self.copy = Copy(folder)
        self.folder = self.copy.folder
        self.tiny: dict[str, Any] = yaml.safe_load((folder / "tests/cluster/tiny.yaml").read_text())
        self._runs = 0

    def configure(self, methods: dict[str, Any] | None = None, seeds: int = 1, **training: Any) -> None:
        """The tiny experiment with other methods, seeds or settings; what is there already stays complete."""
        values = {**self.tiny, "methods": methods or self.tiny["methods"], "seeds": list(range(seeds))}
        values["training"] = {**self.tiny["training"], **training}
        (self.folder / CONFIG).write_text(yaml.safe_dump(values))

    @contextmanager
    def controller(self, *arguments: str) -> Iterator["Controller"]:
        """Start Snakemake with its profile for SLURM."""
        self._runs += 1
        command = [
            "snakemake", "--profile", "profiles/slurm", "--configfile", CONFIG, "--jobs", "16",
            "--kairos-status-command", "squeue", "--kairos-init-seconds-before-status-checks", "5", *arguments,
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
        """Run Snakemake to its end, which must be a good one; returns what it said."""
        with self.controller(*arguments) as controller:
            controller.ended(seconds)
            return controller.log.read_text()

    def training(self, method: str, seed: int = 0) -> "Training":
        return Training(self.folder, method, seed)

    def to_do(self) -> dict[str, int]:
        """Jobs that Snakemake would run, by rule."""
        return self.copy.to_do(config=CONFIG)


def _interruptible() -> None:
    """Restore the default action of SIGINT, which a background process of a shell ignores and its children inherit."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass(frozen=True)
class Controller:
    """A running Snakemake."""

    process: "subprocess.Popen[bytes]"
    log: Path

    def ended(self, seconds: float = 900) -> None:
        """Wait for its end, which must be a good one."""
        assert self.process.wait(seconds) == 0, self.log.read_text()[-6000:]


@dataclass(frozen=True)
class Training:
    """A training of the pipeline, which may be running."""

    root: Path
    method: str
    seed: int

    @property
    def end(self) -> str:
        """The target that Snakemake is asked for."""
        return f"{RESULTS}/{self.method}/seed{self.seed}/training.json"

    @property
    def folder(self) -> Path:
        return self.root / RESULTS / self.method / f"seed{self.seed}"

    @property
    def log(self) -> str:
        """Log of the last job of this training run."""
        return (self.root / RESULTS / "logs" / f"train_{self.method}_seed{self.seed}.log").read_text()

    def said(self) -> str:
        """Return the log of the last job, or an empty string if no job has started yet."""
        with suppress(FileNotFoundError):
            return self.log
        return ""

    def log_of(self, job: Job) -> str:
        """Return the log that is kept of an earlier, failed job of this training run."""
        folder = self.root / ".snakemake/slurm_logs/rule_train" / f"{self.method}_{self.seed}"
        return (folder / f"{job.number}.log").read_text()

    def complete(self) -> bool:
        return (self.folder / "training.json").exists()

    def has_checkpoint(self) -> bool:
        return any(self.folder.glob(".state/*/checkpoints/*.ckpt"))

    def pid(self) -> int:
        """The process that trains; the nodes are all on this machine."""
        found = re.search(r"pid (\d+)", (self.folder / ".state/lock").read_text())
        assert found
        return int(found[1])

    def jobs(self) -> list[Job]:
        """Return the jobs of the training run, oldest first."""
        return [job for job in all_jobs(self.root) if job.rule == f"rule_train_wildcards_{self.method}_{self.seed}"]

    def components(self) -> dict[str, str]:
        """Hashes of everything that it consists of, recomputed from its files."""
        from kairos.files import sha256_file
        from kairos.training.checkpoint import component_hashes, read

        found = component_hashes(read(self.folder / "checkpoint.pt"))
        return {**found, "metrics": sha256_file(self.folder / "metrics.jsonl")}

    def lengths(self) -> list[int]:
        """Steps computed by each job that came to write a checkpoint, as far as a later one went on from them."""
        longest: dict[str, int] = {}
        for line in (self.folder / "timing.jsonl").read_text().splitlines():
            entry = json.loads(line)
            longest[entry["started"]] = entry["steps_run"]
        return list(longest.values())


def all_jobs(folder: Path) -> list[Job]:
    """All jobs of a folder since the cluster was started, the oldest first."""
    rows = slurm("squeue", "-h", "--states=all", "--sort=i", "-o", "%Z|%i|%T|%N|%k").splitlines()
    return [Job(*row.split("|", 4)[1:]) for row in rows if row.startswith(f"{folder}|")]


def details(job: Job) -> dict[str, str]:
    """Return the fields of `scontrol show job` by name, such as Restarts, TimeLimit, GRES."""
    words = slurm("scontrol", "--details", "show", "job", job.number).split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def environment(pid: int) -> dict[str, str]:
    """The environment that a process was started with."""
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


def send(pid: int, number: int) -> None:
    os.kill(pid, number)
