"""Reports and records of experiments with more methods than figures can show one by one."""

import pytest

import results_tree
from kairos.config import load
from kairos.files import DamagedError, RecordReader, read_json, write_record
from kairos.report import curve_figures, formatting, plot_style, shown_methods
from kairos.report.collect import collect
from kairos.report.shown_methods import select_shown_methods
from report_page import page_of


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Experiment file and results of six methods with two seeds."""
    return results_tree.write(tmp_path_factory.mktemp("many"))


def test_figures_of_few_methods_show_all(tree):
    results = collect(load(tree[0]), tree[1])
    assert select_shown_methods(results) == results.methods


@pytest.mark.long
def test_figures_of_many_methods_show_the_baseline_and_the_best_and_the_range_of_the_others(tree, monkeypatch):
    monkeypatch.setattr(shown_methods, "MOST_SHOWN", 3)
    results = collect(load(tree[0]), tree[1])
    shown = select_shown_methods(results)
    assert shown == ["uniform", "min_snr", "speed"]
    styles = plot_style.assign_styles(shown, results.baseline)
    figure = curve_figures.draw_distance(results, styles, over_time=False)
    labels = {text.get_text() for text in figure.axes[0].texts}
    assert {*shown, "3 others: range, median"} <= labels and labels.isdisjoint({"p2", "log_normal", "adaptive"})
    page = page_of(*tree)
    assert "3 of the 6 methods" in page
    for method in results.methods:
        assert f"</i>{method}</b>" in page


def test_methods_of_a_sweep_have_its_name():
    names = ("speed-k=1", "speed-k=2", "late-a=1-b=2", "speed")
    assert [shown_methods.name_of_sweep(name) for name in names] == ["speed", "speed", "late", "speed"]


def test_long_lists_of_names_are_shortened():
    assert formatting.join_first_names(["a", "b"]) == "a and b"
    names = [f"m{number}" for number in range(50)]
    assert formatting.join_first_names(names) == "m0, m1, m2, m3, m4 and 45 more"


def test_a_record_reader_reads_what_read_json_reads_and_shares_the_field(tmp_path):
    records = [
        {"config": {"methods": {"a": {"x": 1}}}, "step": 1},
        {"config": {"methods": {"a": {"x": 1}}}, "step": 2},
        {"config": {"methods": {"a": {"x": 2}}}, "step": 3},
        {"inner": {"config": {"methods": {"a": {"x": 2}}}}, "config": {"methods": {}}},
        {"inner": {"config": {"methods": {"a": {"x": 2}}}}},
        {"a": {"config": {"x": 1}}, "config": None},
        {"config": 1},
        {"config": 12},
        {"config": None, "step": 4},
        {"step": 5},
    ]
    paths = [tmp_path / f"{number}.json" for number in range(len(records))]
    for path, record in zip(paths, records):
        write_record(path, record)
    reader = RecordReader("config")
    read = [reader.read(path) for path in paths]
    assert read == records == [read_json(path) for path in paths]
    assert read[0]["config"] is read[1]["config"]


@pytest.mark.parametrize("text", ["", "[1]", "null", '{"config": ', '{"config": {}} and more', '{"config": {}'])
def test_a_record_reader_rejects_a_damaged_file(tmp_path, text):
    path = tmp_path / "damaged.json"
    path.write_text(text)
    reader = RecordReader("config")
    with pytest.raises(DamagedError, match=r"damaged\.json: damaged"):
        reader.read(path)
    assert reader.glance(path) == {}
    with pytest.raises(DamagedError, match="holds no 'step'"):
        write_record(path, {"config": {}})
        reader.read(path)["step"]
