"""Plugin files: components of a user's module in experiments, in identities of runs, and in all processes of a run."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kairos import devices
from kairos.cli import main
from kairos.config import freeze, load, plugins, validate
from kairos.files import DamagedError, read_json
from kairos.stage_keys import hash_stage_code
from kairos.stages import TRAIN
from kairos.training.settings import read_run_settings
from kairos.validity import Validity, describe_training, training_identity
from kairos_timesteps.components import COUPLINGS, SAMPLERS, WEIGHTINGS
from kairos_timesteps.errors import ConfigError, KairosError
from training_case import experiment, hashes, make_latents, train_command, write_experiment
from workflow_copy import Copy

ROOT = Path(__file__).resolve().parent.parent
FILE = """
import numpy as np

from kairos_timesteps.base import FixedDensity, Weighting
from kairos_timesteps.components import coupling, sampler, weighting
from kairos_timesteps.couplings import Coupling
from kairos_timesteps.options import option

SCALE = 1


@sampler("test_power", "a power of a uniform number")
class Power(FixedDensity):
    exponent: float = option(2.0, "power of the number", gt=0)

    def quantile(self, p, **context):
        return SCALE * p**self.exponent

    def cdf(self, u, **context):
        return u ** (1 / self.exponent)


@sampler("test_other", "another density")
class Other(FixedDensity):
    def quantile(self, p, **context):
        return p * p


@weighting("test_capped", "SNR with an upper bound")
class Capped(Weighting):
    limit: float = option(5.0, "largest weight", gt=0)

    def formula(self, snr):
        return snr.clip(None, self.limit) / snr


@coupling("test_independent", "as the noise comes")
class Untouched(Coupling):
    pass
"""
METHODS = {
    "uniform": {},
    "power": {"sampler": {"name": "test_power", "exponent": 3.0}, "weighting": "test_capped"},
    "coupled": {"coupling": "test_independent"},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Working directory with a plugin file, whose components are removed from this process afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("my_strategies.py").write_text(FILE)
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(tmp_path):
            plugins.forget(name)
    for registry in (SAMPLERS, WEIGHTINGS, COUPLINGS):
        assert not [name for name in registry if name.startswith("test_")]


def make_case(*files, methods=METHODS, **changes):
    """Return a tiny plain experiment with plugin files."""
    return experiment(methods, plugins=[*files] or ["my_strategies.py"], evaluation__num_samples=200, **changes)


def edit(old, new, file="my_strategies.py"):
    text = Path(file).read_text()
    assert old in text
    Path(file).write_text(text.replace(old, new))


def test_components_of_a_plugin_are_checked_with_their_options(folder, capsys):
    write_experiment(Path("case.yaml"), make_case())
    assert main(["check", "case.yaml"]) == 0
    printed = capsys.readouterr().out
    for text in (r"test_power \(exponent 3.0\)", "test_capped", "test_independent"):
        assert re.search(text, printed)
    assert main(["plan", "case.yaml"]) == 0
    with pytest.raises(ConfigError, match="unknown option 'exponnt'; did you mean 'exponent'"):
        make_case(methods={"a": {"sampler": {"name": "test_power", "exponnt": 3.0}}})
    with pytest.raises(ConfigError, match="exponent: got -1"):
        make_case(methods={"a": {"sampler": {"name": "test_power", "exponent": -1.0}}})


def test_a_grid_may_vary_an_option_of_a_plugin(folder):
    grid = {"a": {"sampler": "test_power", "grid": {"sampler.exponent": [1, 2]}}}
    assert [*make_case(methods=grid)["methods"]] == ["a-exponent=1", "a-exponent=2"]


def test_paths_are_relative_to_the_working_directory_in_extended_files_too(folder):
    Path("deep").mkdir()
    write_experiment(Path("deep/base.yaml"), make_case())
    Path("top.yaml").write_text("extends: deep/base.yaml\nexperiment: top\n")
    assert load("top.yaml").plugins == ["my_strategies.py"]


def test_components_can_be_listed_and_shown(folder, capsys):
    assert main(["strategies", "list", "--plugin", "my_strategies.py"]) == 0
    assert "test_power" in capsys.readouterr().out
    assert main(["strategies", "show", "test_power+test_capped", "--plugin", "my_strategies.py"]) == 0
    assert main(["schema", "--plugin", "my_strategies.py"]) == 0
    assert '"const": "test_capped"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("broken", "x = 1\ndef f(:\n", "plugins: broken.py, line 2: SyntaxError: invalid syntax"),
        ("raises", "x = 1\n\n1 / 0\n", "plugins: raises.py, line 3: ZeroDivisionError: division by zero"),
        ("leaves", "import sys\nsys.exit('bye')\n", "plugins: leaves.py, line 2: SystemExit: bye"),
        ("imports_nothing", "import no_such_module\n", "line 1: ModuleNotFoundError: No module named 'no_such_module'"),
        ("zero", "x = 1\0\n", "plugins: zero.py"),
        ("yaml", "", "plugins: yaml.py: module 'yaml' is .*yaml/__init__.py; rename the file"),
        ("kairos", "", "plugins: kairos.py: module 'kairos' is .*; rename the file"),
        ("random", "", "plugins: random.py: module 'random' is .*; rename the file"),
        ("my-file", "", "plugins: got 'my-file.py', allowed: a Python file whose name has letters"),
        (
            "taken",
            FILE.replace("test_other", "uniform"),
            "line 23: sampler uniform: .*Uniform has this name",
        ),
        (
            "twice",
            FILE.replace("test_other", "test_power"),
            "line 23: sampler test_power: twice:Power has this name",
        ),
        (
            "function",
            FILE.replace("class Other(FixedDensity)", "class Other"),
            "line 23: sampler test_other: got Other, allowed: a class",
        ),
        ("untyped", FILE.replace("limit: float =", "limit ="), "line .*Capped.limit: an option needs a type"),
    ],
)
def test_an_unusable_file_is_reported_in_one_line(name, text, message, folder, capsys):
    write_experiment(Path("case.yaml"), make_case(methods={"uniform": {}}) | {"plugins": [f"{name}.py"]})
    plugins.forget("my_strategies")
    Path(f"{name}.py").write_text(text)
    for _ in range(2):  # a second attempt in one process fails likewise
        assert main(["check", "case.yaml"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("kairos: case.yaml: plugins: ") and re.search(message, line), line


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["missing.py"], "missing.py: cannot be read .No such file or directory.; give the path"),
        (["folder.py"], "folder.py: cannot be read"),
        (["latin.py"], "latin.py: not UTF-8"),
        (["notes.txt"], "got 'notes.txt', allowed: a Python file"),
        ("my_strategies.py", "got 'my_strategies.py', allowed: a list of Python files"),
        ([1], "allowed: a list of Python files"),
        (["my_strategies.py", "folder.py/my_strategies.py"], "my_strategies.py is module .* rename one of the files"),
    ],
)
def test_an_unusable_list_is_reported_in_one_line(value, message, folder):
    Path("folder.py").mkdir()
    Path("folder.py/my_strategies.py").write_text(FILE)
    Path("latin.py").write_bytes(b"x = '\xff'")
    values = {"experiment": "x", "plugins": value, "methods": {"power": {"sampler": "test_power"}}}
    with pytest.raises(ConfigError, match=message) as raised:
        validate(values)
    assert "\n" not in str(raised.value)


def test_a_plugin_that_only_another_experiment_lists_is_rejected(folder):
    plain = make_case()
    del plain["plugins"]
    with pytest.raises(ConfigError, match=r"methods.power: uses .*my_strategies.py; list that file in plugins"):
        validate(plain)


def test_a_file_is_imported_once_for_each_content(folder):
    make_case()
    component = SAMPLERS["test_power"].component
    make_case("my_strategies.py", "./my_strategies.py")
    assert SAMPLERS["test_power"].component is component
    edit("test_other", "test_renamed")
    make_case()
    assert "test_other" not in SAMPLERS and "test_renamed" in SAMPLERS
    edit("option(2.0", "option(4.0")
    assert make_case(methods={"a": {"sampler": "test_power"}})["methods"]["a"]["sampler"]["exponent"] == 4


def hash_methods(*files, **changes):
    """Read the plugin files again and return the hash of each method's code."""
    plain = make_case(*files, **changes)
    runs = {method: read_run_settings(plain, method, 0) for method in plain["methods"]}
    return {method: hash_stage_code(TRAIN, run.sections) for method, run in runs.items()}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("p**self.exponent", "p**self.exponent + 0", {"power", "coupled"}),
        ("SCALE = 1", "SCALE = 1.0", {"power", "coupled"}),
        ("SCALE = 1", "# a comment\n\nSCALE = 1", set()),
    ],
)
def test_an_edit_of_a_plugin_counts_for_the_methods_that_use_it(folder, old, new, expected):
    before = hash_methods()
    edit(old, new)
    after = hash_methods()
    assert {method for method in before if before[method] != after[method]} == expected


FUNCTIONS = """
from kairos_timesteps import density, weighting


@density("test_late", help="a power")
def quantile(u, exponent: float = 2.0):
    return u**exponent


@weighting("test_bounded")
def weight(snr, limit: float = 5.0):
    return snr.clip(None, limit) / snr
"""


def test_decorated_functions_are_components(folder, capsys):
    Path("functions.py").write_text(FUNCTIONS)
    methods = {"uniform": {}, "late": {"sampler": {"name": "test_late", "exponent": 3.0}, "weighting": "test_bounded"}}

    before = hash_methods("functions.py", methods=methods)
    write_experiment(Path("case.yaml"), make_case("functions.py", methods=methods))
    assert main(["check", "case.yaml"]) == 0
    assert re.search(r"late +test_late \(exponent 3.0\) +test_bounded", capsys.readouterr().out)
    edit("u**exponent", "u ** (exponent + 1)", "functions.py")
    after = hash_methods("functions.py", methods=methods)
    assert [method for method in methods if before[method] != after[method]] == ["late"]
    edit("test_late", "mode", "functions.py")
    with pytest.raises(ConfigError, match=r"plugins: functions.py, line 5: Mode: a sampler of kairos has this name"):
        hash_methods("functions.py", methods=methods)


def test_code_that_a_plugin_imports_from_its_folder_counts(folder):
    edit("SCALE = 1", "from scale_of_test import SCALE")
    Path("scale_of_test.py").write_text("SCALE = 1\nOTHER = 1\n")
    before = hash_methods()
    assert plugins.source_files(["my_strategies.py"]) == ["my_strategies.py", "scale_of_test.py"]
    kept = freeze(validate(make_case()))
    edit("OTHER = 1", "OTHER = 2", "scale_of_test.py")
    edit("SCALE = 1", "SCALE = 2", "scale_of_test.py")
    code = f"from kairos.config import load; from kairos.config.plugins import hash_plugins\n\
print(hash_plugins(load({str(kept)!r}).methods)['my_strategies'])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert printed != read_json(plugins.plugin_hashes_file(kept))["my_strategies"]
    assert before == hash_methods()  # this process has imported the earlier text


def test_the_path_of_a_plugin_changes_no_identity_and_reruns_no_stage(folder):
    Path("deep").mkdir()
    plain, record = make_case(), {"content_sha256": "", "autoencoder_sha256": ""}

    def identity(config: dict, method: str) -> str:
        return training_identity(describe_training(read_run_settings(config, method, 0), record, "cpu"))

    def list_keys(config: dict) -> list[str]:
        validity = Validity(validate(config), "unused")
        stages = ("prepare", "train", "sample", "evaluate", "report")
        return [validity.describe_stage(stage, "power" if stage == "train" else None)["key"] for stage in stages]

    identities = [identity(plain, method) for method in METHODS]
    before = list_keys(plain)
    assert identity(experiment({"uniform": {}}), "uniform") == identities[0]
    plugins.forget("my_strategies")
    Path("my_strategies.py").rename("deep/renamed.py")
    moved = make_case("deep/renamed.py")
    assert [identity(moved, method) for method in METHODS] == identities
    assert list_keys(moved) == before


def test_the_identity_contains_the_imported_text(folder):
    before, plain = hash_methods(), make_case()
    edit("p**self.exponent", "p")
    assert hash_stage_code(TRAIN, read_run_settings(plain, "power", 0).sections) == before["power"]
    assert hash_methods()["power"] != before["power"]


def test_a_frozen_experiment_records_the_code_of_its_plugins(folder):
    first = freeze(validate(make_case()))
    assert load(first).plugins == ["my_strategies.py"]
    edit("SCALE = 1", "# a comment\nSCALE = 1")
    config = validate(make_case())
    assert freeze(config) == first
    for method in METHODS:
        plugins.check_unedited(first, method, config.methods[method])
    edit("p**self.exponent", "p")
    config = validate(make_case())
    plugins.check_unedited(first, "uniform", config.methods["uniform"])
    for method in ("power", "coupled"):
        with pytest.raises(KairosError, match=rf"my_strategies.py: the code of method {method} was edited after this"):
            plugins.check_unedited(first, method, config.methods[method])
    second = freeze(config)
    assert second != first
    plugins.check_unedited(second, "power", config.methods["power"])


@pytest.mark.parametrize("suffix", [".yaml", ".plugins.json"])
def test_a_damaged_frozen_experiment_is_rejected_and_written_again(folder, suffix):
    path = freeze(validate(make_case()))
    assert load(path) == validate(make_case())
    damaged = path.with_suffix(suffix)
    content = damaged.read_bytes()
    position = len(content) // 2
    damaged.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
    with pytest.raises(DamagedError, match="damaged"):
        load(path)
    assert freeze(validate(make_case())) == path and damaged.read_bytes() == content


@pytest.mark.long
def test_a_run_with_a_plugin_rejects_code_that_was_edited_since_its_start(folder, commands):
    latents = make_latents(folder / "data")
    file = write_experiment(Path("case.yaml"), make_case(training__milestones=[4], training__checkpoint_every=4))
    frozen = freeze(load(file))
    log = folder / "log"

    def train(config, out):
        status = commands.run(train_command(config, "power", out, latents), log)
        return status, log.read_text()

    status, output = train(frozen, "first")
    assert status == 0, output
    record = read_json("first/training.json")
    snapshot = read_json("first/snapshots/0000004/snapshot.json")
    assert snapshot["computed_from"]["fields"]["method"]["sampler"]["name"] == "test_power" and hashes(Path("first"))
    assert snapshot["config"]["plugins"] == ["my_strategies.py"]

    edit("p**self.exponent", "p")
    status, output = train(frozen, "second")
    assert status == 1 and "Traceback" not in output
    assert "my_strategies.py: the code of method power was edited after this run began" in output
    status, output = train(file, "first")
    assert status == 0 and "starts a new run from step 0" in output
    assert read_json("first/training.json")["identity"] != record["identity"]


@pytest.mark.long
def test_all_processes_of_a_run_import_the_plugin(folder, commands):
    latents = make_latents(folder / "data")
    changes = {"training__milestones": [4], "training__checkpoint_every": 4, "training__processes": 2}
    file = write_experiment(Path("case.yaml"), make_case(**changes))
    logs = [folder / f"rank{rank}.log" for rank in range(2)]
    statuses = commands.run_ranks(train_command(freeze(load(file)), "power", "out", latents), logs)
    assert statuses == [0, 0], "\n".join(log.read_text() for log in logs)
    assert read_json("out/training.json")["provenance"]["processes"] == 2


@pytest.fixture
def project(folder):
    """Project of `kairos init` with a plugin file, and an experiment in pixel space with a few training steps."""
    assert main(["init", "project"]) == 0
    shutil.move("my_strategies.py", "project/my_strategies.py")
    methods = {"uniform": {}, "power": {"sampler": "test_power", "weighting": "test_capped"}}
    values = {
        "experiment": "tiny",
        "dataset": {"source": "digits", "color": "grey", "heldout": 0.25, "limit": 200},
        "autoencoder": {"kind": "none"},
        "model": {"name": "dit", "patch": 4, "width": 16, "depth": 1, "heads": 2},
        "training": {"batch_size": 8, "milestones": [2]},
        "methods": methods,
        "sampling": {"steps": 1, "grid": 1},
        "evaluation": {
            "extractor": {"name": "classifier", "features": 4, "channels": 4, "steps": 2},
            "num_samples": 10, "sets": 1, "strata": 2, "loss_images": 4,
        },
        "tracking": {"enabled": False},
        "plugins": ["my_strategies.py"],
    }  # fmt: skip
    write_experiment(folder / "project/params.yaml", values)
    copy = Copy.at(folder / "project")
    copy.environment["PYTHONPATH"] = os.pathsep.join((str(ROOT / "src"), str(ROOT / "library/src")))
    return copy


def test_a_project_lists_its_jobs(project):
    assert project.to_do(config="params.yaml")["train"] == 2


@pytest.mark.long
def test_a_project_reruns_the_runs_whose_code_was_edited(project):
    ended = project.snakemake(config="params.yaml")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert os.path.exists(project.folder / "results/tiny/report.html")
    preloaded = os.path.exists(project.folder / "results/tiny/timing/preload.json")
    assert preloaded or devices.has_nvidia_driver()

    def to_do():
        return project.to_do(config="params.yaml")

    with project.edited("my_strategies.py", "p**self.exponent", "p"):
        assert to_do() == dict.fromkeys(("train", "sample", "evaluate", "report"), 1)
    # a comment and the path of the plugin rerun nothing
    with (
        project.edited("my_strategies.py", "SCALE = 1", "# a comment\nSCALE = 1"),
        project.edited("params.yaml", "my_strategies.py", "renamed.py"),
    ):
        shutil.move(project.folder / "my_strategies.py", project.folder / "renamed.py")  # `edited` restores it
        assert to_do() == {}
    shutil.move(project.folder / "results/tiny", project.folder / "moved")
    shutil.move(project.folder / "my_strategies.py", project.folder / "absent.py")
    ended = project.run_forked("kairos", "report", "moved")
    assert ended.returncode == 2 and "my_strategies.py: cannot be read" in ended.stderr
    shutil.move(project.folder / "absent.py", project.folder / "my_strategies.py")
    ended = project.run_forked("kairos", "report", "moved")
    assert ended.returncode == 0, ended.stderr
