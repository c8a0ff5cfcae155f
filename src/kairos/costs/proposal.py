"""A first experiment for a folder of images: what the images and this machine suggest, and the time that it will take.

The time is measured: the experiment itself runs in a temporary folder, all stages, methods and jobs side by side, with
its lengths cut to some steps; what was cut is then added in proportion.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from kairos.config import Experiment, validate
from kairos.data.settings import DatasetConfig
from kairos.data.survey import look, survey
from kairos.errors import KairosError, demand
from kairos.files import read_json, read_lines
from kairos.progress import duration, say
from kairos.report.text import template

FEWEST = 40  # images
_CUT = {"steps": 120, "images": 2000, "autoencoder": 100, "extractor": 60}  # lengths of the run that is measured


def propose(folder: Path, name: str, minutes: float, schema: str) -> tuple[str, str]:
    """The text of an experiment file for the images in `folder`, and in a line what it is and how long it takes.

    Args:
        folder: images, flat or in a folder per class.
        name: of the experiment.
        minutes: how long it may take on this machine.
        schema: of experiment files, for editors: its path from the file's folder.

    Raises:
        ConfigError: there is no such folder, or it holds too few images.
        KairosError: images cannot be read, which are named, or the steps that are measured fail.
    """
    dataset = DatasetConfig(source="folder", path=str(folder), heldout=0.0)
    seen, known = look(dataset, whole=True), survey(dataset)
    if seen.unread:
        names = "\n  ".join(seen.unread[:10] + ["..."] * (len(seen.unread) > 10))
        raise KairosError(f"--data: {len(seen.unread)} images of {folder} cannot be read; remove them:\n  {names}")
    demand((known.count or 0) >= FEWEST, "--data", f"{known.count} images in {folder}", f"{FEWEST} or more")
    short = statistics.median(min(size) for size in seen.sizes.elements())
    facts = {"name": name, "path": str(folder), "known": known, "seen": seen, "short": short, "minutes": minutes}
    facts |= {"schema": schema, **_machine()}
    steps, seconds = _measured(validate(yaml.safe_load(_text(facts, steps=1000, seconds=0))), facts)
    said = f"4 methods of {steps} steps on {known.count} images; about {duration(seconds)} on this machine, measured"
    return _text(facts, steps=steps, seconds=seconds), said


def _machine() -> dict[str, Any]:
    """The GPU with its memory, if there is one, the processors that `make run` uses and the main memory in GiB."""
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    named = gpu and f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"
    return {"gpu": named, "cores": max(len(os.sched_getaffinity(0)), 2), "memory": memory}


def _text(facts: dict[str, Any], **more: Any) -> str:
    return template(Path(__file__).with_suffix(".yaml.jinja"), duration=duration).render(**facts, **more)


def _measured(experiment: Experiment, facts: dict[str, Any]) -> tuple[int, float]:
    """The steps that the wanted minutes allow, and the seconds that the experiment then takes, all stages."""
    snakefile, images, cores = Path("Snakefile").resolve(), min(facts["known"].count, _CUT["images"]), facts["cores"]
    demand(snakefile.is_file(), "kairos new", f"no Snakefile in {Path.cwd()}", "a clone, or a folder of kairos init")
    plain = experiment.plain()
    coder, extractor = plain["autoencoder"], plain["evaluation"]["extractor"]
    ratios = {"autoencoder": coder["steps"] / _CUT["autoencoder"], "extractor": extractor["steps"] / _CUT["extractor"]}
    ratios |= dict.fromkeys(("prepare", "encode", "reference"), facts["known"].count / images)
    ratios |= dict.fromkeys(("sample", "evaluate"), len(experiment.milestones) / 2)  # the short run: 0 and its end
    plain["dataset"] |= {"path": str(Path(facts["path"]).resolve()), "limit": images}
    coder["steps"], extractor["steps"] = _CUT["autoencoder"], _CUT["extractor"]
    plain["training"] |= {"milestones": [_CUT["steps"]], "checkpoint_every": _CUT["steps"] // 2}
    plain["tracking"]["uri"] = "sqlite:///mlflow.db"
    say("kairos new: measures a short form of the experiment, some minutes")
    with tempfile.TemporaryDirectory() as place:
        config, results = Path(place, "short.yaml"), Path(place, "results", experiment.experiment)
        config.write_text(yaml.safe_dump(plain), encoding="utf-8")
        command = [sys.executable, "-m", "snakemake", "--snakefile", str(snakefile), "--directory", place]
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
        environment, begun = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}, time.monotonic()
        command += ["--cores", str(cores), "--configfile", str(config)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise KairosError(f"kairos new: the steps that are measured failed:\n{(done.stdout + done.stderr)[-3000:]}")
        seconds = time.monotonic() - begun
        turns = -(-len(experiment.methods) // cores)  # of trainings, as many at once as there are processors
        for stage, ratio in ratios.items():
            per_training = stage in ("sample", "evaluate")
            files = (results / "timing").glob(f"{stage}/*/*.json" if per_training else f"{stage}.json")
            works = [record["wall_seconds"] - record["startup_wall_seconds"] for record in map(read_json, files)]
            seconds += (ratio - 1) * statistics.mean(works) * (turns if per_training else 1)
        clocks = [[*map(json.loads, read_lines(file))] for file in results.glob("*/seed0/timing.jsonl")]
    halves = [after["seconds"] - half["seconds"] for *_, half, after in clocks]
    step = turns * statistics.mean(halves) / (_CUT["steps"] / 2)
    steps = min(max(round(_CUT["steps"] + (60 * facts["minutes"] - seconds) / step, -2), 500), 200_000)
    return int(steps), seconds + (steps - _CUT["steps"]) * step
