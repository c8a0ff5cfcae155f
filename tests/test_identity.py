"""What a training's identity and a stage's fingerprint cover: all code that runs, and none that only tells."""

import ast

import pytest

from kairos import fingerprint
from kairos.evaluation.registries import METRICS
from kairos.fingerprint import _text
from kairos.training.identity import code_roots
from kairos.training.registries import AVERAGES, OPTIMIZERS, SCHEDULES, AdamOptions
from kairos.workflow import dependencies
from kairos_timesteps.components import WEIGHTINGS
from training_case import experiment


def test_a_component_that_another_one_names_belongs_to_the_code():
    bases = {"edm": "weightings.fixed", "change_aware": "samplers.speed"}
    for base, module in bases.items():
        plain = experiment({"learned": {"weighting": {"name": "edm2", "base": base}}})
        assert f"kairos_timesteps.{module}" in code_roots(plain, "learned"), base
    assert WEIGHTINGS.modules({"name": "edm2"}) == [
        "kairos_timesteps.weightings.uncertainty",
        "kairos_timesteps.weightings.fixed",
    ]


def test_only_a_module_that_is_left_out_and_its_submodules_do_not_count(tmp_path, monkeypatch):
    package = tmp_path / "kairos"
    (package / "cli").mkdir(parents=True)
    (package / "root.py").write_text("import kairos.cli.table, kairos.clip_grad, kairos.files_of_pixels, kairos.files")
    for name in ("cli/__init__", "cli/table", "clip_grad", "files_of_pixels", "files"):
        (package / f"{name}.py").write_text("")
    monkeypatch.setattr(fingerprint, "__file__", str(package / "fingerprint.py"))
    assert fingerprint.modules(["kairos.root"]) == ["kairos.clip_grad", "kairos.files_of_pixels", "kairos.root"]


def test_a_module_of_another_package_counts_with_its_own_code(tmp_path, monkeypatch):
    (tmp_path / "lonely_sampler.py").write_text("density = 1")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "compute.py").write_text("density = 1")
    monkeypatch.syspath_prepend(tmp_path)
    for name, path in (("lonely_sampler", "lonely_sampler.py"), ("elsewhere.compute", "elsewhere/compute.py")):
        assert fingerprint._path(name) == tmp_path / path


@pytest.mark.parametrize(("registry", "field"), [(OPTIMIZERS, "optimizer"), (SCHEDULES, "schedule"), (AVERAGES, "ema")])
def test_optimisers_schedules_and_averages_belong_to_the_code(registry, field, monkeypatch):
    options = {"options": AdamOptions} if field == "optimizer" else {}
    registry.add("elsewhere", "colorsys:rgb_to_hls", **options)
    try:
        plain = experiment()
        plain["training"][field] = {"name": "elsewhere"}
        assert "colorsys" in code_roots(plain, "uniform")
    finally:
        del registry["elsewhere"]


def test_metrics_belong_to_the_code_of_an_evaluation():
    plain = experiment()
    before = {stage: dependencies.of(stage, plain)["code"] for stage in ("evaluate", "reference", "sample")}
    METRICS.add("elsewhere", "colorsys:rgb_to_hls")
    try:
        changed = {stage for stage, digest in before.items() if dependencies.of(stage, plain)["code"] != digest}
    finally:
        del METRICS["elsewhere"]
    assert changed == {"evaluate", "reference"}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("raise ValueError('a')", "raise ValueError(f'a {b}')", True),
        ("raise ValueError('a' if x else 'b') from None", "raise ValueError('c' if x else 'b') from None", True),
        ("raise ValueError('a')", "raise TypeError('a')", False),
        ("say(f'{n} steps')", "say('steps')", True),
        ("warnings.warn('a', stacklevel=2)", "warnings.warn('b', stacklevel=2)", True),
        ("x: int = option(1, 'one', ge=0)", "x: int = option(1, 'number', ge=0)", True),
        ("x: str = option('a', help='one')", "x: str = option('a', help='two')", True),
        ("x: str = option('a', 'one')", "x: str = option('b', 'one')", False),
        ("x: int = option(1, 'one', ge=0)", "x: int = option(1, 'one', ge=1)", False),
        ("f('a')", "f('b')", False),
    ],
)
def test_what_is_only_said_does_not_count(one, other, same):
    assert (_text(ast.parse(one)) == _text(ast.parse(other))) is same
