"""Outputs of an experiment's stages: which exist, and which samples and evaluations have the experiment's settings."""

import os
import textwrap
import time
from functools import cached_property
from pathlib import Path
from typing import Any

from kairos.files import glance, list_by_step
from kairos.report.outdated import read_samples_protocol
from kairos.status.run_progress import Outline, find_first_snapshot, read_last_lines

_SHARED_HASHES = ("extractor_hash", "reference_hash")  # hashes in reference.json and in an evaluation's protocol
_STAGE_RECORDS = {  # file in the results, by stage; if it exists, the stage is complete
    "prepared": "dataset/manifest.json",
    "autoencoder": "autoencoder/manifest.json",
    "latents": "latents/manifest.json",
    "extractor": "extractor/manifest.json",
    "reference": "reference/reference.json",
    "report": "report.html",
    "tracked": "tracking.json",
}
_STAGE_LOGS = {"prepared": "prepare", "latents": "encode", "tracked": "track"}  # other logs are named like the stage
_ERROR = "kairos: "  # begins the message of a command that fails
_LINE_LENGTH = 120  # columns of a terminal
_LOG_INTERVAL = 60.0  # largest age in seconds of the last line of a job that is running; most write one every 10 s


class RunOutputs:
    """Samples and evaluations of a training run.

    A file is valid if it comes from the present snapshots, and both have the experiment's settings. If only a folder of
    results is known, there are no settings to compare with, and all files are valid.

    Args:
        outline: the experiment.
        method, seed: the training run.

    Attributes:
        folder: folder of the training run.
    """

    def __init__(self, outline: Outline, method: str, seed: int):
        self.folder = outline.run_folder(method, seed)
        self._outline, self._method, self._seed = outline, method, seed

    @cached_property
    def samples(self) -> dict[str, bool]:
        """Validity of each file of samples, by the step in its name, such as ``0000400``; True: valid."""
        paths = list_by_step(self.folder / "samples", ".npz")
        return {path.stem: self._are_samples_valid(path) for path in paths}

    @cached_property
    def evaluations(self) -> dict[str, bool]:
        """Validity of each evaluation, by the step in its name, such as ``0000400``; True: valid."""
        paths = list_by_step(self.folder / "evaluation", ".json")
        return {path.stem: self._is_evaluation_valid(path) for path in paths}

    @property
    def last_evaluation(self) -> Path | None:
        """Path of the valid evaluation of the highest step; None: there is none."""
        paths = reversed(list_by_step(self.folder / "evaluation", ".json"))
        return next((path for path in paths if self.evaluations.get(path.stem)), None)

    @property
    def last_grid(self) -> Path | None:
        """Path of the PNG of the highest step whose samples are valid, see `_is_grid_valid`; None: there is none."""
        paths = reversed(list_by_step(self.folder / "samples", ".png"))
        return next((path for path in paths if self._is_grid_valid(path)), None)

    def _are_samples_valid(self, path: Path) -> bool:
        """Return True if a file of samples comes from the present run and has the experiment's sampling settings.

        Without an experiment file all files are valid. Otherwise a damaged file is not valid.
        """
        expected = self._outline.expected
        if expected is None:
            return True
        protocol = read_samples_protocol(path)
        return self._is_of_present_run(path, protocol) and not expected.find_sampling_changes(protocol)

    def _is_evaluation_valid(self, path: Path) -> bool:
        """Return True if an evaluation comes from the present run and reference and has the experiment's settings.

        Without an experiment file all files are valid. Otherwise a damaged evaluation is not valid. The hashes of
        extractor and reference statistics must agree with reference.json. A hash that reference.json lacks is not
        compared; a hash that only the evaluation lacks makes it invalid.
        """
        expected = self._outline.expected
        if expected is None:
            return True
        evaluation, reference = glance(path), self._outline.reference
        protocol = evaluation.get("protocol", {})
        for name in _SHARED_HASHES:
            if name in reference and protocol.get(name) != reference[name]:
                return False
        if not self._is_of_present_run(path, protocol):  # also a damaged evaluation, which has no protocol
            return False
        return not expected.find_evaluation_changes(evaluation)

    def _is_grid_valid(self, path: Path) -> bool:
        """Return True if the samples of an image grid are valid.

        If the samples are deleted, the settings of the run must be the experiment's; nothing else is compared. Without
        an experiment file all files are valid.
        """
        if path.stem in self.samples:
            return self.samples[path.stem]
        if self._outline.expected is None:
            return True
        has_present_settings = self._identity != ""
        return has_present_settings

    def _is_of_present_run(self, path: Path, protocol: dict[str, Any]) -> bool:
        """Return True if the file's name is the step of a milestone, and its protocol contains the run's identity.

        A file without an identity does not match. A name that is no number raises ValueError.
        """
        step, identity = int(path.stem), protocol.get("identity")
        return step in self._outline.milestones and identity is not None and identity == self._identity

    @cached_property
    def _identity(self) -> str:
        """Identity in the record of the run's first snapshot; empty if it does not have the experiment's settings.

        It is also empty without an experiment file, snapshot or recorded identity.
        """
        expected, record_file = self._outline.expected, find_first_snapshot(self.folder)
        if expected is None or record_file is None or expected.find_changes(self._method, self._seed, record_file):
            return ""
        return str(expected.snapshot_record(record_file).get("identity", ""))


def summarise_stages(outline: Outline, outputs: list[RunOutputs]) -> str:
    """Return lines of text: complete and missing stages, messages of missing stages, counts of samples and evaluations.

    A stage is complete if its file in `_STAGE_RECORDS` exists, whatever its settings are. `outputs` contains all
    training runs.
    """
    complete = [stage for stage, record in _STAGE_RECORDS.items() if (outline.results / record).is_file()]
    missing = [stage for stage in _STAGE_RECORDS if stage not in complete]
    stages = f"complete: {', '.join(complete) or 'none'}; missing: {', '.join(missing) or 'none'}"
    expected_count = len(outline.trainings) * len(outline.milestones)
    stage_messages = _find_stage_messages(outline.results / "logs", missing)
    samples = _count_files("samples", [run.samples for run in outputs], expected_count)
    evaluations = _count_files("evaluations", [run.evaluations for run in outputs], expected_count)
    return "\n".join([stages, *stage_messages, f"{samples}, {evaluations}"])


def _find_stage_messages(logs: Path, stages: list[str]) -> list[str]:
    """Return lines with the error, or else the progress, at the end of each stage's log, without the stage's name.

    An error is the text ``failed: ...`` in lines of at most 120 columns. Progress is the line ``now: ...``, cut at 120
    columns: the last line, whatever it is, of a log written in the last minute. A stage with neither has no line.
    """
    messages = []
    for stage in stages:
        log = logs / f"{_STAGE_LOGS.get(stage, stage)}.log"
        lines = read_last_lines(str(log))
        # an error ends the command, so that all lines after it belong to its message
        error_starts = [index for index, line in enumerate(lines) if line.startswith(_ERROR)]
        if error_starts:
            message = " ".join(line.strip() for line in lines[error_starts[0] :])
            messages += textwrap.wrap(f"failed: {message.removeprefix(_ERROR)}", _LINE_LENGTH)
        elif lines and lines[-1] and time.time() - os.path.getmtime(log) < _LOG_INTERVAL:
            messages.append(f"now: {lines[-1].strip()}"[:_LINE_LENGTH])
    return messages


def _count_files(name: str, files_of_runs: list[dict[str, bool]], expected_count: int) -> str:
    """Return the number of valid files as text, such as ``samples 3 of 8 (1 outdated)``.

    Files that are not valid are counted as outdated; without them the bracket is left out. `files_of_runs` contains the
    validity of each file, by step, for each training run. `expected_count` is for the whole experiment; 0: unknown.
    """
    validity = [is_valid for files in files_of_runs for is_valid in files.values()]
    valid_count, outdated_count = validity.count(True), validity.count(False)
    of_expected = f" of {expected_count}" if expected_count else ""
    outdated = f" ({outdated_count} outdated)" if outdated_count else ""
    return f"{name} {valid_count}{of_expected}{outdated}"
