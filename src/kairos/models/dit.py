"""The diffusion transformer as published (Peebles and Xie 2023): shared embedders, adaLN-zero, sin-cos positions.

Parameter names are those of the published checkpoints. diffusers' DiTTransformer2DModel embeds time and label anew in
every block and is another model.
"""

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn

from kairos.errors import KairosError
from kairos.models.backbone import Backbone, Descriptions
from kairos.models.registries import DiTOptions


class TimestepEmbedder(nn.Module):
    """Sinusoids of t (indices or real numbers), then an MLP: (batch,) to (batch, width)."""

    frequencies = 256

    def __init__(self, width: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(self.frequencies, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Tensor) -> Tensor:
        """Embedding of each t."""
        half = self.frequencies // 2
        rates = torch.exp(-math.log(10_000) * torch.arange(half, dtype=torch.float32, device=t.device) / half)
        angles = t.float()[:, None] * rates[None]  # (batch, half)
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=1))


def named(**layers: nn.Module) -> nn.Sequential:
    """Layers one after the other, their parameters under these names."""
    return nn.Sequential(OrderedDict(layers))


class Attention(nn.Module):
    """Multi-head self-attention on (batch, tokens, width)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attended tokens."""
        batch, tokens, width = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, tokens, width / heads)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(attended.transpose(1, 2).reshape(batch, tokens, width))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Scale and shift tokens (batch, tokens, width) by vectors (batch, width)."""
    return x * (1 + scale[:, None]) + shift[:, None]


class Block(nn.Module):
    """A transformer block whose normalisations and residuals are driven by the embedding: adaLN-zero."""

    def __init__(self, width: int, heads: int, mlp_ratio: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        hidden = int(width * mlp_ratio)
        gelu = nn.GELU(approximate="tanh")
        self.mlp = named(fc1=nn.Linear(width, hidden), act=gelu, fc2=nn.Linear(hidden, width))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """Tokens (batch, tokens, width) under embedding c (batch, width)."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate1[:, None] * self.attn(modulate(self.norm1(x), shift1, scale1))
        return x + gate2[:, None] * self.mlp(modulate(self.norm2(x), shift2, scale2))


class FinalLayer(nn.Module):
    """Tokens to patches: (batch, tokens, width) to (batch, tokens, patch * patch * channels)."""

    def __init__(self, width: int, patch: int, channels: int):
        super().__init__()
        self.norm_final = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(width, patch * patch * channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """Pixels of each patch."""
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(modulate(self.norm_final(x), shift, scale))


class DiT(Backbone):
    """The diffusion transformer; arguments as of `Backbone`, any size that patches divide.

    Raises:
        KairosError: patches do not divide the size.
    """

    def __init__(self, options: DiTOptions, shape: tuple[int, int, int], conditions: Descriptions, outputs: int):
        super().__init__(options, shape, conditions, outputs)
        width, patch = options.width, options.patch
        self.x_embedder = named(proj=nn.Conv2d(self.inputs, width, patch, patch))
        self.t_embedder = TimestepEmbedder(width)
        self.y_embedder = None
        if "class" in conditions:  # the row past the last class stands for no class
            self.y_embedder = named(embedding_table=nn.Embedding(conditions["class"]["num_classes"] + 1, width))
        self.pos_embed = nn.Parameter(_positions(width, self.grid(patch))[None], requires_grad=False)
        self.blocks = nn.ModuleList(Block(width, options.heads, options.mlp_ratio) for _ in range(options.depth))
        self.final_layer = FinalLayer(width, patch, outputs)
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        patches = self.x_embedder[0]
        nn.init.xavier_uniform_(patches.weight.data.flatten(1))
        nn.init.zeros_(patches.bias)
        for layer in (self.t_embedder.mlp[0], self.t_embedder.mlp[2]):
            nn.init.normal_(layer.weight, std=0.02)
        if self.y_embedder is not None:
            nn.init.normal_(self.y_embedder[0].weight, std=0.02)
        zeroed = [*(block.adaLN_modulation[1] for block in self.blocks), self.final_layer.adaLN_modulation[1]]
        for layer in [*zeroed, self.final_layer.linear]:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tensor:
        """Prediction (batch, outputs, height, width)."""
        x = self.x_embedder(self.joined(x, conditions))
        tokens = x.flatten(2).transpose(1, 2) + self.pos_embed  # (batch, tokens, width), row by row
        c = self.t_embedder(t)
        if self.y_embedder is not None:
            c = c + self.y_embedder(conditions["class"])
        for block in self.blocks:
            tokens = block(tokens, c)
        return self.unpatched(self.final_layer(tokens, c), self.options.patch)


def _positions(width: int, grid: tuple[int, int]) -> Tensor:
    """Sin-cos embedding of a grid of patches, (rows * columns, width): half for the column, half for the row."""
    if width % 4:
        raise KairosError(f"model.width: got {width}, allowed: a multiple of 4")
    rates = 1.0 / 10_000 ** (torch.arange(width // 4, dtype=torch.float64) / (width / 4))
    rows, columns = torch.meshgrid(*(torch.arange(side, dtype=torch.float64) for side in grid), indexing="ij")
    parts = []
    for positions in (columns, rows):
        angles = positions.reshape(-1, 1) * rates[None]
        parts += [angles.sin(), angles.cos()]
    return torch.cat(parts, dim=1).float()
