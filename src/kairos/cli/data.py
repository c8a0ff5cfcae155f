"""``kairos prepare``, ``kairos autoencoder``, ``kairos text`` and ``kairos encode``: data for training."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kairos import resource_usage
from kairos.cli.common import add_config, add_shards, add_timing, set_up_device, write_timing
from kairos_timesteps.errors import rejection

if TYPE_CHECKING:
    import torch

    from kairos.config import Experiment
    from kairos.data.dataset import PreparedDataset

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
    """Declare the arguments of one of the four subcommands.

    They are the experiment file, the folders to read and to write, the file of the timing record, and for `encode`
    shards. Only the experiment file is required.
    """
    add_config(parser)
    for folder in _INPUTS[name]:
        help = f"folder to read (default: results/<experiment>/{folder})"
        parser.add_argument(f"--{folder}", type=Path, metavar="DIR", help=help)
    help = f"folder to write (default: results/<experiment>/{_OUTPUTS[name]})"
    parser.add_argument("--out", type=Path, metavar="DIR", help=help)
    if name == "encode":
        add_shards(parser, "DIR", "those of autoencoder.shards, if all of them are in place")
    add_timing(parser)


def run(arguments: argparse.Namespace) -> None:
    """Read the experiment file and the folders of earlier stages, write the folder of one stage, and log its content.

    - `prepare` reads images and writes ``dataset``: equal sizes, training and held-out images, captions.
    - `autoencoder` reads ``dataset`` and writes the trained or fetched autoencoder.
    - `text` reads ``dataset`` and writes its encoded captions.
    - `encode` reads all three and writes ``latents``, one shard of them, or the latents merged from shards.

    Each folder can be set by an option, such as ``--dataset`` or ``--out``; by default it is in results/<experiment>.
    Shards of the images are merged by `encode` if all of them are in their default folders. The time of the job is
    recorded, see ``--timing``.

    Raises:
        ConfigError: the experiment file is not valid, or has no text encoder for `text`.
        KairosError: a folder that the stage reads is missing or damaged.
    """
    from kairos.cli.jobs import open_job
    from kairos.data.dataset import open_dataset
    from kairos.progress import log
    from kairos.validity import Result

    job, command = open_job(arguments), arguments.command
    experiment, results = job.experiment, job.results
    # folders that an option sets are not those of the pipeline
    is_of_pipeline = not any(getattr(arguments, name) for name in ("out", *_INPUTS[command]))
    if command == "encode" and is_of_pipeline and not arguments.merge:
        arguments.merge = job.list_finished_shards()
    out = arguments.out or results / _OUTPUTS[command]
    if job.shard is not None and arguments.out is None:
        out = Path(job.layout.shard_path("encode", job.shard.name))

    def write() -> None:
        if command == "prepare":
            description, facts = _prepare_dataset(experiment, out)
        else:
            dataset = open_dataset(arguments.dataset or results / "dataset")
            device = _choose_device(arguments, experiment)
            if command == "autoencoder":
                description, facts = _make_autoencoder(experiment, dataset, out, device)
            elif command == "text":
                description, facts = _encode_captions(experiment, dataset, out, device)
            else:
                description, facts = _encode_images(arguments, experiment, dataset, out, device)
        log(f"{out}: {description}")
        write_timing(arguments, None if arguments.out else job.timing_file, **facts)

    if is_of_pipeline and job.shard is None:
        job.compute(Result(command), write)
    else:
        write()


def _choose_device(arguments: argparse.Namespace, experiment: "Experiment") -> "torch.device":
    """Set threads and determinism of torch, and return the device for `autoencoder`, `text` or `encode`.

    The device is the CPU if no network is computed, because the workflow then requests no GPU: for `autoencoder` and
    `encode` in pixel space, and if `encode` merges shards. Otherwise it is the device of the experiment.
    """
    # `--merge`, an option of `encode` alone, lists the folders of the shards
    merges_shards = arguments.command == "encode" and bool(arguments.merge)
    stays_in_pixels = arguments.command != "text" and experiment.autoencoder.kind == "none"
    computes_no_network = merges_shards or stays_in_pixels
    return set_up_device(experiment, "cpu" if computes_no_network else None)


def _prepare_dataset(experiment: "Experiment", out: Path) -> Outcome:
    """Prepare images and captions of the data set, and write them to `out`, where earlier files are deleted first.

    Start-up ends as soon as the source is open.

    Returns:
        A description for the log, and the timing entry `images`: the number of images, held-out ones included.
    """
    from kairos.data.prepare import write_dataset
    from kairos.data.sources import open_source

    source = open_source(experiment.dataset)
    resource_usage.end_startup()
    record = write_dataset(experiment.dataset, source, out)
    size = f"{record['height']}×{record['width']}×{record['channels']}"
    description = f"{record['train_count']} training and {record['heldout_count']} held-out images of {size}"
    if "captions" in record:
        description += f" with {record['captions']['count']} captions"
    if record["skipped"]:
        description += f", {len(record['skipped'])} broken skipped"
    return description, {"images": record["count"]}


def _make_autoencoder(
    experiment: "Experiment", dataset: "PreparedDataset", out: Path, device: "torch.device"
) -> Outcome:
    """Train the autoencoder or copy a pretrained one, and write it to `out`; in pixel space, write only a record.

    The end of start-up is marked.

    Returns:
        A description for the log, and the entry of the timing record: `psnr` in dB, None in pixel space.
    """
    from kairos.autoencoders.train_or_load import make_autoencoder

    record = make_autoencoder(experiment.autoencoder, dataset, out, device, flips=experiment.dataset.flips)
    quality = ""
    if record["psnr"] is not None:
        quality = f", PSNR {record['psnr']:.1f} dB on {record['psnr_of']}"
    shape = "×".join(map(str, record["latent_shape"]))
    return f"{record['kind']}, x0 of shape {shape}{quality}", {"psnr": record["psnr"]}


def _encode_captions(
    experiment: "Experiment", dataset: "PreparedDataset", out: Path, device: "torch.device"
) -> Outcome:
    """Encode the captions of the data set, and write them to `out`.

    The end of start-up is marked.

    Returns:
        A description for the log, and the timing entry `captions`: the number of captions.

    Raises:
        ConfigError: the experiment has no text encoder.
    """
    from kairos.text_encoders.encode_captions import encode_captions

    if experiment.text_encoder is None:
        raise rejection("text_encoder", "null", "{path: ...}, the encoder of the captions")
    record = encode_captions(experiment.text_encoder, dataset, out, device)  # marks the end of start-up
    shape = "×".join(map(str, record["condition"]["shape"]))
    return f"{record['count']} encoded captions, each of shape {shape}", {"captions": record["count"]}


def _encode_images(
    arguments: argparse.Namespace,
    experiment: "Experiment",
    dataset: "PreparedDataset",
    out: Path,
    device: "torch.device",
) -> Outcome:
    """Encode the images of the data set or one shard of them, or merge shards, and write the latents to `out`.

    For a model that is conditioned on text, the latents refer to the folder of the encoded captions. Folders to read
    that no option sets are in results/<experiment>. Start-up ends with the loading of the autoencoder.

    Returns:
        A description for the log, and the timing entry `images`: the number of images; a shard has no entry.
    """
    from kairos.autoencoders.codec import load_codec
    from kairos.autoencoders.encode import encode

    results = Path("results") / experiment.experiment
    codec = load_codec(arguments.autoencoder or results / "autoencoder", device)
    text_folder = None
    if "text" in experiment.conditions:
        text_folder = arguments.text or results / "text"
    resource_usage.end_startup()
    record = encode(
        dataset,
        codec,
        out,
        flips=experiment.dataset.flips,
        batch_size=experiment.autoencoder.encode_batch_size,
        shard=arguments.shard,
        shard_folders=arguments.merge,
        factor=experiment.dataset.low_resolution,
        text=text_folder,
        dtype=experiment.autoencoder.dtype,
    )
    if arguments.shard is not None:
        shard = record["shard"]
        return f"images {shard['first']} to {shard['end']}, shard {shard['number']} of {shard['of']}", {}
    shape = "×".join(map(str, record["shape"]))
    flipped = ", with flipped images" if record["flips"] else ""
    description = f"{record['kind']} of {record['count']} images, x0 of shape {shape}{flipped}"
    return description, {"images": record["count"]}
