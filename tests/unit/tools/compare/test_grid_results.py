"""What a comparison's files say of a grid: the columns of its keys, the best combinations, and its figures."""

import csv
import io
import re
import xml.etree.ElementTree as ET

import pytest
from rich.console import Console
from scipy.stats import ttest_rel

from tepal.tools.compare.comparison import Comparison, measure, planned_variants, read_comparison
from tepal.tools.compare.figure_files import painted
from tepal.tools.compare.grid.best import best_of, marks
from tepal.tools.compare.grid.expand import strategies_grid, variants_grid
from tepal.tools.compare.page import figures
from tepal.tools.compare.runs import write_comparison
from tepal.tools.compare.sections import Section, Variant
from tepal.tools.compare.tables import comparison_table
from tepal.tools.dashboard.views import ComparisonView, comparison_facts
from tests.comparisons import CONFIG, RUNS, leave_run

RATES = (0.001, 0.01, 0.1)
SEEDS = (1, 2, 3)
# What each rate adds to the accuracies of `RUNS` with each seed: the second is the best of FedAvg's with all seeds; of
# FedFrozen's it is as good as the third.
ADDED = {
    ("fedavg", 0.001): (-0.10, -0.11, -0.10), ("fedavg", 0.01): (0.01, 0.00, 0.02),
    ("fedavg", 0.1): (-0.2, -0.1, -0.15),
    ("fedfrozen", 0.001): (-0.10, -0.11, -0.10), ("fedfrozen", 0.01): (0.01, 0.00, 0.02),
    ("fedfrozen", 0.1): (0.00, 0.02, 0.00),
}  # fmt: skip


def finished(folder, sections, seeds, added, **how):
    """A comparison of these sections all of whose runs finished; `added`: (run config, seed) → to all accuracies."""
    folder.mkdir(exist_ok=True)
    comparison = Comparison(folder.resolve(), planned_variants(sections, seeds), dict(CONFIG), 10, sections=sections)
    for run in comparison.runs:
        config = comparison.settings_of(run)
        run.directory = leave_run(folder, run.strategy, seed=run.seed, add=added(config, run.seed), **how)
        run.outcome = "finished"
    comparison.save()
    return read_comparison(folder)


def of_rates(config, seed):
    return ADDED[config["strategy"], config["learning-rate"]][SEEDS.index(seed)]


@pytest.fixture(scope="module")
def rates(tmp_path_factory):
    sections = strategies_grid(["fedavg", "fedfrozen"], {"learning-rate": RATES}, len(SEEDS))
    comparison = finished(tmp_path_factory.mktemp("rates"), sections, SEEDS, of_rates)
    write_comparison(comparison)
    return comparison


def shown(comparison, width=80):
    out = io.StringIO()
    Console(file=out, width=width).print(comparison_table(measure(comparison)), soft_wrap=True)
    return out.getvalue()


def rows_of(comparison, name="comparison.csv"):
    with (comparison.folder / name).open(newline="") as file:
        return list(csv.DictReader(file))


# --- the best -------------------------------------------------------------------------------------------------------


def expected_mark(strategy, rate):
    """By the textbook's paired test of the best against each other one."""
    mean = {one: sum(ADDED[strategy, one]) for one in RATES}
    if rate != max(mean, key=mean.get):
        return ""
    tests = [ttest_rel(ADDED[strategy, rate], ADDED[strategy, one]).pvalue for one in RATES if one != rate]
    return "best" if max(tests) < 0.05 else "undecided"


def test_the_best_combination_is_marked_where_the_seeds_show_it(rates):
    rows = rows_of(rates)
    assert [(row["strategy"], row["learning-rate"]) for row in rows] == [(s, str(r)) for s, r in ADDED]
    assert [row["best"] for row in rows] == [expected_mark(*which) for which in ADDED]
    assert {row["best"] for row in rows} == {"best", "undecided", ""}
    for row in rows:
        added = ADDED[row["strategy"], float(row["learning-rate"])]
        mean = RUNS[row["strategy"]][0][3] + sum(added) / 3
        assert float(row["server_accuracy"]) == pytest.approx(mean)


def test_with_one_seed_nothing_is_marked(tmp_path):
    sections = strategies_grid(["fedavg"], {"learning-rate": RATES}, 1)
    comparison = finished(tmp_path, sections, [1], of_rates)
    write_comparison(comparison)
    assert {row["best"] for row in rows_of(comparison)} == {""}
    text = shown(comparison)
    assert "next learning-rate=0.001 with 0.7000; one seed: the difference may be chance" in text
    assert "undecided" not in text
    head = next(line for line in (tmp_path / "comparison.md").read_text().splitlines() if line.startswith("| strategy"))
    assert "| best |" not in head and "| learning-rate |" in head


def test_of_errors_the_least_is_the_best(tmp_path):
    sections = strategies_grid(["fedavg"], {"learning-rate": RATES}, 3)
    results = measure(finished(tmp_path, sections, SEEDS, of_rates, regression=True))
    [best] = best_of(results)
    assert (best.result.values, best.key, best.decided) == ({"learning-rate": 0.01}, "server_rmse", True)


def test_personal_models_are_compared_on_the_clients_own_tests(tmp_path):
    sections = strategies_grid(["fedacs"], {"learning-rate": RATES}, 3)
    added = {rate: ADDED["fedavg", rate] for rate in RATES}
    results = measure(
        finished(tmp_path, sections, SEEDS, lambda config, seed: added[config["learning-rate"]][seed - 1])
    )
    [best] = best_of(results)
    assert (best.result.values, best.key, best.decided) == ({"learning-rate": 0.01}, "clients_accuracy", True)
    [over, *_] = figures(results)
    assert over.plot.data[-1].line.dash == "dash" and "Dashed: on the clients' own test splits" in over.caption


def test_a_combination_without_results_leaves_the_best_undecided(tmp_path):
    sections = strategies_grid(["fedavg"], {"learning-rate": RATES}, 3)
    comparison = finished(tmp_path, sections, SEEDS, of_rates)
    for run in comparison.runs:
        if comparison.settings_of(run)["learning-rate"] == 0.001 and run.seed == 2:
            run.outcome, run.reason = "failed", "no memory"
    assert set(marks(measure(comparison)).values()) == {"undecided"}
    assert "fedavg learning-rate=0.001 seed 2: failed after round 3 of 3: no memory" in shown(comparison)


def test_a_combination_that_finished_with_no_seed_leaves_the_best_undecided(tmp_path):
    sections = strategies_grid(["fedavg"], {"learning-rate": RATES}, 3)
    comparison = finished(tmp_path, sections, SEEDS, of_rates)
    assert "best" in marks(measure(comparison)).values()
    for run in comparison.runs:
        if comparison.settings_of(run)["learning-rate"] == 0.001:
            run.outcome = "failed"
    assert set(marks(measure(comparison)).values()) == {"undecided"}


def test_long_values_that_begin_alike_are_told_apart(tmp_path):
    folder = "/home/someone/projects/federated-learning/"
    sections = strategies_grid(["fedavg"], {"pretrained": [f"{folder}clip.pt", f"{folder}imagenet.pt"]}, 1)
    results = measure(finished(tmp_path, sections, (1,), lambda config, seed: 0.0))
    first, second = (result.full_label for result in results.variants)
    assert first.endswith("/clip.pt") and second.endswith("/imagenet.pt") and len(first) < 70
    told = comparison_facts(ComparisonView(results.comparison.folder), results)
    assert {first, second} == told["strategies"].keys()


def test_the_best_is_of_equal_data(tmp_path):
    """A larger alpha is an easier task: it is not a better setting."""
    grid = {"learning-rate": (0.001, 0.01), "dirichlet-alpha": (0.1, 1.0)}
    sections = strategies_grid(["fedavg"], grid, 3)
    noise = (0.001, -0.001, 0.0)

    def added(config, seed):
        rate, alpha = config["learning-rate"], config["dirichlet-alpha"]
        better = rate == (0.001 if alpha == 0.1 else 0.01)
        return 0.1 * (alpha == 1) + 0.05 * better + noise[seed - 1] * (1 + rate)

    found = {tuple(best.result.values.values()): best.decided for best in best_of(measure(finished(
        tmp_path, sections, SEEDS, added
    )))}  # fmt: skip
    assert found == {(0.001, 0.1): True, (0.01, 1.0): True}


def test_the_target_is_of_the_best_combination_of_fedavg(rates):
    target = measure(rates).target
    assert target.score == pytest.approx(0.9 * 0.81) and target.of == "fedavg learning-rate=0.01"
    assert [float(row["target_accuracy"]) for row in rows_of(rates)] == pytest.approx([0.9 * 0.81] * 6)


# --- tables ---------------------------------------------------------------------------------------------------------


def test_the_terminal_has_a_column_for_the_key_and_fits(rates):
    lines = shown(rates).splitlines()
    table = lines[: next(n for n, line in enumerate(lines) if " has the highest accuracy" in line)]
    assert max(map(len, table)) <= 80
    rows = [line.split() for line in table if line.startswith("fed")]
    means = [f"{RUNS[strategy][0][3] + sum(added) / 3:.4f}" for (strategy, _), added in ADDED.items()]
    assert [row[:3] for row in rows] == [[s, str(r), mean] for (s, r), mean in zip(ADDED, means, strict=True)]
    assert [line.strip() for line in table if line.strip() in ("best", "undecided")] == ["best", "undecided"]
    best = next(line for line in lines if line.startswith("fedavg learning-rate=0.01 has the highest"))
    assert "0.8100; next learning-rate=0.001 with 0.6967, difference +0.1133 (" in best and best.endswith("; best")
    assert any(line.startswith("The scores are of test data: to choose values by them") for line in lines)


def test_all_texts_have_the_column(rates):
    markdown = (rates.folder / "comparison.md").read_text()
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()
                      if line[:1] == "|"]  # fmt: skip
    assert head[:3] == ["strategy", "learning-rate", "best"]
    assert [row[:3] for row in rows] == [[s, str(r), expected_mark(s, r) or "–"] for s, r in ADDED]
    assert "tepal.tools.search" in markdown and "choose on the test set" in markdown
    latex = (rates.folder / "comparison.tex").read_text()
    body = [line for line in latex.splitlines() if "&" in line and not line.startswith("%")]
    assert [line.split(" & ")[:2] for line in body] == [["strategy", "learning-rate"], *([s, str(r)] for s, r in ADDED)]
    assert "choose on the test set" in latex


def test_the_page_has_the_columns_the_figure_and_the_warning(rates):
    page = (rates.folder / "comparison.html").read_text()
    assert "<h1>fedavg · fedfrozen over learning-rate</h1>" in page
    first = re.search(r"<table.*?</table>", page, re.S)[0]
    heads = re.findall(r"<th [^>]*>(.*?)</th>", first, re.S)
    assert [head.strip() for head in heads[:3]] == ["strategy", "learning-rate", "best"]
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.S)[:3] for row in re.findall(r"<tr>.*?</tr>", first, re.S)[1:]]
    assert cells == [[s, str(r), expected_mark(s, r) or "–"] for s, r in ADDED]
    assert "to choose values by them is to choose on the test set" in page and "tepal.tools.search" in page
    assert 'data-for="accuracy-values"' in page
    assert re.search(r"<td[^>]*>learning-rate</td>\s*<td[^>]*>0.001, 0.01, 0.1</td>", page), "in the run config"
    assert "differ in their strategy and in learning-rate alone" in page
    styles = "".join(re.findall(r"<style>(.*?)</style>", page, re.S))
    roles = set(re.findall(r'"role":\s*"(s-[\w-]+)"', page))
    assert {"s-fedavg", "s-fedfrozen"} < roles and all(styles.count(f"--{role}: #") == 2 for role in roles)


# --- figures --------------------------------------------------------------------------------------------------------


def test_the_figure_has_a_line_with_a_band_for_each_strategy_over_the_key(rates):
    [over, *_] = figures(measure(rates))
    assert (over.key, over.plot.layout.xaxis.type) == ("accuracy-values", "log")
    assert list(over.plot.layout.xaxis.tickvals) == list(RATES)
    traces = list(over.plot.data)
    assert [trace.meta.get("band", False) for trace in traces] == [True, False] * 2
    for strategy, band, line in (("fedavg", *traces[:2]), ("fedfrozen", *traces[2:])):
        final = RUNS[strategy][0][3]
        each = [[final + added for added in ADDED[strategy, rate]] for rate in RATES]
        means = [sum(values) / 3 for values in each]
        spreads = [(sum((v - m) ** 2 for v in values) / 2) ** 0.5 for values, m in zip(each, means, strict=True)]
        assert (line.name, list(line.x)) == (strategy, list(RATES)) and list(line.y) == pytest.approx(means)
        high = [m + s for m, s in zip(means, spreads, strict=True)]
        low = [m - s for m, s in zip(means, spreads, strict=True)]
        assert list(band.y) == pytest.approx([*high, *reversed(low)])
    assert "to choose a value by them is to choose on the test set" in over.caption
    colours = {trace.meta["role"]: "#123456" for trace in traces}
    grey = dict.fromkeys(("ink", "card", "grid", "rule", "freeze"), "#777777")
    assert painted(over.plot, {**grey, **colours}).data[1].line.color == "#123456"


@pytest.mark.parametrize(
    ("values", "kind"), [((0.1, 0.9), "linear"), ((0.1, 1), "log"), ((0, 1), "linear"), ((4, 1), "linear")]
)
def test_the_axis_is_logarithmic_from_a_factor_of_ten(tmp_path, values, kind):
    sections = strategies_grid(["fedavg"], {"fedprox.mu": values}, 1)
    [over, *_] = figures(measure(finished(tmp_path, sections, [1], lambda config, _: -config["fedprox.mu"] / 100)))
    assert over.plot.layout.xaxis.type == kind
    [line] = over.plot.data
    assert list(line.x) == sorted(values) and list(line.y) == pytest.approx([0.8 - v / 100 for v in sorted(values)])


def test_two_keys_are_a_heat_map_for_each_strategy_on_one_scale(tmp_path):
    grid = {"learning-rate": (0.001, 0.01), "wire-dtype": ("float32", "int8", "bfloat16")}
    lower = {("fedavg", 0.001, "int8"): 0.3, ("fedfrozen", 0.01, "bfloat16"): 0.5}

    def added(config, _):
        return -lower.get((config["strategy"], config["learning-rate"], config["wire-dtype"]), 0)

    sections = strategies_grid(["fedavg", "fedfrozen"], grid, 1)
    first, second, *rest = figures(measure(finished(tmp_path, sections, [1], added)))
    for figure, strategy in ((first, "fedavg"), (second, "fedfrozen")):
        [cells] = figure.plot.data
        final = RUNS[strategy][0][3]
        assert [list(row) for row in cells.z] == [
            pytest.approx([final - lower.get((strategy, rate, kind), 0) for kind in grid["wire-dtype"]])
            for rate in grid["learning-rate"]
        ]
        assert (list(cells.y), list(cells.x)) == (["0.001", "0.01"], list(grid["wire-dtype"]))
        assert (cells.zmin, cells.zmax) == (pytest.approx(0.21), pytest.approx(0.8))
    assert [figure.key for figure in (first, second, *rest)][:3] == ["accuracy-values-1", "accuracy-values-2",
                                                                     "accuracy-rounds"]  # fmt: skip


@pytest.mark.parametrize("grid", [{"wire-dtype": ("float32", "int8")}, {f"k{n}": (1, 2) for n in range(3)}])
def test_other_grids_have_the_table_alone(tmp_path, grid):
    sections = strategies_grid(["fedavg"], grid, 1)
    drawn = figures(measure(finished(tmp_path, sections, [1], lambda *_: 0.0)))
    assert [figure.key for figure in drawn] == ["accuracy-rounds", "accuracy-bytes", "own-tests"]


def test_the_picture_names_the_values_and_has_room_for_them(rates):
    svg = ET.parse(rates.folder / "comparison.svg").getroot()
    texts = list(svg.iter("{http://www.w3.org/2000/svg}text"))
    names = [text.text.strip() for text in texts if text.get("class") == "name"]
    assert names == [f"{s} {r}" for s, r in ADDED]
    assert "After a name: its learning-rate." in [text.text for text in texts]
    assert max(float(text.get("y") or 0) for text in texts) < float(svg.get("height"))


# --- variants and questions -----------------------------------------------------------------------------------------


def test_a_question_is_answered_for_each_combination(tmp_path):
    variants = (Variant("all", {"strategy": "fedavg"}), Variant("frozen", {"strategy": "fedfrozen"}))
    asked = Section("Bytes", variants, question="bytes", baseline="all", within=0.1)
    sections = variants_grid([asked], {"learning-rate": (0.001, 0.01)}, 3)
    comparison = finished(tmp_path, sections, SEEDS, of_rates)
    write_comparison(comparison)
    text = shown(comparison)
    for rate in ("0.001", "0.01"):
        said = rf"Bytes: learning-rate={rate}: all's final accuracy less 10 points \(0\.\d+\) is reached with"
        assert re.search(said, text)
    assert "has the highest accuracy" not in text and "choose on the test set" in text
    rows = rows_of(comparison)
    assert [(row["variant"], row["learning-rate"], row["baseline"]) for row in rows] == [
        (name, rate, "all") for rate in ("0.001", "0.01") for name in ("all", "frozen")
    ]
    page = (comparison.folder / "comparison.html").read_text()
    assert page.count("tepal.tools.search") == 1 and "Bytes: learning-rate=0.001" in page
    names = [text.text for text in ET.parse(comparison.folder / "comparison.svg").getroot().iter()
             if text.get("class") == "name"]  # fmt: skip
    assert names == ["all", "frozen"] * 2
