"""``kairos prepare``, ``kairos autoencoder``, ``kairos text`` and ``kairos encode``."""

import argparse
from pathlib import Path
from typing import Any

from kairos import resource_usage
from kairos.cli.common import add_config, add_shards, add_timing, set_up_device, write_timing
from kairos_timesteps.errors import demand

Done = tuple[str, dict[str, Any]]  # what to say of the folder that was written, and facts for the record of the time
# where in an experiment's results
_WRITES = {"prepare": "dataset", "autoencoder": "autoencoder", "text": "text", "encode": "latents"}


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of one of the four subcommands."""
    add_config(parser)
    read = {"prepare": (), "encode": ("dataset", "autoencoder", "text")}.get(name, ("dataset",))
    for option, stage in (*zip(read, read), ("out", _WRITES[name])):
        what = "folder to write" if option == "out" else f"folder that holds the {stage}"
        default = f"{what} (default: results/<experiment>/{stage})"
        parser.add_argument(f"--{option}", type=Path, metavar="DIR", help=default)
    if name == "encode":
        add_shards(parser, "DIR")
    add_timing(parser)


def run(arguments: argparse.Namespace) -> None:
    """Run the subcommand."""
    from kairos.config import load
    from kairos.data.dataset import open_dataset
    from kairos.progress import say

    experiment, command = load(arguments.config), arguments.command
    results = Path("results") / experiment.experiment
    out = arguments.out or results / _WRITES[command]
    if command == "prepare":
        said, facts = _prepare(experiment, out)
    else:
        dataset = open_dataset(arguments.dataset or results / "dataset")
        # neither pixels nor joining need a GPU, and are given none
        idle = experiment.autoencoder.kind == "none" and command != "text"
        device = set_up_device(experiment, "cpu" if idle or getattr(arguments, "part", None) else None)
        if command == "encode":
            arguments.autoencoder = arguments.autoencoder or results / "autoencoder"
            arguments.text = (arguments.text or results / "text") if "text" in experiment.conditions else None
            said, facts = _encode(arguments, experiment, dataset, out, device)
        else:
            stage = {"text": _text, "autoencoder": _autoencoder}[command]
            said, facts = stage(experiment, dataset, out, device)
    say(f"{out}: {said}")
    write_timing(arguments, **facts)


def _prepare(experiment: Any, out: Path) -> Done:
    from kairos.data.prepare import write_dataset
    from kairos.data.sources import open_source

    source = open_source(experiment.dataset)
    resource_usage.end_startup()
    manifest = write_dataset(experiment.dataset, source, out)
    skipped = f", {len(manifest['skipped'])} broken skipped" if manifest["skipped"] else ""
    images = f"{manifest['train_count']} training and {manifest['heldout_count']} held-out images of "
    told = f" with {manifest['captions']['count']} captions" if "captions" in manifest else ""
    size = f"{manifest['height']}×{manifest['width']}×{manifest['channels']}"
    return images + size + told + skipped, {"images": manifest["count"]}


def _autoencoder(experiment: Any, dataset: Any, out: Path, device: Any) -> Done:
    from kairos.autoencoders.train_or_load import make_autoencoder

    manifest = make_autoencoder(experiment.autoencoder, dataset, out, device, experiment.dataset.flips)
    quality = "" if manifest["psnr"] is None else f", PSNR {manifest['psnr']:.1f} dB on {manifest['psnr_of']}"
    shape = "×".join(map(str, manifest["latent_shape"]))
    return f"{manifest['kind']}, x0 of shape {shape}{quality}", {"psnr": manifest["psnr"]}


def _text(experiment: Any, dataset: Any, out: Path, device: Any) -> Done:
    from kairos.text_encoders.encode_captions import encode_texts

    demand(experiment.text_encoder, "text_encoder", "null", "{path: ...}, the encoder of the captions")
    manifest = encode_texts(experiment.text_encoder, dataset, out, device)
    shape = "×".join(map(str, manifest["condition"]["shape"]))
    return f"states of {manifest['count']} captions, each {shape}", {"captions": manifest["count"]}


def _encode(arguments: Any, experiment: Any, dataset: Any, out: Path, device: Any) -> Done:
    from kairos.autoencoders.codec import load_codec
    from kairos.autoencoders.encode import encode

    codec = load_codec(arguments.autoencoder, device)
    resource_usage.end_startup()
    size, flips = experiment.autoencoder.encode_batch_size, experiment.dataset.flips
    factor, text = experiment.dataset.low_resolution, arguments.text
    manifest = encode(dataset, codec, out, flips, size, arguments.shard, arguments.part, factor, text)
    if arguments.shard is not None:
        return "images {first} to {end}, part {number} of {of}".format(**manifest["shard"]), {}
    shape, flipped = "×".join(map(str, manifest["shape"])), ", flipped ones too" if manifest["flips"] else ""
    said = f"{manifest['kind']} of {manifest['count']} images, x0 of shape {shape}{flipped}"
    return said, {"images": manifest["count"]}
