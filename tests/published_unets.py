"""Reference U-Nets in plain torch, independent of diffusers, whose weights have their published names."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class AdmBlock(nn.Module):
    """Residual block of ADM."""

    def __init__(self, inputs: int, outputs: int, width: int, groups: int, scale_shift: bool, resample: str = ""):
        super().__init__()
        self.scale_shift, self.resample = scale_shift, resample
        self.in_layers = nn.Sequential(
            nn.GroupNorm(groups, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1)
        )
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(width, outputs * (1 + scale_shift)))
        self.out_layers = nn.Sequential(
            nn.GroupNorm(groups, outputs), nn.SiLU(), nn.Dropout(0.0), nn.Conv2d(outputs, outputs, 3, padding=1)
        )
        self.skip_connection = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        h = self.in_layers[1](self.in_layers[0](x))
        if self.resample == "down":
            h, x = F.avg_pool2d(h, 2), F.avg_pool2d(x, 2)
        elif self.resample == "up":
            h, x = (image.repeat_interleave(2, 2).repeat_interleave(2, 3) for image in (h, x))
        h = self.in_layers[2](h)
        conditioning = self.emb_layers(emb)[:, :, None, None]
        if self.scale_shift:
            scale, shift = conditioning.chunk(2, 1)
            h = self.out_layers[0](h) * (1 + scale) + shift
        else:
            h = self.out_layers[0](h + conditioning)
        return self.skip_connection(x) + self.out_layers[3](F.silu(h))


class AdmAttention(nn.Module):
    """Attention of ADM, with the rows of queries, keys and values in the legacy order (head by head) or the new one."""

    def __init__(self, channels: int, heads: int, groups: int, legacy: bool):
        super().__init__()
        self.heads, self.legacy = heads, legacy
        self.norm, self.qkv = nn.GroupNorm(groups, channels), nn.Conv1d(channels, 3 * channels, 1)
        self.proj_out = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        n, c, height, width = x.shape
        rows = self.qkv(self.norm(x.flatten(2)))
        values_by_head = []
        for head in range(self.heads):
            d = c // self.heads
            starts = [(3 * head + k) * d if self.legacy else k * c + head * d for k in range(3)]
            q, k, v = (rows[:, start : start + d] for start in starts)
            weights = torch.softmax(q.transpose(1, 2) @ k / math.sqrt(d), -1)  # (n, queries, keys)
            values_by_head.append(v @ weights.transpose(1, 2))
        return x + self.proj_out(torch.cat(values_by_head, 1)).view(n, c, height, width)


class Op(nn.Module):
    """Strided convolution, named `op`, or nearest-neighbour upsampling and a convolution, named `conv`."""

    def __init__(self, channels: int, down: bool):
        super().__init__()
        if down:
            self.op = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        else:
            self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        return self.op(x) if hasattr(self, "op") else self.conv(x.repeat_interleave(2, 2).repeat_interleave(2, 3))


class Adm(nn.Module):
    """UNetModel of ADM and of latent diffusion."""

    def __init__(self, *, channels: int, multipliers: list[float], blocks: int, attended: set[int], head: int,
                 groups: int, inputs: int, outputs: int, scale_shift: bool, updown: bool, legacy: bool,
                 classes: int = 0):  # fmt: skip
        super().__init__()
        self.channels, width = channels, 4 * channels
        self.time_embed = nn.Sequential(nn.Linear(channels, width), nn.SiLU(), nn.Linear(width, width))
        self.label_emb = nn.Embedding(classes, width) if classes else None
        widths = [round(channels * m) for m in multipliers]
        c = widths[0]

        def block(a: int, b: int, resample: str = "") -> AdmBlock:
            return AdmBlock(a, b, width, groups, scale_shift, resample)

        def attention(c: int) -> AdmAttention:
            return AdmAttention(c, c // (head or c), groups, legacy)

        self.input_blocks = nn.ModuleList([nn.ModuleList([nn.Conv2d(inputs, c, 3, padding=1)])])
        skips = [c]
        for level, out in enumerate(widths):
            for _ in range(blocks):
                self.input_blocks.append(
                    nn.ModuleList([block(c, out), *([attention(out)] if level in attended else [])])
                )
                skips.append(c := out)
            if level < len(widths) - 1:
                self.input_blocks.append(nn.ModuleList([block(c, c, "down") if updown else Op(c, True)]))
                skips.append(c)
        self.middle_block = nn.ModuleList([block(c, c), attention(c), block(c, c)])
        self.output_blocks = nn.ModuleList()
        for level in reversed(range(len(widths))):
            for number in range(blocks + 1):
                layers = [block(c + skips.pop(), c := widths[level])]
                layers += [attention(c)] if level in attended else []
                if level and number == blocks:
                    layers.append(block(c, c, "up") if updown else Op(c, False))
                self.output_blocks.append(nn.ModuleList(layers))
        self.out = nn.Sequential(nn.GroupNorm(groups, c), nn.SiLU(), nn.Conv2d(c, outputs, 3, padding=1))

    def forward(self, x: Tensor, t: Tensor, y: Tensor | None = None) -> Tensor:
        half = self.channels // 2
        angles = t[:, None].float() * torch.exp(-math.log(10_000) * torch.arange(half) / half)
        emb = self.time_embed(torch.cat([angles.cos(), angles.sin()], 1))
        emb = emb if self.label_emb is None else emb + self.label_emb(y)
        skips = []
        for layers in self.input_blocks:
            for layer in layers:
                x = layer(x) if isinstance(layer, nn.Conv2d) else layer(x, emb)
            skips.append(x)
        for layer in self.middle_block:
            x = layer(x, emb)
        for layers in self.output_blocks:
            x = torch.cat([x, skips.pop()], 1)
            for layer in layers:
                x = layer(x, emb)
        return self.out(x)


def ddpm_torch_weights(
    channels: int, multipliers: list[int], blocks: int, attended: set[int], inputs: int, outputs: int
) -> dict[str, Tensor]:
    """Return random weights under the names of ddpm-torch."""
    weights: dict[str, Tensor] = {}
    width, widths = 4 * channels, [channels * m for m in multipliers]

    def put(name: str, *shape: int) -> None:
        weights[f"{name}.weight"] = torch.randn(shape) / math.sqrt(math.prod(shape[1:]) or 1)
        weights[f"{name}.bias"] = torch.randn(shape[0]) / 10

    def residual(name: str, a: int, b: int) -> None:
        put(f"{name}.norm1", a), put(f"{name}.conv1", b, a, 3, 3), put(f"{name}.fc", b, width)
        put(f"{name}.norm2", b), put(f"{name}.conv2", b, b, 3, 3)
        if a != b:
            put(f"{name}.skip", b, a, 1, 1)

    def attention(name: str, c: int) -> None:
        put(f"{name}.norm", c), put(f"{name}.project_in", 3 * c, c, 1, 1), put(f"{name}.project_out", c, c, 1, 1)

    def block(name: str, level: int, a: int, b: int) -> None:
        residual(name + ".0" * (level in attended), a, b)
        if level in attended:
            attention(f"{name}.1", b)

    put("embed.0", width, channels), put("embed.2", width, width), put("in_conv", channels, inputs, 3, 3)
    skips = [c := channels]
    for level, b in enumerate(widths):
        for number in range(blocks):
            block(f"downsamples.level_{level}.{number}", level, c, b)
            skips.append(c := b)
        if level < len(widths) - 1:
            put(f"downsamples.level_{level}.{blocks}.1", b, b, 3, 3)
            skips.append(b)
    residual("middle.0", c, c), attention("middle.1", c), residual("middle.2", c, c)
    for level in reversed(range(len(widths))):
        for number in range(blocks + 1):
            block(f"upsamples.level_{level}.{number}", level, c + skips.pop(), c := widths[level])
        if level:
            put(f"upsamples.level_{level}.{blocks + 1}.1", c, c, 3, 3)
    put("out_conv.0", c), put("out_conv.2", outputs, c, 3, 3)
    return weights


def ddpm_torch(weights: dict[str, Tensor], x: Tensor, t: Tensor, levels: int, blocks: int, groups: int) -> Tensor:
    """Compute the output of ddpm-torch's U-Net from its weights by name."""

    def conv(name: str, x: Tensor, **options: Any) -> Tensor:
        return F.conv2d(x, weights[f"{name}.weight"], weights[f"{name}.bias"], **options)

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(name: str, x: Tensor) -> Tensor:
        return F.group_norm(x, groups, weights[f"{name}.weight"], weights[f"{name}.bias"], eps=1e-6)

    def residual(name: str, x: Tensor) -> Tensor:
        h = (
            conv(f"{name}.conv1", F.silu(norm(f"{name}.norm1", x)), padding=1)
            + linear(f"{name}.fc", active)[..., None, None]
        )
        h = conv(f"{name}.conv2", F.silu(norm(f"{name}.norm2", h)), padding=1)
        return h + (conv(f"{name}.skip", x) if f"{name}.skip.weight" in weights else x)

    def attention(name: str, x: Tensor) -> Tensor:
        q, k, v = conv(f"{name}.project_in", norm(f"{name}.norm", x)).flatten(2).chunk(3, 1)
        attended = v @ torch.softmax(q.transpose(1, 2) @ k / math.sqrt(x.shape[1]), -1).transpose(1, 2)
        return x + conv(f"{name}.project_out", attended.view(x.shape))

    def block(name: str, x: Tensor) -> Tensor:
        if f"{name}.0.conv1.weight" in weights:
            return attention(f"{name}.1", residual(f"{name}.0", x))
        return residual(name, x)

    half = weights["embed.0.weight"].shape[1] // 2
    angles = t[:, None].float() * torch.exp(-math.log(10_000) * torch.arange(half) / (half - 1))
    active = F.silu(linear("embed.2", F.silu(linear("embed.0", torch.cat([angles.sin(), angles.cos()], 1)))))
    skips = [x := conv("in_conv", x, padding=1)]
    for level in range(levels):
        for number in range(blocks):
            skips.append(x := block(f"downsamples.level_{level}.{number}", x))
        if level < levels - 1:
            skips.append(x := conv(f"downsamples.level_{level}.{blocks}.1", F.pad(x, (0, 1, 0, 1)), stride=2))
    x = residual("middle.2", attention("middle.1", residual("middle.0", x)))
    for level in reversed(range(levels)):
        for number in range(blocks + 1):
            x = block(f"upsamples.level_{level}.{number}", torch.cat([x, skips.pop()], 1))
        if level:
            x = conv(f"upsamples.level_{level}.{blocks + 1}.1", F.interpolate(x, scale_factor=2.0), padding=1)
    return conv("out_conv.2", F.silu(norm("out_conv.0", x)), padding=1)


def edm_ddpmpp(
    weights: dict[str, Tensor], x: Tensor, noise: Tensor, classes: Tensor | None = None, augment: Tensor | None = None
) -> Tensor:
    """Compute the output of EDM's DDPM++ from its published weights by name (under ``model.``).

    Args:
        weights: published weights.
        x: images (batch, channels, height, width).
        noise: noise level of each image, ln(sigma)/4 (batch,).
        classes: one-hot rows (batch, classes).
        augment: labels of the augmentations (batch, labels).
    """
    weights = {name.removeprefix("model."): value for name, value in weights.items()}
    side = x.shape[-1]

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def conv(name: str, x: Tensor) -> Tensor:
        weight = weights[f"{name}.weight"]
        return F.conv2d(x, weight, weights[f"{name}.bias"], padding=weight.shape[-1] // 2)

    def norm(name: str, x: Tensor) -> Tensor:
        scale = weights[f"{name}.weight"]
        return F.group_norm(x, min(32, x.shape[1] // 4), scale, weights[f"{name}.bias"], eps=1e-6)

    def resample(name: str, x: Tensor) -> Tensor:
        if name.endswith("_down"):
            return F.conv2d(x.flatten(0, 1)[:, None], torch.full((1, 1, 2, 2), 0.25), stride=2).view(
                *x.shape[:2], x.shape[2] // 2, x.shape[3] // 2
            )
        return x.repeat_interleave(2, 2).repeat_interleave(2, 3) if name.endswith("_up") else x

    def block(name: str, x: Tensor) -> Tensor:
        h = conv(f"{name}.conv0", resample(name, F.silu(norm(f"{name}.norm0", x))))
        h = F.silu(norm(f"{name}.norm1", h + linear(f"{name}.affine", emb)[:, :, None, None]))
        short = resample(name, x)
        short = conv(f"{name}.skip", short) if f"{name}.skip.weight" in weights else short
        x = (conv(f"{name}.conv1", h) + short) * math.sqrt(0.5)
        if f"{name}.qkv.weight" not in weights:
            return x
        rows = conv(f"{name}.qkv", norm(f"{name}.norm2", x)).flatten(2)  # q, k and v of a channel are neighbours
        q, k, v = rows[:, 0::3], rows[:, 1::3], rows[:, 2::3]
        attended = v @ torch.softmax(q.transpose(1, 2) @ k / math.sqrt(x.shape[1]), -1).transpose(1, 2)
        return (x + conv(f"{name}.proj", attended.view(x.shape))) * math.sqrt(0.5)

    half = weights["map_layer0.weight"].shape[1] // 2
    angles = noise[:, None] * (1 / 10_000) ** (torch.arange(half) / (half - 1))
    emb = torch.cat([angles.sin(), angles.cos()], 1)
    if classes is not None:
        emb = emb + linear("map_label", classes * math.sqrt(classes.shape[1]))
    if augment is not None:
        emb = emb + linear("map_augment", augment)
    emb = F.silu(linear("map_layer1", F.silu(linear("map_layer0", emb))))

    levels = len({name.split(".")[1].split("_")[0] for name in weights if name.startswith("enc.")})
    blocks = len({name.split(".")[1] for name in weights if name.startswith(f"enc.{side}x{side}_block")})
    sides = [side >> level for level in range(levels)]
    skips = [x := conv(f"enc.{side}x{side}_conv", x)]
    for s in sides:
        names = [f"enc.{s}x{s}_down"] * (s != side) + [f"enc.{s}x{s}_block{i}" for i in range(blocks)]
        for name in names:
            skips.append(x := block(name, x))
    for s in reversed(sides):
        for name in [f"dec.{s}x{s}_in0", f"dec.{s}x{s}_in1"] if s == sides[-1] else [f"dec.{s}x{s}_up"]:
            x = block(name, x)
        for number in range(blocks + 1):
            x = block(f"dec.{s}x{s}_block{number}", torch.cat([x, skips.pop()], 1))
    assert not skips
    return conv(f"dec.{side}x{side}_aux_conv", F.silu(norm(f"dec.{side}x{side}_aux_norm", x)))
