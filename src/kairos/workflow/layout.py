"""An experiment as the workflow sees it: its folders, its trainings and the segments that they are split into."""

import json
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from kairos.analyses.registries import ANALYSES, part_of, places
from kairos.config import Experiment, freeze, load
from kairos.downloads import lacking
from kairos.training.job import read_progress
from kairos.workflow import dependencies
from kairos.workflow.rules import gpus_per_job

FROZEN = "KAIROS_EXPERIMENT"  # names the experiment that a controller has frozen for what it starts
PARTS = ".parts"  # folder of what is joined, in that of the results and in each training's


@dataclass(frozen=True)
class Segment:
    """A part of every training that is one job.

    Attributes:
        steps: its milestones.
        before: the milestone that it goes on from, as files name it; none for the first.
        number: from 1.
        name: of this segment in rule names and log files, with a leading ``_``; empty where it is the only one.
        last: whether the training is complete with it.
    """

    steps: tuple[int, ...]
    before: list[str]
    number: int
    name: str
    last: bool

    @property
    def names(self) -> list[str]:
        """Names of the segment's milestones in folders and files."""
        return names(self.steps)

    def part(self, wildcards: Any, output: Any) -> str:
        """Argument of ``kairos train`` for a segment that another one follows."""
        return "" if self.last else "--part"


@dataclass(frozen=True)
class Layout:
    """Layout of an experiment for the Snakefile: paths, stages and dependencies.

    Attributes:
        experiment: the checked experiment.
        config: frozen copy of the experiment, which all jobs read.
        said: notes for the user before anything runs.
    """

    experiment: Experiment
    config: Path
    said: list[str] = field(default_factory=list)

    @cached_property
    def plain(self) -> dict[str, Any]:
        """The whole resolved experiment."""
        return self.experiment.plain()

    @property
    def results(self) -> str:
        """The experiment's folder, relative."""
        return f"results/{self.experiment.experiment}"

    @property
    def outside(self) -> list[str]:
        """The file of real images from outside that samples are compared with, if there is one."""
        reference = self.experiment.evaluation.reference
        return [reference] if reference.endswith(".npz") else []

    @property
    def shared(self) -> tuple[str, ...]:
        """The stages that all trainings share, in order."""
        return dependencies.shared_stages(self.plain)

    @property
    def text(self) -> list[str]:
        """The stage that encodes captions, if there is one."""
        return ["text"] if "text" in self.shared else []

    @property
    def analyses(self) -> dict[str, dict[str, Any]]:
        """The analyses that are asked for, by name."""
        return {named["name"]: named for named in self.experiment.analyses}

    @property
    def tables(self) -> list[str]:
        """The tables and figures of the analyses."""
        return [f"{self.results}/analyses/{name}.{kind}" for name in self.analyses for kind in ("csv", "png")]

    def measured(self, analysis: str) -> list[str]:
        """Return the files of an analysis' measurements, one per milestone; empty if it reads no milestone."""
        return [part_of(self.results, analysis, *one) for one in places(self.analyses[analysis], self.experiment)]

    def analysed(self, analysis: str) -> list[str]:
        """All that the table of an analysis is made of."""
        kinds = {"strategies": "milestones/{}/milestone.json", "evaluations": "evaluation/{}.json"}
        read = kinds.get(ANALYSES.entry(analysis).facts["reads"], "")
        each = product(self.trainings, self.steps) if read else ()
        return self.measured(analysis) + [f"{self.training(*one)}/{read.format(step)}" for one, step in each]

    def end_of(self, wildcards: Any) -> list[str]:
        """The record of a training's end, for what looks at its last milestone."""
        folder = self.training(wildcards.method, wildcards.seed)
        return [f"{folder}/training.json"] if wildcards.step == self.steps[-1] else []

    @property
    def methods(self) -> list[str]:
        """Names of the methods."""
        return list(self.experiment.methods)

    @property
    def trainings(self) -> list[tuple[str, int]]:
        """Method and seed of every training."""
        return [(method, seed) for method in self.methods for seed in self.experiment.seeds]

    @property
    def steps(self) -> list[str]:
        """All milestones as files name them: 7 digits."""
        return names(self.experiment.milestones)

    @property
    def gpus(self) -> int:
        """GPUs that a computing job asks for."""
        return gpus_per_job(self.experiment)

    def frozen(self, wildcards: Any, output: Any) -> str:
        """The configuration file of a job: a parameter that Snakemake does not compare, see `arguments`."""
        return self.config.as_posix()

    def sampling_options(self, wildcards: Any, output: Any) -> str:
        """Arguments of ``kairos sample`` that state the whole sampling section; not compared either."""
        sampling = {name: value for name, value in self.plain["sampling"].items() if name != "shards"}
        sampling |= {"grid_images": sampling.pop("grid")}
        written = {name: json.dumps(sampling[name]) for name in sampling if not isinstance(sampling[name], str)}
        sampling |= written  # null too
        return " ".join(f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in sampling.items())

    @cached_property
    def segments(self) -> list[Segment]:
        """The jobs of a training, in order."""
        parts = self.experiment.segments
        ends = [[], *(names(part[-1:]) for part, _ in pairwise(parts))]
        count, numbered = len(parts), enumerate(zip(parts, ends), 1)
        return [Segment(*its, number, f"_{number}" * (count > 1), number == count) for number, its in numbered]

    def shards(self, stage: str) -> list[str]:
        """The parts that a job of a stage joins, as files name them: ``1of2`` ...; none where it is not split."""
        latent = self.experiment.autoencoder.kind != "none"
        counts = {"sample": self.experiment.sampling.shards, "encode": self.experiment.autoencoder.shards * latent}
        count = counts.get(stage, 0)
        return [f"{number}of{count}" for number in range(1, count + 1)] if count > 1 else []

    def rules(self, stage: str) -> list[str]:
        """The rules of a stage: its own, and the one of its parts, whose results lie apart and go when joined."""
        return [stage, f"{stage}_parts"] if self.shards(stage) else [stage]

    def images(self, segment: Segment) -> str:
        """The group in which a scheduler runs the sampling and evaluating of a segment as one job."""
        return f"images_{{method}}_seed{{seed}}{segment.name}"

    def sharing(self, segment: Segment) -> Callable[[Any], str] | None:
        """The group of the trainings that a scheduler runs as one job, by wildcards; the same ones in every run.

        One that has diverged is left alone: it would take what the others have made down with it, each time.
        """
        together = self.experiment.training.trainings_per_gpu
        if together == 1:
            return None
        numbers = {training: number // together for number, training in enumerate(self.trainings)}

        def group(wildcards: Any) -> str:
            training = wildcards.method, int(wildcards.seed)
            diverged = not read_progress(Path(self.training(*training))).get("again", True)
            alone = f"_alone_{wildcards.method}_seed{wildcards.seed}" if diverged else ""
            return f"trainings{segment.name}_{numbers[training]}{alone}"

        return group

    def matching(self, values: list[Any]) -> str:
        """Wildcard constraint: one of these."""
        return "|".join(re.escape(str(value)) for value in values)

    def depends(self, stage: str) -> dict[str, Callable[[Any], Any]]:
        """``params:`` of a stage, by wildcards: every field and the code that its results depend on.

        As functions, since code is looked at for the stages alone whose jobs there are: in a job, for one.
        """
        of_training = stage in dependencies.TRAINING_STAGES
        of_method = cache(lambda method: dependencies.collect_params(stage, self.plain, method))

        def of_wildcards(name: str) -> Callable[[Any], Any]:
            return lambda wildcards: of_method(wildcards.method if of_training else None)[name]

        names, _ = dependencies.find_dependencies(stage, self.plain, self.methods[0])
        return {name: of_wildcards(name) for name in (*names, "code")}

    def training(self, method: str, seed: int | str) -> str:
        """The folder of a training."""
        return f"{self.results}/{method}/seed{seed}"

    def params(self, rule: str, segment: Segment | None = None) -> dict[str, Any]:
        """``params:`` of a rule: what its stage `depends` on, its configuration, and the file for the time it took.

        That file is no output, since no two are the same: it names the machine too.
        """
        stage = rule.removesuffix("_parts")
        job = ".{method}.seed{seed}.{step}" if stage.startswith("measure_") else ""
        job = job if segment is None else f"/{{method}}_seed{{seed}}/{segment.number}"
        timing = f"{stage}{job}" if rule == stage else f"{PARTS}/{stage}{job}.{{shard}}"
        return {**self.depends(stage), "timing": f"{self.results}/timing/{timing}.json", "config": self.frozen}

    def sums(self, stage: str, method: str, seed: int | str, segment: Segment) -> str:
        """Checksums of what a job of a training has made: in one folder, which DVC's report stage can depend on."""
        return f"{self.results}/sums/{stage}/{method}_seed{seed}/{segment.number}.txt"

    def everything(self) -> list[str]:
        """All records that the report and the tracking read."""
        records = ("dataset/manifest", "autoencoder/manifest", "extractor/manifest", "reference/reference")
        of_step = ("milestones/{}/milestone.json", "samples/{}.png", "evaluation/{}.json")
        each = ["training.json", "metrics.jsonl", *(name.format(step) for step in self.steps for name in of_step)]
        jobs = product(dependencies.TRAINING_STAGES, self.trainings, self.segments)
        return [
            *(f"{self.results}/{record}.json" for record in records),
            *(f"{self.training(*training)}/{name}" for training in self.trainings for name in each),
            *(self.sums(stage, *training, segment) for stage, training, segment in jobs),
            *self.tables,
        ]

    def jobs(self) -> dict[str, int]:
        """Number of jobs of each stage."""
        parts = len(self.trainings) * len(self.segments)
        counts: dict[str, int] = {}
        for stage in (*self.shared, *dependencies.TRAINING_STAGES):
            number = parts if stage in dependencies.TRAINING_STAGES else 1
            counts |= dict(zip(self.rules(stage), (number, number * len(self.shards(stage)))))
        counts |= {f"measure_{name}": len(self.measured(name)) for name in self.analyses if self.measured(name)}
        counts |= {f"analyse_{name}": 1 for name in self.analyses}
        return counts | {"report": 1} | ({"track": 1} if self.experiment.tracking.enabled else {})


def names(steps: tuple[int, ...]) -> list[str]:
    """Steps as folders and files name them: 7 digits."""
    return [f"{step:07d}" for step in steps]


def lay_out(experiment: Experiment) -> Layout:
    """Settle what an experiment leaves open, freeze it and lay it out."""
    settled, said = experiment.settled()
    return Layout(settled, freeze(settled), said + lacking(settled))


def frozen() -> Layout:
    """The experiment that this process's controller has frozen."""
    path = os.environ[FROZEN]
    return Layout(load(path), Path(path))
