"""Tests of VQModel autoencoders: latents are taken before quantisation, decoding quantises, the scale is LDM's."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, VQModel

from kairos.autoencoders.codec import load_codec
from kairos.autoencoders.encode import encode
from kairos.autoencoders.settings import AutoencoderConfig
from kairos.autoencoders.train_or_load import make_autoencoder, psnr
from kairos.cli import main
from kairos.config import validate
from kairos.costs.dataset_size import find_dataset_size
from kairos.data.dataset import open_dataset
from kairos.data.latents import open_latents
from kairos.data.pixels import to_uint8
from kairos.data.prepare import prepare
from kairos.sampling.samples_file import open_samples
from kairos_timesteps.errors import ConfigError
from test_data import folder_config
from training_case import experiment, train

SHARED = Path(__file__).parents[2] / "shared" / "data"
CPU = torch.device("cpu")
VQ_F4 = {
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "block_out_channels": (128, 256, 512),
    "layers_per_block": 2,
    "latent_channels": 3,
    "num_vq_embeddings": 8192,
    "vq_embed_dim": 3,
    "scaling_factor": 1.0,
}


@pytest.fixture(scope="module", autouse=True)
def deterministic_setup():
    from kairos.compute import setup

    setup(1, "cpu")


def small_vq(**fields) -> VQModel:
    """Return a VQModel with 32 channels, 2 levels and 256 codes, whose codes cover the range of its latents."""
    torch.manual_seed(0)
    model = VQModel(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(32, 32),
        latent_channels=3,
        num_vq_embeddings=256,
        norm_num_groups=8,
        **fields,
    ).eval()
    torch.nn.init.normal_(model.quantize.embedding.weight, std=0.5)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Folder of a VQModel saved by diffusers, with the default scaling factor."""
    folder = tmp_path_factory.mktemp("vq")
    small_vq().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Data set of COCO images of side 16."""
    if not (SHARED / "coco_mini").is_dir():
        pytest.skip("coco_mini is not in ../shared/data")
    out = tmp_path_factory.mktemp("coco") / "dataset"
    heldout = str(SHARED / "coco_mini" / "val2017")
    prepare(folder_config(SHARED / "coco_mini" / "train2017", crop="adm", resolution=16, heldout=heldout), out)
    return open_dataset(out)


def make_pretrained(folder: Path, dataset, out: Path, **fields):
    """Run stage autoencoder with a pretrained autoencoder; return its record."""
    config = AutoencoderConfig(kind="pretrained", path=str(folder), **fields)
    return make_autoencoder(config, dataset, out, CPU)


def test_encoding_and_decoding_equal_those_of_diffusers(folder, dataset, tmp_path):
    record = make_pretrained(folder, dataset, tmp_path)
    assert record["class"] == "VQModel" and record["latent_shape"] == [3, 8, 8]
    codec, model = load_codec(tmp_path), VQModel.from_pretrained(folder, low_cpu_mem_usage=False).eval()
    images = dataset.load_tensor(dataset.heldout)
    with torch.no_grad():
        latents = model.encode(images).latents
        z, _, (_, _, codes) = model.quantize(latents)
        mean, logvar = codec.encode(images)
        assert logvar is None and torch.equal(mean, latents)
        assert torch.equal(codec.decode(codec.to_model_space(mean)), model.decode(latents).sample)
        torch.testing.assert_close(codec.decode(mean), model.decode(z, force_not_quantize=True).sample)
    assert not torch.allclose(mean, z, atol=0.1) and len(codes.unique()) > 10
    reconstruction = to_uint8(codec.decode(codec.to_model_space(mean)))
    assert record["psnr"] == pytest.approx(psnr(dataset.images[dataset.heldout], reconstruction), abs=1e-3)


@pytest.mark.parametrize(
    ("saved", "scaling", "expected"),
    [(0.18215, None, 1.0), (1.0, None, 1.0), (0.5, None, 0.5), (0.18215, 0.18215, 0.18215), (1.0, 0.2, 0.2)],
)
def test_the_default_scaling_factor_of_a_file_counts_as_none(dataset, tmp_path, saved, scaling, expected):
    small_vq(scaling_factor=saved).save_pretrained(tmp_path / "vq")
    record = make_pretrained(tmp_path / "vq", dataset, tmp_path / "out", scaling=scaling)
    assert record["scaling_factor"] == expected
    assert json.loads((tmp_path / "out" / "config.json").read_text())["scaling_factor"] == expected
    codec = load_codec(tmp_path / "out")
    images = dataset.load_tensor(dataset.train[:3])
    mean, _ = codec.encode(images)
    assert torch.equal(codec.to_model_space(mean), mean * expected)
    torch.testing.assert_close(
        codec.decode(codec.to_model_space(mean)), codec.model.decode(mean).sample, atol=1e-4, rtol=1e-4
    )


def test_the_scaling_factor_of_a_kl_autoencoder_can_be_set(dataset, tmp_path):
    """U-ViT uses SD's autoencoder with another factor for COCO."""
    torch.manual_seed(0)
    AutoencoderKL(block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2, norm_num_groups=4,
                  up_block_types=("UpDecoderBlock2D",) * 2).save_pretrained(tmp_path / "kl")  # fmt: skip
    assert make_pretrained(tmp_path / "kl", dataset, tmp_path / "default")["scaling_factor"] == 0.18215
    assert make_pretrained(tmp_path / "kl", dataset, tmp_path / "out", scaling=0.2301)["scaling_factor"] == 0.2301


def test_invalid_scaling_factors_are_rejected():
    for fields, message in (
        ({"kind": "none", "scaling": 0.5}, r"autoencoder\.scaling: got 0\.5, allowed: null with kind none"),
        ({"kind": "pretrained", "path": "x", "scaling": 0.0}, "greater than 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            validate({"experiment": "e", "autoencoder": fields, "methods": {"u": {}}})


def test_images_with_an_odd_side_are_rejected(folder, tmp_path):
    prepare(folder_config(_write_odd_images(tmp_path)), tmp_path / "data")
    with pytest.raises(ConfigError, match=r"images are 7×7.*multiples of 2"):
        make_pretrained(folder, open_dataset(tmp_path / "data"), tmp_path / "out")


def _write_odd_images(tmp_path: Path) -> Path:
    from test_data import write_images

    return write_images(tmp_path / "in", 3, height=7, width=7)


@pytest.mark.parametrize(("cls", "fields", "parameters"), [
    (VQModel, VQ_F4, 55_322_782),
    (AutoencoderKL, {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4,
                     "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2}, 83_653_863),
])  # fmt: skip
def test_autoencoders_have_the_published_number_of_parameters(cls, fields, parameters):
    with torch.device("meta"):
        model = cls(**fields)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_a_training_run_uses_latents_of_a_vqmodel(folder, dataset, tmp_path, capsys):
    make_pretrained(folder, dataset, tmp_path / "autoencoder")
    codec = load_codec(tmp_path / "autoencoder")
    record = encode(dataset, codec, tmp_path / "latents", True, 8)
    latents = open_latents(tmp_path / "latents")
    assert record["shape"] == [3, 8, 8] and set(latents.moments) == {"mean", "mean_flipped"}
    assert not latents.stochastic
    assert torch.equal(latents.load_x0(dataset.train[:8]), codec.encode(dataset.load_tensor(dataset.train[:8]))[0])
    plain = experiment({"uniform": {}}, dataset={"flips": False, "source": "folder", "path": "in"})
    run = tmp_path / "methods" / "uniform" / "seed0"
    train(plain, "uniform", 0, run, tmp_path / "latents", [0, 20])
    lines = [json.loads(line)["mse"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert np.isfinite(lines).all()
    snapshot = run / "snapshots" / "0000020"
    out = tmp_path / "images.npz"
    assert main(["sample", "--snapshot", str(snapshot), "--out", str(out), "--num", "3", "--seed", "0"]) == 0
    assert open_samples(out).images.shape == (3, 16, 16, 3)


def test_the_dataset_size_is_known_without_encoding(folder, tmp_path):
    size = find_dataset_size(validate({
        "experiment": "e", "dataset": {"source": "folder", "path": "in", "resolution": 32, "flips": True},
        "autoencoder": {"kind": "pretrained", "path": str(folder)}, "methods": {"u": {}},
    }), tmp_path, None, None)  # fmt: skip
    assert size.x0_shape == (3, 16, 16) and size.latent_arrays == 2
