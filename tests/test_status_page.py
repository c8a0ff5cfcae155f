"""Tests of ``kairos status --serve``: content of the page, and paths and hosts that the server rejects."""

import errno
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import results_tree
from commands import Commands
from kairos.cli import main
from kairos.cli.common import open_listening_socket
from kairos.config import load
from kairos.status import render
from kairos.status.server import Server
from kairos.training.job import ProgressFile
from marks import mark_long
from ports import free_port
from training_case import experiment as case
from training_case import make_latents, train_command, write_experiment

METHODS = ("uniform", "min_snr")
FORBIDDEN = (
    "/../outside.log", "/%2e%2e/outside.log", "/uniform/../../outside.log", "/uniform/..%2f..%2foutside.log",
    "/uniform%2fseed0%2fmetrics.jsonl", "//etc/passwd", "/%2fetc%2fpasswd", "/etc/passwd", "file:///etc/passwd",
    "/uniform/../summary.csv", "/./summary.csv", "/methods/uniform/seed0/.state/secret.log", "/.hidden.log",
    "/linked.log", "/methods/uniform/seed0/%2estate/secret.log", "/folder/passwd", "/circle",
    "/state/secret.log", "/pipe", "/summary.cs",
    "/summary.csv%00", "/summary.csv%00.log", "/uniform", "/uniform/", "/methods/uniform/seed0/", "/" + "x" * 300,
    "summary.cs", "/" + "x/" * 3000, "/%ff", "/tiny.yaml", "/..\\outside.log", "/%5c..%5coutside.log",
)  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder without SLURM."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    return tmp_path


@pytest.fixture
def results(folder: Path) -> Path:
    """Folder of results of a finished pipeline."""
    return results_tree.write(folder, methods=METHODS)[1].relative_to(folder)


@contextmanager
def served(experiment: Path, host: str = "127.0.0.1") -> Iterator[int]:
    """Run a server that reads the results again for each request; gives its port."""
    with socket.create_server((host, 0)) as listener:
        server = Server(listener, experiment, interval=1e-6)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.shutdown()
            thread.join()


def request(
    port: int, path: str = "/", method: str = "GET", host: str | None = None
) -> tuple[int, bytes, dict[str, str]]:
    """Send a request with an unchanged path; return status, content and headers of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", f"localhost:{port}" if host is None else host)
    connection.endheaders()
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content, dict(answer.getheaders())


def fetch_page(port: int) -> str:
    """Return the HTML of the status page."""
    status, content, headers = request(port)
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
    return content.decode()


def test_the_page_of_a_complete_experiment_links_its_results(results: Path) -> None:
    (results / "report.html").write_text("<p>the report")
    (results / "logs").mkdir()
    (results / "logs/train_uniform_seed0_1.log").write_text("took 3 s\n")
    with served(Path("tiny.yaml")) as port:
        text = fetch_page(port)
        assert "<title>100 % tiny</title>" in text and "4 training runs: 4 complete" in text
        assert text.count("<polyline") == 4 and text.count("uniform × min_snr") == 1
        for link in re.findall(r'(?:href|src)="(/[^"]+)"', text):
            status, content, headers = request(port, link)
            assert (status, headers["Cache-Control"]) == (200, "no-store"), link
            assert content == (results / link[1:]).read_bytes()
            head = request(port, link, "HEAD")
            assert (head[0], head[1], head[2]["Content-Length"]) == (200, b"", str(len(content)))
        assert 'href="/report.html"' in text and 'href="/logs/train_uniform_seed0_1.log"' in text
        assert 'src="/methods/uniform/seed0/samples/0000400.png"' in text
        evaluation = json.loads((results / "methods/uniform/seed1/evaluation/0000400.json").read_bytes())
        assert f"{evaluation['validation']['loss_epsilon']:#.4g}<small>epsilon, at step 400" in text
        kinds = {"report.html": "text/html", "logs/train_uniform_seed0_1.log": "text/plain; charset=utf-8",
                 "methods/uniform/seed0/metrics.jsonl": "text/plain; charset=utf-8",
                 "summary.bin": "application/octet-stream",
                 "methods/uniform/seed0/samples/0000400.png": "image/png"}  # fmt: skip
        (results / "summary.bin").touch()
        assert {name: request(port, f"/{name}")[2]["Content-type"] for name in kinds} == kinds
        assert request(port, "/", "HEAD")[:2] == (200, b"")
        assert "interval = 1e-06 * 1000" in text and request(port, "/?again")[0] == 200
    with served(results) as port:  # without the experiment file the runs come from the folder
        assert "4 training runs: 4 complete" in fetch_page(port)


def test_the_server_gives_only_files_in_the_results(results: Path) -> None:
    Path("results/outside.log").write_text("secret")
    state = results / "methods/uniform/seed0/.state"
    state.mkdir()
    for file in (state / "secret.log", results / ".hidden.log", results / "summary.csv"):
        file.write_text("secret")
    (results / "linked.log").symlink_to("../outside.log")
    (results / "folder").symlink_to("/etc")
    (results / "circle").symlink_to("circle")
    (results / "state").symlink_to("methods/uniform/seed0/.state")
    os.mkfifo(results / "pipe")
    with served(results) as port:
        assert request(port, "/summary.csv")[:2] == (200, b"secret")
        for path in FORBIDDEN:
            status, content, _ = request(port, path)
            assert status in (400, 404) and b"secret" not in content and b"root:" not in content, path
            assert request(port, path, "HEAD")[0] == status


def test_results_that_are_a_link_are_served(results: Path) -> None:
    results.rename("elsewhere")
    results.symlink_to("../elsewhere")
    with served(Path("tiny.yaml")) as port:
        assert request(port, "/methods/uniform/seed0/training.json")[0] == 200


def test_other_methods_and_hosts_are_rejected(results: Path) -> None:
    with served(results) as port:
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
            assert request(port, method=method)[0] == 501
        for host in ("localhost", "LOCALHOST:1", "127.0.0.1:9000", "[::1]:9000"):
            assert request(port, host=host)[0] == 200
        for host in (
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "evil.example:80",
            "",
            "10.0.0.1",
        ):
            assert (
                request(port, host=host)[0]
                == request(port, "/methods/uniform/seed0/training.json", host=host)[0]
                == 403
            )
    with served(results, host="0.0.0.0") as port:  # the machine may have any name
        assert request(port, host="node7:8008")[0] == 200


def test_names_and_messages_are_escaped() -> None:
    Path("many.yaml").write_text("experiment: many\nmethods: {a=1+b: {}}\n")
    folder = Path("results/many/methods/a=1+b/seed0")
    odd = Path(os.fsdecode(os.fsencode("results/many/methods/") + b"caf\xe9 50%?#")) / "seed0"  # not UTF-8
    for parent in (folder / ".state", odd):
        parent.mkdir(parents=True)
    ProgressFile(folder / ".state", 200).write_end("failed", "<img src=x onerror=alert(1)> & more")
    Path("results/many/logs").mkdir()
    Path("results/many/logs/train_a=1+b_seed0.log").write_text("of this run")
    with served(Path("many.yaml")) as port:
        text = fetch_page(port)
        assert "<img src=x" not in text and "&gt; &amp; more" in text and "1 training run: 1 failed" in text
        assert "1 training run in the folder is not of this experiment" in text
        (log,) = re.findall(r'href="([^"]+)">log', text)
        assert request(port, log)[1] == b"of this run"


def test_the_page_follows_a_running_experiment(folder: Path) -> None:
    Path("grows.yaml").write_text("experiment: grows\ntraining: {milestones: [100, 200]}\nmethods: {uniform: {}}\n")
    with served(Path("grows.yaml")) as port:
        text = fetch_page(port)  # before anything has run
        assert "<title>0 % grows</title>" in text and "1 waiting" in text and "<polyline" not in text
        state = Path("results/grows/methods/uniform/seed0/.state")
        (state / "0123456789abcdef").mkdir(parents=True)
        progress, metrics = ProgressFile(state, 200), state / "0123456789abcdef/metrics.jsonl"
        progress.set_identity("0123456789abcdef" * 4)
        curves = []
        for step in (10, 50):
            lines = [json.dumps({"step": at, "images": at, "loss": 1 / at, "mse": 1.0}) for at in range(1, step + 1)]
            metrics.write_text(
                "\n".join(lines) + f'\n{{"step": {step + 1}, "images": 7, "loss": 0.'
            )  # the last line is incomplete
            progress._last_write = None
            progress.update(step, step / 10)
            text = fetch_page(port)
            assert f">{step} / 200<" in text and f"<title>{step // 2} %" in text
            curves.append(re.findall(r'points="([^"]+)"', text)[0].split())
            assert [float(point.split(",")[0]) for point in curves[-1]] == list(range(1, step + 1))
            assert f"<span>{render.formatting.format_number(1 / step)}</span>" in text
        assert (
            curves[1][0] == "1,2.0" and curves[1][-1] == "50,28.0"
        )  # the curve falls from the upper edge to the lower edge
        progress.write_end("failed", "step 50: loss nan")
        Path("results/grows/logs").mkdir()
        Path("results/grows/logs/train_uniform_seed0_1.log").write_text("kairos: step 50: loss nan\n")
        assert re.search(
            r'class="failed" title="step 50: loss nan">.*\n.*href="/logs/train_uniform_seed0_1', fetch_page(port)
        )
        Path("grows.yaml").write_text(
            Path("grows.yaml").read_text().replace("}\n", ", p2: {}}\n").replace("200]", "200], x: 1")
        )
        assert (
            "ConfigError" in fetch_page(port) and "training.x" in fetch_page(port) and "<main>" not in fetch_page(port)
        )
        Path("grows.yaml").write_text("experiment: grows\nmethods: {uniform: {}, p2: {}}\n")
        assert "2 training runs: 1 failed, 1 waiting" in fetch_page(port)


@pytest.mark.long
def test_the_loss_curve_of_a_long_run_is_read_at_intervals(tmp_path: Path) -> None:
    """The curve approximates that of all lines; an incomplete last line does not change it."""
    file, points = tmp_path / "metrics.jsonl", []
    with open(file, "w") as out:
        for step in range(1, 100_001):
            loss = 10 ** (-2 * step / 100_000) * (1.05 if step % 2 else 0.95)
            line = {"step": step, "images": 64 * step, "loss": loss, "mse": 9.0, "sampler": {"a": [0.5] * 20}}
            out.write(json.dumps(line) + "\n")
    for size in (file.stat().st_size, file.stat().st_size - 70):
        os.truncate(file, size)
        result = render._read_loss_curve(file)
        assert result is not None
        curve, last, loss = result
        points.append(re.findall(r"([\d.]+),", curve))
        steps, heights = zip(*(map(float, point.split(",")) for point in curve.split()))
        assert 25 < len(steps) <= 80 and list(steps) == sorted(set(steps)) and steps[0] < 5000
        assert last > 97_000 and loss == pytest.approx(10 ** (-2 * last / 100_000), rel=0.05)
        straight = [2 + 26 * (step - steps[0]) / (steps[-1] - steps[0]) for step in steps]  # on a logarithmic axis
        assert max(abs(y - line) for y, line in zip(heights, straight)) < 0.5
    assert points[0][:-2] == points[1][: len(points[0]) - 2]  # earlier points do not move
    os.truncate(file, 0)
    assert render._read_loss_curve(file) is None


def test_the_loss_curve_of_any_length_has_a_last_point_and_at_most_81_points(tmp_path: Path) -> None:
    """The number of points is limited by the width of the page."""
    file = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "images": 1, "loss": -0.01 * step}) + "\n" for step in range(1, 30_000)]
    for count in (1, 2, 79, 80, 81, 160, 161, 1000, 5000, 29_999):
        file.write_text("".join(lines[:count]))
        result = render._read_loss_curve(file)
        assert result is not None and "nan" not in result[0]
        assert min(count, 30) <= len(result[0].split()) <= 81 and result[1] > count * 0.95


def test_bad_arguments_are_rejected_in_one_line(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error_of(*arguments: str) -> str:
        status = main(["status", "--serve", *arguments])
        output = capsys.readouterr()
        lines = output.err.splitlines()
        assert status in (1, 2) and len(lines) == 1 and not output.out, output
        return lines[0]

    with open_listening_socket("127.0.0.1", free_port()) as listener:
        port = listener.getsockname()[1]
        expected = (
            f"kairos: --port: {port} cannot be used ({os.strerror(errno.EADDRINUSE)}); choose another, e.g. {port + 1}"
        )
        assert error_of("tiny.yaml", "--port", str(port)) == expected
    assert "--port: got 70000, allowed: 1 to 65535" in error_of("tiny.yaml", "--port", "70000")
    for host in ("nowhere.invalid", "192.0.2.1", "x" * 300):
        assert f"--host: {host} cannot be used" in error_of("tiny.yaml", "--port", str(free_port()), "--host", host)
    assert "missing.yaml" in error_of("missing.yaml", "--port", str(free_port()))
    assert "no training run there" in error_of(".", "--port", str(free_port()))
    assert "--watch: got 0" in error_of("tiny.yaml", "--watch", "0")


@pytest.mark.parametrize(
    ("number", "host"),
    mark_long([(signal.SIGTERM, "127.0.0.1"), (signal.SIGINT, "0.0.0.0")], [(signal.SIGTERM, "127.0.0.1")]),
)
def test_a_signal_ends_the_server(results: Path, number: signal.Signals, host: str) -> None:
    port = free_port()
    command = [sys.executable, "-m", "kairos", "status", "tiny.yaml", "--serve", "--port", str(port), "--host", host]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == f"http://{host}:{port}/\n"
        assert "4 complete" in fetch_page(port)
        with socket.create_connection(("127.0.0.1", port)):  # an idle connection does not delay the end
            process.send_signal(number)
            assert process.wait(10) == 0
        errors = process.stderr.read()
        assert "Traceback" not in errors and ("without a password" in errors) == (host == "0.0.0.0")
        assert process.stdout.read() == "Ctrl-C ends it\n"


@pytest.mark.long
def test_the_page_follows_a_training_run(commands: Commands) -> None:
    latents = make_latents(Path("results/case"))
    values = case({"uniform": {}}, training__milestones=[100], training__checkpoint_every=10, training__threads=1)
    write_experiment(Path("case.yaml"), values)
    results_tree.sign(load("case.yaml"), Path("results/case"))
    out = Path("results/case/methods/uniform/seed0")
    line = train_command(Path("case.yaml").absolute(), "uniform", out.absolute(), latents.absolute())
    with served(Path("case.yaml")) as port:
        text = fetch_page(port)
        states, curve_counts = set(re.findall(r'<td class="state (\w+)"', text)), {text.count("<polyline")}
        process, end = commands.start(line, Path("train.log").absolute()), time.monotonic() + 120
        while not (out / "training.json").exists():
            assert time.monotonic() < end, Path("train.log").read_text()
            text = fetch_page(port)
            states |= set(re.findall(r'<td class="state (\w+)"', text))
            curve_counts.add(text.count("<polyline"))
            time.sleep(0.05)
        assert commands.wait(process) == 0
        assert {"waiting", "running"} <= states and curve_counts == {0, 1}
        text = fetch_page(port)
        assert ">100 / 100<" in text and "1 complete" in text and "<polyline" in text
