"""Process that records a training run step by step, as `kairos train` does, and reports it to the tracking store.

Its records come from a finished training run of results_tree.py, so that it needs no torch and dozens of such processes
can run at once. Each line of standard input is the step up to which it records. It answers each line with the seconds
that these steps took, and the end of the input with the seconds that ending the run took.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path

from kairos.config import load
from kairos.files import read_json, write_json
from kairos.tracking.live import reporting


def main(config: str, method: str, seed: str, source: Path, out: Path) -> None:
    identity = read_json(source / "training.json")["identity"]
    state = out / ".state" / identity[:16]
    state.mkdir(parents=True, exist_ok=True)

    def write_progress(step: int, status: str) -> None:
        record = {"identity": identity, "step": step, "state": status, "updated": time.time()}
        write_json(out / ".state/progress.json", {**record, "pid": os.getpid(), "host": socket.gethostname()})

    start = time.monotonic()
    with reporting(load(config), method, int(seed), out):
        step = resume(state)
        write_progress(step, "running")
        for order in sys.stdin:
            start = time.monotonic()
            for name in ("metrics.jsonl", "timing.jsonl"):
                with open(state / name, "a", encoding="utf-8") as file:
                    for line in (source / name).read_text().splitlines():
                        if step < json.loads(line)["step"] <= int(order) or (step == 0 and '"step": 0,' in line):
                            file.write(line + "\n")
            step = int(order)
            print(time.monotonic() - start, flush=True)
        write_progress(step, "complete")
        start = time.monotonic()
    print(time.monotonic() - start, flush=True)


def resume(state: Path) -> int:
    """Return the last step that an earlier process recorded."""
    timing = state / "timing.jsonl"
    return json.loads(timing.read_text().splitlines()[-1])["step"] if timing.exists() else 0


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(Path, sys.argv[4:]))
    assert "torch" not in sys.modules
