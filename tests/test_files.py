"""Folders and files are replaced atomically: a reader, or a kill at any moment, finds the old or the new version."""

import errno
import os
import signal
import subprocess
import sys
import time
import zipfile

import numpy as np
import pytest

from kairos import files
from kairos.files import DamagedError, RecordReader, atomic_folder, list_by_step, lock_folder, read_record, write_record
from kairos_timesteps.errors import KairosError

WRITER = """
import sys
from pathlib import Path
from kairos.files import atomic_folder
for number in range(100_000):
    with atomic_folder(Path(sys.argv[1])) as folder:
        for name in "abcdefgh":
            (folder / name).write_text(str(number))
    print(number, flush=True)
"""


def read_version(folder) -> set[str]:
    """Return the contents of the files of a folder; an open descriptor ensures that all are from one version."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        return {
            open(name, opener=lambda name, how: os.open(name, how, dir_fd=descriptor)).read() for name in "abcdefgh"
        }
    finally:
        os.close(descriptor)


def start_writer(folder) -> subprocess.Popen:
    """Start a process that replaces the folder again and again; it has written one version on return."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, folder], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "0\n"
    return process


def test_files_named_by_steps_are_listed_in_the_order_of_their_steps(tmp_path):
    for name in ("10000000.ckpt", "9999999.ckpt", "0000400.ckpt", "0000400-old.ckpt", ".tmp-1.ckpt", "0000500.npz"):
        (tmp_path / name).touch()
    assert [path.name for path in list_by_step(tmp_path, ".ckpt")] == [
        "0000400.ckpt",
        "9999999.ckpt",
        "10000000.ckpt",
    ]
    (tmp_path / "0000300").mkdir()
    assert list_by_step(tmp_path) == [tmp_path / "0000300"]
    assert list_by_step(tmp_path / "missing") == list_by_step(tmp_path / "0000500.npz") == []


def test_a_reader_always_finds_a_folder(tmp_path):
    process = start_writer(tmp_path / "folder")
    end, seen = time.monotonic() + 30, set()
    try:
        while len(seen) < 100 and time.monotonic() < end:
            seen.add((tmp_path / "folder" / "h").read_text())
    finally:
        process.kill()
        process.communicate()
    assert len(seen) > 20


def test_a_kill_at_any_instant_leaves_a_complete_folder(tmp_path):
    for attempt in range(12):
        process = start_writer(tmp_path / "folder")
        time.sleep(0.013 * attempt)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert len(read_version(tmp_path / "folder")) == 1


def test_a_kill_before_the_old_folder_is_deleted_leaves_the_new_one(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "name").write_text("old")
    code = (
        "import os, shutil, sys; from pathlib import Path; from kairos.files import atomic_folder\n"
        "shutil.rmtree = lambda path: os.kill(os.getpid(), 9)\n"
        "with atomic_folder(Path(sys.argv[1])) as new: (new / 'name').write_text('new')"
    )
    assert subprocess.run([sys.executable, "-c", code, folder], check=False).returncode == -9
    assert (folder / "name").read_text() == "new"


@pytest.mark.parametrize("signal_action", ["SIG_DFL", "SIG_IGN"], ids=["kill", "error"])
@pytest.mark.parametrize(
    "write",
    ["write_text(path, 'new ' * 10_000)", "write_record(path, {'new': [0] * 10_000})"],
    ids=["write_text", "write_record"],
)
def test_a_write_that_stops_midway_leaves_the_old_file(tmp_path, signal_action, write):
    """A limit on file sizes interrupts the write: the kernel kills the process, or the write fails."""
    path = tmp_path / "record.json"
    files.write_record(path, {"old": 1})
    code = (
        "import resource, signal, sys; from kairos.files import write_record, write_text; path = sys.argv[1]\n"
        f"signal.signal(signal.SIGXFSZ, signal.{signal_action})\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        f"{write}"
    )
    process = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert files.read_json(path) == {"old": 1}
    left = [file.name for file in tmp_path.iterdir() if file != path]
    if signal_action == "SIG_DFL":
        assert process.returncode == -signal.SIGXFSZ
        assert all(name.startswith(".tmp-") for name in left)
    else:
        assert process.returncode == 1 and f"File too large: '{path}'" in process.stderr
        assert left == []


@pytest.fixture
def file_system_without_exchange(monkeypatch):
    """File system that cannot exchange two folders in one operation."""
    monkeypatch.setattr(files, "_exchange", lambda *_: False)


def test_without_an_exchange_a_failed_replacement_restores_the_old_folder(
    file_system_without_exchange, tmp_path, monkeypatch
):
    folder, rename, calls = tmp_path / "folder", os.rename, []
    for content in ("one", "two"):
        with atomic_folder(folder) as new:
            (new / "name").write_text(content)
    assert (folder / "name").read_text() == "two"

    def failing_rename(*paths):
        calls.append(paths)
        if len(calls) == 2:
            raise OSError(5, "no luck")
        rename(*paths)

    monkeypatch.setattr(os, "rename", failing_rename)
    with pytest.raises(OSError, match="no luck"), atomic_folder(folder) as new:
        (new / "name").write_text("three")
    assert (folder / "name").read_text() == "two" and list(tmp_path.iterdir()) == [folder]


def test_a_link_to_a_folder_stays_and_its_folder_is_replaced(tmp_path):
    folder, link = tmp_path / "disk" / "folder", tmp_path / "link"
    folder.mkdir(parents=True)
    (folder / "name").write_text("old")
    link.symlink_to(folder)
    with atomic_folder(link) as new:
        (new / "name").write_text("new")
    assert link.is_symlink() and (folder / "name").read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["disk", "link"] and os.listdir(folder.parent) == ["folder"]


def test_a_folder_does_not_replace_a_file(tmp_path):
    file = tmp_path / "file"
    file.write_text("content")
    with pytest.raises(KairosError, match=f"{file}: a file is there; allowed: a folder"), atomic_folder(file):
        pass
    assert file.read_text() == "content" and list(tmp_path.iterdir()) == [file]


def test_an_error_reports_the_file_that_caused_it(tmp_path):
    path = tmp_path / "out.npz"
    with pytest.raises(OSError) as missing, files.atomic(path):
        os.stat("/missing/weights")
    assert missing.value.filename == "/missing/weights"
    with pytest.raises(OSError) as full, files.atomic(path):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError) as read_only, files.atomic(path) as file:
        raise OSError(errno.EROFS, "Read-only file system", file.name)
    assert full.value.filename == read_only.value.filename == str(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["[]", '""', "0", '[["a", 1]]', "null"])
def test_only_an_object_is_a_record(content, tmp_path):
    (tmp_path / "record.json").write_text(content)
    for read in (files.read_json, files.RecordReader("config").read):
        with pytest.raises(files.DamagedError, match=r"record\.json: damaged: not JSON with fields"):
            read(tmp_path / "record.json")


HOLDER = """
import sys, time
from pathlib import Path
from kairos.files import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


def test_a_folder_is_written_by_one_process_at_a_time_and_a_kill_releases_its_lock(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(KairosError, match="another process"), lock_folder(tmp_path):
            pass
        holder.kill()
    for _ in range(2):
        with lock_folder(tmp_path):
            assert [file.name for file in tmp_path.iterdir()] == [".tmp-lock"]
        assert not list(tmp_path.iterdir())


def test_a_lock_whose_file_its_holder_deletes_is_taken_again(tmp_path, monkeypatch):
    """The holder deletes the file after another process has opened it; that process must lock the new file."""
    lock, attempts = files.try_lock, []

    def delete_first(file, **arguments):
        if not attempts:
            os.unlink(file.name)
        attempts.append(file.name)
        return lock(file, **arguments)

    monkeypatch.setattr(files, "try_lock", delete_first)
    with lock_folder(tmp_path):
        assert len(attempts) == 2
        with pytest.raises(KairosError, match="another process"), lock_folder(tmp_path):
            pass


def test_every_flipped_bit_of_a_record_is_noticed(tmp_path):
    path = tmp_path / "record.json"
    fields = {"a": 1.25, "nested": {"checksum": "0" * 64}, "text": "é", "zeros": "0" * 64}
    write_record(path, fields)
    content = path.read_bytes()
    assert read_record(path) == fields and RecordReader("nested").read(path) == fields
    for index in range(len(content)):
        for bit in range(8):
            path.write_bytes(content[:index] + bytes([content[index] ^ 1 << bit]) + content[index + 1 :])
            with pytest.raises(DamagedError, match=r"record\.json: damaged"):
                read_record(path)
            with pytest.raises(DamagedError, match=r"record\.json: damaged"):
                RecordReader("nested").read(path)


def test_a_record_that_is_read_can_be_written_again(tmp_path):
    write_record(tmp_path / "first", {"a": 1})
    write_record(tmp_path / "second", read_record(tmp_path / "first") | {"a": 2})
    assert read_record(tmp_path / "second") == {"a": 2}


def test_the_hash_of_an_npz_file_is_that_of_its_arrays(tmp_path):
    def write(name, values, **header):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            member = zipfile.ZipInfo("images.npy", **header)
            archive.writestr(member, values.tobytes())
        return tmp_path / name

    first, second = np.arange(9), np.arange(9) + 1
    path, with_other_header = write("a", first), write("b", first, date_time=(2026, 1, 1, 0, 0, 0))
    assert files.sha256_file(path) != files.sha256_file(with_other_header) and files.hash_npz(path) == files.hash_npz(
        with_other_header
    )
    assert files.hash_npz(path) != files.hash_npz(write("c", second))
