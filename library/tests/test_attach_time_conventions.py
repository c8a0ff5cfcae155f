"""attach: conventions of the trainer's time, and the check of its noised images."""

import logging

import pytest
import torch

import kairos_timesteps
from attached_training import CONVENTIONS, TinyTraining
from kairos_timesteps import Strategy, attach
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.time_convention import TimeConvention
from small_loop import IMAGES, TinyNetwork

SHIFTED = kairos_timesteps.Flow(shift=3.0, time_scale=1000.0)


def attach_and_draw(time, process="flow", name="log_normal", dtype=torch.float32):
    """Return an attached strategy, images, noise, and times that the strategy draws for the images."""
    timesteps = attach(name, process, torch.optim.SGD(TinyNetwork().parameters(), lr=0.1), time=time)
    x0 = torch.randn(16, 4, 8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    noise = torch.randn(16, 4, 8, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    return timesteps, x0, noise, timesteps(x0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trainer", CONVENTIONS)
@pytest.mark.parametrize("time", CONVENTIONS)
def test_a_wrong_convention_is_caught(time, trainer, dtype):
    timesteps, x0, noise, t = attach_and_draw(time, dtype=dtype)
    assert t.dtype == torch.float32
    x_t = CONVENTIONS[trainer](x0, noise, t.view(-1, 1, 1, 1)).to(dtype)
    if time == trainer:
        timesteps.check(x0, noise, x_t, t)
    else:
        with pytest.raises(ConfigError, match=rf"check: x_t: .*with time='{time}'; time='{trainer}' fits"):
            timesteps.check(x0, noise, x_t, t)


def test_conventions_of_flow_are_mirror_images():
    first, second = attach_and_draw("noise_is_one")[3], attach_and_draw("data_is_one")[3]
    torch.testing.assert_close(first, 1 - second)


def test_an_index_of_a_flow_matching_scheduler_selects_its_sigma():
    """Diffusers' scripts look up timesteps[index]: sigmas fall from 1, shift included."""
    sigmas = torch.linspace(1000, 1, 1000, dtype=torch.float64) / 1000
    sigmas = 3 * sigmas / (1 + 2 * sigmas)
    timesteps, x0, noise, index = attach_and_draw("index", SHIFTED)
    assert index.dtype == torch.int64
    continuous = attach_and_draw("noise_is_one", SHIFTED)[3]
    assert (sigmas[index] - continuous).abs().max() < 3.1e-3  # a cell is up to 3/1000 wide
    sigma = sigmas[index].float().view(-1, 1, 1, 1)
    timesteps.check(x0, noise, (1 - sigma) * x0 + sigma * noise, index)
    with pytest.raises(ConfigError, match="check: x_t"):
        timesteps.check(x0, noise, sigma * x0 + (1 - sigma) * noise, index)


def test_another_schedule_is_caught():
    timesteps, x0, noise, t = attach_and_draw(None, "scaled_linear", "uniform")
    for schedule, fits in (("scaled_linear", True), ("linear", False), ("cosine", False)):
        x_t = Strategy("uniform", schedule).process.noised(x0, noise, t)
        if fits:
            timesteps.check(x0, noise, x_t, t)
            timesteps.check(x0, noise, 3 * x_t, t)
        else:
            with pytest.raises(ConfigError, match="check: x_t: got ln SNR"):
                timesteps.check(x0, noise, x_t, t)


def test_other_images_are_caught():
    timesteps, x0, noise, t = attach_and_draw(None, "cosine", "uniform")
    with pytest.raises(ConfigError, match=r"check: x_t: got \d+%"):
        timesteps.check(x0.flip(0), noise, timesteps.strategy.process.noised(x0, noise, t), t)


@pytest.mark.parametrize(
    ("process", "time", "words"),
    [
        ("flow", None, r"time of process Flow: got None, allowed: noise_is_one \(kohya.*data_is_one \(SiT"),
        ("vp", None, "time of process Vp: got None, allowed: noise_is_one"),
        ("flow", "index", "time of process Flow: got 'index', allowed: noise_is_one"),
        ("linear", "noise_is_one", "time of process Discrete: got 'noise_is_one', allowed: index"),
        ("edm", "index", "time of process Edm: got 'index', allowed: sigma"),
    ],
)
def test_conventions_that_the_process_lacks_are_rejected(process, time, words):
    with pytest.raises(ConfigError, match=words):
        attach("uniform", process, torch.optim.SGD(TinyNetwork().parameters(), lr=0.1), time=time)


def test_the_time_convention_and_the_noise_levels_are_logged(caplog):
    with caplog.at_level(logging.INFO, "kairos_timesteps"):
        TinyTraining("log_normal+min_snr", "flow", time="data_is_one")
    first, second = (record.getMessage() for record in caplog.records)
    assert "t = 0.1 (data_is_one) is x_t = 0.1 x0 + 0.9 noise, ln SNR -4.39" in first
    normal = 1.2815515655446004  # 0.9 quantile; ln SNR of log_normal is -2 logit(t)
    low, high = (float(word) for word in second.split("ln SNR ")[1].split(",")[0].split(" to "))
    assert low == pytest.approx(-2 * normal, abs=0.02) and high == pytest.approx(2 * normal, abs=0.02)
    strategy = Strategy("log_normal+min_snr", "flow")
    table = strategy.table()
    assert float(second.rpartition("mean weight ")[2]) == pytest.approx((table["p"] * table["w"]).sum(), rel=1e-2)


def test_noise_levels_that_depend_on_context_are_logged_with_the_first_draw(caplog):
    with caplog.at_level(logging.INFO, "kairos_timesteps"):
        density = {"density": "log_normal", "law": "exponential"}
        training = TinyTraining("shift", "flow", time="noise_is_one", sampler=density)
        assert len(caplog.records) == 1
        training.timesteps(IMAGES, tokens=torch.full((8,), 4096))
        training.timesteps(IMAGES, tokens=4096)
    assert len(caplog.records) == 2 and "80 % of the draws" in caplog.records[1].getMessage()


@pytest.mark.parametrize("t", [torch.full((4,), 1000.0), torch.full((4,), -0.1), torch.rand(4, 3)])
def test_check_rejects_times_outside_the_convention(t):
    convention = TimeConvention(kairos_timesteps.Flow(), "noise_is_one")
    with pytest.raises(ConfigError, match="check: t"):
        convention.check(torch.randn(4, 3), torch.randn(4, 3), torch.randn(4, 3), t)
