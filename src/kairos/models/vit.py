"""The plain vision transformer of Min-SNR's experiments (Hang et al. 2023): BEiT's blocks, time and class as tokens.

Parameter names are those of the published checkpoints.
"""

import math

import torch
from torch import Tensor, nn

from kairos.models.backbone import Backbone, Descriptions
from kairos.models.layers import Attention, PlainBlock, initialise_normal, named_sequence
from kairos.models.registries import ViTOptions


class BeitAttention(Attention):
    """Attention whose queries and values have biases, and whose keys have none."""

    def __init__(self, width: int, heads: int):
        super().__init__(width, heads, qkv_bias=False)
        self.q_bias, self.v_bias = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Attended tokens."""
        bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        return self.attend(nn.functional.linear(x, self.qkv.weight, bias))


class ViT(Backbone):
    """The vision transformer; arguments as of `Backbone`. It knows `options.timesteps` times, indices from 0.

    Raises:
        KairosError: patches do not divide the size.
    """

    def __init__(self, options: ViTOptions, shape: tuple[int, int, int], conditions: Descriptions, outputs: int):
        super().__init__(options, shape, conditions, outputs)
        width, patch = options.width, options.patch
        self.patches = math.prod(self.grid(patch))
        self.patch_embed = named_sequence(proj=nn.Conv2d(self.inputs, width, patch, patch))
        self.time_embedding = nn.Embedding(options.timesteps, width)
        if "class" in conditions:  # the row past the last class stands for no class
            self.class_embedding = nn.Embedding(conditions["class"]["num_classes"] + 1, width)
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + ("class" in conditions) + self.patches, width))
        blocks = (
            PlainBlock(width, BeitAttention(width, options.heads), options.mlp_ratio, 1e-6)
            for _ in range(options.depth)
        )
        self.blocks = nn.ModuleList(blocks)
        self.linear_projection = nn.Linear(width, patch * patch * outputs)
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        nn.init.normal_(self.pos_embed, std=0.02)
        initialise_normal(self)
        for number, block in enumerate(self.blocks, start=1):  # the residual stream does not grow with depth
            for last in (block.attn.proj, block.mlp[2]):
                last.weight /= math.sqrt(2 * number)
        self.linear_projection.weight *= 0.001

    def forward(self, x: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tensor:
        """Prediction (batch, outputs, height, width); t between two indices is taken for the nearest."""
        tokens = self.patch_embed(self.with_image_conditions(x, conditions)).flatten(2).transpose(1, 2)  # row by row
        extra = [self.time_embedding(t.round().long())[:, None]]
        if "class" in self.conditions:
            extra.append(self.class_embedding(conditions["class"])[:, None])
        tokens = torch.cat([*extra, tokens], dim=1) + self.pos_embed
        for block in self.blocks:
            tokens = block(tokens)
        return self.unpatchify(self.linear_projection(tokens[:, -self.patches :]), self.options.patch)
