"""Experiment files: every validation error reports the field, its value and the allowed values before any job."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from kairos.cli import main
from kairos.config import load, validate
from kairos.config.reading import read_experiment_file
from kairos.diffusion import DiffusionConfig
from kairos.sampling.settings import SamplingConfig
from kairos_timesteps.errors import ConfigError

ROOT = Path(__file__).parent.parent


def demo() -> dict:
    """Return the values of the demo experiment."""
    return yaml.safe_load((ROOT / "params.yaml").read_text())


def changed(path: str, value) -> dict:
    """Return the values of the demo experiment with another value at a dotted path."""
    values = demo()
    *sections, last = path.split(".")
    section = values
    for part in sections:
        section = section.setdefault(part, {})
    section[last] = value
    return values


@pytest.mark.parametrize("path", ["params.yaml", *sorted(p.as_posix() for p in Path("experiments").glob("*.yaml"))])
def test_committed_experiments_are_valid(path):
    assert load(ROOT / path).milestones[0] == 0


@pytest.mark.parametrize(
    ("path", "value"),
    [("experiment", "demo\n"), ("training.device", "cpu\n"), ("training.milestones", ["5 steps\nmore"])],
)
def test_text_after_a_line_break_is_rejected(path, value):
    with pytest.raises(ConfigError, match=path):
        validate(changed(path, value))


@pytest.mark.parametrize("name", ["a\n", "a=\n", "a/b", ".a", ""])
def test_method_names_that_are_no_folder_names_are_rejected(name):
    with pytest.raises(ConfigError, match=re.escape(f"method name {name!r}")):
        validate(changed("methods", {name: {}}))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("bogus", 1, r"bogus: unknown field \(value 1\)\. Allowed: analyses, autoencoder, claim, dataset"),
        ("training.bath_size", 8, r"training.bath_size: unknown field \(value 8\); did you mean 'batch_size'\?"),
        ("training.batch_size", -1, r"training.batch_size: got -1, allowed: greater than or equal to 1"),
        ("training.batch_size", "64", r"training.batch_size: got '64', allowed: a valid integer"),
        ("training.batch_size", "1e2", r"got '1e2', allowed: a valid integer .*; in YAML this is text, write 100$"),
        ("training.optimizer.lr", "1e-3", r"lr: got '1e-3', allowed: a valid number .*; .*text, write 1\.0e-3$"),
        ("training.ema.decay", "2.5E-1", r"decay: got '2.5E-1', .*; .*text, write 2\.5e-1$"),
        (
            "methods.a",
            {"weighting": {"name": "min_snr", "gamma": "1e-3"}},
            r"gamma: got '1e-3', allowed: number > 0 .*; in YAML this is text, write 1\.0e-3$",
        ),
        ("diffusion.process.timesteps", "1e3", r"timesteps: got '1e3', allowed: integer .*text, write 1000$"),
        ("dataset.flips", "1", r"dataset.flips: got '1', allowed: a valid boolean[^;]*$"),
        ("training.batch_size", True, r"training.batch_size: got True"),
        ("dataset.flips", "yes", r"dataset.flips: got 'yes', allowed: a valid boolean"),
        ("training.milestones", ["1.2.3 epochs"], r"training.milestones: got '1.2.3 epochs'"),
        ("methods.a.b", {}, r"methods.a.b: unknown field"),
        ("training.batch_size", "many", r"training.batch_size: got 'many', allowed: a valid integer"),
        ("diffusion.process.timesteps", -5, r"timesteps: got -5, allowed: integer >= 2"),
        ("diffusion.prediction", "y", r"diffusion.prediction: got 'y', allowed: 'epsilon', 'x0' or 'v'"),
        ("diffusion.losses", ["msee"], r"unknown loss 'msee'; did you mean 'mse'"),
        (
            "methods.new",
            {"sampler": "speedy"},
            r"methods.new.sampler: .*unknown sampler 'speedy'; did you mean 'speed'\?",
        ),
        ("methods.new", {"weighting": {"name": "min_snr", "gamma": 0}}, r"gamma: got 0, allowed: number > 0"),
        ("methods.new", {"sampler": {"name": "speed", 1: 2}}, r"methods.new.sampler: .*unknown option 1"),
        (
            "methods.speed.sampler",
            {"name": "speed", "tau": 1000},
            r"methods.speed.sampler.tau: got 1000, allowed: 1 to",
        ),
        (
            "methods.speed.sampler",
            {"name": "speed", "r": 1.00001},
            r"methods.speed.*r: got 1.00001, allowed: .*alpha-bar",
        ),
        (
            "methods.speed.sampler",
            {"name": "uniform", "end": 10, "importance": True},
            r"methods.speed: sampler uniform.importance: got true, but .* timesteps are never drawn",
        ),
        ("methods.a", {"sampler": {"name": "adaptive", "selected": 200}}, r"selected: got 200, allowed: 1 to 100, the"),
        ("methods.floor", {}, r"method name 'floor'"),
        ("methods", {}, r"methods: got {}, allowed: .*at least 1"),
        ("training.milestones", [10, 5], r"training.milestones: got \[10, 5\], allowed: increasing"),
        ("training.milestones", ["5 epochs"], r"needs dataset.train_images"),
        ("training.segments", 9, r"training.segments: got 9, allowed: at most 2, the number"),
        ("training.device", "tpu", r"training.device: got 'tpu', allowed: .*cuda"),
        ("training.ema.decay", 1.0, r"training.ema.decay: got 1.0, allowed: less than 1"),
        ("training.optimizer.betas", [0.9, 1.0], r"betas: got .*each in \[0, 1\)"),
        ("dataset.source", "folder", r"dataset.path: got null, allowed: the path"),
        ("dataset.flips", True, r"dataset.flips: got true, allowed: false for digits"),
        ("sampling.guidance_scale", 2, r"sampling.guidance_scale"),
        ("sampling.steps", 5000, r"sampling.steps: got 5000, allowed: at most .* = 1000"),
        ("sampling.scheduler", {"name": "heun", "s_chrun": 1}, r"s_chrun: unknown field .*; did you mean 's_churn'"),
        ("sampling.scheduler", {"name": "heun", "s_churn": 40}, r"s_churn: got 40.0, allowed with process discrete: 0"),
        (
            "sampling.scheduler",
            {"name": "euler", "spacing": "uniform"},
            r"spacing: got 'uniform', allowed with process discrete: auto, trailing, leading, linspace, karras",
        ),
        (
            "sampling",
            {"scheduler": {"name": "heun", "spacing": "karras"}, "steps": 200},
            r"steps: got 200 with spacing",
        ),
        ("sampling.scheduler", {"name": "heun", "sigma_min": 2, "sigma_max": 1}, r"sigma_min: got 2.0, allowed: less"),
        ("sampling.precision", "fp16", r"sampling.precision: got 'fp16', allowed: 'fp32', 'tf32' or 'bf16'"),
        ("evaluation.precision", "fp64", r"evaluation.precision: got 'fp64', allowed: 'fp32', 'tf32' or 'bf16'"),
        ("experiment", "a/b", r"experiment: got 'a/b'"),
        ("model", {"name": "dit", "patch": 3}, r"model.patch: got 3, allowed: a divisor of the input's side, "),
        ("diffusion.losses", ["mse", "mse"], r"diffusion.losses: got mse, mse, allowed: each once"),
        ("evaluation", {"metrics": ["fid"], "extractor": "classifier"}, r"^x.yaml: evaluation.metrics: fid needs"),
        ("seeds", [1, 1], r"seeds: got \[1, 1\], allowed: distinct"),
        ("autoencoder.channels", [0, 32], r"autoencoder.channels.0: got 0, allowed: .* 1"),
        ("autoencoder.channels", [32, -4], r"autoencoder.channels.1: got -4, allowed: .* 1"),
        (
            "autoencoder",
            {"kind": "train", "channels": [8] * 5},
            r"images are 8×8.* 16 instead of 8",
        ),
    ],
)
def test_a_bad_setting_is_rejected_with_its_field_and_value(path, value, message):
    with pytest.raises(ConfigError, match=message):
        validate(changed(path, value), "x.yaml")


def test_a_resolution_that_a_trained_autoencoder_cannot_halve_is_rejected():
    values = {"experiment": "x", "methods": {"a": {}}, "autoencoder": {"kind": "train", "channels": [8, 8, 8]}}
    with pytest.raises(ConfigError, match=r"dataset.resolution: images are 30×30.*28 or 32 instead of 30"):
        validate({**values, "dataset": {"resolution": 30}})
    assert validate({**values, "dataset": {"resolution": 32}}).x0_size == (4, 8)


def test_a_size_that_yaml_reads_as_a_number_becomes_text():
    assert validate(changed("model", {"name": "adm", "size": 64})).model.size == "64"


def test_missing_files_and_networks_are_reported_by_check(tmp_path, capsys):
    values = {"experiment": "x", "methods": {"a": {}}, "dataset": {"source": "folder", "path": str(tmp_path / "train")}}
    values["dataset"] |= {"resolution": 32, "heldout": str(tmp_path / "held"), "captions": str(tmp_path / "c.json")}
    values |= {"text_encoder": {"path": "/no/encoder"}, "model": {"name": "uvit", "conditions": ["text"]}}
    values["evaluation"] = {"metrics": ["frechet", "clip"], "extractor": "selfsupervised"}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(values))
    assert main(["check", str(tmp_path / "x.yaml")]) == 0
    output = capsys.readouterr().out
    for missing in (tmp_path / "held", tmp_path / "c.json", "/no/encoder", "openai/clip-vit-large-patch14"):
        assert re.search(rf"warning: .*{missing}: not here; ", output), missing


NESTED = {"name": "range", "low": 0.25, "density": {"name": "shift", "alpha": 5, "density": "log_normal"}}


def check_output(folder, capsys, *arguments, **changes):
    """Run `kairos check` on a changed experiment; returns its output."""
    methods = {
        "uniform": {},
        "log-normal": {"sampler": {"name": "log_normal", "s": 0.5}},
        "nested": {"sampler": NESTED},
    }
    values = {"experiment": "x", "methods": methods, **changes}
    (folder / "x.yaml").write_text(yaml.safe_dump(values))
    assert main(["check", *arguments, str(folder / "x.yaml")]) == 0
    return capsys.readouterr().out


def test_check_shows_the_options_that_differ_from_their_defaults(tmp_path, capsys):
    text = check_output(tmp_path, capsys)
    row = next(line for line in text.splitlines() if line.startswith("log-normal"))
    assert row.split() == ["log-normal", "log_normal", "(s", "0.5)", "none"]
    nested = " ".join(text.partition("nested")[2].partition("process:")[0].split())
    assert "range (density shift (density log_normal, alpha 5.0), low 0.25)" in nested
    assert "high" not in nested and "floor" not in nested
    everything = check_output(tmp_path, capsys, "--all-options")
    assert "floor 0.0" in everything and "high 1.0" in everything


@pytest.mark.parametrize("arguments", [[], ["--all-options"]])
@pytest.mark.parametrize(
    "file", ["experiments/digits_all_methods.yaml", "recipes/adaptive", "experiments/cifar10.yaml"]
)
def test_check_fits_a_terminal_of_100_columns(arguments, file, capsys):
    files = [ROOT / file] if file.endswith(".yaml") else sorted((ROOT / file).glob("*.yaml"))[:2]
    for path in files:
        assert main(["check", *arguments, str(path)]) == 0
        table = capsys.readouterr().out.partition("method")[2].partition("warning:")[0]
        assert max(map(len, table.splitlines())) <= 100, path


def test_check_shows_the_sets_of_samples(tmp_path, capsys):
    assert "3 sets of 10,000" in check_output(tmp_path, capsys, evaluation={"num_samples": 10000})
    assert "1 set of 500" in check_output(tmp_path, capsys, evaluation={"num_samples": 500, "sets": 1})


@pytest.mark.parametrize(
    ("process", "scheduler", "message"),
    [
        ("flow", {"name": "euler", "s_churn": 1.0}, r"s_churn: got 1.0, allowed with process flow: 0"),
        ("flow", {"name": "heun", "spacing": "karras"}, r"got 'karras', allowed with process flow: auto, uniform"),
        ("edm", {"name": "ddim", "spacing": "leading"}, r"got 'leading', allowed with process edm: auto, karras, uni"),
        ("vp", {"name": "ddpm", "spacing": "trailing"}, r"got 'trailing', allowed with process vp: auto, karras, unif"),
    ],
)
def test_solver_options_that_a_continuous_process_lacks_are_rejected(process, scheduler, message):
    diffusion = DiffusionConfig(process={"name": process, **({"sigma_data": 0.5} if process == "edm" else {})})
    config = SamplingConfig(scheduler=scheduler)
    with pytest.raises(ConfigError, match=message):
        config.check_fits(diffusion, [], 0.0)
    config = SamplingConfig(
        scheduler=scheduler["name"], steps=5000
    )  # continuous times can be divided into any number of steps
    config.check_fits(diffusion, [], 0.0)


def test_several_mistakes_are_reported_at_once():
    values = changed("training.batch_size", 0)
    values["seeds"] = []
    with pytest.raises(ConfigError, match="2 fields cannot be used") as error:
        validate(values)
    assert "training.batch_size" in str(error.value) and "seeds" in str(error.value)


@pytest.mark.parametrize(
    ("line", "column"),
    [
        ("experiment: 2024-13-01", 13),
        ("training: {batch_size: 0b_}", 24),
        (f"seeds: [{'1' * 5000}]", 9),
        (f"seeds: [0x{'f' * 5000}]", 9),  # python reads this number, but cannot write it in decimal
        ("seeds: [!!bool maybe]", 9),
    ],
)
def test_values_that_yaml_cannot_convert_are_rejected_with_their_position(line, column, tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text(f"# comment\n{line}\n")
    with pytest.raises(ConfigError, match=f"^{file}: .*line 2, column {column}: ") as caught:
        load(file)
    assert len(str(caught.value)) < 300


def test_missing_and_malformed_files_are_rejected(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "no.yaml")
    (tmp_path / "a.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=r"a\.yaml: .*YAML.* line "):
        load(tmp_path / "a.yaml")
    (tmp_path / "c.yaml").write_text("a: 1\nmethods: {}\nmethods: {}\n")
    with pytest.raises(ConfigError, match="repeated key: methods"):
        load(tmp_path / "c.yaml")
    (tmp_path / "b.yaml").write_text("just text")
    with pytest.raises(ConfigError, match="a mapping with the fields"):
        load(tmp_path / "b.yaml")


def test_a_name_and_its_options_with_default_values_are_the_same_configuration():
    short, long = demo(), demo()
    short["methods"] = {"a": {"sampler": "speed"}}
    long["methods"] = {"a": {"sampler": {"name": "speed", "k": 5, "tau": None}, "weighting": "none"}}
    assert validate(short).plain() == validate(long).plain()


def test_a_resolved_configuration_is_unchanged_by_writing_and_reading(tmp_path):
    plain = load(ROOT / "params.yaml").plain()
    (tmp_path / "frozen.yaml").write_text(yaml.safe_dump(plain))
    assert load(tmp_path / "frozen.yaml").plain() == plain


def test_segments_partition_the_milestones():
    values = changed("training.milestones", [1, 2, 3, 4, 5])
    for count in range(1, 6):
        values["training"]["segments"] = count
        segments = validate(values).segments
        assert len(segments) == count and sum(segments, ()) == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["--help"], 0), (["train", "--help"], 0), ([], 2), (["trane"], 2), (["train"], 2), (["verify", "/nowhere"], 1)],
)
def test_commands_end_with_their_exit_status_and_no_traceback(arguments, status, capsys):
    try:
        exit_status = main(arguments)
    except SystemExit as end:  # of argparse
        exit_status = end.code
    printed = capsys.readouterr()
    assert exit_status == status and "Traceback" not in printed.err
    assert (printed.out if status == 0 else printed.err).strip()


def test_the_process_ends_with_the_exit_status_of_the_command():
    command = [sys.executable, "-m", "kairos", "verify", "/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "/nowhere" in done.stderr and "Traceback" not in done.stderr


def test_help_of_every_subcommand_imports_no_large_package():
    code = """
import contextlib, sys
from kairos.cli import COMMANDS, main
assert len(COMMANDS) > 20
for name in COMMANDS:
    with contextlib.suppress(SystemExit):
        main([name, "--help"])
    heavy = {"torch", "diffusers", "mlflow", "sklearn", "pandas", "matplotlib"} & set(sys.modules)
    assert not heavy, (name, heavy)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_an_invalid_file_stops_a_command_before_any_work(tmp_path, capsys):
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(changed("diffusion.process.timesteps", -1)))
    line = ["train", "--config", str(path), "--method", "uniform", "--seed", "0", "--out", str(tmp_path / "out")]
    assert main(line) == 2
    assert "timesteps: got -1" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_values_of_the_command_line_do_not_hide_extends(tmp_path, monkeypatch):
    """Snakemake's ``--config`` without ``--configfile``, with a params.yaml that extends another file."""
    from kairos.workflow.controller import _load_experiment

    (tmp_path / "base.yaml").write_text(Path("params.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    methods = "methods: {replaced: {sampler: uniform}}"
    Path("params.yaml").write_text(f"extends: base.yaml\nseeds: [3]\ntraining: {{batch_size: 24}}\n{methods}\n")
    config = {"experiment": "other", "training": {"checkpoint_every": 7}}
    config["methods"] = {"alone": {"sampler": {"name": "log_normal"}}}
    settings = SimpleNamespace(configfiles=[], config=config)
    loaded = _load_experiment(SimpleNamespace(config_settings=settings), config)
    assert (loaded.experiment, loaded.seeds) == ("other", [3])
    assert list(loaded.methods) == ["alone"]  # by the rules of `extends`, methods replace methods
    assert (loaded.training.batch_size, loaded.training.checkpoint_every) == (24, 7)

    # options of params.yaml stay, though only the extended file has the component's name
    name = validate(read_experiment_file(Path("base.yaml")), "base.yaml").model.name
    Path("params.yaml").write_text("extends: base.yaml\nmodel: {depth: 4}\n")
    config = {"model": {"name": name, "width": 96}}
    settings = SimpleNamespace(configfiles=[], config=config)
    model = _load_experiment(SimpleNamespace(config_settings=settings), config).model
    assert (model.depth, model.width) == (4, 96)

    # a file that --config itself extends
    Path("other.yaml").write_text("training: {log_every: 7}\n")
    config = {"extends": "other.yaml"}
    settings = SimpleNamespace(configfiles=[], config=config)
    loaded = _load_experiment(SimpleNamespace(config_settings=settings), config)
    assert (loaded.model.depth, loaded.training.log_every) == (4, 7)
