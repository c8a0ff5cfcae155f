"""``kairos sample``."""

import argparse
import json
from pathlib import Path
from typing import Any

from kairos.cli.common import add_shards, add_timing, demand, paired, write_timing
from kairos.errors import ConfigError


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
    add("--weights", choices=("ema", "raw"), help="which weights")
    scheme = "ddpm, ddim, dpm_solver, euler, heun, or with options as in an experiment file: '{name: ddim, eta: 1}'"
    add("--scheduler", metavar="NAME", help=scheme)
    add("--steps", type=int, metavar="N", help="intervals of the grid from noise to the image")
    add("--guidance-scale", type=float, metavar="X", help="classifier-free guidance; 1: none")
    add("--guidance-channels", metavar="K", help="only the first K channels are guided; null: all")
    add("--guidance-power", metavar="P", help="power-cosine guidance, none at noise; null: constant")
    add("--guidance-interval", metavar="[A,B]", help="least and most noise over signal that is guided; null: all")
    add("--precision", choices=("fp32", "tf32", "bf16"), help="of the network")
    add("--batch-size", type=int, metavar="N", help="images per network evaluation")
    add("--labels", choices=("balanced", "data"), help="classes alike, or as often as in the training data")
    add("--autoencoder", type=Path, metavar="DIR", help="default: results/<experiment>/autoencoder of the milestone")
    add("--latents", type=Path, metavar="DIR", help="for conditions as in the training data; default likewise")
    add_shards(parser, "F")
    add_timing(parser)


def run(arguments: argparse.Namespace) -> None:
    """Draw the images."""
    pairs = paired(arguments, "milestone", "out", "grid")
    a, each = arguments, len(arguments.part) // len(pairs)
    demand(len(a.part) == each * len(pairs), "part", len(a.part), f"as many for each of {len(pairs)} --out")
    from kairos.sampling import sample

    jobs = [
        sample.SamplingJob(folder, out, grid, tuple(a.part[n * each : (n + 1) * each]))
        for n, (folder, out, grid) in enumerate(pairs)
    ]
    request = sample.Request(a.num, a.seed, _overrides(a), a.autoencoder, a.latents, a.shard)
    sample.run(jobs, request)
    write_timing(arguments, milestones=len(jobs), images=arguments.num * len(jobs))


def _plain(text: str) -> Any:
    """A value as JSON, which the workflow writes, or YAML, for which 1e-05 is a text."""
    import yaml

    try:
        return json.loads(text)
    except ValueError:
        return yaml.safe_load(text)


def _overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    import yaml

    same = ("weights", "steps", "guidance_scale", "precision", "batch_size", "labels")
    values = {name: getattr(arguments, name) for name in same} | {"grid": arguments.grid_images}
    values = {key: value for key, value in values.items() if value is not None}
    allowed = {
        "scheduler": "a name or {name: ..., options}",
        **dict.fromkeys(("guidance_channels", "guidance_power"), "a number or null"),
        "guidance_interval": "[least, most] or null",
    }
    for name, meant in allowed.items():
        if (given := getattr(arguments, name)) is not None:
            try:
                values[name] = _plain(given)
            except yaml.YAMLError:
                raise ConfigError(f"--{name.replace('_', '-')}: got {given!r}, allowed: {meant}") from None
    return values
