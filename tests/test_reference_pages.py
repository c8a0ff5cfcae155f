"""Tests that the pages Metrics and Files of the documentation list all files and columns of results."""

import csv
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import reference
import torch

import results_tree
from kairos.config import load
from kairos.data.arrays import ArrayFile
from kairos.evaluation.measurements import ImageStatistics
from kairos.evaluation.metrics import Comparison, RealStatistics
from kairos.evaluation.settings import METRICS
from kairos.report.build import summary_csv
from kairos.report.collect import collect
from kairos.validity import Validity
from kairos.workflow.layout import Layout
from kairos_timesteps.components import SAMPLERS
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.strategy import Strategy
from workflow_copy import copy_finished_run

ROOT = Path(__file__).parents[1]
RUN = "methods/<method>/seed<N>/"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Contents of the files of a finished experiment, by their path in results/<experiment>/."""
    results = copy_finished_run(tmp_path_factory).folder / "results/tiny"
    files = [path for path in results.rglob("*") if path.is_file() and path.name != ".snakemake_timestamp"]
    return {path.relative_to(results).as_posix(): path.read_bytes() for path in files}


def to_regex(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a documented name; a folder stands for all files in it."""
    placeholders = {"<step>": r"\d{7}", "<N>": r"\d+", "<job>": r".+"}
    parts = re.split(r"(<\w+>)", pattern)
    text = "".join(placeholders.get(part, r"[^/]+") if part[:1] == "<" else re.escape(part) for part in parts)
    return re.compile(text + ".+" if pattern.endswith("/") else text)


def documented_files() -> list[str]:
    """Return the names of the page's two tables, relative to results/<experiment>/."""
    page = (ROOT / "docs/reference/files.md").read_text(encoding="utf-8")
    of_experiment, per_snapshot = page.partition("## Columns")[0].split("## Files of a training run")
    names = []
    for prefix, part in (("", of_experiment), (RUN, per_snapshot)):
        for cell in re.findall(r"^\| (`.*?`) \|", part, re.MULTILINE):
            names += [prefix + name for name in re.findall(r"`(.+?)`", cell)]
    names.remove(RUN)  # the folder, whose files are in the second table
    return names


def declared_files() -> set[str]:
    """Return the files that the workflow declares for an experiment with analyses."""
    experiment = load(ROOT / "experiments/analyses/linear.yaml")
    layout = Layout(experiment, Path("frozen.yaml"))
    files = layout.input_paths("report")
    validity = Validity(experiment, layout.results)
    for row in validity.stages.values():
        for result in validity.list_results(row.name) if row.per_analysis and row.per_snapshot else ():
            record = validity.path(result)
            files += [record.as_posix(), record.with_suffix(".csv").as_posix()]
    return {file.removeprefix(f"{layout.results}/") for file in files}


@pytest.mark.long
def test_every_file_of_results_is_listed(finished):
    patterns = [to_regex(name) for name in documented_files()]
    files = {*finished, *declared_files()}
    assert [file for file in sorted(files) if not any(pattern.fullmatch(file) for pattern in patterns)] == []
    assert not any(pattern.fullmatch("another.txt") for pattern in patterns)


@pytest.mark.long
def test_every_listed_file_exists_in_results_with_these_exceptions(finished):
    files = {*finished, *declared_files()}
    unmatched = {name for name in documented_files() if not any(map(to_regex(name).fullmatch, files))}
    # files of DVC, of unfinished experiments, of final errors, and of experiments with captions or published numbers
    assert unmatched == {
        "report_unfinished.html", "published.csv", "text/record.json", "text/<name>.npy",
        "summary/metrics.json", "summary/curves/<method>.csv", RUN + ".state/accepted.json",
        "logs/<job>.error.json",
    }  # fmt: skip


def undocumented(names, table: str) -> list[str]:
    """Return the names that have no row with a meaning in a table."""
    rows = re.findall(r"^\| `(.+?)` \| (?=\w|`)", table, re.MULTILINE)
    return [name for name in names if not any(to_regex(row).fullmatch(name) for row in rows)]


@pytest.mark.long
def test_every_column_of_a_summary_has_a_meaning(finished, tmp_path):
    config, results = results_tree.write(tmp_path, seeds=(0,), methods=("uniform", "adaptive"))
    for text in (finished["summary.csv"].decode(), summary_csv(collect(load(config), results))):
        columns = next(csv.reader(io.StringIO(text)))
        assert len(columns) > 20 and undocumented(columns, reference.summary_columns()) == []
    assert undocumented(["another"], reference.summary_columns()) == ["another"]


def flat_fields(content: bytes) -> set[str]:
    """Return the fields of all lines of a JSON-lines file; an inner field is ``object.field``."""
    fields = set()
    for line in map(json.loads, content.splitlines()):
        for key, value in line.items():
            fields |= {key, *(f"{key}.{inner}" for inner in value)} if isinstance(value, dict) else {key}
    return fields


@pytest.mark.long
def test_every_field_of_metrics_and_timing_has_a_meaning(finished):
    metrics = flat_fields(finished["methods/adaptive/seed0/metrics.jsonl"])
    timing = flat_fields(finished["methods/adaptive/seed0/timing.jsonl"])
    assert "mse" in metrics and undocumented(metrics, reference.metrics_fields()) == []
    assert "seconds" in timing and undocumented(timing, reference.timing_fields()) == []


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_number_of_a_sampler_has_a_meaning(name):
    try:
        strategy = Strategy(name, "linear", timesteps=50)
    except ConfigError:
        strategy = Strategy(name, "flow")
    strategy.draw(torch.zeros(4, 1, 8, 8), index=range(4), total=4)
    fields = {f"sampler.{key}" for key in strategy.sampler.statistics()}
    assert undocumented(fields, reference.metrics_fields()) == []


def test_the_page_has_every_metric_with_its_options():
    page = reference.metrics()
    for name, options in METRICS.items():
        section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert all(f"| `{option}` |" in section for option in options.model_fields if option != "name")
        assert "Needs: " in section and all(f"| `{column}` |" in section for column in options.columns)
        assert set(options.higher_is_better) <= set(options.columns)


@pytest.mark.parametrize("name", ["frechet", "fid", "fd_dinov2", "sfid", "kid", "isc", "precision", "recall", "psnr"])
def test_a_metric_computes_the_columns_that_it_declares(name, tmp_path):
    random = np.random.default_rng(0)
    features = random.standard_normal((60, 4)).astype(np.float32)
    gaussians = dict.fromkeys(("features", "spatial"), (np.zeros(4), np.eye(4)))
    images = random.integers(0, 256, (60, 4, 4, 1), dtype=np.uint8)
    np.save(tmp_path / "features.npy", features)
    rows = ArrayFile(tmp_path / "features.npy")
    statistics = ImageStatistics(60, gaussians, rows, logits=rows, pairs=[(images, images[::-1])])
    column = name if name in ("fid", "fd_dinov2") else "frechet_classifier8"
    metric = METRICS[name](name=name)
    comparison = Comparison(column, RealStatistics(gaussians, features[::-1].copy(), 60), (metric,))
    computed = comparison.score(statistics)
    assert len(computed) == len(metric.columns) and undocumented(computed, reference.metrics()) == []


@pytest.mark.long
def test_the_validation_loss_has_the_columns_that_it_declares(finished):
    losses = json.loads(finished["methods/adaptive/seed0/evaluation/0000040.json"])["validation"]
    columns = {f"val_{name}" for name, value in losses.items() if isinstance(value, float)}
    declared = {name.replace("<prediction>", "epsilon") for name in METRICS["validation"].columns}
    assert columns == declared, "with 50 timesteps, the last one has more than a hundredth of the VLB's weight"
