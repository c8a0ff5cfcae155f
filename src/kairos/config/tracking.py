"""Section `tracking`; here, because the import into MLflow stands on whole experiments."""

from urllib.parse import urlsplit

from pydantic import Field, field_validator

from kairos.section import Section


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
