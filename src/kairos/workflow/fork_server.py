"""Jobs of a run on this machine as forks of one process, which has imported what they need and computed nothing.

Interpreter and imports take seconds of CPU time, of a small job most of it. All else stays as it is, to the bit:

    snakemake               the controller: `start`
      ├── the server        `serve`: imports once, then forks
      │     └── a guardian  `_guard`: hands on what the client is told, tells it how the job has ended
      │           └── the job
      └── bash
            └── kairos ...  the client: `hand_over`; ends as its job does

The import of diffusers asks for GPUs, which a fork could not use any more: where there is one, there is no server.

A job does not outlive its client; it gets SIGTERM where the controller, the server or its guardian has gone. A command
that finds no server, or one of another environment, folder, interpreter or source code, runs by itself. On a cluster,
and outside of Linux, there is none.
"""

import atexit
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kairos import portable, resource_usage
from kairos.training.launch import die_with_parent

_OF_TRAININGS = ("train", "sample", "evaluate", "analyse", "measure")
STAGES = frozenset(("autoencoder", "text", "encode", "extractor", "reference", *_OF_TRAININGS))
_VARIABLE = "KAIROS_PRELOADED"  # names the server's socket
_SERVER = "from kairos import cli; from kairos.workflow import fork_server; fork_server.serve(cli.main, {}, {!r}, {!r})"
# what Snakemake sets to a job's number of threads, and to its folder for temporary files
_NAMES = ("OMP_NUM", "GOTO_NUM", "OPENBLAS_NUM", "MKL_NUM", "NUMEXPR_NUM", "VECLIB_MAXIMUM")
_THREADS = [f"{name}_THREADS" for name in _NAMES]
_FOLDERS = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")
_OF_SHELLS = ("_", "SHLVL", "PWD", "OLDPWD")  # they differ, and no job reads them
_SIGNALS = [getattr(signal, f"SIG{name}") for name in ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "TSTP", "CONT")]
_held: list[Any] = []  # the pipe whose end tells the server that the controller has ended


def start(config: Path, threads: int, stages: Iterable[str]) -> None:
    """Start the server of a run, where it is of use.

    Args:
        config: the frozen experiment.
        threads: of a job.
        stages: of every job that the run will start.
    """
    os.environ.pop(_VARIABLE, None)
    if sys.platform != "linux" or os.path.exists("/dev/nvidiactl") or sum(stage in STAGES for stage in stages) < 2:
        return
    folder = tempfile.mkdtemp(prefix="kairos-")  # for this user alone
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with suppress(OSError), socket.socket(socket.AF_UNIX) as listener:
        os.close(os.pidfd_open(os.getpid()))  # Linux has it from 5.3 on
        listener.bind(f"{folder}/socket")
        listener.listen(1000)  # jobs wait while it imports what they would have to import themselves
        of_jobs = dict.fromkeys(_THREADS, str(threads)) | dict.fromkeys(_FOLDERS, tempfile.gettempdir())
        line = [sys.executable, "-P", "-c", _SERVER.format(listener.fileno(), str(config), folder)]
        # in a group of its own, since what a terminal sends to all processes reaches jobs through their clients
        streams: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        others: Any = {"env": os.environ | of_jobs, "pass_fds": [listener.fileno()], "process_group": 0}
        _held.append(subprocess.Popen(line, **streams, **others))
        os.environ[_VARIABLE] = f"{folder}/socket"


def hand_over(argv: list[str]) -> int | None:
    """Have the server run this command line; returns its exit status, 128 and more where a signal has ended it.

    None: it has to run here.
    """
    path, told = os.environ.pop(_VARIABLE, None), b""
    if path is None or sys.stdin is None:
        return None
    ignored = [number for number in _SIGNALS if signal.getsignal(number) == signal.SIG_IGN]
    asked = {
        "conditions": _conditions(),
        "sys": [sys.argv, sys.path],
        "clock": resource_usage.usage_so_far(),
        "ignored": ignored,
    }
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(path)
            socket.send_fds(server, [b"?"], [0, 1, 2])
            server.sendall(json.dumps({**asked, "argv": argv}).encode() + b"\n")
            if not server.recv(1):
                return None
        except OSError:
            return None

        def hand_on(number: int, frame: object) -> None:
            with suppress(OSError):
                server.send(bytes([number]))
            if number == signal.SIGTSTP:
                os.kill(os.getpid(), signal.SIGSTOP)

        for number in set(_SIGNALS) - set(ignored):
            signal.signal(number, hand_on)
        with suppress(OSError):
            told = server.recv(4)
    status = int.from_bytes(told, "big", signed=True) if told else -signal.SIGKILL  # it was the guardian's end
    return status if status >= 0 else 128 - status


def serve(main: Callable[[list[str]], int], listener: int, config: str, folder: str) -> None:
    """Import what the jobs of an experiment need, and fork for each that asks until the controller has ended.

    Args:
        main: runs a command line and returns its exit status.
        listener: number of the file that is the listening socket.
        config: the frozen experiment.
        folder: of the socket.
    """
    gc.disable()
    if portable.asked(Namespace(config=config)):
        portable.hold()
    conditions = _conditions()
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # a job's first ones wait until it can take them
    # a fork could use no GPU, and would lack other threads
    refused = _import(config) or len(os.listdir("/proc/self/task")) > 1
    known = _sources()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # guardians end unheard
    with socket.socket(fileno=listener) as clients:
        while not refused and 0 not in select.select([0, listener], [], [])[0]:
            with suppress(OSError, ValueError), clients.accept()[0] as client:
                files = socket.recv_fds(client, 1, 3)[1]
                try:
                    asked = json.loads(client.makefile(encoding="utf-8").readline())
                    if asked["conditions"] == conditions and known.items() <= _sources().items() and not os.fork():
                        _guard(client)
                        for number, file in enumerate(files):
                            os.dup2(file, number)
                        break
                finally:  # what others hold open would keep a `tee` from ending
                    for file in files:
                        os.close(file)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(0)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    sys.argv, sys.path[:] = asked["sys"]
    resource_usage.inherited.update(asked["clock"])
    for number in _SIGNALS:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in asked["ignored"] else usual)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    sys.exit(main(asked["argv"]))


def _guard(client: socket.socket) -> None:
    """Fork the job and stay until it has ended; returns in the job."""
    die_with_parent(signal.SIGKILL)
    guardian = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with suppress(OSError):
        if not (job := os.fork()):
            die_with_parent(signal.SIGTERM)
            if os.getppid() == guardian:
                return
            os._exit(1)  # it is gone already
        ended = os.pidfd_open(job)
        client.sendall(b"!")
        while ended not in select.select([client.fileno(), ended], [], [])[0]:
            os.kill(job, (client.recv(1) or b"\x09")[0])  # SIGKILL for one that tells of nothing, as it has got
        client.sendall(os.waitstatus_to_exitcode(os.waitpid(job, 0)[1]).to_bytes(4, "big", signed=True))
    os._exit(0)


def _import(config: str) -> bool:
    """Import what an experiment's stages need, of ours and torch's; other code might compute.

    Returns whether a GPU is here.
    """
    from kairos.config import load
    from kairos.workflow.dependencies import TRAINING_STAGES, find_dependencies, shared_stages

    plain = load(config).plain()
    stages = STAGES.intersection((*shared_stages(plain), *TRAINING_STAGES))
    roots = {
        root
        for stage in stages
        for method in plain["methods"]
        for root in find_dependencies(stage, plain, method).modules
    }
    roots |= {"torch._dynamo", "kairos.training.run", "kairos.staging", "kairos.tracking.live"}
    roots |= {"kairos.autoencoders.train"} if plain["autoencoder"]["kind"] != "none" else set()
    for module in sorted(root for root in roots if root.startswith(("torch.", "kairos.", "kairos_timesteps."))):
        importlib.import_module(module.partition(":")[0])
    resource_usage.write_record(Path("results", plain["experiment"], "timing", "preload.json"), "preload")
    return bool(sys.modules["torch"].cuda.is_available())


def _conditions() -> list[Any]:
    """Return the state of this process that a command and the server must have in common."""
    environment = {name: value for name, value in os.environ.items() if name not in _OF_SHELLS}
    os.umask(umask := os.umask(0))
    blocked = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    return [sys.prefix, sys.path[not sys.flags.safe_path :], environment, os.getcwd(), umask, blocked]


def _sources() -> dict[str, int]:
    """Return the modification time of the file of every imported module."""
    specs = [getattr(module, "__spec__", None) for module in list(sys.modules.values())]
    return {spec.origin: os.stat(spec.origin).st_mtime_ns for spec in specs if spec and spec.has_location}
