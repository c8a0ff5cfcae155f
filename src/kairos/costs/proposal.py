"""A first experiment for a folder of images: what the images and this machine suggest, and the time that it will take.

The time is measured: the experiment itself runs in a temporary folder, all stages, methods and jobs side by side, with
its lengths cut to some steps; what was cut is then added in proportion.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jinja2
import yaml

from kairos.config import Experiment, validate
from kairos.data.settings import DatasetConfig
from kairos.data.survey import Look, look, survey
from kairos.errors import KairosError, demand
from kairos.files import read_json, read_lines
from kairos.progress import duration, say

FEWEST = 40  # images
_DECODED = 20_000  # images that are read as a whole
_CUT = {"steps": 120, "images": 2000, "autoencoder": 100, "extractor": 60}  # lengths of the run that is measured


def propose(folder: Path, name: str, minutes: float) -> tuple[str, str]:
    """The text of an experiment file for the images in `folder`, and in a line what it is and how long it takes.

    Args:
        folder: images, flat or in a folder per class.
        name: of the experiment.
        minutes: how long it may take on this machine.

    Raises:
        ConfigError: there is no such folder, or it holds too few images.
        KairosError: images cannot be read, which are named, or the steps that are measured fail.
    """
    dataset = DatasetConfig(source="folder", path=str(folder), heldout=0.0)
    seen = look(dataset, _DECODED)
    if seen.unread:
        more = f"\n  ... {len(seen.unread) - 10} more" * (len(seen.unread) > 10)
        found = "\n  ".join(seen.unread[:10])
        raise KairosError(
            f"--data: {len(seen.unread)} images of {folder} cannot be read; remove them:\n  {found}{more}"
        )
    known = survey(dataset)
    count = sum(seen.sizes.values())
    demand(count >= FEWEST, "--data", f"{count} images in {folder}", f"{FEWEST} or more")
    facts = {"name": name, "path": str(folder), "count": count, "smallest": known.smallest, "seen": seen}
    facts |= {"classes": len([one for one in folder.iterdir() if one.is_dir()]), **_machine(), "minutes": minutes}
    facts |= _sizes(seen, count, facts["gpu"])
    steps, seconds = _measured(validate(yaml.safe_load(_text(facts, steps=1000, seconds=0))), minutes, facts)
    text, said = _text(facts, steps=steps, seconds=seconds), duration(seconds)
    return text, f"4 methods of {steps} steps on {count} images; about {said} on this machine, measured"


def _machine() -> dict[str, Any]:
    """The GPU with its memory in GiB, if there is one, the processors and the main memory in GiB."""
    import torch

    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"gpu": gpu and f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB", "cores": _cores(), "memory": memory}


def _cores() -> int:
    """Processors that `make run` uses."""
    return max(len(os.sched_getaffinity(0)), 2)


def _sizes(seen: Look, count: int, gpu: Any) -> dict[str, Any]:
    """Side of the images, how much smaller latents are, how many images are held out and how many drawn."""
    short = statistics.median(min(size) for size in seen.sizes.elements())
    side = max(2**n for n in range(3, 9 if gpu else 6) if 2**n <= max(1.2 * short, 8))  # 28 pixels become 32
    heldout = 0.1 if count >= 10_000 else 0.2
    features = next((n for n in (64, 32, 16) if n < 0.1 * count), 8)
    samples = max(min(round(heldout * count), 5000 if gpu else 500), features + 1)
    levels = {8: 0, 16: 0, 32: 3, 64: 3}.get(side, 4)
    return {
        "side": side,
        "heldout": heldout,
        "samples": samples,
        "features": features,
        "levels": levels,
        "short": short,
    }


def _text(facts: dict[str, Any], **more: Any) -> str:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["duration"] = duration
    template = Path(__file__).with_suffix(".yaml.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(**facts, **more)


def _measured(experiment: Experiment, minutes: float, facts: dict[str, Any]) -> tuple[int, float]:
    """The steps that `minutes` allow, and the seconds that the experiment then takes, all stages."""
    snakefile, images = Path("Snakefile").resolve(), min(facts["count"], _CUT["images"])
    demand(snakefile.is_file(), "kairos new", f"no Snakefile in {Path.cwd()}", "a clone, or a folder of kairos init")
    plain = experiment.plain()
    plain["dataset"] |= {"path": str(Path(facts["path"]).resolve()), "limit": images}
    plain["autoencoder"]["steps"], of_autoencoder = _CUT["autoencoder"], plain["autoencoder"]["steps"]
    plain["evaluation"]["extractor"]["steps"], of_extractor = (
        _CUT["extractor"],
        plain["evaluation"]["extractor"]["steps"],
    )
    plain["training"] |= {"milestones": [_CUT["steps"]], "checkpoint_every": _CUT["steps"] // 2}
    plain["tracking"]["uri"] = "sqlite:///mlflow.db"
    say("kairos new: measures a short form of the experiment, some minutes")
    with tempfile.TemporaryDirectory() as place:
        config, results = Path(place, "short.yaml"), Path(place, "results", experiment.experiment)
        config.write_text(yaml.safe_dump(plain), encoding="utf-8")
        command = [sys.executable, "-m", "snakemake", "--snakefile", str(snakefile), "--directory", place]
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
        environment, begun = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}, time.monotonic()
        command += ["--cores", str(facts["cores"]), "--configfile", str(config)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        whole = time.monotonic() - begun
        if done.returncode:
            raise KairosError(f"kairos new: the steps that are measured failed:\n{(done.stdout + done.stderr)[-3000:]}")
        works = {
            stage: _works(results / "timing", stage) for stage in ("prepare", "autoencoder", "encode", "extractor")
        }
        works |= {stage: _works(results / "timing", stage) for stage in ("reference", "sample", "evaluate")}
        clocks = [_step(file) for file in results.glob("*/seed0/timing.jsonl")]
    more = dict.fromkeys(("prepare", "encode", "reference"), facts["count"] / images - 1)
    more |= {"autoencoder": of_autoencoder / _CUT["autoencoder"] - 1, "extractor": of_extractor / _CUT["extractor"] - 1}
    more |= dict.fromkeys(("sample", "evaluate"), len(experiment.milestones) / 2 - 1)
    turns = -(-len(clocks) // facts["cores"])  # of trainings, as many at once as there are processors
    rest = whole + sum(
        work * more[stage] * (turns if stage in ("sample", "evaluate") else 1) for stage, work in works.items()
    )
    each = turns * statistics.mean(clocks)
    steps = max(round((60 * minutes - rest) / each + _CUT["steps"], -2), 500)
    steps = int(min(steps, 200_000))
    return steps, rest + (steps - _CUT["steps"]) * each


def _works(folder: Path, stage: str) -> float:
    """Seconds of a job of a stage without its start-up; the mean of several."""
    records = [read_json(file) for file in (*folder.glob(f"{stage}.json"), *folder.glob(f"{stage}/*/*.json"))]
    return statistics.mean(record["wall_seconds"] - record["startup_wall_seconds"] for record in records or [_NONE])


_NONE = {"wall_seconds": 0.0, "startup_wall_seconds": 0.0}


def _step(file: Path) -> float:
    """Seconds of a training step between the last two checkpoints."""
    import json

    before, after = [json.loads(line) for line in read_lines(file)][-2:]
    return (after["seconds"] - before["seconds"]) / (after["step"] - before["step"])
