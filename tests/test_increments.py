"""SpeeD's process increments equal the paper's numbers, simulated processes and numerical derivatives."""

import subprocess
import sys

import numpy as np
import pytest

from kairos.analyses.settings import AreasOptions, IncrementsOptions
from kairos.increments import AREAS, PROCESSES, increments, process_coefficients
from kairos_timesteps.diffusion.schedule import SCHEDULES, linear_coefficients, make_schedule
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.strategy import Strategy


def test_published_boundaries_of_the_linear_schedule():
    schedule = make_schedule("linear")
    for r, tau in ((5.0, 398.18), (20.0, 544.70), (100.0, 676.30)):
        result = increments("vp", schedule, r=r)
        assert result.deceleration == 220
        assert result.convergence == pytest.approx(tau, abs=0.005)
    delta, beta_0 = linear_coefficients(schedule)
    assert beta_0 + delta * 220 / 1000 == pytest.approx(np.sqrt(delta / 1000), rel=1e-3)  # section 2.5


def test_the_default_area_of_convergence_is_the_one_that_the_paper_suppresses():
    """The paper's tau = 700 is r = 138.6; "one magnitude", r = 10, would be 477."""
    schedule = make_schedule("linear")
    result = increments("vp", schedule)
    assert result.convergence == pytest.approx(700, abs=0.01) and result.suppression == 700
    converged = result.t[result.area() == "convergence"]
    p = Strategy("speed", "linear").table()["p"]
    suppressed = np.flatnonzero(p < p[0] / 2) + 1  # timestep t of kairos is t + 1 of the paper
    assert converged.tolist() == suppressed[:-1].tolist(), "the last timestep has no increment"
    assert increments("vp", schedule, r=10.0).convergence == pytest.approx(477.05, abs=0.01)
    for name, options in (("areas", AreasOptions()), ("increments", IncrementsOptions())):
        assert options.r == result.r, name
    assert increments("edm").suppression is None


def test_published_variance_and_variance_of_the_forward_step():
    result = increments("vp", make_schedule("linear"))
    for t in (220, 221):  # our timestep 220 is t = 221
        assert result.variance[t] == pytest.approx(0.80, abs=0.01)
        assert result.own_variance[t] == pytest.approx(0.0045, abs=5e-5)
    assert result.variance[-1] == pytest.approx(2, abs=1e-3)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_general_form_equals_the_formula_of_the_paper(schedule):
    noise = make_schedule(schedule)
    result = increments("vp", noise)
    before = np.concatenate([[1.0], noise.alphas_cumprod[:-1]])  # alpha-bar_t, t = 0 ... T - 1
    alphas = 1 - noise.betas  # alpha_{t+1}
    assert result.mean == pytest.approx((np.sqrt(alphas) - 1) * np.sqrt(before), rel=1e-9)
    assert result.variance == pytest.approx(2 - before * (1 + alphas), rel=1e-9)
    step_variance = (np.sqrt(alphas) - 1) ** 2 * (1 - before) + noise.betas
    assert result.own_variance == pytest.approx(step_variance, rel=1e-9)
    assert list(result.t) == list(range(1000))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("timesteps", [50, 1000])
def test_bounds_hold(schedule, timesteps):
    result = increments("vp", make_schedule(schedule, timesteps))
    assert (result.mean**2 <= result.mean_squared_bound).all()
    assert (result.variance >= result.variance_bound - 1e-12).all()
    assert (np.diff(result.magnitude)[1:] > 0).all()  # the paper's beta_0 is negative for T below 200


@pytest.mark.parametrize("process", PROCESSES)
def test_simulated_increments_have_the_computed_moments(process):
    result = increments(process, make_schedule("cosine", 20), timesteps=20)
    random = np.random.default_rng(0)
    x = np.full(200_000, 1.5)  # x0
    ends = np.concatenate([result.s[1:], [result.s[-1] + result.mean[-1]]])
    for k in range(len(result.t) - 1):
        # the forward step: scale x, and add the missing noise
        ratio = ends[k] / result.s[k]
        missing = (ends[k] * result.sigma[k + 1]) ** 2 - ratio**2 * (result.s[k] * result.sigma[k]) ** 2
        after = ratio * x + np.sqrt(missing) * random.standard_normal(len(x))
        increment = after - x
        error = np.sqrt(result.own_variance[k] / len(x))
        assert increment.mean() == pytest.approx(1.5 * result.mean[k], abs=5 * error)
        assert increment.var() == pytest.approx(result.own_variance[k], rel=0.02)
        # the paper's variance: independent noise at both ends
        both = result.s[k] * result.sigma[k], ends[k] * result.sigma[k + 1]
        assert np.hypot(*both) ** 2 == pytest.approx(result.variance[k])
        x = after


@pytest.mark.parametrize("process", PROCESSES)
def test_table_8_equals_numerical_derivatives(process):
    t, step = np.linspace(0.1, 0.9, 10), 1e-6
    beta_0, slope = 0.1, 19.9
    result, later, earlier = (process_coefficients(process, t + shift, beta_0, slope) for shift in (0, step, -step))
    sigma, s_dot = np.sqrt(result.sigma2), (later.s - earlier.s) / (2 * step)
    assert result.s_dot == pytest.approx(s_dot, rel=1e-6, abs=1e-9)
    assert result.sigma2_dot == pytest.approx((later.sigma2 - earlier.sigma2) / (2 * step), rel=1e-6)
    slope_of_bound = 2 * (later.s**2 * later.sigma2 - earlier.s**2 * earlier.sigma2) / (2 * step)
    assert result.variance_dot() == pytest.approx(slope_of_bound, rel=1e-5)
    sigma_dot = result.sigma2_dot / (2 * sigma)
    if process == "vp":  # as printed
        assert result.s == pytest.approx(np.exp(-slope * t**2 / 4 - beta_0 * t / 2))
        assert sigma_dot == pytest.approx((1 + sigma**2) * (slope * t + beta_0) / (2 * sigma))
        assert result.s_dot == pytest.approx(-sigma * sigma_dot / (1 + sigma**2) ** 1.5)
    elif process != "flow":  # printed in the column of d(sigma)/dt, but d(sigma²)/dt
        printed = {"ve": np.ones(10), "edm": 2 * t}[process]
        assert np.array_equal(result.sigma2_dot, printed) and sigma_dot != pytest.approx(printed)


def test_areas_of_other_schedules_follow_their_formulas():
    cosine = increments("vp", make_schedule("cosine"), r=5.0)
    assert cosine.deceleration == pytest.approx((0.5 * 1.008 - 0.008) * 1000, abs=1)  # alpha-bar = cos² falls fastest
    start = np.cos(0.008 / 1.008 * np.pi / 2) ** 2
    end = 1.008 * 2 / np.pi * np.arccos(np.sqrt(start / 5)) - 0.008
    assert cosine.convergence == pytest.approx(1000 * end, abs=0.01)
    first = 0.01
    slope = (np.sqrt(0.02) - first) / 999  # sqrt(beta) = first + slope (t - 1); beta' = beta² at the peak
    peak = ((2 * slope) ** (1 / 3) - first) / slope + 1
    assert increments("vp", make_schedule("quadratic"), r=5.0).deceleration == pytest.approx(peak, abs=1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_areas_are_in_order(schedule):
    result = increments("vp", make_schedule(schedule))
    area = result.area()
    order = [area[0], *area[1:][area[1:] != area[:-1]]]
    assert order == ["acceleration", "deceleration", "convergence"]
    assert (area == "acceleration").sum() == result.deceleration
    assert (area == "convergence").argmax() == np.ceil(result.convergence)
    assert increments("vp", make_schedule(schedule), r=1e12).convergence is None
    early = increments("vp", make_schedule(schedule), r=1.01).area()
    assert set(early) == {"acceleration", "convergence"}  # converged before the peak


def test_ve_and_edm_have_no_peak():
    ve, edm = increments("ve", r=5.0), increments("edm", r=5.0)
    assert ve.deceleration is None and set(ve.area()) == {"steady", "convergence"}
    assert edm.deceleration is None and set(edm.area()) == {"acceleration", "convergence"}
    assert ve.convergence == pytest.approx(4) and edm.convergence == pytest.approx(2)  # sigma = 2 where 1 + sigma² = 5
    for result, largest in ((ve, 100), (edm, 80)):
        assert result.sigma[result.area() == "convergence"].min() == pytest.approx(2, rel=0.02)
        assert not result.mean.any() and len(result.t) == 1000
        assert result.sigma[-1] + np.diff(result.sigma)[-1] == pytest.approx(largest, rel=1e-3)
        assert (
            result.variance_bound == pytest.approx(2 * result.sigma**2)
            and (result.variance > result.variance_bound).all()
        )


def test_rectified_flow_equals_its_closed_form():
    """x_t = (1 - t) x0 + t noise in T equal steps: no peak, and converged where noise is twice the signal."""
    flow, t = increments("flow", timesteps=100, r=5.0), np.arange(100) / 100
    assert flow.t == pytest.approx(t)
    assert flow.mean[:-1] == pytest.approx(-1 / 100) and (flow.mean**2 <= flow.mean_squared_bound + 1e-15).all()
    assert flow.variance[:-1] == pytest.approx((t**2 + (t + 0.01) ** 2)[:-1])
    assert flow.variance_bound == pytest.approx(2 * t**2) and (flow.variance > flow.variance_bound).all()
    assert flow.change == pytest.approx(4 * t) and flow.deceleration is None
    assert flow.convergence == pytest.approx(2 / 3)  # 1 + (t/(1 - t))² = 5


def test_invalid_arguments_are_rejected():
    for arguments, word in ((("vp", None), "schedule"), (("sde", None), "vp, ve, edm, flow")):
        with pytest.raises(ConfigError, match=word):
            increments(*arguments)
    for r in (1.0, 0.5, np.inf, np.nan):
        with pytest.raises(ConfigError, match="r: got"):
            increments("ve", r=r)


@pytest.fixture
def main():
    """Command line of kairos; the library alone has none."""
    return pytest.importorskip("kairos.cli").main


@pytest.mark.parametrize("process", PROCESSES)
def test_command_prints_columns_and_boundaries(main, process, capsys):
    line = ["strategies", "increments", "--process", process, "--timesteps", "200", "--r", "20"]
    result = increments(process, make_schedule("linear", 200), 200, 20.0)
    assert main([*line, "--format", "csv"]) == 0
    header, *rows = (row.split(",") for row in capsys.readouterr().out.splitlines())
    columns = result.columns()
    assert header == [*columns, "area"] and len(rows) == 200
    for position, name in enumerate(columns):
        assert np.array_equal([float(row[position]) for row in rows], columns[name])
    assert [row[-1] for row in rows] == list(result.area())
    assert main(line) == 0
    out = capsys.readouterr().out
    assert f"t = {result.convergence:.6g}, where the magnitude exceeds r = 20" in out
    assert all(f"{name} " in out for name in AREAS if name in result.area())


@pytest.mark.long
def test_command_writes_a_picture(main, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["strategies", "increments", "--process", "vp", "--timesteps", "200", "--format", "png"]) == 0
    (picture,) = tmp_path.glob("increments_*.png")
    assert picture.name in capsys.readouterr().err
    with pytest.importorskip("PIL.Image").open(picture) as image:
        assert image.format == "PNG" and image.width > 1200


def test_command_rejects_invalid_options_and_warns_of_unused_ones(main, capsys):
    for arguments, word in (
        (["--process", "sde"], "vp, ve, edm"),
        (["--r", "1"], "r: got 1"),
        (["--schedule", "x"], "'x'"),
    ):
        assert main(["strategies", "increments", *arguments]) == 2
        assert word in capsys.readouterr().err
    assert main(["strategies", "increments", "--process", "ve", "--schedule", "cosine"]) == 0
    assert "--schedule cosine is not used" in capsys.readouterr().err


def test_command_imports_nothing_heavier_than_numpy(main):
    code = "import sys; from kairos.cli import main; assert main(['strategies', 'increments']) == 0; "
    code += "heavy = {'torch', 'scipy', 'matplotlib', 'pandas'} & set(sys.modules); assert not heavy, heavy"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
