"""Tests of ``kairos strategies list`` and ``show``: every name, schedule and prediction, and rejected arguments."""

import itertools
import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from components_by_name import make_sampler, make_weighting
from kairos.cli.strategies.listing import COMBINATIONS
from kairos.strategy_file import parse_strategy_csv
from kairos_timesteps.base import FixedDensity, Weighting
from kairos_timesteps.components import SAMPLERS, WEIGHTINGS
from kairos_timesteps.diffusion.schedule import PREDICTIONS, SCHEDULES, make_schedule
from kairos_timesteps.lookup import parse_name, table
from kairos_timesteps.registry import Entry
from marks import mark_long

# samplers with mass at all timesteps
POSITIVE_SAMPLERS = [name for name in SAMPLERS if name not in ("listed", "cosine_interpolated")]
NEED_NO_TORCH = [name for name, entry in SAMPLERS.items() if issubclass(entry.component, FixedDensity)]
NEED_NO_TORCH += [
    f"uniform+{name}" for name in WEIGHTINGS if name not in ("edm2", "coarse_to_fine")
]  # networks learn these two


@pytest.fixture
def columns(kairos_strategies):
    """Function that returns the CSV columns of a strategy and checks properties of every table."""

    def run(*arguments) -> dict[str, np.ndarray]:
        status, out, err = kairos_strategies("show", *arguments, "--format", "csv")
        assert (status, err) == (0, "")
        shown = parse_strategy_csv(out)
        assert shown["p"].sum() == pytest.approx(1, abs=1e-12) and (shown["p"] >= 0).all()
        assert np.array_equal(shown["effective"], shown["p"] * shown["w"])
        if "--process" not in arguments:
            assert np.array_equal(shown["t"], np.arange(len(shown["t"])))
        return shown

    return run


def test_list_contains_every_strategy_with_its_options(kairos_strategies):
    status, out, err = kairos_strategies("list")
    assert status == 0 and not err
    lines = [line.split() for line in out.splitlines()]
    listed = {line[0] for line in lines if line}
    assert {*SAMPLERS, *WEIGHTINGS, *COMBINATIONS, "bs"} <= listed
    assert {"speed+change_aware", "adaptive+min_snr"} <= set(COMBINATIONS)
    for entry in (*SAMPLERS.values(), *WEIGHTINGS.values()):
        assert " ".join(entry.help.split()) in " ".join(out.split())
    assert "not its density" in out and "lambda=0.6" in out and "tau=null" in out
    assert all(parse_name(name) == tuple(name.split("+")) for name in COMBINATIONS)


@pytest.mark.parametrize(
    ("schedule", "prediction"),
    mark_long(itertools.product(SCHEDULES, PREDICTIONS), [("linear", "epsilon"), ("cosine", "v")]),
)
def test_every_strategy_shows_without_a_warning(columns, schedule, prediction):
    noise = make_schedule(schedule)
    names = (
        (*WEIGHTINGS, *COMBINATIONS) if prediction != "epsilon" else (*POSITIVE_SAMPLERS, *WEIGHTINGS, *COMBINATIONS)
    )
    for name in names:  # samplers do not depend on the prediction
        sampler, weighting = parse_name(name)
        shown = columns(name, "--schedule", schedule, "--timesteps", 1000, "--prediction", prediction)
        expected = table(make_sampler({"name": sampler}, noise), make_weighting({"name": weighting}, noise, prediction))
        for column in expected:  # 17 digits restore every bit
            assert np.array_equal(shown[column], expected[column]), (name, column)
        assert (shown["w"] > 0).all()


def test_every_sampler_with_some_weighting_and_few_timesteps(columns):
    for sampler, weighting in zip(POSITIVE_SAMPLERS, itertools.cycle(WEIGHTINGS)):
        options = ("--set", "feature_timesteps=10") if sampler == "adaptive" else ()
        assert len(columns(f"{sampler}+{weighting}", "--timesteps", 10, "--schedule", "cosine", *options)["t"]) == 10
    assert len(POSITIVE_SAMPLERS) >= len(WEIGHTINGS)


def test_options_of_sampler_and_weighting_have_a_short_form(columns):
    full = columns("speed+change_aware", "--set", "sampler.k=3", "--set", "weighting.lambda=0.8", "--set", "tau=600")
    assert full["p"][599] / full["p"][600] == pytest.approx(3)
    assert full["w"].min() == pytest.approx(0.2) and full["w"].max() == pytest.approx(0.8)
    short = columns("speed+change_aware", "--set", "k=3", "--set", "lambda=0.8", "--set", "tau=600")
    assert all(np.array_equal(full[name], short[name]) for name in full)
    assert columns("speed")["p"][0] == pytest.approx(5 / (1000 + 700 * 4))  # Wang et al. 2025, eq. 2
    assert columns("speed", "--set", "r=5")["p"][397] / columns("speed")["p"][397] > 1  # tau = 398.18
    assert columns("min_snr", "--set", "gamma=1")["w"][100] == pytest.approx((1 - 0.895142) / 0.895142, rel=1e-5)
    weights = columns("speed", "--set", "importance=true", "--set", "floor=1e-1")
    assert weights["effective"] == pytest.approx(np.full(1000, 1e-3))


@pytest.mark.parametrize(
    ("text", "k"), [("1e-3", 1e-3), ("2E1", 20), ("1.5e+0", 1.5), (".5e1", 5), ("7", 7), ("1.0e-3", 1e-3)]
)
def test_numbers_may_have_any_usual_notation(columns, text, k):
    weights = columns("p2", "--set", f"k={text}")["w"]
    assert weights[500] == pytest.approx(1 / (k + make_schedule().snr[500]))


@pytest.mark.parametrize("process", mark_long(["edm", "flow", "vp"], ["edm"]))
def test_every_strategy_is_shown_on_a_continuous_process(columns, kairos_strategies, process):
    for name in (*POSITIVE_SAMPLERS, *WEIGHTINGS, *COMBINATIONS):
        if ("official" in name and not name.startswith("adaptive")) or name.startswith("speed_v1"):
            status, out, err = kairos_strategies("show", name, "--process", process)
            assert status == 2 and not out and f"process: got {process}" in err
            continue
        shown = columns(name, "--process", process)
        assert len(shown["p"]) == 1000 and abs(shown["p"].sum() - 1) < 1e-9 and np.isfinite(shown["effective"]).all()
        assert (np.diff(shown["t"]) > 0).all() and (shown["w"] > 0).all()
    for prediction in PREDICTIONS if process == "vp" else ():
        assert np.isfinite(columns("min_snr", "--process", "vp", "--prediction", prediction)["w"]).all()


def normal_cdf(x) -> np.ndarray:
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in x])


def test_densities_and_weights_in_the_time_of_the_process(columns):
    edges = np.arange(1001) / 1000
    edm = columns("edm_log_normal+edm", "--process", "edm")
    sigma = 0.002 * 40_000 ** ((edges[1:] + edges[:-1]) / 2)
    assert edm["t"] == pytest.approx(sigma, rel=1e-12)
    below = normal_cdf((np.log(0.002) + np.log(40_000) * edges + 1.2) / 1.2)
    assert edm["p"][1:-1] == pytest.approx(np.diff(below)[1:-1], rel=1e-6, abs=1e-14)
    assert edm["p"][-1] == pytest.approx(1 - below[-2], abs=1e-12)
    assert edm["w"] == pytest.approx((sigma**2 + 0.25) / (0.5 * sigma) ** 2, rel=1e-6)
    for setting in ("process.sigma_data=2", "weighting.sigma_data=2"):
        w = columns("edm", "--process", "edm", "--set", setting)["w"]
        assert w == pytest.approx((sigma**2 + 4) / (2 * sigma) ** 2, rel=1e-6)

    with np.errstate(divide="ignore"):
        masses = np.diff(normal_cdf(np.log(edges) - np.log1p(-edges)))
    plain, shifted = (columns("log_normal", "--process", "flow", "--set", f"shift={shift}") for shift in (1, 3))
    assert plain["t"] == pytest.approx((edges[1:] + edges[:-1]) / 2) and plain["p"] == pytest.approx(masses, abs=1e-13)
    assert np.array_equal(
        shifted["p"], plain["p"]
    )  # p is per interval of fractions; the shift applies to the times of these fractions
    assert shifted["t"] == pytest.approx(3 * plain["t"] / (1 + 2 * plain["t"]))
    density = shifted["p"] / np.gradient(shifted["t"])  # of t: logit t ~ N(ln 3, 1)
    expected = np.exp(-((np.log(shifted["t"] / (1 - shifted["t"])) - np.log(3)) ** 2) / 2) / math.sqrt(2 * math.pi)
    expected /= shifted["t"] * (1 - shifted["t"])
    assert density[20:-20] == pytest.approx(expected[20:-20], rel=1e-2)


def test_figures_and_tables_in_the_time_of_the_process(kairos_strategies, tmp_path):
    from kairos.report import strategy_figures

    for process, label, scale in (
        ("edm", "sigma", "log"),
        ("flow", "time t", "linear"),
        ("discrete", "timestep t", "linear"),
    ):
        status, out, err = kairos_strategies("show", "edm_log_normal+edm", "--process", process)
        header = {"edm": "sigma", "flow": "t", "discrete": "timesteps"}[process]
        assert (status, err) == (0, "") and f"\n{header} " in out
        path = tmp_path / f"{process}.csv"
        assert kairos_strategies("show", "edm_log_normal+edm", "--process", process, "--out", path) == (0, "", "")
        figure = strategy_figures.draw_strategy(parse_strategy_csv(path.read_text()), "name", [], process)
        assert all(axes.get_xlabel().startswith(label) and axes.get_xscale() == scale for axes in figure.axes)


def test_the_table_begins_with_strategy_and_process(kairos_strategies):
    status, out, err = kairos_strategies(
        "show", "speed+change_aware", "--set", "k=4", "--schedule", "cosine", "--prediction", "v"
    )
    assert status == 0 and not err
    header, body = out.split("\n\n")
    assert "speed+change_aware" in header and "k=4, tau=null" in header and "lambda=0.6" in header
    assert "cosine schedule, T = 1000, prediction v" in header
    rows = [line for line in body.splitlines() if "%" in line]
    shares = [[float(part.strip().split()[-1]) for part in row.split("%")[:2]] for row in rows]
    assert len(rows) == 20 and np.sum(shares, axis=0) == pytest.approx([100, 100], abs=0.2)
    assert max(row.count("#") for row in rows) == 30
    assert len(kairos_strategies("show", "uniform", "--timesteps", 3)[1].split("\n\n")[1].splitlines()) == 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show"], ["strategy: missing", "SAMPLER+WEIGHTING"]),
        (["show", "sped"], ["unknown strategy 'sped'", "speed_official", "min_snr", "gradient_norm"]),
        (["show", "speed+min_snrr"], ["unknown weighting", "min_snr", "change_aware"]),
        (["show", "min_snr+speed"], ["the sampler comes first", "speed+min_snr"]),
        (["show", "bs"], ["bs", "not its density"]),
        (["show", "bs+p2"], ["bs", "not its density"]),
        (["show", "speed", "--set", "kk=5"], ["'kk'", "sampler.k", "sampler.tau"]),
        (["show", "speed+p2", "--set", "weighting.tau=5"], ["'weighting.tau'", "sampler.tau", "weighting.gamma"]),
        (["show", "speed+p2", "--set", "model.k=5"], ["'model.k'", "sampler.k"]),
        (["show", "speed+p2", "--set", "k=5"], ["ambiguous", "sampler.k or weighting.k"]),
        (["show", "speed", "--set", "k=5", "--set", "sampler.k=6"], ["sampler.k", "twice"]),
        (["show", "speed", "--set", "k"], ["'k'", "OPTION=VALUE"]),
        (["show", "speed", "--set", "k=[1"], ["k=[1", "allowed"]),
        (["show", "speed", "--set", "k=-1"], ["speed.k: got -1", "> 0"]),
        (["show", "speed", "--set", "k=fast"], ["speed.k: got 'fast'", "number"]),
        (["show", "speed", "--set", "tau=1000"], ["speed.tau: got 1000", "999"]),
        (["show", "speed", "--set", "r=1e12"], ["r: got 1e+12", "1/alpha-bar"]),
        (["show", "change_aware", "--set", "lambda=5"], ["lambda: got 5", "0.5"]),
        (["show", "uniform", "--set", "end=0"], ["end: got 0"]),
        (["show", "adaptive", "--set", "selected=200"], ["selected: got 200", "100"]),
        (["show", "speed", "--schedule", "cubic"], ["'cubic'", "linear, cosine, quadratic"]),
        (["show", "speed", "--prediction", "score"], ["'score'", "epsilon, x0, v"]),
        (["show", "speed", "--timesteps", "1"], ["timesteps: got 1", ">= 2"]),
        (["show", "speed", "--progress", "0.5"], ["speed", "does not depend on the step", "clts"]),
        (["show", "loss_rms", "--progress", "0.5"], ["loss_rms", "learns", "clts"]),
        (["show", "clts", "--progress", "1.5"], ["got 1.5", "0 to 1"]),
        (["show", "clts", "--progress", "nan"], ["nan", "0 to 1"]),
        (["show", "clts", "--progress", "1", "--checkpoint", "x"], ["--progress", "checkpoint"]),
        (["show", "speed", "--process", "ddpm"], ["unknown process 'ddpm'", "discrete, edm, fdm, flow, vp"]),
        (["show", "speed", "--process", "edm", "--schedule", "cosine"], ["process edm", "'schedule'", "sigma_max"]),
        (["show", "speed", "--process", "flow", "--timesteps", "10"], ["process flow", "'timesteps'", "shift"]),
        (["show", "speed", "--process", "flow", "--prediction", "v"], ["prediction: got 'v'", "flow", "null"]),
        (["show", "speed", "--process", "vp", "--prediction", "flow"], ["'flow' with process vp", "epsilon, x0, v"]),
        (["show", "edm", "--process", "edm", "--set", "sigma_data=1"], ["weighting.sigma_data or process.sigma_data"]),
        (["show", "speed", "--process", "flow", "--set", "shift=0"], ["shift: got 0", "> 0"]),
        (["show", "speed", "--format", "svg"], ["svg", "png"]),
        (["shew"], ["shew", "increments"]),
    ],
)
def test_bad_arguments_are_rejected_with_the_allowed_values(kairos_strategies, arguments, words):
    status, out, err = kairos_strategies(*arguments)
    assert status == 2 and not out and "Traceback" not in err
    assert all(word in err for word in words), err


class Negative(Weighting):
    """Weighting that falls below 0."""

    def weights(self, step=0):
        return np.linspace(1, -1, self.schedule.timesteps)


@pytest.mark.parametrize(
    ("arguments", "warning"),
    [
        (["uniform", "--set", "start=100", "--set", "end=900"], "never drawn (p = 0) at 200 of 1000"),
        (["p2", "--set", "gamma=400", "--set", "k=1e-3"], "weight is not finite"),
        (["speed+negative"], "weight is negative at 500 of 1000 timesteps between t = 500 and 999"),
    ],
)
@pytest.mark.parametrize("format", ["table", "csv", "png"])
def test_faulty_weights_and_densities_give_a_warning(
    kairos_strategies, tmp_path, monkeypatch, arguments, warning, format
):
    monkeypatch.setitem(WEIGHTINGS, "negative", Entry(Negative))
    status, out, err = kairos_strategies("show", *arguments, "--format", format, "--out", tmp_path / "file")
    assert status == 0 and not out and (tmp_path / "file").stat().st_size > 1000
    assert err.count("\n") == 1 and err.startswith("kairos: warning: ") and warning in err


def test_curricula_are_shown_at_any_progress(columns, kairos_strategies):
    start, middle, end = (columns("clts", "--progress", share)["p"] for share in (0, 0.5, 1))
    assert start == pytest.approx(np.full(1000, 1e-3)) and np.array_equal(start, columns("clts")["p"])
    assert middle == pytest.approx((start + end) / 2)
    assert end.argmax() == pytest.approx(300, abs=1) and end[300] / end[500] == pytest.approx(np.exp(0.5), rel=0.01)
    _, out, _ = kairos_strategies("show", "clts", "--progress", 0.25, "--set", "length=100")
    assert "step 25 of 100" in out
    by_progress = ["schedule", "--set", "of=progress", "--set"]
    by_progress.append('parts=[{"name": "uniform", "start": 0}, {"name": "log_normal", "start": 0.5}]')
    assert "progress 0.7" in kairos_strategies("show", *by_progress, "--progress", 0.7)[1]
    mixture = 'parts=[{"name": "clts", "share": 1, "length": 100}, {"name": "uniform", "share": 1}]'
    assert "step 70 of 100" in kairos_strategies("show", "mixture", "--set", mixture, "--progress", 0.7)[1]


def test_tables_and_figures_are_written_to_files(kairos_strategies, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert kairos_strategies("show", "mode", "--out", "a.csv") == (0, "", "")
    assert len(parse_strategy_csv(Path("a.csv").read_text())["p"]) == 1000
    assert kairos_strategies("show", "mode", "--out", "b.png") == (0, "", "")
    with Image.open("b.png") as picture:
        assert picture.format == "PNG" and picture.width > 1200 and picture.height > 500
    status, out, err = kairos_strategies("show", "speed+edm", "--format", "png", "--timesteps", 20)
    assert status == 0 and not out and "speed+edm.png" in err
    with Image.open("speed+edm.png") as picture:
        assert picture.format == "PNG"
    assert kairos_strategies("show", "mode", "--format", "table", "--out", "c.csv")[0] == 0
    assert "strategy" in Path("c.csv").read_text()


@pytest.mark.long
def test_fixed_strategies_need_no_torch_and_start_quickly():
    code = f"""
import sys
from kairos.cli import main
assert main(["strategies", "list"]) == 0
for name in {NEED_NO_TORCH!r}:
    for schedule in ("linear", "cosine"):
        assert main(["strategies", "show", name, "--schedule", schedule, "--format", "csv"]) == 0, name
    for process in ("edm", "flow", "vp"):
        if not any(part in name for part in ("official", "v1")):
            assert main(["strategies", "show", name, "--process", process, "--format", "csv"]) == 0, name
assert main(["strategies", "show", "clts", "--progress", "0.5"]) == 0
heavy = {{"torch", "scipy", "sklearn", "pandas", "matplotlib", "diffusers", "pydantic"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    assert len(NEED_NO_TORCH) >= 18
    line = [sys.executable, "-m", "kairos", "strategies", "show", "speed+change_aware"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)  # CPU time does not depend on other work of the machine
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_initial_densities_and_weights_are_marked(kairos_strategies):
    for name in ("adaptive", "loss_second_moment", "gradient_norm"):
        assert "initial density" in kairos_strategies("show", name)[1]
    assert "initial" not in kairos_strategies("show", "speed")[1]
    assert "w(t) are the initial weights" in kairos_strategies("show", "edm2")[1]
    assert "importance weight" in kairos_strategies("show", "loss_rms")[1]


def test_options_equal_those_of_an_experiment_file(columns):
    options = yaml.safe_load("{name: beta, a: 2, b: 3, points: sobol}")
    expected = make_sampler(options, make_schedule("quadratic", 50)).probabilities()
    settings = [part for key in ("a", "b", "points") for part in ("--set", f"{key}={options[key]}")]
    assert np.array_equal(columns("beta", "--schedule", "quadratic", "--timesteps", 50, *settings)["p"], expected)
