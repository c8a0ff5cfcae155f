"""``kairos strategies list``: print all samplers, weightings, couplings and presets with their options."""

import argparse
import json
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from kairos_timesteps import options
from kairos_timesteps.base import FixedDensity
from kairos_timesteps.components import COUPLINGS, SAMPLERS, WEIGHTINGS
from kairos_timesteps.preset_table import TABLE as PRESETS
from kairos_timesteps.registry import Registry

# sampler+weighting pairs of papers and their code; a sampler or weighting alone is a method as well
COMBINATIONS = {
    "speed+change_aware": "SpeeD (Wang et al. 2025)",
    "speed_official+change_aware_official": "SpeeD's public code",
    "speed_v1+p2": "SpeeD's first public code",
    "adaptive+min_snr": "Kim et al. 2025, table 3",
    "edm_log_normal+edm": "EDM (Karras et al. 2022), with --process edm",
    "edm_log_normal+edm2": "EDM2 (Karras et al. 2024), with --process edm",
}

_SHARED_OPTIONS = options.default_values(FixedDensity)  # options of every fixed sampler
_WIDTH = 118  # columns of name and text


def run(arguments: argparse.Namespace) -> None:
    """Print samplers, weightings, couplings, presets, unavailable strategies, and combinations, each under a title.

    Each name is followed by its description, and below it by its options with their defaults.
    """
    unavailable = {**SAMPLERS.unavailable, **WEIGHTINGS.unavailable}
    shared_options = describe_options(_SHARED_OPTIONS)  # fixed samplers are the subclasses of FixedDensity
    samplers_title = f"samplers, with options and defaults; fixed ones also have {shared_options}"
    sections: dict[str, Collection[tuple[str, str]]] = {
        samplers_title: list(_entries(SAMPLERS)),
        "weightings, with options and defaults": list(_entries(WEIGHTINGS)),
        "couplings of noise with images, with options and defaults": list(_entries(COUPLINGS)),
        "presets, options of other trainers with their defaults; kairos strategies show NAME": list(_presets()),
        "not available, with the reason": unavailable.items(),
        "combinations from papers; every sampler can be combined with every weighting": COMBINATIONS.items(),
    }
    name_width = max(len(name) for name, _ in chain(*sections.values()))
    for title, entries in sections.items():
        print(title)
        _print_entries(entries, name_width)
        print()
    print("kairos strategies show NAME prints density and weights of a strategy")


def _print_entries(entries: Iterable[tuple[str, str]], name_width: int) -> None:
    """Print entries of a name and a text in two columns, names `name_width` wide; the text is wrapped.

    An entry without a name is the options of the entry above, and its text is indented. An entry without a text prints
    no line.
    """
    for name, text in entries:
        indent = "" if name else "  "
        label = name
        for line in textwrap.wrap(text, _WIDTH - name_width):
            print(f"  {label:{name_width}}  {indent}{line}")
            label = ""  # only the first line has the name


def _entries(registry: Registry) -> Iterator[tuple[str, str]]:
    """Yield two entries per component: its name and description, then "" and its options with defaults as text.

    For fixed samplers, the options that all of them share are omitted. The second text is empty for a component without
    further options.
    """
    for name, entry in registry.items():
        yield name, entry.help
        omitted_options = _SHARED_OPTIONS if issubclass(entry.component, FixedDensity) else {}
        defaults = options.default_values(entry.component)
        listed_options = {option: value for option, value in defaults.items() if option not in omitted_options}
        yield "", describe_options(listed_options)


def _presets() -> Iterator[tuple[str, str]]:
    """Yield name and formula of each preset, and then, if it has options, "" and the options with defaults as text."""
    for row in PRESETS:
        yield row.name, row.help
        if row.options:
            yield "", describe_options(row.options)


def describe_options(values: Mapping[str, Any]) -> str:
    """Return options and values as text, such as ``k=5, tau=null``; options that all fixed samplers share come last.

    Floats have at most 15 significant digits, texts have no quotation marks, and other values are JSON.
    """
    special_options = [option for option in values if option not in _SHARED_OPTIONS]
    shared_options = [option for option in values if option in _SHARED_OPTIONS]
    texts = []
    for option in special_options + shared_options:
        value = values[option]
        text = f"{value:.15g}" if isinstance(value, float) else json.dumps(value).strip('"')
        texts.append(f"{option}={text}")
    return ", ".join(texts)
