"""Shared code of the examples, without kairos: options, real images, a small network, a progress line."""

import argparse
import math
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn


def parser(description: str, strategy: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all examples have."""
    arguments_parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    arguments_parser.add_argument("--strategy", default=strategy, help="SAMPLER, WEIGHTING or SAMPLER+WEIGHTING")
    arguments_parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    arguments_parser.add_argument("--batch", type=int, default=64, help="images per step")
    arguments_parser.add_argument("--lr", type=float, default=2e-3, help="learning rate")
    arguments_parser.add_argument("--width", type=int, default=32, help="channels of the network, a multiple of 8")
    arguments_parser.add_argument(
        "--images", type=Path, help="folder of images; scikit-learn's handwritten digits without it"
    )
    arguments_parser.add_argument(
        "--size", type=int, default=32, help="height and width that images of a folder are brought to"
    )
    arguments_parser.add_argument("--seed", type=int, default=0, help="seed of everything random")
    arguments_parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to train"
    )
    return arguments_parser


def images(folder: Path | None, size: int) -> Tensor:
    """Return real images in [-1, 1], float32 (count, channels, height, width): 1,797 digits of 8x8, or a folder's."""
    if folder is None:
        from sklearn.datasets import load_digits

        return torch.from_numpy(load_digits().images).float()[:, None] / 8 - 1
    from PIL import Image, ImageOps

    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in {".png", ".jpg", ".jpeg", ".webp"})
    if not paths:
        sys.exit(f"--images: no png, jpg, jpeg or webp in {folder}")
    rows = [np.asarray(ImageOps.fit(Image.open(path).convert("RGB"), (size, size))) for path in paths]
    return torch.from_numpy(np.stack(rows)).permute(0, 3, 1, 2).float() / 127.5 - 1


def batch(images: Tensor, size: int, seed: int, step: int, device: str) -> tuple[Tensor, Tensor]:
    """Images and Gaussian noise of a step, each (size, ...): a function of seed and step, so a resume is exact."""
    random = torch.Generator().manual_seed(seed * 1_000_003 + step)
    x0 = images[torch.randint(len(images), (size,), generator=random)]
    return x0.to(device), torch.randn(x0.shape, generator=random).to(device)


class Network(nn.Module):
    """Residual convolutions, shifted and scaled by what a small network makes of the time.

    Args:
        channels: of the images.
        width: of the convolutions.
        period: range of the times that the network is called with.
    """

    def __init__(self, channels: int, width: int, period: float):
        super().__init__()
        self.register_buffer("frequencies", 2 * math.pi / period * 2.0 ** torch.arange(-2, 6))
        self.time = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, 6 * width))
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for _ in range(3))
        self.blocks = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        self.last = nn.Conv2d(width, channels, 3, padding=1)
        nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """A tensor of the shape of x, (batch, channels, height, width), at times t (batch,)."""
        angle = t.to(x.dtype)[:, None] * self.frequencies  # (batch, 8)
        modulation = self.time(torch.cat([angle.cos(), angle.sin()], 1))[:, :, None, None].chunk(6, 1)
        hidden = self.first(x)
        for k, (norm, block) in enumerate(zip(self.norms, self.blocks)):
            shifted = norm(hidden) * (1 + modulation[2 * k]) + modulation[2 * k + 1]
            hidden = hidden + block(nn.functional.silu(shifted))
        return self.last(nn.functional.silu(hidden))


def progress(step: int, steps: int, losses: list[float]) -> None:
    """Print the step and the mean of the last 50 losses in one line, which each call overwrites."""
    if step % 10 == 0 or step == steps:
        recent = sum(losses[-50:]) / len(losses[-50:])
        print(f"\rstep {step}/{steps}  loss {recent:.4f}", end="\n" if step == steps else "", flush=True)
