"""Write the images of the study, and train the frozen classifier that measures style, class and distance.

    python examples/lora_study/prepare.py data/fashion_mnist

The argument is the folder of the public parquet files of Fashion-MNIST, ``train-*.parquet`` and ``test-*.parquet``;
default: fashion_mnist in the folder of environment variable DATA. Written to results/lora_study:

- ``base.parquet``: training images without the class of task ``subject``, for the base, which the pipeline trains.
- ``images.npz``: test images at 16x16, from which fine-tuning and held-out images are taken.
- ``classifier.pt``: network that recognises ten classes, each as photograph and as drawing. It is trained on images of
  the training file only.
"""

import argparse
import io
import os
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from fashion_mnist import CLASSES, FOLDER, SIDE, SUBJECT, build_classifier, draw_outlines, to_pixels
from PIL import Image
from torch.nn import functional

STEPS, BATCH = 1500, 128


def read_images(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the images of a split at 16x16, uint8 (n, 16, 16), and their classes, int64 (n,)."""
    table = pd.concat([pd.read_parquet(path) for path in sorted(folder.glob(f"{split}-*.parquet"))])
    images = [Image.open(io.BytesIO(cell["bytes"])).convert("L") for cell in table["image"]]
    resized = [np.array(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC)) for image in images]
    return np.stack(resized), table["label"].to_numpy(copy=True)


def write_parquet(images: np.ndarray, labels: np.ndarray, path: Path) -> None:
    """Write images as PNG in the columns ``image`` and ``label``."""
    cells = []
    for image in images:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "png")
        cells.append({"bytes": buffer.getvalue(), "path": None})
    pd.DataFrame({"image": cells, "label": labels}).to_parquet(path)


def train_classifier(images: torch.Tensor, labels: torch.Tensor, steps: int) -> torch.nn.Module:
    """Train the classifier of 20 classes: photographs of ten classes, then drawings of these classes."""
    torch.manual_seed(0)
    network = build_classifier()
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(steps):
        index = torch.randint(len(images), (BATCH,))
        is_drawing = torch.rand(BATCH) < 0.5
        shown = torch.where(is_drawing[:, None, None, None], draw_outlines(images[index]), images[index])
        _, logits = network(to_pixels(shown))
        loss = functional.cross_entropy(logits, labels[index] + CLASSES * is_drawing)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return network.eval()


def main() -> None:
    """Write the files, and print the classifier's accuracy on test images."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(os.environ.get("DATA", "data")) / "fashion_mnist"
    parser.add_argument("folder", type=Path, nargs="?", default=default, help="folder of the parquet files")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps of the classifier")
    arguments = parser.parse_args()
    if not list(arguments.folder.glob("test-*.parquet")):
        parser.error(f"folder: {arguments.folder} has no test-*.parquet; pass the folder of Fashion-MNIST's files")
    FOLDER.mkdir(parents=True, exist_ok=True)
    images, labels = read_images(arguments.folder, "train")
    of_base = labels != SUBJECT
    write_parquet(images[of_base], labels[of_base], FOLDER / "base.parquet")
    test_images, test_labels = read_images(arguments.folder, "test")
    np.savez(FOLDER / "images.npz", images=test_images, labels=test_labels)

    def to_tensor(pixels: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(pixels).float()[:, None] / 127.5 - 1

    classifier = train_classifier(to_tensor(images), torch.from_numpy(labels), arguments.steps)
    torch.save(classifier.state_dict(), FOLDER / "classifier.pt")
    photographs = to_tensor(test_images)
    with torch.inference_mode():
        for name, shown, offset in (("photographs", photographs, 0), ("drawings", draw_outlines(photographs), CLASSES)):
            classes = classifier(to_pixels(shown))[1].argmax(1) - offset
            accuracy = float((classes == torch.from_numpy(test_labels)).float().mean())
            print(f"accuracy on {name}: {accuracy:.3f}")


if __name__ == "__main__":
    main()
