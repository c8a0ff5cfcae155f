"""Functions that run in several threads of a job: computation in the order of the arguments, and slow reads."""

import functools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_CHUNK = 4  # calls per task of a thread, because starting a task takes about 50 microseconds
_SLOW_CALL = 0.0005  # seconds; faster calls hold Python's lock too long to profit from threads
_SLOW_READ = 0.0003  # seconds; reads from memory or a local disk are faster
_READERS = 32  # threads that wait for slow reads; they take no CPU time meanwhile
_Outcome = tuple[list[Result], BaseException | None]  # results of a chunk, and the error that ended it


def count_job_threads() -> int:
    """Return the number of threads that this job may compute with: ``OMP_NUM_THREADS``, but at most the usable CPUs.

    Snakemake and the launcher of several processes set the variable to the number of threads of a job. Without a whole
    number in it, the result is the number of CPUs that this process may use. The result is at least 1.
    """
    usable_cpus = len(os.sched_getaffinity(0))
    configured = os.environ.get("OMP_NUM_THREADS", "")
    if not configured.isdigit():
        return usable_cpus
    return min(max(int(configured), 1), usable_cpus)


def map_in_order(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int, chunk: int = _CHUNK
) -> Iterator[Result]:
    """Yield ``function(item)`` for all items, in their order; several threads compute ahead if the calls are slow.

    An error of a call is raised after the results of the calls before it, as in a loop in one thread. A few items per
    thread are in flight, so memory does not grow with the number of items. Threads start after two consecutive slow
    calls: fast calls, such as decoding images of 8×8 pixels, would only wait for Python's lock.

    Args:
        function: function that several threads may call at a time.
        items: arguments of the calls; they are taken in the thread of the caller.
        threads: largest number of threads; 1: all calls run in the thread of the caller.
        chunk: calls per task of a thread; 1 if a call takes seconds.
    """
    remaining = iter(items)
    slow_calls = 0  # in succession
    for item in remaining:
        start = time.perf_counter()
        result = function(item)
        if time.perf_counter() - start > _SLOW_CALL:
            slow_calls += 1
        else:
            slow_calls = 0
        yield result
        if threads > 1 and slow_calls == 2:
            break
    yield from _map_in_threads(function, remaining, threads, chunk)  # yields nothing if the loop took all items


def _map_in_threads(
    function: Callable[[Item], Result], items: Iterator[Item], threads: int, chunk_size: int
) -> Iterator[Result]:
    """Yield ``function(item)`` for all items, in their order, computed by several threads.

    An error of a call is raised after the results of the calls before it. Calls that have not started are then
    cancelled, also if the caller takes no more results.
    """
    with ThreadPoolExecutor(threads) as pool:
        pending: deque[Future[_Outcome[Result]]] = deque()  # chunks in the order of the items
        try:
            while chunk := list(islice(items, chunk_size)):  # the next items, until there are none
                pending.append(pool.submit(_call_until_error, function, chunk))
                if len(pending) > 2 * threads:  # one chunk in work and one in reserve for each thread
                    yield from _results_or_error(pending.popleft())
            while pending:
                yield from _results_or_error(pending.popleft())
        finally:
            for future in pending:  # after an error, or if the caller takes no more results
                future.cancel()


def read_all(read: Callable[[Item], None], items: Sequence[Item]) -> None:
    """Call ``read(item)`` for all items, and return when all reads have ended; many threads read if reads are slow.

    Reads of a network file system take about a millisecond each, whatever their size, so waiting for several at a
    time is faster. Threads start after two consecutive slow reads. Short reads from memory take microseconds, so they
    start no threads.

    Args:
        read: function that several threads may call at a time; the order of the calls does not matter.
        items: arguments of the calls.

    Raises:
        Exception: a read raised it. The items after it may be unread, and with threads other reads may still run.
    """
    slow_reads = 0  # in succession
    for index, item in enumerate(items):
        if slow_reads == 2 and len(items) - index > 1:  # a single last read needs no threads
            _read_in_threads(read, items[index:])
            return
        start = time.perf_counter()
        read(item)
        if time.perf_counter() - start > _SLOW_READ:
            slow_reads += 1
        else:
            slow_reads = 0


def _read_in_threads(read: Callable[[Item], None], items: Sequence[Item]) -> None:
    """Call ``read(item)`` for all items in up to 32 threads, each of which takes a slice of the items.

    An error of a read ends its slice. The error of the first such slice is raised, while later slices may still run.
    """
    slice_size = math.ceil(len(items) / _READERS)

    def read_slice(start: int) -> None:
        for item in items[start : start + slice_size]:
            read(item)

    pool = _reading_pool()
    futures = [pool.submit(read_slice, start) for start in range(0, len(items), slice_size)]
    for future in futures:
        future.result()  # raises the error of a read


@functools.cache
def _reading_pool() -> ThreadPoolExecutor:
    """Return the pool of 32 threads for slow reads, which the first call in this process creates."""
    return ThreadPoolExecutor(_READERS, thread_name_prefix="slow-reads")


os.register_at_fork(after_in_child=_reading_pool.cache_clear)  # a fork has no threads of its parent


def _call_until_error(function: Callable[[Item], Result], items: list[Item]) -> "_Outcome[Result]":
    """Call ``function(item)`` for items up to the first error; return the results and the error, or None without one.

    Errors of all types are caught, also KeyboardInterrupt and SystemExit.
    """
    results: list[Result] = []
    for item in items:
        try:
            results.append(function(item))
        except BaseException as error:  # raised again in the thread of the caller
            return results, error
    return results, None


def _results_or_error(future: "Future[_Outcome[Result]]") -> Iterator[Result]:
    """Wait for a chunk of calls, yield its results, and then raise its error if there is one."""
    results, error = future.result()
    yield from results
    if error is not None:
        raise error
