"""Runs kairos command lines in processes that SIGKILL themselves at an exact point; see `Mother`.

A process dies for real, at the N-th passage of the point; nothing is caught, flushed or cleaned up. All are forks of
one process that has imported what a training needs and computed nothing: importing would take most of the time.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path


class Mother:
    """The process that forks; children are given its order in turn."""

    def __enter__(self):
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()

    def start(self, arguments: list[str], log: Path, point: str = "never", passage: int = 0) -> int:
        """Start a kairos command line in a child that dies at the point; returns its process id."""
        order = {"arguments": arguments, "log": str(log), "point": point, "passage": passage}
        print(json.dumps(order), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def wait(self) -> int:
        """The exit status of the child, minus the signal where one killed it."""
        return int(self.process.stdout.readline())


def die_at(count, function):
    """The function, killed at its `count`-th call before it does anything."""
    calls = [0]

    def wrapped(*arguments, **keywords):
        calls[0] += 1
        if calls[0] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **keywords)

    return wrapped


def prepare(point: str, count: int) -> None:
    """Make this process die at the `count`-th passage of the point."""
    from kairos import files
    from kairos.strategies.adaptive import Adaptive
    from kairos.training import checkpoint, loop

    if point == "step":  # before a step is computed
        loop._passes = die_at(count, loop._passes)
    elif point == "after_optimizer":  # the optimiser has stepped, the sampler has not measured it yet
        Adaptive._measure = die_at(2 * count, Adaptive._measure)
    elif point in ("half_written", "not_synced", "not_renamed"):  # inside a checkpoint write
        write = checkpoint.write
        writes = [0]

        def killing(path, content):
            writes[0] += 1
            if writes[0] == count:
                if point == "not_synced":
                    files.os.fsync = die_at(1, os.fsync)
                elif point == "not_renamed":
                    files.os.replace = die_at(1, os.replace)
                else:
                    checkpoint.atomic = half_written
            write(path, content)

        checkpoint.write = killing
    elif point != "never":
        raise SystemExit(f"unknown point {point}")


def half_written(path):
    """Stands for `files.atomic`: opens the real temporary file and dies in the middle of its second write."""
    from kairos import files

    real = files.atomic(path)

    class Half:
        def __enter__(self):
            self.file = real.__enter__()
            self.writes = 0
            return self

        def write(self, data):
            self.writes += 1
            if self.writes == 2:
                self.file.write(data[: len(data) // 2])
                self.file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            return self.file.write(data)

        def __exit__(self, *_):
            raise AssertionError("was to be dead by now")

    return Half()


def child(order: dict) -> None:
    from kairos.cli import main

    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, sys.stderr.fileno())
    prepare(order["point"], order["passage"])
    status = main(order["arguments"])
    sys.stderr.flush()
    os._exit(status)


def mother() -> None:
    from training_case import experiment

    from kairos.training.run import import_components

    import_components(experiment(), "adaptive")
    for line in sys.stdin:
        number = os.fork()
        if number == 0:
            child(json.loads(line))
        print(number, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]), flush=True)


if __name__ == "__main__":
    mother()
