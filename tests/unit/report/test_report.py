"""The report: read as a browser reads it (HTML parsed, each figure's JSON decoded), never compared as text."""

import json
import re
from html import unescape
from html.parser import HTMLParser
from itertools import accumulate

import pytest

from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import RunDirectory, read_label_counts
from tepal.report.run_page import write_report

CONFIG = {
    "strategy": "FedFrozen",
    "model": "vit_b_32",
    "dataset": "cifar10",
    "num-server-rounds": 20,
    "fedfrozen.warmup-rounds": 6,
}
FIGURES = ["accuracy-rounds", "accuracy-bytes", "loss-rounds", "loss-bytes", "bytes-rounds", "bytes-total"]


class Page(HTMLParser):
    """What a test wants to know of a page: tags with attributes, text, scripts, figures, tables."""

    VOID = ("meta", "link", "br", "img", "input", "hr")

    def __init__(self, path):
        super().__init__()
        self.tags, self.scripts, self.tables, self.definitions, self.open = [], [], [], [], []
        self.texts = {}
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == [], "an element is not closed"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        if tag == "table":
            self.tables.append([])
        if tag == "dt":
            self.definitions.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        inside = self.open[-1] if self.open else ""
        if inside == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = attributes, text + data
        elif inside in ("td", "th"):
            self.tables[-1][-1][-1] += data
        if inside in ("dt", "dd"):
            self.definitions[-1].append(data)
        if inside not in ("script", "style"):
            self.texts.setdefault(inside, []).append(data)

    @property
    def text(self):
        return " ".join(" ".join(" ".join(parts) for parts in self.texts.values()).split())

    @property
    def figures(self):
        return {a["data-for"]: json.loads(text) for a, text in self.scripts if "data-for" in a}

    def table(self, first_heading, second_heading):
        return next(t for t in self.tables if t[0][:2] == [first_heading, second_heading])

    @property
    def headlines(self):
        return {name: tuple(rest) for name, *rest in self.definitions}


def metrics_line(number, **changes):
    """Ten clients, a model of 1 MB of which 200 kB are query and key; frozen after round 6."""
    frozen = number > 6
    size = 800_000 if frozen else 1_000_000
    return {
        "round": number,
        "phase": "frozen" if frozen else "warm-up",
        "clients_asked": 10,
        "clients_replied": 10,
        "refused": [],
        "lost": [],
        "accuracy": 0.1 + 0.04 * number,
        "loss": 2.5 - 0.1 * number,
        "accuracy_of": "server",
        "train_loss": 2.4 - 0.1 * number,
        "learning_rate": 1e-4,
        "bytes_down": 10 * (1_000_000 if number == 7 else size),
        "bytes_up": 10 * size,
        "bytes_overhead": 1000,
        "bytes_fedavg": 20_000_000,
        "resent": 0,
        "seconds": 2.0,
        "seconds_train": 1.5,
        "step_seconds": 0.0123,
    } | changes


def report(tmp_path, lines, config=CONFIG, summary=True, **summary_values):
    run = RunDirectory.create(tmp_path, "FedFrozen", config)
    for line in lines:
        run.append(RoundRecord.from_line(line))
    if summary:
        run.write_summary(**summary_values)
    return Page(write_report(run.path))


@pytest.fixture(scope="module")
def rounds():
    return [{"round": 0, "accuracy": 0.1, "loss": 2.5, "accuracy_of": "server"}, *map(metrics_line, range(1, 21))]


@pytest.fixture(scope="module")
def page(tmp_path_factory, rounds):
    return report(tmp_path_factory.mktemp("runs"), rounds, parameters=250_000)


def trace(figure, name):
    return next(t for t in figure["data"] if t["name"] == name)


def test_title_and_headlines_say_what_ran_and_how_it_ended(page):
    assert page.texts["title"] == ["FedFrozen · vit_b_32 · cifar10"]
    assert page.texts["h1"] == ["FedFrozen"]
    down, up = 6 * 10 + 10 + 13 * 8, 6 * 10 + 14 * 8  # MB
    assert page.headlines == {
        "Final accuracy": ("90.00 %", "server's test data, round 20"),
        "Transferred bytes": (f"{down + up} MB", f"{down} MB down, {up} MB up"),
        "Relative to FedAvg": (f"{(down + up) / 400:.4f}", "FedAvg would transfer 400 MB"),
        "Rounds": ("20", "of 20 planned"),
        "Time": ("40.0 s", "30.0 s of it training"),
        "Refused replies": ("0", "none lost"),
    }


def test_every_figure_is_drawn_with_caption_and_spoken_description(page):
    assert list(page.figures) == FIGURES
    shown = {a["id"]: a for tag, a in page.tags if tag == "div" and a.get("role") == "group"}
    assert list(shown) == FIGURES
    assert "from 0.1 to 0.9" in shown["accuracy-rounds"]["aria-label"]
    assert len(page.texts["figcaption"]) == 6
    assert all(len(caption) > 20 for caption in page.texts["figcaption"])


@pytest.mark.parametrize(("key", "name"), [("accuracy", "server's test data"), ("loss", "loss, server's test data")])
def test_scores_stand_over_rounds_and_over_bytes(page, rounds, key, name):
    by_round, by_byte = (trace(page.figures[f"{key}-{axis}"], name) for axis in ("rounds", "bytes"))
    assert by_round["x"] == list(range(21))
    assert by_round["y"] == by_byte["y"] == [line[key] for line in rounds]
    megabytes = [0, *accumulate((line["bytes_down"] + line["bytes_up"]) / 1e6 for line in rounds[1:])]
    assert by_byte["x"] == pytest.approx(megabytes)
    assert by_byte["customdata"] == list(range(21))
    assert "(MB)" in page.figures[f"{key}-bytes"]["layout"]["xaxis"]["title"]["text"]


def test_training_loss_has_its_own_curve(page, rounds):
    curve = trace(page.figures["loss-rounds"], "training loss")
    assert curve["x"] == list(range(1, 21))
    assert curve["y"] == [line["train_loss"] for line in rounds[1:]]


def test_bytes_per_round_are_stacked_under_fedavgs_line(page):
    figure = page.figures["bytes-rounds"]
    assert figure["layout"]["barmode"] == "stack"
    assert trace(figure, "down, to clients")["y"] == [10] * 7 + [8] * 13
    assert trace(figure, "up, from clients")["y"] == [10] * 6 + [8] * 14
    fedavg = trace(figure, "FedAvg, calculated")
    assert (fedavg["type"], fedavg["x"], fedavg["y"]) == ("scatter", list(range(1, 21)), [20] * 20)
    low, high = figure["layout"]["yaxis"]["range"]
    assert low == 0 and high > 20


def test_bytes_in_total_stand_beside_fedavgs(page):
    figure = page.figures["bytes-total"]
    assert trace(figure, "FedAvg")["y"] == [20 * number for number in range(21)]
    assert trace(figure, "this run")["y"][-1] == 346


def test_the_freeze_is_marked_in_every_figure(page):
    # 6 warm-up rounds of 20 MB each.
    where = dict.fromkeys(FIGURES, 6) | {"accuracy-bytes": 120, "loss-bytes": 120, "bytes-rounds": 6.5}
    for key, figure in page.figures.items():
        (line,), (label,) = figure["layout"]["shapes"], figure["layout"]["annotations"]
        assert line["type"] == "line" and line["x0"] == line["x1"] == pytest.approx(where[key])
        assert label["text"] == "query/key frozen after round 6"
        assert label["x"] == line["x0"]


def test_a_run_that_freezes_at_once_says_so(tmp_path):
    page = report(tmp_path, [metrics_line(n, phase="frozen") for n in (1, 2)])
    for key, figure in page.figures.items():
        assert figure["layout"]["shapes"][0]["x0"] == (0.5 if key == "bytes-rounds" else 0)
        assert figure["layout"]["annotations"][0]["text"] == "query/key frozen from the start"


@pytest.mark.parametrize("summary", [{}, {"frozen_after": None}, {"frozen_after": 6}])
def test_a_run_that_never_came_to_its_freeze_has_no_mark(tmp_path, summary):
    page = report(tmp_path, [metrics_line(n) for n in (1, 2, 3)], **summary)
    assert all("shapes" not in figure["layout"] for figure in page.figures.values())


def test_the_summary_can_state_the_freeze_where_phases_do_not(tmp_path):
    page = report(tmp_path, [metrics_line(n, phase="train") for n in range(1, 5)], frozen_after=2)
    assert page.figures["accuracy-rounds"]["layout"]["shapes"][0]["x0"] == 2


def test_accuracies_of_different_test_data_are_different_curves(tmp_path):
    lines = [metrics_line(1, accuracy_of="clients"), metrics_line(2, accuracy_of="clients"), metrics_line(3)]
    page = report(tmp_path, lines)
    figure = page.figures["accuracy-rounds"]
    assert trace(figure, "clients' test data")["x"] == [1, 2]
    assert trace(figure, "server's test data")["x"] == [3]
    assert "weighted by their sizes" in page.texts["figcaption"][0]
    assert "held-out" in page.texts["figcaption"][0]


def test_the_labels_at_the_clients_are_a_figure_where_clients_tell_them(tmp_path):
    page = report(tmp_path, [metrics_line(0), metrics_line(1)])
    assert list(page.figures) == FIGURES
    run = tmp_path / "latest"
    counts = {"client-10": [1, 3], "client-2": [0, 8], "client-1": [4]}
    directory = RunDirectory.resume(run)
    directory.add_label_counts({"client-10": (1.0, 3.0), "client-2": (5.0, 5.0)})
    directory.add_label_counts({"client-2": (0.0, 8.0), "client-1": (4.0,)})
    assert read_label_counts(run) == counts
    figure = Page(write_report(run)).figures["labels"]["data"][0]
    assert figure["y"] == ["client-1", "client-2", "client-10"]
    assert figure["z"] == [[1, 0], [0, 1], [1 / 4, 3 / 4]]
    assert figure["customdata"] == [[4, 0], [0, 8], [1, 3]]


def test_nothing_in_the_page_asks_the_network(page):
    addresses = [
        (tag, name, value)
        for tag, attributes in page.tags
        for name, value in attributes.items()
        if name in ("src", "href", "srcset", "data", "action", "poster", "background", "ping", "formaction")
    ]
    assert addresses == []
    assert not [tag for tag, _ in page.tags if tag in ("link", "iframe", "object", "embed", "base", "img", "form")]
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert directives["default-src"] == "'none'"
    assert not re.search(r"https?:|\*", policy)


def test_the_style_loads_nothing(tmp_path):
    run = RunDirectory.create(tmp_path, "a", CONFIG)
    styles = re.findall(r"<style>(.*?)</style>", write_report(run.path).read_text(), re.S)
    assert len(styles) == 1
    assert not re.search(r"url\(|@import|https?:", styles[0])
    assert "prefers-color-scheme: dark" in styles[0]


def test_plotly_is_in_the_page_once_and_without_its_cloud(page):
    plotly = [text for _, text in page.scripts if "plotly.js v" in text[:200]]
    assert len(plotly) == 1
    own = page.scripts[-1][1]
    assert "Plotly.react" in own
    assert "displaylogo: false" in own
    assert "plotlyServerURL: ''" in own


def test_names_from_the_run_are_shown_and_never_run(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x onerror='alert(2)'>&\"'"
    config = {"strategy": evil, "model": evil, "dataset": evil, evil: evil}
    refused = [{"client": evil, "reason": evil}]
    line = metrics_line(1, phase=evil, accuracy_of=evil, refused=refused, lost=[{"client": evil, "reason": evil}])
    page = report(tmp_path, [line], config=config)
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert not [a for _, a in page.tags if any(name.startswith("on") for name in a)]
    # One script with data a figure, plotly, and the page's own.
    assert len(page.scripts) == 6 + 2
    assert page.texts["h1"] == [evil]
    assert page.table("round", "client")[1:] == [["1", evil, "refused", evil], ["1", evil, "lost", evil]]
    assert page.table("key", "value")[-1] == [evil, evil]
    # plotly reads markup in a legend, so it is escaped there, too
    name = page.figures["accuracy-rounds"]["data"][0]["name"]
    assert "<" not in name and evil.startswith(unescape(name).removesuffix("…"))


def test_refused_and_lost_replies_are_listed_by_round(tmp_path):
    lines = [
        metrics_line(1, lost=[{"client": "client-4", "reason": "error 2"}], clients_replied=9),
        metrics_line(2, refused=[{"client": "client-3", "reason": "entry 'w' holds NaN"}]),
        metrics_line(
            3, lost=[{"client": "client-4", "reason": "after 30 s"}], refused=[{"client": "client-1", "reason": None}]
        ),
    ]
    page = report(tmp_path, lines)
    assert page.table("round", "client")[1:] == [
        ["1", "client-4", "lost", "error 2"],
        ["2", "client-3", "refused", "entry 'w' holds NaN"],
        ["3", "client-1", "refused", "no reason given"],
        ["3", "client-4", "lost", "after 30 s"],
    ]
    assert page.headlines["Refused replies"] == ("2", "2 more lost")


def test_a_run_without_trouble_has_no_table_of_it(page):
    assert "Incidents" not in page.text


def test_figures_of_some_tasks_are_in_the_table_where_there_are_some(tmp_path, page):
    assert "perplexity" not in page.text and "macro-F1" not in page.text
    told = report(tmp_path, [metrics_line(1, perplexity=12.3456), metrics_line(2, perplexity=11.0)])
    assert told.table("round", "phase")[1][-1] and "perplexity" in told.text and "12.35" in told.text
    assert "macro-F1" not in told.text


def test_a_regression_has_its_error_where_others_have_their_accuracy(tmp_path):
    lines = [metrics_line(n, accuracy=None, rmse=0.5 / (n + 1), loss=0.25 / (n + 1) ** 2) for n in range(3)]
    told = report(tmp_path, lines)
    assert told.headlines["Final RMSE"] == ("0.1667", "server's test data, round 2")
    assert told.figures["rmse-rounds"]["data"][0]["y"] == pytest.approx([0.5, 0.25, 0.5 / 3])
    assert "RMSE" in told.table("round", "phase")[0] and "ccuracy" not in told.text


def test_every_round_is_in_a_table(page):
    table = page.table("round", "phase")
    assert [row[0] for row in table[1:]] == [str(n) for n in range(21)]
    row = dict(zip(table[0], table[8], strict=True))
    assert (row["round"], row["phase"], row["accuracy"], row["down (bytes)"], row["up (bytes)"]) == (
        "7",
        "frozen",
        "0.3800",
        "10.0 MB",
        "8.00 MB",
    )
    assert row["local step"] == "12.3 ms"
    assert all(a.get("scope") == "col" for tag, a in page.tags if tag == "th")


def test_the_config_is_folded_and_whole(page):
    assert page.table("key", "value")[1:] == [[key, str(value)] for key, value in CONFIG.items()]
    details = [a for tag, a in page.tags if tag == "details"]
    assert details and not any("open" in a for a in details)


def test_the_page_says_where_its_bytes_come_from(page):
    assert "measured at the exchange" in page.text
    assert "21.0 kB" not in page.text and "20.0 kB in this run" in page.text


def test_unknown_scores_are_said_and_not_drawn(tmp_path):
    page = report(tmp_path, [metrics_line(n, accuracy=None, loss=None, train_loss=None) for n in (1, 2)])
    assert list(page.figures) == ["bytes-rounds", "bytes-total"]
    assert page.headlines["Final accuracy"] == ("unknown", "no round reported one")
    assert "No accuracy is known" in page.text
    assert "No loss is known" in page.text


def test_unknown_bytes_are_said_and_not_drawn(tmp_path):
    page = report(tmp_path, [metrics_line(n, bytes_down=None, bytes_up=None, bytes_fedavg=None) for n in (1, 2)])
    assert list(page.figures) == ["accuracy-rounds", "loss-rounds"]
    assert page.headlines["Transferred bytes"][0] == "unknown"
    assert page.headlines["Relative to FedAvg"] == ("unknown", "FedAvg's bytes are not known")


def test_what_an_encoding_leaves_is_drawn_where_there_is_one(tmp_path):
    plain = {1: 40, 2: None, 3: 200}
    lines = [metrics_line(n, bytes_down=6, bytes_up=4, bytes_plain=of) for n, of in plain.items()]
    drawn = trace(report(tmp_path, lines).figures["encoded-rounds"], "this run")
    assert (drawn["x"], drawn["y"]) == ([1, 3], [0.25, 0.05])


def test_without_an_encoding_there_is_no_figure_of_one(tmp_path):
    page = report(tmp_path, [metrics_line(n, bytes_down=6, bytes_up=4, bytes_plain=10) for n in (1, 2)])
    assert "encoded-rounds" not in page.figures


def test_what_auto_left_out_and_the_budget_are_drawn_beside_the_bytes(tmp_path):
    left_out = {"wire_left_out_up": 0.5}
    budget = {"wire_budget": 9_000_000, "wire_budget_down": 0, "wire_budget_up": 3_000_000}
    lines = [metrics_line(1, **left_out, **budget), metrics_line(2, **left_out, wire_left_out_down=0.75, **budget)]
    page = report(tmp_path, lines)
    drawn = page.figures["left-out-rounds"]
    assert {name: (trace(drawn, name)["x"], trace(drawn, name)["y"]) for name in ("down", "up")} == {
        "down": ([2], [0.75]), "up": ([1, 2], [0.5, 0.5]),
    }  # fmt: skip
    drawn = page.figures["budget-rounds"]
    assert {name: trace(drawn, name)["y"] for name in ("down", "up", "budget")} == {
        "down": [0, 0], "up": [3, 3], "budget": [9, 9],
    }  # fmt: skip
    assert all(heading in page.text for heading in ("norm left out, down", "norm left out, up", "budget (bytes)"))


def test_without_auto_there_is_neither_figure_nor_column_of_it(tmp_path):
    page = report(tmp_path, [metrics_line(1)])
    assert not {"left-out-rounds", "budget-rounds"} & page.figures.keys() and "norm left out" not in page.text


def test_without_fedavgs_bytes_there_is_no_comparison(tmp_path):
    page = report(tmp_path, [metrics_line(n, bytes_fedavg=None) for n in (1, 2)])
    assert [t["name"] for t in page.figures["bytes-total"]["data"]] == ["this run"]
    assert "no comparison" in page.text
    assert page.headlines["Transferred bytes"][0] == "40.0 MB"


def test_bytes_after_an_unknown_round_are_not_made_up(tmp_path):
    page = report(tmp_path, [metrics_line(1), metrics_line(2, bytes_up=None), metrics_line(3)])
    assert trace(page.figures["bytes-total"], "this run")["y"] == [20, None, None]
    assert trace(page.figures["accuracy-bytes"], "server's test data")["x"] == [20]
    assert trace(page.figures["accuracy-rounds"], "server's test data")["x"] == [1, 2, 3]


@pytest.mark.parametrize("size", [50, 5_000, 5_000_000, 50_000_000_000])
def test_a_model_of_any_size_is_drawn_in_units_that_can_be_read(tmp_path, size):
    page = report(tmp_path, [metrics_line(1, bytes_down=size, bytes_up=size, bytes_fedavg=2 * size)])
    figure = page.figures["bytes-rounds"]
    title = figure["layout"]["yaxis"]["title"]["text"]
    unit = {"payload (kB)": 1e3, "payload (MB)": 1e6, "payload (GB)": 1e9}[title]
    assert trace(figure, "up, from clients")["y"] == [size / unit]


def test_a_run_that_is_not_over_says_so(tmp_path):
    page = report(tmp_path, [metrics_line(1), metrics_line(2)], summary=False)
    assert "has no summary yet" in page.text and "2 of 20 rounds" in page.text
    assert page.headlines["Latest accuracy"][0] == "18.00 %"
    assert len(page.figures) == 6


def test_a_run_that_ended_early_says_so(tmp_path):
    page = report(tmp_path, [metrics_line(1), metrics_line(2)])
    assert "This run ended after round 2 of 20." in page.text


@pytest.mark.parametrize("planned", [3, 20])
def test_a_run_that_failed_says_in_which_round_and_why(tmp_path, planned):
    """The line of the round that failed is the last one, and this round has not ended, also if it is the last."""
    failed = metrics_line(3, clients_replied=0, accuracy=None, loss=None, train_loss=None)
    reason = "round 3 got fewer than min_replies=2 good replies in 3 attempts. <b>site-1</b>: no memory left"
    lines, config = [metrics_line(1), metrics_line(2), failed], {**CONFIG, "num-server-rounds": planned}
    page = report(tmp_path, lines, config, stopped_by=reason)
    assert f"This run failed in round 3: {reason}" in page.text and "b" not in page.texts
    assert f"This run ended after round 2 of {planned}." in page.text
    assert page.headlines["Rounds"] == ("2", f"of {planned} planned")


def test_a_run_that_did_not_fail_does_not_say_so(tmp_path, page):
    early = report(tmp_path, [metrics_line(1)])
    assert "failed" not in page.text and "failed" not in early.text


def test_a_run_that_has_only_begun_has_an_honest_report(tmp_path):
    page = report(tmp_path, [], summary=False)
    assert page.figures == {}
    assert "No round of this run has ended yet" in page.text
    assert page.headlines["Rounds"] == ("0", "of 20 planned")
    assert page.headlines["Time"] == ("0.0 s",)


def test_a_torn_last_line_costs_only_that_round(tmp_path):
    run = RunDirectory.create(tmp_path, "FedFrozen", CONFIG)
    run.append(RoundRecord.from_line(metrics_line(1)))
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"round": 2, "accura')
    page = Page(write_report(run.path))
    assert trace(page.figures["bytes-total"], "this run")["x"] == [1]


def test_the_score_of_the_final_model_may_come_after_the_last_round(tmp_path):
    page = report(tmp_path, [metrics_line(1, accuracy_of="clients")], accuracy=0.77)
    assert page.headlines["Final accuracy"] == ("77.00 %", "of the final model")


def test_the_report_is_found_through_latest_and_replaced(tmp_path):
    run = RunDirectory.create(tmp_path, "FedFrozen", CONFIG)
    first = write_report(tmp_path / "latest")
    assert first == run.path.resolve() / "report.html"
    run.append(RoundRecord.from_line(metrics_line(1)))
    assert len(Page(write_report(tmp_path / "latest")).figures) == 6
    assert sorted(p.name for p in run.path.iterdir()) == ["config.toml", "metrics.jsonl", "report.html"]


def test_no_report_is_made_of_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        write_report(tmp_path)
