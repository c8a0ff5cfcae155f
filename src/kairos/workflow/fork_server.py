"""Fork server: the jobs of a run on this machine are forks of one process that has imported their modules.

Start-up of the interpreter and imports take seconds of CPU time, most of a small job. The results stay equal to the
bit. The processes are:

    snakemake               the controller: `start_server`
      ├── the server        `serve`: imports once, then forks
      │     └── a guardian  `_guard`: forwards signals to the job, and its exit status to the client
      │           └── the job
      └── bash
            └── kairos ...  the client: `run_on_server`; ends with the job's exit status

A client connects to the server's socket and sends `_REQUEST` with its standard streams, and a line of JSON. The
guardian answers `_ACCEPTED` and later the job's exit status, 4 bytes. In between, each byte from the client is the
number of a signal. A closed connection without an answer means that the server does not accept the command.

Servers are not used on machines with a GPU: the import of diffusers initialises the GPU, which forks then cannot use.
They are not used on clusters and outside of Linux either.

A job does not outlive its client. It gets SIGTERM if the controller, the server or its guardian ends. A command runs in
the client's process without a server, or if the server has another environment, working directory, interpreter or
source code.
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
from typing import Any, NoReturn

from kairos import devices, portable, process_exit, resource_usage
from kairos.stages import STAGES

# stages with PyTorch, whose import takes seconds
FORKED_STAGES = frozenset(row.name for row in STAGES if row.computes_on)
_SOCKET_VARIABLE = "KAIROS_PRELOADED"  # environment variable with the path of the server's socket
# stages whose jobs import diffusers if the experiment has an autoencoder
_AUTOENCODER_STAGES = frozenset(row.name for row in STAGES if "autoencoder" in (row.name, *row.needs)) & FORKED_STAGES
# code of the server's process, to be formatted with the arguments of `serve`: listener, config, stages and folder
_SERVER_CODE = (
    "from kairos import process_exit, quick_imports; process_exit.skip_teardown(); quick_imports.enable(); "
    "from kairos import cli; from kairos.workflow import fork_server; fork_server.serve(cli.main, {}, {!r}, {!r}, {!r})"
)
# environment variables that Snakemake sets to a job's number of threads, and to its folder for temporary files
_THREAD_LIBRARIES = ("OMP_NUM", "GOTO_NUM", "OPENBLAS_NUM", "MKL_NUM", "NUMEXPR_NUM", "VECLIB_MAXIMUM")
_THREAD_VARIABLES = [f"{library}_THREADS" for library in _THREAD_LIBRARIES]
_FOLDER_VARIABLES = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")
_SHELL_VARIABLES = ("_", "SHLVL", "PWD", "OLDPWD")  # differ between processes, and no job reads them
_SIGNALS = [getattr(signal, f"SIG{name}") for name in ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "TSTP", "CONT")]
_MOST_WAITING = 1000  # clients that wait while the server imports
_REQUEST, _ACCEPTED = b"?", b"!"  # first bytes that a client and a guardian send
# the server's process, kept so that its standard input stays open: when the input closes, the server ends
_servers: list[Any] = []

Request = dict[str, Any]  # a client's command line and the state of its process


# ------------------------------------------------------------------------------------------------- in the controller


def start_server(config: Path, threads: int, stages: Iterable[str]) -> None:
    """Start the fork server of a run on this machine, unless it would be of no use.

    There is no server outside of Linux, on a machine with a GPU, or if fewer than two jobs would use it.
    `_SOCKET_VARIABLE` is set to the path of the server's socket, or deleted if there is no server. If the server cannot
    start, jobs run in separate processes: no error is raised. The function does not wait for the server's imports. The
    server ends with this process at the latest, and the temporary folder of its socket is deleted.

    Args:
        config: file of the frozen experiment.
        threads: number of threads of a job.
        stages: the stage of every job that the run will start, one element per job; stages outside of `FORKED_STAGES`
            are ignored.
    """
    os.environ.pop(_SOCKET_VARIABLE, None)
    forked_stages = [stage for stage in stages if stage in FORKED_STAGES]
    if sys.platform != "linux" or devices.has_nvidia_driver() or len(forked_stages) < 2:
        return
    folder = tempfile.mkdtemp(prefix="kairos-")  # only this user can open it
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # the environment that Snakemake will give to the jobs' commands, see `_process_conditions`
    environment = dict(os.environ)
    environment |= dict.fromkeys(_THREAD_VARIABLES, str(threads))
    environment |= dict.fromkeys(_FOLDER_VARIABLES, tempfile.gettempdir())
    with suppress(OSError), socket.socket(socket.AF_UNIX) as listener:  # an OSError: the jobs run without a server
        os.close(os.pidfd_open(os.getpid()))  # raises OSError before Linux 5.3, where guardians could not work
        listener.bind(f"{folder}/socket")
        listener.listen(_MOST_WAITING)
        code = _SERVER_CODE.format(listener.fileno(), str(config), sorted(set(forked_stages)), folder)
        server = subprocess.Popen(
            [sys.executable, "-P", "-c", code],  # -P: sys.path without the working directory
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            pass_fds=[listener.fileno()],
            process_group=0,  # signals of a terminal reach jobs through their clients, not directly
        )
        _servers.append(server)
        os.environ[_SOCKET_VARIABLE] = f"{folder}/socket"


# ----------------------------------------------------------------------------------------------------- in the client


def run_on_server(argv: list[str]) -> int | None:
    """Run a command line in a fork of the server, and forward this process's signals to it.

    `_SOCKET_VARIABLE` is deleted from the environment. If the server accepts the command, the function sets signal
    handlers, which stay, and waits for the end of the job. Signals that this process ignores are not forwarded; the job
    ignores them.

    Args:
        argv: arguments of ``kairos``.

    Returns:
        The job's exit status, or 128 plus the signal that ended the job; 137, as for SIGKILL, if the guardian ends
        without an answer. None if the command has to run in this process: there is no server, the server does not
        accept the command, or this process has no standard input.
    """
    path = os.environ.pop(_SOCKET_VARIABLE, None)
    if path is None or sys.stdin is None:
        return None
    ignored_signals = [number for number in _SIGNALS if signal.getsignal(number) == signal.SIG_IGN]
    request: Request = {
        "conditions": _process_conditions(),
        "sys": [sys.argv, sys.path],
        "usage": resource_usage.usage_so_far(),
        "ignored": ignored_signals,
        "argv": argv,
    }
    with socket.socket(socket.AF_UNIX) as server:
        if not _send_request(server, path, request):
            return None

        def forward(number: int, frame: object) -> None:
            """Send the number of a signal to the guardian."""
            with suppress(OSError):
                server.send(bytes([number]))
            if number == signal.SIGTSTP:  # the handler replaces the signal's effect: stop this process as well
                os.kill(os.getpid(), signal.SIGSTOP)

        for number in set(_SIGNALS) - set(ignored_signals):
            signal.signal(number, forward)
        answer = b""
        with suppress(OSError):
            answer = server.recv(4)  # waits for the end of the job
    if answer:
        status = int.from_bytes(answer, "big", signed=True)
    else:  # the guardian was killed
        status = -signal.SIGKILL
    return status if status >= 0 else 128 - status  # a negative status is the number of a signal


def _send_request(server: socket.socket, path: str, request: Request) -> bool:
    """Connect to the server at `path`, and send a request and this process's standard streams; return True if accepted.

    The function waits for the answer. The result is False if the server closes the connection without an answer, and
    after every error of the connection.
    """
    standard_streams = [0, 1, 2]
    try:
        server.connect(path)
        socket.send_fds(server, [_REQUEST], standard_streams)
        server.sendall(json.dumps(request).encode() + b"\n")
        return bool(server.recv(len(_ACCEPTED)))  # empty if the server closes the connection
    except OSError:
        return False


# ----------------------------------------------------------------------------------------------------- in the server


def serve(main: Callable[[list[str]], int], listener: int, config: str, stages: list[str], folder: str) -> NoReturn:
    """Import the modules for the jobs of some stages, and fork a job for each client until the controller has ended.

    The function does not return: it ends the server's process with status 0, and each job's process with the job's exit
    status. A server that must not fork, because it uses a GPU or has further threads, ends after the imports.

    The time of the imports is recorded, see `_import_modules`. If the experiment is portable, environment variables
    that limit CPU instructions are set before.

    Args:
        main: function that runs a command line and returns its exit status.
        listener: file descriptor of the listening socket.
        config: file of the frozen experiment.
        stages: stages whose modules are imported.
        folder: folder of the socket, which the server deletes at its end.
    """
    gc.disable()  # imports are faster without it; in a job `kairos.resource_usage.end_startup` enables it again
    if portable.is_requested(Namespace(config=config)):
        portable.set_variables()
    conditions = _process_conditions()  # with these variables, and without the signals blocked below: as in clients
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # a job's first signals wait until its handlers are set
    _import_modules(config, stages)
    # a fork could not use a GPU that is initialised, and would lack other threads
    thread_count = len(os.listdir("/proc/self/task"))
    can_fork = thread_count == 1 and not sys.modules["torch"].cuda.is_available()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended guardians are removed without a wait
    with socket.socket(fileno=listener) as clients:  # closed at the end in a job's process too
        request = _fork_jobs(clients, conditions) if can_fork else None
        if request is None:  # this process is the server
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(0)
    _run_job(main, request)


def _fork_jobs(clients: socket.socket, conditions: list[Any]) -> Request | None:
    """Accept clients, and fork a guardian and a job for each acceptable request.

    The job's process has the standard streams of its client. A request is not accepted if it is faulty, if the client's
    process differs in `conditions`, or if the source file of a module imported at the start has changed. Its connection
    is closed without an answer.

    Returns:
        The request, in the process of its job. None in the server when the controller has ended.
    """
    source_times = _source_times()
    controller_pipe = 0  # standard input, which becomes readable when the controller ends
    while True:
        readable = _wait_until_readable(controller_pipe, clients.fileno())
        if controller_pipe in readable:
            return None
        with suppress(OSError, ValueError, KeyError, TypeError):  # a faulty request is not accepted
            client, _ = clients.accept()
            with client:
                request = _fork_job(client, conditions, source_times)
                if request is not None:  # this process is the job's
                    return request


def _fork_job(client: socket.socket, conditions: list[Any], source_times: dict[str, int]) -> Request | None:
    """Receive a request, and fork a guardian and a job if it is acceptable, see `_fork_jobs`.

    The job's process has the client's standard streams.

    Returns:
        The request, in the process of its job. None in the server. The guardian's process never returns.

    Raises:
        OSError, ValueError, KeyError, TypeError: the connection or the request is faulty.
    """
    _, streams, _, _ = socket.recv_fds(client, len(_REQUEST), maxfds=3)
    try:
        request: Request = json.loads(client.makefile(encoding="utf-8").readline())
        # the server may have imported more modules since, but no file of the first ones may have changed
        is_unchanged = source_times.items() <= _source_times().items()
        is_acceptable = is_unchanged and request["conditions"] == conditions
        if is_acceptable and os.fork() == 0:  # 0: in the new process, the guardian
            _guard(client)  # forks the job, and returns in the job's process alone
            for number, stream in enumerate(streams):  # standard input, output and error
                os.dup2(stream, number)
            return request
        return None
    finally:  # a stream that stays open would keep its reader, such as `tee`, from ending
        for stream in streams:
            os.close(stream)


def _wait_until_readable(*descriptors: int) -> list[int]:
    """Wait until data can be read from a file descriptor, or its other end is closed; return all such descriptors."""
    readable, _, _ = select.select(descriptors, [], [])
    return readable


def _run_job(main: Callable[[list[str]], int], request: Request) -> NoReturn:
    """Run a client's command line in this process, with the client's arguments, paths and ignored signals.

    The signals of `_SIGNALS`, which the server has blocked, are unblocked; those that the client does not ignore have
    Python's default effect. The client's resource usage is added to the job's. The process ends with the exit status
    of the command line.
    """
    # as Python buffers at its start. TextIO, the declared type of sys.stdout, lacks the method
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    arguments, paths = request["sys"]
    sys.argv = arguments
    sys.path[:] = paths
    resource_usage.inherited.update(request["usage"])
    for number in _SIGNALS:
        if number in request["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        elif number == signal.SIGINT:  # as Python does at its start
            signal.signal(number, signal.default_int_handler)
        else:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    process_exit.end_process(main(request["argv"]))


def _guard(client: socket.socket) -> None:
    """Fork the job, and return in the job's process alone; this process becomes the job's guardian.

    The guardian accepts the request, forwards the client's signals to the job, sends the job's exit status to the
    client at the end, and ends. If the client ends first, the job is killed; it gets SIGTERM if its request was not
    accepted yet. If the server ends first, the guardian is killed. If the guardian ends first, the job gets SIGTERM.
    """
    process_exit.die_with_parent(signal.SIGKILL)
    guardian = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the server ignores it, and then waitpid returns no status
    with suppress(OSError):  # the client has ended, or no process can be started
        job = os.fork()
        if job == 0:
            process_exit.die_with_parent(signal.SIGTERM)
            if os.getppid() == guardian:
                return
            os._exit(1)  # the guardian ended before `die_with_parent` took effect
        job_descriptor = os.pidfd_open(job)  # becomes readable when the job ends
        client.sendall(_ACCEPTED)
        while job_descriptor not in _wait_until_readable(client.fileno(), job_descriptor):
            message = client.recv(1)  # one byte, the number of a signal; empty if the client has ended
            signal_number = message[0] if message else signal.SIGKILL
            os.kill(job, signal_number)
        _, wait_status = os.waitpid(job, 0)
        status = os.waitstatus_to_exitcode(wait_status)  # negative: number of the signal that ended the job
        client.sendall(status.to_bytes(4, "big", signed=True))
    os._exit(0)


def _import_modules(config: str, stages: list[str]) -> None:
    """Import the modules of kairos, kairos_timesteps and torch that some stages of an experiment need.

    The code of the stages is hashed, too, so that jobs do not hash it again.

    Other modules, such as plugins, are not imported, except by these modules. The wall-clock and CPU time of this
    process so far are written to ``timing/preload.json`` of the results folder. `config` is the experiment file.
    """
    from kairos.config import load
    from kairos.stage_keys import hash_stage_code, list_modules, list_sections
    from kairos.stages import list_stages

    experiment = load(config)
    names = {"kairos.training.run", "kairos.staging", "kairos.tracking.live"}
    if experiment.autoencoder.kind != "none" and not _AUTOENCODER_STAGES.isdisjoint(stages):
        names.add("kairos.autoencoders.train")  # imports diffusers
    rows = list_stages(experiment)
    for stage in set(stages) - {"measure", "analyse"}:  # analyses need nothing more than a training run does
        for method in experiment.methods:
            sections = list_sections(experiment, rows[stage], method)
            names.update(list_modules(rows[stage], sections))
            hash_stage_code(rows[stage], sections)
    for name in sorted(names):
        # other imports, such as imports of plugins, could compute something
        if name.startswith(("torch.", "kairos.", "kairos_timesteps.")):
            importlib.import_module(name)
    resource_usage.write_record(Path("results", experiment.experiment, "timing", "preload.json"), "preload")


def _process_conditions() -> list[Any]:
    """Return the state of this process that a client and the server must have in common, as values of JSON.

    The values are Python's prefix, ``sys.path`` without the script's folder, the environment without
    `_SHELL_VARIABLES`, the working directory, the umask and the blocked signals. The function does not change them.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _SHELL_VARIABLES}
    umask = os.umask(0)  # can only be read by setting it
    os.umask(umask)
    blocked_signals = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))  # blocks no further signal
    first_path = 0 if sys.flags.safe_path else 1  # without safe_path, sys.path begins with the script's folder
    return [sys.prefix, sys.path[first_path:], environment, os.getcwd(), umask, blocked_signals]


def _source_times() -> dict[str, int]:
    """Return the modification time of the file of every imported module that has one, in nanoseconds, by path.

    Raises:
        OSError: a file has been deleted since its import.
    """
    specs = [getattr(module, "__spec__", None) for module in list(sys.modules.values())]
    files = [spec.origin for spec in specs if spec is not None and spec.has_location]
    return {file: os.stat(file).st_mtime_ns for file in files}
