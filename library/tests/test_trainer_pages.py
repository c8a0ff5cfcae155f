"""Code of the pages of trainers that are not run in tests: it runs with a small network and the trainer's x_t.

`test_trainer_replicas` executes further pages in replicas of the loops. The formulas of x_t are reimplemented from the
trainers' sources. No code of a trainer runs here.
"""

import os
import re
import sys
import types
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import kairos_timesteps
from kairos_timesteps.attached import Attached

PAGES = Path(__file__).parents[2] / "docs/trainers"
if not PAGES.exists():
    pytest.skip("the source distribution does not contain docs/", allow_module_level=True)
SECTIONS = ["Change", "Strategies", "Time", "Tested", "Limits"]
BATCH = 6


def blocks(page: str) -> list[str]:
    """Return the Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", (PAGES / f"{page}.md").read_text(encoding="utf-8"), re.DOTALL)


class TrainerVariables:
    """Network, optimizer, latents and noise, as local variables of a trainer."""

    def __init__(self, shape: tuple[int, ...] = (4, 8, 8)):
        torch.manual_seed(0)
        convolution = nn.Conv2d if len(shape) == 3 else nn.Conv3d
        self.network = convolution(shape[0], shape[0], 3, padding=1)
        self.optimizer = torch.optim.AdamW(self.network.parameters())
        self.latents, self.noise = torch.randn(2, BATCH, *shape)
        self.errors = (self.network(self.latents) - self.noise).square().flatten(1).mean(1)

    def run(self, page: str, *variables: dict[str, Any]) -> dict[str, Any]:
        """Run the blocks of a page, each with further variables, in one namespace."""
        names: dict[str, Any] = {"kairos_timesteps": kairos_timesteps, "torch": torch, "args": Namespace(seed=1)}
        code = blocks(page)
        assert len(code) == len(variables)
        for block, more in zip(code, variables):
            names.update(more)
            exec(compile(block, f"docs/trainers/{page}.md", "exec"), names)
        return names

    def step(self, timesteps: Attached, t: Tensor, noised: Callable[..., Tensor], times: Tensor | None = None) -> None:
        """Check the convention of time, and take a step whose loss the strategy observes."""
        times = t if times is None else times
        x_t = noised(self.latents, self.noise, times.double().view(-1, *[1] * (self.latents.ndim - 1)))
        timesteps.check(self.latents, self.noise, x_t, times)
        loss = timesteps.loss((self.network(x_t.float()) - self.noise).square())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        timesteps.state_dict()
        assert timesteps.strategy.step == 1


def noise_is_one(x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    return (1 - t) * x0 + t * noise


def test_the_page_of_kohya_works():
    case = TrainerVariables()
    alphas = torch.from_numpy(kairos_timesteps.make_schedule("scaled_linear").alphas_cumprod).float()
    self = Namespace(get_noise_scheduler=lambda args, device: Namespace(alphas_cumprod=alphas))
    accelerator = Namespace(device="cpu", register_for_checkpointing=lambda state: None)
    weights = torch.tensor([1.0, 1.0, 0.5, 1.0, 0.5, 1.0])
    names = case.run(
        "kohya",
        {"self": self, "optimizer": case.optimizer, "network": case.network, "accelerator": accelerator}
        | {"args": Namespace(v_parameterization=False, seed=1)},
        {"latents": case.latents, "draw": lambda latents: self.timesteps(latents)},
        {"loss": case.errors, "batch": {"loss_weights": weights}},
    )
    t = names["timesteps"]
    assert t.dtype == torch.int64 and t.min() >= 0 and t.max() < 1000

    def noised(x0, noise, index):
        alpha = alphas.double()[index.long()]
        return alpha.sqrt() * x0 + (1 - alpha).sqrt() * noise

    case.step(self.timesteps, t, noised)


@pytest.mark.parametrize("shape", [(4, 8, 8), (4, 2, 8, 8)])
def test_the_page_of_musubi_works(shape, monkeypatch, tmp_path):
    class QwenImageNetworkTrainer:
        """Trainer that calls its methods in the order of musubi."""

        def train(self, case):
            args = Namespace(seed=1, resume=None, output_dir=str(tmp_path))
            self.on_train_start(args, None, case.network, None, case.optimizer)
            x_t, times = self.get_noisy_model_input_and_timesteps(
                None, case.noise, case.latents, None, None, "cpu", torch.float32
            )
            output = Namespace(pred=case.network(x_t), target=case.noise - case.latents)
            loss, _ = self.compute_loss(None, output, times, None, torch.float32, torch.float32, 0)
            assert loss.ndim == 0
            return x_t, times

    case = TrainerVariables(shape)
    script = types.ModuleType("qwen_image_train_network")
    script.QwenImageNetworkTrainer = QwenImageNetworkTrainer
    script.main = lambda: None
    package = types.ModuleType("musubi_tuner")
    package.qwen_image_train_network = script
    monkeypatch.setitem(sys.modules, "musubi_tuner", package)
    trainer = case.run("musubi", {"__name__": "__main__"})["Trainer"]()
    assert script.QwenImageNetworkTrainer is type(trainer)
    x_t, times = trainer.train(case)
    t = (times - 1) / 1000
    torch.testing.assert_close(x_t, noise_is_one(case.latents, case.noise, t.view(-1, *[1] * len(shape))))
    case.step(trainer.timesteps, t, noise_is_one)
    saved, args = trainer.timesteps.state_dict(), Namespace(output_dir=str(tmp_path))
    trainer.on_post_save(args, None, case.network, None, "lora-step00000001.safetensors", 1)
    trainer.timesteps.detach()
    args = Namespace(seed=1, resume=str(tmp_path / "lora-step00000001-state"))
    trainer.on_train_start(args, None, case.network, None, case.optimizer)
    assert trainer.timesteps.state_dict()["strategy"]["step"] == saved["strategy"]["step"] > 0


def test_the_page_of_ai_toolkit_works(tmp_path):
    case = TrainerVariables()
    self = Namespace(sd=Namespace(unet=None), network=case.network, optimizer=case.optimizer, save_root=str(tmp_path))
    names = case.run("ai-toolkit", {"self": self, "latents": case.latents, "loss": case.errors, "os": os})
    case.step(self.timesteps, names["timesteps"] / 1000, noise_is_one)


def test_the_page_of_diffusion_pipe_works():
    local = {"kairos_timesteps": kairos_timesteps, "torch": torch, "bs": 20_000, "latents": torch.zeros(1)}
    torch.manual_seed(0)
    (code,) = blocks("diffusion-pipe")
    exec(code, local | (random := {"timestep_quantile": None}), random)
    for quantile in (0.1, 0.5, 0.9):
        exec(code, local | (fixed := {"timestep_quantile": quantile}), fixed)
        expected = 1 / (1 + np.exp(-(np.log(3) + torch.distributions.Normal(0, 1).icdf(torch.tensor(quantile)).item())))
        assert fixed["t"].numpy() == pytest.approx(np.full(20_000, expected), rel=1e-5)
        assert (random["t"] < expected).double().mean() == pytest.approx(quantile, abs=0.02)


def test_the_page_of_torchtitan_works():
    case = TrainerVariables()
    self = Namespace(parallel_dims=Namespace(dp_enabled=False), config=Namespace(debug=Namespace(seed=None)))
    self.optimizers, self.model_parts = Namespace(optimizers=[case.optimizer]), [case.network]
    names = case.run("torchtitan", {"self": self, "labels": case.latents}, {})
    case.step(self.timesteps, names["timesteps"], noise_is_one)


class Studio:
    """Loop of AnimaLoraStudio, reduced to the calls of its timestep sampler."""

    def __init__(self, sampler: Any, seed: int = 0):
        self.sampler, self.global_step, self.times = sampler, 0, []
        self.random = torch.Generator().manual_seed(seed)

    def step(self, regularisation: list[Tensor]) -> None:
        """Take a step with a micro-batch for each mask of regularisation images, bool (batch,)."""
        for is_reg in regularisation:
            t = self.sampler.sample(len(is_reg), "cpu")
            self.times.append(t)
            errors = (t * torch.rand(len(t), generator=self.random)).detach()
            if (~is_reg).any():
                self.sampler.record(t[~is_reg], errors[~is_reg])
        self.global_step += 1
        self.sampler.maybe_refresh(self.global_step)


def test_the_page_of_animalorastudio_works(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    from animalorastudio_sampler import KairosSampler, build

    def make():
        return KairosSampler("loss_mean", seed=3, device="cpu", importance=False, start=4, frequency=2)

    none, some, all_of_them = (torch.arange(6) < count for count in (0, 2, 6))
    plan = [[none], [some, none], [all_of_them], [none, all_of_them], *[[some]] * 6]
    loop = Studio(make())
    for masks in plan:
        loop.step(masks)
    strategy = kairos_timesteps.Strategy(
        "loss_mean", "flow", seed=3, sampler={"importance": False, "start": 4, "frequency": 2}
    )
    random, times = torch.Generator().manual_seed(0), []
    for masks in plan:
        for is_reg in masks:
            draw = strategy.draw(torch.empty(6, 1))
            times.append(draw.t.float())
            strategy.weighted(draw, times[-1] * torch.rand(6, generator=random), ~is_reg)
        with strategy.observe(draw):
            pass
    assert all(torch.equal(t, expected) for t, expected in zip(loop.times, times, strict=True))
    assert loop.sampler.status()["kind"] == "kairos" and loop.sampler.status()["updates"] > 0

    resumed = Studio(make())
    for masks in plan[:6]:
        resumed.step(masks)
    state = resumed.sampler.state_dict()
    resumed.sampler = make()
    resumed.sampler.load_state_dict(state)
    for masks in plan[6:]:
        resumed.step(masks)
    assert all(torch.equal(t, expected) for t, expected in zip(resumed.times, loop.times, strict=True))

    built = build(Namespace(kairos_sampler="log_normal", seed=None), 100)
    (block,) = blocks("animalorastudio")
    names = {"args": Namespace(kairos_sampler="log_normal"), "total_steps": 9, "BUILDERS": {"kairos": lambda *_: built}}
    exec(block, names)
    assert names["sampler"] is built and built.requires_token_counts is False
    shifted = KairosSampler("shift", law="exponential", density="log_normal")
    assert shifted.requires_token_counts
    assert len(shifted.sample(2, "cpu", token_counts=torch.tensor([1024, 4096]))) == 2
    with pytest.raises(ValueError, match="importance weights"):
        KairosSampler("loss_rms")


def test_every_page_has_the_sections_and_is_in_the_index_and_in_the_navigation():
    index = (PAGES / "index.md").read_text(encoding="utf-8")
    navigation = (PAGES.parents[1] / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {path.name: path.read_text(encoding="utf-8") for path in PAGES.glob("*.md") if path.stem != "index"}
    for name in pages:
        assert f"trainers/{name}" in navigation and f"]({name})" in index, name
    table = index.partition("## Read, not run")[2].partition("\n\n*Loop*")[0]
    not_run = {*re.findall(r"\]\(([\w-]+\.md)\)", table)} - {"for-maintainers.md"}
    assert len(not_run) > 10
    for name in not_run:
        assert re.findall(r"^## (\w+)$", pages[name], re.MULTILINE) == SECTIONS, name
        assert "read, not run" in pages[name].lower() and len(pages[name].splitlines()) < 70, name
    for name, stated in re.findall(r"\]\(([\w-]+\.md)\) \|[^|]*\|[^|\d]*(\d+) lines", table):
        code = "\n".join(blocks(name.removesuffix(".md"))).splitlines()
        count = sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in code)
        assert count == int(stated), f"{name}: {count} lines"
