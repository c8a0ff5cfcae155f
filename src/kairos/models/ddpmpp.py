"""DDPM++ in EDM's form (Song et al. 2021; Karras et al. 2022, appendix C), EDM's and FDM's network for CIFAR-10.

Written from the papers' descriptions; weights have the published names. The rows of attention's qkv are interleaved.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kairos.models.backbone import Backbone, Descriptions, apply_padded
from kairos.models.layers import embed_time
from kairos.models.settings import DdpmppOptions
from kairos.shapes import Embedding, FeatureMaps, Images, Inputs, Output, Rows, Times

BlockOutput = Float[Tensor, "batch output_channels scaled_rows scaled_columns"]  # other channels and sides
Resampled = Float[Tensor, "batch channels scaled_rows scaled_columns"]  # other sides

_SUM_SCALE = math.sqrt(0.5)  # keeps the variance of a sum of two branches


def _build_norm(channels: int) -> nn.GroupNorm:
    """Return a group normalisation with at most 32 groups of equal size, of at least 4 channels each if possible."""
    most_groups = min(32, channels // 4)  # 0 below 4 channels; the next line then returns a group for each channel
    groups = math.gcd(most_groups, channels)  # divides the channels, as GroupNorm demands
    return nn.GroupNorm(groups, channels, eps=1e-6)


class ResidualBlock(nn.Module):
    """Residual block, followed by single-head attention if `attention` is set.

    Args:
        inputs, outputs: channels.
        width: width of the embedding of time and conditions.
        dropout: probability of dropout.
        attention: add attention after the block.
        scale: 0.5 or 2 to halve or double the sides first; 1 to keep them.
    """

    def __init__(self, inputs: int, outputs: int, width: int, dropout: float, attention: bool, scale: float = 1.0):
        super().__init__()
        self.scale, self.dropout = scale, nn.Dropout(dropout)
        self.norm0, self.norm1 = _build_norm(inputs), _build_norm(outputs)
        self.conv0 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.affine = nn.Linear(width, outputs)
        self.conv1 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs or scale != 1 else None
        self.norm2 = _build_norm(outputs) if attention else None
        if attention:
            self.qkv, self.proj = nn.Conv2d(outputs, 3 * outputs, 1), nn.Conv2d(outputs, outputs, 1)

    def forward(self, x: FeatureMaps, embedding: Embedding) -> BlockOutput:
        """Return features (batch, outputs, h * scale, w * scale) of x (batch, inputs, h, w).

        `embedding`, (batch, width), is the embedding of time and conditions.
        """
        h = self.conv0(self._resample(nn.functional.silu(self.norm0(x))))
        h = nn.functional.silu(self.norm1(h + self.affine(embedding)[..., None, None]))
        shortcut = self._resample(x)
        if self.skip is not None:
            shortcut = self.skip(shortcut)
        x = (self.conv1(self.dropout(h)) + shortcut) * _SUM_SCALE
        if self.norm2 is None:  # a block without attention
            return x
        output: BlockOutput = (x + self.proj(self._attend(self.norm2(x)))) * _SUM_SCALE
        return output

    def _resample(self, x: FeatureMaps) -> Resampled:
        """Return x with its sides scaled by `scale`: averages of 2 x 2 pixels, or each pixel as 2 x 2 equal ones."""
        if self.scale == 1:
            return x
        if self.scale < 1:
            return nn.functional.avg_pool2d(x, 2)
        return nn.functional.interpolate(x, scale_factor=2.0)

    def _attend(self, x: FeatureMaps) -> FeatureMaps:
        """Return single-head self-attention over the pixels of x, shape of x; the softmax is in float32 or more."""
        batch, channels = x.shape[:2]
        # the rows are q, k, v of the first channel, then of the second; each result is (batch, channels, pixels)
        q, k, v = self.qkv(x).reshape(batch, channels, 3, -1).unbind(2)
        logits = torch.einsum("bcq,bck->bqk", q, k / math.sqrt(channels))
        weights = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).to(v.dtype)
        return torch.einsum("bqk,bck->bcq", weights, v).reshape(x.shape)


class DDPMpp(Backbone):
    """DDPM++; see `Backbone` for the arguments. t is EDM's c_noise, ln(sigma)/4; no class is the zero vector.

    ``conditions["augment"]`` (batch, 9) contains the labels of the augmentations; without it they are 0. Images are
    padded to sides that the levels can halve. If they are not square, `options.attention` refers to the height.
    """

    def __init__(self, options: DdpmppOptions, shape: tuple[int, int, int], conditions: Descriptions, outputs: int):
        super().__init__(options, shape, conditions, outputs)
        channels, levels = options.channels, len(options.multipliers)
        self._factor = 2 ** (levels - 1)  # the levels halve sides that it divides

        # embeddings of classes, augmentation labels and times
        embedding_width = 4 * channels
        self._classes = conditions["class"]["num_classes"] if "class" in conditions else 0
        self.map_label = nn.Linear(self._classes, channels) if self._classes else None
        self.map_augment = nn.Linear(options.augment, channels, bias=False) if options.augment else None
        self.map_layer0 = nn.Linear(channels, embedding_width)
        self.map_layer1 = nn.Linear(embedding_width, embedding_width)

        # U-Net
        height, width = (math.ceil(side / self._factor) * self._factor for side in shape[1:])
        level_names, level_attends = [], []
        for level in range(levels):
            rows, columns = height // 2**level, width // 2**level
            level_names.append(f"{rows}x{columns}")  # the published names of weights contain it
            level_attends.append(rows in options.attention)
        skip_channels = self._build_encoder(level_names, level_attends)
        self._build_decoder(level_names, level_attends, skip_channels)
        self._initialise()

    def _build_block(self, inputs: int, outputs: int, attention: bool = False, scale: float = 1.0) -> ResidualBlock:
        """Return a residual block with the width of the time embedding and the dropout of this network."""
        width, dropout = 4 * self.options.channels, self.options.dropout
        return ResidualBlock(inputs, outputs, width, dropout, attention=attention, scale=scale)

    def _build_encoder(self, level_names: list[str], level_attends: list[bool]) -> list[int]:
        """Build the encoder as attribute `enc`, and return the channels of each layer's output, for the skips.

        Args:
            level_names: names of the levels, the highest resolution first.
            level_attends: True for a level whose blocks all have attention.
        """
        self.enc = nn.ModuleDict()
        channels = self.options.channels
        self.enc[f"{level_names[0]}_conv"] = nn.Conv2d(self.inputs, channels, 3, padding=1)
        skip_channels = [channels]
        for level, (name, multiplier) in enumerate(zip(level_names, self.options.multipliers)):
            if level > 0:
                self.enc[f"{name}_down"] = self._build_block(channels, channels, scale=0.5)
                skip_channels.append(channels)
            level_channels = multiplier * self.options.channels
            for number in range(self.options.blocks):
                block = self._build_block(channels, level_channels, attention=level_attends[level])
                self.enc[f"{name}_block{number}"] = block
                channels = level_channels
                skip_channels.append(channels)
        return skip_channels

    def _build_decoder(self, level_names: list[str], level_attends: list[bool], skip_channels: list[int]) -> None:
        """Build the decoder as attribute `dec`, from the lowest resolution on; `skip_channels` is emptied from its end.

        `level_names` and `level_attends` have the highest resolution first. A level has one block more than in the
        encoder, and only its last one may have attention. Two blocks without skips precede the lowest level; the first
        has attention at any resolution.
        """
        self.dec = nn.ModuleDict()
        channels = skip_channels[-1]
        last_level = len(level_names) - 1
        for level in reversed(range(len(level_names))):
            name = level_names[level]
            if level == last_level:
                self.dec[f"{name}_in0"] = self._build_block(channels, channels, attention=True)
                self.dec[f"{name}_in1"] = self._build_block(channels, channels)
            else:
                self.dec[f"{name}_up"] = self._build_block(channels, channels, scale=2.0)
            level_channels = self.options.multipliers[level] * self.options.channels
            for number in range(self.options.blocks + 1):
                is_last = number == self.options.blocks
                attention = level_attends[level] and is_last
                block = self._build_block(channels + skip_channels.pop(), level_channels, attention=attention)
                self.dec[f"{name}_block{number}"] = block
                channels = level_channels
        self.dec[f"{level_names[0]}_aux_norm"] = _build_norm(channels)
        self.dec[f"{level_names[0]}_aux_conv"] = nn.Conv2d(channels, self.outputs, 3, padding=1)

    @torch.no_grad()
    def _initialise(self) -> None:
        """Initialise weights uniformly by fan average and biases by 0.

        Weights of the last layers of branches and of the network are scaled by 1e-5, and weights of attention's first
        layers by 0.2^(1/2).
        """
        for name, module in self.named_modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                if name.endswith((".conv1", ".proj", "_aux_conv")):
                    gain = 1e-5
                elif name.endswith("qkv"):
                    gain = math.sqrt(0.2)
                else:
                    gain = 1.0
                nn.init.xavier_uniform_(module.weight, gain)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Images, t: Times, conditions: dict[str, Rows]) -> Output:
        """Return the prediction, (batch, outputs, height, width); t is EDM's c_noise.

        Images are padded to sides that the levels can halve, and the output is cropped. `_embed` uses the conditions.
        """
        embedding = self._embed(t, conditions)
        inputs = self.with_image_conditions(x, conditions)
        return apply_padded(lambda padded: self._apply_unet(padded, embedding), inputs, self._factor)

    def _embed(self, t: Times, conditions: dict[str, Rows]) -> Embedding:
        """Return the embedding of times, classes and augmentation labels, (batch, 4 * channels).

        Without ``conditions["augment"]`` the augmentation labels are 0: not augmented. A network with classes needs
        ``conditions["class"]``; the index after the last class means "no class".
        """
        width = self.options.channels
        embedding = embed_time(t, width, shift=1).roll(width // 2, 1)  # sines first
        if self.map_label is not None:
            classes = torch.arange(self._classes, device=t.device)
            one_hot = (conditions["class"][:, None] == classes).float()  # all 0 for no class, the index after the last
            # the factor, EDM's, makes the mean square of the vector of a class 1
            embedding = embedding + self.map_label(one_hot * math.sqrt(self._classes))
        if self.map_augment is not None:
            labels = conditions.get("augment")
            if labels is None:  # sampling: images without augmentation
                labels = embedding.new_zeros(len(t), self.options.augment)
            embedding = embedding + self.map_augment(labels)
        for layer in (self.map_layer0, self.map_layer1):
            embedding = nn.functional.silu(layer(embedding))
        return embedding

    def _apply_unet(self, x: Inputs, embedding: Embedding) -> Output:
        """Return the prediction for x, whose sides the levels can halve, with the embedding of `_embed`."""
        skips = []  # outputs of the encoder's layers; the decoder uses the last one first
        for layer in self.enc.values():
            x = layer(x, embedding) if isinstance(layer, ResidualBlock) else layer(x)
            skips.append(x)
        *decoder_blocks, (_, final_norm), (_, final_conv) = self.dec.items()  # pairs of name and module
        for name, block in decoder_blocks:
            if "_block" in name:  # the other blocks change the resolution or are the bottleneck
                x = torch.cat([x, skips.pop()], dim=1)
            x = block(x, embedding)
        normalised = final_norm(x)
        output: Output = final_conv(nn.functional.silu(normalised))
        return output

    def convert_published(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a published file's weights without prefix ``model.`` and without constant filters of resampling."""
        converted = {}
        for name, value in weights.items():
            if not name.endswith("resample_filter"):
                converted[name.removeprefix("model.")] = value
        return converted
