"""``kairos doctor``: what is installed, which devices, data and weights are here, whether MLflow, DVC and SLURM work.

On a cluster it is run on the login node and in a job on a GPU node (``srun --gres=gpu:1 kairos doctor``).
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

Finding = tuple[bool, str, str]  # as of `kairos.status.tool_checks`
_PACKAGES = ("torch", "torchvision", "diffusers", "datasets", "torch-fidelity", "scikit-learn", "pandas", "pydantic")
_TOOLS = ("snakemake", "dvc", "mlflow")


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--config", type=Path, metavar="F", help="also check what this experiment file needs")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="of the cluster; default: profiles/slurm")


def run(arguments: argparse.Namespace) -> None:
    """Print a line per finding; what does not work says how to mend it. Ends with status 1 if something is missing."""
    from kairos.config import load
    from kairos.status import machine, tool_checks
    from kairos_timesteps.errors import KairosError

    profile = arguments.profile or machine.PROFILE
    usable = not arguments.profile or machine.profile_file(profile)
    demand(usable, "profile", repr(str(profile)), "a folder that holds a profile.yaml")
    experiment = load(arguments.config) if arguments.config is not None else None
    results = Path("results") / (experiment.experiment if experiment else "")
    with ThreadPoolExecutor() as pool:  # MLflow and DVC are asked while torch is imported
        mlflow = pool.submit(tool_checks.mlflow, experiment.tracking.uri if experiment else None)
        dvc = pool.submit(tool_checks.dvc)
        cluster = [*machine.slurm(profile), machine.disk(results), *machine.locks(results), *machine.limits()]
        devices, gpus = _devices()
        findings = [*_software(), *devices, *machine.job(gpus), *cluster]
        findings += [_git(), *mlflow.result(), *dvc.result(), _weights()]
    if experiment is not None:
        findings += _experiment(arguments.config, experiment)
    for good, what, fact in findings:
        print(f"{'ok ' if good else 'NO '} {what:<22} {fact}")
    missing = [what for good, what, _ in findings if not good]
    if missing:
        raise KairosError(f"not usable here: {', '.join(dict.fromkeys(missing))}")


def _software() -> list[Finding]:
    lines = [(sys.version_info >= (3, 11), "python", platform.python_version())]
    for package in (*_PACKAGES, *_TOOLS):
        try:
            lines.append((True, package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            lines.append((False, package, "not installed: run make setup"))
    return lines


def _devices() -> tuple[list[Finding], int]:
    """The devices, and how many of them are GPUs."""
    try:
        import torch
    except ImportError as error:
        return [(False, "devices", f"torch cannot be imported: {error}")], 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    lines = [(True, "processors", f"{cores} usable, {platform.machine()}")]
    lines.append((True, "threads", f"{torch.get_num_threads()} by default; every job sets training.threads instead"))
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            lines.append((True, f"cuda:{index}", f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB"))
    else:
        why = "nvidia-smi is not here" if shutil.which("nvidia-smi") is None else "torch cannot use it; see nvidia-smi"
        lines.append((True, "GPU", f"none ({why}); everything runs on the CPU"))
    free = shutil.disk_usage(".").free / 2**30
    lines.append((free > 1, "disk", f"{free:.1f} GiB free here"))
    return lines, torch.cuda.device_count()


def _git() -> Finding:
    git = subprocess.run(["git", "rev-parse", "--git-dir"], capture_output=True, text=True, check=False).returncode == 0
    return git, "git", "this is a repository" if git else "not a git repository; kairos ledger record needs one"


def _weights() -> Finding:
    from kairos.evaluation import inception_weights

    path = inception_weights.default_path()
    absent = f"absent ({path}); only extractor inception needs it, kairos fetch brings it"
    return True, "inception weights", str(path) if path.is_file() else absent


def _experiment(path: Path, experiment: Any) -> list[Finding]:
    from kairos import downloads

    lines = [(True, "experiment file", f"{path}: {len(experiment.methods)} methods, {len(experiment.seeds)} seeds")]
    for need in downloads.needs(experiment):
        place, fault = need.look()
        lines.append((place is not None, "needs", f"{need.what}: {place or need.lack(fault)}"))
    return lines
