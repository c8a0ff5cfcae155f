"""Properties of an experiment's data that are known before they are prepared: shapes, and mostly their number."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kairos.autoencoders.settings import AutoencoderConfig
from kairos.config import Experiment
from kairos.config.published_results import KnownConfig
from kairos.data.survey import survey
from kairos.files import read_json
from kairos.text_encoders.settings import TextEncoderConfig
from kairos_timesteps.errors import ConfigError

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Data:
    """The data of an experiment.

    Attributes:
        image: channels, height and width of an image; None where that is not known.
        x0: the same of what the network is trained on.
        images: number of images, training and held out; None where that is not known.
        train: number of training images.
        conditions: descriptions of the conditions that the network takes.
        moments: arrays that the latents consist of; 0 in pixel space.
        known: where the number is from.
        captions: number of captions; None where that is not known.
        text_bytes: of the states of a text; 0 where there are none.
    """

    image: Shape | None
    x0: Shape
    images: int | None
    train: int | None
    conditions: dict[str, dict[str, Any]]
    moments: int
    known: str
    captions: int | None = None
    text_bytes: int = 0

    @property
    def image_bytes(self) -> int | None:
        """Bytes of a prepared image."""
        return math.prod(self.image) if self.image else None

    @property
    def latent_bytes(self) -> int:
        """Bytes of an image's latents; 0 in pixel space."""
        return 4 * self.moments * math.prod(self.x0)


def describe(
    experiment: Experiment, results: Path, x0: Shape | None, classes: int | None, text: Sequence[int] | None = None
) -> Data:
    """The data of an experiment, from what is prepared already, or else from its file.

    Args:
        experiment: the checked experiment.
        results: its folder.
        x0: what the network is trained on, given by the user; None: to be found out.
        classes: number of classes, likewise.
        text: tokens and width of a text's states, likewise.

    Raises:
        ConfigError: the shape of x0 or of a text, or the number of classes is not known; the message says how to give
            it.
    """
    given = experiment.known or KnownConfig()
    record, encoded, kind = _record(results / "dataset"), _record(results / "latents"), experiment.autoencoder.kind
    image, images, train, known = _images(experiment, record)
    found, arrays = (image, 0) if kind == "none" else _latents(experiment.autoencoder, image)
    shape: Any = x0 or (tuple(encoded["shape"]) if encoded else found) or tuple(given.shape or ())
    if not shape:
        lacking = f"fetch autoencoder.path ({experiment.autoencoder.path})" if image else "set dataset.resolution"
        advice = f"{lacking}, run kairos prepare and encode, or give --shape C H W"
        raise ConfigError(f"the shape of what the network is trained on is not known yet: {advice}")
    if kind != "none":
        arrays = (arrays + (experiment.dataset.low_resolution is not None)) * (1 + experiment.dataset.flips)
    told = {"low_resolution": {"kind": "image", "shape": list(shape)}, **record.get("conditions", {})}
    encoder, states = experiment.text_encoder, 0
    if encoder is not None and (described := _text(encoder, results, text or given.text)):
        told["text"] = described
        states = math.prod(described["shape"]) * (2 if encoder.dtype == "float16" else 4)
    if classes is None and "class" in experiment.conditions:
        classes = survey(experiment.dataset).classes or given.classes
    if classes is not None:
        told.setdefault("class", {"kind": "class", "num_classes": classes})
    missing = [name for name in experiment.conditions if name not in told]
    if missing:
        give = {"class": "--classes N", "text": "--text TOKENS WIDTH"}[missing[0]]
        advice = f"run kairos prepare (and text), or give {give}"
        raise ConfigError(f"model.conditions: what {', '.join(missing)} is like is not known yet: {advice}")
    conditions = {name: told[name] for name in experiment.conditions}
    captions = record.get("captions", {}).get("count")
    return Data(image, shape, images, train, conditions, arrays, known, captions, states)


def _record(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    return read_json(path) if path.is_file() else {}


def _images(experiment: Experiment, record: dict[str, Any]) -> tuple[Shape | None, int | None, int | None, str]:
    """Shape of an image, number of images and of training images, and where the numbers are from."""
    dataset, own = experiment.dataset, isinstance(experiment.dataset.heldout, str)
    if record:
        shape = (record["channels"], record["height"], record["width"])
        return shape, record["count"], record["train_count"], "prepared"
    digits = dataset.source == "digits"
    side = dataset.resolution or 8 * digits
    image = (1 if dataset.color == "grey" else 3, side, side) if side else None
    if dataset.train_images is not None and not digits:
        images = None if own else round(dataset.train_images / (1 - float(dataset.heldout)))
        return image, images, dataset.train_images, "dataset.train_images"
    if (images := dataset.images) is not None and not digits:
        return image, None if own else images, images - (0 if own else dataset.held_out(images)), "dataset.images"
    if not (seen := survey(dataset)).unknown:
        return image, None if own else seen.count, seen.train, "embedded" if digits else "counted"
    return image, None, None, "unknown before kairos prepare; dataset.train_images would tell"


def _pretrained(path: str) -> dict[str, Any]:
    """config.json of a pretrained autoencoder, if it is a folder here or in the hub's cache, else nothing."""
    file: Any = Path(path) / "config.json"
    if not Path(path).is_dir():
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(path, "config.json") if path.count("/") == 1 else None
    return read_json(file) if isinstance(file, (str, Path)) and Path(file).is_file() else {}


def _latents(config: AutoencoderConfig, image: Shape | None) -> tuple[Shape | None, int]:
    """Shape of an image's latents, where that is known, and the number of arrays that they are kept in."""
    levels: Sequence[int] | None = config.channels
    channels, arrays = config.latent_channels, 2
    if config.kind == "pretrained":
        found = _pretrained(str(config.path))
        channels = found.get("vq_embed_dim") or found.get("latent_channels", 0)
        levels = found.get("block_out_channels") or found.get("encoder_block_out_channels")
        arrays = 1 if found.get("_class_name") in ("AutoencoderTiny", "VQModel") else 2
    if not image or not levels:
        return None, arrays
    factor = 2 ** (len(levels) - 1)  # each level but the first halves the sides
    return (channels, image[1] // factor, image[2] // factor), arrays


def _text(config: TextEncoderConfig, results: Path, given: Sequence[int] | None) -> dict[str, Any] | None:
    """Return the description of encoded texts: from `given`, from stage text, or from the encoder's configuration.

    None if the shape is not known.
    """
    if given is None and (made := _record(results / "text")):
        return dict(made["condition"])
    found = {} if given else _pretrained(config.path)
    found = found.get("text_config", found)
    own = config.length or found.get("max_position_embeddings"), found.get("hidden_size") or found.get("d_model")
    length, width = given or own
    shape = [length, width] if config.output == "tokens" else [width]
    return {"kind": "text", "shape": shape, "null": config.dropped} if all(shape) else None
