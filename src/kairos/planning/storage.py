"""Bytes on disk and in a GPU's memory, from numbers of values."""

from dataclasses import dataclass

from kairos.config import Experiment
from kairos.planning.data import Data
from kairos.planning.network import Network

_KEPT = 2  # checkpoints of a training, see `training.store`
_RECORD = 250  # bytes around each tensor in torch's file, see tests/test_plan.py
_LINE = 330  # of metrics.jsonl, which is there twice
_SMALL = 40_000  # configuration, scheduler, records and density of a milestone
_PICTURE = 0.6  # a grid's bytes in those of its pixels


@dataclass(frozen=True)
class Memory:
    """Bytes in the memory of one GPU, of one training at its peak.

    Attributes:
        weights, gradients, optimizer, average: of the network; the average is the EMA.
        activations: kept for the backward pass of one micro-batch.
        passing: what the optimiser's step needs for a moment, while there are no activations.
    """

    weights: int
    gradients: int
    optimizer: int
    average: int
    activations: int
    passing: int

    @property
    def peak(self) -> int:
        """All of it, at the worst moment; the GPU's own context and the libraries' workspace come on top."""
        lasting = self.weights + self.gradients + self.optimizer + self.average
        return lasting + max(self.activations, self.passing)


def memory(network: Network, processes: int) -> Memory:
    """The memory of a training with Adam; several processes hold the gradients a second time, to exchange them."""
    each = network.value_bytes
    trained, kept = network.parameters * each, network.weights * each
    gradients = trained * (2 if processes > 1 else 1)
    return Memory(kept, gradients, 2 * trained, kept, network.activations, trained)


@dataclass(frozen=True)
class Storage:
    """Bytes on disk. Those of the data are None while the number of images is not known, and then hold per image.

    Attributes:
        dataset: the prepared images.
        latents: their moments; 0 in pixel space.
        image: of the dataset, per image.
        latent: of the latents, per image.
        checkpoint: one.
        checkpoints: all that are kept at a time, of all trainings.
        milestones: of all trainings.
        samples: of all trainings, with grids; None while the size of an image is not known.
        metrics: of all trainings.
    """

    dataset: int | None
    latents: int | None
    image: int | None
    latent: int
    checkpoint: int
    checkpoints: int
    milestones: int
    samples: int | None
    metrics: int

    @property
    def total(self) -> int:
        """What is known of it."""
        parts = (self.dataset, self.latents, self.checkpoints, self.milestones, self.samples, self.metrics)
        return sum(part or 0 for part in parts)


def storage(experiment: Experiment, data: Data, network: Network, states: dict[str, int]) -> Storage:
    """What an experiment leaves on disk.

    Args:
        experiment: the checked experiment.
        data: its data.
        network: its backbone.
        states: bytes of the strategy's state by method.
    """
    channels, height, width = data.x0
    latent = data.moments * channels * height * width * 4
    seeds, steps, training = len(experiment.seeds), experiment.milestones, experiment.training
    weights = network.weights * network.value_bytes
    optimizer = 2 * network.parameters * network.value_bytes
    checkpoint = 2 * weights + optimizer + 5 * network.tensors * _RECORD
    checkpoints = [_KEPT * (checkpoint + state) for state in states.values()]
    each = 2 * weights + _SMALL
    pictures = None
    if data.image_bytes is not None:
        evaluation, grid = experiment.evaluation, experiment.sampling.grid
        images = evaluation.num_samples * evaluation.sets + round(_PICTURE * grid)
        pictures = len(states) * seeds * len(steps) * images * data.image_bytes
    lines = steps[-1] // training.log_every
    return Storage(
        dataset=None if None in (data.images, data.image_bytes) else (data.images or 0) * (data.image_bytes or 0),
        latents=None if data.images is None and latent else (data.images or 0) * latent,
        image=data.image_bytes,
        latent=latent,
        checkpoint=checkpoint + max(states.values()),
        checkpoints=seeds * sum(checkpoints),
        milestones=len(states) * seeds * len(steps) * each,
        samples=pictures,
        metrics=2 * len(states) * seeds * lines * _LINE,
    )
