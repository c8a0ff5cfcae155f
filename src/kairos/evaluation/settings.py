"""Section `evaluation`, and the settings of the validation loss."""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import SerializerFunctionWrapHandler, model_serializer

from kairos.evaluation.registries import EXTRACTORS, FRECHET_METRICS, METRICS, default_metrics, needs_of
from kairos.section import Section, component, field
from kairos_timesteps import options
from kairos_timesteps.errors import ConfigError, ValueRejected, demand


class EvaluationConfig(Section):
    """Settings of the comparison of samples with real images."""

    extractor: component(EXTRACTORS) = field("auto", "extractor of image features")
    reference: str = field("train", "real images: train, all (with the held-out ones), or an npz's path")
    metrics: list[component(METRICS)] | None = field(None, "metrics; null: the defaults of the extractor")
    primary_metric: Literal["distance", "validation"] = field(
        "distance", "metric that methods are ranked by: the Fréchet distance or the validation loss"
    )
    num_samples: int = field(450, "images per set", ge=2)
    sets: int = field(3, "sets of samples; their standard deviation is the uncertainty of a distance", ge=1)
    strata: int = field(32, "validation loss: strata of times between the first and the last timestep", ge=1)
    loss_images: int = field(256, "validation loss: number of held-out images", ge=1)
    precision: Literal["fp32", "tf32", "bf16"] = field("fp32", "precision of the extractor and the validation loss")
    seed: int = field(0, "seed of validation noise and reference rows", ge=0)

    def model_post_init(self, context: Any) -> None:
        """Check the reference and the metrics, as far as this section alone determines them."""
        if self.metrics is not None:
            check_metrics(self.metrics, self.extractor["name"])
        is_valid = self.reference in ("train", "all") or self.reference.endswith(".npz")
        demand(is_valid, "evaluation.reference", repr(self.reference), "train, all or the path of an npz")

    @model_serializer(mode="wrap")
    def _omit_default_primary_metric(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Keep the plain values, and so the hashes, of experiments that do not set `primary_metric`."""
        values = serialize(self)
        if self.primary_metric == "distance":
            del values["primary_metric"]
        return values

    def metrics_for(self, extractor: str, heldout: bool) -> list[dict[str, Any]]:
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
        names = [metric["name"] for metric in metrics]
        if self.primary_metric == "validation" and "validation" not in names:
            raise ConfigError(
                f"evaluation.primary_metric: got validation, which is not among the metrics {', '.join(names)}; "
                "add it to evaluation.metrics and hold images out (dataset.heldout), or set distance"
            )
        if self.metrics is None:
            return metrics
        check_metrics(metrics, extractor)
        # metrics of a snapshot's weights, not of its samples: losses on held-out images
        losses = [metric["name"] for metric in metrics if "milestone" in needs_of([metric])]
        if losses and not heldout:
            raise ConfigError(f"evaluation.metrics: {losses[0]} needs held-out images, and dataset.heldout is 0")
        return metrics


def metrics_with_options(names: list[str]) -> list[dict[str, Any]]:
    """Return metrics given by name, each with the default values of its options."""
    return [{"name": name, **options.dump(METRICS.parse(name))} for name in names]


def check_metrics(metrics: list[dict[str, Any]], extractor: str) -> None:
    """Check that metrics can be computed with an extractor; ``auto`` stands for one that is selected later.

    Raises:
        ConfigError: a metric is listed twice or defined for another extractor, or not exactly one metric ranks methods.
    """
    names = [metric["name"] for metric in metrics]
    for name in names:
        required = METRICS.entry(name).facts.get("extractor")
        if required and extractor not in (required, "auto"):
            raise ValueRejected(f"evaluation.metrics: {name} needs evaluation.extractor {required}, got {extractor}")
        demand(names.count(name) == 1, "evaluation.metrics", f"{name} twice", "each once")
    ranking = set(names) & set(FRECHET_METRICS)
    allowed = f"exactly one of {', '.join(FRECHET_METRICS)}, by which methods are ranked, and any others"
    demand(len(ranking) == 1, "evaluation.metrics", ", ".join(names) or "none", allowed)


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
