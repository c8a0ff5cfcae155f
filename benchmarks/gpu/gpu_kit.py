"""Shared code of the GPU benchmarks: rows with a time budget and a JSON record, synthetic data, interleaved timing.

Only torch, numpy, pydantic and jaxtyping are needed; `packages.py` finds or installs the last two. A row that needs
diffusers is skipped with a message if diffusers is not installed.
"""

import argparse
import faulthandler
import functools
import gc
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kairos import compute
from kairos.data.latents import Latents, open_latents
from kairos.diffusion import DiffusionConfig, MethodConfig
from kairos.files import sha256_json, write_record
from kairos.models.settings import BACKBONES
from kairos.section import check
from kairos.training.settings import TrainingConfig, read_run_settings
from kairos.training.state import TrainingState

ROOT = Path(__file__).resolve().parents[2]
SPARE = 20.0  # seconds between the end of the budget and that of a process that does not listen


class Skipped(Exception):
    """Raised by a row that cannot run on this machine; the message is the reason."""


class _OutOfTime(BaseException):
    """Raised when the time budget is used up, in a row or between two rows."""


class Part:
    """Part of the GPU benchmarks: runs its rows, the most valuable first, within a budget, and updates the JSON record.

    Args:
        name: name of the part.
        about: what is measured, in one line.
        arguments: command line, from `arguments`.
    """

    def __init__(self, name: str, about: str, arguments: argparse.Namespace):
        self.short, self.device = arguments.short, device_of(arguments.device)
        self._budget, self._only, self._begun = arguments.budget, arguments.only, time.monotonic()
        out = arguments.out or os.environ.get("OUT") or ROOT / "benchmarks" / "results" / "gpu"
        self.path = Path(out) / f"{name}.json"
        self.content: dict[str, Any] = {
            "part": name, "about": about, **machine(self.device), "short": self.short, "budget_s": self._budget,
            "seconds": 0.0, "complete": False, "rows": [], "not_reached": [],
        }  # fmt: skip

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self._budget - (time.monotonic() - self._begun)

    def run(self, rows: dict[str, Callable[[], dict[str, Any]]]) -> int:
        """Run the rows that the command line selects, in order; return 1 if one of them failed, else 0.

        Rows after the end of the budget are recorded as not reached. The record is written after each row, and a
        summary is printed. A process that hangs for 20 s after the budget is ended.

        Args:
            rows: functions that measure a row and return its columns, by the label of the row.
        """
        names = [name for name in rows if not self._only or any(word in name for word in self._only)]
        gc.freeze()  # `free` collects after each row; modules and what the part has built stay
        faulthandler.dump_traceback_later(self._budget + SPARE, exit=True)  # a call that hangs ends the process
        signal.signal(signal.SIGALRM, _out_of_time)
        signal.setitimer(signal.ITIMER_REAL, max(self.left, 0.01))
        with suppress(_OutOfTime):  # in a row, or between two of them
            self._run_rows(names, rows)
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.unfreeze()
        self.content["complete"] = not self.content["not_reached"]
        self._write()
        faulthandler.cancel_dump_traceback_later()
        failed = [row["row"] for row in self.content["rows"] if "failed" in row]
        summary = [f"{len(failed)} failed", f"{len(self.content['not_reached'])} not reached", str(self.path)]
        print(f"{self.content['part']}: {len(self.content['rows'])} rows, {', '.join(summary)}", flush=True)
        return int(bool(failed))

    def _run_rows(self, names: list[str], rows: dict[str, Callable[[], dict[str, Any]]]) -> None:
        """Run rows in order until the budget is used up; write the record after each.

        A row that raises an error is recorded as failed or, after `Skipped`, as skipped.
        """
        for number, name in enumerate(names):
            self.content["not_reached"] = names[number:]
            if self.left <= 0:
                break
            row, begun = {"row": name}, time.monotonic()
            try:
                row |= rows[name]()
            except Skipped as reason:
                row["skipped"] = str(reason)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}"[:2000]
                row["raised_in"] = location(error)
            row["seconds"] = round(time.monotonic() - begun, 2)
            self.content["rows"].append(row)
            self.content["not_reached"] = names[number + 1 :]
            self._write()
            print(f"{self.content['part']} {json.dumps(row)}", flush=True)
            free(self.device)

    def _write(self) -> None:
        """Write the JSON record with the seconds so far."""
        self.content["seconds"] = round(time.monotonic() - self._begun, 1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_record(self.path, self.content)


def location(error: Exception) -> str:
    """Return file, line and function in which an error was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"


def _out_of_time(number: int, frame: object) -> None:
    """Raise `_OutOfTime`, as a handler of the timer's signal."""
    raise _OutOfTime


def arguments(about: str) -> argparse.Namespace:
    """Parse the command line, whose options all parts share; `about` is the module's docstring."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds that the part may take")
    parser.add_argument("--short", action="store_true", help="tiny models and few steps: whether it runs at all")
    parser.add_argument("--only", nargs="*", help="rows whose name contains one of these words")
    parser.add_argument("--out", type=Path, help="folder of the JSON; default: $OUT, or benchmarks/results/gpu")
    return parser.parse_args()


def device_of(name: str) -> torch.device:
    """Return the device with a name; ``auto`` is the GPU, or the CPU without one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def machine(device: torch.device) -> dict[str, Any]:
    """Return the device, the driver, the commit and the versions of the libraries, for the JSON record."""
    provenance = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {platform.machine()}",
        "driver": _first_output_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "commit": _first_output_line("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"),
        "python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
        "diffusers": no_unet() is None,
    }  # fmt: skip
    if device.type == "cuda":
        provenance["memory_gib"] = round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1)
    return provenance


def _first_output_line(*command: str) -> str | None:
    """Return the first line of a command's output; None if the command fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None


@functools.cache
def no_unet() -> str | None:
    """Return the reason why the U-Net cannot be built; None if it can."""
    try:
        import kairos.models.unet  # noqa: F401
    except ImportError as error:
        return f"the U-Net needs diffusers ({error}); WHEELS=folder brings it"
    return None


def setup(device: torch.device, deterministic: bool = False, precision: str = "fp32") -> None:
    """Set up torch as a training run does, with up to 8 CPU threads if the device is a GPU, else 1 thread."""
    threads = min(os.cpu_count() or 1, 8) if device.type == "cuda" else 1
    compute.setup(threads, str(device), deterministic, precision=precision)


def synchronize(device: torch.device) -> None:
    """Wait for the work on a GPU; nothing happens for the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    """Free the memory of unreachable objects, on the host and on the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# a training


def experiment(
    model: dict[str, Any],
    process: dict[str, Any] | None = None,
    prediction: str | None = None,
    sampler: dict[str, Any] | None = None,
    weighting: dict[str, Any] | None = None,
    losses: tuple[dict[str, Any], ...] = ({"name": "mse"},),
    **training: Any,
) -> dict[str, Any]:
    """Build the part of a resolved experiment that training reads, as plain values; its method is ``method``.

    Raises:
        Skipped: the model needs diffusers, which is not installed.
    """
    if model["name"] in ("unet", "ldm_unet", "adm") and no_unet():
        raise Skipped(no_unet())
    diffusion = {"process": process or {"name": "discrete"}, "prediction": prediction, "losses": [*losses]}
    method = {"sampler": sampler or {"name": "uniform"}, "weighting": weighting or {"name": "none"}}
    return {
        "model": BACKBONES.select(model).plain(),
        "dataset": {},
        "diffusion": check(DiffusionConfig, diffusion, "diffusion").model_dump(mode="json"),
        "training": check(TrainingConfig, training, "training").model_dump(mode="json"),
        "methods": {"method": check(MethodConfig, method, "methods.method").model_dump(mode="json")},
    }


def make_latents(
    folder: Path, shape: tuple[int, int, int], count: int, conditions: dict[str, dict[str, Any]], pixels: bool = False
) -> Path:
    """Write `folder`/dataset and `folder`/latents of random numbers as stage encode does; return `folder`/latents.

    `conditions` are described as in the record of latents. A condition that is an image is the image in low resolution.
    """
    dataset, latents = folder / "dataset", folder / "latents"
    random = np.random.default_rng(0)
    (dataset / "conditions").mkdir(parents=True)
    latents.mkdir()
    channels, height, width = shape
    image_shape = (height, width, channels) if pixels else (1, 1, 1)  # a placeholder if training is on latents
    np.save(dataset / "images.npy", random.integers(0, 256, (count, *image_shape), dtype=np.uint8))
    files, stored_conditions = {}, {}
    for name, item in conditions.items():
        if item["kind"] == "image":
            files["low_mean.npy"] = ""
            np.save(latents / "low_mean.npy", random.standard_normal((count, *item["shape"]), np.float32))
            continue
        if item["kind"] == "class":
            values = random.integers(0, item["num_classes"], count)
        else:
            values = random.standard_normal((count, *item["shape"]), np.float32)
        np.save(dataset / "conditions" / f"{name}.npy", values)
        stored_conditions[name] = {**item, "file": f"conditions/{name}.npy"}
    np.save(dataset / "train.npy", np.arange(count))
    np.save(dataset / "heldout.npy", np.arange(0))
    content = sha256_json([shape, count, conditions, pixels])
    dataset_record = {"content_sha256": content, "count": count, "conditions": stored_conditions}
    write_record(dataset / "record.json", dataset_record)
    if not pixels:
        np.save(latents / "mean.npy", random.standard_normal((count, *shape), np.float32))
        np.save(latents / "logvar.npy", np.full((count, *shape), -4.0, np.float32))
        files |= {"mean.npy": "", "logvar.npy": ""}
    record = {
        "kind": "pixels" if pixels else "moments", "shape": list(shape), "count": count, "scaling_factor": 1.0,
        "shift_factor": 0.0, "flips": pixels, "autoencoder_sha256": "none", "dataset_sha256": content,
        "content_sha256": content, "conditions": {**conditions, **stored_conditions}, "dataset": "../dataset",
        "files": files,
    }  # fmt: skip
    write_record(latents / "record.json", record)
    return latents


class Data:
    """Synthetic data sets by shape, in a temporary folder that is deleted at the end of the ``with`` block."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kairos-gpu-"))

    def __enter__(self) -> "Data":
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def path(
        self,
        shape: tuple[int, int, int],
        count: int,
        classes: int = 10,
        pixels: bool = False,
        conditions: dict[str, dict[str, Any]] | None = None,
    ) -> Path:
        """Return the folder of latents of a data set with `count` images, which is written at the first call.

        `conditions` are described as in the record of latents; None: a class condition with `classes` classes.
        """
        if conditions is None:
            conditions = {"class": {"kind": "class", "num_classes": classes}}
        folder = self.folder / sha256_json([shape, count, conditions, pixels])[:16]
        return folder / "latents" if folder.exists() else make_latents(folder, shape, count, conditions, pixels)

    def open(self, *arguments: Any, **keywords: Any) -> Latents:
        """Open the latents of a data set with the arguments of `path`."""
        return open_latents(self.path(*arguments, **keywords))


def training_of(plain: dict[str, Any], latents: Latents, device: torch.device, seed: int = 0) -> TrainingState:
    """Return a new training run of an experiment, from `experiment`."""
    return TrainingState(read_run_settings(plain, "method", seed), latents, device)


def move(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Add equal random numbers to all weights, drawn on the CPU: gates and last layers are 0 initially."""
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=random).to(parameter))


# measuring


def compare_alternately(
    variants: dict[str, Callable[[int], float]], steps: int, rounds: int, base: str
) -> dict[str, dict[str, Any]]:
    """Run blocks of steps of each variant alternately, and compare their times.

    Args:
        variants: functions that run a number of steps and return the seconds.
        steps: number of steps of a block.
        rounds: number of blocks of each variant.
        base: name of the variant that the others are compared with.

    Returns:
        By variant: milliseconds per step (median over blocks), the ratio of its time to the base's in the same round
        (median), and the range of that ratio.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}  # per step, of each round
    for _ in range(rounds):
        for name, run in variants.items():
            seconds[name].append(run(steps) / steps)
    statistics_of_variants = {}
    for name, values in seconds.items():
        ratios = [value / base_value for value, base_value in zip(values, seconds[base], strict=True)]
        statistics_of_variants[name] = {
            "ms_per_step": round(1e3 * statistics.median(values), 4),
            "ratio": round(statistics.median(ratios), 4),
            "range": [round(min(ratios), 4), round(max(ratios), 4)],
        }
    return statistics_of_variants


def synchronisations(device: torch.device, run: Callable[[], Any]) -> dict[str, Any] | None:
    """Call `run` and count how often, and where, it synchronises with the device; None without a GPU.

    Returns:
        ``count``, and ``places``: the counts of the eight most frequent lines of code, by ``<folder>/<file>:<line>``.
    """
    if device.type != "cuda":
        run()
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    locations: Counter[str] = Counter()
    for warning in caught:
        if "called a synchronizing" in str(warning.message):  # excludes the warning that the mode is a prototype
            file = "/".join(Path(warning.filename).parts[-2:])
            locations[f"{file}:{warning.lineno}"] += 1
    return {"count": sum(locations.values()), "places": dict(locations.most_common(8))}


def idle_share(device: torch.device, run: Callable[[], Any]) -> float | None:
    """Call `run`; return the share of the time from its first to its last kernel without a running kernel.

    The share is measured by torch.profiler, which costs the host some time: it is an upper bound. None without a GPU or
    a kernel.
    """
    if device.type != "cuda":
        run()
        return None
    synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        synchronize(device)
    cuda = torch.autograd.DeviceType.CUDA
    spans = []  # start and end of each kernel
    for event in profile.events():
        if event.device_type == cuda and not getattr(event, "is_user_annotation", False):
            spans.append((event.time_range.start, event.time_range.end))
    if not spans:
        return None
    spans.sort()
    first_start, _ = spans[0]
    busy, last_end = 0.0, first_start
    for start, end in spans:  # kernels may overlap
        busy += max(0.0, end - max(start, last_end))
        last_end = max(last_end, end)
    return round(1 - busy / (last_end - first_start), 4)
