"""Published sampling: learned variance, timesteps, DPM-Solver, Heun through a schedule, and varying guidance."""

import json
import math

import numpy as np
import pytest
import torch

from kairos.cli import main
from kairos.config import validate
from kairos.sampling import generate
from kairos.sampling.samples_file import open_samples
from kairos.sampling.settings import SOLVERS, SamplingConfig
from kairos.sampling.solvers import orders
from kairos.sampling.time_grids import build_time_grid, spaced_timesteps
from kairos_timesteps.errors import ConfigError
from test_sampling import MEAN, STD, optimal_network, process_of, run, small_dit, solver_settings
from training_case import build_model, experiment, make_process, train, write_experiment

LEARNED = {"name": "discrete", "timesteps": 1000, "schedule": "linear", "variance": "learned_range"}


def make_learned_process(**options):
    return make_process({**LEARNED, **options}, "epsilon")


def make_learned_ddpm(options):
    return SOLVERS.select({"name": "ddpm", "variance": "learned_range", **options})


# Learned variance


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(("spacing", "steps"), [("linspace", 250), ("linspace", 50), ("trailing", 61)])
def test_ddpm_with_a_learned_variance_equals_diffusers_step_by_step(monkeypatch, spacing, steps, clip):
    import diffusers.schedulers.scheduling_ddpm as diffusers_ddpm

    process, random = make_learned_process(), torch.Generator().manual_seed(0)
    noise = torch.randn(steps + 1, 3, 2, 4, 4, generator=random, dtype=torch.float64)
    step_numbers = []
    monkeypatch.setattr(diffusers_ddpm, "randn_tensor", lambda *a, **k: noise[step_numbers[-1]])

    def predict(x, t):
        """Return arbitrary smooth outputs; v is also outside of [-1, 1]."""
        return torch.cat([torch.sin(x + t.view(-1, 1, 1, 1) / 100), 1.5 * torch.cos(3 * x)], 1)

    visited, seen = [], []
    scheduler = make_learned_ddpm({"spacing": spacing, "clip": clip})
    estimate = generate.DataPrediction(process, lambda x, t: seen.append((x, t)) or predict(x, t), clip)
    grid = build_time_grid(process, steps, scheduler)
    x0 = scheduler.build(process, grid, estimate, lambda k: noise[k])
    visited = [int(t[0]) for _, t in seen]
    kept = process.schedule.alphas_cumprod[visited][::-1]
    reference = diffusers_ddpm.DDPMScheduler(
        steps, trained_betas=1 - kept / np.concatenate([[1.0], kept[:-1]]), variance_type="learned_range",
        clip_sample=clip, timestep_spacing="leading",
    )  # fmt: skip
    reference.set_timesteps(steps)
    largest = 0.0
    after = [x for x, _ in seen[1:]] + [x0.float()]
    for k, (index, (x, t), expected) in enumerate(zip(reference.timesteps, seen, after, strict=True), 1):
        step_numbers.append(k)
        (result, *_) = reference.step(predict(x, t), index, x, return_dict=False)
        largest = max(largest, float(((result - expected).abs() / (1 + expected.abs())).max()))
    print("largest difference of a step", largest)
    assert largest < 2e-5


def test_sampling_options_that_the_process_lacks_are_rejected():
    for process, scheduler, word in (
        ({}, {"name": "ddpm", "variance": "learned_range"}, "variance fixed_large: fixed_large, fixed_small"),
        ({}, {"name": "ddim", "offset": 1}, "spacing auto: 0"),
        ({"name": "vp"}, {"name": "ddim", "end": "first"}, "process vp: image"),
    ):
        values = {"experiment": "x", "methods": {"a": {}}, "sampling": {"scheduler": scheduler}}
        with pytest.raises(ConfigError, match=f"sampling.scheduler.*: got .*, allowed with {word}"):
            validate({**values, "diffusion": {"process": process or "discrete"}})
    values["sampling"] = {"scheduler": {"name": "ddim", "spacing": "leading", "offset": 1}, "steps": 1000}
    with pytest.raises(ConfigError, match="offset: got 1 with all 1000 timesteps as steps, allowed: 0"):
        validate(values)


@pytest.mark.parametrize(
    ("process", "options", "message"),
    [
        ("edm", {"sigma_min": 200.0}, "sigma_min: got 200.0, allowed: less than 80, the largest"),
        ("edm", {"sigma_max": 0.001}, "sigma_max: got 0.001, allowed: greater than 0.002, the smallest"),
        ("vp", {"sigma_min": 200.0}, "sigma_min: got 200.0, allowed: less than"),
        ("discrete", {"spacing": "karras", "sigma_min": 200.0}, "sigma_min: got 200.0, allowed: less than 157"),
        ("discrete", {"spacing": "karras", "sigma_max": 0.001}, "sigma_max: got 0.001, allowed: greater than 0.01"),
    ],
)
def test_noise_levels_outside_the_process_are_rejected(process, options, message):
    values = {"experiment": "x", "methods": {"a": {}}, "diffusion": {"process": process}}
    with pytest.raises(ConfigError, match=rf"sampling\.scheduler\.{message}"):
        validate({**values, "sampling": {"steps": 5, "scheduler": {"name": "heun", **options}}})
    # a range wider than the process's is narrowed
    wide = {"name": "heun", "spacing": "karras", "sigma_min": 1e-4, "sigma_max": 1e4}
    validate({**values, "sampling": {"steps": 5, "scheduler": wide}})


# Timesteps


def test_respaced_timesteps_are_the_published_ones():
    visited = spaced_timesteps("linspace", 250, 1000)[::-1].tolist()
    assert visited[:6] == [0, 4, 8, 12, 16, 20] and visited[-4:] == [987, 991, 995, 999]
    fifty = spaced_timesteps("linspace", 50, 1000)[::-1].tolist()
    assert fifty[:4] == [0, 20, 41, 61] and fifty[-2:] == [979, 999]
    assert spaced_timesteps("leading", 50, 1000)[::-1].tolist() == list(range(0, 1000, 20))


def test_latent_diffusions_ddim_equals_diffusers():
    """Timesteps 1, 6 ... 996, ending at alpha-bar_0, as diffusers with offset 1 and set_alpha_to_one False."""
    from diffusers import DDIMScheduler

    process = make_process(
        {"name": "discrete", "schedule": "scaled_linear", "beta_start": 0.0015, "beta_end": 0.0195}, "epsilon"
    )
    scheduler = solver_settings("ddim", {"spacing": "leading", "offset": 1, "end": "first"})
    predict = optimal_network(process, 0.2, 0.5)
    z = torch.randn(8, 1, 1, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    grid = build_time_grid(process, 200, scheduler)
    assert [point.t for point in grid] == [*range(996, 0, -5), 0]
    x0 = run(scheduler, process, 200, predict, noise=lambda k: z)
    reference = DDIMScheduler(
        1000, trained_betas=process.schedule.betas, steps_offset=1, set_alpha_to_one=False,
        timestep_spacing="leading", clip_sample=False,
    )  # fmt: skip
    reference.set_timesteps(200)
    x = grid[0].scale * grid[0].sigma * z
    for t in reference.timesteps:
        x = reference.step(predict(x, t.expand(8)), t, x).prev_sample
    print("difference", float((x0 - x).abs().max()))
    torch.testing.assert_close(x0, x, atol=1e-4, rtol=0)


def test_heun_uses_noise_levels_of_the_cosine_schedule():
    """MinSNR's sampling grid uses the nearest noise level of the schedule, at most 80, without churn."""
    process = make_process({"name": "discrete", "schedule": "cosine"}, "epsilon")
    scheduler = solver_settings("heun", {"spacing": "karras", "sigma_min": 0.002, "sigma_max": 80.0})
    grid = build_time_grid(process, 50, scheduler)
    levels = process.schedule.snr**-0.5
    least, share = levels[0], np.linspace(0, 1, 50)
    expected = ((1 - share) * 80 ** (1 / 7) + share * least ** (1 / 7)) ** 7
    nearest = [levels[np.abs(levels - sigma).argmin()] for sigma in expected]
    assert [point.sigma for point in grid] == pytest.approx([*nearest, 0.0])
    assert grid[0].sigma < 81 < levels.max() and grid[-2].t == 0
    assert scheduler.s_churn == 0 and SamplingConfig(scheduler="heun", steps=50).nfe == 99


# DPM-Solver


@pytest.mark.parametrize(
    ("intervals", "to_image", "expected"),
    [
        (1, True, [1]), (2, True, [1, 1]), (3, True, [2, 1]), (4, True, [3, 1]), (5, True, [3, 1, 1]),
        (5, False, [3, 2]), (6, False, [3, 2, 1]), (50, False, [3] * 16 + [2]), (50, True, [3] * 16 + [1, 1]),
    ],
)  # fmt: skip
def test_orders_of_dpm_solver_have_the_published_sequence(intervals, to_image, expected):
    assert orders(intervals, to_image) == expected and sum(expected) == intervals


@pytest.mark.parametrize("name", ["discrete", "vp", "edm", "flow"])
def test_dpm_solver_solves_the_ode_of_a_gaussian(name):
    """x keeps its distance from the mean in standard deviations; DDIM, an Euler step, has a larger error."""
    process = process_of(name)
    z = torch.linspace(-2, 2, 9, dtype=torch.float64).view(-1, 1, 1, 1)
    errors = {}
    for solver, steps in (("dpm_solver", 50), ("ddim", 50)):
        calls = []
        best = optimal_network(process)
        predict = lambda x, t: calls.append(t) or best(x, t)  # noqa: E731, B023
        scheduler = solver_settings(solver, {}, name)
        first = build_time_grid(process, steps, scheduler)[0]
        deviation = (first.sigma * z - first.alpha * MEAN) / math.hypot(first.alpha * STD, first.sigma)
        x0 = run(scheduler, process, steps, predict, noise=lambda k: z)
        assert len(calls) == steps
        errors[solver, steps] = float((x0 - MEAN - STD * deviation).abs().max())
    print(name, errors)
    # the last steps of a discrete process are uniform in time and wide in noise; the other grids are dense there
    assert errors["dpm_solver", 50] < errors["ddim", 50] / (2 if name == "discrete" else 10)


def test_dpm_solver_agrees_with_many_steps_of_ddim():
    """Both solve the process of U-ViT down to alpha-bar_0."""
    process = make_process({"name": "discrete", "schedule": "scaled_linear"}, "epsilon")
    z = torch.linspace(-2, 2, 9, dtype=torch.float64).view(-1, 1, 1, 1)
    samples = {}
    for solver, steps in (("dpm_solver", 50), ("dpm_solver", 200), ("ddim", 50), ("ddim", 200), ("ddim", 1000)):
        scheduler = solver_settings(solver, {"spacing": "trailing", "end": "first"})
        samples[solver, steps] = run(scheduler, process, steps, optimal_network(process), noise=lambda k: z)
    off = {key: float((x0 - samples["ddim", 1000]).abs().max()) for key, x0 in samples.items()}
    print(off)
    assert off["dpm_solver", 200] < 4e-3 < 2 * off["ddim", 200] and off["dpm_solver", 50] < off["ddim", 50] / 2.5


def test_the_error_of_dpm_solver_is_nearly_of_second_order():
    process = process_of("vp")
    z = torch.linspace(-2, 2, 9, dtype=torch.float64).view(-1, 1, 1, 1)
    errors = []
    for steps in (31, 61, 121):
        scheduler = solver_settings("dpm_solver", {"spacing": "karras"}, "vp")
        first = build_time_grid(process, steps, scheduler)[0]
        deviation = (first.sigma * z - first.alpha * MEAN) / math.hypot(first.alpha * STD, first.sigma)
        x0 = run(scheduler, process, steps, optimal_network(process), noise=lambda k: z)
        errors.append(float((x0 - MEAN - STD * deviation).abs().max()))
    print(errors)
    assert math.log2(errors[0] / errors[1]) > 1.8 and math.log2(errors[1] / errors[2]) > 1.8


def test_second_order_steps_equal_diffusers():
    """Compare one second-order group of two steps, whose intermediate time is on the solver time grid."""
    from diffusers import DPMSolverSinglestepScheduler

    process = process_of()
    grid = build_time_grid(process, 1000, solver_settings("dpm_solver", {}))
    points = [grid[300], grid[400], grid[500]]
    predict = lambda x, t: torch.sin(2 * x) + t.view(-1, 1, 1, 1) / 1000  # noqa: E731
    z = torch.linspace(-2, 2, 9, dtype=torch.float64).view(-1, 1, 1, 1)
    estimate = generate.DataPrediction(process, predict, False)
    end = points[-1]
    result = solver_settings("dpm_solver", {}).build(process, points, estimate, lambda k: z) * end.scale
    reference = DPMSolverSinglestepScheduler(
        1000, trained_betas=process.schedule.betas.tolist(), solver_order=2, algorithm_type="dpmsolver++",
        solver_type="midpoint", lower_order_final=False,
    )  # fmt: skip
    reference.set_timesteps(2)
    reference.timesteps = torch.tensor([point.t for point in points[:2]])
    reference.sigmas = torch.tensor([point.sigma for point in points], dtype=torch.float64)
    reference.order_list = [1, 2]
    x = z * points[0].sigma * points[0].scale
    for t in reference.timesteps:
        x = reference.step(predict(x, t.expand(9)), t, x).prev_sample
    print("difference", float((result - x).abs().max()))
    torch.testing.assert_close(result, x, atol=1e-5, rtol=0)


# Guidance

CLASSES = {"class": {"kind": "class", "num_classes": 3}}


def evaluate_guidance(process, model, guidance, t, x):
    """Return the guided, conditional and unconditional predictions, and the number of images evaluated for guidance."""
    labels, seen = {"class": torch.arange(len(x)) % 3}, []
    count_and_predict = lambda x, t, c: seen.append(len(x)) or model(x, t, c)  # noqa: E731
    with torch.inference_mode():
        result = generate.build_guided_predictor(
            process, count_and_predict, labels, CLASSES, generate.Guidance(**guidance)
        )(x, t)
        parts = [process.predict(model, x, t, c) for c in (labels, {"class": torch.full((len(x),), 3)})]
    return result, *parts, sum(seen)


def make_learned_dit():

    torch.manual_seed(0)
    options = {"name": "dit", "patch": 1, "width": 32, "depth": 2, "heads": 2, "conditions": ["class"]}
    model = build_model(options, (4, 4, 4), CLASSES, 8).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(("channels", "guided"), [(3, 3), (None, 4), (1, 1)])
def test_only_the_selected_channels_are_guided(channels, guided):
    process, x, t = make_learned_process(), torch.randn(6, 4, 4, 4), torch.full((6,), 400)
    result, c, u, _ = evaluate_guidance(process, make_learned_dit(), {"scale": 2.5, "channels": channels}, t, x)
    assert result.shape == (6, 8, 4, 4)
    torch.testing.assert_close(result[:, :guided], (u + 2.5 * (c - u))[:, :guided], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(result[:, guided:], c[:, guided:], atol=1e-6, rtol=1e-6)
    assert not torch.allclose(u, c)


def test_power_cosine_guidance_has_the_published_values():
    t = torch.tensor([0, 100, 250, 500, 750, 999])
    scales = generate.Guidance(3.8, power=4.0).scales(process_of(), t)
    weights = (scales - 1) / 2.8
    assert weights.tolist() == pytest.approx([1, 0.735491, 0.227338, 0.009607, 3.8e-5, 0], abs=1e-6)
    flow = generate.Guidance(3.8, power=4.0).scales(process_of("flow"), torch.tensor([0.1, 0.5], dtype=torch.float64))
    assert ((flow - 1) / 2.8).tolist() == pytest.approx([0.735491, 0.009607], abs=1e-6)
    process, x, t = process_of(), torch.randn(6, 4, 4, 4), torch.full((6,), 250)
    result, c, u, _ = evaluate_guidance(process, small_dit(CLASSES), {"scale": 3.8, "power": 4.0}, t, x)
    torch.testing.assert_close(result, u + (1 + 2.8 * 0.227338) * (c - u), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("process_name", ["discrete", "edm", "flow"])
def test_guidance_in_an_interval_of_noise_saves_evaluations(process_name):
    process, model, x = process_of(process_name), small_dit(CLASSES), torch.randn(6, 4, 4, 4)
    for fraction in (0.05, 0.5, 0.99):
        t = process.times(torch.full((6,), fraction, dtype=torch.float64))
        sigma = float(process.snr(t[:1])) ** -0.5
        for low, high in ((sigma / 2, sigma * 2), (sigma * 2, sigma * 3), (0.0, sigma / 2)):
            result, c, u, seen = evaluate_guidance(process, model, {"scale": 2.0, "interval": [low, high]}, t, x)
            inside = low <= sigma <= high
            torch.testing.assert_close(result, u + 2.0 * (c - u) if inside else c, atol=1e-5, rtol=1e-5)
            assert seen == (12 if inside else 6)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"guidance_power": 4.0}, r"sampling.guidance_power: got 4.0 with guidance_scale 1, .*allowed: null"),
        ({"guidance_channels": 3}, r"sampling.guidance_channels: got 3 with guidance_scale 1"),
        ({"guidance_scale": 2, "guidance_interval": [5.0, 0.1]}, r"guidance_interval: got \[5.0, 0.1\], allowed: 0 <"),
        ({"guidance_scale": 2, "guidance_interval": [5.0]}, r"guidance_interval: got \[5.0\], allowed: .*at least 2"),
        ({"guidance_scale": 2, "guidance_power": 0}, r"guidance_power: got 0, allowed: greater than 0"),
        ({"guidance_scale": 2, "guidance_channels": 0}, r"guidance_channels: got 0, allowed: greater than or equal"),
        ({"guidance_scale": 2, "guidance_channels": "3"}, r"guidance_channels: got '3', allowed: a valid integer"),
    ],
)  # fmt: skip
def test_invalid_guidance_is_rejected(sampling, message):
    values = {"experiment": "x", "methods": {"a": {}}, "sampling": sampling, "training": {"condition_dropout": 0.1}}
    with pytest.raises(ConfigError, match=message):
        validate({**values, "model": {"name": "dit", "conditions": ["class"]}})


def test_guidance_without_conditions_or_their_dropout_is_rejected_with_its_value():
    for model, allowed in (
        ({"name": "dit"}, "conditions"),
        ({"name": "dit", "conditions": ["class"]}, "training.*t 0"),
    ):
        values = {"experiment": "x", "methods": {"a": {}}, "model": model, "sampling": {"guidance_scale": 2.5}}
        with pytest.raises(
            ConfigError, match=rf"sampling\.guidance_scale: got 2.5, allowed: 1 for a model .*{allowed}"
        ):
            validate(values)


def test_sampling_jobs_get_the_guidance_of_the_experiment(tmp_path, monkeypatch):
    """Null settings are passed too, because the snapshot may contain other values."""
    seen = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kairos.sampling.sample.run", lambda jobs, request, finished: seen.append(request))
    for sampling in (
        {},
        {"guidance_scale": 3.8, "guidance_channels": 3, "guidance_power": 4.0, "guidance_interval": [1e-5, 5.0]},
    ):
        plain = experiment(
            model={"name": "dit", "patch": 2, "width": 16, "depth": 1, "heads": 2, "conditions": ["class"]},
            training__condition_dropout=0.1, sampling=sampling,
        )  # fmt: skip
        config = write_experiment(tmp_path / "x.yaml", plain)
        assert main(["sample", "--config", str(config), "--method", "uniform", "--seed", "0"]) == 0
        passed = {**seen[-1].overrides, "seed": seen[-1].seed}
        assert {**plain["sampling"], **passed} == plain["sampling"] and set(plain["sampling"]) - set(passed) == {
            "shards"
        }


def test_the_command_line_samples_with_a_learned_variance(tmp_path):
    from kairos.autoencoders.codec import load_codec
    from kairos.autoencoders.encode import encode
    from kairos.autoencoders.train_or_load import make_autoencoder
    from kairos.data.dataset import open_dataset
    from kairos.data.prepare import write_dataset
    from kairos.data.sources import open_source

    plain = experiment(
        {"speed": {"sampler": "speed"}}, training__condition_dropout=0.2, training__milestones=[4],
        model={"name": "dit", "patch": 2, "width": 16, "depth": 1, "heads": 2, "conditions": ["class"]},
        diffusion={"process": {**LEARNED, "timesteps": 100}, "losses": ["mse", "vb"]},
        sampling={"scheduler": {"name": "ddpm", "variance": "learned_range", "spacing": "linspace"}, "steps": 10,
                  "guidance_scale": 3.8, "guidance_channels": 3, "guidance_power": 4.0},
    )  # fmt: skip
    config = validate(plain)
    results = tmp_path / "results"
    write_dataset(config.dataset, open_source(config.dataset), results / "dataset")
    dataset = open_dataset(results / "dataset")
    make_autoencoder(config.autoencoder, dataset, results / "autoencoder", torch.device("cpu"), False)
    encode(dataset, load_codec(results / "autoencoder", "cpu"), results / "latents", False, 64)
    train(plain, "speed", 0, results / "methods" / "speed" / "seed0", results / "latents", [0, 4])
    snapshot = results / "methods" / "speed" / "seed0" / "snapshots" / "0000004"
    line = ["sample", "--snapshot", str(snapshot), "--num", "5", "--out"]
    channels = json.loads((snapshot / "snapshot.json").read_text())["shape"][0]
    assert main([*line, str(tmp_path / "a.npz"), "--guidance-channels", str(channels)]) == 0
    protocol = open_samples(tmp_path / "a.npz").protocol
    assert protocol["guidance_power"] == 4.0 and protocol["guidance_channels"] == channels
    assert protocol["guidance_interval"] is None and protocol["scheduler"]["variance"] == "learned_range"
    dpm = ["--scheduler", "{name: dpm_solver, end: first}", "--guidance-channels", "null", "--guidance-power", "null"]
    assert main([*line, str(tmp_path / "b.npz"), *dpm, "--guidance-interval", "[0.2, 5]"]) == 0
    protocol = open_samples(tmp_path / "b.npz").protocol
    assert protocol["guidance_interval"] == [0.2, 5] and protocol["guidance_channels"] is None
    assert main([*line, str(tmp_path / "c.npz"), "--guidance-channels", str(channels + 1)]) == 2


def test_solvers_without_variance_use_only_the_mean():
    process = make_learned_process()
    best = optimal_network(process)
    predict = lambda x, t: torch.cat([best(x, t), torch.full_like(x, 9.0).double()], 1)  # noqa: E731
    for name in ("ddim", "dpm_solver", "heun", "euler"):
        scheduler = solver_settings(name, {})
        expected = run(scheduler, process, 20, best, 8)
        assert torch.equal(run(scheduler, process, 20, predict, 8), expected), name
