"""U-ViT (Bao et al. 2023): a transformer on patches, time, class and text as tokens, with long skips.

Parameters have the names of the published checkpoints.
"""

import math

import torch
from torch import Tensor, nn

from kairos.models.backbone import Backbone, Descriptions, NullText
from kairos.models.layers import Attention, PlainBlock, build_sequence, embed_time, initialise_normal
from kairos.models.settings import UViTOptions
from kairos.shapes import Images, Output, Rows, Times


class UViT(Backbone):
    """U-ViT for images of any size that the patches divide; see `Backbone` for the arguments.

    The tokens are class, time, text and patches (class and text if the model is conditioned on them), with one table of
    learned positions.

    Raises:
        KairosError: patches do not divide the size, or the text is not a sequence.
    """

    def __init__(self, options: UViTOptions, shape: tuple[int, int, int], conditions: Descriptions, outputs: int):
        super().__init__(options, shape, conditions, outputs)
        width, patch, half = options.width, options.patch, options.depth // 2
        self.patches = math.prod(self.patch_grid(patch))
        self.patch_embed = build_sequence(proj=nn.Conv2d(self.inputs, width, patch, patch))
        token_count = 1 + self.patches  # the time, and the patches
        if "class" in conditions:  # the row after the last class means no class
            self.label_emb = nn.Embedding(conditions["class"]["num_classes"] + 1, width)
            token_count += 1
        if "text" in conditions:
            self.null = NullText(conditions["text"], axes=2)
            text_tokens, text_width = conditions["text"]["shape"]
            self.context_embed = nn.Linear(text_width, width)
            token_count += text_tokens
        self.pos_embed = nn.Parameter(torch.empty(1, token_count, width))

        def build_block(skip: bool = False) -> PlainBlock:
            attention = Attention(width, options.heads, qkv_bias=False)
            return PlainBlock(width, attention, options.mlp_ratio, eps=1e-5, skip=skip)

        self.in_blocks = nn.ModuleList(build_block() for _ in range(half))
        self.mid_block = build_block()
        self.out_blocks = nn.ModuleList(build_block(skip=True) for _ in range(half))
        self.norm = nn.LayerNorm(width)
        self.decoder_pred = nn.Linear(width, patch * patch * outputs)
        self.final_layer = nn.Conv2d(outputs, outputs, 3, padding=1) if options.convolution else nn.Identity()
        nn.init.normal_(self.pos_embed, std=0.02)
        initialise_normal(self)

    def convert_published(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a published file's weights; a class table without a row for no class gets a row of zeros at its end.

        The published model of ImageNet 64 has no such row. Names are unchanged.
        """
        table = weights.get("label_emb.weight")  # (classes, width)
        if table is None or "class" not in self.conditions:
            return weights
        if len(table) + 1 != self.label_emb.num_embeddings:
            return weights
        no_class = torch.zeros_like(table[:1])
        return weights | {"label_emb.weight": torch.cat([table, no_class])}

    def forward(self, x: Images, t: Times, conditions: dict[str, Rows]) -> Output:
        """Return the prediction, (batch, outputs, height, width).

        Classes are indices; the number of classes is the index of no class. NaN in a text is replaced by the null
        value.
        """
        tokens = self.patch_embed(self.with_image_conditions(x, conditions)).flatten(2).transpose(1, 2)  # row by row
        condition_tokens = [embed_time(t, self.options.width)[:, None]]  # in the order class, time, text
        if "class" in self.conditions:
            class_token = self.label_emb(conditions["class"])[:, None]
            condition_tokens = [class_token, *condition_tokens]
        if "text" in self.conditions:
            condition_tokens.append(self.context_embed(self.null(conditions["text"])))
        tokens = torch.cat([*condition_tokens, tokens], dim=1) + self.pos_embed
        skips = []  # tokens after each block of the first half; the last block's are merged first
        for block in self.in_blocks:
            tokens = block(tokens)
            skips.append(tokens)
        tokens = self.mid_block(tokens)
        for block in self.out_blocks:
            tokens = block(tokens, skips.pop())
        patch_tokens = tokens[:, -self.patches :]
        pixels = self.decoder_pred(self.norm(patch_tokens))
        prediction: Output = self.final_layer(self.unpatchify(pixels, self.options.patch))
        return prediction
