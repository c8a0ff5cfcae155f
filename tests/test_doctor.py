"""``kairos doctor`` reports whether the tracking store, DVC's cache and remote, and SLURM can be used."""

import resource
import socket
import subprocess
from pathlib import Path

import pytest

from kairos.cli import doctor as doctor_command
from kairos.cli import main
from kairos.staging import mount
from kairos.status import cluster_checks


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder without any tracking set up."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


def doctor(capsys) -> tuple[int, dict[str, tuple[str, str]]]:
    """Run ``kairos doctor``; returns its exit status, and the mark and message of each line by its name."""
    status = main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    return status, {line[4:26].strip(): (line[:3].strip(), line[27:]) for line in lines}


@pytest.mark.long
def test_a_usable_store_and_repository_are_reported_as_ok(folder, capsys, monkeypatch):
    from mlflow import MlflowClient

    # the tests on SLURM may run at the same time, and stop its controller
    monkeypatch.setattr(cluster_checks, "check_slurm", lambda profile: [])
    (folder / ".dvc").mkdir()
    (folder / ".dvc/config").write_text(
        "[core]\n  remote = store\n['remote \"store\"']\n  url = https://me:secret@host/x\n"
    )
    subprocess.run(["git", "init", "-q"], check=True)
    status, checks = doctor(capsys)
    assert status == 0
    assert checks["mlflow store"] == ("ok", "sqlite:///mlflow.db: does not exist yet, the first import creates it")
    assert checks["dvc repository"][0] == "ok"
    assert checks["dvc cache"] == ("ok", str(folder / ".dvc/cache/files/md5"))
    assert checks["dvc remote"] == ("ok", "store, https://host/x")
    assert not (folder / "mlflow.db").exists()

    MlflowClient(
        f"sqlite:///{folder}/mlflow.db"
    ).search_experiments()  # creates the database; MLflow caches stores by their URI
    status, checks = doctor(capsys)
    assert status == 0 and checks["mlflow store"] == ("ok", "sqlite:///mlflow.db: opened")


@pytest.mark.long
def test_an_unusable_store_or_repository_is_reported_with_the_remedy(folder, capsys, monkeypatch):
    (folder / "mlflow.db").write_text("not a database")
    status, checks = doctor(capsys)
    assert status == 1
    mark, message = checks["mlflow store"]
    assert mark == "NO" and "file is not a database" in message and "set MLFLOW_TRACKING_URI" in message
    mark, message = checks["dvc repository"]
    assert mark == "NO" and "not inside of a DVC repository" in message and "dvc init" in message

    with socket.socket() as listener:  # bound, but not listening
        listener.bind(("127.0.0.1", 0))
        server = f"127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:secret@{server}")
        (folder / "cache").write_text("a file where a folder should be")
        (folder / ".dvc").mkdir()
        (folder / ".dvc/config").write_text("[core]\n  no_scm = true\n[cache]\n  dir = ../cache/below\n")
        status, checks = doctor(capsys)
    assert status == 1
    mark, message = checks["mlflow store"]
    assert (
        mark == "NO" and message.startswith(f"http://{server}: ") and "refused" in message and "secret" not in message
    )
    assert checks["dvc repository"][0] == "ok"
    mark, message = checks["dvc cache"]
    assert mark == "NO" and "cannot write" in message and "dvc cache dir" in message
    assert checks["dvc remote"] == (
        "ok",
        "none: dvc remote add --local --default NAME PATH_OR_URL adds one, to share results",
    )


def test_a_missing_git_is_reported_without_an_error(folder, monkeypatch):
    monkeypatch.setenv("PATH", str(folder))
    mark, name, message = doctor_command._check_git()
    assert (mark, name) == (False, "git") and "not installed" in message


def test_a_missing_profile_is_rejected(capsys):
    assert main(["doctor", "--profile", "profiles/none"]) == 2
    assert "--profile: got 'profiles/none', allowed: a folder that contains" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    ["default-resources:\n  slurm_account: x\n slurm_partition: y\n", "default-resources: [no_value]\n", "- a\n"],
)
def test_an_invalid_profile_is_reported(folder, monkeypatch, text):
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    (folder / "profile.yaml").write_text(text)
    [(mark, name, message)] = cluster_checks.check_slurm(folder)
    assert (mark, name) == (False, "slurm profile")
    assert message.startswith(f"{folder}/profile.yaml: default-resources cannot be read: ")


def test_file_locks_disks_and_limits_of_a_machine_are_checked(folder, monkeypatch):
    """These checks run without SLURM; tests/cluster contains the checks that need SLURM."""
    monkeypatch.setenv("PATH", "/nowhere")
    assert cluster_checks.check_slurm() == [
        (True, "slurm", "no sinfo here: jobs run on this machine, make cluster does not work")
    ]
    good = cluster_checks.check_locks(folder / "results" / "x")
    assert [mark for mark, *_ in good] == [True, True]
    assert good[0][2] == f"flock works in {folder}"
    assert mount(Path("/proc/self"))[0] == "proc"
    for kind, option in (("lustre", "localflock"), ("nfs", "local_lock=all")):
        with monkeypatch.context() as patch:
            mounted = (kind, ["rw", option, "vers=3"])
            patch.setattr("kairos.staging.mount", lambda path, mounted=mounted: mounted)
            mark, _, message = cluster_checks.check_locks(folder)[0]
        assert not mark
        assert f"{kind} is mounted with {option}: locks end at this machine" in message
    bad = cluster_checks.check_locks(Path("/proc/self"))  # a folder in which no file can be created
    assert [mark for mark, *_ in bad] == [False, False]
    assert "use another file system" in bad[0][2]
    monkeypatch.setenv("TMPDIR", str(folder))
    assert "GiB free, the file system of the results" in cluster_checks.check_disk(folder / "results")[2]
    monkeypatch.setenv("TMPDIR", str(folder / "nowhere"))
    assert cluster_checks.check_disk(folder)[0] is False
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        mark, _, message = cluster_checks.check_limits()[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not mark
    assert "256 open files" in message
    assert "ulimit -n 1024" in message


@pytest.mark.parametrize(
    ("variables", "visible", "expected_mark"),
    [
        ({"SLURM_JOB_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "0,1"}, 2, True),
        ({"SLURM_JOB_GPUS": "2"}, 0, False),
        ({"SLURM_GPUS_ON_NODE": "1"}, 0, False),
        ({"SLURM_JOB_GPUS": "0", "CUDA_VISIBLE_DEVICES": "0"}, 2, False),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0, True),
        ({"SLURM_JOB_GPUS": "2", "CUDA_VISIBLE_DEVICES": ""}, 0, True),
        ({"SLURM_STEP_GPUS": "", "SLURM_JOB_GPUS": "2"}, 1, True),
        ({}, 0, True),
        ({}, 1, False),
    ],
)
def test_the_gpus_of_a_job_must_be_visible_to_torch(variables, visible, expected_mark, monkeypatch):
    """The check compares the GPUs that SLURM allocates to the job with the GPUs that torch finds."""
    for name in cluster_checks._GPU_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert cluster_checks.check_job(visible)[0][2].startswith("none")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ((mark, name, message),) = cluster_checks.check_job(visible)
    assert (mark, name) == (expected_mark, "slurm job")
    assert f"torch sees {visible}" in message
