"""``kairos prepare``, ``kairos autoencoder`` and ``kairos encode``."""

import argparse
from pathlib import Path
from typing import Any

from kairos import clock
from kairos.cli.common import add_config, add_timing, write_timing


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of one of the three subcommands."""
    add_config(parser)
    read = {"autoencoder": ("dataset",), "encode": ("dataset", "autoencoder")}.get(name, ())
    out = {"prepare": "dataset", "encode": "latents"}.get(name, name)
    for option, stage in (*zip(read, read), ("out", out)):
        what = "folder to write" if option == "out" else f"folder that holds the {stage}"
        default = f"{what} (default: results/<experiment>/{stage})"
        parser.add_argument(f"--{option}", type=Path, metavar="DIR", help=default)
    add_timing(parser)


def run(arguments: argparse.Namespace) -> None:
    """Run the subcommand."""
    from kairos.config import load

    experiment = load(arguments.config)
    results = Path("results") / experiment.experiment
    stage = {"prepare": _prepare, "autoencoder": _autoencoder, "encode": _encode}[arguments.command]
    write_timing(arguments, **stage(arguments, experiment, results))


def _prepare(arguments: argparse.Namespace, experiment: Any, results: Path) -> dict[str, Any]:
    from kairos.data.prepare import write_dataset
    from kairos.data.sources import open_source
    from kairos.progress import say

    source = open_source(experiment.dataset)
    clock.work_begins()
    out = arguments.out or results / "dataset"
    manifest = write_dataset(experiment.dataset, source, out)
    skipped = f", {len(manifest['skipped'])} broken skipped" if manifest["skipped"] else ""
    say(
        f"{out}: {manifest['train_count']} training and {manifest['heldout_count']} held-out images of "
        f"{manifest['height']}×{manifest['width']}×{manifest['channels']}{skipped}"
    )
    return {"images": manifest["count"]}


def _autoencoder(arguments: argparse.Namespace, experiment: Any, results: Path) -> dict[str, Any]:
    from kairos.data.dataset import open_dataset
    from kairos.progress import say

    dataset = open_dataset(arguments.dataset or results / "dataset")
    device = _compute(experiment)
    from kairos.autoencoders.stage import make_autoencoder

    out = arguments.out or results / "autoencoder"
    manifest = make_autoencoder(experiment.autoencoder, dataset, out, device, experiment.dataset.flips)
    quality = "" if manifest["psnr"] is None else f", PSNR {manifest['psnr']:.1f} dB on held-out images"
    say(f"{out}: {manifest['kind']}, x0 of shape {'×'.join(map(str, manifest['latent_shape']))}{quality}")
    return {"psnr": manifest["psnr"]}


def _encode(arguments: argparse.Namespace, experiment: Any, results: Path) -> dict[str, Any]:
    from kairos.data.dataset import open_dataset
    from kairos.progress import say

    dataset = open_dataset(arguments.dataset or results / "dataset")
    device = _compute(experiment)
    from kairos.autoencoders.codec import load_codec
    from kairos.autoencoders.encode import encode

    codec = load_codec(arguments.autoencoder or results / "autoencoder", device)
    clock.work_begins()
    out = arguments.out or results / "latents"
    manifest = encode(dataset, codec, out, experiment.dataset.flips, experiment.autoencoder.encode_batch_size)
    shape = "×".join(map(str, manifest["shape"]))
    flipped = ", flipped ones too" if manifest["flips"] else ""
    say(f"{out}: {manifest['kind']} of {manifest['count']} images, x0 of shape {shape}{flipped}")
    return {"images": manifest["count"]}


def _compute(experiment: Any) -> Any:
    """The device, with threads and determinism set as the experiment says; pixels need no GPU, and are given none."""
    from kairos.compute import setup

    training = experiment.training
    device = "cpu" if experiment.autoencoder.kind == "none" else training.device
    return setup(training.threads, device, training.deterministic)
