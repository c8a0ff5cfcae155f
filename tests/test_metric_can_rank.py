"""Reports of a distance that cannot rank methods, because real images do not score clearly below a fitted Gaussian."""

import json

import pytest
import yaml

import results_tree
from kairos.cli import main
from kairos.config import load, validate
from kairos.evaluation.separation import reason_not_to_rank
from kairos.files import read_json, write_record
from kairos.report import findings
from kairos.report.collect import collect
from kairos.report.compare import join_experiments
from kairos.report.ranking import compare_methods
from kairos_timesteps.errors import ConfigError, KairosError
from report_page import page_of

METRIC = results_tree.METRIC


def make_reference(real: float, real_error: float, gaussian: float, gaussian_error: float | None) -> dict:
    rows = {"floor": (real, real_error), "gaussian": (gaussian, gaussian_error)}
    return {
        "metric": METRIC,
        "features": 32,
        "rows": {name: {"n_samples": 80, METRIC: row[0], f"{METRIC}_spread": row[1]} for name, row in rows.items()},
    }


@pytest.mark.parametrize(
    ("real", "real_error", "gaussian", "gaussian_error", "ranks"),
    [
        (652, 181, 367, 24, False),  # measured with 400 images
        (250, 80, 367, 24, False),  # below, but not clearly
        (100, 20, 367, 24, True),
        (100, 20, 367, None, True),  # one set of samples: no standard deviation of the Gaussian
        (350, 20, 367, None, False),
        (367, 0, 367, 0, False),
    ],
)
def test_separation_takes_the_standard_deviations_into_account(real, real_error, gaussian, gaussian_error, ranks):
    message = reason_not_to_rank(make_reference(real, real_error, gaussian, gaussian_error))
    assert (message is None) == ranks
    if message:
        assert METRIC in message and str(real) in message and str(gaussian) in message


def test_there_is_no_warning_without_both_rows():
    record = make_reference(652, 181, 367, 24)
    del record["rows"]["floor"]
    assert reason_not_to_rank(record) is None


@pytest.fixture
def unranked(tmp_path, monkeypatch):
    """Experiment whose real images score above the Gaussian: its file and its results."""
    config, results = results_tree.write(tmp_path, methods=("uniform", "min_snr"))
    file = results / "reference/record.json"
    record = read_json(file)
    record["rows"]["floor"] |= {METRIC: 652.0, f"{METRIC}_spread": 181.0}
    record["rows"]["gaussian"] |= {METRIC: 367.0, f"{METRIC}_spread": 24.0}
    write_record(file, record)
    (results / "extractor").mkdir()
    options = load(config).evaluation.extractor.plain()
    write_record(results / "extractor/record.json", {"options": options})
    results_tree.sign(load(config), results)
    monkeypatch.chdir(tmp_path)
    return config, results


def test_findings_start_with_the_warning(unranked):
    config, folder = unranked
    results = collect(load(config), folder)
    verdict = findings.summarise_outcome(results, compare_methods(results.measurements))
    assert METRIC in verdict[0] and "652" in verdict[0] and "367" in verdict[0] and "primary_metric" in verdict[0]
    assert "seeds:" not in " ".join(verdict)  # more seeds would not help
    good = results_tree.write(folder.parent.parent / "good", methods=("uniform", "min_snr"))
    results = collect(load(good[0]), good[1])
    verdict = " ".join(findings.summarise_outcome(results, compare_methods(results.measurements)))
    assert "cannot rank" not in verdict and "seeds: [" in verdict


def test_compare_starts_with_the_warning(unranked, capsys):
    _, folder = unranked
    assert main(["compare", str(folder)]) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert METRIC in first and "652" in first and "367" in first and "primary_metric" in first


def test_the_index_shows_the_warning(unranked, tmp_path):
    assert main(["compare", "--index", str(unranked[1].parent)]) == 0
    assert "652" in (unranked[1].parent / "index.html").read_text()


def test_check_warns_from_results_with_equal_settings_only(unranked, capsys):
    config, _ = unranked
    assert main(["check", str(config)]) == 0
    output = capsys.readouterr().out
    assert METRIC in output and "652" in output and output.index("652") < output.index("milestones")
    values = yaml.safe_load(config.read_text())
    values["evaluation"]["num_samples"] = 300  # the recorded rows belong to other sample sets
    config.write_text(yaml.safe_dump(values))
    assert main(["check", str(config)]) == 0
    assert "652" not in capsys.readouterr().out


def test_check_warns_of_few_images_for_a_trained_extractor(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    values = results_tree.experiment() | {"dataset": {"source": "digits", "limit": 400, "heldout": 0.2}}
    values["evaluation"] |= {"num_samples": 80}

    def run_check() -> str:
        (tmp_path / "few.yaml").write_text(yaml.safe_dump(values))
        assert main(["check", "few.yaml"]) == 0
        return capsys.readouterr().out

    assert "primary_metric" in run_check() and "320" in run_check()
    values["evaluation"]["primary_metric"] = "validation"
    assert "320" not in run_check()
    values["evaluation"]["primary_metric"] = "distance"
    values["dataset"]["limit"] = None
    assert "primary_metric" not in run_check()


def rank_by_validation(config) -> dict:
    values = yaml.safe_load(config.read_text())
    values["evaluation"]["primary_metric"] = "validation"
    config.write_text(yaml.safe_dump(values, sort_keys=False))
    return values


def test_validation_loss_ranks_methods(unranked, capsys):
    config, folder = unranked
    rank_by_validation(config)
    results = collect(load(config), folder)
    rows = compare_methods(results.measurements)
    losses = {
        method: results.measurements.values_of(method, "val_loss_epsilon").iloc[:, -1].mean()
        for method in results.methods
    }
    assert [row.method for row in rows] == sorted(losses, key=losses.get)
    assert [row.curve.mean[-1] for row in rows] == pytest.approx(sorted(losses.values()))
    outcome = findings.summarise_outcome(results, rows)
    assert not any("Fréchet" in sentence for sentence in outcome) and any(
        "alidation loss" in sentence for sentence in outcome
    )
    assert any("652" in warning for warning in findings.find_warnings(results))
    assert main(["compare", str(config), "--format", "json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert {row["metric"] for row in table} == {"val_loss_epsilon"}


def test_distances_above_the_gaussian_are_reported_if_the_validation_loss_ranks_methods(tmp_path):
    config, folder = results_tree.write(tmp_path, methods=("uniform", "min_snr"))
    file = folder / "reference/record.json"
    record = read_json(file)
    rank_by_validation(config)

    def find_warnings(gaussian: float) -> str:
        record["rows"]["gaussian"] |= {METRIC: gaussian, f"{METRIC}_spread": 0.2}
        write_record(file, record)
        results_tree.sign(load(config), folder)
        return "\n".join(findings.find_warnings(collect(load(config), folder)))

    assert f"{METRIC} is not below the 12 of a Gaussian fitted to the data: uniform (" in find_warnings(12.0)
    assert "Gaussian" not in find_warnings(1000.0)


def test_validation_losses_of_two_autoencoders_are_not_compared(unranked, tmp_path):
    config, folder = unranked
    rank_by_validation(config)
    other_config, other = results_tree.write(tmp_path / "other", methods=("uniform", "min_snr"))
    rank_by_validation(other_config)

    def join():
        collected = collect(load(config), folder), collect(load(other_config), other)
        return join_experiments([(results, results.methods) for results in collected])

    assert len(join().methods) == 4
    record = read_json(other / "autoencoder/record.json") | {"sha256": "b" * 64}
    write_record(other / "autoencoder/record.json", record)
    for file in other.glob("methods/*/seed*/snapshots/*/snapshot.json"):
        write_record(file, read_json(file) | {"autoencoder_sha256": "b" * 64})
    results_tree.sign(load(other_config), other)
    with pytest.raises(KairosError, match="autoencoder"):
        join()


def test_the_page_shows_validation_loss_and_distance_if_the_loss_ranks(unranked):
    config, folder = unranked
    rank_by_validation(config)
    html = page_of(config, folder)
    assert "val_loss_epsilon ↓" in html and METRIC in html


def test_a_primary_metric_that_is_not_measured_is_rejected(tmp_path):
    values = results_tree.experiment()
    values["evaluation"] |= {"primary_metric": "validation", "metrics": ["frechet", "kid"]}
    with pytest.raises(ConfigError, match=r"primary_metric.*validation"):
        validate(values).resolve()
    del values["evaluation"]["metrics"]
    values["dataset"] = {"heldout": 0}
    with pytest.raises(ConfigError, match=r"primary_metric.*validation"):
        validate(values).resolve()
