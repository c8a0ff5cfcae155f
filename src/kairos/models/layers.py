"""Layers that several backbones use: sinusoids of time, attention, the block of a plain transformer."""

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn


def embed_time(t: Tensor, width: int, shift: int = 0) -> Tensor:
    """Cosines, then sines, of t (indices or real numbers) at falling rates, float32: (batch,) to (batch, width).

    Rates fall from 1 to 1/10,000, with `shift` 1 the last is that.
    """
    half = width // 2
    rates = torch.exp(-math.log(10_000) * torch.arange(half, dtype=torch.float32, device=t.device) / (half - shift))
    angles = t.float()[:, None] * rates[None]  # (batch, half)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def named_sequence(**layers: nn.Module) -> nn.Sequential:
    """Layers one after the other, their parameters under these names."""
    return nn.Sequential(OrderedDict(layers))


def build_mlp(inside: int, hidden: int, outside: int, approximate: str = "none") -> nn.Sequential:
    """Two linear layers with a GELU between: exact, or the approximation by ``tanh``."""
    return named_sequence(fc1=nn.Linear(inside, hidden), act=nn.GELU(approximate), fc2=nn.Linear(hidden, outside))


class Attention(nn.Module):
    """Multi-head self-attention on (batch, tokens, width)."""

    def __init__(self, width: int, heads: int, qkv_bias: bool = True):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attended tokens."""
        return self.attend(self.qkv(x))

    def attend(self, qkv: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the attention output, (batch, tokens, width), of queries, keys and values (batch, tokens, 3 * width).

        `bias`, (…, heads, tokens, tokens), is added to the logits.
        """
        batch, tokens, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
        q, k, v = qkv.view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        bias = None if bias is None else bias.to(q.dtype).expand(batch, -1, -1, -1)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)  # (batch, heads, tokens, …)
        return self.proj(attended.transpose(1, 2).reshape(batch, tokens, width))


class PlainBlock(nn.Module):
    """A block driven by nothing but its tokens; with `skip` it first takes in those of an earlier one."""

    def __init__(self, width: int, attention: nn.Module, mlp_ratio: float, eps: float, skip: bool = False):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attn = attention
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp = build_mlp(width, int(width * mlp_ratio), width)
        self.skip_linear = nn.Linear(2 * width, width) if skip else None

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        """Tokens (batch, tokens, width)."""
        if self.skip_linear is not None:
            x = self.skip_linear(torch.cat([x, skip], dim=-1))
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def initialise_normal(module: nn.Module) -> None:
    """Linear layers normal with standard deviation 0.02 (published code truncates at 100 of them), biases 0."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
