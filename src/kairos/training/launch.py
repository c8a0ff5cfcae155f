"""Several processes for one training run: torchrun on this machine, or on every machine of a SLURM job by srun.

    kairos train             the launcher, in which torchrun runs
      ├── kairos train       rank 0, which writes the files
      └── kairos train       rank 1 ...

With several machines the first `kairos train` starts a launcher on each of them through srun. A launcher forwards
requests to stop to its ranks, and they die with it. After a failure torchrun ends the other ranks of its machine, and
finds the rank that failed first.
"""

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

from kairos.errors import TemporaryError
from kairos.process_exit import die_with_parent
from kairos.training.job import SIGNALS, STATUS, StoppedEarly
from kairos_timesteps.errors import KairosError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from kairos.training.settings import TrainingConfig

_ADDRESS = "KAIROS_RENDEZVOUS"  # environment variable: address where the launchers of several machines meet
# srun would read the other SLURM_* variables, which describe this process's job step, as options of the new step
_KEPT_SLURM_VARIABLES = ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_CONF", "SLURM_JOB_END_TIME", "SLURM_CLUSTER_NAME")


def local_rank() -> int | None:
    """Return the index of this process among the ranks of this machine; None if torchrun has not started it."""
    number = os.environ.get("LOCAL_RANK")
    return None if number is None else int(number)


def is_reporting_process() -> bool:
    """Return True if this process reports for a training run: rank 0 of all machines, a launcher or a lone process."""
    return local_rank() is None or os.environ.get("RANK", "0") == "0"


def run_rank(work: Callable[[], None]) -> None:
    """Do the work of a training process; under torchrun, record its error for torchrun instead of raising it.

    A rank dies with torchrun's process; otherwise it would train at the same time as its successor. A rank that fails
    ends at once without a message. Its exit status is 1, or EX_SOFTWARE if the error needs a traceback. `StoppedEarly`
    is raised in any case.
    """
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        work()
        return
    from torch.distributed.elastic.multiprocessing.errors import record

    die_with_parent()
    try:
        record(work)()
    # without functions for the exit, which may wait for the other ranks
    except (KairosError, OSError):
        os._exit(1)
    except Exception:
        os._exit(os.EX_SOFTWARE)


def launch(training: "TrainingConfig") -> None:
    """Run this command once in every process of the training run, and wait for the processes.

    With several machines, srun runs this command again on each machine; there this function starts the machine's ranks.

    Args:
        training: section `training` of the experiment.

    Raises:
        StoppedEarly: a stop was requested, and the ranks have stopped; its reason is empty, because a rank logs it.
        SystemExit: on another machine, or in srun, an error has occurred, which is reported there.
        TemporaryError: a rank has failed or was killed.
        KairosError: the SLURM job has too few machines.
    """
    started_by_srun = _ADDRESS in os.environ
    if training.nodes > 1 and not started_by_srun:
        _launch_machines(training.nodes)
    else:
        _launch_ranks(training)


def _launch_ranks(training: "TrainingConfig") -> None:
    """Run this command in the ranks of this machine by torchrun, and wait for them; errors as in `launch`.

    Signal handlers, environment variables and the disabled logging stay: this process ends after its ranks.
    """
    variables = {
        "OMP_NUM_THREADS": str(training.threads),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # read by the imports below
    }
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    logging.disable(logging.CRITICAL)  # torchrun logs each signal to a rank and each failure, also after Ctrl-C
    requests = _forward_requests()
    with tempfile.TemporaryDirectory(prefix="kairos-") as log_folder:  # also of the errors that ranks record
        options = [*_torchrun_options(training), "--log-dir", log_folder]
        try:
            run.main([*options, "-m", "kairos", *sys.argv[1:]])
        except RendezvousError as error:  # the launcher that holds torchrun's key-value store has ended
            if requests:
                raise StoppedEarly("") from None
            raise TemporaryError(f"the launchers of the machines have no connection: {error}") from None
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            has_error = isinstance(failure.message, dict)
            if failure.exitcode == STATUS or (requests and not has_error):
                raise StoppedEarly("") from None
            raise TemporaryError(f"process {rank} of the training run: {_describe(failure)}") from None


def _forward_requests() -> list[int]:
    """Forward requests to stop to the ranks from now on, as SIGTERM; return the list that requests are appended to.

    A second SIGINT ends this process at once, and its ranks with it, see `run_rank`.

    Raises:
        StoppedEarly: raised later, where a request arrives without a rank to forward it to.
    """
    requests: list[int] = []

    def forward(number: int, frame: object) -> None:
        requests.append(number)
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
        ranks = psutil.Process().children()
        if not ranks:
            raise StoppedEarly(signal.Signals(number).name)
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):  # it has ended already
                rank.terminate()  # not a second SIGINT, which would end a rank at once

    for number in SIGNALS:
        signal.signal(number, forward)
    return requests


def _torchrun_options(training: "TrainingConfig") -> list[str]:
    """Return torchrun's options for the numbers of machines and ranks, their rendezvous and the handled signals.

    The launchers meet at the address in environment variable `_ADDRESS`. Without it, this machine is the only one.
    """
    address = os.environ.get(_ADDRESS)
    # --local-addr: by default it is the machine's full name, which other processes may not be able to resolve
    if address:
        # the address is also the id of the rendezvous, which has to be equal on all machines
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", address, "--rdzv-id", address]
        rendezvous += ["--local-addr", socket.gethostname()]
    else:
        rendezvous = ["--standalone", "--local-addr", "127.0.0.1"]
    ranks_per_node = training.processes // training.nodes
    ranks = ["--nnodes", str(training.nodes), "--nproc-per-node", str(ranks_per_node)]
    # by default torchrun kills the ranks 30 s after SIGTERM, SIGINT and SIGHUP, and exits with status 1; of its
    # default signals only SIGQUIT is kept
    return [*rendezvous, *ranks, "--signals-to-handle", "SIGQUIT"]


def _describe(failure: "ProcessFailure") -> str:
    """Return the error that a rank has recorded, with its traceback if it needs one, or how the rank was killed."""
    if isinstance(failure.message, dict):
        if failure.exitcode == os.EX_SOFTWARE:
            return failure.message["extraInfo"]["py_callstack"]
        return failure.message["message"]
    if failure.exitcode < 0:
        return f"{failure.message}; the same command resumes from the last checkpoint"
    return f"exit status {failure.exitcode}"


def _launch_machines(nodes: int) -> None:
    """Run this command again on `nodes` machines of the SLURM job by srun, and wait for it to end on all.

    On each machine the command is a launcher, see `launch`, which lists the errors. Environment variables of the
    present job step are removed.
    """
    command = [*_srun_command(nodes), sys.executable, "-m", "kairos", *sys.argv[1:]]
    environment = {}
    for name, value in os.environ.items():
        if name in _KEPT_SLURM_VARIABLES or not name.startswith("SLURM_"):
            environment[name] = value
    environment[_ADDRESS] = _free_address()
    # a process group of its own: a terminal's Ctrl-C reaches the launchers only as SIGUSR1
    with subprocess.Popen(command, env=environment, process_group=0, preexec_fn=die_with_parent) as srun:
        try:
            status = srun.wait()
        except StoppedEarly:
            srun.send_signal(signal.SIGUSR1)  # forwarded to the launchers; SIGTERM would kill them
            status = srun.wait() or STATUS
    if status == STATUS:
        raise StoppedEarly("")
    if status != 0:
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
