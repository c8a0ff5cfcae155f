"""Checks that the sections of an experiment fit together: a function each; all run before any job."""

import math
from typing import TYPE_CHECKING

from kairos.losses.registries import LOSSES
from kairos.models import check_conditions_accepted
from kairos.models.registries import MODELS
from kairos_timesteps.components import SAMPLERS, WEIGHTINGS, checked
from kairos_timesteps.diffusion.schedule import CELLS
from kairos_timesteps.errors import ValueRejected, demand
from kairos_timesteps.registry import split

if TYPE_CHECKING:
    from kairos.config.experiment import Experiment


def check_fits(experiment: "Experiment") -> None:
    """Ask all of them.

    Raises:
        ConfigError: the first field that does not fit, its value and what is allowed.
    """
    for check in (_jobs, _conditions, _texts, _low_resolution, _shapes, _augment, _losses, _process):
        check(experiment)
    for published in experiment.published:
        published.check_fits(experiment.methods)
    if experiment.claim is not None:
        experiment.claim.check_fits(experiment.methods)
    diffusion, dropout = experiment.diffusion.model_dump(), experiment.training.condition_dropout
    experiment.sampling.check_fits(diffusion, experiment.conditions, dropout)


def _jobs(experiment: "Experiment") -> None:
    training, sampling, steps = experiment.training, experiment.sampling, list(experiment.milestones)
    demand(steps == sorted(set(steps)), "training.milestones", training.milestones, "increasing lengths")
    most, segments = len(steps) - 1, training.segments
    demand(segments <= most, "training.segments", segments, f"at most the number of milestones ({most})")
    images = experiment.evaluation.num_samples * experiment.evaluation.sets
    most = -(-images // sampling.batch_size)
    batches = f"the batches (sampling.batch_size {sampling.batch_size}) that the {images} images of a milestone"
    demand(sampling.shards <= most, "sampling.shards", sampling.shards, f"at most {most}, {batches} are drawn in")


def _conditions(experiment: "Experiment") -> None:
    check_conditions_accepted(experiment.model)
    dropout, lost = experiment.training.condition_dropout, experiment.model.get("null_class") is False
    got = f"{dropout} with model.null_class: false"
    allowed = "0, and no guidance (as published: there is no row for no class)"
    demand(not (dropout and lost and "class" in experiment.conditions), "training.condition_dropout", got, allowed)


def _texts(experiment: "Experiment") -> None:
    told, encoder, dataset = "text" in experiment.conditions, experiment.text_encoder, experiment.dataset
    scored = "clip" if "clip" in experiment.metrics else None
    where = "where model.conditions names text"
    for field, value in (("dataset.captions", dataset.captions), ("text_encoder", encoder)):
        demand(not told or value is not None, field, "null", f"what it needs {where}")
    for field, got in (("text_encoder", encoder and encoder.path), ("evaluation.metrics", scored)):
        demand(told or got is None, field, got, where)


def _low_resolution(experiment: "Experiment") -> None:
    told, factor = "low_resolution" in experiment.conditions, experiment.dataset.low_resolution
    allowed = "a number, since model.conditions has" if told else "null, since model.conditions has no"
    demand(told == (factor is not None), "dataset.low_resolution", factor, f"{allowed} low_resolution")
    if not told and "psnr" in experiment.metrics:
        raise ValueRejected("evaluation.metrics: got psnr, allowed where model.conditions has low_resolution")


def _shapes(experiment: "Experiment") -> None:
    channels, side = experiment.x0 or (math.inf, 0)
    patch, guided = experiment.model.get("patch") or 1, experiment.sampling.guidance_channels or 1
    demand(side % patch == 0, "model.patch", patch, f"a divisor of x0's side, {side}")
    demand(guided <= channels, "sampling.guidance_channels", guided, f"at most {channels}, those of x0")


def _augment(experiment: "Experiment") -> None:
    augment, kind, model = experiment.training.augment, experiment.autoencoder.kind, experiment.model
    if augment is None:
        return
    beside = "with training.augment"
    demand(kind == "none", "autoencoder.kind", f"{kind} {beside}", "none (it moves pixels)")
    demand(not experiment.dataset.flips, "dataset.flips", f"true {beside}", "false (it flips by itself)")
    allowed = "null, or a model that is told of it: ddpmpp with augment: 9"
    demand(model.get("augment"), "training.augment", f"{augment} with model {model['name']}", allowed)


def _losses(experiment: "Experiment") -> None:
    name, losses = experiment.model["name"], [loss["name"] for loss in experiment.diffusion.losses]
    masked = [loss for loss in losses if LOSSES.entry(loss).facts.get("masked")]
    able = [other for other, entry in MODELS.items() if entry.facts.get("masks")]
    allowed = f"with a model that hides tokens: {', '.join(able) or 'none is known'}"
    demand(not masked or name in able, "diffusion.losses", f"{', '.join(masked)} with model {name}", allowed)


def _process(experiment: "Experiment") -> None:
    """A learned table of times has a row for each that the process shows, and the strategies go with its times."""
    process, rows = experiment.diffusion.process, experiment.model.get("timesteps", math.inf)
    shown, of = math.inf, f"{process['name']} is continuous"
    if "timesteps" in process:
        shown = of = process["timesteps"] + process.get("first_index", 0)
    demand(rows >= shown, "model.timesteps", rows, f"at least the indices that a discrete process shows ({of})")
    timesteps, schedule = process.get("timesteps", CELLS), process.get("schedule", process["name"])
    for name, method in experiment.methods.items():
        sampler, options = split(method.sampler)
        required = SAMPLERS[sampler].load().required_context(SAMPLERS.parse(sampler, options))
        got = f"{sampler}, which requires {', '.join(sorted(required))}"
        demand(not required, f"methods.{name}.sampler", got, "samplers that need nothing but the step")
        for part, registry in (("sampler", SAMPLERS), ("weighting", WEIGHTINGS)):
            checked(registry, *split(getattr(method, part)), timesteps, schedule, f"methods.{name}.{part}")
