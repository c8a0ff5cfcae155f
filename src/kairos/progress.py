"""Progress with rate and remaining time, as a bar on a terminal or as lines in log files; messages and tables.

tqdm draws the bar. It writes no plain lines for log files. Tables use no package, because the imports of tabulate and
rich slow the start of a command.
"""

import os
import sys
import time
from collections.abc import Collection, Sequence
from typing import Any

_INTERVAL = 10.0  # seconds between lines in a log file
_BAR_INTERVAL = 0.5  # seconds between updates of the facts in a bar


class ProgressBar:
    """Progress of a long loop on stderr: a bar if stderr is a terminal, else lines.

    Args:
        total: number of units.
        label: name of the work, such as ``train speed seed 0``.
        unit: name of a unit, such as ``step`` or ``image``.
        start: units that an interrupted run has done, which are left out of the rate.
    """

    def __init__(self, total: int, label: str, unit: str, start: int = 0):
        self.total, self.label, self.unit = total, label, unit
        self.done = self._first = start
        self._start_time = self._last_output = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=label, unit=unit, initial=start, file=sys.stderr, dynamic_ncols=True)

    def advance(self, count: int = 1, facts: str = "") -> None:
        """Add `count` finished units; `facts` is a short text to show, such as the loss.

        A terminal shows each call in a bar, and new facts at most every 0.5 seconds. A log file gets a line at most
        every 10 seconds, and none when all units are done: `close` prints the last line.
        """
        self.done += count
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(count)
            if facts and now - self._last_output > _BAR_INTERVAL:
                self._bar.set_postfix_str(facts, refresh=False)
                self._last_output = now
        elif now - self._last_output >= _INTERVAL and self.done < self.total:
            self._last_output = now
            self._print_line(facts)

    def close(self, facts: str = "") -> None:
        """Close the bar, or print the last line with `facts`, which a bar does not show; the caller calls this once."""
        if self._bar is not None:
            self._bar.close()
        else:
            self._print_line(facts)

    def _print_line(self, facts: str) -> None:
        """Print the progress and rate as one line, with the remaining time or, at the end, the time since the start."""
        elapsed = max(time.monotonic() - self._start_time, 1e-9)  # seconds; no division by zero below
        rate = (self.done - self._first) / elapsed
        line = f"{self.label}: {self.unit} {self.done}/{self.total}, {rate:.3g} {self.unit}s/s"
        if self.done < self.total:
            remaining = (self.total - self.done) / rate if rate > 0 else float("inf")
            line += f", {duration(remaining)} left"
        else:
            line += f", took {duration(elapsed)}"
        if facts:
            line += f", {facts}"
        log(line)


def duration(seconds: float) -> str:
    """Return a time in seconds as text, such as 9 s, 3:05 or 2:03:04; ``unknown time`` for infinity."""
    if seconds == float("inf"):
        return "unknown time"
    whole_seconds = round(seconds)
    if whole_seconds < 60:
        return f"{whole_seconds} s"
    minutes, second = divmod(whole_seconds, 60)
    if minutes < 60:
        return f"{minutes}:{second:02d}"
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}"


def table(rows: Sequence[Sequence[object]], left: Collection[int] = (0,)) -> str:
    """Return rows of cells as text in columns, two blanks apart.

    Args:
        rows: cells of each row; the first row is the header, and without rows the text is empty. The caller ensures
            that all rows have equally many cells: cells beyond the end of the shortest row are left out.
        left: indices of the columns that are aligned to the left, with their header; all others are aligned to the
            right.
    """
    columns = []
    for index, cells in enumerate(zip(*rows)):
        texts = [str(cell) for cell in cells]
        width = max(map(len, texts))
        columns.append([text.ljust(width) if index in left else text.rjust(width) for text in texts])
    lines = ["  ".join(row).rstrip() for row in zip(*columns)]
    return "\n".join(lines)


def log(text: str) -> None:
    """Print a line for the user on stderr.

    If the program that reads stderr has ended, such as `tee`, the line and all further ones are dropped.
    """
    try:
        print(text, file=sys.stderr, flush=True)
    except BrokenPipeError:
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, sys.stderr.fileno())  # stderr writes there from now on
