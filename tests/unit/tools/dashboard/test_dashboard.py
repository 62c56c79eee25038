"""The dashboard's pages, who may see them, and the parts that follow a run; in a browser: tests/integration."""

import asyncio
import json
import re
import shutil
import socket
import subprocess
from pathlib import Path

import httpx
import numpy as np
import pytest
from plotly.offline import get_plotlyjs

from tepal.host.addresses import is_loopback
from tepal.records.columns import bytes_text
from tepal.records.round_record import BINS, RoundRecord
from tepal.records.run_directory import BLOCKS, CLIENTS, METRICS, NOW, RunDirectory, held
from tepal.report.run_page import write_report
from tepal.tools.dashboard import app, watched
from tepal.tools.dashboard.app import COOKIE, _listening, dashboard
from tepal.tools.dashboard.watched import CLIENT_COLUMNS, Sent, WatchedFolder, WatchedRun
from tests.comparisons import comparison_in, continue_run, finish, leave_run

TOKEN = "a-token-of-some-length"


@pytest.fixture
def runs(tmp_path):
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


class Browser:
    """Asks the application, in this process; keeps cookies."""

    def __init__(self, app, address):
        self._app, self._address, self._cookies = app, address, httpx.Cookies()

    def request(self, method, path, **options):
        async def ask():
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url=self._address, cookies=self._cookies) as client:
                answer = await client.request(method, path, **options)
                self._cookies.update(client.cookies)
                return answer

        return asyncio.run(ask())

    def get(self, path, **options):
        return self.request("GET", path, **options)


def browser(runs, token=None, host="127.0.0.1", scheme="http"):
    return Browser(dashboard(runs, token=token), f"{scheme}://{host}")


def parts_of(run, sent=None):
    """All that a reader is sent until there is nothing more: id → part."""
    run = run if isinstance(run, WatchedRun) else WatchedRun(run)
    sent, found = Sent() if sent is None else sent, {}
    while new := run.changes(sent):
        found |= {part["id"]: part for part in map(json.loads, new)}
    return found


@pytest.fixture
def at_once(monkeypatch):
    """Nothing waits for its turn."""
    monkeypatch.setattr(watched, "_TIMES", 0)


# --- pages ----------------------------------------------------------------------------------------------------------


def test_the_first_page_lists_runs_with_links_that_lead_to_them(runs):
    run = leave_run(runs, "fedfrozen")
    client = browser(runs)
    page = client.get("/")
    assert page.status_code == 200 and run.name in page.text and "42.0 MB" in page.text and "0.7100" in page.text
    [link] = re.findall(r'href="(run/[^"]+)"', page.text)
    shown = client.get(f"/{link}")
    assert shown.status_code == 200 and run.name in shown.text and "fedfrozen · tiny-vit · digits" in shown.text
    for source in re.findall(r'(?:src|href)="(\.\./[^"]*assets[^"]*)"', shown.text):
        assert client.get(f"/{link}{source}").status_code == 200


def test_a_folder_without_runs_says_how_to_make_one(runs):
    assert "tepal simulate" in browser(runs).get("/").text


def test_a_comparison_has_its_page_and_its_runs_theirs(runs):
    folder = runs / "20260101-000000-comparison"
    folder.mkdir()
    comparison = finish(comparison_in(folder, ["fedavg", "fedfrozen"]))
    for run in comparison.runs:
        write_report(run.directory)
    client = browser(runs)
    page = client.get(f"/run/{folder.name}/")
    assert page.status_code == 200 and "fedavg" in page.text
    for run in comparison.runs:
        assert f'href="{run.directory.name}/report.html"' in page.text and f'href="{run.directory.name}/"' in page.text
        assert client.get(f"/run/{folder.name}/{run.directory.name}/report.html").status_code == 200
        shown = client.get(f"/run/{folder.name}/{run.directory.name}/")
        assert shown.status_code == 200 and f'<a href="../">{folder.name}</a>' in shown.text
    assert "2/2 runs" in client.get("/").text


@pytest.mark.parametrize(
    "path",
    ["/run/nothing/", "/run/..%2f..%2fetc/", "/run/%2e%2e/", "/run/.hidden/", "/run/link/", "/run/file/",
     "/run/a/b/c/", "/assets/config.toml", "/assets/..%2fdashboard.js", "/run/%00/", "/run/nothing/events",
     "/run/nothing/report.html"],
)  # fmt: skip
def test_nothing_but_runs_of_the_folder_is_shown(runs, tmp_path, path):
    outside = leave_run(tmp_path / "elsewhere", "fedavg")
    (runs / "link").symlink_to(outside)
    (runs / "file").write_text("no run")
    (runs / ".hidden").mkdir()
    answer = browser(runs).get(path)
    assert answer.status_code == 404 and outside.name not in answer.text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_it_only_reads(runs, method):
    assert browser(runs).request(method, "/").status_code == 405


def test_pages_allow_no_script_but_their_own_and_are_kept_by_nobody(runs):
    run = leave_run(runs, "fedavg")
    client = browser(runs)
    for path in ("/", f"/run/{run.name}/"):
        headers = client.get(path).headers
        policy = dict(rule.strip().split(" ", 1) for rule in headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'" and policy["script-src"] == "'self'"
        assert headers["cache-control"] == "no-store" and headers["x-frame-options"] == "DENY"
        assert not re.search(r"<script(?![^>]*\bsrc=)", client.get(path).text)
    asset = client.get("/assets/plotly.js")
    assert "immutable" in asset.headers["cache-control"] and "plotly" in asset.text[:2000].lower()
    # figures are made for the library that the Python package brings: the same major version draws them here
    ours, theirs = (re.search(r"plotly\.js[^\n]* v(\d+)\.", text[:500])[1] for text in (asset.text, get_plotlyjs()))
    assert ours == theirs and "MIT" in asset.text[:500]


def test_names_from_runs_are_shown_and_never_believed(runs):
    evil = '<img src=x onerror=alert(1)>"'
    run = leave_run(runs, "fedavg", config={"strategy": evil, "model": evil, "dataset": evil, "num-server-rounds": 3})
    client = browser(runs)
    for text in (client.get("/").text, client.get(f"/run/{run.name}/").text, parts_of(run)["config"]["html"]):
        assert "<img" not in text and "&lt;img" in text


# --- who may see it -------------------------------------------------------------------------------------------------


def test_without_a_token_only_this_machine_is_answered_under_its_own_names(runs):
    for host in ("127.0.0.1", "localhost", "[::1]"):
        assert browser(runs, host=host).get("/").status_code == 200, host
    for host in ("evil.example", "10.0.0.7", "localhost.evil.example"):
        assert browser(runs, host=host).get("/").status_code == 421, host
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "lab-server")] == [
        True, True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "host", ["rebind_x.evil.example", "r\xe9bind.example", "user@evil.example", "evil.example@127.0.0.1", "localhost.",
             "localhost:80:80", "localhost:", "localhost:x", "localhost ", " localhost", "127.0.0.1.evil.example",
             "", "::1", "[::1", "127.0.0.1/", "localhost#", "0", "2130706433", "localhost\r"],
)  # fmt: skip
def test_a_host_that_is_no_loopback_name_is_refused_however_it_is_written(runs, host):
    answer = browser(runs).get("/", headers=[(b"host", host.encode("latin-1"))])
    assert answer.status_code == 421


def status_of(app, headers):
    """The status of an answer to GET / with exactly these headers."""
    sent = []

    async def ask():
        scope = {"type": "http", "http_version": "1.1", "method": "GET", "path": "/", "raw_path": b"/", "root_path": "",
                 "scheme": "http", "query_string": b"", "headers": headers, "server": ("127.0.0.1", 8765)}  # fmt: skip

        async def send(message):
            sent.append(message)

        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        await app(scope, receive, send)

    asyncio.run(ask())
    return sent[0]["status"]


def test_a_request_names_its_host_exactly_once(runs):
    app = dashboard(runs)
    assert status_of(app, [(b"host", b"localhost:8765")]) == status_of(app, [(b"host", b"LocalHost")]) == 200
    assert status_of(app, []) == 421
    assert status_of(app, [(b"host", b"localhost"), (b"host", b"localhost")]) == 421
    assert status_of(app, [(b"host", b"localhost"), (b"Host", b"evil.example")]) == 421


def test_the_address_that_is_listened_on_is_a_name_of_this_machine_if_it_is_loopback(runs):
    assert status_of(dashboard(runs, host="127.0.0.2"), [(b"host", b"127.0.0.2:80")]) == 200
    assert status_of(dashboard(runs, host="127.0.0.2"), [(b"host", b"127.0.0.3:80")]) == 421
    assert status_of(dashboard(runs, host="lab-server"), [(b"host", b"lab-server")]) == 421


def test_a_report_that_leads_out_of_its_run_is_not_served(runs, tmp_path):
    run = leave_run(runs, "fedavg")
    other = leave_run(runs, "fedfrozen")
    (tmp_path / "secret.html").write_text("a secret")
    (other / "report.html").write_text("a secret")
    report = run / "report.html"
    for target in (tmp_path / "secret.html", other / "report.html", report, run):
        report.unlink(missing_ok=True)
        report.symlink_to(target)
        answer = browser(runs).get(f"/run/{run.name}/report.html")
        assert answer.status_code == 404 and "secret" not in answer.text, target
    report.unlink()
    (run / "kept.html").write_text("its own")
    report.symlink_to("kept.html")
    assert browser(runs).get(f"/run/{run.name}/report.html").text == "its own"


def directives(policy):
    return {name: set(sources) for name, *sources in (part.split() for part in policy.split(";"))}


def test_a_report_runs_in_an_origin_of_its_own_and_asks_for_nothing(runs):
    """It may be someone else's; `fetch`, cookies and frames are then refused by the browser."""
    run = leave_run(runs, "fedavg")
    (run / "report.html").write_text("<script>fetch('/')</script>")
    answer = browser(runs).get(f"/run/{run.name}/report.html")
    policy = directives(answer.headers["content-security-policy"])
    assert policy["sandbox"] == {"allow-scripts", "allow-downloads"}, "and not allow-same-origin"
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == {"'none'"}
    assert "connect-src" not in policy and answer.headers["referrer-policy"] == "no-referrer"


def test_the_policy_of_the_dashboard_allows_a_report_what_its_own_policy_does(runs):
    run = leave_run(runs, "fedavg")
    write_report(run)
    answer = browser(runs).get(f"/run/{run.name}/report.html")
    own = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', answer.text)[1]
    allowed = directives(answer.headers["content-security-policy"])
    assert {name: allowed[name] for name in directives(own)} == directives(own)


def test_with_a_token_every_path_asks_for_it(runs):
    run = leave_run(runs, "fedavg")
    for path in ("/", f"/run/{run.name}/", f"/run/{run.name}/events", "/events", "/assets/dashboard.js", "/nothing"):
        client = browser(runs, TOKEN, "lab-server")
        assert client.get(path).status_code == 401
        assert client.get(path, params={"token": TOKEN + "x"}).status_code == 401
        assert client.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert client.get(path, headers={"Cookie": f"{COOKIE}=wrong"}).status_code == 401
    by_header = browser(runs, TOKEN, "lab-server").get("/", headers={"Authorization": f"Bearer {TOKEN}"})
    assert by_header.status_code == 200


def test_the_token_moves_from_the_address_into_a_cookie_that_scripts_cannot_read(runs):
    client = browser(runs, TOKEN, "lab-server")
    answer = client.get("/", params={"token": TOKEN})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie and "secure" not in cookie
    assert client.get("/").status_code == 200
    over_tls = browser(runs, TOKEN, "lab-server", "https")
    assert "secure" in over_tls.get("/", params={"token": TOKEN}).headers["set-cookie"].lower()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no socket for IPv4 and IPv6")
def test_all_addresses_of_ipv6_are_those_of_ipv4_too():
    with _listening("::", 0) as listening:
        socket.create_connection(("127.0.0.1", listening.getsockname()[1]), timeout=5).close()


def test_a_port_that_is_taken_is_said_with_what_helps():
    with _listening("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1, port {port}: .*; choose another --port"):
            _listening("127.0.0.1", port)


# --- parts ----------------------------------------------------------------------------------------------------------


def test_a_finished_run_has_every_part_of_its_report(runs):
    run = leave_run(runs, "fedfrozen")
    parts = parts_of(run)
    assert {key for key in parts if key.startswith("figure-")} == {
        f"figure-{key}" for key in ("accuracy-rounds", "accuracy-bytes", "loss-rounds", "loss-bytes", "bytes-rounds",
                                    "bytes-total")
    }  # fmt: skip
    drawn = parts["figure-accuracy-rounds"]["plot"]["data"][0]
    assert drawn["y"] == [0.1, 0.4, 0.73, 0.71] and parts["figure-loss-rounds"]["plot"] is None
    assert "finished" in parts["state"]["html"] and "3 of 3 rounds" in parts["state"]["html"]
    assert "71.00 %" in parts["headlines"]["html"] and parts["said"]["text"] == "Round 3 has ended, accuracy 0.7100."
    assert parts["problems"]["html"] == ""


def test_only_what_changed_is_sent_again(runs, at_once):
    path = leave_run(runs, "fedavg", rounds=1, summary=False)
    run, sent = WatchedRun(path), Sent()
    with held(path):
        first = parts_of(run, sent)
        assert "running" in first["state"]["html"] and "1 of 3 rounds" in first["state"]["html"]
        assert parts_of(run, sent) == {}
        continue_run(path, "fedavg", [2])
        second = parts_of(run, sent)
        assert second["figure-accuracy-rounds"]["plot"]["data"][0]["y"] == [0.1, 0.5, 0.7]
        assert second["title"]["text"].startswith("2/3") and "config" not in second and "clients" not in second
        (path / CLIENTS).write_text(json.dumps({"site-1": {"rounds": 2, "replied": 1, "lost": 1, "reason": "gone"}}))
        assert parts_of(run, sent).keys() == {"clients"}
        assert parts_of(run, Sent()).keys() >= first.keys(), "who comes later gets all"
    assert "interrupted" in parts_of(run, sent)["state"]["html"]


def test_clients_are_shown_as_they_are_now_and_over_the_whole_run(runs, at_once):
    path = leave_run(runs, "fedavg", rounds=1, summary=False)
    now = {
        "round": 2, "rounds": 3, "phase": "train", "ended": False,
        "clients": {
            "site-10": {"state": "training", "bytes_down": 5, "bytes_up": 0, "seconds": 0.0},
            "site-2": {"state": "replied", "examples": 12, "bytes_down": 5, "bytes_up": 3, "seconds": 1.25},
        },
    }  # fmt: skip
    (path / NOW).write_text(json.dumps(now))
    totals = {"rounds": 1, "replied": 0, "refused": 1, "lost": 0, "examples": 9, "bytes_down": 50, "bytes_up": 30,
              "seconds": 2.0, "reason": "round 1: NaN"}  # fmt: skip
    (path / CLIENTS).write_text(json.dumps({"site-10": totals, "site-1": totals}))
    with held(path):
        parts = parts_of(path)
        assert "round 2, train: 1 of 2 clients answered" in parts["state"]["html"]
    rows = [dict(zip(CLIENT_COLUMNS, row, strict=True)) for row in parts["clients"]["rows"]]
    assert [row["client"] for row in rows] == ["site-1", "site-2", "site-10"]
    assert (rows[0]["state"], rows[0]["refused"], rows[0]["reason"]) == (None, 1, "round 1: NaN")
    assert (rows[1]["state"], rows[1]["examples"], rows[1]["seconds"], rows[1]["rounds"]) == ("replied", 12, 1.25, None)
    assert (rows[2]["state"], rows[2]["examples"], rows[2]["total_bytes_down"]) == ("training", 9, 50)


def test_the_block_diagram_is_of_the_round_that_goes_on(runs, at_once):
    path = leave_run(runs, "fedavg", rounds=1, summary=False)
    cells = [{"stage": stage, "kind": "other", "bytes": 4} for stage in ("embedding", "layer 1", "head")]
    (path / BLOCKS).write_text(json.dumps(cells))
    shares = {f"travel_{way}": [1, 0.5, 0] for way in ("down", "trains", "up")}
    (path / NOW).write_text(json.dumps({"round": 2, "phase": "frozen", "ended": False, "clients": {}, **shares}))
    drawn = parts_of(path)["diagram"]["html"]
    assert "Round 2, in progress: frozen." in drawn and "sent to</span> 50%" in drawn


def test_method_figures_come_from_records(runs, at_once):
    path = leave_run(runs, "selective")
    masks = np.array([[True, False], [True, True]])
    RunDirectory(path, {}).write_record(1, {"clients": np.array(["a", "b"]), "masks": masks})
    parts = parts_of(path)
    assert parts["figure-layers-clients"]["plot"]["data"][0]["z"] == [[1, 0], [1, 1]]
    assert parts["figure-layers-clients"]["section"] == "method"


def test_the_reliability_of_the_probabilities_is_shown_as_in_the_report(runs, at_once):
    path = leave_run(runs, "fedavg", summary=False)
    assert not any(part.get("section") == "uncertainty" for part in parts_of(path).values())
    bins = dict(zip(BINS, ([0.5] * 15, [0.25] * 15, [2] * 15), strict=True))
    flagged = {"entropy_threshold": 1.0, "flagged_letters": 0.5, "flagged_noise": 1.0, "flagged_covered": 0.25}
    RunDirectory(path, {}).append(RoundRecord(round=4, loss=0.5, calibration_error=0.25, **bins, **flagged))
    parts = parts_of(path)
    shown = {name: part["place"] for name, part in parts.items() if part.get("section") == "uncertainty"}
    assert shown == {"figure-reliability": 0, "figure-calibration-rounds": 1, "figure-flagged": 2}
    assert parts["figure-reliability"]["plot"]["data"][0]["y"] == [0.25] * 15
    assert "calibration error" in parts["rounds"]["html"] and "letters flagged" in parts["rounds"]["html"]


def test_a_file_that_cannot_be_read_is_said_and_the_rest_is_shown(runs, at_once):
    path = leave_run(runs, "fedavg")
    (path / METRICS).write_text('{"round": 1}\nnonsense\n{"round": 2}\n')
    (path / CLIENTS).write_text(json.dumps({"site-1": {"rounds": 1}}))
    parts = parts_of(path)
    assert parts["problems"]["html"].count("line 2") == 1
    assert parts["clients"]["rows"][0][0] == "site-1"
    (path / NOW).write_text('["of another kind"]')
    assert "now.json is damaged" in parts_of(path)["problems"]["html"]


def test_an_error_that_has_passed_is_no_longer_shown(monkeypatch):
    """On the page of a run the notice of damaged files is in the same place, and is sent again."""
    monkeypatch.setattr(app, "_LOOK", 0.0)
    found = iter([OSError("the disk is away"), OSError("the disk is away"), ["a part"], ["another"]])
    sent_before = []

    def changes(sent):
        sent_before.append(dict(sent))
        answer = next(found)
        if isinstance(answer, OSError):
            raise answer
        sent["problems"] = 1
        return answer

    async def read(events):
        stream = app._events(changes).body_iterator
        return [await anext(stream) for _ in range(events)]

    problems, gone, first, second = asyncio.run(read(4))
    shown = [json.loads(event.removeprefix("data: ")) for event in (problems, gone)]
    assert shown == [{"id": "problems", "kind": "text", "text": text} for text in ("the disk is away", "")]
    assert (first, second) == ("data: a part\n\n", "data: another\n\n")
    assert sent_before[-1] == {}


def test_a_folder_is_listed_anew_when_a_run_appears(runs, at_once, monkeypatch):
    folder, sent = WatchedFolder(runs), Sent()
    assert "has no runs yet" in json.loads(folder.changes(sent)[0])["html"]
    assert folder.changes(sent) == []
    run = leave_run(runs, "fedavg")
    folder._due = 0
    assert run.name in json.loads(folder.changes(sent)[0])["html"]
    (run / "config.toml").write_text("not = [toml")
    folder._due = 0
    assert "unreadable" in json.loads(folder.changes(sent)[0])["html"]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_the_table_of_clients_writes_bytes_as_every_other_place_does():
    script = (Path(watched.__file__).parent / "assets/dashboard.js").read_text()
    start = script.index("const write = {")
    write = script[start : script.index("\n};", start) + 3]
    numbers = [0, 7, 999, 1000, 9994, 9996, 99_960, 999_499, 999_999, 41_230_000, 1_500_000_000_000_000, 12.4e18]
    show = f"{write}\nconsole.log(JSON.stringify({numbers}.map(write.bytes)))"
    done = subprocess.run(["node", "-e", show], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [bytes_text(number) for number in numbers]
