"""`tepal dashboard`: runs in a browser, while they go on and afterwards. It only reads.

    /                            the runs in a folder
    /run/<name>/                 a run, or the page of a comparison; its runs are /run/<comparison>/<name>/
    /run/<name>/events           the parts of the page, each when it changes (server-sent events)
    /run/<name>/report.html      the run as one file, as `tepal report` wrote it

Requests from other machines need the token. On loopback, the host name of a request must be this machine's, so that
pages of other origins cannot read the dashboard (DNS rebinding). A file is only served if it lies in the run's folder,
and a run that cannot be read is shown with its error. A report may be someone else's: its scripts run in an origin of
their own.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import re
import secrets
import signal
import socket
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import suppress
from pathlib import Path

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tepal import __version__
from tepal.host.addresses import is_loopback
from tepal.host.text import visible
from tepal.records.run_directory import LATEST, REPORT, find_run
from tepal.report.page import empty_plot
from tepal.report.templates import render
from tepal.tools.compare.comparison import is_comparison, measure, read_comparison
from tepal.tools.compare.page import comparison_page
from tepal.tools.dashboard.pages import (
    TEMPLATES,
    dashboard_script,
    dashboard_style,
    figure_library,
    message_page,
    run_page,
    runs_page,
)
from tepal.tools.dashboard.views import RunView
from tepal.tools.dashboard.watched import Sent, WatchedFolder, WatchedRun

_LOOK = 0.2  # seconds between two checks of the files
_ALIVE = 15.0  # seconds without an event after which a comment keeps the connection open
_MOST_RUNS = 16  # runs whose parts are kept in memory

COOKIE, TOKEN = "tepal-dashboard", "TEPAL_DASHBOARD_TOKEN"
"""The names of the cookie and of the environment variable that contain the token."""

_ASSETS: dict[str, tuple[str, Callable[[], str]]] = {
    "dashboard.js": ("text/javascript", dashboard_script),
    "plotly.js": ("text/javascript", figure_library),
    "style.css": ("text/css", dashboard_style),
}

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

_REPORT_HEADERS = {
    **_HEADERS,
    "Content-Security-Policy": (
        "sandbox allow-scripts allow-downloads; default-src 'none'; script-src 'unsafe-inline'; "
        "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}
"""Of a report, which may come from someone else's run: its scripts run in an origin of their own, so that they cannot
read the dashboard, and cannot make requests."""


def serve(
    folder: Path,
    host: str,
    port: int,
    *,
    token: str | None,
    certificate: Path | None = None,
    key: Path | None = None,
    said: Callable[[str], None],
) -> None:
    """Serve the dashboard until the process is asked to end. Raises OSError if it cannot listen at the address.

    Args:
        folder: The folder of runs.
        host: The name or address to listen on.
        port: The port; 0 takes a free one.
        token: As of `dashboard`.
        certificate, key: PEM files, for TLS.
        said: Called with the address as soon as it can be opened in a browser.
    """
    import uvicorn

    app = dashboard(folder, token=token, host=host)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1,
        ssl_certfile=certificate, ssl_keyfile=key,
    )  # fmt: skip
    with _listening(host, port) as listening:
        bound = listening.getsockname()[1]
        everywhere = host in ("0.0.0.0", "::", "")
        name = socket.gethostname() if everywhere else f"[{host}]" if ":" in host else host
        said(f"{'http' if certificate is None else 'https'}://{name}:{bound}/")
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # uvicorn ends on them, and then raises them again
        uvicorn.Server(config).run(sockets=[listening])


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # Not `socket.create_server`, which limits "::" to IPv6 and whose errors repeat the address.
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)
        return listening
    except OSError as error:
        raise OSError(
            f"cannot listen on {host}, port {port}: {error.strerror or error}; choose another --port, or 0 for a free "
            "one, and a --host of this machine"
        ) from error


def dashboard(folder: Path, *, token: str | None = None, host: str = "127.0.0.1") -> ASGIApp:
    """The dashboard of a folder of runs, as an ASGI application.

    Args:
        folder: The folder of run directories and comparisons.
        token: Required in every request, as a bearer token or, the first time, as `?token=`. None: no token is needed,
            but requests must use a loopback name of this machine.
        host: The name or address that is listened on. If it is a loopback name, requests may use it too.
    """
    pages = _Dashboard(folder)
    threading.Thread(target=pages.prepare, daemon=True).start()
    app = Starlette(
        routes=[
            Route("/", pages.runs),
            Route("/events", pages.runs_events),
            Route("/assets/{name}", pages.asset),
            Route("/run/{name}/report.html", pages.report),
            Route("/run/{parent}/{name}/report.html", pages.report),
            Route("/run/{name}/events", pages.run_events),
            Route("/run/{parent}/{name}/events", pages.run_events),
            Route("/run/{name}/", pages.run),
            Route("/run/{parent}/{name}/", pages.run),
        ]
    )
    return _Guard(app, token, {*_LOOPBACK, *([_in_header(host)] if is_loopback(host) else [])})


class _Dashboard:
    """The pages. Files are read in threads, so that a large run does not delay other requests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._runs = WatchedFolder(self.folder)
        self._watched: OrderedDict[Path, WatchedRun] = OrderedDict()
        self._lock = threading.Lock()
        self._assets: dict[str, tuple[str, bytes]] = {}  # name → media type, gzip of the content
        content = "\0".join((__version__, figure_library(), dashboard_script(), dashboard_style()))
        self._version = hashlib.sha256(content.encode()).hexdigest()[:12]

    # --- pages ------------------------------------------------------------------------------------------------------

    async def runs(self, request: Request) -> Response:
        table = await run_in_threadpool(self._runs.html)
        return HTMLResponse(runs_page(str(self.folder), table, self._version), headers=_HEADERS)

    async def run(self, request: Request) -> Response:
        path = self._path(request)
        if path is None:
            return self._missing(request)
        if is_comparison(path):
            try:
                html = await run_in_threadpool(_comparison, path)
            except Exception as error:  # of damaged files
                return self._unreadable(request, path, error)
            # This page has its own, stricter policy, and contains its script and style.
            return HTMLResponse(html, headers={**_HEADERS, "Content-Security-Policy": "frame-ancestors 'none'"})
        name, parent = request.path_params["name"], request.path_params.get("parent", "")
        try:
            config = await run_in_threadpool(lambda: RunView(path).config)
        except Exception:  # the parts of the page have the reason
            config = {}
        known = (config.get("strategy"), config.get("model"), config.get("dataset"))
        subtitle = " · ".join(str(each) for each in known if each)
        whole = f"{parent}/{name}" if parent else name
        return HTMLResponse(run_page(whole, subtitle, parent, self._version), headers=_HEADERS)

    async def report(self, request: Request) -> Response:
        path = self._path(request)
        file = None if path is None else await run_in_threadpool(_inside, path, REPORT)
        if file is None:
            return self._missing(request)
        return FileResponse(file, headers=_REPORT_HEADERS)

    async def asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        made = await run_in_threadpool(self._asset, name)
        if made is None:
            return self._missing(request)
        kind, packed = made
        headers = {"Cache-Control": "public, max-age=31536000, immutable", "Vary": "Accept-Encoding"}
        headers["X-Content-Type-Options"] = "nosniff"
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(packed, media_type=kind, headers={**headers, "Content-Encoding": "gzip"})
        return Response(gzip.decompress(packed), media_type=kind, headers=headers)

    def _unreadable(self, request: Request, path: Path, error: Exception) -> Response:
        root = "../" * max(request.url.path.count("/") - 1, 0)
        text = f"{path.name} cannot be read: {error if isinstance(error, OSError | ValueError) else repr(error)}"
        page = message_page("Not readable", text, root, self._version)
        return HTMLResponse(page, status_code=422, headers=_HEADERS)

    def _missing(self, request: Request) -> Response:
        root = "../" * max(request.url.path.count("/") - 1, 0)
        text = f"There is no such page. The first page lists the runs in {self.folder}."
        return HTMLResponse(message_page("Not found", text, root, self._version), status_code=404, headers=_HEADERS)

    # --- events -----------------------------------------------------------------------------------------------------

    async def runs_events(self, request: Request) -> Response:
        return _events(self._runs.changes)

    async def run_events(self, request: Request) -> Response:
        path = self._path(request)
        if path is None or is_comparison(path):
            return self._missing(request)
        with self._lock:
            watched = self._watched.setdefault(path, WatchedRun(path))
            self._watched.move_to_end(path)
            while len(self._watched) > _MOST_RUNS:
                self._watched.popitem(last=False)
        return _events(watched.changes)

    # --- used by several pages --------------------------------------------------------------------------------------

    def _path(self, request: Request) -> Path | None:
        """The run or comparison of a request; None for any path outside of the folder."""
        path = self.folder
        for name in (request.path_params.get("parent"), request.path_params["name"]):
            if name is None:
                continue
            if not name or name.startswith(".") or "/" in name or "\\" in name or "\0" in name:
                return None
            path = path / name
            with suppress(OSError):  # of a name that is too long
                if path.is_symlink() and name != LATEST:
                    return None
        try:
            path = path.resolve()
            if not path.is_relative_to(self.folder) or not path.is_dir():
                return None
            return path if is_comparison(path) else _run_inside(path, self.folder)
        except (OSError, ValueError, RuntimeError):  # RuntimeError: a loop of links
            return None

    def _asset(self, name: str) -> tuple[str, bytes] | None:
        with self._lock:
            if name in _ASSETS and name not in self._assets:
                kind, content = _ASSETS[name]
                self._assets[name] = kind, gzip.compress(content().encode(), 5)
            return self._assets.get(name)

    def prepare(self) -> None:
        """Prepare what takes longest, before the first request."""
        with suppress(OSError):
            self._runs.changes(Sent())
        self._asset("plotly.js")
        empty_plot("", "").to_json()  # imports what builds figures


def _run_inside(path: Path, folder: Path) -> Path | None:
    """The run directory at a path, or the newest of a folder of runs; None if it is not in the dashboard's folder."""
    run = find_run(path)
    return run if run.is_relative_to(folder) else None


def _inside(run: Path, name: str) -> Path | None:
    """The regular file of this name in a run directory; None for a link that leads out of it, and for anything else."""
    try:
        file = (run / name).resolve(strict=True)
        return file if file.is_file() and file.is_relative_to(run.resolve()) else None
    except (OSError, RuntimeError):  # RuntimeError: a loop of links
        return None


def _comparison(path: Path) -> str:
    """The page of a comparison, with links to all its runs."""
    results = measure(read_comparison(path))
    return comparison_page(results, render("comparison_runs.html.j2", TEMPLATES, comparison=results.comparison))


def _events(changes: Callable[[Sent], list[str]]) -> StreamingResponse:
    async def stream() -> AsyncIterator[str]:
        sent, silent, said = Sent(), 0.0, ""
        while True:
            try:
                parts = await run_in_threadpool(changes, sent)
                if said:  # the error has passed; of a run, what else it says of problems is sent again
                    said = ""
                    sent.pop("problems", None)
                    parts = [json.dumps({"id": "problems", "kind": "text", "text": said}), *parts]
            except Exception as error:  # the connection stays, until the files can be read
                parts, said_before, said = [], said, visible(error)
                if said != said_before:
                    parts = [json.dumps({"id": "problems", "kind": "text", "text": said})]
            for part in parts:
                yield f"data: {part}\n\n"
            if parts:
                silent = 0.0
                continue
            await asyncio.sleep(_LOOK)
            silent += _LOOK
            if silent >= _ALIVE:
                silent = 0.0
                yield ": here\n\n"

    return StreamingResponse(stream(), media_type="text/event-stream", headers={**_HEADERS, "X-Accel-Buffering": "no"})


_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def _in_header(host: str) -> str:
    """A name or address as the header `Host` has it."""
    return f"[{host.strip('[]')}]" if ":" in host else host.lower()


class _Guard:
    """Passes on requests with the token or, if there is none, with one of the `names` as host; refuses all others."""

    def __init__(self, app: ASGIApp, token: str | None, names: Collection[str]) -> None:
        self._app = app
        self._token = token
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        answer: ASGIApp = self._app
        if self._token is None:
            if not self._of_this_machine(scope):
                text = "This dashboard is only for this machine: open it as http://localhost or http://127.0.0.1."
                answer = Response(text, 421, _HEADERS, "text/plain")
        elif given := request.query_params.get("token"):
            if self._right(given):
                # The token moves from the address, which people copy, to a cookie.
                secure = request.url.scheme == "https"
                answer = RedirectResponse(request.url.path, 303, headers=_HEADERS)
                answer.set_cookie(COOKIE, given, httponly=True, samesite="strict", secure=secure)
            else:
                answer = _forbidden()
        elif not self._right(_token_of(request)):
            answer = _forbidden()
        await answer(scope, receive, send)

    def _of_this_machine(self, scope: Scope) -> bool:
        """Whether the request has one header `Host`, and that is one of the names, with or without a port."""
        # Not `request.url`: for a host that the framework finds invalid, it has the server's own address.
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name.lower() == b"host"]
        return len(hosts) == 1 and re.sub(r":[0-9]{1,5}\Z", "", hosts[0]).lower() in self._names

    def _right(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), (self._token or "").encode())


def _token_of(request: Request) -> str:
    kind, _, bearer = request.headers.get("authorization", "").partition(" ")
    return bearer.strip() if kind.lower() == "bearer" else request.cookies.get(COOKIE, "")


def _forbidden() -> Response:
    text = "The dashboard's token is missing or wrong: open the address that `tepal dashboard` printed, with ?token=…"
    return Response(text, 401, {**_HEADERS, "WWW-Authenticate": "Bearer"}, "text/plain")
