"""Several threads give the results, the errors and the order of one thread; a kill leaves no half-written data set."""

import multiprocessing
import os
import random
import signal
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kairos import threads
from kairos.data.arrays import ArrayFile
from kairos.data.dataset import open_dataset
from kairos.data.linked_images import delete_temporary_copy
from kairos.data.prepare import prepare, write_dataset
from kairos.data.sources import Source, open_source
from kairos.files import DamagedError
from kairos_timesteps.errors import KairosError
from test_data import config, random_image, write_images
from test_tables import hub_cache, write_parquet  # noqa: F401  (a fixture)


@pytest.fixture
def use_threads(monkeypatch):
    """Function that sets the number of threads of this process's jobs, and lets fast calls use them too."""
    monkeypatch.setattr(threads, "_SLOW_CALL", -1.0)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda process: set(range(64)))

    def use(count: int) -> None:
        monkeypatch.setenv("OMP_NUM_THREADS", str(count))

    return use


def read_folder(folder: Path) -> dict[str, bytes]:
    """Return the content of each file below a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def source_settings(kind: str, folder: Path, count: int = 30, broken: int | None = None, **fields):
    """Write `count` images as a source of some kind, and return its section `dataset`.

    Args:
        kind: folder, zip, parquet or digits.
        folder: folder to write into.
        count: number of images.
        broken: index of a truncated image; None: none.
        fields: further fields of the section.
    """
    if kind == "digits":
        return config(source=kind, limit=count, **fields)
    if kind == "parquet":
        path = write_parquet(folder / "images.parquet", count, broken=broken)
        return config(source=kind, path=str(path), **fields)
    path = write_images(folder / "images", count)
    if broken is not None:
        file = path / f"{broken:03d}.png"
        file.write_bytes(file.read_bytes()[:60])
    if kind == "zip":
        archive = folder / "images.zip"
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
            for image in sorted(path.iterdir()):
                file.write(image, f"part/{image.name}")
        path = archive
    return config(source=kind, path=str(path), **fields)


@given(
    st.lists(st.sampled_from(["fast", "slow", "error"]), max_size=60),
    st.integers(1, 8),
    st.sampled_from([-1.0, 0.0005, 10.0]),
)
@settings(max_examples=40, deadline=None)
def test_threads_give_the_results_and_the_first_error_of_a_loop(calls, count, slow_call):
    def compute(index):
        if calls[index] == "slow":
            time.sleep(random.random() * 2e-3)
        if calls[index] == "error":
            raise ValueError(f"item {index}")
        return index * index

    def collect(results):
        values = []
        try:
            for value in results:
                values.append(value)
        except ValueError as error:
            return values, str(error)
        return values, None

    expected = collect(map(compute, range(len(calls))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "_SLOW_CALL", slow_call)
        assert collect(threads.map_in_order(compute, range(len(calls)), count)) == expected


def test_slow_calls_use_all_threads_and_take_few_items_ahead():
    running, most_running, taken = set(), [0], [0]

    def items():
        for index in range(400):
            taken[0] += 1
            yield index

    def compute(index):
        running.add(threading.get_ident())
        most_running[0] = max(most_running[0], len(running))
        time.sleep(1e-3)
        return index

    most_ahead = 0
    for index in threads.map_in_order(compute, items(), 3):
        most_ahead = max(most_ahead, taken[0] - index)
    assert most_running[0] == 1 + 3  # the first calls are in the thread of the caller
    assert most_ahead <= 4 * (2 * 3 + 1)


def test_fast_calls_stay_in_one_thread(monkeypatch):
    monkeypatch.setattr(threads, "_SLOW_CALL", 10.0)
    used = set(threads.map_in_order(lambda index: threading.get_ident(), range(100), 8))
    assert used == {threading.get_ident()}


def test_an_abandoned_loop_starts_no_further_calls(monkeypatch):
    monkeypatch.setattr(threads, "_SLOW_CALL", -1.0)
    called = []
    results = threads.map_in_order(lambda index: called.append(index) or index, range(10_000), 4)
    assert next(results) == 0
    assert [next(results) for _ in range(5)] == [1, 2, 3, 4, 5]
    results.close()
    count = len(called)
    assert count < 100
    time.sleep(0.05)
    assert len(called) == count


@pytest.mark.parametrize(
    ("variable", "usable", "expected"), [("3", 8, 3), ("16", 8, 8), (None, 8, 8), ("0", 8, 1), ("1,2", 8, 8)]
)
def test_a_job_uses_its_threads_and_no_more_than_its_cpus(monkeypatch, variable, usable, expected):
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda process: set(range(usable)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert threads.count_job_threads() == expected


@pytest.mark.parametrize("kind", ["folder", "zip", "parquet", "digits"])
@pytest.mark.parametrize("store", ["copy", "refer"])
def test_every_source_gives_equal_files_with_any_number_of_threads(tmp_path, hub_cache, use_threads, kind, store):  # noqa: F811
    section = source_settings(kind, tmp_path, resolution=6, store=store, heldout=0.2)
    contents, images = [], []
    for count in (1, 2, 7):
        use_threads(count)
        out = tmp_path / f"out{count}"
        prepare(section, out)
        contents.append(read_folder(out))
        images.append(open_dataset(out).images[:])
    assert contents[0] == contents[1] == contents[2]
    assert np.array_equal(images[0], images[1]) and np.array_equal(images[0], images[2])


@pytest.mark.parametrize("kind", ["folder", "zip", "parquet"])
def test_a_broken_image_is_reported_or_skipped_with_any_number_of_threads(
    tmp_path,
    hub_cache,  # noqa: F811
    use_threads,
    kind,
):
    section = source_settings(kind, tmp_path, broken=17)
    messages, skipped = set(), []
    for count in (1, 2, 7):
        use_threads(count)
        with pytest.raises(KairosError) as error:
            prepare(section, tmp_path / "out")
        messages.add(str(error.value))
        with pytest.raises(KairosError, match="not complete"):
            open_dataset(tmp_path / "out")
        record = prepare(section.model_copy(update={"broken": "skip"}), tmp_path / "out")
        skipped.append((record["skipped"], record["count"], record["files"]))
    assert len(messages) == 1 and "17" in messages.pop()
    assert skipped[0] == skipped[1] == skipped[2] and len(skipped[0][0]) == 1 and skipped[0][1] == 29


def test_the_first_of_several_broken_images_is_reported_although_a_later_one_fails_earlier(tmp_path, use_threads):
    section = source_settings("folder", tmp_path)
    source = open_source(section)
    use_threads(8)

    def read(index):
        if index == 11:
            time.sleep(0.05)
        if index >= 11:
            raise ValueError("no image")
        return source.read(index)

    with pytest.raises(KairosError, match=r"011\.png is broken"):
        write_dataset(section, Source(source.count, read, source.name), tmp_path / "out")


def test_the_first_changed_linked_image_is_reported_with_any_number_of_threads(tmp_path, use_threads):
    section = source_settings("folder", tmp_path, store="refer")
    prepare(section, tmp_path / "out")
    delete_temporary_copy(tmp_path / "out")
    for index in (21, 9, 27):
        random_image(500 + index).save(tmp_path / "images" / f"{index:03d}.png")
    for count in (1, 2, 7):
        use_threads(count)
        with pytest.raises(DamagedError, match=r"009\.png, which has changed"):
            open_dataset(tmp_path / "out").images[:]


def _prepare_until_killed(section, out: Path, index: int) -> None:
    """Prepare a data set in a process that dies while a thread decodes the image with an index."""
    source = open_source(section)

    def read(number):
        if number == index:
            os.kill(os.getpid(), signal.SIGKILL)
        return source.read(number)

    write_dataset(section, Source(source.count, read, source.name), out)


@pytest.mark.parametrize("store", ["copy", "refer"])
@pytest.mark.parametrize("index", [1, 14, 29])
def test_a_kill_while_threads_decode_leaves_no_data_set(tmp_path, use_threads, store, index):
    section = source_settings("folder", tmp_path, store=store)
    whole = prepare(section, tmp_path / "whole")
    out = tmp_path / "out"
    prepare(section, out)  # an earlier data set must not be taken for the new one
    use_threads(5)
    job = multiprocessing.get_context("fork").Process(target=_prepare_until_killed, args=(section, out, index))
    job.start()
    job.join()
    assert job.exitcode == -signal.SIGKILL
    with pytest.raises(KairosError, match=r"not complete.*kairos prepare"):
        open_dataset(out)
    assert prepare(section, out) == whole
    assert read_folder(out) == read_folder(tmp_path / "whole")


@pytest.fixture
def slow_disk(monkeypatch):
    """Delay each read of an array file by a millisecond, and return the set of threads that read."""
    real_read, readers = os.preadv, set()

    def read_slowly(*arguments):
        readers.add(threading.get_ident())
        time.sleep(1e-3)
        return real_read(*arguments)

    monkeypatch.setattr("kairos.data.arrays.os.preadv", read_slowly)
    return readers


@given(st.lists(st.integers(0, 99), max_size=80), st.booleans())
@settings(max_examples=30, deadline=None)
def test_rows_read_by_threads_equal_the_rows_of_the_file(tmp_path_factory, indices, slow):
    values = np.random.default_rng(0).normal(size=(100, 3, 2)).astype(np.float32)
    path = tmp_path_factory.mktemp("rows") / "rows.npy"
    np.save(path, values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "_SLOW_READ", -1.0 if slow else 10.0)
        assert np.array_equal(ArrayFile(path)[np.array(indices, np.int64)], values[np.array(indices, np.int64)])


def test_a_slow_disk_is_read_by_many_threads_and_memory_by_one(tmp_path, slow_disk):
    values = np.arange(512 * 4).reshape(512, 4)
    np.save(tmp_path / "rows.npy", values)
    indices = np.random.default_rng(0).permutation(512)[:256]
    assert np.array_equal(ArrayFile(tmp_path / "rows.npy")[indices], values[indices])
    assert len(slow_disk) > 8


def _read_slowly_and_exit(path: Path, expected: np.ndarray) -> None:
    """Read all rows of an array file backwards in a forked process, and exit with status 7 if they are right."""
    rows = ArrayFile(path)[np.arange(len(expected) - 1, -1, -1)]
    os._exit(7 if np.array_equal(rows, expected[::-1]) else 1)


def test_a_fork_reads_with_its_own_threads(tmp_path, slow_disk):
    values = np.arange(200)
    path = tmp_path / "rows.npy"
    np.save(path, values)
    assert np.array_equal(ArrayFile(path)[np.arange(199, -1, -1)], values[::-1])
    job = multiprocessing.get_context("fork").Process(target=_read_slowly_and_exit, args=(path, values))
    job.start()
    job.join(60)
    assert job.exitcode == 7


def test_fast_reads_start_no_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(threads, "_SLOW_READ", 10.0)
    np.save(tmp_path / "rows.npy", np.arange(1000))
    readers = set()
    threads.read_all(lambda index: readers.add(threading.get_ident()), range(1000))
    assert readers == {threading.get_ident()}


def test_a_file_that_became_shorter_is_reported_by_threads(tmp_path, slow_disk):
    np.save(tmp_path / "rows.npy", np.arange(300))
    rows = ArrayFile(tmp_path / "rows.npy")
    os.truncate(tmp_path / "rows.npy", 600)
    with pytest.raises(DamagedError, match=r"rows\.npy: ends early"):
        rows[np.arange(299, -1, -1)]
