"""Tests of text conditions: captions, text encoders, training, sampling and the CLIP score."""

import json
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file

from clip_case import make_clip, write_text_encoder, write_tokenizer
from kairos.cli import main
from kairos.compute import setup
from kairos.config import load, validate
from kairos.data import resumable_arrays
from kairos.data.captions import open_encoded_captions, read_coco_captions
from kairos.data.dataset import open_dataset
from kairos.data.latents import open_latents
from kairos.data.prepare import prepare
from kairos.data.settings import DatasetConfig
from kairos.evaluation import clip
from kairos.evaluation.measurements import ImageStatistics
from kairos.evaluation.settings import ClipOptions
from kairos.files import lock_folder, read_record, write_record
from kairos.sampling.samples_file import open_samples
from kairos.staging import staged
from kairos.text_encoders import encoder as encoders
from kairos.text_encoders.encode_captions import encode_captions
from kairos.text_encoders.settings import TextEncoderConfig
from kairos_timesteps.errors import ConfigError, KairosError
from training_case import train

CPU = torch.device("cpu")
COCO = Path(__file__).parents[2] / "shared" / "data" / "coco_mini"
SMALL = {"patch": 8, "width": 32, "depth": 2, "heads": 2, "conditions": ["text"]}
MODEL = {"name": "uvit", **SMALL}
needs_coco = pytest.mark.skipif(not COCO.is_dir(), reason="COCO-mini is not in ../shared/data")


@pytest.fixture(autouse=True)
def deterministic_setup():
    setup(1, "cpu")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    return write_text_encoder(tmp_path_factory.mktemp("encoder"))


def write_images(folder: Path, names: list[str]) -> Path:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number * 20, 50, 100)).save(folder / name)
    return folder


def write_captions(path: Path, captions: dict[str, list[str]]) -> str:
    """Write captions in COCO's format, with ids that are not sorted; return the path."""
    ids = {name: 1000 - number for number, name in enumerate(captions)}
    pairs = [(ids[name], text) for name, texts in captions.items() for text in texts]
    images = [{"id": ids[name], "file_name": name} for name in captions]
    annotations = [{"image_id": image, "id": index, "caption": text} for index, (image, text) in enumerate(pairs)]
    path.write_text(json.dumps({"images": images, "annotations": annotations}))
    return str(path)


def captions_of(dataset, images) -> list[list[str]]:
    """Return all captions of some images of a prepared data set."""
    captions = dataset.captions
    return [captions.texts(range(captions.firsts[image], captions.firsts[image + 1])) for image in images]


@pytest.mark.parametrize("store", ["copy", "refer"])
def test_coco_captions_are_matched_by_file_name(tmp_path, capsys, store):
    images = write_images(tmp_path / "images", ["a.png", "b.png", "c.png", "in/d.png"])
    captions = {"a.png": ["One.", " zwei ü "], "d.png": ["three"], "b.png": ["", "four"], "x.png": ["gone", "too"]}
    file = write_captions(tmp_path / "captions.json", captions)
    settings = {"source": "folder", "path": str(images), "captions": file, "heldout": 0.3, "store": store}
    record = prepare(DatasetConfig(**settings), tmp_path / "out")
    assert record["captions"] == {"count": 4, "images_without": 1, "captions_without": 2}
    assert (
        "1 of 4 images have no caption (the first: c.png), 2 captions no image; they are left out"
        in capsys.readouterr().err
    )
    dataset = open_dataset(tmp_path / "out")
    assert captions_of(dataset, range(3)) == [["One.", "zwei ü"], ["four"], ["three"]]
    assert dataset.captions.caption_indices(np.array([2, 0, 0]), np.array([7, 1, 2**31])).tolist() == [3, 1, 0]
    assert dataset.captions.longest_bytes == len("zwei ü".encode())
    assert dataset.images[[0, 2]].shape == (2, 8, 8, 3)  # images can be read without their captions
    with pytest.raises(
        KairosError, match=r"dataset.unmatched: got refuse.*the first: c.png.*2 captions no image; allowed: count"
    ):
        prepare(DatasetConfig(**settings, unmatched="refuse"), tmp_path / "refused")


def test_captions_of_heldout_images_are_in_a_second_file_or_in_the_same_one(tmp_path):
    training, heldout = (write_images(tmp_path / name, [f"{name}{n}.png" for n in range(3)]) for name in "ab")
    captions = {f"{name}{n}.png": [f"{name} {n}"] for name in "ab" for n in range(3)}
    both = write_captions(tmp_path / "both.json", captions)
    second_file = write_captions(tmp_path / "second.json", {"b1.png": ["mine"], "q.png": ["nothing"]})
    settings = {"source": "folder", "path": str(training), "heldout": str(heldout), "captions": both}
    one = prepare(DatasetConfig(**settings), tmp_path / "one")
    assert one["captions"] == {"count": 6, "images_without": 0, "captions_without": 0}
    two = prepare(DatasetConfig(**settings, heldout_captions=second_file), tmp_path / "two")
    assert two["captions"] == {"count": 4, "images_without": 2, "captions_without": 4}
    dataset = open_dataset(tmp_path / "two")
    assert captions_of(dataset, dataset.heldout) == [["mine"]]
    with pytest.raises(ConfigError, match=r"dataset.heldout_captions: .*cannot be read"):
        prepare(DatasetConfig(**settings, heldout_captions="none.json"), tmp_path / "three")
    other = write_captions(tmp_path / "other.json", {"a1.png": ["of a training image"]})
    with pytest.raises(KairosError, match=r"dataset.heldout_captions: .*other.json' has none of the 3 held-out images"):
        prepare(DatasetConfig(**settings, heldout_captions=other), tmp_path / "four")


def test_captions_are_read_from_sidecar_files_and_from_a_column(tmp_path):
    from datasets import Dataset, Features, List, Value
    from datasets import Image as ImageFeature

    images = write_images(tmp_path / "images", ["a.png", "b.png"])
    (images / "a.txt").write_text("first\n\n second \n")
    (images / "b.txt").write_text("third")
    prepare(DatasetConfig(source="folder", path=str(images), captions="sidecar"), tmp_path / "sidecar")
    assert captions_of(open_dataset(tmp_path / "sidecar"), range(2)) == [["first", "second"], ["third"]]

    cells = [{"bytes": (images / name).read_bytes(), "path": None} for name in ("a.png", "b.png")]
    rows = {"image": cells, "text": ["one", " two"], "texts": [["p", "q"], ["r", None]], "n": [1, 2]}
    features = Features(
        {"image": ImageFeature(), "text": Value("string"), "texts": List(Value("string")), "n": Value("int64")}
    )
    Dataset.from_dict(rows, features).to_parquet(tmp_path / "t.parquet")
    settings = {"source": "parquet", "path": str(tmp_path / "t.parquet")}
    for column, expected in (("text", [["one"], ["two"]]), ("texts", [["p", "q"], ["r"]])):
        prepare(DatasetConfig(**settings, captions=column), tmp_path / column)
        assert captions_of(open_dataset(tmp_path / column), range(2)) == expected
    for column, message in (("gone", "allowed: one of image, text, texts, n"), ("n", "holds 1, allowed: texts")):
        with pytest.raises(ConfigError, match=f"dataset.captions: .*{message}"):
            prepare(DatasetConfig(**settings, captions=column), tmp_path / "bad")


@pytest.mark.parametrize("content", ["{", "[]", '{"images": []}', '{"images": [3], "annotations": []}', "\xff"])
def test_a_file_that_is_not_in_the_coco_format_is_rejected(tmp_path, content):
    (tmp_path / "c.json").write_bytes(content.encode("latin1"))
    with pytest.raises(ConfigError, match=r"dataset.captions: .*cannot be read .*, allowed: JSON"):
        read_coco_captions(str(tmp_path / "c.json"), ["a.png"])


def test_captions_that_match_no_image_or_two_images_are_rejected(tmp_path):
    images = write_images(tmp_path / "images", ["x/a.png", "y/a.png"])
    for captions, message in (
        ({"a.png": ["which?"]}, "2 images"),
        ({"x/a.png": [" "]}, "has none of the images: 2 of 2"),
    ):
        file = write_captions(tmp_path / "c.json", captions)
        with pytest.raises(KairosError, match=f"dataset.captions: .*{message}"):
            prepare(DatasetConfig(source="folder", path=str(images), captions=file), tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": {"source": "digits", "captions": "sidecar"}}, "dataset.captions: got 'sidecar', allowed: null"),
        ({"dataset": {"source": "folder", "path": "x", "captions": "column"}}, "a path *.json, or sidecar with source"),
        (
            {"dataset": {"source": "zip", "path": "x", "captions": "sidecar"}},
            "dataset.captions: got 'sidecar', allowed: a path *.json with source zip",
        ),
        (
            {"dataset": {"source": "zip", "path": "x", "heldout_captions": "sidecar"}},
            "dataset.heldout_captions: got 'sidecar', allowed: a path *.json with source zip",
        ),
        (
            {"dataset": {"source": "parquet", "path": "x", "captions": "c.json"}},
            "allowed: a column with source parquet",
        ),
        ({"dataset": {"source": "parquet", "path": "x", "heldout_captions": "c"}}, "dataset.heldout_captions: got 'c'"),
        ({"text_encoder": None}, "text_encoder: got null, allowed: a value"),
        ({"dataset": {"source": "folder", "path": "x"}}, "dataset.captions: got null, allowed: a value"),
        ({"model": "unet"}, "text_encoder: got x, allowed: null, unless model.conditions contains text"),
        ({"model": {"name": "unet", "conditions": ["text"]}}, "model.conditions: got ['text'], allowed with unet"),
        (
            {"model": {"name": "unet", "conditions": ["text"]}, "dataset": {}, "text_encoder": None},
            "model.conditions: got ['text'], allowed with unet",
        ),
        ({"text_encoder": {"path": "x", "output": "pooled"}}, "text_encoder.output: got pooled, allowed with this"),
        (
            {"model": "unet", "text_encoder": None, "evaluation": {"metrics": ["frechet", "clip"]}},
            "evaluation.metrics: got clip, allowed: other metrics, unless model.conditions contains text",
        ),
    ],
)
def test_incompatible_text_settings_are_rejected_by_validation(changes, message):
    plain = {
        "experiment": "e",
        "methods": {"a": {}},
        "model": MODEL,
        "dataset": {"source": "parquet", "path": "x", "captions": "text"},
        "text_encoder": {"path": "x"},
    }
    resolved = validate(plain).text_encoder
    assert (resolved.output, resolved.dropped) == ("tokens", "empty")
    with pytest.raises(ConfigError) as caught:
        validate(plain | changes)
    assert message in str(caught.value)


@pytest.fixture(scope="module")
def captioned(tmp_path_factory) -> Path:
    """Data set of 40 images with 60 captions, of which one is too long."""
    root = tmp_path_factory.mktemp("captioned")
    names = [f"{number:02}.png" for number in range(40)]
    captions = {name: [f"a photo of {n}", f"the {n}"][: 1 + n % 2] for n, name in enumerate(names)}
    captions[names[6]] = ["cat " * 100]
    file = write_captions(root / "c.json", captions)
    prepare(DatasetConfig(source="folder", path=str(write_images(root / "images", names)), captions=file), root / "d")
    return root / "d"


def test_encoded_captions_equal_those_of_transformers(encoder, captioned, tmp_path, capsys):
    from transformers import CLIPTextModel, CLIPTokenizer

    dataset = open_dataset(captioned)
    model, tokenizer = CLIPTextModel.from_pretrained(encoder), CLIPTokenizer.from_pretrained(encoder)
    ids = tokenizer(["A photo of  cat"])["input_ids"]
    words = ["<|startoftext|>", "a</w>", "photo</w>", "of</w>", "cat</w>", "<|endoftext|>"]
    assert tokenizer.convert_ids_to_tokens(ids[0]) == words
    record = encode_captions(
        TextEncoderConfig(path=str(encoder)).resolve_auto("tokens"), dataset, tmp_path / "tokens", CPU
    )
    description = {"kind": "text", "shape": [77, 32], "null": "empty", "encoder": record["condition"]["encoder"]}
    assert record["condition"] == description and len(description["encoder"]) == 64
    assert (record["count"], record["truncated"], record["longest"]) == (60, 1, 102)
    assert "1 of 60 captions have more than 77 tokens and are cut off" in capsys.readouterr().err
    text = open_encoded_captions(tmp_path / "tokens", dataset)
    for number in (0, 1, 9, 59):
        tokens = tokenizer(dataset.captions.texts([number]), padding="max_length", truncation=True, return_tensors="pt")
        assert tokens["input_ids"].shape == (1, 77)
        with torch.no_grad():
            expected = model(input_ids=tokens["input_ids"])
        assert torch.allclose(torch.from_numpy(text.states[number]), expected.last_hidden_state[0], atol=1e-5)
    pooled = TextEncoderConfig(path=str(encoder), dtype="float16").resolve_auto("pooled")
    record = encode_captions(pooled, dataset, tmp_path / "pooled", CPU)
    assert record["condition"] == {**description, "shape": [32], "null": "random"}
    text = open_encoded_captions(tmp_path / "pooled", dataset)
    assert text.states.dtype == np.float16
    assert np.allclose(text.states[59], expected.pooler_output[0], atol=2e-3)
    with pytest.raises(KairosError, match=r"text_encoder.too_long: got refuse, but 1 of 60 captions .*the first: 'cat"):
        encode_captions(pooled.model_copy(update={"too_long": "refuse"}), dataset, tmp_path / "refused", CPU)


def test_states_of_t5_do_not_depend_on_the_padding(captioned, tmp_path):
    """The attention mask excludes the padding, and the pooled state is the mean of the tokens' states."""
    from transformers import T5Config, T5EncoderModel

    size = write_tokenizer(tmp_path, 10**30)
    torch.manual_seed(0)
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    T5EncoderModel(T5Config(vocab_size=size, **shape)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"text_encoder.length: got null, allowed with .*: a number"):
        encoders.load_encoder(TextEncoderConfig(path=str(tmp_path), output="tokens"), CPU)
    states = {}
    for output in ("tokens", "pooled"):
        for length in (8, 12):
            config = TextEncoderConfig(path=str(tmp_path), output=output, length=length)
            states[output, length] = encoders.load_encoder(config, CPU)(["a photo", "cat"])
    assert torch.allclose(states["tokens", 8][:, :3], states["tokens", 12][:, :3], atol=1e-5)
    assert torch.allclose(states["pooled", 8], states["pooled", 12], atol=1e-5)
    assert torch.allclose(states["pooled", 8][1], states["tokens", 8][1, :3].mean(0), atol=1e-5)


def test_unusable_encoders_are_rejected(tmp_path, encoder, monkeypatch):
    def error_of(folder, **more):
        with pytest.raises(KairosError) as caught:
            encoders.load_encoder(TextEncoderConfig(path=str(folder), output="tokens", **more), CPU)
        return str(caught.value)

    assert "text_encoder.path: got './gone', allowed: a folder that exists, or a hub id" in error_of("./gone")
    (tmp_path / "none").mkdir()
    assert "lacks config.json and model.safetensors and a tokenizer; allowed: a folder with" in error_of(
        tmp_path / "none"
    )
    write_text_encoder(tmp_path / "damaged")
    (tmp_path / "damaged/model.safetensors").write_bytes(b"12")
    assert "damaged cannot be opened" in error_of(tmp_path / "damaged")
    write_text_encoder(tmp_path / "alone")
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / "alone" / name).unlink()
    assert "lacks a tokenizer" in error_of(tmp_path / "alone")
    assert "text_encoder.length: got 78, allowed with" in error_of(encoder, length=78)
    config, states = TextEncoderConfig(path=str(encoder), output="tokens"), load_file(encoder / "model.safetensors")
    expected, old, lacking = encoders.load_encoder(config, CPU)(["a cat"]), tmp_path / "old", tmp_path / "lacking"
    for folder in (old, lacking):
        write_text_encoder(folder)
    save_file(dict(sorted(states.items())[5:]), lacking / "model.safetensors", {"format": "pt"})
    assert "lacks weights: embeddings." in error_of(lacking)
    (old / "model.safetensors").unlink()  # OpenAI's files have this format
    torch.save({f"text_model.{name}": values for name, values in states.items()}, old / "pytorch_model.bin")
    assert torch.equal(encoders.load_encoder(config.model_copy(update={"path": str(old)}), CPU)(["a cat"]), expected)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "`kairos fetch` brings it" in error_of("kairos/no-such-encoder")
    for length, positions in ((100, 20), (20, 100)):  # limits of tokenizer and network: the shorter one counts
        folder = write_text_encoder(tmp_path / str(length), length=length, positions=positions)
        text_encoder = encoders.load_encoder(TextEncoderConfig(path=str(folder), output="tokens"), CPU)
        assert text_encoder(["a cat", "dog " * 50]).shape == (2, 20, 32)
    assert encoders.load_encoder(TextEncoderConfig(path=str(folder), output="pooled", length=5), CPU)([""]).shape == (
        1,
        32,
    )


def _encode_until_killed(call, encoder, dataset, out):
    """Encode captions, and kill this process at a call of the encoder."""
    resumable_arrays._SAVE_SECONDS = 0.0
    encode, calls = encoders.TextEncoder.__call__, [0]

    def counted(self, texts):
        calls[0] += 1
        if calls[0] == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(self, texts)

    encoders.TextEncoder.__call__ = counted
    encode_captions(TextEncoderConfig(path=str(encoder), batch_size=16).resolve_auto("tokens"), dataset, out, CPU)


def kill_encoding(encoder, dataset, out):
    """Encode captions in a process that is killed at the fourth call of the encoder."""
    arguments = (4, encoder, dataset, out)
    job = multiprocessing.get_context("fork").Process(target=_encode_until_killed, args=arguments)
    job.start()
    job.join()
    assert job.exitcode == -signal.SIGKILL


def test_killed_and_resumed_encoding_gives_equal_bits(encoder, captioned, tmp_path, capsys):
    dataset = open_dataset(captioned)
    config = TextEncoderConfig(path=str(encoder), batch_size=16).resolve_auto("tokens")
    whole = encode_captions(config, dataset, tmp_path / "whole", CPU)
    kill_encoding(encoder, dataset, tmp_path / "killed")
    with pytest.raises(KairosError, match=r"is not complete.*kairos text"):
        open_encoded_captions(tmp_path / "killed", dataset)
    assert encode_captions(config, dataset, tmp_path / "killed", CPU) == whole
    assert "text: resumes after caption 32" in capsys.readouterr().err
    assert sorted(file.name for file in (tmp_path / "killed").iterdir()) == ["empty.npy", "record.json", "states.npy"]
    other = encode_captions(config.model_copy(update={"length": 20}), dataset, tmp_path / "other", CPU)
    assert other["content_sha256"] != whole["content_sha256"]


def test_two_processes_cannot_encode_captions_into_one_folder_at_once(encoder, captioned, tmp_path):
    config = TextEncoderConfig(path=str(encoder), batch_size=16).resolve_auto("tokens")
    with lock_folder(tmp_path / "out"), pytest.raises(KairosError, match="out: another process"):
        encode_captions(config, open_dataset(captioned), tmp_path / "out", CPU)


def test_text_states_of_another_torch_are_not_resumed(encoder, captioned, tmp_path, capsys, monkeypatch):
    dataset = open_dataset(captioned)
    config = TextEncoderConfig(path=str(encoder), batch_size=16).resolve_auto("tokens")
    kill_encoding(encoder, dataset, tmp_path / "killed")
    capsys.readouterr()
    monkeypatch.setattr(torch, "__version__", "0.0.1")
    encode_captions(config, dataset, tmp_path / "killed", CPU)
    assert "resumes" not in capsys.readouterr().err


METHODS = {
    "uniform": {},
    "speed": {"sampler": "speed", "weighting": "change_aware"},
    "adaptive": {"sampler": {"name": "adaptive", "frequency": 4, "feature_timesteps": 20}},
}


def experiment(model: str, encoder: Path, clip_folder: Path) -> dict:
    """Return the values of an experiment on COCO with captions."""
    return {
        "experiment": "coco",
        "methods": METHODS,
        "model": {"name": model, **SMALL},
        "dataset": {
            "source": "folder", "path": str(COCO / "train2017"), "resolution": 64, "heldout": str(COCO / "val2017"),
            "captions": str(COCO / "annotations/captions_train2017.json"),
            "heldout_captions": str(COCO / "annotations/captions_val2017.json"),
        },
        "text_encoder": {"path": str(encoder)},
        "diffusion": {"process": {"name": "discrete", "timesteps": 100}},
        "training": {
            "batch_size": 8, "milestones": [10, 20], "checkpoint_every": 10, "device": "cpu", "condition_dropout": 0.2,
            "optimizer": {"lr": 1e-2},
        },
        "sampling": {"steps": 3, "guidance_scale": 2.0, "batch_size": 16, "grid": 4},
        "evaluation": {
            "extractor": {"name": "selfsupervised", "features": 8, "channels": 4, "steps": 5}, "num_samples": 30,
            "sets": 1, "loss_images": 8, "strata": 2,
            "metrics": ["frechet", {"name": "clip", "path": str(clip_folder)}, "validation"],
        },
    }  # fmt: skip


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    make_clip(folder).save_pretrained(folder)
    return folder


@pytest.mark.long
@needs_coco
@pytest.mark.parametrize(("model", "shape"), [("uvit", [77, 32]), ("dit", [32])])
def test_the_pipeline_leads_from_captioned_images_to_a_clip_score(
    model, shape, encoder, clip_folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("e.yaml").write_text(yaml.safe_dump(experiment(model, encoder, clip_folder)))

    def run(*arguments: str) -> str:
        assert main([str(argument) for argument in arguments]) == 0, capsys.readouterr().err
        return capsys.readouterr().err

    assert main(["check", "e.yaml"]) == 0
    assert "text         1" in capsys.readouterr().out
    assert "26 training and 25 held-out images of 64×64×3 with 255 captions" in run("prepare", "--config", "e.yaml")
    run("autoencoder", "--config", "e.yaml")
    assert f"255 encoded captions, each of shape {'×'.join(map(str, shape))}" in run("text", "--config", "e.yaml")
    run("encode", "--config", "e.yaml")
    results = Path("results/coco")
    record = read_record(results / "latents/record.json")
    assert (record["text"], record["conditions"]["text"]["shape"]) == ("../text", shape)
    assert record["text_sha256"] == read_record(results / "text/record.json")["content_sha256"]
    assert main(["plan", "e.yaml"]) == 0
    assert "text" in capsys.readouterr().out

    plain, latents = load(Path("e.yaml")).plain(), open_latents(results / "latents")
    assert latents.condition_kinds["text"]["empty"].shape == tuple(shape)
    for method in METHODS:
        train(plain, method, 0, results / "methods" / method / "seed0", results / "latents", [10, 20])
    interrupted = results / "methods" / "again" / "seed0"
    train(plain, "uniform", 0, interrupted, results / "latents", [10])
    train(plain, "uniform", 0, interrupted, results / "latents", [10, 20])
    whole, parts = (
        read_record(out / "training.json")["components"] for out in (results / "methods/uniform/seed0", interrupted)
    )
    assert whole == parts  # bit for bit, metrics included

    snapshot = results / "methods/speed/seed0/snapshots/0000020"
    assert read_record(snapshot / "snapshot.json")["conditions"]["text"] == record["conditions"]["text"]
    whole_file = Path("whole.npz")
    run("sample", "--snapshot", snapshot, "--out", whole_file, "--num", 30, "--seed", 1)
    samples, dataset = open_samples(whole_file), latents.dataset
    texts = [text.decode() for text in samples.conditions["text"][:].tolist()]
    heldout = captions_of(dataset, dataset.heldout)
    assert texts == [*(captions[0] for captions in heldout), *(captions[1] for captions in heldout[:5])]
    shards = [Path(f"shard{number}.npz") for number in (1, 2)]
    for number, shard in enumerate(shards, 1):
        run("sample", "--snapshot", snapshot, "--out", shard, "--num", 30, "--seed", 1, "--shard", f"{number}of2")
    merge_options = [argument for shard in shards for argument in ("--merge", shard)]
    run("sample", "--snapshot", snapshot, "--out", "merged.npz", "--num", 30, "--seed", 1, *merge_options)
    assert Path("merged.npz").read_bytes() == whole_file.read_bytes()

    folders = [argument for name in ("autoencoder", "latents") for argument in (f"--{name}", results / name)]
    data = ("--config", "e.yaml", "--dataset", results / "dataset")
    run("extractor", *data, "--out", results / "extractor")
    run("reference", *data, *folders, "--extractor", results / "extractor", "--out", results / "reference")
    run(
        "evaluate",
        "--samples",
        whole_file,
        "--snapshot",
        snapshot,
        "--reference",
        results / "reference",
        "--out",
        "s.json",
    )
    evaluation = read_record(Path("s.json"))
    rows = read_record(results / "reference/record.json")["rows"]
    assert -100 <= evaluation["metrics"]["clip_score"] <= 100
    assert [name for name in rows if "clip_score" in rows[name]] == ["floor", "reconstruction"]
    assert np.isfinite(evaluation["validation"]["loss_epsilon"])
    np.savez("foreign.npz", arr_0=samples.images[:])
    assert main(["evaluate", "--samples", "foreign.npz", "--reference", str(results / "reference"), "--out", "f"]) == 1
    assert "foreign.npz: contains no captions, which metric clip needs" in capsys.readouterr().err


def test_the_seed_determines_the_caption_of_each_visit(encoder, captioned, tmp_path, monkeypatch):
    from kairos.autoencoders.codec import Codec
    from kairos.autoencoders.encode import encode
    from kairos.data.batches import Batches

    dataset, record = open_dataset(captioned), {"kind": "none", "sha256": "pixels"}
    encode_captions(TextEncoderConfig(path=str(encoder)).resolve_auto("pooled"), dataset, tmp_path / "text", CPU)
    shapes = {name: list(dataset.shape) for name in ("image_shape", "latent_shape")}
    codec = Codec({**record, **shapes, "scaling_factor": 1.0, "shift_factor": 0.0}, CPU)
    encode(dataset, codec, tmp_path / "latents", False, 16, text=tmp_path / "text")
    latents = open_latents(tmp_path / "latents")

    def load_texts(index, seed=0, dropout=0.0):
        return next(Batches(latents, seed, 32, index, ("text",), dropout).steps(5, 6)).conditions["text"]

    whole = load_texts(range(32))
    assert torch.equal(whole, torch.cat([load_texts(range(10)), load_texts(range(10, 32))]))
    assert not torch.equal(whole, load_texts(range(32), seed=1))
    first = latents.load_conditions(latents.train)["text"]
    first_captions = {row.numpy().tobytes() for row in first}
    others = [row for row in whole if row.numpy().tobytes() not in first_captions]
    assert 3 <= len(others) <= 15  # of 32 images half have a second caption, and half of these draw it
    dropped = load_texts(range(32), dropout=0.5).isnan()
    assert 8 <= dropped.all(1).sum() == dropped.any(1).sum() <= 24
    monkeypatch.setenv("KAIROS_LOCAL", str(tmp_path / "local"))
    (tmp_path / "local").mkdir()
    with staged(tmp_path / "latents") as local:  # a node-local copy
        assert local.is_relative_to(tmp_path / "local") and (local / "../text/states.npy").is_file()
        copied = next(Batches(open_latents(local), 0, 32, range(32), ("text",)).steps(5, 6))
    assert torch.equal(copied.conditions["text"], whole)
    record = tmp_path / "text/record.json"
    write_record(record, {**read_record(record), "content_sha256": "other"})
    with pytest.raises(KairosError, match="other texts"):
        open_latents(tmp_path / "latents")


@pytest.mark.long
def test_the_clip_score_is_the_mean_cosine_and_falls_for_wrong_captions(tmp_path):
    """A CLIP model is trained for seconds on coloured squares, so that wrong captions have a lower score."""
    model = make_clip(tmp_path)
    texts = [f"a photo of {name}" for name in ("cat", "dog", "man", "the")]
    colours = torch.tensor([[220, 30, 30], [30, 220, 30], [30, 30, 220], [200, 200, 30]], dtype=torch.uint8)
    tokenizer = clip_tokenizer(tmp_path)
    ids = tokenizer(texts, padding="max_length", max_length=77, return_tensors="pt")["input_ids"]
    mean, std = torch.tensor([0.48145466, 0.4578275, 0.40821073]), torch.tensor([0.26862954, 0.26130258, 0.27577711])
    optimizer, random = torch.optim.AdamW(model.parameters(), 2e-3), torch.Generator().manual_seed(0)
    for _ in range(60):
        noise = torch.randint(0, 30, (4, 32, 32, 3), generator=random)
        pixels = ((colours[:, None, None] + noise) / 255 - mean) / std
        loss = model(input_ids=ids, pixel_values=pixels.permute(0, 3, 1, 2), return_loss=True).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval().save_pretrained(tmp_path)
    images = colours[:, None, None].expand(-1, 32, 32, -1).repeat(5, 1, 1, 1).numpy()

    def score(captions):
        pairs = zip(np.split(images, 4), (captions[start : start + 5] for start in range(0, 20, 5)))
        return clip.clip(ClipOptions(path=str(tmp_path)), ImageStatistics(20, {}, captioned=pairs), None)["clip_score"]

    correct, shuffled = score(texts * 5), score([*texts[1:], texts[0]] * 5)
    assert correct > shuffled + 20
    with torch.no_grad():
        pixels = ((torch.from_numpy(images) / 255 - mean) / std).permute(0, 3, 1, 2)
        one = model.vision_model(pixel_values=pixels).pooler_output @ model.visual_projection.weight.T
        other = model.text_model(input_ids=ids.repeat(5, 1)).pooler_output @ model.text_projection.weight.T
    assert correct == pytest.approx(100 * float(torch.cosine_similarity(one, other).mean()), abs=1e-3)
    assert clip.clip(ClipOptions(path=str(tmp_path)), ImageStatistics(20, {}), None) == {}


def clip_tokenizer(folder: Path):
    from transformers import CLIPTokenizer

    return CLIPTokenizer.from_pretrained(folder)


def test_a_model_that_is_not_clip_is_rejected(encoder):
    captioned = [(np.zeros((1, 8, 8, 1), np.uint8), ["a"])]
    with pytest.raises(ConfigError, match=r"evaluation.metrics: clip.path: got a clip_text_model .*allowed: a clip"):
        clip.clip(ClipOptions(path=str(encoder)), ImageStatistics(1, {}, captioned=captioned), None)
    with pytest.raises(ConfigError, match=r"evaluation.metrics: clip.path: got '/gone', allowed: a folder"):
        clip.clip(ClipOptions(path="/gone"), ImageStatistics(1, {}, captioned=captioned), None)
