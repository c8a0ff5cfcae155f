"""Setting of the study: base, images, tasks and features. For another model, write a class with these methods."""

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from kairos.evaluation.classifier import Classifier
from kairos.snapshots import open_snapshot

FOLDER = Path("results/lora_study")
BASE = Path("results/lora_base/methods/log_normal/seed0/snapshots")
SIDE, CLASSES, FEATURES = 16, 10, 32
SUBJECT = 8  # bags, which the base has not seen: their row in its table of classes is random, like a rare token


class Data(NamedTuple):
    """Images in [-1, 1], (n, channels, height, width), and the index of each in the base's table of classes, (n,)."""

    images: Tensor
    labels: Tensor


def to_pixels(images: Tensor) -> Tensor:
    """Return images in [-1, 1] as uint8."""
    return ((images + 1) * 127.5).round().to(torch.uint8)


def draw_outlines(images: Tensor) -> Tensor:
    """Return drawings of images (n, 1, height, width) in [-1, 1]: dark outlines on white paper."""
    vertical, horizontal = torch.gradient(images, dim=(2, 3))
    return 1 - 2 * (vertical.square() + horizontal.square()).sqrt().clamp(max=1)


def build_classifier() -> Classifier:
    """Build the classifier of ten classes as photographs and as drawings, with random weights."""
    return Classifier((SIDE, SIDE, 1), 2 * CLASSES, 16, FEATURES)


def euler(predict: Any, noise: Tensor, steps: int) -> Tensor:
    """Return images of a rectified flow, from noise (n, channels, height, width) by Euler's method."""
    x = noise
    for k in range(steps, 0, -1):
        x = x - predict(x, torch.full((len(x),), k / steps)) / steps
    return x


class FashionMnist:
    """Rectified flow on Fashion-MNIST at 16x16, conditioned on the class.

    Attributes:
        process: forward process, as for `kairos_timesteps.attach`.
        time: convention of `predict`'s t, as for `kairos_timesteps.attach`.
        lora: arguments of peft's LoraConfig.
        tasks: names of the tasks.
        pool: number of images of each class that fine-tuning images are drawn from; the others are held out.
        samples: number of images to generate for a task, a multiple of nine, the number of the base's classes.
    """

    process, time = "flow", "noise_is_one"
    lora: ClassVar = {"r": 4, "lora_alpha": 4, "target_modules": r"blocks\..*\.(qkv|proj|fc1|fc2|1)"}
    tasks = ("subject", "style")
    pool, samples = 500, 252

    def load_network(self) -> nn.Module:
        """Load the base, whose weights fine-tuning does not change."""
        folder = max(BASE.glob("*"))  # the last snapshot
        return open_snapshot(folder).model

    def predict(self, network: nn.Module, x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """Return the velocity noise - x0 that the network predicts at times t (n,)."""
        velocity: Tensor = network(x_t, 1000 * t, {"class": labels})
        return velocity

    @torch.inference_mode()
    def generate(self, network: nn.Module, labels: Tensor, seed: int) -> Tensor:
        """Return an image per label."""
        noise = torch.randn(len(labels), 1, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))
        return euler(lambda x_t, t: self.predict(network, x_t, t, labels), noise, steps=12).clamp(-1, 1)

    def training_data(self, task: str, count: int, seed: int) -> Data:
        """Return the images of a fine-tuning run, drawn from the pool by the seed."""
        pool = self._task_data(task, heldout=False)
        index = torch.randperm(len(pool.images), generator=torch.Generator().manual_seed(seed))[:count]
        return Data(pool.images[index], pool.labels[index])

    def heldout_data(self, task: str) -> Data:
        """Return the held-out images of a task, its true target, in a fixed random order."""
        return self._task_data(task, heldout=True)

    def base_data(self) -> Data:
        """Return images of the base's classes that neither the base nor fine-tuning has seen."""
        return self._task_data("base", heldout=True)

    def labels_to_generate(self, task: str) -> Tensor:
        """Return labels of the images to generate for a task, or for ``base``."""
        if task == "subject":
            return torch.full((self.samples,), SUBJECT)
        of_base = torch.tensor([number for number in range(CLASSES) if number != SUBJECT])
        return of_base.repeat(self.samples // len(of_base))

    @torch.inference_mode()
    def features(self, images: Tensor) -> Tensor:
        """Return features of images for the Fréchet distance, (n, features)."""
        features: Tensor = self._classifier(to_pixels(images))[0]
        return features

    @torch.inference_mode()
    def recognise(self, task: str, images: Tensor, labels: Tensor) -> Tensor:
        """Return True for each image that the frozen classifier recognises as the task's target, bool (n,).

        The target of ``style`` is a drawing of the label's class; that of ``subject`` is a photograph of the subject.
        """
        classes = self._classifier(to_pixels(images))[1].argmax(1)
        if task == "subject":
            return classes == SUBJECT
        return classes == CLASSES + labels

    def _task_data(self, task: str, heldout: bool) -> Data:
        images, labels = self._test_images
        is_subject = labels == SUBJECT
        index_in_class = torch.zeros(len(labels), dtype=torch.long)
        for number in range(CLASSES):
            of_class = labels == number
            index_in_class[of_class] = torch.arange(int(of_class.sum()))
        selected = ((index_in_class >= self.pool) == heldout) & (is_subject == (task == "subject"))
        images, labels = images[selected], labels[selected]
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        images, labels = images[order], labels[order]
        return Data(draw_outlines(images) if task == "style" else images, labels)

    @cached_property
    def _test_images(self) -> tuple[Tensor, Tensor]:
        with np.load(FOLDER / "images.npz") as file:
            return torch.from_numpy(file["images"]).float()[:, None] / 127.5 - 1, torch.from_numpy(file["labels"])

    @cached_property
    def _classifier(self) -> nn.Module:
        classifier = build_classifier()
        classifier.load_state_dict(torch.load(FOLDER / "classifier.pt"))
        return classifier.eval()
