"""``kairos sample``."""

import argparse
from functools import partial
from pathlib import Path

from kairos.cli.common import add_shards, add_timing, demand, pair_options, write_timing, yaml_type

# options that are fields of section `sampling`
_GUIDANCE = ("guidance_scale", "guidance_channels", "guidance_power", "guidance_interval")
_SETTINGS = ("scheduler", "steps", "weights", *_GUIDANCE, "precision", "batch_size", "labels")


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Arguments of ``kairos sample``."""
    parser.epilog = (
        "Repeat --milestone and --out, in pairs, to draw from several milestones in one job. What is not stated is "
        "taken from the configuration that the milestone carries. Image i depends on the seed and on i alone."
    )
    add = parser.add_argument
    add("--milestone", type=Path, action="append", required=True, metavar="D", help="milestone folder (repeatable)")
    add("--out", type=Path, action="append", required=True, metavar="F", help="npz file to write (repeatable)")
    add("--grid", type=Path, action="append", metavar="F", help="PNG picture of the first images (repeatable)")
    add("--grid-images", type=int, metavar="N", help="images on the picture")
    add("--num", type=int, required=True, metavar="N", help="number of images")
    add("--seed", type=int, metavar="S", help="seed of the images")
    scheme = "ddpm, ddim, dpm_solver, euler, heun, or with options as in an experiment file: '{name: ddim, eta: 1}'"
    given = partial(add, default=argparse.SUPPRESS)
    given("--weights", choices=("ema", "raw"), help="which weights")
    given("--scheduler", type=yaml_type("scheduler", "a name or {name: ..., options}"), metavar="NAME", help=scheme)
    given("--steps", type=int, metavar="N", help="intervals of the grid from noise to the image")
    given("--guidance-scale", type=float, metavar="X", help="classifier-free guidance; 1: none")
    number = partial(yaml_type, allowed="a number or null")
    channels, power = number("guidance-channels"), number("guidance-power")
    given("--guidance-channels", type=channels, metavar="K", help="only the first K channels are guided; null: all")
    given("--guidance-power", type=power, metavar="P", help="power-cosine guidance, none at noise; null: constant")
    bounds = "least and most noise over signal that is guided; null: all"
    interval = yaml_type("guidance-interval", "[least, most] or null")
    given("--guidance-interval", type=interval, metavar="[A,B]", help=bounds)
    given("--precision", choices=("fp32", "tf32", "bf16"), help="of the network")
    given("--batch-size", type=int, metavar="N", help="images per network evaluation")
    given("--labels", choices=("balanced", "data"), help="classes alike, or as often as in the training data")
    add("--autoencoder", type=Path, metavar="DIR", help="default: results/<experiment>/autoencoder of the milestone")
    add("--latents", type=Path, metavar="DIR", help="for conditions as in the training data; default likewise")
    add_shards(parser, "F")
    add_timing(parser)


def run(arguments: argparse.Namespace) -> None:
    """Draw the images."""
    pairs = pair_options(arguments, "milestone", "out", "grid")
    a, each = arguments, len(arguments.part) // len(pairs)
    demand(len(a.part) == each * len(pairs), "part", len(a.part), f"as many for each of {len(pairs)} --out")
    from kairos.sampling import sample

    parts = [tuple(a.part[n * each : (n + 1) * each]) for n in range(len(pairs))]
    jobs = [sample.SamplingJob(folder, out, grid, its) for (folder, out, grid), its in zip(pairs, parts)]
    overrides = {name: value for name, value in vars(a).items() if name in _SETTINGS}
    if a.grid_images is not None:
        overrides["grid"] = a.grid_images
    request = sample.SamplingRequest(a.num, a.seed, overrides, a.autoencoder, a.latents, a.shard)
    sample.run(jobs, request)
    write_timing(arguments, milestones=len(jobs), images=arguments.num * len(jobs))
