"""What a run tells of itself while it goes on: clients' states as the round sees them, and the files that show them."""

import json
import threading
import time

import numpy as np
import pytest

from tepal.exchange.layout import Layout
from tepal.records.live import Live, read_now
from tepal.strategies import FedAvg
from tepal.strategies.rounds.report import ClientReport, RoundReport
from tepal.strategies.rounds.travel import OTHER, QUERY_KEY, Segment, Travel, segments
from tests.unit.strategies.rounds.test_round import grid_of, numpy_app, reply_of, start

ARRAYS = {"embedding": (2, 3), "q0": (4,), "v0": (6,), "q1": (4,), "v1": (6,), "norm": (2,), "head": (5,)}


class Blocks:
    layout = Layout.of_arrays({name: np.zeros(shape, np.float32) for name, shape in ARRAYS.items()})
    query_key = ("q0", "q1")
    layers = (("q0", "v0"), ("q1", "v1"))
    embedding, rest, head = ("embedding",), ("norm",), ("head",)


def read(path, name):
    return json.loads((path / f"{name}.json").read_text())


def test_cells_are_the_stages_from_input_to_output_and_hold_every_entry_once():
    found = segments(Blocks.layout, Blocks)
    assert [(cell.stage, cell.kind, cell.names, cell.nbytes) for cell in found] == [
        ("embedding", OTHER, ("embedding",), 24), ("layer 1", QUERY_KEY, ("q0",), 16), ("layer 1", OTHER, ("v0",), 24),
        ("layer 2", QUERY_KEY, ("q1",), 16), ("layer 2", OTHER, ("v1",), 24), ("rest", OTHER, ("norm",), 8),
        ("head", OTHER, ("head",), 20),
    ]  # fmt: skip
    [whole] = segments(Blocks.layout, None)
    assert (whole.stage, set(whole.names), whole.nbytes) == ("model", {*ARRAYS}, 132)


def test_shares_are_of_the_clients_that_were_asked():
    travel = Travel(Blocks.layout, segments(Blocks.layout, Blocks))
    for _ in range(4):
        travel.sent(("embedding", "v0", "v1", "norm", "head"))
        travel.asked(("v0", "head"))
    travel.sent(("head",))
    travel.returned(("v0", "head"))
    shares = travel.shares(4)
    assert shares["travel_down"].tolist() == [1, 0, 1, 0, 1, 1, 1.25]
    assert shares["travel_trains"].tolist() == [0, 0, 1, 0, 0, 0, 1]
    assert shares["travel_up"].tolist() == [0, 0, 0.25, 0, 0, 0, 0.25]
    assert travel.shares(0)["travel_up"].tolist() == [0, 0, 1, 0, 0, 0, 1], "nobody was asked: no division by 0"


def test_a_client_goes_from_asked_to_its_answer_and_each_step_is_told():
    """Of three clients one replies, one raises, one gives what is no number; every client's states in their order."""

    def answer(partition, server_round):
        if partition == 1:
            raise RuntimeError("no memory left")
        arrays, examples = reply_of(partition, server_round)
        return {**arrays, "w": arrays["w"] * (np.nan if partition == 2 else 1)}, examples

    seen, order = {}, []

    def watch(report):
        for name, client in report.clients.items():
            states = seen.setdefault(name, [])
            if not states or states[-1] != client.state:
                states.append(client.state)
        if report.clients:
            order.append([client.state for client in report.clients.values()])

    strategy = FedAvg(on_progress=watch, fraction_evaluate=0)
    _, [report] = start(strategy, grid_of(3, numpy_app(answer=answer)))
    assert order[0] == ["training", "asked", "asked"]
    ends = {"client-0": "replied", "client-1": "lost", "client-2": "refused"}
    for name, end in ends.items():
        assert [state for state in seen[name] if state != "asked"] == ["training", end]
    assert report.clients["client-0"].examples == 1 and report.clients["client-0"].seconds > 0
    assert sum(client.bytes_down for client in report.clients.values()) == report.down.payload
    assert sum(client.bytes_up for client in report.clients.values()) == report.up.payload


def test_those_that_a_round_did_not_wait_for_are_called_so():
    _, [report] = start(FedAvg(max_replies=2, fraction_evaluate=0), grid_of(5))
    states = sorted(client.state for client in report.clients.values())
    assert states == ["not waited for"] * 3 + ["replied"] * 2


def report_of(number, **clients):
    report = RoundReport(number, "train", clients=clients)
    for name, client in clients.items():
        if client.state == "replied":
            report.replied.append(name)
        elif client.state in ("refused", "lost"):
            getattr(report, client.state).append((name, "a reason"))
    return report


def test_clients_are_summed_over_the_rounds_and_a_run_that_goes_on_adds_to_them(tmp_path):
    replied = ClientReport("replied", 7, 2.0, 100, 50, 1.5)
    Live(tmp_path, 9).end_round(report_of(1, a=replied, b=ClientReport("lost", bytes_down=100)))
    live = Live(tmp_path, 9)
    live.end_round(report_of(2, a=replied, b=ClientReport("refused", None, None, 100, 30, 2.0)))
    live.end_round(report_of(3, a=replied))
    live.close()
    told = read(tmp_path, "clients")
    assert told["a"] == {
        "rounds": 3, "replied": 3, "refused": 0, "lost": 0, "examples": 7, "budget": 2.0, "bytes_down": 300,
        "bytes_up": 150, "seconds": 4.5, "last_round": 3, "state": "replied", "reason": "",
    }  # fmt: skip
    assert (told["b"]["rounds"], told["b"]["refused"], told["b"]["lost"], told["b"]["bytes_down"]) == (2, 1, 1, 200)
    assert told["b"]["reason"] == "round 2: a reason" and told["b"]["examples"] is None


class Timers:
    """Makes timers that have no threads: a test calls what they would call."""

    def __init__(self, starts=True):
        self.starts, self.waiting = starts, []

    def __call__(self, seconds, call):
        timers = self

        class Timer:
            daemon = False

            def __init__(self):
                self.seconds, self.call = seconds, call

            def start(self):
                if not timers.starts:
                    raise RuntimeError("can't start new thread")
                timers.waiting.append(self)

            def cancel(self):
                if self in timers.waiting:
                    timers.waiting.remove(self)

        return Timer()


def states(path):
    return [client["state"] for client in read(path, "now")["clients"].values()]


def test_progress_is_written_now_and_then_and_the_end_of_a_round_at_once(tmp_path):
    now = [0.0]
    live = Live(tmp_path, 5, clock=lambda: now[0], timer=Timers())
    report = report_of(1, a=ClientReport("asked"))
    live.progress(report)
    report.clients["a"].state = "training"
    live.progress(report)
    assert read(tmp_path, "now")["clients"]["a"]["state"] == "asked"
    now[0] = 0.3
    live.progress(report)
    told = read(tmp_path, "now")
    assert (told["round"], told["rounds"], told["ended"]) == (1, 5, False)
    assert told["clients"]["a"]["state"] == "training"
    report.clients["a"].state = "lost"
    report.lost.append(("a", "no answer"))
    live.end_round(report)
    told = read(tmp_path, "now")
    assert told["ended"] and told["clients"]["a"] == {
        "state": "lost", "bytes_down": 0, "bytes_up": 0, "seconds": 0.0, "reason": "no answer",
    }  # fmt: skip


def test_what_was_not_written_at_once_is_written_after_a_pause_as_it_is_then(tmp_path):
    """Ten clients are sent their messages at once, and then nothing happens until one of them has trained."""
    now, timers = [0.0], Timers()
    live = Live(tmp_path, 5, clock=lambda: now[0], timer=timers)
    report = report_of(1, **{f"site-{k}": ClientReport() for k in range(10)})
    for client in report.clients.values():
        client.state = "training"
        live.progress(report)
    assert states(tmp_path) == ["training"] + ["asked"] * 9
    [timer] = timers.waiting
    assert timer.seconds == pytest.approx(0.25) and timer.daemon
    report.clients["site-0"].state = "replied"
    now[0] = 0.25
    timer.call()
    assert states(tmp_path) == ["replied"] + ["training"] * 9
    assert timers.waiting == [] and not read(tmp_path, "now")["ended"]
    live.progress(report)
    now[0] = 1.0
    live.progress(report)
    assert timers.waiting == [], "it was written by the call"


@pytest.mark.parametrize("end", ["end_round", "close"])
def test_after_the_end_of_a_round_or_of_the_run_nothing_is_written_later(tmp_path, end):
    now, timers = [0.0], Timers()
    live = Live(tmp_path, 5, clock=lambda: now[0], timer=timers)
    report = report_of(1, a=ClientReport())
    for state in ("training", "replied"):
        report.clients["a"].state = state
        live.progress(report)
    [timer] = timers.waiting
    live.end_round(report) if end == "end_round" else live.close()
    assert timers.waiting == []
    before = (tmp_path / "now.json").read_bytes()
    timer.call()  # it had begun before it was cancelled
    assert (tmp_path / "now.json").read_bytes() == before
    assert read(tmp_path, "now")["ended"] == (end == "end_round")


def test_a_run_goes_on_if_no_thread_can_be_started(tmp_path):
    now = [0.0]
    live = Live(tmp_path, 5, clock=lambda: now[0], timer=Timers(starts=False))
    report = report_of(1, a=ClientReport())
    for state, later in (("asked", 0.0), ("training", 0.1), ("replied", 0.3)):
        report.clients["a"].state, now[0] = state, later
        live.progress(report)
    assert states(tmp_path) == ["replied"]


def test_a_thread_writes_what_is_left_and_ends(tmp_path):
    threads, live = set(threading.enumerate()), Live(tmp_path, 5)
    report = report_of(1, **{f"site-{k}": ClientReport() for k in range(10)})
    for client in report.clients.values():
        client.state = "training"
        live.progress(report)
    deadline = time.monotonic() + 60
    while states(tmp_path) != ["training"] * 10 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert states(tmp_path) == ["training"] * 10
    live.progress(report)
    live.close()
    while (left := set(threading.enumerate()) - threads) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


def test_what_those_that_only_score_are_sent_is_of_all_clients_of_the_round(tmp_path):
    """Four of ten train, and all score the last model: each is sent the model once, and four of them once more."""
    live = Live(tmp_path, 1)
    strategy = FedAvg(on_progress=live.progress, fraction_train=0.4)
    _, [report] = start(strategy, grid_of(10))
    live.end_round(report)
    live.close()
    assert len(report.asked) == 4 and len(report.clients) == 10
    assert report.record["travel_down"] == pytest.approx([1.4]) and report.record["travel_up"] == pytest.approx([1])
    for name, shares in read_now(tmp_path).travel.items():
        assert shares == pytest.approx(report.record[name]), name


def test_a_model_that_was_sent_to_be_scored_was_sent(tmp_path):
    """Who is to train it next is not sent it again."""
    _, reports = start(FedAvg(), grid_of(2), rounds=3)
    assert [report.record["travel_down"].tolist() for report in reports] == [[2], [1], [1]]


def test_a_disk_that_takes_nothing_is_said_once_and_stops_no_run(tmp_path, caplog):
    live = Live(tmp_path / "gone", 5)
    for number in (1, 2):
        live.end_round(report_of(number, a=ClientReport("replied")))
    live.model([Segment("model", OTHER, ("w",), 4)])
    said = [record.getMessage() for record in caplog.records]
    assert sum("now.json" in text for text in said) == 1
    assert all("The run continues without this file." in text for text in said)


def test_many_thousands_of_clients_do_not_slow_a_round(tmp_path, monkeypatch):
    """What is written seldom, the longer it takes: 20 times what it took lies between two writings."""
    now, took = [0.0], 0.5

    def slow(path, content):
        now[0] += took

    monkeypatch.setattr("tepal.records.live.write_whole", slow)
    live = Live(tmp_path, 5, clock=lambda: now[0], timer=Timers())
    before = time.monotonic()
    for _ in range(1000):
        live.progress(report_of(1))
        now[0] += 0.01
    assert now[0] - 10 == pytest.approx(took, abs=0.6) and time.monotonic() - before < 60
