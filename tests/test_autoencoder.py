"""Stage autoencoder and its codec, for the kinds none, train and pretrained."""

import io
import json
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kairos.autoencoders.codec import Codec, load_codec
from kairos.autoencoders.settings import AutoencoderConfig, check_image_size
from kairos.autoencoders.train_or_load import make_autoencoder, psnr
from kairos.data.dataset import open_dataset
from kairos.data.pixels import to_uint8
from kairos.data.prepare import prepare
from kairos.data.settings import DatasetConfig
from kairos.files import DamagedError
from kairos_timesteps.errors import ConfigError, KairosError

SHARED = Path(__file__).parents[2] / "shared" / "data"
CPU = torch.device("cpu")
TINY = {"kind": "train", "channels": [8, 16], "batch_size": 16, "learning_rate": 5e-3}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Deterministic computation on one thread."""
    from kairos.compute import setup

    setup(1, "cpu")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A data set of 300 grey digits."""
    out = tmp_path_factory.mktemp("digits")
    prepare(DatasetConfig(color="grey", limit=300), out)
    return open_dataset(out)


def settings(**fields) -> AutoencoderConfig:
    """Return the settings of a tiny autoencoder, with some fields changed."""
    return AutoencoderConfig.model_validate({**TINY, **fields})


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory):
    """The folder and the record of a trained autoencoder."""
    out = tmp_path_factory.mktemp("trained")
    return out, make_autoencoder(settings(steps=60), digits, out, CPU)


def test_kind_none_keeps_the_pixels(digits, tmp_path):
    record = make_autoencoder(AutoencoderConfig(), digits, tmp_path, CPU)
    codec = load_codec(tmp_path)
    images = digits.load_tensor([0, 1])
    assert type(codec) is Codec
    assert record["sha256"] == "pixels" and record["latent_shape"] == [1, 8, 8]
    mean, logvar = codec.encode(images)
    assert logvar is None
    assert torch.equal(codec.decode(codec.to_model_space(mean)), images)


def test_a_trained_autoencoder_reconstructs_images(digits, trained):
    out, record = trained
    codec = load_codec(out)
    images = digits.load_tensor(digits.heldout)
    mean, logvar = codec.encode(images)
    assert list(mean.shape[1:]) == record["latent_shape"] == [4, 4, 4]
    assert logvar.shape == mean.shape
    back = to_uint8(codec.decode(codec.to_model_space(mean)))
    assert psnr(digits.images[digits.heldout], back) == pytest.approx(record["psnr"], abs=1e-3)
    blank = np.full_like(back, round(255 * digits.record["channel_mean"][0]))
    assert record["psnr"] > psnr(digits.images[digits.heldout], blank) + 3


def test_latents_in_model_space_are_standardised(digits, trained):
    codec = load_codec(trained[0])
    mean, logvar = codec.encode(digits.load_tensor(digits.train))
    x0 = codec.to_model_space(mean + (0.5 * logvar).exp() * torch.randn(mean.shape))
    assert float(x0.mean()) == pytest.approx(0, abs=0.03)
    assert float(x0.std()) == pytest.approx(1, abs=0.03)


def test_diffusers_opens_the_folder_which_shows_reconstructions(trained):
    from diffusers import AutoencoderKL

    out, record = trained
    model = AutoencoderKL.from_pretrained(out, low_cpu_mem_usage=False)
    assert model.config.scaling_factor == record["scaling_factor"]
    assert model.config.shift_factor == record["shift_factor"]
    with Image.open(out / "reconstructions.png") as image:
        assert image.width >= 8 * 64
    assert str(out) not in (out / "config.json").read_text()


def test_training_is_deterministic_for_each_seed(digits, tmp_path):
    first, again, other = (
        make_autoencoder(settings(steps=3, seed=seed), digits, tmp_path / name, CPU)["sha256"]
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert first == again != other


def _train_until_killed(config, dataset_folder, out) -> None:
    import kairos.autoencoders.train as training
    from kairos.compute import setup

    setup(1, "cpu")
    training._CHECKPOINT_EVERY = 4
    original_advance = training.ProgressBar.advance

    def advance(self, *arguments, **keywords):
        if self.done == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        original_advance(self, *arguments, **keywords)

    training.ProgressBar.advance = advance
    make_autoencoder(config, open_dataset(dataset_folder), out, CPU)


@pytest.mark.long
def test_a_killed_training_run_resumes_exactly(digits, tmp_path, monkeypatch, capsys):
    import kairos.autoencoders.train as training

    monkeypatch.setattr(training, "_CHECKPOINT_EVERY", 4)
    expected = make_autoencoder(settings(steps=10), digits, tmp_path / "whole", CPU)
    # a fork of this process could not train: tests before this one may have started autograd's threads
    job = multiprocessing.get_context("forkserver").Process(
        target=_train_until_killed, args=(settings(steps=10), digits.folder, tmp_path / "killed")
    )
    job.start()
    job.join()
    assert job.exitcode == -signal.SIGKILL
    with pytest.raises(KairosError, match=r"not complete.*kairos autoencoder"):
        load_codec(tmp_path / "killed")
    capsys.readouterr()
    assert make_autoencoder(settings(steps=10), digits, tmp_path / "killed", CPU) == expected
    assert "resumes after step 4" in capsys.readouterr().err
    assert not (tmp_path / "killed" / ".state.pt").exists()


def test_checkpoints_of_other_settings_and_damaged_ones_are_not_used(digits, tmp_path, monkeypatch, capsys):
    import kairos.autoencoders.train as training

    state = tmp_path / "state.pt"
    training.train(settings(steps=2), digits, state, CPU)
    capsys.readouterr()
    # fields that only stage encode uses
    training.train(settings(steps=2, shards=8, encode_batch_size=2, dtype="float16"), digits, state, CPU)
    assert "resumes after step 2" in capsys.readouterr().err
    training.train(settings(steps=2, seed=3), digits, state, CPU)
    assert "resumes" not in capsys.readouterr().err
    load, keywords = torch.load, {}
    monkeypatch.setattr(torch, "load", lambda *arguments, **given: keywords.update(given) or load(*arguments, **given))
    training.train(settings(steps=4), digits, state, CPU)
    assert keywords["map_location"] == "cpu"  # the GPU that wrote a checkpoint may be missing
    other_content = io.BytesIO()  # a file of torch with other content
    torch.save([1, 2], other_content)
    for damaged in (state.read_bytes()[:1000], other_content.getvalue()):
        state.write_bytes(damaged)
        training.train(settings(steps=2), digits, state, CPU)
        assert "is damaged" in capsys.readouterr().err


def test_a_resolution_that_cannot_be_halved_is_rejected(digits, tmp_path):
    with pytest.raises(ConfigError, match=r"dataset\.resolution: images are 8×8.*multiples of 16; allowed: 16"):
        make_autoencoder(settings(channels=[8, 8, 8, 8, 8]), digits, tmp_path, CPU)


def test_damaged_weights_are_reported(digits, tmp_path):
    make_autoencoder(settings(steps=1), digits, tmp_path, CPU)
    weights = tmp_path / "diffusion_pytorch_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    with pytest.raises(DamagedError, match=r"safetensors.*damaged"):
        load_codec(tmp_path)


def test_a_pretrained_kl_autoencoder_keeps_its_scaling(digits, trained, tmp_path):
    """A folder that kairos has trained serves as a pretrained autoencoder of another experiment."""
    source, trained_record = trained
    config = AutoencoderConfig(kind="pretrained", path=str(source))
    record = make_autoencoder(config, digits, tmp_path, CPU)
    assert record["class"] == "AutoencoderKL"
    assert record["scaling_factor"] == trained_record["scaling_factor"]
    assert record["psnr"] == trained_record["psnr"]
    images = digits.load_tensor([0, 5])
    for moments, moments_of_source in zip(load_codec(tmp_path).encode(images), load_codec(source).encode(images)):
        assert torch.equal(moments, moments_of_source)


def test_unusable_pretrained_autoencoders_are_reported(digits, tmp_path, monkeypatch):
    def make(path):
        return make_autoencoder(AutoencoderConfig(kind="pretrained", path=str(path)), digits, tmp_path / "out", CPU)

    with pytest.raises(ConfigError, match=r"autoencoder\.path: got .*nowhere.*hub id"):
        make(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"lacks config\.json and diffusion_pytorch_model\.safetensors"):
        make(tmp_path / "empty")
    (tmp_path / "empty" / "diffusion_pytorch_model.safetensors").write_bytes(b"")
    (tmp_path / "empty" / "config.json").write_text(json.dumps({"_class_name": "ConsistencyDecoderVAE"}))
    with pytest.raises(ConfigError, match=r"'ConsistencyDecoderVAE', allowed: AutoencoderKL, AutoencoderTiny, VQModel"):
        make(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text(json.dumps({"_class_name": "AutoencoderTiny"}))
    with pytest.raises(KairosError, match=r"empty cannot be loaded"):
        make(tmp_path / "empty")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(KairosError, match=r"someone/vae.*cannot be downloaded from the hub.*set autoencoder\.path"):
        make("someone/vae")


taesd = pytest.mark.skipif(not (SHARED / "taesd").is_dir(), reason="taesd is not in ../shared/data")
TAESD = AutoencoderConfig(kind="pretrained", path=str(SHARED / "taesd"))


@pytest.mark.long
@taesd
@pytest.mark.skipif(not (SHARED / "cifar10").is_dir(), reason="CIFAR-10 is not in ../shared/data")
def test_taesd_reconstructs_enlarged_cifar_images(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    files = str(SHARED / "cifar10" / "*.parquet")
    config = DatasetConfig(source="parquet", path=files, limit=4, resolution=256, heldout=0.5)
    prepare(config, tmp_path / "data")
    record = make_autoencoder(TAESD, open_dataset(tmp_path / "data"), tmp_path / "out", CPU)
    assert record["class"] == "AutoencoderTiny" and record["latent_shape"] == [4, 32, 32]
    assert record["psnr"] > 30
    assert "shared" not in (tmp_path / "out" / "config.json").read_text()


@taesd
def test_a_colour_autoencoder_encodes_grey_images(tmp_path):
    prepare(DatasetConfig(color="grey", limit=6, resolution=32), tmp_path / "data")
    dataset = open_dataset(tmp_path / "data")
    make_autoencoder(TAESD, dataset, tmp_path / "out", CPU)
    codec = load_codec(tmp_path / "out")
    mean, logvar = codec.encode(dataset.load_tensor([0, 1]))
    assert mean.shape == (2, 4, 4, 4) and logvar is None
    assert codec.decode(codec.to_model_space(mean)).shape == (2, 1, 32, 32)


@taesd
def test_taesd_rejects_sizes_that_are_no_multiples_of_eight(digits, tmp_path):
    prepare(DatasetConfig(limit=4, resolution=28), tmp_path / "data")
    with pytest.raises(ConfigError, match=r"28×28.*multiples of 8; allowed: 24 or 32 instead of 28"):
        make_autoencoder(TAESD, open_dataset(tmp_path / "data"), tmp_path / "out", CPU)


def test_proposed_sizes_are_those_of_the_side_that_does_not_fit():
    with pytest.raises(ConfigError, match="allowed: 28 or 32 instead of 30"):
        check_image_size((3, 32, 30), 4, "this autoencoder")
