"""Progress with rate and remaining time: a bar on a terminal, plain lines elsewhere (log files, pipes)."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

_INTERVAL = 10.0  # seconds between plain lines


class Progress:
    """Progress of a long loop.

    Args:
        total: number of units.
        label: what is done, e.g. ``train speed seed 0``.
        unit: name of a unit, e.g. ``step`` or ``image``.
        start: units already done before (a resume); they do not count for the rate.
    """

    def __init__(self, total: int, label: str, unit: str, start: int = 0):
        self.total, self.label, self.unit = total, label, unit
        self.done = self._first = start
        self._begun = self._said = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=label, unit=unit, initial=start, file=sys.stderr, dynamic_ncols=True)

    def advance(self, count: int = 1, facts: str = "") -> None:
        """Count `count` more units; `facts` is a text such as the loss."""
        self.done += count
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(count)
            if facts and now - self._said > 0.5:
                self._bar.set_postfix_str(facts, refresh=False)
                self._said = now
        elif now - self._said >= _INTERVAL and self.done < self.total:
            self._said = now
            self._line(facts)

    def close(self, facts: str = "") -> None:
        """End the bar, or say the last line."""
        if self._bar is not None:
            self._bar.close()
        else:
            self._line(facts)

    def _line(self, facts: str) -> None:
        seconds = max(time.monotonic() - self._begun, 1e-9)
        rate = (self.done - self._first) / seconds
        left = (self.total - self.done) / rate if rate > 0 else float("inf")
        text = f"{self.label}: {self.unit} {self.done}/{self.total}, {rate:.3g} {self.unit}s/s"
        text += f", {duration(left)} left" if self.done < self.total else f", took {duration(seconds)}"
        log(text + (f", {facts}" if facts else ""))


def duration(seconds: float) -> str:
    """A time as people read it: 9 s, 3:05, 2:03:04."""
    if seconds == float("inf"):
        return "unknown time"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def table(rows: Sequence[Sequence[object]], right: Callable[[bool, int, str], bool]) -> str:
    """Rows in columns, two blanks apart; `right` says, of whether a cell is in the head, its column and its text,
    whether it stands to the right of its column.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = []
    for row in cells:
        sides = ["<>"[right(row is cells[0], place, cell)] for place, cell in enumerate(row)]
        lines.append("  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths)).rstrip())
    return "\n".join(lines)


def log(text: str) -> None:
    """A line for the user, on stderr; where nobody reads it any more, as after the end of a `tee`, work goes on."""
    try:
        print(text, file=sys.stderr, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
