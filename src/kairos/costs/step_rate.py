"""Duration of a training step: measured in earlier training runs of the experiment, or from command-line options."""

import math
import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kairos import devices
from kairos.costs.cards import peak_of
from kairos.files import read_entries
from kairos.report.formatting import format_machine
from kairos_timesteps.errors import demand


@dataclass(frozen=True)
class StepRate:
    """Speed of training.

    Attributes:
        seconds_per_step: duration of a step, by method.
        flops_per_second: floating-point operations per second of a device in training.
        source: origin of the numbers, as text.
        unit: ``GPU`` or ``CPU``, the kind of device.
        sampling_flops_per_second: the speed in sampling; None: that of training.
    """

    seconds_per_step: dict[str, float]
    flops_per_second: float
    source: str
    unit: str
    sampling_flops_per_second: float | None = None

    @property
    def sampling_speed(self) -> float:
        """Floating-point operations per second of a device in sampling."""
        return self.sampling_flops_per_second or self.flops_per_second


def unit_of(device: str) -> str:
    """Return the kind of device on which training runs compute, ``GPU`` or ``CPU``.

    Args:
        device: `training.device`. With ``auto``, the result is ``GPU`` if this machine has a GPU or a SLURM cluster,
            whose jobs then request GPUs.
    """
    if device != "auto":
        return "CPU" if device == "cpu" else "GPU"
    has_slurm = shutil.which("sinfo") is not None
    return "GPU" if devices.has_nvidia_driver() or has_slurm else "CPU"


def rate_from_options(
    flops: dict[str, float],
    devices: int,
    steps_per_second: float | None,
    tflops: float | None,
    utilisation: float,
    unit: str = "GPU",
    card: str | None = None,
    precisions: tuple[str, str] = ("fp32", "fp32"),
) -> StepRate | None:
    """Return the speed that options of the command line set; None if they set neither speed.

    The methods' steps take times in proportion to their operations. With `tflops` the unit is GPU, whatever `unit` is.

    Args:
        flops: floating-point operations of a step, by method.
        devices: number of devices of a training run, which share the operations.
        steps_per_second: steps per second of the cheapest method; None: not set.
        tflops: peak speed of a GPU, 10^12 floating-point operations per second; None: not set.
        utilisation: fraction of the peak speed that training reaches.
        unit: ``GPU`` or ``CPU``, the kind of device that `steps_per_second` refers to.
        card: name of a card in `cards.PEAKS`; None: not set.
        precisions: precisions of training and of sampling, which select the card's peaks.

    Raises:
        ConfigError: several speeds are set, the card is unknown, or a number is not positive and finite.
    """
    speeds = {"--steps-per-second": steps_per_second, "--tflops": tflops, "--card": card}
    set_options = [name for name, value in speeds.items() if value is not None]
    if not set_options:
        return None
    demand(len(set_options) == 1, " and ".join(set_options), "all", "one of them")
    options = {"--steps-per-second": steps_per_second, "--tflops": tflops, "--utilisation": utilisation}
    for name, value in options.items():
        demand(value is None or 0 < value < math.inf, name, value, "more than 0, and finite")
    sampling_flops_per_second = None
    if steps_per_second is not None:
        # operations of the cheapest method per second of all devices, over the number of devices
        flops_per_second = min(flops.values()) * steps_per_second / devices
        source = f"{steps_per_second:g} steps per second, from --steps-per-second"
    elif card is not None:
        training_peak, sampling_peak = (peak_of(card, precision) for precision in precisions)
        unit, flops_per_second = "GPU", training_peak * 1e12 * utilisation
        sampling_flops_per_second = sampling_peak * 1e12 * utilisation
        peaks = (
            f"training in {precisions[0]}, {training_peak:g} TFLOP/s, sampling in {precisions[1]}, {sampling_peak:g}"
        )
        source = f"{card.upper()} at {utilisation:.0%} of its peak: {peaks}; from --card"
    else:
        unit, flops_per_second = "GPU", (tflops or 0) * 1e12 * utilisation  # `or 0` is for the type checker alone
        source = f"a GPU of {tflops:g} TFLOP/s at {utilisation:.0%}, from --tflops"
    seconds_per_step = {method: step_flops / (flops_per_second * devices) for method, step_flops in flops.items()}
    return StepRate(seconds_per_step, flops_per_second, source, unit, sampling_flops_per_second)


def measured_rate(results: Path, flops: dict[str, float], devices: int) -> StepRate | None:
    """Return the speed of the experiment's earlier training runs; None if no training run recorded its time.

    The duration of a method's step is the median over the method's runs, incomplete runs included. For a method without
    a timed run it follows from its operations and the median speed of the other methods. The operations per second are
    of one device. The source is a text with the number of runs and the kinds of their machines. The unit is CPU if all
    of them computed on CPUs, else GPU.

    Args:
        results: folder of the experiment's results.
        flops: floating-point operations of a step, by method. Runs of other methods are ignored.
        devices: number of devices of a training run, also assumed for the earlier runs.
    """
    # times and devices of the timed runs
    step_seconds: dict[str, list[float]] = {}  # seconds of each run, by method
    machines: list[dict[str, Any]] = []  # of the timed runs
    for method in flops:
        for folder in sorted((results / "methods" / method).glob("seed*")):
            entry = _last_times(folder)
            if entry is None:
                continue
            step_seconds.setdefault(method, []).append(entry["seconds"] / entry["step"])
            machines.append(entry["machine"])
    if not step_seconds:
        return None

    # speed
    medians = {method: statistics.median(seconds_of_runs) for method, seconds_of_runs in step_seconds.items()}
    flops_per_second = statistics.median(flops[method] / seconds / devices for method, seconds in medians.items())
    seconds_per_step = {}
    for method, flops_per_step in flops.items():
        if method in medians:
            seconds_per_step[method] = medians[method]
        else:
            seconds_per_step[method] = flops_per_step / flops_per_second / devices

    # origin and unit
    run_count = sum(map(len, step_seconds.values()))
    runs = "1 training run" if run_count == 1 else f"{run_count} training runs"
    kinds = "; ".join(sorted({format_machine(machine) for machine in machines}))
    unit = "GPU" if any(machine["gpu"] for machine in machines) else "CPU"
    return StepRate(seconds_per_step, flops_per_second, f"measured in {runs} of {results} on {kinds}", unit)


def _last_times(folder: Path) -> dict[str, Any] | None:
    """Return the last entry of a training run's timing.jsonl; None if no file contains a timed step.

    A complete run has timing.jsonl in its `folder`, an incomplete run in the folder of its state. A run has several
    states if its settings have changed. The last line of a file contains the steps and the seconds of the run so far.
    The newest file is used in which neither number is 0.
    """
    files = [*folder.glob("timing.jsonl"), *folder.glob(".state/*/timing.jsonl")]
    for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True):
        entries = read_entries(file)
        if entries and entries[-1]["step"] and entries[-1]["seconds"]:
            return entries[-1]
    return None
