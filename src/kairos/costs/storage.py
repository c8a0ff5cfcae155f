"""Bytes that an experiment takes on disk and in the memory of a GPU."""

from kairos.config import Experiment
from kairos.costs.dataset_size import DatasetSize
from kairos.costs.network import NetworkCost
from kairos.training.lengths import log_interval

_CHECKPOINTS = 2  # kept per training run, see `training.run_folder`
_BYTES_PER_TENSOR = 250  # metadata of a tensor in torch's file format, see tests/test_plan.py
_BYTES_PER_LINE = 330  # bytes of a line in metrics.jsonl, which is stored twice
_SMALL_FILES = 40_000  # bytes of a snapshot's configuration, scheduler, records and density
_PNG_RATIO = 0.6  # bytes of an image grid as PNG per byte of its pixels


def estimate_memory(network: NetworkCost, processes: int) -> dict[str, int]:
    """Return the bytes in the memory of one GPU at the peak of a training run with Adam, by use.

    The uses are weights, gradients, optimizer, EMA and activations. The GPU's context and the libraries' workspace are
    not included. `network` describes a micro-batch, and `processes` is the number of processes of the run.
    """
    trained_bytes = network.parameters * network.bytes_per_value
    weight_bytes = network.saved_values * network.bytes_per_value
    gradient_copies = 2 if processes > 1 else 1  # several processes exchange gradients, which takes a second copy
    return {
        "weights": weight_bytes,
        "gradients": gradient_copies * trained_bytes,
        "optimizer": 2 * trained_bytes,  # the two moments
        "EMA": weight_bytes,
        # the optimizer's step copies the gradients when the activations are freed
        "activations": max(network.activation_bytes, trained_bytes),
    }


def checkpoint_bytes(network: NetworkCost) -> int:
    """Return the bytes of a checkpoint without the strategy's state: weights, EMA and two moments of Adam."""
    values = 2 * network.saved_values + 2 * network.parameters
    # tensors of a weight: the weight, its average, two moments, and the optimizer's step
    tensors = 5 * network.saved_tensors
    return values * network.bytes_per_value + tensors * _BYTES_PER_TENSOR


def estimate_storage(
    experiment: Experiment, data: DatasetSize, network: NetworkCost, state_bytes: list[int]
) -> dict[str, int | None]:
    """Return the bytes that an experiment leaves on disk, by kind of file; a kind has None if not known yet.

    The kinds are dataset, latents, text, checkpoints, snapshots, samples and metrics, in this order. Kind text is left
    out if no captions are encoded. Images that are not copied, and latents in pixel space, have 0 bytes. `state_bytes`
    are the bytes of the strategy's state, one number per method.
    """
    evaluation, training = experiment.evaluation, experiment.training
    seed_count, method_count = len(experiment.seeds), len(state_bytes)
    run_count = method_count * seed_count
    snapshot_count = run_count * len(experiment.milestones)

    # one seed of all methods
    checkpoint_bytes_of_seed = sum(_CHECKPOINTS * (checkpoint_bytes(network) + state) for state in state_bytes)
    weight_bytes = network.saved_values * network.bytes_per_value
    snapshot_bytes = 2 * weight_bytes + _SMALL_FILES  # raw and averaged weights
    grid_images = round(_PNG_RATIO * experiment.sampling.grid)  # the PNG takes the bytes of this number of images
    images_per_snapshot = evaluation.num_samples * evaluation.sets + grid_images
    # auto: the CPU, which writes more lines
    device = "cuda" if training.device.startswith("cuda") else "cpu"
    lines_per_run = experiment.milestones[-1] // log_interval(training.log_every, device)

    storage = _estimate_data_storage(experiment, data)
    storage["checkpoints"] = seed_count * checkpoint_bytes_of_seed
    storage["snapshots"] = snapshot_count * snapshot_bytes
    storage["samples"] = _product(snapshot_count * images_per_snapshot, data.bytes_per_image)
    storage["metrics"] = 2 * run_count * lines_per_run * _BYTES_PER_LINE  # stored twice
    return storage


def _estimate_data_storage(experiment: Experiment, data: DatasetSize) -> dict[str, int | None]:
    """Return the bytes of prepared images, latents and encoded texts by kind, a part of `estimate_storage`.

    The kinds are dataset, latents and, if captions are encoded, text. A kind has None if its bytes are not known yet.
    """
    storage: dict[str, int | None] = {"dataset": 0, "latents": 0}
    if experiment.dataset.store != "refer":  # else the images stay in the user's files
        storage["dataset"] = _product(data.image_count, data.bytes_per_image)
    if data.latent_bytes_per_image > 0:  # else training is in pixel space
        storage["latents"] = _product(data.image_count, data.latent_bytes_per_image)
    if data.bytes_per_text > 0:
        storage["text"] = _product(data.caption_count, data.bytes_per_text)
    return storage


def _product(count: int | None, size: int | None) -> int | None:
    """Return the product of a count and a size; None if one of them is not known."""
    return None if count is None or size is None else count * size
