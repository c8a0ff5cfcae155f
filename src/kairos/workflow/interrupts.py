"""A run on this machine that is told to end, by Ctrl-C, SIGINT, SIGTERM or a terminal that is closed.

Snakemake by itself waits on SIGTERM until its jobs are done, counts on a terminal to have sent its SIGINT to them too,
and hears none where a script started it in the background. Here each of them ends it alike: nothing further starts, its
jobs get SIGTERM, at which trainings write their state, and what is left of them after a while is killed.
"""

import logging
import signal
import threading
import time
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import psutil

_PATIENCE = 45.0  # seconds that jobs have to end
told_at: list[float] = []  # when this run was told to end, if it was


def obey(scheduler: Any) -> None:
    """From now on these signals end the run; a hang-up only where it is not ignored (nohup)."""
    told: SimpleQueue[int] = SimpleQueue()  # whose `put` may interrupt any code of the main thread
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: told.put(number))
    threading.Thread(target=_end, args=(scheduler, told), daemon=True).start()


def _end(scheduler: Any, told: "SimpleQueue[int]") -> None:
    told.get()
    told_at.append(time.time())
    logging.disable()  # Snakemake would call each of its jobs failed
    scheduler.exit_gracefully()
    known: set[psutil.Process] = set()
    while True:  # until this process ends
        late = time.time() - told_at[0] > _PATIENCE
        for process in set(psutil.Process().children(recursive=True)) - (set() if late else known):
            with suppress(psutil.Error):
                process.kill() if late else process.terminate()
            known.add(process)
        time.sleep(0.2)
