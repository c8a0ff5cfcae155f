"""A real SLURM on this machine, from Debian's packages: one controller, two nodes with "GPUs"; all on loopback.

    python tests/cluster/slurm.py start      prints the cluster's folder; squeue, sbatch and the like then work
    python tests/cluster/slurm.py stop
    python tests/cluster/slurm.py install    the packages, with apt-get

It needs root, and the packages slurmctld, slurmd, slurm-client and munge. There is one cluster per machine: snakemake's
job steps drop SLURM_CONF, so /etc/slurm/slurm.conf must lead to this cluster while it runs.
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
NODES = {"n1": "steady", "n2": "failing"}  # and their feature; jobs that may go anywhere go to the last one first
GPUS = 8  # of a node
CPUS = 8  # of a node; more than there are, so that jobs run side by side
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
AuthInfo=socket={folder}/munge.socket,cred_expire=10  # a requeued job waits as long as its credentials last
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


def why_not() -> str | None:
    """Return why no cluster can be started here; None if one can."""
    if os.geteuid() != 0:
        return "SLURM's daemons need root"
    if _missing():
        return f"{', '.join(_missing())} not installed: apt-get install --no-install-recommends {' '.join(PACKAGES)}"
    if os.path.lexists(LINK) and not _ours():
        return f"{LINK} is there: this machine has a SLURM of its own"
    if _ours() and (owner := _read(_folder()).get("owner")) is not None and Path(f"/proc/{owner}").exists():
        return f"process {owner} has a cluster in {_folder()}"
    return None


def by_hand() -> Path | None:
    """Folder of a cluster that was started by hand and runs."""
    content = _read(_folder())
    started = content.get("owner") is None and _alive(content.get("pids", {}).get("slurmctld"), "slurmctld")
    return _folder() if started else None


def install() -> str:
    """Install the packages with apt-get where they are missing and that is possible; returns what came of it."""
    if _missing():
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            return f"SLURM's {', '.join(_missing())}: missing, and not installable without root and apt-get"
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(["apt-get", *command], env=environment, capture_output=True, timeout=300)
    return f"SLURM's {', '.join(_missing())}: missing" if _missing() else "SLURM's packages are installed"


def _missing() -> list[str]:
    return [name for name in ("slurmctld", "slurmd", "sbatch", "munged") if shutil.which(name) is None]


def start(owner: int | None = None) -> Path:
    """Start the cluster and wait until its nodes are idle; returns its folder.

    Args:
        owner: process that stops it; where that has died without, the next start does. None: started by hand.

    Raises:
        RuntimeError: it cannot be started here, or did not come up.
    """
    reason = why_not()
    if reason is not None:
        raise RuntimeError(reason)
    if _ours():
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
        _munge(folder)
        start_controller(folder)
        for node in NODES:
            _daemon(folder, f"slurmd-{node}", ["slurmd", "-D", "-N", node, "-f", f"{folder}/slurm.conf"])
        wait_for(lambda: set(node_states().values()) == {"idle"}, 60, "idle nodes")
    except BaseException:
        logs = "\n".join(path.read_text(errors="replace")[-1000:] for path in folder.glob("*.log"))
        stop()
        print(logs, file=sys.stderr)
        raise
    return folder


def stop() -> None:
    """Cancel all jobs, end the daemons by their process ids, and remove the cluster's folder; nothing without one."""
    if not _ours():
        return
    folder = _folder()
    pids = _read(folder).get("pids", {})
    if _alive(pids.get("slurmctld"), "slurmctld"):
        with suppress(RuntimeError, subprocess.TimeoutExpired):
            slurm("scancel", "--full", "--user", "root")
            wait_for(lambda: not slurm("squeue", "-h"), 30, "the end of all jobs")
    names = ["slurmctld", *(f"slurmd-{node}" for node in NODES), "munged"]
    for sent in (signal.SIGTERM, signal.SIGKILL):
        for name in names:
            if _alive(pids.get(name), name):
                os.kill(pids[name], sent)
        with suppress(RuntimeError):
            wait_for(lambda: not any(_alive(pids.get(name), name) for name in names), 10, "the end of the daemons")
            break
    for process in _leftover(folder):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    LINK.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def clean() -> None:
    """Take away what a test that failed has left: its jobs, and nodes that take none."""
    slurm("scancel", "--user", "root")
    for node, state in node_states().items():
        if state.startswith(("drain", "down")):
            slurm("scontrol", "update", f"NodeName={node}", "State=RESUME")
    wait_for(lambda: not slurm("squeue", "--noheader"), 120, "an empty queue")


def start_controller(folder: Path) -> None:
    """Start slurmctld, for the first time or after a kill."""
    _daemon(folder, "slurmctld", ["slurmctld", "-D", "-f", f"{folder}/slurm.conf"])
    wait_for(lambda: "DOWN" not in slurm("scontrol", "ping"), 30, "slurmctld")


def kill_controller(folder: Path) -> None:
    """Kill slurmctld; the nodes and their jobs go on."""
    os.kill(_read(folder)["pids"]["slurmctld"], signal.SIGKILL)


def save_state(folder: Path) -> None:
    """Let slurmctld write down what it knows: by itself it does so late where its backfill has started a job."""
    begun = time.time()
    for job in slurm("squeue", "--noheader", "--format", "%i").split():
        slurm("scontrol", "update", f"JobId={job}", "Nice=0")
    wait_for(lambda: (folder / "state/job_state").stat().st_mtime > begun, 30, "slurmctld's state")


def slurm(*command: str) -> str:
    """Output of one of SLURM's commands.

    Raises:
        RuntimeError: it failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def node_states() -> dict[str, str]:
    """State of each node."""
    return dict(line.split() for line in slurm("sinfo", "-h", "-N", "-o", "%N %T").splitlines())


def wait_for(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait until a condition holds.

    Raises:
        RuntimeError: it did not in that time.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(RuntimeError):  # SLURM's commands fail while its controller is away
            if condition():
                return
        time.sleep(0.1)
    raise RuntimeError(f"waited {seconds:.0f} s in vain for {what}")


def _configure(folder: Path) -> None:
    ports = _free_ports(1 + len(NODES))
    for name in ("state", "dev", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    for index in range(len(NODES) * GPUS):  # SLURM sets CUDA_VISIBLE_DEVICES for character devices alone
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
    # proctrack/pgid, where there are no cgroups, loses what calls setsid
    tracking = "proctrack/cgroup" if os.access(CGROUP, os.W_OK) else "proctrack/pgid"
    text = CONFIGURATION.format(
        name=folder.name, host=host, controller_port=ports[0], folder=folder, tracking=tracking, nodes=nodes,
        names=",".join(NODES),
    )  # fmt: skip
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text(gpus + "\n")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")


def _munge(folder: Path) -> None:
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    paths = [f"--{option}={folder}/munge.{suffix}" for option, suffix in files.items()]
    _daemon(folder, "munged", ["munged", "--foreground", "--force", "--num-threads=2", f"--key-file={key}", *paths])
    wait_for((folder / "munge.socket").exists, 20, "munged")


def _daemon(folder: Path, name: str, command: list[str]) -> None:
    """Start a daemon that outlives this process, and note its process id."""
    with open(folder / f"{name}.out", "ab") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd=folder
        )
    content = _read(folder)
    content["pids"][name] = process.pid
    _write(folder, content)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _folder() -> Path:
    return Path(os.readlink(LINK)).parent if LINK.is_symlink() else Path("/nonexistent")


def _ours() -> bool:
    return _folder().name.startswith("kairos-slurm-")


def _read(folder: Path) -> dict:
    path = folder / "cluster.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _write(folder: Path, content: dict) -> None:
    (folder / "cluster.json").write_text(json.dumps(content))


def _alive(pid: int | None, name: str) -> bool:
    """Return True if this process id belongs to a running daemon of this name; a zombie counts as dead."""
    if pid is None:
        return False
    with suppress(OSError, ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    with suppress(OSError):
        status = Path(f"/proc/{pid}/stat").read_text()
        return f"({name.split('-')[0]}" in status and status.rsplit(")", 1)[1].split()[0] != "Z"
    return False


def _leftover(folder: Path) -> list[int]:
    """Processes of jobs that outlived their cluster: its name is in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"SLURM_CLUSTER_NAME={folder.name}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="A real SLURM on this machine, for tests.")
    parser.add_argument("action", choices=["install", "start", "stop"])
    action = parser.parse_args().action
    if action == "install":
        print(install())
    elif action == "start":
        print(start())
    elif _ours():
        stop()


if __name__ == "__main__":
    main()
