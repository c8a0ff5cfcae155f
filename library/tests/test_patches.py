"""Reference patches of docs/trainers/patches: their added lines run in reduced replicas of the trainers.

A replica has the variables and the order of calls of the trainer, and a marker where each hunk of the patch belongs. No
code of a trainer runs here.
"""

import argparse
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kairos_timesteps import Strategy, make_schedule
from kairos_timesteps.errors import ConfigError
from small_loop import IMAGES, TinyNetwork, equal_bits

PATCHES = Path(__file__).parents[2] / "docs/trainers/patches"
if not PATCHES.exists():
    pytest.skip("the source distribution does not contain docs/", allow_module_level=True)

KOHYA = """
import importlib
#: hunk 2
import argparse
import torch
from types import SimpleNamespace

def get_timesteps(min_timestep, max_timestep, b_size, device):
    return torch.randint(min_timestep, max_timestep, (b_size,))

def get_noise_noisy_latents_and_timesteps(
    #: hunk 0
):
    noise = torch.randn_like(latents)
    min_timestep, max_timestep, b_size = 0, 1000, len(latents)
    #: hunk 1
    alpha = noise_scheduler.alphas_cumprod[timesteps].view(-1, 1, 1, 1)
    return noise, alpha.sqrt() * latents + (1 - alpha).sqrt() * noise, timesteps

train_util = SimpleNamespace(get_noise_noisy_latents_and_timesteps=get_noise_noisy_latents_and_timesteps)

class NetworkTrainer:
    def get_noise_scheduler(self, args, device):
        return SimpleNamespace(alphas_cumprod=args.alphas_cumprod.clone())

    def process_batch(self, batch, network, noise_scheduler, args, is_train=True):
        latents = batch["latents"]
        #: hunk 3
        loss = (network(noisy_latents, timesteps) - noise) ** 2
        loss = loss.mean(dim=list(range(1, loss.ndim)))
        #: hunk 4
        loss_weights = batch["loss_weights"]
        return (loss * loss_weights).mean()

    def train(self, args, accelerator, network, optimizer, batches):
        #: hunk 5
        accelerator.load_state()
        noise_scheduler = self.get_noise_scheduler(args, accelerator.device)
        losses = []
        for number, batch in enumerate(batches):
            torch.manual_seed(batch["number"])
            accelerator.sync_gradients = number % 2 == 1
            loss = self.process_batch(batch, network, noise_scheduler, args)
            (loss / 2).backward()
            losses.append(loss.item())
            if accelerator.sync_gradients:
                optimizer.step()
            #: hunk 6, indented
            if accelerator.sync_gradients:
                optimizer.zero_grad(set_to_none=True)
            with torch.no_grad():
                self.process_batch(batch, network, noise_scheduler, args, is_train=False)
        return losses

def setup_parser():
    parser = argparse.ArgumentParser()
    #: hunk 7
    return parser
"""

ONETRAINER = """
import copy
#: hunk 2
import os
import torch
from types import SimpleNamespace

data = []
#: hunk 7

class Setup:
    def _get_timestep_discrete(self, num_train_timesteps, deterministic, generator, batch_size, config, shift=None):
        if deterministic:
            return torch.tensor(int(num_train_timesteps * 0.5) - 1, dtype=torch.long).unsqueeze(0)
        #: hunk 1
        else:
            return (num_train_timesteps * torch.rand(batch_size, generator=generator)).int()

    def predict(self, model, batch, config, train_progress, deterministic=False):
        generator = torch.Generator()
        generator.manual_seed(0 if deterministic else train_progress.global_step)
        latents = batch["latents"]
        noise = torch.randn(latents.shape, generator=generator)
        timestep = self._get_timestep_discrete(1000, deterministic, generator, len(latents), config)
        sigma = ((timestep + 1) / 1000).view(-1, 1, 1, 1)
        x_t = (1 - sigma) * latents + sigma * noise
        output = model.network(x_t, timestep)
        return {"predicted": output, "target": noise - latents, "timestep": timestep}

    def calculate_loss(self, model, batch, data, config):
        return self._flow_matching_losses(batch, data, config).mean()

    def _flow_matching_losses(self, batch, data, config):
        loss_weight = batch["loss_weight"]
        losses = (data["predicted"] - data["target"]).square().mean((1, 2, 3))
        #: hunk 0
        losses = losses * config.loss_scaler.get_scale(config.batch_size, config.gradient_accumulation_steps)
        return losses * loss_weight

class GenericTrainer:
    def start(self, config, model, last_backup_path):
        self.config, self.model, self.model_setup = config, model, Setup()
        self.parameters = list(model.network.parameters())
        #: hunk 3

    def backup(self, backup_path):
        #: hunk 4, indented

    def train(self, train_progress, batches, prior):
        scaler, losses, timesteps = None, [], []
        lr_scheduler = SimpleNamespace(step=lambda: None)
        for number, batch in enumerate(batches):
            if prior:
                with torch.no_grad():
                    prior_data = self.model_setup.predict(self.model, batch, self.config, train_progress)
            output = self.model_setup.predict(self.model, batch, self.config, train_progress)
            if prior:
                assert torch.equal(prior_data["timestep"], output["timestep"])
            loss = self.model_setup.calculate_loss(self.model, batch, output, self.config)
            losses.append(loss.item())
            timesteps.append(output["timestep"])
            (loss / 2).backward()
            if number % 2 == 1:
                #: hunk 5, indented
                self.model.optimizer.step()
                #: hunk 6, indented
                self.model.optimizer.zero_grad(set_to_none=True)
            train_progress.global_step += 1
            with torch.no_grad():
                output = self.model_setup.predict(self.model, batch, self.config, train_progress, deterministic=True)
                self.model_setup.calculate_loss(self.model, batch, output, self.config)
        return losses, timesteps
"""


def added_lines(name):
    """Return the lines that each hunk of a patch adds, without their indentation."""
    lines = (PATCHES / f"{name}.patch").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 40
    hunks = []
    for line in lines:
        if line.startswith("@@"):
            hunks.append([])
        elif line.startswith("+") and not line.startswith("+++"):
            hunks[-1].append(line[1:])
    return [textwrap.dedent("\n".join(hunk)) for hunk in hunks]


def patched(name, replica):
    """Return the namespace of a replica with the hunks of a patch at its markers."""
    hunks = added_lines(name)

    def insert(marker):
        return textwrap.indent(hunks[int(marker[2])], marker[1])

    source, count = re.subn(r"^( *)#: hunk (\d)(?:, indented)?$", insert, replica, flags=re.MULTILINE)
    assert count == len(hunks)
    names = {}
    exec(compile(source, f"{name}.patch", "exec"), names)
    return names


def batches(first, last):
    """Return micro-batches of four images, two of them with another weight."""
    weights = torch.tensor([1.0, 0.5, 1.0, 0.5])
    return [
        {"latents": IMAGES[4 * (number % 2) :][:4], "loss_weights": weights, "loss_weight": weights, "number": number}
        for number in range(first, last)
    ]


class Accelerator:
    """Checkpoints as accelerate writes them, of network, optimizer and a registered object."""

    device, optimizer_step_was_skipped, sync_gradients = "cpu", False, True

    def __init__(self, network, optimizer, state=None):
        self.objects, self.state = [network, optimizer], state

    def register_for_checkpointing(self, value):
        self.objects.append(value)

    def load_state(self):
        if self.state is not None:
            for value, state in zip(self.objects, self.state, strict=True):
                value.load_state_dict(state)

    def save_state(self):
        return [value.state_dict() for value in self.objects]


def train_kohya(option, first=0, last=12, state=None, v_parameterization=False):
    """Train the replica of kohya; returns the trainer, losses and the state."""
    names = patched("kohya", KOHYA)
    parsed = names["setup_parser"]().parse_args([] if option is None else ["--timestep_strategy", option])
    alphas = torch.from_numpy(make_schedule("scaled_linear").alphas_cumprod).float()
    args = argparse.Namespace(**vars(parsed), v_parameterization=v_parameterization, seed=3, alphas_cumprod=alphas)
    torch.manual_seed(0)
    network = TinyNetwork()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    accelerator, trainer = Accelerator(network, optimizer, state), names["NetworkTrainer"]()
    losses = trainer.train(args, accelerator, network, optimizer, batches(first, last))
    return trainer, losses, accelerator.save_state()


@pytest.mark.parametrize("name", ["uniform", "loss_rms", "speed+change_aware", "info_noise+edm2"])
def test_the_patch_of_kohya_trains_and_resumes(name):
    trainer, losses, state = train_kohya(f"kairos:{name}")
    assert trainer.timestep_strategy.strategy.step == 6
    _, first, saved = train_kohya(f"kairos:{name}", 0, 6)
    _, second, resumed = train_kohya(f"kairos:{name}", 6, 12, saved)
    assert first + second == losses and equal_bits(resumed[0], state[0]) and equal_bits(resumed[2], state[2])
    strategy = Strategy(name, trainer.timestep_strategy.strategy.process, seed=3)
    assert equal_bits(strategy.draw(IMAGES[:4]).t, Strategy(name, "scaled_linear", seed=3).draw(IMAGES[:4]).t)


def test_without_the_option_the_patch_of_kohya_changes_nothing():
    trainer, losses, _ = train_kohya(None)
    assert trainer.timestep_strategy is None and len(set(losses)) == 12
    assert (
        train_kohya("kairos:uniform", v_parameterization=True)[0].timestep_strategy.strategy.process.prediction == "v"
    )
    with pytest.raises(ConfigError, match="no predict"):
        train_kohya("kairos:auto")
    with pytest.raises(ValueError):
        train_kohya("os:system")


def train_onetrainer(option, folder, first=0, last=12, resumed=False, prior=False):
    """Train the replica of OneTrainer and write its backup; returns losses, timesteps and weights."""
    names = patched("onetrainer", ONETRAINER)
    ((key, default, _, _),) = names["data"]
    config = SimpleNamespace(
        **{key: option or default}, batch_size=4, gradient_accumulation_steps=2, train_device="cpu",
        continue_last_backup=resumed, loss_scaler=SimpleNamespace(get_scale=lambda batch_size, steps: 2.0),
    )  # fmt: skip
    torch.manual_seed(0)
    network = TinyNetwork()
    model = SimpleNamespace(network=network, optimizer=torch.optim.AdamW(network.parameters(), lr=1e-2))
    if resumed:
        state = torch.load(folder / "model.pt")
        network.load_state_dict(state["network"])
        model.optimizer.load_state_dict(state["optimizer"])
    trainer = names["GenericTrainer"]()
    trainer.start(config, model, str(folder) if resumed else None)
    losses, timesteps = trainer.train(SimpleNamespace(global_step=first), batches(first, last), prior)
    trainer.backup(str(folder))
    torch.save({"network": network.state_dict(), "optimizer": model.optimizer.state_dict()}, folder / "model.pt")
    return trainer, losses, timesteps, network.state_dict()


@pytest.mark.parametrize("name", ["uniform", "loss_rms", "log_normal+bell", "mode+edm2"])
@pytest.mark.parametrize("prior", [False, True])
def test_the_patch_of_onetrainer_trains_and_resumes(name, prior, tmp_path):
    trainer, losses, timesteps, weights = train_onetrainer(f"kairos:{name}", tmp_path, prior=prior)
    assert trainer.model_setup.timestep_strategy.strategy.step == 6
    assert all(t.dtype == torch.int32 and t.min() >= 0 and t.max() < 1000 for t in timesteps)
    _, first, _, _ = train_onetrainer(f"kairos:{name}", tmp_path, 0, 6, prior=prior)
    _, second, later, resumed = train_onetrainer(f"kairos:{name}", tmp_path, 6, 12, resumed=True, prior=prior)
    assert first + second == losses and equal_bits(later, timesteps[6:]) and equal_bits(resumed, weights)


def test_without_the_option_the_patch_of_onetrainer_changes_nothing(tmp_path):
    trainer, losses, _, _ = train_onetrainer(None, tmp_path)
    assert not hasattr(trainer.model_setup, "timestep_strategy") and len(set(losses)) == 12
    assert not (tmp_path / "timestep_strategy.pt").exists()
