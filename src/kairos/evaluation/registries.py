"""Feature extractors and metrics by name.

An extractor's code is called as ``code(options, dataset, folder)``, fills the folder and gives its manifest; its
module also has ``load(folder, manifest)``, which opens it. A metric's code is called as ``code(options, measured,
target)``, with what was measured of one set of images and of the real ones, and gives columns: a dictionary of numbers;
that of a metric that needs a milestone as ``code(milestone, latents, settings, device)``, see `validation`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from kairos_timesteps.options import Options, option
from kairos_timesteps.registry import NoOptions, Registry


class ClassifierOptions(Options):
    """A small convolutional classifier, trained on the labelled training split."""

    features: int = option(64, "features: width of the layer before the classes", ge=2, le=2048)
    channels: int = option(16, "width of the first convolution", ge=4)
    steps: int = option(600, "training steps", ge=1)
    batch_size: int = option(128, "images per step", ge=2)
    learning_rate: float = option(2e-3, "peak learning rate", gt=0)
    seed: int = option(0, "seed", ge=0)


class SelfsupervisedOptions(ClassifierOptions):
    """The network of `ClassifierOptions`, trained on the training images without labels: which way up is an image?"""


class InceptionOptions(Options):
    """torch-fidelity's Inception-v3 (2,048 features): FID, IS and KID proper."""

    path: str | None = option(None, "weights file; null: torch-fidelity's own, downloaded where there is a network")


class DinoOptions(Options):
    """DINOv2 through transformers; the published distance is of ViT-L/14."""

    path: str = option("facebook/dinov2-large", "folder or hub id of a Dinov2Model")


class KidOptions(Options):
    """Kernel distance."""

    subsets: int = option(50, "subsets that are drawn", ge=1)
    subset_size: int = option(1000, "images in each, where there are twice as many", ge=2)


class ManifoldOptions(Options):
    """Precision and recall."""

    neighbours: int = option(3, "a ball reaches to this neighbour", ge=1)


class ClipOptions(Options):
    """CLIP score; the default is torchmetrics'."""

    path: str = option("openai/clip-vit-large-patch14", "folder or hub id of a CLIPModel, tokenizer and preprocessor")


EXTRACTORS = Registry("extractor")
EXTRACTORS.add("classifier", "kairos.evaluation.classifier:train", ClassifierOptions, "trained by the pipeline")
EXTRACTORS.add(
    "selfsupervised", "kairos.evaluation.classifier:train_on_rotations", SelfsupervisedOptions, "needs no labels"
)
EXTRACTORS.add(
    "auto", "kairos.evaluation.extractor_choice:choose_extractor", help="settled before any job, so never made"
)
EXTRACTORS.add("inception", "kairos.evaluation.inception:prepare", InceptionOptions, "Inception-v3 of torch-fidelity")
EXTRACTORS.add("dinov2", "kairos.evaluation.dinov2:prepare", DinoOptions, "DINOv2 (Oquab et al. 2023)")

METRICS = Registry("metric")


def _metric(
    name: str, help: str, needs: str, options: type = NoOptions, extractor: str = "", code: str = "metrics:{}"
) -> None:
    """Register a metric: what it needs (see `moments.measure`), and the only extractor that it is defined for."""
    code = f"kairos.evaluation.{code.format(name)}"
    METRICS.add(name, code, options, help, needs=needs.split(), extractor=extractor)


_metric("frechet", "Fréchet distance of the extractor's features (Heusel et al. 2017)", "moments")
_metric("fid", "the same of Inception's: FID", "moments", extractor="inception", code="metrics:frechet")
_metric("fd_dinov2", "the same of DINOv2's (Stein et al. 2023)", "moments", extractor="dinov2", code="metrics:frechet")
_metric("sfid", "FID of Inception's spatial features (Nash et al. 2021)", "spatial", extractor="inception")
_metric("kid", "kernel distance (Bińkowski et al. 2018)", "features", KidOptions)
_metric("isc", "Inception score (Salimans et al. 2016)", "logits", extractor="inception")
_metric("precision", "samples in the real manifold (Kynkäänniemi et al. 2019)", "features", ManifoldOptions)
_metric("recall", "real images in the samples' manifold", "features", ManifoldOptions)
_metric("clip", "100 x cosine of images and captions (Hessel et al. 2021)", "captions", ClipOptions, code="clip:{}")
_metric("validation", "loss by time on held-out images", "milestone", code="validation:validation_loss")
_metric("mlperf8", "loss at eight equidistant times (MLPerf Training, Flux.1)", "milestone", code="validation:{}")
_metric("psnr", "PSNR in dB against the images that conditions come from", "pairs")
FRECHET = ("frechet", "fid", "fd_dinov2")  # names of the distance that methods are ranked by
UNREAL = {"logits", "milestone", "captions", "pairs"}  # what metrics need of samples alone


def needs_of(metrics: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the union of what the given metrics need."""
    return {need for named in metrics for need in METRICS.entry(named["name"]).facts.get("needs", ())}


def default_metrics(extractor: str, heldout: bool) -> list[str]:
    """The metrics of an experiment that names none."""
    first = {"inception": ["fid", "kid", "isc"], "dinov2": ["fd_dinov2", "kid"]}.get(extractor, ["frechet", "kid"])
    return first + (["validation"] if heldout else [])
