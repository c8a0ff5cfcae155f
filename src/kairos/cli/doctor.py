"""``kairos doctor``: what is installed, which devices, data and weights are here, whether MLflow and DVC are usable."""

import argparse
import glob
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kairos.config import Experiment
    from kairos.workflow.usable import Finding

_PACKAGES = ("torch", "torchvision", "diffusers", "datasets", "torch-fidelity", "scikit-learn", "pandas", "pydantic")
_PIPELINE = ("snakemake", "dvc", "mlflow")


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--config", type=Path, metavar="F", help="also check what this experiment file needs")


def run(arguments: argparse.Namespace) -> None:
    """Print a line per finding; what does not work says how to mend it. Ends with status 1 if something is missing."""
    from kairos.config import load
    from kairos.errors import KairosError
    from kairos.workflow.usable import Tools

    experiment = load(arguments.config) if arguments.config is not None else None
    tools = Tools(experiment.tracking.uri if experiment else None)  # they are asked while torch is imported
    findings = [*_software(), *_devices(), _git(), *tools.findings(), _weights()]
    if experiment is not None:
        findings += _experiment(arguments.config, experiment)
    for good, what, fact in findings:
        print(f"{'ok ' if good else 'NO '} {what:<22} {fact}")
    missing = [what for good, what, _ in findings if not good]
    if missing:
        raise KairosError(f"not usable here: {', '.join(missing)}")


def _software() -> "list[Finding]":
    lines = [(sys.version_info >= (3, 11), "python", platform.python_version())]
    for package in (*_PACKAGES, *_PIPELINE):
        try:
            lines.append((True, package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            extra = " (pip install kairos[pipeline])" if package in _PIPELINE else ""
            lines.append((False, package, f"not installed: run make setup{extra}"))
    return lines


def _devices() -> "list[Finding]":
    try:
        import torch
    except ImportError as error:
        return [(False, "devices", f"torch cannot be imported: {error}")]
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
    return lines


def _git() -> "Finding":
    git = subprocess.run(["git", "rev-parse", "--git-dir"], capture_output=True, text=True, check=False).returncode == 0
    return git, "git", "this is a repository" if git else "not a git repository; dvc needs one"


def _weights() -> "Finding":
    cache = Path(os.environ.get("TORCH_HOME", Path.home() / ".cache" / "torch")) / "hub" / "checkpoints"
    found = sorted(cache.glob("weights-inception*.pth")) if cache.is_dir() else []
    fact = str(found[0]) if found else f"absent ({cache}); only extractor inception needs it"
    return True, "inception weights", fact


def _experiment(path: Path, experiment: "Experiment") -> "list[Finding]":
    lines = [(True, "experiment file", f"{path}: {len(experiment.methods)} methods, {len(experiment.seeds)} seeds")]
    dataset, autoencoder = experiment.dataset, experiment.autoencoder
    if dataset.source in ("folder", "parquet"):
        present = Path(str(dataset.path)).exists() or bool(glob.glob(str(dataset.path), recursive=True))
        lines.append((present, "data", f"{dataset.path}" + ("" if present else ": nothing there")))
    if autoencoder.kind == "pretrained":
        present = Path(str(autoencoder.path)).is_dir()
        fact = f"{autoencoder.path}" + ("" if present else ": no such folder; as a hub id it needs a network")
        lines.append((present, "autoencoder", fact))
    return lines
