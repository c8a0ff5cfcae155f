"""How long a step takes: as measured in earlier trainings of the experiment, or as given."""

import json
import math
import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path

from kairos.files import read_json, read_lines
from kairos_timesteps.errors import demand


@dataclass(frozen=True)
class Rate:
    """Seconds of a step by method, and where they are from.

    Attributes:
        seconds: of a step of each method.
        operations: floating-point operations per second and GPU that this amounts to.
        source: where the rate is from.
        unit: ``GPU`` or ``CPU``, whose rate it is.
    """

    seconds: dict[str, float]
    operations: float
    source: str
    unit: str


def unit_of(device: str) -> str:
    """Return ``GPU`` or ``CPU``, on which trainings will run by `training.device`.

    With ``auto`` that is a GPU where this machine has one, or a SLURM cluster, whose jobs then ask for a GPU.
    """
    has_gpu = Path("/dev/nvidiactl").exists() or shutil.which("sinfo") is not None
    return "CPU" if device == "cpu" or (device == "auto" and not has_gpu) else "GPU"


def given(
    operations: dict[str, float],
    gpus: int,
    steps_per_second: float | None,
    tflops: float | None,
    utilisation: float,
    unit: str = "GPU",
) -> Rate | None:
    """The rate that a user states: of a step without further passes, or of the hardware.

    Args:
        operations: floating-point operations of a step by method.
        gpus: of one training.
        steps_per_second: of the cheapest method.
        tflops: 10^12 operations per second that a GPU is said to do.
        utilisation: share of these that is reached.
        unit: ``GPU`` or ``CPU``, for `steps_per_second`.

    Raises:
        ConfigError: both are given, or one is not positive.
    """
    if steps_per_second is None and tflops is None:
        return None
    demand(None in (steps_per_second, tflops), "--steps-per-second and --tflops", "both", "one of them")
    stated = {"--steps-per-second": steps_per_second, "--tflops": tflops, "--utilisation": utilisation}
    for name, value in stated.items():
        demand(value is None or 0 < value < math.inf, name, value, "more than 0, and finite")
    if steps_per_second is not None:
        least = min(operations.values())
        speed, source = least * steps_per_second / gpus, f"{steps_per_second:g} steps per second, as given"
    else:
        unit, speed = "GPU", (tflops or 0) * 1e12 * utilisation
        source = f"a GPU of {tflops:g} TFLOP/s at {utilisation:.0%}, as given"
    return Rate({method: each / (speed * gpus) for method, each in operations.items()}, speed, source, unit)


def measured(results: Path, operations: dict[str, float], gpus: int, unit: str = "GPU") -> Rate | None:
    """The rate of the experiment's trainings so far; arguments as for `given`. None where none has left its time.

    `unit` counts where no training has recorded its device.

    Of a method that has not been timed it is in proportion to its operations.
    """
    found: dict[str, list[float]] = {}
    machines = set()
    for method in operations:
        for folder in sorted((results / method).glob("seed*")):
            files = [folder / "timing.jsonl", *sorted((folder / ".state").glob("*/timing.jsonl"))]
            times = [time for time in map(_seconds, files) if time is not None]
            if times:
                found.setdefault(method, []).append(times[0])
                record = folder / "training.json"
                machines |= {read_json(record)["provenance"].get("device", "?")} if record.exists() else set()
    if not found:
        return None
    own = {method: statistics.median(times) for method, times in found.items()}
    speed = statistics.median(operations[method] / seconds / gpus for method, seconds in own.items())
    seconds = {method: own.get(method, each / speed / gpus) for method, each in operations.items()}
    number = sum(map(len, found.values()))
    source = f"measured in {number} training{'s' * (number > 1)} of {results} ({', '.join(sorted(machines)) or '?'})"
    if machines - {"?"}:
        unit = "CPU" if machines <= {"cpu", "?"} else "GPU"
    return Rate(seconds, speed, source, unit)


def _seconds(path: Path) -> float | None:
    """Seconds per step by a training's timing file."""
    lines = read_lines(path)
    last = json.loads(lines[-1]) if lines else {"step": 0}
    return last["seconds"] / last["step"] if last["step"] and last["seconds"] else None
