"""Policy network of the adaptive sampler, and the selection of timesteps for its reward (Kim et al. 2025)."""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributions import Beta

INITIAL = math.log1p(math.exp(0.5)) + 1e-5  # a and b of a new policy: softplus of the last layer's bias


def beta_distribution(a: Tensor, b: Tensor) -> Beta:
    """Return the distribution without torch's check of parameters and arguments, which synchronises with the device."""
    return Beta(a, b, validate_args=False)


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
        """Return a and b of each image."""
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


def select_timesteps(queue: Tensor, count: int, signed: bool = True) -> Tensor:
    """Select the features that explain the target best: the largest F-statistics among those that rise with it.

    The F-statistic of a linear regression on one feature, r²/(1-r²)(n-2), grows with r². The order is therefore that of
    the correlation r with the target, the row mean (Kim et al. 2025, algorithm 2 and appendix 10).

    Args:
        queue: measured changes, float64 (rows, features), 3 rows or more.
        count: number of features.
        signed: True: order by r; False: by r², without correlation 0.

    Returns:
        Indices of the selected features, ascending, int64 (count,).
    """
    target = queue.mean(1)
    centred, centred_target = queue - queue.mean(0), target - target.mean()
    scale = centred.norm(dim=0) * centred_target.norm()
    correlation = (centred * centred_target[:, None]).sum(0) / scale
    score = torch.where(scale > 0, correlation, -torch.inf) if signed else torch.nan_to_num(correlation**2)
    return score.argsort(descending=True, stable=True)[:count].sort().values
