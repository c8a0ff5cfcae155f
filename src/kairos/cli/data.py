"""``kairos prepare``, ``kairos autoencoder``, ``kairos text`` and ``kairos encode``: data for training."""

import argparse
from pathlib import Path
from typing import Any

from kairos import resource_usage
from kairos.cli.common import add_config, add_shards, add_timing, set_up_device, write_timing
from kairos_timesteps.errors import demand

Outcome = tuple[str, dict[str, Any]]  # description of the folder that was written, entries of the timing record
# output folder of each subcommand, below the folder of results, and the folders that it reads
_OUTPUTS = {"prepare": "dataset", "autoencoder": "autoencoder", "text": "text", "encode": "latents"}
_INPUTS: dict[str, tuple[str, ...]] = {
    "prepare": (),
    "autoencoder": ("dataset",),
    "text": ("dataset",),
    "encode": ("dataset", "autoencoder", "text"),
}


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of one of the four subcommands."""
    add_config(parser)
    for folder in _INPUTS[name]:
        help = f"folder to read (default: results/<experiment>/{folder})"
        parser.add_argument(f"--{folder}", type=Path, metavar="DIR", help=help)
    help = f"folder to write (default: results/<experiment>/{_OUTPUTS[name]})"
    parser.add_argument("--out", type=Path, metavar="DIR", help=help)
    if name == "encode":
        add_shards(parser, "DIR")
    add_timing(parser)


def run(arguments: argparse.Namespace) -> None:
    """Write the folder of the subcommand."""
    from kairos.config import load
    from kairos.data.dataset import open_dataset
    from kairos.progress import log

    experiment, command = load(arguments.config), arguments.command
    results = Path("results") / experiment.experiment
    out = arguments.out or results / _OUTPUTS[command]
    if command == "prepare":
        description, facts = _prepare(experiment, out)
    else:
        dataset = open_dataset(arguments.dataset or results / "dataset")
        stays_in_pixels = experiment.autoencoder.kind == "none" and command != "text"
        merges_shards = bool(getattr(arguments, "part", None))
        # the workflow requests no GPU for jobs that compute no network
        device = set_up_device(experiment, "cpu" if stays_in_pixels or merges_shards else None)
        if command == "encode":
            arguments.autoencoder = arguments.autoencoder or results / "autoencoder"
            arguments.text = (arguments.text or results / "text") if "text" in experiment.conditions else None
            description, facts = _encode(arguments, experiment, dataset, out, device)
        else:
            stage = {"text": _text, "autoencoder": _autoencoder}[command]
            description, facts = stage(experiment, dataset, out, device)
    log(f"{out}: {description}")
    write_timing(arguments, **facts)


def _prepare(experiment: Any, out: Path) -> Outcome:
    """Write the prepared data set."""
    from kairos.data.prepare import write_dataset
    from kairos.data.sources import open_source

    source = open_source(experiment.dataset)
    resource_usage.end_startup()
    manifest = write_dataset(experiment.dataset, source, out)
    skipped = f", {len(manifest['skipped'])} broken skipped" if manifest["skipped"] else ""
    images = f"{manifest['train_count']} training and {manifest['heldout_count']} held-out images of "
    captions = f" with {manifest['captions']['count']} captions" if "captions" in manifest else ""
    size = f"{manifest['height']}×{manifest['width']}×{manifest['channels']}"
    return images + size + captions + skipped, {"images": manifest["count"]}


def _autoencoder(experiment: Any, dataset: Any, out: Path, device: Any) -> Outcome:
    """Train the autoencoder or copy a pretrained one."""
    from kairos.autoencoders.train_or_load import make_autoencoder

    manifest = make_autoencoder(experiment.autoencoder, dataset, out, device, experiment.dataset.flips)
    quality = "" if manifest["psnr"] is None else f", PSNR {manifest['psnr']:.1f} dB on {manifest['psnr_of']}"
    shape = "×".join(map(str, manifest["latent_shape"]))
    return f"{manifest['kind']}, x0 of shape {shape}{quality}", {"psnr": manifest["psnr"]}


def _text(experiment: Any, dataset: Any, out: Path, device: Any) -> Outcome:
    """Encode the captions of the data set."""
    from kairos.text_encoders.encode_captions import encode_captions

    demand(experiment.text_encoder, "text_encoder", "null", "{path: ...}, the encoder of the captions")
    manifest = encode_captions(experiment.text_encoder, dataset, out, device)
    shape = "×".join(map(str, manifest["condition"]["shape"]))
    return f"{manifest['count']} encoded captions, each of shape {shape}", {"captions": manifest["count"]}


def _encode(arguments: Any, experiment: Any, dataset: Any, out: Path, device: Any) -> Outcome:
    """Encode the images of the data set, or one shard of them, or merge shards."""
    from kairos.autoencoders.codec import load_codec
    from kairos.autoencoders.encode import encode

    codec = load_codec(arguments.autoencoder, device)
    resource_usage.end_startup()
    size, flips = experiment.autoencoder.encode_batch_size, experiment.dataset.flips
    factor, text = experiment.dataset.low_resolution, arguments.text
    manifest = encode(dataset, codec, out, flips, size, arguments.shard, arguments.part, factor, text)
    if arguments.shard is not None:
        return "images {first} to {end}, shard {number} of {of}".format(**manifest["shard"]), {}
    shape, flipped = "×".join(map(str, manifest["shape"])), ", with flipped images" if manifest["flips"] else ""
    description = f"{manifest['kind']} of {manifest['count']} images, x0 of shape {shape}{flipped}"
    return description, {"images": manifest["count"]}
