"""Backbones: published sizes, saved files that diffusers opens, odd image sizes, conditions."""

import pytest
import torch

from kairos.models import save
from kairos.models.settings import BACKBONES, omit_overridden_size
from kairos_timesteps.errors import KairosError
from training_case import build_model, load_model

CLASSES = {"class": {"kind": "class", "num_classes": 10}}


def count_parameters(model) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("name", "options", "millions"),
    [
        ("S/2", {"width": 384, "depth": 12, "heads": 6, "patch": 2}, 33),
        ("B/4", {"width": 768, "depth": 12, "heads": 12, "patch": 4}, 130),
    ],
)  # fmt: skip
def test_dit_has_the_published_sizes(name, options, millions):
    classes = {"class": {"kind": "class", "num_classes": 1000}}
    with torch.device("meta"):
        model = build_model({"name": "dit", "conditions": ["class"], **options}, (4, 32, 32), classes)
    assert count_parameters(model) / 1e6 == pytest.approx(millions, rel=0.02)


@pytest.mark.parametrize(
    ("name", "options", "kept"),
    [
        ("dit", {}, True),
        ("dit", {"size": "b/4", "conditions": ["class"], "mlp_ratio": 2.0}, True),
        ("dit", {"width": 64, "depth": 2, "heads": 4}, False),
        ("unet", {"channels": 128}, True),
        ("unet", {"channels": 64}, False),
        ("ddpmpp", {"multipliers": [2, 2]}, False),
    ],
)
def test_the_size_field_is_omitted_if_other_options_override_it(name, options, kept):
    model = BACKBONES.select({"name": name, **options}).plain()
    assert omit_overridden_size(model) == {key: value for key, value in model.items() if kept or key != "size"}


def test_dit_has_the_published_parameter_names():
    model = build_model(
        {"name": "dit", "width": 16, "depth": 1, "heads": 2, "conditions": ["class"]}, (4, 4, 4), CLASSES
    )
    assert set(model.weights()) == {
        "pos_embed", "x_embedder.proj.weight", "x_embedder.proj.bias",
        *(f"t_embedder.mlp.{i}.{p}" for i in (0, 2) for p in ("weight", "bias")),
        "y_embedder.embedding_table.weight",
        *(f"blocks.0.{part}.{p}" for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2", "adaLN_modulation.1")
          for p in ("weight", "bias")),
        *(f"final_layer.{part}.{p}" for part in ("linear", "adaLN_modulation.1") for p in ("weight", "bias")),
    }  # fmt: skip


def test_dit_initially_predicts_zero():
    model = build_model({"name": "dit", "width": 16, "depth": 2, "heads": 2}, (3, 8, 4), {})
    assert (model(torch.randn(2, 3, 8, 4), torch.tensor([0, 9]), {}) == 0).all()


def test_dit_depends_on_position_time_and_class():
    model = build_model(
        {"name": "dit", "width": 16, "depth": 1, "heads": 2, "conditions": ["class"]}, (1, 4, 4), CLASSES
    )
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    x, t = torch.ones(2, 1, 4, 4), torch.tensor([5, 5])
    output = model(x, t, {"class": torch.tensor([3, 3])})
    assert torch.allclose(output[0], output[1]) and output[0, 0, 0, 0] != output[0, 0, 2, 0] != output[0, 0, 0, 2]
    assert not torch.allclose(output, model(x, t + 300, {"class": torch.tensor([3, 3])}))
    assert not torch.allclose(output, model(x, t, {"class": torch.tensor([4, 10])}))


def test_impossible_models_are_rejected():
    with pytest.raises(KairosError, match=r"model.patch: got 3 .* divisor"):
        build_model({"name": "dit", "patch": 3}, (1, 8, 8), {})
    with pytest.raises(KairosError, match=r"model.conditions: got \['class'\].*conditions of the data set"):
        build_model({"name": "dit", "conditions": ["class"]}, (1, 8, 8), {})


@pytest.mark.long
def test_unet_has_the_published_size_and_opens_in_diffusers(tmp_path):
    from diffusers import UNet2DModel

    with torch.device("meta"):
        published = build_model({"name": "unet"}, (3, 32, 32), {})
    assert count_parameters(published) / 1e6 == pytest.approx(35.7, abs=0.05)
    options = {
        "init": "diffusers",
        "name": "unet",
        "channels": 8,
        "multipliers": [1, 2],
        "blocks": 1,
        "attention": [4],
        "norm_groups": 4,
    }
    model = build_model(options, (1, 7, 5), {}).eval()  # padded to 8x6
    x, t = torch.randn(2, 1, 7, 5), torch.tensor([1, 700])
    assert model(x, t, {}).shape == x.shape
    save(model, tmp_path)
    assert torch.equal(load_model(tmp_path, options, (1, 7, 5), {})(x, t, {}), model(x, t, {}))
    opened = UNet2DModel.from_pretrained(tmp_path, use_safetensors=True)
    padded = torch.nn.functional.pad(x, (0, 1, 0, 1))
    assert torch.allclose(opened(padded, t).sample[..., :7, :5], model(x, t, {}), atol=1e-6)
    with pytest.raises(KairosError, match=r"pad: got false with images of 7x5, allowed: sizes that are multiples of 2"):
        build_model({**options, "pad": False}, (1, 7, 5), {})
    with pytest.raises(KairosError, match="norm_groups: got 3"):
        build_model({**options, "norm_groups": 3}, (1, 8, 8), {})
    conditional = build_model({**options, "conditions": ["class"]}, (1, 8, 8), CLASSES).eval()
    both = conditional(torch.ones(2, 1, 8, 8), torch.tensor([5, 5]), {"class": torch.tensor([2, 10])})
    assert not torch.allclose(both[0], both[1])


def test_unet_has_ddpms_initialisation_and_initially_predicts_zero():
    options = {"name": "unet", "channels": 8, "multipliers": [1, 2], "blocks": 1, "attention": [4], "norm_groups": 4}
    x, t = torch.randn(2, 1, 8, 8), torch.tensor([0, 999])
    torch.manual_seed(0)
    model = build_model(options, (1, 8, 8), {})
    assert torch.equal(model(x, t, {}), torch.zeros_like(x))  # the last layer is zero
    weight = model.unet.down_blocks[0].resnets[0].conv1.weight  # uniform, of variance 2/(fan in + fan out)
    assert weight.var().item() == pytest.approx(2 / (9 * (8 + 8)), rel=0.1)
    assert not model.unet.mid_block.resnets[0].conv2.weight.any() and not model.unet.conv_in.bias.any()
    torch.manual_seed(0)
    assert build_model({**options, "init": "diffusers"}, (1, 8, 8), {})(x, t, {}).abs().max() > 0


@pytest.mark.parametrize("name", ["dit", "unet"])
def test_a_backbone_has_the_requested_number_of_output_channels(name, tmp_path):
    options = {"dit": {"width": 16, "depth": 1, "heads": 2}, "unet": {"channels": 8, "norm_groups": 4, "attention": []}}
    arguments = {"name": name, **options[name]}, (3, 8, 8), {}, 6
    model = build_model(*arguments)
    x, t = torch.randn(2, 3, 8, 8), torch.tensor([0, 1])
    assert model.eval()(x, t, {}).shape == (2, 6, 8, 8)
    save(model, tmp_path)
    assert torch.equal(load_model(tmp_path, *arguments)(x, t, {}), model(x, t, {}))
