"""Stage `sample`: images from milestones, with everything that decides them read from the milestone itself."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kairos import compute, resource_usage
from kairos.data.dataset import to_uint8
from kairos.data.image_grid import write_image_grid
from kairos.files import open_record
from kairos.progress import Progress, say
from kairos.sampling.conditions import load_conditions
from kairos.sampling.generate import (
    DataPrediction,
    Guidance,
    build_guided_predictor,
    iterate_batches,
    make_noise_source,
)
from kairos.sampling.registries import SCHEDULERS, resolve_solver
from kairos.sampling.samples_file import join_parts, open_samples, write_samples
from kairos.sampling.settings import GUIDANCE, SamplingConfig
from kairos.sampling.time_grids import build_time_grid
from kairos.section import build, check
from kairos.shards import Shard
from kairos_timesteps.errors import ConfigError, KairosError


@dataclass(frozen=True)
class SamplingJob:
    """Images to draw from one milestone.

    Args:
        milestone: its folder.
        out: the npz file that is written.
        grid: the picture that is written, or None.
        parts: files of all shards, which are joined; none: the images are drawn.
    """

    milestone: Path
    out: Path
    grid: Path | None = None
    parts: tuple[Path, ...] = ()


@dataclass(frozen=True)
class SamplingRequest:
    """Settings that all jobs of a sampling request share; None or an absent field: the milestone's configuration.

    Args:
        num: number of images.
        seed: seed of the images.
        overrides: fields of section `sampling` that replace the milestone's.
        autoencoder: folder of the autoencoder; None: ``../../../../autoencoder``, seen from the milestone.
        latents: folder of the latents, needed for labels as in the data and conditions other than classes; None:
            likewise.
        shard: the part of the images that is drawn; None: all.
    """

    num: int
    seed: int | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    autoencoder: Path | None = None
    latents: Path | None = None
    shard: Shard | None = None


def run(jobs: list[SamplingJob], request: SamplingRequest) -> None:
    """Draw the images of every job.

    Raises:
        KairosError: a milestone or autoencoder is missing, damaged, or does not belong to the other.
    """
    if request.num < 1:
        raise ConfigError(f"--num: got {request.num}, allowed: 1 or more")
    for job in jobs:
        sample_milestone(job, request)


def load_settings(milestone: Path, overrides: dict[str, Any]) -> tuple[SamplingConfig, dict[str, Any]]:
    """Section `sampling` that a milestone carries, with fields replaced, and the milestone's record.

    Raises:
        KairosError: no milestone is there.
        ConfigError: the replaced fields cannot be used.
    """
    record = open_record(milestone, "train --config F --method M --seed N --out D", "milestone.json")
    config = record["config"]
    sampling = check(SamplingConfig, {**config["sampling"], **overrides}, f"{milestone}/milestone.json: sampling")
    conditions, dropout = config["model"].get("conditions") or [], config["training"]["condition_dropout"]
    sampling.check_fits(config["diffusion"], conditions, dropout)
    return sampling, record


def set_up_device(record: dict[str, Any]) -> torch.device:
    """Set threads and device as a milestone's training states them."""
    training = record["config"]["training"]
    return compute.setup(training["threads"], training["device"], training["deterministic"])


def sample_milestone(job: SamplingJob, request: SamplingRequest) -> None:
    """Write the images of one milestone, or a shard of them: drawn and decoded, or joined from their parts."""
    from kairos.milestones import open_milestone

    options, record = load_settings(job.milestone, request.overrides)
    config, files = record["config"], record["files"].items()
    seed = options.seed if request.seed is None else request.seed
    scheduler = resolve_solver(options.scheduler, config["diffusion"]["process"])
    names = config["model"].get("conditions") or []
    latents = request.latents or job.milestone / "../../../../latents"
    conditions = load_conditions(names, record["conditions"], latents, options.labels, seed)
    protocol = {
        **{name: record[name] for name in ("identity", "method", "step", "autoencoder_sha256")},
        "training_seed": record["seed"],
        "model_files": {name: sha256 for name, sha256 in files if name.startswith(f"{options.weights}/")},
        "scheduler": scheduler,
        **{name: getattr(options, name) for name in ("weights", "steps", "nfe", "precision", *GUIDANCE)},
        "labels": options.labels if names else None,
        "seed": seed,
        "num": request.num,
    }
    guidance, channels = Guidance(*(getattr(options, name) for name in GUIDANCE)), record["shape"][0]
    if (got := guidance.channels or 0) > channels:
        raise ConfigError(f"sampling.guidance_channels: got {got}, allowed: at most {channels}, those of x0")
    label = f"sample {record['method']} seed {record['seed']} step {record['step']}"
    num, size, shard = request.num, options.batch_size, request.shard
    rows = shard.rows(num, size) if shard else range(num)
    if shard:
        protocol["shard"] = shard.record(num, size)
        label += f" part {shard.number} of {shard.of}"
        if not rows:
            raise ConfigError(f"{label}: got no batch of {size}, allowed: at most as many parts as batches")

    def drawn() -> Iterator[np.ndarray]:
        device = set_up_device(record)
        milestone = open_milestone(job.milestone, options.weights, device)
        codec = open_codec(job.milestone, record, request.autoencoder, device)
        process, shape = milestone.process, tuple(record["shape"])
        grid, clip = build_time_grid(process, options.steps, scheduler), scheduler.get("clip", False)
        resource_usage.end_startup()
        progress = Progress(len(rows), label, "image")
        for indices, kept in iterate_batches(rows, size):
            with torch.inference_mode():
                told = {name: values.to(device) for name, values in conditions(indices).items()}
                predict = build_guided_predictor(process, milestone.model, told, record["conditions"], guidance)
                estimate = DataPrediction(process, predict, clip, options.precision)
                noise = make_noise_source(seed, indices, shape, device)
                x0 = build(SCHEDULERS, scheduler, process, grid, estimate, noise)  # (batch, c, h, w)
                images = to_uint8(codec.decode(x0.float()))[:kept]
            yield images
            progress.advance(kept)
        progress.close()

    def all_of(name: str) -> Iterator[np.ndarray]:
        return (conditions.recorded(name, indices)[:kept] for indices, kept in iterate_batches(rows, size))

    images = join_parts(job.parts, protocol, num, size) if job.parts else drawn()
    kept = [name for name in names if record["conditions"][name]["kind"] != "image"]  # those would be as large again
    write_samples(job.out, images, protocol, {name: all_of(name) for name in kept}, len(rows))
    if job.grid is not None:
        write_image_grid(job.grid, open_samples(job.out).images[: options.grid])
    say(f"{label}: {len(rows)} images in {job.out}")


def open_codec(milestone: Path, record: dict[str, Any], folder: Path | None, device: torch.device | str) -> Any:
    """The autoencoder that a milestone was trained with.

    Raises:
        KairosError: it is not there, or it is another one.
    """
    from kairos.autoencoders.codec import load_codec

    folder = folder or milestone / "../../../../autoencoder"
    given = f"pass --autoencoder DIR, the one that {milestone} was trained with"
    if not (folder / "manifest.json").is_file():
        raise KairosError(f"{folder}: no autoencoder; {given}")
    codec = load_codec(folder, device)
    known, latent = record["autoencoder_sha256"], list(codec.manifest["latent_shape"])
    if known is None and latent != list(record["shape"]):  # of imported weights
        raise KairosError(f"--autoencoder: {folder} has latents of shape {latent}, allowed: {list(record['shape'])}")
    if known not in (None, codec.manifest["sha256"]):
        raise KairosError(f"{folder}: is autoencoder {codec.manifest['sha256'][:12]}, not {known[:12]}; {given}")
    return codec
