"""Layers of several backbones: time embedding, MLP, attention, and the block of a transformer without conditioning."""

import math
from collections import OrderedDict

import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn

from kairos.shapes import Times, Tokens

TimeSinusoids = Float32[Tensor, "batch sinusoids"]  # cosines and sines of the times, before any layer
PackedQkv = Float[Tensor, "batch tokens qkv_width"]  # queries, keys and values of each token, in this order
AttentionBias = Float[Tensor, "*optional_batch heads tokens tokens"]


def embed_time(t: Times, width: int, shift: int = 0) -> TimeSinusoids:
    """Return the sinusoidal embedding of t, float32 (batch, width): cosines, then sines, at falling rates.

    Args:
        t: timesteps or real numbers, (batch,).
        width: width of the embedding, an even number.
        shift: 1: the rates fall from 1 to 1/10,000; 0: the smallest rate is one step above 1/10,000.
    """
    half = width // 2
    # 10,000 ** (-k / (half - shift)) for k = 0 to half - 1
    rates = torch.exp(-math.log(10_000) * torch.arange(half, dtype=torch.float32, device=t.device) / (half - shift))
    angles = t.float()[:, None] * rates[None]  # (batch, half)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def build_sequence(**layers: nn.Module) -> nn.Sequential:
    """Return the layers as an `nn.Sequential`; the keywords name them and their weights, as in ``proj.weight``."""
    return nn.Sequential(OrderedDict(layers))


def build_mlp(input_width: int, hidden_width: int, output_width: int, approximate: str = "none") -> nn.Sequential:
    """Return two linear layers, ``fc1`` and ``fc2``, with a GELU between them.

    `approximate` is ``none`` for the exact GELU, ``tanh`` for its approximation.
    """
    return build_sequence(
        fc1=nn.Linear(input_width, hidden_width),
        act=nn.GELU(approximate),
        fc2=nn.Linear(hidden_width, output_width),
    )


class Attention(nn.Module):
    """Multi-head self-attention on (batch, tokens, width).

    Args:
        width: width of the tokens, a multiple of `heads`.
        heads: number of heads.
        qkv_bias: add biases to queries, keys and values; the output projection always has a bias.
    """

    def __init__(self, width: int, heads: int, qkv_bias: bool = True):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tokens) -> Tokens:
        """Return the attention output of tokens x, (batch, tokens, width)."""
        return self.attend_packed(self.qkv(x))

    def attend_packed(self, qkv: PackedQkv, bias: AttentionBias | None = None) -> Tokens:
        """Return the attention output after the output projection, (batch, tokens, width).

        Args:
            qkv: queries, keys and values in this order, (batch, tokens, 3 * width).
            bias: numbers to add to the logits, ([batch,] heads, tokens, tokens); they are cast to the type of `qkv`.
        """
        batch, tokens, packed_width = qkv.shape
        width = packed_width // 3
        # from (batch, tokens, q/k/v, heads, head width) to (q/k/v, batch, heads, tokens, head width)
        q_k_v = qkv.view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = q_k_v  # each (batch, heads, tokens, head width)
        if bias is not None:
            bias = bias.to(q.dtype).expand(batch, -1, -1, -1)  # (batch, heads, tokens, tokens)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)  # the shape of q
        projected: Tokens = self.proj(attended.transpose(1, 2).reshape(batch, tokens, width))
        return projected


class PlainBlock(nn.Module):
    """Transformer block without conditioning; with `skip`, it first merges the tokens of an earlier block.

    Args:
        width: width of the tokens.
        attention: attention of the block.
        mlp_ratio: hidden width of the MLP, in multiples of `width`.
        eps: number that the layer normalisations add to the variance.
        skip: add the layer that merges the tokens of an earlier block.
    """

    def __init__(self, width: int, attention: Attention, mlp_ratio: float, eps: float, skip: bool = False):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attn = attention
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp = build_mlp(width, int(width * mlp_ratio), width)
        self.skip_linear = nn.Linear(2 * width, width) if skip else None

    def forward(self, x: Tokens, skip: Tokens | None = None) -> Tokens:
        """Return the block's output for tokens x, in the shape of x, (batch, tokens, width).

        A block with a merging layer needs `skip`, tokens of an earlier block in the shape of x; other blocks ignore it.
        """
        if self.skip_linear is not None:
            assert skip is not None
            x = self.skip_linear(torch.cat([x, skip], dim=-1))
        x = x + self.attn(self.norm1(x))
        output: Tokens = x + self.mlp(self.norm2(x))
        return output


def initialise_normal(module: nn.Module) -> None:
    """Initialise all linear layers in a module: weights normal with standard deviation 0.02, biases 0.

    Published code also truncates the normal distribution at 2.0, but a weight never exceeds 100 standard deviations.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
