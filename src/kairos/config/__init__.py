"""Experiment files: fields, defaults and validation errors (see `experiment.Experiment`)."""

from kairos.config.experiment import REFERENCE_ROWS, Experiment, freeze, load, validate
from kairos.config.reading import apply_extends, find_experiment_files

__all__ = [
    "REFERENCE_ROWS",
    "Experiment",
    "apply_extends",
    "find_experiment_files",
    "freeze",
    "load",
    "validate",
]
