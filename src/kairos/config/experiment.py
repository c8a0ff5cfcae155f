"""An experiment file as a whole: its sections, the checks between them, and how it is read.

An experiment file stands alone: what it does not say has the default stated here, never another file's value.
"""

import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, field_validator, model_validator

from kairos.autoencoders.settings import AutoencoderConfig
from kairos.config.strategies import DiffusionConfig, MethodConfig
from kairos.config.tracking import TrackingConfig
from kairos.data.settings import DatasetConfig
from kairos.diffusion.registries import CELLS, LOSSES
from kairos.errors import ConfigError
from kairos.evaluation.choice import choose
from kairos.evaluation.settings import EvaluationConfig
from kairos.files import sha256_json, write_text
from kairos.milestones import hash_of_start
from kairos.models import check_takes
from kairos.models.registries import MODELS
from kairos.options import but_name
from kairos.sampling.settings import SamplingConfig
from kairos.section import Section, check, component
from kairos.strategies.registries import SAMPLERS, WEIGHTINGS, checked
from kairos.text.settings import TextEncoderConfig
from kairos.training.lengths import length_in_steps
from kairos.training.settings import TrainingConfig

REFERENCE_ROWS = ("floor", "reconstruction", "gaussian", "noise")
_FOLDERS = ("dataset", "autoencoder", "text", "latents", "extractor", "reference", "figures", "timing", "sums", "logs")
RESERVED = (*REFERENCE_ROWS, *_FOLDERS)
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.+-]*$")


class Experiment(Section):
    """An experiment: one data set, one model, several methods and seeds, compared."""

    experiment: str = Field(description="name of the experiment and of its results folder")
    seeds: list[int] = Field([0], min_length=1, description="seeds; all methods of a seed share data order and noise")
    dataset: DatasetConfig = DatasetConfig()
    autoencoder: AutoencoderConfig = AutoencoderConfig()
    text_encoder: TextEncoderConfig | None = Field(None, description="of captions, for a model that is told of texts")
    model: component(MODELS) = Field("unet", validate_default=True, description="backbone")  # type: ignore[valid-type]
    diffusion: DiffusionConfig = DiffusionConfig()
    training: TrainingConfig = TrainingConfig()
    methods: dict[str, MethodConfig] = Field(min_length=1, description="timestep strategies by name")
    sampling: SamplingConfig = SamplingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    tracking: TrackingConfig = TrackingConfig()

    @field_validator("experiment")
    @classmethod
    def _folder_name(cls, value: str) -> str:
        if not _NAME.match(value):
            raise ValueError("letters, digits and _ . + - only (it names a folder)")
        return value

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, value: list[int]) -> list[int]:
        if len(set(value)) != len(value) or min(value) < 0:
            raise ValueError("distinct seeds, each 0 or more")
        return value

    @field_validator("methods")
    @classmethod
    def _method_names(cls, value: dict[str, MethodConfig]) -> dict[str, MethodConfig]:
        for name in value:
            if not _NAME.match(name) or "." in name or name in RESERVED:  # dvc splits names at dots
                reserved = ", ".join(RESERVED)
                raise ValueError(f"method name {name!r}: letters, digits and _ + - only, and none of {reserved}")
        return value

    @model_validator(mode="after")
    def _model_is_told(self) -> "Experiment":
        try:
            check_takes(self.model)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self

    @model_validator(mode="after")
    def _images_stay_or_are_copied(self) -> "Experiment":
        kind, store = self.autoencoder.kind, self.dataset.store
        if store == "refer" and kind == "none":
            raise ValueError("dataset.store: got refer, allowed: copy or auto where trainings read images, not latents")
        if store == "auto":
            store = "refer" if kind == "pretrained" and self.dataset.source != "digits" else "copy"
            object.__setattr__(self, "dataset", self.dataset.model_copy(update={"store": store}))
        return self

    @model_validator(mode="after")
    def _texts_are_encoded(self) -> "Experiment":
        encoder, scored = self.text_encoder, [named["name"] for named in self.evaluation.metrics or ()]
        needed = {"dataset.captions": self.dataset.captions, "text_encoder": encoder}
        useless = {"text_encoder": encoder and encoder.path, "evaluation.metrics": "clip" if "clip" in scored else None}
        for field, value in needed.items() if self.takes_text else ():
            if value is None:
                raise ValueError(f"{field}: got null, allowed: what it needs where model.conditions names text")
        for field, value in useless.items() if not self.takes_text else ():
            if value is not None:
                raise ValueError(f"{field}: got {value}, allowed: where model.conditions names text")
        if encoder is not None:
            takes = MODELS.entry(self.model["name"]).facts.get("text")
            object.__setattr__(self, "text_encoder", encoder.settled(takes))
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> "Experiment":
        steps = self.milestones
        if list(steps) != sorted(set(steps)):
            raise ValueError(f"training.milestones: got {list(self.training.milestones)}, allowed: increasing lengths")
        segments, most = self.training.segments, len(steps) - 1
        if segments > most:
            raise ValueError(f"training.segments: got {segments}, allowed: at most the number of milestones ({most})")
        images, size = self.evaluation.num_samples * self.evaluation.sets, self.sampling.batch_size
        if self.sampling.shards > -(-images // size):
            raise ValueError(
                f"sampling.shards: got {self.sampling.shards}, allowed: at most {-(-images // size)}, the batches "
                f"(sampling.batch_size {size}) that the {images} images of a milestone are drawn in"
            )
        process, losses = self.diffusion.process, [loss["name"] for loss in self.diffusion.losses]
        masked = [name for name in losses if LOSSES.entry(name).facts.get("masked")]
        if masked and not MODELS.entry(self.model["name"]).facts.get("masks"):
            able = [name for name, entry in MODELS.items() if entry.facts.get("masks")]
            raise ValueError(
                f"diffusion.losses: got {masked[0]} with model {self.model['name']}, allowed: with a model that hides "
                f"tokens: {', '.join(able) or 'none is known'}"
            )
        timesteps, schedule = process.get("timesteps", CELLS), process.get("schedule", process["name"])
        shown = process["timesteps"] + process.get("first_index", 0) if "timesteps" in process else math.inf
        if self.model.get("timesteps", math.inf) < shown:
            of = shown if "timesteps" in process else f"{process['name']} is continuous"
            got = f"model.timesteps: got {self.model['timesteps']}"
            raise ValueError(f"{got}, allowed: at least the indices that a discrete process shows ({of})")
        conditions = self.model.get("conditions") or []
        try:
            for name, method in self.methods.items():
                for part, registry in (("sampler", SAMPLERS), ("weighting", WEIGHTINGS)):
                    named = getattr(method, part)
                    place = f"methods.{name}.{part}"
                    checked(registry, named["name"], but_name(named), timesteps, schedule, place)
            self.sampling.check_fits(self.diffusion.model_dump(), conditions, self.training.condition_dropout)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        taken, factor = "low_resolution" in conditions, self.dataset.low_resolution
        if taken != (factor is not None):
            raise ValueError(
                f"dataset.low_resolution: got {factor}, allowed: "
                + ("a number, since model.conditions has" if taken else "null, since model.conditions has no")
                + " low_resolution"
            )
        channels, side = self.x0 or (math.inf, 0)
        patch, guided = self.model.get("patch") or 1, self.sampling.guidance_channels or 1
        if side % patch:
            raise ValueError(f"model.patch: got {patch}, allowed: a divisor of x0's side, {side}")
        if guided > channels:
            raise ValueError(f"sampling.guidance_channels: got {guided}, allowed: at most {channels}, those of x0")
        if not taken and any(metric["name"] == "psnr" for metric in self.evaluation.metrics or ()):
            raise ValueError("evaluation.metrics: got psnr, allowed where model.conditions has low_resolution")
        return self

    @model_validator(mode="after")
    def _network_is_told(self) -> "Experiment":
        dropout, augment, model = self.training.condition_dropout, self.training.augment, self.model
        if dropout and model.get("null_class") is False and "class" in model["conditions"]:
            raise ValueError(
                f"training.condition_dropout: got {dropout} with model.null_class: false, allowed: 0, and no guidance "
                "(as published: there is no row for no class)"
            )
        if augment is not None and self.autoencoder.kind != "none":
            kind = self.autoencoder.kind
            raise ValueError(f"autoencoder.kind: got {kind} with training.augment, allowed: none (it moves pixels)")
        if augment is not None and self.dataset.flips:
            raise ValueError("dataset.flips: got true with training.augment, allowed: false (it flips by itself)")
        if augment is not None and not model.get("augment"):
            raise ValueError(
                f"training.augment: got {augment} with model {model['name']}, allowed: null, or a model that is told "
                "of it: ddpmpp with augment: 9"
            )
        return self

    @property
    def x0(self) -> tuple[int, int] | None:
        """Channels and side of what the network is trained on, where the file alone says them."""
        dataset, autoencoder = self.dataset, self.autoencoder
        side, halved = dataset.resolution or 8 * (dataset.source == "digits"), 2 ** (len(autoencoder.channels) - 1)
        if not side or autoencoder.kind == "pretrained":
            return None
        if autoencoder.kind == "train":
            return (autoencoder.latent_channels, side // halved) if side % halved == 0 else None
        return 1 if dataset.color == "grey" else 3, side

    @property
    def takes_text(self) -> bool:
        """Whether the model is told of captions."""
        return "text" in (self.model.get("conditions") or [])

    @property
    def milestones(self) -> tuple[int, ...]:
        """All milestones in steps, 0 (untrained) first."""
        training = self.training
        return (0, *(length_in_steps(m, training.batch_size, self.dataset.train_images) for m in training.milestones))

    @property
    def segments(self) -> tuple[tuple[int, ...], ...]:
        """The milestones of each training job, in order; step 0 belongs to the first."""
        steps, count = self.milestones, self.training.segments
        ends = [1 + round((len(steps) - 1) * k / count) for k in range(1, count + 1)]
        return tuple(steps[a:b] for a, b in pairwise([0, *ends]))

    def settled(self) -> tuple["Experiment", list[str]]:
        """The experiment with a definite extractor, and what is to be said of it; see `choice.choose`.

        Raises:
            ConfigError: there is no milestone where trainings are to start from one.
        """
        if start := self.training.start_from:
            hash_of_start(Path(start), self.model)
        evaluation, said = choose(self.evaluation, self.dataset, self.model.get("conditions") or ())
        return self.model_copy(update={"evaluation": evaluation}), said

    def plain(self) -> dict[str, Any]:
        """The whole configuration as plain values, defaults included."""
        return self.model_dump(mode="json")


def validate(values: Any, source: str = "experiment") -> Experiment:
    """Check an experiment given as plain values.

    Raises:
        ConfigError: everything that is wrong, a line per field: the field, the value and what is allowed.
    """
    if not isinstance(values, dict):
        fields = ", ".join(Experiment.model_fields)
        raise ConfigError(f"{source}: an experiment file is a mapping with the fields {fields}")
    return check(Experiment, values, source)


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key given twice is a mistake; YAML itself would quietly keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"key given twice: {', '.join(twice)}", node.start_mark)
        return super().construct_mapping(node, deep)


def load(path: Path | str) -> Experiment:
    """Read and check an experiment file.

    Raises:
        ConfigError: the file is missing, is not YAML, or what it says cannot be used.
    """
    path = Path(path)
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        advice = "pass an experiment file such as params.yaml"
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); {advice}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not YAML in UTF-8: {' '.join(str(error).split())}") from None
    return validate(values, str(path))


def freeze(experiment: Experiment, folder: Path | str = ".kairos/config") -> Path:
    """Write the resolved configuration under its own hash, for jobs to read, so that edits change no running job."""
    plain = experiment.plain()
    path = Path(folder) / f"{experiment.experiment}-{sha256_json(plain)[:16]}.yaml"
    if not path.exists():
        write_text(path, yaml.safe_dump(plain, sort_keys=False))
    return path
