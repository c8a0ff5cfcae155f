"""A small classifier of the data set's images as feature extractor, for data where Inception is absent or unsuitable.

It is trained on the labelled training split, or without labels to predict by how many quarter turns an image was
rotated. Gidaris et al. 2018, "Unsupervised representation learning by predicting image rotations", proposed this task.
`benchmarks/extractors.py` compares the two tasks, and others. The features are the layer before the classes. Training
is deterministic on one machine and takes seconds on small images.

The classes of a task are drawn equally often, so that a network cannot gain by predicting a large class. After
training, `instrument_check` tests that the network has learned its task.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from kairos.array_shapes import FeatureArray, IntegerArray
from kairos.data.dataset import Labels, PreparedDataset
from kairos.evaluation.extractors import Extractor
from kairos.evaluation.instrument_check import check_instrument
from kairos.evaluation.metrics import indices_to_store
from kairos.evaluation.settings import ClassifierOptions, NetworkOptions, SelfsupervisedOptions
from kairos.files import atomic, sha256_file
from kairos.finite import demand_finite
from kairos.progress import ProgressBar, log
from kairos.shapes import Features, Integers, Logits, Pixels
from kairos_timesteps.errors import KairosError
from kairos_timesteps.optimizers import AdamW
from kairos_timesteps.randomness import Stream, derived_seed

WEIGHTS = "model.safetensors"
BATCH = 256  # images classified at a time
Task = Callable[[IntegerArray, int], tuple[Pixels, Integers]]  # images and classes by dataset indices and step
SMALLEST_SIDE = 4  # convolutions halve the image until it is no larger


class Classifier(nn.Module):
    """Network of strided convolutions, a layer of features, and a linear layer of classes.

    There are no normalisation layers: they would hide from the features how far an image is from the training images.

    Args:
        shape: (height, width, channels) of the uint8 images.
        classes: number of classes.
        channels: width of the first convolution; it doubles up to four times that.
        features: width of the layer before the classes.
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, channels: int, features: int):
        super().__init__()
        height, width, inputs = shape
        layers: list[nn.Module] = [nn.Conv2d(inputs, channels, 3, padding=1), nn.ReLU()]
        level_channels = channels  # channels of the last layer so far; height and width are its sides
        while max(height, width) > SMALLEST_SIDE:
            next_channels = min(2 * level_channels, 4 * channels)
            layers += [nn.Conv2d(level_channels, next_channels, 3, stride=2, padding=1), nn.ReLU()]
            level_channels = next_channels
            height, width = math.ceil(height / 2), math.ceil(width / 2)  # the sides after a stride of 2 with padding 1
        flat_width = level_channels * height * width
        self.body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(flat_width, features), nn.ReLU())
        self.head = nn.Linear(features, classes)

    def forward(self, images: Pixels) -> tuple[Features, Logits]:
        """Return features >= 0 (batch, features) and logits (batch, classes) of uint8 (batch, channels, h, w)."""
        features = self.body(images.float() / 127.5 - 1)  # the output of a ReLU
        return features, self.head(features)


def train(options: ClassifierOptions, dataset: PreparedDataset, folder: Path) -> dict[str, Any]:
    """Train the classifier on labels, write its weights into `folder` and return its record fields.

    The record fields include the accuracy on held-out images, see `train_on_task`.

    Raises:
        KairosError: the data set has no classes.
    """
    if dataset.labels is None:
        raise KairosError(
            "evaluation.extractor: got classifier, but the data set has no classes to train it on; "
            "allowed: selfsupervised, inception, or a data set with labels"
        )
    labels, classes = torch.from_numpy(dataset.labels), len(dataset.record["classes"])

    def task(indices: IntegerArray, step: int) -> tuple[Pixels, Integers]:
        return load_pixels(dataset, indices), labels[indices]

    images = BalancedImages(dataset.train, dataset.labels)
    return train_on_task("classifier", options, dataset, classes=classes, task=task, folder=folder, images=images)


def train_on_rotations(options: SelfsupervisedOptions, dataset: PreparedDataset, folder: Path) -> dict[str, Any]:
    """Train the classifier without labels, on the rotation of images, and write its weights into `folder`.

    The classes are the numbers of quarter turns, 0 to 3. They are drawn by step and position in the batch. The caller
    ensures that the images are square, as stage prepare makes them.

    Returns:
        The classifier's record fields, see `train_on_task`.
    """

    def task(indices: IntegerArray, step: int) -> tuple[Pixels, Integers]:
        quarters = Stream(options.seed, "selfsupervised turns").integers(step, 4, range(len(indices)))
        return rotate_images(load_pixels(dataset, indices), quarters), quarters

    return train_on_task("selfsupervised", options, dataset, classes=4, task=task, folder=folder)


class BalancedImages:
    """Dataset indices of images, with repetitions, so that every class has the number of images of the largest one.

    The images come first, in their order; repetitions of smaller classes follow. If all classes have equally many
    images, there are no repetitions. Repetitions are computed on access, not stored. The images of a class are
    repeated in turn, so that their numbers of repetitions differ by at most one.

    Args:
        images: dataset indices of the images, (n,).
        labels: class of every image of the data set, by dataset index.
    """

    def __init__(self, images: IntegerArray, labels: Labels):
        image_labels = labels[images]
        self.images = images
        self.images_by_class = images[np.argsort(image_labels, kind="stable")]  # the first class comes first
        self.class_counts = np.bincount(image_labels)
        self.class_starts = np.cumsum(self.class_counts) - self.class_counts  # positions in `images_by_class`
        is_present = self.class_counts > 0
        self.repetitions = np.where(is_present, self.class_counts.max() - self.class_counts, 0)
        self.repetition_ends = np.cumsum(self.repetitions)  # positions among all repetitions

    def __len__(self) -> int:
        return len(self.images) + int(self.repetition_ends[-1])

    def __getitem__(self, positions: IntegerArray) -> IntegerArray:
        """Return the dataset indices at positions from 0 to the length of this sequence, (n,)."""
        is_repetition = positions >= len(self.images)
        repeated = positions[is_repetition] - len(self.images)
        classes = np.searchsorted(self.repetition_ends, repeated, side="right")
        numbers = repeated - (self.repetition_ends - self.repetitions)[classes]  # of a repetition within its class
        indices = np.empty_like(positions)
        indices[~is_repetition] = self.images[positions[~is_repetition]]
        indices[is_repetition] = self.images_by_class[self.class_starts[classes] + numbers % self.class_counts[classes]]
        return indices


def rotate_images(images: Pixels, quarters: Integers) -> Pixels:
    """Return square images (n, channels, h, w), each turned counterclockwise by its number of quarter turns (n,)."""
    rotated = [image.rot90(int(count), dims=(1, 2)) for image, count in zip(images, quarters)]
    return torch.stack(rotated)


def train_on_task(
    kind: str,
    options: NetworkOptions,
    dataset: PreparedDataset,
    classes: int,
    task: Task,
    folder: Path,
    images: BalancedImages | None = None,
) -> dict[str, Any]:
    """Train the network on a classification task, write its weights into `folder` and return its record fields.

    Training runs on the CPU and does not change torch's global generator. Messages report the progress, and the
    result of the check.

    Args:
        kind: name of the extractor without its width; also names the random streams.
        options: size and training of the network.
        dataset: data set with the training images, and held-out images to measure the accuracy.
        classes: number of classes of the task.
        task: function from dataset indices and step to uint8 images (n, channels, height, width) and their classes
            (n,).
        folder: folder for the weights.
        images: images to draw from; None: the training images, of which the task draws the classes equally often.

    Returns:
        Fields of the extractor's record. ``name`` is `kind` with the number of features, such as ``classifier64``,
            ``metric`` the column of the Fréchet distance, and ``shape`` height, width and channels of the images.
            ``accuracy`` is the share of held-out images that are classified correctly, None without held-out images.
            ``check`` is the result of `check_instrument`, and ``warnings`` contains its reasons against the extractor.
    """
    name = f"{kind}{options.features}"
    shape = tuple(dataset.images.shape[1:])
    with torch.random.fork_rng(devices=[]):  # weights are drawn on the CPU: no generator of a GPU is saved
        torch.manual_seed(derived_seed(options.seed, f"{kind} weights"))
        model = Classifier(shape, classes, options.channels, options.features)
    _optimize(kind, model, options, dataset.train if images is None else images, task)
    what = f"evaluation.extractor: {name}: weights after {options.steps} steps"
    demand_finite(model.state_dict(), what, "its training diverged: lower evaluation.extractor.learning_rate")
    has_heldout = len(dataset.heldout) > 0
    checked_images = dataset.heldout if has_heldout else dataset.train[indices_to_store(len(dataset.train))]
    check, warnings = check_instrument(name, *_classify(model, checked_images, task))
    accuracy = check["accuracy"] if has_heldout else None
    log(
        f"{name}: {check['accuracy']:.2%} of {len(checked_images)} {'held-out' if has_heldout else 'training'} images "
        f"classified correctly; effective rank of the features {check['effective_rank']:.3g}"
    )
    digest = _save_weights(model, folder / WEIGHTS)
    return {
        "name": name,
        "metric": f"frechet_{name}",
        "features": options.features,
        "accuracy": accuracy,
        "check": {"images": "held out" if has_heldout else "training", **check},
        "warnings": warnings,
        "classes": classes,
        "shape": list(shape),
        "sha256": digest,
        "dataset_sha256": dataset.record["content_sha256"],
        "files": {WEIGHTS: digest},
    }


def _optimize(
    kind: str, model: Classifier, options: NetworkOptions, images: IntegerArray | BalancedImages, task: Task
) -> None:
    """Train the network in place on random batches of `images`, by AdamW with a one-cycle learning rate.

    The images of a batch are drawn with replacement, from a stream named after `kind`. The loss is the cross entropy.
    """
    # the weight decay is torch's default for AdamW
    optimizer = AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, total_steps=options.steps)
    order = Stream(options.seed, f"{kind} order")
    progress = ProgressBar(options.steps, f"train {kind}{options.features}", "step")
    for step in range(options.steps):
        positions = order.integers(step, len(images), range(options.batch_size)).numpy()
        pixels, labels = task(images[positions], step)
        _, logits = model(pixels)
        loss = nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        progress.advance(1, f"loss {loss.item():.3f}")
    progress.close()


def _classify(
    model: Classifier, image_indices: IntegerArray, task: Task
) -> tuple[FeatureArray, IntegerArray, IntegerArray]:
    """Return features (n, width), classes (n,) and predicted classes (n,) of the images with these dataset indices.

    The task gets the number of each batch as step, so that rotations are drawn by batch and position.
    """
    features, classes, predictions = [], [], []
    batches = np.split(image_indices, range(BATCH, len(image_indices), BATCH))
    with torch.inference_mode():
        for batch_number, indices in enumerate(batches):
            images, labels = task(indices, batch_number)  # the number stands for the step that rotations are drawn from
            batch_features, logits = model(images)
            features.append(batch_features)
            classes.append(labels)
            predictions.append(logits.argmax(1))
    return torch.cat(features).numpy(), torch.cat(classes).numpy(), torch.cat(predictions).numpy()


def _save_weights(model: Classifier, path: Path) -> str:
    """Write the network's weights atomically as safetensors and return the SHA-256 of the file."""
    from safetensors.torch import save

    with atomic(path) as file:
        file.write(save(model.state_dict()))
    return sha256_file(path)


def load(folder: Path, record: dict[str, Any]) -> Extractor:
    """Open the extractor in a folder that `train` or `train_on_rotations` filled."""
    return Extractor(record, module=ClassifierExtractor(folder, record), layers=("features",))


class ClassifierExtractor(nn.Module):
    """Features of the classifier in an extractor's folder, as the module of an `Extractor`.

    Args:
        folder: folder that `train` or `train_on_rotations` filled.
        record: record of the folder.
    """

    def __init__(self, folder: Path, record: dict[str, Any]):
        super().__init__()
        from safetensors.torch import load_file

        channels, features = record["options"]["channels"], record["features"]
        self.model = Classifier(tuple(record["shape"]), record["classes"], channels, features)
        self.model.load_state_dict(load_file(folder / WEIGHTS))

    def forward(self, images: Pixels) -> tuple[Features]:
        """Return the features (batch, features) of uint8 images (batch, channels, height, width)."""
        features, _ = self.model(images)
        return (features,)


def load_pixels(dataset: PreparedDataset, indices: IntegerArray) -> Pixels:
    """Return the images with these dataset indices, uint8 (n, channels, height, width)."""
    return torch.from_numpy(dataset.images[indices]).permute(0, 3, 1, 2)
