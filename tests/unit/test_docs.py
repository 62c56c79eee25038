"""The commands and Python of README and docs are run; pages that mirror the code are compared with it."""

import itertools
import re
import runpy
import shlex
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from PIL import Image
from typer.main import get_command
from typer.testing import CliRunner

from tepal.exchange import partial_exchange
from tepal.models import build
from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import RunDirectory
from tepal.server_app.config import defaults, open_run, read_run_config
from tepal.strategies import STRATEGIES
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.tools.cli.main import main
from tests.apps import quickstart_app
from tests.packages import PACKAGES, ROOT

README = (ROOT / "README.md").read_text()


PAGES = sorted((ROOT / "docs").rglob("*.md"))

# How a block begins whose commands no test runs as they stand.
MARKS = (
    "# needs a network",
    "# needs an app of your own",
    "# needs the server's machine",
    "# needs the site's machine",
    "# needs a cluster",
)


def blocks(language, text=README):
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def commands(text=README, *, marked=False):
    """The commands of a page, each with its lines joined; of its marked blocks only where they are asked for."""
    found = []
    for block in blocks("sh", text):
        lines = block.replace("\\\n", "").splitlines()
        if marked or lines[0] not in MARKS:
            found += [without_comment(line) for line in lines]
    return [command for command in found if command]


def without_comment(line):
    words = shlex.shlex(line, posix=False, punctuation_chars=True)
    words.whitespace_split, words.commenters = True, "#"
    return " ".join(words)


# Commands of README and docs by how they begin, and the test that runs each.
RUN_BY = {
    "make run": "tests/integration/test_main_job.py",
    "make test": "is what runs these tests",
    "tepal simulate . -c conf/": "tests/integration/test_methods.py",
    "tepal simulate . -c 'resume=": "tests/integration/test_resume.py",
    "python -m tepal.tools.pretrain": "tests/unit/tools/pretrain/test_pretrain.py",
    "tepal reproduce": "tests/unit/tools/reproduce/test_reproduce.py",
    "tepal dashboard --host": "tests/integration/test_dashboard_command.py",
    "tepal dashboard": "tests/integration/test_browser.py",
    "tepal simulate . -c 'trackers=\"wandb": "tests/unit/server_app/test_wandb.py",
    "tepal simulate . -c 'trackers=": "tests/unit/server_app/test_trackers.py",
    "tepal simulate . -c 'foreign-images=": "tests/unit/server_app/test_evaluation.py",
    "tepal simulate . -c 'deliver=": "tests/unit/server_app/test_best.py",
    "tepal simulate . -c 'wire-dtype": "tests/unit/strategies/rounds/test_encoding.py",
    "tepal simulate . -c 'client.3.": "tests/integration/test_main_job.py",
    "tepal simulate . --clients 100000": "tests/unit/test_benchmarks.py",
    "tepal simulate . --clients 100": "tests/integration/test_simulation_launcher.py",
    "tepal simulate . --clients 10 -c 'model=\"char-lstm\"": "tests/unit/training/data/test_inputs.py",
    "tepal simulate . --clients 3 -c 'model=\"linear-attention\"": "tests/unit/training/data/test_inputs.py",
    "tepal simulate . --clients 5 -c 'model=\"mlp\"": "tests/unit/training/data/test_tables_of_classes.py",
    "tepal simulate . --clients 2 -c 'model=\"my-bert\"": "tests/unit/test_docs_pages.py",
    "tepal simulate --clients": "tests/unit/test_docs_questions.py",
    "tepal simulate": "tests/integration/test_main_job.py",
    "tepal compare --strategies": "tests/unit/test_docs_questions.py",
    "tepal compare . --variants": "tests/unit/tools/compare/test_variants.py",
    "tepal compare . --strategies fedavg,selective --seeds 1,2,3 --target": "tests/unit/tools/compare/test_target.py",
    "tepal compare . --strategies fedavg,fedfrozen --vary": "tests/unit/tools/compare/test_vary.py",
    "tepal compare . --clients": "tests/unit/test_results.py",
    "tepal compare": "tests/integration/test_main_job.py",
    "tepal predict": "test_the_predict_command_reads_a_run_and_writes_what_it_predicts",
    "tepal export --to onnx": "tests/unit/tools/export/test_onnx_file.py",
    "tepal export runs": "tests/unit/tools/export/test_hugging_face.py",
    "tepal strategies": "test_every_strategy_is_listed_with_its_options",
    "tepal report runs/20261120-101500-fedfrozen --figures": "tests/unit/tools/compare/test_figure_files.py",
    "tepal report runs/20261120-101500-compare --figures": "tests/unit/tools/compare/test_figure_files.py",
    "tepal report": "test_the_report_command_says_where_the_report_is",
    "tepal runs": "test_the_commands_that_look_at_runs",
    "tepal show": "test_the_commands_that_look_at_runs",
    "tepal doctor": "tests/unit/tools/deploy/test_doctor.py",
    "python benchmarks/": "tests/unit/test_benchmarks.py",
    "python docs/run_config.py": "test_what_follows_from_the_declared_options_is_written_anew",
    "python -m tepal.tools.search": "tests/unit/tools/search/test_search.py",
    "tepal init": "tests/integration/test_own_app.py",
    "cd quickstart": "tests/integration/test_own_app.py",
    "python in_process.py": "test_the_app_of_ones_own_runs",
    "flwr run . CONNECTION --stream --run-config 'resume=": "tests/integration/test_resume.py",
    "tepal loopback": "tests/integration/test_loopback_command.py",
    "docker compose -f docker/compose.yml": "tests/containers/test_one_host.py",
    "tepal provision kubernetes": "tests/unit/tools/deploy/test_kubernetes.py",
    "tepal provision": "tests/integration/test_provision.py",
    "tepal server": "tests/integration/test_server.py",
    "tepal node": "tests/integration/test_node.py",
    "flower-superlink --ssl": "tests/integration/test_secure.py",
    "flower-supernode --root-certificates": "tests/integration/test_secure.py",
    "flower-superlink": "tests/integration/test_loopback.py",
    "flower-supernode": "tests/integration/test_loopback.py",
    "ssh-keygen": "tests/integration/credentials.py",
    "flwr supernode register": "tests/integration/test_node.py",
    "flwr run . CONNECTION --stream --run-config conf/": "tests/integration/test_methods.py",
    "flwr run": "tests/integration/test_loopback.py",
}


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_is_run_by_a_test_or_says_what_it_needs(page):
    text = page.read_text()
    for command in commands(text):
        assert any(command.startswith(known) for known in RUN_BY), command
    for block in blocks("sh", text):
        assert block.splitlines()[0] in MARKS or not block.startswith("# needs"), f"no mark of MARKS: {block}"
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    indented = re.findall(r"^    (?:tepal|flwr|flower-\w+|docker|pip|python|make|sudo) .*", prose, flags=re.MULTILINE)
    assert not indented, "commands stand in blocks of ```sh"


def _comments(path):
    """The indented lines of a file's comments."""
    return "\n".join(line[6:] for line in path.read_text().splitlines() if line.startswith("#     "))


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *PAGES, *sorted((ROOT / "docker").glob("*.yml"))], ids=lambda page: page.name
)
def test_every_compose_command_has_the_variables_that_its_files_need(page):
    """From an `export` before it, or in its own line: compose refuses every command without them, not `up` alone."""
    text = page.read_text() if page.suffix == ".md" else f"```sh\n{_comments(page)}\n```"
    given = set()
    for command in commands(text, marked=True):
        names = set(re.findall(r"\b(\w+)=", command.partition("docker compose")[0]))
        if command.startswith("export "):
            given |= names
        for file in re.findall(r"-f (docker/\S+)", command) if "docker compose" in command else ():
            needed = set(re.findall(r"\$\{(\w+):\?", (ROOT / file).read_text()))
            assert needed <= given | names, command


@pytest.mark.parametrize("file", sorted((ROOT / "docker").glob("*.Dockerfile")), ids=lambda file: file.name)
def test_the_docker_that_the_images_need_is_stated(file):
    """Docker has the start interval of a health check since version 25."""
    page = (ROOT / "docs/install.md").read_text()
    header = file.read_text().partition("ARG ")[0]
    assert "--start-interval" in file.read_text()
    assert "Docker Engine 25 or newer, with Compose 2" in page and "Docker Engine 25 or newer" in header


def test_what_runs_the_commands_is_there():
    tests = "".join(path.read_text() for path in (ROOT / "tests/unit").glob("test_docs*.py"))
    for by in set(RUN_BY.values()):
        assert (ROOT / by).exists() if by.endswith(".py") else f"def {by}(" in tests or " " in by, by
    every = [command for page in [ROOT / "README.md", *PAGES] for command in commands(page.read_text())]
    unused = [known for known in RUN_BY if not any(command.startswith(known) for command in every)]
    assert not unused, "of commands that no page has"


def tepal_commands():
    every = [command for page in [ROOT / "README.md", *PAGES] for command in commands(page.read_text(), marked=True)]
    return sorted({command for command in every if command.startswith("tepal ") and "…" not in command})


@pytest.mark.parametrize("command", tepal_commands())
def test_every_tepal_command_has_options_and_keys_that_there_are(command, monkeypatch):
    """What click makes of it; of those that start a run, the run config that comes of it, where it names no files."""
    from tepal.host.superlink import app_run_config
    from tepal.host.toml import parse_run_config

    monkeypatch.chdir(ROOT)
    words = list(itertools.takewhile(lambda word: word != "|", shlex.split(command)[1:]))
    group = get_command(main)
    while hasattr(group, "commands") and not words[0].startswith("-"):
        name = words.pop(0)
        group = group.commands[name]
    given = group.make_context(name, words).params
    if name not in ("simulate", "loopback", "compare"):
        return
    changes = parse_run_config(given["run_config"] or [])
    assert {key for key in changes if not key.startswith("client.")} <= defaults().keys()
    files = [value for value in changes.values() if str(value).endswith((".npz", ".txt", ".xz", ".csv", ".tsv"))]
    if not files and "resume" not in changes:
        open_run({**app_run_config(ROOT), **changes})


def test_the_commands_that_look_at_runs(tmp_path, monkeypatch):
    """Those of docs/index.md and docs/runs.md, with names of runs that are there."""
    monkeypatch.chdir(tmp_path)
    run = RunDirectory.create(tmp_path / "runs", "fedfrozen", {"strategy": "fedfrozen"})
    run.append(RoundRecord(round=1, phase="train", accuracy=0.5))
    looked = [c for c in tepal_commands() if c.startswith(("tepal runs", "tepal show"))]
    assert len(looked) >= 5
    for command in looked:
        words = list(itertools.takewhile(lambda word: word != "|", shlex.split(command)[1:]))
        words = [word.replace("20261120-101500-fedfrozen", run.path.name) for word in words]
        words = ["runs" if word.endswith("-compare") else word for word in words]
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0 and run.path.name in done.output.replace("\n", ""), (command, done.output)


def test_the_readmes_run_config_can_be_run():
    from tepal.host.toml import parse_run_config

    simulate, resume = [command for command in commands() if command.startswith("tepal simulate")]
    assert "resume=" in resume, "tests/integration/test_resume.py runs it"
    words = shlex.split(simulate)
    config = read_run_config(parse_run_config([words[words.index("-c") + 1]]))
    assert (config.rounds.num_server_rounds, config.fedfrozen.warmup_rounds) == (2, 1)


def test_the_readmes_python_runs(tmp_path, monkeypatch, no_report):
    """The server's snippet with the client's snippet on its nodes, and those on the Python API and on blocks."""
    api, server, client, blocks_ = blocks("python")
    monkeypatch.chdir(tmp_path)
    ran = {}
    exec(api, ran)
    assert len(ran["run"].metrics) == 3 and list((tmp_path / "runs").glob("*-fedfrozen"))

    def make():
        return build("tiny-vit", image_shape=(1, 8, 8), classes=10, seed=0)

    names = {"ArrayRecord": ArrayRecord, "MetricRecord": MetricRecord, "RecordDict": RecordDict, "Message": Message,
             "ClientApp": ClientApp, "model": make(), "fit": lambda model: None}  # fmt: skip
    exec(client, names)
    grid = InProcessGrid([Node(names["app"], {"partition-id": k}) for k in range(2)])
    server_names = {"ArrayRecord": ArrayRecord, "model": make(), "grid": grid}
    exec(server.replace("warmup_rounds=2", "warmup_rounds=2, fraction_evaluate=0"), server_names)
    assert set(server_names["result"].arrays) == set(make().state_dict())
    block_names = {"model": make()}
    exec(blocks_, block_names)
    assert len(block_names["blocks"].query_key) == 8


def test_the_readme_is_short_and_its_files_exist():
    assert README.count("\n") <= 120
    for target in re.findall(r"\]\((?!http)([^)#]+)", README):
        assert (ROOT / target).exists(), target


def test_the_table_of_folders_has_every_package():
    page = (ROOT / "docs/developers.md").read_text()
    rows = re.findall(r"^\| (`[^|]*/`) \|", page, flags=re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`([^`]+)/`", row)}
    assert listed >= set(PACKAGES) and all((ROOT / name).is_dir() for name in listed)


def test_the_glossary_defines_each_term_once():
    rows = re.findall(r"^\| ([a-z ,]+) \| \w.* \|$", (ROOT / "docs/glossary.md").read_text(), flags=re.MULTILINE)
    terms = [term for row in rows if row != "term" for term in row.split(", ")]
    assert len(rows) == 13 and len(terms) == len(set(terms))
    assert {"client", "node", "site", "round", "entry", "block", "part", "personal model"} <= set(terms)


def test_what_follows_from_the_declared_options_is_written_anew():
    generated = runpy.run_path(str(ROOT / "docs/run_config.py"))["generated"]()
    assert {path.name for path in generated} == {"run-config.md", "strategies.md", "pyproject.toml"}
    for path, text in generated.items():
        assert path.read_text() == text, f"{path.name} is not up to date: python docs/run_config.py"


def test_every_strategy_is_listed_with_its_options():
    listed = CliRunner().invoke(main, ["strategies"])
    assert listed.exit_code == 0 and all(name in listed.stdout for name in STRATEGIES)
    shown = CliRunner().invoke(main, ["strategies", "fedadam", "scaffold"])
    assert shown.exit_code == 0 and "arXiv:2003.00295" in shown.stdout and "fedadam.tau" in shown.stdout
    assert "P + C down" in shown.stdout
    wrong = CliRunner().invoke(main, ["strategies", "fedadm"])
    assert wrong.exit_code == 1 and "did you mean 'fedadam'?" in wrong.stderr
    for name, one in STRATEGIES.items():
        page = (ROOT / "docs/strategies.md").read_text().partition(f"## {name}\n")[2].partition("\n## ")[0]
        keys = [key for key in defaults() if key.startswith(f"{name}.")]
        assert re.findall(r"^\| `(\S+)` \|", page, flags=re.MULTILINE) == keys
        assert one.strategy.__name__ in page and one.paper in page


def test_the_report_command_says_where_the_report_is(tmp_path):
    run = RunDirectory.create(tmp_path / "runs", "fedavg", {"strategy": "fedavg"})
    run.append(RoundRecord(round=1, phase="train", accuracy=0.5))
    done = CliRunner().invoke(main, ["report", str(tmp_path / "runs")])
    assert done.exit_code == 0 and Path(done.output.strip()).name == "report.html"
    failed = CliRunner().invoke(main, ["report", str(tmp_path / "nothing")])
    assert failed.exit_code == 1 and "nothing" in failed.output


def test_the_predict_command_reads_a_run_and_writes_what_it_predicts(tmp_path):
    model = build("tiny-vit", image_shape=(1, 8, 8), classes=10, seed=0)
    config = {"strategy": "fedavg", "model": "tiny-vit", "image-shape": "1x8x8", "classes": 10}
    run = RunDirectory.create(tmp_path / "runs", "fedavg", config)
    run.write_model({name: tensor.numpy() for name, tensor in model.state_dict().items()})
    (tmp_path / "images").mkdir()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "images" / "a.png")
    arguments = ["predict", str(tmp_path / "runs"), str(tmp_path / "images"), "--output", str(tmp_path / "all.csv")]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "all.csv").read_text().count("\n") == 2 and "all.csv" in done.output
    failed = CliRunner().invoke(main, ["predict", str(tmp_path / "runs"), str(tmp_path / "nothing")])
    assert failed.exit_code == 1
    away = CliRunner().invoke(main, [*arguments[:-1], str(tmp_path / "nowhere" / "all.csv")])
    assert away.exit_code == 1


@pytest.mark.parametrize("calls_apply_plan", [True, False])
def test_the_line_that_the_readme_adds_is_the_one_that_is_needed(calls_apply_plan):
    from tepal.strategies import FedFrozen, RoundFailed

    model = build("tiny-vit", image_shape=(1, 8, 8), classes=10, seed=0)
    app = quickstart_app(lambda: model, [partial_exchange], calls_apply_plan=calls_apply_plan)
    grid = InProcessGrid([Node(app, {"partition-id": k}) for k in range(2)])
    strategy = FedFrozen(warmup_rounds=1, model=model)
    if calls_apply_plan:
        strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=2)
    else:
        with pytest.raises(RoundFailed, match="apply_plan"):
            strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=2)
