"""Policy network of the adaptive sampler (Kim et al. 2025)."""

from itertools import pairwise

import torch
from torch import Tensor, nn


class Policy(nn.Module):
    """Network from images (batch, channels, height, width) of any size to a, b > 0, each (batch,).

    Three convolutions, pooled while there is something to pool, a mean over what is left, an MLP. The last layer starts
    at weight 0 and bias 0.5, so a = b = 0.974 for every image: close to uniform.
    """

    def __init__(self, channels: int, width: int, depth: int):
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, 3, padding=1) for before, after in ((channels, 32), (32, 64), (64, 128))
        )
        sizes = [128] + [width] * depth
        self.hidden = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(sizes))
        self.last = nn.Linear(sizes[-1], 2)
        nn.init.zeros_(self.last.weight)
        nn.init.constant_(self.last.bias, 0.5)

    def forward(self, x0: Tensor) -> tuple[Tensor, Tensor]:
        """Return a and b of each image, each (batch,), in the type of the policy's weights."""
        x = x0.to(self.last.weight.dtype)
        for convolution in self.convolutions:
            x = torch.relu(convolution(x))
            if min(x.shape[-2:]) > 1:
                x = nn.functional.max_pool2d(x, 2)
        x = x.mean((2, 3))  # (batch, 128)
        for layer in self.hidden:
            x = torch.relu(layer(x))
        a, b = (nn.functional.softplus(self.last(x)) + 1e-5).unbind(1)
        return a, b
