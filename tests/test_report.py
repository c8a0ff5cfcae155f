"""The report: its statistics, its files and its page."""

import base64
import csv
import html
import io
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from scipy import stats

import results_tree
from kairos.cli import main
from kairos.config import load, validate
from kairos.files import hash_folder, read_json, sha256_file, write_json, write_record
from kairos.report import curve_figures, figures, findings, formatting, plot_style, ranking
from kairos.report.build import build_report, summary_csv
from kairos.report.collect import collect
from kairos.report.plot_style import space_out_heights
from kairos.report.sample_figures import draw_conditional_samples
from kairos.sampling.samples_file import write_samples
from kairos_timesteps.errors import KairosError
from marks import mark_long
from report_page import page_of

METRIC = results_tree.METRIC
SEEDS = tuple(range(ranking.MIN_SEEDS))
FIRST_COLUMNS = [
    "experiment", "method", "seed", "step", "images_seen", "train_seconds", METRIC, f"{METRIC}_spread",
    "val_loss_epsilon", "val_vlb", "n_samples", "scheduler", "steps", "nfe", "weights", "extractor_hash",
    "reference_hash", "eval_seed",
]  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Complete results with a report from the command line; tests must not change them."""
    config, results = results_tree.write(tmp_path_factory.mktemp("built"), seeds=SEEDS)
    assert main(["report", "--config", str(config), "--results", str(results)]) == 0
    return config, results


@pytest.fixture
def small(tmp_path):
    """Two methods and one seed, without a report; tests may change them."""
    return results_tree.write(tmp_path, seeds=(0,), methods=("uniform", "adaptive"))


def read_page(built):
    """Read the page with all character references replaced."""
    return html.unescape((built[1] / "report.html").read_text())


def read_csv(path):
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        return list(reader.fieldnames), list(reader)


def test_summary_has_the_documented_columns_and_rows(built):
    columns, rows = read_csv(built[1] / "summary.csv")
    assert columns[: len(FIRST_COLUMNS)] == FIRST_COLUMNS
    assert {"kid", "kid_spread", "val_vlb_without_last", "sets", "spacing", "clip", "sample_seed"} <= set(columns)
    assert len(rows) == 6 * 5 * 4 + 4 and not (built[1] / "published.csv").exists()
    assert [row["method"] for row in rows[-4:]] == ["floor", "reconstruction", "gaussian", "noise"]
    for row in rows[-4:]:
        assert row["seed"] == row["step"] == row["val_loss_epsilon"] == ""
        assert row["reference_hash"] == results_tree.REFERENCE_HASH and row["n_samples"] == "400"


def test_summary_numbers_are_read_back_exactly(built):
    _, rows = read_csv(built[1] / "summary.csv")
    for row in rows[:-4]:
        step = int(row["step"])
        assert float(row[METRIC]) == results_tree.distance(row["method"], int(row["seed"]), step)
        assert float(row["train_seconds"]) == pytest.approx(step * (0.06 if row["method"] == "adaptive" else 0.05))
        assert int(row["images_seen"]) == 64 * step


def test_methods_are_ranked_only_if_a_test_finds_a_difference(built):
    collected = collect(load(built[0]), built[1])
    rows = ranking.compare_methods(collected.measurements)
    ranks = {row.method: (row.first_rank, row.last_rank) for row in rows}
    assert ranks == {
        "min_snr": (1, 1), "speed": (2, 2), "p2": (3, 4), "uniform": (3, 4), "adaptive": (5, 5), "log_normal": (6, 6),
    }  # fmt: skip
    assert [row.method for row in rows if row.may_be_best] == ["min_snr"]
    findings_in_order = findings.summarise_outcome(collected, rows)
    best, below, above, equal, steps = findings_in_order
    assert re.search(r"min_snr .*Fréchet distance, 17\.", best)
    assert re.search(r"uniform.*min_snr \(−2\d\.\d %\).*speed \(−2\d\.\d %\)", below)
    assert re.search(r"uniform.*adaptive \(\+.*log_normal \(\+", above) and re.search(r"uniform.*p2", equal)
    assert re.search(r"min_snr .*1\.\d\d× .*uniform.*95 % interval 1\.", steps)
    page = read_page(built)
    assert all(sentence in page for sentence in findings_in_order) and "corrected after Holm" in page


def test_the_table_contains_difference_interval_and_p_value(built):
    rows = {row.method: row for row in ranking.compare_methods(collect(load(built[0]), built[1]).measurements)}
    finals = {method: np.log([results_tree.distance(method, seed, 400) for seed in SEEDS]) for method in rows}
    raw = [stats.ttest_rel(finals[one], finals[other]) for one, other in combinations(finals, 2)]
    p2_test = stats.ttest_rel(finals["p2"], finals["uniform"])
    # Holm's correction multiplies a p-value by the number of p-values that are not smaller
    larger_count = sum(test.pvalue >= p2_test.pvalue for test in raw)
    against = rows["p2"].ratio_to_baseline
    assert against.p_value == pytest.approx(p2_test.pvalue * larger_count) and against.p_value > 0.05
    assert [against.low, against.high] == pytest.approx(np.exp(p2_test.confidence_interval()))
    assert against.value == pytest.approx(np.exp(np.mean(finals["p2"] - finals["uniform"])))
    for cell in (*formatting.format_change(against), formatting.format_p_value(against)):
        assert cell in read_page(built)


def test_methods_that_may_be_best_are_marked_and_no_winner_is_reported(tmp_path):
    tree = results_tree.write(tmp_path, seeds=SEEDS, methods=("uniform", "p2"))
    collected = collect(load(tree[0]), tree[1])
    rows = ranking.compare_methods(collected.measurements)
    assert all(row.may_be_best and (row.first_rank, row.last_rank) == (1, 2) for row in rows)
    assert findings.summarise_outcome(collected, rows)[0].startswith("The tests find no difference between p2 and")
    assert page_of(*tree).count("≈ best") == 2


def test_below_five_seeds_nothing_is_ranked_and_the_report_gives_the_reason(tmp_path):
    tree = results_tree.write(tmp_path, seeds=[1, 2, 3, 7], methods=("uniform", "min_snr"))
    collected = collect(load(tree[0]), tree[1])
    rows = ranking.compare_methods(collected.measurements)
    assert not any(row.is_ranked or row.may_be_best for row in rows)
    html = page_of(*tree)
    assert "Not ranked: methods are ranked from 5 seeds on, and this experiment has 4." in html
    assert "set seeds: [0, 1, 2, 3, 7] in the experiment file" in html
    assert "not ranked" in html
    assert formatting.format_change(rows[0].ratio_to_baseline)[1] in html  # an interval, and no p-value
    assert not re.search("<th>rank|Holm|≈ best|Below uniform|Above uniform|difference from|has a speed-up", html)


@pytest.mark.long
def test_seeds_that_the_report_advises_include_those_of_the_experiment(tmp_path):
    tree = results_tree.write(tmp_path, seeds=(1, 7), methods=("uniform", "min_snr"))
    assert "set seeds: [0, 1, 2, 3, 7] in the experiment file" in page_of(*tree)


def test_step_and_time_factors_against_uniform_have_intervals(built):
    rows = {row.method: row for row in ranking.compare_methods(collect(load(built[0]), built[1]).measurements)}
    steps, logs = [0, 100, 200, 400], []
    for seed in SEEDS:
        curve = [results_tree.distance("min_snr", seed, step) for step in steps]
        target = results_tree.distance("uniform", seed, 400)
        logs.append(np.log(400 / np.interp(-target, -np.array(curve), steps)))
    half = stats.t.ppf(0.975, len(SEEDS) - 1) * stats.sem(logs)
    expected = np.exp([np.mean(logs), np.mean(logs) - half, np.mean(logs) + half])
    # The time factor equals the step factor, because steps of min_snr take as long as those of uniform
    for factor in (rows["min_snr"].step_factor, rows["min_snr"].time_factor):
        assert [factor.value, factor.low, factor.high] == pytest.approx(expected)
        assert formatting.format_factor(factor)[1] in read_page(built)
    assert (
        formatting.format_factor(rows["uniform"].step_factor)
        == formatting.format_factor(rows["uniform"].time_factor)
        == ("1.00×", "")
    )
    assert formatting.format_factor(rows["log_normal"].step_factor) == ("not reached", "in 5 of 5 seeds")
    assert 0 < rows["p2"].step_factor.missed_seed_count < 5
    assert np.isnan(rows["p2"].step_factor.value)  # seeds that miss the value are not left out
    assert f"in {rows['p2'].step_factor.missed_seed_count} of 5 seeds" in read_page(built)


def test_the_time_factor_includes_the_cost_of_a_step(small):
    config, results = small
    for step in (100, 200, 400):  # adaptive equals uniform, with steps that take 1.2 times as long
        path = results / "methods/adaptive/seed0/evaluation" / f"{step:07d}.json"
        record = read_json(path)
        record["metrics"][METRIC] = results_tree.distance("uniform", 0, step)
        write_record(path, record)
    row = next(
        row for row in ranking.compare_methods(collect(load(config), results).measurements) if row.method == "adaptive"
    )
    assert row.step_factor.value == pytest.approx(1.0) and row.time_factor.value == pytest.approx(1 / 1.2)


def test_without_a_uniform_method_there_is_no_baseline(tmp_path):
    tree = results_tree.write(tmp_path, seeds=(0,), methods=("p2", "speed"))
    html = page_of(*tree)
    assert "no baseline" in html and "One seed" in html
    assert all(row.step_factor is None for row in ranking.compare_methods(collect(load(tree[0]), tree[1]).measurements))


def test_learned_samplers_are_listed_and_one_that_has_not_moved_is_marked(built, small):
    text = re.sub(r"<[^>]+>", " ", (built[1] / "report.html").read_text())
    assert "policy updates" in text and "has not moved" not in text
    results = small[1]
    for step in (0, 100, 200, 400):
        path = results / "methods/adaptive/seed0/snapshots" / f"{step:07d}" / "snapshot.json"
        record = read_json(path)
        record["strategy"]["tv_from_start"] = 0.004
        write_record(path, record)
    html = page_of(*small)
    assert html.count('<span class="mark warn">has not moved</span>') == 2  # in the comparison and at its last snapshot
    assert "adaptive seed 0: its sampler learns but has not moved" in html


def test_the_report_warns_of_methods_that_end_above_the_gaussian_or_get_worse(small):
    config, results = small
    path = results / "methods/adaptive/seed0/evaluation/0000400.json"
    record = read_json(path)
    record["metrics"][METRIC] = 320.0
    record["warnings"] = ["<script>few images</script>"]
    write_record(path, record)
    path = results / "methods/uniform/seed0/evaluation/0000400.json"
    record = read_json(path)
    record["warnings"] = ["<script>few images</script>"]
    write_record(path, record)
    messages = list(findings.find_warnings(collect(load(config), results)))
    assert any("not below the 88 of a Gaussian fitted to the data: adaptive (" in message for message in messages)
    assert any(message.startswith("adaptive gets worse from step 200") for message in messages)
    assert "uniform seed 0 step 400 and 1 other evaluation: <script>few images</script>." in messages
    html = page_of(*small)
    assert "<script" not in html and "&lt;script&gt;" in html


def test_without_standard_deviations_and_clock_times_the_report_contains_no_nan(small):
    config, results = small
    for training in ("methods/uniform/seed0", "methods/adaptive/seed0"):
        (results / training / "timing.jsonl").unlink()
        for path in (results / training / "evaluation").glob("*.json"):
            record = read_json(path)
            record["metrics"][f"{METRIC}_spread"] = None
            write_record(path, record)
    rows = list(csv.DictReader(io.StringIO(summary_csv(collect(load(config), results)))))
    assert {row[f"{METRIC}_spread"] for row in rows[:-4]} == {""}
    assert {row["train_seconds"] for row in rows[:-4] if row["step"] != "0"} == {""}
    html = page_of(config, results)
    assert "no timing.jsonl" in html and not re.search(r"\bnan\b", re.sub(r"base64,[^\"]+", "", html))
    assert "Not ranked: methods are ranked from 5 seeds on, and this experiment has 1." in html


class _PageParser(HTMLParser):
    def __init__(self):
        super().__init__()
        self.links, self.images, self.ids, self.tags = [], [], set(), set()

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.add(tag)
        self.ids.add(attributes.get("id"))
        self.links += [attributes["href"]] if "href" in attributes else []
        self.images += [attributes["src"]] if tag == "img" else []


def test_the_page_is_self_contained(built):
    page = _PageParser()
    page.feed((built[1] / "report.html").read_text())
    assert not {"link", "iframe", "script"} & page.tags
    assert (built[1] / "report.html").stat().st_size < 2e6
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links) and page.links
    assert len(page.images) == 8
    for source in page.images:
        kind, data = re.fullmatch(r"data:image/(png|svg\+xml);base64,(.+)", source).groups()
        content = base64.b64decode(data)
        assert Image.open(io.BytesIO(content)).size[0] > 500 if kind == "png" else b"<svg" in content[:900]


def test_the_page_contains_the_evaluation_protocol(built):
    page = (built[1] / "report.html").read_text()
    text = re.sub(r"<[^>]+>", "", re.sub(r"<style.*?</style>", "", page, flags=re.S))
    text = " ".join(text.split())
    for fact in (
        "held-out accuracy 98.1%", "3 sets of 400 images (12.5 per feature)",
        "20 intervals, 20 network evaluations, trailing spacing, x0 not clipped", "EMA weights",
            "eeeeeeeeeeee", "ffffffffffff",
        "Start-up (interpreter and imports) takes 51% of all CPU time",
        "reconstruction PSNR 24.7 dB", "0123456789abcdef",
    ):  # fmt: skip
        assert fact in text, fact


def hash_report(results):
    return hash_folder(results / "figures"), [sha256_file(results / name) for name in ("report.html", "summary.csv")]


@pytest.mark.long
def test_equal_results_give_equal_bytes_and_a_failure_keeps_the_old_report(small, monkeypatch):
    config, results = small
    build_report(load(config), results)
    first = hash_report(results)
    assert {Path(name).suffix for name in first[0]} == {".png", ".svg"} and len(first[0]) == 16
    write_json(results / "timing" / "report.json", {"stage": "report", "cpu_seconds": 1.0})  # time of the report itself
    build_report(load(config), results)
    assert hash_report(results) == first
    (results / "dataset/images.npy").unlink()  # detected only when the figures are drawn
    monkeypatch.setattr(figures, "FIGURES", {"final_samples": figures.FIGURES["final_samples"]})
    with pytest.raises(KairosError, match=r"images\.npy: is missing"):
        build_report(load(config), results)
    assert hash_report(results) == first and not list(results.glob(".tmp-*"))


def test_labels_keep_their_order_and_a_minimum_distance():
    rng = np.random.default_rng(0)
    for count in (1, 2, 5, 12):
        heights = sorted(rng.random(count) * 0.4)
        positions = space_out_heights(heights, 0.06)
        assert all(after - before >= 0.06 - 1e-9 for before, after in pairwise(positions))
        assert np.mean(positions) == pytest.approx(np.mean(heights))
    assert space_out_heights([0.1, 0.5, 0.9], 0.06) == pytest.approx([0.1, 0.5, 0.9])


@pytest.mark.long
def test_without_held_out_images_neither_page_nor_summary_has_rows_for_them(small):
    for path in small[1].glob("methods/*/seed*/evaluation/*.json"):
        write_record(path, {name: value for name, value in read_json(path).items() if name != "validation"})
    reference = small[1] / "reference/record.json"
    record = read_json(reference)
    rows = {name: row for name, row in record["rows"].items() if name in ("gaussian", "noise")}
    write_record(
        reference, {**record, "rows": {**record["rows"], "floor": {**record["rows"]["floor"], "n_samples": 333}}}
    )
    results_tree.sign(load(small[0]), small[1])
    assert page_of(*small).count("(of 333 images, all that are held out)") == 1
    write_record(reference, {**record, "rows": rows, "reference": "all"})
    results_tree.sign(load(small[0]), small[1])
    content = page_of(*small)
    assert "validation_loss" not in content and "#validation" not in content and "held-out real images" not in content
    assert "statistics of all images" in content
    table = list(csv.DictReader(io.StringIO(summary_csv(collect(load(small[0]), small[1])))))
    assert {row["method"] for row in table} >= {"gaussian", "noise"} and all(
        row["val_loss_epsilon"] == "" for row in table
    )


def test_the_page_shows_recorded_values_that_differ_from_the_settings(small):
    """Settings can be upper bounds, or names of published sizes that other options override."""
    config, results = small
    values = yaml.safe_load(config.read_text())
    values["model"] = {"name": "dit", "size": "s/2", "width": 64, "depth": 2, "heads": 4}
    values["sampling"]["guidance_scale"] = 1.0
    values["evaluation"]["strata"] = 32
    config.write_text(yaml.safe_dump(values))
    experiment = load(config)
    for path in results.glob("methods/*/seed*/snapshots/*/snapshot.json"):
        write_record(path, read_json(path) | {"config": experiment.plain()})
    for path in results.glob("methods/*/seed*/evaluation/*.json"):
        record = read_json(path)
        record["validation"]["images"] = 20
        record["protocol"] |= {"n_samples": 390, "scheduler": "heun", "guidance_scale": 1.5}
        write_record(path, record)
    results_tree.sign(experiment, results)
    facts = dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", page_of(*small), re.DOTALL))
    assert (experiment.evaluation.loss_images, experiment.evaluation.strata) == (256, 32)
    assert "20 held-out images" in facts["Validation loss"] and "18 strata" in facts["Validation loss"]
    assert "width 64" in facts["Model"] and "depth 2" in facts["Model"] and "s/2" not in facts["Model"]
    assert "3 sets of 390 images (12.2\nper feature)" in facts["Images"]
    assert facts["Sampling"].startswith("heun") and "guidance 1.50" in facts["Sampling"]


@pytest.mark.parametrize("conditions", mark_long([["text"], ["text", "low_resolution"]], [["text"]]))
def test_conditions_are_shown_with_the_generated_images(small, conditions):
    values = yaml.safe_load(small[0].read_text())
    values["model"] = {"name": "dit", "conditions": conditions}
    values["dataset"] = {"source": "folder", "path": "images", "captions": "sidecar"}
    values["dataset"] |= {"low_resolution": 2, "resolution": 8} if "low_resolution" in conditions else {}
    small[0].write_text(yaml.safe_dump(values | {"text_encoder": {"path": "encoder"}}))
    texts = np.array([b"a cat of $5"] * 20)
    for path in small[1].glob("methods/*/seed*/samples/*.png"):
        images = np.zeros((20, 8, 8, 1), np.uint8)
        write_samples(path.with_suffix(".npz"), images, {"labels": "balanced", "seed": 0}, {"text": [texts]}, 20)
    for path in small[1].glob("methods/*/seed*/snapshots/*/snapshot.json"):
        kinds = {name: {"kind": name} for name in conditions}
        write_record(path, read_json(path) | {"conditions": kinds, "config": load(small[0]).plain()})
    results_tree.sign(load(small[0]), small[1])
    results = collect(load(small[0]), small[1])
    figure = draw_conditional_samples(results, plot_style.assign_styles(results.methods, results.baseline))
    columns = ["low resolution"] * (len(conditions) - 1) + ["real", *results.methods]
    assert [axes.get_title() for axes in figure.axes[: len(columns)]] == columns
    assert len(figure.axes) == 8 * len(columns)
    assert figure.axes[0].texts[0].get_text() == r"a cat of \$5"
    assert "Conditions of the model" in page_of(*small)


def test_template_and_style_are_part_of_the_code_of_the_report(tmp_path):
    package = Path(main.__code__.co_filename).parents[1]
    copy = shutil.copytree(package, tmp_path / "kairos", ignore=shutil.ignore_patterns("__pycache__"))
    code = "from kairos.stage_keys import hash_modules; print(hash_modules(['kairos.report.build']))"
    hashes = set()
    for name in ("page.html.jinja", "plot_style.mplstyle", None):
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
        hashes.add(done.stdout)
        if name:
            with open(copy / "report" / name, "a") as file:
                file.write("# another")
    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("process", "label", "scale"),
    [("edm", "sigma (small", "log"), ("flow", "time t (0", "linear"), ("discrete", "timestep t (0", "linear")],
)
def test_densities_and_losses_are_plotted_over_the_time_of_the_process(small, process, label, scale):
    results = collect(load(small[0]), small[1])
    plain = results.experiment.plain()
    plain["diffusion"] = {"process": process}
    plain["sampling"]["scheduler"] = "euler"
    results = replace(results, experiment=validate(plain))
    for training in results.runs:
        for snapshot in training.snapshots:
            for row in snapshot.evaluation["validation"]["per_timestep"]:
                row[results.validation_metric.removeprefix("val_")] = row.pop("loss_epsilon")
            snapshot.strategy_table["t"] = np.geomspace(0.002, 0.9, len(snapshot.strategy_table))
    styles = plot_style.assign_styles(results.methods, results.baseline)
    figure = curve_figures.draw_strategies(results, styles, "p", "p", "linear")
    assert all(axes.get_xlabel().startswith(label) and axes.get_xscale() == scale for axes in figure.axes)
    assert all(axes.get_xlim() == pytest.approx((0.002, 0.9)) for axes in figure.axes)
    line = figure.axes[0].lines[0].get_ydata()
    assert line == pytest.approx(np.ones(len(line)))  # T times the probability mass of uniform
    assert figure.axes[0].get_ylabel() == "p" and figure.axes[1].get_ylabel() == ""
    losses = curve_figures.draw_validation_loss(results, styles)
    assert losses.axes[0].get_xlabel().startswith(label) and losses.axes[0].get_xscale() == scale


def test_lines_of_strategies_have_the_colour_of_their_step_without_a_snapshot_between(small):
    results = collect(load(small[0]), small[1])
    (run,) = results.runs_of("adaptive")
    for snapshot in run.snapshots:  # p at the first timestep is a value of its own for each step
        snapshot.strategy_table["p"] = 1 + snapshot.step
    styles = plot_style.assign_styles(["adaptive"], None)

    def draw_colors(snapshots) -> dict[int, tuple[float, ...]]:
        """Return the colour of the line of each step."""
        one_method = replace(results, runs=(replace(run, snapshots=snapshots),))
        lines = curve_figures.draw_strategies(one_method, styles, "p", "p", "linear").axes[0].lines
        timesteps = len(run.snapshots[0].strategy_table)
        return {
            int(line.get_ydata()[0] / timesteps - 1): tuple(line.get_color())
            for line in lines
            if len(line.get_ydata()) == timesteps
        }

    colors = draw_colors(run.snapshots)
    assert len(run.snapshots) == len(set(colors.values())) >= 4
    for missing in range(len(run.snapshots)):
        left = draw_colors(run.snapshots[:missing] + run.snapshots[missing + 1 :])
        assert left == {step: color for step, color in colors.items() if step != run.snapshots[missing].step}


def test_one_collapsed_density_does_not_flatten_the_panels_of_the_others():
    from matplotlib.figure import Figure

    from kairos.report.curve_figures import _set_common_linear_limit

    for highest_values, clipped in (((1, 2, 1.4, 516, 2.5), [3]), ((1, 2, 3), []), ((516,), [])):
        panels = list(Figure().subplots(1, len(highest_values), squeeze=False).flat)
        _set_common_linear_limit(panels, highest_values)
        (top,) = {panel.get_ylim()[1] for panel in panels}
        shown = [highest for number, highest in enumerate(highest_values) if number not in clipped]
        assert max(shown) < top < 10 * max(shown)
        texts = {number: [text.get_text() for text in panel.texts] for number, panel in enumerate(panels)}
        assert texts == {number: ["up to 516"] if number in clipped else [] for number in texts}
