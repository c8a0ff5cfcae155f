"""Count the kernels that a training step of kairos starts on a GPU, besides those of the network.

    python benchmarks/launches.py --out benchmarks/results/launches.csv

No GPU is needed: the CUDA device is simulated (tests/fake_cuda.py), which counts the operations of torch on it. Views
count as no kernel. An operation on lists of tensors, such as the optimizer's, counts as the kernels that torch starts
for lists of that length. Every other operation counts as one kernel. That holds for the elementwise operations of
kairos. The network's convolutions and backward passes start more, so that the share is an upper bound. A kernel of
Triton counts as one.

The length of a list that one kernel takes depends on the CUDA version that torch was built with: 13, or 12 and earlier.

The networks are the CIFAR-10 U-Net on 32x32 pixels with flips, and DiT-S/2 with classes on 4x32x32 latents. Columns:
    model: name of the network.
    network: kernels of its forward and backward passes.
    generator: what computes random integers: Triton, or torch if Triton is not installed.
    cuda: CUDA version that torch was built with.
    kairos: all other kernels of a step that neither logs nor draws the timesteps of the next 16 steps.
    share: kairos over network.
    drawing: further kernels of a step that draws the timesteps of the next 16 steps.
    logging: further kernels of a step that logs, by default every tenth.
    mean_share: share of the mean over steps, with the kernels of drawing and logging.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from result_file import write_rows

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "gpu"))
from gpu_kit import Data, experiment, training_of
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _foreach_utils

from fake_cuda import CUDA_12, CUDA_13, DEVICE, Record, fake_cuda
from kairos.data.latents import Latents
from kairos.training.loop import train_steps
from kairos_timesteps import randomness

Launches = Counter[tuple[str, str]]  # kernels by function of kairos and operation of torch

CASES: dict[str, tuple[dict[str, Any], tuple[int, int, int], int]] = {  # model, x0, batch
    "CIFAR-10 U-Net": ({"name": "unet"}, (3, 32, 32), 128),
    "DiT-S/2": ({"name": "dit", "conditions": ["class"]}, (4, 32, 32), 256),
}
VARIANTS = [("Triton", 13), ("torch", 13), ("Triton", 12), ("torch", 12)]
LIMITS = {12: CUDA_12, 13: CUDA_13}
FIRST, ORDINARY, LOGGING, DRAWING = 13, 14, 15, 16  # steps: the first moves tables to the device
DRAWING_INTERVAL, LOGGING_INTERVAL = 16, 10  # a GPU logs every tenth step by default


@dataclass(frozen=True)
class StepLaunches:
    """Kernels that are not the network's, of three kinds of steps.

    Attributes:
        network: kernels of the network's forward and backward passes.
        ordinary, logging, drawing: other kernels of a step that only trains, of one that also logs, and of one that
            also draws the timesteps of the next 16 steps.
    """

    network: int
    ordinary: Launches
    logging: Launches
    drawing: Launches

    def summary(self) -> dict[str, Any]:
        """Return the columns of the result file."""
        ordinary = self.ordinary.total()
        drawing, logging = self.drawing.total() - ordinary, self.logging.total() - ordinary
        mean = ordinary + drawing / DRAWING_INTERVAL + logging / LOGGING_INTERVAL
        return {
            "kairos": ordinary,
            "share": round(ordinary / self.network, 4),
            "drawing": drawing,
            "logging": logging,
            "mean_share": round(mean / self.network, 4),
        }


def one_kernel(record: Record) -> Any:
    """Return a replacement of `randomness._fused_words` that adds one kernel of Triton to `record`.

    The words that the replacement returns have no values. On the CPU it returns None, as without Triton.
    """

    def fused_words(stream: Any, step: Any, index: Any, count: int, device: str, centred: bool = False) -> Any:
        if device == "cpu":
            return None
        steps = len(step) if isinstance(step, range) else 1
        record.launches["randomness._fused_words", "kernel of Triton"] += 1
        dtype = torch.float64 if centred else torch.int64
        return torch.empty(steps, len(index), count, dtype=dtype, device=device)

    return fused_words


def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, **_: Any) -> Any:
    """Compute attention by one operation, as on a GPU; torch splits it on the simulated device."""
    return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, attn_mask, True)[0]


@contextmanager
def operations_of_a_gpu() -> Iterator[None]:
    """Make torch select the attention and the operations on lists of tensors that it selects on a GPU, in the block."""
    with (
        mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", attention),
        mock.patch.object(_foreach_utils, "_foreach_supported_types", [torch.Tensor, torch.nn.Parameter, FakeTensor]),
    ):
        yield


def open_latents(data: Data, shape: tuple[int, int, int]) -> Latents:
    """Return 512 synthetic training images: pixels for three channels, otherwise latents with a shift and a scale."""
    latents = data.open(shape, 512, pixels=shape[0] == 3)
    if shape[0] == 3:
        return latents
    return replace(latents, record={**latents.record, "shift_factor": 0.1, "scaling_factor": 0.5})


def count(name: str, data: Data, generator: str = "Triton", cuda: int = 13) -> StepLaunches:
    """Run training steps on the simulated device; return the kernels of the network and of the rest of a step.

    Args:
        name: key of `CASES`.
        data: synthetic data sets.
        generator: what computes random integers: Triton, or torch.
        cuda: CUDA version that torch was built with, 12 or 13.
    """
    model, shape, batch_size = CASES[name]
    plain = experiment(model, batch_size=batch_size, optimizer="adamw", log_every=LOGGING + 1)
    with operations_of_a_gpu(), fake_cuda() as record:
        record.list_limits = LIMITS[cuda]
        training = training_of(plain, open_latents(data, shape), DEVICE)
        training.step = FIRST
        state = training.strategy.state_dict() | {"step": FIRST, "drawn": [0, FIRST * batch_size]}
        training.strategy.load_state_dict(state, DEVICE)
        replacement = one_kernel(record) if generator == "Triton" else randomness._fused_words
        launches_by_step = {}
        with mock.patch.object(randomness, "_fused_words", replacement):
            for step, _ in enumerate(train_steps(training, DRAWING + 1), FIRST):
                launches_by_step[step] = Counter(record.launches)
                record.counts_launches = step + 1 in (ORDINARY, LOGGING, DRAWING)  # of the next step
                record.clear()
        network = count_network(training, record, torch.empty(batch_size, *shape, device=DEVICE))
    others = {}
    for step in (ORDINARY, LOGGING, DRAWING):
        launches_by_step[step].subtract(network)
        others[step] = +launches_by_step[step]  # keeps positive counts only
    return StepLaunches(network.total(), others[ORDINARY], others[LOGGING], others[DRAWING])


def count_network(training: Any, record: Record, x0: torch.Tensor) -> Launches:
    """Count the kernels of the network's forward and backward passes for images `x0`.

    They are counted under the functions of kairos in which a training step starts them. `record` is cleared.
    """
    t = torch.zeros(len(x0), dtype=torch.int64, device=DEVICE)
    conditions = {name: t for name in training.conditions}
    for parameter in training.parameters:
        parameter.grad = None
    record.clear()
    record.counts_launches = True
    output = training.process.predict(training.network, x0, t, conditions)
    forward = Counter(record.launches)
    record.clear()
    output.backward(output)  # the simulation replaces the gradient by ones
    backward: Launches = Counter()
    for (_, operation), kernels in record.launches.items():
        backward["loop._forward_backward_micro_batch", operation] += kernels
    return forward + backward


def origins(launches: Launches) -> list[tuple[str, int, str]]:
    """Return a row per function of kairos: its name, its kernels, and a text with the kernels of each operation.

    The function with the most kernels comes first.
    """
    by_function: dict[str, Counter[str]] = {}
    for (function, operation), kernels in launches.items():
        by_function.setdefault(function, Counter())[operation] += kernels
    rows = []
    for function, operations in by_function.items():
        texts = []
        for operation, kernels in operations.most_common():
            name = operation.strip("_")
            texts.append(name if kernels == 1 else f"{name} {kernels}")
        rows.append((function, operations.total(), ", ".join(texts)))
    return sorted(rows, key=lambda row: (-row[1], row[0]))


def main() -> None:
    """Count, print and write a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    with Data() as data:
        for name in CASES:
            for generator, cuda in VARIANTS:
                counted = count(name, data, generator, cuda)
                row = {"model": name, "network": counted.network, "generator": generator, "cuda": cuda}
                rows.append(row | counted.summary())
                print(rows[-1], flush=True)
                if (generator, cuda) == VARIANTS[0]:
                    print("| function | kernels | operations of torch |\n|---|---|---|")
                    for function, kernels, operations in origins(counted.ordinary):
                        print(f"| `{function}` | {kernels} | {operations} |")
    if arguments.out:
        write_rows(arguments.out, rows, f"torch {torch.__version__}")


if __name__ == "__main__":
    main()
