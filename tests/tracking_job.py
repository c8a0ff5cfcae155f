"""A process that writes down a training step by step, as `kairos train` does, and reports it while it does so.

It takes its lines from a finished training (results_tree.py writes them), so that it needs no torch and dozens of them
can run side by side. Standard input says how far to go: a number of steps per line. For each it answers with the
seconds that the steps took, and at the end of the input with those that the end took.
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

    def progress(step: int, how: str) -> None:
        facts = {"identity": identity, "step": step, "state": how, "updated": time.time()}
        write_json(out / ".state/progress.json", {**facts, "pid": os.getpid(), "host": socket.gethostname()})

    begun = time.monotonic()
    with reporting(load(config), method, int(seed), out):
        step = resume(state)
        progress(step, "running")
        for order in sys.stdin:
            begun = time.monotonic()
            for name in ("metrics.jsonl", "timing.jsonl"):
                with open(state / name, "a", encoding="utf-8") as file:
                    for line in (source / name).read_text().splitlines():
                        if step < json.loads(line)["step"] <= int(order) or (step == 0 and '"step": 0,' in line):
                            file.write(line + "\n")
            step = int(order)
            print(time.monotonic() - begun, flush=True)
        progress(step, "complete")
        begun = time.monotonic()
    print(time.monotonic() - begun, flush=True)


def resume(state: Path) -> int:
    """The last step that a process before this one wrote down."""
    timing = state / "timing.jsonl"
    return json.loads(timing.read_text().splitlines()[-1])["step"] if timing.exists() else 0


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(Path, sys.argv[4:]))
    assert "torch" not in sys.modules
