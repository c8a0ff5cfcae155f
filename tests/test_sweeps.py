"""Tests of sweeps: the grid of a method becomes one method for each combination of values."""

import json
import subprocess

import pytest
import yaml

import results_tree
from kairos.cli import main
from kairos.config import load, validate
from kairos.config.sweeps import parse_sweep_name
from kairos.report import curve_figures, ranking
from kairos.report.collect import collect
from kairos.report.curve_figures import group_swept_methods
from kairos.report.plot_style import assign_styles
from kairos_timesteps.errors import ConfigError
from workflow_copy import Copy

SPEED = {"sampler": "speed", "grid": {"sampler.k": [1, 2.5, 5.0]}}


def expand_methods(**values) -> dict:
    """Return the methods of an experiment, with those of grids."""
    return validate({"experiment": "x", "methods": values}, "x.yaml").methods


def test_a_grid_becomes_a_method_for_each_value():
    expanded = expand_methods(uniform={}, speed=SPEED)
    assert list(expanded) == ["uniform", "speed-k=1", "speed-k=2.5", "speed-k=5"]
    assert [method.sampler.get("k") for method in expanded.values()] == [None, 1.0, 2.5, 5.0]
    explicit = expand_methods(**{"speed-k=2.5": {"sampler": {"name": "speed", "k": 2.5}}})
    assert explicit["speed-k=2.5"] == expanded["speed-k=2.5"]


def test_a_grid_of_several_keys_becomes_their_product():
    grid = {"sampler.gamma": [0.5], "sampler": ["speed"], "weighting.gamma": [0, 1], "sampler.tau": [None, 500]}
    del grid["sampler.gamma"]
    expanded = expand_methods(a={"weighting": {"name": "p2", "k": 2.0}, "grid": grid})
    assert list(expanded)[:2] == ["a-sampler=speed-gamma=0-tau=null", "a-sampler=speed-gamma=0-tau=500"]
    assert len(expanded) == 4
    weighting = expanded["a-sampler=speed-gamma=1-tau=500"].weighting
    assert (weighting.name, weighting.get("k"), weighting.get("gamma")) == ("p2", 2.0, 1.0)
    two_keys = {"sampler": "edm_log_normal", "weighting": "p2", "grid": {"sampler.floor": [0.1], "weighting.k": [1, 2]}}
    assert list(expand_methods(a=two_keys)) == ["a-floor=0.1-k=1", "a-floor=0.1-k=2"]
    assert parse_sweep_name("my-own-m=-1-s=2e-05") == [("m", "-1"), ("s", "2e-05")]
    assert parse_sweep_name("speed_v1") == []


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"sampler.k": [1, 2, 1.0]}, r"methods.a.grid: got .*allowed: lists of different numbers"),
        (
            {"sampler.kk": [1, 2]},
            r"methods.a.grid: sampler speed: unknown option 'kk'; did you mean 'k'\? Allowed: ",
        ),
        (
            {"training.lr": [1]},
            r"methods.a.grid: got training.lr, allowed: sampler, weighting, coupling or one of their options",
        ),
        ({"sampler.k": 1}, r"methods.a.grid: got .*allowed: lists"),
        ({"sampler.k": []}, r"methods.a.grid: got .*allowed: lists"),
        ({"sampler.k": [[1]]}, r"methods.a.grid: got .*allowed: lists"),
        ({1: [1]}, r"methods.a.grid: got .*allowed: lists"),
        ({}, r"methods.a.grid: got {}, allowed: lists"),
        (3, r"methods.a.grid: got 3, allowed: lists"),
        ({"sampler.k": [1, -1]}, r"methods.a.grid: sampler speed.k: got -1, allowed: number > 0"),
        ({"sampler.k": [*range(1, 1001)]}, r"methods: got 1,001, with those of grids, allowed: at most 1,000"),
        ({"sampler.k": [7]}, r"methods.a-k=7: got a second a-k=7, allowed: each name once"),
    ],
)
def test_an_invalid_grid_is_rejected_in_one_line(grid, message):
    with pytest.raises(ConfigError, match=f"^x.yaml: {message}") as caught:
        expand_methods(a={"sampler": "speed", "grid": grid}, **{"a-k=7": {}})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [1, None])
def test_a_name_that_is_not_a_text_is_rejected(name):
    methods = {name: {"sampler": "speed", "grid": {"sampler.k": [1, 2]}}}
    with pytest.raises(ConfigError, match=rf"methods\.{name}\S*: got {name}, allowed: a valid string"):
        validate({"experiment": "x", "methods": methods})


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy whose params.yaml has a sweep."""
    copy = Copy(tmp_path_factory.mktemp("sweep"))
    values = yaml.safe_load((copy.folder / "params.yaml").read_text())
    values |= {"seeds": [0], "methods": {"uniform": {}, "speed": SPEED}}
    (copy.folder / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    subprocess.run(["git", "init", "-q"], cwd=copy.folder, check=True)
    return copy


def test_snakemake_and_kairos_commands_list_the_methods_of_a_sweep(copy, monkeypatch, capsys):
    assert copy.to_do(config="params.yaml")["train"] == 4
    assert copy.to_do("results/demo/methods/speed-k=2.5/seed0/training.json", config="params.yaml")["train"] == 1
    monkeypatch.chdir(copy.folder)
    assert main(["check", "params.yaml"]) == 0
    checked = capsys.readouterr().out
    assert "speed-k=2.5" in checked and "speed-k=5" in checked
    assert main(["plan", "params.yaml", "--tflops", "1", "--format", "json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert list(planned["gpu_hours"]) == ["uniform", "speed-k=1", "speed-k=2.5", "speed-k=5"]


@pytest.mark.parametrize("best", ["one", "two", "three"])
def test_lines_of_a_sweep_without_a_name_are_labelled_at_one_of_them(tmp_path, monkeypatch, best):
    monkeypatch.setattr(curve_figures, "MOST_SHOWN", 2)
    monkeypatch.setattr(curve_figures, "_LABELLED_LINES", 1)
    distances = {"one": 60.0, "two": 40.0, "three": 50.0} | {best: 20.0}
    for line, distance in distances.items():
        for k in (1, 2):
            method = {"sampler": {"name": "speed", "k": float(k)}}, distance + k, 1.4
            monkeypatch.setitem(results_tree.METHODS, f"{line}-k={k}", method)
    config, folder = results_tree.write(tmp_path, (0,), tuple(name for name in results_tree.METHODS if "=" in name))
    results = collect(load(config), folder)
    figure = curve_figures.draw_distance_by_option(results, assign_styles(results.methods, None))
    (axes,) = figure.axes
    heights = {}
    for line in distances:
        final_value = ranking.build_curve(results.measurements, f"{line}-k=2").mean[-1]
        heights[line] = axes.transAxes.inverted().transform(axes.transData.transform((1, final_value)))[1]
    labels = {text.get_text(): text.xy[1] for text in axes.texts}
    assert set(labels) == {best, "2 other lines"}
    assert labels[best] == pytest.approx(heights.pop(best))
    assert any(labels["2 other lines"] == pytest.approx(height) for height in heights.values())


@pytest.mark.long
def test_the_report_plots_the_distance_against_the_swept_option(tmp_path, monkeypatch):
    for k, distance in ((1, 25.0), (2.5, 20.0), (10, 22.0)):
        method = {"sampler": {"name": "speed", "k": float(k)}}, distance, 1.4
        monkeypatch.setitem(results_tree.METHODS, f"speed-k={k}", method)
    names = tuple(name for name in results_tree.METHODS if "=" in name)
    config, results = results_tree.write(tmp_path, (0,), ("uniform", *names))
    assert main(["report", "--config", str(config), "--results", str(results)]) == 0
    assert "Distance against swept options" in (results / "report.html").read_text()
    figure = (results / "figures/metric_vs_option.svg").read_text()
    assert all(f"<!-- {word} -->" in figure for word in ("k", "1", "2.5", "10", "speed", "uniform"))
    assert group_swept_methods(list(load(config).methods)) == {"k": {"speed": dict(zip(("1", "2.5", "10"), names))}}
