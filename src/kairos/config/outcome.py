"""Sections `sampling`, `evaluation` and `tracking`: what is made of a training."""

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from kairos.config.base import Section, component
from kairos.evaluation.registries import EXTRACTORS
from kairos.sampling.registries import SCHEDULERS


class SamplingConfig(Section):
    """How images are drawn from a milestone."""

    scheduler: component(SCHEDULERS) = Field("ddim", validate_default=True, description="sampling scheme")  # type: ignore[valid-type]
    steps: int = Field(50, ge=1, description="network evaluations per image")
    weights: Literal["ema", "raw"] = Field("ema", description="which weights are sampled")
    guidance_scale: float = Field(1.0, ge=0, description="classifier-free guidance; 1: none")
    batch_size: int = Field(128, ge=1, description="images per network evaluation; does not change the images")
    grid: int = Field(64, ge=1, le=400, description="images on the grid picture")
    seed: int = Field(0, ge=0, description="seed of the starting noise, one generator per image")


class EvaluationConfig(Section):
    """How images are compared with real ones."""

    extractor: component(EXTRACTORS) = Field("classifier", validate_default=True, description="features of images")  # type: ignore[valid-type]
    num_samples: int = Field(450, ge=2, description="images per set")
    sets: int = Field(3, ge=1, description="sets of samples; their spread is the uncertainty of a distance")
    kid: bool = Field(True, description="kernel distance beside the Fréchet distance")
    strata: int = Field(32, ge=1, description="validation loss: strata of timesteps between the two end points")
    loss_images: int = Field(256, ge=1, description="validation loss: held-out images, fixed")
    seed: int = Field(0, ge=0, description="seed of validation noise and reference rows")


class TrackingConfig(Section):
    """Import of results into MLflow; trainings report to a server (an http URI) while they run."""

    enabled: bool = Field(True, description="import results into MLflow")
    uri: str | None = Field(None, description="tracking URI; null: MLFLOW_TRACKING_URI or sqlite:///mlflow.db")
    experiment: str | None = Field(None, description="MLflow experiment; null: kairos/<experiment>")
    flush_seconds: float = Field(3.0, ge=0, description="what a training waits for a server at its end, at most")

    @field_validator("uri")
    @classmethod
    def _no_credentials(cls, value: str | None) -> str | None:
        if value is not None and "@" in urlsplit(value).netloc:
            raise ValueError(
                "tracking.uri: got an address with credentials, which every record would hold; allowed: the address "
                "alone, with MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment"
            )
        return value
