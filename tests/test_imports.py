"""Each kind of job imports only the large packages that it needs, since imports are most of a small job's CPU time.

`benchmarks/job_imports.py` lists the jobs and measures their CPU time.
"""

import json
import os
import subprocess
import sys

import pytest
from job_imports import JOBS, LARGE, write_small_demo

pytestmark = pytest.mark.long

# Runs each job in a fork. Jobs that may import torch are forks of a process that has imported it.
RUN_JOBS = """
import json, os, sys
from kairos import portable
portable.set_variables()  # as each command of the demo does before it imports torch
from kairos.cli import main

def run(name, command):
    output = os.open(f"{name}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    status = main(command)
    with open(f"{name}.json", "w") as file:
        json.dump([status, sorted({*large} & {*sys.modules})], file)

def in_fork(function, *arguments):
    process = os.fork()
    if process == 0:
        try:
            function(*arguments)
        finally:
            os._exit(0)
    os.waitpid(process, 0)

def run_with_torch(jobs):
    import torch
    for job in jobs:
        in_fork(run, *job)

before, with_torch, after, large = json.loads(sys.argv[1])
for job in before:
    in_fork(run, *job)
in_fork(run_with_torch, with_torch)
for job in after:
    in_fork(run, *job)
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """The large packages that each kind of job has imported at its end."""
    folder = tmp_path_factory.mktemp("imports")
    write_small_demo(folder, autoencoder="none")
    names = list(JOBS)
    groups = [names[: names.index("autoencoder")], names[names.index("autoencoder") : names.index("report")]]
    groups.append(names[names.index("report") :])
    order = [[(name, JOBS[name][0]) for name in group] for group in groups]
    command = [sys.executable, "-c", RUN_JOBS, json.dumps([*order, LARGE])]
    store = {**os.environ, "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db", "MLFLOW_DISABLE_TELEMETRY": "true"}
    subprocess.run(command, cwd=folder, env=store, check=True)
    result = {}
    for name in JOBS:
        log = (folder / f"{name}.log").read_text()
        assert (folder / f"{name}.json").exists(), log
        status, result[name] = json.loads((folder / f"{name}.json").read_text())
        assert status == 0, log
    return result


@pytest.mark.parametrize("name", JOBS)
def test_a_job_imports_only_the_large_packages_that_it_needs(imported, name):
    assert set(imported[name]) <= JOBS[name][1]
