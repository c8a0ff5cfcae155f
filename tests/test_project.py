"""A project outside of the clone, created with the installed package."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kairos.cli import main

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> dict[str, str]:
    """Environment of a process that imports kairos from its wheel alone."""
    folder = tmp_path_factory.mktemp("wheel")
    source = shutil.copytree(ROOT, folder / "source", ignore=shutil.ignore_patterns(".*", "results", "mlruns", "tests"))
    command = [sys.executable, "-m", "uv", "build", "--wheel", "--quiet", "--out-dir", str(folder), str(source)]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode:
        pytest.skip(f"the wheel cannot be built here (no package registry?): {built.stderr[-300:]}")
    zipfile.ZipFile(next(folder.glob("*.whl"))).extractall(folder / "unpacked")
    shutil.rmtree(source)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": str(folder / "unpacked"), "PATH": path}
    environment.pop("KAIROS_PLAN", None)
    return environment


@pytest.mark.long
def test_init_and_a_dry_run_from_the_wheel(installed, tmp_path):
    def run(*command: str, at: Path = tmp_path) -> str:
        ended = subprocess.run([sys.executable, "-m", *command], cwd=at, env=installed, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr

    assert "Snakefile, experiments, params.yaml, profiles" in run("kairos", "init", "mine")
    project = tmp_path / "mine"
    assert (project / "profiles/default").is_dir() and (project / "profiles/slurm").is_dir()
    assert "experiment demo" in run("kairos", "check", "params.yaml", at=project)
    (project / "Snakefile").write_text((project / "Snakefile").read_text() + "\n\nrule own:\n    output: 'own.txt'\n")
    printed = run("snakemake", "--dry-run", "--cores", "1", "all", "own", at=project)
    for rule in ("prepare", "autoencoder", "train", "evaluate", "report", "track", "own"):
        assert re.search(rf"^{rule} +\d+$", printed, re.MULTILINE), rule


def test_init_rejects_existing_files_and_folders_that_are_not_empty(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/mine").write_text("x")
    for path in ("a", "a/mine"):
        assert main(["init", str(tmp_path / path)]) == 2
        assert "allowed: an empty or new folder" in capsys.readouterr().err
    assert main(["init", str(tmp_path / "b")]) == 0
    assert (tmp_path / "b/experiments/schema.json").read_bytes() == (ROOT / "experiments/schema.json").read_bytes()
