"""Section `tracking`; here, because the import into MLflow stands on whole experiments."""

from typing import Any
from urllib.parse import urlsplit

from kairos.errors import Refusal
from kairos.section import Section, field


class TrackingConfig(Section):
    """Import of results into MLflow; trainings report to a server (an http URI) while they run."""

    enabled: bool = field(True, "import results into MLflow")
    uri: str | None = field(None, "tracking URI; null: MLFLOW_TRACKING_URI or sqlite:///mlflow.db")
    experiment: str | None = field(None, "MLflow experiment; null: kairos/<experiment>")
    flush_seconds: float = field(3.0, "what a training waits for a server at its end, at most", ge=0)

    def model_post_init(self, context: Any) -> None:
        """Whether nothing secret would be written down."""
        got = "an address with credentials, which every record would hold"
        environment = "with MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment"
        if "@" in urlsplit(self.uri or "").netloc:
            raise Refusal(f"tracking.uri: got {got}; allowed: the address alone, {environment}")
