"""``kairos plan``: estimate the cost of an experiment, or of a folder of experiments, before anything runs."""

import argparse
import json
from pathlib import Path

from kairos.cli.common import demand

_FOR_ONE_FILE = ("steps_per_second", "tflops", "shape", "classes", "text")  # arguments that a folder does not take


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    file = (
        "experiment file, e.g. params.yaml, or a folder of experiment files: one table with GPU-hours of H100 and A100"
    )
    parser.add_argument("file", type=Path, metavar="FILE", help=file)
    steps_per_second = "speed of a training run of the cheapest method"
    parser.add_argument("--steps-per-second", type=float, metavar="R", help=steps_per_second)
    tflops = "alternative: peak speed of a GPU, 10^12 operations per second"
    parser.add_argument("--tflops", type=float, metavar="X", help=tflops)
    utilisation = "fraction of --tflops that training reaches (0.4)"
    parser.add_argument("--utilisation", type=float, default=0.4, metavar="U", help=utilisation)
    shape = "shape of images or latents, if unknown"
    parser.add_argument("--shape", type=int, nargs=3, metavar=("C", "H", "W"), help=shape)
    parser.add_argument("--classes", type=int, metavar="N", help="number of classes, if unknown")
    text = "shape of an encoded text, if unknown; pooled texts have only the width"
    parser.add_argument("--text", type=int, nargs=2, metavar=("TOKENS", "WIDTH"), help=text)
    parser.add_argument("--format", choices=("text", "json"), default="text", help="tables, or values for programs")


def run(arguments: argparse.Namespace) -> None:
    """Print the estimated cost of one experiment, or of all experiments in a folder, as tables or JSON.

    Files read: experiment files, and prepared data and timings of earlier training runs if there are any. No file is
    written.
    """
    if arguments.file.is_dir():
        _plan_folder(arguments)
    else:
        _plan_file(arguments)


def _plan_file(arguments: argparse.Namespace) -> None:
    """Print the cost of one experiment."""
    from kairos.config import load

    experiment = load(arguments.file)
    counts = {"shape": arguments.shape or [], "classes": [arguments.classes or 1], "text": arguments.text or []}
    for option, values in counts.items():
        demand(all(value >= 1 for value in values), option, " ".join(map(str, values)), "1 or more")

    # imported after the checks of the arguments, since it takes seconds
    from kairos.costs.estimate import estimate_cost
    from kairos.costs.rendering import estimate_values, render_estimate

    estimate = estimate_cost(
        experiment,
        x0_shape=tuple(arguments.shape) if arguments.shape else None,
        classes=arguments.classes,
        steps_per_second=arguments.steps_per_second,
        tflops=arguments.tflops,
        utilisation=arguments.utilisation,
        text_shape=arguments.text,
    )
    if arguments.format == "json":
        print(json.dumps(estimate_values(estimate), indent=1))
    else:
        print(render_estimate(estimate))


def _plan_folder(arguments: argparse.Namespace) -> None:
    """Print a table of the costs of all experiments in a folder."""
    for name in _FOR_ONE_FILE:
        value = getattr(arguments, name)
        demand(value is None, name.replace("_", "-"), value, "none with a folder")
    utilisation = arguments.utilisation
    demand(0 < utilisation <= 1, "utilisation", utilisation, "more than 0, at most 1")

    # imported after the checks of the arguments, since it takes seconds
    from kairos.costs.recipes import load_recipes, render_recipes
    from kairos.costs.rendering import estimate_values

    recipes = load_recipes(arguments.file)
    if arguments.format == "text":
        print(render_recipes(recipes, utilisation))
        return
    values = {}
    for recipe in recipes:
        gpu_hours = {"gpu_hours": recipe.gpu_hours_by_gpu(utilisation)}
        values[str(recipe.file)] = estimate_values(recipe.estimate) | gpu_hours
    print(json.dumps(values, indent=1))
