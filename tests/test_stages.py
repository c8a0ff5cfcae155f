"""The table of stages: which fields and which code the results of each stage depend on."""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kairos
import kairos_timesteps
from kairos import code_hash, stage_keys, stages
from kairos.analyses.settings import ANALYSES
from kairos.config import validate
from kairos.evaluation.settings import EXTRACTORS, METRICS
from kairos.losses.settings import LOSSES
from kairos.models.settings import BACKBONES
from kairos.sampling.settings import SOLVERS
from kairos.training.settings import AVERAGES, OPTIMIZERS, SCHEDULES
from kairos_timesteps.components import COUPLINGS, PROCESSES, SAMPLERS, WEIGHTINGS
from training_case import experiment

PIPELINE, LIBRARY = Path(kairos.__file__).parent, Path(kairos_timesteps.__file__).parent
CASE = validate(experiment({"uniform": {}, "learned": {"sampler": "adaptive"}}))


def hash_all(config: Any = CASE) -> dict[str, str]:
    """Return the hash of the code of every stage, for stage train of every method as ``train.METHOD``."""
    hashes = {}
    for name, row in stages.list_stages(config).items():
        for method in config.methods if name == "train" else [None]:
            sections = stage_keys.list_sections(config, row, method)
            hashes[f"{name}.{method}" if method else name] = stage_keys.hash_stage_code(row, sections)
    return hashes


@contextmanager
def edited(path: Path, edit: Callable[[str], str]) -> Iterator[None]:
    """Replace the text of a source file, for hashes of code alone."""
    text = path.read_text(encoding="utf-8")
    assert edit(text) != text
    code_hash.set_source(path, edit(text).encode())
    try:
        yield
    finally:
        code_hash.set_source(path, text.encode())


def append_statement(text: str) -> str:
    """Return an edit of a module that changes its code."""
    return f"{text}\nEXTRA = 1\n"


def changed_by(path: Path, edit: Callable[[str], str] = append_statement) -> set[str]:
    """Return the stages whose code an edit changes."""
    before = hash_all()
    with edited(path, edit):
        after = hash_all()
    return {stage for stage in before if before[stage] != after[stage]}


TRAINING = {"train.uniform", "train.learned"}
SUMMARIES = {"report", "track"}


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        ("data/settings.py", "round(share * count)", "round(2 * share * count)", {"prepare"}),
        ("models/settings.py", "def widths", "def other_widths", TRAINING | {"sample", "evaluate"}),
        ("evaluation/settings.py", '"kid"', '"sfid"', {"reference", "evaluate"}),
        ("sampling/settings.py", "DISCRETE = ", "DISCRETE = () or ", {"sample", "evaluate"}),
    ],
)
def test_settings_modules_count_where_they_decide_results(file: str, old: str, new: str, expected: set[str]) -> None:
    assert expected <= changed_by(PIPELINE / file, lambda text: text.replace(old, new))


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("analyses/tables.py", set()),  # of stages measure_NAME, which this experiment lacks
        ("autoencoders/train.py", {"autoencoder"}),
        ("cli/train.py", set()),
        ("config/experiment.py", set()),
        ("costs/estimate.py", set()),
        ("data/prepare.py", {"prepare"}),
        ("data/batches.py", TRAINING),
        ("evaluation/evaluate.py", {"evaluate"}),
        ("losses/terms.py", TRAINING),
        ("snapshots.py", {*TRAINING, "sample", "evaluate", *SUMMARIES}),
        ("models/dit.py", {*TRAINING, "sample", "evaluate"}),
        ("models/unet.py", set()),  # another backbone
        ("report/page.py", {"report"}),
        ("sampling/solvers.py", {"sample"}),
        ("status/render.py", set()),
        ("text_encoders/encode_captions.py", set()),  # of stage text, which this experiment lacks
        ("tracking/track.py", {"track"}),
        ("training/loop.py", TRAINING),
        ("workflow/layout.py", set()),
    ],
)
def test_an_edit_in_a_folder_of_the_pipeline_counts_for_the_stages_that_use_it(file: str, expected: set[str]) -> None:
    assert changed_by(PIPELINE / file) == expected


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("base.py", TRAINING),
        ("diffusion/schedule.py", {*TRAINING, "sample", "evaluate", *SUMMARIES}),
        ("integrations/diffusers.py", set()),  # for other projects' trainers
        ("samplers/adaptive.py", {"train.learned"}),
        ("samplers/policy.py", {"train.learned"}),
        ("samplers/speed.py", set()),  # another sampler
        ("weightings/change_aware.py", set()),
        ("presets.py", set()),
    ],
)
def test_an_edit_in_the_library_counts_for_the_methods_that_use_it(file: str, expected: set[str]) -> None:
    assert changed_by(LIBRARY / file) == expected


def test_every_module_counts_or_has_a_reason() -> None:
    """A module that training, sampling or evaluation import is in their code, or in `LEFT_OUT`."""
    for name in ("prepare", "encode", "train", "sample", "evaluate"):
        row = stages.list_stages(CASE)[name]
        sections = stage_keys.list_sections(CASE, row, "uniform" if row.per_snapshot else None)
        modules = stage_keys.list_modules(row, sections)
        code = f"import sys, importlib\nfor name in {modules}: importlib.import_module(name)\nprint(*sys.modules)"
        imported = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
        counted = set(code_hash.list_files(tuple(modules), frozenset(stages.LEFT_OUT)))
        for module in imported:
            path = code_hash.find_file(module) if module.partition(".")[0] in code_hash.PACKAGES else None
            if path is None or path in counted or module in stages.LEFT_OUT or path.name == "__init__.py":
                continue
            # imported by a module that is left out: a registry, or what reads the options of other components
            importers = [other for other in imported if other in stages.LEFT_OUT]
            reached = code_hash.list_files(tuple(sorted(importers)))
            assert path in reached, f"{name}: {module} is neither in the code nor left out"


def test_reasons_are_of_modules_that_exist() -> None:
    assert [name for name in stages.LEFT_OUT if code_hash.find_file(name) is None] == []
    sections = {*type(CASE).model_fields, "method", "analysis"}
    for row in stages.list_stages(CASE).values():
        for name in (*row.fields, *row.no_effect):
            section, _, entry = name.partition(".")
            assert section in sections or name == "*", name
            options = getattr(type(getattr(CASE, section, None)), "model_fields", {})
            assert not entry or section in ("method", "analysis") or entry in options, name
        assert set(row.needs) <= {stage.name for stage in stages.STAGES}


REGISTRIES = {
    "sampler": SAMPLERS, "weighting": WEIGHTINGS, "coupling": COUPLINGS, "process": PROCESSES, "model": BACKBONES,
    "optimizer": OPTIMIZERS, "schedule": SCHEDULES, "ema": AVERAGES, "loss": LOSSES, "extractor": EXTRACTORS,
    "metric": METRICS, "solver": SOLVERS, "analysis": ANALYSES,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind, registry in REGISTRIES.items()
        for name in registry
        if not hasattr(registry[name], "code") or getattr(registry[name], "code", None)
    ],
)
def test_an_edit_in_every_file_of_a_components_classes_changes_its_hash(kind: str, name: str) -> None:
    component = REGISTRIES[kind][name]
    if hasattr(component, "component"):  # of the library
        implementation, modules = component.component, [component.module]
    else:
        implementation, modules = component.load(), [component.module()]
    bases = implementation.__mro__ if isinstance(implementation, type) else [implementation]
    files = {code_hash.find_file(base.__module__) for base in bases if base.__module__.startswith("kairos")}
    assert files
    before = stage_keys.hash_modules(modules)
    for path in files - {code_hash.find_file(module) for module in stages.LEFT_OUT}:
        with edited(path, append_statement):
            assert stage_keys.hash_modules(modules) != before, path


@pytest.mark.parametrize(
    ("first", "second", "are_equal"),
    [
        ("x = 1", "x = 1  # a comment", True),
        ('"""Text."""\nx = 1', "x = 1", True),
        ('def f():\n    """Text."""\n    return 1', 'def f():\n    """Other."""\n    return 1', True),
        ("def f(x: int) -> int: return x", "def f(x): return x", True),
        ("async def f(x: int) -> int: return x", "async def f(x): return x", True),
        ("class A:\n    x: int = 1", "class A:\n    x: float = 1", True),
        ("class A:\n    x: int\n    y: int", "class A:\n    y: int\n    x: int", False),
        ("if TYPE_CHECKING:\n    import a\nx = 1", "x = 1", True),
        ("if typing.TYPE_CHECKING:\n    import a\nelse:\n    x = 1", "x = 1", True),
        ("x = 'a'", "x = 'b'", False),
        ("def f(x=1): return x", "def f(x=2): return x", False),
        ("x = 1", "y = 1", False),
    ],
)
def test_docstrings_comments_and_annotations_do_not_count(first: str, second: str, are_equal: bool) -> None:
    def strip(text: str) -> str:
        return ast.dump(code_hash._Stripped().visit(ast.parse(text)))

    assert (strip(first) == strip(second)) == are_equal


@pytest.mark.parametrize(
    ("text", "reached"),
    [
        ("from kairos_timesteps import make_schedule", "diffusion/schedule.py"),
        ("def f():\n    from kairos_timesteps import make_schedule", "diffusion/schedule.py"),
        ("import kairos_timesteps.numeric", "numeric.py"),
        ("from kairos_timesteps import numeric", "numeric.py"),
        ("from kairos_timesteps.numeric import spline as other", "numeric.py"),
        ("try:\n    from kairos_timesteps.numeric import spline\nfinally: pass", "numeric.py"),
        ("import helper_of_test", "helper_of_test.py"),
    ],
)
def test_imports_are_followed(text: str, reached: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"importer_{abs(hash(text))}"
    (tmp_path / f"{module}.py").write_text(f"import numpy, torch\n{text}\n")
    (tmp_path / "helper_of_test.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    code_hash.find_file.cache_clear()
    try:
        files = code_hash.list_files((module,), frozenset(stages.LEFT_OUT))
    finally:
        code_hash.find_file.cache_clear()
    assert any(path.as_posix().endswith(f"/{reached}") for path in files)
    folders = {tmp_path, *LIBRARY.rglob("."), LIBRARY}
    assert all(path.parent in folders for path in files)  # neither numpy nor torch


def test_a_module_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="missing"):
        stage_keys.hash_modules(["kairos.training.missing"])


def test_the_number_of_processes_counts_for_couplings_by_rank_alone() -> None:
    names = {"independent": False, "assignment": True, "antithetic": True}
    config = validate(experiment({name: {"coupling": name} for name in names}))
    for name, counts in names.items():
        fields = stage_keys.select_fields(stages.TRAIN, config.run_settings(name, 0).sections)
        assert ("processes" in fields["training"]) == counts, name


def test_the_end_of_a_schedule_counts_as_its_length() -> None:
    plain = experiment()
    plain["training"] |= {"schedule": "cosine", "milestones": [4, 8]}
    fields = stage_keys.select_fields(stages.TRAIN, validate(plain).run_settings("uniform", 0).sections)
    assert fields["training"]["schedule"]["length"] == 8 and "milestones" not in fields["training"]


@pytest.mark.parametrize("has_init", [True, False])
def test_packages_next_to_a_plugin_are_followed(
    has_init: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"plugin_of_test_{has_init}"
    helpers = tmp_path / f"helpers_of_{name}"
    helpers.mkdir()
    (tmp_path / f"{name}.py").write_text(f"from {helpers.name}.inner import VALUE\n")
    (helpers / "inner.py").write_text("VALUE = 1\n")
    if has_init:
        (helpers / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    names = {path.relative_to(tmp_path).as_posix() for path in code_hash.list_files((name,))}
    expected = {f"{name}.py", f"{helpers.name}/inner.py"}
    assert names == expected | ({f"{helpers.name}/__init__.py"} if has_init else set())
