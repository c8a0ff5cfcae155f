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
from typing import Any

from kairos.cli.common import demand

Finding = tuple[bool, str, str]  # True if usable, name of what was checked, description
_PACKAGES = ("torch", "torchvision", "diffusers", "datasets", "torch-fidelity", "scikit-learn", "pandas", "pydantic")
_TOOLS = ("snakemake", "dvc", "mlflow")


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--config", type=Path, metavar="F", help="also check the files that this experiment needs")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="profile of the cluster; default: profiles/slurm")


def run(arguments: argparse.Namespace) -> None:
    """Print a line per finding, with a remedy for each problem.

    Raises:
        KairosError: something is not usable.
    """
    from kairos.config import load
    from kairos.status import cluster_checks, tool_checks
    from kairos_timesteps.errors import KairosError

    profile = arguments.profile or cluster_checks.PROFILE
    has_profile = not arguments.profile or cluster_checks.profile_file(profile)
    demand(has_profile, "profile", repr(str(profile)), "a folder that contains a profile.yaml")
    experiment = load(arguments.config) if arguments.config is not None else None
    results = Path("results") / (experiment.experiment if experiment else "")
    with ThreadPoolExecutor() as pool:  # MLflow and DVC are checked while torch is imported
        mlflow = pool.submit(tool_checks.mlflow, experiment.tracking.uri if experiment else None)
        dvc = pool.submit(tool_checks.dvc)
        cluster = [
            *cluster_checks.slurm(profile),
            cluster_checks.disk(results),
            *cluster_checks.locks(results),
            *cluster_checks.limits(),
        ]
        devices, gpus = _devices()
        findings = [*_software(), *devices, *cluster_checks.job(gpus), *cluster]
        findings += [_git(), *mlflow.result(), *dvc.result(), _weights()]
    if experiment is not None:
        findings += _experiment(arguments.config, experiment)
    for usable, name, description in findings:
        print(f"{'ok ' if usable else 'NO '} {name:<22} {description}")
    unusable = [name for usable, name, _ in findings if not usable]
    if unusable:
        raise KairosError(f"not usable on this machine: {', '.join(dict.fromkeys(unusable))}")


def _software() -> list[Finding]:
    """Return a finding for Python and each package."""
    findings = [(sys.version_info >= (3, 11), "python", platform.python_version())]
    for package in (*_PACKAGES, *_TOOLS):
        try:
            findings.append((True, package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            findings.append((False, package, "not installed: run make setup"))
    return findings


def _devices() -> tuple[list[Finding], int]:
    """Return findings about CPUs, GPUs and free disk space, and the number of GPUs."""
    try:
        import torch
    except ImportError as error:
        return [(False, "devices", f"torch cannot be imported: {error}")], 0
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
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
    free = shutil.disk_usage(".").free / 2**30
    findings.append((free > 1, "disk", f"{free:.1f} GiB free in the working directory"))
    return findings, torch.cuda.device_count()


def _git() -> Finding:
    """Return a finding about the git repository of the working directory."""
    command = ["git", "rev-parse", "--git-dir"]
    is_repository = subprocess.run(command, capture_output=True, text=True, check=False).returncode == 0
    missing = "not a git repository; kairos ledger record needs one"
    return is_repository, "git", "this is a repository" if is_repository else missing


def _weights() -> Finding:
    """Return a finding about the weights of Inception, which only some experiments need."""
    from kairos.evaluation import inception_weights

    path = inception_weights.default_path()
    absent = f"absent ({path}); only extractor inception needs them; kairos fetch downloads them"
    return True, "inception weights", str(path) if path.is_file() else absent


def _experiment(path: Path, experiment: Any) -> list[Finding]:
    """Return a finding about an experiment file and about each file that its jobs read."""
    from kairos import downloads

    size = f"{len(experiment.methods)} methods, {len(experiment.seeds)} seeds"
    findings = [(True, "experiment file", f"{path}: {size}")]
    for requirement in downloads.list_requirements(experiment):
        location, problem = requirement.locate()
        description = f"{requirement.name}: {location or requirement.describe_absence(problem)}"
        findings.append((location is not None, "needs", description))
    return findings
