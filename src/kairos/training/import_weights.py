"""Import of published weights as a snapshot, from which kairos samples, evaluates or starts a training run."""

import copy
from pathlib import Path
from typing import Any

import torch

from kairos import models
from kairos.data.latents import open_latents
from kairos.files import open_record, sha256_file, sha256_json
from kairos.forward_process import build_process, output_channels, scheduler_config
from kairos.models.published_weights import read_published
from kairos.snapshots import write_snapshot
from kairos.training.provenance import describe_environment
from kairos.training.settings import RunSettings
from kairos_timesteps import Strategy
from kairos_timesteps.errors import ConfigError, KairosError


def _learned_variance(schedule: str = "linear") -> dict[str, Any]:
    """Return section `diffusion` of a discrete process whose network also predicts the variance: losses mse and vb."""
    process = {"name": "discrete", "schedule": schedule, "variance": "learned_range"}
    return {"process": process, "losses": ["mse", "vb"]}


def _scaled_linear(beta_start: float, beta_end: float, **options: int) -> dict[str, Any]:
    """Return section `diffusion` of a discrete process whose square root of beta is linear, as in latent diffusion.

    `options` are further options of the process.
    """
    betas = {"schedule": "scaled_linear", "beta_start": beta_start, "beta_end": beta_end}
    return {"process": {"name": "discrete", **betas, **options}}


# Section `diffusion` that published weights were trained with. Keys are the backbone, the backbone with its size, or
# the backbone with "text" if it is conditioned on text.
PUBLISHED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("dit", "mdt", "adm", "unet speed"), _learned_variance()),
    "adm 64": _learned_variance("cosine"),
    "uvit": {"process": "vp"},
    **dict.fromkeys(("uvit h/2", "uvit text"), _scaled_linear(0.00085, 0.012, first_index=1)),
    "ldm_unet": _scaled_linear(0.0015, 0.0195),
    "vit": {"process": {"name": "discrete", "schedule": "cosine"}, "prediction": "x0"},
    "ddpmpp": {"process": {"name": "edm", "sigma_data": 0.5, "time_scale": 1.0}},
}


def published_diffusion(model: Any) -> dict[str, Any]:
    """Return a copy of section `diffusion` that published weights of a `model` section were trained with.

    The section `model` may be invalid. The result is empty if `PUBLISHED` has no entry for it, or if it is not a
    mapping, such as a bare name. The defaults of section `diffusion` then apply. An entry for a text-conditional
    backbone has priority over an entry for the backbone's size, and both over the entry of the backbone alone.
    """
    if not isinstance(model, dict):
        return {}
    name, conditions = model.get("name"), model.get("conditions")
    has_text = isinstance(conditions, list) and "text" in conditions
    text_keys = [f"{name} text"] if has_text else []
    for key in (*text_keys, f"{name} {model.get('size')}", str(name)):
        if key in PUBLISHED:
            return copy.deepcopy(PUBLISHED[key])  # the caller may change the result
    return {}


def import_weights(
    file: Path,
    run: RunSettings,
    out: Path,
    latents: Path | None = None,
    autoencoder: Path | None = None,
    shape: tuple[int, int, int] | None = None,
    classes: int | None = None,
    step: int = 0,
) -> dict[str, Any]:
    """Write a snapshot of published weights and return its record.

    The shape of x0 comes from `latents`, else from `autoencoder`, else from `shape`. A snapshot in `out` is replaced.

    The record has method ``imported``, seed 0 and 0 images seen. The snapshot's strategy is ``uniform``. Hashes of
    autoencoder and data set, and `sigma_data`, are None in the record where they are unknown. If the autoencoder is
    unknown, x0 of 1 or 3 channels is treated as pixels, which the snapshot's scheduler for diffusers clips.

    Args:
        file: weights, see `models.published_weights.read_published`.
        run: settings with the model and diffusion of the weights. Its experiment must contain section `sampling`,
            which sampling reads from the snapshot's record.
        out: folder of the snapshot.
        latents: folder of latents that the weights fit; provides shape, conditions, hashes of autoencoder and data set,
            and `sigma_data`.
        autoencoder: folder of the autoencoder that the weights fit; provides the shape and the autoencoder's hash.
            Ignored with `latents`.
        shape: shape of x0, (c, h, w); sampling then accepts any autoencoder with such latents. Ignored with `latents`
            or `autoencoder`.
        classes: number of classes of a class-conditional model; needed without `latents`, ignored with them.
        step: number of steps that the weights were trained for; 0: unknown.

    Raises:
        ConfigError: the shape of x0, the number of classes, another condition, or a `sigma_data` that the process needs
            is unknown.
        KairosError: the file cannot be read, its weights do not fit the model, or a folder is missing or damaged.
    """
    # shape of x0, descriptions of the conditions, and record of latents and autoencoder
    descriptions = {} if classes is None else {"class": {"kind": "class", "num_classes": classes}}
    sources: dict[str, Any] = {"autoencoder_sha256": None, "dataset_sha256": None, "sigma_data": None}
    if latents is not None:
        data = open_latents(latents)
        shape, descriptions = data.shape, data.condition_kinds
        sources = {
            "autoencoder_sha256": data.record["autoencoder_sha256"],
            "dataset_sha256": data.record["dataset_sha256"],
            "sigma_data": data.measure_sigma_data(),
        }
    elif autoencoder is not None:
        autoencoder_record = open_record(autoencoder, "autoencoder --config F")
        shape = tuple(autoencoder_record["latent_shape"])
        sources["autoencoder_sha256"] = autoencoder_record["sha256"]
    if shape is None:
        raise ConfigError("--shape: got none; pass C,H,W of x0, or --autoencoder DIR or --latents DIR that contain it")
    condition_names = run.model.conditions
    _check_conditions(condition_names, descriptions)

    # model with the published weights
    process = build_process(run.diffusion.process, run.diffusion.prediction, sources["sigma_data"])
    model = models.build(run.model, shape, descriptions, output_channels(process, shape[0]))
    averaged_weights = _load_published(model, file)  # the model itself receives the raw weights

    # record
    condition_records = {}
    for name in condition_names:
        condition_records[name] = dict(descriptions[name])
        condition_records[name].pop("empty", None)  # the encoded empty text, a large array
    identity_parts = {
        "config": run.plain_experiment(),
        "shape": list(shape),
        "conditions": condition_records,
        **sources,
        "imported": {"file": file.name, "sha256": sha256_file(file)},
    }
    record = {
        "identity": sha256_json(identity_parts), "method": "imported", "seed": 0, "step": step, "images_seen": 0,
        **identity_parts,
        # as the record of a run whose sampler does not learn; a and b are parameters of a learned Beta density
        "learned": False, "strategy": {"updates": None, "a": None, "b": None, "tv_from_start": 0.0},
        "provenance": describe_environment(run.training, torch.device("cpu")),  # of the import: the training is unknown
    }  # fmt: skip

    # snapshot
    columns = Strategy("uniform", process).table()  # the density of the published training is unknown
    # "pixels" is the hash of an experiment without an autoencoder; None: the autoencoder is unknown
    may_be_pixels = sources["autoencoder_sha256"] in (None, "pixels")
    has_pixels = may_be_pixels and shape[0] in (1, 3)  # grey or colour images
    scheduler = scheduler_config(process, clip=has_pixels)
    write_snapshot(out, model, averaged_weights, record, columns=columns, scheduler=scheduler)
    return record


def _load_published(model: Any, file: Path) -> dict[str, torch.Tensor]:
    """Load a file's raw weights into a model, and return copies of the file's averaged weights by the model's names.

    If the file contains only one set of weights, both are that set.

    Raises:
        KairosError: the file cannot be read, or its weights do not fit the model.
    """
    average, raw = read_published(file)
    try:
        # the average is loaded too, because `load_published` translates names and shapes; the raw weights come last and
        # stay in the model
        model.load_published(average)
        averaged_weights = {name: value.clone() for name, value in model.weights().items()}
        model.load_published(raw)
    except KairosError as error:
        raise KairosError(f"{file}: {error}") from None
    return averaged_weights


def _check_conditions(names: list[str], descriptions: dict[str, Any]) -> None:
    """Check that every condition of the model, in `names`, has a description.

    Raises:
        ConfigError: a description is missing; the message contains the command-line option that provides it:
            ``--classes`` for class, otherwise ``--latents``.
    """
    if "class" in names and "class" not in descriptions:
        raise ConfigError("--classes: got none, but the model is conditioned on classes; pass their number")
    undescribed = [name for name in names if name not in descriptions]
    if undescribed:
        raise ConfigError(
            f"--latents: got none, but the model has the conditions {undescribed}; pass latents with them"
        )
