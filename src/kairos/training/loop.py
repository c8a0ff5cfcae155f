"""The training loop, and everything that a step does. What is random in step k is a function of (seed, k).

Several processes share a step: each computes its part of the global batch, so that their number, like that of
microbatches, changes nothing but the order of sums. A step that logs nothing waits for nothing: what is measured stays
on the device.
"""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kairos import ranks
from kairos.losses.terms import LossBatch, Prediction
from kairos.training.lengths import log_interval
from kairos.training.state import TrainingState
from kairos_timesteps import distributed
from kairos_timesteps.errors import DivergedError
from kairos_timesteps.randomness import Stream, derived_seed
from kairos_timesteps.strategy import Draw


def train_steps(training: TrainingState, end: int) -> Iterator[dict[str, Any] | None]:
    """Train until step `end`; after each step comes its line of metrics, of the global batch, where it logs one.

    Raises:
        DivergedError: the loss or the gradient of a step is not finite; where a device is not waited for, `sound` of
            the training says so later.
    """
    seed, strategy = training.seed, training.strategy
    every = log_interval(training.settings["log_every"], training.device.type)
    for batch in training.batches.steps(training.step, end):
        step, shape = batch.step, batch.x0.shape[1:]
        logs = (step + 1) % every == 0

        # draw timesteps with their weights, and noise for each image
        said = batch.visit if strategy.sampler.points == "epochs" else {}
        draw = strategy.draw(batch.x0, index=batch.sample_indices, total=training.settings["batch_size"], **said)
        drawn = Stream(seed, "noise").normal(step, batch.sample_indices, shape, training.device, training.dtype)
        noise = strategy.couple(draw, drawn)

        # forward and backward passes
        training.model.train()
        training.optimizer.zero_grad(set_to_none=True)
        computed = _passes(training, draw, noise, batch.conditions)
        norm = nn.utils.clip_grad_norm_(training.parameters, training.grad_clip)
        training.sound &= norm.isfinite()

        # measure
        line = _line(training, draw, computed, norm) if logs else None
        if (logs or training.device.type == "cpu") and not training.sound:
            diverged(step, line)

        # move the weights; samplers that learn look at the network before and after
        rate = training.learning_rate(step)
        for group in training.optimizer.param_groups:
            group["lr"] = rate
        network, context = training.network, training.autocast()
        with strategy.observe(draw, network, training.optimizer, batch.conditions, context):
            training.optimizer.step()
        training.average.update(step)
        training.step += 1
        yield {**line, "lr": rate, "sampler": strategy.sampler.statistics()} if line is not None else None


@dataclass(frozen=True)
class Computed:
    """Results of forward and backward passes, for the log and for probes: ``probe(training, draw, computed)``.

    A probe is called in steps that log, after the backward pass and before the optimiser step; what it returns is
    written to the step's line of metrics.jsonl under its name. It draws from a random stream of its own and must leave
    the model as it is, so that a training's trajectory does not depend on its probes.

    Attributes:
        prediction: batch, noise, timesteps and output.
        terms: per-sample losses by name, each (batch,).
        objective: what these samples add to the mean over the global batch, times the number of ranks.
    """

    prediction: Prediction
    terms: dict[str, Tensor]
    objective: Tensor


def _passes(training: TrainingState, draw: Draw, noise: Tensor, conditions: dict[str, Tensor]) -> Computed:
    """Forward and backward passes of this rank's part, in microbatches; gradients add up over passes and ranks."""
    if len(training.passes) == 1:
        return _pass(training, *training.passes[0], draw, noise, conditions)
    done, first, last = [], training.batches.index.start, training.passes[-1][0]
    for number, place in training.passes:
        here = slice(place.start - first, place.stop - first)
        part = draw.rows(here.start, here.stop)
        chosen = {name: values[here] for name, values in conditions.items()}
        with nullcontext() if number == last or training.trained is training.network else training.trained.no_sync():
            done.append(_pass(training, number, place, part, noise[here], chosen))
    terms = {name: torch.cat([one.terms[name] for one in done]) for name in done[0].terms}
    x_t, output = (torch.cat([getattr(one.prediction, name) for one in done]) for name in ("x_t", "output"))
    prediction = Prediction(training.process, draw.x0, noise, draw.t, x_t, output)
    return Computed(prediction, terms, torch.stack([one.objective for one in done]).sum())


def _pass(
    training: TrainingState, number: int, place: slice, draw: Draw, noise: Tensor, conditions: dict[str, Tensor]
) -> Computed:
    """Forward and backward pass number `number` of the global batch, which is of the samples `place` in it."""
    torch.manual_seed(derived_seed(training.seed, f"dropout {number}" if number else "dropout", draw.step))
    samples = LossBatch(training.seed, draw.step, range(place.start, place.stop))
    prediction, terms = predicted(training, training.trained, samples, draw.x0, noise, draw.t, conditions)
    weighted, plain = _scaled(training, terms, weighted=True), _scaled(training, terms, weighted=False)
    means = [training.strategy.loss(draw, torch.stack(weighted).sum(0)), *(term.mean() for term in plain)]
    share = len(draw.t) / training.settings["batch_size"]
    # DistributedDataParallel takes the mean over the ranks
    objective = torch.stack(means).sum() * (share * distributed.ranks())
    objective.backward()
    terms = {name: term.detach() for name, term in terms.items()}
    return Computed(replace(prediction, output=prediction.output.detach()), terms, objective.detach())


def predicted(
    training: TrainingState,
    network: Any,
    samples: LossBatch,
    x0: Tensor,
    noise: Tensor,
    t: Tensor,
    conditions: dict[str, Tensor],
) -> tuple[Prediction, dict[str, Tensor]]:
    """Compute a network's prediction for some samples, and the terms of its loss by name, each (batch,)."""

    def predict(x_t: Tensor, further: dict[str, Tensor]) -> Tensor:
        with training.autocast():
            output: Tensor = training.process.predict(network, x_t, t, {**conditions, **further})
        return output

    x_t = training.process.noised(x0, noise, t)
    prediction = Prediction(training.process, x0, noise, t, x_t, predict(x_t, {}), predict, samples)
    return prediction, {name: function(options, prediction) for name, options, function in training.losses}


def _scaled(training: TrainingState, terms: dict[str, Tensor], weighted: bool) -> list[Tensor]:
    return [options.scale * terms[name] for name, options, _ in training.losses if options.weighted is weighted]


def _line(training: TrainingState, draw: Draw, computed: Computed, norm: Tensor) -> dict[str, Any]:
    """Return the line of metrics.jsonl for a step, averaged over the global batch."""
    settings, step = training.settings, draw.step
    told = {name: probe(training, draw, computed) for name, probe in training.probes.items()}
    share = len(draw.x0) / settings["batch_size"]
    sums = [computed.objective / distributed.ranks(), *(term.mean() * share for term in computed.terms.values())]
    loss, *means = ranks.add(torch.stack([value.double() for value in sums]).tolist())
    training.sound &= math.isfinite(loss)
    return {
        "step": step + 1,
        "images": (step + 1) * settings["batch_size"],
        "loss": loss,
        **dict(zip(computed.terms, means, strict=True)),
        "grad_norm": norm.item(),
        **told,
    }


def diverged(step: int, line: dict[str, Any] | None = None) -> None:
    """Refuse to go on from a step, from 0, that is not finite; raises DivergedError."""
    found = f"loss {line['loss']}, gradient norm {line['grad_norm']}" if line else "loss or gradient"
    raise DivergedError(
        f"step {step + 1}: {found}: not finite, stopped before the step was taken; the last good state is kept. A "
        "lower training.optimizer.lr, warm-up or precision fp32 may help"
    )
