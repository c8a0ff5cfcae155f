"""Identities of runs and fingerprints of stages cover all code that computes a result, and no other code."""

import ast
import json
import subprocess
import sys
from types import ModuleType
from typing import ClassVar

import pytest

import kairos_timesteps
from kairos import fingerprint
from kairos.config import validate
from kairos.evaluation.settings import METRICS, FrechetOptions
from kairos.fingerprint import _text
from kairos.training.identity import code_roots
from kairos.training.settings import (
    AVERAGES,
    OPTIMIZERS,
    SCHEDULES,
    AverageOptions,
    OptimizerOptions,
    ScheduleOptions,
    read_run_settings,
)
from kairos.workflow import dependencies
from training_case import experiment


def test_the_base_of_a_component_belongs_to_the_code():
    bases = {"edm": "weightings.fixed", "change_aware": "weightings.change_aware"}
    for base, module in bases.items():
        plain = experiment({"learned": {"weighting": {"name": "edm2", "base": base}}})
        modules = {root.partition(":")[0] for root in code_roots(read_run_settings(plain, "learned", 0))}
        assert {f"kairos_timesteps.{module}", "kairos_timesteps.weightings.uncertainty"} <= modules, base


def test_only_excluded_modules_and_their_submodules_do_not_count(tmp_path, monkeypatch):
    package = tmp_path / "kairos"
    (package / "cli").mkdir(parents=True)
    (package / "root.py").write_text("import kairos.cli.table, kairos.clip_grad, kairos.files_of_pixels, kairos.files")
    for name in ("cli/__init__", "cli/table", "clip_grad", "files_of_pixels", "files"):
        (package / f"{name}.py").write_text("")
    monkeypatch.setattr(fingerprint, "__file__", str(package / "fingerprint.py"))
    assert fingerprint.modules(["kairos.root"]) == ["kairos.clip_grad", "kairos.files_of_pixels", "kairos.root"]


def test_modules_of_other_packages_are_found_with_their_code(tmp_path, monkeypatch):
    (tmp_path / "lonely_sampler.py").write_text("density = 1")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "compute.py").write_text("density = 1")
    monkeypatch.syspath_prepend(tmp_path)
    for name, path in (("lonely_sampler", "lonely_sampler.py"), ("elsewhere.compute", "elsewhere/compute.py")):
        assert fingerprint._path(name) == tmp_path / path


def declare_elsewhere(base):
    """Return a component, derived from `base`, whose code is in a module of the standard library."""

    class ElsewhereOptions(base):
        code: ClassVar[str] = "colorsys:rgb_to_hls"

        name: str = "elsewhere"

    return ElsewhereOptions


@pytest.mark.parametrize(
    ("components", "base", "field"),
    [
        (OPTIMIZERS, OptimizerOptions, "optimizer"),
        (SCHEDULES, ScheduleOptions, "schedule"),
        (AVERAGES, AverageOptions, "ema"),
    ],
)
def test_optimizers_schedules_and_averages_belong_to_the_code(components, base, field, monkeypatch):
    monkeypatch.setitem(components, "elsewhere", declare_elsewhere(base))
    plain = experiment()
    plain["training"][field] = {"name": "elsewhere"}
    assert "colorsys" in {root.partition(":")[0] for root in code_roots(read_run_settings(plain, "uniform", 0))}


def test_metrics_belong_to_the_code_of_an_evaluation(monkeypatch):
    config, stages = validate(experiment()), ("evaluate", "reference", "sample")
    before = {stage: dependencies.collect_params(stage, config)["code"] for stage in stages}
    metric = declare_elsewhere(FrechetOptions)
    monkeypatch.setitem(METRICS, "elsewhere", metric)
    after = {stage: dependencies.collect_params(stage, config)["code"] for stage in stages}
    assert {stage for stage in stages if after[stage] != before[stage]} == {"evaluate", "reference"}


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        ("raise ValueError('a')", "raise ValueError(f'a {b}')", True),
        ("raise ValueError('a' if x else 'b') from None", "raise ValueError('c' if x else 'b') from None", True),
        ("raise ValueError('a')", "raise TypeError('a')", False),
        ("log(f'{n} steps')", "log('steps')", True),
        ("warnings.warn('a', stacklevel=2)", "warnings.warn('b', stacklevel=2)", True),
        ("x: int = option(1, 'one', ge=0)", "x: int = option(1, 'number', ge=0)", True),
        ("x: str = option('a', help='one')", "x: str = option('a', help='two')", True),
        ("x: str = option('a', 'one')", "x: str = option('b', 'one')", False),
        ("x: int = option(1, 'one', ge=0)", "x: int = option(1, 'one', ge=1)", False),
        ("f('a')", "f('b')", False),
        ("@sampler('a', 'one')\nclass A: pass", "@sampler('a', help='two', paper='x')\nclass A: pass", True),
        ("@kt.weighting('a', 'one')\nclass A: pass", "@kt.weighting('a')\nclass A: pass", True),
        ("@sampler('a')\nclass A: pass", "@sampler('b')\nclass A: pass", False),
        ("@other('a', 'one')\nclass A: pass", "@other('a', 'two')\nclass A: pass", False),
    ],
)
def test_messages_and_help_texts_do_not_count(first, second, equal):
    assert (_text(ast.parse(first)) == _text(ast.parse(second))) is equal


MODE, LOG_NORMAL = "kairos_timesteps.samplers.fixed:Mode", "kairos_timesteps.samplers.fixed:LogNormal"
LOOP = "kairos.training.run"


@pytest.fixture
def changed(monkeypatch):
    """Function that edits the text of a module and returns the roots whose fingerprint changes."""

    def compare(module, edit, roots):
        path, source = fingerprint._path(module), fingerprint._source
        text = edit(source(path))
        assert text != source(path)
        before = {root: fingerprint.fingerprint([root]) for root in roots}
        with monkeypatch.context() as patch:
            patch.setattr(fingerprint, "_source", lambda file: text if file == path else source(file))
            patch.setattr(fingerprint, "_fingerprint", fingerprint._fingerprint.__wrapped__)
            return {root for root in roots if fingerprint.fingerprint([root]) != before[root]}

    return compare


def insert_into(name):
    """Return an edit of a module's text that inserts a statement into the class or function `name`."""

    def edit(text):
        (definition,) = (node for node in ast.parse(text).body if getattr(node, "name", "") == name)
        first, lines = definition.body[0], text.splitlines(keepends=True)
        lines.insert(first.end_lineno, " " * first.col_offset + "extra = 1\n")
        return "".join(lines)

    return edit


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        ("samplers.fixed", "Mode", {MODE}),
        ("samplers.fixed", "LogNormal", {LOG_NORMAL}),
        ("base", "Sampler", {MODE, LOG_NORMAL, LOOP}),
        ("numeric", "normal_quantile", {LOG_NORMAL}),
        ("strategy", "Strategy", {LOOP}),
        ("presets", "preset", set()),
        ("options", "option", set()),
    ],
)
def test_an_edit_in_the_library_counts_where_the_definition_is_used(module, name, expected, changed):
    assert changed(f"kairos_timesteps.{module}", insert_into(name), [MODE, LOG_NORMAL, LOOP]) == expected


def test_a_module_as_root_counts_as_a_whole(changed):
    module = MODE.partition(":")[0]
    assert changed(module, insert_into("Mode"), [module]) == {module}


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text.replace("import math\n", "import math\n\nif TYPE_CHECKING:\n    import os\n"),
        lambda text: text.replace('"""', '"""Reworded: ', 1),
        lambda text: f"{text}\nunused = 1\n",
    ],
)
def test_neither_typing_imports_nor_docstrings_nor_unused_names_count(edit, changed):
    assert changed("kairos_timesteps.numeric", edit, [MODE, LOG_NORMAL, LOOP]) == set()


def test_top_level_statements_count_with_every_definition(changed):
    def edit(text):
        return f"{text}\nfor name in ():\n    print(name)\n"

    assert changed("kairos_timesteps.samplers.fixed", edit, [MODE, LOG_NORMAL, LOOP]) == {MODE, LOG_NORMAL}


@pytest.mark.parametrize("name", sorted({*kairos_timesteps.__all__} - {"__version__"}))
def test_every_public_name_of_the_library_resolves_to_its_definition(name):
    module = getattr(kairos_timesteps, name).__module__
    hashes = fingerprint.reached([f"kairos_timesteps:{name}"])
    assert f"{module}:{name}" in hashes or (fingerprint._is_left_out(module) and not hashes)


def write_plugins(folder, monkeypatch, **files):
    """Write plugin files and make them importable."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)


def test_an_edit_of_a_plugin_file_counts_per_component(tmp_path, monkeypatch, changed):
    write_plugins(
        tmp_path,
        monkeypatch,
        components_of_test="""
import numpy, torch
import helper_of_test
from kairos_timesteps.base import Sampler
from kairos_timesteps.numeric import logit

@sampler("first", "help")
class First(Sampler):
    value = numpy.array(helper_of_test.VALUE)

class Second:
    value = logit(torch.zeros(1))
""",
        helper_of_test="VALUE = 1\nOTHER = 1\n",
    )
    first, second = "components_of_test:First", "components_of_test:Second"
    for module, edit, expected in (
        ("components_of_test", insert_into("First"), {first}),
        ("components_of_test", insert_into("Second"), {second}),
        ("components_of_test", lambda text: text.replace('"help"', '"a better help"'), set()),
        ("helper_of_test", lambda text: text.replace("VALUE = 1", "VALUE = 2"), {first}),
        ("kairos_timesteps.base", insert_into("Sampler"), {first, LOOP}),
        ("kairos_timesteps.numeric", insert_into("logit"), {second}),
        ("kairos_timesteps.samplers.fixed", insert_into("Mode"), set()),
    ):
        assert changed(module, edit, [first, second, LOOP]) == expected, (module, expected)
    tops = {code.partition(".")[0].partition(":")[0] for code in fingerprint.reached([first, second])}
    assert tops == {"components_of_test", "helper_of_test", "kairos_timesteps"}  # neither numpy nor torch


def test_a_plugin_module_without_import_specification_counts(tmp_path, monkeypatch, changed):
    module = ModuleType("loaded_by_test")
    module.__file__ = str(tmp_path / "any_name.py")
    (tmp_path / "any_name.py").write_text("class Mine:\n    value = 1\n")
    monkeypatch.setitem(sys.modules, "loaded_by_test", module)
    root = "loaded_by_test:Mine"
    assert changed("loaded_by_test", lambda text: text.replace("1", "2"), [root]) == {root}


@pytest.mark.parametrize(
    ("text", "reached"),
    [
        ("from kairos_timesteps import make_schedule\ndef f(): make_schedule()", "diffusion.schedule:make_schedule"),
        ("def f():\n    from kairos_timesteps import make_schedule", "diffusion.schedule:make_schedule"),
        ("import kairos_timesteps\ndef f(): kairos_timesteps.make_schedule()", "diffusion.schedule:make_schedule"),
        ("import kairos_timesteps as kt\ndef f(): kt.make_schedule()", "diffusion.schedule:make_schedule"),
        ("def f():\n    import kairos_timesteps as kt\n    kt.make_schedule()", "diffusion.schedule:make_schedule"),
        ("import kairos_timesteps\ndef f(x): getattr(kairos_timesteps, x)", "diffusion.schedule:make_schedule"),
        ("import kairos_timesteps.numeric\ndef f(): kairos_timesteps.numeric.spline(1)", "numeric"),
        ("from kairos_timesteps import numeric\ndef f(): numeric.spline(1)", "numeric"),
        ("from kairos_timesteps import samplers\ndef f(): samplers.fixed.Mode", "samplers.fixed:Mode"),
        ("from kairos_timesteps.samplers import fixed\ndef f(): fixed.Mode", "samplers.fixed"),
        ("from kairos_timesteps.numeric import *\ndef f(): spline(1)", "numeric"),
        ("try:\n    from kairos_timesteps.numeric import spline\nfinally: pass\ndef f(): spline(1)", "numeric:spline"),
        ("from kairos_timesteps.numeric import no_definition\ndef f(): no_definition()", "numeric"),
        ("from kairos_timesteps.numeric import np\ndef f(): np", "numeric"),
    ],
)
@pytest.mark.parametrize("root", ["importer_of_test", "importer_of_test:f"])
def test_imports_of_the_library_are_followed(text, reached, root, tmp_path, monkeypatch):
    write_plugins(tmp_path, monkeypatch, importer_of_test=text)
    hashes = fingerprint.reached([root])
    assert f"kairos_timesteps.{reached}" in hashes
    if "getattr" not in text:
        assert not any("Strategy" in code for code in hashes)


@pytest.mark.parametrize(
    "text", ["from kairos_timesteps import unknown as f", "import kairos_timesteps\nf = kairos_timesteps.unknown"]
)
def test_a_public_name_without_definition_is_an_error(text, tmp_path, monkeypatch):
    write_plugins(tmp_path, monkeypatch, importer_of_test=text)
    with pytest.raises(ImportError, match="unknown"):
        fingerprint.reached(["importer_of_test"])


@pytest.mark.parametrize("root", ["kairos.training.missing", "kairos_timesteps.missing:Name", "missing_of_test:Name"])
def test_a_root_that_does_not_exist_is_an_error(root):
    with pytest.raises(ModuleNotFoundError, match="missing"):
        fingerprint.reached([root])


def test_a_fingerprint_imports_no_module_of_the_library():
    code = f"""import sys; from kairos.fingerprint import fingerprint
fingerprint(["{MODE}", "kairos_timesteps:Strategy", "{LOOP}"])
print([name for name in sys.modules if name.startswith(("kairos_timesteps.", "torch"))])"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout in (
        "[]\n",
        "['kairos_timesteps.errors']\n",  # of kairos.files, which writes the cache
    )


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Function that returns the fingerprint of all code of the tiny experiment, as a new process with a cache file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def compute():
        for cached in (fingerprint._fingerprint, fingerprint._summarise):
            cached.cache_clear()
        monkeypatch.setattr(fingerprint, "_summaries", fingerprint._Summaries())
        return fingerprint.fingerprint(["kairos.training.run", "kairos_timesteps.samplers.adaptive:Adaptive"])

    yield compute
    for cached in (fingerprint._fingerprint, fingerprint._summarise):
        cached.cache_clear()


def test_summaries_from_the_cache_equal_parsed_ones(cache, tmp_path, monkeypatch):
    expected = cache()
    assert (tmp_path / "kairos/modules.json").stat().st_size > 1000
    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "_parse", None)  # nothing is parsed again
        assert cache() == expected


@pytest.mark.long
def test_a_damaged_or_unusable_cache_changes_nothing(cache, tmp_path):
    expected = cache()
    file = tmp_path / "kairos/modules.json"
    whole = file.read_bytes()
    summaries = json.loads(whole)
    wrong_entries = (None, [], {}, [{}, {}], [[], {"": 1}], [1, 2])
    wrong_files = [json.dumps(dict.fromkeys(summaries, entry)).encode() for entry in wrong_entries]
    damaged = [b"", whole[:1000], b"[]", b"\xff\x00", *wrong_files]
    for content in damaged:
        file.write_bytes(content)
        assert cache() == expected, content[:80]
        assert json.loads(file.read_bytes()) == summaries  # the file has been repaired
    file.unlink()
    file.mkdir()
    assert cache() == expected
    file.rmdir()
    file.parent.rmdir()
    file.parent.write_text("a file in place of the folder")
    assert cache() == expected


def test_edited_code_is_not_taken_from_the_cache(cache, monkeypatch):
    before = cache()
    path, source = fingerprint._path("kairos.training.loop"), fingerprint._source
    edited = source(path).replace("training.step += 1", "training.step += 2")
    assert edited != source(path)
    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "_source", lambda file: edited if file == path else source(file))
        assert cache() != before
    assert cache() == before
