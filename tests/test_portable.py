"""`training.deterministic: portable`: caps reach the libraries, bits are equal under any caps, conflicts are errors."""

import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from kairos import portable
from kairos.cli import main
from kairos.config import validate
from kairos.files import hash_folder, read_json, sha256_file
from kairos_timesteps.errors import ConfigError, KairosError
from training_case import experiment, hashes, make_latents, train_command, write_experiment

SOURCE = Path(portable.__file__).parents[1]
pytestmark = pytest.mark.skipif("avx2" not in Path("/proc/cpuinfo").read_text(), reason="no AVX2 here")

PROBE = """
import hashlib, json, os, sys
from kairos import portable
portable.set_variables()
import numpy, torch
portable.setup()
torch.set_num_threads(1)
x = (torch.arange(48 * 80).reshape(48, 80) * 7919 % 2003) / 2003
image = x.reshape(3, 16, 8, 10).requires_grad_()
convolved = torch.nn.functional.conv2d(image, x[:, :72].reshape(24, 16, 3, 3))
convolved.square().sum().backward()
weights = [torch.nn.Parameter(x.clone()), torch.nn.Parameter(x.double())]
optimizer = torch.optim.AdamW(weights, fused=True)
for power in (1, 2, 3):
    for weight in weights:
        weight.grad = weight.detach() ** power - 0.3
    optimizer.step()
results = {
    "adamw": weights[0].detach(), "adamw64": weights[1].detach(),
    "sqrt": x.sqrt(), "pow": x**0.5, "log": x.log(), "exp": x.exp(), "log64": x.double().log(), "mm": x @ x.T,
    "mm64": x.double() @ x.double().T, "bmm": torch.bmm(x[None], x.T[None]), "sum": x.sum(1), "softmax": x.softmax(1),
    "attention": torch.nn.functional.scaled_dot_product_attention(*[x.reshape(1, 2, 24, 80)] * 3),
    "conv": convolved.detach(), "conv backward": image.grad, "eigh": torch.linalg.eigvalsh(x @ x.T),
    "numpy": torch.from_numpy(numpy.log(x.double().numpy())), "blas": torch.from_numpy(x.numpy() @ x.numpy().T),
}
exact = bool((x.sqrt().numpy() == numpy.sqrt(x.numpy())).all() and (x.sqrt() ** 2 - x).abs().max() < 1e-6)
digests = {name: hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest() for name, value in results.items()}
print(json.dumps({"digests": digests, "exact": exact, "machine": portable.machine()}))
"""
OTHER_CAPS = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "AUTO",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OPENBLAS_CORETYPE": "Nehalem",
}


def run_process(line: list[str], before: tuple[str, ...] = (), **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), **variables}
    return subprocess.run([*before, *line], capture_output=True, text=True, env=environment)


def run_probe(*before: str, **variables: str) -> tuple[dict, str]:
    ended = run_process([sys.executable, "-c", PROBE], before, **variables)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout), ended.stderr


@pytest.fixture(scope="module")
def local_probe() -> dict:
    return run_probe()[0]


@pytest.mark.long
def test_the_caps_override_the_environment_and_reach_the_libraries(local_probe):
    other, warnings = run_probe(**OTHER_CAPS)
    assert local_probe["machine"]["instruction_set"] == "AVX2 (portable)" and local_probe["exact"]
    assert other == local_probe
    assert "sets MKL_CBWR=COMPATIBLE, in place of AUTO" in warnings


@pytest.mark.long
def test_caps_are_rejected_after_torch_has_computed():
    ended = run_process(
        [sys.executable, "-c", "import torch; torch.zeros(9).exp(); from kairos import portable; portable.setup()"]
    )
    assert "ATEN_CPU_CAPABILITY='avx2'" in ended.stderr and "MKL_CBWR='COMPATIBLE'" in ended.stderr


def test_a_cpu_without_avx2_is_rejected(monkeypatch):
    monkeypatch.setattr("torch.cpu._is_avx2_supported", lambda: False)
    with pytest.raises(KairosError, match="no AVX2; allowed here: true, false"):
        portable.check()


@pytest.mark.parametrize("field, value", [("device", "auto"), ("compile", True)])
def test_contradicting_settings_are_rejected(field, value):
    settings = {"deterministic": "portable", "device": "cpu", field: value}
    with pytest.raises(ConfigError, match=rf"training\.{field}.*allowed"):
        validate({"experiment": "x", "training": settings, "methods": {"uniform": {}}})


@pytest.mark.timeout(30)
@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("command", ["check", "train"])
def test_files_that_extend_each_other_are_rejected_in_one_line(tmp_path, capsys, command, length):
    names = [f"{number}.yaml" for number in range(length)]
    for name, base in zip(names, [*names[1:], names[0]]):
        (tmp_path / name).write_text(f"extends: {base}\n")
    assert main(write_command(command, tmp_path / "0.yaml")) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "extends" in message and "0.yaml" in message


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_file_without_a_mapping_is_rejected_in_one_line(tmp_path, capsys, command):
    for content in ("- extends\n", "extends\n", ""):
        (tmp_path / "list.yaml").write_text(content)
        assert main(write_command(command, tmp_path / "list.yaml")) == 2
        message = capsys.readouterr().err
        assert message.count("\n") == 1 and "list.yaml" in message


def write_command(command: str, config: Path) -> list[str]:
    if command == "check":
        return ["check", str(config)]
    return ["train", "--config", str(config), "--method", "uniform", "--seed", "0", "--out", str(config.parent / "out")]


def test_a_setting_overrides_the_extended_file(tmp_path):
    (tmp_path / "base.yaml").write_text("training: {deterministic: portable}\n")
    (tmp_path / "middle.yaml").write_text("extends: base.yaml\n")
    (tmp_path / "plain.yaml").write_text("extends: base.yaml\ntraining: {deterministic: true}\n")
    portable_by_file = [
        portable.is_requested(Namespace(config=tmp_path / f"{name}.yaml")) for name in ("base", "middle", "plain")
    ]
    assert portable_by_file == [True, True, False]
    # `kairos analyse` has an experiment file and the path of one snapshot
    assert portable.is_requested(Namespace(config=tmp_path / "base.yaml", snapshot=tmp_path / "snapshot"))


def write_case(folder: Path, steps: int = 4) -> tuple[Path, Path]:
    values = experiment(
        training__milestones=[steps], training__deterministic="portable", training__checkpoint_every=steps
    )
    return write_experiment(folder / "x.yaml", values), make_latents(folder / "data")


def run_training(out: Path, config: Path, latents: Path, *before: str, **variables: str) -> dict[str, str]:
    ended = run_process(train_command(config, "adaptive", out, latents, "--timing", f"{out}.json"), before, **variables)
    assert ended.returncode == 0, ended.stderr
    assert read_json(f"{out}.json")["machine"]["instruction_set"] == "AVX2 (portable)"
    return hashes(out) | hash_folder(out / "snapshots") | {"training": sha256_file(out / "training.json")}


@pytest.fixture(scope="module")
def native(tmp_path_factory) -> tuple[Path, Path, dict[str, str]]:
    """Experiment file, its latents, and the hashes of its training run on this CPU."""
    folder = tmp_path_factory.mktemp("native")
    config, latents = write_case(folder)
    return config, latents, run_training(folder / "one", config, latents)


@pytest.mark.long
def test_a_run_under_other_caps_has_equal_bits(tmp_path, native):
    config, latents, native_hashes = native
    assert run_training(tmp_path / "other", config, latents, **OTHER_CAPS) == native_hashes


@pytest.mark.long
@pytest.mark.parametrize("processor", ["Haswell", "EPYC"])
def test_a_run_on_an_emulated_cpu_has_equal_bits(tmp_path, local_probe, native, processor):
    """Emulated Intel and AMD CPUs without AVX-512 differ in vendor, caches and approximations such as rsqrtps."""
    if not shutil.which("qemu-x86_64"):
        pytest.skip("no qemu-x86_64 here: Debian's package qemu-user")
    emulated = ("qemu-x86_64", "-cpu", processor)
    assert run_probe(*emulated)[0]["digests"] == local_probe["digests"]
    config, latents, native_hashes = native
    assert run_training(tmp_path / "other", config, latents, *emulated) == native_hashes
