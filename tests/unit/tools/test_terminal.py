"""What a run shows in the terminal, in a pipe, and while its metrics file is still growing."""

import io
import json
import threading
from pathlib import Path

import pytest
from rich.console import Console

from tepal.host.text import visible_lines
from tepal.records.columns import bytes_text, seconds_text, step_text
from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import write_whole
from tepal.tools.terminal import RoundProgress, final_table, follow_metrics

LINE = {
    "round": 3,
    "phase": "warm-up",
    "clients_asked": 10,
    "clients_replied": 10,
    "refused": [],
    "lost": [],
    "accuracy": 0.8312,
    "loss": 0.41,
    "bytes_down": 500_000,
    "bytes_up": 250_000,
    "bytes_fedavg": 1_000_000,
    "bytes_fedavg_down": 600_000,
    "seconds": 1.7,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (None, "unknown"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_996, "10.0 kB"),
        (99_960, "100 kB"),
        (999_499, "999 kB"),
        (999_999, "1.00 MB"),
        (41_234_567, "41.2 MB"),
        (1_050_000_000, "1.05 GB"),
        (2.5e12, "2.50 TB"),
        (3e15, "3.00 PB"),
        (5e18, "5,000 PB"),
    ],
)
def test_bytes_are_written_in_decimal_units_with_three_figures(n, text):
    assert bytes_text(n) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "unknown"), (0, "0.0 s"), (59.94, "59.9 s"), (59.96, "1:00 min"), (125, "2:05 min"), (3725, "1:02:05 h")],
)
def test_durations_are_written_for_people(seconds, text):
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "unknown"), (0.0005, "0.5 ms"), (0.01234, "12.3 ms"), (0.9999, "1.0 s"), (75, "1:15 min")],
)
def test_a_local_step_is_written_in_milliseconds(seconds, text):
    assert step_text(seconds) == text


def test_a_pipe_gets_one_plain_line_a_round(monkeypatch):
    # Build servers set this; a log file must stay plain all the same.
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    with RoundProgress(20, console=Console(file=out, width=40)) as progress:
        progress.update(RoundRecord(round=0, accuracy=0.1))
        progress.update(RoundRecord.from_line(LINE))
        progress.update(
            RoundRecord.from_line({**LINE, "round": 4, "phase": "frozen", "accuracy": None, "seconds": 60.0})
        )
    assert out.getvalue().splitlines()[1:] == [
        "round 3/20  warm-up  accuracy 0.8312  loss 0.4100  750 kB transferred  1.7 s",
        "round 4/20  frozen  loss 0.4100  1.50 MB transferred  1:02 min",
    ]
    assert out.getvalue().splitlines()[0].startswith("round 0/20  initial model  accuracy 0.1000  0 B transferred")


def test_a_regression_shows_its_error():
    out = io.StringIO()
    with RoundProgress(20, console=Console(file=out, width=40)) as progress:
        progress.update(RoundRecord.from_line({**LINE, "accuracy": None, "rmse": 0.6403}))
        progress.update(RoundRecord.from_line({**LINE, "accuracy": None, "loss": None, "received_rmse": 0.5}))
    first, second = out.getvalue().splitlines()
    assert first == "round 3/20  warm-up  rmse 0.6403  loss 0.4100  750 kB transferred  1.7 s"
    assert "rmse before 0.5000" in second
    table = shown({"rounds": 3, "accuracy": None, "rmse": 0.6403, "loss": 0.41}, [LINE])
    assert "accuracy" not in table and cells(table, "rmse")[1] == "0.6403"


def test_refused_and_lost_replies_are_named_and_not_taken_for_markup():
    out = io.StringIO()
    refused = [{"client": "client-3", "reason": "shape [2, 3]; expected [bold]"}]
    with RoundProgress(20, console=Console(file=out)) as progress:
        lost = [{"client": client, "reason": "x"} for client in ("client-4", "client-5")]
        progress.update(RoundRecord.from_line({**LINE, "refused": refused, "lost": lost}))
    line = out.getvalue()
    assert "refused 1 (client-3: shape [2, 3]; expected [bold])" in line
    assert "no reply from client-4, client-5" in line


def test_what_was_late_left_out_or_got_over_is_named():
    out = io.StringIO()
    with RoundProgress(20, console=Console(file=out)) as progress:
        late, left_out = [{"client": "client-4", "reason": "x"}], [{"client": "client-5", "reason": "x"}]
        notes = [{"client": "server", "reason": "no checkpoint of round 2 could be written"}]
        progress.update(RoundRecord.from_line({**LINE, "late": late, "left_out": left_out, "notes": notes}))
    line = out.getvalue()
    for part in ("late and dropped: client-4", "left out: client-5", "server: no checkpoint of round 2 could be"):
        assert part in line


def test_bytes_so_far_are_unknown_once_a_round_does_not_know_its_own():
    out = io.StringIO()
    with RoundProgress(20, console=Console(file=out)) as progress:
        progress.update(RoundRecord.from_line(LINE))
        progress.update(RoundRecord.from_line({**LINE, "round": 4, "bytes_up": None}))
        progress.update(RoundRecord.from_line({**LINE, "round": 5}))
    assert [("unknown transferred" in line) for line in out.getvalue().splitlines()] == [False, True, True]


def test_a_terminal_gets_a_bar_with_the_round_and_its_figures(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with RoundProgress(20, console=Console(file=out, width=100)) as progress:
        progress.update(RoundRecord.from_line({**LINE, "refused": [{"client": "client-3", "reason": "[red]NaN"}]}))
    written = out.getvalue()
    for part in ("round 3/20 warm-up", "accuracy 0.8312", "750 kB transferred", "client-3: [red]NaN"):
        assert part in written
    assert "\x1b[?25h" in written  # the cursor is given back


def test_following_a_run_yields_each_round_once_and_waits_for_whole_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    steps = iter(
        [
            lambda: None,  # not there yet
            lambda: path.write_bytes(b'{"round": 1}\n{"rou'),
            lambda: path.open("ab").write(b'nd": 2}'),
            lambda: path.open("ab").write(b"\n"),
            lambda: None,
        ]
    )
    seen_at = []
    rounds = []

    def stop():
        seen_at.append(list(rounds))
        step = next(steps, None)
        if step is None:
            return True
        step()
        return False

    for line in follow_metrics(path, stop, poll=0):
        rounds.append(line.round)
    assert rounds == [1, 2]
    assert seen_at == [[], [], [1], [1], [1, 2], [1, 2]]


def test_following_reads_what_was_written_just_before_the_end(tmp_path):
    path = tmp_path / "metrics.jsonl"

    def stop():
        path.write_text('{"round": 1}\n{"round": 2}\n{"torn')
        return True

    assert [line.round for line in follow_metrics(path, stop)] == [1, 2]


def test_following_a_file_that_a_resumed_run_replaces_tells_no_round_twice(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"round": 1}\n{"round": 2}\n{"round": 3}\n')

    def replace():
        write_whole(path, b'{"round": 1}\n')
        with path.open("a") as file:  # longer than before
            file.write('{"round": 2, "accuracy": 0.5, "loss": 0.25}\n')

    steps = iter([lambda: None, replace])

    def stop():
        step = next(steps, None)
        if step is not None:
            step()
        return step is None

    followed = [(line.round, line.accuracy) for line in follow_metrics(path, stop, poll=0)]
    assert followed == [(1, None), (2, None), (3, None), (2, 0.5)]


def test_following_another_thread_that_writes(tmp_path):
    path = tmp_path / "metrics.jsonl"
    done = threading.Event()

    def write():
        with path.open("w") as file:
            for number in range(1, 201):
                for character in json.dumps({"round": number}) + "\n":
                    file.write(character)
                    file.flush()
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    rounds = [line.round for line in follow_metrics(path, done.is_set, poll=0.001)]
    writer.join()
    assert rounds == list(range(1, 201))


def test_following_says_which_line_is_no_round(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"accuracy": 1}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl.*accuracy"):
        list(follow_metrics(path, lambda: True))


def shown(summary, metrics, run=None):
    out = io.StringIO()
    Console(file=out, width=60).print(
        final_table(summary, [RoundRecord.from_line(line) for line in metrics], run), soft_wrap=True
    )
    return out.getvalue()


def cells(text, name):
    row = next(line for line in text.splitlines() if name in line)
    return [cell.strip() for cell in row.strip("│ ").split("│")]


SUMMARY = {
    "strategy": "fedfrozen",
    "model": "vit_b_32",
    "rounds": 2,
    "accuracy": 0.8312,
    "loss": 0.41,
    "bytes_down": 1_000_000,
    "bytes_up": 500_000,
    "bytes_vs_fedavg": 0.75,
    "seconds": 3.4,
    "refused_replies": 1,
}


def test_the_final_table_puts_the_run_beside_fedavg():
    text = shown(SUMMARY, [LINE, {**LINE, "round": 4}])
    assert cells(text, "bytes down") == ["bytes down", "1.00 MB", "1.20 MB", "0.8333"]
    assert cells(text, "bytes up") == ["bytes up", "500 kB", "800 kB", "0.6250"]
    assert cells(text, "in total") == ["bytes in total", "1.50 MB", "2.00 MB", "0.7500"]
    assert cells(text, "accuracy")[1] == "0.8312"
    assert cells(text, "refused")[1] == "1"


def test_the_final_table_tells_what_the_strategy_saves_from_what_the_encoding_saves():
    text = shown({**SUMMARY, "bytes_plain": 1_600_000}, [LINE, {**LINE, "round": 4}])
    assert cells(text, "by the strategy")[-1] == "0.8000" and cells(text, "by the encoding")[-1] == "0.9375"
    for plain in (1_500_000, None):
        assert "by the strategy" not in shown({**SUMMARY, "bytes_plain": plain}, [LINE, {**LINE, "round": 4}])


def test_the_final_table_says_what_is_not_known():
    text = shown(dict.fromkeys(SUMMARY), [{**LINE, "bytes_fedavg": None}])
    assert cells(text, "in total") == ["bytes in total", "unknown", "–", "–"]
    assert cells(text, "accuracy")[1] == "unknown"


def test_the_final_table_ends_with_the_paths_of_what_is_there_unbroken(tmp_path):
    run = tmp_path / ("a-long-folder-name-" * 5) / "20261120-101500-fedfrozen"
    run.mkdir(parents=True)
    (run / "report.html").touch()
    (run / "metrics.jsonl").touch()
    lines = shown(SUMMARY, [LINE], run).splitlines()
    assert f"Results in {run}" in lines
    assert any(str(run / "report.html") in line for line in lines)
    assert not any("model.safetensors" in line for line in lines)
    assert Path(lines[-1].strip()) == run / "metrics.jsonl"


def test_printed_without_soft_wrap_long_paths_are_folded_and_not_cut(tmp_path):
    run = tmp_path / ("x" * 100)
    out = io.StringIO()
    Console(file=out, width=60).print(final_table(SUMMARY, [RoundRecord.from_line(LINE)], run))
    assert str(run) in out.getvalue().replace("\n", "")


def test_what_goes_on_before_the_first_round_is_said():
    out = io.StringIO()
    with RoundProgress(3, console=Console(file=out)) as progress:
        progress.stage("Starting a SuperLink ...")
    assert out.getvalue() == "Starting a SuperLink ...\n"


def test_a_reason_that_many_clients_give_is_said_once():
    out = io.StringIO()
    with RoundProgress(3, console=Console(file=out)) as progress:
        refused = [{"client": f"client-{k}", "reason": "no images" if k else "NaN"} for k in range(3)]
        progress.update(RoundRecord.from_line({**LINE, "refused": refused}))
    assert "refused 3 (client-0: NaN; client-1, client-2: no images)" in out.getvalue()


@pytest.mark.parametrize("terminal", [io.StringIO, Terminal])
def test_names_and_reasons_of_clients_forge_no_line_and_move_no_cursor(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    evil = "site-1\nround 4/4  accuracy 0.9999\x1b]0;title\x07\x1b[2J\0\u202e"
    many = [{"client": f"{evil}{k}", "reason": f"{evil}{k}" + "x" * 5000} for k in range(500)]
    file = terminal()
    with RoundProgress(4, console=Console(file=file, width=200, color_system=None)) as progress:
        progress.stage(evil)
        progress.update(RoundRecord.from_line({**LINE, "phase": evil, "refused": many, "lost": many, "notes": many}))
    text = file.getvalue()
    for hostile in ("\x1b]0;", "\x1b[2J", "\x07", "\0", "\u202e", "\nround 4/4  accuracy 0.9999"):
        assert hostile not in text, hostile
    assert r"site-1\nround 4/4" in text.replace("\n", "") and "and 490 more" in text and "and 480 more" in text
    assert len(text) < 60_000


def test_the_final_table_and_messages_show_control_characters():
    file = io.StringIO()
    Console(file=file, width=120).print(final_table({"strategy": "a\nb\x1b[2J", "model": "\u202e"}, []))
    assert r"a\nb\x1b[2J · \u202e" in file.getvalue() and "\x1b[2J" not in file.getvalue()
    assert visible_lines("a\x1bb\nc\rd") == "a\\x1bb\nc\\rd"
    assert visible_lines("a:\n  b \n\x1b c") == "a:\n  b\\x20\n\\x1b c"
    assert visible_lines("\n" * 1000).splitlines()[-1] == "… and 801 more lines"
