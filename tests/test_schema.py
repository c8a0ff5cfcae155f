"""The JSON schema of experiment files is current, accepts every file here, and rejects what kairos rejects."""

import copy
import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from kairos.cli import main
from kairos.config import validate
from kairos_timesteps.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
FILES = ["params.yaml", *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("[er][xe][pc]*s/**/*.yaml"))]
SCHEMA = json.loads((ROOT / "experiments/schema.json").read_text())
CHECK = jsonschema.Draft202012Validator(SCHEMA)


def test_the_committed_schema_is_current(capsys):
    assert main(["schema"]) == 0
    is_current = capsys.readouterr().out == (ROOT / "experiments/schema.json").read_text()
    assert is_current, "run: kairos schema > experiments/schema.json"
    CHECK.check_schema(SCHEMA)


def test_every_experiment_file_links_the_schema_in_its_first_line_and_conforms_to_it():
    assert len(FILES) > 50
    problems = {}
    for name in FILES:
        text = (ROOT / name).read_text()
        header, _, schema = text.splitlines()[0].partition("$schema=")
        target = ((ROOT / name).parent / schema).resolve()
        if header != "# yaml-language-server: " or target != ROOT / "experiments/schema.json":
            problems[name] = f"first line: {text.splitlines()[0]}"
        elif error := next(CHECK.iter_errors(yaml.safe_load(text)), None):
            problems[name] = error.message
    assert problems == {}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("trainign", {}),
        ("training.bath_size", 8),
        ("training.batch_size", -1),
        ("training.batch_size", "64"),
        ("training.optimizer", {"name": "adamw", "lrr": 1.0}),
        ("training.optimizer", {"lr": 0}),
        ("methods.a", {"sampler": "speedy"}),
        ("methods.a", {"sampler": {"name": "speed", "k": 0}}),
        ("methods.a", {"sampler": {"name": "speed", "m": 1}}),
        ("methods.a", {"sampler": {"name": "uniform", "points": "halton"}}),
        ("methods.a", {"sampler": {"k": 1}}),
        ("methods.a", {"sampler": "speed", "grid": {"training.lr": [1]}}),
        ("methods.a", {"sampler": "speed", "grid": {"sampler.k": [1, 1]}}),
        ("methods.a", {"sampler": "speed", "grid": {"sampler.k": 1}}),
        ("model", {"name": "adm", "size": 63}),
        ("diffusion.losses", []),
    ],
)
def test_the_schema_rejects_values_that_kairos_rejects(path, value):
    values = yaml.safe_load((ROOT / "params.yaml").read_text())
    *sections, last = path.split(".")
    section = values
    for name in sections:
        section = section[name]
    section[last] = value
    assert not CHECK.is_valid(values)
    with pytest.raises(ConfigError):
        validate(copy.deepcopy(values))


def test_the_schema_accepts_values_that_kairos_accepts():
    grid = {"sampler": "speed", "grid": {"sampler.k": [1, 2.5], "weighting": ["none", "p2"]}}
    for values in ({"methods": {"a": grid}}, {"model": {"name": "adm", "size": 64}, "methods": {"a": {}}}):
        values = {"experiment": "x", "training": {"optimizer": {"lr": 1}, "milestones": [1, "2k images"]}, **values}
        validate(copy.deepcopy(values))
        CHECK.validate(values)


def test_the_schema_contains_the_bounds_and_defaults_of_options():
    samplers = [
        variant.get("properties", {}) for variant in SCHEMA["$defs"]["MethodConfig"]["properties"]["sampler"]["anyOf"]
    ]
    speed = next(options for options in samplers if options.get("name", {}).get("const") == "speed")
    k = {"type": "number", "exclusiveMinimum": 0, "default": 5.0}
    assert speed["k"] == {**k, "description": "how much more often timesteps before tau are drawn"}
