"""The masked diffusion transformer, version 1 (Gao et al. 2023): a DiT that is also trained on a subset of the patches.

Parameters have the names of the published checkpoints.
"""

import math

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from kairos.models.backbone import Descriptions
from kairos.models.dit import AdaLNBlock, DiT, initialise
from kairos.models.layers import Attention
from kairos.models.settings import MDTOptions
from kairos.shapes import Embedding, Images, Output, Rows, Times, Tokens

OffsetRows = Int64[Tensor, "*optional_batch tokens tokens"]  # row of the bias table for each pair of tokens
Scores = Float[Tensor, "batch height width"]  # uniform numbers that select the visible patches
VisiblePatches = Int64[Tensor, "batch visible"]  # indices of each image's visible patches, ascending

_UNUSED_OFFSETS = 3  # rows at the end of the published bias tables that no pair of patches uses


class BiasedAttention(Attention):
    """Attention with a learned bias for each head and each offset between two patches.

    Args:
        width: width of the tokens.
        heads: number of heads.
        offsets: rows of the bias table, at least one for each offset.
    """

    def __init__(self, width: int, heads: int, offsets: int):
        super().__init__(width, heads)
        table = nn.Parameter(nn.init.normal_(torch.empty(offsets, heads), std=0.02))
        self.rel_pos_bias = nn.ParameterDict({"relative_position_bias_table": table})

    # the base class attends without offsets
    def forward(self, x: Tokens, offset_rows: OffsetRows) -> Tokens:  # type: ignore[override]
        """Return the attention output, (batch, tokens, width).

        Args:
            x: tokens, (batch, tokens, width).
            offset_rows: row of the bias table for each pair of tokens, ([batch,] tokens, tokens).
        """
        table = self.rel_pos_bias["relative_position_bias_table"]
        bias = nn.functional.embedding(offset_rows, table).movedim(-1, -3)  # ([batch,] heads, tokens, tokens)
        return self.attend_packed(self.qkv(x), bias.contiguous())  # fused attention needs contiguous rows


class MDT(DiT):
    """The masked diffusion transformer; see `Backbone` for the arguments.

    If ``conditions["mask"]`` contains uniform numbers (batch, height, width), the network hides a share `ratio` of its
    L patches. All blocks except the last `decoder_depth` process the int(L (1 - ratio)) patches with the lowest numbers
    in their first pixels. Then a side block computes the tokens of the hidden patches.

    Raises:
        KairosError: patches do not divide the size.
    """

    _offset_rows: OffsetRows  # rows of the bias tables

    def __init__(self, options: MDTOptions, shape: tuple[int, int, int], conditions: Descriptions, outputs: int):
        _, height, width = shape
        # the base class rejects a size that the patches do not divide
        rows, columns = math.ceil(height / options.patch), math.ceil(width / options.patch)
        # set before the base class builds the blocks, whose attention has one row per offset between two patches
        self._offset_count = (2 * rows - 1) * (2 * columns - 1) + _UNUSED_OFFSETS
        super().__init__(options, shape, conditions, outputs)
        self.pos_embed.requires_grad_()  # trained, unlike the positions of DiT
        self.decoder_pos_embed = nn.Parameter(self.pos_embed.detach().clone())
        self.sideblocks = nn.ModuleList([self.build_block()])
        initialise(self.sideblocks)
        self.mask_token = nn.Parameter(nn.init.normal_(torch.empty(1, 1, options.width), std=0.02))
        self.register_buffer("_offset_rows", _pairwise_offsets(rows, columns), persistent=False)

    def build_block(self) -> AdaLNBlock:
        """Build one transformer block, whose attention has a learned bias for each offset between patches."""
        width, heads = self.options.width, self.options.heads
        return AdaLNBlock(width, BiasedAttention(width, heads, self._offset_count), self.options.mlp_ratio)

    def convert_published(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a published file's weights without the constant index of every block."""
        return {name: value for name, value in weights.items() if not name.endswith("relative_position_index")}

    def forward(self, x: Images, t: Times, conditions: dict[str, Rows]) -> Output:
        """Return the prediction, (batch, outputs, height, width); ``conditions["mask"]`` hides patches, see `MDT`.

        Without a mask, the side block and the mask token are not used. In training their gradients are then 0.
        """
        tokens, c = self.embed(x, t, conditions)
        blocks = list(self.blocks)
        encoder_depth = len(blocks) - self.options.decoder_depth
        encoder_blocks, decoder_blocks = blocks[:encoder_depth], blocks[encoder_depth:]
        if "mask" in conditions:
            tokens = self._encode_visible(encoder_blocks, tokens, c, self._visible_patches(conditions["mask"]))
        else:
            for block in encoder_blocks:
                tokens = block(tokens, c, self._offset_rows)
            tokens = tokens + self.decoder_pos_embed
            if self.training:  # adds 0: DistributedDataParallel waits for gradients of all parameters
                unused = (self.mask_token, *self.sideblocks.parameters())
                tokens = tokens + 0 * torch.stack([parameter.sum() for parameter in unused]).sum()
        for block in decoder_blocks:
            tokens = block(tokens, c, self._offset_rows)
        return self.to_image(tokens, c)

    def _encode_visible(self, blocks: list[nn.Module], tokens: Tokens, c: Embedding, visible: VisiblePatches) -> Tokens:
        """Return tokens of all patches, in the shape of `tokens`, from the encoder's blocks and the side block.

        The blocks process only the patches with indices `visible`, (batch, n). The decoder's positions are added. Then
        the side block computes the tokens of the other patches, which start as the mask token.
        """
        # encoder, on the visible patches alone
        # indexing, not gather and scatter: their deterministic kernels on a GPU sort an index for every number
        image_index = torch.arange(len(visible), device=visible.device)[:, None]  # (batch, 1)
        image_and_patch = (image_index, visible)
        visible_tokens = tokens[image_and_patch]  # (batch, visible patches, width)
        offset_rows = self._offset_rows[visible[:, :, None], visible[:, None]]  # a row for each pair of visible patches
        for block in blocks:
            visible_tokens = block(visible_tokens, c, offset_rows)

        # side block: hidden patches start as the mask token, and the block computes them from all patches
        is_hidden = torch.ones_like(tokens[:, :, :1], dtype=torch.bool).scatter(1, visible[:, :, None], False)
        mask_tokens = self.mask_token.to(visible_tokens.dtype).expand_as(tokens)
        tokens = mask_tokens.index_put(image_and_patch, visible_tokens) + self.decoder_pos_embed
        side_tokens = self.sideblocks[0](tokens, c, self._offset_rows)
        return torch.where(is_hidden, side_tokens, tokens)

    def _visible_patches(self, scores: Scores) -> VisiblePatches:
        """Return ascending indices of the visible patches with the smallest scores, int64 (batch, visible patches).

        The scores are uniform random numbers, (batch, height, width); a patch has the score of its first pixel. The
        number of visible patches is int(L (1 - ratio)) of L patches, and at least 1.
        """
        patch = self.options.patch
        patch_scores = scores[:, ::patch, ::patch].flatten(1)  # (batch, patches)
        visible_count = max(1, int(patch_scores.shape[1] * (1 - self.options.ratio)))
        visible = patch_scores.argsort(1)[:, :visible_count]
        return visible.sort(1).values


def _pairwise_offsets(rows: int, columns: int) -> OffsetRows:
    """Return the row of the bias table for each pair of patches of a grid, int64 (patches, patches).

    The row depends on the offset between the two patches alone: there are 2 rows - 1 vertical and 2 columns - 1
    horizontal offsets. Offsets are numbered from the upper left, row by row.
    """
    patch = torch.arange(rows * columns)
    row, column = patch // columns, patch % columns
    vertical = row[:, None] - row + (rows - 1)  # 0 to 2 rows - 2
    horizontal = column[:, None] - column + (columns - 1)  # 0 to 2 columns - 2
    return vertical * (2 * columns - 1) + horizontal
