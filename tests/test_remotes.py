"""DVC remotes return pushed files bit for bit: from a folder, over SSH and from an S3 store, with real servers."""

import asyncio
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from kairos import code_hash, stage_keys, stages
from kairos.config import load
from kairos.files import hash_folder
from ports import free_port

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ("dataset", "latents", "methods/uniform/seed0/checkpoint.pt")


class Repository:
    """DVC repository with data, latents and a checkpoint, configured like kairos' repository."""

    def __init__(self, folder: Path):
        self.folder, self.results = folder / "repository", folder / "repository/results"
        (folder / "home").mkdir()
        self.environment = {**os.environ, "HOME": str(folder / "home"), "DVC_NO_ANALYTICS": "1"}
        rng = np.random.default_rng(0)
        for name in ("dataset/images.npy", "dataset/train.npy", "latents/mean.npy", RESULTS[-1]):
            path = self.results / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(rng.bytes(300_000))
        subprocess.run(["git", "init", "-q"], cwd=self.folder, check=True)
        assert self.dvc("init", "-q").returncode == 0
        shutil.copy(ROOT / ".dvc/config", self.folder / ".dvc/config")
        assert self.dvc("add", *(f"results/{name}" for name in RESULTS)).returncode == 0
        self.hashes = hash_folder(self.results)

    def dvc(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "dvc", *arguments]
        return subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, text=True)

    def add_remote(self, url: str, **settings: str) -> None:
        """Add a remote for this clone alone, as in docs/services.md."""
        assert self.dvc("remote", "add", "--force", "--local", "--default", "store", url).returncode == 0
        for name, value in settings.items():
            assert self.dvc("remote", "modify", "--local", "store", name, value).returncode == 0

    def delete_local_files(self) -> None:
        """Delete all files that a clone would not have."""
        for name in RESULTS:
            path = self.results / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.rmtree(self.folder / ".dvc/cache")


@pytest.fixture
def repository(tmp_path):
    return Repository(tmp_path)


class SftpServer:
    """SSH server with SFTP access to a folder, for one user with one key."""

    def __init__(self, folder: Path):
        import asyncssh

        self.folder, self.port, self.key = folder / "sftp", free_port(), folder / "key"
        self.folder.mkdir()
        key = asyncssh.generate_private_key("ssh-ed25519")
        key.write_private_key(self.key)
        self.key.chmod(0o600)
        self.options = {
            "server_host_keys": [asyncssh.generate_private_key("ssh-ed25519")],
            "authorized_client_keys": asyncssh.import_authorized_keys(key.export_public_key().decode()),
            "sftp_factory": lambda channel: asyncssh.SFTPServer(channel, chroot=str(self.folder)),
        }
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def start(self) -> None:
        import asyncssh

        async def listening() -> asyncssh.SSHAcceptor:
            return await asyncssh.listen("127.0.0.1", self.port, **self.options)

        self.listener = asyncio.run_coroutine_threadsafe(listening(), self.loop).result(60)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.listener.close)
        asyncio.run_coroutine_threadsafe(self.listener.wait_closed(), self.loop).result(60)


@pytest.fixture
def sftp(tmp_path):
    if importlib.util.find_spec("dvc_ssh") is None:
        pytest.skip("no dvc-ssh; the extra `remotes` brings it")
    server = SftpServer(tmp_path)
    server.start()
    yield server
    server.stop()
    server.loop.call_soon_threadsafe(server.loop.stop)


@pytest.fixture
def s3(monkeypatch):
    if importlib.util.find_spec("dvc_s3") is None:
        pytest.skip("no dvc-s3; the extra `remotes` brings it")
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    keys = {"aws_access_key_id": "me", "aws_secret_access_key": "hush"}
    boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys).create_bucket(Bucket="kairos")
    yield {"endpointurl": url, "region": "us-east-1", "access_key_id": "me", "secret_access_key": "hush"}
    server.stop()


def check_round_trip(repository: Repository) -> None:
    """Push, delete the local files, pull, and compare hashes; also check that git sees no local configuration."""
    done = repository.dvc("push")
    assert done.returncode == 0, done.stderr
    assert "Everything is up to date" in repository.dvc("push").stdout
    repository.delete_local_files()
    done = repository.dvc("pull")
    assert done.returncode == 0, done.stderr
    assert hash_folder(repository.results) == repository.hashes
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    shown = subprocess.run(listing, cwd=repository.folder, capture_output=True)
    assert b".dvc/config\n" in shown.stdout and b"config.local" not in shown.stdout  # files that a commit would contain
    assert (repository.folder / ".dvc/config").read_bytes() == (ROOT / ".dvc/config").read_bytes()


@pytest.mark.long
def test_a_folder_returns_pushed_files(repository, tmp_path):
    repository.add_remote(str(tmp_path / "store"))
    check_round_trip(repository)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::Warning")
def test_an_ssh_server_returns_pushed_files(repository, sftp):
    repository.add_remote(f"ssh://me@127.0.0.1:{sftp.port}/kairos", keyfile=str(sftp.key))
    check_round_trip(repository)
    assert list((sftp.folder / "kairos").rglob("*.dir"))


@pytest.mark.nightly
def test_an_s3_store_returns_pushed_files(repository, s3):
    repository.add_remote("s3://kairos/store", **s3)
    check_round_trip(repository)


@pytest.mark.nightly
def test_an_unreachable_remote_is_reported_and_loses_nothing(repository, sftp):
    sftp.stop()
    repository.add_remote(f"ssh://me@127.0.0.1:{sftp.port}/kairos", keyfile=str(sftp.key))
    cache = hash_folder(repository.folder / ".dvc/cache")
    for command in ("push", "pull"):
        done = repository.dvc(command)
        if command == "push":
            assert done.returncode != 0
            assert re.search(r"(failed to connect|Connect call failed).*127\.0\.0\.1", done.stderr)
        assert "Traceback" not in done.stderr
        assert hash_folder(repository.results) == repository.hashes
        assert hash_folder(repository.folder / ".dvc/cache") == cache
    sftp.start()
    check_round_trip(repository)


def test_no_job_calls_dvc(monkeypatch):
    """Concurrent DVC processes would compete for one lock."""
    rules = [ROOT / "Snakefile", *(ROOT / "workflow").rglob("*.smk")]
    assert len(rules) > 5 and not any(re.search(r"\bdvc\b", path.read_text()) for path in rules)
    calls = {
        path
        for path in (ROOT / "src/kairos").rglob("*.py")
        if re.search(r"[\"']dvc[\"']|(import|from) dvc", path.read_text())
    }
    assert {path.relative_to(ROOT / "src/kairos").as_posix() for path in calls} == {
        "cli/doctor.py",
        "status/tool_checks.py",
    }
    config = load(ROOT / "params.yaml")
    method = next(iter(config.methods))
    for name, row in stages.list_stages(config).items():
        modules = stage_keys.list_modules(row, stage_keys.list_sections(config, row, method))
        files = code_hash.list_files(tuple(modules), frozenset(stages.LEFT_OUT))
        assert not calls & set(files), name
