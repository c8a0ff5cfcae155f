"""Several processes for one training: torchrun on this machine, or on every machine of a SLURM job.

    kairos train             the launcher; torchrun's agent runs in it
      ├── kairos train       rank 0, the one that writes
      └── kairos train       rank 1 ...

With several machines the first `kairos train` starts a launcher on each of them through srun. A launcher hands the
signals that ask to leave on to its ranks, and they die with it. Of the ranks of a machine the first that fails says
why, and the others say nothing. Which one that is, torchrun's error files could not tell: they have whole seconds.
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

from kairos.progress import say
from kairos.training.job import SIGNALS, STATUS, StoppedEarly
from kairos_timesteps.errors import KairosError

if TYPE_CHECKING:
    from kairos.training.settings import TrainingConfig

_FOLDER = "KAIROS_RANKS"  # of a launcher and its ranks: where the first that fails leaves its number
_ADDRESS = "KAIROS_RENDEZVOUS"  # where the launchers of several machines meet
_LOST = 76  # status of a rank that lost the others; one of those knows why
_SAID = (1, 2)  # of one that has said why itself
_PR_SET_PDEATHSIG = 1
# beginnings of gloo's messages: a line of its transport, such as [.../gloo/gloo/transport/tcp/pair.cc:561]
_GLOO_TEXT = re.compile(
    r"\[\S*/gloo/transport/\S+:\d+\]|Gloo connectFullMesh failed|Application timeout caused pair closure"
)


def local_rank() -> int | None:
    """Number of this process among the ranks of this machine; None where torchrun has not started it."""
    number = os.environ.get("LOCAL_RANK")
    return None if number is None else int(number)


def is_reporting_process() -> bool:
    """Return True if this process reports for the training run: rank 0, a launcher, or the only process."""
    return _FOLDER not in os.environ or os.environ.get("RANK", "0") == "0"


def die_with_launcher() -> None:
    """Die with the launcher: a rank that lived on would train beside its successor."""
    die_with_parent()
    if os.environ.get(_FOLDER, "").rpartition("-")[2] not in ("", str(os.getppid())):
        os._exit(1)  # the launcher is gone already


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Get a signal when the process that has started this one ends."""
    with suppress(OSError, AttributeError):  # Linux alone has it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def is_first_failure(error: BaseException) -> bool:
    """Return True if this process is the one to report why the training run failed.

    A single process always reports. Of several ranks the first to fail does; an error of communication never counts.
    """
    folder = os.environ.get(_FOLDER)
    if local_rank() is None or folder is None:
        return True
    if _is_of_communication(error):
        return False
    with suppress(FileExistsError, FileNotFoundError), open(Path(folder) / "failed", "x") as file:
        file.write(str(local_rank()))
    with suppress(OSError):
        return (Path(folder) / "failed").read_text() == str(local_rank())
    return False


def _is_of_communication(error: BaseException) -> bool:
    """Return True if torch.distributed or gloo raised the error, which then has its cause in another rank."""
    names = {f"{kind.__module__}.{kind.__name__}" for kind in type(error).__mro__}
    if "torch.distributed.DistError" in names:
        return True
    # gloo has no error class: torch raises a plain RuntimeError with gloo's text
    return type(error) is RuntimeError and _GLOO_TEXT.match(str(error)) is not None


@contextmanager
def report_first_failure() -> Iterator[None]:
    """Around the work of a rank: the first error of all goes on its way to the user, the others end silently."""
    try:
        yield
    except StoppedEarly:
        raise
    except BaseException as error:
        if local_rank() is not None and os.environ.get(_FOLDER):
            if not is_first_failure(error):
                time.sleep(1)  # the cause's own process is found before this one
                os._exit(_LOST)
            atexit.register(os._exit, 1)  # when the message is out; torch would wait for the others
        raise


def launch(training: "TrainingConfig") -> None:
    """Run this command once in every process of the training.

    Raises:
        StoppedEarly: it was asked to leave, and has.
        SystemExit: a rank has failed and said why.
        KairosError: a rank was killed, or there are not enough machines.
    """
    if training.nodes > 1 and _ADDRESS not in os.environ:
        _launch_machines(training.nodes)
    else:
        _launch_ranks(training)


def _launch_ranks(training: "TrainingConfig") -> None:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    address = os.environ.get(_ADDRESS)
    where = ["--standalone", "--local-addr", "127.0.0.1"]
    if address:
        where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", address, "--rdzv-id", address]
        where += ["--local-addr", socket.gethostname()]
    ranks = ["--nnodes", str(training.nodes), "--nproc-per-node", str(training.processes // training.nodes)]
    usual = {"OMP_NUM_THREADS": str(training.threads), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    usual["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "5"  # seconds, in which the others end where one has failed
    os.environ |= usual | os.environ
    logging.disable(logging.CRITICAL)  # torchrun's, which tell of every failure at length
    with tempfile.TemporaryDirectory(prefix="kairos-", suffix=f"-{os.getpid()}") as folder:
        os.environ[_FOLDER] = folder
        options = [*where, *ranks, "--log-dir", folder, "--signals-to-handle", "SIGQUIT"]
        with _handing_on(_signal_ranks, lambda: os._exit(1)) as asked:
            try:
                run.main([*options, "-m", "kairos", *sys.argv[1:]])
            except ChildFailedError as error:
                rank, failure = error.get_first_failure()
                _explain(asked, rank, failure.exitcode)


def _explain(asked: list[str], rank: int, status: int) -> None:
    """Turn the end of the rank that ended first into that of the launcher."""
    if status in _SAID:
        raise SystemExit(1)
    if status == STATUS or asked:
        raise StoppedEarly("")
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    if status == _LOST:
        how = "lost the others"
    raise KairosError(f"process {rank} of the training {how}; the same command goes on from the last checkpoint")


@contextmanager
def _handing_on(hand_on: Callable[[], None], end: Callable[[], Any]) -> Iterator[list[str]]:
    """Hand on the signals that ask to leave; gives their names. A second SIGINT ends everything at once."""
    asked: list[str] = []

    def handler(number: int, frame: object) -> None:
        name = signal.Signals(number).name
        if name == "SIGINT" and name in asked:
            say("kairos: interrupted; the last good state is in place")
            end()
        asked.append(name)
        hand_on()

    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield asked
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _signal_ranks() -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGUSR1)


def _launch_machines(nodes: int) -> None:
    job, have = os.environ.get("SLURM_JOB_ID"), int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    if job is None or have < nodes:
        place = f"a SLURM job of {have} machines" if job else "no SLURM job"
        raise KairosError(f"training.nodes: got {nodes} in {place}, allowed: a job of as many machines, or nodes: 1")
    with socket.socket() as free:
        free.bind(("", 0))
        address = f"{socket.gethostname()}:{free.getsockname()[1]}"
    cpus = re.match(r"\d+", os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    line = [
        "srun", "--jobid", job, "--overlap", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1",
        f"--cpus-per-task={cpus[0] if cpus else 1}", "--cpu-bind=none", "--wait=60", "--quiet",
        sys.executable, "-m", "kairos", *sys.argv[1:],
    ]  # fmt: skip
    # SLURM_* of the step that this process is in would be taken for options of the new one
    kept = ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_CONF", "SLURM_JOB_END_TIME", "SLURM_CLUSTER_NAME")
    environment = {name: value for name, value in os.environ.items() if name in kept or not name.startswith("SLURM_")}
    environment |= {_ADDRESS: address}
    srun = subprocess.Popen(line, env=environment, process_group=0, preexec_fn=die_with_parent)
    with srun, _handing_on(lambda: srun.send_signal(signal.SIGUSR1), srun.kill) as asked:
        status = srun.wait()
    if status == STATUS or (asked and status):
        raise StoppedEarly("")
    if status:
        raise SystemExit(1)
