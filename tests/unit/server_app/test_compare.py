"""The comparison of strategies: its figures by hand, its page and picture as a reader gets them, and runs that fail."""

import csv
import io
import json
import re
import runpy
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tepal.server_app import commands
from tepal.server_app.compare import (
    LOOKS,
    STRATEGIES,
    Entry,
    comparison_table,
    draw,
    measured,
    new_folder,
    read_comparison,
    target_accuracy,
    write_comparison,
)
from tepal.server_app.flower import RunError
from tepal.server_app.run_directory import KEPT_IN, RunDirectory, find_run, read_config
from tepal.server_app.terminal import TimeLeft

ROOT = Path(__file__).resolve().parents[3]
SVG = "{http://www.w3.org/2000/svg}"

# Accuracy after each round, the initial model first, and MB down and up in each. Three rounds.
RUNS = {
    "fedavg": ([0.1, 0.5, 0.7, 0.8], (10, 10)),
    "fedfrozen": ([0.1, 0.4, 0.73, 0.71], (8, 6)),
    "selective": ([0.1, 0.3, 0.6, 0.7], (6, 4)),
    "fedensemble": ([0.1, 0.3, 0.5, 0.6], (10, 10)),
    "fedacs": ([None, 0.85, 0.9, 0.95], (5, 5)),
}


def leave_run(folder, strategy, rounds=3, summary=True, config=None):
    """A run directory as a run of this strategy leaves it, or one that got only so far."""
    shared = {"model": "tiny-vit", "dataset": "digits", "num-server-rounds": 3, "seed": 7}
    run = RunDirectory.create(folder, strategy, config or {**shared, "strategy": strategy})
    accuracies, (down, up) = RUNS[strategy]
    personal = strategy == "fedacs"
    for number, accuracy in list(enumerate(accuracies))[: rounds + 1]:
        if number == 0 and personal:
            continue
        scored = personal or number == 3
        run.append(
            {
                "round": number,
                "accuracy": accuracy,
                "accuracy_of": "personal" if personal else "server",
                "clients_accuracy": accuracy - 0.05 if scored else None,
                "clients_spread": 0.02 if scored else None,
                "bytes_down": down * 1_000_000 if number else 0,
                "bytes_up": up * 1_000_000 if number else 0,
                "bytes_fedavg": 20_000_000 if number else 0,
                "seconds": 2.0 if number else 0.0,
            }
        )
    if summary:
        run.write_summary()
    return run.path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Four strategies that finished, and one that failed in its first round."""
    folder = new_folder(tmp_path_factory.mktemp("runs"))
    entries = [Entry(name, leave_run(folder, name), "finished") for name in RUNS if name != "selective"]
    failed = leave_run(folder, "selective", rounds=0, summary=False)
    entries.insert(2, Entry("selective", failed, "failed", "The run failed: <no> memory"))
    write_comparison(folder, entries)
    return folder


@pytest.fixture(scope="module")
def entries(folder):
    return read_comparison(folder)


def rows_of_csv(folder):
    with (folder / "comparison.csv").open(newline="") as file:
        return {row["strategy"]: row for row in csv.DictReader(file)}


def shown(folder, entries, width=80):
    out = io.StringIO()
    Console(file=out, width=width).print(comparison_table(folder, entries), soft_wrap=True)
    return out.getvalue()


# --- figures --------------------------------------------------------------------------------------------------------


def test_the_table_has_every_figure_of_every_strategy(folder, entries):
    text = shown(folder, entries)
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in text.splitlines() if line.split()}
    # 90 % of FedAvg's 0.8 is 0.72: FedAvg has it after its third round, FedFrozen after its second, Fed-ensemble never.
    assert rows["fedavg"] == "0.8000 0.7500 ±0.0200 30.0 MB 30.0 MB 1.0000 60.0 MB 6.0 s"
    assert rows["fedfrozen"] == "0.7100 0.6600 ±0.0200 24.0 MB 18.0 MB 0.7000 28.0 MB 6.0 s"
    assert rows["fedensemble"] == "0.6000 0.5500 ±0.0200 30.0 MB 30.0 MB 1.0000 — 6.0 s"
    assert rows["fedacs"] == "— 0.9000 ±0.0200 15.0 MB 15.0 MB 0.5000 — 6.0 s"
    assert "90% of fedavg's final accuracy on the server's data" in text


def test_the_table_fits_a_terminal_and_ends_with_whole_paths(folder, entries):
    lines = shown(folder, entries).splitlines()
    table = lines[: next(n for n, line in enumerate(lines) if line.startswith("selective: "))]
    assert max(map(len, table)) <= 80
    assert f"  {folder / 'comparison.html'}  (open it in a browser)" in lines
    assert all(f"  {folder / name}" in lines for name in ("comparison.csv", "comparison.svg"))


def test_a_failed_run_is_in_the_table_with_its_reason(folder, entries):
    text = shown(folder, entries)
    row = text.splitlines().index(next(line for line in text.splitlines() if line.startswith("selective")))
    assert text.splitlines()[row + 1].strip() == "failed"
    assert "selective: failed after round 0 of 3: The run failed: <no> memory" in text


def test_the_csv_has_the_measured_figures_unrounded(folder):
    rows = rows_of_csv(folder)
    assert list(rows) == ["fedavg", "fedfrozen", "selective", "fedensemble", "fedacs"]
    frozen = rows["fedfrozen"]
    assert float(frozen["server_accuracy"]) == 0.71 and float(frozen["clients_accuracy"]) == 0.71 - 0.05
    assert (float(frozen["bytes_down"]), float(frozen["bytes_up"])) == (24e6, 18e6)
    assert float(frozen["target_accuracy"]) == pytest.approx(0.72)
    assert float(frozen["bytes_until_target"]) == 28e6
    assert rows["fedacs"]["server_accuracy"] == "" == rows["fedacs"]["bytes_until_target"]
    assert (rows["selective"]["outcome"], rows["selective"]["reason"]) == ("failed", "The run failed: <no> memory")
    assert (folder / frozen["run"] / "metrics.jsonl").is_file()


def test_without_fedavg_the_target_is_of_the_first_that_finished_with_an_accuracy(folder, entries):
    results = {entry.strategy: measured(entry) for entry in entries}
    some = [results[name] for name in ("fedacs", "selective", "fedfrozen", "fedensemble")]
    accuracy, of = target_accuracy(some)
    assert (accuracy, of) == (pytest.approx(0.9 * 0.71), "fedfrozen")
    assert target_accuracy([*some, results["fedavg"]])[1] == "fedavg"
    assert target_accuracy([results["fedacs"], results["selective"]]) is None


def test_an_earlier_models_score_on_the_clients_is_not_the_results(tmp_path):
    run = leave_run(tmp_path, "fedacs")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"round": 4, "clients_accuracy": None}) + "\n")
    assert measured(Entry("fedacs", run)).clients_accuracy is None


def test_bytes_after_an_unknown_round_are_not_made_up(tmp_path):
    run = RunDirectory.create(tmp_path, "fedavg", {})
    for number, down in ((1, 1000), (2, None), (3, 1000)):
        run.append(
            {"round": number, "accuracy": 0.1 * number, "accuracy_of": "server", "bytes_down": down, "bytes_up": 0}
        )
    result = measured(Entry("fedavg", run.path, "finished"))
    assert result.curve.points == ((1, 1000, 0.1),)
    assert result.bytes_until(0.3) is None


def test_a_run_that_was_resumed_and_finished_since_counts_as_finished(tmp_path):
    write_comparison(tmp_path, [Entry("fedavg", leave_run(tmp_path, "fedavg", rounds=1, summary=False), "stopped")])
    (stopped,) = read_comparison(tmp_path)
    assert stopped.outcome == "stopped"
    with (stopped.run / "metrics.jsonl").open("a") as file:
        file.write('{"round": 2}\n{"round": 3}\n')
    run = RunDirectory(stopped.run, {})
    run.write_summary(stopped_by="too few replies, in the last round")
    assert read_comparison(tmp_path)[0].outcome == "stopped"
    run.write_summary()
    assert read_comparison(tmp_path)[0].outcome == "finished"


def test_a_folder_that_is_no_comparison_is_refused(tmp_path):
    (tmp_path / "comparison.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"comparison\.csv has no column 'strategy'"):
        read_comparison(tmp_path)


# --- picture --------------------------------------------------------------------------------------------------------


def picture(results):
    return ET.fromstring(draw(results))


def words(element):
    return " ".join("".join(text.itertext()) for text in element.iter(f"{SVG}text"))


def scale(svg, anchor, along):
    """What a reader does with the tick labels of an axis: position → value."""
    ticks = [
        (float(text.get(along)), float(text.text))
        for text in svg.iter(f"{SVG}text")
        if text.get("class") == "tick" and text.get("text-anchor") == anchor
    ]
    (at, low), *_, (end, high) = ticks
    return lambda position: low + (position - at) * (high - low) / (end - at)


def test_the_picture_has_one_line_a_strategy_where_its_values_are(folder, entries):
    svg = ET.parse(folder / "comparison.svg").getroot()
    lines = {
        group.get("class").split()[1].removeprefix("s-"): group
        for group in svg.iter(f"{SVG}g")
        if "curve" in group.get("class").split()
    }
    assert list(lines) == ["fedavg", "fedfrozen", "selective", "fedensemble", "fedacs"]
    to_mb, to_accuracy = scale(svg, "middle", "x"), scale(svg, "end", "y")
    offset = 4  # of a tick's label below its line

    def points(name):
        pairs = (pair.split(",") for pair in lines[name].find(f"{SVG}polyline").get("points").split())
        return [(to_mb(float(x)), to_accuracy(float(y) + offset)) for x, y in pairs]

    moved = {"fedavg": [0, 20, 40, 60], "fedfrozen": [0, 14, 28, 42]}
    for name, megabytes in moved.items():
        expected = list(zip(megabytes, RUNS[name][0], strict=True))
        assert [x for x, _ in points(name)] == pytest.approx([x for x, _ in expected], abs=0.01)
        assert [y for _, y in points(name)] == pytest.approx([y for _, y in expected], abs=0.001)
    assert [y for _, y in points("fedacs")] == pytest.approx([0.85, 0.9, 0.95], abs=0.001)
    assert points("selective") == [(0, pytest.approx(0.1, abs=0.001))]
    assert all(len(lines[name].findall(f"{SVG}use")) == len(points(name)) for name in lines)


def test_the_picture_sets_the_clients_data_apart(folder):
    svg = ET.parse(folder / "comparison.svg").getroot()
    curves = [group.get("class").split() for group in svg.iter(f"{SVG}g") if "curve" in group.get("class").split()]
    assert [names[1] for names in curves if "of-clients" in names] == ["s-fedacs"]
    style = svg.find(f"{SVG}style").text
    assert re.search(r"\.of-clients polyline[^{]*\{stroke-dasharray", style)
    assert "clients' own models" in words(svg)
    assert "not comparable with solid lines" in words(svg)


def test_the_picture_is_told_to_those_who_do_not_see_it(folder):
    svg = ET.parse(folder / "comparison.svg").getroot()
    assert svg.get("role") == "img" and svg.get("aria-labelledby") == "title desc"
    assert svg.find(f"{SVG}title").text == "Accuracy against bytes moved, tiny-vit on digits"
    told = svg.find(f"{SVG}desc").text
    assert "fedfrozen: 0.7100 on the server's test data after 42.0 MB." in told
    assert "fedacs: 0.9500 on the clients' own models after 30.0 MB." in told


def test_the_pictures_legend_does_not_overlap(folder):
    svg = ET.parse(folder / "comparison.svg").getroot()
    at = sorted(float(text.get("y")) for text in svg.iter(f"{SVG}text") if float(text.get("x") or 0) > 600)
    assert len(at) >= 10
    assert min(after - before for before, after in pairwise(at)) >= 14
    assert at[-1] < float(svg.get("height"))


def test_the_picture_follows_light_and_dark_and_loads_nothing(folder):
    text = (folder / "comparison.svg").read_text()
    assert "prefers-color-scheme:dark" in text
    assert not re.search(r"url\(|@import|<script|<image", text)
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]


def test_the_picture_of_runs_that_measured_nothing_says_so():
    svg = picture([measured(Entry("fedavg", None, "failed")), measured(Entry("fedacs"))])
    assert not list(svg.iter(f"{SVG}polyline"))
    assert words(svg).count("nothing measured") == 2


def test_every_strategy_has_its_own_look():
    assert set(LOOKS) == set(STRATEGIES)
    for what in ("light", "dark", "symbol", "mark"):
        assert len({getattr(look, what) for look in LOOKS.values()}) == len(LOOKS)


# --- page -----------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What these tests want to know of a page: its tags, text, figures and tables."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.figures, self.tables, self.text, self.scripts = [], {}, [], "", []
        self._inside = {}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = {"tag": tag, **dict(attrs)}
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_data(self, data):
        if self._inside.get("tag") == "script":
            self.scripts.append(data)
            if "data-for" in self._inside:
                self.figures[self._inside["data-for"]] = json.loads(data)
        elif self._inside.get("tag") in ("td", "th"):
            self.tables[-1][-1][-1] += data
        if self._inside.get("tag") not in ("script", "style"):
            self.text += data

    def handle_endtag(self, tag):
        self._inside = {}


@pytest.fixture(scope="module")
def page(folder):
    return Page(folder / "comparison.html")


def test_the_page_asks_the_network_for_nothing(page):
    assert not [tag for tag, _ in page.tags if tag in ("link", "iframe", "object", "embed", "base", "img", "form")]
    assert not [a for _, a in page.tags if "src" in a or any(name.startswith("on") for name in a)]
    links = [a["href"] for tag, a in page.tags if tag == "a"]
    assert all(re.fullmatch(r"[\w-]+/report\.html", link) for link in links)
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'") and not re.search(r"https?:|\*", policy)
    assert len([script for script in page.scripts if "plotly.js v" in script[:200]]) == 1


def test_the_page_has_all_strategies_with_the_tables_figures(page):
    table = page.tables[0]
    assert [row[0] for row in table[1:]] == ["fedavg", "fedfrozen", "selective", "fedensemble", "fedacs"]
    assert table[2][1:] == ["0.7100", "0.6600 ±0.0200", "24.0 MB", "18.0 MB", "0.7000", "28.0 MB", "6.0 s", "finished"]
    assert table[5][1] == "—"
    assert "selective: failed after round 0 of 3: The run failed: <no> memory" in page.text
    assert all(a.get("scope") == "col" for tag, a in page.tags if tag == "th")


def test_the_page_draws_accuracy_over_bytes(page):
    curves = {trace["name"]: trace for trace in page.figures["accuracy-bytes"]["data"]}
    frozen = curves["fedfrozen, server's test data"]
    assert frozen["x"] == [0, 14, 28, 42] and frozen["y"] == RUNS["fedfrozen"][0]
    assert frozen["line"]["dash"] == "solid"
    own = curves["fedacs, clients' own models"]
    assert own["x"] == [10, 20, 30] and own["line"]["dash"] == "dash"


def test_the_page_compares_all_on_the_clients_own_tests(page):
    bars = page.figures["own-tests"]["data"]
    assert [bar["x"] for bar in bars] == [["fedavg"], ["fedfrozen"], ["fedensemble"], ["fedacs"]]
    assert [bar["y"][0] for bar in bars] == pytest.approx([0.75, 0.66, 0.55, 0.9])
    assert all(bar["error_y"]["array"] == [0.02] for bar in bars)


def test_every_figure_is_spoken_and_coloured_and_every_round_is_in_a_table(folder, page):
    spoken = [a["aria-label"] for tag, a in page.tags if a.get("role") == "img"]
    assert len(spoken) == 2 and all("fedfrozen" in text for text in spoken)
    rounds = next(table for table in page.tables if table[0][:2] == ["strategy", "round"])
    assert len(rounds) == 1 + 3 * 4 + 3 + 1
    roles = {trace["meta"]["role"] for figure in page.figures.values() for trace in figure["data"]}
    assert roles == {f"s-{name}" for name in RUNS}
    (style,) = re.findall(r"<style>(.*?)</style>", (folder / "comparison.html").read_text(), re.S)
    assert all(style.count(f"--{role}: #") == 2 for role in roles), "a colour on light, and one on dark"
    assert not re.search(r"url\(|@import|https?:", style)


def test_the_page_has_the_config_that_the_runs_share(page):
    config = next(table for table in page.tables if table[0] == ["key", "value"])
    assert ["seed", "7"] in config and "strategy" not in [key for key, _ in config]


# --- time -----------------------------------------------------------------------------------------------------------


def test_the_time_left_counts_starts_and_rounds_of_all_runs():
    now = [0.0]
    left = TimeLeft(2, 3, clock=lambda: now[0])

    def after(seconds, round_ended):
        now[0] += seconds
        left.update({"round": round_ended})
        return left.seconds

    left.begin()
    assert after(5, 0) is None and after(5, 1) is None  # nothing is known of a usual round
    assert after(2, 2) == 2 + (10 + 2 + 2)
    assert after(4, 3) == 0 + (10 + 3 + 3)
    left.begin()
    now[0] += 4
    assert left.seconds == (10 - 4) + 3 + 3
    now[0] += 60
    assert left.seconds == 0


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def compare(monkeypatch, tmp_path):
    """`tepal compare` with simulations that leave a run at once; `failing` says what instead happens to a strategy."""
    monkeypatch.chdir(ROOT)
    started, failing = [], {}

    def simulate(app, *, clients, run_config, on_event, log, **_):
        config = dict(run_config)
        started.append((config, clients))
        error = failing.get(config["strategy"])
        if isinstance(error, ValueError):
            raise error  # as before anything is started
        rounds = 1 if error else 3
        run = leave_run(Path(config["runs"]), config["strategy"], rounds, summary=not error, config=config)
        on_event("log", f"INFO : {KEPT_IN}{run}")
        log.write_text("Flower's log")
        if error:
            raise error

    monkeypatch.setattr(commands, "simulate", simulate)

    def run(*arguments):
        config = f'num-server-rounds=3 runs="{tmp_path / "runs"}"'
        return CliRunner().invoke(commands.main, ["compare", ".", "--clients", "3", "-c", config, *arguments])

    run.started, run.failing, run.runs = started, failing, tmp_path / "runs"
    return run


def test_the_runs_differ_in_their_strategy_alone(compare):
    done = compare("--strategies", "fedfrozen,fedavg,fedacs", "-c", "seed=5")
    assert done.exit_code == 0, done.output
    configs = [config for config, _ in compare.started]
    assert [config.pop("strategy") for config in configs] == ["fedfrozen", "fedavg", "fedacs"]
    assert configs[0] == configs[1] == configs[2] and configs[0]["seed"] == 5
    assert {clients for _, clients in compare.started} == {3}


def test_all_strategies_are_compared_in_one_folder(compare):
    done = compare()
    assert done.exit_code == 0, done.output
    (folder,) = compare.runs.glob("*-compare")
    assert re.fullmatch(r"\d{8}-\d{6}-compare", folder.name)
    rows = rows_of_csv(folder)
    assert tuple(rows) == STRATEGIES
    assert all(row["outcome"] == "finished" and (folder / row["run"]).is_dir() for row in rows.values())
    assert str(folder / "comparison.html") in done.output.split()
    for number, strategy in enumerate(STRATEGIES, start=1):
        assert f"{number}/5 {strategy}: round 3/3" in done.output


def test_latest_is_the_newest_run_and_the_comparison_can_be_written_anew(compare):
    compare("--strategies", "fedavg,fedacs")
    (folder,) = compare.runs.glob("*-compare")
    assert read_config(find_run(compare.runs))["strategy"] == "fedacs"
    assert find_run(compare.runs).parent == folder.resolve()
    report = CliRunner().invoke(commands.main, ["report", str(compare.runs)])
    assert report.output.strip().endswith("-fedacs/report.html")
    (folder / "comparison.html").unlink()
    again = CliRunner().invoke(commands.main, ["report", str(folder)])
    assert again.output.strip() == str(folder / "comparison.html")
    assert (folder / "comparison.html").is_file()


def test_a_run_that_fails_ends_alone(compare):
    compare.failing["fedfrozen"] = RunError("The run failed: [all] clients are gone\nand more of it")
    done = compare("--strategies", "fedavg,fedfrozen,fedacs")
    assert done.exit_code == 1
    (folder,) = compare.runs.glob("*-compare")
    assert [row["outcome"] for row in rows_of_csv(folder).values()] == ["finished", "failed", "finished"]
    assert "fedfrozen: failed after round 1 of 3: The run failed: [all] clients are gone" in done.output
    assert "error: fedfrozen: The run failed" in done.output and "flower.log" in done.output
    assert f"`tepal report {folder}` compares anew" in done.output


def test_ctrl_c_ends_all_and_shows_what_is_there(compare):
    compare.failing["fedfrozen"] = KeyboardInterrupt()
    done = compare("--strategies", "fedavg,fedfrozen,fedacs")
    assert done.exit_code == 130
    assert [config["strategy"] for config, _ in compare.started] == ["fedavg", "fedfrozen"]
    (folder,) = compare.runs.glob("*-compare")
    assert [row["outcome"] for row in rows_of_csv(folder).values()] == ["finished", "stopped", "not run"]
    assert "fedfrozen: stopped after round 1 of 3" in done.output and "fedacs: not run" in done.output
    assert (folder / "comparison.html").is_file()


def test_nothing_is_left_where_no_run_could_begin(compare):
    compare.failing["fedavg"] = ValueError("cpus_per_client is 99, but there are 2 cores here")
    done = compare("--strategies", "fedavg,fedacs")
    assert done.exit_code == 1 and done.output.strip().endswith("there are 2 cores here")
    assert list(compare.runs.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-c", 'strategy="fedavg"'], ["strategy='fedavg'", "sets the strategy itself", "--strategies"]),
        (["-c", str(ROOT / "conf" / "fedavg.toml")], ["strategy='fedavg'", "--strategies"]),
        (["-c", 'resume="runs/latest"'], ["resume='runs/latest'", "anew", "tepal simulate"]),
        (["--strategies", "fedavg,fedfrosen"], ["'fedfrosen'", "did you mean 'fedfrozen'?", "known are fedavg"]),
        (["--strategies", "fedavg,fedavg"], ["'fedavg' is there twice"]),
        (["--strategies", ","], ["names none"]),
        (["-c", "seed=-1"], ["seed=-1"]),
        (["-c", "selective.budget=0 fedacs.alpha=2"], ["selective.budget=0", "fedacs.alpha=2"]),
        (["-c", 'model="cnn"'], ["fedfrozen: strategy='fedfrozen' with model='cnn'"]),
        (["-c", "min-clients=5"], ["min-clients=5", "--clients is 3"]),
        (["-c", "seed"], ["'seed' is not of the form"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) and value[0].startswith("-") else "",
)
def test_what_cannot_be_compared_is_refused_before_the_first_run(compare, arguments, said):
    done = compare(*arguments)
    assert done.exit_code == 1, done.output
    message = " ".join(done.output.split())
    assert message.startswith("error: ") and "Traceback" not in message
    for text in said:
        assert text in message
    assert compare.started == [] and not compare.runs.exists()


def test_what_is_wrong_for_all_strategies_is_said_once(compare):
    assert compare("-c", "seed=-1").output.count("seed=-1") == 1


def test_the_readmes_picture_is_that_of_a_comparison(folder, tmp_path):
    script = runpy.run_path(str(ROOT / "docs" / "picture.py"))
    script["main"](folder, tmp_path / "main-job.svg")
    assert (tmp_path / "main-job.svg").read_text() == (folder / "comparison.svg").read_text()
