"""The tracker Weights & Biases shows what metrics.jsonl says, by its own files, and online by a server that keeps rows.

The files are read here as what they are: LevelDB's log of protocol buffers.
"""

import json
import struct
import sys
import threading
from types import SimpleNamespace

import psutil
import pytest

from tepal.records.run_directory import RunDirectory
from tepal.server_app.config import ConfigError, defaults, read_run_config
from tepal.server_app.trackers import TrackerError, check_trackers, open_trackers
from tepal.server_app.trackers.choice import missing
from tests.unit.server_app.test_trackers import expected, line
from tests.unit.server_app.wandb_server import WandBServer

pytest.importorskip("wandb", reason="pip install 'tepal[wandb]'")

OFFLINE = {"trackers": "wandb", "wandb.mode": "offline"}
ONLINE = {"trackers": "wandb", "wandb.mode": "online"}
KEY = "5ec2e7" * 8
OWN = {"_step", "_timestamp", "_runtime", "round"}  # columns of a row that are no metrics of ours


@pytest.fixture(autouse=True)
def nothing_of_the_environment(monkeypatch, tmp_path):
    for name in ("MODE", "API_KEY", "BASE_URL", "PROJECT", "ENTITY"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "settings"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.fixture
def directory(tmp_path):
    return RunDirectory.create(tmp_path / "runs", "fedavg", {**defaults(), **OFFLINE})


@pytest.fixture
def server(monkeypatch):
    with WandBServer() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        yield server


def records(path):
    """The records of a .wandb file, of which some are cut into pieces at the ends of blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    at, pieces, found = 7, b"", []  # after the file's own header
    while at + 7 <= len(data):
        left = 0x8000 - at % 0x8000
        _, length, kind = struct.unpack_from("<IHB", data, at) if left >= 7 else (0, 0, 0)
        if not kind:
            at += left
            continue
        pieces += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            found.append(Record.FromString(pieces))
            pieces = b""
    return found


def in_wandb(run):
    """The runs of W&B in a run directory, by their ids and in the order of their sessions."""
    runs = {}
    for path in sorted(run.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_ctime_ns):
        seen = None
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                fresh = SimpleNamespace(rows=[], config={}, tags=[], sessions=0)
                seen = runs.setdefault(record.run.run_id, fresh)
                seen.record, seen.tags = record.run, list(record.run.tags)
                seen.config |= {each.key: json.loads(each.value_json) for each in record.run.config.update}
            elif kind == "history":
                named = {each.key or each.nested_key[0]: json.loads(each.value_json) for each in record.history.item}
                seen.rows.append(named)
            elif kind == "exit":
                seen.exit = record.exit.exit_code
                seen.sessions += 1
    return runs


def values(rows):
    """(round, key) → value; a value must not be there twice, and W&B's own steps must grow."""
    shown = [((row["round"], key), value) for row in rows for key, value in row.items() if key not in OWN]
    assert len(dict(shown)) == len(shown), "a value is there twice"
    assert [row["_step"] for row in rows] == list(range(len(rows)))
    return dict(shown)


def the_run(run):
    """The only run of W&B that is not replaced."""
    (found,) = (each for each in in_wandb(run).values() if "replaced" not in each.tags)
    return found


def follow(directory, numbers, config=OFFLINE, **changed):
    """Rounds as a run writes them."""
    with open_trackers(read_run_config({**config, "runs": str(directory.path.parent)}), directory.path) as tracked:
        for number in numbers:
            row = line(number, **changed)
            directory.add(row)
            tracked.add(row)


def core():
    return [each for each in psutil.Process().children() if each.name() == "wandb-core"]


# --- offline ----------------------------------------------------------------------------------------------------------


def test_it_shows_what_metrics_jsonl_says_and_leaves_nothing_elsewhere(directory, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    threads = set(threading.enumerate())
    follow(directory, range(5), learning_rate=float("nan"), step_seconds=None)
    assert set(threading.enumerate()) <= threads and not core(), "W&B's process or threads still run"
    found = the_run(directory.path)
    wanted = expected(directory.path)
    assert wanted[3, "accuracy"] == 3 / 7 and wanted[2, "lost"] == 2 and (2, "learning_rate") not in wanted
    assert values(found.rows) == wanted
    assert (found.exit, found.record.display_name, found.record.project) == (0, directory.path.name, "tepal")
    assert found.record.run_group == defaults()["strategy"]
    assert {key: value for key, value in found.config.items() if key != "_wandb"}.keys() == defaults().keys()
    assert found.config["trackers"] == "wandb" and found.config["num-server-rounds"] == 20
    assert not found.record.HasField("git") and not list(elsewhere.iterdir())
    assert capfd.readouterr() == ("", "")
    files = [path for path in directory.path.rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()], "the API key was written"
    names = {path.name for path in files} - {"metrics.jsonl", "config.toml", "wandb.jsonl"}
    assert {name for name in names if not name.endswith((".wandb", ".log"))} == set()


def test_a_run_that_goes_on_stays_the_same_run_of_wandb(directory):
    follow(directory, range(3))
    (before,) = in_wandb(directory.path)
    follow(directory, range(3, 6), {**OFFLINE, "num-server-rounds": 30})
    found = the_run(directory.path)
    assert (found.record.run_id, found.sessions) == (before, 2)
    assert found.config["num-server-rounds"] == 30
    assert values(found.rows) == expected(directory.path)


def test_a_round_that_is_repeated_with_other_values_begins_a_new_run_and_the_old_one_is_marked(directory):
    follow(directory, range(5))
    follow(directory, range(3, 5), loss=9.0)
    assert expected(directory.path)[4, "loss"] == 9
    found = in_wandb(directory.path)
    assert sorted(each.tags for each in found.values()) == [[], ["replaced"]]
    assert values(the_run(directory.path).rows) == expected(directory.path)
    assert the_run(directory.path).record.display_name == directory.path.name


def test_a_round_that_is_repeated_with_the_same_values_is_shown_once(directory):
    with open_trackers(read_run_config(OFFLINE), directory.path) as tracked:
        for number in (1, 2, 2, 3):
            directory.add(line(number))
            tracked.add(line(number))
    (found,) = in_wandb(directory.path).values()
    assert found.sessions == 1 and values(found.rows) == expected(directory.path)


def test_rounds_that_were_not_told_are_told_later(directory):
    follow(directory, range(3))
    directory.add(line(3))
    follow(directory, [4])
    assert values(the_run(directory.path).rows) == expected(directory.path)


@pytest.mark.parametrize("after", [[], [3, 4]], ids=["at the end of a run", "in a run"])
def test_rows_that_die_with_wandbs_process_are_written_again(directory, caplog, after):
    with open_trackers(read_run_config(OFFLINE), directory.path) as tracked:
        for number in range(3):
            directory.add(line(number))
            tracked.add(line(number))
        (process,) = core()
        process.kill()
        process.wait(10)
        for number in after:
            directory.add(line(number))
            tracked.add(line(number))
    assert "wandb could not be updated" in caplog.text
    follow(directory, [5])
    (found,) = in_wandb(directory.path).values()
    assert values(found.rows) == expected(directory.path)


def test_a_session_that_was_uploaded_before_it_was_lost_is_replaced(directory):
    follow(directory, range(3))
    noted = directory.path / "wandb.jsonl"
    noted.write_text(noted.read_text().replace('{"closed": "FINISHED"}\n', '{"round": 3, "lo'))
    (file,) = directory.path.glob("wandb/*/*.wandb")
    file.with_name(file.name + ".synced").touch()
    follow(directory, [3])
    old, new = in_wandb(directory.path).values()
    assert len(old.rows) == 3 and values(new.rows) == expected(directory.path)


def test_scores_that_clients_give_a_round_later_are_shown_at_the_round_that_they_are_of(directory):
    none = {"accuracy": None, "loss": None}
    with open_trackers(read_run_config(OFFLINE), directory.path) as tracked:
        for row in (line(1, **none), line(2, **none, received_accuracy=0.25), line(3, received_accuracy=0.5)):
            directory.add(row)
            tracked.add(row)
    wanted = {**expected(directory.path), (1, "accuracy"): 0.25, (2, "accuracy"): 0.5}
    assert values(the_run(directory.path).rows) == wanted


@pytest.mark.parametrize("error, code", [(RuntimeError, 1), (KeyboardInterrupt, 255)])
def test_the_end_of_a_run_is_its_exit_code(directory, error, code):
    with pytest.raises(error), open_trackers(read_run_config(OFFLINE), directory.path) as tracked:
        directory.add(line(1))
        tracked.add(line(1))
        raise error
    assert the_run(directory.path).exit == code


def test_other_projects_have_other_runs(directory):
    follow(directory, range(2))
    follow(directory, [2], {**OFFLINE, "wandb.project": "p", "wandb.entity": "team"})
    first, second = in_wandb(directory.path).values()
    assert (second.record.project, second.record.entity) == ("p", "team")
    assert len(first.rows) == 2 and values(second.rows) == expected(directory.path)


def test_the_environment_gives_the_mode_and_the_key_overrides_it(directory, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_trackers(read_run_config({"trackers": "wandb"}))
    follow(directory, [1], {"trackers": "wandb"})
    assert values(the_run(directory.path).rows) == expected(directory.path)
    with pytest.raises(TrackerError, match="no API key"):
        check_trackers(read_run_config(ONLINE))


# --- online -----------------------------------------------------------------------------------------------------------


def test_online_a_run_goes_on_where_it_was_and_uploads_only_metrics_and_config(directory, server, capfd):
    check_trackers(read_run_config(ONLINE))
    follow(directory, range(3), ONLINE)
    follow(directory, range(3, 5), ONLINE)
    ((run, found),) = server.runs.items()
    assert values(server.rows(run)) == expected(directory.path)
    assert (found["displayName"], found["groupName"], found["exit"]) == (directory.path.name, "fedfrozen", 0)
    assert set(server.uploads) <= {"wandb-summary.json", "config.yaml"}
    assert capfd.readouterr() == ("", "") and not core()
    files = [path for path in directory.path.rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()], "the API key was written"


def test_online_rows_that_the_server_did_not_receive_are_sent_again(directory, server):
    follow(directory, range(4), ONLINE)
    (run,) = server.runs
    del server.runs[run]["history"][2:]
    follow(directory, [4], ONLINE)
    assert list(server.runs) == [run] and values(server.rows(run)) == expected(directory.path)


def test_online_rows_that_are_not_known_here_begin_a_new_run(directory, server):
    follow(directory, range(2), ONLINE)
    (run,) = server.runs
    server.runs[run]["history"].append('{"_step": 2, "round": 2, "loss": 5}')
    follow(directory, [2], ONLINE)
    old, new = server.runs
    assert old == run and values(server.rows(new)) == expected(directory.path)


def test_a_run_that_was_offline_is_sent_from_its_start_when_it_is_online(directory, server):
    follow(directory, range(3))
    follow(directory, [3], ONLINE)
    (run,) = server.runs
    assert values(server.rows(run)) == expected(directory.path) and list(in_wandb(directory.path)) == [run]


# --- before a run starts ----------------------------------------------------------------------------------------------


def test_online_without_an_api_key_is_refused_before_a_run_and_does_not_end_a_resumed_one(directory, caplog, capfd):
    with pytest.raises(TrackerError, match=r'`wandb login`, set WANDB_API_KEY .*wandb\.mode="offline"'):
        check_trackers(read_run_config({"trackers": "wandb"}))
    follow(directory, range(3), ONLINE)
    assert caplog.text.count("no API key") == 1 and "The run continues" in caplog.text
    # Flower's handler may write to what the terminal was when Flower was imported.
    printed = [text for text in "".join(capfd.readouterr()).splitlines() if "The run continues" not in text]
    assert not printed and not list(directory.path.glob("wandb/*")) and not core()


def test_an_api_key_that_the_server_refuses_is_refused_without_naming_it(server):
    server.refuses = True
    with pytest.raises(TrackerError, match=r"Correct the API key or the connection") as error:
        check_trackers(read_run_config(ONLINE))
    assert KEY not in str(error.value)


def test_a_mode_that_is_not_supported_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r'wandb\.mode=.*allowed are "", online, offline'):
        read_run_config({"trackers": "wandb", "wandb.mode": "shared"})
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with pytest.raises(TrackerError, match=r"WANDB_MODE='disabled' is not supported: allowed are online and offline"):
        check_trackers(read_run_config({"trackers": "wandb"}))


def test_a_folder_that_wandb_wrote_does_not_count_as_its_package(monkeypatch, tmp_path):
    (tmp_path / "wandb").mkdir()
    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert missing(["wandb"]) == [
        "wandb needs wandb, which this Python does not have: pip install 'tepal[wandb]', or leave wandb out"
    ]
