"""Tests of the U-Nets: published sizes, equality with reference networks, initial weights, rejected settings."""

import math
from typing import Any

import pytest
import torch
import yaml

from kairos.cli import main
from kairos.models import save
from kairos_timesteps.errors import ConfigError, KairosError
from marks import mark_long
from published_unets import Adm, ddpm_torch, ddpm_torch_weights, edm_ddpmpp
from training_case import build_model, experiment, load_model, make_latents, train

CLASSES = {"class": {"kind": "class", "num_classes": 10}}
TINY = {"channels": 16, "multipliers": [1, 2], "blocks": 1, "attention": [2], "norm_groups": 8}
TINY_MODELS: dict[str, dict[str, Any]] = {
    "speed": {"name": "unet", "size": "speed", **TINY},
    "ldm_unet": {"name": "ldm_unet", "head_channels": 8, **TINY},
    "adm": {"name": "adm", "head_channels": 8, **TINY},
    "ddpmpp": {"name": "ddpmpp", "channels": 16, "multipliers": [1, 2], "blocks": 1, "attention": [2]},
}


def randomise(model):
    """Replace every parameter by random values, so that none is zero; return the model in evaluation mode."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=1 / math.sqrt(max(parameter[0].numel(), 4)))
    return model.eval()


@pytest.mark.parametrize(
    ("model", "side", "classes", "outputs", "count"),
    [
        ({"name": "unet"}, 32, 0, 3, 35_746_307),
        ({"name": "unet", "size": "speed"}, 32, 0, 8, 35_876_104),
        ({"name": "unet", "size": "speed"}, 32, 1000, 8, 36_388_104),
        ({"name": "ldm_unet"}, 64, 0, 3, 274_056_163),
        ({"name": "adm", "size": "64"}, 64, 1000, 6, 295_904_454),
        ({"name": "adm"}, 256, 1000, 6, 553_838_086),
        ({"name": "adm"}, 256, 0, 6, 552_814_086),
        ({"name": "adm", "size": "512"}, 512, 1000, 6, 558_997_638),  # 559 M in the paper
        ({"name": "ddpmpp"}, 32, 10, 3, 55_735_299),
        ({"name": "ddpmpp"}, 32, 0, 3, 55_733_891),
        ({"name": "ddpmpp", "augment": 0}, 32, 0, 3, 55_732_739),
        ({"name": "ddpmpp", "size": "vp"}, 32, 10, 3, 61_806_979),
    ],
)
def test_models_have_the_published_number_of_parameters(model, side, classes, outputs, count):
    channels = 4 if model.get("size") == "speed" else 3
    conditions = {"class": {"kind": "class", "num_classes": classes}} if classes else {}
    with torch.device("meta"):
        network = build_model({**model, "conditions": list(conditions)}, (channels, side, side), conditions, outputs)
    assert sum(parameter.numel() for parameter in network.parameters()) == count


@pytest.mark.parametrize(
    ("name", "options", "reference"),
    [
        ("ldm_unet", {"head_channels": 8}, {"head": 8, "scale_shift": False, "updown": False, "legacy": True}),
        ("unet", {"size": "speed", "blocks": 2}, {"head": 0, "scale_shift": False, "updown": False, "legacy": True}),
        ("adm", {"size": "64", "head_channels": 8}, {"head": 8, "scale_shift": True, "updown": True, "legacy": False}),
        ("adm", {"head_channels": 8}, {"head": 8, "scale_shift": True, "updown": True, "legacy": True}),
        (  # three heads: the number of projections in the joint weights, too
            "adm",
            {"head_channels": 8, "multipliers": [1, 1.5, 1.5]},
            {"head": 8, "scale_shift": True, "updown": True, "legacy": True},
        ),
        (
            "adm",
            {"size": "512", "head_channels": 8, "multipliers": [0.5, 1, 2], "attention": [4, 2]},
            {"head": 8, "scale_shift": True, "updown": True, "legacy": True},
        ),
    ],
)
def test_published_weights_of_adm_give_the_output_of_adm(name, options, reference):
    options = {**TINY, "multipliers": [1, 2, 2], "attention": [4], "dropout": 0.0, **options}
    classes = CLASSES if name != "ldm_unet" else {}
    shape, sides = (3, 8, 8), [8 >> level for level in range(len(options["multipliers"]))]
    published = randomise(
        Adm(
            channels=16, multipliers=options["multipliers"], blocks=options["blocks"], groups=8, inputs=3, outputs=6,
            attended={level for level, side in enumerate(sides) if side in options["attention"]},
            classes=10 if classes else 0, **reference,
        )
    )  # fmt: skip
    model = build_model({"name": name, "conditions": list(classes), **options}, shape, classes, 6).eval()
    weights = {f"model.diffusion_model.{key}": value for key, value in published.state_dict().items()}
    weights["first_stage_model.encoder"] = torch.zeros(1)
    if name != "ldm_unet":
        weights = published.state_dict()
    model.load_published(weights)
    x, t, y = torch.randn(3, *shape), torch.tensor([0, 500, 999]), torch.tensor([0, 3, 9])
    with torch.no_grad():
        expected = published(x, t, y if classes else None)
        error = (model(x, t, {"class": y} if classes else {}) - expected).abs().max()
        print(f"{name} {options.get('size')}: {error / expected.abs().max():.1e} of the largest value")
        assert error < 2e-6 * expected.abs().max() and expected.std() > 0.1
        other = {"legacy": "new", "new": "legacy"}[model.options.qkv]
        if reference["head"]:  # with the other order of rows the output differs
            wrong = build_model({"name": name, "qkv": other, "conditions": list(classes), **options}, shape, classes, 6)
            wrong.load_published(weights)
            assert (wrong.eval()(x, t, {"class": y} if classes else {}) - expected).abs().max() > 1e-3


def test_published_weights_of_ddpm_torch_give_its_output():
    torch.manual_seed(1)
    weights = ddpm_torch_weights(16, [1, 2, 2], 2, {1}, 3, 3)
    model = build_model(
        {"name": "unet", **TINY, "multipliers": [1, 2, 2], "blocks": 2, "attention": [4]}, (3, 8, 8), {}
    )
    model.eval().load_published(weights)
    x, t = torch.randn(3, 3, 8, 8), torch.tensor([0, 500, 999])
    with torch.no_grad():
        expected = ddpm_torch(weights, x, t, 3, 2, 8)
        error = (model(x, t, {}) - expected).abs().max()
    print(f"ddpm-torch: {error / expected.abs().max():.1e} of the largest value")
    assert error < 2e-6 * expected.abs().max() and expected.std() > 0.1


def test_published_weights_that_do_not_fit_are_rejected():
    weights = ddpm_torch_weights(16, [1, 2], 1, {1}, 3, 3)
    fitting = {"name": "unet", **TINY, "attention": [4]}
    renamed = build_model(fitting, (3, 8, 8), {}).convert_published(weights)
    assert build_model(fitting, (3, 8, 8), {}).convert_published(renamed) == renamed  # names of diffusers are unchanged
    build_model(fitting, (3, 8, 8), {}).load_published(weights)
    for changed, outputs, more, message in (
        ({"blocks": 2}, 3, {}, r"missing: down_blocks.0.*"),
        ({}, 3, {"extra.weight": torch.zeros(1)}, r"not of this model: extra\.weight"),
        ({}, 6, {}, r"of another shape: conv_out.bias \(3,\) for \(6,\)"),
        (
            {},
            3,
            {"middle.1.project_in.weight": torch.zeros(3, 3)},
            r"another shape: mid_block.attentions.0.to_k.weight",
        ),
    ):
        with pytest.raises(KairosError, match=message):
            build_model({**fitting, **changed}, (3, 8, 8), {}, outputs).load_published({**weights, **more})


@pytest.mark.parametrize("system", ["ddpm-torch", "latent diffusion", "ADM"])
def test_published_files_are_imported_as_snapshots(system, tmp_path):
    reference = Adm(
        channels=16, multipliers=[1, 2], blocks=1, attended={1}, head=8, groups=8, inputs=3, outputs=3,
        scale_shift=system == "ADM", updown=system == "ADM", legacy=True, classes=10 * (system == "ADM"),
    )  # fmt: skip
    adm = reference.state_dict()
    ddpm, ldm = ddpm_torch_weights(16, [1, 2], 1, {1}, 3, 3), {f"diffusion_model.{name}": adm[name] for name in adm}
    model: dict[str, Any] = {**TINY, "attention": [4], "head_channels": 8}
    content, model = {
        "ddpm-torch": ({"model": ddpm, "ema": {"shadow": ddpm}}, {"name": "unet", **model, "head_channels": 0}),
        "latent diffusion": (
            {"state_dict": {
                **{f"model.{name}": value for name, value in ldm.items()},
                **{f"model_ema.{name.replace('.', '')}": value for name, value in ldm.items()},
            }},
            {"name": "ldm_unet", **model},
        ),
        "ADM": (adm, {"name": "adm", "conditions": ["class"], **model}),
    }[system]  # fmt: skip
    torch.save(content, tmp_path / "published.pt")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(experiment(model=model)))
    line = ["--config", str(tmp_path / "config.yaml"), "--out", str(tmp_path / "out"), "--shape", "3,8,8"]
    assert main(["import-weights", str(tmp_path / "published.pt"), *line, "--classes", "10"]) == 0
    network = model, (3, 8, 8), CLASSES if system == "ADM" else {}
    snapshot = load_model(tmp_path / "out" / "ema", *network)
    x, t, y = torch.randn(2, 3, 8, 8), torch.tensor([0, 999]), torch.tensor([0, 9])
    with torch.no_grad():
        conditions, labels = ({"class": y}, y) if system == "ADM" else ({}, None)
        expected = ddpm_torch(ddpm, x, t, 2, 1, 8) if system == "ddpm-torch" else reference(x, t, labels)
        assert (snapshot(x, t, conditions) - expected).abs().max() < 2e-6 * expected.abs().max()


@pytest.mark.parametrize("multipliers", [[2, 2, 2], [1, 2, 2, 2]])
def test_ddpmpp_equals_the_network_of_edm(multipliers):
    options = {"name": "ddpmpp", "channels": 16, "multipliers": multipliers, "blocks": 2, "attention": [8]}
    model = randomise(build_model({**options, "conditions": ["class"]}, (3, 16, 16), CLASSES))
    x, noise = torch.randn(4, 3, 16, 16), torch.tensor([0.002, 0.3, 5.0, 80.0]).log() / 4
    classes, augment = torch.tensor([0, 3, 9, 10]), torch.randn(4, 9)
    one_hot = torch.nn.functional.one_hot(classes, 11)[:, :10].float()
    weights = {f"model.{name}": value for name, value in model.weights().items()}
    with torch.no_grad():
        for labels in (augment, torch.zeros(4, 9)):
            conditions = {"class": classes, **({"augment": labels} if labels.any() else {})}
            expected = edm_ddpmpp(weights, x, noise, one_hot, labels)
            error = (model(x, noise, conditions) - expected).abs().max()
            print(f"ddpmpp {multipliers}: {error / expected.abs().max():.1e} of the largest value")
            assert error < 2e-6 * expected.abs().max() and expected.std() > 0.1
    renamed = model.convert_published({**weights, "model.enc.8x8_down.conv0.resample_filter": torch.ones(2)})
    model.load_published(weights)
    assert renamed.keys() == model.weights().keys()
    assert {"map_layer0.weight", "enc.16x16_block0.norm0.weight", "dec.16x16_aux_conv.weight"} < renamed.keys()
    assert model.map_label.weight.shape == (16, 10) and model.map_augment.bias is None


def test_ddpmpp_has_the_attention_layers_of_edm():
    with torch.device("meta"):
        model = build_model({"name": "ddpmpp"}, (3, 32, 32), {})
    attention_layers = {name.removesuffix(".qkv.weight") for name in model.weights() if "qkv.weight" in name}
    assert attention_layers == {*(f"enc.16x16_block{i}" for i in range(4)), "dec.8x8_in0", "dec.16x16_block4"}


def test_initial_weights_are_the_published_ones():
    model = build_model({**TINY_MODELS["adm"], "channels": 64, "norm_groups": 32}, (3, 8, 8), {})
    x, t = torch.randn(2, 3, 8, 8), torch.tensor([0, 9])
    assert not model(x, t, {}).any()
    block, attention = model.unet.mid_block.resnets[0], model.unet.mid_block.attentions[0]
    bound = 1 / math.sqrt(9 * 128)  # default of torch: uniform by fan in, with a bias
    assert block.conv1.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert block.conv1.bias.any() and not block.conv2.weight.any() and not block.conv2.bias.any()
    assert attention.to_q.weight.any() and not attention.to_out[0].weight.any() and not model.unet.conv_out.bias.any()

    edm = build_model(
        {"name": "ddpmpp", "channels": 64, "multipliers": [1, 1], "blocks": 1, "attention": [8]}, (3, 8, 8), {}
    )
    block = edm.enc["8x8_block0"]
    fan = math.sqrt(2 / (2 * 9 * 64))  # uniform by fan average
    for weight, gain in ((block.conv0.weight, 1), (block.conv1.weight, 1e-5), (edm.dec["8x8_aux_conv"].weight, None)):
        expected = gain * fan if gain else 1e-5 * math.sqrt(2 / (9 * 67))
        assert weight.std().item() == pytest.approx(expected, rel=0.03)
    assert block.qkv.weight.std().item() == pytest.approx(math.sqrt(0.2 * 2 / (4 * 64)), rel=0.03)
    assert block.proj.weight.std().item() == pytest.approx(1e-5 * math.sqrt(2 / 128), rel=0.03)
    assert not any(
        value.any() for name, value in edm.weights().items() if name.endswith(".bias") and "norm" not in name
    )


@pytest.mark.parametrize("name", ["speed", "ldm_unet", "adm"])
def test_unets_open_in_diffusers(name, tmp_path):
    from diffusers import UNet2DModel

    model = randomise(build_model(TINY_MODELS[name], (3, 8, 8), {}))
    save(model, tmp_path)
    x, t = torch.randn(2, 3, 8, 8), torch.tensor([0, 999])
    assert torch.equal(UNet2DModel.from_pretrained(tmp_path, use_safetensors=True)(x, t).sample, model(x, t, {}))


@pytest.mark.parametrize("name", TINY_MODELS)
def test_odd_sizes_and_any_number_of_output_channels_are_possible(name, tmp_path):
    conditions = {**CLASSES, "low_resolution": {"kind": "image", "shape": [3, 7, 5]}}
    conditions = conditions if name != "ddpmpp" else CLASSES
    network = {**TINY_MODELS[name], "conditions": list(conditions)}, (3, 7, 5), conditions, 6
    model = randomise(build_model(*network))
    x, t = torch.randn(2, 3, 7, 5), torch.tensor([0, 1])
    inputs = {"class": torch.tensor([0, 9]), "low_resolution": torch.randn(2, 3, 7, 5)}
    assert model(x, t, inputs).shape == (2, 6, 7, 5)
    other = model(x, t, {**inputs, "class": torch.tensor([0, 8])})
    assert torch.equal(other[0], model(x, t, inputs)[0]) and not torch.equal(other[1], model(x, t, inputs)[1])
    save(model, tmp_path)
    assert torch.equal(load_model(tmp_path, *network)(x, t, inputs), model(x, t, inputs))
    assert sum(parameter.numel() for parameter in model.parameters()) < 1e6


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"name": "unet", "size": "64"}, "model.*size: got '?64'?, allowed: one of ddpm, speed"),
        ({"name": "adm", "head_channels": 48}, "head_channels: got 48, allowed: a divisor of every width"),
        ({"name": "adm", "channels": 48}, "norm_groups: got 32, allowed: a divisor of every width"),
        ({"name": "ddpmpp", "channels": 18}, "channels: got 18, allowed: a multiple of 4"),
        ({"name": "unet", "multipliers": []}, r"model\.multipliers: got widths \[\], allowed: at least 1 channel"),
        (
            {"name": "ddpmpp", "multipliers": [1, 0]},
            r"model\.multipliers: got widths \[1, 0\], allowed: at least 1 channel",
        ),
        ({"name": "ddpmpp", "augment": 3}, "augment: got 3, allowed: 9 or 0"),
        ({"name": "ddpmpp", "conditions": ["low_resolution"]}, "allowed with ddpmpp: class"),
    ],
)
def test_invalid_sizes_are_rejected(model, message):
    with pytest.raises(ConfigError, match=message):
        experiment(model=model) and build_model(model, (3, 8, 8), {})


@pytest.mark.parametrize("name", ["adm", "unet"])
def test_condition_dropout_needs_a_null_class(name):
    model = {"name": name, "conditions": ["class"], **({"size": "speed"} if name == "unet" else {})}
    experiment(model=model)
    with pytest.raises(ConfigError, match=r"condition_dropout: got 0.1 with model.null_class: false, allowed: 0"):
        experiment(model=model, training__condition_dropout=0.1)
    experiment(model={**model, "null_class": True}, training__condition_dropout=0.1, sampling__guidance_scale=2.0)
    with pytest.raises(ConfigError, match=r"guidance_scale"):
        experiment(model=model, sampling__guidance_scale=2.0)


@pytest.mark.parametrize(
    ("name", "method"),
    mark_long([*((name, "adaptive") for name in TINY_MODELS), ("ddpmpp", "speed")], [("adm", "adaptive")]),
)
def test_tiny_models_are_trained(name, method, tmp_path):
    methods = {
        "speed": {"sampler": {"name": "speed", "k": 5.0}, "weighting": {"name": "change_aware", "lambda": 0.6}},
        "adaptive": {"sampler": {"name": "adaptive", "frequency": 4, "feature_timesteps": 20}},
    }
    process = {"name": "edm"} if (name, method) == ("ddpmpp", "adaptive") else {"name": "discrete", "timesteps": 100}
    case = experiment(
        methods, model={**TINY_MODELS[name], "conditions": ["class"]}, diffusion__process=process,
        training__milestones=[5], training__checkpoint_every=5,
    )  # fmt: skip
    train(case, method, 0, tmp_path / "out", make_latents(tmp_path), [0, 5])
