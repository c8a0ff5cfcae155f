"""The executor plugin without a SLURM: its record of the jobs that earlier controllers have sent."""

import os
import threading

import pytest

from kairos.files import write_json
from kairos.slurm import books
from snakemake_executor_plugin_kairos.executor import Executor


@pytest.fixture
def executor(tmp_path, monkeypatch):
    """An executor in an empty folder, with a `squeue` that takes a moment, counts its calls and lists no job."""
    monkeypatch.chdir(tmp_path)
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text("#!/bin/sh\necho called >> calls\nsleep 0.3\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(squeue.parent), prepend=os.pathsep)
    executor = Executor.__new__(Executor)  # what __post_init__ sets up needs a whole workflow
    executor._results = "results/demo"
    executor._leaving = threading.Event()
    executor._reading_earlier = threading.Lock()
    executor._earlier_jobs = None
    return executor


def test_threads_that_submit_jobs_share_one_record_of_earlier_jobs(executor, tmp_path):
    for number in (11, 12):
        write_json(books("results/demo") / f"{number}.json", {"outputs": [], "work": {}, "slurm_logfile": "log"})
    records, start = [], threading.Barrier(2)

    def read():
        start.wait()
        records.append(executor._earlier)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert records[0] is records[1] and {path.stem for path in records[0]} == {"11", "12"}
    assert (tmp_path / "calls").read_text().splitlines() == ["called"]
    executor._forget(books("results/demo") / "11.json")
    assert {path.stem for path in executor._earlier} == {"12"}
