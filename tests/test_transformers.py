"""Tests of the transformers: published sizes, formulas of the papers, initial weights, masks, texts, training.

The reference implementations follow the papers cited in `kairos.models` and read weights by their published
names. ``pytest -s`` prints the largest differences.
"""

import json
import math

import jaxtyping
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kairos.config import validate
from kairos.costs.network import count_network_cost
from kairos.models import save
from kairos.models.backbone import NullText
from kairos.models.settings import BACKBONES
from kairos_timesteps.errors import ConfigError, KairosError
from marks import mark_long
from training_case import build_model, experiment, load_model, make_latents, train

LATENT = (4, 32, 32)
SMALL = {"width": 32, "depth": 4, "heads": 2, "patch": 2}
NAMES = ("dit", "mdt", "uvit", "vit")
TIMES = torch.tensor([0, 500, 999])
CLASS = {"class": {"kind": "class", "num_classes": 10}}
CONDITIONS = {"class": torch.tensor([0, 7, 10])}


def class_condition(number):
    """Return the description of a class condition."""
    return {"class": {"kind": "class", "num_classes": number}}


def text_condition(*shape, null="empty"):
    """Return the description of a text condition."""
    return {"text": {"kind": "text", "shape": list(shape), "null": null}}


def small_model(name, conditions=CLASS, shape=(4, 8, 12), outputs=8, **options):
    """Return a small model with random weights, none of them zero, in evaluation mode."""
    torch.manual_seed(0)
    model = build_model({"name": name, **SMALL, "conditions": list(conditions), **options}, shape, conditions, outputs)
    for parameter in model.parameters():
        if parameter.requires_grad:
            scale = 0.7 / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 0.3
            torch.nn.init.normal_(parameter, std=scale)
    return model.eval()


PUBLISHED = [
    ("dit", "xl/2", LATENT, class_condition(1000), 675_129_632),
    ("dit", "xl/4", LATENT, class_condition(1000), 675_074_432),
    ("dit", "xl/8", LATENT, class_condition(1000), 675_683_072),
    ("dit", "xl/2", (4, 64, 64), class_condition(1000), 676_014_368),
    ("dit", "l/2", LATENT, class_condition(1000), 458_102_816),
    ("dit", "b/2", LATENT, class_condition(1000), 130_512_416),
    ("dit", "s/2", LATENT, class_condition(1000), 32_963_360),
    ("dit", "s/8", LATENT, class_condition(1000), 33_148_160),
    ("dit", "xl/2", LATENT, {}, 673_976_480),
    ("dit", "xl/2", LATENT, text_condition(512, null="random"), 675_895_712),
    ("mdt", "s/2", LATENT, class_condition(1000), 35_797_208),
    ("mdt", "b/2", LATENT, class_condition(1000), 141_488_528),
    ("mdt", "xl/2", LATENT, class_condition(1000), 699_778_144),
    ("uvit", "s/2", (3, 32, 32), {}, 44_255_328),
    ("uvit", "s/4", (3, 64, 64), {}, 44_292_228),
    ("uvit", "m/4", (3, 64, 64), class_condition(999), 130_940_292),  # 1000 classes, no row for the dropped one
    ("uvit", "l/2", LATENT, class_condition(1000), 286_763_172),
    ("uvit", "h/2", LATENT, class_condition(1000), 500_832_016),
    ("uvit", "printed", LATENT, class_condition(1000), 224_600_848),
    ("uvit", "s/2", LATENT, text_condition(77, 768), 44_692_644),
    ("uvit", "s/2-deep", LATENT, text_condition(77, 768), 58_345_636),
    ("vit", "printed", LATENT, class_condition(1000), 193_909_264),
    ("vit", "xl/2", LATENT, class_condition(1000), 448_934_416),
]  # fmt: skip


@pytest.mark.parametrize(("name", "size", "shape", "conditions", "count"), PUBLISHED)
def test_models_have_the_published_number_of_parameters(name, size, shape, conditions, count):
    outputs = 2 * shape[0] if name in ("dit", "mdt") else shape[0]
    with torch.device("meta"):
        model = build_model({"name": name, "size": size, "conditions": list(conditions)}, shape, conditions, outputs)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    if name == "dit":  # position embeddings are fixed
        assert count - sum(p.numel() for p in model.parameters() if p.requires_grad) == model.pos_embed.numel()


def heads_attention(q, k, v, heads, bias=0.0):
    """Return softmax attention; all tensors have shape (n, tokens, width)."""
    n, tokens, width = q.shape
    q, k, v = (part.view(n, tokens, heads, width // heads).transpose(1, 2) for part in (q, k, v))
    logits = torch.einsum("nhqd,nhkd->nhqk", q, k) / math.sqrt(width // heads) + bias
    return torch.einsum("nhqk,nhkd->nhqd", logits.softmax(-1), v).transpose(1, 2).reshape(n, tokens, width)


def linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros(()))


def layer_norm(x, eps, w=None, name=""):
    y = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + eps).sqrt()
    return y if w is None else y * w[f"{name}.weight"] + w[f"{name}.bias"]


def patches(w, name, x, patch):
    """Return a linear embedding of each patch."""
    pixels = F.unfold(x, patch, stride=patch).transpose(1, 2)  # (n, tokens, c * patch * patch)
    return pixels @ w[f"{name}.weight"].flatten(1).T + w[f"{name}.bias"]


def sinusoidal_embedding(t, width):
    angles = t[:, None].float() * (-math.log(10_000) * torch.arange(width // 2) / (width // 2)).exp()
    return torch.cat([angles.cos(), angles.sin()], 1)


def unpatchify(pixels, like, patch, channels):
    """Return the image of patches, whose values are in the order rows, columns, channels."""
    n, _, height, width = like.shape
    result = torch.empty(n, channels, height, width)
    for token in range(pixels.shape[1]):
        i, j = divmod(token, width // patch)
        block = pixels[:, token].view(n, patch, patch, channels).permute(0, 3, 1, 2)
        result[:, :, i * patch : (i + 1) * patch, j * patch : (j + 1) * patch] = block
    return result


def bias_indices(rows, columns):
    """Return the row of the relative-position table for every pair of patches."""
    positions = [divmod(token, columns) for token in range(rows * columns)]
    return torch.tensor(
        [[(a - c + rows - 1) * (2 * columns - 1) + b - d + columns - 1 for c, d in positions] for a, b in positions]
    )


def modulated_block(w, name, x, c, heads, index=None):
    s1, m1, g1, s2, m2, g2 = linear(w, f"{name}.adaLN_modulation.1", F.silu(c))[:, None].chunk(6, -1)
    q, k, v = linear(w, f"{name}.attn.qkv", layer_norm(x, 1e-6) * (1 + m1) + s1).chunk(3, -1)
    bias = 0.0
    if index is not None:
        bias = w[f"{name}.attn.rel_pos_bias.relative_position_bias_table"][index].movedim(-1, -3)
    x = x + g1 * linear(w, f"{name}.attn.proj", heads_attention(q, k, v, heads, bias))
    hidden = F.gelu(linear(w, f"{name}.mlp.fc1", layer_norm(x, 1e-6) * (1 + m2) + s2), approximate="tanh")
    return x + g2 * linear(w, f"{name}.mlp.fc2", hidden)


def condition_embedding(w, t, conditions):
    c = linear(w, "t_embedder.mlp.2", F.silu(linear(w, "t_embedder.mlp.0", sinusoidal_embedding(t, 256))))
    if "class" in conditions:
        c = c + w["y_embedder.embedding_table.weight"][conditions["class"]]
    if "text" in conditions:
        hidden = F.gelu(linear(w, "y_embedder.y_proj.fc1", conditions["text"]), approximate="tanh")
        c = c + linear(w, "y_embedder.y_proj.fc2", hidden)
    return c


def final_layer(w, x, c, like, patch, channels):
    shift, scale = linear(w, "final_layer.adaLN_modulation.1", F.silu(c))[:, None].chunk(2, -1)
    return unpatchify(linear(w, "final_layer.linear", layer_norm(x, 1e-6) * (1 + scale) + shift), like, patch, channels)


def dit(w, x, t, conditions, patch, heads, channels):
    tokens, c = patches(w, "x_embedder.proj", x, patch) + w["pos_embed"], condition_embedding(w, t, conditions)
    for number in range(4):
        tokens = modulated_block(w, f"blocks.{number}", tokens, c, heads)
    return final_layer(w, tokens, c, x, patch, channels)


def mdt(w, x, t, conditions, patch, heads, channels, ratio=0.3):
    tokens, c = patches(w, "x_embedder.proj", x, patch) + w["pos_embed"], condition_embedding(w, t, conditions)
    index = bias_indices(x.shape[2] // patch, x.shape[3] // patch)
    if "mask" not in conditions:
        for number in range(2):
            tokens = modulated_block(w, f"blocks.{number}", tokens, c, heads, index)
        tokens = tokens + w["decoder_pos_embed"]
    else:
        full = torch.empty_like(tokens)
        for n, numbers in enumerate(conditions["mask"][:, ::patch, ::patch].flatten(1)):  # a sample at a time
            kept = numbers.argsort()[: int(len(numbers) * (1 - ratio))]
            part = tokens[n : n + 1, kept]
            for number in range(2):
                part = modulated_block(w, f"blocks.{number}", part, c[n : n + 1], heads, index[kept][:, kept])
            filled = w["mask_token"].repeat(1, len(numbers), 1)
            filled[:, kept] = part
            filled = filled + w["decoder_pos_embed"]
            side = modulated_block(w, "sideblocks.0", filled, c[n : n + 1], heads, index)
            side[:, kept] = filled[:, kept]
            full[n] = side[0]
        tokens = full
    for number in (2, 3):
        tokens = modulated_block(w, f"blocks.{number}", tokens, c, heads, index)
    return final_layer(w, tokens, c, x, patch, channels)


def plain_block(w, name, x, heads, eps, qkv_bias=0.0):
    q, k, v = (layer_norm(x, eps, w, f"{name}.norm1") @ w[f"{name}.attn.qkv.weight"].T + qkv_bias).chunk(3, -1)
    x = x + linear(w, f"{name}.attn.proj", heads_attention(q, k, v, heads))
    hidden = F.gelu(linear(w, f"{name}.mlp.fc1", layer_norm(x, eps, w, f"{name}.norm2")))
    return x + linear(w, f"{name}.mlp.fc2", hidden)


def uvit(w, x, t, conditions, patch, heads, channels):
    tokens = patches(w, "patch_embed.proj", x, patch)
    parts = [sinusoidal_embedding(t, tokens.shape[2])[:, None]]
    if "class" in conditions:
        parts.insert(0, w["label_emb.weight"][conditions["class"]][:, None])
    if "text" in conditions:
        parts.append(linear(w, "context_embed", conditions["text"]))
    count = tokens.shape[1]
    tokens, skips = torch.cat([*parts, tokens], 1) + w["pos_embed"], []
    for number in range(2):
        tokens = plain_block(w, f"in_blocks.{number}", tokens, heads, 1e-5)
        skips.append(tokens)
    tokens = plain_block(w, "mid_block", tokens, heads, 1e-5)
    for number in range(2):
        tokens = linear(w, f"out_blocks.{number}.skip_linear", torch.cat([tokens, skips.pop()], -1))
        tokens = plain_block(w, f"out_blocks.{number}", tokens, heads, 1e-5)
    pixels = linear(w, "decoder_pred", layer_norm(tokens, 1e-5, w, "norm"))[:, -count:]
    result = unpatchify(pixels, x, patch, channels)
    if "final_layer.weight" in w:
        result = F.conv2d(result, w["final_layer.weight"], w["final_layer.bias"], padding=1)
    return result


def vit(w, x, t, conditions, patch, heads, channels):
    tokens = patches(w, "patch_embed.proj", x, patch)
    parts = [w["time_embedding.weight"][t][:, None]]
    if "class" in conditions:
        parts.append(w["class_embedding.weight"][conditions["class"]][:, None])
    count = tokens.shape[1]
    tokens = torch.cat([*parts, tokens], 1) + w["pos_embed"]
    for number in range(4):
        q, v = w[f"blocks.{number}.attn.q_bias"], w[f"blocks.{number}.attn.v_bias"]
        tokens = plain_block(w, f"blocks.{number}", tokens, heads, 1e-6, torch.cat([q, 0 * q, v]))
    return unpatchify(linear(w, "linear_projection", tokens[:, -count:]), x, patch, channels)


REFERENCES = {"dit": dit, "mdt": mdt, "uvit": uvit, "vit": vit}


@pytest.mark.parametrize(
    ("name", "keys", "options"),
    [
        *((name, ("class",), {}) for name in NAMES), *((name, (), {}) for name in NAMES),
        ("mdt", ("class", "mask"), {}), ("mdt", ("mask",), {"ratio": 0.6}), ("mdt", ("class", "text"), {}),
        ("dit", ("text",), {}), ("dit", ("class",), {"patch": 4}), ("uvit", ("text",), {}),
        ("uvit", ("class", "text"), {"convolution": False, "patch": 4}), ("uvit", (), {"depth": 5, "mlp_ratio": 2.0}),
    ],
)  # fmt: skip
def test_outputs_equal_the_formulas_of_the_papers(name, keys, options):
    descriptions = CLASS | (text_condition(5, 12) if name == "uvit" else text_condition(12))
    model = small_model(name, {key: descriptions[key] for key in keys if key != "mask"}, **options)
    texts = torch.randn(3, *descriptions["text"]["shape"])
    values = {**CONDITIONS, "text": texts, "mask": torch.rand(3, 8, 12)}
    conditions = {key: values[key] for key in keys}
    x, extra = torch.randn(3, 4, 8, 12), {key: options[key] for key in options.keys() & {"ratio"}}
    with torch.no_grad():
        output = model(x, TIMES, conditions)
        reference = REFERENCES[name](model.weights(), x, TIMES, conditions, model.options.patch, 2, 8, **extra)
    difference, scale = (output - reference).abs().max().item(), reference.abs().max().item()
    print(f"{name} {keys} {options}: largest difference {difference:.1e} on a scale of {scale:.2g}")
    assert difference < 2e-6 * scale and reference.std() > 0.1


def test_dit_equals_dit_of_diffusers_with_equal_frequencies():
    from diffusers import DiTTransformer2DModel

    model = small_model("dit", shape=(4, 8, 8))
    reference = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=4, sample_size=8,
        num_embeds_ada_norm=10, norm_eps=1e-6,
    ).eval()  # fmt: skip
    weights, names = model.weights(), {}
    for k in range(4):
        block, other = f"blocks.{k}.", f"transformer_blocks.{k}."
        names |= {
            f"{other}attn1.to_out.0": f"{block}attn.proj", f"{other}ff.net.0.proj": f"{block}mlp.fc1",
            f"{other}ff.net.2": f"{block}mlp.fc2", f"{other}norm1.linear": f"{block}adaLN_modulation.1",
            f"{other}norm1.emb.timestep_embedder.linear_1": "t_embedder.mlp.0",
            f"{other}norm1.emb.timestep_embedder.linear_2": "t_embedder.mlp.2",
            f"{other}norm1.emb.class_embedder.embedding_table": "y_embedder.embedding_table",
        }  # fmt: skip
    names |= {"pos_embed.proj": "x_embedder.proj", "proj_out_1": "final_layer.adaLN_modulation.1"}
    names |= {"proj_out_2": "final_layer.linear"}
    state = {
        f"{a}.{p}": weights[f"{b}.{p}"] for a, b in names.items() for p in ("weight", "bias") if f"{b}.{p}" in weights
    }
    for k in range(4):
        for p in ("weight", "bias"):
            parts = weights[f"blocks.{k}.attn.qkv.{p}"].chunk(3)
            state |= {f"transformer_blocks.{k}.attn1.to_{n}.{p}": part for n, part in zip("qkv", parts, strict=True)}
    reference.load_state_dict(state)
    assert torch.allclose(reference.pos_embed.pos_embed, weights["pos_embed"], atol=1e-6)
    for block in reference.transformer_blocks:
        block.norm1.emb.time_proj.downscale_freq_shift = 0
    x = torch.randn(3, 4, 8, 8)
    with torch.no_grad():
        difference = reference(x, TIMES, CONDITIONS["class"]).sample - model(x, TIMES, CONDITIONS)
    print(f"diffusers' DiT with shift 0: largest difference {difference.abs().max():.1e}")
    assert difference.abs().max() < 5e-6


def test_initial_weights_of_uvit_and_vit_are_the_published_ones():
    torch.manual_seed(0)
    model = build_model(
        {"name": "uvit", "width": 128, "depth": 4, "heads": 2, "conditions": ["class"]}, (4, 8, 8), CLASS
    )
    blocks = [*model.in_blocks, model.mid_block, *model.out_blocks]
    layers = [*(b.attn.qkv for b in blocks), *(b.mlp[2] for b in blocks), *(b.skip_linear for b in model.out_blocks)]
    for layer in [*layers, model.decoder_pred]:
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert layer.bias is None or not layer.bias.any()
    assert model.label_emb.weight.std().item() == pytest.approx(1, rel=0.1)
    assert model.pos_embed.std().item() == pytest.approx(0.02, rel=0.1)
    default = 1 / math.sqrt(3 * 4 * 9)  # of PyTorch
    assert model.final_layer.weight.std().item() == pytest.approx(default, rel=0.15)
    model = build_model(
        {"name": "vit", "width": 128, "depth": 4, "heads": 2, "conditions": ["class"]}, (4, 8, 8), CLASS
    )
    for number, block in enumerate(model.blocks, start=1):
        assert block.attn.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
        for layer in (block.attn.proj, block.mlp[2]):
            assert layer.weight.std().item() == pytest.approx(0.02 / math.sqrt(2 * number), rel=0.05)
        assert block.norm1.eps == 1e-6 and not block.attn.q_bias.any() and not block.attn.v_bias.any()
    assert model.linear_projection.weight.std().item() == pytest.approx(2e-5, rel=0.1)
    assert model.time_embedding.weight.std().item() == pytest.approx(1, rel=0.02)


def test_initial_weights_of_mdt_are_the_published_ones():
    torch.manual_seed(0)
    model = build_model({"name": "mdt", **SMALL, "conditions": ["class"]}, (4, 16, 16), CLASS)
    for mask in ({}, {"mask": torch.rand(3, 16, 16)}):
        assert not model(torch.randn(3, 4, 16, 16), TIMES, CONDITIONS | mask).any()
    assert torch.equal(model.pos_embed, model.decoder_pos_embed)
    assert model.pos_embed.requires_grad and model.decoder_pos_embed.requires_grad
    for block in (*model.blocks, *model.sideblocks):
        assert not block.adaLN_modulation[1].weight.any() and not block.adaLN_modulation[1].bias.any()
        assert block.attn.rel_pos_bias["relative_position_bias_table"].shape == (15 * 15 + 3, 2)
        assert block.attn.rel_pos_bias["relative_position_bias_table"].std().item() == pytest.approx(0.02, rel=0.15)
    assert model.mask_token.std().item() == pytest.approx(0.02, rel=0.5)


def test_parameter_names_are_the_published_ones():
    block = ["attn.proj", "mlp.fc1", "mlp.fc2"]
    both = {f"{layer}.{p}" for layer in ("norm1", "norm2", *block) for p in ("weight", "bias")} | {"attn.qkv.weight"}
    ends = {f"{layer}.{p}" for layer in ("patch_embed.proj", "norm", "decoder_pred", "final_layer", "context_embed")
            for p in ("weight", "bias")}  # fmt: skip
    names = {f"{where}.{name}" for where in ("in_blocks.0", "mid_block", "out_blocks.0") for name in both}
    names |= {f"out_blocks.0.skip_linear.{p}" for p in ("weight", "bias")} | {"pos_embed", "label_emb.weight"}
    assert set(small_model("uvit", CLASS | text_condition(5, 12), depth=2).weights()) - {"null.value"} == names | ends
    names = {f"blocks.0.{name}" for name in both} | {"blocks.0.attn.q_bias", "blocks.0.attn.v_bias", "pos_embed"}
    names |= {f"{layer}.{p}" for layer in ("patch_embed.proj", "linear_projection") for p in ("weight", "bias")}
    names |= {"class_embedding.weight", "time_embedding.weight"}
    assert set(small_model("vit", depth=1).weights()) == names
    base = small_model("dit", depth=2).weights().keys()
    table = "attn.rel_pos_bias.relative_position_bias_table"
    side = {name.replace("blocks.0", "sideblocks.0") for name in base if name.startswith("blocks.0")}
    more = {f"{where}.{table}" for where in ("blocks.0", "blocks.1", "sideblocks.0")}
    assert set(small_model("mdt", depth=2).weights()) == base | side | more | {"mask_token", "decoder_pos_embed"}


def test_published_weights_are_loaded_and_those_that_do_not_fit_are_reported():
    model, other = small_model("mdt"), small_model("mdt")
    file = {name: value + 1 for name, value in model.weights().items()}
    index = {f"blocks.{k}.attn.rel_pos_bias.relative_position_index": torch.zeros(24, 24) for k in range(4)}
    other.load_published(file | index)
    assert all(torch.equal(file[name], value) for name, value in other.weights().items())
    incomplete = {name: value for name, value in file.items() if name != "mask_token"}
    incomplete["decoder_pred.bias"] = torch.ones(1)
    incomplete["pos_embed"] = torch.zeros(1, 9, 32)
    with pytest.raises(KairosError, match=r"do not fit MDT.*missing: mask_token; not of this model: decoder_pred.bias; "
                       r"of another shape: pos_embed \(1, 9, 32\) for \(1, 24, 32\)"):  # fmt: skip
        other.load_published(incomplete)
    with pytest.raises(KairosError, match=r"missing: blocks.0.*, …"):
        other.load_published({})
    dit = small_model("dit", text_condition(12, null="random"))
    file = {name: value for name, value in dit.weights().items() if "null" not in name}
    dit.load_published(file | {"y_embedder.y_embedding": torch.full((1, 12), 3.0)})
    assert (dit.weights()["y_embedder.null.value"] == 3).all()
    dit.load_published(file)  # a file without a null row leaves it unchanged
    assert (dit.weights()["y_embedder.null.value"] == 3).all()
    imagenet64 = small_model("uvit")
    file = dict(imagenet64.weights())
    imagenet64.load_published(file | {"label_emb.weight": torch.ones(10, 32)})  # without a row for the dropped class
    assert imagenet64.label_emb.weight.sum(1).tolist() == [32.0] * 10 + [0.0]


def test_a_dropped_text_becomes_the_null_text_of_the_model():
    values, dropped = torch.randn(3, 5, 12), torch.tensor([True, False, True])
    values[dropped] = torch.nan
    empty = np.arange(60, dtype=np.float32).reshape(5, 12)
    null = NullText({"shape": [5, 12], "null": "empty", "empty": empty}, axes=2)
    assert torch.equal(null(values)[0], torch.from_numpy(empty)) and torch.equal(null(values)[1], values[1])
    assert not list(null.parameters()) and not NullText({"shape": [5, 12]}, axes=2).value.any()
    torch.manual_seed(0)
    fixed = NullText({"shape": [512], "null": "random"}, axes=1)
    assert not list(fixed.parameters()) and fixed.value.norm().item() == pytest.approx(1, rel=0.1)
    learned = NullText({"shape": [5, 12], "null": "learned"}, axes=2)
    learned(values).sum().backward()
    assert (learned.value.grad == 2).all()
    with pytest.raises(KairosError, match=r"text of shape \(5, 12\).*allowed with this model: one vector"):
        build_model({"name": "dit", **SMALL, "conditions": ["text"]}, (4, 8, 8), text_condition(5, 12))


@pytest.mark.parametrize("name", ["dit", "mdt", "uvit"])
def test_outputs_depend_on_texts_and_the_null_text_is_saved_with_the_weights(name, tmp_path):
    shape = (5, 12) if name == "uvit" else (12,)
    descriptions = text_condition(*shape)
    descriptions["text"]["empty"] = np.full(shape, 0.5, np.float32)
    model, x = small_model(name, descriptions), torch.randn(3, 4, 8, 12)
    texts = torch.randn(3, *shape)
    dropped = torch.full_like(texts, torch.nan)
    with torch.no_grad():
        null = model(x, TIMES, {"text": dropped})
        assert torch.equal(null, model(x, TIMES, {"text": torch.full_like(texts, 0.5)}))
        assert (model(x, TIMES, {"text": texts}) - null).abs().max() > 0.01
    save(model, tmp_path)
    assert "empty" not in json.loads((tmp_path / "config.json").read_text())["conditions"]["text"]
    options = {"name": name, **SMALL, "conditions": ["text"]}
    # without the empty text in the description
    loaded = load_model(tmp_path, options, (4, 8, 12), text_condition(*shape), 8)
    with torch.no_grad():
        assert torch.equal(loaded(x, TIMES, {"text": dropped}), null)


def test_a_forward_pass_that_masks_nothing_equals_the_full_pass():
    model, x, mask = small_model("mdt", ratio=0.0), torch.randn(3, 4, 8, 12), torch.rand(3, 8, 12)
    with torch.no_grad():
        difference = model(x, TIMES, CONDITIONS | {"mask": mask}) - model(x, TIMES, CONDITIONS)
    print(f"mdt, ratio 0: largest difference {difference.abs().max():.1e}")
    assert difference.abs().max() < 2e-6


def test_a_masked_forward_pass_does_not_depend_on_masked_patches():
    model = small_model("mdt", CLASS, (4, 8, 8), depth=3, decoder_depth=1)
    mask = torch.rand(3, 8, 8)
    numbers = mask[:, ::2, ::2].flatten(1)
    masked = numbers.argsort(1)[:, int(16 * 0.7) :]
    x = torch.randn(3, 4, 8, 8).requires_grad_()
    model(x, TIMES, CONDITIONS | {"mask": mask}).square().sum().backward()
    used = F.unfold(x.grad, 2, stride=2).abs().sum(1) > 0  # (batch, tokens)
    assert used.sum(1).tolist() == [11] * 3
    assert not used.gather(1, masked).any()


def gradients(model, *masks):
    """Return the gradients of a sum of forward passes, each with further conditions."""
    model.train().zero_grad()
    x = torch.randn(3, 4, 8, 12)
    sum(model(x, TIMES, CONDITIONS | mask).square().mean() for mask in masks).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def test_every_parameter_has_a_gradient():
    mask = {"mask": torch.rand(3, 8, 12)}
    for name in NAMES:
        by_name = gradients(small_model(name), *([{}, mask] if name == "mdt" else [{}]))
        unused = {key for key, value in by_name.items() if not value.any()}
        assert not unused, name
        if name == "uvit":
            assert {"out_blocks.0.skip_linear.weight", "out_blocks.1.skip_linear.weight"} <= by_name.keys()


def test_only_the_masked_pass_of_mdt_uses_the_side_block():
    by_name = gradients(small_model("mdt"), {})
    # unused parameters have zero gradients instead of None, since DistributedDataParallel waits for all
    unused = {key for key, value in by_name.items() if not value.any()}
    assert unused == {key for key in by_name if key == "mask_token" or key.startswith("sideblocks")}


@pytest.mark.parametrize("name", NAMES)
def test_a_low_resolution_image_is_concatenated_to_the_channels(name):
    conditions = {"low_resolution": {"kind": "image", "shape": [3, 8, 12]}}
    model = small_model(name, conditions)
    x, low = torch.randn(3, 4, 8, 12), torch.randn(3, 3, 8, 12)
    with torch.no_grad():
        one, other = (model(x, TIMES, {"low_resolution": value}) for value in (low, -low))
    assert one.shape == (3, 8, 8, 12) and (one - other).abs().max() > 0.01


@pytest.mark.parametrize(
    ("name", "precision"),
    mark_long([*((name, "fp32") for name in NAMES), ("dit", "bf16"), ("dit", "fp64")], [("dit", "fp32")]),
)
def test_the_cost_of_a_network_includes_its_parameters_and_blocks(name, precision):
    cost = count_network_cost(
        BACKBONES.select({"name": name, **SMALL, "conditions": ["class"]}), (4, 8, 8), CLASS, 8, precision
    )
    model = build_model({"name": name, **SMALL, "conditions": ["class"]}, (4, 8, 8), CLASS)
    assert cost.parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert cost.forward_flops > 2 * 8 * 16 * 4 * 12 * 32**2  # matrix products of the blocks


@pytest.mark.long
@pytest.mark.parametrize("name", ["uvit", "mdt", "dit", "vit"])
def test_autocast_changes_little_and_dynamo_compiles_one_graph(name, monkeypatch):
    model, x = small_model(name), torch.randn(3, 4, 8, 12)
    conditions = CONDITIONS | ({"mask": torch.rand(3, 8, 12)} if name == "mdt" else {})
    full = model(x, TIMES, conditions).detach()
    with torch.autocast("cpu", torch.bfloat16):
        half = model(x, TIMES, conditions)
        half.float().square().mean().backward()
    assert (half - full).norm() < 0.03 * full.norm()
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # dynamo does not compile the checks of shapes
    torch._dynamo.reset()
    assert torch._dynamo.explain(model)(x, TIMES, conditions).graph_break_count == 0


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"name": "uvit", "size": "xl/2"}, "model.*size: got '?xl/2'?, allowed: one of s/2"),
        ({"name": "uvit", "width": 9, "heads": 3}, "width: got 9, allowed: an even number"),
        ({"name": "vit", "width": 10, "heads": 3}, "width: got 10, allowed: a multiple of heads = 3"),
        ({"name": "mdt", "depth": 2, "decoder_depth": 3}, "decoder_depth: got 3, allowed: at most depth = 2"),
        ({"name": "mdt", "ratio": 1.0}, "ratio: got 1.0, allowed: less than 1"),
        ({"name": "vit", "timesteps": 99}, r"model.timesteps: got 99, allowed: at least 100,"),
    ],
)
def test_invalid_sizes_are_rejected(model, message):
    with pytest.raises(ConfigError, match=message):
        experiment(model=model)
    for name in ("uvit", "mdt", "vit"):
        with pytest.raises(KairosError, match=r"model.patch: got 3 .* divisor"):
            build_model({"name": name, **SMALL, "patch": 3}, (1, 8, 8), {})


def test_a_learned_table_of_times_needs_a_discrete_process():
    values = {"experiment": "x", "model": "vit", "methods": {"uniform": {}}, "diffusion": {"process": "flow"}}
    with pytest.raises(ConfigError, match=r"model.timesteps: got 1000, allowed: .* flow is continuous"):
        validate(values)
    with pytest.raises(ConfigError, match=r"model.conditions: got \['text'\], allowed with vit: class, low_resolution"):
        build_model({"name": "vit", "conditions": ["text"]}, (4, 8, 8), text_condition(12))


@pytest.fixture(scope="module")
def latents(tmp_path_factory):
    return make_latents(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize(
    ("name", "sampler"),
    mark_long([("mdt", "adaptive"), ("uvit", "adaptive"), ("vit", "adaptive"), ("mdt", "speed")], [("mdt", "speed")]),
)
def test_training_updates_every_parameter(name, sampler, latents, tmp_path):
    methods = {"m": {"sampler": {"name": "adaptive", "frequency": 4, "feature_timesteps": 20}, "weighting": "min_snr"}}
    if sampler == "speed":
        methods = {"m": {"sampler": "speed", "weighting": "change_aware"}}
    model = {"name": name, "patch": 2, "width": 32, "depth": 2, "heads": 2, "conditions": ["class"]}
    train(experiment(methods, model=model, training__condition_dropout=0.1), "m", 0, tmp_path, latents, [0, 20])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 20 and all(math.isfinite(line["loss"]) for line in lines)
    saved = {step: load_weights(tmp_path, step) for step in (0, 20)}
    updated = {key for key in saved[0] if not torch.equal(saved[0][key], saved[20][key])}
    unchanged = {key for key in saved[0] if key not in updated}
    assert all(key == "mask_token" or key.startswith("sideblocks") for key in unchanged)


def load_weights(folder, step):
    from safetensors.torch import load_file

    return load_file(folder / "snapshots" / f"{step:07d}" / "raw" / "diffusion_pytorch_model.safetensors")
