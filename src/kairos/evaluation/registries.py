"""Feature extractors and metrics by name.

An extractor's code is called as ``code(options, dataset, folder)``. It fills the folder and returns the manifest's
fields. The module also has ``load(folder, manifest)``, which opens the folder.

A metric's code is called as ``code(options, statistics, comparison)``, with the measurements of a set of images and the
statistics of the real ones. It returns columns: a dictionary of numbers. A metric that needs a snapshot is called as
``code(milestone, latents, settings, device)``, see `validation`.

`MEASUREMENTS` lists what metrics can need of a set of images.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kairos_timesteps.errors import demand
from kairos_timesteps.options import Options, option
from kairos_timesteps.registry import NoOptions, Registry


class ClassifierOptions(Options):
    """A small convolutional classifier, trained on the labelled training split."""

    features: int = option(64, "number of features: width of the layer before the classes", ge=2, le=2048)
    channels: int = option(16, "width of the first convolution", ge=4)
    steps: int = option(600, "training steps", ge=1)
    batch_size: int = option(128, "images per step", ge=2)
    learning_rate: float = option(2e-3, "peak learning rate", gt=0)
    seed: int = option(0, "seed", ge=0)


class SelfsupervisedOptions(ClassifierOptions):
    """The network of `ClassifierOptions`, trained without labels to predict the rotation of training images."""


class InceptionOptions(Options):
    """torch-fidelity's Inception-v3 (2,048 features): FID, IS and KID as published."""

    path: str | None = option(None, "weights file; null: torch-fidelity's file, downloaded if it is missing")


class DinoOptions(Options):
    """DINOv2 through transformers; the published distance is of ViT-L/14."""

    path: str = option("facebook/dinov2-large", "folder or hub id of a Dinov2Model")


class KidOptions(Options):
    """Kernel distance."""

    subsets: int = option(50, "number of random subsets", ge=1)
    subset_size: int = option(1000, "images per subset, at most half of the images", ge=2)


class ManifoldOptions(Options):
    """Precision and recall."""

    neighbours: int = option(3, "number of the neighbour to which a ball reaches", ge=1)


class ClipOptions(Options):
    """CLIP score; the default is torchmetrics'."""

    path: str = option("openai/clip-vit-large-patch14", "folder or hub id of a CLIPModel, tokenizer and preprocessor")


EXTRACTORS = Registry("extractor")
EXTRACTORS.add("classifier", "kairos.evaluation.classifier:train", ClassifierOptions, "trained by the pipeline")
EXTRACTORS.add(
    "selfsupervised", "kairos.evaluation.classifier:train_on_rotations", SelfsupervisedOptions, "needs no labels"
)
EXTRACTORS.add(
    "auto",
    "kairos.evaluation.extractor_choice:choose_extractor",
    help="selected before any job by the images and weights at hand",
)
EXTRACTORS.add("inception", "kairos.evaluation.inception:prepare", InceptionOptions, "Inception-v3 of torch-fidelity")
EXTRACTORS.add("dinov2", "kairos.evaluation.dinov2:prepare", DinoOptions, "DINOv2 (Oquab et al. 2023)")


@dataclass(frozen=True)
class Measurement:
    """A measurement of a set of images that metrics can need.

    Attributes:
        content: description of the measured values.
        taken_in: function of `kairos.evaluation` that takes the measurement.
        of_real_images: True if stage `reference` takes the measurement of the real images too.
        layer: for a mean and covariance: layer of the extractor; else empty.
        arrays: for a mean and covariance: names of the two arrays in published npz files.
    """

    content: str
    taken_in: str
    of_real_images: bool
    layer: str = ""
    arrays: tuple[str, str] = ("", "")


MEASUREMENTS = {
    "moments": Measurement(
        "mean and covariance of the features",
        "measurements.measure",
        of_real_images=True,
        layer="features",
        arrays=("mu", "sigma"),
    ),
    "spatial": Measurement(
        "mean and covariance of Inception's spatial features",
        "measurements.measure",
        of_real_images=True,
        layer="spatial",
        arrays=("mu_s", "sigma_s"),
    ),
    "features": Measurement("feature vectors", "measurements.measure", of_real_images=True),
    "logits": Measurement("logits of the classes", "measurements.measure", of_real_images=False),
    "captions": Measurement("images with their captions", "evaluate.pair_with_captions", of_real_images=False),
    "pairs": Measurement(
        "images with the real images that their conditions come from",
        "evaluate.pair_with_real_images",
        of_real_images=False,
    ),
    "milestone": Measurement(
        "none: the metric evaluates the snapshot's network on held-out images",
        "evaluate._compute_losses",
        of_real_images=False,
    ),
}
GAUSSIAN_MEASUREMENTS = {name: measurement for name, measurement in MEASUREMENTS.items() if measurement.layer}
METRICS = Registry("metric")


def _metric(
    name: str, help: str, needs: str, options: type = NoOptions, extractor: str = "", code: str = "metrics:{}"
) -> None:
    """Register a metric.

    Args:
        name: name of the metric.
        help: description for the documentation.
        needs: measurements that the metric needs, names of `MEASUREMENTS` separated by spaces.
        options: class of its options.
        extractor: the only extractor that the metric is defined for; empty: any.
        code: ``module:function`` in `kairos.evaluation`; ``{}`` stands for the name.

    Raises:
        ConfigError: a measurement is not in `MEASUREMENTS`.
    """
    measurements = needs.split()
    for measurement in measurements:
        demand(measurement in MEASUREMENTS, f"metric {name}: needs", measurement, ", ".join(MEASUREMENTS))
    METRICS.add(name, f"kairos.evaluation.{code.format(name)}", options, help, needs=measurements, extractor=extractor)


_metric("frechet", "Fréchet distance of the extractor's features (Heusel et al. 2017)", "moments")
_metric(
    "fid", "FID: Fréchet distance of Inception's features", "moments", extractor="inception", code="metrics:frechet"
)
_metric(
    "fd_dinov2",
    "Fréchet distance of DINOv2's features (Stein et al. 2023)",
    "moments",
    extractor="dinov2",
    code="metrics:frechet",
)
_metric("sfid", "FID of Inception's spatial features (Nash et al. 2021)", "spatial", extractor="inception")
_metric("kid", "kernel distance (Bińkowski et al. 2018)", "features", KidOptions)
_metric("isc", "Inception score (Salimans et al. 2016)", "logits", extractor="inception")
_metric("precision", "share of samples in the real manifold (Kynkäänniemi et al. 2019)", "features", ManifoldOptions)
_metric("recall", "share of real images in the samples' manifold", "features", ManifoldOptions)
_metric("clip", "100 x cosine of images and captions (Hessel et al. 2021)", "captions", ClipOptions, code="clip:{}")
_metric("validation", "loss by time on held-out images", "milestone", code="validation:validation_loss")
_metric("mlperf8", "loss at eight equidistant times (MLPerf Training, Flux.1)", "milestone", code="validation:{}")
_metric("psnr", "PSNR in dB against the images that conditions come from", "pairs")
FRECHET_METRICS = ("frechet", "fid", "fd_dinov2")  # metrics that methods are ranked by, one for each kind of extractor


def needs_of(metrics: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the names of all measurements that some metrics need; `MEASUREMENTS` describes them."""
    needs: set[str] = set()
    for metric in metrics:
        needs.update(METRICS.entry(metric["name"]).facts.get("needs", ()))
    return needs


def needs_of_real_images(metrics: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the names of all measurements that metrics need of the real images; see `MEASUREMENTS`."""
    return {need for need in needs_of(metrics) if MEASUREMENTS[need].of_real_images}


def default_metrics(extractor: str, heldout: bool) -> list[str]:
    """Return the metrics of an experiment that lists none; `heldout` is True if images are held out."""
    by_extractor = {"inception": ["fid", "kid", "isc"], "dinov2": ["fd_dinov2", "kid"]}
    names = by_extractor.get(extractor, ["frechet", "kid"])
    if heldout:
        return [*names, "validation"]
    return names
