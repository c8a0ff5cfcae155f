"""State of a training run: model, average of its weights, optimizer, timestep strategy, and the code that builds them.

`kairos.training.loop` updates the state, `kairos.training.run` saves and restores it.
"""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kairos import models
from kairos.data.batches import Batches
from kairos.data.latents import Latents
from kairos.forward_process import build_process, output_channels
from kairos.snapshots import load_start_weights
from kairos.training.lengths import length_in_steps
from kairos.training.optim import Average
from kairos.training.settings import RunSettings
from kairos_timesteps import Strategy, distributed
from kairos_timesteps.randomness import derived_seed


class MicroBatch(NamedTuple):
    """Samples of one forward pass.

    Attributes:
        number: number of the pass within the step, over all ranks, from 0.
        samples: indices of the samples in the global batch.
    """

    number: int
    samples: slice


class TrainingState:
    """State of a training run, with the components that its configuration selects.

    Args:
        run: settings of the training run.
        latents: training data.
        device: device that computes the run.

    Attributes:
        run: settings of the training run.
        seed: seed of the training run.
        latents: training data.
        device: device that computes the run.
        settings: section `training` of the experiment.
        dtype: type of weights and images: float64 with precision fp64, else float32.
        conditions: names of the model's conditions.
        sigma_data: standard deviation of x0, see `Latents.measure_sigma_data`.
        micro_batches: forward passes of this rank in every step.
        batches: source of x0 and conditions.
        process: forward process.
        strategy: timestep strategy of the method.
        losses: options and function of each loss term.
        probes: measurements by name, see `kairos.training.loop.StepResult`.
        model: the module that is trained.
        network: the model, compiled if the settings request it; measurements call it.
        ddp_network: the network whose backward pass also averages gradients over ranks; `network` if there is one rank.
        average: average of the weights, the `ema` of snapshots.
        parameters: parameters that the optimizer updates.
        optimizer: optimizer of the parameters.
        grad_clip: largest norm of the gradient; inf: no clipping.
        length: number of steps of the learning-rate schedule; None if the schedule has no end.
        step: number of completed steps.
        largest_gradient_norm: scalar on the device: the largest norm of a step's gradient so far; infinite or NaN as
            soon as one norm was.
        losses_are_finite: no logged loss was infinite or NaN so far.
    """

    def __init__(self, run: RunSettings, latents: Latents, device: torch.device):
        self.run, self.seed, self.latents, self.device = run, run.seed, latents, device
        self.settings = settings = run.training
        self.dtype = torch.float64 if settings.precision == "fp64" else torch.float32
        self.conditions = tuple(run.model.conditions)

        # data
        self.micro_batches = split_into_micro_batches(
            settings.batch_size, settings.microbatch, distributed.rank(), distributed.ranks()
        )
        self.batches = self._build_batches()

        # diffusion
        self.sigma_data = latents.measure_sigma_data()
        self.process = build_process(run.diffusion.process, run.diffusion.prediction, self.sigma_data)
        self.strategy = self._build_strategy()
        self.losses = [(term, term.load()) for term in run.diffusion.losses]
        self.probes = {probe.name: probe.build() for probe in settings.probes}

        # model and the code that updates its weights
        self.model: Any = self._build_model()
        self.average = self._build_average()
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer: torch.optim.Optimizer = settings.optimizer.build(self.parameters)
        clip = settings.optimizer.grad_clip
        self.grad_clip = math.inf if clip is None else clip
        self._rate_factor = settings.schedule.load()
        self.length = self._schedule_length()
        self.network = torch.compile(self.model) if settings.compile else self.model
        self.ddp_network = self._wrap_for_ranks(self.network)

        self.step = 0
        self.largest_gradient_norm = torch.zeros((), dtype=self.dtype, device=device)
        self.losses_are_finite = True

    def _build_batches(self) -> Batches:
        """Build the source of x0 and conditions, for this rank's slice of every global batch."""
        settings = self.settings
        first_samples, last_samples = self.micro_batches[0].samples, self.micro_batches[-1].samples
        return Batches(
            self.latents.with_small_arrays_in_memory(),  # arrays of at most 16 MiB
            seed=self.seed,
            size=settings.batch_size,
            sample_indices=range(first_samples.start, last_samples.stop),
            conditions=self.conditions,
            dropout=settings.condition_dropout,
            device=self.device,
            dtype=self.dtype,
            augment=settings.augment,
        )

    def _build_strategy(self) -> Strategy:
        """Build the timestep strategy of the method: sampler, weighting and coupling of noise."""
        method = self.run.method
        # the first argument selects sampler and weighting by their names; `sampler` and `weighting` are their options
        return Strategy(
            f"{method.sampler.name}+{method.weighting.name}",
            self.process,
            sampler=method.sampler.plain_options(),
            weighting=method.weighting.plain_options(),
            coupling=method.coupling.plain(),
            seed=self.seed,
        )

    def _build_model(self) -> Any:
        """Build the model on the device, with weights drawn from the run's seed or read from snapshot `start_from`.

        The state of torch's generators is unchanged. With precision fp64 all linear layers convert inputs to float64.

        Raises:
            KairosError: the snapshot is missing or damaged, or its weights do not fit.
        """
        latents = self.latents
        with torch.random.fork_rng(devices=[]):  # restores torch's CPU generator afterwards
            torch.default_generator.manual_seed(derived_seed(self.seed, "weights"))
            channels = output_channels(self.process, latents.shape[0])
            model = models.build(self.run.model, latents.shape, latents.condition_kinds, channels)
        if self.settings.start_from:
            model.load_weights(load_start_weights(Path(self.settings.start_from), model.weights()))
        model = model.to(self.device, self.dtype)
        if self.dtype == torch.float64:
            # models embed times in float32 also in a float64 network: convert the inputs of linear layers
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    module.register_forward_pre_hook(_convert_to_double)
        return model

    def _build_average(self) -> Average:
        """Build the average of the model's weights, which starts as a copy of the present weights."""
        options, batch_size = self.settings.ema, self.settings.batch_size
        compute_decay = options.load()
        return Average(self.model.weights(), decay_at=lambda step: compute_decay(options, step, batch_size))

    def _schedule_length(self) -> int | None:
        """Return the number of steps of a schedule that ends; None for other schedules.

        A schedule ends if it has an option `length`. If that is None, the schedule ends at the last milestone.
        """
        settings = self.settings
        if not hasattr(settings.schedule, "length"):
            return None
        last_milestone = length_in_steps(settings.milestones[-1], settings.batch_size, self.run.train_images)
        return settings.schedule.length or last_milestone

    def _wrap_for_ranks(self, network: Any) -> Any:
        """Return `network` in DistributedDataParallel, which averages gradients; `network` itself with one rank."""
        if distributed.ranks() == 1:
            return network
        # Buffers are equal on all ranks, so they need no broadcast. A step has two forward passes before its backward
        # pass if a loss term masks tokens. A broadcast in the second one would overwrite values that the backward pass
        # reads.
        return nn.parallel.DistributedDataParallel(network, broadcast_buffers=False)

    def autocast(self) -> Any:
        """Return a context manager for calls of the network: bfloat16 autocast for precision bf16, else no effect."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.precision == "bf16")

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0: `lr` times the schedule's factor and linear warm-up.

        The factor of warm-up is (step + 1)/warmup_steps, or with `warmup_from_zero` step/warmup_steps, and at most 1.
        """
        options = self.settings.optimizer
        # schedules without an end have no length and ignore the 0
        scheduled_rate: float = options.lr * self._rate_factor(self.settings.schedule, step, self.length or 0)
        if not options.warmup_steps:
            return scheduled_rate
        warm_up_step = step if options.warmup_from_zero else step + 1
        return scheduled_rate * min(1.0, warm_up_step / options.warmup_steps)

    def is_finite(self) -> bool:
        """Return True if no gradient and no logged loss was infinite or NaN so far; synchronises with the device."""
        return self.losses_are_finite and math.isfinite(self.largest_gradient_norm)

    def density_images(self) -> Tensor:
        """Return x0 of the first training images, at most 256, (n, c, h, w), to average p(t) of a learned sampler over.

        The images are on the device, and are read again at every call.
        """
        return self.latents.load_x0(self.latents.train[:256]).to(self.device, self.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from: ``model``, ``ema``, ``optimizer`` and ``strategy``.

        The step, data and configuration are not included. Weights and moments are the tensors that training updates,
        not copies.
        """
        return {
            "model": self.model.state_dict(),
            "ema": self.average.weights,
            "optimizer": self.optimizer.state_dict(),
            "strategy": self.strategy.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Restore a result of `state_dict` that was saved after `step` completed steps, and set `step`.

        `largest_gradient_norm` and `losses_are_finite` do not change.
        """
        self.model.load_state_dict(state["model"])
        self.average.load(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.strategy.load_state_dict(state["strategy"], self.device)
        self.step = step


def split_into_micro_batches(batch_size: int, microbatch: int | None, rank: int, ranks: int) -> list[MicroBatch]:
    """Split the global batch into forward passes, and return the passes of one rank, in order.

    If `microbatch` is set, the split does not depend on the number of ranks, and each rank has consecutive passes. The
    last pass of the batch may be smaller. Otherwise every rank has one pass: a batch of 10 on 3 ranks gives samples 0
    to 2, 3 to 5 and 6 to 9. The caller ensures that every rank gets at least one pass.

    Args:
        batch_size: number of samples in the global batch.
        microbatch: number of samples per forward pass; None: all samples of a rank.
        rank: number of this process, from 0.
        ranks: number of processes.
    """
    # all passes of the global batch
    if microbatch is None:
        starts = [batch_size * number // ranks for number in range(ranks)]
    else:
        starts = list(range(0, batch_size, microbatch))
    micro_batches = []
    # `pairwise` gives the first and the end of each pass: its end is the start of the next one, or the batch's end
    for number, (start, stop) in enumerate(pairwise([*starts, batch_size])):
        micro_batches.append(MicroBatch(number, slice(start, stop)))

    # passes of this rank, which are consecutive; the numbers of passes of two ranks differ by at most 1
    first = len(micro_batches) * rank // ranks
    end = len(micro_batches) * (rank + 1) // ranks
    return micro_batches[first:end]


def _convert_to_double(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a module's inputs with each tensor converted to float64; a forward pre-hook, which ignores `module`."""
    return tuple(value.double() if isinstance(value, Tensor) else value for value in inputs)
