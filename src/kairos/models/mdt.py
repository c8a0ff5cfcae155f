"""The masked diffusion transformer, version 1 (Gao et al. 2023): DiT that also learns from part of the patches.

Parameter names are those of the published checkpoints.
"""

import torch
from torch import Tensor, nn

from kairos.models.backbone import Descriptions
from kairos.models.dit import AdaLNBlock, DiT, initialise
from kairos.models.layers import Attention
from kairos.models.registries import MDTOptions


class BiasedAttention(Attention):
    """Attention with a learned bias by head and by how far two patches lie apart."""

    def __init__(self, width: int, heads: int, distances: int):
        super().__init__(width, heads)
        table = nn.Parameter(nn.init.normal_(torch.empty(distances, heads), std=0.02))
        self.rel_pos_bias = nn.ParameterDict({"relative_position_bias_table": table})

    def forward(self, x: Tensor, distances: Tensor) -> Tensor:  # type: ignore[override]
        """Attended tokens; `distances` are rows of the table, ([batch,] tokens, tokens)."""
        table = self.rel_pos_bias["relative_position_bias_table"]
        bias = nn.functional.embedding(distances, table).movedim(-1, -3)  # ([batch,] heads, tokens, tokens)
        return self.attend(self.qkv(x), bias.contiguous())  # fused attention reads rows


class MDT(DiT):
    """The masked diffusion transformer; arguments as of `Backbone`.

    Where ``conditions["mask"]`` is given (uniform numbers (batch, height, width), those at the patches' corners count),
    all blocks but the last `decoder_depth` see the int(L (1 - ratio)) patches of L with the lowest numbers. Then a side
    block fills the gaps.

    Raises:
        KairosError: patches do not divide the size.
    """

    def __init__(self, options: MDTOptions, shape: tuple[int, int, int], conditions: Descriptions, outputs: int):
        rows, columns = -(-shape[1] // options.patch), -(-shape[2] // options.patch)
        self.distances = (2 * rows - 1) * (2 * columns - 1) + 3  # three more, as published, are of no use
        super().__init__(options, shape, conditions, outputs)
        self.pos_embed.requires_grad_()
        self.decoder_pos_embed = nn.Parameter(self.pos_embed.detach().clone())
        self.sideblocks = nn.ModuleList([self.block()])
        initialise(self.sideblocks)
        self.mask_token = nn.Parameter(nn.init.normal_(torch.empty(1, 1, options.width), std=0.02))
        place = torch.arange(rows * columns)
        row, column = place // columns, place % columns
        down, right = row[:, None] - row + rows - 1, column[:, None] - column + columns - 1  # each from 0
        self.register_buffer("distance", down * (2 * columns - 1) + right, persistent=False)  # (tokens, tokens)

    def block(self) -> AdaLNBlock:
        """One of its blocks."""
        width, heads = self.options.width, self.options.heads
        return AdaLNBlock(width, BiasedAttention(width, heads, self.distances), self.options.mlp_ratio)

    def to_kairos_names(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """A published file's weights under our names: without the constant index of every block."""
        return {name: value for name, value in weights.items() if not name.endswith("relative_position_index")}

    def forward(self, x: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tensor:
        """Prediction (batch, outputs, height, width)."""
        tokens, c = self.embedded(x, t, conditions)
        split, blocks = len(self.blocks) - self.options.decoder_depth, list(self.blocks)
        if "mask" in conditions:
            kept = self._kept(conditions["mask"])  # (batch, kept)
            # not gather and scatter, whose deterministic kernels on a GPU sort an index for every number
            place = torch.arange(len(kept), device=kept.device)[:, None], kept
            part, distance = tokens[place], self.distance[kept[:, :, None], kept[:, None]]
            for block in blocks[:split]:
                part = block(part, c, distance)
            gaps = torch.ones_like(tokens[:, :, :1], dtype=torch.bool).scatter(1, kept[:, :, None], False)
            tokens = self.mask_token.to(part.dtype).expand_as(tokens).index_put(place, part) + self.decoder_pos_embed
            tokens = torch.where(gaps, self.sideblocks[0](tokens, c, self.distance), tokens)
        else:
            for block in blocks[:split]:
                tokens = block(tokens, c, self.distance)
            tokens = tokens + self.decoder_pos_embed
            if self.training:  # gradients 0, which DistributedDataParallel waits for where no pass is masked
                unused = (self.mask_token, *self.sideblocks.parameters())
                tokens = tokens + 0 * torch.stack([parameter.sum() for parameter in unused]).sum()
        for block in blocks[split:]:
            tokens = block(tokens, c, self.distance)
        return self.pixels(tokens, c)

    def _kept(self, mask: Tensor) -> Tensor:
        """Places of the patches that are seen, in their order, (batch, kept)."""
        patch = self.options.patch
        numbers = mask[:, ::patch, ::patch].flatten(1)
        count = max(1, int(numbers.shape[1] * (1 - self.options.ratio)))
        return numbers.argsort(1)[:, :count].sort(1).values
