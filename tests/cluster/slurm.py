"""A real SLURM cluster on this machine, from Debian's packages: a controller and two nodes with simulated GPUs.

    python tests/cluster/slurm.py start      prints the cluster's folder; squeue, sbatch and others then work
    python tests/cluster/slurm.py stop
    python tests/cluster/slurm.py install    installs the packages with apt-get

It needs root, and the packages slurmctld, slurmd, slurm-client and munge. All daemons listen on the loopback interface.
A machine can have one cluster: jobs of Snakemake drop SLURM_CONF, so /etc/slurm/slurm.conf is a link to its settings.
"""

import argparse
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
NODES = {"n1": "steady", "n2": "failing"}  # feature of each node; jobs without a constraint prefer the last one
GPUS = 8  # per node
CPUS = 8  # per node; more than the machine has, so that jobs run at the same time
LINK = Path("/etc/slurm/slurm.conf")
CGROUP = Path("/sys/fs/cgroup/freezer")

CONFIGURATION = """
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10  # a requeued job waits until its credentials expire
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType={tracking}
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=100
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=2
JobAcctGatherParams=OverMemoryKill
AccountingStorageType=accounting_storage/none
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
KillWait=10
MinJobAge=3600
ReturnToService=1
SlurmdTimeout=60
MpiDefault=none
GresTypes=gpu
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP
PartitionName=wide Nodes={names} MaxTime=INFINITE State=UP
"""


def find_obstacle() -> str | None:
    """Return the reason why no cluster can be started here; None: one can be started."""
    if os.geteuid() != 0:
        return "SLURM's daemons need root"
    if _missing():
        return f"{', '.join(_missing())} not installed: apt-get install --no-install-recommends {' '.join(PACKAGES)}"
    if os.path.lexists(LINK) and not _has_test_cluster():
        return f"{LINK} exists: this machine has another SLURM cluster"
    if _has_test_cluster() and (owner := _read(_folder()).get("owner")) is not None and Path(f"/proc/{owner}").exists():
        return f"process {owner} has a cluster in {_folder()}"
    return None


def find_manual_cluster() -> Path | None:
    """Return the folder of a running cluster that was started by hand; None: there is none."""
    content = _read(_folder())
    is_running = content.get("owner") is None and _is_alive(content.get("pids", {}).get("slurmctld"), "slurmctld")
    return _folder() if is_running else None


def install() -> str:
    """Install missing packages with apt-get if that is possible; return the result as a message."""
    if _missing():
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            return f"SLURM's {', '.join(_missing())}: missing, and not installable without root and apt-get"
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(["apt-get", *command], env=environment, capture_output=True, timeout=300)
    return f"SLURM's {', '.join(_missing())}: missing" if _missing() else "SLURM's packages are installed"


def _missing() -> list[str]:
    """Return the missing programs."""
    return [name for name in ("slurmctld", "slurmd", "sbatch", "munged") if shutil.which(name) is None]


def start(owner: int | None = None) -> Path:
    """Start the cluster and wait until its nodes are idle; returns its folder.

    Args:
        owner: id of the process that stops the cluster; if it died before, the next start does. None: started by hand.

    Raises:
        RuntimeError: the cluster cannot be started here, or its nodes did not become idle.
    """
    reason = find_obstacle()
    if reason is not None:
        raise RuntimeError(reason)
    if _has_test_cluster():
        stop()
    shared_memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="kairos-slurm-", dir=shared_memory if shared_memory.is_dir() else None))
    folder.chmod(0o755)
    _write(folder, {"owner": owner, "pids": {}})
    LINK.parent.mkdir(exist_ok=True)
    LINK.unlink(missing_ok=True)
    LINK.symlink_to(folder / "slurm.conf")
    try:
        _configure(folder)
        _start_munge(folder)
        start_controller(folder)
        for node in NODES:
            _start_daemon(folder, f"slurmd-{node}", ["slurmd", "-D", "-N", node, "-f", f"{folder}/slurm.conf"])
        wait_for(lambda: set(node_states().values()) == {"idle"}, 60, "idle nodes")
    except BaseException:
        logs = "\n".join(path.read_text(errors="replace")[-1000:] for path in folder.glob("*.log"))
        stop()
        print(logs, file=sys.stderr)
        raise
    return folder


def stop() -> None:
    """Cancel all jobs, end the daemons by their process ids, and remove the cluster's folder, if there is a cluster."""
    if not _has_test_cluster():
        return
    folder = _folder()
    pids = _read(folder).get("pids", {})
    if _is_alive(pids.get("slurmctld"), "slurmctld"):
        with suppress(RuntimeError, subprocess.TimeoutExpired):
            slurm("scancel", "--full", "--user", "root")
            wait_for(lambda: not slurm("squeue", "-h"), 30, "the end of all jobs")
    names = ["slurmctld", *(f"slurmd-{node}" for node in NODES), "munged"]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for name in names:
            if _is_alive(pids.get(name), name):
                os.kill(pids[name], number)
        with suppress(RuntimeError):
            wait_for(lambda: not any(_is_alive(pids.get(name), name) for name in names), 10, "the end of the daemons")
            break
    for process in _leftover_processes(folder):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    LINK.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def clean() -> None:
    """Cancel the jobs of a failed test and return drained nodes to service."""
    slurm("scancel", "--user", "root")
    for node, state in node_states().items():
        if state.startswith(("drain", "down")):
            slurm("scontrol", "update", f"NodeName={node}", "State=RESUME")
    wait_for(lambda: not slurm("squeue", "--noheader"), 120, "an empty queue")


def start_controller(folder: Path) -> None:
    """Start slurmctld, also after a kill."""
    _start_daemon(folder, "slurmctld", ["slurmctld", "-D", "-f", f"{folder}/slurm.conf"])
    wait_for(lambda: "DOWN" not in slurm("scontrol", "ping"), 30, "slurmctld")


def kill_controller(folder: Path) -> None:
    """Kill slurmctld; the nodes and their jobs keep running."""
    os.kill(_read(folder)["pids"]["slurmctld"], signal.SIGKILL)


def save_state(folder: Path) -> None:
    """Let slurmctld save its state; after a backfilled start it would do so late."""
    begin = time.time()
    for job in slurm("squeue", "--noheader", "--format", "%i").split():
        slurm("scontrol", "update", f"JobId={job}", "Nice=1")  # a change, which it saves
    wait_for(lambda: (folder / "state/job_state").stat().st_mtime > begin, 60, "slurmctld's state")


def slurm(*command: str) -> str:
    """Run a SLURM command and return its output.

    Raises:
        RuntimeError: the command failed.
    """
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {result.stderr.strip() or result.stdout.strip()}")
    return result.stdout.strip()


def node_states() -> dict[str, str]:
    """Return the state of each node."""
    return dict(line.split() for line in slurm("sinfo", "-h", "-N", "-o", "%N %T").splitlines())


def wait_for(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait until a condition is true.

    The condition is evaluated ten times a second. A slow condition is evaluated less often, so that it takes a tenth of
    the time: a query of SLURM costs CPU time. The pause is at most two seconds. The last evaluation is at the end.

    Args:
        condition: the condition.
        seconds: time limit.
        what: name of the condition, for the message.

    Raises:
        RuntimeError: the condition was not true within the time limit.
    """
    deadline, begin = time.monotonic() + seconds, 0.0
    while begin < deadline:
        begin = time.monotonic()
        with suppress(RuntimeError):  # SLURM's commands fail without a controller
            if condition():
                return
        time.sleep(min(max(0.1, 9 * (time.monotonic() - begin)), 2))
    raise RuntimeError(f"{what}: not there after {seconds:.0f} s")


def _configure(folder: Path) -> None:
    """Write the configuration of SLURM and create the devices that stand for GPUs."""
    ports = _free_ports(1 + len(NODES))
    for name in ("state", "dev", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    for index in range(len(NODES) * GPUS):  # SLURM sets CUDA_VISIBLE_DEVICES only for character devices
        os.mknod(folder / "dev" / f"gpu{index}", 0o20666, os.makedev(1, 3))
    host = socket.gethostname().split(".")[0]
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} RealMemory=64000"
        f" Gres=gpu:{GPUS} Features={feature} Weight={100 - number}"
        for number, ((node, feature), port) in enumerate(zip(NODES.items(), ports[1:]))
    )
    gpus = "\n".join(
        f"NodeName={node} Name=gpu File={folder}/dev/gpu[{number * GPUS}-{(number + 1) * GPUS - 1}]"
        for number, node in enumerate(NODES)
    )
    # proctrack/pgid is for machines without cgroups; it loses processes that call setsid
    tracking = "proctrack/cgroup" if os.access(CGROUP, os.W_OK) else "proctrack/pgid"
    text = CONFIGURATION.format(
        name=folder.name, host=host, controller_port=ports[0], folder=folder, tracking=tracking, nodes=nodes,
        names=",".join(NODES),
    )  # fmt: skip
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text(gpus + "\n")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")


def _start_munge(folder: Path) -> None:
    """Start MUNGE, the authentication service of SLURM, with a new key."""
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    paths = [f"--{option}={folder}/munge.{suffix}" for option, suffix in files.items()]
    _start_daemon(
        folder, "munged", ["munged", "--foreground", "--force", "--num-threads=2", f"--key-file={key}", *paths]
    )
    wait_for((folder / "munge.socket").exists, 20, "munged")


def _start_daemon(folder: Path, name: str, command: list[str]) -> None:
    """Start a daemon that outlives this process, and record its process id."""
    with open(folder / f"{name}.out", "ab") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd=folder
        )
    content = _read(folder)
    content["pids"][name] = process.pid
    _write(folder, content)


def _free_ports(count: int) -> list[int]:
    """Return ports that no process uses."""
    sockets = [socket.socket() for _ in range(count)]
    for listener in sockets:
        listener.bind(("127.0.0.1", 0))
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


def _folder() -> Path:
    """Return the folder of the cluster to which the link of SLURM's configuration leads."""
    return Path(os.readlink(LINK)).parent if LINK.is_symlink() else Path("/nonexistent")


def _has_test_cluster() -> bool:
    """Return True if SLURM's configuration is that of a cluster of this module."""
    return _folder().name.startswith("kairos-slurm-")


def _read(folder: Path) -> dict:
    """Return the record of a cluster: owner and process ids; empty: there is none."""
    path = folder / "cluster.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _write(folder: Path, content: dict) -> None:
    """Write the record of a cluster."""
    (folder / "cluster.json").write_text(json.dumps(content))


def _is_alive(pid: int | None, name: str) -> bool:
    """Return True if a process id belongs to a running daemon of a given name; a zombie counts as dead."""
    if pid is None:
        return False
    with suppress(OSError, ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    with suppress(OSError):
        status = Path(f"/proc/{pid}/stat").read_text()
        return f"({name.split('-')[0]}" in status and status.rsplit(")", 1)[1].split()[0] != "Z"
    return False


def _leftover_processes(folder: Path) -> list[int]:
    """Return the ids of processes with the name of the cluster in their environment, which outlived its end."""
    ids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"SLURM_CLUSTER_NAME={folder.name}".encode() in path.read_bytes().split(b"\0"):
                ids.append(int(path.parent.name))
    return ids


def main() -> None:
    """Install, start or stop the cluster."""
    parser = argparse.ArgumentParser(description="A real SLURM cluster on this machine, for tests.")
    parser.add_argument("action", choices=["install", "start", "stop"])
    action = parser.parse_args().action
    if action == "install":
        print(install())
    elif action == "start":
        print(start())
    elif _has_test_cluster():
        stop()


if __name__ == "__main__":
    main()
