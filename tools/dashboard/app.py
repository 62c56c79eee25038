"""`tepal dashboard`: runs in a browser, while they go on and afterwards. It only reads.

    /                            the runs in a folder
    /run/<name>/                 a run, or the page of a comparison; its runs are /run/<comparison>/<name>/
    /run/<name>/events           the parts of the page, each when it changes (server-sent events)
    /run/<name>/report.html      the run as one file, as `tepal report` wrote it

On another address than loopback whoever asks needs the token; and the name that a browser asks for must be this
machine's, so that no page from elsewhere can read along (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import ipaddress
import json
import secrets
import signal
import socket
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from tepal import __version__
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

_LOOK = 0.2  # seconds between two looks at the files
_ALIVE = 15.0  # seconds after which a silent connection says that it is there
_MOST_RUNS = 16  # runs whose parts are kept in memory

COOKIE, TOKEN = "tepal-dashboard", "TEPAL_DASHBOARD_TOKEN"
"""The cookie and the environment variable that a token is kept in."""

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

ASGI = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Any]], Callable[[MutableMapping[str, Any]], Awaitable[None]]],
    Awaitable[None],
]


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
    """Serve the dashboard until the process is asked to end. Raises OSError where it cannot listen there.

    Args:
        folder: of runs.
        host: name or address to listen on.
        port: 0 takes a free one.
        token: see `dashboard`.
        certificate, key: PEM files, for TLS.
        said: is told the address, as soon as a browser can be sent there.
    """
    import uvicorn

    app = dashboard(folder, token=token)
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
            signal.signal(number, lambda *_: None)  # uvicorn ends on them, and then raises them anew
        uvicorn.Server(config).run(sockets=[listening])


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(128)
    except OSError as error:
        raise OSError(
            f"cannot listen on {host}, port {port}: {error.strerror or error}; choose another --port, or 0 for a free "
            "one, and a --host of this machine"
        ) from error
    return made


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def dashboard(folder: Path, *, token: str | None = None) -> ASGI:
    """The dashboard of a folder of runs, as an ASGI application.

    Args:
        folder: of run directories and comparisons.
        token: that readers must bring, as `?token=`, once, or as a bearer token; None: they need none, but must ask for
            this machine by a name of loopback.
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
    return _Guard(app, token)


@dataclass(frozen=True)
class _Asset:
    kind: str
    packed: bytes
    plain: bytes


class _Dashboard:
    """The pages. Files are read in threads, so that one large run keeps nobody waiting."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._runs = WatchedFolder(self.folder)
        self._watched: OrderedDict[Path, WatchedRun] = OrderedDict()
        self._lock = threading.Lock()
        self._assets: dict[str, _Asset] = {}
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
            html = await run_in_threadpool(_comparison, path)
            # A page of its own, which carries its own, stricter policy, with script and style inside.
            return HTMLResponse(html, headers={**_HEADERS, "Content-Security-Policy": "frame-ancestors 'none'"})
        name, parent = request.path_params["name"], request.path_params.get("parent", "")
        config = await run_in_threadpool(lambda: RunView(path).config)
        known = (config.get("strategy"), config.get("model"), config.get("dataset"))
        subtitle = " · ".join(str(each) for each in known if each)
        whole = f"{parent}/{name}" if parent else name
        return HTMLResponse(run_page(whole, subtitle, parent, self._version), headers=_HEADERS)

    async def report(self, request: Request) -> Response:
        path = self._path(request)
        if path is None or not (path / REPORT).is_file():
            return self._missing(request)
        return FileResponse(path / REPORT, headers={**_HEADERS, "Content-Security-Policy": "frame-ancestors 'none'"})

    async def asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        made = await run_in_threadpool(self._asset, name)
        if made is None:
            return self._missing(request)
        headers = {"Cache-Control": "public, max-age=31536000, immutable", "Vary": "Accept-Encoding"}
        headers["X-Content-Type-Options"] = "nosniff"
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(made.packed, media_type=made.kind, headers={**headers, "Content-Encoding": "gzip"})
        return Response(made.plain, media_type=made.kind, headers=headers)

    def _missing(self, request: Request) -> Response:
        root = "../" * max(request.url.path.count("/") - 1, 0)
        text = f"There is nothing here. The first page has the runs of {self.folder} that were not moved or removed."
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

    # --- what they share --------------------------------------------------------------------------------------------

    def _path(self, request: Request) -> Path | None:
        """The run or comparison that a request is about: never anything outside of the folder."""
        path = self.folder
        for name in (request.path_params.get("parent"), request.path_params["name"]):
            if name is None:
                continue
            if not name or name.startswith(".") or "/" in name or "\\" in name or "\0" in name:
                return None
            path = path / name
            if path.is_symlink() and name != LATEST:
                return None
        try:
            path = path.resolve()
            if not path.is_relative_to(self.folder) or not path.is_dir():
                return None
            return path if is_comparison(path) else find_run(path)
        except OSError:
            return None

    def _asset(self, name: str) -> _Asset | None:
        with self._lock:
            if name not in self._assets:
                makers: dict[str, tuple[str, Callable[[], str]]] = {
                    "dashboard.js": ("text/javascript", dashboard_script),
                    "plotly.js": ("text/javascript", figure_library),
                    "style.css": ("text/css", dashboard_style),
                }
                if name not in makers:
                    return None
                kind, make = makers[name]
                plain = make().encode()
                self._assets[name] = _Asset(kind, gzip.compress(plain, 5), plain)
            return self._assets[name]

    def prepare(self) -> None:
        """Make what takes longest before somebody waits for it."""
        with suppress(OSError):
            self._runs.changes(Sent())
        self._asset("plotly.js")
        empty_plot("", "").to_json()  # imports what builds figures


def _comparison(path: Path) -> str:
    """The page of a comparison, with the way to the runs in it, those that go on among them."""
    results = measure(read_comparison(path))
    return comparison_page(results, render("comparison_runs.html.j2", TEMPLATES, comparison=results.comparison))


def _events(changes: Callable[[Sent], list[str]]) -> StreamingResponse:
    async def stream() -> AsyncIterator[str]:
        sent, silent, said = Sent(), 0.0, ""
        while True:
            try:
                parts = await run_in_threadpool(changes, sent)
            except (OSError, ValueError) as error:
                parts, said_before, said = [], said, str(error)
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


class _Guard:
    """Lets through who brings the token, or, where none is asked for, who asks for this machine by its own name."""

    def __init__(self, app: ASGI, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        answer: ASGI = self._app
        if self._token is None:
            if not is_loopback(request.url.hostname or ""):
                text = "This dashboard is for this machine alone: ask for it as http://localhost or http://127.0.0.1."
                answer = Response(text, 421, _HEADERS, "text/plain")
        elif given := parse_qs(request.url.query).get("token"):
            if self._right(given[0]):
                # The token goes into a cookie, and out of the address, which people copy.
                answer = RedirectResponse(request.url.path, 303, headers=_HEADERS)
                answer.set_cookie(
                    COOKIE, self._token, httponly=True, samesite="strict", secure=request.url.scheme == "https"
                )
            else:
                answer = _forbidden()
        elif not self._right(_brought(request)):
            answer = _forbidden()
        await answer(scope, receive, send)

    def _right(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), (self._token or "").encode())


def _brought(request: Request) -> str:
    kind, _, bearer = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return bearer.strip()
    cookies: SimpleCookie = SimpleCookie()
    cookies.load(request.headers.get("cookie", ""))
    return cookies[COOKIE].value if COOKIE in cookies else ""


def _forbidden() -> Response:
    text = "The dashboard's token is missing or wrong: open the address that `tepal dashboard` printed, with ?token=…"
    return Response(text, 401, {**_HEADERS, "WWW-Authenticate": "Bearer"}, "text/plain")
