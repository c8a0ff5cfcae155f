"""Shapes and numbers of an experiment's images, latents and conditions, from its file or from prepared data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kairos.autoencoders.settings import AutoencoderConfig, check_image_size
from kairos.config import Experiment
from kairos.config.published_results import KnownConfig
from kairos.data.settings import DatasetConfig
from kairos.data.source_statistics import count_images
from kairos.files import read_json
from kairos.pretrained import read_network_config
from kairos.text_encoders.settings import TextEncoderConfig
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
        count_source: origin of the numbers of images, such as ``prepared`` or ``dataset.images``; the advice to set one
            if they are not known.
        caption_count: number of captions; None if not known.
        bytes_per_text: bytes of an encoded text; 0 without texts.
        bytes_per_latent_value: bytes of a stored value of the latents.
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
    bytes_per_latent_value: int = 4

    @property
    def bytes_per_image(self) -> int | None:
        """Bytes of a prepared image, which has one byte per value; None if the image's shape is not known."""
        return math.prod(self.image_shape) if self.image_shape else None

    @property
    def latent_bytes_per_image(self) -> int:
        """Bytes of the stored latents of an image; 0 in pixel space."""
        return self.bytes_per_latent_value * self.latent_arrays * math.prod(self.x0_shape)


def find_dataset_size(
    experiment: Experiment,
    results: Path,
    x0_shape: Shape | None,
    classes: int | None,
    text_shape: Sequence[int] | None = None,
) -> DatasetSize:
    """Find shapes and numbers of an experiment's data, from prepared data if possible, else from the experiment file.

    Nothing is downloaded; images that are not prepared are counted.

    Args:
        x0_shape: channels, height and width of the network's input, which take precedence; None: find them.
        classes: number of classes, if prepared data do not give it; None: find it.
        text_shape: tokens and width of an encoded text, which take precedence; None: find them.

    Raises:
        ConfigError: the shape of x0, the shape of a text or the number of classes is not known; the message reports the
            option that sets it. It is also raised if images cannot be used, if their number is not `dataset.images`, or
            if the autoencoder does not accept images of this size.
    """
    # shapes and numbers of images
    assumed = experiment.known or KnownConfig()  # facts in the experiment file, used if the data are not at hand
    dataset_record = _read_record(results / "dataset")
    image_shape, image_count, train_count, count_source = _find_image_counts(experiment, dataset_record)
    x0_shape, latent_arrays = _find_x0_shape(experiment, results, image_shape, x0_shape)

    # descriptions of conditions: prepared data replace the shape of x0 and the number of classes
    descriptions: dict[str, dict[str, Any]] = {"low_resolution": {"kind": "image", "shape": list(x0_shape)}}
    descriptions |= dataset_record.get("conditions", {})
    encoder = experiment.text_encoder
    bytes_per_text = 0
    if encoder is not None:
        text = _describe_text(encoder, results, text_shape or assumed.text)
        if text is not None:
            descriptions["text"] = text
            bytes_per_value = 2 if encoder.dtype == "float16" else 4
            bytes_per_text = math.prod(text["shape"]) * bytes_per_value
    if classes is None and "class" in experiment.conditions:
        classes = count_images(experiment.dataset).classes or assumed.classes
    if classes is not None:
        descriptions.setdefault("class", {"kind": "class", "num_classes": classes})
    missing = [name for name in experiment.conditions if name not in descriptions]
    if missing:
        option = {"class": "--classes N", "text": "--text TOKENS WIDTH"}.get(missing[0])  # none for a backbone's own
        advice = "run kairos prepare (and text)" + (f", or pass {option}" if option else "")
        raise ConfigError(f"model.conditions: the shape of {', '.join(missing)} is not known yet: {advice}")

    return DatasetSize(
        image_shape=image_shape,
        x0_shape=x0_shape,
        image_count=image_count,
        train_count=train_count,
        conditions={name: descriptions[name] for name in experiment.conditions},
        latent_arrays=latent_arrays,
        count_source=count_source,
        caption_count=dataset_record.get("captions", {}).get("count"),
        bytes_per_text=bytes_per_text,
        bytes_per_latent_value=2 if experiment.autoencoder.dtype == "float16" else 4,
    )


def _find_x0_shape(
    experiment: Experiment, results: Path, image_shape: Shape | None, passed_shape: Shape | None
) -> tuple[Shape, int]:
    """Return the shape of the network's input, and the number of latent arrays stored per image, 0 in pixel space.

    The shape is `passed_shape`, else it is from the first source that contains it: encoded latents, the experiment file
    with `image_shape`, its section `known`. Images of low resolution add an array, and flipped images double the
    number.

    Raises:
        ConfigError: the shape is not known, or the autoencoder does not accept images of `image_shape`.
    """
    autoencoder = experiment.autoencoder
    latents_record = _read_record(results / "latents")
    if autoencoder.kind == "none":  # pixel space
        configured_shape, arrays = image_shape, 0
    else:
        configured_shape, arrays = latent_shape(autoencoder, image_shape)
        if experiment.dataset.low_resolution is not None:
            arrays += 1  # the latents of the image of low resolution
        if experiment.dataset.flips:
            arrays *= 2  # flipped images are stored too
    assumed_shape = experiment.known.shape if experiment.known else None
    shape: Any = passed_shape or latents_record.get("shape") or configured_shape or assumed_shape
    if not shape:
        # with an image's shape, only the config.json of a pretrained autoencoder can be missing
        first_advice = f"fetch autoencoder.path ({autoencoder.path})" if image_shape else "set dataset.resolution"
        advice = f"{first_advice}, run kairos prepare and encode, or pass --shape C H W"
        raise ConfigError(f"the shape of the network's input is not known yet: {advice}")
    return tuple(shape), arrays


def _read_record(folder: Path) -> dict[str, Any]:
    """Return the content of record.json in a stage's folder; empty if the stage has not run: no such file."""
    path = folder / "record.json"
    return read_json(path) if path.is_file() else {}


def _find_image_counts(
    experiment: Experiment, dataset_record: dict[str, Any]
) -> tuple[Shape | None, int | None, int | None, str]:
    """Return the shape of an image, the numbers of all images and of training images, and the numbers' origin.

    A number or shape that is not known is None. The origin of prepared data is ``prepared``; for other data see
    `_count_unprepared_images`. `dataset_record` is the record of the prepared data, which is empty before stage
    prepare.

    Raises:
        ConfigError: the images cannot be used, or their counted number is not `dataset.images`.
    """
    if dataset_record:
        shape = (dataset_record["channels"], dataset_record["height"], dataset_record["width"])
        return shape, dataset_record["count"], dataset_record["train_count"], "prepared"
    dataset = experiment.dataset
    count, train_count, origin = _count_unprepared_images(dataset)
    image_shape = None if dataset.side is None else (dataset.channels, dataset.side, dataset.side)
    return image_shape, count, train_count, origin


def _count_unprepared_images(dataset: DatasetConfig) -> tuple[int | None, int | None, str]:
    """Return the numbers of all images and of training images before stage prepare, and the numbers' origin.

    The numbers follow from `dataset.train_images`, else from `dataset.images` and `dataset.limit`; else the images are
    counted. If held-out images are in another folder, the number of all images is None. The origin is
    ``dataset.train_images``, ``dataset.images``, ``counted`` or ``embedded`` (digits). If images cannot be counted,
    both numbers are None and the origin is the advice to set one of the fields.

    Raises:
        ConfigError: the images cannot be used, or their counted number is not `dataset.images`.
    """
    has_separate_heldout = isinstance(dataset.heldout, str)  # path of held-out images
    is_digits = dataset.source == "digits"  # scikit-learn's, whose number is known, so that the fields are ignored
    if dataset.train_images is not None and not is_digits:
        train_count = dataset.train_images
        # dataset.heldout is the fraction of all images that are held out, or the path of other images
        count = None if has_separate_heldout else round(train_count / (1 - float(dataset.heldout)))
        return count, train_count, "dataset.train_images"
    if dataset.images is not None and not is_digits:
        used_count = dataset.images if dataset.limit is None else min(dataset.images, dataset.limit)
        if has_separate_heldout:
            return None, used_count, "dataset.images"
        return used_count, used_count - dataset.heldout_count(used_count), "dataset.images"
    counts = count_images(dataset)
    if counts.unknown:
        return None, None, "unknown before kairos prepare; set dataset.train_images"
    origin = "embedded" if is_digits else "counted"
    return None if has_separate_heldout else counts.count, counts.train, origin


def latent_shape(config: AutoencoderConfig, image_shape: Shape | None) -> tuple[Shape | None, int]:
    """Return the shape of an image's latents, None if not known, and the number of arrays that store the latents.

    An autoencoder stores two arrays, mean and log-variance; AutoencoderTiny and VQModel store one. The shape of a
    pretrained autoencoder follows from its config.json, see `read_network_config`. It is not known without this file,
    and the number of arrays is then 2. The caller ensures that the autoencoder is not of kind none.

    Raises:
        ConfigError: the autoencoder does not accept images of this size.
        DamagedError: config.json does not contain an object in JSON.
    """
    level_channels: Sequence[int] | None = config.channels
    latent_channels = config.latent_channels
    arrays = 2
    if config.kind == "pretrained":
        pretrained = read_network_config(str(config.path))
        # VQModel has vq_embed_dim; 0: there is no config.json, and hence no `level_channels` either
        latent_channels = pretrained.get("vq_embed_dim") or pretrained.get("latent_channels", 0)
        level_channels = pretrained.get("block_out_channels") or pretrained.get("encoder_block_out_channels")
        arrays = 1 if pretrained.get("_class_name") in ("AutoencoderTiny", "VQModel") else 2
    if not image_shape or not level_channels:
        return None, arrays
    factor = 2 ** (len(level_channels) - 1)  # each level except the last halves the sides
    if config.kind == "pretrained":
        check_image_size(image_shape, factor, f"the autoencoder {config.path}")
    else:
        config.check_trainable_on(image_shape)
    _, height, width = image_shape
    return (latent_channels, height // factor, width // factor), arrays


def _describe_text(
    config: TextEncoderConfig, results: Path, known_shape: Sequence[int] | None
) -> dict[str, Any] | None:
    """Return the description of condition ``text``, with the shape of an encoded text; None if the shape is not known.

    The shape contains tokens and width, or only the width if the encoder's output is pooled. Without `known_shape`
    (tokens and width), the description is read from the record of encoded texts, if there are any. Otherwise the
    width is read from the encoder's config.json, and the tokens too unless the configuration has a length.
    """
    if known_shape is not None:
        length, width = known_shape
    else:
        text_record = _read_record(results / "text")
        if text_record:
            return dict(text_record["condition"])
        encoder_config = read_network_config(config.path)
        # CLIP has a section for each of its two networks
        text_config = encoder_config.get("text_config", encoder_config)
        length = config.length or text_config.get("max_position_embeddings")
        width = text_config.get("hidden_size") or text_config.get("d_model")  # d_model: T5
    shape = [length, width] if config.output == "tokens" else [width]
    if not all(shape):  # a number is missing
        return None
    return {"kind": "text", "shape": shape, "null": config.dropped}  # null: what replaces a dropped text
