"""The diffusion transformer as published (Peebles and Xie 2023): shared embedders, adaLN-zero, sin-cos positions.

Parameters have the names of the published checkpoints. diffusers' DiTTransformer2DModel is another model: each of its
blocks embeds time and label.
"""

import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn

from kairos.models.backbone import Backbone, Descriptions, NullText
from kairos.models.layers import Attention, build_mlp, build_sequence, embed_time
from kairos.models.settings import TransformerOptions
from kairos.shapes import Embedding, Images, Output, PatchPixels, Rows, Times, Tokens
from kairos_timesteps.errors import KairosError

Modulation = Float[Tensor, "batch hidden_width"]  # shift or scale of each sample's tokens
Positions = Float32[Tensor, "patches hidden_width"]  # embedding of each patch's position

_SINUSOIDS = 256  # sines and cosines that embed t: width of the embedding before its MLP


def modulate(x: Tokens, shift: Modulation, scale: Modulation) -> Tokens:
    """Return x (1 + scale) + shift: tokens x (batch, tokens, width), scaled and shifted by vectors (batch, width)."""
    return x * (1 + scale[:, None]) + shift[:, None]


class AdaLNBlock(nn.Module):
    """Transformer block whose normalisations and residuals are conditioned on the embedding: adaLN-zero.

    Args:
        width: width of the tokens.
        attention: attention of the block.
        mlp_ratio: hidden width of the MLP, in multiples of `width`.
    """

    def __init__(self, width: int, attention: Attention, mlp_ratio: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.attn = attention
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.mlp = build_mlp(width, int(width * mlp_ratio), width, approximate="tanh")
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tokens, c: Embedding, *attention_arguments: Tensor) -> Tokens:
        """Return the block's output for tokens x, in the shape of x, (batch, tokens, width).

        c, (batch, width), is the embedding of t and conditions. Further arguments are passed to the attention.
        """
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate1[:, None] * self.attn(modulate(self.norm1(x), shift1, scale1), *attention_arguments)
        output: Tokens = x + gate2[:, None] * self.mlp(modulate(self.norm2(x), shift2, scale2))
        return output


class FinalLayer(nn.Module):
    """Final layer from tokens to pixels; functions of the embedding scale and shift the normalised tokens."""

    def __init__(self, width: int, patch: int, channels: int):
        super().__init__()
        self.norm_final = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(width, patch * patch * channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tokens, c: Embedding) -> PatchPixels:
        """Return the pixels of each token's patch, (batch, tokens, patch * patch * channels).

        x are tokens (batch, tokens, width), and c, (batch, width), is the embedding of t and conditions.
        """
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        pixels: PatchPixels = self.linear(modulate(self.norm_final(x), shift, scale))
        return pixels


def initialise(module: nn.Module) -> None:
    """Initialise all linear layers in a module: weights Xavier-uniform, biases 0, and weights of adaLN modulation 0.

    With modulation 0, a block is the identity.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    for layer in module.modules():  # after the loop above, which initialises the modulation too
        if isinstance(layer, AdaLNBlock | FinalLayer):
            nn.init.zeros_(layer.get_parameter("adaLN_modulation.1.weight"))


class DiT(Backbone):
    """Diffusion transformer for images of any size that the patches divide; see `Backbone` for the arguments.

    A text is one vector per image. An MLP embeds it, and the result is added to the time embedding (SpeeD's code).

    `MDT` derives from this class, but its options are not `DiTOptions`. Only methods that `MDT` overrides, such as
    `build_block`, may read an option that `MDTOptions` lacks.

    Raises:
        KairosError: patches do not divide the size, or the text is a sequence.
    """

    def __init__(
        self, options: TransformerOptions, shape: tuple[int, int, int], conditions: Descriptions, outputs: int
    ):
        super().__init__(options, shape, conditions, outputs)
        width, patch = options.width, options.patch
        self.x_embedder = build_sequence(proj=nn.Conv2d(self.inputs, width, patch, patch))
        embedder = nn.Sequential(nn.Linear(_SINUSOIDS, width), nn.SiLU(), nn.Linear(width, width))
        self.t_embedder = nn.ModuleDict({"mlp": embedder})
        self.y_embedder = nn.ModuleDict()
        if "class" in conditions:  # the row after the last class means no class
            self.y_embedder["embedding_table"] = nn.Embedding(conditions["class"]["num_classes"] + 1, width)
        if "text" in conditions:
            self.y_embedder["null"] = NullText(conditions["text"], axes=1)
            self.y_embedder["y_proj"] = build_mlp(conditions["text"]["shape"][0], width, width, approximate="tanh")
        self.pos_embed = nn.Parameter(_positions(width, self.patch_grid(patch))[None], requires_grad=False)
        self.blocks = nn.ModuleList(self.build_block() for _ in range(options.depth))
        self.final_layer = FinalLayer(width, patch, outputs)
        self._initialise()

    def build_block(self) -> AdaLNBlock:
        """Build one transformer block; the constructor calls it once for each block."""
        width, heads = self.options.width, self.options.heads
        return AdaLNBlock(width, Attention(width, heads), self.options.mlp_ratio)

    def _initialise(self) -> None:
        """Initialise all weights as the published code.

        The embeddings of t, class and text are normal with standard deviation 0.02, and the final layer is 0. All other
        layers are initialised by `initialise`, the convolution of the patches as a linear layer.
        """
        initialise(self)
        patch_weight = self.x_embedder.get_parameter("proj.weight")  # (width, channels, patch, patch)
        nn.init.xavier_uniform_(patch_weight.data.flatten(1))  # a view, so that it changes the weight
        nn.init.zeros_(self.x_embedder.get_parameter("proj.bias"))
        for layer in (*self.t_embedder.modules(), *self.y_embedder.modules()):
            if isinstance(layer, nn.Linear | nn.Embedding):
                nn.init.normal_(layer.weight, std=0.02)
        nn.init.zeros_(self.final_layer.linear.weight)

    def convert_published(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a published file's weights; SpeeD's null text is renamed and reshaped, the others are unchanged."""
        renamed = dict(weights)
        if "y_embedder.y_embedding" in renamed:
            renamed["y_embedder.null.value"] = renamed.pop("y_embedder.y_embedding")[0]  # from (1, width)
        return renamed

    def embed(self, x: Images, t: Times, conditions: dict[str, Rows]) -> tuple[Tokens, Embedding]:
        """Return tokens of x, (batch, tokens, width), and the embedding of t and conditions, (batch, width).

        The tokens are embedded patches plus their positions. Classes are indices; the number of classes is the index of
        no class. NaN in a text is replaced by the null value.
        """
        patches = self.x_embedder(self.with_image_conditions(x, conditions))  # (batch, width, rows, columns)
        tokens = patches.flatten(2).transpose(1, 2) + self.pos_embed
        c = self.t_embedder["mlp"](embed_time(t, _SINUSOIDS))
        if "class" in self.conditions:
            c = c + self.y_embedder["embedding_table"](conditions["class"])
        if "text" in self.conditions:
            c = c + self.y_embedder["y_proj"](self.y_embedder["null"](conditions["text"]))
        return tokens, c

    def to_image(self, tokens: Tokens, c: Embedding) -> Output:
        """Return the image (batch, outputs, height, width) from the last block's tokens and the embedding c."""
        return self.unpatchify(self.final_layer(tokens, c), self.options.patch)

    def forward(self, x: Images, t: Times, conditions: dict[str, Rows]) -> Output:
        """Return the prediction, (batch, outputs, height, width); `embed` describes the conditions."""
        tokens, c = self.embed(x, t, conditions)
        for block in self.blocks:
            tokens = block(tokens, c)
        return self.to_image(tokens, c)


def _positions(width: int, grid: tuple[int, int]) -> Positions:
    """Return the sin-cos embedding of positions in a grid of (rows, columns) patches, float32 (rows * columns, width).

    The four quarters of the width are sine and cosine of the column, then sine and cosine of the row.

    Raises:
        KairosError: the width is not a multiple of 4.
    """
    if width % 4:
        raise KairosError(f"model.width: got {width}, allowed: a multiple of 4")
    quarter = width // 4
    rates = 1.0 / 10_000 ** (torch.arange(quarter, dtype=torch.float64) / quarter)
    row_numbers, column_numbers = (torch.arange(side, dtype=torch.float64) for side in grid)
    rows, columns = torch.meshgrid(row_numbers, column_numbers, indexing="ij")  # each of the grid's shape
    features = []
    for positions in (columns, rows):
        angles = positions.reshape(-1, 1) * rates[None]  # (rows * columns, quarter)
        features += [angles.sin(), angles.cos()]
    return torch.cat(features, dim=1).float()
