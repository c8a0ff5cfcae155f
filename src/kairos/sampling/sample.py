"""Stage `sample`: images from milestones, with everything that decides them read from the milestone itself."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kairos import clock, compute
from kairos.data.dataset import to_uint8
from kairos.data.grid import write_grid
from kairos.errors import ConfigError, KairosError
from kairos.files import atomic, read_json
from kairos.progress import Progress, say
from kairos.sampling.draw import batches, estimate_of, guided, noise_of
from kairos.sampling.drawn_conditions import conditions_of
from kairos.sampling.places import places
from kairos.sampling.registries import SCHEDULERS, resolved
from kairos.sampling.settings import SamplingConfig
from kairos.section import build, check


@dataclass(frozen=True)
class SamplingJob:
    """Images to draw from one milestone.

    Args:
        milestone: its folder.
        out: the npz file that is written.
        grid: the picture that is written, or None.
    """

    milestone: Path
    out: Path
    grid: Path | None = None


@dataclass(frozen=True)
class Request:
    """What all jobs share; a None or an absent field is taken from the milestone's configuration.

    Args:
        num: number of images.
        seed: seed of the images.
        overrides: fields of section `sampling` that replace the milestone's.
        autoencoder: folder of the autoencoder; None: ``../../../../autoencoder``, seen from the milestone.
        latents: folder of the latents, needed for conditions other than classes; None: likewise.
    """

    num: int
    seed: int | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    autoencoder: Path | None = None
    latents: Path | None = None


def run(jobs: list[SamplingJob], request: Request) -> None:
    """Draw the images of every job.

    Raises:
        KairosError: a milestone or autoencoder is missing, damaged, or does not belong to the other.
    """
    if request.num < 1:
        raise ConfigError(f"--num: got {request.num}, allowed: 1 or more")
    for job in jobs:
        sample_milestone(job, request)


def settings(milestone: Path, overrides: dict[str, Any]) -> tuple[SamplingConfig, dict[str, Any]]:
    """Section `sampling` that a milestone carries, with fields replaced, and all of its configuration.

    Raises:
        KairosError: no milestone is there.
        ConfigError: the replaced fields cannot be used.
    """
    path = milestone / "milestone.json"
    if not path.is_file():
        raise KairosError(f"{milestone}: no milestone.json; pass a milestone folder, D/milestones/<step>")
    config = read_json(path)["config"]
    sampling = check(SamplingConfig, {**config["sampling"], **overrides}, f"{path}: sampling")
    conditions, dropout = config["model"].get("conditions") or [], config["training"]["condition_dropout"]
    sampling.check_fits(config["diffusion"], conditions, dropout)
    return sampling, config


def sample_milestone(job: SamplingJob, request: Request) -> None:
    """Draw, decode and write the images of one milestone."""
    from kairos.milestones import open_milestone

    options, config = settings(job.milestone, request.overrides)
    training = config["training"]
    device = compute.setup(training["threads"], training["device"], training["deterministic"])
    milestone = open_milestone(job.milestone, options.weights, device)
    record = milestone.record
    codec = open_codec(job.milestone, record, request.autoencoder, device)
    seed = options.seed if request.seed is None else request.seed
    process, shape = milestone.process, tuple(record["shape"])
    scheduler = resolved(options.scheduler, config["diffusion"]["process"])
    grid, clip = places(process, options.steps, scheduler), scheduler.get("clip", False)
    clock.work_begins()

    names = milestone.config["model"].get("conditions") or []
    latents = request.latents or job.milestone / "../../../../latents"
    label = f"sample {record['method']} seed {record['seed']} step {record['step']}"
    progress = Progress(request.num, label, "image")
    parts = []
    with torch.inference_mode():
        for indices, kept in batches(request.num, options.batch_size):
            conditions = conditions_of(indices, names, record["conditions"], latents)
            conditions = {name: values.to(device) for name, values in conditions.items()}
            predict = guided(process, milestone.model, conditions, record["conditions"], options.guidance_scale)
            estimate = estimate_of(process, predict, clip, options.precision)
            noise = noise_of(seed, indices, shape, device)
            x0 = build(SCHEDULERS, scheduler, process, grid, estimate, noise)  # (batch, c, h, w)
            parts.append(to_uint8(codec.decode(x0.float()))[:kept])
            progress.advance(kept)
    progress.close()
    images = np.concatenate(parts)  # (num, height, width, channels)

    protocol = {
        "identity": record["identity"],
        "method": record["method"],
        "training_seed": record["seed"],
        "step": record["step"],
        "weights": options.weights,
        "model_files": {
            name: value for name, value in record["files"].items() if name.startswith(f"{options.weights}/")
        },
        "autoencoder_sha256": record["autoencoder_sha256"],
        "scheduler": scheduler,
        "steps": options.steps,
        "nfe": options.nfe,
        "precision": options.precision,
        "guidance_scale": options.guidance_scale,
        "seed": seed,
        "num": request.num,
    }
    write_samples(job.out, images, protocol)
    if job.grid is not None:
        write_grid(job.grid, images[: options.grid])
    say(f"{label}: {request.num} images in {job.out}")


def open_codec(milestone: Path, record: dict[str, Any], folder: Path | None, device: torch.device | str) -> Any:
    """The autoencoder that a milestone was trained with.

    Raises:
        KairosError: it is not there, or it is another one.
    """
    from kairos.autoencoders.codec import load_codec

    folder = folder or milestone / "../../../../autoencoder"
    if not (folder / "manifest.json").is_file():
        raise KairosError(
            f"{folder}: no autoencoder; pass --autoencoder DIR, the one that {milestone} was trained with"
        )
    codec = load_codec(folder, device)
    if codec.manifest["sha256"] != record["autoencoder_sha256"]:
        raise KairosError(
            f"{folder}: autoencoder {codec.manifest['sha256'][:12]} is not the one that {milestone} was trained with "
            f"({record['autoencoder_sha256'][:12]}); pass that one as --autoencoder DIR, or train again"
        )
    return codec


def write_samples(path: Path, images: np.ndarray, protocol: dict[str, Any]) -> None:
    """Write images and how they came about, atomically."""
    with atomic(path) as file:
        np.savez(file, images=images, protocol=np.array(json.dumps(protocol, sort_keys=True)))


def read_samples(path: Path) -> tuple[np.ndarray, dict[str, Any]]:
    """Images (uint8, N×H×W×C) of an npz file and their protocol, empty where the file holds none.

    Raises:
        KairosError: no such file, or not images as `kairos sample` writes them.
    """
    if not path.is_file():
        raise KairosError(f"{path}: no such file; allowed: an npz file with `images`, uint8, N×H×W×C")
    try:
        with np.load(path, allow_pickle=False) as file:
            images = file["images"]
            protocol = json.loads(str(file["protocol"])) if "protocol" in file else {}
    except Exception as error:  # numpy and zipfile raise many kinds for a damaged file
        raise KairosError(f"{path}: cannot be read as npz with `images` ({error})") from None
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise KairosError(
            f"{path}: images: got {images.dtype} {images.shape}, allowed: uint8, N×H×W×C with 1 or 3 channels"
        )
    return images, protocol
