"""Experiment files: what may be configured, its defaults, and clear refusals (see `experiment.Experiment`)."""

from kairos.config.experiment import REFERENCE_ROWS, Experiment, freeze, load, validate
from kairos.config.reading import extended, files_in

__all__ = ["REFERENCE_ROWS", "Experiment", "extended", "files_in", "freeze", "load", "validate"]
