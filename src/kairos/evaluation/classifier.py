"""A small classifier of the data set's own images as feature extractor, where Inception is absent or out of place.

Trained on the labelled training split, or without labels on a task made of the images alone: which way up is an image
(Gidaris et al. 2018, "Unsupervised representation learning by predicting image rotations")?
`benchmarks/extractors.py` compares the two, and other tasks. Its features are the layer before the classes. The
training is deterministic on one machine and takes seconds on small images.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_fidelity import FeatureExtractorBase, register_feature_extractor

from kairos.data.dataset import PreparedDataset
from kairos.evaluation.extractors import Extractor
from kairos.evaluation.registries import ClassifierOptions, SelfsupervisedOptions
from kairos.files import atomic, read_json, sha256_file
from kairos.progress import Progress, say
from kairos_timesteps.errors import KairosError
from kairos_timesteps.randomness import Stream, derived_seed

WEIGHTS = "model.safetensors"
NAME = "kairos-classifier"
BATCH = 256  # images classified at a time
Task = Callable[[np.ndarray, int], tuple[Tensor, Tensor]]
SMALLEST_SIDE = 4  # convolutions halve the image until it is no larger


class Classifier(nn.Module):
    """Convolutions that halve the image, then features, then classes.

    Without normalisation layers: they would take from the features how far an image is from the training images.

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
        level = channels
        while max(height, width) > SMALLEST_SIDE:
            wider = min(2 * level, 4 * channels)
            layers += [nn.Conv2d(level, wider, 3, stride=2, padding=1), nn.ReLU()]
            level, height, width = wider, -(-height // 2), -(-width // 2)
        self.body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(level * height * width, features), nn.ReLU())
        self.head = nn.Linear(features, classes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 (batch, channels, height, width) to features (batch, features) and logits (batch, classes)."""
        features = self.body(images.float() / 127.5 - 1)
        return features, self.head(features)


def train(options: ClassifierOptions, dataset: PreparedDataset, folder: Path) -> dict[str, Any]:
    """Train the classifier, write its weights into the folder and return what the manifest says of it.

    Raises:
        KairosError: the data set has no classes.
    """
    if dataset.labels is None:
        raise KairosError(
            "evaluation.extractor: got classifier, but the data set has no classes to train it on; "
            "allowed: selfsupervised, inception, or a data set with labels"
        )
    labels, classes = torch.from_numpy(dataset.labels), len(dataset.manifest["classes"])

    def task(chosen: np.ndarray, step: int) -> tuple[Tensor, Tensor]:
        return load_pixels(dataset, chosen), labels[chosen]

    return train_on_task("classifier", options, dataset, classes, task, folder)


def train_on_rotations(options: SelfsupervisedOptions, dataset: PreparedDataset, folder: Path) -> dict[str, Any]:
    """Train the classifier without labels, on the task which way up an image is, and write its weights into the folder.

    Returns the record for the manifest.
    """

    def task(chosen: np.ndarray, step: int) -> tuple[Tensor, Tensor]:
        turns = Stream(options.seed, "selfsupervised turns").integers(step, 4, range(len(chosen)))
        return rotate_images(load_pixels(dataset, chosen), turns), turns

    return train_on_task("selfsupervised", options, dataset, 4, task, folder)


def rotate_images(images: Tensor, turns: Tensor) -> Tensor:
    """Each square image turned by so many quarters, (n, channels, side, side)."""
    return torch.stack([image.rot90(int(turn), (1, 2)) for image, turn in zip(images, turns)])


def train_on_task(
    kind: str, options: ClassifierOptions, dataset: PreparedDataset, classes: int, task: Task, folder: Path
) -> dict[str, Any]:
    """Train the network on a task, write its weights into the folder and return what the manifest says of it.

    Args:
        kind: what it is called.
        options: its size and its training.
        dataset: whose training images it sees.
        classes: how many the task has.
        task: uint8 images (n, channels, height, width) and their classes (n,), made of the images with given indices
            for a given step.
        folder: where the weights go.
    """
    name = f"{kind}{options.features}"
    shape = tuple(dataset.images.shape[1:])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(options.seed, f"{kind} weights"))
        model = Classifier(shape, classes, options.channels, options.features)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, total_steps=options.steps)
    order = Stream(options.seed, f"{kind} order")
    progress = Progress(options.steps, f"train {name}", "step")
    for step in range(options.steps):
        chosen = dataset.train[order.integers(step, len(dataset.train), range(options.batch_size)).numpy()]
        images, labels = task(chosen, step)
        loss = nn.functional.cross_entropy(model(images)[1], labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        progress.advance(1, f"loss {loss.item():.3f}")
    progress.close()

    heldout, right, accuracy = dataset.heldout, 0, None
    with torch.inference_mode():
        for step, chosen in enumerate(np.split(heldout, range(BATCH, len(heldout), BATCH))):
            images, labels = task(chosen, step)
            right += int((model(images)[1].argmax(1) == labels).sum())
    if len(heldout):
        accuracy = right / len(heldout)
        say(f"{name}: {accuracy:.2%} of {len(heldout)} held-out images right")
    from safetensors.torch import save

    with atomic(folder / WEIGHTS) as file:
        file.write(save(model.state_dict()))
    digest = sha256_file(folder / WEIGHTS)
    return {
        "name": name,
        "metric": f"frechet_{name}",
        "features": options.features,
        "accuracy": accuracy,
        "classes": classes,
        "shape": list(shape),
        "sha256": digest,
        "dataset_sha256": dataset.manifest["content_sha256"],
        "files": {WEIGHTS: digest},
    }


def load(folder: Path, manifest: dict[str, Any]) -> Extractor:
    """Open a classifier's folder."""
    return Extractor(manifest, ClassifierExtractor(NAME, ["features"], str(folder)), ("features",))


class ClassifierExtractor(FeatureExtractorBase):
    """The classifier as torch-fidelity knows it; its weights path is the extractor's folder."""

    def __init__(
        self, name: str, features_list: list[str], feature_extractor_weights_path: str | None = None, **_: Any
    ):
        super().__init__(name, features_list)
        if feature_extractor_weights_path is None:
            raise KairosError(f"{name}: pass the folder of stage extractor as feature_extractor_weights_path")
        from safetensors.torch import load_file

        folder = Path(feature_extractor_weights_path)
        manifest = read_json(folder / "manifest.json")
        channels, features = manifest["options"]["channels"], manifest["features"]
        self.model = Classifier(tuple(manifest["shape"]), manifest["classes"], channels, features)
        self.model.load_state_dict(load_file(folder / WEIGHTS))

    @staticmethod
    def get_provided_features_list() -> tuple[str, ...]:
        """Layers by name."""
        return ("features", "logits")

    @staticmethod
    def get_default_feature_layer_for_metric(metric: str) -> str:
        """Logits for the Inception score, features for distances."""
        return "logits" if metric == "isc" else "features"

    @staticmethod
    def can_be_compiled() -> bool:
        """Return False: compilation takes longer than it saves."""
        return False

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """The requested layers of uint8 (batch, channels, height, width)."""
        layers = dict(zip(("features", "logits"), self.model(images)))
        return tuple(layers[name] for name in self.features_list)


register_feature_extractor(NAME, ClassifierExtractor)


def load_pixels(dataset: PreparedDataset, indices: np.ndarray) -> Tensor:
    """Images as uint8 (n, channels, height, width)."""
    return torch.from_numpy(dataset.images[indices]).permute(0, 3, 1, 2)
