"""Train a network with one trainer, and record the times of its steps; `other_trainers.py` starts this as a process.

    python benchmarks/trainer_process.py TRAINER SETTINGS.json

The settings are the fields of `Settings`. All trainers are unmodified: a hook of torch, which torch calls after each
step of any optimizer, takes the times.
"""

import json
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RATE, BETAS, DECAY = 1e-4, (0.9, 0.99), 0.995  # lucidrains' defaults


@dataclass(frozen=True)
class Settings:
    """Settings of a training run.

    Attributes:
        model: section `model` of an experiment of kairos, which describes the network.
        images: folder of PNG files.
        channels, side: shape of an image.
        batch_size: images of a step.
        flips: flip half of the images.
        steps: length of the training run.
        save_every: steps between checkpoints of lucidrains' trainer and of kairos.
        results: folder for checkpoints.
        times: file of times, which `StepTimes` writes.
    """

    model: dict[str, Any]
    images: str
    channels: int
    side: int
    batch_size: int
    flips: bool
    steps: int
    save_every: int
    results: str
    times: str


class StepTimes:
    """Recorder of the steps of any optimizer in this process.

    The file ``<times>.steps`` gets one byte for each step. At the steps of `at`, `times` gets a JSON line with step,
    wall time (seconds of the machine's monotonic clock) and CPU seconds of this process and its descendants.
    """

    def __init__(self, settings: Settings, at: tuple[int, ...]):
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.step, self.at = 0, at
        self.times = Path(settings.times)
        self.steps = os.open(f"{settings.times}.steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        register_optimizer_step_post_hook(self)

    def __call__(self, *_: Any) -> None:
        """Record a step; torch calls this after each step of an optimizer."""
        self.step += 1
        os.write(self.steps, b".")
        if self.step in self.at:
            line = {"step": self.step, "wall": time.monotonic(), "cpu": cpu_seconds()}
            with self.times.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its descendants, ended or running."""
    import psutil

    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        usage = child.cpu_times()
        total += usage.user + usage.system
    return total


def build_network(settings: Settings) -> Any:
    """Build the network that all trainers train, called as ``network(x_t, t, x_self_cond)``."""
    import torch

    from kairos import models
    from kairos.models.settings import BACKBONES

    class Network(torch.nn.Module):
        """Network of kairos with the attributes that lucidrains' GaussianDiffusion reads."""

        def __init__(self):
            super().__init__()
            self.channels = self.out_dim = settings.channels
            self.self_condition = False
            shape = (settings.channels, settings.side, settings.side)
            self.network = models.build(BACKBONES.select(settings.model), shape, {})

        def forward(self, x_t, t, x_self_cond=None):
            return self.network(x_t, t, {})

    return Network()


def train_with_kairos(settings: Settings) -> None:
    """Train by ``kairos train``; the experiment is x.yaml in the working directory. Exit if it fails."""
    from kairos.cli import main

    command = ["train", "--config", "x.yaml", "--method", "uniform", "--seed", "0", "--out", settings.results]
    if main(command):
        raise SystemExit("kairos train failed")


def train_with_lucidrains(settings: Settings, update_every: int) -> None:
    """Train by denoising-diffusion-pytorch's Trainer, from its newest checkpoint if there is one.

    Args:
        settings: settings of the training run.
        update_every: steps between updates of the averaged weights.
    """
    from denoising_diffusion_pytorch import GaussianDiffusion, Trainer

    diffusion = GaussianDiffusion(
        build_network(settings),
        image_size=settings.side,
        objective="pred_noise",
        beta_schedule="linear",
        sampling_timesteps=2,
    )
    trainer = Trainer(
        diffusion,
        settings.images,
        train_batch_size=settings.batch_size,
        augment_horizontal_flip=settings.flips,
        train_lr=RATE,
        adam_betas=BETAS,
        train_num_steps=settings.steps,
        ema_decay=DECAY,
        ema_update_every=update_every,
        save_and_sample_every=settings.save_every,
        num_samples=1,
        results_folder=settings.results,
        calculate_fid=False,
    )
    numbers = [int(path.stem.removeprefix("model-")) for path in Path(settings.results).glob("model-*.pt")]
    if numbers:
        trainer.load(max(numbers))
    trainer.train()


def train_with_accelerate(settings: Settings) -> None:
    """Train by a loop with accelerate, as in the introductions of accelerate and diffusers; it saves nothing."""
    import numpy as np
    import torch
    from accelerate import Accelerator
    from PIL import Image
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
    from torch.utils.data import DataLoader, Dataset

    class ImageFolder(Dataset):
        def __init__(self, folder):
            self.paths = sorted(Path(folder).glob("*.png"))
            self.mode = "L" if settings.channels == 1 else "RGB"

        def __len__(self):
            return len(self.paths)

        def __getitem__(self, index):
            pixels = np.asarray(Image.open(self.paths[index]).convert(self.mode), dtype=np.float32) / 127.5 - 1
            image = torch.from_numpy(pixels.reshape(settings.side, settings.side, settings.channels)).permute(2, 0, 1)
            if settings.flips and torch.rand(()) < 0.5:
                image = image.flip(-1)
            return image

    accelerator = Accelerator()
    network = build_network(settings)
    optimizer = torch.optim.Adam(network.parameters(), lr=RATE, betas=BETAS)
    average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    loader = DataLoader(ImageFolder(settings.images), settings.batch_size, shuffle=True, drop_last=True)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    alphas_cumprod = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)
    step = 0
    while step < settings.steps:
        for x0 in loader:
            noise = torch.randn_like(x0)
            t = torch.randint(0, 1000, (len(x0),))
            alpha = alphas_cumprod[t].view(-1, 1, 1, 1)
            x_t = alpha.sqrt() * x0 + (1 - alpha).sqrt() * noise
            loss = torch.nn.functional.mse_loss(network(x_t, t), noise)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(network)
            step += 1
            if step == settings.steps:
                break


TRAINERS = {
    "kairos": train_with_kairos,
    "lucidrains": lambda settings: train_with_lucidrains(settings, update_every=10),
    "lucidrains, average in every step": lambda settings: train_with_lucidrains(settings, update_every=1),
    "accelerate": train_with_accelerate,
}
WARM_UP = 20  # steps before the steady state


def main() -> None:
    """Train with one trainer; times are recorded after the first step, after the warm-up and after the last step."""
    trainer, path = sys.argv[1:]
    settings = Settings(**json.loads(Path(path).read_text(encoding="utf-8")))
    StepTimes(settings, at=(1, WARM_UP, settings.steps))
    TRAINERS[trainer](settings)


if __name__ == "__main__":
    main()
