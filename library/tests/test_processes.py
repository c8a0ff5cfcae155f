"""Forward processes: noised images, targets and weights agree for every parametrisation of the network's output."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import kairos_timesteps
from components_by_name import make_weighting
from kairos_timesteps.components import WEIGHTINGS
from kairos_timesteps.diffusion.adapters import as_process
from kairos_timesteps.diffusion.processes import Process
from kairos_timesteps.diffusion.schedule import PREDICTIONS, SCHEDULES, error_ratio, make_schedule
from kairos_timesteps.errors import ConfigError

DISCRETE = {f"{s}-{p}": (lambda s=s, p=p: as_process(s, 50, p)) for s in SCHEDULES for p in PREDICTIONS}
CONTINUOUS = {
    "edm": kairos_timesteps.Edm,
    "edm-1": lambda: kairos_timesteps.Edm(sigma_data=1.0),
    "flow": kairos_timesteps.Flow,
    "shift": lambda: kairos_timesteps.Flow(shift=3),
    "vp": kairos_timesteps.Vp,
    "vp-v": lambda: kairos_timesteps.Vp(prediction="v"),
}
RAW = {"linear", "power", "cosmap_weight", "bell", "table_weight", "robust"}  # on the error of the network's output
OF_SNR = sorted(
    set(WEIGHTINGS)
    - RAW
    - {"none", "vlb", "change_aware", "change_aware_official", "debiased", "edm2", "sigmoid", "auto", "coarse_to_fine"}
)


def batch(process, count=64, shape=(2, 3, 4), dtype=torch.float64):
    """Return images, noise, outputs and times."""
    random = torch.Generator().manual_seed(1)
    x0, noise, output = (torch.randn(count, *shape, generator=random, dtype=torch.float64).to(dtype) for _ in range(3))
    t = process.times(torch.rand(count, generator=random, dtype=torch.float64))
    return x0, noise, output, t


def mean_square(values):
    return values.double().flatten(1).square().mean(1)


def scales(process, t):
    """Return the coefficients of x0 and of the noise in x_t, computed from the signal-to-noise ratio alone."""
    snr = process.snr(t)
    if isinstance(process, kairos_timesteps.Edm):
        return torch.ones_like(snr), snr**-0.5
    if isinstance(process, kairos_timesteps.Flow):
        return snr**0.5 / (1 + snr**0.5), 1 / (1 + snr**0.5)
    return (snr / (1 + snr)) ** 0.5, (1 / (1 + snr)) ** 0.5


ALL = DISCRETE | CONTINUOUS


@pytest.mark.parametrize("name", ALL)
def test_noised_target_and_epsilon_agree(name):
    process = ALL[name]()
    x0, noise, _, t = batch(process)
    a, s = (value.view(-1, 1, 1, 1) for value in scales(process, t))
    x_t = process.noised(x0, noise, t)
    torch.testing.assert_close(x_t, a * x0 + s * noise, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(process.epsilon(process.target(x0, noise, t), x_t, t), noise, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", ALL)
def test_errors_of_predictions_convert_by_error_ratio(name):
    process = ALL[name]()
    x0, noise, output, t = batch(process)
    a, s = (value.view(-1, 1, 1, 1) for value in scales(process, t))
    x_t = process.noised(x0, noise, t)
    epsilon = process.epsilon(output, x_t, t)
    of_epsilon, of_x0 = mean_square(epsilon - noise), mean_square((x_t - s * epsilon) / a - x0)
    of_output = mean_square(output - process.target(x0, noise, t))
    snr = process.snr(t)
    torch.testing.assert_close(of_epsilon, snr * of_x0, rtol=1e-3, atol=1e-9)
    ratio = torch.from_numpy(error_ratio(snr.numpy(), process.prediction))
    torch.testing.assert_close(of_output, ratio * of_x0, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("weighting", OF_SNR)
@pytest.mark.parametrize("name", ALL)
def test_a_weighting_gives_equal_losses_for_every_prediction(name, weighting):
    process = ALL[name]()
    strategy = kairos_timesteps.Strategy(weighting, process)
    x0, noise, output, t = batch(process)
    x_t = process.noised(x0, noise, t)
    of_output = mean_square(output - process.target(x0, noise, t))
    of_epsilon = mean_square(process.epsilon(output, x_t, t) - noise)
    options = {"sigma_data": getattr(process, "sigma_data", 0.5)} if weighting == "edm" else {}
    stated = make_weighting({"name": weighting, **options}, make_schedule(), "epsilon")(process.snr(t).numpy())
    results = strategy.weighting.at(process, t).double() * of_output
    torch.testing.assert_close(results, torch.from_numpy(stated) * of_epsilon, rtol=1e-3, atol=1e-9)


def test_debiased_converts_between_predictions_except_v():
    snr = np.geomspace(1e-4, 1e4, 50)
    weight = {p: make_weighting({"name": "debiased"}, make_schedule(), p)(snr) for p in ("epsilon", "x0", "flow")}
    for prediction, values in weight.items():
        ratio = error_ratio(snr, "epsilon") / error_ratio(snr, prediction)
        np.testing.assert_allclose(values, weight["epsilon"] * ratio, rtol=1e-12)
    np.testing.assert_allclose(weight["epsilon"], np.minimum(snr, 1000) ** -0.5, rtol=1e-12)


FORMULAS = {
    "none": lambda snr: np.ones_like(snr),
    "p2": lambda snr: snr / (1 + snr),
    "min_snr": lambda snr: np.minimum(snr, 5),
    "soft_min_snr": lambda snr: 5 * snr / (snr + 5),
    "debiased": lambda snr: snr / np.sqrt(np.minimum(snr, 1000)),
    "edm": lambda snr: (1 / snr + 0.25) / (0.25 / snr),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_weights_at_continuous_times_equal_the_formula(name):
    on_x0 = FORMULAS[name]
    edm = kairos_timesteps.Strategy(name, kairos_timesteps.Edm()).draw(torch.zeros(1000, 1))
    np.testing.assert_allclose(edm.weights, on_x0(edm.t.numpy() ** -2.0), rtol=1e-6)
    flow = kairos_timesteps.Strategy(name, kairos_timesteps.Flow()).draw(torch.zeros(1000, 1))
    snr = ((1 - flow.t.numpy()) / flow.t.numpy()) ** 2
    wanted = on_x0(snr) / (1 if name == "none" else (1 + np.sqrt(snr)) ** 2)
    np.testing.assert_allclose(flow.weights, wanted, rtol=1e-6)


@pytest.mark.parametrize("sigma_data", [0.5, 1.0, 0.3])
def test_the_weight_of_edm_on_the_output_of_the_network_is_one(sigma_data):
    process = kairos_timesteps.Edm(sigma_data=sigma_data)
    x0, noise, output, t = batch(process)
    x_t = process.noised(x0, noise, t)
    denoised = process.predict(lambda x, time: output, x_t, t)
    zero = process.predict(lambda x, time: torch.zeros_like(output), x_t, t)
    c_out = ((denoised - zero) / output).flatten(1).mean(1)
    torch.testing.assert_close(c_out, t * sigma_data / (t**2 + sigma_data**2) ** 0.5)
    weights = kairos_timesteps.Strategy("edm", process).weighting.at(process, t)  # sigma_data comes from the process
    torch.testing.assert_close(c_out**2 * weights.double(), torch.ones_like(t), rtol=1e-5, atol=1e-5)


def test_edm_calls_the_network_with_unit_variance_and_a_quarter_of_ln_sigma():
    process, seen = kairos_timesteps.Edm(), []
    random = torch.Generator().manual_seed(0)
    t = torch.tensor([0.002, 0.5, 80.0], dtype=torch.float64)
    x0, noise = 0.5 * torch.randn(3, 1, 100, 100, generator=random), torch.randn(3, 1, 100, 100, generator=random)
    network = lambda x, time: seen.append((x, time)) or torch.zeros_like(x)  # noqa: E731
    denoised = process.predict(network, process.noised(x0, noise, t), t)
    assert seen[0][0].flatten(1).std(1) == pytest.approx([1, 1, 1], rel=0.02)
    assert seen[0][1] == pytest.approx((t.log() / 4).tolist())
    assert seen[0][1].dtype == torch.float32
    torch.testing.assert_close(denoised[0], x0[0], atol=0.02, rtol=0)  # almost clean: close to the input
    assert denoised[2].std() == pytest.approx(0.25 / 80, rel=0.05)  # almost pure noise: close to the mean


def kolmogorov_smirnov(values, cdf):
    from scipy.stats import kstest

    return kstest(np.asarray(values), cdf).pvalue


@pytest.mark.parametrize("points", ["random", "sobol"])
def test_edm_log_normal_is_normal_in_ln_sigma(points):
    from scipy.stats import norm

    draw = kairos_timesteps.Strategy("edm_log_normal", kairos_timesteps.Edm(), sampler={"points": points}).draw(
        torch.zeros(100_000, 1)
    )
    assert kolmogorov_smirnov(draw.t.log(), norm(-1.2, 1.2).cdf) > 0.01
    assert kolmogorov_smirnov(draw.t.log(), norm(-1.2, 1.25).cdf) < 1e-3  # the test detects a difference


def test_log_normal_on_a_flow_is_logit_normal_also_with_a_shift():
    from scipy.stats import norm

    draw = kairos_timesteps.Strategy("log_normal", kairos_timesteps.Flow(), sampler={"m": -0.5, "s": 0.8}).draw(
        torch.zeros(100_000, 1)
    )
    assert kolmogorov_smirnov(draw.t.logit(), norm(-0.5, 0.8).cdf) > 0.01
    assert kolmogorov_smirnov(draw.t.logit(), norm(-0.45, 0.8).cdf) < 1e-3
    draw = kairos_timesteps.Strategy("log_normal", kairos_timesteps.Flow(shift=3)).draw(torch.zeros(100_000, 1))
    assert kolmogorov_smirnov(draw.t.logit(), norm(math.log(3), 1).cdf) > 0.01  # SD3, section 5.3.2


def test_uniform_on_edm_is_even_in_ln_sigma_and_mode_on_a_flow_equals_that_of_sd3():
    t = kairos_timesteps.Strategy("uniform", kairos_timesteps.Edm()).draw(torch.zeros(100_000, 1)).t
    assert kolmogorov_smirnov((t.log() - math.log(0.002)) / math.log(80 / 0.002), "uniform") > 0.01
    t = kairos_timesteps.Strategy("mode", kairos_timesteps.Flow()).draw(torch.zeros(100_000, 1)).t.numpy()
    u = np.random.default_rng(0).random(100_000)
    from scipy.stats import ks_2samp

    assert ks_2samp(t, 1 - u - 1.29 * (np.cos(np.pi * u / 2) ** 2 - 1 + u)).pvalue > 0.01


# Types and shapes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["linear-epsilon", "cosine-v", "quadratic-x0", "edm", "flow"])
def test_half_precision_is_kept_and_accurate(name, dtype):
    process = ALL[name]()
    x0, noise, output, t = batch(process, dtype=dtype)
    wide = [value.double() for value in (x0, noise, output)]
    x_t, full = process.noised(x0, noise, t), process.noised(wide[0], wide[1], t)
    assert x_t.dtype == dtype
    precision = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(x_t.double(), full, rtol=4 * precision, atol=4 * precision)
    prediction = process.predict(lambda x, time: output.to(x.dtype), x_t, t)
    expected = process.predict(lambda x, time: wide[2], full, t)
    assert torch.isfinite(prediction).all()
    torch.testing.assert_close(prediction.double(), expected, rtol=8 * precision, atol=8 * precision)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("process", [kairos_timesteps.Flow(time_scale=1000), kairos_timesteps.Edm(), "vp"])
def test_times_are_not_rounded_to_the_type_of_the_latents(process, dtype):
    times = {}
    for kind in (torch.float32, dtype):
        seen = times.setdefault(kind, [])
        validation = kairos_timesteps.ValidationLoss(torch.randn(8, 2, 4, 4).to(kind), process, kind="middle8")
        validation(lambda x, t, seen=seen: seen.append(t) or torch.zeros_like(x))
    assert len(times[dtype]) > 0
    for wide, half in zip(times[torch.float32], times[dtype], strict=True):
        assert half.dtype == torch.float32 and torch.equal(half, wide)


@pytest.mark.parametrize("name", ["adaptive+min_snr", "gradient_norm", "loss_rms+edm2"])
@pytest.mark.parametrize("process", ["cosine", "edm", "flow"])
def test_a_strategy_measures_a_network_in_bfloat16(name, process):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x, t):
            assert x.dtype == torch.bfloat16
            return self.convolution(x) * (1 + 0 * t.to(x.dtype).view(-1, 1, 1, 1))

    network = Net().bfloat16()
    optimizer = torch.optim.SGD(network.parameters(), 0.01)
    options = {
        "adaptive": {"frequency": 1, "feature_timesteps": 8, "selected": 2},
        "gradient_norm": {"frequency": 1, "bins": 3},
    }
    strategy = kairos_timesteps.Strategy(
        name,
        ALL.get(process, lambda: process)(),
        timesteps=20,
        sampler=options.get(name.split("+")[0], {"start": 1, "frequency": 1}),
    )
    for step in range(5):
        x0 = torch.randn(6, 4, 5, 3, generator=torch.Generator().manual_seed(step)).bfloat16()
        draw = strategy.draw(x0)
        noise = torch.randn_like(x0)
        output = strategy.process.predict(network, strategy.process.noised(x0, noise, draw.t), draw.t)
        target = strategy.process.target(x0, noise, draw.t)
        loss = strategy.loss(draw, (output - target).square().mean((1, 2, 3)))
        optimizer.zero_grad()
        loss.backward()
        with strategy.observe(draw, network, optimizer):
            optimizer.step()
        assert loss.isfinite() and draw.weights.dtype == torch.float32
    assert strategy.sampler.updates > 0


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (4, 8, 8), (16,), (2, 3, 4, 5)])
@pytest.mark.parametrize("process", ["cosine", "edm", "flow"])
def test_processes_work_with_one_sample_of_any_shape(shape, process):
    built = as_process("cosine", 50, "v") if process == "cosine" else ALL[process]()
    strategy = kairos_timesteps.Strategy("speed+min_snr", built)
    x0 = torch.randn(1, *shape)
    draw = strategy.draw(x0)
    assert draw.t.shape == draw.weights.shape == draw.fractions.shape == (1,)
    x_t = built.noised(x0, torch.randn_like(x0), draw.t)
    assert x_t.shape == x0.shape and x_t.dtype == torch.float32
    error = (built.predict(lambda x, t: x, x_t, draw.t) - x0).double().square().flatten(1).mean(1)  # a float64 loss
    assert strategy.loss(draw, error).isfinite()
    with strategy.observe(draw):
        pass
    assert strategy.step == 1


def test_vp_has_the_integral_of_its_linear_beta():
    """The published beta runs from 0.1 to 20, so its integral up to t is 0.1 t + 9.95 t²."""
    t = torch.tensor([0.25, 0.5, 1.0], dtype=torch.float64)
    signal, noise = as_process("vp").coefficients(t)
    alphas_cumprod = torch.exp(-torch.tensor([0.646875, 2.5375, 10.05], dtype=torch.float64))
    torch.testing.assert_close(signal**2, alphas_cumprod)
    torch.testing.assert_close(noise**2, 1 - alphas_cumprod)


def test_the_name_of_a_users_class_does_not_decide_what_a_process_is():
    class Preconditioned(kairos_timesteps.Edm):
        pass

    class Linear(kairos_timesteps.Flow):
        pass

    class Cosine(Process):
        prediction = "flow"
        times, fractions = kairos_timesteps.Flow.times, kairos_timesteps.Flow.fractions
        coefficients, shift = kairos_timesteps.Flow.coefficients, 1.0

    for process, name in ((Preconditioned(), "edm"), (Linear(), "flow"), (Cosine(), "continuous")):
        assert process.schedule.name == name
        for strategy in ("speed_official", "speed_v1", "change_aware_official"):
            with pytest.raises(ConfigError, match=f"process: got {name}, allowed: discrete"):
                kairos_timesteps.Strategy(strategy, process)


def test_a_magnitude_of_speed_suppresses_the_noise_levels_above_it():
    """SpeeD without timesteps: 1/alpha-bar = 1 + sigma² exceeds r; the step multiplies the density of the process."""
    edm = kairos_timesteps.Edm()
    levels = edm.schedule.snr**-0.5
    assert levels.min() < 0.01 and levels.max() > 60
    base, r, k = kairos_timesteps.Strategy("edm_log_normal", edm), 10.0, 5.0
    noisy = levels > (r - 1) ** 0.5
    q = base.table()["p"]
    options = {"r": r, "k": k, "density": "edm_log_normal"}
    p = kairos_timesteps.Strategy("speed", edm, sampler=options).table()["p"]
    np.testing.assert_allclose(p, np.where(noisy, 1, k) * q / (q[noisy].sum() + k * q[~noisy].sum()), rtol=1e-6)
    assert p[noisy].sum() < q[noisy].sum() / 4
    # 0.7 of the levels, even in ln sigma, suppresses nothing that EDM trains: it multiplies the share of such levels
    plain = kairos_timesteps.Strategy("speed", edm).table()["p"]
    suppressed = np.arange(1000) >= 700
    assert plain[suppressed].sum() / q[suppressed].sum() == pytest.approx(3.5, abs=0.1)
    for process in ("cosine", kairos_timesteps.Flow(), edm):
        strategy = kairos_timesteps.Strategy("speed", process, sampler={"r": 138.6})
        falls = np.flatnonzero(np.diff(strategy.table()["p"]) < -1e-6)
        alphas_cumprod = strategy.process.schedule.alphas_cumprod
        assert len(falls) == 1 and alphas_cumprod[falls[0]] >= 1 / 138.6 > alphas_cumprod[falls[0] + 1]
    for density in (
        {"name": "uniform", "end": 100},
        {"name": "mixture", "per": "batch", "parts": [{"name": "uniform", "share": 1}]},
    ):
        with pytest.raises(ConfigError, match="density: got"):
            kairos_timesteps.Strategy("speed", "linear", sampler={"density": density})
