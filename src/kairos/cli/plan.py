"""``kairos plan``: what an experiment will cost, before anything runs."""

import argparse
from pathlib import Path

from kairos.cli.common import demand


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    what = "experiment file, e.g. params.yaml, or a folder of some: one table, GPU-hours on an H100 and an A100"
    parser.add_argument("file", type=Path, metavar="FILE", help=what)
    parser.add_argument("--steps-per-second", type=float, metavar="R", help="rate of a training of the cheapest method")
    parser.add_argument("--tflops", type=float, metavar="X", help="or: speed of a GPU, 10^12 operations per second")
    parser.add_argument("--utilisation", type=float, default=0.4, metavar="U", help="share of it that is reached (0.4)")
    parser.add_argument("--shape", type=int, nargs=3, metavar=("C", "H", "W"), help="of images or latents, if unknown")
    parser.add_argument("--classes", type=int, metavar="N", help="number of classes, if unknown")
    text = "of a text's states, if unknown; one that is pooled has the width alone"
    parser.add_argument("--text", type=int, nargs=2, metavar=("TOKENS", "WIDTH"), help=text)
    parser.add_argument("--format", choices=("text", "json"), default="text", help="tables, or values for programs")


def run(arguments: argparse.Namespace) -> None:
    """Print the estimate."""
    import json

    from kairos.config import load

    if arguments.file.is_dir():
        _folder(arguments)
        return
    experiment = load(arguments.file)
    given = {"shape": arguments.shape or [], "classes": [arguments.classes or 1], "text": arguments.text or []}
    for name, numbers in given.items():
        demand(all(number >= 1 for number in numbers), name, " ".join(map(str, numbers)), "1 or more")

    from kairos.costs.estimate import estimate_cost
    from kairos.costs.rendering import estimate_values, render_estimate

    a, shape = arguments, tuple(arguments.shape) if arguments.shape else None
    found = estimate_cost(experiment, shape, a.classes, a.steps_per_second, a.tflops, a.utilisation, a.text)
    print(json.dumps(estimate_values(found), indent=1) if arguments.format == "json" else render_estimate(found))


def _folder(arguments: argparse.Namespace) -> None:
    """One table of all; what each experiment's data are like, its own file says."""
    for name in ("steps_per_second", "tflops", "shape", "classes", "text"):
        demand(getattr(arguments, name) is None, name.replace("_", "-"), getattr(arguments, name), "for one file alone")
    share = arguments.utilisation
    demand(0 < share <= 1, "utilisation", share, "more than 0, at most 1")
    from kairos.costs import recipes

    found = recipes.load_recipes(arguments.file)
    if arguments.format == "text":
        print(recipes.render_recipes(found, share))
        return
    import json

    from kairos.costs.rendering import estimate_values

    each = {str(one.file): estimate_values(one.estimate) | {"gpu_hours": one.gpu_hours_by_gpu(share)} for one in found}
    print(json.dumps(each, indent=1))
