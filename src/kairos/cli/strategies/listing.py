"""``kairos strategies list``."""

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

# sampler+weighting as papers and their code use them together; a bare name is a method of its own as well
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
        ("\nknown, but not available", {**SAMPLERS.unavailable, **WEIGHTINGS.unavailable}.items()),
        ("\ncombinations of the papers; any sampler goes with any weighting", COMBINATIONS.items()),
    ):
        print(title)
        for name, text in entries:
            indent = "" if name else "  "
            for number, line in enumerate(textwrap.wrap(text, 118 - width)):
                print(f"  {'' if number else name:{width}}  {indent}{line}")
    print("\nkairos strategies show NAME says what a strategy trains on")


def _entries(registry: Registry) -> Iterator[tuple[str, str]]:
    """Each component's name and what it is; under no name its own options."""
    for name, entry in registry.items():
        yield name, entry.help
        shared = _COMMON if issubclass(entry.load(), FixedDensity) else {}
        yield (
            "",
            describe_options({key: value for key, value in options.dump(entry.options()).items() if key not in shared}),
        )


def _presets() -> Iterator[tuple[str, str]]:
    """Yield the name and the formula of each preset, and its options under no name."""
    for row in TABLE:
        yield row.name, row.help
        if row.options:
            yield "", describe_options(row.options)


def describe_options(values: Mapping[str, Any]) -> str:
    """Options and their values as a user would write them, those of all samplers last: ``k=5, tau=null``."""
    ordered = sorted(values.items(), key=lambda item: item[0] in _COMMON)
    written = ((key, f"{its:.15g}" if isinstance(its, float) else json.dumps(its).strip('"')) for key, its in ordered)
    return ", ".join(map("=".join, written))
