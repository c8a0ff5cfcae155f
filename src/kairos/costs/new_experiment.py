"""A first experiment for a folder of images: what the images and this machine suggest, and the time that it will take.

The time is measured: the experiment itself runs in a temporary folder, all stages, methods and jobs side by side, with
its lengths cut to some steps; what was cut is then added in proportion.
"""

import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from kairos.config import Experiment, validate
from kairos.data.settings import DatasetConfig
from kairos.data.source_statistics import count_images, inspect_images
from kairos.evaluation.separation import ENOUGH_IMAGES
from kairos.files import read_json, read_lines
from kairos.progress import duration, say
from kairos.report.formatting import template
from kairos_timesteps.errors import KairosError, demand

FEWEST = 40  # images
_FEWEST_STEPS, _MOST_STEPS = 500, 200_000
_LONGER = 1.1  # times the wanted minutes, from which on an experiment takes longer than wanted
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
    facts = look_at(folder, name, minutes, schema)
    steps, seconds = _measured(validate(yaml.safe_load(text(facts, steps=1000, seconds=0))), facts)
    count = facts["known"].count
    said = f"4 methods of {steps} steps on {count} images; about {duration(seconds)} on this machine, measured"
    if seconds > _LONGER * 60 * minutes:
        said += (
            f"\nwarning: --minutes: got {minutes:g}, but the experiment is expected to take {duration(seconds)}: "
            f"{steps} steps are the fewest that it proposes; remove methods or milestones to shorten it"
        )
    return text(facts, steps=steps, seconds=seconds), said


def look_at(folder: Path, name: str, minutes: float, schema: str) -> dict[str, Any]:
    """Return the facts about images and machine that decide the experiment's settings; arguments as of `propose`."""
    say(f"kairos new: reads the images of {folder}")
    dataset = DatasetConfig(source="folder", path=str(folder), heldout=0.0)
    seen, known = inspect_images(dataset, whole=True), count_images(dataset)
    if seen.unread:
        names = "\n  ".join(seen.unread[:10] + ["..."] * (len(seen.unread) > 10))
        raise KairosError(f"--data: {len(seen.unread)} images of {folder} cannot be read; remove them:\n  {names}")
    demand((known.count or 0) >= FEWEST, "--data", f"{known.count} images in {folder}", f"{FEWEST} or more")
    short = statistics.median(min(size) for size in seen.sizes.elements())
    facts = {"name": name, "path": str(folder), "known": known, "seen": seen, "short": short, "minutes": minutes}
    return facts | {"schema": schema, "enough": ENOUGH_IMAGES, **_machine()}


def _machine() -> dict[str, Any]:
    """The GPU with its memory, if there is one, the processors that `make run` uses and the main memory in GiB."""
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    named = gpu and f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"
    return {"gpu": named, "cores": max(len(os.sched_getaffinity(0)), 2), "memory": memory}


def text(facts: dict[str, Any], **more: Any) -> str:
    """Return the experiment file for the facts of `look_at`, with its number of ``steps`` and its ``seconds``."""
    return template(Path(__file__).with_suffix(".yaml.jinja"), duration=duration).render(**facts, **more)


def _measured(experiment: Experiment, facts: dict[str, Any]) -> tuple[int, float]:
    """The steps that the wanted minutes allow, and the seconds that the experiment then takes, all stages."""
    snakefile, images, cores = Path("Snakefile").resolve(), min(facts["known"].count, _CUT["images"]), facts["cores"]
    demand(snakefile.is_file(), "kairos new", f"no Snakefile in {Path.cwd()}", "a clone, or a folder of kairos init")
    plain = experiment.plain()
    coder, extractor = plain["autoencoder"], plain["evaluation"]["extractor"]
    short = {stage: min(_CUT[stage], own["steps"]) for stage, own in (("autoencoder", coder), ("extractor", extractor))}
    ratios = {"autoencoder": coder["steps"] / short["autoencoder"]}
    ratios |= {"extractor": extractor["steps"] / short["extractor"]}
    ratios |= dict.fromkeys(("prepare", "encode", "reference"), facts["known"].count / images)
    ratios |= dict.fromkeys(("sample", "evaluate"), len(experiment.milestones) / 2)  # the short run: 0 and its end
    plain["dataset"] |= {"path": str(Path(facts["path"]).resolve()), "limit": images}
    coder["steps"], extractor["steps"] = short["autoencoder"], short["extractor"]
    plain["training"] |= {"milestones": [_CUT["steps"]], "checkpoint_every": _CUT["steps"] // 2}
    plain["tracking"]["uri"] = "sqlite:///mlflow.db"
    methods = len(experiment.methods)
    say(f"kairos new: measures a short run of all stages: {methods} methods of {_CUT['steps']} steps, {images} images")
    with tempfile.TemporaryDirectory() as place:
        config, results = Path(place, "short.yaml"), Path(place, "results", experiment.experiment)
        config.write_text(yaml.safe_dump(plain), encoding="utf-8")
        command = [sys.executable, "-m", "snakemake", "--snakefile", str(snakefile), "--directory", place]
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
        environment, begun = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}, time.monotonic()
        command += ["--cores", str(cores), "--configfile", str(config)]
        command += ["--quiet", "host", "reason"]  # `progress_lines` reads which rule runs, which a profile may hide
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        output = list[str]()
        with subprocess.Popen(command, env=environment, **pipes) as running:
            try:
                for line in progress_lines(_kept(running.stdout or (), output)):
                    say(line)
            except BaseException:  # interrupted: Snakemake must not outlive the folder that it works in
                running.terminate()
                raise
        if running.returncode:
            raise KairosError(f"kairos new: the steps that are measured failed:\n{''.join(output)[-3000:]}")
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
    steps = round(_CUT["steps"] + (60 * facts["minutes"] - seconds) / step, -2)
    steps = int(min(max(steps, _FEWEST_STEPS), _MOST_STEPS))
    return steps, seconds + (steps - _CUT["steps"]) * step


def _kept(lines: Iterable[str], kept: list[str]) -> Iterator[str]:
    """Yield the lines and append each to `kept`."""
    for line in lines:
        kept.append(line)
        yield line


def progress_lines(output: Iterable[str], now: Callable[[], float] = time.monotonic) -> Iterator[str]:
    """Yield a line for each stage that begins in the output of Snakemake: its name, jobs done, rate, remaining time.

    Args:
        output: lines, as Snakemake prints them.
        now: clock in seconds.
    """
    begun, done, total, stages = now(), 0, 0, set[str]()
    for line in output:
        if found := re.match(r"total\s+(\d+)", line):
            total = int(found[1])
        elif found := re.match(r"(\d+) of (\d+) steps", line):
            done, total = int(found[1]), int(found[2])
        elif (found := re.match(r"(?:local)?rule (\w+):", line)) and found[1] not in stages | {"all"}:
            stages.add(found[1])
            rate = done / max(now() - begun, 1e-9)
            left = (total - done) / rate if done else math.inf
            speed = f", {rate:.2g} jobs/s, {duration(left)} left" if done else ""
            yield f"kairos new: measures {found[1]}; {done} of {total} jobs done{speed}"
