"""An experiment file as a whole: its sections, the checks between them, and how it is read.

An experiment file stands alone: what it does not say has the default stated here, or the value of the file that it
names under `extends` (see `reading`).
"""

import re
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
)

from kairos.analyses.registries import ANALYSES, check_analyses
from kairos.autoencoders.settings import AutoencoderConfig
from kairos.config.consistency import check_fits
from kairos.config.plugins import check_listed, codes_file, load_plugins, method_codes
from kairos.config.published_results import ClaimConfig, KnownConfig, PublishedConfig
from kairos.config.reading import read_experiment_file
from kairos.config.strategies import DiffusionConfig, MethodConfig
from kairos.config.sweeps import expand_grids
from kairos.config.tracking import TrackingConfig
from kairos.data.settings import DatasetConfig
from kairos.evaluation.extractor_choice import choose_extractor
from kairos.evaluation.settings import EvaluationConfig
from kairos.files import sha256_json, write_json, write_text
from kairos.milestones import hash_start_weights
from kairos.models.registries import MODELS
from kairos.sampling.settings import SamplingConfig
from kairos.section import Section, check, component, field
from kairos.text_encoders.settings import TextEncoderConfig
from kairos.training.lengths import length_in_steps
from kairos.training.settings import TrainingConfig
from kairos_timesteps.errors import ConfigError, demand

REFERENCE_ROWS = ("floor", "reconstruction", "gaussian", "noise")
_FOLDERS = ("dataset", "autoencoder", "text", "latents", "extractor", "reference", "figures", "timing", "sums", "logs")
RESERVED = (*REFERENCE_ROWS, *_FOLDERS, "analyses")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")


def _folder_name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError("letters, digits and _ . + - only (it names a folder)")
    return value


def _distinct(seeds: list[int]) -> list[int]:
    if len(set(seeds)) != len(seeds) or min(seeds, default=0) < 0:
        raise ValueError("distinct seeds, each 0 or more")
    return seeds


def _method_names(methods: dict[str, MethodConfig]) -> dict[str, MethodConfig]:
    for name in methods:
        if not _NAME.fullmatch(name.replace("=", "")) or name in RESERVED:  # = is a sweep's
            reserved = ", ".join(RESERVED)
            raise ValueError(f"method name {name!r}: letters, digits and _ . + - only, and none of {reserved}")
    return methods


_Name = Annotated[str, AfterValidator(_folder_name)]
_Seeds = Annotated[list[int], AfterValidator(_distinct)]
_Plugins = Annotated[list[str], BeforeValidator(load_plugins)]
_Methods = Annotated[dict[str, MethodConfig], AfterValidator(_method_names)]
_EXTENDS = {"type": "string", "description": "experiment file that this one is laid over, from its own folder"}


class Experiment(Section):
    """An experiment: one data set, one model, several methods and seeds, compared."""

    model_config = ConfigDict(json_schema_extra=lambda schema: schema["properties"].update(extends=_EXTENDS))

    experiment: _Name = field(..., "name of the experiment and of its results folder")
    seeds: _Seeds = field([0], "seeds; all methods of a seed share data order and noise", min_length=1)
    dataset: DatasetConfig = DatasetConfig()
    autoencoder: AutoencoderConfig = AutoencoderConfig()
    text_encoder: TextEncoderConfig | None = field(None, "of captions, for a model that is told of texts")
    model: component(MODELS) = field("unet", "backbone")
    diffusion: DiffusionConfig = DiffusionConfig()
    training: TrainingConfig = TrainingConfig()
    plugins: _Plugins = field(
        [], "Python files that register samplers, weightings or couplings; paths from the working directory"
    )
    methods: _Methods = field(..., "timestep strategies by name", min_length=1)
    sampling: SamplingConfig = SamplingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    analyses: list[component(ANALYSES)] = field([], "measurements of their own, each a table and a figure")
    tracking: TrackingConfig = TrackingConfig()
    published: list[PublishedConfig] = field([], "numbers of a paper, which the report puts beside ours")
    claim: ClaimConfig | None = field(None, "what a paper claims of two of the methods")
    known: KnownConfig | None = field(None, "what plans take for known of data that are not here")

    @field_validator("methods", mode="before")
    @classmethod
    def _without_grids(cls, methods: Any) -> Any:
        return expand_grids(methods) if isinstance(methods, dict) else methods

    @model_serializer(mode="wrap")
    def _without_what_is_not_said(self, values_of: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Experiments without recipes or analyses stay what they were, to the hash."""
        values, later = values_of(self), ("plugins", "analyses", "published", "claim", "known")
        return {name: value for name, value in values.items() if value or name not in later}

    def model_post_init(self, context: Any) -> None:
        """Set fields whose values depend on other sections, and check that all sections fit together."""
        kind, store = self.autoencoder.kind, self.dataset.store
        allowed = "copy or auto where trainings read images, not latents"
        demand((store, kind) != ("refer", "none"), "dataset.store", "refer", allowed)
        if store == "auto":
            store = "refer" if kind == "pretrained" and self.dataset.source != "digits" else "copy"
            object.__setattr__(self, "dataset", self.dataset.model_copy(update={"store": store}))
        check_listed(self.plugins, self.methods)
        check_fits(self)
        check_analyses(self)
        if self.text_encoder is not None:
            takes = MODELS.entry(self.model["name"]).facts.get("text")
            object.__setattr__(self, "text_encoder", self.text_encoder.settled(takes))

    @property
    def conditions(self) -> list[str]:
        """Names of the conditions that the model takes."""
        return self.model.get("conditions") or []

    @property
    def baseline(self) -> str | None:
        """The method that samples uniformly and weights nothing (EDM: by its own lambda), which factors refer to."""
        plain = ("none", self.diffusion.process["name"])
        for name, method in self.methods.items():
            usual = method.sampler["name"], method.coupling["name"]
            if usual == ("uniform", "independent") and method.weighting["name"] in plain:
                return name
        return None

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics that are asked for; none where the usual ones are left to be chosen."""
        return [named["name"] for named in self.evaluation.metrics or ()]

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
            hash_start_weights(Path(start), self.model)
        evaluation, said = choose_extractor(self.evaluation, self.dataset, self.conditions)
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


def load(path: Path | str) -> Experiment:
    """Read and check an experiment file.

    Raises:
        ConfigError: the file is missing, is not YAML, or what it says cannot be used.
    """
    return validate(read_experiment_file(Path(path)), str(path))


def freeze(experiment: Experiment, folder: Path | str = ".kairos/config") -> Path:
    """Write the resolved configuration under its own hash, for jobs to read, so that edits change no running job.

    With plugins the hash covers their code too. A file next to the configuration contains the fingerprint of each
    component, see `plugins.check_unedited`.
    """
    plain = experiment.plain()
    codes = method_codes(plain["methods"])
    path = Path(folder) / f"{experiment.experiment}-{sha256_json([plain, codes] if codes else plain)[:16]}.yaml"
    if codes and not codes_file(path).exists():
        write_json(codes_file(path), codes)
    if not path.exists():
        write_text(path, yaml.safe_dump(plain, sort_keys=False))
    return path
