"""The runs of a SuperLink as its Control API tells of them: their statuses, and a thread that follows a run's log."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tepal.host.processes import Process, ProcessError
from tepal.tools.deploy.recovery import Due


@dataclass(frozen=True)
class RunStatus:
    """Flower's words about a run: pending, starting, running, finished; then completed, failed or stopped; and why."""

    status: str = ""
    ended: str = ""
    details: str = ""


class Runs:
    """The runs of a SuperLink, by its Control API."""

    def __init__(self, address: str, root_certificates: Path | None) -> None:
        from flwr.supercore.control import ControlHttpClient

        self._client = ControlHttpClient.from_server_address(
            server_address=address,
            insecure=root_certificates is None,
            root_certificates=root_certificates.read_bytes() if root_certificates else None,
            interceptors=(),
        )

    def statuses(self) -> dict[int, RunStatus]:
        """Run id → its status."""
        from flwr.proto.control_pb2 import ListRunsRequest

        found = self._client.ListRuns(ListRunsRequest()).run_dict
        return {
            run_id: RunStatus(run.status.status, run.status.sub_status, run.status.details)
            for run_id, run in found.items()
        }

    def stop(self, run_id: int) -> None:
        """Let Flower forget a run whose process is dead, and what its nodes were to do for it."""
        import httpx
        from flwr.proto.control_pb2 import StopRunRequest

        with contextlib.suppress(httpx.HTTPError):  # it has ended meanwhile, or the SuperLink has
            self._client.StopRun(StopRunRequest(run_id=run_id))

    def close(self) -> None:
        self._client.close()


class Watch:
    """A run of the SuperLink, followed by a thread."""

    def __init__(
        self, run_id: int, control: str, superlink: Process, log: Path, root_certificates: Path | None, ours: Due | None
    ) -> None:
        from tepal.host.superlink import Clock

        self.run_id = run_id
        self.log = log
        self.ours = ours
        self.kept: Path | None = None
        """Its directory, once it has said so."""
        self.heard = False
        """Whether the supervisor has taken note of that."""
        self.end: tuple[str, str] | None = None
        """Flower's status and words."""
        self.free_since: float | None = None
        """Since when nobody runs in its directory."""
        self.pending_since = time.monotonic()
        self._clock = Clock(self._hear, None)
        self._thread = threading.Thread(
            target=self._follow, args=(control, superlink, root_certificates), name=f"run-{run_id}", daemon=True
        )
        self._thread.start()

    def _follow(self, control: str, superlink: Process, root_certificates: Path | None) -> None:
        from tepal.host.superlink import follow

        # A SuperLink that is lost is the supervisor's to notice; a run that cannot be followed is still seen on disk.
        with contextlib.suppress(ProcessError, OSError, ValueError, KeyError):
            self.end = follow(self.run_id, control, superlink, self._clock, self.log, root_certificates)

    def _hear(self, kind: str, text: str) -> None:
        from tepal.records.run_directory import KEPT_IN

        if kind != "log":
            return
        with contextlib.suppress(OSError):
            print(text, flush=True)  # the SuperLink's own log has none of it
        if KEPT_IN in text and self.kept is None:
            self.kept = Path(text.partition(KEPT_IN)[2].strip())

    @property
    def lost(self) -> bool:
        """Whether it is not followed any more, though its end was not seen."""
        return self.end is None and not self._thread.is_alive()

    def leave(self) -> None:
        """Follow it no longer, and put its log into its directory. The SuperLink waits for open streams otherwise."""
        self._clock.limit = 0.0
        self._thread.join(5)
        with contextlib.suppress(OSError):
            if self.kept is not None:
                with (self.kept / "flower.log").open("ab") as file, self.log.open("rb") as new:
                    shutil.copyfileobj(new, file)
            self.log.unlink(missing_ok=True)
