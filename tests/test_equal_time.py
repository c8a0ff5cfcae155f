"""Numbers with what they were measured on: speed-ups, clock times, and comparisons at equal training time."""

import csv
import io
import json
import re

import numpy as np
import pytest
from scipy import stats

import results_tree
from kairos.cli import main
from kairos.config import load
from kairos.files import read_json, write_json, write_record
from kairos.report import ranking
from kairos.report.collect import collect
from kairos.report.equal_time import compare_at_equal_time, most_simultaneous_runs
from kairos.report.findings import list_warnings
from kairos.tracking import run_content, view
from report_page import page_of

SEEDS = range(5)
STEPS = (0, 100, 200, 400)


def set_distances(results, method, values):
    """Give every seed of a method these distances, by step, times a factor that depends on the seed."""
    for seed in SEEDS:
        for step, value in zip(STEPS, values):
            path = results / f"methods/{method}/seed{seed}/evaluation/{step:07d}.json"
            record = read_json(path)
            record["metrics"][results_tree.METRIC] = value * (1 + 0.01 * seed + 0.001 * len(method) * seed**2)
            write_record(path, record)


@pytest.fixture
def slow_winner(tmp_path):
    """Results in which min_snr ends below uniform, but reaches uniform's final distance later than uniform."""
    config, results = results_tree.write(tmp_path, seeds=SEEDS, methods=("uniform", "min_snr"))
    set_distances(results, "uniform", [100, 20, 25, 20])  # at 20 already after 100 steps
    set_distances(results, "min_snr", [100, 40, 10, 9])
    return config, results


def test_a_lower_distance_with_a_speed_up_below_1_is_explained_in_every_view(slow_winner, capsys):
    config, results = slow_winner
    collected = collect(load(config), results)
    comparison = ranking.compare_methods(collected.measurements)[0]
    assert comparison.method == "min_snr" and comparison.step_factor.value < 1
    page = page_of(config, results)
    assert main(["compare", str(results)]) == 0
    printed = capsys.readouterr()
    for text in (page, printed.out + printed.err, view.build_note(collected)):
        assert not re.search("fewer steps|less time", text, re.IGNORECASE)
        assert re.search("min_snr .*although .*uniform .*at step 100", re.sub(r"\s+", " ", text))


def change_times(results, pattern, **fields):
    """Replace fields of every line of the timing files that match the pattern."""
    for path in results.glob(pattern):
        lines = [json.loads(line) | fields for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_times_of_another_run_are_shown_in_no_view(tmp_path, capsys):
    """Clock times are outputs of no stage: results that were restored may have the times of another run."""
    config, results = results_tree.write(tmp_path, seeds=SEEDS, methods=("uniform", "min_snr"))
    change_times(results, "methods/min_snr/*/timing.jsonl", identity="0" * 64, seconds=3600.0)
    collected = collect(load(config), results)
    assert not any(run.seconds_by_step or run.started for run in collected.runs_of("min_snr"))
    assert set(collected.table[collected.table["step"] > 0].groupby("method")["train_seconds"].count()) == {0, 15}
    points = run_content.collect_points(collected.runs_of("min_snr")[0])
    assert "seconds_per_step" not in {point.key for point in points}
    assert "kairos.machine" not in run_content.build_tags(collected, collected.runs_of("min_snr")[0])
    assert run_content.build_tags(collected, collected.runs[0])["kairos.machine"] == "CPU 1, 2 CPUs, 1 thread"
    assert main(["compare", str(results), "--format", "csv"]) == 0
    printed = capsys.readouterr()
    rows = {row["method"]: row for row in csv.DictReader(io.StringIO(printed.out))}
    assert rows["min_snr"]["speedup_seconds"] == "" and rows["min_snr"]["speedup_steps"]
    assert "min_snr" in next(line for line in printed.err.splitlines() if "times" in line)


def test_times_of_different_machines_are_not_compared(tmp_path, capsys):
    config, results = results_tree.write(tmp_path, seeds=SEEDS, methods=("uniform", "min_snr"))
    change_times(results, "methods/min_snr/*/timing.jsonl", machine=results_tree.MACHINE | {"cpu": "CPU 2"})
    collected = collect(load(config), results)
    comparisons = ranking.compare_methods(collected.measurements)
    assert all(comparison.time_factor is None and comparison.step_factor for comparison in comparisons)
    assert main(["compare", str(results)]) == 0
    page = page_of(config, results)
    for text in (capsys.readouterr().err, page, view.build_note(collected)):
        assert "CPU 1, 2 CPUs, 1 thread (uniform)" in text and "CPU 2, 2 CPUs, 1 thread (min_snr)" in text
    assert main(["compare", str(results), "--at-equal", "seconds"]) == 1
    assert "CPU 2, 2 CPUs, 1 thread (min_snr)" in capsys.readouterr().err


def test_methods_are_compared_at_equal_training_time(tmp_path, capsys):
    """The steps of adaptive take 1.2 times as long: its value is interpolated where uniform's runs end."""
    config, results = results_tree.write(tmp_path, seeds=SEEDS, methods=("uniform", "adaptive"))
    assert main(["compare", str(results), "--at-equal", "seconds", "--format", "csv"]) == 0
    printed = capsys.readouterr()
    rows = {row["method"]: row for row in csv.DictReader(io.StringIO(printed.out))}
    seconds = 400 * 0.05
    expected = {
        method: [
            np.interp(seconds, per_step * np.array(STEPS), [results_tree.distance(method, seed, s) for s in STEPS])
            for seed in SEEDS
        ]
        for method, per_step in (("uniform", 0.05), ("adaptive", 0.06))
    }
    for method, values in expected.items():
        row = rows[method]
        assert float(row["seconds"]) == pytest.approx(seconds) and row["seeds"] == "5"
        assert float(row["value"]) == pytest.approx(np.mean(values))
        assert float(row["spread"]) == pytest.approx(np.std(values, ddof=1))
        assert row["machine"] == "CPU 1, 2 CPUs, 1 thread"
    assert float(rows["adaptive"]["step"]) == pytest.approx(seconds / 0.06)
    test = stats.ttest_rel(*np.log([expected["adaptive"], expected["uniform"]]))
    assert float(rows["adaptive"]["p_value"]) == pytest.approx(test.pvalue)
    ends = np.mean(expected["uniform"]) * (np.exp([*test.confidence_interval()]) - 1)
    assert [float(rows["adaptive"]["low"]), float(rows["adaptive"]["high"])] == pytest.approx(ends)
    assert "at most 10 of these training runs at a time" in printed.err
    page = re.sub(r"\s+", " ", page_of(config, results))
    assert "At equal training time" in page and "CPU 1, 2 CPUs, 1 thread" in page
    assert "at most 10 of these training runs at a time" in page


def test_runs_one_after_another_do_not_count_as_simultaneous(tmp_path):
    config, results = results_tree.write(tmp_path, seeds=range(2), methods=("uniform",))
    change_times(
        results, "methods/uniform/seed1/*.jsonl", started="2026-01-02T03:04:30+00:00", saved="2026-01-02T03:05:00+00:00"
    )
    assert most_simultaneous_runs(collect(load(config), results).runs) == 1
    change_times(results, "methods/uniform/seed1/*.jsonl", started="2026-01-02T03:04:20+00:00")
    assert most_simultaneous_runs(collect(load(config), results).runs) == 2
    change_times(results, "methods/uniform/seed1/*.jsonl", machine=results_tree.MACHINE | {"host": "node2"})
    assert most_simultaneous_runs(collect(load(config), results).runs) == 1


def test_the_costs_leave_out_jobs_of_another_training_run(tmp_path):
    config, results = results_tree.write(tmp_path, seeds=(0,), methods=("uniform",))
    identity = read_json(results / "methods/uniform/seed0/training.json")["identity"]
    usage = read_json(results / "timing/prepare-0.json") | {"stage": "train", "method": "uniform", "seed": 0}
    for recorded_identity, count in ((identity, 1), ("0" * 64, 0)):
        write_json(results / "timing/train/uniform_seed0/1.json", usage | {"identity": recorded_identity})
        jobs = collect(load(config), results).jobs
        assert [job["stage"] for job in jobs].count("train") == count


def test_a_missing_evaluation_is_no_missing_time(tmp_path):
    config, results = results_tree.write(tmp_path, seeds=range(2), methods=("uniform", "adaptive"))
    (results / "methods/adaptive/seed1/evaluation/0000200.json").unlink()
    measurements = collect(load(config), results, unfinished=True).measurements
    comparison = compare_at_equal_time(measurements)
    values = {value.method: value.values for value in comparison.methods}
    known = [step for step in STEPS if step != 200]
    curve = [results_tree.distance("adaptive", 1, step) for step in known]
    assert values["adaptive"][1] == pytest.approx(np.interp(20, 0.06 * np.array(known), curve))


def test_uneven_training_times_are_a_warning(tmp_path):
    """Seeds of one method that take different times were trained under different load."""
    config, results = results_tree.write(tmp_path, seeds=(0, 1), methods=("uniform", "min_snr"))
    even = list_warnings(collect(load(config), results))
    for file in results.glob("methods/min_snr/seed1/timing.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        text = "".join(json.dumps(line | {"seconds": 3 * line["seconds"]}) + "\n" for line in lines)
        file.write_text(text)
    uneven = list_warnings(collect(load(config), results))
    added = [warning for warning in uneven if warning not in even]
    assert len(added) == 1 and "min_snr" in added[0] and "3" in added[0]
