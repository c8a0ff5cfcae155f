"""``kairos status --serve``: what the page shows while an experiment grows, and what its server gives to nobody."""

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
from kairos.cli.common import listen
from kairos.status import render
from kairos.status.server import Server
from kairos.training.job import ProgressFile
from training_case import experiment as case
from training_case import make_latents, train_command, write_experiment

METHODS = ("uniform", "min_snr")
FOREIGN = (
    "/../outside.log", "/%2e%2e/outside.log", "/uniform/../../outside.log", "/uniform/..%2f..%2foutside.log",
    "/uniform%2fseed0%2fmetrics.jsonl", "//etc/passwd", "/%2fetc%2fpasswd", "/etc/passwd", "file:///etc/passwd",
    "/uniform/../summary.csv", "/./summary.csv", "/uniform/seed0/.state/secret.log", "/.hidden.log", "/linked.log",
    "/uniform/seed0/%2estate/secret.log", "/folder/passwd", "/circle", "/state/secret.log", "/pipe", "/summary.cs",
    "/summary.csv%00", "/summary.csv%00.log", "/uniform", "/uniform/", "/uniform/seed0/", "/" + "x" * 300,
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
    """A folder of results as the pipeline leaves it."""
    return results_tree.write(folder, methods=METHODS)[1].relative_to(folder)


@contextmanager
def served(experiment: Path, host: str = "127.0.0.1") -> Iterator[int]:
    """A server that looks anew whenever it is asked; its port."""
    with socket.create_server((host, 0)) as listener:
        server = Server(listener, experiment, interval=1e-6)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.shutdown()
            thread.join()


def ask(port: int, path: str = "/", method: str = "GET", host: str | None = None) -> tuple[int, bytes, dict[str, str]]:
    """Status, content and headers; the path goes out as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", f"localhost:{port}" if host is None else host)
    connection.endheaders()
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content, dict(answer.getheaders())


def shown(port: int) -> str:
    status, content, headers = ask(port)
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
    return content.decode()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def test_an_experiment_that_is_done(results: Path) -> None:
    (results / "report.html").write_text("<p>the report")
    (results / "logs").mkdir()
    (results / "logs/train_uniform_seed0_1.log").write_text("took 3 s\n")
    with served(Path("tiny.yaml")) as port:
        text = shown(port)
        assert "<title>100 % tiny</title>" in text and "4 trainings: 4 complete" in text
        assert text.count("<polyline") == 4 and text.count("uniform × min_snr") == 1
        for link in re.findall(r'(?:href|src)="(/[^"]+)"', text):
            status, content, headers = ask(port, link)
            assert (status, headers["Cache-Control"]) == (200, "no-store"), link
            assert content == (results / link[1:]).read_bytes()
            head = ask(port, link, "HEAD")
            assert (head[0], head[1], head[2]["Content-Length"]) == (200, b"", str(len(content)))
        assert 'href="/report.html"' in text and 'href="/logs/train_uniform_seed0_1.log"' in text
        assert 'src="/uniform/seed0/samples/0000400.png"' in text
        evaluation = json.loads((results / "uniform/seed1/evaluation/0000400.json").read_bytes())
        assert f"{evaluation['validation']['loss']:#.4g}<small>at step 400" in text
        kinds = {"report.html": "text/html", "logs/train_uniform_seed0_1.log": "text/plain; charset=utf-8",
                 "uniform/seed0/metrics.jsonl": "text/plain; charset=utf-8", "summary.bin": "application/octet-stream",
                 "uniform/seed0/samples/0000400.png": "image/png"}  # fmt: skip
        (results / "summary.bin").touch()
        assert {name: ask(port, f"/{name}")[2]["Content-type"] for name in kinds} == kinds
        assert ask(port, "/", "HEAD")[:2] == (200, b"")
        assert "interval = 1e-06 * 1000" in text and ask(port, "/?again")[0] == 200
    with served(results) as port:  # the folder alone says which trainings there are
        assert "4 trainings: 4 complete" in shown(port)


def test_nothing_but_files_in_the_results(results: Path) -> None:
    Path("results/outside.log").write_text("secret")
    state = results / "uniform/seed0/.state"
    state.mkdir()
    for file in (state / "secret.log", results / ".hidden.log", results / "summary.csv"):
        file.write_text("secret")
    (results / "linked.log").symlink_to("../outside.log")
    (results / "folder").symlink_to("/etc")
    (results / "circle").symlink_to("circle")
    (results / "state").symlink_to("uniform/seed0/.state")
    os.mkfifo(results / "pipe")
    with served(results) as port:
        assert ask(port, "/summary.csv")[:2] == (200, b"secret")
        for path in FOREIGN:
            status, content, _ = ask(port, path)
            assert status in (400, 404) and b"secret" not in content and b"root:" not in content, path
            assert ask(port, path, "HEAD")[0] == status


def test_results_that_are_a_link_are_served(results: Path) -> None:
    results.rename("elsewhere")
    results.symlink_to("../elsewhere")
    with served(Path("tiny.yaml")) as port:
        assert ask(port, "/uniform/seed0/training.json")[0] == 200


def test_who_may_ask(results: Path) -> None:
    with served(results) as port:
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
            assert ask(port, method=method)[0] == 501
        for host in ("localhost", "LOCALHOST:1", "127.0.0.1:9000", "[::1]:9000"):
            assert ask(port, host=host)[0] == 200
        for host in (
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "evil.example:80",
            "",
            "10.0.0.1",
        ):
            assert ask(port, host=host)[0] == ask(port, "/uniform/seed0/training.json", host=host)[0] == 403
    with served(results, host="0.0.0.0") as port:  # by whatever name
        assert ask(port, host="node7:8008")[0] == 200


def test_names_and_messages_are_escaped() -> None:
    evil = "<img src=x onerror=alert(1)>"
    training = Path("results/many") / f'a"{evil}' / "seed0"
    odd = Path(os.fsdecode(os.fsencode("results/many/") + b"caf\xe9 50%?#")) / "seed0"  # no UTF-8
    for folder in (training, odd):
        (folder / ".state").mkdir(parents=True)
        (folder / "samples").mkdir()
        (folder / "samples/0000010.png").write_bytes(b"of this training")
        ProgressFile(folder / ".state", 200).write_end("failed", f"{evil} & more")
    with served(Path("results/many")) as port:
        text = shown(port)
        assert "<img src=x" not in text and "a&#34;&lt;img src=x onerror=alert(1)&gt;</b>" in text
        assert "&gt; &amp; more" in text and "2 trainings: 2 failed" in text
        sources = re.findall(r'<img [^>]*src="([^"]+)"', text)
        assert [ask(port, source)[1] for source in sources] == [b"of this training"] * 2


def test_it_follows_an_experiment(folder: Path) -> None:
    Path("grows.yaml").write_text("experiment: grows\ntraining: {milestones: [100, 200]}\nmethods: {uniform: {}}\n")
    with served(Path("grows.yaml")) as port:
        text = shown(port)  # before anything has run
        assert "<title>0 % grows</title>" in text and "1 waiting" in text and "<polyline" not in text
        state = Path("results/grows/uniform/seed0/.state")
        (state / "0123456789abcdef").mkdir(parents=True)
        said, metrics = ProgressFile(state, 200), state / "0123456789abcdef/metrics.jsonl"
        curves = []
        for step in (10, 50):
            lines = [json.dumps({"step": at, "images": at, "loss": 1 / at, "mse": 1.0}) for at in range(1, step + 1)]
            metrics.write_text("\n".join(lines) + f'\n{{"step": {step + 1}, "images": 7, "loss": 0.')  # being written
            said._last_write = None
            said.update(step, step / 10)
            text = shown(port)
            assert f">{step} / 200<" in text and f"<title>{step // 2} %" in text
            curves.append(re.findall(r'points="([^"]+)"', text)[0].split())
            assert [float(point.split(",")[0]) for point in curves[-1]] == list(range(1, step + 1))
            assert f"<span>{render.formatting.format_number(1 / step)}</span>" in text
        assert curves[1][0] == "1,2.0" and curves[1][-1] == "50,28.0"  # from the upper edge to the lower one
        said.write_end("failed", "step 50: loss nan")
        Path("results/grows/logs").mkdir()
        Path("results/grows/logs/train_uniform_seed0_1.log").write_text("kairos: loss nan\n")
        assert re.search(
            r'class="failed" title="step 50: loss nan">.*\n.*href="/logs/train_uniform_seed0_1', shown(port)
        )
        Path("grows.yaml").write_text(
            Path("grows.yaml").read_text().replace("}\n", ", p2: {}}\n").replace("200]", "200], x: 1")
        )
        assert "ConfigError" in shown(port) and "training.x" in shown(port) and "<main>" not in shown(port)
        Path("grows.yaml").write_text("experiment: grows\nmethods: {uniform: {}, p2: {}}\n")
        assert "2 trainings: 1 failed, 1 waiting" in shown(port)


def test_losses_of_a_long_training_are_read_in_places(tmp_path: Path) -> None:
    """The curve is that of all lines; half a line in front or behind changes nothing."""
    file, points = tmp_path / "metrics.jsonl", []
    with open(file, "w") as written:
        for step in range(1, 100_001):
            loss = 10 ** (-2 * step / 100_000) * (1.05 if step % 2 else 0.95)
            line = {"step": step, "images": 64 * step, "loss": loss, "mse": 9.0, "sampler": {"a": [0.5] * 20}}
            written.write(json.dumps(line) + "\n")
    for kept in (file.stat().st_size, file.stat().st_size - 70):
        os.truncate(file, kept)
        found = render._read_loss_curve(0, kept, file)
        assert found is not None
        curve, last, loss = found
        points.append(re.findall(r"([\d.]+),", curve))
        steps, heights = zip(*(map(float, point.split(",")) for point in curve.split()))
        assert 25 < len(steps) <= 80 and list(steps) == sorted(set(steps)) and steps[0] < 5000
        assert last > 97_000 and loss == pytest.approx(10 ** (-2 * last / 100_000), rel=0.05)
        straight = [2 + 26 * (step - steps[0]) / (steps[-1] - steps[0]) for step in steps]  # on a logarithmic axis
        assert max(abs(y - line) for y, line in zip(heights, straight)) < 0.5
    assert points[0][:-2] == points[1][: len(points[0]) - 2]  # they stay where they were
    os.truncate(file, 0)
    assert render._read_loss_curve(1, 0, file) is None


def test_a_thousand_bytes_at_a_time(tmp_path: Path) -> None:
    """Whatever the length, there is a last point, and there are never more than fit the page."""
    file = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "images": 1, "loss": -0.01 * step}) + "\n" for step in range(1, 30_000)]
    for count in (1, 2, 79, 80, 81, 160, 161, 1000, 5000, 29_999):
        file.write_text("".join(lines[:count]))
        found = render._read_loss_curve(0, file.stat().st_size, file)
        assert found is not None and "nan" not in found[0]
        assert min(count, 30) <= len(found[0].split()) <= 81 and found[1] > count * 0.95


def test_what_cannot_be_served_is_rejected_in_one_line(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: str) -> str:
        status = main(["status", "--serve", *arguments])
        said = capsys.readouterr()
        lines = said.err.splitlines()
        assert status in (1, 2) and len(lines) == 1 and not said.out, said
        return lines[0]

    with listen("127.0.0.1", free_port()) as taken:
        port = taken.getsockname()[1]
        told = (
            f"kairos: --port: {port} cannot be used ({os.strerror(errno.EADDRINUSE)}); choose another, e.g. {port + 1}"
        )
        assert refused("tiny.yaml", "--port", str(port)) == told
    assert "--port: got 70000, allowed: 1 to 65535" in refused("tiny.yaml", "--port", "70000")
    for host in ("nowhere.invalid", "192.0.2.1", "x" * 300):
        assert f"--host: {host} cannot be used" in refused("tiny.yaml", "--port", str(free_port()), "--host", host)
    assert "missing.yaml" in refused("missing.yaml", "--port", str(free_port()))
    assert "no training run there" in refused(".", "--port", str(free_port()))
    assert "--watch: got 0" in refused("tiny.yaml", "--watch", "0")


@pytest.mark.parametrize(("number", "host"), [(signal.SIGTERM, "127.0.0.1"), (signal.SIGINT, "0.0.0.0")])
def test_it_ends_when_told_to(results: Path, number: signal.Signals, host: str) -> None:
    port = free_port()
    command = [sys.executable, "-m", "kairos", "status", "tiny.yaml", "--serve", "--port", str(port), "--host", host]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == f"http://{host}:{port}/\n"
        assert "4 complete" in shown(port)
        with socket.create_connection(("127.0.0.1", port)):  # a browser that says nothing keeps it from nothing
            process.send_signal(number)
            assert process.wait(10) == 0
        said = process.stderr.read()
        assert "Traceback" not in said and ("without a password" in said) == (host == "0.0.0.0")
        assert process.stdout.read() == "Ctrl-C ends it\n"


@pytest.mark.long
def test_a_training_that_runs(commands: Commands) -> None:
    latents = make_latents(Path("results/case"))
    values = case({"uniform": {}}, training__milestones=[100], training__checkpoint_every=10, training__threads=1)
    write_experiment(Path("case.yaml"), values)
    out = Path("results/case/uniform/seed0")
    line = train_command(Path("case.yaml").absolute(), "uniform", out.absolute(), latents.absolute())
    with served(Path("case.yaml")) as port:
        text = shown(port)
        states, seen = set(re.findall(r'<td class="state (\w+)"', text)), {text.count("<polyline")}
        process, end = commands.start(line, Path("train.log").absolute()), time.monotonic() + 120
        while not (out / "training.json").exists():
            assert time.monotonic() < end, Path("train.log").read_text()
            text = shown(port)
            states |= set(re.findall(r'<td class="state (\w+)"', text))
            seen.add(text.count("<polyline"))
            time.sleep(0.05)
        assert commands.wait(process) == 0
        assert {"waiting", "running"} <= states and seen == {0, 1}
        text = shown(port)
        assert ">100 / 100<" in text and "1 complete" in text and "<polyline" in text
