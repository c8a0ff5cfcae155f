"""Measurements on a training by name: called at every step that they ask for, written to metrics.jsonl."""

from kairos.registry import Registry

PROBES = Registry("probe")
