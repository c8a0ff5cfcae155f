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

# environment variables
_FOLDER = "KAIROS_RANKS"  # folder in which the first rank to fail writes its number
_ADDRESS = "KAIROS_RENDEZVOUS"  # address where the launchers of several machines meet
_LOST_OTHERS = 76  # exit status of a rank that failed because another rank ended
_ERROR_REPORTED = (1, 2)  # exit statuses of a rank that has reported its error
_PR_SET_PDEATHSIG = 1  # option of Linux's prctl: signal that the kernel sends when the parent process ends
# srun would read the other SLURM_* variables, which describe this process's job step, as options of the new step
_KEPT_SLURM_VARIABLES = ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_CONF", "SLURM_JOB_END_TIME", "SLURM_CLUSTER_NAME")
# gloo's messages begin with a line of its transport, such as [.../gloo/gloo/transport/tcp/pair.cc:561]
_GLOO_TEXT = re.compile(
    r"\[\S*/gloo/transport/\S+:\d+\]|Gloo connectFullMesh failed|Application timeout caused pair closure"
)


def local_rank() -> int | None:
    """Return the index of this process among the ranks of this machine; None if torchrun has not started it."""
    number = os.environ.get("LOCAL_RANK")
    return None if number is None else int(number)


def is_reporting_process() -> bool:
    """Return True if this process reports for a training run: rank 0 of all machines, a launcher or a lone process."""
    return local_rank() is None or os.environ.get("RANK", "0") == "0"


def die_with_launcher() -> None:
    """Make this rank die with its launcher; otherwise it would train at the same time as its successor.

    If the launcher has ended already, this process ends at once with status 1. A rank that kairos did not launch dies
    with its parent process, such as a user's torchrun.
    """
    die_with_parent()
    # the launcher's folder ends with the launcher's process id, such as /tmp/kairos-x7a2-4711
    launcher_id = os.environ.get(_FOLDER, "").rpartition("-")[2]
    has_launcher = launcher_id != ""
    if has_launcher and launcher_id != str(os.getppid()):
        os._exit(1)  # the launcher ended before `die_with_parent`, so this rank has another parent


def die_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Make the kernel send a signal to this process when its parent ends; on systems other than Linux do nothing."""
    with suppress(OSError, AttributeError):  # the kernel rejects the request; not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal_number)


def is_first_failure(error: BaseException) -> bool:
    """Return True if this process is the one that should report why the training run failed.

    A process without a launcher always reports. A rank never reports an error of communication, which another rank has
    caused. Otherwise the first rank of a machine that calls this function reports, now and at later calls. It creates
    the file ``failed`` in the launcher's folder with its number. If the folder is gone, no rank reports.
    """
    folder = os.environ.get(_FOLDER)
    if local_rank() is None or folder is None:
        return True
    if _is_communication_error(error):
        return False
    failed_file = Path(folder) / "failed"
    this_rank = str(local_rank())
    # mode "x" creates the file, and fails if another rank has created it: the first to fail writes its number.
    # Without the folder, the launcher has ended.
    with suppress(FileExistsError, FileNotFoundError), open(failed_file, "x") as file:
        file.write(this_rank)
    with suppress(OSError):
        return failed_file.read_text() == this_rank
    return False


def _is_communication_error(error: BaseException) -> bool:
    """Return True if torch.distributed or gloo raised the error, so that another rank has caused it."""
    # class names instead of classes, so that this module need not import torch; base classes included
    class_names = {f"{base.__module__}.{base.__name__}" for base in type(error).__mro__}
    if "torch.distributed.DistError" in class_names:
        return True
    # gloo has no error class: torch raises a plain RuntimeError that begins with gloo's text
    return type(error) is RuntimeError and _GLOO_TEXT.match(str(error)) is not None


@contextmanager
def report_first_failure() -> Iterator[None]:
    """Raise the error of a rank's work inside the block if this rank failed first; otherwise end the rank silently.

    A process without a launcher raises every error, and all processes raise `StoppedEarly`. A rank that raises exits
    with status 1 without waiting for the other ranks. A rank that did not fail first ends after 1 s with status 76.
    """
    try:
        yield
    except StoppedEarly:
        raise
    except BaseException as error:
        has_launcher = local_rank() is not None and bool(os.environ.get(_FOLDER))
        if not has_launcher:
            raise
        if not is_first_failure(error):
            time.sleep(1)  # so that torchrun finds the failed rank before this one
            os._exit(_LOST_OTHERS)
        atexit.register(os._exit, 1)  # exit after the message; torch would wait for the other ranks
        raise


def launch(training: "TrainingConfig") -> None:
    """Run this command once in every process of the training run, and wait for the processes.

    With several machines, srun runs this command again on each machine; there this function starts the machine's ranks.

    Args:
        training: section `training` of the experiment.

    Raises:
        StoppedEarly: a stop was requested, and the ranks have stopped; its reason is empty, because a rank logs it.
        SystemExit: a rank has failed and reported its error.
        KairosError: a rank was killed, or the SLURM job has too few machines.
    """
    started_by_srun = _ADDRESS in os.environ
    if training.nodes > 1 and not started_by_srun:
        _launch_machines(training.nodes)
    else:
        _launch_ranks(training)


def _launch_ranks(training: "TrainingConfig") -> None:
    """Run this command in the ranks of this machine by torchrun, and wait for them; errors as in `launch`.

    Environment variables for the ranks stay set and Python's logging stays off afterwards.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # neither change is undone, because this process ends after its ranks
    _set_rank_variables(training.threads)
    logging.disable(logging.CRITICAL)  # torchrun logs every failure at length
    # folder for the file of `is_first_failure` and for torchrun's logs; `die_with_launcher` reads the process id at
    # the end of its name
    with tempfile.TemporaryDirectory(prefix="kairos-", suffix=f"-{os.getpid()}") as folder:
        os.environ[_FOLDER] = folder
        options = [*_torchrun_options(training), "--log-dir", folder]
        with _forward_signals(forward=_signal_ranks, end=_end_process) as received_signals:
            try:
                run.main([*options, "-m", "kairos", *sys.argv[1:]])
            except ChildFailedError as error:
                rank, failure = error.get_first_failure()
                _raise_for_exit_status(rank, failure.exitcode, stop_requested=bool(received_signals))


def _torchrun_options(training: "TrainingConfig") -> list[str]:
    """Return torchrun's options for the numbers of machines and ranks, their rendezvous and the handled signals.

    The launchers meet at the address in environment variable `_ADDRESS`, which `_launch_machines` sets. Without it,
    this machine is treated as the only one. The options make torchrun handle SIGQUIT alone. The caller ensures that
    the number of processes is a multiple of the number of machines.
    """
    address = os.environ.get(_ADDRESS)
    # --local-addr: by default it is the machine's full name, which other processes may not be able to resolve
    if address:
        # the address is also the id of the rendezvous, which has to be equal on all machines
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", address, "--rdzv-id", address]
        rendezvous += ["--local-addr", socket.gethostname()]
    else:  # a single machine
        rendezvous = ["--standalone", "--local-addr", "127.0.0.1"]
    ranks_per_node = training.processes // training.nodes
    ranks = ["--nnodes", str(training.nodes), "--nproc-per-node", str(ranks_per_node)]
    # by default torchrun kills the ranks on SIGTERM, SIGINT and SIGHUP, before they can write a checkpoint;
    # of its defaults only SIGQUIT is kept
    return [*rendezvous, *ranks, "--signals-to-handle", "SIGQUIT"]


def _set_rank_variables(threads: int) -> None:
    """Set environment variables that the ranks inherit, such as OMP_NUM_THREADS; variables already set are kept."""
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",  # seconds for the other ranks to end after one has failed
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _end_process() -> None:
    """End this launcher at once, without its clean-up; its ranks die with it, see `die_with_launcher`."""
    os._exit(1)


def _raise_for_exit_status(rank: int, status: int, stop_requested: bool) -> None:
    """Raise the launcher's exception for the exit status of the rank that ended first, see `launch`.

    A reported error has priority over a request to stop, which has priority over every other status. A negative status
    is minus the number of the signal that killed the rank. `stop_requested` is True if the launcher has forwarded a
    request to stop.

    Raises:
        SystemExit, StoppedEarly, KairosError: always one of them.
    """
    if status in _ERROR_REPORTED:
        raise SystemExit(1)
    if status == STATUS or stop_requested:
        raise StoppedEarly("")
    if status == _LOST_OTHERS:
        problem = "lost the connection to the others"
    elif status < 0:
        try:
            problem = f"was killed by {signal.Signals(-status).name}"
        except ValueError:  # most real-time signals have no name
            problem = f"was killed by signal {-status}"
    else:
        problem = f"ended with status {status}"
    raise KairosError(
        f"process {rank} of the training run {problem}; the same command resumes from the last checkpoint"
    )


@contextmanager
def _forward_signals(forward: Callable[[], None], end: Callable[[], Any]) -> Iterator[list[str]]:
    """Call `forward` for each SIGTERM, SIGUSR1 and SIGINT inside the block; a repeated SIGINT calls `end` first.

    The previous handlers are restored after the block.

    Args:
        forward: requests the ranks to stop; called after every signal.
        end: ends the ranks at once; called before `forward` if SIGINT is repeated. If it returns, the block continues.

    Yields:
        Names of the signals received so far, in a list that grows.
    """
    received: list[str] = []

    def handle(number: int, frame: object) -> None:
        name = signal.Signals(number).name
        if name == "SIGINT" and name in received:
            log("kairos: interrupted; the last good state is kept")
            end()
        received.append(name)
        forward()

    previous_handlers = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield received
    finally:
        for number, previous_handler in previous_handlers.items():
            signal.signal(number, previous_handler)


def _signal_ranks() -> None:
    """Send SIGUSR1, a request to stop, to every child process that this process's main thread has started."""
    # Linux lists the children in /proc
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for child in children:
        with suppress(ProcessLookupError):  # it has ended already
            os.kill(int(child), signal.SIGUSR1)


def _launch_machines(nodes: int) -> None:
    """Run this command again on `nodes` machines of the SLURM job by srun, and wait for it to end on all.

    On each machine the command is a launcher, see `launch`. Environment variables of the present job step are removed.

    Raises:
        KairosError: there is no SLURM job, or it has fewer machines than `nodes`.
        StoppedEarly: a stop was requested, and the ranks have stopped.
        SystemExit: a launcher, or srun itself, has failed and reported its error.
    """
    command = [*_srun_command(nodes), sys.executable, "-m", "kairos", *sys.argv[1:]]
    environment = {}
    for name, value in os.environ.items():
        if name in _KEPT_SLURM_VARIABLES or not name.startswith("SLURM_"):
            environment[name] = value
    environment[_ADDRESS] = _free_address()
    # a process group of its own: a terminal's Ctrl-C reaches the launchers only as a forwarded SIGUSR1
    srun = subprocess.Popen(command, env=environment, process_group=0, preexec_fn=die_with_parent)

    def forward() -> None:
        srun.send_signal(signal.SIGUSR1)

    with srun, _forward_signals(forward=forward, end=srun.kill) as received_signals:
        status = srun.wait()
    if status == 0:
        return
    if status == STATUS or received_signals:
        raise StoppedEarly("")
    raise SystemExit(1)


def _srun_command(nodes: int) -> list[str]:
    """Return srun with its options for one process on each of `nodes` machines of this SLURM job.

    A process gets all CPUs that the job has on its first machine, or 1 if SLURM does not set their number.

    Raises:
        KairosError: there is no SLURM job, or it has fewer machines.
    """
    job = os.environ.get("SLURM_JOB_ID")
    job_nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))  # SLURM may not set it
    if job is None or job_nodes < nodes:
        location = f"a SLURM job of {job_nodes} machines" if job else "no SLURM job"
        raise KairosError(
            f"training.nodes: got {nodes} in {location}, allowed: a SLURM job of {nodes} machines, or nodes: 1"
        )
    first_number = re.match(r"\d+", os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))  # of 64(x2): 64 on 2 machines
    cpu_count = first_number[0] if first_number else "1"
    # --overlap: use CPUs of this process's step; --wait: seconds after the first launcher's end to kill the others
    return [
        "srun", "--jobid", job, "--overlap", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1",
        f"--cpus-per-task={cpu_count}", "--cpu-bind=none", "--wait=60", "--quiet",
    ]  # fmt: skip


def _free_address() -> str:
    """Return this host with a port that is free now, such as ``node1:41234``; the port is not reserved."""
    with socket.socket() as free_socket:
        free_socket.bind(("", 0))  # port 0: the kernel selects a free one
        port = free_socket.getsockname()[1]
    return f"{socket.gethostname()}:{port}"
