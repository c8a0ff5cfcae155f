"""Feature extractors and metrics by name.

An extractor's code is called as ``code(options, dataset, folder)``, fills the folder and gives its manifest; its
module also has ``load(folder, manifest)``, which opens it. A metric's code is called as ``code(options, sample,
target)``, with the features of one set of images and the real ones, and gives columns: a dictionary of numbers, empty
where it does not apply. Every registered metric is computed for every set.
"""

from dataclasses import dataclass

from kairos.options import option
from kairos.registry import NoOptions, Registry


@dataclass(frozen=True)
class ClassifierOptions:
    """A small convolutional classifier, trained on the labelled training split."""

    features: int = option(64, "features: width of the layer before the classes", ge=2, le=2048)
    channels: int = option(16, "width of the first convolution", ge=4)
    steps: int = option(600, "training steps", ge=1)
    batch_size: int = option(128, "images per step", ge=2)
    learning_rate: float = option(2e-3, "peak learning rate", gt=0)
    seed: int = option(0, "seed", ge=0)


@dataclass(frozen=True)
class SelfsupervisedOptions(ClassifierOptions):
    """The same network, trained on the training images without labels: which way up is an image?"""


@dataclass(frozen=True)
class InceptionOptions:
    """torch-fidelity's Inception-v3 (2,048 features): FID, IS and KID proper."""

    path: str | None = option(None, "weights file; null: torch-fidelity's own, downloaded where there is a network")


EXTRACTORS = Registry("extractor")
EXTRACTORS.add("classifier", "kairos.evaluation.classifier:train", ClassifierOptions, "trained by the pipeline")
EXTRACTORS.add("selfsupervised", "kairos.evaluation.selfsupervised:train", SelfsupervisedOptions, "needs no labels")
EXTRACTORS.add("auto", "kairos.evaluation.choice:choose", help="settled before any job, so never made")
EXTRACTORS.add("inception", "kairos.evaluation.inception:prepare", InceptionOptions, "Inception-v3 of torch-fidelity")

METRICS = Registry("metric")
METRICS.add("frechet", "kairos.evaluation.distances:frechet", help="Fréchet distance (Heusel et al. 2017)")
METRICS.add("kid", "kairos.evaluation.distances:kid", help="kernel distance (Bińkowski et al. 2018)")
METRICS.add("isc", "kairos.evaluation.distances:isc", help="Inception score (Salimans et al. 2016)")

__all__ = ["EXTRACTORS", "METRICS", "ClassifierOptions", "InceptionOptions", "NoOptions"]
