"""``kairos strategies``: list strategies, show density and weights of one, or show SpeeD's process increments.

Commands that show fixed strategies do not import torch.
"""

import argparse
import importlib
from pathlib import Path

from kairos.cli.common import add_plugins
from kairos.increments import PUBLISHED_R

# action: (module in this package, help in one line)
_ACTIONS = {
    "list": ("listing", "list samplers, weightings, couplings, presets, and combinations from papers"),
    "show": ("show", "show p(t), w(t) and p(t) w(t) of a strategy or a preset as table, CSV or figure"),
    "increments": ("increments", "show SpeeD's process increments: acceleration, deceleration and convergence"),
}


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the actions `list`, `show` and `increments`, each with its arguments; one of them is required.

    The parsed arguments have the action in `action`. All commands' functions take `name`, which is not used here.
    """
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    parsers = {}
    for action, (_, help) in _ACTIONS.items():
        parsers[action] = actions.add_parser(action, help=help, description=help[0].upper() + help[1:] + ".")
    _add_show_arguments(parsers["show"])
    _add_increments_arguments(parsers["increments"])
    for action in ("list", "show"):
        add_plugins(parsers[action])
    for action in ("show", "increments"):
        add = parsers[action].add_argument
        add("--format", choices=("table", "csv", "png"), help="default: the suffix of --out, else table")
        add("--out", type=Path, metavar="F", help="file to write; default: the terminal")


def _add_show_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `show` alone.

    They are the strategy, process and prediction target, options, context, the strategy to compare with, progress of a
    curriculum, and checkpoint. The parsed arguments also have `set_option`: the name of the option, ``set``, that error
    messages report for values in `set`. `show.compared_arguments` replaces both.
    """
    add = parser.add_argument
    parser.set_defaults(set_option="set")
    strategy = (
        "one name is a sampler or a weighting, combined with weighting none or sampler uniform; or a preset, an "
        "option of another trainer such as kohya:shift, in that trainer's time; optional with --checkpoint"
    )
    add("strategy", nargs="?", metavar="SAMPLER[+WEIGHTING]", help=strategy)
    add("--process", metavar="P", help="discrete (default), edm, flow or vp")
    add("--schedule", metavar="S", help="schedule of discrete: linear (default), cosine or quadratic")
    add("--timesteps", type=int, metavar="T", help="number of timesteps of discrete (1000)")
    add("--prediction", metavar="P", help="prediction target of discrete and vp: epsilon (default), x0 or v")
    option = "an option, e.g. sampler.k=5, weighting.gamma=1, process.shift=3, or k=5 if it is unambiguous; repeatable"
    add("--set", action="append", default=[], metavar="OPTION=VALUE", help=option)
    properties = "a property of the samples, e.g. tokens=4096 for shifts that depend on it; repeatable"
    add("--context", action="append", default=[], metavar="NAME=VALUE", help=properties)
    add("--compare", metavar="NAME", help="another strategy or preset to compare with, in the same time")
    add("--compare-set", action="append", default=[], metavar="OPTION=VALUE", help="an option of --compare; repeatable")
    add("--progress", type=float, metavar="0..1", help="fraction of a curriculum that has passed, for curricula")
    recorded = "folder of a training run or of a snapshot, or a checkpoint: show the recorded strategy"
    add("--checkpoint", type=Path, metavar="F", help=recorded)


def _add_increments_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `increments` alone.

    They are the process with its schedule and number of timesteps, and the magnitude at which convergence begins.
    """
    add = parser.add_argument
    add("--process", default="vp", metavar="P", help="vp (default), ve, edm or flow")
    add("--schedule", metavar="S", help="schedule of vp: linear (default), cosine or quadratic")
    add("--timesteps", type=int, default=1000, metavar="T", help="number of timesteps (1000)")
    magnitude = f"magnitude at which convergence begins ({PUBLISHED_R}, the paper's tau = 700)"
    add("--r", type=float, default=PUBLISHED_R, metavar="R", help=magnitude)


def run(arguments: argparse.Namespace) -> None:
    """Import the plugins of ``--plugin``, and run the action: `list`, `show` or `increments`.

    All of them print text by default. With ``--format`` or ``--out``, `show` and `increments` print or write a CSV, or
    write a figure.

    Raises:
        ConfigError: a plugin cannot be imported, or an argument of the action is not allowed.
    """
    plugins = getattr(arguments, "plugin", [])  # `increments` has no plugins
    if plugins:
        from kairos.config.plugins import load_plugins

        load_plugins(plugins)
    module, _ = _ACTIONS[arguments.action]
    importlib.import_module(f"kairos.cli.strategies.{module}").run(arguments)
