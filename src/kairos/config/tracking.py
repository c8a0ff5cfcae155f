"""Section `tracking` of an experiment: import of results into MLflow.

Package `tracking` depends on `config`, so the section is not defined there.
"""

import re
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kairos.section import Section, field
from kairos_timesteps.errors import ValueRejected

# matches names of query parameters that contain a user name or a secret; others, such as sslmode, are allowed
_CREDENTIAL_NAME = re.compile("user|uid|pass|pwd|token|secret|odbc_connect", re.IGNORECASE)


class TrackingConfig(Section):
    """Import of results into MLflow; with a server (an http URI), training runs also report while they run."""

    enabled: bool = field(True, "import results into MLflow")
    uri: str | None = field(None, "tracking URI; null: MLFLOW_TRACKING_URI or sqlite:///mlflow.db")
    experiment: str | None = field(None, "MLflow experiment; null: kairos/<experiment>")
    flush_seconds: float = field(3.0, "time that a training run waits for a server at its end, at most", ge=0)

    def model_post_init(self, context: Any) -> None:
        """Reject a URI with credentials, since records contain the URI; a URI that is not set passes.

        Raises:
            ValueRejected: the URI contains a user name, or a query parameter whose name contains a match of
                `_CREDENTIAL_NAME`, such as ``password``.
        """
        address = urlsplit(self.uri or "")
        has_user = "@" in address.netloc
        has_secret = any(_CREDENTIAL_NAME.search(parameter) for parameter, _ in parse_qsl(address.query))
        if has_user or has_secret:
            # the message does not repeat the address: logs would contain the credentials
            value = "an address with credentials, which every record would contain"
            advice = (
                "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment; "
                "for a database, omit tracking.uri and set MLFLOW_TRACKING_URI to the whole address"
            )
            raise ValueRejected(f"tracking.uri: got {value}; allowed: the address alone; {advice}")
