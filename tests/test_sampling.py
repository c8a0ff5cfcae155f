"""Tests of sampling: solvers against exact solutions, closed formulas and diffusers; noise, guidance, image grids."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kairos.data import image_grid
from kairos.library_components import LibraryComponent
from kairos.sampling import generate, sample
from kairos.sampling.conditions import load_conditions
from kairos.sampling.samples_file import hash_samples, write_samples
from kairos.sampling.settings import SOLVERS, resolve_solver
from kairos.sampling.time_grids import build_time_grid, spaced_timesteps
from kairos_timesteps import components
from kairos_timesteps.errors import KairosError
from marks import mark_long
from training_case import build_model, make_process

PROCESSES = {
    "discrete": {"name": "discrete", "timesteps": 1000, "schedule": "linear"},
    "edm": {"name": "edm", "sigma_data": 0.5, "time_scale": 1.0},
    "flow": {"name": "flow"},
    "shifted": {"name": "flow", "shift": 3.0},
    "vp": {"name": "vp"},
}
MEAN, STD = 0.7, 0.3


def process_of(name="discrete", prediction="epsilon"):
    return make_process(PROCESSES[name], prediction)


def optimal_network(process, mean=MEAN, std=STD):
    """Return the optimal network for x0 ~ N(mean, std²) and the prediction of a process."""

    def predict(x, t):
        a, s = (c.view(-1, 1, 1, 1) for c in process.coefficients(t))
        x = x.double()
        x0 = mean + std**2 * a / (a**2 * std**2 + s**2) * (x - a * mean)
        epsilon = (x - a * x0) / s
        return {"epsilon": epsilon, "x0": x0, "v": a * epsilon - s * x0, "flow": epsilon - x0}[process.prediction]

    return predict


def solver_settings(name, options, process_name="discrete"):
    """Return a solver with its options, with the spacing that an experiment on the process has."""
    process = LibraryComponent.select(components.PROCESSES, PROCESSES[process_name])
    return resolve_solver(SOLVERS.select({"name": name, **options}), process)


def run(scheduler, process, steps, predict, count=64, seed=0, noise=None):
    """Sample images 0 ... count - 1 of one pixel each; return x0, shape (count, 1, 1, 1)."""
    estimate = generate.DataPrediction(process, predict, scheduler.clip)
    noise = noise or generate.make_noise_source(seed, range(count), (1, 1, 1), "cpu")
    return scheduler.build(process, build_time_grid(process, steps, scheduler), estimate, noise)


# Exact cases


@pytest.mark.parametrize(
    ("name", "spacing", "least"),
    [
        ("edm", "karras", 1.9), ("edm", "uniform", 1.9), ("vp", "karras", 1.9), ("flow", "uniform", 1.9),
        ("shifted", "uniform", 1.8), ("discrete", "linspace", 1.9),
        # the last interval is an Euler step, and its noise level falls only with the root of the number of steps
        ("discrete", "trailing", 1.5), ("vp", "uniform", 1.5),
    ],
)  # fmt: skip
def test_the_error_falls_with_the_order_of_the_solver(name, spacing, least):
    """The exact solution for Gaussian data keeps the distance of x from the mean, in standard deviations, constant."""
    process = process_of(name)
    z = torch.linspace(-2, 2, 9, dtype=torch.float64).view(-1, 1, 1, 1)
    errors = {}
    for solver in ("euler", "heun"):
        for steps in (28, 56):
            scheduler = solver_settings(solver, {"spacing": spacing}, name)
            first = build_time_grid(process, steps, scheduler)[0]
            deviation = (first.sigma * z - first.alpha * MEAN) / math.hypot(first.alpha * STD, first.sigma)
            x0 = run(scheduler, process, steps, optimal_network(process), noise=lambda k: z)
            errors[solver, steps] = float((x0 - MEAN - STD * deviation).abs().max())
    euler, heun = (math.log2(errors[solver, 28] / errors[solver, 56]) for solver in ("euler", "heun"))
    assert 0.85 < euler < 1.1 and least < heun < 2.6, (euler, heun)
    assert errors["heun", 56] < errors["euler", 56] / 2


def test_karras_spacing_on_a_discrete_process_is_of_second_order():
    process, z = process_of(), torch.linspace(-2, 2, 9, dtype=torch.float64).view(-1, 1, 1, 1)
    errors = []
    for steps in (20, 40):
        scheduler = solver_settings("heun", {"spacing": "karras", "sigma_max": 80.0})
        x0 = run(scheduler, process, steps, optimal_network(process), noise=lambda k: z)
        sigma = build_time_grid(process, steps, scheduler)[0].sigma
        assert 79 < sigma < 81
        errors.append(float((x0 - MEAN - STD * (sigma * z - MEAN) / math.hypot(STD, sigma)).abs().max()))
    assert math.log2(errors[0] / errors[1]) > 1.9


@pytest.mark.parametrize("prediction", ["epsilon", "x0", "v"])
@pytest.mark.parametrize("name,options", [("ddim", {}), ("ddim", {"eta": 1.0}), ("ddpm", {}), ("heun", {})])
def test_a_gaussian_is_recovered(name, options, prediction):
    process = process_of(prediction=prediction)
    x0 = run(solver_settings(name, options), process, 400, optimal_network(process), 2000)
    assert abs(float(x0.mean()) - MEAN) < 0.02
    assert abs(float(x0.std()) - STD) < 0.02


@pytest.mark.parametrize("process_name", ["edm", "flow", "vp"])
@pytest.mark.parametrize(
    "name,options",
    [("ddim", {}), ("ddim", {"eta": 1.0}), ("ddpm", {}), ("ddpm", {"variance": "fixed_small"}), ("euler", {})],
)
def test_every_solver_samples_from_every_process(name, options, process_name):
    process = process_of(process_name)
    x0 = run(solver_settings(name, options, process_name), process, 400, optimal_network(process), 4000)
    assert abs(float(x0.mean()) - MEAN) < 0.02
    assert abs(float(x0.std()) - STD) < 0.02


@pytest.mark.parametrize(
    ("process_name", "solver"), mark_long(itertools.product(["edm", "vp"], ["euler", "heun"]), [("edm", "heun")])
)
def test_churn_keeps_the_distribution_and_changes_the_images(process_name, solver):
    process, images = process_of(process_name), []
    for churn in (0.0, 40.0):
        options = {"s_churn": churn, "s_min": 0.05, "s_max": 50.0, "s_noise": 1.0}
        scheduler = solver_settings(solver, options, process_name)
        images.append(run(scheduler, process, 200, optimal_network(process), 4000))
        assert abs(float(images[-1].mean()) - MEAN) < 0.02
        assert abs(float(images[-1].std()) - STD) < 0.02
    correlation = np.corrcoef(*(x0.flatten().numpy() for x0 in images))[0, 1]
    assert abs(correlation) < 0.5, "most of the noise comes from churn, not from the start"


def test_one_churned_step_equals_the_formula():
    process, z = process_of("edm"), [torch.full((1, 1, 1, 1), v, dtype=torch.float64) for v in (1.0, -0.5)]
    scheduler = solver_settings("euler", {"s_churn": 0.3, "s_noise": 1.003}, "edm")
    x0 = run(scheduler, process, 1, lambda x, t: 0.1 * x + t.view(-1, 1, 1, 1), noise=lambda k: z[k])
    hat = 80 * 1.3
    x = 80 + math.sqrt(hat**2 - 80**2) * 1.003 * -0.5
    assert float(x0) == pytest.approx(0.1 * x + hat, rel=1e-6)


def test_the_time_grid_of_edm_is_the_published_one():
    published = [80, 57.586, 40.786, 28.375, 19.352, 12.910, 8.4009, 5.3152, 3.2568, 1.9233, 1.0882, 0.58535, 0.29644]
    published += [0.13952, 0.05995, 0.02293, 0.00753, 0.002]
    grid = build_time_grid(process_of("edm"), 18, solver_settings("heun", {}, "edm"))
    assert [level.sigma for level in grid] == pytest.approx([*published, 0], rel=4e-4)
    assert [level.t for level in grid[:-1]] == pytest.approx([level.sigma for level in grid[:-1]], rel=1e-12)


@pytest.mark.parametrize("process_name", PROCESSES)
@pytest.mark.parametrize("solver", SOLVERS)
def test_number_of_network_evaluations(solver, process_name):
    from kairos.sampling.settings import SamplingConfig

    process, calls = process_of(process_name), []
    network = optimal_network(process)
    predict = lambda x, t: calls.append(t) or network(x, t)  # noqa: E731
    x0 = run(solver_settings(solver, {}, process_name), process, 18, predict, count=3)
    assert x0.isfinite().all() and len(calls) == SamplingConfig(scheduler=solver, steps=18).nfe
    assert len(calls) == {"heun": 35}.get(solver, 18)
    assert all(
        t.shape == (3,) and t.dtype == (torch.int64 if process_name == "discrete" else torch.float64) for t in calls
    )


def test_ddim_equals_its_closed_formula_for_a_single_image():
    # x0 = 0.5 always: eps is known exactly, and DDIM's x_t stays on the line through x0 and eps until it ends in x0
    process = process_of()
    scheduler = solver_settings("ddim", {"spacing": "linspace"})
    x0 = run(scheduler, process, 13, optimal_network(process, 0.5, 0.0), count=16)
    torch.testing.assert_close(x0, torch.full_like(x0, 0.5), atol=1e-4, rtol=0)


def step_deviation(variance, process, z):
    """Return the factor of the noise `z` in DDPM's step from t = 400, for x_t = 0.8 and a prediction of -0.3."""
    network_inputs = []
    schedule, t = process.schedule, 400
    scheduler = solver_settings("ddpm", {"variance": variance})
    steps = [level for level in build_time_grid(process, 1000, scheduler) if level.t in (t, t - 1)]
    first = 0.8 / (steps[0].scale * steps[0].sigma)
    estimate = generate.DataPrediction(
        process, lambda x, t: network_inputs.append(x) or torch.full_like(x, -0.3), False
    )
    scheduler.build(process, [*steps, build_time_grid(process, 1, scheduler)[-1]], estimate,
          lambda k: torch.full((1, 1, 1, 1), (first, z)[min(k, 1)], dtype=torch.float64))  # fmt: skip
    assert float(network_inputs[0]) == pytest.approx(0.8)  # the next input is x_{t-1}
    beta, alpha_bar = schedule.betas[t], schedule.alphas_cumprod[t]
    mean = (0.8 - beta / math.sqrt(1 - alpha_bar) * -0.3) / math.sqrt(1 - beta)
    return (float(network_inputs[1]) - mean) / z


def test_a_ddpm_step_equals_algorithm_2():
    process = process_of()
    assert step_deviation("fixed_large", process, 0.7) ** 2 == pytest.approx(process.schedule.betas[400], rel=1e-5)
    assert step_deviation("fixed_small", process, 0.7) ** 2 == pytest.approx(
        process.schedule.posterior_variance[400], rel=1e-5
    )


# Comparison with the schedulers of diffusers

NOISE = torch.randn(6, 8, 1, 1, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def sample_with_diffusers(scheduler, predict, network_times, x, timesteps=None, **options):
    """Return x0 of a scheduler of diffusers, which steps over its timesteps; the network receives `network_times`."""
    for index, t in zip(timesteps or scheduler.timesteps, network_times, strict=True):
        x_t = scheduler.scale_model_input(x, index) if hasattr(scheduler, "scale_model_input") else x
        output = predict(x_t, torch.as_tensor(t).expand(len(x)))
        (x, *_) = scheduler.step(output, index, x, return_dict=False, **options)
    return x


def sample_with_kairos(name, options, process_name, steps, predict):
    process, scheduler = process_of(process_name), solver_settings(name, options, process_name)
    x0 = run(scheduler, process, steps, predict, noise=lambda k: NOISE[k % 6])
    return x0, build_time_grid(process, steps, scheduler)[:-1]


@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize(
    "name,options",
    [
        ("ddpm", {}),
        ("ddpm", {"clip": True}),
        ("ddpm", {"variance": "fixed_small"}),
        ("ddim", {}),
        ("ddim", {"eta": 1.0}),
        ("ddim", {"eta": 0.5, "clip": True}),
    ],
)
def test_equals_diffusers_on_the_respaced_process(monkeypatch, name, options, spacing):
    """The schedulers of diffusers run over the visited timesteps alone; over all timesteps their spacing differs."""
    import diffusers.schedulers.scheduling_ddim as diffusers_ddim
    import diffusers.schedulers.scheduling_ddpm as diffusers_ddpm

    noise_indices = iter(range(1, 100))
    for module in (diffusers_ddim, diffusers_ddpm):
        monkeypatch.setattr(module, "randn_tensor", lambda *a, **k: NOISE[next(noise_indices) % 6])
    process = process_of()
    predict = optimal_network(process, 0.9, 0.5)
    x0, visited = sample_with_kairos(name, {**options, "spacing": spacing}, "discrete", 61, predict)
    alphas = process.schedule.alphas_cumprod[[level.t for level in visited]][::-1]
    shared = {
        "num_train_timesteps": 61, "trained_betas": 1 - alphas / np.concatenate([[1.0], alphas[:-1]]),
        "clip_sample": options.get("clip", False), "timestep_spacing": "leading", "steps_offset": 0,
    }  # fmt: skip
    if name == "ddpm":
        variance = options.get("variance", "fixed_large")
        scheduler, step = diffusers_ddpm.DDPMScheduler(**shared, variance_type=variance), {}
    else:
        scheduler = diffusers_ddim.DDIMScheduler(**shared, set_alpha_to_one=True)
        step = {"eta": options.get("eta", 0.0), "use_clipped_model_output": options.get("clip", False)}
    scheduler.set_timesteps(61)
    start = visited[0].scale * visited[0].sigma * NOISE[0]
    expected = sample_with_diffusers(scheduler, predict, [level.t for level in visited], start, **step)
    print("difference", name, options, spacing, float((x0 - expected).abs().max()))
    torch.testing.assert_close(x0, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("spacing", ["leading", "trailing"])
def test_equals_diffusers_where_steps_divide_timesteps(spacing):
    from diffusers import DDIMScheduler

    process = process_of()
    predict = optimal_network(process, 0.2, 0.5)
    x0, visited = sample_with_kairos("ddim", {"spacing": spacing}, "discrete", 25, predict)
    scheduler = DDIMScheduler(1000, timestep_spacing=spacing, clip_sample=False, trained_betas=process.schedule.betas)
    scheduler.set_timesteps(25)
    timesteps = scheduler.timesteps.tolist()
    assert [level.t for level in visited] == timesteps
    start = visited[0].scale * visited[0].sigma * NOISE[0]
    torch.testing.assert_close(x0, sample_with_diffusers(scheduler, predict, timesteps, start), atol=2e-4, rtol=0)


@pytest.mark.parametrize("solver", ["euler", "heun"])
def test_equals_diffusers_euler_and_heun_on_a_discrete_process(solver):
    """With 28 steps, linspace's timesteps are integers, so Heun of diffusers does not interpolate."""
    from diffusers import EulerDiscreteScheduler, HeunDiscreteScheduler

    process = process_of()
    predict = optimal_network(process, 0.2, 0.5)
    x0, visited = sample_with_kairos(solver, {"spacing": "linspace"}, "discrete", 28, predict)
    scheduler_class = {"euler": EulerDiscreteScheduler, "heun": HeunDiscreteScheduler}[solver]
    scheduler = scheduler_class(1000, timestep_spacing="linspace", trained_betas=process.schedule.betas)
    scheduler.set_timesteps(28)
    timesteps = scheduler.timesteps.long().tolist()
    assert sorted(set(timesteps)) == sorted(level.t for level in visited)
    expected = sample_with_diffusers(scheduler, predict, timesteps, visited[0].sigma * NOISE[0])
    print("difference", solver, float((x0 - expected).abs().max()))
    torch.testing.assert_close(x0, expected.double(), atol=1e-4, rtol=0)


def test_equals_diffusers_edm_euler():
    from diffusers import EDMEulerScheduler

    process = process_of("edm")
    network = lambda x, t: torch.tanh(x + t.view(-1, 1, 1, 1)) - 0.2 * x  # noqa: E731
    predict = lambda x, t: process.predict(network, x, t)  # noqa: E731
    x0, visited = sample_with_kairos("euler", {}, "edm", 18, predict)
    scheduler = EDMEulerScheduler()
    scheduler.set_timesteps(18)
    c_noise = [math.log(level.sigma) / 4 for level in visited]
    expected = sample_with_diffusers(scheduler, network, c_noise, 80 * NOISE[0], list(scheduler.timesteps))
    print("difference edm", float((x0 - expected).abs().max()))
    torch.testing.assert_close(x0, expected.double(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["flow", "shifted"])
def test_equals_diffusers_flow_match_euler(name):
    from diffusers import FlowMatchEulerDiscreteScheduler

    process = process_of(name)
    predict = optimal_network(process, 0.2, 0.5)
    x0, visited = sample_with_kairos("euler", {}, name, 28, predict)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=process.shift)
    scheduler.set_timesteps(sigmas=(np.arange(28, 0, -1) / 28).tolist())
    expected = sample_with_diffusers(scheduler, predict, [level.t for level in visited], NOISE[0])
    print("difference flow", float((x0 - expected).abs().max()))
    torch.testing.assert_close(x0, expected.double(), atol=1e-4, rtol=0)


def test_spacings_equal_hand_computed_timesteps():
    assert spaced_timesteps("leading", 4, 1000).tolist() == [750, 500, 250, 0]
    assert spaced_timesteps("trailing", 4, 1000).tolist() == [999, 749, 499, 249]
    assert spaced_timesteps("linspace", 4, 1000).tolist() == [999, 666, 333, 0]


@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize("timesteps", [7, 61, 1000])
def test_a_spacing_visits_each_timestep_once_for_every_number_of_steps(spacing, timesteps):
    for steps in range(1, timesteps + 1):
        visited = spaced_timesteps(spacing, steps, timesteps)
        assert len(set(visited.tolist())) == steps
        assert visited.min() >= 0 and visited.max() < timesteps
        assert (np.diff(visited) < 0).all()


@pytest.mark.parametrize("name", ["ddim", "ddpm", "euler", "heun"])
@pytest.mark.parametrize("process_name", ["discrete", "edm", "flow"])
def test_images_are_clipped_only_if_the_solver_clips(name, process_name):
    process = process_of(process_name)
    predict = optimal_network(process, 3.0, 0.1)
    plain, clipped = (solver_settings(name, {"clip": clip}, process_name) for clip in (False, True))
    assert float(run(plain, process, 50, predict, 16).mean()) == pytest.approx(3.0, abs=0.2)
    assert float(run(clipped, process, 50, predict, 16).max()) <= 1.0 + 1e-6


def small_dit(conditions=None):
    torch.manual_seed(0)
    options = {"name": "dit", "patch": 1, "width": 32, "depth": 2, "heads": 2, "conditions": sorted(conditions or {})}
    model = build_model(options, (4, 4, 4), conditions or {}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # with the zeros of adaLN-zero the output would be zero
    return model


def sample_all(model, batch_size, num, scheduler="ddpm", process_name="discrete", seed=3, precision="fp32", **options):
    process, scheduler = process_of(process_name), solver_settings(scheduler, options, process_name)
    batches = []
    with torch.inference_mode():
        for indices, kept in generate.iterate_batches(range(num), batch_size):
            predict = generate.build_guided_predictor(process, model, {}, {}, generate.Guidance())
            estimate = generate.DataPrediction(process, predict, False, precision)
            noise = generate.make_noise_source(seed, indices, (4, 4, 4), "cpu")
            grid = build_time_grid(process, 5, scheduler)
            batches.append(scheduler.build(process, grid, estimate, noise)[:kept])
    return torch.cat(batches)


@pytest.mark.parametrize(
    "scheduler,process_name,options",
    mark_long(
        [
            ("ddpm", "discrete", {}),
            ("heun", "edm", {"s_churn": 2.0}),
            ("ddim", "vp", {"eta": 0.5}),
            ("euler", "flow", {}),
        ],
        [("ddpm", "discrete", {})],
    ),
)
def test_images_do_not_depend_on_the_batch_size(scheduler, process_name, options):
    torch.set_num_threads(1)
    model, shared = small_dit(), (scheduler, process_name)
    images = {size: sample_all(model, size, 70, *shared, **options) for size in (16, 33, 70, 128)}
    for size, result in images.items():
        assert torch.equal(result, images[70]), size
    # below SMALLEST_BATCH the network's results may differ in the last bits
    torch.testing.assert_close(sample_all(model, 3, 70, *shared, **options), images[70], atol=1e-4, rtol=1e-5)
    fewer = sample_all(model, 128, 5, *shared, **options)
    assert torch.equal(fewer, images[70][:5]), "an image depends on its index, not on the number of images"
    assert not torch.equal(sample_all(model, 70, 70, *shared, seed=4, **options), images[70])
    assert len({row.numpy().tobytes() for row in images[70]}) == 70, "every image has its noise"


@pytest.mark.parametrize("process_name", ["discrete", "edm", "flow"])
def test_the_precision_applies_to_the_network_alone(process_name):
    model = small_dit()
    single, tensor, half = (
        sample_all(model, 16, 16, "heun", process_name, precision=precision) for precision in ("fp32", "tf32", "bf16")
    )
    assert torch.equal(single, tensor), "on a CPU there is no tf32"
    assert half.dtype == single.dtype == torch.float64 and not torch.equal(single, half)
    assert float((single - half).abs().max()) < 0.05 * float(single.abs().max())
    assert not torch.backends.cuda.matmul.allow_tf32 and not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("process_name", ["discrete", "edm", "flow"])
def test_guidance_extrapolates_from_the_null_condition(process_name):
    description = {"class": {"kind": "class", "num_classes": 3}}
    model, process = small_dit(description), process_of(process_name)
    x = torch.randn(6, 4, 4, 4)
    labels = {"class": torch.arange(6) % 3}
    t = process.times(torch.full((6,), 0.5, dtype=torch.float64))
    with torch.inference_mode():
        conditional = process.predict(model, x, t, labels)
        null = process.predict(model, x, t, {"class": torch.full((6,), 3)})
        for scale in (0.0, 1.0, 2.5):
            output = generate.build_guided_predictor(process, model, labels, description, generate.Guidance(scale))(
                x, t
            )
            torch.testing.assert_close(output, null + scale * (conditional - null), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(conditional, null)


def test_balanced_classes_repeat_in_order():
    description = {"class": {"kind": "class", "num_classes": 3}}
    assert load_conditions(["class"], description, Path("absent"))(range(4, 9))["class"].tolist() == [1, 2, 0, 1, 2]


def test_small_images_are_enlarged_in_the_image_grid(tmp_path):
    images = np.zeros((10, 8, 8, 1), np.uint8)
    images[1] = 200
    image_grid.write_image_grid(tmp_path / "grid.png", images)
    picture = np.asarray(Image.open(tmp_path / "grid.png"))
    assert picture.shape == (3 * 50 - 2, 4 * 50 - 2)
    assert picture[10, 10] == 0 and picture[10, 60] == 200 and picture[0, 48] == 255
    assert image_grid.tile_images(np.zeros((4, 64, 64, 3), np.uint8)).shape == (130, 130, 3)


def test_a_samples_file_is_reproducible_and_damaged_files_are_rejected(tmp_path):
    images = np.arange(2 * 4 * 4 * 1, dtype=np.uint8).reshape(2, 4, 4, 1)
    sample.write_samples(tmp_path / "a.npz", images, {"seed": 1})
    first = (tmp_path / "a.npz").read_bytes()
    read = sample.open_samples(tmp_path / "a.npz")
    assert np.array_equal(read.images[:], images) and read.protocol == {"seed": 1}
    sample.write_samples(tmp_path / "a.npz", images, {"seed": 1})
    assert (tmp_path / "a.npz").read_bytes() == first
    (tmp_path / "b.npz").write_bytes(first[:50])
    np.savez(tmp_path / "c.npz", images=images.astype(float))
    for name in ("b.npz", "c.npz", "missing.npz"):
        with pytest.raises(KairosError, match=name):
            sample.open_samples(tmp_path / name)


def test_sampling_without_a_snapshot_or_with_two_outputs_is_rejected(tmp_path, capsys):
    from kairos.cli import main

    arguments = ["sample", "--snapshot", str(tmp_path), "--out", str(tmp_path / "x.npz"), "--num", "4"]
    assert main(arguments) == 1
    assert "snapshot.json" in capsys.readouterr().err
    assert main([*arguments, "--out", str(tmp_path / "y.npz")]) == 2
    assert "--out" in capsys.readouterr().err
    assert not (tmp_path / "x.npz").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-size", "0"], "--batch-size: got 0, allowed: greater than or equal to 1"),
        (["--grid-images", "401"], "--grid-images: got 401, allowed: less than or equal to 400"),
        (["--guidance-scale", "-1"], "--guidance-scale: got -1.0, allowed: greater than or equal to 0"),
        (
            ["--scheduler", "{name: ddim, eta: 2}"],
            "--scheduler.eta: got 2, allowed: less than or equal to 1",
        ),
    ],
)
def test_an_invalid_option_of_sample_is_reported_with_its_name(options, message, capsys):
    from kairos.cli import main

    assert main(["sample", "--snapshot", "m", "--out", "x.npz", "--num", "4", *options]) == 2
    assert message in capsys.readouterr().err


def test_option_device_replaces_the_device_of_the_training_run(tmp_path, monkeypatch, capsys):
    from kairos.cli import main
    from kairos.evaluation import evaluate

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    record = {"config": {"training": {"threads": 1, "device": "cuda", "deterministic": True}}}
    with pytest.raises(KairosError, match=r"training\.device of the snapshot \(--device replaces it\): got 'cuda'"):
        sample.set_up_device(record)
    assert sample.set_up_device(record, "auto") == sample.set_up_device(record, "cpu") == torch.device("cpu")
    with pytest.raises(KairosError, match=r"^--device: got 'cuda:1', but no usable GPU is here"):
        sample.set_up_device(record, "cuda:1")

    # the commands pass the option
    devices = []
    monkeypatch.setattr(sample, "run", lambda jobs, request: devices.append(request.device))
    monkeypatch.setattr(evaluate, "run", lambda jobs, reference, **options: devices.append(options["device"]))
    for arguments in (
        ["sample", "--snapshot", "m", "--out", "x.npz", "--num", "4"],
        ["evaluate", "--samples", "x.npz", "--out", "x.json", "--reference", "r"],
    ):
        assert main([*arguments, "--device", "cuda:1"]) == main(arguments) == 0
        assert main([*arguments, "--device", "tpu"]) == 2
        assert "--device: got 'tpu', allowed: auto, cpu, cuda, cuda:N" in capsys.readouterr().err
    assert devices == ["cuda:1", None] * 2


def test_the_hash_of_samples_is_that_of_their_arrays_and_of_the_pixels_of_their_picture(tmp_path):
    samples, picture = tmp_path / "samples.npz", tmp_path / "samples.png"

    def hash_of(pixel: int, seed: int, level: int = 6) -> str:
        images = np.full((2, 4, 4, 1), pixel, np.uint8)
        write_samples(samples, images, {"seed": seed})
        Image.fromarray(images[0, ..., 0]).save(picture, compress_level=level)
        return hash_samples(samples, picture)

    first = hash_of(7, seed=0)
    assert hash_of(7, seed=0, level=0) == first  # other bytes of equal pixels
    assert len({first, hash_of(8, seed=0), hash_of(7, seed=1)}) == 3
    write_samples(samples, np.full((2, 4, 4, 1), 7, np.uint8), {"seed": 0})
    Image.new("L", (4, 4), 8).save(picture)
    assert hash_samples(samples, picture) != first  # another picture of equal samples
