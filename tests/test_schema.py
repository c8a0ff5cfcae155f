"""The JSON schema of experiment files: current, true of every file here, and false of what kairos refuses."""

import copy
import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from kairos.cli import main
from kairos.config import validate
from kairos.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
FILES = ["params.yaml", *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("[er][xe][pc]*s/**/*.yaml"))]
SCHEMA = json.loads((ROOT / "experiments/schema.json").read_text())
CHECK = jsonschema.Draft202012Validator(SCHEMA)


def test_it_is_current(capsys):
    assert main(["schema"]) == 0
    same = capsys.readouterr().out == (ROOT / "experiments/schema.json").read_text()
    assert same, "kairos schema > experiments/schema.json"
    CHECK.check_schema(SCHEMA)


@pytest.mark.parametrize("name", FILES)
def test_files_name_it_and_keep_to_it(name):
    path = ROOT / name
    head, _, place = path.read_text().splitlines()[0].partition("$schema=")
    assert head == "# yaml-language-server: " and (path.parent / place).resolve() == ROOT / "experiments/schema.json"
    CHECK.validate(yaml.safe_load(path.read_text()))


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
def test_what_is_refused_does_not_keep_to_it(path, value):
    values = yaml.safe_load((ROOT / "params.yaml").read_text())
    *sections, last = path.split(".")
    place = values
    for part in sections:
        place = place[part]
    place[last] = value
    assert not CHECK.is_valid(values)
    with pytest.raises(ConfigError):
        validate(copy.deepcopy(values))


def test_what_is_allowed_keeps_to_it():
    grid = {"sampler": "speed", "grid": {"sampler.k": [1, 2.5], "weighting": ["none", "p2"]}}
    for values in ({"methods": {"a": grid}}, {"model": {"name": "adm", "size": 64}, "methods": {"a": {}}}):
        values = {"experiment": "x", "training": {"optimizer": {"lr": 1}, "milestones": [1, "2k images"]}, **values}
        validate(copy.deepcopy(values))
        CHECK.validate(values)


def test_options_are_described_with_bounds_and_defaults():
    told = SCHEMA["$defs"]["MethodConfig"]["properties"]["sampler"]["anyOf"]
    speed = next(one["properties"] for one in told if one.get("properties", {}).get("name", {}).get("const") == "speed")
    k = {"type": "number", "exclusiveMinimum": 0, "default": 5.0}
    assert speed["k"] == {**k, "description": "how much more often timesteps before tau are drawn"}
