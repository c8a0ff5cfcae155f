"""`kairos compare`: tables of the report's numbers for one or several experiments with equal evaluation protocols."""

import csv
import html
import io
import json
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest
from scipy import stats

import results_tree
from kairos.cli import main
from kairos.config import load
from kairos.evaluation.settings import is_higher_better
from kairos.files import read_json, write_record
from kairos.report import formatting, ranking
from kairos.report.collect import collect, load_recorded_experiment

COLUMNS = [
    "experiment", "method", "seeds", "step", "metric", "value", "spread", "baseline", "difference", "low", "high",
    "p_value", "speedup_steps", "speedup_seconds",
]  # fmt: skip
SEEDS = tuple(range(ranking.MIN_SEEDS))


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Results of three methods and five seeds; read-only."""
    return results_tree.write(tmp_path_factory.mktemp("tree"), seeds=SEEDS, methods=("uniform", "p2", "min_snr"))


@pytest.fixture
def small(tmp_path):
    """Results of two methods and two seeds that a test may change."""
    return results_tree.write(tmp_path, seeds=(0, 1), methods=("uniform", "min_snr"))


@pytest.fixture
def compare(capsys):
    """Function that runs `kairos compare` and returns its output."""

    def call(*words):
        assert main(["compare", *map(str, words)]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return call


def rows_of(text):
    """Return the rows of a CSV table by method."""
    return {row["method"]: row for row in csv.DictReader(io.StringIO(text))}


def edit(results, pattern, change):
    """Change the JSON records whose paths match a pattern."""
    for path in sorted(results.glob(pattern)):
        record = read_json(path)
        change(record)
        write_record(path, record)


def numbers(row):
    """Return the numbers that compare a row with the baseline."""
    return [float(row[name] or "nan") for name in COLUMNS[8:]]  # without the warnings


def test_numbers_equal_those_of_the_report(tree, compare):
    text = compare(tree[1], "--format", "csv")
    assert next(csv.reader(io.StringIO(text))) == [*COLUMNS, "warnings"]
    rows = rows_of(text)
    report = {row.method: row for row in ranking.compare_methods(collect(load(tree[0]), tree[1]).measurements)}
    assert list(rows) == list(report)
    base = report["uniform"].curve.mean[-1]
    for method, row in report.items():
        line = rows[method]
        assert (line["experiment"], line["seeds"], line["step"]) == ("tiny", "5", "400")
        assert (line["metric"], line["baseline"]) == (results_tree.METRIC, "uniform")
        assert float(line["value"]) == row.curve.mean[-1] and float(line["spread"]) == row.curve.std[-1]
        against = row.ratio_to_baseline or ranking.Ratio(*[np.nan] * 3)
        factors = [row.step_factor.value, row.time_factor.value]
        ratios = [1 if method == "uniform" else against.value, against.low, against.high]
        expected = [*(base * (ratio - 1) for ratio in ratios), against.p_value, *factors]
        np.testing.assert_allclose(numbers(line), expected)
    assert rows["p2"]["speedup_steps"] == ""  # some seeds never reach uniform's distance
    assert float(rows["min_snr"]["p_value"]) < 0.05 and float(rows["min_snr"]["high"]) < 0


def test_a_difference_is_within_its_confidence_interval(tmp_path, compare):
    """One seed with large distances dominates the arithmetic means, but not the mean of the ratios."""
    _, results = results_tree.write(tmp_path, seeds=SEEDS, methods=("uniform", "min_snr"))
    distances = {"uniform": [1, 1, 1, 1, 100], "min_snr": [0.5, 0.5, 0.5, 0.51, 90]}
    for method, values in distances.items():
        for seed, value in enumerate(values):
            edit(
                results,
                f"methods/{method}/seed{seed}/evaluation/0000400.json",
                lambda record, value=value: record["metrics"].update({results_tree.METRIC: value}),
            )
    row = rows_of(compare(results, "--format", "csv"))["min_snr"]
    difference, low, high = (float(row[name]) for name in ("difference", "low", "high"))
    assert low < difference < high
    ratios = np.array(distances["min_snr"]) / distances["uniform"]
    assert difference == pytest.approx(np.mean(distances["uniform"]) * (stats.gmean(ratios) - 1))


def test_methods_are_compared_by_any_measured_value(tree, compare, capsys):
    results = collect(load(tree[0]), tree[1])
    rows = rows_of(compare(tree[1], "--metric", "kid", "--format", "csv"))
    last = results.table[results.table["step"] == 400]
    means = last.groupby("method")["kid"].mean()
    assert list(rows) == list(means.sort_values().index)
    for method, row in rows.items():
        assert row["metric"] == "kid" and float(row["value"]) == pytest.approx(means[method])
    distances = last.pivot(index="seed", columns="method", values="kid").astype(float)
    test = stats.ttest_rel(np.log(distances["p2"]), np.log(distances["uniform"]))
    assert test.pvalue <= float(rows["p2"]["p_value"]) <= 3 * test.pvalue  # Holm's correction for three pairs

    assert main(["compare", str(tree[1]), "--metric", "kids"]) == 2
    message = capsys.readouterr().err
    assert all(text in message for text in ("--metric", "kids", "kid", "val_loss_epsilon", results_tree.METRIC))
    assert "_spread" not in message and "_sets" not in message


def test_a_note_reports_too_few_seeds_for_a_ranking(tmp_path, capsys):
    _, results = results_tree.write(tmp_path, seeds=(0,), methods=("uniform", "min_snr"))
    assert main(["compare", str(results)]) == 0
    assert re.search("note: not ranked: .* 5 seeds .* 1 seed", capsys.readouterr().err)


def test_a_note_reports_too_few_seeds_with_positive_values(tmp_path, capsys):
    """An unbiased kernel distance may be negative; two of six seeds have no ratio to the baseline."""
    _, results = results_tree.write(tmp_path, seeds=range(6), methods=("uniform", "min_snr"))
    for seed, value in ((1, 0.0), (4, -0.1)):
        edit(
            results,
            f"methods/min_snr/seed{seed}/evaluation/0000400.json",
            lambda record, value=value: record["metrics"].update(kid=value),
        )
    assert main(["compare", str(results), "--metric", "kid", "--format", "csv"]) == 0
    printed = capsys.readouterr()
    assert {row["p_value"] for row in rows_of(printed.out).values()} == {""}
    assert re.search("note: not ranked: .* 5 seeds .* 4 seeds", printed.err)


def test_higher_values_are_better_in_these_columns():
    columns = [
        "fid",
        "frechet_classifier64",
        "kid",
        "val_loss_epsilon",
        "precision",
        "recall",
        "psnr",
        "isc",
        "clip_score",
    ]
    assert [column for column in columns if is_higher_better(column)] == columns[4:]


def test_a_metric_may_be_better_if_it_is_higher(tmp_path, compare):
    """The precision of min_snr after 100 steps is above that of uniform after 400."""
    _, results = results_tree.write(tmp_path, seeds=SEEDS, methods=("uniform", "min_snr"))
    for method, base in (("uniform", 0.2), ("min_snr", 0.6)):
        for step in (0, 100, 200, 400):
            for seed in SEEDS:
                value = base * (1 + 0.0005 * step) + 0.001 * seed + 1e-5 * len(method) * seed**2 if step else 0.05
                edit(
                    results,
                    f"methods/{method}/seed{seed}/evaluation/{step:07}.json",
                    lambda record, value=value: record["metrics"].update(precision=value),
                )
    table = compare(results, "--metric", "precision", "--format", "csv")
    rows = rows_of(table)
    assert list(rows) == ["min_snr", "uniform"]  # the best comes first
    assert float(rows["min_snr"]["difference"]) > 0 and float(rows["min_snr"]["p_value"]) < 0.05
    assert float(rows["min_snr"]["speedup_steps"]) > 4


def test_seeds_whose_metric_is_not_positive_have_no_differences(small, capsys):
    """An unbiased kernel distance may be negative, and recall may be 0."""

    def set_recall(values):
        for method, seed in (("uniform", 0), ("uniform", 1), ("min_snr", 0), ("min_snr", 1)):
            value = values.get((method, seed), 0.5)
            edit(
                small[1],
                f"methods/{method}/seed{seed}/evaluation/*.json",
                lambda record, value=value: record["metrics"].update(recall=value),
            )

    command = ["compare", str(small[1]), "--metric", "recall", "--format", "csv"]
    set_recall({("min_snr", 1): 0.0})
    assert main(command) == 0
    captured = capsys.readouterr()
    assert [(row["seeds"], float(row["value"])) for row in rows_of(captured.out).values()] == [("1", 0.5), ("1", 0.25)]
    assert "recall" in captured.err and "seeds 1" in captured.err
    set_recall({("min_snr", 1): 0.0, ("uniform", 0): 0.0})
    assert main(command) == 1
    assert "recall" in (message := capsys.readouterr().err) and "0 or negative" in message


def test_errors_of_different_predictions_are_not_compared(tmp_path, compare, capsys):
    """The error of epsilon and the error of v are different quantities, so they have different columns."""
    folders = []
    for prediction in ("epsilon", "v"):
        _, results = results_tree.write(tmp_path / prediction, seeds=(0, 1), methods=("uniform", "min_snr"))
        folders.append(results)

        def rename_loss(record, prediction=prediction):
            validation = record["validation"]
            loss = validation.pop("loss_epsilon")
            validation |= {f"loss_{prediction}": loss, f"mlperf8_{prediction}": 0.5}

        edit(results, "methods/*/seed*/evaluation/*.json", rename_loss)
        edit(
            results,
            "methods/*/seed*/snapshots/*/snapshot.json",
            lambda record, prediction=prediction: record["config"]["diffusion"].update(prediction=prediction),
        )
        results_tree.sign(load_recorded_experiment(results), results)
    for metric in ("val_mlperf8_v", "val_loss_epsilon"):
        assert main(["compare", *map(str, folders), "--metric", metric]) == 2
        message = capsys.readouterr().err
        assert metric in message and "val_vlb" in message, "errors of epsilon in both experiments are allowed"
    compare(folders[0], "--metric", "val_mlperf8_epsilon")
    compare(*folders)  # distances do not depend on the prediction target


def test_an_experiment_file_stands_for_its_results(tree, compare, monkeypatch):
    monkeypatch.chdir(tree[0].parent)
    rows_of_file, rows_of_folder = (rows_of(compare(path, "--format", "csv")) for path in ("tiny.yaml", "results/tiny"))
    assert rows_of_file.keys() == rows_of_folder.keys()
    for method, row in rows_of_file.items():
        assert [row[name] for name in COLUMNS] == [rows_of_folder[method][name] for name in COLUMNS]


def test_all_formats_contain_the_same_numbers(tree, compare, tmp_path):
    texts = {form: compare(tree[1], "--format", form) for form in ("table", "csv", "md", "json")}
    rows, records = rows_of(texts["csv"]), json.loads(texts["json"])
    assert all(list(record) == [*COLUMNS, "warnings"] for record in records)
    for record in records:
        line = rows[record["method"]]
        assert {name: "" if value is None else str(value) for name, value in record.items() if name in COLUMNS[:5]} == {
            name: line[name] for name in COLUMNS[:5]
        }
        np.testing.assert_allclose(
            [np.nan if record[name] is None else record[name] for name in COLUMNS[8:]], numbers(line)
        )
    lines = [line for line in texts["md"].splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == COLUMNS and len(lines) == 2 + 3
    assert {line.count("|") for line in lines} == {len(COLUMNS) + 1}
    assert all(name in texts["table"].split() or f"{name} " in texts["table"] for name in COLUMNS)
    assert max(len(line) for line in texts["table"].splitlines() if not line.startswith("warning: ")) <= 100
    assert compare(tree[1], "--out", tmp_path / "sub/table.txt") == ""
    assert (tmp_path / "sub/table.txt").read_text() == texts["table"]


def test_folders_of_methods_and_another_baseline_can_be_selected(tree, compare):
    rows = rows_of(compare(tree[1] / "p2", tree[1] / "min_snr", "--format", "csv"))
    assert set(rows) == {"p2", "min_snr"} and {row["baseline"] for row in rows.values()} == {"p2"}
    rows = rows_of(compare(tree[1], "--baseline", "min_snr", "--format", "csv"))
    assert float(rows["min_snr"]["difference"]) == 0 and float(rows["uniform"]["low"]) > 0


def test_methods_of_two_experiments_compare_like_methods_of_one(tree, compare, tmp_path):
    one = rows_of(compare(tree[1], "--format", "csv"))
    for name, methods in (("first", ("uniform", "p2")), ("second", ("min_snr",))):
        shutil.copytree(tree[1], tmp_path / name, ignore=shutil.ignore_patterns(*({*one} - {*methods})))

        def rename(record, name=name, methods=methods):
            record["config"] |= {
                "experiment": name,
                "methods": {method: record["config"]["methods"][method] for method in methods},
            }

        edit(tmp_path / name, "methods/*/seed*/snapshots/*/snapshot.json", rename)
    two = rows_of(compare(tmp_path / "first", tmp_path / "second", "--format", "csv"))
    assert {method: row["experiment"] for method, row in two.items()} == {
        "uniform": "first", "p2": "first", "min_snr": "second",
    }  # fmt: skip
    for method, row in two.items():
        assert row["baseline"] == "first/uniform"
        np.testing.assert_allclose(numbers(row), numbers(one[method]))
    rows = rows_of(compare(tmp_path / "first", tmp_path / "second", "--baseline", "second/min_snr", "--format", "csv"))
    assert {row["baseline"] for row in rows.values()} == {"second/min_snr"}


def test_the_default_baseline_is_a_method_of_the_first_experiment(small, compare, tmp_path):
    other = shutil.copytree(small[1], tmp_path / "other")
    edit(other, "methods/*/seed*/snapshots/*/snapshot.json", lambda record: record["config"].update(experiment="other"))
    text = compare(small[1] / "min_snr", other, "--format", "csv")
    assert {row["baseline"] for row in csv.DictReader(io.StringIO(text))} == {"tiny/min_snr"}


def test_methods_are_compared_at_their_last_common_milestone_and_seeds(small, compare, capsys):
    (small[1] / "methods/min_snr/seed0/evaluation/0000400.json").unlink()
    (small[1] / "methods/min_snr/seed1/evaluation/0000400.json").unlink()
    rows = rows_of(compare(small[1], "--format", "csv"))
    assert {(row["step"], row["seeds"]) for row in rows.values()} == {("200", "2")}
    expected = np.mean([results_tree.distance("uniform", seed, 200) for seed in (0, 1)])
    assert float(rows["uniform"]["value"]) == pytest.approx(expected)
    shutil.rmtree(small[1] / "methods/min_snr/seed1/evaluation")
    assert main(["compare", str(small[1])]) == 0
    printed = capsys.readouterr()
    assert "seeds 1" in printed.out and "min_snr seed 1" in printed.err
    shutil.rmtree(small[1] / "methods/uniform/seed0/evaluation")
    assert main(["compare", str(small[1])]) == 1
    assert "seed" in capsys.readouterr().err


def test_protocols_that_differ_are_not_compared(small, tmp_path, capsys):
    other = shutil.copytree(small[1], tmp_path / "other")
    edit(
        other, "methods/*/seed*/evaluation/*.json", lambda record: record["protocol"].update(nfe=50, scheduler="euler")
    )
    assert main(["compare", str(small[1]), str(other)]) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    for difference in (f"scheduler (ddim in {small[1]}, euler in {other})", f"nfe (20 in {small[1]}, 50 in {other})"):
        assert difference in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nowhere.yaml", "nowhere.yaml"),
        ("results", "results: no training"),
        ("results/tiny/speed", "method of results/tiny: got speed, allowed: min_snr, uniform"),
        ("results/tiny/methods/uniform/seed0", "results/tiny/methods/uniform/seed0: no training"),
        ("results/tiny --baseline nobody", "--baseline: got nobody, allowed: min_snr, uniform"),
        ("tiny.yaml --index", "--index: got tiny.yaml, allowed: one folder"),
        ("results --index --metric kid", "--metric: got kid, allowed: none with --index"),
        ("results --index --baseline nobody", "--baseline: got nobody, allowed: none with --index"),
        ("results --index --format table", "--format: got table, allowed: none with --index"),
        ("results/tiny --out results", "results"),
    ],
)
def test_what_cannot_be_compared_is_reported_in_one_line(small, words, message, capsys, monkeypatch):
    monkeypatch.chdir(small[0].parent)
    assert main(["compare", *words.split()]) in (1, 2)
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_missing_evaluations_and_snapshots_are_reported(small, capsys):
    for folder in small[1].glob("methods/*/seed*/evaluation"):
        shutil.rmtree(folder)
    assert main(["compare", str(small[1])]) == 1
    assert "no training run is evaluated past step 0 yet" in capsys.readouterr().err
    for folder in small[1].glob("methods/*/seed*/snapshots"):
        shutil.rmtree(folder)
    assert main(["compare", str(small[1])]) == 1
    assert "contains no snapshot yet" in capsys.readouterr().err


class _Links(HTMLParser):
    """Collects the links of a page."""

    def __init__(self):
        super().__init__()
        self.links = []

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("href", "src")]


def test_the_index_lists_all_experiments_with_links_that_exist(small, compare):
    root = small[1].parent
    (small[1] / "figures").mkdir()
    for name in ("report.html", "summary.csv", "figures/metric_vs_steps.svg"):
        (small[1] / name).write_text("")
    broken = shutil.copytree(small[1], root / "broken")
    (broken / "reference/record.json").unlink()
    (root / "no_results").mkdir()
    assert compare(root, "--index").strip() == str(root / "index.html")
    content = html.unescape((root / "index.html").read_text())
    assert "2 experiments" in content and "no_results" not in content
    assert "broken/reference/record.json is missing" in content
    for row in ranking.compare_methods(collect(load(small[0]), small[1]).measurements):
        assert (
            f"<td>{row.method}</td>" in content
            and formatting.format_plus_minus(row.curve.mean[-1], row.curve.std[-1]) in content
        )
    links = _Links()
    links.feed(content)
    assert "tiny/report.html" in links.links and all((root / link).exists() for link in links.links)
