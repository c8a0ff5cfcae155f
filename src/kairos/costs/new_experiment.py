"""Propose a first experiment for a folder of images, with settings that suit the images and this machine.

The number of steps follows from the time that the user allows. To predict the time, a short form of the experiment runs
in a temporary folder: all stages and methods, with fewer steps and images. The omitted steps and images are then added
in proportion.
"""

import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from kairos.config import Experiment, validate
from kairos.costs.preflight import TF32_MAJOR
from kairos.data.settings import DatasetConfig
from kairos.data.source_statistics import ImageCounts, ImageProperties, count_images, inspect_images
from kairos.data.values import format_range
from kairos.evaluation.separation import ENOUGH_IMAGES
from kairos.files import read_entries, read_json
from kairos.progress import duration, log
from kairos.report.formatting import format_count, load_template
from kairos.stages import TRAIN, Stage, list_stages
from kairos_timesteps.errors import KairosError, demand

FEWEST_IMAGES = 40
_FEWEST_STEPS, _MOST_STEPS = 500, 200_000
_TOLERANCE = 1.1  # the user is warned if the experiment takes this many times the wanted minutes
# lengths of the run that is timed: steps of each method, images, steps of the autoencoder and of the extractor
_SHORT_RUN = {"steps": 120, "images": 2000, "autoencoder": 100, "extractor": 60}
_NOT_UTF8 = re.compile("[\ud800-\udfff]")  # surrogates, by which Python represents bytes of a path that are not UTF-8
# line ends, and characters that YAML rejects
_NOT_IN_COMMENT = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True)
class Machine:
    """Resources of this machine.

    Attributes:
        gpu: name and memory of the GPU; None without a GPU.
        capability: compute capability of the GPU, such as ``8.0``; empty without a GPU.
        has_tf32: True if the GPU has TF32, and fast bfloat16.
        cores: number of CPUs that `make run` uses, at least 2.
        memory: main memory, GiB.
    """

    gpu: str | None
    capability: str
    has_tf32: bool
    cores: int
    memory: float


@dataclass(frozen=True)
class Facts:
    """Properties of images and machine that determine the settings of a proposed experiment.

    Attributes:
        name: name of the experiment.
        folder: folder of the images.
        minutes: time that the experiment may take.
        schema: path of the schema of experiment files, from the folder of the experiment file.
        counts: numbers of images and classes.
        images: sizes and colours of the images.
        value_range: range of stored values as text, such as ``[0, 4095]``; empty if the default fits the images.
        shorter_side: median of the images' shorter sides, pixels.
        machine: resources of this machine.
    """

    name: str
    folder: str
    minutes: float
    schema: str
    counts: ImageCounts
    images: ImageProperties
    value_range: str
    shorter_side: float
    machine: Machine

    @property
    def image_count(self) -> int:
        """Number of images, training and held out; `collect_facts` ensures that it is known."""
        return self.counts.count or 0  # `or 0` is for the type checker alone


def propose_experiment(folder: Path, name: str, minutes: float, schema: str) -> tuple[str, str]:
    """Return the text of an experiment file for the images of a folder, and a summary for the user; writes no file.

    At most 20,000 images are decoded, and a short run of the experiment is timed, which takes minutes. Messages report
    the progress. The summary contains a warning if the experiment is expected to exceed `minutes` by more than 10 %.

    Args:
        folder: folder of images, flat or with a folder per class.
        minutes: time that the experiment may take on this machine.
        schema: path of the schema of experiment files, from the folder of the experiment file; editors use it.

    Raises:
        ConfigError: there is no such folder, it contains too few images, or the working directory has no Snakefile.
        KairosError: images cannot be read, or the short run fails; the message reports the images or the output.
    """
    facts = collect_facts(folder, name, minutes, schema)
    any_steps = 1000  # the short run has another number of steps
    draft = validate(yaml.safe_load(render_experiment(facts, steps=any_steps, seconds=0)))
    steps, seconds = _find_steps(draft, facts)
    summary = f"{len(draft.methods)} methods of {steps} steps on {facts.image_count} images; "
    summary += f"about {duration(seconds)} on this machine, as measured"
    if seconds > _TOLERANCE * 60 * minutes:
        trains_autoencoder = draft.autoencoder.kind == "train"
        advice = "remove methods or lower autoencoder.steps" if trains_autoencoder else "remove methods"
        summary += (
            f"\nwarning: --minutes: got {minutes:g}, but the experiment is expected to take {duration(seconds)}; "
            f"{steps} steps are the minimum; to shorten it, {advice}"
        )
    return render_experiment(facts, steps=steps, seconds=seconds), summary


def collect_facts(folder: Path, name: str, minutes: float, schema: str) -> Facts:
    """Read the images of a folder and return the facts that determine the settings of an experiment.

    At most 20,000 images are decoded. A message reports the start.

    Args:
        folder: folder of images, flat or with a folder per class.
        minutes: time that the experiment may take on this machine.
        schema: path of the schema of experiment files, from the folder of the experiment file.

    Raises:
        ConfigError: there is no such folder, it contains too few images, an experiment file cannot contain a path, or
            no range fits the stored values of all images.
        KairosError: images cannot be read; the message reports them.
    """
    demand(folder.is_dir(), "--data", repr(str(folder)), "a folder that exists")
    absolute = str(folder.resolve())  # the short run has this path
    demand(not _NOT_UTF8.search(absolute), "--data", repr(absolute), "a path in UTF-8")
    demand(not _NOT_IN_COMMENT.search(schema), "FILE", repr(schema), "a path to the schema without control characters")
    log(f"kairos new: reading the images of {folder}")
    dataset = DatasetConfig(source="folder", path=str(folder), heldout=0.0)
    images, counts = inspect_images(dataset, decode=True), count_images(dataset)
    if images.unread:
        names = images.unread[:10]
        if len(images.unread) > len(names):
            names.append("...")
        lines = "\n  ".join(names)
        count = format_count(len(images.unread), "image")
        raise KairosError(f"--data: {folder}: {count} cannot be read; repair or remove:\n  {lines}")
    value_range = images.values.propose_range()
    has_enough = (counts.count or 0) >= FEWEST_IMAGES  # a number that is not known (None) is too small
    demand(has_enough, "--data", f"{counts.count} images in {folder}", f"{FEWEST_IMAGES} or more")
    shorter_side = statistics.median(min(size) for size in images.sizes.elements())  # each image counts
    return Facts(
        name=name,
        folder=str(folder),
        minutes=minutes,
        schema=schema,
        counts=counts,
        images=images,
        value_range=format_range(value_range) if value_range else "",
        shorter_side=shorter_side,
        machine=_inspect_machine(),
    )


def _inspect_machine() -> Machine:
    """Return the first GPU, the number of CPUs and the main memory of this machine.

    On a machine with one CPU the number is 2, like the number of processes that `make run` starts there.
    """
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu_text = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" if gpu else None
    cores = max(len(os.sched_getaffinity(0)), 2)  # the default of CORES in the Makefile
    return Machine(
        gpu=gpu_text,
        capability=f"{gpu.major}.{gpu.minor}" if gpu else "",
        has_tf32=gpu is not None and gpu.major >= TF32_MAJOR,
        cores=cores,
        memory=memory,
    )


def render_experiment(facts: Facts, steps: int, seconds: float) -> str:
    """Return the text of an experiment file, from the template ``new_experiment.yaml.jinja``.

    Methods train `steps` steps. A comment in the file reports `seconds`, the predicted time of the experiment.
    """
    file = Path(__file__).with_suffix(".yaml.jinja")
    values = {"facts": facts, "steps": steps, "seconds": seconds, "enough_images": ENOUGH_IMAGES}
    return load_template(file, duration=duration, quote=_quote).render(values)


def _quote(text: str) -> str:
    """Return a text in double quotes as YAML, on one line; without quotes, name ``2024`` would be a number."""
    return yaml.safe_dump(text, default_style='"', allow_unicode=True, width=math.inf).rstrip("\n")


def _find_steps(experiment: Experiment, facts: Facts) -> tuple[int, float]:
    """Return the number of steps that the wanted minutes allow, and the predicted seconds of the experiment.

    A short run of the experiment is timed; it takes minutes, logs its progress and leaves no files. The prediction is
    its time, plus the time of omitted images and steps in proportion. The number of steps is a multiple of 100 between
    500 and 200,000, so that the predicted time may exceed the wanted minutes.

    Raises:
        ConfigError: the working directory has no Snakefile.
        KairosError: the short run fails.
    """
    # prepare the short run
    snakefile = Path("Snakefile").resolve()
    demand(snakefile.is_file(), "kairos new", f"no Snakefile in {Path.cwd()}", "a clone, or a folder of kairos init")
    short_form, factors = _shorten(experiment, facts)
    image_count = short_form["dataset"]["limit"]
    lengths = f"{len(experiment.methods)} methods of {_SHORT_RUN['steps']} steps, {image_count} images"
    log(f"kairos new: timing a short run of all stages: {lengths}")
    # each training run occupies a CPU: with more methods than CPUs, the runs take turns
    rounds = math.ceil(len(experiment.methods) / facts.machine.cores)

    # time the short run, and add the omitted part of all stages but training
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        _run_snakemake(short_form, snakefile, folder=Path(folder), cores=facts.machine.cores)
        seconds = time.monotonic() - begin
        results = Path(folder, "results", experiment.experiment)
        stages = list_stages(experiment)
        for stage, factor in factors.items():
            stage_rounds = rounds if stages[stage].per_snapshot else 1
            seconds += (factor - 1) * _mean_job_seconds(results, stages[stage]) * stage_rounds
        seconds_per_step = rounds * _mean_step_seconds(results)  # seconds of a step of all methods

    # spend the remaining time on training steps; `seconds` includes the steps of the short run
    short_steps = _SHORT_RUN["steps"]
    affordable_steps = short_steps + (60 * facts.minutes - seconds) / seconds_per_step
    steps = int(min(max(round(affordable_steps, -2), _FEWEST_STEPS), _MOST_STEPS))  # a multiple of 100
    return steps, seconds + (steps - short_steps) * seconds_per_step


def _mean_step_seconds(results: Path) -> float:
    """Return the seconds of a step, as the mean over the training runs of the short run.

    Only the second half of the steps is measured, since start-up falls into the first half. The caller ensures that the
    short run is complete.
    """
    half_run_seconds = []
    for file in results.glob("methods/*/seed0/timing.jsonl"):
        # each half ends with a checkpoint, and hence with a line, whose `seconds` are since the start of training
        half_way, end = read_entries(file)[-2:]
        half_run_seconds.append(end["seconds"] - half_way["seconds"])
    return float(statistics.mean(half_run_seconds)) / (_SHORT_RUN["steps"] / 2)


def _shorten(experiment: Experiment, facts: Facts) -> tuple[dict[str, Any], dict[str, float]]:
    """Return a short form of an experiment as plain values, and the factor by which each stage is shortened.

    The short form has fewer images, and fewer steps of autoencoder, extractor and methods. Its extractor is always
    ``selfsupervised``, which takes about the time of ``classifier`` and needs no images of each class. Training has two
    snapshots, step 0 and its end, and is not among the factors. MLflow's database is in the working directory of the
    run.
    """
    plain = experiment.plain()
    factors = {}  # length of a stage over its length in the short form

    # fewer steps of the networks that are trained before the methods
    autoencoder, extractor = plain["autoencoder"], plain["evaluation"]["extractor"]
    extractor["name"] = "selfsupervised"  # the network of `classifier`; fewer images may lack some of a small class
    extractor.pop("fallback", None)  # an option of `classifier` alone
    for stage, settings in (("autoencoder", autoencoder), ("extractor", extractor)):
        short_steps = min(_SHORT_RUN[stage], settings["steps"])
        factors[stage] = settings["steps"] / short_steps
        settings["steps"] = short_steps

    # fewer images, and fewer snapshots of the methods: the short form has 2
    image_count = min(facts.image_count, _SHORT_RUN["images"])
    for row in list_stages(experiment).values():
        if row.name not in (*factors, TRAIN.name) and not row.is_summary:
            factors[row.name] = len(experiment.milestones) / 2 if row.per_snapshot else facts.image_count / image_count
    # an absolute path: the run has another working directory
    plain["dataset"] |= {"path": str(Path(facts.folder).resolve()), "limit": image_count}

    # fewer steps of the methods
    plain["training"] |= {"milestones": [_SHORT_RUN["steps"]], "checkpoint_every": _SHORT_RUN["steps"] // 2}
    plain["tracking"]["uri"] = "sqlite:///mlflow.db"
    return plain, factors


def _run_snakemake(values: dict[str, Any], snakefile: Path, folder: Path, cores: int) -> None:
    """Run an experiment by Snakemake in a folder and log its progress; an interrupt ends Snakemake too.

    Args:
        values: the experiment as plain values.
        snakefile: Snakefile of the pipeline.
        folder: the working directory, which gets the experiment file and the results.
        cores: number of CPUs that Snakemake uses.

    Raises:
        KairosError: the run fails; the message contains the end of its output.
    """
    # command
    config = folder / "short.yaml"
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(snakefile), "--directory", str(folder)]
    command += ["--cores", str(cores), "--configfile", str(config)]
    command += ["--quiet", "host", "reason"]  # shows the rules, which `progress_lines` reads and a profile may hide
    # environment: the rules call `kairos`, which is in the folder of this interpreter; one thread, as in the Makefile
    search_path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": search_path, "OMP_NUM_THREADS": "1"}

    merged_output: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    output: list[str] = []  # all lines, for the message after a failure
    with subprocess.Popen(command, env=environment, **merged_output) as process:
        try:
            lines: Iterable[str] = process.stdout or ()  # `or ()` is for the type checker alone
            for line in progress_lines(_record(lines, output)):
                log(line)
        except BaseException:  # an interrupt: Snakemake must end before its folder is deleted
            process.terminate()
            raise
    if process.returncode:
        raise KairosError(f"kairos new: the short run failed:\n{''.join(output)[-3000:]}")


def _mean_job_seconds(results: Path, stage: Stage) -> float:
    """Return the mean wall time of a stage's jobs in seconds, without start-up; 0 if they record no times."""
    pattern = f"{stage.name}/*/*.json" if stage.per_snapshot else f"{stage.name}.json"
    records = [read_json(file) for file in (results / "timing").glob(pattern)]
    seconds = [record["wall_seconds"] - record["startup_wall_seconds"] for record in records]
    return float(statistics.mean(seconds)) if seconds else 0.0


def _record(lines: Iterable[str], recorded: list[str]) -> Iterator[str]:
    """Yield the lines and append each to the list `recorded`, so that they can be reported after a failure."""
    for line in lines:
        recorded.append(line)
        yield line


def progress_lines(output: Iterable[str], now: Callable[[], float] = time.monotonic) -> Iterator[str]:
    """Yield a message for each stage when its first job begins in the output of Snakemake.

    The message contains the name of the stage and the numbers of finished and of all jobs. If jobs are finished, it
    also contains jobs per second and the remaining time. `output` are the lines of Snakemake, and `now` returns the
    time in seconds.
    """
    begin, done, total = now(), 0, 0
    started_stages = {"all"}  # rule all is not a stage
    for line in output:
        if match := re.match(r"total\s+(\d+)", line):  # last line of the table of jobs: "total     42"
            total = int(match[1])
        elif match := re.match(r"(\d+) of (\d+) steps", line):  # "3 of 42 steps (7%) done"
            done, total = int(match[1]), int(match[2])
        elif match := re.match(r"(?:local)?rule (\w+):", line):  # "rule train:" or "localrule report:"
            stage = match[1]
            if stage in started_stages:
                continue
            started_stages.add(stage)
            speed = ""
            if done:
                jobs_per_second = done / max(now() - begin, 1e-9)  # the clock may not have advanced
                remaining = (total - done) / jobs_per_second
                speed = f", {jobs_per_second:.2g} jobs/s, {duration(remaining)} left"
            yield f"kairos new: timing {stage}; {done} of {total} jobs done{speed}"
