"""Samples and evaluations of a training, and which of them have the settings of the experiment."""

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from kairos.files import glance
from kairos.report.outdated import read_samples_protocol
from kairos.status.outline import Outline
from kairos.status.trainings import first_milestone

_SHARED_HASHES = ("extractor_hash", "reference_hash")


class Products:
    """Samples and evaluations of a training.

    A file is valid if it was made of the present training, and both have the experiment's settings. Where only a folder
    of results is known there are no settings to compare with, and all files are valid.

    Args:
        outline: the experiment.
        method, seed: the training.
    """

    def __init__(self, outline: Outline, method: str, seed: int):
        self.folder = outline.results / method / f"seed{seed}"
        self._outline, self._method, self._seed = outline, method, seed

    @cached_property
    def samples(self) -> dict[str, bool]:
        """The files of samples by step, as files name it: True for a valid one."""
        return {path.stem: self._samples_valid(path) for path in self.folder.glob("samples/[0-9]*.npz")}

    @cached_property
    def evaluations(self) -> dict[str, bool]:
        """The evaluations by step, as files name it: True for a valid one."""
        return {path.stem: self._evaluation_valid(path) for path in self.folder.glob("evaluation/[0-9]*.json")}

    @property
    def last_evaluation(self) -> Path | None:
        """The valid evaluation of the last step."""
        return _last(path for path in self.folder.glob("evaluation/[0-9]*.json") if self.evaluations.get(path.stem))

    @property
    def last_grid(self) -> Path | None:
        """The picture of valid samples of the last step."""
        return _last(path for path in self.folder.glob("samples/[0-9]*.png") if self._grid_valid(path))

    def _samples_valid(self, path: Path) -> bool:
        expected = self._outline.expected
        if expected is None:
            return True
        protocol = read_samples_protocol(path)
        return self._of_this_training(path, protocol) and not expected.find_sampling_changes(protocol)

    def _evaluation_valid(self, path: Path) -> bool:
        expected = self._outline.expected
        if expected is None:
            return True
        evaluation, reference = glance(path), self._outline.reference
        protocol = evaluation.get("protocol", {})
        if any(name in reference and protocol.get(name) != reference[name] for name in _SHARED_HASHES):
            return False
        return self._of_this_training(path, protocol) and not expected.find_evaluation_changes(evaluation)

    def _grid_valid(self, path: Path) -> bool:
        if path.stem in self.samples:
            return self.samples[path.stem]
        return self._outline.expected is None or bool(self._identity)  # only the picture is left of the samples

    def _of_this_training(self, path: Path, protocol: dict[str, Any]) -> bool:
        """True if a file belongs to a milestone that counts, by the step in its name and by its protocol."""
        step, identity = int(path.stem), protocol.get("identity")
        return step in self._outline.milestones and identity is not None and identity == self._identity

    @cached_property
    def _identity(self) -> str:
        """The identity of the training, empty where it has other settings than the experiment or no milestone."""
        expected, record = self._outline.expected, first_milestone(self.folder)
        if expected is None or record is None or expected.find_changes(self._method, self._seed, record):
            return ""
        return str(expected.snapshot_record(record).get("identity", ""))


def _last(paths: Iterable[Path]) -> Path | None:
    return max(paths, key=lambda path: (len(path.name), path.name), default=None)
