"""Count the kernels that a training step of kairos starts on a GPU, besides those of the network.

    python benchmarks/launches.py --out benchmarks/results/launches.csv

No GPU is needed: the CUDA device is simulated (tests/fake_cuda.py), which counts each operation of torch on it as one
kernel, except views. Real operations start one kernel or several, such as a convolution's backward pass. The number is
therefore a lower bound for the network, and the share an upper bound. A kernel of Triton counts as one.

The networks are the CIFAR-10 U-Net on 32x32 pixels with flips, and DiT-S/2 with classes on 4x32x32 latents. Columns:
    model: name of the network.
    network: kernels of its forward and backward passes.
    kairos: all other kernels of a step that neither logs nor draws the timesteps of the next 16 steps.
    share: kairos over network.
    logging: further kernels of a step that logs.
    without_triton: share if Triton is not installed.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from result_file import write_rows

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "gpu"))
from common import Data, experiment, training_of
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _foreach_utils

from fake_cuda import DEVICE, Record, fake_cuda
from kairos.training.loop import train_steps
from kairos_timesteps import randomness

CASES: dict[str, tuple[dict[str, Any], tuple[int, int, int], int]] = {  # model, x0, batch
    "CIFAR-10 U-Net": ({"name": "unet"}, (3, 32, 32), 128),
    "DiT-S/2": ({"name": "dit", "conditions": ["class"]}, (4, 32, 32), 256),
}
ORDINARY, LOGGING = 1, 2  # steps


def one_kernel(record: Record) -> Any:
    """Return a replacement of `randomness._fused_words` that counts one kernel; the words have no values here."""

    def fused_words(stream: Any, step: Any, index: Any, count: int, device: str) -> Any:
        if device == "cpu":
            return None
        steps = len(step) if isinstance(step, range) else 1
        record.launches["Triton's kernel"] += 1
        return torch.empty(steps, len(index), count, dtype=torch.int64, device=device)

    return fused_words


def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, **_: Any) -> Any:
    """Compute attention by one operation, as on a GPU; torch splits it on the simulated device."""
    return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, attn_mask, True)[0]


@contextmanager
def operations_of_a_gpu() -> Iterator[None]:
    """Let torch select the attention and the operations on lists of tensors that it selects on a GPU."""
    with (
        mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", attention),
        mock.patch.object(_foreach_utils, "_foreach_supported_types", [torch.Tensor, torch.nn.Parameter, FakeTensor]),
    ):
        yield


def count(name: str, data: Data, triton: bool) -> tuple[int, Counter[str], Counter[str]]:
    """Return the kernels of the network, and those of an ordinary step and of one that logs, by function."""
    model, shape, batch_size = CASES[name]
    latents = data.open(shape, 512, pixels=shape[0] == 3)
    plain = experiment(model, batch_size=batch_size, optimizer="adamw", log_every=LOGGING + 1)
    with operations_of_a_gpu(), fake_cuda() as record:
        training = training_of(plain, latents, DEVICE)
        replacement = one_kernel(record) if triton else randomness._fused_words
        with mock.patch.object(randomness, "_fused_words", replacement):
            steps = []
            for step, _ in enumerate(train_steps(training, LOGGING + 1)):
                if step in (ORDINARY, LOGGING):
                    steps.append(Counter(record.launches))
                record.counts_launches = step + 1 in (ORDINARY, LOGGING)
                record.clear()
        x0 = torch.empty(batch_size, *shape, device=DEVICE)
        t = torch.zeros(batch_size, dtype=torch.int64, device=DEVICE)
        conditions = {each: t for each in training.conditions}
        for parameter in training.parameters:
            parameter.grad = None
        record.clear()
        record.counts_launches = True
        output = training.process.predict(training.network, x0, t, conditions)
        loss = output.sum()
        record.launches.subtract(["sum"])  # not of the network
        loss.backward()
        network = record.launches.total()
    return network, *steps


def main() -> None:
    """Count, print and write a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--functions", action="store_true", help="print the kernels by function of kairos")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    with Data() as data:
        for name in CASES:
            network, ordinary, logging = count(name, data, triton=True)
            _, eager, _ = count(name, data, triton=False)
            kairos = ordinary.total() - network
            row = {
                "model": name,
                "network": network,
                "kairos": kairos,
                "share": round(kairos / network, 4),
                "logging": logging.total() - ordinary.total(),
                "without_triton": round((eager.total() - network) / network, 4),
            }
            rows.append(row)
            print(row, flush=True)
            if arguments.functions:
                for function, kernels in ordinary.most_common():
                    print(f"    {kernels:5} {function}")
    if arguments.out:
        write_rows(arguments.out, rows, f"torch {torch.__version__}")


if __name__ == "__main__":
    main()
