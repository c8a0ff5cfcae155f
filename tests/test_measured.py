"""Numbers with what they were measured on: speed-ups, clock times, and comparisons at equal training time."""

import re

import pytest

import results_tree
from kairos.cli import main
from kairos.config import load
from kairos.files import read_json, write_json
from kairos.report import ranking
from kairos.report.collect import collect
from kairos.tracking import view
from report_page import page_of

SEEDS = range(5)
STEPS = (0, 100, 200, 400)


def set_distances(results, method, values):
    """Give every seed of a method these distances, by step, times a factor that depends on the seed."""
    for seed in SEEDS:
        for step, value in zip(STEPS, values):
            path = results / f"{method}/seed{seed}/evaluation/{step:07d}.json"
            record = read_json(path)
            record["metrics"][results_tree.METRIC] = value * (1 + 0.01 * seed + 0.001 * len(method) * seed**2)
            write_json(path, record)


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
