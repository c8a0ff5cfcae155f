"""``kairos strategies list``: print all samplers, weightings, couplings and presets with their options."""

import argparse
import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from kairos_timesteps import options
from kairos_timesteps.base import FixedDensity
from kairos_timesteps.components import COUPLINGS, SAMPLERS, WEIGHTINGS
from kairos_timesteps.preset_table import TABLE
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

_COMMON = options.dump(FixedDensity.Options())  # options of every fixed sampler


def run(arguments: argparse.Namespace) -> None:
    """Print samplers, weightings, couplings, presets, unavailable strategies, and combinations."""
    presets = [row.name for row in TABLE]
    width = max(map(len, (*SAMPLERS, *WEIGHTINGS, *SAMPLERS.unavailable, *COMBINATIONS, *presets)))
    for title, entries in (
        (f"samplers, with options and defaults; fixed ones also have {describe_options(_COMMON)}", _entries(SAMPLERS)),
        ("\nweightings, with options and defaults", _entries(WEIGHTINGS)),
        ("\ncouplings of noise with images, with options and defaults", _entries(COUPLINGS)),
        ("\npresets, options of other trainers with their defaults; kairos strategies show NAME", _presets()),
        ("\nnot available, with the reason", {**SAMPLERS.unavailable, **WEIGHTINGS.unavailable}.items()),
        ("\ncombinations from papers; every sampler can be combined with every weighting", COMBINATIONS.items()),
    ):
        print(title)
        for name, text in entries:
            indent = "" if name else "  "
            for number, line in enumerate(textwrap.wrap(text, 118 - width)):
                print(f"  {'' if number else name:{width}}  {indent}{line}")
    print("\nkairos strategies show NAME prints density and weights of a strategy")


def _entries(registry: Registry) -> Iterator[tuple[str, str]]:
    """Yield name and description of each component, and its options under an empty name.

    Options that all fixed samplers share are omitted.
    """
    for name, entry in registry.items():
        yield name, entry.help
        shared = _COMMON if issubclass(entry.load(), FixedDensity) else {}
        defaults = options.dump(entry.options())
        yield "", describe_options({option: value for option, value in defaults.items() if option not in shared})


def _presets() -> Iterator[tuple[str, str]]:
    """Yield name and formula of each preset, and its options under an empty name."""
    for row in TABLE:
        yield row.name, row.help
        if row.options:
            yield "", describe_options(row.options)


def describe_options(values: Mapping[str, Any]) -> str:
    """Return options and values as text, such as ``k=5, tau=null``; options that all fixed samplers share come last."""
    texts = []
    for option, value in sorted(values.items(), key=lambda item: item[0] in _COMMON):
        text = f"{value:.15g}" if isinstance(value, float) else json.dumps(value).strip('"')
        texts.append(f"{option}={text}")
    return ", ".join(texts)
