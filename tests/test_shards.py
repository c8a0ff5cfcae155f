"""Tests of sampling and encoding in shards: bytes of one job, damaged shards, conditions, memory, the workflow."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from kairos.cli import main
from kairos.config import load, validate
from kairos.data.latents import open_latents
from kairos.files import read_json
from kairos.sampling.samples_file import open_samples, write_samples
from kairos.shards import Shard
from kairos.validity import Validity
from kairos.workflow.layout import Layout
from kairos_timesteps.errors import ConfigError, KairosError
from workflow_copy import copy_finished_run

EXPERIMENT = {
    "experiment": "r",
    "dataset": {"source": "digits", "color": "grey", "heldout": 0.25},
    "model": {"name": "dit", "patch": 2, "width": 32, "depth": 1, "heads": 2, "conditions": ["class"]},
    "training": {"batch_size": 16, "milestones": [2], "device": "cpu", "condition_dropout": 0.1},
    "methods": {"uniform": {}},
    "sampling": {"steps": 3, "batch_size": 32, "grid": 9},
    "evaluation": {"num_samples": 150, "sets": 1, "extractor": {"name": "classifier", "features": 32}},
}
NUM = 150  # four batches of 32 and a ragged fifth


def kairos(*arguments) -> int:
    """Run a kairos command in this process; return its exit status."""
    torch.set_num_threads(1)
    return main([str(argument) for argument in arguments])


def train_milestones(root: Path, **changes) -> Path:
    """Run the commands of the workflow up to a training run in pixel space; return the folder of its snapshots."""
    values = json.loads(json.dumps(EXPERIMENT))
    for section, fields in changes.items():
        values[section].update(fields)
    config, r = root / "experiment.yaml", root / "r"
    config.write_text(yaml.safe_dump(values))
    shared = ("--config", config, "--dataset", r / "dataset")
    assert kairos("prepare", "--config", config, "--out", r / "dataset") == 0
    assert kairos("autoencoder", *shared, "--out", r / "autoencoder") == 0
    assert kairos("encode", *shared, "--autoencoder", r / "autoencoder", "--out", r / "latents") == 0
    out = r / "methods" / "uniform" / "seed0"
    job = ("--config", config, "--method", "uniform", "--seed", 0, "--out", out, "--latents", r / "latents")
    assert kairos("train", *job, "--milestones", 0, 2) == 0
    return out / "snapshots"


@pytest.fixture(scope="module")
def milestones(tmp_path_factory) -> Path:
    return train_milestones(tmp_path_factory.mktemp("experiment"))


def run_sample(milestones: Path, out: Path, *options, step: int = 2, num: int = NUM) -> int:
    return kairos("sample", "--snapshot", milestones / f"{step:07d}", "--out", out, "--num", num, *options)


def sample_shards(milestones: Path, folder: Path, count: int, *options) -> list[Path]:
    """Sample all shards, each in one call; return their files."""
    paths = [folder / f"{number}of{count}.npz" for number in range(1, count + 1)]
    for path in paths:
        assert run_sample(milestones, path, "--shard", path.stem, *options) == 0
    return paths


def merge(milestones: Path, out: Path, shards: list[Path], *options) -> int:
    return run_sample(milestones, out, *(word for path in shards for word in ("--merge", path)), *options)


@pytest.mark.parametrize("labels", ["balanced", "data"])
@pytest.mark.parametrize("count", [2, 3])
def test_merged_shards_are_the_bytes_of_one_job(milestones, tmp_path, count, labels):
    options = ("--labels", labels)
    assert run_sample(milestones, tmp_path / "whole.npz", "--grid", tmp_path / "whole.png", *options) == 0
    shards = sample_shards(milestones, tmp_path, count, *options)
    assert sum(len(open_samples(path).images) for path in shards) == NUM
    assert merge(milestones, tmp_path / "merged.npz", shards[::-1], "--grid", tmp_path / "merged.png", *options) == 0
    for suffix in (".npz", ".png"):
        assert (tmp_path / f"merged{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()


def test_several_milestones_are_merged_in_one_call(milestones, tmp_path):
    both = [word for step in (0, 2) for word in ("--snapshot", milestones / f"{step:07d}")]
    for number in (1, 2):
        outs = [word for step in (0, 2) for word in ("--out", tmp_path / f"{step}.{number}.npz")]
        assert kairos("sample", *both, *outs, "--num", NUM, "--shard", f"{number}of2") == 0
    merge_options = [word for step in (0, 2) for n in (1, 2) for word in ("--merge", tmp_path / f"{step}.{n}.npz")]
    outs = [word for step in (0, 2) for word in ("--out", tmp_path / f"{step}.npz")]
    assert kairos("sample", *both, *outs, "--num", NUM, *merge_options) == 0
    for step in (0, 2):
        assert run_sample(milestones, tmp_path / "whole.npz", step=step) == 0
        assert (tmp_path / f"{step}.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()
    assert kairos("sample", *both, *outs, "--num", NUM, *merge_options[:-2]) == 2


def replace_shard(path: Path, how: str, milestones: Path, shards: list[Path]) -> None:
    """Replace the file of a shard by one that cannot be merged."""
    path.unlink()
    if how == "truncated":
        path.write_bytes(shards[0].read_bytes()[:3000])
    elif how == "flipped":
        content = bytearray(shards[1].read_bytes())
        content[2000] ^= 1
        path.write_bytes(content)
    elif how == "twice":
        shutil.copy(shards[0], path)
    elif how == "whole":
        assert run_sample(milestones, path) == 0
    elif how != "missing":
        options = {"seed": ("--seed", 7), "batch size": ("--batch-size", 50), "sampling": ("--steps", 2)}.get(how, ())
        shard = "2of3" if how == "other number" else "2of2"
        num, step = 200 if how == "number of images" else NUM, 0 if how == "snapshot" else 2
        assert run_sample(milestones, path, "--shard", shard, *options, step=step, num=num) == 0


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "no such file"),
        ("truncated", "cannot be read"),
        ("flipped", "Bad CRC-32"),
        ("twice", "contains shard 1 of 2, which .*1of2.npz also contains"),
        ("whole", "shard: got None, allowed"),
        ("seed", "seed: got 7, allowed: 0"),
        ("batch size", "shard: got .*'batch_size': 50"),
        ("sampling", "steps: got 2, allowed: 3"),
        ("snapshot", "step: got 0, allowed: 2"),
        ("number of images", "num: got 200, allowed: 150"),
        ("other number", "belongs to 3 shards, got 2"),
    ],
)
def test_a_shard_that_cannot_be_merged_is_reported(milestones, tmp_path, capsys, how, message):
    shards = sample_shards(milestones, tmp_path, 2)
    replace_shard(shards[1], how, milestones, [shards[0], shutil.copy(shards[1], tmp_path / "copy.npz")])
    capsys.readouterr()
    assert merge(milestones, tmp_path / "merged.npz", shards) == 1
    error = capsys.readouterr().err
    assert re.search(rf"2of2\.npz: .*{message}.*(delete this shard|pass each of them)", error, re.S), error
    assert not (tmp_path / "merged.npz").exists() and not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize("text", ["0of2", "3of2", "1/2", "of", "2"])
def test_a_malformed_shard_is_rejected(milestones, tmp_path, text, capsys):
    assert run_sample(milestones, tmp_path / "x.npz", "--shard", text) == 2
    assert "allowed: KofN" in capsys.readouterr().err


def test_more_shards_than_batches_are_rejected(milestones, tmp_path, capsys):
    assert run_sample(milestones, tmp_path / "x.npz", "--shard", "1of6") == 2
    assert "the number of batches" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"sampling.shards: got 6, allowed: at most 5, the number of batches"):
        validate({**EXPERIMENT, "sampling": {"batch_size": 32, "shards": 6}})


@pytest.mark.parametrize(("count", "size", "of"), [(150, 32, 2), (150, 32, 3), (150, 32, 5), (64, 32, 5), (7, 100, 3)])
def test_shards_consist_of_whole_batches_and_cover_all_images(count, size, of):
    rows = [Shard(number, of).rows(count, size) for number in range(1, of + 1)]
    assert [index for shard in rows for index in shard] == list(range(count))
    assert all(shard.start % size == 0 for shard in rows if shard)


# Conditions


def test_a_samples_file_contains_the_conditions_of_its_images(milestones, tmp_path):
    latents = open_latents(milestones / "../../../../latents")
    train_labels = latents.load_conditions(latents.train)["class"].numpy()
    for labels in ("balanced", "data"):
        assert run_sample(milestones, tmp_path / labels, "--labels", labels, num=400) == 0
    balanced, data = (open_samples(tmp_path / labels) for labels in ("balanced", "data"))
    assert (balanced.conditions["class"][:] == np.arange(400) % 10).all()
    assert data.conditions["class"].dtype == np.int64 and data.conditions["class"].shape == (400,)
    labels = (train_labels, data.conditions["class"][:])
    expected, shares = (np.bincount(values, minlength=10) / len(values) for values in labels)
    assert np.abs(shares - expected).max() < 4 * (0.1 * 0.9 / 400) ** 0.5 and len(set(shares)) > 1
    assert (balanced.protocol["labels"], data.protocol["labels"]) == ("balanced", "data")
    assert run_sample(milestones, tmp_path / "fewer", "--labels", "data", "--batch-size", 17, num=70) == 0
    assert (open_samples(tmp_path / "fewer").conditions["class"][:] == data.conditions["class"][:70]).all()
    assert run_sample(milestones, tmp_path / "other", "--labels", "data", "--seed", 1, num=70) == 0
    assert (open_samples(tmp_path / "other").conditions["class"][:] != data.conditions["class"][:70]).any()


# The file


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_files_in_the_format_of_adm_are_read(tmp_path, save):
    images = np.random.default_rng(0).integers(0, 256, (20, 4, 6, 3), dtype=np.uint8)
    save(tmp_path / "x.npz", images, np.arange(20) % 3)
    samples = open_samples(tmp_path / "x.npz")
    assert samples.protocol == {} and (samples.conditions["class"][:] == np.arange(20) % 3).all()
    for which in (
        slice(3, 9),
        slice(None, None, -2),
        np.array([5, 6, 7, 2, 2, 19]),
        [0],
        slice(0, 0),
        4,
        images[:, 0, 0, 0] > 99,
    ):
        assert np.array_equal(samples.images[which], images[which])
    assert (samples.images.shape, samples.images.dtype, len(samples.images)) == ((20, 4, 6, 3), np.uint8, 20)
    with pytest.raises(IndexError):
        samples.images[np.array([20])]


def test_files_without_readable_images_are_rejected(tmp_path):
    np.savez(tmp_path / "none.npz", mu=np.zeros(3))
    np.savez(tmp_path / "fortran.npz", images=np.asfortranarray(np.zeros((5, 4, 4, 3), np.uint8)))
    for name, message in (("none.npz", "`images` or `arr_0` .*no item"), ("fortran.npz", "Fortran")):
        with pytest.raises(KairosError, match=f"{name}: .*{message}"):
            open_samples(tmp_path / name)


def test_a_file_has_the_bytes_of_numpy_and_too_few_images_leave_no_file(tmp_path):
    images = np.arange(2 * 4 * 4, dtype=np.uint8).reshape(2, 4, 4, 1)
    write_samples(tmp_path / "a.npz", (images[n : n + 1] for n in range(2)), {"seed": 1}, num=2)
    np.savez(tmp_path / "b.npz", images=images, protocol=np.array(json.dumps({"seed": 1})))
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    with pytest.raises(ValueError, match="got 2 rows, allowed: 3"):
        write_samples(tmp_path / "c.npz", iter([images]), {}, num=3)
    assert not (tmp_path / "c.npz").exists()


def test_an_empty_first_batch_changes_no_byte_and_an_array_needs_a_batch(tmp_path):
    images = np.arange(2 * 4 * 4, dtype=np.uint8).reshape(2, 4, 4, 1)
    for name, batches in (("a", [images]), ("b", [images[:0], images, images[:0]])):
        write_samples(tmp_path / f"{name}.npz", iter(batches), {}, num=2)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    with pytest.raises(ValueError, match="got no batch"):
        write_samples(tmp_path / "c.npz", iter([]), {}, num=0)


PEAK_MEMORY_CODE = """
import json, os, re, sys
from pathlib import Path
import torch
from kairos.cli import main
for command in json.loads(sys.argv[1]):
    process = os.fork()
    if process == 0:
        status = main(command)
        print("peak", re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1], flush=True)
        os._exit(status)
    if os.waitpid(process, 0)[1]:
        sys.exit(1)
"""


def peak_memories(commands: list[tuple]) -> list[int]:
    """Run kairos commands one after another, in forks of a process that has imported torch; return their peak memories.

    The peaks are in bytes. VmHWM is used because ru_maxrss would start at the memory of this process.
    """
    words = [[str(word) for word in command] for command in commands]
    command = [sys.executable, "-c", PEAK_MEMORY_CODE, json.dumps(words)]
    result = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    peaks = [1024 * int(kilobytes) for kilobytes in re.findall(r"^peak (\d+)$", result.stdout, re.MULTILINE)]
    assert len(peaks) == len(commands)
    return peaks


@pytest.mark.long
def test_memory_does_not_grow_with_the_number_of_images(tmp_path):
    """An image has 48 KB, so 2,000 more images in memory would be 98 MB."""
    model = {"name": "dit", "patch": 64, "width": 16, "depth": 1, "heads": 1, "conditions": []}
    milestones = train_milestones(tmp_path, model=model, dataset={"color": "rgb", "resolution": 128, "limit": 100})
    call = ("sample", "--snapshot", milestones / "0000000", "--steps", 1, "--batch-size", 32)
    merge_options = ("--merge", tmp_path / "1.npz", "--merge", tmp_path / "2.npz")
    few, many, _, _, merged = peaks = peak_memories([
        (*call, "--num", 500, "--out", tmp_path / "few.npz"),
        (*call, "--num", 2500, "--out", tmp_path / "many.npz"),
        (*call, "--num", 2500, "--shard", "1of2", "--out", tmp_path / "1.npz"),
        (*call, "--num", 2500, "--shard", "2of2", "--out", tmp_path / "2.npz"),
        (*call, "--num", 2500, *merge_options, "--out", tmp_path / "merged.npz"),
    ])  # fmt: skip
    print([f"{peak / 2**20:.0f} MiB" for peak in peaks])
    assert many == pytest.approx(few, rel=0.1)
    assert merged < 1.1 * few
    assert (tmp_path / "merged.npz").read_bytes() == (tmp_path / "many.npz").read_bytes()


# The workflow


def create_layout(**changes) -> Layout:
    return Layout(validate({**EXPERIMENT, **changes}), Path("x.yaml"))


def test_the_jobs_of_shards_are_counted_and_belong_to_their_stage():
    sharded = create_layout(
        sampling={"shards": 2, "batch_size": 32}, autoencoder={"kind": "train", "shards": 3}, seeds=[0, 1]
    )
    jobs = sharded.count_jobs()
    assert {name: jobs[name] for name in ("encode", "encode_shards", "sample", "sample_shards", "evaluate")} == {
        "encode": 1, "encode_shards": 3, "sample": 2, "sample_shards": 4, "evaluate": 2,
    }  # fmt: skip
    pixels = create_layout(autoencoder={"shards": 3})
    assert "encode_shards" not in pixels.count_jobs() and "sample_shards" not in pixels.count_jobs()
    one = create_layout(autoencoder={"kind": "train"}, sampling={"batch_size": 32}, seeds=[0, 1])
    for stage in ("autoencoder", "encode", "sample"):  # another number of shards reruns no complete stage
        keys = [Validity(layout.experiment, "unused").describe_stage(stage, None)["key"] for layout in (one, sharded)]
        assert keys[0] == keys[1]


@pytest.mark.long
def test_a_pipeline_in_shards_gives_the_same_files(tmp_path_factory):
    copy = copy_finished_run(tmp_path_factory)
    results, file = copy.folder / "results/tiny", copy.folder / "params.yaml"
    patterns = ("latents/*", "methods/*/seed*/samples/*", "methods/*/seed*/evaluation/*")

    def hashes() -> dict[str, str]:
        paths = sorted(path for pattern in patterns for path in results.glob(pattern))
        return {str(path.relative_to(results)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}

    before, text = hashes(), file.read_text()
    text = text.replace("steps: 30}\n\nmodel", "steps: 30, shards: 2}\n\nmodel")
    file.write_text(text.replace("sampling:\n", "sampling:\n  shards: 2\n  batch_size: 64\n"))
    assert load(file).autoencoder.shards == load(file).sampling.shards == 2
    assert copy.to_do(config="params.yaml") == {"report": 1, "track": 1}  # both show the settings
    shutil.rmtree(results / "latents")
    for folder in results.glob("methods/*/seed*/samples"):
        shutil.rmtree(folder)
    to_do = copy.to_do(config="params.yaml")
    assert to_do["encode_shards"] == 2 and to_do["encode"] == 1
    assert to_do["sample_shards_1"] == to_do["sample_shards_2"] == 2
    result = copy.snakemake("--until", "evaluate_1", "evaluate_2", config="params.yaml")
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    assert output.count("shard 2 of 2") == 7, "once for the latents, and twice for each of three snapshots"
    assert hashes() == before and len(before) > 12
    assert copy.to_do(config="params.yaml") == {"report": 1, "track": 1}
    assert not list(results.glob("**/.shards/**/*.np?"))
    assert read_json(results / "timing/.shards/encode.1of2.json")["stage"] == "encode"
