"""The plain vision transformer of Min-SNR's experiments (Hang et al. 2023): BEiT's blocks, time and class as tokens.

Parameters have the names of the published checkpoints.
"""

import math

import torch
from torch import nn

from kairos.models.backbone import Backbone, Descriptions
from kairos.models.layers import Attention, PlainBlock, build_sequence, initialise_normal
from kairos.models.settings import ViTOptions
from kairos.shapes import Images, Output, Rows, Times, Tokens


class BeitAttention(Attention):
    """Attention with biases of queries and values but not of keys."""

    def __init__(self, width: int, heads: int):
        super().__init__(width, heads, qkv_bias=False)
        self.q_bias, self.v_bias = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tokens) -> Tokens:
        """Return the attention output of tokens x, (batch, tokens, width); keys have no bias."""
        bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        return self.attend_packed(nn.functional.linear(x, self.qkv.weight, bias))


class ViT(Backbone):
    """The vision transformer; see `Backbone` for the arguments.

    The table of times has `options.timesteps` rows, for t = 0 and later.

    Raises:
        KairosError: patches do not divide the size.
    """

    def __init__(self, options: ViTOptions, shape: tuple[int, int, int], conditions: Descriptions, outputs: int):
        super().__init__(options, shape, conditions, outputs)
        width, patch = options.width, options.patch
        self.patches = math.prod(self.patch_grid(patch))
        self.patch_embed = build_sequence(proj=nn.Conv2d(self.inputs, width, patch, patch))
        self.time_embedding = nn.Embedding(options.timesteps, width)
        if "class" in conditions:  # the row after the last class means no class
            self.class_embedding = nn.Embedding(conditions["class"]["num_classes"] + 1, width)
        condition_tokens = 2 if "class" in conditions else 1  # the time, and the class
        self.pos_embed = nn.Parameter(torch.empty(1, condition_tokens + self.patches, width))
        blocks = (
            PlainBlock(width, BeitAttention(width, options.heads), options.mlp_ratio, eps=1e-6)
            for _ in range(options.depth)
        )
        self.blocks = nn.ModuleList(blocks)
        self.linear_projection = nn.Linear(width, patch * patch * outputs)
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        """Initialise positions and linear layers as the published code; other layers keep torch's initialisation.

        Positions and weights are normal with standard deviation 0.02, biases 0. The last weights of both branches of
        block n, counted from 1, are divided by (2n)^(1/2), and the network's last weights are multiplied by 0.001.
        """
        nn.init.normal_(self.pos_embed, std=0.02)
        initialise_normal(self)
        for depth, block in enumerate(self.blocks, start=1):  # keeps the variance of the residuals
            for last_layer in ("attn.proj.weight", "mlp.fc2.weight"):  # last layers of the two branches
                block.get_parameter(last_layer).div_(math.sqrt(2 * depth))
        self.linear_projection.weight *= 0.001

    def forward(self, x: Images, t: Times, conditions: dict[str, Rows]) -> Output:
        """Return the prediction, (batch, outputs, height, width).

        t is rounded to the nearest row of the time table. Classes are indices; the number of classes is the index of no
        class.
        """
        tokens = self.patch_embed(self.with_image_conditions(x, conditions)).flatten(2).transpose(1, 2)  # row by row
        condition_tokens = [self.time_embedding(t.round().long())[:, None]]
        if "class" in self.conditions:
            condition_tokens.append(self.class_embedding(conditions["class"])[:, None])
        tokens = torch.cat([*condition_tokens, tokens], dim=1) + self.pos_embed
        for block in self.blocks:
            tokens = block(tokens)
        pixels = self.linear_projection(tokens[:, -self.patches :])  # pixels of the patches, without the conditions
        return self.unpatchify(pixels, self.options.patch)
