"""Bytes on disk and in a GPU's memory, from numbers of values."""

from kairos.config import Experiment
from kairos.costs.dataset_size import DatasetSize
from kairos.costs.network import Network
from kairos.training.lengths import log_interval

_KEPT = 2  # checkpoints of a training, see `training.run_folder`
_RECORD = 250  # bytes around each tensor in torch's file, see tests/test_plan.py
_LINE = 330  # of metrics.jsonl, which is there twice
_SMALL = 40_000  # configuration, scheduler, records and density of a milestone
_PICTURE = 0.6  # a grid's bytes in those of its pixels


def memory(network: Network, processes: int) -> dict[str, int]:
    """Bytes in the memory of one GPU, of one training with Adam at its peak.

    The GPU's own context and the libraries' workspace come on top. Several processes hold the gradients a second time,
    to exchange them. What the optimiser's step needs for a moment, as much as the gradients, takes the place of the
    activations, which are kept for the backward pass of one micro-batch.
    """
    trained, kept = network.parameters * network.value_bytes, network.weights * network.value_bytes
    return {
        "weights": kept,
        "gradients": trained * (2 if processes > 1 else 1),
        "optimiser": 2 * trained,
        "EMA": kept,
        "activations": max(network.activations, trained),
    }


def checkpoint_bytes(network: Network) -> int:
    """Bytes of a checkpoint, without the strategy's state: weights, their average, two moments of Adam."""
    return (2 * network.weights + 2 * network.parameters) * network.value_bytes + 5 * network.tensors * _RECORD


def storage(experiment: Experiment, data: DatasetSize, network: Network, states: list[int]) -> dict[str, int | None]:
    """Estimate the bytes that an experiment leaves on disk, of all its training runs, by kind; None if not known yet.

    Args:
        experiment: the checked experiment.
        data: the experiment's data.
        network: the experiment's backbone.
        states: bytes of the strategy's state, one number per method.
    """
    evaluation, seeds, steps = experiment.evaluation, len(experiment.seeds), experiment.milestones
    milestones = len(states) * seeds * len(steps)
    pictures = evaluation.num_samples * evaluation.sets + round(_PICTURE * experiment.sampling.grid)
    device = "cuda" if experiment.training.device.startswith("cuda") else "cpu"  # which has more lines
    lines = len(states) * seeds * (steps[-1] // log_interval(experiment.training.log_every, device))
    image, images, referred = data.bytes_per_image, data.image_count, experiment.dataset.store == "refer"
    return {
        "dataset": 0 if referred else None if image is None or images is None else image * images,
        "latents": 0
        if not data.latent_bytes_per_image
        else None
        if images is None
        else data.latent_bytes_per_image * images,
        **({"text": data.caption_count and data.bytes_per_text * data.caption_count} if data.bytes_per_text else {}),
        "checkpoints": seeds * _KEPT * sum(checkpoint_bytes(network) + state for state in states),
        "milestones": milestones * (2 * network.weights * network.value_bytes + _SMALL),
        "samples": None if image is None else milestones * pictures * image,
        "metrics": 2 * lines * _LINE,
    }
