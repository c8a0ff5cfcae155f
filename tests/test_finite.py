"""NaN and infinite values end in one error at the stage where they arise, and no output counts as complete."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file

from clip_case import write_text_encoder
from kairos.autoencoders.codec import load_codec
from kairos.autoencoders.encode import encode
from kairos.autoencoders.settings import AutoencoderConfig
from kairos.autoencoders.train_or_load import make_autoencoder
from kairos.cli import main
from kairos.compute import setup
from kairos.data.dataset import open_dataset
from kairos.data.latents import open_latents
from kairos.data.prepare import prepare
from kairos.data.settings import DatasetConfig
from kairos.evaluation.external_reference import read_moments
from kairos.evaluation.extractors import build_extractor, open_extractor
from kairos.evaluation.measurements import ImageStatistics
from kairos.evaluation.metrics import Comparison, RealStatistics
from kairos.evaluation.settings import EXTRACTORS, METRICS
from kairos.files import hash_folder, read_json, write_json, write_record
from kairos.finite import demand_finite
from kairos.snapshots import open_snapshot
from kairos.text_encoders.encode_captions import encode_captions
from kairos.text_encoders.settings import TextEncoderConfig
from kairos.training.job import read_progress
from kairos_timesteps.errors import KairosError, NotFiniteError
from test_import import MODELS, make_weights
from test_text import write_captions, write_images
from training_case import experiment, make_latents, train

CPU = torch.device("cpu")
WEIGHTS = "diffusion_pytorch_model.safetensors"
DIVERGING = {"lr": 1e39, "warmup_steps": 0, "grad_clip": None}  # the first update overflows; its gradient is finite
NOT_FINITE = [float("nan"), float("inf")]


@pytest.fixture(autouse=True)
def one_thread():
    setup(1, "cpu")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A data set of 60 colour digits."""
    out = tmp_path_factory.mktemp("digits")
    prepare(DatasetConfig(color="rgb", limit=60), out)
    return open_dataset(out)


@pytest.fixture(scope="module")
def latents(tmp_path_factory):
    """Folder of the latents of 60 digits."""
    return make_latents(tmp_path_factory.mktemp("latents"), 60)


@pytest.fixture(scope="module")
def finished(latents, tmp_path_factory):
    """Folder of a finished training run of one step, and its experiment."""
    out = tmp_path_factory.mktemp("finished") / "run"
    plain = experiment({"uniform": {}}, training__milestones=[1])
    train(plain, "uniform", 0, out, latents, [1])
    return out, plain


def write_autoencoder(folder: Path, weight: str = "", value: float = 0.0) -> Path:
    """Write a small autoencoder of diffusers, with one weight set to a value, or with all of its values if large."""
    torch.manual_seed(0)
    model = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        norm_num_groups=4,
    )
    if weight:
        tensor = model.state_dict()[weight].view(-1)
        tensor[: 1 if not np.isfinite(value) else None] = value
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("weight", ["encoder.conv_in.weight", "decoder.conv_in.weight"])
def test_an_autoencoder_with_a_weight_that_is_not_finite_is_rejected(digits, tmp_path, weight, value):
    config = AutoencoderConfig(kind="pretrained", path=str(write_autoencoder(tmp_path / "vae", weight, value)))
    with pytest.raises(NotFiniteError, match=rf"vae: weights: 1 of [\d,]+ values are .*{weight}"):
        make_autoencoder(config, digits, tmp_path / "out", CPU)
    assert not (tmp_path / "out/record.json").exists()


@pytest.mark.parametrize(
    ("weight", "message"), [("encoder.conv_out.weight", "latents"), ("decoder.conv_out.weight", "decoded images")]
)
def test_an_autoencoder_whose_output_overflows_is_rejected(digits, tmp_path, weight, message):
    config = AutoencoderConfig(kind="pretrained", path=str(write_autoencoder(tmp_path / "vae", weight, 1e38)))
    with pytest.raises(NotFiniteError, match=f"vae: .*{message}"):
        make_autoencoder(config, digits, tmp_path / "out", CPU)
    assert not (tmp_path / "out/record.json").exists()


@pytest.mark.parametrize("field", ["scaling_factor", "shift_factor"])
def test_a_factor_of_an_autoencoder_that_is_not_finite_is_rejected(digits, tmp_path, field):
    folder = write_autoencoder(tmp_path / "vae")
    write_json(folder / "config.json", {**read_json(folder / "config.json"), field: 1e300})
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("1e+300", "NaN"))
    config = AutoencoderConfig(kind="pretrained", path=str(folder))
    with pytest.raises(KairosError, match=f"{field} nan"):
        make_autoencoder(config, digits, tmp_path / "out", CPU)
    assert not (tmp_path / "out/record.json").exists()


def test_latents_and_pixels_are_checked_when_they_leave_the_codec(digits, tmp_path):
    config = AutoencoderConfig(kind="pretrained", path=str(write_autoencoder(tmp_path / "vae")))
    make_autoencoder(config, digits, tmp_path / "autoencoder", CPU)
    codec = load_codec(tmp_path / "autoencoder")
    images = digits.load_tensor(range(4))
    mean, _ = codec.encode(images)
    codec.model.decoder.conv_out.bias[0] = torch.nan
    with pytest.raises(NotFiniteError, match="256 of 768 values are NaN"):
        codec.decode(codec.to_model_space(mean))
    codec.model.quant_conv.bias[0] = torch.inf
    with pytest.raises(NotFiniteError, match="mean"):
        encode(digits, codec, tmp_path / "latents", flips=False, batch_size=16)
    assert not (tmp_path / "latents/record.json").exists()


def test_a_diverged_training_of_the_autoencoder_ends_at_once_and_again_after_a_retry(digits, tmp_path):
    config = AutoencoderConfig(kind="train", channels=[8, 16], batch_size=8, steps=40, learning_rate=1e30)
    for _ in range(2):
        with pytest.raises(NotFiniteError, match=r"autoencoder: step \d+: .*autoencoder.learning_rate"):
            make_autoencoder(config, digits, tmp_path / "out", CPU)
        assert not (tmp_path / "out/record.json").exists()


@pytest.mark.parametrize(("name", "value"), [("mean", np.nan), ("logvar", np.inf), ("logvar", 1e4)])
def test_latents_that_are_not_finite_stop_a_training_run_for_good(latents, tmp_path, name, value):
    shutil.copytree(latents.parent, tmp_path / "data")
    file = tmp_path / "data/latents" / f"{name}.npy"
    values = np.load(file)
    values[int(open_latents(latents).train[3]), 0, 1, 2] = value
    np.save(file, values)
    with pytest.raises(NotFiniteError, match=r"latents .*1 of .* values are"):
        train(experiment({"uniform": {}}), "uniform", 0, tmp_path / "run", tmp_path / "data/latents", [20])
    assert read_progress(tmp_path / "run")["again"] is False
    assert not (tmp_path / "run/snapshots").exists()


def test_conditions_that_are_not_finite_are_rejected(latents, tmp_path):
    shutil.copytree(latents.parent, tmp_path / "data")
    vectors = np.zeros((60, 3), np.float32)
    vectors[7] = np.inf
    np.save(tmp_path / "data/dataset/conditions/vector.npy", vectors)
    for file in ("dataset", "latents"):
        path = tmp_path / "data" / file / "record.json"
        record = read_json(path)
        record["conditions"]["vector"] = {"kind": "tensor", "shape": [3], "file": "conditions/vector.npy"}
        write_record(path, record)
    opened = open_latents(tmp_path / "data/latents")
    assert opened.load_conditions([6, 8])["vector"].shape == (2, 3)
    with pytest.raises(NotFiniteError, match=r"condition vector .*3 of 6 values are infinite"):
        opened.load_conditions([6, 7])


def test_weights_that_overflow_in_the_last_step_are_not_saved(latents, tmp_path):
    plain = experiment({"uniform": {}}, training__optimizer=DIVERGING, training__milestones=[1])
    with pytest.raises(NotFiniteError, match=r"step 1: .*training.optimizer.lr"):
        train(plain, "uniform", 0, tmp_path / "run", latents, [1])
    assert not list((tmp_path / "run").rglob("*.ckpt")) and not list((tmp_path / "run").rglob("snapshot.json"))


def damage_snapshot(finished: Path, folder: Path, value: float, weights: str = "ema") -> Path:
    """Copy a snapshot, set all values of one of its weights, and record the hashes of the changed files."""
    shutil.copytree(finished / "snapshots/0000001", folder)
    file = folder / weights / WEIGHTS
    tensors = load_file(file)
    tensors[max(tensors, key=lambda name: tensors[name].numel())][:] = value
    save_file(tensors, file, {"format": "pt"})
    record = read_json(folder / "snapshot.json")
    (folder / "snapshot.json").unlink()
    write_record(folder / "snapshot.json", {**record, "files": hash_folder(folder)})
    return folder


@pytest.mark.parametrize("value", [*NOT_FINITE, 3e38])
def test_a_snapshot_of_a_diverged_run_gives_no_images(finished, latents, tmp_path, capsys, value):
    folder = damage_snapshot(finished[0], tmp_path / "snapshot", value)
    make_autoencoder(AutoencoderConfig(), open_dataset(latents.parent / "dataset"), tmp_path / "none", CPU)
    arguments = ["sample", "--snapshot", folder, "--out", tmp_path / "x.npz", "--num", 4, "--autoencoder"]
    record = read_json(tmp_path / "none/record.json") | {"sha256": "blocks"}
    write_record(tmp_path / "none/record.json", record)
    assert main([*map(str, arguments), str(tmp_path / "none")]) == 1
    message = capsys.readouterr().err
    assert str(folder) in message and "values are" in message and "Traceback" not in message
    assert not (tmp_path / "x.npz").exists()
    if not np.isfinite(value):  # large weights are finite: only their output is not
        with pytest.raises(NotFiniteError, match=WEIGHTS):
            open_snapshot(folder)
        assert open_snapshot(folder, "raw").record["step"] == 1


def test_a_run_does_not_start_from_weights_that_are_not_finite(finished, latents, tmp_path):
    out, plain = finished
    folder = damage_snapshot(out, tmp_path / "snapshot", torch.nan)
    plain = {**plain, "training": {**plain["training"], "start_from": str(folder)}}
    with pytest.raises(NotFiniteError, match=r"training.start_from: .*ema"):
        train(plain, "uniform", 0, tmp_path / "run", latents, [1])


@pytest.mark.parametrize("value", NOT_FINITE)
def test_published_weights_that_are_not_finite_are_not_imported(tmp_path, capsys, value):
    weights = make_weights("dit")
    weights["blocks.1.attn.qkv.weight"][3, 4:6] = value
    torch.save({"model": make_weights("dit"), "ema": weights}, tmp_path / "published.pt")
    arguments = ["import-weights", tmp_path / "published.pt", "--model", MODELS["dit"], "--shape", "4,8,8"]
    assert main([*map(str, arguments), "--classes", "10", "--out", str(tmp_path / "out")]) == 1
    message = capsys.readouterr().err
    assert "published.pt" in message and "2 of" in message and "blocks.1.attn.qkv.weight" in message
    assert not (tmp_path / "out").exists()


def test_texts_whose_states_are_not_finite_are_rejected(tmp_path):
    captions = write_captions(tmp_path / "c.json", {f"{n}.png": ["a photo of a cat"] for n in range(6)})
    images = write_images(tmp_path / "images", [f"{n}.png" for n in range(6)])
    prepare(DatasetConfig(source="folder", path=str(images), captions=captions), tmp_path / "dataset")
    dataset = open_dataset(tmp_path / "dataset")
    folder = write_text_encoder(tmp_path / "encoder")
    tensors = load_file(folder / "model.safetensors")
    config = TextEncoderConfig(path=str(folder)).resolve_auto("tokens")
    for value, dtype, message in (
        (torch.nan, "float32", "text_encoder.path: .*encoder: state"),
        (1e5, "float16", "text_encoder.dtype: .*set float32"),
    ):
        next(tensor for name, tensor in tensors.items() if name.endswith("final_layer_norm.bias"))[:] = value
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(NotFiniteError, match=message):
            encode_captions(config.model_copy(update={"dtype": dtype}), dataset, tmp_path / "text", CPU)
        assert not (tmp_path / "text/record.json").exists()


def test_an_extractor_that_is_not_finite_is_neither_written_nor_used(digits, tmp_path):
    options = {"name": "selfsupervised", "features": 4, "channels": 4, "steps": 3}
    with pytest.raises(NotFiniteError, match=r"selfsupervised4: weights .*evaluation.extractor.learning_rate"):
        build_extractor(EXTRACTORS.select({**options, "learning_rate": 1e30}), digits, tmp_path / "diverged")
    assert not (tmp_path / "diverged/record.json").exists()
    build_extractor(EXTRACTORS.select(options), digits, tmp_path / "extractor")
    extractor = open_extractor(tmp_path / "extractor")
    with torch.no_grad():
        extractor.module.model.body[0].bias[0] = torch.nan
    with pytest.raises(NotFiniteError, match=r"selfsupervised4: .* of 12 values are NaN, in features"):
        extractor.compute_layers(digits.images[:3])


@pytest.mark.parametrize("array", ["mu", "sigma"])
def test_published_moments_that_are_not_finite_are_rejected(tmp_path, array):
    moments = {"mu": np.zeros(4), "sigma": np.eye(4)}
    moments[array].flat[1] = np.nan
    np.savez(tmp_path / "reference.npz", **moments)
    with pytest.raises(NotFiniteError, match=rf"reference.npz: 1 of 20 values are NaN, in {array}"):
        read_moments(tmp_path / "reference.npz", 4, {"moments"}, "evaluation.reference")


def test_a_metric_that_is_not_finite_is_rejected():
    huge = (np.full(2, 1e200), np.eye(2))
    real = RealStatistics({"features": (np.zeros(2), np.eye(2))})
    comparison = Comparison("frechet_x", real, (METRICS.select({"name": "frechet"}),))
    with pytest.raises(NotFiniteError, match="frechet_x"), np.errstate(over="ignore"):
        comparison.score(ImageStatistics(count=3, gaussians={"features": huge}))


def test_a_record_with_a_number_that_is_not_finite_is_not_written(tmp_path):
    with pytest.raises(NotFiniteError, match=r"record.json: validation.rows\[1\].loss is nan"):
        write_record(tmp_path / "record.json", {"validation": {"rows": [{"loss": 1.0}, {"loss": float("nan")}]}})
    assert not (tmp_path / "record.json").exists()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_only_values_that_are_not_finite_are_rejected(dtype):
    large = torch.full((3, 4), torch.finfo(dtype).max, dtype=dtype)  # their sum overflows
    demand_finite({"a": large, "b": torch.zeros(0), "c": torch.ones(2, dtype=torch.int64)}, "values", "none")
    large[1, 2] = torch.nan
    with pytest.raises(NotFiniteError, match=r"^values: 1 of 14 values are NaN, in a; remedy$"):
        demand_finite({"a": large, "b": torch.zeros(2)}, "values", "remedy")
    if dtype in (torch.float64, torch.float32, torch.float16):
        array = torch.full((5,), torch.finfo(dtype).max, dtype=dtype).numpy()
        demand_finite(array, "values", "none")
        array[0] = -np.inf
        with pytest.raises(NotFiniteError, match="1 of 5 values are infinite; remedy"):
            demand_finite(array, "values", "remedy")
