"""Real data sets through the whole pipeline for a few hundred steps; they lie beside the project and may be absent."""

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kairos.files import read_json

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

ROOT = Path(__file__).parent.parent
DATA = ROOT.parent / "shared" / "data"

UNET = {
    "name": "unet", "channels": 16, "multipliers": [1, 2], "blocks": 1, "attention": [], "norm_groups": 8,
}  # fmt: skip
DIT = {"name": "dit", "patch": 2, "width": 64, "depth": 2, "heads": 4}
CASES: dict[str, dict[str, Any]] = {
    "fashion_mnist": {
        "dataset": {"path": str(DATA / "fashion_mnist" / "train-*.parquet"), "color": "grey"},
        "model": UNET,
    },
    "cifar10": {"dataset": {"path": str(DATA / "cifar10" / "train-*.parquet"), "flips": True}, "model": UNET},
    "cifar10_taesd": {
        "dataset": {"path": str(DATA / "cifar10" / "train-*.parquet"), "flips": True},
        "autoencoder": {"kind": "pretrained", "path": str(DATA / "taesd")},
        "model": DIT,
    },
}


@pytest.mark.skipif(not DATA.is_dir(), reason="the data sets beside the project (shared/data) are absent")
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_real_data_set_from_images_to_the_table(name, tmp_path):
    pixels = "autoencoder" not in CASES[name]
    case = CASES[name]
    case["dataset"] |= {"source": "parquet", "limit": 2000, "heldout": 0.15}
    experiment = {
        **case,
        "experiment": name,
        "training": {
            "batch_size": 16, "milestones": [100, 200], "device": "cpu", "ema": {"decay": 0.98},
            "optimizer": {"name": "adam", "lr": 1e-3},
        },
        "methods": {
            "adaptive": {
                "sampler": {"name": "adaptive", "frequency": 20, "feature_timesteps": 100}, "weighting": "min_snr",
            },
        },
        "sampling": {"scheduler": {"name": "ddim", "clip": pixels}, "steps": 8},
        "evaluation": {
            "extractor": {"name": "classifier", "features": 16, "channels": 8, "steps": 150},
            "num_samples": 160, "sets": 2, "strata": 8, "loss_images": 64,
        },
    }  # fmt: skip
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(experiment))
    line = [
        sys.executable,
        "-m",
        "snakemake",
        "--snakefile",
        ROOT / "Snakefile",
        "--directory",
        tmp_path,
        "--cores",
        "2",
    ]
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "hf"), "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    done = subprocess.run([*line, "--configfile", path], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = tmp_path / "results" / name
    manifest = read_json(results / "dataset" / "manifest.json")
    assert manifest["count"] == 2000 and len(manifest["classes"]) == 10
    latents = read_json(results / "latents" / "manifest.json")
    assert latents["kind"] == ("pixels" if pixels else "moments")
    if not pixels:
        assert latents["shape"] == [4, 4, 4] and (results / "latents" / "mean_flipped.npy").exists()
    with open(results / "summary.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    loss = {row["step"]: float(row["val_loss"]) for row in rows if row["step"]}
    assert loss["200"] < loss["100"] < loss["0"]
    distance = {row["method"]: float(row["frechet_classifier16"]) for row in rows if not row["step"]}
    assert distance["floor"] < distance["gaussian"] < distance["noise"]
    assert (results / "report.html").stat().st_size > 100_000
