"""``kairos strategies``: which strategies there are, what each one trains on, and SpeeD's process increments.

Fixed strategies are shown without torch.
"""

import argparse
import importlib
from pathlib import Path

from kairos.cli.common import add_plugins

_ACTIONS = {
    "list": ("listing", "every sampler and weighting, and the combinations that papers use"),
    "show": ("show", "p(t), w(t) and p(t) w(t) of a strategy or a preset, as table, csv or picture"),
    "increments": ("increments", "SpeeD's process increments: areas of acceleration, deceleration and convergence"),
}


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """A subcommand per action."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    parsers = {}
    for action, (_, help) in _ACTIONS.items():
        parsers[action] = actions.add_parser(action, help=help, description=help[0].upper() + help[1:] + ".")

    add = parsers["show"].add_argument
    either = "a bare name may be either part, the other is then uniform or none; may be left out with --checkpoint"
    either += "; or a preset, another trainer's option such as kohya:shift, in that trainer's time"
    add("strategy", nargs="?", metavar="SAMPLER[+WEIGHTING]", help=either)
    add("--process", metavar="P", help="discrete (default), edm, flow or vp")
    add("--schedule", metavar="S", help="of discrete: linear (default), cosine or quadratic")
    add("--timesteps", type=int, metavar="T", help="of discrete: number of timesteps (1000)")
    add("--prediction", metavar="P", help="of discrete and vp: epsilon (default), x0 or v")
    option = "an option, e.g. sampler.k=5, weighting.gamma=1, process.shift=3; k=5 where one part has it; repeatable"
    add("--set", action="append", default=[], metavar="OPTION=VALUE", help=option)
    properties = "a property of the samples, e.g. tokens=4096 for shifts that depend on it; repeatable"
    add("--context", action="append", default=[], metavar="NAME=VALUE", help=properties)
    add("--compare", metavar="NAME", help="draw another strategy or preset with it, in the same time")
    add("--compare-set", action="append", default=[], metavar="OPTION=VALUE", help="an option of --compare; repeatable")
    add("--progress", type=float, metavar="0..1", help="place in the curriculum, for curricula")
    recorded = "a training's folder, milestone or checkpoint: show its strategy as it was there"
    add("--checkpoint", type=Path, metavar="F", help=recorded)

    add = parsers["increments"].add_argument
    add("--process", default="vp", metavar="P", help="vp (default), ve, edm or flow")
    add("--schedule", metavar="S", help="of vp: linear (default), cosine or quadratic")
    add("--timesteps", type=int, default=1000, metavar="T", help="number of timesteps (1000)")
    add("--r", type=float, default=5.0, metavar="R", help="magnitude where convergence begins (5)")

    for action in ("list", "show"):
        add_plugins(parsers[action])
    for action in ("show", "increments"):
        add = parsers[action].add_argument
        add("--format", choices=("table", "csv", "png"), help="default: what --out ends in, else table")
        add("--out", type=Path, metavar="F", help="file instead of the terminal")


def run(arguments: argparse.Namespace) -> None:
    """Do the action."""
    if plugins := getattr(arguments, "plugin", []):
        from kairos.config.plugins import load_plugins

        load_plugins(plugins)
    importlib.import_module(f"kairos.cli.strategies.{_ACTIONS[arguments.action][0]}").run(arguments)
