"""Sampling: the schemes against closed formulas and against diffusers, one generator per image, guidance, the grid."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from kairos import models
from kairos.diffusion.processes import build_process
from kairos.errors import KairosError
from kairos.sampling import draw, grid, sample
from kairos.sampling.drawn_conditions import conditions_of
from kairos.sampling.registries import SCHEDULERS, SPACINGS
from kairos.sampling.schedulers import respaced_betas, spaced_timesteps


def process(prediction="epsilon", timesteps=1000, schedule="linear"):
    return build_process(
        {"process": {"name": "discrete", "timesteps": timesteps, "schedule": schedule}, "prediction": prediction}
    )


def gaussian_network(diffusion, mean, std):
    """The best network for x0 ~ N(mean, std²), whatever it predicts."""

    def network(x, t):
        alpha = diffusion.schedule.alphas_cumprod[t]
        x0 = mean + std**2 * math.sqrt(alpha) / (alpha * std**2 + 1 - alpha) * (x - math.sqrt(alpha) * mean)
        epsilon = (x - math.sqrt(alpha) * x0) / math.sqrt(1 - alpha)
        v = math.sqrt(alpha) * epsilon - math.sqrt(1 - alpha) * x0
        return {"epsilon": epsilon, "x0": x0, "v": v}[diffusion.prediction]

    return network


def run(name, options, diffusion, steps, network, count=64, seed=0):
    scheme = SCHEDULERS.build(name, options, diffusion, steps)
    noise, generators = draw.starting_noise(seed, range(count), (1, 1, 1), "cpu")
    return scheme(network, noise, generators)


@pytest.mark.parametrize("prediction", ["epsilon", "x0", "v"])
@pytest.mark.parametrize("name,options", [("ddim", {}), ("ddim", {"eta": 1.0}), ("ddpm", {})])
def test_recovers_a_gaussian(name, options, prediction):
    x0 = run(name, options, process(prediction), 400, gaussian_network(process(prediction), 0.7, 0.3), 2000)
    assert abs(float(x0.mean()) - 0.7) < 0.02
    assert abs(float(x0.std()) - 0.3) < 0.02


def test_ddim_is_the_closed_formula_of_a_point():
    # x0 = 0.5 always: eps is known exactly, and DDIM's x_t stays on the line through x0 and eps until it ends in x0
    diffusion = process()
    x0 = run("ddim", {"spacing": "linspace"}, diffusion, 13, gaussian_network(diffusion, 0.5, 0.0), count=16)
    torch.testing.assert_close(x0, torch.full_like(x0, 0.5), atol=1e-4, rtol=0)


def test_ddpm_step_is_algorithm_2():
    diffusion = process()
    scheme = SCHEDULERS.build("ddpm", {"variance": "fixed_large"}, diffusion, 1000)
    x = torch.full((1, 1, 1, 1), 0.8, dtype=torch.float64)
    output = torch.full_like(x, -0.3)
    t, generator = 400, torch.Generator().manual_seed(1)
    (result, *_) = scheme.scheduler.step(output, t, x, generator=[generator], return_dict=False)
    beta, alpha_bar = diffusion.schedule.betas[t], diffusion.schedule.alphas_cumprod[t]
    z = torch.randn((1, 1, 1, 1), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mean = (0.8 - beta / math.sqrt(1 - alpha_bar) * -0.3) / math.sqrt(1 - beta)
    torch.testing.assert_close(result, mean + math.sqrt(beta) * z, atol=1e-6, rtol=0)


def test_variance_option_reaches_the_scheduler():
    values = {
        v: float(SCHEDULERS.build("ddpm", {"variance": v}, process(), 1000).scheduler._get_variance(1))
        for v in ("fixed_large", "fixed_small")
    }
    schedule = process().schedule
    assert values["fixed_large"] == pytest.approx(schedule.betas[1], rel=1e-3)
    assert values["fixed_small"] == pytest.approx(schedule.posterior_variance[1], rel=1e-3)


@pytest.mark.parametrize("spacing", ["leading", "trailing"])
def test_equals_diffusers_where_steps_divide_timesteps(spacing):
    from diffusers import DDIMScheduler

    diffusion = process()
    network = gaussian_network(diffusion, 0.2, 0.5)
    theirs = DDIMScheduler(1000, timestep_spacing=spacing, clip_sample=False, trained_betas=diffusion.schedule.betas)
    theirs.set_timesteps(25)
    noise, generators = draw.starting_noise(0, range(8), (1, 1, 1), "cpu")
    x = noise
    for t in theirs.timesteps.tolist():
        x = theirs.step(network(x, t), t, x).prev_sample
    scheme = SCHEDULERS.build("ddim", {"spacing": spacing}, diffusion, 25)
    assert list(scheme.timesteps) == theirs.timesteps.tolist()
    torch.testing.assert_close(scheme(network, noise, generators), x, atol=2e-4, rtol=0)


def test_spacings_by_hand():
    assert spaced_timesteps("leading", 4, 1000).tolist() == [750, 500, 250, 0]
    assert spaced_timesteps("trailing", 4, 1000).tolist() == [999, 749, 499, 249]
    assert spaced_timesteps("linspace", 4, 1000).tolist() == [999, 666, 333, 0]


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("timesteps", [7, 61, 1000])
def test_spacing_visits_as_many_timesteps_as_asked(spacing, timesteps):
    for steps in range(1, timesteps + 1):
        visited = spaced_timesteps(spacing, steps, timesteps)
        assert len(set(visited.tolist())) == steps
        assert visited.min() >= 0 and visited.max() < timesteps
        assert (np.diff(visited) < 0).all()


def test_respaced_process_has_the_same_noise_levels():
    alphas_cumprod = process().schedule.alphas_cumprod
    visited = spaced_timesteps("trailing", 61, 1000)
    betas = respaced_betas(alphas_cumprod, visited)
    np.testing.assert_allclose(np.cumprod(1 - betas), alphas_cumprod[visited[::-1]], rtol=1e-12)


@pytest.mark.parametrize("name", ["ddim", "ddpm"])
def test_clipping_is_off_unless_asked(name):
    diffusion = process()
    network = gaussian_network(diffusion, 3.0, 0.1)
    assert float(run(name, {}, diffusion, 50, network, 16).mean()) == pytest.approx(3.0, abs=0.2)
    assert float(run(name, {"clip": True}, diffusion, 50, network, 16).max()) <= 1.0 + 1e-6


def small_dit(conditions=None):
    torch.manual_seed(0)
    options = {"name": "dit", "patch": 1, "width": 32, "depth": 2, "heads": 2, "conditions": sorted(conditions or {})}
    model = models.build(options, (4, 4, 4), conditions or {}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # adaLN-zero starts at zero: no network yet
    return model


def draw_all(model, batch_size, num, scheduler="ddpm", seed=3, conditions=None, scale=1.0):
    descriptions = conditions or {}
    scheme = SCHEDULERS.build(scheduler, {}, process(), 5)
    parts = []
    with torch.inference_mode():
        for indices, kept in draw.batches(num, batch_size):
            told = conditions_of(indices, list(descriptions), descriptions, None)
            network = draw.guided(model, told, descriptions, scale)
            parts.append(scheme(network, *draw.starting_noise(seed, indices, (4, 4, 4), "cpu"))[:kept])
    return torch.cat(parts)


def test_images_do_not_depend_on_the_batch_size():
    torch.set_num_threads(1)
    model = small_dit()
    images = {size: draw_all(model, size, 70) for size in (16, 33, 70, 128)}
    for size, result in images.items():
        assert torch.equal(result, images[70]), size
    # below SMALLEST_BATCH the arithmetic of the network may differ in the last bits, no more
    torch.testing.assert_close(draw_all(model, 3, 70), images[70], atol=1e-4, rtol=1e-5)
    assert torch.equal(draw_all(model, 128, 5), images[70][:5]), "an image depends on its index, not on the number"
    assert not torch.equal(draw_all(model, 70, 70, seed=4), images[70])
    assert len({row.numpy().tobytes() for row in images[70]}) == 70, "every image has noise of its own"


def test_guidance():
    description = {"class": {"kind": "class", "num_classes": 3}}
    model = small_dit(description)
    x = torch.randn(6, 4, 4, 4)
    labels = {"class": torch.arange(6) % 3}
    t = torch.full((6,), 500)
    with torch.inference_mode():
        conditional, null = model(x, t, labels), model(x, t, {"class": torch.full((6,), 3)})
        for scale in (0.0, 1.0, 2.5):
            output = draw.guided(model, labels, description, scale)(x, 500)
            torch.testing.assert_close(output, null + scale * (conditional - null), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(conditional, null)


def test_classes_go_round():
    description = {"class": {"kind": "class", "num_classes": 3}}
    assert conditions_of(range(4, 9), ["class"], description, None)["class"].tolist() == [1, 2, 0, 1, 2]


def test_grid_is_large_enough_to_see(tmp_path):
    images = np.zeros((10, 8, 8, 1), np.uint8)
    images[1] = 200
    grid.write_grid(tmp_path / "grid.png", images)
    picture = np.asarray(Image.open(tmp_path / "grid.png"))
    assert picture.shape == (3 * 50 - 2, 4 * 50 - 2)
    assert picture[10, 10] == 0 and picture[10, 60] == 200 and picture[0, 48] == 255
    assert grid.grid(np.zeros((4, 64, 64, 3), np.uint8)).shape == (130, 130, 3)


def test_samples_file(tmp_path):
    images = np.arange(2 * 4 * 4 * 1, dtype=np.uint8).reshape(2, 4, 4, 1)
    sample.write_samples(tmp_path / "a.npz", images, {"seed": 1})
    first = (tmp_path / "a.npz").read_bytes()
    read, protocol = sample.read_samples(tmp_path / "a.npz")
    assert np.array_equal(read, images) and protocol == {"seed": 1}
    sample.write_samples(tmp_path / "a.npz", images, {"seed": 1})
    assert (tmp_path / "a.npz").read_bytes() == first
    (tmp_path / "b.npz").write_bytes(first[:50])
    np.savez(tmp_path / "c.npz", images=images.astype(float))
    for name in ("b.npz", "c.npz", "missing.npz"):
        with pytest.raises(KairosError, match=name):
            sample.read_samples(tmp_path / name)


def test_no_milestone(tmp_path, capsys):
    from kairos.cli import main

    arguments = ["sample", "--milestone", str(tmp_path), "--out", str(tmp_path / "x.npz"), "--num", "4"]
    assert main(arguments) == 1
    assert "milestone.json" in capsys.readouterr().err
    assert main([*arguments, "--out", str(tmp_path / "y.npz")]) == 2
    assert "--out" in capsys.readouterr().err
    assert not (tmp_path / "x.npz").exists()
