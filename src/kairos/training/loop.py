"""The training loop: what one step computes. Everything random in step k is a function of (seed, k).

The images of step k also depend on batch size and number of training images, see `kairos.data.batches`.

Several ranks share a step: each computes its slice of the global batch. The number of ranks and of micro-batches
changes the order of sums. Without `training.microbatch`, the number of ranks also changes dropout masks, and some
couplings act on the samples of a rank. A step that logs nothing does not synchronise with the device.
"""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kairos import ranks
from kairos.data.batches import Batch
from kairos.finite import demand_finite
from kairos.losses.terms import Prediction, SampleCoordinates
from kairos.shapes import Images, Output, PerSample, Rows, Scalar, Times
from kairos.training.lengths import log_interval
from kairos.training.state import MicroBatch, TrainingState
from kairos_timesteps import Draw, distributed
from kairos_timesteps.errors import DivergedError
from kairos_timesteps.randomness import Stream, derived_seed

Summand = Float[Tensor, "*shape"]
DIVERGENCE_REMEDY = (
    "training stopped, and the last checkpoint is kept. Try a lower training.optimizer.lr, warm-up, or precision fp32"
)


def train_steps(training: TrainingState, end: int) -> Iterator[dict[str, Any] | None]:
    """Train up to step `end`, and yield after each step its metrics for metrics.jsonl, or None if it does not log.

    A step draws timesteps and noise, runs the passes, clips the gradient, and updates weights, strategy and average.
    Metrics are over the global batch. Every step seeds torch's generators. Steps that do not log leave the largest
    gradient norm on the device, so that the caller can check it later by `training.is_finite`.

    Args:
        training: state of the run, which the steps update.
        end: number of completed steps at which training ends.

    Raises:
        DivergedError: the loss or the gradient of a step is not finite. A CPU checks the gradient of every step before
            its weights change, and the loss of steps that log. A GPU checks steps that log, so earlier steps may
            already have changed the weights.
        NotFiniteError: the images of such a step are not finite.
    """
    interval = log_interval(training.settings.log_every, training.device.type)
    for batch in training.batches.steps(training.step, end):
        step = batch.step
        logs = (step + 1) % interval == 0

        # draw timesteps with their weights, and noise for each image
        draw, noise = _draw_timesteps_and_noise(training, batch)

        # forward and backward passes
        if not training.model.training:  # `train` visits all modules: call it only if needed
            training.model.train()
        for parameter in training.parameters:
            parameter.grad = None
        result = _forward_backward(training, draw, noise, batch.conditions)
        gradient_norm = clip_gradient(training.parameters, training.grad_clip)
        # the running maximum stays NaN or infinite after the first such norm; it takes one GPU kernel, isfinite four
        training.largest_gradient_norm = torch.maximum(training.largest_gradient_norm, gradient_norm)

        # measure; on a GPU a step that does not log leaves the check to the caller
        metrics = _compute_metrics(training, draw, result, gradient_norm) if logs else None
        checks_now = logs or training.device.type == "cpu"
        if checks_now and not training.is_finite():
            demand_finite(batch.x0, f"step {step + 1}: latents or pixels of its images", "make the latents again")
            raise divergence_error(step, metrics)

        # update the weights; samplers that learn evaluate the network before and after the update
        rate = training.learning_rate(step)
        for group in training.optimizer.param_groups:
            group["lr"] = rate
        with training.strategy.observe(
            draw, training.network, training.optimizer, batch.conditions, training.autocast()
        ):
            training.optimizer.step()
        training.average.update(step)
        training.step += 1

        if metrics is not None:
            metrics |= {"lr": rate, "sampler": training.strategy.sampler.statistics()}
        yield metrics


@dataclass(frozen=True)
class StepResult:
    """Results of the forward and backward passes of a step, for metrics and for probes.

    A probe is a function ``probe(training, draw, result)``. Steps that log call it after the backward pass and before
    the optimizer step, and write its return value to metrics.jsonl under its name. A probe draws from a random stream
    of its own and must not change the model, so that the trajectory of a run does not depend on its probes.

    Attributes:
        prediction: batch, noise, timesteps and output.
        terms: per-sample losses by name, each (batch,).
        objective: contribution of these samples to the mean over the global batch, times the number of ranks.
    """

    prediction: Prediction
    terms: dict[str, PerSample]
    objective: Scalar


def _draw_timesteps_and_noise(training: TrainingState, batch: Batch) -> tuple[Draw, Images]:
    """Return timesteps with their weights for a batch, and the noise that the strategy's coupling gives each image.

    The draw contains x0 too. The noise is (batch, c, h, w), in the type of the run's precision. The caller ensures that
    the strategy is at the step of the batch, since its step and the batch's step select the random numbers.
    """
    strategy = training.strategy
    # only samplers that count visits of images take epoch and position of an image as context
    visit: dict[str, Any] = batch.visit if strategy.sampler.points == "epochs" else {}
    draw = strategy.draw(batch.x0, index=batch.sample_indices, total=training.settings.batch_size, **visit)
    image_shape = batch.x0.shape[1:]
    noise = Stream(training.seed, "noise").normal(
        batch.step, batch.sample_indices, image_shape, training.device, training.dtype
    )
    return draw, strategy.couple(draw, noise)


def _forward_backward(training: TrainingState, draw: Draw, noise: Images, conditions: dict[str, Rows]) -> StepResult:
    """Run the forward and backward passes of this rank's micro-batches, and return their joined, detached results.

    The result contains all samples of this rank. The caller has cleared the gradients. Afterwards the parameters have
    the gradients of the global batch, on every rank.

    Args:
        training: model, losses and strategy.
        draw: timesteps and weights of this rank's samples.
        noise: noise of these samples, (batch, c, h, w).
        conditions: conditions of these samples by name, each (batch, ...).
    """
    if len(training.micro_batches) == 1:
        return _forward_backward_micro_batch(training, training.micro_batches[0], draw, noise, conditions)
    results = []
    has_other_ranks = training.ddp_network is not training.network
    # micro-batches count samples in the global batch, the tensors contain this rank's samples alone
    first_sample = training.micro_batches[0].samples.start  # index of this rank's first sample in the global batch
    for micro_batch in training.micro_batches:
        start = micro_batch.samples.start - first_sample
        stop = micro_batch.samples.stop - first_sample
        # ranks exchange gradients once, in their last backward pass
        is_last = micro_batch == training.micro_batches[-1]
        postpones_exchange = has_other_ranks and not is_last
        with training.ddp_network.no_sync() if postpones_exchange else nullcontext():
            result = _forward_backward_micro_batch(
                training,
                micro_batch,
                draw=draw.rows(start, stop),
                noise=noise[start:stop],
                conditions={name: values[start:stop] for name, values in conditions.items()},
            )
        results.append(result)
    return _join_results(training, draw, noise, results)


def _join_results(training: TrainingState, draw: Draw, noise: Images, results: list[StepResult]) -> StepResult:
    """Return one result for all samples of this rank, from the results of its micro-batches in order.

    Per-sample tensors are concatenated, and objectives are summed. The joined prediction cannot evaluate the network
    again.
    """
    terms = {name: torch.cat([result.terms[name] for result in results]) for name in results[0].terms}
    x_t = torch.cat([result.prediction.x_t for result in results])
    output = torch.cat([result.prediction.output for result in results])
    prediction = Prediction(training.process, draw.x0, noise, draw.t, x_t, output)
    objective = torch.stack([result.objective for result in results]).sum()  # each contains its fraction of the batch
    return StepResult(prediction, terms, objective)


def _forward_backward_micro_batch(
    training: TrainingState, micro_batch: MicroBatch, draw: Draw, noise: Images, conditions: dict[str, Rows]
) -> StepResult:
    """Run forward and backward pass of one micro-batch, and return detached results.

    The backward pass adds to the gradients, so that they sum up to the gradient of the mean over the global batch.
    Torch's global generators are reseeded by run, step and micro-batch. A strategy that learns keeps the losses until
    its `observe`.

    Args:
        training: model, losses and strategy.
        micro_batch: number of the micro-batch, and its samples in the global batch.
        draw: timesteps and weights of these samples alone.
        noise: noise of these samples, (micro-batch, c, h, w).
        conditions: conditions of these samples by name, each (micro-batch, ...).
    """
    step = draw.step

    # forward pass, with dropout masks from the generators. Micro-batch 0 uses stream `dropout`, as a step without
    # micro-batches does.
    dropout_stream = f"dropout {micro_batch.number}" if micro_batch.number else "dropout"
    seed_generators(derived_seed(training.seed, dropout_stream, step), training.device)
    samples = SampleCoordinates(training.seed, step, range(micro_batch.samples.start, micro_batch.samples.stop))
    prediction, terms = predict_and_compute_losses(
        training, training.ddp_network, samples, x0=draw.x0, noise=noise, t=draw.t, conditions=conditions
    )

    # mean loss of these samples; the strategy's weights apply to the weighted terms alone, of which there is at least
    # one (section `diffusion` ensures that)
    weighted_terms = _scale_terms(training, terms, weighted=True)
    unweighted_terms = _scale_terms(training, terms, weighted=False)
    weighted_mean = training.strategy.loss(draw, _add(weighted_terms))
    objective = _add([weighted_mean, *(term.mean() for term in unweighted_terms)])

    # backward pass. The mean over the global batch is a sum over the micro-batches of all ranks: each mean times
    # len(draw.t) / batch_size. DistributedDataParallel divides the sum over ranks by their number, hence the factor.
    factor = len(draw.t) / training.settings.batch_size * distributed.ranks()
    if factor != 1:
        objective = objective * factor
    objective.backward()

    detached_terms = {name: term.detach() for name, term in terms.items()}
    detached_prediction = replace(prediction, output=prediction.output.detach())
    return StepResult(detached_prediction, detached_terms, objective.detach())


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed torch's generator of the CPU, and of the device if it is a GPU.

    `torch.manual_seed` also visits all other kinds of device, which takes a tenth of a small model's step.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda" and torch.cuda.is_initialized():  # it is, unless tensors on the device are simulated
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)


def clip_gradient(parameters: list[nn.Parameter], max_norm: float) -> Scalar:
    """Scale gradients down to a largest norm, as `torch.nn.utils.clip_grad_norm_`, and return their norm before that.

    The returned norm, over all parameters that have a gradient, is a scalar on the device. No error is raised if it is
    NaN or infinite.

    Args:
        parameters: parameters whose gradients change in place.
        max_norm: largest norm that the gradients may have; inf: no clipping.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    if math.isinf(max_norm):
        return norm
    if norm.device.type == "cpu":
        # `clip_grads_with_norm_` multiplies by min(1, max_norm / (norm + 1e-6)). A multiplication by 1 is skipped.
        # With a norm of NaN the comparison is False, so the gradients become NaN.
        is_small = bool(max_norm / (norm + 1e-6) >= 1)
        if not is_small:
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm
    # On a GPU the comparison would synchronise, so the gradients are always multiplied by
    # min(1, max_norm / (norm + 1e-6)). torch computes this division by two kernels, a reciprocal and a
    # multiplication. For max_norm = 1, the default, the multiplication is skipped.
    factor = (norm + 1e-6).reciprocal_()
    if max_norm != 1:
        factor *= max_norm
    torch._foreach_mul_(gradients, factor.clamp_(max=1.0))
    return norm


def predict_and_compute_losses(
    training: TrainingState,
    network: Any,
    samples: SampleCoordinates,
    x0: Images,
    noise: Images,
    t: Times,
    conditions: dict[str, Rows],
) -> tuple[Prediction, dict[str, PerSample]]:
    """Return a network's prediction for noised images, and the loss terms by name, each (batch,).

    Images are noised and the network is called here. The terms have neither the strategy's weights nor option `scale`.

    Args:
        training: provides forward process, losses and precision.
        network: called as ``network(x_t, t, conditions)`` by the forward process.
        samples: random coordinates of the samples, for loss terms that draw random numbers.
        x0: images, (batch, c, h, w).
        noise: noise, shape of x0.
        t: times, (batch,).
        conditions: conditions by name, each (batch, ...).
    """

    # some loss terms evaluate the network again, at another x_t or with further conditions
    def predict(x_t: Images, more_conditions: dict[str, Rows]) -> Output:
        with training.autocast():
            output: Output = training.process.predict(network, x_t, t, {**conditions, **more_conditions})
        return output

    x_t = training.process.noised(x0, noise, t)
    output = predict(x_t, {})
    prediction = Prediction(training.process, x0, noise, t, x_t, output, predict=predict, coordinates=samples)
    terms = {options.name: compute_loss(options, prediction) for options, compute_loss in training.losses}
    return prediction, terms


def _scale_terms(training: TrainingState, terms: dict[str, PerSample], weighted: bool) -> list[PerSample]:
    """Return the terms whose option `weighted` equals the argument, times their option `scale`, in configured order."""
    scaled_terms = []
    for options, _ in training.losses:
        if options.weighted is weighted:
            term = terms[options.name]
            scaled_terms.append(term if options.scale == 1 else options.scale * term)
    return scaled_terms


def _add(values: list[Summand]) -> Summand:
    """Return the sum of at least one tensor; a single tensor is returned as it is."""
    total = values[0]  # not 0: even the addition of 0 would slow a small model
    for value in values[1:]:
        total = total + value
    return total


def _compute_metrics(training: TrainingState, draw: Draw, result: StepResult, gradient_norm: Scalar) -> dict[str, Any]:
    """Return the line of metrics.jsonl for a step, without ``lr`` and ``sampler``; calls the probes on every rank.

    Its keys are ``step`` (completed steps), ``images``, ``loss``, ``grad_norm``, and names of loss terms and probes.
    Means are over the global batch: ``loss`` with the strategy's weights and the scales of the terms, each loss term
    without both. The value of a probe is the value on this rank. A loss that is not finite sets
    `training.losses_are_finite` to False.

    Args:
        training: probes, and numbers of samples.
        draw: timesteps of this rank's samples.
        result: losses of this rank's samples.
        gradient_norm: norm of the global batch's gradient before clipping, a scalar on the device.
    """
    batch_size, completed_steps = training.settings.batch_size, draw.step + 1
    probe_values = {name: probe(training, draw, result) for name, probe in training.probes.items()}
    # values of this rank, the terms as means over its samples; one tensor, so that one copy to the CPU reads them all
    rank_values = torch.stack([result.objective, *(term.mean() for term in result.terms.values()), gradient_norm])
    objective, *rank_term_means, norm = rank_values.tolist()  # synchronises once; `norm` is equal on all ranks
    # what this rank adds to the means over the global batch; the objective contains the number of ranks as a factor
    fraction_of_batch = len(draw.x0) / batch_size
    summands = [objective / distributed.ranks(), *(mean * fraction_of_batch for mean in rank_term_means)]
    loss, *term_means = ranks.add(summands)
    training.losses_are_finite &= math.isfinite(loss)
    return {
        "step": completed_steps,
        "images": completed_steps * batch_size,
        "loss": loss,
        **dict(zip(result.terms, term_means, strict=True)),
        "grad_norm": norm,
        **probe_values,
    }


def divergence_error(step: int, metrics: dict[str, Any] | None = None) -> DivergedError:
    """Return the error for a step, counted from 0, whose loss or gradient is not finite.

    The message counts steps from 1, and contains no values if `metrics` is None because the step does not log.
    """
    values = "loss or gradient"
    if metrics is not None:
        values = f"loss {metrics['loss']}, gradient norm {metrics['grad_norm']}"
    return DivergedError(
        f"step {step + 1}: {values}: not finite, in this step or in a step since the last logged one; "
        f"{DIVERGENCE_REMEDY}"
    )
