"""Kairos commands in separate processes, without the seconds that imports take: see `Commands`."""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from ports import free_port


@dataclass
class Commands:
    """Start kairos commands as forks of one process, which has only imported the modules that a training run needs."""

    _process: "subprocess.Popen[str] | None" = field(default=None, init=False)

    def __enter__(self) -> "Commands":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait()

    def start(
        self,
        line: list[str],
        log: Path,
        point: str = "never",
        passage: int = 0,
        **environment: str,
    ) -> int:
        """Start a command line of `training_case.command` in the present working directory; returns the process id.

        Args:
            line: the command line.
            log: file for what the command writes to standard output and standard error.
            point: where the process kills itself, at the `passage`-th time; see `kill_at.prepare`.
            passage: see `point`.
            environment: variables in addition to those of the tests.
        """
        assert line[1:3] == ["-m", "kairos"]
        order = {"arguments": line[3:], "log": str(log), "point": point, "passage": passage}
        order["folder"] = os.getcwd()
        return self._send(order | {"environment": environment})

    def wait(self, process: int) -> int:
        """Wait until a command ends; returns its exit status, minus the signal if a signal killed it."""
        return self._send({"wait": process})

    def run(self, line: list[str], log: Path, **environment: str) -> int:
        """Run a command to its end; returns its exit status."""
        return self.wait(self.start(line, log, **environment))

    def run_ranks(self, line: list[str], logs: list[Path]) -> list[int]:
        """Run a training command on one rank per log, without torchrun, whose imports are slow.

        Returns:
            The exit status of each rank.
        """
        self.preload("torch._dynamo")  # which DistributedDataParallel would import in each rank
        group = {"WORLD_SIZE": str(len(logs)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        ranks = [self.start(line, log, RANK=str(rank), LOCAL_RANK=str(rank), **group) for rank, log in enumerate(logs)]
        return [self.wait(rank) for rank in ranks]

    def preload(self, module: str) -> None:
        """Import a module in the process that forks, so that no command has to."""
        self._send({"import": module})

    def _send(self, order: dict) -> int:
        """Send an order to the process that forks, which starts with the first order; returns its answer."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())


def run_command(order: dict) -> None:
    """Run a command in this process, a fork, and end the process."""
    from kairos.cli import main
    from kairos.process_exit import die_with_parent
    from kill_at import prepare

    die_with_parent()
    os.environ.update(order["environment"])
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, sys.stderr.fileno())
    os.dup2(log, sys.stdout.fileno())
    os.chdir(order["folder"])
    prepare(order["point"], order["passage"])
    try:
        status = main(order["arguments"])
    except SystemExit as end:
        status = int(end.code or 0)
    sys.stderr.flush()
    os._exit(status)


def serve() -> None:
    """Read orders from standard input until it is closed; answer with process ids and exit statuses."""
    from kairos.training.run import import_components
    from kairos.training.settings import read_run_settings
    from training_case import experiment

    import_components(read_run_settings(experiment(), "adaptive", 0))
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            answer = os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
        elif "import" in order:
            importlib.import_module(order["import"])
            answer = 0
        else:
            answer = os.fork()
            if answer == 0:
                run_command(order)
        print(answer, flush=True)


if __name__ == "__main__":
    serve()
