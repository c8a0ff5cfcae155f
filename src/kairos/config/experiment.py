"""The experiment: sections of an experiment file, checks between them, and functions that load and freeze one.

A field that an experiment file omits has its default, or the value of the file that `extends` names (see `reading`).
"""

import os
import re
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    field_validator,
    model_validator,
)

from kairos.analyses.settings import ANALYSES, AnalysisOptions, check_analyses
from kairos.autoencoders.settings import AutoencoderConfig
from kairos.components import component
from kairos.config.consistency import check_consistency
from kairos.config.plugins import check_listed, hash_plugins, load_plugins, plugin_hashes_file
from kairos.config.published_results import ClaimConfig, KnownConfig, PublishedConfig
from kairos.config.reading import read_experiment_file
from kairos.config.sweeps import expand_grids
from kairos.config.tracking import TrackingConfig
from kairos.data.settings import DatasetConfig
from kairos.diffusion import DiffusionConfig, MethodConfig
from kairos.evaluation.extractor_choice import choose_extractor
from kairos.evaluation.settings import EvaluationConfig
from kairos.files import DamagedError, glance, read_json, sha256_json, write_json, write_text
from kairos.models.settings import BACKBONES, BackboneOptions
from kairos.sampling.settings import SamplingConfig
from kairos.section import Section, check, field
from kairos.snapshots import hash_start_weights
from kairos.text_encoders.settings import TextEncoderConfig
from kairos.training.lengths import length_in_steps
from kairos.training.settings import RunSettings, TrainingConfig
from kairos_timesteps.errors import ConfigError, demand

REFERENCE_ROWS = ("floor", "reconstruction", "gaussian", "noise")
_FROZEN = Path(".kairos/config")  # folder of frozen experiments
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")


def _check_folder_name(value: str) -> str:
    """Return a name unchanged if it can be the name of a folder.

    Raises:
        ValueError: the name is empty, contains other characters than ASCII letters, digits and ``_.+-``, or begins with
            one of ``_.+-``.
    """
    if not _NAME.fullmatch(value):
        raise ValueError("letters, digits and _ . + - only (it names a folder)")
    return value


def _check_seeds(seeds: list[int]) -> list[int]:
    """Return seeds unchanged; their order is arbitrary, and an empty list passes.

    Raises:
        ValueError: a seed is negative or occurs twice.
    """
    are_distinct = len(set(seeds)) == len(seeds)
    has_negative = min(seeds, default=0) < 0
    if not are_distinct or has_negative:
        raise ValueError("distinct seeds, each 0 or more")
    return seeds


def _check_method_names(methods: dict[str, MethodConfig]) -> dict[str, MethodConfig]:
    """Return methods unchanged if each name can be the name of a folder; ``=`` is allowed, since sweeps use it.

    Raises:
        ValueError: a name contains other characters, or is that of a row of the report, see `REFERENCE_ROWS`.
    """
    for name in methods:
        without_equals_sign = name.replace("=", "")
        is_folder_name = _NAME.fullmatch(without_equals_sign) is not None
        if not is_folder_name or name in REFERENCE_ROWS:
            reserved = ", ".join(REFERENCE_ROWS)
            raise ValueError(f"method name {name!r}: letters, digits and _ . + - only, and none of {reserved}")
    return methods


_Name = Annotated[str, AfterValidator(_check_folder_name)]
_Seeds = Annotated[list[int], AfterValidator(_check_seeds)]
_Plugins = Annotated[list[str], BeforeValidator(load_plugins)]
_Analysis = Annotated[AnalysisOptions, component(ANALYSES)]
_Methods = Annotated[dict[str, MethodConfig], AfterValidator(_check_method_names)]
_EXTENDS = {
    "type": "string",
    "description": "experiment file whose values this one overrides; path from the folder of this file",
}


class Experiment(Section):
    """An experiment: a comparison of methods on one data set and one model, with one or more seeds."""

    model_config = ConfigDict(json_schema_extra=lambda schema: schema["properties"].update(extends=_EXTENDS))

    experiment: _Name = field(..., "name of the experiment and of its results folder")
    seeds: _Seeds = field([0], "seeds; all methods of a seed share data order and noise", min_length=1)
    dataset: DatasetConfig = DatasetConfig()
    autoencoder: AutoencoderConfig = AutoencoderConfig()
    text_encoder: TextEncoderConfig | None = field(None, "encoder of captions, for a text-conditional model")
    model: Annotated[BackboneOptions, component(BACKBONES)] = field("unet", "backbone")
    diffusion: DiffusionConfig = DiffusionConfig()
    training: TrainingConfig = TrainingConfig()
    plugins: _Plugins = field(
        [], "Python files that register samplers, weightings or couplings; paths from the working directory"
    )
    methods: _Methods = field(..., "timestep strategies by name", min_length=1)
    sampling: SamplingConfig = SamplingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    analyses: list[_Analysis] = field([], "further measurements, each with a table and a figure")
    tracking: TrackingConfig = TrackingConfig()
    published: list[PublishedConfig] = field([], "numbers of a paper, for comparison in the report")
    claim: ClaimConfig | None = field(None, "a paper's claim about two of the methods")
    known: KnownConfig | None = field(None, "properties that kairos plan assumes for missing data")

    @field_validator("methods", mode="before")
    @classmethod
    def _expand_grids(cls, methods: Any) -> Any:
        """Return the methods with each grid expanded, before they are checked, see `expand_grids`.

        A value that is not a mapping is returned unchanged, since pydantic rejects it afterwards.
        """
        return expand_grids(methods) if isinstance(methods, dict) else methods

    @model_validator(mode="after")
    def _check_and_resolve(self) -> Self:
        """Check sections, plugins and analyses; return a copy without ``auto`` in `dataset.store` and `text_encoder`.

        Raises:
            ConfigError: two sections contradict each other, or a plugin of a method is not listed in `plugins`. The
                message reports the first problem.
            ValueError: a training length has no number of steps, see `milestones`.
        """
        dataset = self._resolve_store()
        check_listed(self.plugins, self.methods)
        check_consistency(self)
        check_analyses(self)
        text_encoder = self.text_encoder
        if text_encoder is not None:
            text_encoder = text_encoder.resolve_auto(self.model.text_form)
        return self.model_copy(update={"dataset": dataset, "text_encoder": text_encoder})

    def _resolve_store(self) -> DatasetConfig:
        """Return section `dataset` with ``refer`` or ``copy`` instead of `store: auto`, otherwise unchanged.

        Training in pixel space reads prepared images, which therefore have to be copies. With ``auto``, data refer to
        the user's images only if a pretrained autoencoder encodes them, as it reads each image once; digits, which are
        not files, are copied.

        Raises:
            ConfigError: `dataset.store` is ``refer`` in pixel space, with `autoencoder.kind` ``none``.
        """
        autoencoder, store = self.autoencoder.kind, self.dataset.store
        if autoencoder == "none":
            allowed = "copy or auto if autoencoder.kind is none, since training then reads prepared images"
            demand(store != "refer", "dataset.store", store, allowed)
        if store != "auto":
            return self.dataset
        refers = autoencoder == "pretrained" and self.dataset.source != "digits"
        return self.dataset.model_copy(update={"store": "refer" if refers else "copy"})

    @property
    def conditions(self) -> list[str]:
        """Names of the conditions that the model takes."""
        return self.model.conditions

    @property
    def baseline(self) -> str | None:
        """Name of the first method with uniform timesteps, independent noise and no weights, to which factors refer.

        None without such a method. The weighting with the name of the process is treated as no weights: with EDM, it is
        the lambda of its loss.
        """
        neutral_weightings = ("none", self.diffusion.process.name)
        for name, method in self.methods.items():
            is_uniform = method.sampler.name == "uniform" and method.coupling.name == "independent"
            if is_uniform and method.weighting.name in neutral_weightings:
                return name
        return None

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics that the file lists; empty if `evaluation.metrics` is null, for default metrics."""
        return [metric.name for metric in self.evaluation.metrics or ()]

    @property
    def x0_size(self) -> tuple[int, int] | None:
        """Channels and side of the network's input; None if the file does not determine them.

        The file does not determine them for a pretrained autoencoder, or for images without a resolution; digits have
        side 8 by default. `check_consistency` ensures that a trained autoencoder can halve the side at each level.
        """
        dataset, autoencoder = self.dataset, self.autoencoder
        if dataset.side is None or autoencoder.kind == "pretrained":
            return None
        if autoencoder.kind == "none":
            return dataset.channels, dataset.side
        return autoencoder.latent_channels, dataset.side // autoencoder.factor

    @property
    def milestones(self) -> tuple[int, ...]:
        """Steps of all snapshots: 0 for the untrained network, then `training.milestones` converted to steps.

        Raises:
            ValueError: a length is not positive, or is in epochs and `dataset.train_images` is null.
        """
        batch_size, train_images = self.training.batch_size, self.dataset.train_images
        steps = [length_in_steps(length, batch_size, train_images) for length in self.training.milestones]
        return (0, *steps)

    @property
    def segments(self) -> tuple[tuple[int, ...], ...]:
        """Steps of the snapshots of each segment of a training run, in order; step 0 belongs to the first segment.

        The snapshots after step 0 are divided as evenly as possible: four of them in two segments are
        ``((0, 1000, 2000), (3000, 4000))``.
        """
        steps, segment_count = self.milestones, self.training.segments
        trained_snapshots = len(steps) - 1
        boundaries = [0]  # indices of `steps` at which a segment begins or ends
        for number in range(1, segment_count + 1):
            snapshots_so_far = round(trained_snapshots * number / segment_count)
            boundaries.append(1 + snapshots_so_far)  # 1 is for step 0
        return tuple(steps[begin:end] for begin, end in pairwise(boundaries))

    def resolve(self) -> tuple["Experiment", list[str]]:
        """Return the experiment with a definite extractor in place of ``auto``, and messages for the user.

        The messages are the reason for the choice and warnings. Weights in `training.start_from` are checked, too.

        Raises:
            ConfigError: the weights in `training.start_from` are missing or of another model, or the evaluation is not
                possible.
            DamagedError: the record of these weights is damaged.
        """
        start_folder = self.training.start_from
        if start_folder:
            hash_start_weights(Path(start_folder), self.model)  # only for its checks: the hash is not used here
        evaluation, messages = choose_extractor(self.evaluation, self.dataset, self.conditions)
        return self.model_copy(update={"evaluation": evaluation}), messages

    def run_settings(self, method: str, seed: int) -> RunSettings:
        """Return the settings of the training run of a method with a seed.

        The seed need not be one of the experiment's. The caller ensures that the experiment has the method.
        """
        return RunSettings(
            method_name=method,
            seed=seed,
            model=self.model,
            diffusion=self.diffusion,
            method=self.methods[method],
            training=self.training,
            train_images=self.dataset.train_images,
            plain_experiment=self.plain,
        )

    def plain(self) -> dict[str, Any]:
        """Return the whole configuration as values of JSON by field, defaults included."""
        return self.model_dump(mode="json")


def validate(values: Any, source: str = "experiment") -> Experiment:
    """Check an experiment from plain values and return it, with the defaults of fields that are missing.

    Grids of methods are expanded, and the files in ``plugins`` imported. Field ``extends`` must have been applied
    before. `source` is the origin of the values, for error messages.

    Raises:
        ConfigError: `values` is not a mapping, or some values are not valid. The message has a line with field, value
            and allowed values for each of these.
    """
    if not isinstance(values, dict):
        fields = ", ".join(Experiment.model_fields)
        raise ConfigError(f"{source}: an experiment file is a mapping with the fields {fields}")
    return check(Experiment, values, source)


def load(path: Path | str) -> Experiment:
    """Read and check an experiment file and the files that it extends; import its plugins, see `validate`.

    The text of a frozen experiment, see `freeze`, is compared with the hash in its name.

    Raises:
        ConfigError: the file is missing, is not YAML, or contains values that are not valid.
        DamagedError: the text of a frozen experiment, or its hashes of plugins, have changed.
    """
    path = Path(path)
    # not `resolve`, which rejects a loop of links
    if Path(os.path.abspath(path)).parent.parts[-2:] == _FROZEN.parts and os.path.isfile(path):
        _check_frozen(path)
    return validate(read_experiment_file(path), str(path))


def _check_frozen(path: Path) -> None:
    """Raise DamagedError if the text of a frozen experiment does not match the hash in its name."""
    plugin_file = plugin_hashes_file(path)
    plugin_hashes = dict(read_json(plugin_file)) if plugin_file.is_file() else {}
    text = path.read_text(encoding="utf-8", errors="replace")
    if not path.stem.endswith(f"-{_hash_frozen(text, plugin_hashes)}"):
        remedy = "run the workflow again, which writes it again"
        raise DamagedError(f"{path}: damaged: does not match the hash in its name; {remedy}")


def freeze(experiment: Experiment, folder: Path | str = _FROZEN) -> Path:
    """Write the resolved configuration for jobs to read, so that later edits change no running job; return its path.

    The file is ``<experiment>-<hash>.yaml``, with 16 digits of the hash of its text and of the plugins' code. If
    methods use plugins, a second file contains the hash of each plugin's code, see `plugins.check_unedited`. An intact
    file that exists is not written again. Its modification time becomes the present time, so that the newest file is
    the experiment that was frozen last.
    """
    text = yaml.safe_dump(experiment.plain(), sort_keys=False)
    plugin_hashes = hash_plugins(experiment.methods)
    path = Path(folder) / f"{experiment.experiment}-{_hash_frozen(text, plugin_hashes)}.yaml"
    # the hashes first, so that a frozen experiment never lacks them
    if plugin_hashes and glance(plugin_hashes_file(path)) != plugin_hashes:
        write_json(plugin_hashes_file(path), plugin_hashes)
    if path.exists() and path.read_bytes() == text.encode():
        with suppress(OSError):  # another user's file, or a read-only file system
            os.utime(path)
    else:
        write_text(path, text)
    return path


def _hash_frozen(text: str, plugin_hashes: dict[str, str]) -> str:
    return sha256_json([text, plugin_hashes])[:16]
