"""Tests of live reports to an MLflow server that is shared, slow, killed or absent, and of the later import."""

import contextlib
import io
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

import results_tree
import tracking_job
from kairos.config import load
from kairos.files import read_json
from kairos.tracking import mlflow_store, view
from kairos.tracking.live import reporting
from kairos.tracking.track import track
from kairos_timesteps.errors import ConfigError
from ports import free_port
from tracking_server import PATIENCE, POINTS, RUNS, Job, Proxy, Server, points, wait_for
from training_case import experiment, make_latents, train_command, write_experiment

METHODS = ("uniform", "adaptive")
TRAINING_METRICS = ("loss", "mse", "lr", "grad_norm", "sampler.a", "sampler.b")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Experiment file and results of two methods with two seeds, with a report."""
    config, results = results_tree.write(tmp_path_factory.mktemp("tree"), methods=METHODS)
    (results / "report.html").write_text("<html/>")
    return config, results


@pytest.fixture(scope="module")
def imported(tree, tmp_path_factory):
    """Points that the import writes into an empty database."""
    folder = tmp_path_factory.mktemp("imported")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MLFLOW_TRACKING_URI", "sqlite:///alone.db")
        track(load(tree[0]), tree[1], folder / "tracking.json")
    return points(folder / "alone.db", "kairos/tiny")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("server")) as server:
        yield server


def write_config(config: Path, name: str, folder: Path) -> Path:
    """Write the experiment file with the name of an MLflow experiment; return its path."""
    path = folder / "experiment.yaml"
    path.write_text(config.read_text() + f"tracking: {{experiment: {name}, flush_seconds: 300}}\n")
    return path


def import_into(uri: str, config: Path, results: Path, out: Path, monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")  # other tests use the same CPUs
    track(load(config), results, out)
    assert read_json(out)["imported"], read_json(out)


@pytest.mark.long
def test_many_runs_report_at_once_and_the_import_adds_only_missing_points(
    tree, imported, server, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    config, results = write_config(tree[0], "many", tmp_path), tree[1]
    reported = [("adaptive", 1), ("uniform", 0), ("uniform", 1)]  # the import creates the run of the fourth training
    jobs = [Job(config, results, *item, tmp_path / "out" / "-".join(map(str, item)), server.uri) for item in reported]
    jobs += [Job(config, results, "uniform", 0, tmp_path / "double" / str(k), server.uri) for k in range(2)]
    for steps in (100, 200, 400):
        for job in jobs:
            job.advance(steps)
    runs = [(method, str(seed)) for method, seed in reported]
    expected = [row for row in imported if row[:2] in runs and row[2] in TRAINING_METRICS]
    wait_for(lambda: server.points("many") == expected, "points of all trainings")
    for job in jobs:
        job.end()
    assert [run[:2] for run in server.runs("many")] == runs
    for _ in range(2):
        import_into(server.uri, config, results, tmp_path / "tracking.json", monkeypatch)
        assert server.points("many") == imported
        assert server.runs("many") == [("adaptive", "0", "FINISHED"), *((*run, "FINISHED") for run in runs)]
    assert not Path("mlflow.db").exists()
    assert list((server.folder / "artifacts").rglob("report.html"))


@pytest.mark.long
def test_a_run_under_way_is_current_and_replaces_runs_of_earlier_options(server, tmp_path, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)
    edited = {"min_snr": {"sampler": "uniform", "weighting": {"name": "min_snr", "gamma": 1.0}}}
    trees = {}
    for name, settings in (("before", {}), ("after", edited)):
        (tmp_path / name).mkdir()
        config, results = results_tree.write(tmp_path / name, (0, 1), ("uniform", "min_snr"), settings)
        trees[name] = write_config(config, "live", tmp_path / name), results
    client = MlflowClient(tracking_uri=server.uri)

    def current_runs():
        """Return method, seed and gamma of the runs that the prepared comparison shows."""
        experiment = client.get_experiment_by_name("live")
        shown = client.search_runs([experiment.experiment_id], json.loads(experiment.tags[view.TAG])["searchFilter"])
        runs = [run.data.params for run in shown if "seed" in run.data.params]
        return sorted((run["method"], run["seed"], run.get("weighting.gamma")) for run in runs)

    before = [("min_snr", "0", "5.0"), ("min_snr", "1", "5.0"), ("uniform", "0", None), ("uniform", "1", None)]
    import_into(server.uri, *trees["before"], tmp_path / "tracking.json", monkeypatch)
    assert current_runs() == before

    # the first run of the edited method replaces the earlier runs of all seeds, and no run of another method
    jobs = [Job(*trees["after"], "min_snr", 0, tmp_path / str(k), server.uri) for k in range(2)]  # two at once
    for job in jobs:
        job.advance(100)
    wait_for(lambda: current_runs() == [("min_snr", "0", "1.0"), *before[2:]], "the run under way alone")
    other_seed = Job(*trees["after"], "min_snr", 1, tmp_path / "other", server.uri)
    other_seed.advance(100)
    after = [("min_snr", "0", "1.0"), ("min_snr", "1", "1.0"), *before[2:]]
    wait_for(lambda: current_runs() == after, "both runs under way")
    for job in (*jobs, other_seed):
        job.end()
    for name, expected in (("after", after), ("before", before)):
        import_into(server.uri, *trees[name], tmp_path / "tracking.json", monkeypatch)
        assert current_runs() == expected


@pytest.mark.long
def test_processes_that_mark_runs_at_once_leave_one_current_run(server):
    client = mlflow_store.connect(server.uri)
    experiment_id = mlflow_store.find_or_create_experiment(client, "race")
    tags = {"kairos.experiment": "tiny", "kairos.role": "training", "kairos.method": "uniform", "kairos.seed": "0"}
    ids = [client.create_run(experiment_id, tags=tags).info.run_id for _ in range(4)]

    def mark(run_id):
        client_of_thread = mlflow_store.connect(server.uri)
        for _ in range(5):
            mlflow_store.mark_current_runs(
                client_of_thread, experiment_id, {"kairos.experiment": "tiny"}, lambda run: run.info.run_id == run_id
            )

    threads = [threading.Thread(target=mark, args=(run_id,)) for run_id in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    current = mlflow_store.find_runs(client, experiment_id, {**tags, "kairos.current": "true"})
    assert len(current) <= 1
    mark(ids[0])
    current = mlflow_store.find_runs(client, experiment_id, {**tags, "kairos.current": "true"})
    assert [run.info.run_id for run in current] == ids[:1]


@pytest.mark.long
def test_a_server_that_is_killed_and_restarted_receives_all_points(tree, imported, server, tmp_path, monkeypatch):
    config, results = write_config(tree[0], "killed", tmp_path), tree[1]
    proxy = Proxy(server.port)
    job = Job(config, results, "adaptive", 0, tmp_path / "run", proxy.uri)
    job.advance(100)
    wait_for(server.reached("killed", 100), "points up to step 100")
    server.kill()
    assert job.advance(200) < 8
    wait_for(lambda: "training continues" in job.log.read_text(), "the message about the server's end")
    server.start()
    wait_for(server.reached("killed", 200), "points up to step 200")
    assert server.runs("killed") == [("adaptive", "0", "RUNNING")]
    proxy.close()
    job.advance(400)
    assert job.end() < 15
    assert not any(row[3] > 200 for row in server.points("killed"))
    import_into(server.uri, config, results, tmp_path / "tracking.json", monkeypatch)
    assert server.points("killed") == imported


@pytest.mark.long
def test_a_slow_server_delays_no_training_and_a_resumed_training_keeps_its_mlflow_run(tree, imported, server, tmp_path):
    config, results = write_config(tree[0], "slow", tmp_path), tree[1]
    config.write_text(config.read_text().replace("flush_seconds: 300", "flush_seconds: 1"))
    proxy = Proxy(server.port)
    proxy.delay = None
    job = Job(config, results, "uniform", 1, tmp_path / "run", proxy.uri)
    slowest = job.advance(50)
    wait_for(lambda: proxy.connections > 0, "connection")
    slowest = max(slowest, job.advance(100, 150, 200))
    assert slowest < 8 and job.end() < 8  # a request times out after 15 s
    assert server.points("slow") == []
    assert job.log.read_text().count("\n") == 1

    proxy.delay = 0.3
    config.write_text(config.read_text().replace("flush_seconds: 1", "flush_seconds: 300"))
    job = Job(config, results, "uniform", 1, tmp_path / "run", proxy.uri)
    assert job.advance(300) < 8
    wait_for(server.reached("slow", 200), "points up to step 200")
    job.process.kill()
    job.process.wait()
    job = Job(config, results, "uniform", 1, tmp_path / "run", proxy.uri)
    job.advance(400)
    job.end()
    assert server.runs("slow") == [("uniform", "1", "FINISHED")]
    expected = [row for row in imported if row[:2] == ("uniform", "1") and row[2] in TRAINING_METRICS]
    assert server.points("slow") == expected


@pytest.mark.long
def test_a_reporting_training_keeps_its_mlflow_run_and_has_the_weights_of_one_without_reports(
    server, commands, tmp_path
):
    latents, log = make_latents(tmp_path / "data"), tmp_path / "log"
    plain = experiment({"uniform": {}}, tracking={"experiment": "real", "flush_seconds": 300})
    config, out = write_experiment(tmp_path / "x.yaml", plain), tmp_path / "run"
    for milestones in ([0, 20], [0, 20, 40]):
        line = train_command(config, "uniform", out, latents, "--milestones", *milestones)
        assert commands.run(line, log, MLFLOW_TRACKING_URI=server.uri) == 0, log.read_text()
        assert server.runs("real") == [("uniform", "0", "FINISHED")], log.read_text()
        steps = sorted(row[3] for row in server.points("real") if row[2] == "loss")
        assert steps == list(range(1, milestones[-1] + 1))
    unreported = tmp_path / "unreported"
    line = train_command(config, "uniform", unreported, latents, "--milestones", "0", "20", "40")
    assert commands.run(line, log, MLFLOW_TRACKING_URI="") == 0, log.read_text()
    weights = [read_json(folder / "training.json")["components"]["ema"] for folder in (out, unreported)]
    assert weights[0] == weights[1]  # MLflow's client changes no random number


@pytest.fixture
def postgres(tmp_path):
    """A PostgreSQL server, from Debian's packages."""
    pytest.importorskip("psycopg2", reason="no psycopg2; the development dependencies bring psycopg2-binary")
    paths = [shutil.which("initdb"), *map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb")))]
    tools = [Path(path).resolve().parent for path in paths if path]
    if not tools:
        pytest.skip("no PostgreSQL here; apt-get install postgresql")
    folder, port, user = Path("/tmp") / f"kairos-postgres-{os.getpid()}", free_port(), {}
    folder.mkdir()
    if os.geteuid() == 0:  # PostgreSQL does not run as root
        account = pwd.getpwnam("postgres")
        os.chown(folder, account.pw_uid, account.pw_gid)
        user = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": [], "cwd": folder}
    initdb = [tools[-1] / "initdb", "--pgdata", folder / "data", "--username", "kairos", "--auth", "trust", "--no-sync"]
    result = subprocess.run(initdb, capture_output=True, text=True, **user)
    if result.returncode:
        shutil.rmtree(folder)
        pytest.skip(f"PostgreSQL cannot make a database here: {result.stderr.strip()}")
    command = [tools[-1] / "postgres", "-D", folder / "data", "-p", str(port), "-k", folder, "-h", "127.0.0.1"]
    with open(tmp_path / "postgres.log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, **user)
    try:
        wait_for(lambda: "ready to accept connections" in (tmp_path / "postgres.log").read_text(), "PostgreSQL")
        yield f"postgresql://kairos@127.0.0.1:{port}/postgres"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=PATIENCE)
        shutil.rmtree(folder)


@pytest.mark.long
def test_reports_and_import_agree_on_postgresql(postgres, tree, imported, tmp_path, monkeypatch):
    import psycopg2

    config, results = write_config(tree[0], "postgres", tmp_path), tree[1]
    with Server(tmp_path, postgres) as server:
        jobs = [Job(config, results, "adaptive", 1, tmp_path / f"run{k}", server.uri) for k in range(2)]
        for job in jobs:
            job.advance(200, 400)
        for job in jobs:
            job.end()
        for _ in range(2):
            import_into(server.uri, config, results, tmp_path / "tracking.json", monkeypatch)
            with contextlib.closing(psycopg2.connect(postgres)) as connection, connection.cursor() as cursor:
                cursor.execute(RUNS.format(*POINTS).replace("?", "%s"), ("postgres",))
                assert sorted(cursor.fetchall()) == imported


@pytest.mark.long
def test_without_a_server_a_training_ends_normally_and_logs_one_line(tree, tmp_path):
    uri = f"http://someone:secret@127.0.0.1:{free_port()}"
    job = Job(*tree, "uniform", 0, tmp_path / "run", uri)
    job.advance(100, 400)
    wait_for(lambda: "training continues" in job.log.read_text(), "the message about the server")
    assert job.end() < 5
    log = job.log.read_text()
    assert log.count("\n") == 1 and "`kairos track` imports what is missing" in log and "refused" in log
    assert "secret" not in log and "someone" not in log


@pytest.mark.parametrize(
    ("environment", "login", "header", "status"),
    [
        ({"MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": "hush"}, "", "Basic bWU6aHVzaA==", 401),
        ({"MLFLOW_TRACKING_TOKEN": "hush"}, "", "Bearer hush", 403),
        ({}, "me:h%20ush@", "Basic bWU6aCB1c2g=", 401),
        ({}, "", None, 401),
    ],
)
def test_credentials_are_sent_and_never_logged(tree, tmp_path, monkeypatch, capfd, environment, login, header, status):
    headers = []

    class Rejecting(BaseHTTPRequestHandler):
        def do_GET(self):
            headers.append(self.headers["Authorization"])
            self.send_error(status)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Rejecting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        config, uri = write_config(tree[0], "rejected", tmp_path), f"http://{login}127.0.0.1:{server.server_port}"
        for name, value in {"MLFLOW_TRACKING_URI": uri, **environment}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("sys.stdin", io.StringIO("400\n"))
        tracking_job.main(str(config), "uniform", "0", tree[1] / "methods/uniform/seed0", tmp_path / "run")
        server.shutdown()
    logged = capfd.readouterr().err
    assert headers == [header]
    assert f"HTTP {status}" in logged and logged.count("\n") == 1 and not re.search("hush|h%20ush|me:", logged)


@pytest.mark.parametrize("uri", ["https://me:hush@host/a", "postgresql://db/mlflow?user=me&password=hush"])
def test_an_experiment_file_with_credentials_is_rejected(tree, tmp_path, uri):
    values = yaml.safe_load(tree[0].read_text()) | {"tracking": {"uri": uri}}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=r"tracking.uri: got an address with credentials") as caught:
        load(tmp_path / "x.yaml")
    assert "hush" not in str(caught.value)


def test_an_experiment_file_may_contain_other_options_of_a_database(tree, tmp_path):
    uri = "postgresql://db/mlflow?sslmode=require"
    values = yaml.safe_load(tree[0].read_text()) | {"tracking": {"uri": uri}}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(values))
    assert load(tmp_path / "x.yaml").tracking.uri == uri


def test_nothing_is_reported_to_a_database_in_the_working_folder(tree, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    before = threading.active_count()
    with reporting(load(tree[0]), "uniform", 0, tmp_path):
        assert threading.active_count() == before
