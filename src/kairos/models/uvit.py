"""U-ViT (Bao et al. 2023): a transformer on patches, time, class and text as tokens, with long skips.

Parameter names are those of the published checkpoints.
"""

import math

import torch
from torch import Tensor, nn

from kairos.models.backbone import Backbone, Descriptions, NullText
from kairos.models.layers import Attention, PlainBlock, embed_time, initialise_normal, named_sequence
from kairos.models.registries import UViTOptions


class UViT(Backbone):
    """U-ViT; arguments as of `Backbone`, any size that patches divide.

    Tokens are class, time, text (as far as there are any) and patches, with one table of learned positions.

    Raises:
        KairosError: patches do not divide the size; the text is not a sequence.
    """

    def __init__(self, options: UViTOptions, shape: tuple[int, int, int], conditions: Descriptions, outputs: int):
        super().__init__(options, shape, conditions, outputs)
        width, patch, half = options.width, options.patch, options.depth // 2
        self.patches = math.prod(self.grid(patch))
        self.patch_embed = named_sequence(proj=nn.Conv2d(self.inputs, width, patch, patch))
        count = 1 + self.patches
        if "class" in conditions:  # the row past the last class stands for no class
            self.label_emb = nn.Embedding(conditions["class"]["num_classes"] + 1, width)
            count += 1
        if "text" in conditions:
            self.null = NullText(conditions["text"], axes=2)
            tokens, text_width = conditions["text"]["shape"]
            self.context_embed = nn.Linear(text_width, width)
            count += tokens
        self.pos_embed = nn.Parameter(torch.empty(1, count, width))

        def block(skip: bool = False) -> PlainBlock:
            return PlainBlock(width, Attention(width, options.heads, qkv_bias=False), options.mlp_ratio, 1e-5, skip)

        self.in_blocks = nn.ModuleList(block() for _ in range(half))
        self.mid_block = block()
        self.out_blocks = nn.ModuleList(block(skip=True) for _ in range(half))
        self.norm = nn.LayerNorm(width)
        self.decoder_pred = nn.Linear(width, patch * patch * outputs)
        self.final_layer = nn.Conv2d(outputs, outputs, 3, padding=1) if options.convolution else nn.Identity()
        nn.init.normal_(self.pos_embed, std=0.02)
        initialise_normal(self)

    def to_kairos_names(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """A published file's weights; a table of classes without a row for none (ImageNet 64) gets one of zeros."""
        table = weights.get("label_emb.weight")
        if table is None or "class" not in self.conditions or len(table) + 1 != self.label_emb.num_embeddings:
            return weights
        return weights | {"label_emb.weight": nn.functional.pad(table, (0, 0, 0, 1))}

    def forward(self, x: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tensor:
        """Prediction (batch, outputs, height, width)."""
        tokens = self.patch_embed(self.with_image_conditions(x, conditions)).flatten(2).transpose(1, 2)  # row by row
        extra = [embed_time(t, self.options.width)[:, None]]
        if "class" in self.conditions:
            extra.insert(0, self.label_emb(conditions["class"])[:, None])
        if "text" in self.conditions:
            extra.append(self.context_embed(self.null(conditions["text"])))
        tokens = torch.cat([*extra, tokens], dim=1) + self.pos_embed
        skips = []
        for block in self.in_blocks:
            tokens = block(tokens)
            skips.append(tokens)
        tokens = self.mid_block(tokens)
        for block in self.out_blocks:
            tokens = block(tokens, skips.pop())
        pixels = self.decoder_pred(self.norm(tokens[:, -self.patches :]))
        return self.final_layer(self.unpatchify(pixels, self.options.patch))
