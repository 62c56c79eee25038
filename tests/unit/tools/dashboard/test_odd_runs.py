"""Runs that are damaged, or made to harm their reader: each is a row with its error, and no page fails."""

import json
import os
import random
from urllib.parse import quote

import pytest
from typer.testing import CliRunner

from tepal.report.run_page import write_report
from tepal.tools.cli.main import main
from tepal.tools.dashboard import watched
from tepal.tools.dashboard.watched import CLIENT_COLUMNS
from tests.comparisons import comparison_in, finish, leave_run
from tests.unit.report.test_bounds import HOSTILE
from tests.unit.tools.dashboard.test_dashboard import browser, parts_of

DEEP = "[" * 100_000
FILES = ("config.toml", "metrics.jsonl", "summary.json", "now.json", "clients.json", "blocks.json", "labels.json")
ODD = [
    "", "\0", DEEP, '{"a": ' * 5000, "[[[]]]", "nonsense", "[1, 2]", '"text"', "null", "1e999",
    '{"round": "1"}\n\n{}', '{"round": 1, "accuracy": "high"}\n{"round": 2}', '{"rounds": "x", "accuracy": []}',
    '{"clients": 5}', '{"clients": {"a": {"state": {}}}}', '[{"stage": 1}]', '{"a": [1, "x"]}',
    '{"strategy": {"a": 1}}', "strategy = [[1], {a = 2}]", "num-server-rounds = 'x'", 'strategy = "' + "x" * 5000 + '"',
    "a = " + "[" * 400 + "]" * 400, '{"accuracy": 1e999, "seconds": -5}',
    '{"round": 1, "seconds": 1e300, "bytes_up": 1e300, "loss": -1e300}\n',
]  # fmt: skip


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(watched, "_TIMES", 0)


@pytest.fixture
def runs(tmp_path):
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def look_at(runs, good):
    """Ask for all pages, and check that none fails and the good run is listed with its score; the first page."""
    client = browser(runs)
    page = client.get("/")
    assert page.status_code == 200 and good.name in page.text and "0.7100" in page.text
    page.text.encode()
    for entry in os.listdir(runs):
        if entry.isascii():
            assert client.get(f"/run/{quote(entry)}/").status_code in (200, 404, 422), entry
    assert parts_of(good)["problems"]["html"] == ""
    listed = CliRunner().invoke(main, ["runs", str(runs)])
    assert listed.exit_code == 0 and good.name in listed.stdout, listed.exception
    assert listed.stdout.replace("\n", "").isprintable()
    return page.text


@pytest.mark.parametrize("name", [*FILES[:3], *(pytest.param(name, marks=pytest.mark.long) for name in FILES[3:])])
def test_a_run_with_a_damaged_file_is_a_row_and_the_others_are_as_they_are(runs, name):
    good = leave_run(runs, "fedfrozen")
    for number, content in enumerate(ODD):
        bad = leave_run(runs, "fedavg", summary=name != "metrics.jsonl").rename(runs / f"bad-{number}")
        (bad / name).write_text(content)
        parts_of(bad)
        shown = CliRunner().invoke(main, ["show", str(bad)])
        assert shown.exit_code in (0, 1) and (shown.exception is None or isinstance(shown.exception, SystemExit))
        assert shown.output.replace("\n", "").isprintable()
    page = look_at(runs, good)
    assert page.count("bad-") >= len(ODD)
    if name in ("config.toml", "metrics.jsonl", "summary.json"):
        assert "unreadable" in page and ("damaged" in page or "line 1" in page)


def test_what_is_no_regular_file_is_not_waited_for(runs, tmp_path):
    good = leave_run(runs, "fedfrozen")
    (tmp_path / "secret").write_text("secret = 1")
    for number, name in enumerate(FILES):
        for kind, make in {
            "pipe": os.mkfifo, "folder": os.mkdir, "zero": lambda path: os.symlink("/dev/zero", path),
            "link": lambda path: os.symlink(tmp_path / "secret", path), "loop": lambda path: os.symlink(path, path),
        }.items():  # fmt: skip
            bad = leave_run(runs, "fedavg").rename(runs / f"bad-{kind}-{number}")
            (bad / name).unlink(missing_ok=True)
            make(bad / name)
            assert "secret = 1" not in json.dumps(parts_of(bad))
    assert "secret = 1" not in look_at(runs, good)


def test_the_page_of_an_unreadable_run_has_the_reason(runs):
    leave_run(runs, "fedfrozen")
    bad = leave_run(runs, "fedavg").rename(runs / "bad")
    (bad / "config.toml").write_text("a = [")
    client = browser(runs)
    assert 'href="run/bad/"' in client.get("/").text
    assert client.get("/run/bad/").status_code == 200 and "config.toml is damaged" in parts_of(bad)["problems"]["html"]


@pytest.mark.parametrize(
    "change",
    [{"strategy": "x}</style><script>alert(1)</script>"}, {"run": "../../outside"}, {"run": "javascript:alert(1)"},
     {"run": "/etc"}, {"seed": "1"}, {"outcome": "x\ny"}, {"cells": []}, {"cells": 5}, {"clients": "many"},
     {"other": 1}, {"run_config": [1]}, {"run_config": {"num-server-rounds": {"a": 1}}}, {"target": "high"},
     {"cells": [{"strategy": "fedavg", "seed": 1, "run": None}] * 20_000}],
)  # fmt: skip
def test_a_damaged_comparison_is_a_row_and_its_page_has_the_reason(runs, tmp_path, change):
    good = leave_run(runs, "fedfrozen")
    leave_run(tmp_path / "outside", "fedavg")
    folder = runs / "20260101-000000-compare"
    folder.mkdir()
    finish(comparison_in(folder, ["fedavg", "fedfrozen"]))
    plan = json.loads((folder / "comparison.json").read_text())
    of_run = change.keys() <= {"strategy", "run", "seed", "outcome"}
    (plan["cells"][0] if of_run else plan).update(change)
    (folder / "comparison.json").write_text(json.dumps(plan))
    answer = browser(runs).get(f"/run/{folder.name}/")
    assert answer.status_code == 422 and "cannot be read" in answer.text and "alert(1)" not in answer.text
    assert "unreadable" in look_at(runs, good)


@pytest.mark.parametrize("content", [DEEP, "", "[]", "null", '{"cells": ' + DEEP])
def test_a_comparison_that_is_no_json_is_a_row(runs, content):
    good = leave_run(runs, "fedfrozen")
    (runs / "compared").mkdir()
    (runs / "compared" / "comparison.json").write_text(content)
    assert "comparison.json" in look_at(runs, good)
    assert browser(runs).get("/run/compared/").status_code == 422


@pytest.mark.parametrize(
    "name", [b"a\nb", b"\x1b[2J", b"\xff\xfe", "\u202egnp".encode(), b"<script>", b"a?b#c%2e", b"x" * 255,
             b"javascript:alert(1)", b"a&b=c", b"'\"", b"a\\b", b"=cmd()"],
)  # fmt: skip
def test_a_run_with_any_name_is_listed_and_its_link_leads_to_it(runs, name):
    good = leave_run(runs, "fedfrozen")
    odd = leave_run(runs, "fedavg")
    os.rename(odd, os.fsencode(runs) + b"/" + name)
    page = look_at(runs, good)
    links = [part.split('"')[0] for part in page.split('href="')[1:] if part.startswith("run/")]
    client = browser(runs)
    assert len(links) in (1, 2) and all(client.get(f"/{link}").status_code == 200 for link in links)
    assert page.replace("\n", "").isprintable()


@pytest.mark.parametrize("path", ["x" * 5000, "a/" + "x" * 5000, "%ff", "%0a", "latest", "x" * 300 + "/report.html"])
def test_no_address_fails(runs, path):
    leave_run(runs, "fedfrozen")
    (runs / "latest").unlink()
    (runs / "latest").symlink_to("latest")
    assert browser(runs).get(f"/run/{path}/").status_code == 404


def test_a_folder_that_is_gone_is_reported(runs):
    runs.rmdir()
    answer = browser(runs).get("/")
    assert answer.status_code == 200 and "there is no folder" in answer.text


def test_a_time_that_no_calendar_has_hides_no_run(runs):
    good = leave_run(runs, "fedfrozen")
    odd = leave_run(runs, "fedavg").rename(runs / "odd")
    os.utime(odd / "config.toml", (2**40, 2**40))
    assert "odd" in look_at(runs, good)


def test_hostile_names_reach_page_and_terminal_as_text(runs):
    run = leave_run(runs, "fedavg", summary=False, rounds=0)
    line = {"round": 1, "phase": HOSTILE[0], "accuracy": 0.5, "clients_asked": 2, "clients_replied": 2,
            **{key: [{"client": each, "reason": each} for each in HOSTILE] for key in ("refused", "lost", "notes")}}
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    clients = {name: {"state": name, "reason": name} for name in HOSTILE}
    (run / "now.json").write_text(json.dumps({"round": 2, "phase": HOSTILE[1], "clients": clients}))
    (run / "config.toml").write_text("".join(f"key-{k} = {json.dumps(name)}\n" for k, name in enumerate(HOSTILE[:9])))
    for arguments in (["show", str(run)], ["show", str(run), "--json"], ["runs", str(runs)]):
        shown = CliRunner().invoke(main, arguments)
        assert shown.exit_code == 0 and shown.stdout.replace("\n", "").isprintable(), arguments
        if "--json" not in arguments and "show" in arguments:
            assert shown.stdout.count("round 1: a|b") == 1, "a long name leaves room for the reasons"
    parts = parts_of(run)
    rows = [dict(zip(CLIENT_COLUMNS, row, strict=True)) for row in parts["clients"]["rows"]]
    assert len(rows) == len(HOSTILE)
    texts = [row[key] for row in rows for key in ("client", "state", "reason")]
    assert all(text.isprintable() and len(text) <= 2000 for text in texts)
    for part in parts.values():
        text = part.get("html", part.get("text", ""))
        assert text.replace("\n", "").isprintable() and "<script" not in text
    write_report(run)


@pytest.mark.long
def test_files_of_random_bytes_and_changed_bytes_fail_no_page(runs):
    generator = random.Random(5)
    good = leave_run(runs, "fedfrozen")
    for number in range(60):
        bad = leave_run(runs, "fedavg", summary=number % 2 == 0).rename(runs / f"bad-{number}")
        (bad / "now.json").write_text('{"round": 1, "clients": {"a": {"state": "replied", "examples": 3}}}')
        (bad / "labels.json").write_text('{"a": [1, 2], "b": [3]}')
        (bad / "blocks.json").write_text('[{"stage": "a", "kind": "b", "bytes": 1}]')
        name = generator.choice([each for each in FILES if (bad / each).exists()])
        content = bytearray((bad / name).read_bytes())
        for _ in range(generator.randint(1, 4)):
            content[generator.randrange(len(content))] = generator.choice(b'"{}[],:0-9.eE\\\n\0\xff')
        (bad / name).write_bytes(content)
        parts_of(bad)
    look_at(runs, good)
