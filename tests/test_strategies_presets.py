"""Tests of ``kairos strategies show`` for presets of other trainers: densities, weights, comparison."""

import numpy as np
import pytest
from PIL import Image

import kairos_timesteps
from kairos.cli.strategies.trainer_presets import PROCESS_BY_TIME_UNIT, build_preset_view
from kairos.library_components import LibraryComponent
from kairos.strategy_file import parse_strategy_csv
from kairos_timesteps.components import PROCESSES
from kairos_timesteps.preset_table import CONVENTIONS, TABLE


@pytest.fixture
def columns(kairos_strategies):
    """Function that returns the CSV columns of a strategy or preset."""

    def run(*arguments) -> dict[str, np.ndarray]:
        status, out, err = kairos_strategies("show", *arguments, "--format", "csv")
        assert (status, err) == (0, "")
        return parse_strategy_csv(out)

    return run


def compared_columns(kairos_strategies, *arguments) -> dict[str, np.ndarray]:
    """Return the CSV columns of a call with ``--compare``."""
    status, out, err = kairos_strategies("show", *arguments, "--format", "csv")
    assert (status, err) == (0, "")
    header, *lines = out.splitlines()
    rows = np.array([[float(value) for value in line.split(",")] for line in lines])
    return dict(zip(header.split(","), rows.T, strict=True))


# presets, and strategies of kairos with equal densities and weights on the process of the preset's time
EQUAL = [
    (["kohya:shift", "--set", "shift=2"], ["shift", "--set", "alpha=2", "--set", "density=log_normal"], ["flow"]),
    (["kohya:sigmoid"], ["log_normal"], ["flow"]),
    (["diffusers:logit_normal", "--set", "mean=0.5"], ["log_normal", "--set", "m=-0.5"], ["flow"]),
    (["diffsynth:bell"], ["bell"], ["flow"]),
    (["ai_toolkit:style"], ["warp", "--set", "density={name: beta, a: 0.333333333333333333, b: 1}"], ["flow"]),
    (["edm:log_normal"], ["edm_log_normal+edm"], ["edm"]),
    (["kohya:min_snr"], ["min_snr"], ["discrete", "--schedule", "scaled_linear"]),
]


@pytest.mark.parametrize(("preset", "strategy", "process"), EQUAL)
def test_a_preset_has_the_density_and_the_weights_of_its_strategy(
    columns, kairos_strategies, preset, strategy, process
):
    status, out, err = kairos_strategies("show", *preset, "--format", "csv")
    shown, expected = parse_strategy_csv(out), columns(*strategy, "--process", *process)
    assert status == 0 and not err
    for key in ("t", "w"):
        np.testing.assert_allclose(shown[key], expected[key], rtol=1e-6)
    np.testing.assert_allclose(shown["p"], expected["p"], rtol=1e-6, atol=1e-12)


def test_a_preset_is_shown_in_the_time_of_its_trainer(columns):
    """The masses of intervals of t equal the shares of the preset's draws."""
    for name, context, count in (
        ("musubi:flux_shift", {"tokens": 4096}, 100_000),
        ("musubi:qinglong_qwen", {"tokens": 1024}, 100_000),
    ):
        shown = columns(name, *[word for key, value in context.items() for word in ("--context", f"{key}={value}")])
        draws = kairos_timesteps.preset(name).sample(count, **context).numpy()
        shares = np.histogram(draws, np.arange(0, 1.01, 0.1))[0] / count
        np.testing.assert_allclose(shown["p"].reshape(10, 100).sum(1), shares, atol=5 * (0.25 / count) ** 0.5)


def test_listed_times_have_all_the_mass(kairos_strategies):
    status, out, err = kairos_strategies("show", "simpletuner:fast_schedule", "--format", "csv")
    assert status == 0 and "never drawn (p = 0) at 996 of 1000" in err
    p = parse_strategy_csv(out)["p"]
    assert p[[250, 500, 750, 999]] == pytest.approx([0.1, 0.1, 0.1, 0.7], abs=1e-12)


def test_strategies_are_compared_in_one_time(kairos_strategies, columns):
    shown = compared_columns(kairos_strategies, "kohya:shift", "--compare", "log_normal+bell", "--compare-set", "m=0.5")
    expected = columns("log_normal+bell", "--process", "flow", "--set", "m=0.5")
    assert list(shown) == ["t", "p", "w", "effective", "p_compared", "w_compared", "effective_compared"]
    for key in ("p", "w", "effective"):
        assert np.array_equal(shown[f"{key}_compared"], expected[key])
    swapped = compared_columns(kairos_strategies, "log_normal+bell", "--set", "m=0.5", "--compare", "kohya:shift")
    assert np.array_equal(swapped["p"], shown["p_compared"]) and np.array_equal(swapped["p_compared"], shown["p"])
    two = compared_columns(
        kairos_strategies, "speed", "--compare", "p2", "--schedule", "cosine", "--compare-set", "gamma=2"
    )
    assert np.array_equal(two["w_compared"], columns("p2", "--schedule", "cosine", "--set", "gamma=2")["w"])
    same_preset = compared_columns(
        kairos_strategies, "kohya:shift", "--compare", "kohya:shift", "--compare-set", "shift=1"
    )
    assert np.array_equal(same_preset["p"], shown["p"])
    assert abs(same_preset["p_compared"] - shown["p"]).sum() > 0.1
    status, out, err = kairos_strategies("show", "kohya:shift", "--compare", "nemo:linear")
    assert status == 0 and not err
    rows = [line for line in out.splitlines() if "%" in line]
    shares = [[float(part.split()[-1]) for part in row.split("%")[:2]] for row in rows]  # masses of both strategies
    assert len(rows) == 20 and np.sum(shares, axis=0) == pytest.approx([100, 100], abs=0.2)
    assert "shift=3" in out and "sum of p*w = 2.5" in out  # the mean of 1 + 3t


def test_the_context_is_passed_to_strategies(columns):
    shifted = ("shift", "--process", "flow", "--set", "law=exponential", "--set", "density=log_normal")
    shown = columns(*shifted, "--context", "tokens=4096")
    expected = columns("musubi:flux_shift", "--context", "tokens=4096")
    np.testing.assert_allclose(shown["p"], expected["p"], rtol=1e-6, atol=1e-12)


@pytest.mark.long
def test_the_figure_of_a_comparison_shows_both_strategies(kairos_strategies, tmp_path):
    from kairos.report.strategy_figures import ComparedStrategy, draw_strategy

    path = tmp_path / "figure.png"
    assert kairos_strategies("show", "edm:log_normal", "--compare", "edm_log_normal+edm2", "--out", path)[0] == 0
    assert Image.open(path).width > 1000
    t = np.linspace(0, 1, 100)
    one = {"t": t, "p": np.full(100, 0.01), "w": np.full(100, 1.0), "effective": np.full(100, 0.01)}
    two = {**one, "p": 2 * t / 99, "w": np.full(100, 5.0), "effective": 10 * t / 99}
    figure = draw_strategy(one, "one", [], "flow", ComparedStrategy(two, "two", []))
    for axes, key, scale in zip(figure.axes, ("p", "w", "effective"), (100, 1, 100)):
        curves = [line.get_ydata() for line in axes.lines]
        for columns in (one, two):
            assert any(len(y) == 100 and np.allclose(y, columns[key] * scale) for y in curves)
        assert axes.get_ylim()[1] > (two[key] * scale).max()


def test_list_contains_every_preset(kairos_strategies):
    status, out, err = kairos_strategies("list")
    assert status == 0 and not err
    listed = {line.split()[0] for line in out.splitlines() if line.strip()}
    assert {*kairos_timesteps.names("preset")} <= listed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["kohya:shfit"], ["unknown preset 'kohya:shfit'", "kohya:shift", "musubi:flux_shift"]),
        (["kohya:shift", "--set", "shfit=3"], ["'shfit'", "sigmoid_scale"]),
        (["kohya:shift", "--set", "shift"], ["'shift'", "OPTION=VALUE"]),
        (["kohya:shift", "--set", "shift=1", "--set", "shift=2"], ["shift", "twice"]),
        (["kohya:shift", "--set", "shift=-1"], ["shift: got -1", "> 0"]),
        (["musubi:flux_shift"], ["musubi:flux_shift", "--context tokens="]),
        (["shift", "--process", "flow", "--set", "law=linear"], ["sampler shift", "--context tokens="]),
        (["speed", "--context", "tokens=3"], ["context: got tokens"]),
        (["speed", "--context", "tokens"], ["'tokens'", "NAME=VALUE"]),
        (["kohya:shift", "--process", "edm"], ["--process", "kohya:shift"]),
        (["kohya:shift", "--progress", "0.5"], ["--progress", "kohya:shift"]),
        (["kohya:shift", "--compare", "kohya:min_snr"], ["kohya:shift in flow time", "kohya:min_snr in discrete time"]),
        (["log_normal", "--compare", "kohya:nothing"], ["unknown preset 'kohya:nothing'"]),
        (["kohya:shift", "--compare", "log_normal", "--compare-set", "k=3"], ["'k'", "sampler.m"]),
        (["--checkpoint", "x", "--compare", "log_normal"], ["--compare", "--checkpoint"]),
        (["--checkpoint", "x", "--compare-set", "k=3"], ["--compare-set", "--checkpoint"]),
        (["--checkpoint", "x", "--context", "tokens=3"], ["--context", "--checkpoint"]),
        (["speed", "--compare-set", "k=3"], ["--compare-set: got k=3", "--compare"]),
        (["speed", "--context", "tokens=[1"], ["--context tokens=[1"]),
        (["speed", "--set", "k=[1"], ["--set k=[1"]),
        (["speed", "--compare", "speed", "--compare-set", "k=[1"], ["--compare-set k=[1"]),
        (["speed", "--compare", "speed", "--compare-set", "k"], ["--compare-set: got 'k'"]),
        (["speed", "--compare", "speed", "--compare-set", "q=1"], ["--compare-set: unknown option 'q'"]),
        (["speed", "--compare", "kohya:shift", "--compare-set", "shift=[1"], ["--compare-set shift=[1"]),
        (["speed", "--compare", "kohya:shift", "--compare-set", "shift"], ["--compare-set: got 'shift'"]),
    ],
)
def test_bad_arguments_are_rejected(kairos_strategies, arguments, words):
    status, out, err = kairos_strategies("show", *arguments)
    assert status == 2 and not out and "Traceback" not in err
    assert all(word in err for word in words), err


@pytest.mark.long
def test_one_preset_of_each_trainer_has_a_complete_table():
    for row in {row.trainer: row for row in TABLE}.values():
        process = LibraryComponent.select(PROCESSES, PROCESS_BY_TIME_UNIT[CONVENTIONS[row.convention].time])
        view = build_preset_view(kairos_timesteps.preset(row.name), process, {"tokens": 1024, "frames": 1})
        assert view.columns["p"].sum() == pytest.approx(1, abs=1e-12), row.name
        assert (view.columns["p"] >= 0).all() and np.isfinite(view.columns["effective"]).all(), row.name
