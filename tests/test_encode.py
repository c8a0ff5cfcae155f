"""Stage encode, and the latents that training runs read."""

import multiprocessing
import os
import shutil
import signal

import numpy as np
import pytest
import torch

from kairos.autoencoders.codec import Codec, load_codec
from kairos.autoencoders.encode import encode
from kairos.autoencoders.settings import AutoencoderConfig
from kairos.autoencoders.train_or_load import make_autoencoder
from kairos.config import validate
from kairos.data import resumable_arrays
from kairos.data.dataset import open_dataset
from kairos.data.latents import open_latents
from kairos.data.pixels import to_float
from kairos.data.prepare import prepare
from kairos.data.settings import DatasetConfig
from kairos.shards import Shard
from kairos.stage_keys import list_sections, select_fields
from kairos.stages import list_stages
from kairos_timesteps.errors import ConfigError, KairosError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A data set and two autoencoders: kind none, and one that was trained for five steps."""
    from kairos.compute import setup

    setup(1, "cpu")
    root = tmp_path_factory.mktemp("results")
    prepare(DatasetConfig(color="grey", limit=100), root / "dataset")
    dataset = open_dataset(root / "dataset")
    config = AutoencoderConfig(kind="train", channels=[8, 16], steps=5, batch_size=8)
    make_autoencoder(config, dataset, root / "autoencoder", CPU)
    make_autoencoder(AutoencoderConfig(), dataset, root / "none", CPU)
    return root


@pytest.fixture(scope="module")
def latents(results):
    """Latents with flips."""
    encode_into(results, "latents", flips=True)
    return open_latents(results / "latents")


def encode_into(results, name, flips=False, codec="autoencoder", batch_size=16):
    """Encode the data set into a folder of the results; returns the record."""
    dataset = open_dataset(results / "dataset")
    return encode(dataset, load_codec(results / codec), results / name, flips, batch_size)


def test_moments_equal_those_of_the_codec(results, latents):
    codec, dataset = load_codec(results / "autoencoder"), open_dataset(results / "dataset")
    assert latents.shape == (4, 4, 4) and len(latents.dataset.images) == 100 and latents.stochastic
    assert np.array_equal(latents.train, dataset.train) and np.array_equal(latents.heldout, dataset.heldout)
    mean, _ = codec.encode(dataset.load_tensor(range(100)))
    assert torch.allclose(latents.load_x0(range(100)), codec.to_model_space(mean), atol=1e-5)


def test_moments_of_flips_equal_those_of_flipped_images(results, latents):
    codec, dataset = load_codec(results / "autoencoder"), open_dataset(results / "dataset")
    expected = codec.encode(dataset.load_tensor(range(10)).flip(3))
    for name, moments in zip(("mean_flipped", "logvar_flipped"), expected):
        assert np.allclose(latents.moments[name][:10], moments.numpy(), atol=1e-5)
    assert not np.allclose(latents.moments["mean_flipped"][:], latents.moments["mean"][:][..., ::-1])


def means(latents, indices):
    """Return the means of the latents of some images."""
    return torch.from_numpy(latents.moments["mean"][indices])


def test_latents_are_sampled_from_their_moments(results, latents):
    indices = np.array([7, 3, 90])
    flips = np.array([False, True, False])
    noise = torch.randn(3, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    z = []
    for index, flip, noise_of_image in zip(indices, flips, noise):
        suffix = "_flipped" if flip else ""
        mean, logvar = (torch.tensor(latents.moments[name + suffix][index]) for name in ("mean", "logvar"))
        z.append(mean + torch.exp(logvar / 2) * noise_of_image)
    expected = load_codec(results / "autoencoder").to_model_space(torch.stack(z))
    assert torch.allclose(latents.load_x0(indices, flips, noise), expected, atol=1e-6)
    assert torch.equal(
        latents.load_x0(indices), load_codec(results / "autoencoder").to_model_space(means(latents, indices))
    )
    assert latents.load_x0(indices, flips, noise).dtype == torch.float32


def test_flips_that_were_not_encoded_are_rejected(results):
    encode_into(results, "unflipped")
    latents = open_latents(results / "unflipped")
    assert not latents.can_flip and "mean_flipped" not in latents.moments
    assert torch.equal(latents.load_x0([0, 1], np.array([False, False])), latents.load_x0([0, 1]))
    with pytest.raises(KairosError, match=r"dataset\.flips"):
        latents.load_x0([0, 1], np.array([False, True]))


def test_without_an_autoencoder_latents_are_pixels(results):
    record = encode_into(results, "pixels", flips=True, codec="none")
    latents, dataset = open_latents(results / "pixels"), open_dataset(results / "dataset")
    assert record["kind"] == "pixels" and record["files"] == {} and not latents.stochastic
    assert torch.equal(latents.load_x0([4, 2]), dataset.load_tensor([4, 2]))
    flipped = latents.load_x0([4, 2], np.array([True, False]), torch.randn(2, 1, 8, 8))
    assert torch.equal(flipped[0], dataset.load_tensor([4])[0].flip(2))
    assert torch.equal(flipped[1], dataset.load_tensor([2])[0])


def test_conditions_of_latents_equal_those_of_the_data_set(results, latents):
    assert latents.condition_kinds["class"]["num_classes"] == 10
    classes = latents.load_conditions([5, 0])["class"]
    assert classes.dtype == torch.int64
    assert classes.tolist() == [int(open_dataset(results / "dataset").labels[index]) for index in (5, 0)]


def test_the_content_hash_depends_on_everything_that_training_reads(results, latents):
    again = encode_into(results, "again", flips=True)
    assert again == {**latents.record, "dataset": "../dataset"}
    unflipped = encode_into(results, "other")
    pixels = encode_into(results, "other", codec="none")
    hashes = {item["content_sha256"] for item in (again, unflipped, pixels)}
    assert len(hashes) == 3


def _encode_until_killed(results, name, batch_size=16, last_call=9, save_seconds=0.0, device="cpu"):
    resumable_arrays._SAVE_SECONDS = save_seconds
    codec = load_codec(results / "autoencoder")
    dataset = open_dataset(results / "dataset")

    class DyingCodec(Codec):
        calls = 0

        def encode(self, images):
            DyingCodec.calls += 1
            if DyingCodec.calls == last_call:
                os.kill(os.getpid(), signal.SIGKILL)
            return codec.encode(images)

    encode(dataset, DyingCodec(codec.record, torch.device(device)), results / name, True, batch_size)


def test_a_killed_encode_resumes_with_equal_bits(results, latents, capsys):
    job = multiprocessing.get_context("fork").Process(target=_encode_until_killed, args=(results, "killed"))
    job.start()
    job.join()
    assert job.exitcode == -signal.SIGKILL
    with pytest.raises(KairosError, match=r"not complete.*kairos encode"):
        open_latents(results / "killed")
    capsys.readouterr()
    assert encode_into(results, "killed", flips=True) == latents.record
    assert "resumes after image 48" in capsys.readouterr().err
    assert sorted(file.name for file in (results / "killed").iterdir()) == [
        *("logvar.npy", "logvar_flipped.npy", "mean.npy", "mean_flipped.npy", "record.json")
    ]


def test_a_partial_encode_with_other_settings_is_not_used(results, latents, capsys):
    job = multiprocessing.get_context("fork").Process(target=_encode_until_killed, args=(results, "foreign"))
    job.start()
    job.join()
    assert (results / "foreign" / ".partial" / "progress.json").is_file()
    job = multiprocessing.get_context("fork").Process(
        target=_encode_until_killed, args=(results, "foreign", 8, 5, 1e9)
    )  # another batch size starts again, and dies before it has recorded anything
    job.start()
    job.join()
    assert job.exitcode == -signal.SIGKILL
    capsys.readouterr()
    assert encode_into(results, "foreign", flips=True) == latents.record
    assert "resumes" not in capsys.readouterr().err


def test_a_progress_record_without_contents_is_not_used(results, latents, capsys):
    job = multiprocessing.get_context("fork").Process(target=_encode_until_killed, args=(results, "odd"))
    job.start()
    job.join()
    (results / "odd" / ".partial" / "progress.json").write_text("{}")
    capsys.readouterr()
    assert encode_into(results, "odd", flips=True) == latents.record
    assert "resumes" not in capsys.readouterr().err


@pytest.mark.parametrize("shard", [None, "1of2"])
def test_two_processes_cannot_encode_into_one_folder_at_once(results, shard):
    codec = load_codec(results / "autoencoder")
    dataset = open_dataset(results / "dataset")
    out = results / f"twice-{shard}"
    rejected = []

    class EncodingTwice(Codec):
        def encode(self, images):
            if not rejected:
                rejected.append(shard)
                with pytest.raises(KairosError, match=f"{out.name}: another process"):
                    encode(dataset, codec, out, True, 16, shard=shard and Shard.parse(shard))
            return codec.encode(images)

    twice = EncodingTwice(codec.record, torch.device("cpu"))
    encode(dataset, twice, out, True, 16, shard=shard and Shard.parse(shard))
    assert rejected and (out / "record.json").is_file() and not list(results.glob(".tmp-*"))


class CodecOnDevice(Codec):
    """Codec that computes on the CPU and reports another device, such as a GPU."""

    def __init__(self, codec, device):
        super().__init__(codec.record, torch.device(device))
        vars(self)["codec"] = codec  # the class is frozen

    def encode(self, images):
        return self.codec.encode(images)


def test_a_partial_encode_of_a_gpu_is_not_resumed_on_a_cpu(results, latents, capsys):
    job = multiprocessing.get_context("fork").Process(
        target=_encode_until_killed, args=(results, "gpu", 16, 9, 0.0, "cuda")
    )
    job.start()
    job.join()
    assert job.exitcode == -signal.SIGKILL
    capsys.readouterr()
    assert encode_into(results, "gpu", flips=True) == latents.record
    assert "resumes" not in capsys.readouterr().err


def test_a_partial_encode_of_another_version_of_torch_is_not_resumed(results, latents, capsys, monkeypatch):
    job = multiprocessing.get_context("fork").Process(target=_encode_until_killed, args=(results, "old-torch"))
    job.start()
    job.join()
    assert job.exitcode == -signal.SIGKILL
    capsys.readouterr()
    monkeypatch.setattr(torch, "__version__", "0.0.1")
    encode_into(results, "old-torch", flips=True)
    assert "resumes" not in capsys.readouterr().err


def encode_shard(results, text, batch_size=16, device="cpu", **changes):
    """Encode one shard, such as ``1of2``, into a folder of the results; returns the folder."""
    dataset, codec = open_dataset(results / "dataset"), CodecOnDevice(load_codec(results / "autoencoder"), device)
    options = {"flips": True, "shard": Shard.parse(text), **changes}
    folder = results / f"shard{text}"
    encode(dataset, codec, folder, batch_size=batch_size, **options)
    return folder


def merge_shards(results, shards):
    """Merge the folders of shards, and return the record."""
    dataset, codec = open_dataset(results / "dataset"), load_codec(results / "autoencoder")
    return encode(dataset, codec, results / "merged", True, 16, shard_folders=shards)


@pytest.mark.parametrize("count", [2, 3, 9])
def test_merged_shards_equal_the_bits_of_one_job(results, latents, count):
    """There are seven batches, the last one of 4 images, so that two of nine shards are empty."""
    shards = [encode_shard(results, f"{number}of{count}") for number in range(1, count + 1)]
    assert merge_shards(results, shards[::-1]) == latents.record
    for name in latents.record["files"]:
        assert (results / "merged" / name).read_bytes() == (results / "latents" / name).read_bytes()


def test_shards_of_two_devices_are_not_merged(results):
    shards = [encode_shard(results, "1of2"), encode_shard(results, "2of2", device="cuda")]
    with pytest.raises(KairosError, match=r"shard2of2.*device.*cuda.*cpu"):
        merge_shards(results, shards)


def test_shards_of_a_gpu_are_merged_on_a_cpu(results, latents):
    shards = [encode_shard(results, f"{number}of2", device="cuda") for number in (1, 2)]
    assert merge_shards(results, shards) == latents.record


def test_a_shard_that_cannot_be_merged_is_reported(results):
    first, second = (encode_shard(results, text) for text in ("1of2", "2of2"))
    with pytest.raises(KairosError, match=r"shard1of2: contains shard 1 of 2, which .*shard1of2 also contains; delete"):
        merge_shards(results, [first, first])
    with pytest.raises(KairosError, match=r"shard1of2: belongs to 2 shards, got 1"):
        merge_shards(results, [first])
    with open(second / "logvar_flipped.npy", "r+b") as file:
        file.truncate(500)
    with pytest.raises(KairosError, match=r"shard2of2/logvar_flipped\.npy: damaged.*delete this shard"):
        merge_shards(results, [first, second])
    (second / "logvar_flipped.npy").unlink()
    with pytest.raises(KairosError, match=r"shard2of2/logvar_flipped\.npy: is missing; delete this shard"):
        merge_shards(results, [first, second])
    for changes, message in (({"flips": False}, "flips: got False"), ({"batch_size": 8}, "batch_size: got 8")):
        encode_shard(results, "2of2", **changes)
        with pytest.raises(KairosError, match=f"shard2of2: is no shard of this job: {message}"):
            merge_shards(results, [first, second])
    shutil.rmtree(second)
    with pytest.raises(KairosError, match=r"shard2of2: does not exist; make it with: kairos encode --shard"):
        merge_shards(results, [first, second])
    with pytest.raises(KairosError, match="kind none"):
        encode(open_dataset(results / "dataset"), load_codec(results / "none"), results / "p", True, 16, Shard(1, 2))


def test_missing_or_incompatible_files_are_reported(results, latents, tmp_path):
    with pytest.raises(KairosError, match=r"none-here: does not exist; make it with: kairos encode"):
        open_latents(tmp_path / "none-here")
    shutil.copytree(results / "dataset", tmp_path / "dataset")
    shutil.copytree(results / "latents", tmp_path / "latents")
    (tmp_path / "latents" / "logvar.npy").unlink()
    with pytest.raises(KairosError, match=r"logvar\.npy: is missing; make it with: kairos encode"):
        open_latents(tmp_path / "latents")
    prepare(DatasetConfig(color="grey", limit=100, split_seed=4), tmp_path / "dataset")
    with pytest.raises(KairosError, match="another version of"):
        open_latents(tmp_path / "latents")


def test_an_autoencoder_of_other_images_is_rejected(results, tmp_path):
    prepare(DatasetConfig(color="rgb", limit=10), tmp_path / "colour")
    with pytest.raises(KairosError, match=r"shape \[1, 8, 8\].*data set has \[3, 8, 8\]"):
        encode(open_dataset(tmp_path / "colour"), load_codec(results / "autoencoder"), tmp_path / "out", False, 8)


def test_an_image_condition_flips_with_its_image(results, latents, monkeypatch):
    low = np.arange(100 * 1 * 2 * 2, dtype=np.float32).reshape(100, 1, 2, 2)
    conditions = {**latents.condition_kinds, "low": {"kind": "image", "shape": [1, 2, 2]}}
    monkeypatch.setitem(latents.record, "conditions", conditions)
    monkeypatch.setitem(latents.dataset.conditions, "low", low)
    loaded = latents.load_conditions([3, 4], np.array([True, False]))
    assert torch.equal(loaded["low"][0], torch.from_numpy(low[3]).flip(2))
    assert torch.equal(loaded["low"][1], torch.from_numpy(low[4]))
    assert loaded["class"].tolist() == latents.load_conditions([3, 4])["class"].tolist()


def test_sigma_data_is_the_standard_deviation_of_the_training_latents(results, latents):
    noise = torch.randn(len(latents.train), *latents.shape, generator=torch.Generator().manual_seed(0))
    x0 = latents.load_x0(latents.train, noise=noise)
    assert latents.measure_sigma_data() == pytest.approx(float(x0.std()), rel=0.02)
    encode_into(results, "for_sigma", codec="none")
    pixels = open_latents(results / "for_sigma")
    assert pixels.measure_sigma_data() == pytest.approx(float(pixels.load_x0(pixels.train).std(correction=0)), rel=1e-3)


def encode_half(results, name, **options):
    """Encode the data set with float16 on disk; returns the record."""
    dataset, codec = open_dataset(results / "dataset"), load_codec(results / "autoencoder")
    return encode(dataset, codec, results / name, True, 16, dtype="float16", **options)


def test_latents_in_float16_take_half_the_disk_and_change_x0_by_rounding_alone(results, latents):
    record = encode_half(results, "half")
    assert record["dtype"] == "float16" and latents.record["dtype"] == "float32"
    assert record["content_sha256"] != latents.record["content_sha256"]
    half = open_latents(results / "half")
    for name, rows in half.moments.items():
        assert rows.dtype == np.float16
        assert np.array_equal(rows[:], latents.moments[name][:].astype(np.float16))
    flips = np.arange(100) % 3 == 0
    noise = torch.randn(100, *latents.shape, generator=torch.Generator().manual_seed(0))
    x0, expected = (stored.load_x0(range(100), flips, noise) for stored in (half, latents))
    assert x0.dtype == expected.dtype == torch.float32
    # 2^-11 is the largest relative error of a rounded mean; the error of the standard deviation is smaller
    assert float((x0 - expected).abs().max() / expected.abs().max()) < 2**-10
    assert not torch.equal(x0, expected)


def test_shards_in_float16_equal_one_job_and_do_not_mix_with_float32(results):
    whole = encode_half(results, "half")
    for number in (1, 2):
        encode_half(results, f"half{number}", shard=Shard(number, 2))
    merged = encode_half(results, "merged", shard_folders=[results / "half1", results / "half2"])
    assert merged["files"] == whole["files"] and merged["content_sha256"] == whole["content_sha256"]
    dataset, codec = open_dataset(results / "dataset"), load_codec(results / "autoencoder")
    with pytest.raises(KairosError, match="half1"):
        encode(dataset, codec, results / "mixed", True, 16, shard_folders=[results / "half1", results / "half2"])
    for number in (1, 2):
        encode(dataset, codec, results / f"full{number}", True, 16, shard=Shard(number, 2))
    with pytest.raises(KairosError, match="full1"):
        encode_half(results, "mixed", shard_folders=[results / "full1", results / "full2"])


def test_latents_beyond_the_range_of_float16_are_rejected(results):
    codec = load_codec(results / "autoencoder")
    real_encode = codec.encode

    class LargeCodec(Codec):
        def encode(self, images):
            mean, logvar = real_encode(images)
            return mean * 1e6, logvar

    dataset = open_dataset(results / "dataset")
    with pytest.raises(KairosError, match=r"autoencoder\.dtype: float16 holds values up to 65504.*set float32"):
        encode(dataset, LargeCodec(codec.record, codec.device), results / "large", False, 16, dtype="float16")
    with pytest.raises(KairosError):
        open_latents(results / "large")


def _experiment(**autoencoder):
    experiment = {"experiment": "e", "autoencoder": autoencoder, "methods": {"uniform": {}}}
    return validate(experiment)


@pytest.mark.parametrize("kind", [{"kind": "train"}, {"kind": "pretrained", "path": "some/where"}])
def test_only_latents_depend_on_their_data_type(kind):
    default, explicit = _experiment(**kind), _experiment(**kind, dtype="float32")
    half = _experiment(**kind, dtype="float16")
    assert default == explicit
    assert validate(half.plain()).autoencoder.dtype == half.plain()["autoencoder"]["dtype"] == "float16"
    for name, row in list_stages(default).items():
        method = "uniform" if row.per_snapshot else None
        before, after = (select_fields(row, list_sections(experiment, row, method)) for experiment in (default, half))
        assert (before != after) == (name in ("encode", "report")), name
        if name == "encode":
            assert after == {**before, "autoencoder": {**before["autoencoder"], "dtype": "float16"}}


def test_pixels_have_no_data_type():
    with pytest.raises(ConfigError, match=r"autoencoder\.dtype: got float16, allowed: float32 with kind none"):
        _experiment(kind="none", dtype="float16")


@pytest.mark.parametrize("channels", [1, 3])
def test_images_on_a_cpu_keep_the_layout_by_which_torch_selects_convolutions(channels):
    """Another layout of equal values would give a trained autoencoder other bits."""
    images = torch.randint(256, (2, 8, 6, channels), dtype=torch.uint8, generator=torch.manual_seed(0))
    expected = images.permute(0, 3, 1, 2).contiguous().float() / 127.5 - 1
    converted = to_float(images)
    assert torch.equal(converted, expected) and converted.stride() == expected.stride()
