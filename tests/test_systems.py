"""The systems of both papers: their files, their published sizes, and small forms of them that learn."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kairos.config import load
from kairos.costs.network import measure
from kairos.diffusion.processes import build_process

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))

from papers import FILES, SYSTEMS  # noqa: E402


def test_every_file_is_a_system_and_the_reverse():
    assert {file.stem for file in FILES.glob("*.yaml")} == set(SYSTEMS)


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_has_its_published_size(name):
    """What `kairos plan` prints, and in every file the methods uniform (EDM's own law for EDM), speed and adaptive."""
    experiment, system = load(FILES / f"{name}.yaml"), SYSTEMS[name]
    assert experiment.experiment == name and {"speed", "adaptive"} < set(experiment.methods)
    outputs = build_process(experiment.plain()["diffusion"], 0.5).channels(system.shape[0])
    found = measure(experiment.model, system.shape, system.conditions, 1, outputs=outputs)
    assert found.parameters + found.fixed == system.parameters


@pytest.mark.long
def test_small_forms_learn(tmp_path):
    """Three systems through the pipeline's own commands, on digits; `make systems` runs all, on CIFAR-10 and COCO."""
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "systems.py"),
        "dit_imagenet256",
        "mdt_imagenet256",
        "edm_cifar10",
    ]
    environment = os.environ | {"DATA": str(tmp_path / "none"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    with open(tmp_path / "systems.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 9 and all(int(row["small_parameters"]) < 1e6 for row in rows)
    for row in rows:
        assert float(row["loss_after"]) < float(row["loss_before"]), row
        assert (tmp_path / "systems" / f"{row['system']}_{row['method']}.png").is_file()
