"""Checks of a cluster's machine: SLURM, the GPUs of a job, a local disk, locks, limits."""

import fcntl
import getpass
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kairos.slurm import NO_CLUSTER, ask
from kairos.status.tool_checks import Finding, existing
from kairos_timesteps.errors import KairosError

PROFILE = Path("profiles/slurm")
_FILES = 1024  # open files at once that a job may need
_GIVEN = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES")

_LOCK = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    try:
        getattr(fcntl, sys.argv[2])(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(3)
"""


def slurm(profile: Path = PROFILE) -> list[Finding]:
    """Check that SLURM answers, list its partitions, and check partition and account of the profile.

    Args:
        profile: folder of the profile that jobs will be submitted with.
    """
    if shutil.which("sinfo") is None:
        return [(True, "slurm", "no sinfo here: jobs run on this machine, make cluster does not work")]
    try:
        defaults = _default_resources(profile)
    except KairosError as error:
        return [(False, "slurm profile", str(error))]
    good, answer = ask("sinfo", "--noheader", "--format=%P|%a|%D|%l|%G")
    if NO_CLUSTER in answer:
        return [(True, "slurm", "its commands are here, but no cluster is configured (slurm.conf): none to use")]
    if not good:
        return [(False, "slurm", f"sinfo: {answer}; is slurmctld reachable, is SLURM_CONF right?")]
    rows = [line.split("|") for line in answer.splitlines() if line.count("|") == 4]
    shown = [f"{name} ({state}, {nodes} nodes, {limit}, {gres})" for name, state, nodes, limit, gres in rows]
    findings: list[Finding] = [(bool(rows), "slurm partitions", ", ".join(shown) or "none: ask the administrators")]
    known = {name.rstrip("*") for name, *_ in rows}
    wanted = defaults.get("slurm_partition")
    if rows and wanted and not known.issuperset(wanted.split(",")):
        advice = f"{wanted}, as in {profile}, is none of {', '.join(sorted(known))}: edit the profile"
        findings.append((False, "slurm partition", advice))
    return [*findings, _account(profile, defaults.get("slurm_account"))]


def _account(profile: Path, wanted: str | None) -> Finding:
    """The accounts that this user may charge, where SLURM keeps any."""
    command = ("sacctmgr", "--noheader", "--parsable2", "show", "assoc", f"user={getpass.getuser()}", "format=account")
    good, answer = ask(*command) if shutil.which("sacctmgr") else (False, "no sacctmgr here")
    accounts = sorted(set(answer.split()))
    if good and accounts and wanted and wanted not in accounts:
        return False, "slurm account", f"{wanted}, as in {profile}, is none of {', '.join(accounts)}: edit the profile"
    kept = f", of {', '.join(accounts)}" if accounts else "; SLURM keeps none for this user"
    return True, "slurm account", (wanted or "none in the profile") + (kept if good else f"; not checked ({answer})")


def profile_file(profile: Path) -> Path | None:
    """The file of a profile's folder; None where it has none."""
    return next((profile / name for name in ("profile.yaml", "config.yaml") if (profile / name).is_file()), None)


def _default_resources(profile: Path) -> dict[str, str]:
    """Return the default resources of a profile, without empty values.

    Raises:
        KairosError: the profile is not the YAML that Snakemake reads.
    """
    import yaml

    file = profile_file(profile)
    try:
        found = (yaml.safe_load(file.read_text(encoding="utf-8")) if file else None) or {}
        given = found.get("default-resources") or {}
        named = dict(item.split("=", 1) for item in given) if isinstance(given, list) else dict(given)
        return {name: str(value).strip("'\"") for name, value in named.items() if value}
    except (yaml.YAMLError, AttributeError, TypeError, ValueError) as error:
        raise KairosError(f"{file}: default-resources cannot be read: {' '.join(str(error).split())}") from None


def job(visible: int) -> list[Finding]:
    """Check that torch finds the number of GPUs that SLURM has given to this job; report if there is no job.

    Args:
        visible: number of GPUs that torch sees.
    """
    number = os.environ.get("SLURM_JOB_ID")
    if number is None:
        return [(True, "slurm job", "none: a login node, or a machine of one's own")]
    told = {name: os.environ[name] for name in _GIVEN if os.environ.get(name)}
    words = ", ".join(f"{name}={value}" for name, value in told.items()) or "no GPU"
    fact = f"job {number} on {os.environ.get('SLURMD_NODENAME', '?')}, given: {words}; torch sees {visible}"
    given = _number(told)
    if given == visible or (given is None and not visible):
        return [(True, "slurm job", fact)]
    advice = "the driver or torch's CUDA version may not fit this node" if not visible else "check gres.conf"
    return [(False, "slurm job", f"{fact}: {advice}")]


def _number(told: dict[str, str]) -> int | None:
    """Return the number of GPUs in the environment variables; CUDA_VISIBLE_DEVICES, which CUDA obeys, comes first."""
    value = told.get("CUDA_VISIBLE_DEVICES") or told.get("SLURM_STEP_GPUS") or told.get("SLURM_JOB_GPUS")
    if value is not None:
        return 0 if value in ("-1", "NoDevFiles") else len(value.split(","))
    count = told.get("SLURM_GPUS_ON_NODE", "")
    return int(count) if count.isdigit() and count != "0" else None


def disk(results: Path) -> Finding:
    """The folder for temporary files, which latents are staged to where it is on a disk of its own."""
    folder = Path(os.environ.get("TMPDIR") or tempfile.gettempdir())
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return False, "local disk", f"{folder} (TMPDIR): cannot write: {error.strerror}"
    free = shutil.disk_usage(folder).free / 2**30
    same = os.stat(folder).st_dev == os.stat(existing(results)).st_dev
    where = "the file system of the results, nothing is gained by it" if same else "not the file system of the results"
    return True, "local disk", f"{folder}: {free:.1f} GiB free, {where}"


def locks(results: Path) -> list[Finding]:
    """Check that a lock in the results' folder keeps other processes out, and that its release lets them in.

    Trainings and the controller lock with flock, databases (MLflow's, Snakemake's) with POSIX locks.
    """
    folder = existing(results)
    findings: list[Finding] = []
    for kind in ("flock", "lockf"):
        try:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".tmp-lock-") as file:
                fault = _try_lock(kind, file)
        except OSError as error:
            fault = f"{error.strerror}"
        if not fault and kind == "flock":
            fault = _not_between_machines(folder)
        advice = "; two trainings could write one state: use another file system, or have it mounted with locks"
        fact = f"{kind} works in {folder}" if not fault else f"{kind} in {folder}: {fault}{advice}"
        findings.append((not fault, f"locks ({kind})", fact))
    return findings


def _not_between_machines(folder: Path) -> str:
    """Return the mount options of a file system that confine locks to one machine, as a message; empty: none."""
    from kairos.staging import mount

    kind, options = mount(folder)
    local = {"localflock", "nolock", "local_lock=all", "local_lock=flock"} & set(options)
    return f"{kind} is mounted with {', '.join(sorted(local))}: locks end at this machine" if local else ""


def _try_lock(kind: str, file: "tempfile._TemporaryFileWrapper[bytes]") -> str:
    """Lock a file, let another process try, unlock it, let it try again; what was wrong, or nothing."""
    lock = getattr(fcntl, kind)
    command = [sys.executable, "-S", "-c", _LOCK, file.name, kind]
    lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    kept_out = subprocess.run(command, capture_output=True, check=False).returncode
    lock(file, fcntl.LOCK_UN)
    let_in = subprocess.run(command, capture_output=True, check=False).returncode
    if kept_out == 3 and let_in == 0:
        return ""
    return "another process was not kept out" if kept_out == 0 else "another process could not try"


def limits() -> list[Finding]:
    """Report the resource limits of this user's processes; too few open files or limited addresses fail the check."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    enough = files == resource.RLIM_INFINITY or files >= _FILES
    words = f"{_limit(resource.RLIMIT_NOFILE)} open files, {_limit(resource.RLIMIT_NPROC)} processes, "
    words += f"{_limit(resource.RLIMIT_MEMLOCK, 2**20)} MiB locked memory, core files {_limit(resource.RLIMIT_CORE)}"
    advice = "" if enough else f"; at least {_FILES} open files: ulimit -n {_FILES}"
    findings: list[Finding] = [(enough, "limits", words + advice)]
    memory = resource.getrlimit(resource.RLIMIT_AS)[0]
    if memory != resource.RLIM_INFINITY:
        advice = "CUDA reserves far more addresses than it uses: ulimit -v unlimited"
        findings.append((False, "limits", f"{memory / 2**30:.0f} GiB of address space; {advice}"))
    return findings


def _limit(which: int, unit: int = 1) -> str:
    value = resource.getrlimit(which)[0]
    return "unlimited" if value == resource.RLIM_INFINITY else str(value // unit)
