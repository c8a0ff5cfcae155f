"""Schedulers of diffusers, noise schedules and numbers as processes: accepted and rejected values."""

import types

import numpy as np
import pytest
import torch
from torch import nn

import kairos_timesteps
from kairos_timesteps.components import WEIGHTINGS
from kairos_timesteps.coordinates import RandomCoordinates
from kairos_timesteps.diffusion.adapters import as_process
from kairos_timesteps.diffusion.schedule import NoiseSchedule, make_schedule
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.meter import Meter


@pytest.fixture(scope="module")
def diffusers():
    return pytest.importorskip("diffusers")


def random_images(count=200):
    """Return images and noise (count, 1, 2, 2)."""
    random = torch.Generator().manual_seed(0)
    return torch.randn(count, 1, 2, 2, generator=random), torch.randn(count, 1, 2, 2, generator=random)


@pytest.mark.parametrize("scheduler", ["DDPMScheduler", "DDIMScheduler"])
@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("betas", ["linear", "scaled_linear", "squaredcos_cap_v2", "trained", "zero"])
def test_schedulers_of_diffusers_become_equal_processes(diffusers, scheduler, prediction, betas):
    options = {"beta_schedule": betas} if betas not in ("trained", "zero") else {}
    if betas == "trained":
        options = {"trained_betas": np.linspace(0.01, 0.3, 37) ** 1.5, "num_train_timesteps": 37}
    if betas == "zero":
        options = {"rescale_betas_zero_snr": True}
    noise_scheduler = getattr(diffusers, scheduler)(prediction_type=prediction, **options)
    process = kairos_timesteps.Strategy("uniform", noise_scheduler).process
    assert process.prediction == {"epsilon": "epsilon", "sample": "x0", "v_prediction": "v"}[prediction]
    assert process.schedule.timesteps == noise_scheduler.config.num_train_timesteps
    x0, noise = random_images()
    t = torch.arange(len(x0)) * process.schedule.timesteps // len(x0)
    t[-1] = process.schedule.timesteps - 1
    atol = 1e-3 if betas == "zero" else 1e-5  # half of a signal-to-noise ratio of 1e-9 stands for 0
    torch.testing.assert_close(
        process.noised(x0, noise, t), noise_scheduler.add_noise(x0, noise, t), rtol=1e-5, atol=atol
    )
    target = {"epsilon": noise, "sample": x0, "v_prediction": noise_scheduler.get_velocity(x0, noise, t)}[prediction]
    torch.testing.assert_close(process.target(x0, noise, t), target, rtol=1e-5, atol=atol)
    for weighting in sorted(set(WEIGHTINGS) - {"edm2"}):
        assert np.isfinite(kairos_timesteps.Strategy(weighting, noise_scheduler).table()["w"]).all(), weighting


def test_a_linear_scheduler_has_the_tau_and_the_weights_of_the_linear_schedule(diffusers):
    by_scheduler = kairos_timesteps.Strategy("speed+change_aware", diffusers.DDPMScheduler(), sampler={"r": 5})
    by_name = kairos_timesteps.Strategy("speed+change_aware", "linear", sampler={"r": 5})
    for strategy in (by_scheduler, by_name):
        falls = np.diff(strategy.table()["p"]) < -1e-6
        assert np.flatnonzero(falls).tolist() == [397]  # tau = 398
    for column in ("p", "w"):
        np.testing.assert_allclose(by_scheduler.table()[column], by_name.table()[column], rtol=1e-5)
    c = kairos_timesteps.Strategy("vlb", diffusers.DDPMScheduler()).table()["w"]
    np.testing.assert_allclose(c, make_schedule().vlb, rtol=1e-4)  # from a float32 alpha-bar it would be off by 1e-3
    for other in ("scaled_linear", "squaredcos_cap_v2"):
        assert as_process(diffusers.DDPMScheduler(beta_schedule=other)).schedule.name == "custom"


@pytest.mark.parametrize("attribute", ["alphas_cumprod", "betas"])
def test_a_scheduler_in_float64_is_not_modified_and_shares_no_memory(diffusers, attribute):
    zero_terminal_snr = attribute == "alphas_cumprod"
    scheduler = diffusers.DDPMScheduler(num_train_timesteps=10, rescale_betas_zero_snr=zero_terminal_snr)
    values = getattr(scheduler, attribute).double()
    if zero_terminal_snr:
        values[-1] = 0
    setattr(scheduler, attribute, values)
    before = values.clone()
    process = as_process(scheduler)
    assert torch.equal(values, before)
    betas = process.schedule.betas.copy()
    values.fill_(0.5)  # later changes to the scheduler do not reach the process
    np.testing.assert_array_equal(process.schedule.betas, betas)


def test_numbers_in_float64_are_not_modified_and_share_no_memory():
    for values in (np.linspace(0.9, 0.1, 10), torch.linspace(0.9, 0.1, 10, dtype=torch.float64)):
        process = as_process(values)
        betas = process.schedule.betas.copy()
        values[:] = 0.5
        np.testing.assert_array_equal(process.schedule.betas, betas)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_the_edm_scheduler_of_diffusers_becomes_an_equal_process(diffusers, prediction):
    scheduler = diffusers.EDMEulerScheduler(sigma_min=0.01, sigma_max=50, sigma_data=0.7, prediction_type=prediction)
    process = as_process(scheduler)
    assert isinstance(process, kairos_timesteps.Edm) and process.sigma_data == 0.7
    ends = process.times(torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert ends.tolist() == pytest.approx([0.01, 50])
    x, output = random_images(1)
    sigma = torch.tensor([3.0], dtype=torch.float64)
    calls = []
    denoised = process.predict(lambda scaled, time: calls.append((scaled, time)) or output, x, sigma)
    torch.testing.assert_close(calls[0][0], scheduler.precondition_inputs(x, 3.0))
    assert calls[0][1].item() == pytest.approx(float(scheduler.precondition_noise(torch.tensor(3.0))))
    torch.testing.assert_close(denoised, scheduler.precondition_outputs(x, output, 3.0))


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_the_flow_matching_scheduler_of_diffusers_becomes_an_equal_process(diffusers, shift):
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    process = as_process(scheduler)
    assert isinstance(process, kairos_timesteps.Flow)
    k = torch.arange(1, 1000, dtype=torch.float64)
    torch.testing.assert_close(
        process.times(k / 1000).float(), scheduler.sigmas[:1000].flip(0)[:999], rtol=1e-5, atol=1e-6
    )
    x0, noise = random_images(3)
    position = torch.tensor([100, 500, 900])
    mixed = scheduler.scale_noise(x0, scheduler.timesteps[position], noise)
    t = scheduler.sigmas[position].double()
    torch.testing.assert_close(process.noised(x0, noise, t), mixed)
    times = []
    process.predict(lambda x, time: times.append(time) or x, mixed, t)
    torch.testing.assert_close(times[0], scheduler.timesteps[position])  # the times of diffusers' models
    dynamic = as_process(diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True))
    assert dynamic.shift == 1  # diffusers' training scripts do not apply dynamic shifts


@pytest.mark.parametrize("name", ["UniPCMultistepScheduler", "DPMSolverMultistepScheduler", "DEISMultistepScheduler"])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_a_solver_of_diffusers_with_flow_sigmas_is_one_of_flow_matching(diffusers, name, shift):
    scheduler = getattr(diffusers, name)(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
    process = as_process(scheduler)
    assert isinstance(process, kairos_timesteps.Flow) and process.shift == shift
    scheduler.set_timesteps(20)
    x0, noise = random_images(5)
    position = torch.tensor([0, 5, 10, 15, 19])
    t = scheduler.sigmas[position].double()
    mixed = scheduler.add_noise(x0, noise, scheduler.timesteps[position])
    torch.testing.assert_close(process.noised(x0, noise, t), mixed, atol=2e-3, rtol=0)
    times = []
    process.predict(lambda x, time: times.append(time) or x, mixed, t)
    torch.testing.assert_close(times[0], scheduler.timesteps[position].float(), atol=1.0, rtol=0)


def test_predictions_that_contradict_are_rejected(diffusers):
    ddpm, flow = diffusers.DDPMScheduler, diffusers.FlowMatchEulerDiscreteScheduler
    for process in (ddpm(), "flow", "edm", flow(), diffusers.EDMEulerScheduler(), kairos_timesteps.Flow()):
        with pytest.raises(ConfigError, match=r"prediction: got 'v', allowed: '(epsilon|flow|x0)', which the process"):
            kairos_timesteps.Strategy("uniform+min_snr", process, prediction="v")
    for process, prediction in ((ddpm(prediction_type="v_prediction"), "v"), ("flow", "flow"), ("edm", "x0")):
        assert as_process(process, prediction=prediction).prediction == prediction
    assert as_process("vp", prediction="v").prediction == "v"
    unknown = [
        diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction"),
        diffusers.UniPCMultistepScheduler(prediction_type="epsilon", use_flow_sigmas=True),
        types.SimpleNamespace(config=types.SimpleNamespace(prediction_type="noise"), alphas_cumprod=[0.9, 0.5]),
    ]
    for scheduler in unknown:
        with pytest.raises(ConfigError, match=r"prediction_type of the scheduler: got '.*', allowed"):
            as_process(scheduler)


def test_a_change_of_alpha_bar_at_little_noise_counts(diffusers):
    scheduler = diffusers.DDPMScheduler()
    scheduler.alphas_cumprod[0] = 1 - 2 * (1 - scheduler.alphas_cumprod[0])  # half of the SNR, a change of 1e-4
    snr = as_process(scheduler).schedule.snr[0]
    assert snr == pytest.approx(as_process("linear").schedule.snr[0] / 2, rel=0.01)


@pytest.mark.parametrize("rescale", [False, True])
def test_a_schedulers_alpha_bar_counts_where_its_betas_do_not_give_it(diffusers, rescale):
    shifted = diffusers.CogVideoXDPMScheduler(rescale_betas_zero_snr=rescale)
    by_user = diffusers.DDPMScheduler()
    by_user.alphas_cumprod = by_user.alphas_cumprod / (3 - 2 * by_user.alphas_cumprod)
    for scheduler in (shifted, by_user):
        alphas_cumprod = as_process(scheduler).schedule.alphas_cumprod
        np.testing.assert_allclose(alphas_cumprod[:-1], scheduler.alphas_cumprod[:-1].double(), rtol=1e-6)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("first", [1e-8, 1e-6, 1e-4])
def test_exact_betas_count_where_alpha_bar_is_only_rounded(diffusers, kind, first):
    scheduler = diffusers.DDPMScheduler(beta_start=first)
    scheduler.alphas_cumprod = scheduler.alphas_cumprod.to(kind)
    np.testing.assert_array_equal(as_process(scheduler).schedule.betas, scheduler.betas.double())


def test_alpha_bar_of_any_memory_layout_is_read_and_rounded_values_are_named():
    alphas_cumprod = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))
    flipped = np.ascontiguousarray(alphas_cumprod[::-1])[::-1]
    np.testing.assert_allclose(as_process(flipped).schedule.alphas_cumprod, alphas_cumprod)
    with pytest.raises(ConfigError, match=r"alphas_cumprod: got .* at 0 and .* at 1, allowed: .*float32"):
        as_process(torch.tensor(alphas_cumprod).bfloat16())


def test_processes_schedules_and_numbers_are_used_unchanged():
    process = kairos_timesteps.Flow()
    assert as_process(process) is process
    schedule = make_schedule("cosine", 30)
    assert as_process(schedule, prediction="v").schedule is schedule
    for values in (
        schedule.alphas_cumprod,
        schedule.alphas_cumprod.tolist(),
        torch.from_numpy(schedule.alphas_cumprod),
    ):
        discrete = as_process(values, prediction="x0")
        assert discrete.prediction == "x0" and discrete.schedule.timesteps == 30
        np.testing.assert_allclose(discrete.schedule.alphas_cumprod, schedule.alphas_cumprod, rtol=1e-9)
    parameter = nn.Parameter(torch.from_numpy(schedule.alphas_cumprod).float())
    np.testing.assert_allclose(as_process(parameter).schedule.alphas_cumprod, schedule.alphas_cumprod, rtol=1e-5)
    assert as_process(torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)).schedule.name == "linear"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("linaer", "schedule: got 'linaer', allowed: linear, cosine, quadratic"),
        (object(), "process: got object, allowed: a process, a NoiseSchedule, a scheduler of diffusers"),
        (["a", "b"], "process: got list"),
        ([0.1, 0.5, 0.9], "alphas_cumprod: got 0.1 at 0 and 0.5 at 1.*not betas.* decreasing"),
        ([0.9, 0.5, 0.0], "zero terminal signal-to-noise ratio must end above 0"),
        (torch.zeros(3, 3), "alphas_cumprod: got shape"),
        ([0.9, float("nan"), 0.1], "alphas_cumprod"),
    ],
)
def test_a_value_that_is_no_process_is_rejected(value, message):
    with pytest.raises(ConfigError, match=message):
        as_process(value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: as_process("linear", prediction="eps"), "prediction: got 'eps', allowed: epsilon, x0, v"),
        (lambda: kairos_timesteps.Edm(sigma_min=1, sigma_max=0.5), "sigma_min and sigma_max: got 1.0 and 0.5"),
        (lambda: kairos_timesteps.Edm(sigma_data=0), "process edm.sigma_data: got 0, allowed: number or null > 0"),
        (lambda: kairos_timesteps.Flow(shift=0), "process flow.shift: got 0, allowed: number > 0"),
    ],
)
def test_parameters_of_processes_are_checked(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_meter_accepts_the_outputs_of_diffusers_models():
    class Output:
        def __init__(self, sample):
            self.sample = sample

    x0 = torch.randn(5, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    fractions = torch.full((5,), 0.5, dtype=torch.float64)
    networks = (lambda x, t: 2 * x, lambda x, t: Output(2 * x))
    meters = [Meter(as_process("cosine"), network, x0, RandomCoordinates()) for network in networks]
    plain, wrapped = (meter.errors(torch.arange(5), fractions, "noise") for meter in meters)
    assert torch.equal(plain, wrapped) and plain.shape == (5,)


def test_a_schedule_can_be_built_from_betas_or_alphas_cumprod():
    betas = np.array([0.1, 0.2, 0.3])
    np.testing.assert_allclose(NoiseSchedule(betas).alphas_cumprod, [0.9, 0.72, 0.504])
    np.testing.assert_allclose(NoiseSchedule.of_alphas_cumprod(np.array([0.9, 0.72, 0.504])).betas, betas)


@pytest.mark.parametrize("values", [[0.9], [1.0, 0.5], [0.9, 0.0], [0.5, 0.5], [0.5, 0.6], [0.9, np.nan]])
def test_a_schedule_takes_two_or_more_numbers_that_fall_within_0_and_1(values):
    assert NoiseSchedule.of_alphas_cumprod(np.array([0.9, 0.1])).timesteps == 2
    with pytest.raises(ConfigError, match="alphas_cumprod"):
        NoiseSchedule.of_alphas_cumprod(np.array(values))


@pytest.mark.parametrize(
    "scheduler", ["EulerDiscreteScheduler", "DPMSolverMultistepScheduler", "UniPCMultistepScheduler", "DDIMScheduler"]
)
@pytest.mark.parametrize("betas", ["linear", "scaled_linear"])
def test_schedulers_of_zero_terminal_snr_have_finite_weights(diffusers, scheduler, betas):
    options = {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction"}
    built = getattr(diffusers, scheduler)(beta_schedule=betas, **options)
    process = as_process(built)
    snr = process.schedule.snr
    assert 0 < snr[-1] < snr[-2] and np.isfinite(np.log(snr)).all()
    np.testing.assert_allclose(process.schedule.alphas_cumprod[:-1], built.alphas_cumprod[:-1], rtol=1e-5)
    for name in ("auto", "uniform+vlb", "uniform+edm2", "uniform+sigmoid", "info_noise"):
        assert np.isfinite(kairos_timesteps.Strategy(name, built).table()["effective"]).all()
