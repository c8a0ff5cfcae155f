"""Several processes for one training run: torchrun on this machine, or on every machine of a SLURM job.

    kairos train             the launcher, which runs torchrun's agent
      ├── kairos train       rank 0, which writes the files
      └── kairos train       rank 1 ...

With several machines the first `kairos train` starts a launcher on each of them through srun. A launcher forwards
requests to stop to its ranks, and they die with it. On each machine the first rank that fails reports its error, and
the others end silently. torchrun's error files cannot show which rank failed first: their times are whole seconds.
"""

import atexit
import ctypes
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kairos.progress import log
from kairos.training.job import SIGNALS, STATUS, StoppedEarly
from kairos_timesteps.errors import KairosError

if TYPE_CHECKING:
    from kairos.training.settings import TrainingConfig

_FOLDER = "KAIROS_RANKS"  # variable: folder of a launcher and its ranks, where the first rank to fail writes its number
_ADDRESS = "KAIROS_RENDEZVOUS"  # variable: address at which the launchers of several machines meet
_LOST_OTHERS = 76  # exit status of a rank that failed because another rank ended
_ERROR_REPORTED = (1, 2)  # exit statuses of a rank that has reported its error
_PR_SET_PDEATHSIG = 1  # of Linux's prctl
# gloo's messages begin with a line of its transport, such as [.../gloo/gloo/transport/tcp/pair.cc:561]
_GLOO_TEXT = re.compile(
    r"\[\S*/gloo/transport/\S+:\d+\]|Gloo connectFullMesh failed|Application timeout caused pair closure"
)


def local_rank() -> int | None:
    """Return the number of this process among the ranks of this machine; None if torchrun has not started it."""
    number = os.environ.get("LOCAL_RANK")
    return None if number is None else int(number)


def is_reporting_process() -> bool:
    """Return True if this process reports for the training run: rank 0, a launcher, or the only process."""
    return _FOLDER not in os.environ or os.environ.get("RANK", "0") == "0"


def die_with_launcher() -> None:
    """Make this rank die with its launcher; otherwise it would train at the same time as its successor."""
    die_with_parent()
    launcher = os.environ.get(_FOLDER, "").rpartition("-")[2]
    if launcher not in ("", str(os.getppid())):
        os._exit(1)  # the launcher has ended already


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Make the kernel send a signal to this process when its parent process ends; does nothing outside of Linux."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def is_first_failure(error: BaseException) -> bool:
    """Return True if this process is the one to report why the training run failed.

    A single process always reports. Of several ranks the first to fail reports, unless its error is one of
    communication, which another rank has caused.
    """
    folder = os.environ.get(_FOLDER)
    if local_rank() is None or folder is None:
        return True
    if _is_communication_error(error):
        return False
    with suppress(FileExistsError, FileNotFoundError), open(Path(folder) / "failed", "x") as file:
        file.write(str(local_rank()))
    with suppress(OSError):
        return (Path(folder) / "failed").read_text() == str(local_rank())
    return False


def _is_communication_error(error: BaseException) -> bool:
    """Return True if torch.distributed or gloo raised the error, which then has its cause in another rank."""
    names = {f"{kind.__module__}.{kind.__name__}" for kind in type(error).__mro__}
    if "torch.distributed.DistError" in names:
        return True
    # gloo has no error class: torch raises a plain RuntimeError with gloo's text
    return type(error) is RuntimeError and _GLOO_TEXT.match(str(error)) is not None


@contextmanager
def report_first_failure() -> Iterator[None]:
    """Context manager of a rank's work: the first error of all ranks is raised, other ranks end silently."""
    try:
        yield
    except StoppedEarly:
        raise
    except BaseException as error:
        if local_rank() is not None and os.environ.get(_FOLDER):
            if not is_first_failure(error):
                time.sleep(1)  # so that torchrun finds the failed rank before this one
                os._exit(_LOST_OTHERS)
            atexit.register(os._exit, 1)  # exit after the message; torch would wait for the other ranks
        raise


def launch(training: "TrainingConfig") -> None:
    """Run this command once in every process of the training run, and wait for the processes.

    Args:
        training: section `training` of the experiment.

    Raises:
        StoppedEarly: a stop was requested, and the ranks have stopped.
        SystemExit: a rank has failed and reported its error.
        KairosError: a rank was killed, or the SLURM job has too few machines.
    """
    if training.nodes > 1 and _ADDRESS not in os.environ:
        _launch_machines(training.nodes)
    else:
        _launch_ranks(training)


def _launch_ranks(training: "TrainingConfig") -> None:
    """Run the ranks of this machine by torchrun, and wait for them."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    rendezvous = ["--standalone", "--local-addr", "127.0.0.1"]
    address = os.environ.get(_ADDRESS)
    if address:
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", address, "--rdzv-id", address]
        rendezvous += ["--local-addr", socket.gethostname()]
    ranks = ["--nnodes", str(training.nodes), "--nproc-per-node", str(training.processes // training.nodes)]
    defaults = {
        "OMP_NUM_THREADS": str(training.threads),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",  # seconds for the other ranks to end after one has failed
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    logging.disable(logging.CRITICAL)  # torchrun logs every failure at length
    with tempfile.TemporaryDirectory(prefix="kairos-", suffix=f"-{os.getpid()}") as folder:
        os.environ[_FOLDER] = folder
        options = [*rendezvous, *ranks, "--log-dir", folder, "--signals-to-handle", "SIGQUIT"]
        with _forward_signals(_signal_ranks, lambda: os._exit(1)) as received:
            try:
                run.main([*options, "-m", "kairos", *sys.argv[1:]])
            except ChildFailedError as error:
                rank, failure = error.get_first_failure()
                _raise_for_exit_status(rank, failure.exitcode, stop_requested=bool(received))


def _raise_for_exit_status(rank: int, status: int, stop_requested: bool) -> None:
    """End the launcher like the rank that ended first.

    Args:
        rank: number of that rank.
        status: its exit status; negative: number of the signal that killed it.
        stop_requested: the launcher has forwarded a request to stop.

    Raises:
        SystemExit, StoppedEarly, KairosError: always one of them, as in `launch`.
    """
    if status in _ERROR_REPORTED:
        raise SystemExit(1)
    if status == STATUS or stop_requested:
        raise StoppedEarly("")
    if status == _LOST_OTHERS:
        problem = "lost the connection to the others"
    elif status < 0:
        problem = f"was killed by {signal.Signals(-status).name}"
    else:
        problem = f"ended with status {status}"
    raise KairosError(
        f"process {rank} of the training run {problem}; the same command resumes from the last checkpoint"
    )


@contextmanager
def _forward_signals(forward: Callable[[], None], end: Callable[[], Any]) -> Iterator[list[str]]:
    """Forward requests to stop inside the block; a second SIGINT ends everything at once.

    Args:
        forward: asks the ranks to stop.
        end: ends the ranks at once.

    Yields:
        Names of the signals received so far.
    """
    received: list[str] = []

    def handler(number: int, frame: object) -> None:
        name = signal.Signals(number).name
        if name == "SIGINT" and name in received:
            log("kairos: interrupted; the last good state is kept")
            end()
        received.append(name)
        forward()

    previous = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield received
    finally:
        for number, previous_handler in previous.items():
            signal.signal(number, previous_handler)


def _signal_ranks() -> None:
    """Send SIGUSR1, a request to stop, to every child process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGUSR1)


def _launch_machines(nodes: int) -> None:
    """Run a launcher on every machine of the SLURM job by srun, and wait for them."""
    job, job_nodes = os.environ.get("SLURM_JOB_ID"), int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    if job is None or job_nodes < nodes:
        location = f"a SLURM job of {job_nodes} machines" if job else "no SLURM job"
        raise KairosError(
            f"training.nodes: got {nodes} in {location}, allowed: a SLURM job of {nodes} machines, or nodes: 1"
        )
    with socket.socket() as free_socket:
        free_socket.bind(("", 0))
        address = f"{socket.gethostname()}:{free_socket.getsockname()[1]}"
    cpus = re.match(r"\d+", os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    command = [
        "srun", "--jobid", job, "--overlap", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1",
        f"--cpus-per-task={cpus[0] if cpus else 1}", "--cpu-bind=none", "--wait=60", "--quiet",
        sys.executable, "-m", "kairos", *sys.argv[1:],
    ]  # fmt: skip
    # srun would take the SLURM_* variables of this process's job step for options of the new step
    kept = ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_CONF", "SLURM_JOB_END_TIME", "SLURM_CLUSTER_NAME")
    environment = {name: value for name, value in os.environ.items() if name in kept or not name.startswith("SLURM_")}
    environment[_ADDRESS] = address
    srun = subprocess.Popen(command, env=environment, process_group=0, preexec_fn=die_with_parent)
    with srun, _forward_signals(lambda: srun.send_signal(signal.SIGUSR1), srun.kill) as received:
        status = srun.wait()
    if status == STATUS or (received and status):
        raise StoppedEarly("")
    if status:
        raise SystemExit(1)
