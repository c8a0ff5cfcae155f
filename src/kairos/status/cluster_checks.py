"""Checks of `kairos doctor` on a cluster: SLURM, the GPUs of a job, local disk, file locks, resource limits."""

import fcntl
import getpass
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kairos.slurm import NO_CLUSTER, run_command
from kairos.status.tool_checks import Finding, nearest_existing
from kairos_timesteps.errors import KairosError

PROFILE = Path("profiles/slurm")
_OPEN_FILES = 1024  # number of files that a job must be able to open at once
_GPU_VARIABLES = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES")

_LOCKED = 3  # exit status of the code below if another process holds the lock
# code that tries a lock; the file is open for writing, which lockf requires for an exclusive lock
_TRY_LOCK = f"""
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    try:
        getattr(fcntl, sys.argv[2])(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit({_LOCKED})
"""


def check_slurm(profile: Path = PROFILE) -> list[Finding]:
    """Check that SLURM answers, and that it has the partition and the account of a profile; return the findings.

    The findings are SLURM's partitions (a failure if there are none), a failure if SLURM lacks a partition of the
    profile, and the account. No partition is compared if the profile has none or SLURM lists none.

    There is a single finding in four cases. It is a success if SLURM's commands are missing, and if they are installed
    but no cluster is configured. It is a failure if the profile cannot be read, or if SLURM does not answer.

    Args:
        profile: folder of the profile that jobs will be submitted with.
    """
    if shutil.which("sinfo") is None:
        return [(True, "slurm", "no sinfo here: jobs run on this machine, make cluster does not work")]
    try:
        defaults = _default_resources(profile)
    except KairosError as error:
        return [(False, "slurm profile", str(error))]
    succeeded, answer = run_command("sinfo", "--noheader", "--format=%P|%a|%D|%l|%G")
    if NO_CLUSTER in answer:
        return [(True, "slurm", "its commands are installed, but no cluster is configured (slurm.conf)")]
    if not succeeded:
        return [(False, "slurm", f"sinfo: {answer}; is slurmctld reachable, is SLURM_CONF right?")]
    rows = [line.split("|") for line in answer.splitlines() if line.count("|") == 4]  # other lines are warnings
    descriptions = [f"{name} ({state}, {nodes} nodes, {limit}, {gres})" for name, state, nodes, limit, gres in rows]
    partitions = ", ".join(descriptions) or "none: ask the administrators"
    findings: list[Finding] = [(bool(rows), "slurm partitions", partitions)]
    partition_names = {name.rstrip("*") for name, *_ in rows}  # an asterisk marks the default partition
    requested = defaults.get("slurm_partition")
    # a profile may request several partitions, separated by commas
    if rows and requested and not partition_names.issuperset(requested.split(",")):
        advice = f"{requested}, as in {profile}, is none of {', '.join(sorted(partition_names))}: edit the profile"
        findings.append((False, "slurm partition", advice))
    return [*findings, _check_account(profile, defaults.get("slurm_account"))]


def _check_account(profile: Path, requested: str | None) -> Finding:
    """Check that this user may charge the account of the profile, if SLURM has accounts.

    The check fails only if SLURM lists accounts of the user without the profile's account. Without sacctmgr, or if it
    fails, nothing is compared and the check succeeds. A profile without an account succeeds, too: `requested` is None.
    """
    command = ("sacctmgr", "--noheader", "--parsable2", "show", "assoc", f"user={getpass.getuser()}", "format=account")
    succeeded, answer = False, "no sacctmgr here"
    if shutil.which("sacctmgr"):
        succeeded, answer = run_command(*command)
    accounts = sorted(set(answer.split()))  # valid only if the command succeeded
    if succeeded and accounts and requested and requested not in accounts:
        advice = f"{requested}, as in {profile}, is none of {', '.join(accounts)}: edit the profile"
        return False, "slurm account", advice
    if not succeeded:
        comparison = f"; not checked ({answer})"
    elif accounts:
        comparison = f", of {', '.join(accounts)}"
    else:
        comparison = "; SLURM keeps none for this user"
    return True, "slurm account", (requested or "none in the profile") + comparison


def profile_file(profile: Path) -> Path | None:
    """Return the path of profile.yaml in a profile's folder, else of config.yaml; None: there is neither.

    Snakemake looks for these files in this order.
    """
    for name in ("profile.yaml", "config.yaml"):
        if (profile / name).is_file():
            return profile / name
    return None


def _default_resources(profile: Path) -> dict[str, str]:
    """Return the default resources of a profile, by name, as texts without quotes; empty if there is no profile.

    Resources whose value is empty, 0 or false are left out.

    Raises:
        KairosError: the profile is not YAML, or its ``default-resources`` is neither a mapping nor a list of
            ``name=value``.
    """
    import yaml

    file = profile_file(profile)
    if file is None:
        return {}
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8")) or {}  # None: the file is empty
        resources = settings.get("default-resources") or {}
        if isinstance(resources, list):  # such as ["slurm_partition=gpu", "mem_mb=4000"]
            resources = dict(item.split("=", 1) for item in resources)
        # Snakemake evaluates resources as expressions, so that a value may have quotes within the text: "'gpu'"
        return {name: str(value).strip("'\"") for name, value in dict(resources).items() if value}
    except (yaml.YAMLError, AttributeError, TypeError, ValueError) as error:
        raise KairosError(f"{file}: default-resources cannot be read: {' '.join(str(error).split())}") from None


def check_job(visible: int) -> list[Finding]:
    """Check that torch finds the number of GPUs that SLURM has allocated to this job; return a list with one finding.

    The check succeeds if this process is not in a SLURM job. `visible` is the number of GPUs that torch finds. The
    allocated number is read from environment variables, see `_count_assigned_gpus`.
    """
    job_id = os.environ.get("SLURM_JOB_ID")
    if job_id is None:
        return [(True, "slurm job", "none: this is not a job of SLURM")]
    # an empty CUDA_VISIBLE_DEVICES hides all GPUs; the others are unset where they are empty
    is_set = {name: bool(os.environ.get(name)) for name in _GPU_VARIABLES}
    is_set["CUDA_VISIBLE_DEVICES"] = "CUDA_VISIBLE_DEVICES" in os.environ
    variables = {name: os.environ[name] for name in _GPU_VARIABLES if is_set[name]}
    assigned = ", ".join(f"{name}={value}" for name, value in variables.items()) or "no GPU"
    fact = f"job {job_id} on {os.environ.get('SLURMD_NODENAME', '?')}, given: {assigned}; torch sees {visible}"
    if _count_assigned_gpus(variables) == visible:
        return [(True, "slurm job", fact)]
    advice = "check gres.conf" if visible else "the driver or torch's CUDA version may not fit this node"
    return [(False, "slurm job", f"{fact}: {advice}")]


def _count_assigned_gpus(variables: dict[str, str]) -> int:
    """Return the number of GPUs in a job's environment variables; a job without these variables has no GPU.

    The first list of devices decides: CUDA_VISIBLE_DEVICES, which CUDA obeys, SLURM_STEP_GPUS, then SLURM_JOB_GPUS. Its
    value may also hide all GPUs. Only without a list SLURM_GPUS_ON_NODE is used; a value that is not a number is
    treated as 0.
    """
    if variables.get("CUDA_VISIBLE_DEVICES") == "":  # CUDA then hides all GPUs
        return 0
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        devices = variables.get(name)  # such as "0,1"
        if devices:
            are_hidden = devices in ("-1", "NoDevFiles")  # values with which CUDA and SLURM hide all GPUs
            return 0 if are_hidden else len(devices.split(","))
    count = variables.get("SLURM_GPUS_ON_NODE", "")
    return int(count) if count.isdigit() else 0


def check_disk(results: Path) -> Finding:
    """Check the folder for temporary files, to which jobs copy latents if it is on another file system.

    The check writes and deletes a temporary file. It fails only if the folder, TMPDIR or else Python's default, cannot
    be written. It reports the free GiB, and whether the folder is on the file system of the results.

    Args:
        results: folder of the results, which may not exist yet.
    """
    folder = Path(os.environ.get("TMPDIR") or tempfile.gettempdir())
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return False, "local disk", f"{folder} (TMPDIR): cannot write: {error.strerror}"
    free_gib = shutil.disk_usage(folder).free / 2**30
    if os.stat(folder).st_dev == os.stat(nearest_existing(results)).st_dev:
        location = "the file system of the results, so a copy of the latents gains nothing"
    else:
        location = "not the file system of the results"
    return True, "local disk", f"{folder}: {free_gib:.1f} GiB free, {location}"


def check_locks(results: Path) -> list[Finding]:
    """Check that a file lock in the results excludes other processes, and that its release admits them.

    Training runs and the controller use flock; databases (MLflow's, Snakemake's) use POSIX locks (`lockf`). Each kind
    has a finding, which fails if the folder cannot be written. Flock also fails if options of the mount confine it to
    this machine. The check writes and deletes a temporary file in the results, or in their nearest existing parent.
    """
    folder = nearest_existing(results)
    findings: list[Finding] = []
    for function in ("flock", "lockf"):
        try:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".tmp-lock-") as file:
                fault = _try_lock(function, file)
        except OSError as error:
            fault = error.strerror or str(error) or type(error).__name__
        if not fault and function == "flock":
            fault = _find_local_lock_options(folder)
        if fault:
            advice = "two jobs could write one state: use another file system, or mount it with locks"
            fact = f"{function} in {folder}: {fault}; {advice}"
        else:
            fact = f"{function} works in {folder}"
        findings.append((not fault, f"locks ({function})", fact))
    return findings


def _find_local_lock_options(folder: Path) -> str:
    """Return a message with the mount options that confine `flock` to one machine; empty if there are none.

    The options are of the file system that contains `folder`. Option ``local_lock=posix``, which only affects `lockf`,
    is not reported, since training runs lock their state with `flock`.
    """
    from kairos.staging import mount

    file_system, options = mount(folder)
    local_options = {"localflock", "nolock", "local_lock=all", "local_lock=flock"} & set(options)
    if not local_options:
        return ""
    return f"{file_system} is mounted with {', '.join(sorted(local_options))}: locks end at this machine"


def _try_lock(function: str, file: "tempfile._TemporaryFileWrapper[bytes]") -> str:
    """Test a lock with another process, while it is held and after its release, and return what failed; empty: nothing.

    `function` is ``flock`` or ``lockf`` of module fcntl. The text is ``another process was not kept out``, or ``another
    process could not try`` for every other failure. The lock is released at the end.

    Raises:
        OSError: this process cannot lock the file.
    """
    lock = getattr(fcntl, function)
    command = [sys.executable, "-S", "-c", _TRY_LOCK, file.name, function]  # -S: starts faster, without packages
    lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # the other process must fail to lock the file now, and succeed after the release
    status_while_locked = subprocess.run(command, capture_output=True, check=False).returncode
    lock(file, fcntl.LOCK_UN)
    status_after_release = subprocess.run(command, capture_output=True, check=False).returncode
    if status_while_locked == _LOCKED and status_after_release == 0:
        return ""
    if status_while_locked == 0:
        return "another process was not kept out"
    return "another process could not try"


def check_limits() -> list[Finding]:
    """Report the soft resource limits of this process: open files, processes, locked memory and core files.

    The finding fails if fewer than 1024 files may be open. If the address space is limited, there is a second finding,
    which fails.
    """
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # soft and hard limit
    is_enough = open_files == resource.RLIM_INFINITY or open_files >= _OPEN_FILES
    fact = f"{_limit(resource.RLIMIT_NOFILE)} open files, {_limit(resource.RLIMIT_NPROC)} processes, "
    fact += f"{_limit(resource.RLIMIT_MEMLOCK, 2**20)} MiB locked memory, core files {_limit(resource.RLIMIT_CORE)}"
    advice = "" if is_enough else f"; at least {_OPEN_FILES} open files: ulimit -n {_OPEN_FILES}"
    findings: list[Finding] = [(is_enough, "limits", fact + advice)]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        advice = "CUDA reserves far more addresses than it uses: ulimit -v unlimited"
        findings.append((False, "limits", f"{address_space / 2**30:.0f} GiB of address space; {advice}"))
    return findings


def _limit(resource_number: int, unit: int = 1) -> str:
    """Return the soft limit of a resource as text, in whole units of `unit`; ``unlimited`` if there is none."""
    value = resource.getrlimit(resource_number)[0]
    return "unlimited" if value == resource.RLIM_INFINITY else str(value // unit)
