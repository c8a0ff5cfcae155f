"""``kairos plan``: estimate the cost of an experiment before anything runs."""

import argparse
import json
from pathlib import Path

from kairos.cli.common import demand_option


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `kairos plan`."""
    parser.add_argument("file", type=Path, metavar="FILE", help="experiment file, e.g. params.yaml")
    steps_per_second = "speed of a training run of the cheapest method"
    parser.add_argument("--steps-per-second", type=float, metavar="R", help=steps_per_second)
    card = "alternative: a card, whose peak at the experiment's precisions is used: H100, H200 or A100"
    parser.add_argument("--card", metavar="NAME", help=card)
    tflops = "alternative: peak speed of a GPU at all precisions, 10^12 operations per second"
    parser.add_argument("--tflops", type=float, metavar="X", help=tflops)
    utilisation = "fraction of the peak that training reaches (0.4)"
    parser.add_argument("--utilisation", type=float, default=0.4, metavar="U", help=utilisation)
    shape = "shape of images or latents, if unknown"
    parser.add_argument("--shape", type=int, nargs=3, metavar=("C", "H", "W"), help=shape)
    parser.add_argument("--classes", type=int, metavar="N", help="number of classes, if unknown")
    text = "shape of an encoded text, if unknown; pooled texts have only the width"
    parser.add_argument("--text", type=int, nargs=2, metavar=("TOKENS", "WIDTH"), help=text)
    parser.add_argument("--format", choices=("text", "json"), default="text", help="tables, or values for programs")


def run(arguments: argparse.Namespace) -> None:
    """Print the estimated cost of an experiment as tables or JSON.

    Files read: the experiment file, and prepared data and timings of earlier training runs if there are any. No file
    is written.

    Raises:
        ConfigError: an option is not allowed, or a shape is not known yet and no option sets it.
    """
    from kairos.config import load

    experiment = load(arguments.file)
    counts_by_option = {  # an option that is not set has no counts to check
        "shape": arguments.shape or [],
        "classes": [] if arguments.classes is None else [arguments.classes],
        "text": arguments.text or [],
    }
    for option, counts in counts_by_option.items():
        demand_option(all(count >= 1 for count in counts), option, " ".join(map(str, counts)), "1 or more")

    # imported after the checks of the arguments, since it takes seconds
    from kairos.costs.estimate import estimate_cost
    from kairos.costs.rendering import estimate_values, render_estimate

    estimate = estimate_cost(
        experiment,
        x0_shape=tuple(arguments.shape) if arguments.shape else None,
        classes=arguments.classes,
        steps_per_second=arguments.steps_per_second,
        tflops=arguments.tflops,
        card=arguments.card,
        utilisation=arguments.utilisation,
        text_shape=arguments.text,
    )
    if arguments.format == "json":
        print(json.dumps(estimate_values(estimate), indent=1))
    else:
        print(render_estimate(estimate))
