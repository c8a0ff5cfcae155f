"""Bytes that an experiment takes on disk and in the memory of a GPU."""

from kairos.config import Experiment
from kairos.costs.dataset_size import DatasetSize
from kairos.costs.network import NetworkCost
from kairos.training.lengths import log_interval

_CHECKPOINTS = 2  # kept per training run, see `training.store`
_BYTES_PER_TENSOR = 250  # metadata of a tensor in torch's file format, see tests/test_plan.py
_BYTES_PER_LINE = 330  # of metrics.jsonl, which is stored twice
_SMALL_FILES = 40_000  # bytes of a snapshot's configuration, scheduler, records and density
_PNG_RATIO = 0.6  # bytes of an image grid as PNG per byte of its pixels


def estimate_memory(network: NetworkCost, processes: int) -> dict[str, int]:
    """Return the bytes in the memory of one GPU at the peak of a training run with Adam, by use.

    The GPU's context and the libraries' workspace are not included. Several processes exchange gradients, which takes a
    second copy of them. The optimiser's step briefly takes another copy of the gradients. It replaces the activations
    of a micro-batch, which are freed by then.

    Args:
        network: size of the backbone and cost of a micro-batch.
        processes: processes of the training run.
    """
    trained_bytes = network.parameters * network.bytes_per_value
    weight_bytes = network.saved_values * network.bytes_per_value
    return {
        "weights": weight_bytes,
        "gradients": trained_bytes * (2 if processes > 1 else 1),
        "optimiser": 2 * trained_bytes,
        "EMA": weight_bytes,
        "activations": max(network.activation_bytes, trained_bytes),
    }


def checkpoint_bytes(network: NetworkCost) -> int:
    """Return the bytes of a checkpoint without the strategy's state: weights, EMA and two moments of Adam."""
    values = 2 * network.saved_values + 2 * network.parameters
    return values * network.bytes_per_value + 5 * network.saved_tensors * _BYTES_PER_TENSOR


def estimate_storage(
    experiment: Experiment, data: DatasetSize, network: NetworkCost, state_bytes: list[int]
) -> dict[str, int | None]:
    """Return the bytes that an experiment leaves on disk, by kind of file; None if not known yet.

    Args:
        experiment: the checked experiment.
        data: shapes and numbers of the experiment's data.
        network: size of the experiment's backbone.
        state_bytes: bytes of the strategy's state, one number per method.
    """
    evaluation, seeds, steps = experiment.evaluation, len(experiment.seeds), experiment.milestones
    snapshots = len(state_bytes) * seeds * len(steps)
    image_bytes, image_count = data.bytes_per_image, data.image_count
    stored_images = evaluation.num_samples * evaluation.sets + round(_PNG_RATIO * experiment.sampling.grid)
    device = "cuda" if experiment.training.device.startswith("cuda") else "cpu"  # with auto: more lines, those of a CPU
    lines = len(state_bytes) * seeds * (steps[-1] // log_interval(experiment.training.log_every, device))

    dataset = None if image_bytes is None or image_count is None else image_bytes * image_count
    if experiment.dataset.store == "refer":  # images stay in the user's files
        dataset = 0
    latents = None if image_count is None else data.latent_bytes_per_image * image_count
    if not data.latent_bytes_per_image:
        latents = 0
    texts = {}
    if data.bytes_per_text:
        texts["text"] = data.caption_count and data.bytes_per_text * data.caption_count
    return {
        "dataset": dataset,
        "latents": latents,
        **texts,
        "checkpoints": seeds * _CHECKPOINTS * sum(checkpoint_bytes(network) + state for state in state_bytes),
        "milestones": snapshots * (2 * network.saved_values * network.bytes_per_value + _SMALL_FILES),
        "samples": None if image_bytes is None else snapshots * stored_images * image_bytes,
        "metrics": 2 * lines * _BYTES_PER_LINE,
    }
