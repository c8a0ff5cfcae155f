"""Section `evaluation`, and what the reference fixes for every evaluation that uses it."""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import SerializerFunctionWrapHandler, model_serializer

from kairos.evaluation.registries import EXTRACTORS, FRECHET, METRICS, default_metrics, needs_of
from kairos.section import Section, component, field
from kairos_timesteps import options
from kairos_timesteps.errors import ConfigError, ValueRejected, demand


class EvaluationConfig(Section):
    """Settings of the comparison of samples with real images."""

    extractor: component(EXTRACTORS) = field("auto", "features of images")
    reference: str = field("train", "real images: train, all (with the held-out ones), or an npz's path")
    metrics: list[component(METRICS)] | None = field(None, "metrics; null: those usual for the extractor")
    primary_metric: Literal["distance", "validation"] = field(
        "distance", "metric that methods are ranked by: the Fréchet distance or the validation loss"
    )
    num_samples: int = field(450, "images per set", ge=2)
    sets: int = field(3, "sets of samples; their spread is the uncertainty of a distance", ge=1)
    strata: int = field(32, "validation loss: strata of times between the two end points", ge=1)
    loss_images: int = field(256, "validation loss: held-out images, fixed", ge=1)
    precision: Literal["fp32", "tf32", "bf16"] = field("fp32", "of the extractor and the validation loss")
    seed: int = field(0, "seed of validation noise and reference rows", ge=0)

    def model_post_init(self, context: Any) -> None:
        """Check the reference, and that the metrics can be computed, as far as this section alone determines it."""
        if self.metrics is not None:
            check_metrics(self.metrics, self.extractor["name"])
        good = self.reference in ("train", "all") or self.reference.endswith(".npz")
        demand(good, "evaluation.reference", repr(self.reference), "train, all or the path of an npz")

    @model_serializer(mode="wrap")
    def _omit_default_primary_metric(self, values_of: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Keep the plain values, and so the hashes, of experiments that do not set `primary_metric`."""
        values = values_of(self)
        if self.primary_metric == "distance":
            del values["primary_metric"]
        return values

    def metrics_for(self, extractor: str, heldout: bool) -> list[dict[str, Any]]:
        """The metrics that are computed.

        Args:
            extractor: the kind that is used, which `extractor` may leave open.
            heldout: whether images are held out, which the validation loss needs.

        Raises:
            ConfigError: a metric is asked for that has not what it needs.
        """
        names = default_metrics(extractor, heldout) if self.metrics is None else [one["name"] for one in self.metrics]
        if self.primary_metric == "validation" and "validation" not in names:
            raise ConfigError(
                f"evaluation.primary_metric: got validation, which is not among the metrics {', '.join(names)}; "
                "add it to evaluation.metrics and hold images out (dataset.heldout), or set distance"
            )
        if self.metrics is None:
            return metrics_with_options(names)
        check_metrics(self.metrics, extractor)
        losses = [named["name"] for named in self.metrics if "milestone" in needs_of([named])]
        if losses and not heldout:
            raise ConfigError(f"evaluation.metrics: {losses[0]} needs held-out images, and dataset.heldout is 0")
        return self.metrics


def metrics_with_options(names: list[str]) -> list[dict[str, Any]]:
    """Metrics by name, with their options."""
    return [{"name": name, **options.dump(METRICS.parse(name))} for name in names]


def check_metrics(metrics: list[dict[str, Any]], extractor: str) -> None:
    """Check that metrics can be computed with an extractor; ``auto`` stands for one that is selected later.

    Raises:
        ConfigError: a metric is listed twice or defined for another extractor, or not exactly one metric ranks methods.
    """
    names = [named["name"] for named in metrics]
    for name in names:
        needed = METRICS.entry(name).facts.get("extractor")
        if needed and extractor not in (needed, "auto"):
            raise ValueRejected(f"evaluation.metrics: {name} needs evaluation.extractor {needed}, got {extractor}")
        demand(names.count(name) == 1, "evaluation.metrics", f"{name} twice", "each once")
    allowed = f"exactly one of {', '.join(FRECHET)}, by which methods are ranked, and any others"
    ranked = len(set(names) & set(FRECHET)) == 1
    demand(ranked, "evaluation.metrics", ", ".join(names) or "none", allowed)


@dataclass(frozen=True)
class LossSettings:
    """The validation loss: number of held-out images, of strata between the end points, seed and precision."""

    images: int
    strata: int
    seed: int
    precision: str = "fp32"
