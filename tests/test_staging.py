"""Tests of node-local copies of latents: copied once, atomically, and equal to the original."""

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kairos.data.latents import open_latents
from kairos.files import DamagedError, hash_folder, read_json, write_record
from kairos.staging import mount, staged
from training_case import make_latents


@pytest.fixture
def latents(tmp_path, monkeypatch):
    """Latents with their data set, whose records contain the hashes of their files."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("KAIROS_LOCAL", raising=False)
    folder = make_latents(tmp_path / "shared", count=40)
    for path in (folder, folder.parent / "dataset"):
        record = read_json(path / "record.json")
        files = {name: digest for name, digest in hash_folder(path).items() if name != "record.json"}
        write_record(path / "record.json", {**record, "files": files})
    (tmp_path / "local").mkdir()
    return folder


@pytest.fixture
def local(latents, tmp_path, monkeypatch):
    """Folder that stands for a node's local disk."""
    monkeypatch.setenv("KAIROS_LOCAL", str(tmp_path / "local"))
    return tmp_path / "local"


@pytest.fixture
def stage():
    """Function that stages latents as a job does, for the duration of the test."""
    with ExitStack() as stack:
        yield lambda latents: stack.enter_context(staged(latents))


JOB = """
import sys
from contextlib import ExitStack
from pathlib import Path
from kairos.staging import staged
with staged(Path(sys.argv[1])) as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


def start_job(latents) -> subprocess.Popen:
    """Start a job that uses a copy of the latents until its standard input is closed."""
    line = [sys.executable, "-c", JOB, latents]
    return subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_outside_of_a_slurm_job_nothing_is_copied(stage, latents):
    assert stage(latents) == latents


def test_a_copy_has_the_content_of_the_original(stage, latents, local):
    copy = stage(latents)
    assert copy.is_relative_to(local)
    original, copied = open_latents(latents), open_latents(copy)
    assert copied.record == original.record
    assert (copied.load_x0(np.arange(40)) == original.load_x0(np.arange(40))).all()
    assert (copied.load_conditions(np.arange(40))["class"] == original.load_conditions(np.arange(40))["class"]).all()
    assert not (copy / "mean.npy").is_symlink()
    assert (copy / "../dataset/images.npy").is_symlink()  # a training run on latents does not read the images


def test_for_training_on_pixels_the_data_set_is_copied(stage, latents, local):
    record = read_json(latents / "record.json")
    write_record(latents / "record.json", {**record, "kind": "pixels", "files": {}})
    copy = stage(latents)
    assert not (copy / "../dataset/images.npy").is_symlink()
    assert (open_latents(copy).dataset.images[:] == open_latents(latents).dataset.images[:]).all()


def test_concurrent_jobs_share_one_copy_and_remove_the_rest_of_a_killed_copy(stage, latents, local):
    first = stage(latents)
    home = first.parent.parent
    (first.parent).rename(home / ".tmp-killed")  # the name of a copy whose process was killed
    jobs = [start_job(latents) for _ in range(4)]
    assert {job.communicate("")[0] for job in jobs} == {f"{first}\n"}
    assert sorted(path.name for path in home.iterdir()) == ["copy", "lock", "used"]
    before = os.stat(first / "mean.npy")
    assert stage(latents) == first
    assert os.stat(first / "mean.npy").st_ino == before.st_ino


def test_a_copy_with_missing_or_truncated_files_is_replaced(stage, latents, local, capsys):
    first = stage(latents)
    (first / "mean.npy").unlink()  # some machines delete old files of /tmp
    assert stage(latents) == first
    assert (first / "mean.npy").read_bytes() == (latents / "mean.npy").read_bytes()
    os.truncate(first / "mean.npy", 100)
    (first / "../dataset/record.json").unlink()
    stage(latents)
    assert (open_latents(first).load_x0(np.arange(40)) == open_latents(latents).load_x0(np.arange(40))).all()


def test_latents_with_other_content_get_another_copy(stage, latents, local):
    first = stage(latents)
    mean = np.load(latents / "mean.npy")
    np.save(latents / "mean.npy", mean + 1)
    record = read_json(latents / "record.json")
    files = {**record["files"], "mean.npy": hash_folder(latents)["mean.npy"]}
    write_record(latents / "record.json", {**record, "files": files})
    second = stage(latents)
    assert second != first
    assert (np.load(second / "mean.npy") == mean + 1).all()


def test_latents_are_not_copied_without_space_for_two_copies(stage, latents, local, capsys):
    os.truncate(latents / "mean.npy", shutil.disk_usage(local).free * 3 // 4)  # a sparse file
    assert stage(latents) == latents
    assert "GB are free, twice" in capsys.readouterr().err


def test_a_damaged_original_is_rejected(stage, latents, local):
    with open(latents / "mean.npy", "r+b") as file:
        file.seek(200)
        file.write(b"damage")
    with pytest.raises(DamagedError, match=r"mean\.npy: differs"):
        stage(latents)
    assert not list(local.rglob("mean.npy"))


def test_nothing_is_copied_within_one_file_system(stage, latents, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "local"))
    assert stage(latents) == latents
    assert "the same file system" in capsys.readouterr().err


def test_the_last_job_to_end_deletes_the_copy_even_if_it_fails(latents, local):
    with pytest.raises(ValueError, match="failed"), staged(latents) as copy:
        others = [start_job(latents) for _ in range(2)]
        assert {other.stdout.readline() for other in others} == {f"{copy}\n"}
        assert others[0].communicate("")[0] == "" and (copy / "mean.npy").is_file()
        raise ValueError("failed")
    assert (copy / "mean.npy").is_file()  # another job still reads the copy
    others[1].communicate("")
    assert not list(local.rglob("*.npy")) and (latents / "mean.npy").is_file()
    with staged(latents) as second_copy:
        assert second_copy == copy
        copied, original = open_latents(second_copy), open_latents(latents)
        assert (copied.load_x0(np.arange(40)) == original.load_x0(np.arange(40))).all()


def test_the_next_job_to_end_deletes_the_copy_of_a_killed_job(latents, local):
    killed = start_job(latents)
    assert killed.stdout.readline()
    killed.kill()
    killed.communicate()
    assert list(local.rglob("mean.npy"))
    record = read_json(latents / "record.json")
    write_record(latents / "record.json", {**record, "note": "of another experiment"})
    with staged(latents):
        assert len(list(local.rglob("mean.npy"))) == 2
    assert not list(local.rglob("*.npy"))


def test_the_file_system_of_a_mount_point_with_blanks_is_found(tmp_path, monkeypatch):
    folder = tmp_path / "two words\\and a backslash"
    folder.mkdir()
    escaped = str(folder).replace("\\", "\\134").replace(" ", "\\040")
    lines = f"disk / ext4 rw 0 0\nserver:/data {escaped} nfs4 rw,nolock 0 0\n"
    read_text = Path.read_text
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda path, **options: lines if str(path) == "/proc/mounts" else read_text(path, **options),
    )
    assert mount(folder) == ("nfs4", ["rw", "nolock"])
    assert mount(tmp_path) == ("ext4", ["rw"])
