"""Job of the pipeline: its experiment, stage, training run, segment and shard, from the arguments of a command."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kairos.cli.common import add_config, demand_option
from kairos.files import DamagedError, check_files, glance, read_json, sha256_file, write_record
from kairos.progress import log
from kairos.shards import Shard
from kairos_timesteps.errors import ConfigError

if TYPE_CHECKING:
    from kairos.config import Experiment
    from kairos.validity import Result, Validity
    from kairos.workflow.layout import Layout, Segment


@dataclass(frozen=True)
class Job:
    """A job of the pipeline: a stage of an experiment, or a part of it.

    Attributes:
        layout: the experiment and its files.
        stage: name of the stage.
        method, seed: the training run; None for a stage that all runs share.
        segment: segment of the training run; None for a stage that all runs share.
        shard: the shard that the job computes; None: it computes everything, or merges shards.
    """

    layout: "Layout"
    stage: str
    method: str | None = None
    seed: int | None = None
    segment: "Segment | None" = None
    shard: Shard | None = None

    @property
    def experiment(self) -> "Experiment":
        """The experiment."""
        return self.layout.experiment

    @property
    def results(self) -> Path:
        """Folder of the experiment's results."""
        return Path(self.layout.results)

    @property
    def run_folder(self) -> Path:
        """Folder of the training run."""
        return Path(self.layout.training_folder(str(self.method), str(self.seed)))

    @property
    def snapshots(self) -> list[str]:
        """Names of the segment's snapshots, or of all snapshots of the run."""
        return self.segment.snapshots if self.segment else self.layout.snapshots

    @cached_property
    def validity(self) -> "Validity":
        """Present settings, code and inputs of the experiment's results."""
        from kairos.validity import Validity

        return Validity(self.experiment, self.results, reads_outside=True)

    def compute(self, result: "Result", write: Callable[[], None], files: tuple[Path, ...] = ()) -> None:
        """Compute a result and record what it was computed from, unless it is up to date, see `select_outdated`.

        Args:
            result: the result.
            write: function that writes the files of the result.
            files: files of which the record contains the hashes; empty: `write` writes the record itself.
        """
        outdated = self.select_outdated([result])
        if result in outdated:
            write()
            self.complete_record(result, outdated[result], *files)

    def select_outdated(self, results: list["Result"]) -> dict["Result", dict[str, Any]]:
        """Return the results that have to be computed, with what they will be computed from; log the others.

        A result has to be computed unless its files are intact, and settings, code and inputs are those in its record.
        Damage is logged.

        Raises:
            ConfigError: code or files outside of the results have changed since the pipeline planned the job.
            DamagedError: a file of samples or measurements that a result needs differs from its record.
        """
        outdated = {}
        for result in results:
            if self.validity.is_unchanged(result) and self._has_intact_files(result):
                log(f"{self.validity.path(result)}: settings, code and inputs are unchanged, nothing to compute")
            else:
                outdated[result] = self.validity.describe(result)
                self.check_plan(result.stage, outdated[result]["key"])
                self._check_inputs(result)
        return outdated

    def _check_inputs(self, result: "Result") -> None:
        """Compare samples and measurements that a result needs with the hashes in their records.

        A killed job may have left other files.

        Raises:
            DamagedError: a file differs.
        """
        for needed in self.validity.list_needed(result):
            if needed.stage == "sample" or needed.stage.startswith("measure_"):
                path = self.validity.path(needed)
                remedy = f"compute it again: snakemake --configfile FILE --forcerun {path}"
                check_files(path.parent, self.validity.record(needed).get("files", {}), remedy)

    def has_complete_training(self) -> bool:
        """Return True if all snapshots of the job's training run or segment are unchanged and intact.

        After the last segment, training.json must also belong to the last snapshot, and metrics and checkpoint exist.
        """
        from kairos.validity import Result

        results = [Result("train", self.method, self.seed, name) for name in self.snapshots]
        if not all(self.validity.is_unchanged(result) and self._has_intact_files(result) for result in results):
            return False
        if self.segment is not None and not self.segment.is_last:
            return True
        folder, snapshot_record = self.run_folder, self.validity.record(results[-1])
        run_record = glance(folder / "training.json")
        has_files = all((folder / name).is_file() for name in ("metrics.jsonl", "checkpoint.pt"))
        last = (snapshot_record["identity"], snapshot_record["step"])
        is_of_run = (run_record.get("identity"), run_record.get("steps")) == last
        return has_files and is_of_run

    def _has_intact_files(self, result: "Result") -> bool:
        try:
            check_files(
                self.validity.path(result).parent, self.validity.record(result).get("files", {}), "it is computed again"
            )
        except DamagedError as error:
            log(str(error))
            return False
        return True

    def complete_record(self, result: "Result", computed_from: dict[str, Any], *files: Path, **fields: Any) -> None:
        """Add to a result's record what the result was computed from.

        With `files`, the record is created first, with their hashes and `fields`. Without, the stage has written it.
        """
        path = self.validity.path(result)
        if files:
            hashes = {file.relative_to(path.parent).as_posix(): sha256_file(file) for file in files}
            write_record(path, {"files": hashes, **fields})
        self.validity.add_computed_from(result, computed_from)

    def check_plan(self, name: str, key: str) -> None:
        """Check that code and files outside of the results are those with which the pipeline has planned a job.

        Args:
            name: name of the stage or, of training, ``train.METHOD``.
            key: the stage's key in this process.

        Raises:
            ConfigError: another key was planned.
        """
        from kairos.workflow.layout import find_planned_layout

        layout = find_planned_layout(self.layout.config_file)
        if layout is not None and read_json(str(layout.plan_file))["keys"].get(name, key) != key:
            raise ConfigError(
                f"{name}: code or files outside of the results have changed since this run began; run again"
            )

    @property
    def timing_file(self) -> Path | None:
        """File of the job's times; None for a call by hand that computes several segments."""
        run = f"{self.method}_seed{self.seed}" if self.method else None
        if run is not None and self.segment is None and len(self.layout.segments) > 1:
            return None
        segment = self.segment.number if self.segment else 1
        return Path(self.layout.timing_file(self.stage, run, segment, self.shard.name if self.shard else None))

    def list_finished_shards(self, snapshot: str = "") -> list[Path]:
        """Return the paths of the shards to merge; empty if one is missing, or if the job computes a shard."""
        if self.shard is not None:
            return []
        paths = []
        for shard in self.layout.shards(self.stage):
            method, seed = str(self.method), str(self.seed)  # unused for stages that all runs share
            paths.append(Path(self.layout.shard_path(self.stage, shard, method, seed, snapshot)))
        return paths if all(path.exists() for path in paths) else []


def add_job(parser: argparse.ArgumentParser, required: bool = True, seed: str = "seed of the training run") -> None:
    """Declare ``--config``, ``--method``, ``--seed`` and ``--segment``, by which the pipeline calls a job of a run.

    Args:
        parser: parser of the command.
        required: False for commands that are also called without an experiment file.
        seed: help of ``--seed``.
    """
    add_config(parser, required)
    parser.add_argument("--method", required=required, metavar="M", help="name of a method of the experiment")
    parser.add_argument("--seed", required=required, type=int, metavar="N", help=seed)
    segment = "segment of the training run, from 1 (training.segments); default: the whole run"
    parser.add_argument("--segment", type=int, metavar="K", help=segment)


def open_job(arguments: argparse.Namespace) -> Job:
    """Return the job that the arguments of `add_job` select, and ``--shard`` if the command has it.

    Raises:
        ConfigError: the experiment is not valid, or does not have the method or the segment; or the seed is negative.
    """
    from kairos.config import load
    from kairos.workflow.layout import Layout

    layout = Layout(load(arguments.config), arguments.config)
    method, seed, number = (getattr(arguments, name, None) for name in ("method", "seed", "segment"))
    if method is not None:
        demand_option(method in layout.methods, "method", repr(method), ", ".join(layout.methods))
    if seed is not None:
        demand_option(seed >= 0, "seed", seed, "0 or more")
    segment = None
    if number is not None:
        count = len(layout.segments)
        demand_option(1 <= number <= count, "segment", number, f"1 to {count} (training.segments)")
        segment = layout.segments[number - 1]
    shard = getattr(arguments, "shard", None)
    if shard is not None and not arguments.out:
        names = layout.shards(arguments.command)
        demand_option(shard.name in names, "shard", shard.name, f"{', '.join(names) or 'none'}, of the experiment")
    return Job(layout, arguments.command, method, seed, segment, shard)


def check_command_form(
    arguments: argparse.Namespace, options_by_hand: tuple[str, ...], suppressed: tuple[str, ...] = ()
) -> None:
    """Check a command that has two forms: ``--config``, ``--method`` and ``--seed``, or options that name files.

    Args:
        arguments: arguments of the command.
        options_by_hand: options that are not allowed with ``--config``, by their names in `arguments`.
        suppressed: those of them without a default, which are absent from `arguments` unless they are set.

    Raises:
        ConfigError: options of the two forms are combined, or ``--config`` lacks the method or the seed.
    """
    if arguments.config is None:
        for option in ("method", "segment"):
            demand_option(getattr(arguments, option) is None, option, getattr(arguments, option), "with --config only")
        return
    for option in ("method", "seed"):
        demand_option(getattr(arguments, option) is not None, option, "none", "a value with --config")
    for option in options_by_hand:
        value = getattr(arguments, option, None)
        is_set = hasattr(arguments, option) if option in suppressed else value not in (None, [])
        demand_option(not is_set, option.replace("_", "-"), value, "none with --config, whose experiment decides it")
