"""Import of published weights: files with published names and shapes become snapshots for sampling and training."""

import copy
import os
import pickle
import re
import shutil
from argparse import Namespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kairos.cli import main
from kairos.config import validate
from kairos.data.latents import open_latents
from kairos.evaluation.settings import LossSettings
from kairos.evaluation.validation import validation_loss
from kairos.files import read_json, write_record
from kairos.snapshots import open_snapshot
from kairos.training.import_weights import published_diffusion
from kairos.training.settings import read_run_settings
from kairos.validity import describe_training, training_identity
from kairos_timesteps.errors import ConfigError, KairosError
from training_case import build_model, experiment, make_latents, train

CLASSES = {"class": {"kind": "class", "num_classes": 10}}
SMALL = {"width": 16, "depth": 2, "heads": 2}
MODELS = {
    "dit": {"name": "dit", "patch": 2, **SMALL, "conditions": ["class"]},
    "mdt": {"name": "mdt", "patch": 2, **SMALL, "conditions": ["class"]},
    "uvit": {"name": "uvit", "patch": 2, **SMALL, "conditions": ["class"]},
}


def make_weights(name, outputs=8, seed=0):
    """Return random weights under the published names, which kairos' models also use."""
    torch.manual_seed(seed)
    plain = validate({"experiment": "x", "methods": {"a": {}}, "model": MODELS[name]}).plain()["model"]
    model = build_model(plain, (4, 8, 8), CLASSES, outputs)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return {key: value.clone() for key, value in model.weights().items()}


def import_weights(tmp_path, file, model, *more):
    out = tmp_path / "imported"
    return out, main(["import-weights", str(file), "--model", str(model), "--out", str(out), *map(str, more)])


@pytest.mark.parametrize("name", ["dit", "mdt", "uvit"])
def test_published_weights_become_snapshots(name, tmp_path, capsys):
    outputs = 4 if name == "uvit" else 8
    raw, average = make_weights(name, outputs), make_weights(name, outputs, seed=1)
    file = tmp_path / "0400000.pt"
    torch.save({"model": raw, "ema": average, "opt": {"state": {}}, "args": Namespace(model=name)}, file)
    out, status = import_weights(tmp_path, file, MODELS[name], "--shape", "4,8,8", "--classes", 10, "--step", 400_000)
    assert status == 0, capsys.readouterr().err
    record = read_json(out / "snapshot.json")
    assert record["step"] == 400_000 and record["imported"]["file"] == "0400000.pt" and record["shape"] == [4, 8, 8]
    opened = {kind: open_snapshot(out, kind).model.weights() for kind in ("ema", "raw")}
    assert all(torch.equal(opened["ema"][key], average[key]) for key in average)
    assert all(torch.equal(opened["raw"][key], raw[key]) for key in raw)


def test_a_snapshot_of_published_weights_is_evaluated_and_trained_further(tmp_path, capsys):
    latents = make_latents(tmp_path / "data")
    model_options = {**MODELS["dit"], "conditions": ["class"]}
    torch.manual_seed(0)
    settings = experiment({"uniform": {}}, model=model_options)["model"]
    model = build_model(settings, (4, 4, 4), CLASSES, 8)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    save_file({key: value.clone() for key, value in model.weights().items()}, tmp_path / "dit.safetensors")
    out, status = import_weights(tmp_path, tmp_path / "dit.safetensors", model_options, "--latents", latents)
    assert status == 0, capsys.readouterr().err
    start = {key: value.clone() for key, value in open_snapshot(out).model.weights().items()}
    validation = validation_loss(open_snapshot(out), open_latents(latents), LossSettings(16, 4, 0))
    assert np.isfinite(validation["loss_epsilon"]) and validation["images"] == 16

    changes = {"diffusion": {"process": {"name": "discrete", "variance": "learned_range"}, "losses": ["mse", "vb"]}}
    plain = experiment({"uniform": {}}, model=model_options, training__start_from=str(out), **changes)
    train(plain, "uniform", 0, tmp_path / "run", latents, [0, 5])
    first, last = (open_snapshot(tmp_path / "run/snapshots" / f"{step:07d}", "raw").model for step in (0, 5))
    assert all(torch.equal(first.weights()[key], start[key]) for key in start)
    assert any(not torch.equal(last.weights()[key], start[key]) for key in start)
    identity = read_json(tmp_path / "run/training.json")["identity"]

    other = {key: value + 0.01 for key, value in start.items()}
    save_file(other, tmp_path / "other.safetensors")
    assert import_weights(tmp_path, tmp_path / "other.safetensors", model_options, "--latents", latents)[1] == 0
    train(plain, "uniform", 0, tmp_path / "again", latents, [0, 1])
    assert read_json(tmp_path / "again/training.json")["identity"] != identity  # other weights, another run


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"name": "uvit", "size": "l/2", "conditions": ["class"]}, ("vp", None, "epsilon")),
        ({"name": "uvit", "size": "h/2", "conditions": ["class"]}, ("discrete", "scaled_linear", "epsilon")),
        ({"name": "uvit", "size": "s/2", "conditions": ["text"]}, ("discrete", "scaled_linear", "epsilon")),
        ({"name": "adm", "size": "64"}, ("discrete", "cosine", "epsilon")),
        ({"name": "adm", "size": "256"}, ("discrete", "linear", "epsilon")),
        ({"name": "unet", "size": "speed"}, ("discrete", "linear", "epsilon")),
        ({"name": "unet"}, ("discrete", "linear", "epsilon")),
        ({"name": "vit", "size": "xl/2"}, ("discrete", "cosine", "x0")),
        ({"name": "ddpmpp"}, ("edm", None, None)),
    ],
)
def test_published_weights_have_the_process_that_they_were_trained_with(model, expected):
    values = {"experiment": "x", "methods": {"a": {}}, "diffusion": published_diffusion(model)}
    diffusion = validate(values).plain()["diffusion"]
    process = diffusion["process"]
    assert (process["name"], process.get("schedule"), diffusion["prediction"]) == expected
    learned = model["name"] == "adm" or model.get("size") == "speed"
    assert (process.get("variance") == "learned_range") == learned


def test_a_change_of_the_process_of_published_weights_stays_local():
    first = published_diffusion({"name": "dit"})
    expected = copy.deepcopy(first)
    first["losses"].append("other")
    first["process"]["schedule"] = "other"
    assert published_diffusion({"name": "dit"}) == expected
    assert published_diffusion({"name": "mdt"}) == expected  # trained with the same process


def test_guidance_of_edms_network_is_rejected(tmp_path, capsys):
    options = {"channels": 16, "multipliers": [1, 2], "blocks": 1, "conditions": ["class"]}
    model_settings = validate(
        {"experiment": "x", "methods": {"a": {}}, "model": {"name": "ddpmpp", **options}}
    ).plain()["model"]
    state = {
        f"model.{key}": value.clone()
        for key, value in build_model(model_settings, (3, 8, 8), CLASSES).weights().items()
    }
    save_file(state, tmp_path / "edm.safetensors")
    model_options = {"name": "ddpmpp", **options}
    out, status = import_weights(
        tmp_path, tmp_path / "edm.safetensors", model_options, "--shape", "3,8,8", "--classes", 10
    )
    assert status == 0, capsys.readouterr().err
    config = read_json(out / "snapshot.json")["config"]
    assert config["diffusion"]["process"]["name"] == "edm" and config["training"]["condition_dropout"] == 0
    command = ["sample", "--snapshot", out, "--out", tmp_path / "a.npz", "--num", 4, "--guidance-scale", 2]
    assert main(list(map(str, command))) == 2 and "condition_dropout" in capsys.readouterr().err


def test_averages_in_files_of_latent_diffusion_are_read(tmp_path):
    from kairos.models.published_weights import read_published

    weights = {"input_blocks.0.0.weight": torch.zeros(2), "out.2.bias": torch.zeros(3)}
    state = {f"model.diffusion_model.{key}": value for key, value in weights.items()}
    state["model_ema.diffusion_modelinput_blocks00weight"] = torch.ones(2)
    state["first_stage_model.encoder.weight"] = torch.ones(9)
    torch.save({"state_dict": state, "global_step": 7}, tmp_path / "model.ckpt")
    average, live = read_published(tmp_path / "model.ckpt")
    assert live.keys() == weights.keys() and average["input_blocks.0.0.weight"].tolist() == [1, 1]
    torch.save(
        {"model": weights, "ema": {"decay": 0.9999, "shadow": {k: v + 2 for k, v in weights.items()}}},
        tmp_path / "d.pt",
    )
    assert read_published(tmp_path / "d.pt")[0]["out.2.bias"].tolist() == [2, 2, 2]


class Live:
    """Class whose pickled instance represents the custom objects in EDM's files."""


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_bytes(pickle.dumps({"ema": Live()})), "runs code when it is opened"),
        (lambda path: torch.save({"ema": Live()}, path), "runs code when it is opened"),
        (lambda path: path.write_bytes(b"no weights"), "not a file of weights|runs code"),
        (lambda path: torch.save([1, 2], path), "contains list"),
        (lambda path: torch.save({"step": 3}, path), "contains no weights; its keys: step"),
        (lambda path: torch.save({"x_embedder.proj.weight": torch.zeros(1)}, path), "do not fit DiT"),
        (lambda path: None, "no such file"),
        (lambda path: path.mkdir(), "a folder"),
        (lambda path: (torch.save(make_weights("dit"), path), os.truncate(path, 20_000)), "damaged, or not a file"),
    ],
)
def test_files_without_usable_weights_are_rejected(write, message, tmp_path, capsys):
    path = tmp_path / "weights.pkl"
    write(path)
    out, status = import_weights(tmp_path, path, MODELS["dit"], "--shape", "4,8,8", "--classes", 10)
    assert status == 1 and not out.exists()
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "--shape: got none"),
        (("--shape", "4,8"), "--shape: got 4,8, allowed: C,H,W"),
        (("--shape", "4,8,8"), "--classes: got none"),
        (("--shape", "4,8,8", "--classes", "0"), "--classes: got 0"),
    ],
)
def test_missing_options_are_reported(more, message, tmp_path, capsys):
    torch.save(make_weights("dit"), tmp_path / "a.pt")
    out, status = import_weights(tmp_path, tmp_path / "a.pt", MODELS["dit"], *more)
    assert status == 2 and message in capsys.readouterr().err and not out.exists()


def test_latents_without_a_condition_of_the_model_are_reported(tmp_path, capsys):
    """`--classes` is ignored with latents, so the message does not ask for it."""
    torch.save(make_weights("dit"), tmp_path / "a.pt")
    latents = make_latents(tmp_path / "data")
    for folder in (latents, latents.parent / "dataset"):
        write_record(folder / "record.json", {**read_json(folder / "record.json"), "conditions": {}})
    for more in ((), ("--classes", 10)):
        out, status = import_weights(tmp_path, tmp_path / "a.pt", MODELS["dit"], "--latents", latents, *more)
        message = capsys.readouterr().err
        assert status == 2 and not out.exists()
        assert f"--latents: got {latents} with no conditions, allowed: latents with class" in message
        assert "--classes: got none" not in message


def test_start_weights_of_another_size_are_rejected(tmp_path):
    """A size mismatch is rejected before any job if the settings show it, else when training starts."""
    model_options = MODELS["dit"]
    torch.save(make_weights("dit"), tmp_path / "a.pt")
    out, _ = import_weights(tmp_path, tmp_path / "a.pt", model_options, "--shape", "4,8,8", "--classes", 10)
    start = {"training__start_from": str(out)}
    with pytest.raises(ConfigError, match=r"training.start_from: got model.width: 16 .* allowed: 32"):
        validate(experiment(model={**model_options, "width": 32}, **start)).resolve()
    plain = experiment({"uniform": {}}, model=model_options, **start)
    with pytest.raises(
        KairosError, match=r"training.start_from: .* do not fit the model; .*pos_embed \(1, 16, 16\) for \(1, 4, 16\)"
    ):
        train(plain, "uniform", 0, tmp_path / "run", make_latents(tmp_path / "data"), [0, 1])


def test_only_an_earlier_import_is_overwritten(tmp_path, capsys):
    file = tmp_path / "imported" / "a.pt"
    file.parent.mkdir()
    torch.save(make_weights("dit"), file)
    command = ["import-weights", file, "--model", MODELS["dit"], "--shape", "4,8,8", "--classes", 10]
    for path in (file.parent, file):
        assert main([*map(str, command), "--out", str(path)]) == 2
        assert f"--out: got {path}, allowed: a new folder" in capsys.readouterr().err and file.is_file()
    assert [main([*map(str, command), "--out", str(tmp_path / "new")]) for _ in range(2)] == [0, 0]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("{name: dit, conditions: [text]}", "--config: got none with a model conditioned on text"),
        ("{name: dit, conditions: 5}", "conditions: got 5, allowed: a valid list"),
    ],
)
def test_models_that_the_model_option_cannot_describe_are_rejected(model, message, tmp_path, capsys):
    assert import_weights(tmp_path, tmp_path / "a.pt", model, "--shape", "4,8,8")[1] == 2
    assert message in capsys.readouterr().err


def test_a_missing_start_is_rejected_before_any_job(tmp_path):
    with pytest.raises(ConfigError, match=r"training.start_from: got .*nowhere.* allowed: the folder of a snapshot"):
        validate(experiment(training__start_from=str(tmp_path / "nowhere"))).resolve()


def test_the_identity_contains_the_start_weights_and_another_model_is_rejected(tmp_path):
    latents = make_latents(tmp_path / "data")
    train(experiment({"uniform": {}}), "uniform", 0, tmp_path / "run", latents, [0])
    starts = [tmp_path / "run/snapshots/0000000", tmp_path / "elsewhere"]
    shutil.copytree(*starts)
    plain = [experiment({"uniform": {}}, training__start_from=str(start)) for start in starts]
    record = read_json(latents / "record.json")
    described = [describe_training(read_run_settings(one, "uniform", 0), record, "cpu") for one in plain]
    assert len(set(map(training_identity, described))) == 1
    plain[0]["model"]["width"] = 32
    with pytest.raises(KairosError, match=r"training.start_from: got model.width: 16 .* allowed: 32"):
        train(plain[0], "uniform", 0, tmp_path / "other", latents, [0])


def test_images_are_sampled_from_published_weights(tmp_path, capsys):
    """Pixels need no autoencoder; `kairos sample` reads the imported snapshot."""
    model_options = {**MODELS["dit"]}
    torch.save(make_weights("dit", 8), tmp_path / "a.pt")
    pixels = tmp_path / "autoencoder"
    pixels.mkdir()
    shape, factors = [4, 8, 8], {"scaling_factor": 1.0, "shift_factor": 0.0}
    record = {"kind": "none", "sha256": "pixels", "latent_shape": shape, "image_shape": shape, **factors}
    write_record(pixels / "record.json", record)
    out, status = import_weights(tmp_path, tmp_path / "a.pt", model_options, "--autoencoder", pixels, "--classes", 10)
    assert status == 0, capsys.readouterr().err
    images = tmp_path / "images.npz"
    command = ["sample", "--snapshot", out, "--out", images, "--num", 3, "--steps", 4, "--guidance-scale", 1.5]
    assert main([*map(str, command), "--autoencoder", str(pixels)]) == 0, capsys.readouterr().err
    with np.load(images) as samples:
        assert samples["images"].shape == (3, 8, 8, 4)

    assert import_weights(tmp_path, tmp_path / "a.pt", model_options, "--shape", "4,8,8", "--classes", 10)[1] == 0
    assert main([*map(str, command), "--autoencoder", str(pixels)]) == 0  # the snapshot does not record its autoencoder
    write_record(pixels / "record.json", {**record, "latent_shape": [4, 4, 4]})
    assert main([*map(str, command), "--autoencoder", str(pixels)]) == 1
    assert "has latents of shape [4, 4, 4], allowed: [4, 8, 8]" in capsys.readouterr().err
