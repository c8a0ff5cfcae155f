"""Checks of fields that depend on other sections of an experiment; all run before any job.

Each function raises ConfigError if its check fails.
"""

import math
from typing import TYPE_CHECKING

from kairos.forward_process import build_process
from kairos.models import check_conditions_accepted
from kairos.models.settings import BACKBONES
from kairos_timesteps.components import checked
from kairos_timesteps.diffusion.schedule import CELLS
from kairos_timesteps.errors import ConfigError, ValueRejected, demand, rejection
from kairos_timesteps.lookup import build_pair

if TYPE_CHECKING:
    from kairos.config.experiment import Experiment


def check_consistency(experiment: "Experiment") -> None:
    """Check that the sections of an experiment, and the methods in `published` and `claim`, are consistent.

    Raises:
        ConfigError: two fields contradict each other; the message reports the first such field, its value and what is
            allowed.
        ValueError: a training length has no number of steps, see `Experiment.milestones`.
    """
    _check_job_counts(experiment)
    _check_conditions(experiment)
    _check_text(experiment)
    _check_low_resolution(experiment)
    _check_shapes(experiment)
    _check_augmentation(experiment)
    _check_losses(experiment)
    _check_timestep_table(experiment)
    _check_strategies(experiment)
    for published in experiment.published:
        published.check_methods(experiment.methods)
    if experiment.claim is not None:
        experiment.claim.check_methods(experiment.methods)
    dropout = experiment.training.condition_dropout
    experiment.sampling.check_fits(experiment.diffusion, experiment.conditions, dropout)


def _check_job_counts(experiment: "Experiment") -> None:
    """Check that snapshots increase, and that `training.segments` and `sampling.shards` leave no job without work.

    A training run has at most one segment per snapshot after step 0. Sampling has at most one shard per batch of a
    snapshot's images in all sample sets.

    Raises:
        ConfigError: one of them does not hold.
        ValueError: a training length has no number of steps, see `Experiment.milestones`.
    """
    training, sampling = experiment.training, experiment.sampling
    steps = list(experiment.milestones)
    increases = steps == sorted(set(steps))  # compared in steps, since lengths may be in images or epochs
    demand(increases, "training.milestones", training.milestones, "increasing lengths")
    trained_snapshots = len(steps) - 1  # without step 0, the untrained network, which needs no training job
    allowed = f"at most {trained_snapshots}, the number of training.milestones"
    demand(training.segments <= trained_snapshots, "training.segments", training.segments, allowed)
    images = experiment.evaluation.num_samples * experiment.evaluation.sets
    batches = math.ceil(images / sampling.batch_size)
    allowed = f"at most {batches}, the number of batches of {sampling.batch_size} in the {images} images of a snapshot"
    demand(sampling.shards <= batches, "sampling.shards", sampling.shards, allowed)


def _check_conditions(experiment: "Experiment") -> None:
    """Check that the model accepts its conditions, and that it has an embedding for dropped classes.

    Only a model with the option ``null_class: false`` lacks this embedding, and passes if no classes are dropped.

    Raises:
        ConfigError: the model does not accept a condition, or drops classes without an embedding for them.
    """
    check_conditions_accepted(experiment.model)
    dropout = experiment.training.condition_dropout
    drops_class = dropout > 0 and "class" in experiment.conditions
    if drops_class:
        has_embedding = getattr(experiment.model, "null_class", True)
        value = f"{dropout} with model.null_class: false"
        allowed = "0, and no guidance (as published: the model has no embedding for a dropped class)"
        demand(has_embedding, "training.condition_dropout", value, allowed)


def _check_text(experiment: "Experiment") -> None:
    """Check that captions and text encoder are set if the model takes texts, and that nothing needs texts if not.

    Without such a model, an encoder and metric clip, which compares images with captions, are rejected. Captions may be
    set: they are then prepared, but not used.

    Raises:
        ConfigError: captions or encoder are missing, or the encoder or the metric is set without need.
    """
    captions, encoder = experiment.dataset.captions, experiment.text_encoder
    if "text" in experiment.conditions:
        for field, value in (("dataset.captions", captions), ("text_encoder", encoder)):
            demand(value is not None, field, "null", "a value, since model.conditions contains text")
        return
    exception = "unless model.conditions contains text"  # end of both messages
    encoder_path = encoder.path if encoder is not None else None
    demand(encoder is None, "text_encoder", encoder_path, f"null, {exception}")
    demand("clip" not in experiment.metrics, "evaluation.metrics", "clip", f"other metrics, {exception}")


def _check_low_resolution(experiment: "Experiment") -> None:
    """Check that images of low resolution are prepared if and only if the model is conditioned on them.

    Raises:
        ConfigError: `dataset.low_resolution` does not fit the model, or metric psnr is listed without such a model.
    """
    factor = experiment.dataset.low_resolution
    if "low_resolution" in experiment.conditions:
        allowed = "a number, since model.conditions contains low_resolution"
        demand(factor is not None, "dataset.low_resolution", "null", allowed)
        return
    exception = "unless model.conditions contains low_resolution"  # end of both messages
    demand(factor is None, "dataset.low_resolution", factor, f"null, {exception}")
    demand("psnr" not in experiment.metrics, "evaluation.metrics", "psnr", f"other metrics, {exception}")


def _check_shapes(experiment: "Experiment") -> None:
    """Check the sizes of the images and of the network's input, as far as the experiment file determines them.

    Raises:
        ConfigError: a trained autoencoder cannot halve the images' sides at each level; or see `check_input`.
    """
    dataset, autoencoder = experiment.dataset, experiment.autoencoder
    if dataset.side is not None and autoencoder.kind == "train":
        autoencoder.check_trainable_on((dataset.channels, dataset.side, dataset.side))
    if experiment.x0_size is not None:  # otherwise known once the data are prepared
        check_input(experiment, *experiment.x0_size)


def check_input(experiment: "Experiment", channels: int, side: int) -> None:
    """Check that patches divide the side of the network's input, and that the guided channels exist.

    A model without patches passes the first check, and guidance of all channels (null) the second.

    Args:
        experiment: the experiment.
        channels: channels of the network's input.
        side: side of the network's input.

    Raises:
        ConfigError: the patch size does not divide the side, or more channels are guided than the input has.
    """
    patch = getattr(experiment.model, "patch", None)
    if patch:
        demand(side % patch == 0, "model.patch", patch, f"a divisor of the input's side, {side}")
    guided_channels = experiment.sampling.guidance_channels
    if guided_channels is not None:
        allowed = f"at most {channels}, the channels of the network's input"
        demand(guided_channels <= channels, "sampling.guidance_channels", guided_channels, allowed)


def _check_augmentation(experiment: "Experiment") -> None:
    """Check that augmentation transforms pixels, that `dataset.flips` is off, and that the model takes its labels.

    An experiment without `training.augment` passes. The model takes labels if its option `augment` is not 0.

    Raises:
        ConfigError: one of the three does not hold, for example with an autoencoder.
    """
    augment = experiment.training.augment
    if augment is None:
        return
    autoencoder, model = experiment.autoencoder.kind, experiment.model
    value = f"{autoencoder} with training.augment"
    demand(autoencoder == "none", "autoencoder.kind", value, "none, since it transforms pixels")
    allowed = "false, since training.augment flips images"
    demand(not experiment.dataset.flips, "dataset.flips", "true with training.augment", allowed)
    label_count = getattr(model, "augment", 0)  # 0 also for models without this option
    allowed = "null, or a model that is conditioned on the augmentation: ddpmpp with augment: 9"
    demand(label_count, "training.augment", f"{augment} with model {model.name}", allowed)


def _check_losses(experiment: "Experiment") -> None:
    """Check that an experiment with a loss on masked tokens has a model that masks tokens; other experiments pass.

    Raises:
        ConfigError: the model does not mask tokens; the message lists the models that do.
    """
    model = experiment.model
    masked_losses = [loss.name for loss in experiment.diffusion.losses if loss.masks_tokens]
    if masked_losses:
        masking_models = [name for name, backbone in BACKBONES.items() if backbone.masks]
        value = f"{', '.join(masked_losses)} with model {model.name}"
        allowed = f"with a model that masks tokens: {', '.join(masking_models) or 'none is known'}"
        demand(model.masks, "diffusion.losses", value, allowed)


def _check_timestep_table(experiment: "Experiment") -> None:
    """Check that a learned table of timestep embeddings (`model.timesteps`) has a row for each timestep.

    Row 0 belongs to timestep 0, even if the timesteps of the process begin later. A model without a table passes.

    Raises:
        ConfigError: the model has a table, and the process is continuous or has more timesteps than the table rows.
    """
    table_rows = getattr(experiment.model, "timesteps", None)
    if table_rows is None:
        return
    process = experiment.diffusion.process
    if process.get("timesteps") is None:
        allowed = f"a model without this option, since process {process.name} is continuous"
        raise rejection("model.timesteps", table_rows, allowed)
    required_rows = process.get("timesteps") + process.get("first_index", 0)  # timesteps begin at first_index
    allowed = f"at least {required_rows}, the timesteps of the process"
    demand(table_rows >= required_rows, "model.timesteps", table_rows, allowed)


def _check_strategies(experiment: "Experiment") -> None:
    """Check that samplers require no context, and that samplers and weightings fit timesteps and noise schedule.

    Properties of a sample, such as its tokens, are context. For this check, a continuous process has `CELLS` timesteps,
    and its name in place of a schedule. Couplings are not checked.

    Raises:
        ConfigError: a sampler requires context, or an option of a sampler or weighting does not fit.
    """
    process = experiment.diffusion.process
    timesteps = process.get("timesteps", CELLS)
    schedule = process.get("schedule", process.name)
    for method_name, method in experiment.methods.items():
        required_context = method.sampler.load().required_context(method.sampler.options)
        value = f"{method.sampler.name}, which requires {', '.join(sorted(required_context))}"
        demand(not required_context, f"methods.{method_name}.sampler", value, "samplers that require no context")
        for component in (method.sampler, method.weighting):
            where = f"methods.{method_name}.{component.registry.kind}"  # such as methods.speed.sampler
            checked(  # only for its errors: the result is not used
                component.registry,
                component.name,
                component.plain_options(),
                timesteps=timesteps,
                schedule=schedule,
                where=where,
            )
        has_magnitude = getattr(method.sampler.options, "r", None) is not None
        if has_magnitude or getattr(method.sampler.options, "importance", False):
            _check_build(experiment, method_name)


def _check_build(experiment: "Experiment", method_name: str) -> None:
    """Build the sampler of a method, which rejects options that do not fit the noise levels of the process.

    Such options are importance weights with timesteps that are never drawn, and a magnitude of `speed` that no level
    has.

    Raises:
        ConfigError: an option does not fit.
    """
    sampler, diffusion = experiment.methods[method_name].sampler, experiment.diffusion
    process = build_process(diffusion.process, diffusion.prediction, sigma_data=1.0)  # timesteps do not depend on it
    try:
        build_pair(process, (sampler.name, "none"), sampler.plain_options(), None)
    except ConfigError as error:
        raise ValueRejected(f"methods.{method_name}: {error}") from None
