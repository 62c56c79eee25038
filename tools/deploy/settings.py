"""The settings of `tepal server`, and the command line, environment and address of its SuperLink."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tepal.host.metrics import Endpoint

if TYPE_CHECKING:
    from tepal.host.toml import Value
    from tepal.tools.deploy.provision import ServerFolder


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of `tepal server`. Without `credentials` there is no TLS, and nodes are not authenticated."""

    state: Path
    credentials: ServerFolder | None = None
    app: Path | None = None
    run_config: Mapping[str, Value] | None = None
    fleet: str = "0.0.0.0:9092"
    host: str = "127.0.0.1"
    port: int = 8000
    attempts: int = 5
    metrics: Endpoint = field(default_factory=Endpoint)
    """Metrics for Prometheus; by default none."""

    @property
    def control(self) -> str:
        """The control port's address for clients on this machine."""
        return f"{reachable(self.host)}:{self.port}"

    @property
    def root_certificates(self) -> Path | None:
        return self.credentials.root_certificates if self.credentials else None


def superlink_command(settings: Settings) -> list[str]:
    """Return the SuperLink's command line."""
    command = ["flower-superlink", "--host", settings.host, "--port", str(settings.port)]
    command += ["--fleet-api-address", settings.fleet]
    if settings.credentials is None:
        return [*command, "--insecure"]
    own = settings.credentials
    command += ["--ssl-ca-certfile", str(own.root_certificates), "--ssl-certfile", str(own.certificate)]
    return [*command, "--ssl-keyfile", str(own.key), "--enable-supernode-auth"]


def superlink_environment(home: Path, host: str) -> dict[str, str]:
    """Return the environment of the SuperLink and of its clients. `home` is FLWR_HOME, `host` the control port's."""
    from tepal.host.processes import flower_environment

    return flower_environment(home, reachable(host)) | {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}


def reachable(host: str) -> str:
    """Return the host to which a client on this machine connects when the server listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host.strip("[]"), host.strip("[]"))
    return f"[{host}]" if ":" in host else host
