"""``kairos strategies list``."""

import argparse
import textwrap
from collections.abc import Mapping
from typing import Any

from kairos import options
from kairos.registry import Registry
from kairos.strategies.options import Fixed
from kairos.strategies.registries import SAMPLERS, WEIGHTINGS

# sampler+weighting as papers and their code use them together; a bare name is a method of its own as well
COMBINATIONS = {
    "speed+change_aware": "SpeeD (Wang et al. 2025)",
    "speed_official+change_aware_official": "SpeeD's public code",
    "speed_v1+p2": "SpeeD's first public code",
    "adaptive+min_snr": "Kim et al. 2025, table 3",
    "edm_log_normal+edm": "EDM (Karras et al. 2022), with --prediction x0",
    "edm_log_normal+edm2": "EDM2 (Karras et al. 2024), with --prediction x0",
}


_COMMON = options.dump(Fixed())  # what every fixed sampler can be told


def run(arguments: argparse.Namespace) -> None:
    """Print samplers, weightings, what cannot be had, and combinations."""
    width = max(map(len, (*SAMPLERS, *WEIGHTINGS, *SAMPLERS.refused, *COMBINATIONS)))
    print(f"samplers, with options and defaults; fixed ones also have {described(_COMMON)}")
    _print_entries(SAMPLERS, width)
    print("\nweightings, with options and defaults")
    _print_entries(WEIGHTINGS, width)
    print("\nknown, but not available")
    for name, reason in {**SAMPLERS.refused, **WEIGHTINGS.refused}.items():
        _print_entry(name, width, reason)
    print("\ncombinations of the papers; any sampler goes with any weighting")
    for name, source in COMBINATIONS.items():
        _print_entry(name, width, source)
    print("\nkairos strategies show NAME says what a strategy trains on")


def _print_entries(registry: Registry, width: int) -> None:
    for name, entry in registry.items():
        _print_entry(name, width, entry.help)
        values = options.dump(entry.options())
        own = {k: v for k, v in values.items() if not (issubclass(entry.options, Fixed) and k in _COMMON)}
        _print_entry("", width, described(own), indent="  ")


def _print_entry(name: str, width: int, text: str, indent: str = "") -> None:
    for number, line in enumerate(textwrap.wrap(text, 118 - width)):
        print(f"  {'' if number else name:{width}}  {indent}{line}")


def described(values: Mapping[str, Any]) -> str:
    """Options and their values as a user would write them, those of all samplers last: ``k=5, tau=null``."""
    words = {None: "null", True: "true", False: "false"}
    ordered = sorted(values.items(), key=lambda item: item[0] in _COMMON)
    return ", ".join(
        f"{key}={words[value] if value is None or isinstance(value, bool) else _number(value)}"
        for key, value in ordered
    )


def _number(value: Any) -> str:
    return f"{value:.15g}" if isinstance(value, float) else str(value)
