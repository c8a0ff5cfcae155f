"""DDPM++ in EDM's form (Song et al. 2021; Karras et al. 2022, appendix C), EDM's and FDM's network for CIFAR-10.

Written from its description; names of weights are the published ones. Rows of attention's qkv are interleaved.
"""

import math

import torch
from torch import Tensor, nn

from kairos.models.backbone import Backbone, Descriptions, apply_padded
from kairos.models.layers import embed_time
from kairos.models.registries import DdpmppOptions

_HALF = math.sqrt(0.5)  # keeps the variance of a sum of two


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(min(32, channels // 4), channels), channels, eps=1e-6)


class ResidualBlock(nn.Module):
    """A residual block, then attention with one head where asked; `scale` halves or doubles sides first."""

    def __init__(self, inputs: int, outputs: int, width: int, dropout: float, attention: bool, scale: float = 1):
        super().__init__()
        self.scale, self.dropout = scale, nn.Dropout(dropout)
        self.norm0, self.norm1 = _norm(inputs), _norm(outputs)
        self.conv0 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.affine = nn.Linear(width, outputs)
        self.conv1 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs or scale != 1 else None
        self.norm2 = _norm(outputs) if attention else None
        if attention:
            self.qkv, self.proj = nn.Conv2d(outputs, 3 * outputs, 1), nn.Conv2d(outputs, outputs, 1)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """Images (batch, inputs, h, w) under an embedding (batch, width) to (batch, outputs, h scale, w scale)."""
        h = self.conv0(self._resample(nn.functional.silu(self.norm0(x))))
        h = nn.functional.silu(self.norm1(h + self.affine(embedding)[..., None, None]))
        short = self._resample(x)
        x = (self.conv1(self.dropout(h)) + (short if self.skip is None else self.skip(short))) * _HALF
        return x if self.norm2 is None else (x + self.proj(self._attend(self.norm2(x)))) * _HALF

    def _resample(self, x: Tensor) -> Tensor:
        if self.scale == 1:
            return x
        return nn.functional.avg_pool2d(x, 2) if self.scale < 1 else nn.functional.interpolate(x, scale_factor=2.0)

    def _attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, -1).unbind(2)  # each (batch, channels, pixels)
        logits = torch.einsum("bcq,bck->bqk", q, k / math.sqrt(x.shape[1]))
        weights = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).to(v.dtype)
        return torch.einsum("bqk,bck->bcq", weights, v).reshape(x.shape)


class DDPMpp(Backbone):
    """DDPM++; arguments as of `Backbone`. t is EDM's c_noise, ln(sigma)/4; no class is the zero vector.

    Takes labels of the augmentations, ``conditions["augment"]`` (batch, 9), as zeros where there are none.
    """

    def __init__(self, options: DdpmppOptions, shape: tuple[int, int, int], conditions: Descriptions, outputs: int):
        super().__init__(options, shape, conditions, outputs)
        channels, width, levels = options.channels, 4 * options.channels, len(options.multipliers)
        self._factor = 2 ** (levels - 1)
        self._classes = conditions["class"]["num_classes"] if "class" in conditions else 0
        self.map_label = nn.Linear(self._classes, channels) if self._classes else None
        self.map_augment = nn.Linear(options.augment, channels, bias=False) if options.augment else None
        self.map_layer0, self.map_layer1 = nn.Linear(channels, width), nn.Linear(width, width)

        sides = [[-(-side // self._factor) * self._factor >> level for side in shape[1:]] for level in range(levels)]
        names, attends = [f"{h}x{w}" for h, w in sides], [h in options.attention for h, _ in sides]
        self.enc, self.dec = nn.ModuleDict(), nn.ModuleDict()

        def block(outputs: int, attention: bool = False, inputs: int = 0, scale: float = 1) -> ResidualBlock:
            return ResidualBlock(inputs or outputs, outputs, width, options.dropout, attention, scale)

        self.enc[f"{names[0]}_conv"] = nn.Conv2d(self.inputs, channels, 3, padding=1)
        skips = [c := channels]
        for level, (name, multiplier) in enumerate(zip(names, options.multipliers)):
            if level:
                self.enc[f"{name}_down"] = block(c, scale=0.5)
                skips.append(c)
            for number in range(options.blocks):
                self.enc[f"{name}_block{number}"] = block(multiplier * channels, attends[level], c)
                skips.append(c := multiplier * channels)
        for level in reversed(range(levels)):
            name, multiplier = names[level], options.multipliers[level]
            if level == levels - 1:
                self.dec[f"{name}_in0"], self.dec[f"{name}_in1"] = block(c, True), block(c)
            else:
                self.dec[f"{name}_up"] = block(c, scale=2)
            for number in range(options.blocks + 1):
                attention = attends[level] and number == options.blocks
                self.dec[f"{name}_block{number}"] = block(multiplier * channels, attention, c + skips.pop())
                c = multiplier * channels
        self.dec[f"{names[0]}_aux_norm"] = _norm(c)
        self.dec[f"{names[0]}_aux_conv"] = nn.Conv2d(c, outputs, 3, padding=1)
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        """Uniform by fan average, biases 0; last layers of branches times 1e-5, attention's first times 0.2^(1/2)."""
        for name, module in self.named_modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                last = name.endswith((".conv1", ".proj", "_aux_conv"))
                nn.init.xavier_uniform_(module.weight, 1e-5 if last else math.sqrt(0.2) if name.endswith("qkv") else 1)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tensor:
        """Prediction (batch, outputs, height, width)."""
        width = self.options.channels
        embedding = embed_time(t, width, shift=1).roll(width // 2, 1)  # sines first
        if self.map_label is not None:
            classes = torch.arange(self._classes, device=t.device)
            told = (conditions["class"][:, None] == classes).float()  # all 0 for the class past the last
            embedding = embedding + self.map_label(told * math.sqrt(self._classes))
        if self.map_augment is not None:
            labels = conditions.get("augment")
            embedding = embedding + self.map_augment(embedding.new_zeros(len(t), 9) if labels is None else labels)
        for layer in (self.map_layer0, self.map_layer1):
            embedding = nn.functional.silu(layer(embedding))
        return apply_padded(
            lambda x: self._network(x, embedding), self.with_image_conditions(x, conditions), self._factor
        )

    def _network(self, x: Tensor, embedding: Tensor) -> Tensor:
        skips = []
        for layer in self.enc.values():
            x = layer(x, embedding) if isinstance(layer, ResidualBlock) else layer(x)
            skips.append(x)
        *blocks, (_, norm), (_, last) = self.dec.items()
        for name, block in blocks:
            x = block(torch.cat([x, skips.pop()], dim=1) if "_block" in name else x, embedding)
        return last(nn.functional.silu(norm(x)))

    def to_kairos_names(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights of EDM's wrapper, as its ``state_dict`` names them: without the constant filters."""
        kept = {name: value for name, value in weights.items() if not name.endswith("resample_filter")}
        return {name.removeprefix("model."): value for name, value in kept.items()}
