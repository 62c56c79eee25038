"""`tepal doctor`: check an installation, with a remedy for each problem.

A check is a function that returns a `Finding` and changes nothing. A check that needs an option (a folder of
credentials, the server's address) is skipped without it, and names the option. torch is imported in a process of its
own, because a broken installation may crash at its import.
"""

from __future__ import annotations

import contextlib
import email.utils
import errno
import json
import os
import shutil
import ssl
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shlex import quote

import httpx
import psutil
from rich.table import Table
from rich.text import Text

from tepal.host.addresses import binding_error, unused_proxy
from tepal.host.flower.patches import FLOWER
from tepal.host.limits import Limits
from tepal.host.site import ProvisionError, SiteCredentials, days_left, read_certificate, read_site
from tepal.tools.deploy import node_keys
from tepal.tools.deploy.provision import SOON, closed, find_server, overview, site_folder

OK, WARNING, PROBLEM, SKIPPED = "ok", "warning", "problem", "skipped"

SERVER_PORTS = (8000, 9092)
"""The default ports of `tepal server`: for runs, and for nodes."""

_PYTHON = (3, 11)
_LITTLE_DISK, _NO_DISK = 5e9, 5e8  # bytes
_LITTLE_MEMORY, _NO_MEMORY = 2e9, 5e8
# Limits of a node's clock for which Flower accepts its signatures, in seconds.
_AHEAD, _BEHIND = 5.0, 300.0
_SOME_SECONDS = 2.0
_TORCH = 300.0  # seconds that the import of torch may take
_STYLES = {OK: "green", WARNING: "yellow", PROBLEM: "bold red", SKIPPED: "dim"}

_IMPORT_TORCH = """
import json
said = {}
try:
    import torch
    said = {"torch": torch.__version__, "gpus": [], "cuda": torch.version.cuda or torch.version.hip or ""}
    if torch.cuda.is_available():
        said["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    try:
        import torchvision
        said["torchvision"] = torchvision.__version__
    except ModuleNotFoundError as error:
        said["missing" if error.name == "torchvision" else "torchvision_error"] = str(error)
    except Exception as error:
        said["torchvision_error"] = f"{type(error).__name__}: {error}"
except Exception as error:
    said["error"] = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps(said))
"""


@dataclass(frozen=True)
class Finding:
    """The result of a check, and what to do about it: "" if nothing needs to be done."""

    check: str
    state: str
    found: str
    remedy: str = ""


def examine(
    *,
    runs: Path | None = None,
    cache: Path | None = None,
    ports: Sequence[int] = (),
    credentials: Path | None = None,
    site: Path | None = None,
    superlink: str = "",
    root_certificates: Path | None = None,
) -> Iterator[Finding]:
    """Run all checks, one after the other.

    Args:
        runs: Folder of run directories. None: a node has none.
        cache: Folder of clients' caches. None: a server has none.
        ports: Ports that must be free; by default those of a server, where one may be running.
        credentials: A folder of `tepal provision`, or a copy of its server/.
        site: A site's archive or folder.
        superlink: HOST:PORT of the server's Control API.
        root_certificates: PEM file to trust there; by default that of `credentials` or `site`.
    """
    yield python_version()
    yield flower_version()
    yield from torch_and_gpu()
    yield from check_ports(ports)
    yield folder("runs folder", runs)
    yield folder("cache folder", cache)
    yield memory()
    if credentials:
        yield from check_credentials(credentials)
    else:
        yield Finding("credentials", SKIPPED, "no folder of credentials is given", "name it with --credentials")
    if site:
        yield from check_site(site)
    else:
        yield Finding("site", SKIPPED, "no site is given", "name its folder or archive with --site")
    if superlink:
        yield clock(superlink, root_certificates or credentials, site)
    else:
        yield Finding("clock", SKIPPED, "no server is given", "name its control port with --superlink HOST:PORT")


# --- the installation -------------------------------------------------------------------------------------------------


def python_version(installed: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    """Check the version of Python."""
    found = f"Python {'.'.join(map(str, installed))}"
    if installed >= _PYTHON:
        return Finding("Python", OK, found)
    needed = ".".join(map(str, _PYTHON))
    return Finding("Python", PROBLEM, found, f"install Python {needed} or newer, and Tepal with it")


def flower_version(installed: str | None = None) -> Finding:
    """Check that Flower has the version that the warm node and the server support."""
    if installed is None:
        try:
            installed = version("flwr")
        except PackageNotFoundError:
            return Finding("Flower", PROBLEM, "flwr is not installed", f"pip install 'flwr=={FLOWER}'")
    if installed == FLOWER:
        return Finding("Flower", OK, f"flwr {installed}")
    return Finding(
        "Flower",
        PROBLEM,
        f"flwr {installed}; `tepal node` and `tepal server` need {FLOWER}",
        f"pip install 'flwr=={FLOWER}'",
    )


def torch_and_gpu(devices: Path = Path("/dev")) -> Iterator[Finding]:
    """Check that torch can be imported, that torchvision is built for it, and that torch finds the machine's GPUs.

    Args:
        devices: The system's folder of devices, to find GPUs that torch does not find.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _IMPORT_TORCH], capture_output=True, text=True, timeout=_TORCH, check=False
        )
        said = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        yield Finding("torch", PROBLEM, f"its import takes more than {_TORCH:.0f} s", "check for a slow disk")
        return
    except (IndexError, ValueError):
        *_, last = ["without output", *done.stderr.strip().splitlines()]
        ended = f"its import ended the process with status {done.returncode}: {last.strip()}"
        yield Finding("torch", PROBLEM, ended, "pip install --force-reinstall torch")
        return
    if "error" in said:
        yield Finding("torch", PROBLEM, said["error"], "pip install --force-reinstall torch")
        return
    build = f"built for {said['cuda']}" if said["cuda"] else "built for CPUs"
    yield Finding("torch", OK, f"torch {said['torch']}, {build}")
    yield _torchvision(said)
    yield _gpu(said, devices)


def _torchvision(said: dict[str, str]) -> Finding:
    if "torchvision" in said:
        return Finding("torchvision", OK, f"torchvision {said['torchvision']} works with torch {said['torch']}")
    if "missing" in said:
        found = "not installed; only models of torchvision need it"
        return Finding("torchvision", SKIPPED, found, "pip install 'tepal[vision]', to use them")
    return Finding(
        "torchvision",
        PROBLEM,
        f"it is not built for torch {said['torch']}: {said['torchvision_error']}",
        "install both at once and from one index: pip install --force-reinstall torch torchvision; or, if no model of "
        "torchvision is used: pip uninstall torchvision",
    )


def _gpu(said: dict[str, str], devices: Path) -> Finding:
    if said["gpus"]:
        return Finding("GPU", OK, f"torch finds {', '.join(said['gpus'])}")
    if not any(devices.glob("nvidia[0-9]*")):
        return Finding("GPU", OK, "none; training is on the CPU")
    found = "torch does not find this machine's GPU"
    if said["cuda"]:
        return Finding("GPU", WARNING, found, "check `nvidia-smi`, and that CUDA_VISIBLE_DEVICES is not empty")
    return Finding("GPU", WARNING, f"{found}: it is built for CPUs", "install a build of torch for CUDA")


# --- the machine ------------------------------------------------------------------------------------------------------


def check_ports(named: Sequence[int]) -> Iterator[Finding]:
    """Check that ports are free. A server may be running on its default ports."""
    for port in named or SERVER_PORTS:
        check = f"port {port}"
        problem = binding_error("", port)
        if problem == errno.EACCES:
            remedy = "choose a port above 1023, or allow this user to use it"
            yield Finding(check, PROBLEM, f"cannot be used: {os.strerror(problem)}", remedy)
        elif problem and named:
            remedy = f"stop the program that `ss -ltnp 'sport = {port}'` shows, or choose another port"
            yield Finding(check, PROBLEM, "in use by another program", remedy)
        elif problem:
            found = "in use, perhaps by a running `tepal server`"
            remedy = f"`ss -ltnp 'sport = {port}'` shows the program; a second server needs another port"
            yield Finding(check, WARNING, found, remedy)
        else:
            yield Finding(check, OK, "free")


def folder(check: str, path: Path | None) -> Finding:
    """Check that files can be written to a folder, or to the one in which it will be created, and the free space."""
    if path is None:
        return Finding(check, SKIPPED, "not used here", f"name one with --{check.split()[0]}")
    path = path.expanduser().absolute()
    there = path
    try:
        there = next(above for above in (path, *path.parents) if above.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
        free = shutil.disk_usage(there).free
    except OSError as error:
        uid = os.geteuid()
        remedy = f"choose a folder that this user (uid {uid}) may write to, or chown -R {uid} {quote(str(there))}"
        return Finding(check, PROBLEM, f"{there} cannot be written to: {error.strerror}", remedy)
    found = f"{path}{'' if there == path else ', which will be created'}: {free / 1e9:,.1f} GB free"
    if free < _NO_DISK:
        return Finding(check, PROBLEM, found, "free some space, or choose a folder on another disk")
    if free < _LITTLE_DISK:
        return Finding(check, WARNING, found, "free some space: every checkpoint has the size of the model")
    return Finding(check, OK, found)


def memory() -> Finding:
    """Check the free memory, and the limit of the container or service if it has one."""
    free, limit = psutil.virtual_memory().available, Limits().memory
    within = f", and the limit of this container or service is {limit / 1e9:,.1f} GB" if limit else ""
    return _memory(free, limit, f"{free / 1e9:,.1f} GB are free{within}")


def _memory(free: float, limit: float, found: str) -> Finding:
    usable = min(free, limit) if limit else free
    remedy = "end other programs, raise the limit, or lower batch-size and micro-batch-size"
    if usable < _NO_MEMORY:
        return Finding("memory", PROBLEM, found, remedy)
    return Finding("memory", WARNING, found, remedy) if usable < _LITTLE_MEMORY else Finding("memory", OK, found)


# --- credentials ------------------------------------------------------------------------------------------------------


def check_credentials(path: Path) -> Iterator[Finding]:
    """Check certificates and keys in a folder of `tepal provision`: dates, names, whether they fit, files' modes."""
    check = "credentials"
    try:
        server = find_server(path)
        warnings = node_keys.check_credentials(server, "localhost", datetime.now(UTC))
        found = overview(path)
    except (ProvisionError, node_keys.ServerError, OSError) as error:
        said = closed(Path(error.filename)) if isinstance(error, PermissionError) else error
        yield Finding(check, PROBLEM, *_halves(str(said)))
        return
    for warning in warnings:
        yield Finding(check, WARNING, *_halves(warning))
    if not warnings:
        days = f"{found.server_days} days, the authority's {found.ca_days}"
        sites = sum(each.revoked is None for each in found.sites)
        yield Finding(check, OK, f"the server's certificate is valid for {days}; {sites} sites are authorised")
    private = [server.key, path / "ca" / "ca.key", *sorted((path / "sites").glob("*.tar.gz"))]
    # Unlike Path.exists, without an error for a folder that is closed to this user: others cannot read the file either.
    yield _modes("private keys", [file for file in private if os.path.exists(file)])


def check_site(path: Path) -> Iterator[Finding]:
    """Check a site's archive, packed or unpacked."""
    try:
        with site_folder(path) as unpacked:
            if path.is_file():
                yield _modes("site's archive", [path])
            yield _site_finding(read_site(unpacked))
    except (ProvisionError, PermissionError) as error:
        user = f"this user (uid {os.geteuid()})"
        closed_to = f"{path} cannot be read by {user}. Run the command with sudo, or as the user that runs the node"
        yield Finding("site", PROBLEM, *_halves(closed_to if isinstance(error, PermissionError) else str(error)))


def _site_finding(site: SiteCredentials) -> Finding:
    days = days_left(read_certificate(site.root_certificates))
    found = f"{site.name}, server {site.superlink}; the authority's certificate is valid for {days} days"
    if days < SOON:
        return Finding("site", WARNING, found, "ask the server's administrator for an archive of a new deployment")
    return Finding("site", OK, found)


def _modes(check: str, files: Sequence[Path]) -> Finding:
    """Check that only their owner can read files."""
    modes = {file: stat.S_IMODE(file.stat().st_mode) for file in files}
    if open_ones := [file for file, mode in modes.items() if mode & 0o077]:
        found = f"other users can read {', '.join(f'{file} (mode {modes[file]:04o})' for file in open_ones)}"
        return Finding(check, PROBLEM, found, f"chmod 600 {' '.join(map(str, open_ones))}")
    return Finding(check, OK, f"{len(files)} {'file' if len(files) == 1 else 'files'}, readable by the owner only")


# --- the clock --------------------------------------------------------------------------------------------------------


def clock(superlink: str, certificates: Path | None = None, site: Path | None = None) -> Finding:
    """Compare this machine's clock with the server's: the Date header of the answer to a request for its health.

    Args:
        superlink: HOST:PORT of the server's Control API.
        certificates: PEM file to trust, or folder of credentials. None: the site's; without both, plain HTTP.
        site: A site's archive or folder.
    """
    remedy = f"check that the server is running, and that this machine can connect to its control port at {superlink}"
    url = f"http://{superlink}/health"
    try:
        context: ssl.SSLContext | bool = True
        if trusted := _certificate(certificates, site):
            url = f"https://{superlink}/health"
            context = ssl.create_default_context(cadata=trusted)
        with httpx.Client(verify=context, trust_env=False, timeout=10) as client:  # never through a proxy
            begun = time.time()
            date = client.get(url).headers.get("Date")
            answered = time.time()
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        said = f"{str(error) or type(error).__name__}{unused_proxy(superlink.rpartition(':')[0])}"
        return Finding("clock", PROBLEM, f"{url} does not answer: {said}", remedy)
    if not date:
        return Finding("clock", SKIPPED, f"the answer of {url} has no Date header", "compare the clocks by hand")
    # The header's time is truncated to seconds.
    theirs = email.utils.parsedate_to_datetime(date).timestamp() + 0.5
    return _rate_clock((begun + answered) / 2 - theirs, superlink)


def _rate_clock(ahead: float, superlink: str) -> Finding:
    """Rate a difference of the clocks: seconds by which this machine's is ahead of the server's; negative if behind."""
    found = f"{abs(ahead):.0f} s {'ahead of' if ahead >= 0 else 'behind'} that of {superlink}"
    remedy = "set the clocks of both machines by NTP"
    if ahead > _AHEAD or -ahead > _BEHIND:
        limits = f"a node may be {_AHEAD:.0f} s ahead and {_BEHIND / 60:.0f} min behind"
        return Finding("clock", PROBLEM, f"{found}; {limits}", remedy)
    if abs(ahead) > _SOME_SECONDS:
        return Finding("clock", WARNING, found, remedy)
    return Finding("clock", OK, f"within {_SOME_SECONDS:.0f} s of that of {superlink}")


def _certificate(certificates: Path | None, site: Path | None) -> str:
    """Return the authority's certificate in PEM from a file, credentials or a site; "" if none is given."""
    with site_folder(site) if site else contextlib.nullcontext() as unpacked:
        for given in filter(None, (certificates, unpacked)):
            for candidate in (given, given / "server" / "ca.crt", given / "ca.crt"):
                if candidate.is_file():
                    return candidate.read_text(encoding="ascii")
    return ""


# --- output -----------------------------------------------------------------------------------------------------------


def findings_table(findings: Sequence[Finding]) -> Table:
    """Return the findings as a table, each with what to do below it."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in ("state", "check"):
        table.add_column(column, no_wrap=True)
    table.add_column("found", overflow="fold")
    for each in findings:
        table.add_row(Text(each.state, style=_STYLES[each.state]), each.check, Text(each.found))
        if each.remedy:
            table.add_row("", "", Text(f"→ {each.remedy}", style="" if each.state != SKIPPED else "dim"))
    return table


def _halves(said: str) -> tuple[str, str]:
    """Split an error message into the problem and, in its last sentence or after its colon, what to do."""
    for found, there, remedy in (said.rpartition(". "), said.partition(": ")):
        if there:
            return found, remedy
    return said, "see the documentation of `tepal provision`"
