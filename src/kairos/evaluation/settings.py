"""Section `evaluation`, and what the reference fixes for every evaluation that uses it."""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from kairos import options
from kairos.errors import ConfigError
from kairos.evaluation.registries import EXTRACTORS, FRECHET, METRICS, default_metrics, needs_of
from kairos.section import Section, component


class EvaluationConfig(Section):
    """How images are compared with real ones."""

    extractor: component(EXTRACTORS) = Field("auto", validate_default=True, description="features of images")  # type: ignore[valid-type]
    reference: str = Field("train", description="real images: train, all (with the held-out ones), or an npz's path")
    metrics: list[component(METRICS)] | None = Field(None, description="metrics; null: those usual for the extractor")  # type: ignore[valid-type]
    num_samples: int = Field(450, ge=2, description="images per set")
    sets: int = Field(3, ge=1, description="sets of samples; their spread is the uncertainty of a distance")
    strata: int = Field(32, ge=1, description="validation loss: strata of times between the two end points")
    loss_images: int = Field(256, ge=1, description="validation loss: held-out images, fixed")
    precision: Literal["fp32", "tf32", "bf16"] = Field("fp32", description="of the extractor and the validation loss")
    seed: int = Field(0, ge=0, description="seed of validation noise and reference rows")

    @model_validator(mode="after")
    def _metrics_fit(self) -> "EvaluationConfig":
        if self.metrics is not None:
            try:
                check_metrics(self.metrics, self.extractor["name"])
            except ConfigError as error:
                raise ValueError(str(error)) from None
        if self.reference not in ("train", "all") and not self.reference.endswith(".npz"):
            raise ValueError(f"evaluation.reference: got {self.reference!r}, allowed: train, all or the path of an npz")
        return self

    def metrics_for(self, extractor: str, heldout: bool) -> list[dict[str, Any]]:
        """The metrics that are computed.

        Args:
            extractor: the kind that is used, which `extractor` may leave open.
            heldout: whether images are held out, which the validation loss needs.

        Raises:
            ConfigError: a metric is asked for that has not what it needs.
        """
        if self.metrics is None:
            return named_metrics(default_metrics(extractor, heldout))
        check_metrics(self.metrics, extractor)
        losses = [named["name"] for named in self.metrics if "milestone" in needs_of([named])]
        if losses and not heldout:
            raise ConfigError(f"evaluation.metrics: {losses[0]} needs held-out images, and dataset.heldout is 0")
        return self.metrics


def named_metrics(names: list[str]) -> list[dict[str, Any]]:
    """Metrics by name, with their options."""
    return [{"name": name, **options.dump(METRICS.parse(name))} for name in names]


def check_metrics(metrics: list[dict[str, Any]], extractor: str) -> None:
    """Whether metrics can be computed with an extractor (or with one that is still to be chosen, ``auto``).

    Raises:
        ConfigError: one is named twice or defined for another extractor, or none is there to rank methods by.
    """
    names = [named["name"] for named in metrics]
    for name in names:
        needed = METRICS.entry(name).facts.get("extractor")
        if needed and extractor not in (needed, "auto"):
            raise ConfigError(f"evaluation.metrics: {name} needs evaluation.extractor {needed}, got {extractor}")
        if names.count(name) > 1:
            raise ConfigError(f"evaluation.metrics: got {name} twice, allowed: each once")
    if len(set(names) & set(FRECHET)) != 1:
        raise ConfigError(
            f"evaluation.metrics: got {', '.join(names) or 'none'}, allowed: exactly one of {', '.join(FRECHET)}, by "
            "which methods are ranked, and any others"
        )


@dataclass(frozen=True)
class LossSettings:
    """The validation loss: number of held-out images, of strata between the end points, seed and precision."""

    images: int
    strata: int
    seed: int
    precision: str = "fp32"
