"""Shapes and numbers of an experiment's images, latents and conditions, from its file or from prepared data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kairos.autoencoders.settings import AutoencoderConfig
from kairos.config import Experiment
from kairos.config.published_results import KnownConfig
from kairos.data.settings import DatasetConfig
from kairos.data.source_statistics import count_images
from kairos.files import read_json
from kairos.text.settings import TextEncoderConfig
from kairos_timesteps.errors import ConfigError

Shape = tuple[int, int, int]  # channels, height, width


@dataclass(frozen=True)
class DatasetSize:
    """Shapes and numbers of the data of an experiment.

    Attributes:
        image_shape: channels, height and width of an image; None if not known.
        x0_shape: channels, height and width of the network's input: an image or its latents.
        image_count: number of images, training and held out; None if not known.
        train_count: number of training images; None if not known.
        conditions: descriptions of the conditions that the network takes, by name.
        latent_arrays: number of stored arrays per image, each with `x0_shape`; 0 in pixel space.
        count_source: origin of the numbers of images, such as ``prepared`` or ``dataset.images``.
        caption_count: number of captions; None if not known.
        bytes_per_text: bytes of an encoded text; 0 without texts.
    """

    image_shape: Shape | None
    x0_shape: Shape
    image_count: int | None
    train_count: int | None
    conditions: dict[str, dict[str, Any]]
    latent_arrays: int
    count_source: str
    caption_count: int | None = None
    bytes_per_text: int = 0

    @property
    def bytes_per_image(self) -> int | None:
        """Bytes of a prepared image; None if its shape is not known."""
        return math.prod(self.image_shape) if self.image_shape else None

    @property
    def latent_bytes_per_image(self) -> int:
        """Bytes of the stored latents of an image; 0 in pixel space."""
        return 4 * self.latent_arrays * math.prod(self.x0_shape)


def find_dataset_size(
    experiment: Experiment,
    results: Path,
    x0_shape: Shape | None,
    classes: int | None,
    text_shape: Sequence[int] | None = None,
) -> DatasetSize:
    """Find shapes and numbers of an experiment's data: prepared data count first, then the experiment file.

    Args:
        experiment: the checked experiment.
        results: its folder of results.
        x0_shape: channels, height and width of the network's input; None: find them.
        classes: number of classes; None: find it.
        text_shape: tokens and width of an encoded text; None: find them.

    Raises:
        ConfigError: the shape of x0, the shape of a text or the number of classes is not known. The message reports the
            option that sets it.
    """
    assumed = experiment.known or KnownConfig()
    dataset_record = _read_manifest(results / "dataset")
    image_shape, image_count, train_count, count_source = _count_images(experiment, dataset_record)
    x0_shape, latent_arrays = _find_x0_shape(experiment, results, image_shape, x0_shape or assumed.shape)

    described: dict[str, dict[str, Any]] = {"low_resolution": {"kind": "image", "shape": list(x0_shape)}}
    described |= dataset_record.get("conditions", {})
    encoder, bytes_per_text = experiment.text_encoder, 0
    if encoder is not None and (text := _describe_text(encoder, results, text_shape or assumed.text)):
        described["text"] = text
        bytes_per_text = math.prod(text["shape"]) * (2 if encoder.dtype == "float16" else 4)
    if classes is None and "class" in experiment.conditions:
        classes = count_images(experiment.dataset).classes or assumed.classes
    if classes is not None:
        described.setdefault("class", {"kind": "class", "num_classes": classes})
    missing = [name for name in experiment.conditions if name not in described]
    if missing:
        option = {"class": "--classes N", "text": "--text TOKENS WIDTH"}[missing[0]]
        advice = f"run kairos prepare (and text), or pass {option}"
        raise ConfigError(f"model.conditions: the shape of {', '.join(missing)} is not known yet: {advice}")
    return DatasetSize(
        image_shape=image_shape,
        x0_shape=x0_shape,
        image_count=image_count,
        train_count=train_count,
        conditions={name: described[name] for name in experiment.conditions},
        latent_arrays=latent_arrays,
        count_source=count_source,
        caption_count=dataset_record.get("captions", {}).get("count"),
        bytes_per_text=bytes_per_text,
    )


def _find_x0_shape(
    experiment: Experiment, results: Path, image_shape: Shape | None, stated: Sequence[int] | None
) -> tuple[Shape, int]:
    """Find the shape of the network's input and the number of arrays that are stored per image, 0 in pixel space.

    Args:
        experiment: the checked experiment.
        results: its folder of results.
        image_shape: channels, height and width of an image, if known.
        stated: the shape that the user or the experiment file states, if any.

    Raises:
        ConfigError: the shape is not known.
    """
    autoencoder, encoded = experiment.autoencoder, _read_manifest(results / "latents")
    if autoencoder.kind == "none":
        computed, arrays = image_shape, 0
    else:
        computed, arrays = _latent_shape(autoencoder, image_shape)
        has_low_resolution = experiment.dataset.low_resolution is not None
        arrays = (arrays + has_low_resolution) * (1 + experiment.dataset.flips)
    shape: Any = stated or encoded.get("shape") or computed
    if not shape:
        fetch = f"fetch autoencoder.path ({autoencoder.path})" if image_shape else "set dataset.resolution"
        advice = f"{fetch}, run kairos prepare and encode, or pass --shape C H W"
        raise ConfigError(f"the shape of the network's input is not known yet: {advice}")
    return tuple(shape), arrays


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a stage's folder; empty if the stage has not run."""
    path = folder / "manifest.json"
    return read_json(path) if path.is_file() else {}
