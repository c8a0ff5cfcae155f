"""Section `evaluation`, the feature extractors and metrics by name, and the settings of the validation loss.

An extractor's code is called as ``code(options, dataset, folder)``. It fills the folder and returns the record's
fields. The module also has ``load(folder, record)``, which opens the folder. Another extractor
replaces ``auto`` before any job.

A metric's code is called as ``code(options, statistics, comparison)``. `statistics` holds the measurements of a set of
images, and `comparison.real` measurements of the real images. The code returns columns: a dictionary of numbers. A
metric that needs a snapshot is called as ``code(snapshot, latents, settings, device)``, see `validation`.

`MEASUREMENTS` lists what metrics can need of a set of images.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from kairos.components import ComponentOptions, Components, component
from kairos.files import DamagedError
from kairos.pretrained import read_network_config
from kairos.section import Section, field
from kairos_timesteps.errors import ConfigError, ValueRejected, demand
from kairos_timesteps.options import options_without_name

_DINO_WIDTH = 1024  # features of the default DINOv2, ViT-L/14

SPLITS = ("train", "heldout", "all")  # real images of the data set that samples may be compared with


class ExtractorOptions(ComponentOptions):
    """Base class of the options of a feature extractor.

    Attributes:
        width: number of features; None: an option decides it.
    """

    width: ClassVar[int | None] = None

    @property
    def feature_count(self) -> int | None:
        """Number of features; None if it is not known before the extractor is prepared."""
        return self.width

    @property
    def replacement(self) -> "ExtractorOptions | None":
        """Extractor that replaces this one if it has learned nothing; None without a replacement."""
        return None


EXTRACTORS: Components[ExtractorOptions] = Components("extractor")


class NetworkOptions(ExtractorOptions):
    """Base class of the options of a small convolutional network that the pipeline trains on the training images."""

    features: int = field(64, "number of features: width of the layer before the classes", ge=2, le=2048)
    channels: int = field(16, "width of the first convolution", ge=4)
    steps: int = field(600, "training steps", ge=1)
    batch_size: int = field(128, "images per step", ge=2)
    learning_rate: float = field(2e-3, "peak learning rate", gt=0)
    seed: int = field(0, "seed", ge=0)

    @property
    def feature_count(self) -> int | None:
        """Number of features."""
        return self.features


@EXTRACTORS.register
class SelfsupervisedOptions(NetworkOptions):
    """The network of `classifier`, trained without labels to predict the rotation of training images."""

    code: ClassVar[str] = "kairos.evaluation.classifier:train_on_rotations"

    name: str = "selfsupervised"


@EXTRACTORS.register
class ClassifierOptions(NetworkOptions):
    """A small convolutional classifier, trained by the pipeline on the labelled training split."""

    code: ClassVar[str] = "kairos.evaluation.classifier:train"

    name: str = "classifier"
    fallback: Literal["selfsupervised"] | None = field(
        None, "extractor that replaces a classifier that has learned nothing; null: the results carry a warning"
    )

    @property
    def replacement(self) -> SelfsupervisedOptions | None:
        """Extractor with equal options that replaces a classifier that has learned nothing; None without a fallback."""
        if self.fallback is None:
            return None
        return SelfsupervisedOptions(**options_without_name(self.model_dump(exclude={"fallback"})))


@EXTRACTORS.register
class AutoOptions(ExtractorOptions):
    """Selected before any job by the images and weights at hand."""

    code: ClassVar[str] = "kairos.evaluation.extractor_choice:choose_extractor"

    name: str = "auto"


@EXTRACTORS.register
class InceptionOptions(ExtractorOptions):
    """torch-fidelity's Inception-v3 (2,048 features): FID, IS and KID as published."""

    code: ClassVar[str] = "kairos.evaluation.inception:prepare"
    width: ClassVar[int | None] = 2048

    name: str = "inception"
    path: str | None = field(None, "weights file; null: torch-fidelity's file, downloaded if it is missing")


@EXTRACTORS.register
class DinoOptions(ExtractorOptions):
    """DINOv2 (Oquab et al. 2023) through transformers; the published distance is of ViT-L/14."""

    code: ClassVar[str] = "kairos.evaluation.dinov2:prepare"

    name: str = "dinov2"
    path: str = field("facebook/dinov2-large", "folder or hub id of a Dinov2Model")

    @property
    def feature_count(self) -> int | None:
        """Number of features, from config.json in the folder or in the hub's cache; None without this file.

        Without the file, the number of the default network is known. A damaged file counts as absent here: the
        extractor's job reports it.
        """
        with suppress(DamagedError):
            width = read_network_config(self.path).get("hidden_size")
            if isinstance(width, int):
                return width
        return _DINO_WIDTH if self.path == type(self)().path else None


@dataclass(frozen=True)
class Measurement:
    """A measurement of a set of images that metrics can need.

    Attributes:
        content: description of the measured values.
        taken_in: function of `kairos.evaluation` that takes the measurement.
        of_real_images: True if stage `reference` takes the measurement of the real images too.
        layer: for a mean and covariance: layer of the extractor; else empty.
        arrays: for a mean and covariance: names of the two arrays in published npz files.
        requires: inputs of a measurement that the extractor does not compute, for the documentation; else empty.
    """

    content: str
    taken_in: str
    of_real_images: bool
    layer: str = ""
    arrays: tuple[str, str] = ("", "")
    requires: str = ""


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
    "captions": Measurement(
        "images with their captions",
        "evaluate.pair_with_captions",
        of_real_images=False,
        requires="samples with captions: a model with condition `text`",
    ),
    "pairs": Measurement(
        "images with the real images that their conditions come from",
        "evaluate.pair_with_real_images",
        of_real_images=False,
        requires="samples with conditions of real images, such as `low_resolution`",
    ),
    "snapshot": Measurement(
        "none: the metric evaluates the snapshot's network on held-out images",
        "evaluate._compute_losses",
        of_real_images=False,
        requires="network of the snapshot, and held-out images (`dataset.heldout`)",
    ),
}
GAUSSIAN_MEASUREMENTS = {name: measurement for name, measurement in MEASUREMENTS.items() if measurement.layer}


class MetricOptions(ComponentOptions):
    """Base class of the options of a metric.

    Attributes:
        needs: measurements that the metric needs, names of `MEASUREMENTS`.
        extractor: the only extractor that the metric is defined for; empty: any.
        columns: columns of summary.csv that the metric writes, with their meaning; documentation.
        higher_is_better: columns of the metric whose values are higher for better samples.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    extractor: ClassVar[str] = ""
    columns: ClassVar[Mapping[str, str]] = {}
    higher_is_better: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def __pydantic_init_subclass__(cls, **keywords: Any) -> None:
        """Check the measurements that a metric needs, and the form of `higher_is_better`.

        Raises:
            ConfigError: a measurement is not in `MEASUREMENTS`, or `higher_is_better` is not a tuple.
        """
        for need in cls.needs:
            demand(need in MEASUREMENTS, f"metric {cls.__name__}: needs", need, ", ".join(MEASUREMENTS))
        is_tuple = isinstance(cls.higher_is_better, tuple)
        allowed = 'a tuple of columns, such as ("precision",)'
        demand(is_tuple, f"metric {cls.__name__}: higher_is_better", repr(cls.higher_is_better), allowed)


METRICS: Components[MetricOptions] = Components("metric")


@METRICS.register
class FrechetOptions(MetricOptions):
    """Fréchet distance of the extractor's features (Heusel et al. 2017).

    torch-fidelity has the same formula. The extractor decides the name of the column, such as `frechet_classifier32`;
    it is `fid` with Inception and `fd_dinov2` with DINOv2.
    """

    code: ClassVar[str] = "kairos.evaluation.metrics:frechet"
    columns: ClassVar[Mapping[str, str]] = {"frechet_<extractor>": "Fréchet distance of the extractor's features"}
    needs: ClassVar[tuple[str, ...]] = ("moments",)

    name: str = "frechet"


@METRICS.register
class FidOptions(MetricOptions):
    """FID: Fréchet distance of Inception's features.

    Heusel et al. 2017. ADM's evaluator uses the same 2,048 features.
    """

    code: ClassVar[str] = "kairos.evaluation.metrics:frechet"
    columns: ClassVar[Mapping[str, str]] = {"fid": "Fréchet distance of Inception's features"}
    needs: ClassVar[tuple[str, ...]] = ("moments",)
    extractor: ClassVar[str] = "inception"

    name: str = "fid"


@METRICS.register
class FdDinoOptions(MetricOptions):
    """Fréchet distance of DINOv2's features (Stein et al. 2023).

    The published distance is of ViT-L/14, the default of extractor `dinov2`.
    """

    code: ClassVar[str] = "kairos.evaluation.metrics:frechet"
    columns: ClassVar[Mapping[str, str]] = {"fd_dinov2": "Fréchet distance of DINOv2's features"}
    needs: ClassVar[tuple[str, ...]] = ("moments",)
    extractor: ClassVar[str] = "dinov2"

    name: str = "fd_dinov2"


@METRICS.register
class SfidOptions(MetricOptions):
    """FID of Inception's spatial features (Nash et al. 2021).

    ADM's evaluator uses the same 2,023 spatial features.
    """

    code: ClassVar[str] = "kairos.evaluation.metrics:sfid"
    columns: ClassVar[Mapping[str, str]] = {"sfid": "Fréchet distance of Inception's spatial features"}
    needs: ClassVar[tuple[str, ...]] = ("spatial",)
    extractor: ClassVar[str] = "inception"

    name: str = "sfid"


@METRICS.register
class KidOptions(MetricOptions):
    """Kernel distance (Bińkowski et al. 2018).

    The unbiased estimate, with the subsets of torch-fidelity. It can be negative; at most 10,000 images are used. For
    Inception the kernel is the published one. For other extractors its scale follows the real features.
    """

    code: ClassVar[str] = "kairos.evaluation.metrics:kid"
    columns: ClassVar[Mapping[str, str]] = {"kid": "unbiased kernel distance of the features, mean over subsets"}
    needs: ClassVar[tuple[str, ...]] = ("features",)

    name: str = "kid"
    subsets: int = field(50, "number of random subsets", ge=1)
    subset_size: int = field(1000, "images per subset, at most half of the images", ge=2)


@METRICS.register
class IscOptions(MetricOptions):
    """Inception score (Salimans et al. 2016).

    The splits have 5,000 consecutive images, as in ADM's evaluator.
    """

    code: ClassVar[str] = "kairos.evaluation.metrics:isc"
    columns: ClassVar[Mapping[str, str]] = {"isc": "Inception score, mean over splits"}
    higher_is_better: ClassVar[tuple[str, ...]] = ("isc",)
    needs: ClassVar[tuple[str, ...]] = ("logits",)
    extractor: ClassVar[str] = "inception"

    name: str = "isc"


@METRICS.register
class PrecisionOptions(MetricOptions):
    """Share of samples in the real manifold (Kynkäänniemi et al. 2019).

    At most 10,000 real images, evenly spread, form the manifold.
    """

    code: ClassVar[str] = "kairos.evaluation.metrics:precision"
    columns: ClassVar[Mapping[str, str]] = {"precision": "share of samples in the real manifold, from 0 to 1"}
    higher_is_better: ClassVar[tuple[str, ...]] = ("precision",)
    needs: ClassVar[tuple[str, ...]] = ("features",)

    name: str = "precision"
    neighbours: int = field(3, "k: the ball around an image reaches to its k-th nearest neighbour", ge=1)


@METRICS.register
class RecallOptions(PrecisionOptions):
    """Share of real images in the samples' manifold.

    Kynkäänniemi et al. 2019. At most 10,000 real images, evenly spread, are used.
    """

    code: ClassVar[str] = "kairos.evaluation.metrics:recall"
    columns: ClassVar[Mapping[str, str]] = {"recall": "share of real images in the samples' manifold, from 0 to 1"}
    higher_is_better: ClassVar[tuple[str, ...]] = ("recall",)

    name: str = "recall"


@METRICS.register
class ClipOptions(MetricOptions):
    """100 x cosine of images and captions (Hessel et al. 2021).

    torchmetrics clamps this score at 0; here it is not clamped. Published scores near 0.24 are the cosine itself.
    Scores of different networks are not comparable.
    """

    code: ClassVar[str] = "kairos.evaluation.clip:clip"
    columns: ClassVar[Mapping[str, str]] = {"clip_score": "100 times the mean cosine of image and caption"}
    higher_is_better: ClassVar[tuple[str, ...]] = ("clip_score",)
    needs: ClassVar[tuple[str, ...]] = ("captions",)

    name: str = "clip"
    path: str = field("openai/clip-vit-large-patch14", "folder or hub id of a CLIPModel, tokenizer and preprocessor")


@METRICS.register
class ValidationOptions(MetricOptions):
    """Loss by time on held-out images.

    Images, noise and times are fixed and equal for all methods. The loss is the squared error of the network's
    prediction, without weights. Its name contains the prediction, such as `val_loss_velocity` for rectified flow.
    """

    code: ClassVar[str] = "kairos.evaluation.validation:validation_loss"
    columns: ClassVar[Mapping[str, str]] = {
        "val_loss_<prediction>": "squared error of the prediction, mean over the fractions of the process",
        "val_vlb": "mean of c_t times the squared error of epsilon (Kim et al. 2025, eq. 7); not the bound itself",
        "val_vlb_without_last": "`val_vlb` without the last timestep; exists only if its share matters",
    }
    needs: ClassVar[tuple[str, ...]] = ("snapshot",)

    name: str = "validation"


@METRICS.register
class ValidationEpsilonOptions(MetricOptions):
    """Error of epsilon on held-out images, for every prediction target.

    Images, noise and times are those of `validation`. The prediction is converted to epsilon, so networks with
    different prediction targets are comparable. If the network predicts epsilon, it is the loss of `validation`.
    """

    code: ClassVar[str] = "kairos.evaluation.validation:epsilon_loss"
    columns: ClassVar[Mapping[str, str]] = {
        "val_loss_epsilon": "squared error of epsilon, mean over the fractions of the process"
    }
    needs: ClassVar[tuple[str, ...]] = ("snapshot",)

    name: str = "validation_epsilon"


@METRICS.register
class Mlperf8Options(MetricOptions):
    """Loss at eight equidistant times (MLPerf Training, Flux.1).

    Images and noise are fixed and equal for all methods. The loss is the squared error of the network's prediction,
    whose name the column contains.
    """

    code: ClassVar[str] = "kairos.evaluation.validation:mlperf8"
    columns: ClassVar[Mapping[str, str]] = {
        "val_mlperf8_<prediction>": "squared error of the prediction, mean over images"
    }
    needs: ClassVar[tuple[str, ...]] = ("snapshot",)

    name: str = "mlperf8"


@METRICS.register
class PsnrOptions(MetricOptions):
    """PSNR in dB against the images that conditions come from."""

    code: ClassVar[str] = "kairos.evaluation.metrics:psnr"
    columns: ClassVar[Mapping[str, str]] = {"psnr": "peak signal-to-noise ratio in dB, mean over the images"}
    higher_is_better: ClassVar[tuple[str, ...]] = ("psnr",)
    needs: ClassVar[tuple[str, ...]] = ("pairs",)

    name: str = "psnr"


FRECHET_METRICS = ("frechet", "fid", "fd_dinov2")  # metrics that methods are ranked by, one for each kind of extractor


def is_higher_better(column: str) -> bool:
    """Return True if higher values of a metric's column are better; False with a suffix such as ``_spread``."""
    return any(column in options.higher_is_better for options in METRICS.values())


def compares_features(column: str) -> bool:
    """Return True if a column belongs to a metric that compares features of samples with features of real images.

    The column of the Fréchet distance, which the extractor names, is not known here: the result is False.
    """
    return any(column in options.columns and needs_of_real_images([options]) for options in METRICS.values())


def needs_of(metrics: Iterable[MetricOptions | type[MetricOptions]]) -> set[str]:
    """Return the names of all measurements that some metrics need; `MEASUREMENTS` describes them."""
    needs: set[str] = set()
    for metric in metrics:
        needs.update(metric.needs)
    return needs


def needs_of_real_images(metrics: Iterable[MetricOptions | type[MetricOptions]]) -> set[str]:
    """Return the names of all measurements that metrics need of the real images; see `MEASUREMENTS`."""
    return {need for need in needs_of(metrics) if MEASUREMENTS[need].of_real_images}


def default_metrics(extractor: str, heldout: bool) -> list[str]:
    """Return the names of the metrics of an experiment that lists none.

    They are the extractor's Fréchet distance and KID; with held-out images, also the validation loss.

    Args:
        extractor: name of the extractor.
        heldout: True if images are held out.
    """
    by_extractor = {"inception": ["fid", "kid"], "dinov2": ["fd_dinov2", "kid"]}
    names = by_extractor.get(extractor, ["frechet", "kid"])
    if heldout:
        return [*names, "validation"]
    return names


_Metric = Annotated[MetricOptions, component(METRICS)]


class EvaluationConfig(Section):
    """Settings of the comparison of samples with real images."""

    extractor: Annotated[ExtractorOptions, component(EXTRACTORS)] = field("auto", "extractor of image features")
    reference: str = field("train", "real images: train, heldout, all (both), or an npz's path")
    metrics: list[_Metric] | None = field(None, "metrics; null: the defaults of the extractor")
    primary_metric: Literal["distance", "validation"] = field(
        "distance", "metric that methods are ranked by: the Fréchet distance or the loss of metric validation"
    )
    num_samples: int = field(450, "images per set", ge=2)
    sets: int = field(3, "sets of samples; their standard deviation is the uncertainty of a distance", ge=1)
    strata: int = field(32, "validation loss: strata of times between the first and the last timestep", ge=1)
    loss_images: int = field(256, "validation loss: number of held-out images", ge=1)
    precision: Literal["fp32", "tf32", "bf16"] = field("fp32", "precision of the extractor and the validation loss")
    seed: int = field(0, "seed of validation noise and reference rows", ge=0)

    def model_post_init(self, context: Any) -> None:
        """Check the reference and the metrics, as far as this section alone determines them.

        Raises:
            ConfigError: the reference has another form, or the metrics do not fit the extractor.
        """
        if self.metrics is not None:
            check_metrics(self.metrics, self.extractor.name)
        is_valid = self.reference in SPLITS or self.reference.endswith(".npz")
        demand(is_valid, "evaluation.reference", repr(self.reference), f"{', '.join(SPLITS)} or the path of an npz")

    @property
    def possible_metrics(self) -> list[Any]:
        """The metrics of the experiment file, or all: without a list, extractor and split decide the metrics."""
        return list(self.metrics or METRICS.values())

    @property
    def possible_image_metrics(self) -> list[Any]:
        """Possible metrics that need only images. The reference holds real images, so it has no network to measure."""
        return [metric for metric in self.possible_metrics if "snapshot" not in metric.needs]

    @property
    def needs_logits(self) -> bool:
        """True if a listed metric needs the extractor's last layer, as the Inception score does."""
        return any("logits" in metric.needs for metric in self.metrics or [])

    def metrics_for(self, extractor: str, heldout: bool) -> list[MetricOptions]:
        """Return the metrics to compute, with their options.

        Args:
            extractor: the extractor in use, which `self.extractor` may leave open as ``auto``.
            heldout: True if images are held out, which the validation loss needs.

        Returns:
            The metrics of the experiment file; if it has none, the defaults that the extractor and the split allow.

        Raises:
            ConfigError: a metric lacks something that it needs, or the primary metric is not among the metrics.
        """
        if self.metrics is None:
            metrics = metrics_with_options(default_metrics(extractor, heldout))
        else:
            metrics = self.metrics
        names = [metric.name for metric in metrics]
        if self.primary_metric == "validation" and "validation" not in names:
            raise ConfigError(
                f"evaluation.primary_metric: got validation, which is not among the metrics {', '.join(names)}; "
                "add it to evaluation.metrics and hold images out (dataset.heldout), or set distance"
            )
        if self.metrics is None:  # the defaults fit extractor and split
            return metrics
        check_metrics(metrics, extractor)
        # metrics of a snapshot's weights, not of its samples: losses on held-out images
        losses = [metric.name for metric in metrics if "snapshot" in metric.needs]
        if losses and not heldout:
            raise ConfigError(f"evaluation.metrics: {losses[0]} needs held-out images, and dataset.heldout is 0")
        return metrics


def metrics_with_options(names: list[str]) -> list[MetricOptions]:
    """Return metrics by their names, each with the default values of its options."""
    return [METRICS.select({"name": name}) for name in names]


def check_metrics(metrics: list[MetricOptions], extractor: str) -> None:
    """Check that metrics can be computed with an extractor; ``auto`` stands for one that is selected later.

    Raises:
        ConfigError: a metric is listed twice or defined for another extractor, or not exactly one metric ranks methods.
    """
    names = [metric.name for metric in metrics]
    for metric in metrics:
        name, required = metric.name, metric.extractor
        if required and extractor not in (required, "auto"):
            # the ConfigError that `demand` raises, but with a message of another form
            raise ValueRejected(f"evaluation.metrics: {name} needs evaluation.extractor {required}, got {extractor}")
        demand(names.count(name) == 1, "evaluation.metrics", f"{name} twice", "each once")
    ranking_metrics = set(names) & set(FRECHET_METRICS)
    allowed = f"exactly one of {', '.join(FRECHET_METRICS)}, by which methods are ranked, and any others"
    demand(len(ranking_metrics) == 1, "evaluation.metrics", ", ".join(names) or "none", allowed)


@dataclass(frozen=True)
class LossSettings:
    """Settings of the validation loss.

    Attributes:
        images: number of held-out images; all, if there are fewer.
        strata: number of strata of times between the first and the last cell, see `validation.build_strata`.
        seed: seed of images, noise and times.
        precision: precision of the network, see `compute.precision`.
    """

    images: int
    strata: int
    seed: int
    precision: str = "fp32"
