"""CPU time and memory of the start of each kind of job, and the large packages that it imports.

    python benchmarks/job_imports.py > benchmarks/results/job_imports.csv

Each kind of job is one process, on the demo in a small form. Columns: job; start-up in CPU seconds (interpreter and
imports, see `kairos.resource_usage.end_startup`); all CPU seconds; peak memory in MiB; packages of `LARGE`.
`tests/test_imports.py` checks the packages of the form without an autoencoder.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
# packages and modules whose import takes more than 0.1 s of CPU time
LARGE = (
    *("torch", "torch._dynamo", "torchvision", "torch_fidelity", "diffusers", "transformers", "datasets"),
    *("scipy", "scipy.stats", "sklearn", "pandas", "matplotlib", "matplotlib.pyplot", "mlflow", "dvc", "snakemake"),
)
RUN = ("--method", "log_normal", "--seed", "1")

# command of each kind of job on the demo's images, in the order of the pipeline; the large packages that it may import
# without an autoencoder, which diffusers computes
JOBS: dict[str, tuple[list[str], set[str]]] = {
    "check": (["check", "x.yaml"], set()),
    "prepare": (["prepare", "--config", "x.yaml"], set()),
    "autoencoder": (["autoencoder", "--config", "x.yaml"], {"torch"}),
    "encode": (["encode", "--config", "x.yaml"], {"torch"}),
    "extractor": (["extractor", "--config", "x.yaml"], {"torch"}),
    "reference": (["reference", "--config", "x.yaml"], {"torch"}),
    "train": (["train", "--config", "x.yaml", *RUN], {"torch"}),
    "train by adaptive": (
        [
            *("train", "--config", "adaptive.yaml", "--method", "adaptive", "--seed", "1", "--out", "adaptive"),
            *("--latents", "results/demo/latents"),
        ],
        {"torch"},
    ),
    "sample": (["sample", "--config", "x.yaml", *RUN], {"torch"}),
    "evaluate": (["evaluate", "--config", "x.yaml", *RUN], {"torch"}),
    "measure": (
        ["analyse", "--config", "x.yaml", "--analysis", "gradient_variance", *RUN, "--step", "4"],
        {"torch", "pandas"},
    ),
    "report": (["report", "--config", "x.yaml"], {"scipy", "scipy.stats", "pandas", "matplotlib"}),
    "track": (["track", "--config", "x.yaml"], {"scipy", "scipy.stats", "pandas", "mlflow"}),
    "status": (["status", "x.yaml"], set()),
}

# runs one command and writes what it has used
RUN_JOB = """
import json, resource, sys
from kairos import resource_usage
from kairos.cli import main
status = main(json.loads(sys.argv[2]))
startup = resource_usage._startup.get("cpu")
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
with open(sys.argv[1], "w") as file:
    json.dump([status, startup, resource_usage.cpu_seconds(), peak, sorted({*sys.modules})], file)
"""


def write_small_demo(folder: Path, autoencoder: str) -> None:
    """Write x.yaml, the demo with one method and few steps, and adaptive.yaml, that experiment with method `adaptive`.

    Args:
        folder: folder of the two files.
        autoencoder: ``none``, or ``train`` as in the demo.
    """
    values: dict[str, Any] = yaml.safe_load((ROOT / "params.yaml").read_text())
    values["methods"] = {"log_normal": values["methods"]["log_normal"]}
    values["seeds"] = [1]
    values["autoencoder"] = {**values["autoencoder"], "steps": 2} if autoencoder == "train" else {"kind": "none"}
    values["model"] |= {"width": 32, "depth": 1}
    values["training"] |= {"milestones": [2, 4], "checkpoint_every": 2}
    values["sampling"] |= {"steps": 2}
    values["evaluation"] |= {"num_samples": 40, "extractor": {"name": "classifier", "features": 8, "steps": 2}}
    values["analyses"] = [{"name": "gradient_variance", "milestones": [4], "images": 4, "bins": 2}]
    (folder / "x.yaml").write_text(yaml.safe_dump(values))
    adaptive = {**values, "methods": {"adaptive": {"sampler": "adaptive"}}, "analyses": []}
    (folder / "adaptive.yaml").write_text(yaml.safe_dump(adaptive))


def main() -> None:
    """Run the jobs and print a row for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--autoencoder", choices=("train", "none"), default="train", help="default: train, the demo's")
    autoencoder = parser.parse_args().autoencoder
    setting = f"python {platform.python_version()}, one thread, cpu {platform.machine()}"
    print(f"# python benchmarks/job_imports.py; autoencoder {autoencoder}, {setting}")
    print("job,startup_seconds,cpu_seconds,peak_mib,packages")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_small_demo(folder, autoencoder)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db"}
        for job, (command, _) in JOBS.items():
            line = [sys.executable, "-c", RUN_JOB, "usage.json", json.dumps(command)]
            done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True)
            status, startup, cpu, peak, modules = json.loads((folder / "usage.json").read_text())
            assert status == 0, done.stderr
            packages = " ".join(name for name in LARGE if name in modules)
            print(
                f"{job},{'' if startup is None else format(startup, '.2f')},{cpu:.2f},{peak:.0f},{packages}", flush=True
            )


if __name__ == "__main__":
    main()
