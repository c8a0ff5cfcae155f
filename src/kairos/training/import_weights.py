"""Published weights as a milestone: it samples, is evaluated, and a training can start from it."""

from pathlib import Path
from typing import Any

import torch

from kairos import models
from kairos.data.latents import open_latents
from kairos.files import open_record, sha256_file, sha256_json
from kairos.forward_process import build_process, scheduler_config
from kairos.milestones import write_milestone
from kairos.models.published_weights import read_published
from kairos.training.provenance import build_provenance, library_versions
from kairos_timesteps.errors import ConfigError, KairosError
from kairos_timesteps.strategy import Strategy


def _hybrid(schedule: str = "linear") -> dict[str, Any]:
    process = {"name": "discrete", "schedule": schedule, "variance": "learned_range"}
    return {"process": process, "losses": ["mse", "vb"]}


def _scaled_linear(start: float, end: float, **further: int) -> dict[str, Any]:
    ends = {"schedule": "scaled_linear", "beta_start": start, "beta_end": end}
    return {"process": {"name": "discrete", **ends, **further}}


# section `diffusion` that files of a backbone, of one of its sizes or told of text were trained with
PUBLISHED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("dit", "mdt", "adm", "unet speed"), _hybrid()),
    "adm 64": _hybrid("cosine"),
    "uvit": {"process": "vp"},
    **dict.fromkeys(("uvit h/2", "uvit text"), _scaled_linear(0.00085, 0.012, first_index=1)),
    "ldm_unet": _scaled_linear(0.0015, 0.0195),
    "vit": {"process": {"name": "discrete", "schedule": "cosine"}, "prediction": "x0"},
    "ddpmpp": {"process": {"name": "edm", "sigma_data": 0.5, "time_scale": 1.0}},
}


def published_diffusion(model: Any) -> dict[str, Any]:
    """Section `diffusion` that the published files of a `model` section were trained with; empty: the default."""
    if not isinstance(model, dict):
        return {}
    name, told = model.get("name"), model.get("conditions")
    kinds = ["text"] * (isinstance(told, list) and "text" in told) + [model.get("size")]
    return next((PUBLISHED[key] for key in (*(f"{name} {kind}" for kind in kinds), str(name)) if key in PUBLISHED), {})


def import_weights(
    file: Path,
    plain: dict[str, Any],
    out: Path,
    latents: Path | None = None,
    autoencoder: Path | None = None,
    shape: tuple[int, int, int] | None = None,
    classes: int | None = None,
    step: int = 0,
) -> dict[str, Any]:
    """Write a milestone of published weights and return its record.

    Args:
        file: see `models.published_weights.read_published`.
        plain: a whole experiment, whose model, diffusion and sampling are those of the weights.
        out: folder of the milestone.
        latents: what the weights go with: shape of x0, conditions, autoencoder; or else
        autoencoder: the folder of the autoencoder that they go with; or else
        shape: of x0; sampling then takes any autoencoder with such latents.
        classes: of a model that is told classes, where there are no latents.
        step: number of steps that the weights were trained for, if it is known.

    Raises:
        ConfigError: the shape of x0 or the number of classes is not known.
        KairosError: the file cannot be used, or its weights are not those of the model.
    """
    facts: dict[str, Any] = dict.fromkeys(("autoencoder_sha256", "dataset_sha256", "sigma_data"))
    conditions = {} if classes is None else {"class": {"kind": "class", "num_classes": classes}}
    if latents is not None:
        opened = open_latents(latents)
        facts |= {name: opened.manifest[name] for name in ("autoencoder_sha256", "dataset_sha256")}
        facts["sigma_data"], shape, conditions = opened.sigma_data(), opened.shape, opened.condition_kinds
    elif autoencoder is not None:
        manifest = open_record(autoencoder, "autoencoder --config F")
        facts["autoencoder_sha256"], shape = manifest["sha256"], tuple(manifest["latent_shape"])
    wanted = plain["model"].get("conditions") or []
    if shape is None:
        raise ConfigError("--shape: got none, allowed: C,H,W of x0, or --autoencoder DIR or --latents DIR that say it")
    if "class" in wanted and "class" not in conditions:
        raise ConfigError("--classes: got none with a model that is told classes, allowed: their number")
    if lacking := [name for name in wanted if name not in conditions]:
        raise ConfigError(f"--latents: got none that say what {lacking} is like, allowed: those of such a data set")
    process = build_process(plain["diffusion"], facts["sigma_data"])
    model = models.build(plain["model"], shape, conditions, process.channels(shape[0]))
    average, raw = read_published(file)
    try:
        model.load_published(average)
        averaged = {name: value.clone() for name, value in model.weights().items()}
        model.load_published(raw)
    except KairosError as error:
        raise KairosError(f"{file}: {error}") from None
    came = {"file": file.name, "sha256": sha256_file(file)}
    kept = {name: {k: v for k, v in conditions[name].items() if k != "empty"} for name in wanted}
    about = {"config": plain, "shape": list(shape), "conditions": kept, **facts, "imported": came}
    record = {
        "identity": sha256_json(about), "method": "imported", "seed": 0, "step": step, "images_seen": 0, **about,
        "learned": False, "strategy": {"updates": None, "a": None, "b": None, "tv_from_start": 0.0},
        "provenance": build_provenance(plain, torch.device("cpu"), library_versions(), []),
    }  # fmt: skip
    columns = Strategy("uniform", process).table()
    clip = facts["autoencoder_sha256"] in (None, "pixels") and shape[0] in (1, 3)
    scheduler = scheduler_config(process, clip)
    write_milestone(out, model, averaged, record, columns=columns, scheduler=scheduler)
    return record
