"""The Python of the documentation's pages is run, and their drawings are what the methods' functions give."""

import contextlib
import io
import random
import re
import runpy
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy
from typer.testing import CliRunner

import tepal.client_app.app as app_module
from tepal import strategies
from tepal.client_app.objectives import OBJECTIVES
from tepal.exchange import Encoding
from tepal.host.superlink import app_run_config
from tepal.models import build
from tepal.models.blocks import find_blocks
from tepal.records.run_directory import read_metrics
from tepal.server_app.config import defaults
from tepal.strategies import FedFrozen, MethodError, MethodStrategy
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.tools.cli.main import main
from tepal.tools.init import TEMPLATE, write_app
from tepal.training.data.tokens import load_tokenizer
from tepal.training.prediction import EnsembleScore
from tests.packages import ROOT

DOCS = ROOT / "docs"


def files_of(page):
    """Title → code, of a page's blocks that are files."""
    return dict(re.findall(r'```python title="([^"]+)"\n(.*?)```', (DOCS / page).read_text(), flags=re.DOTALL))


def snippets_of(page):
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)


OF_PAGES = ["quickstart", "head_only", "median", "head_first", "sparse", "sparse_method", "fused", "patterns"]


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A folder with the files of both pages, from which they can be imported."""
    for page in ("own-app.md", "extend.md"):
        for title, code in files_of(page).items():
            (tmp_path / title).parent.mkdir(exist_ok=True)
            (tmp_path / title).write_text(code)
    (tmp_path / "pyproject.toml").write_text((TEMPLATE / "pyproject.toml").read_text())
    monkeypatch.setenv("TEPAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in OF_PAGES:
            del sys.modules[name]


def test_the_app_of_ones_own_runs(written):
    runpy.run_path("in_process.py", run_name="__main__")
    final = torch.load("final.pt")
    from quickstart.task import RowReader, accuracy, load_data

    model = RowReader()
    model.load_state_dict(final)
    assert accuracy(model, *load_data(0, 1)) > 0.5, "ten classes, and it has learned"


def test_the_app_of_the_page_is_the_one_that_init_writes(tmp_path):
    write_app(tmp_path / "quickstart")
    files = files_of("own-app.md") | dict(
        re.findall(r'```toml title="([^"]+)"\n(.*?)```', (DOCS / "own-app.md").read_text(), flags=re.DOTALL)
    )
    del files["in_process.py"]
    assert files == {
        path.relative_to(tmp_path / "quickstart").as_posix(): path.read_text()
        for path in (tmp_path / "quickstart").rglob("*.*") if path.stat().st_size and path.name != ".gitignore"
    }  # fmt: skip
    assert sum(text.count("\n") for text in files.values()) <= 120


def test_the_further_options_are_options(written):
    from quickstart.task import RowReader

    names = {"model": RowReader()}
    exec(snippets_of("own-app.md")[0], names)
    strategy = names["strategy"]
    assert isinstance(strategy, FedFrozen) and (strategy.rules.fraction_train, strategy.resume) == (0.5, True)
    assert strategy.encoding == Encoding(up="int8")


def test_the_method_of_the_page_trains_its_head_first_and_moves_what_the_page_says(written):
    printed = io.StringIO()
    torch.manual_seed(0)
    with contextlib.redirect_stdout(printed):
        names = runpy.run_path("try_head_first.py")
    said = re.search(r"```text\n(.*?)```", (DOCS / "extend.md").read_text(), flags=re.DOTALL)
    assert printed.getvalue() == said[1]
    # `model` shares no memory with the run: its body is what two rounds must have left alone.
    strategy, model = names["HeadFirst"](rounds=2, model=names["model"]), names["model"]
    assert_only_the_head_moves(strategy, names["grid"], model, rounds=2)
    with pytest.raises(ValueError, match="rounds is -1; it must be a whole number, at least 0"):
        names["HeadFirst"](rounds=-1)
    with pytest.raises(MethodError, match="must know the model's head"):
        names["HeadFirst"]().start(names["grid"], ArrayRecord(model.state_dict()), num_rounds=1)


def assert_only_the_head_moves(strategy, grid, model, rounds):
    start = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=rounds)
    for name, array in result.arrays.items():
        assert np.array_equal(array.numpy(), start[name]) == (not name.startswith("head.")), name


@pytest.fixture
def three_clients(written):
    from quickstart.client_app import app

    nodes = [Node(app, {"partition-id": k, "num-partitions": 3}) for k in range(3)]
    return InProcessGrid(nodes, app_run_config(TEMPLATE))


def test_three_lines_train_the_head_alone(written, three_clients):
    from head_only import strategy

    from quickstart.task import RowReader

    assert_only_the_head_moves(strategy, three_clients, RowReader(), rounds=2)


def test_the_complete_method_of_the_page_takes_the_median(written, three_clients):
    from median import Median

    from quickstart.task import RowReader

    model, replies = RowReader(), []
    strategy = MethodStrategy(Median(), fraction_evaluate=0)
    strategy.method.accept = lambda plan, reply: replies.append(reply.parts)
    result = strategy.start(three_clients, ArrayRecord(model.state_dict()), num_rounds=1)
    models = [parts["model"] for parts in replies if parts]
    assert len(models) == 3
    for name, array in result.arrays.items():
        in_order = np.sort(np.stack([one[name] for one in models]), axis=0)
        np.testing.assert_array_equal(array.numpy(), in_order[1])


def test_the_objective_of_the_page_makes_weights_small(written, monkeypatch):
    from sparse import Sparse
    from sparse_method import SparseMethod

    monkeypatch.setitem(OBJECTIVES, "sparse", Sparse())
    run_config = {**defaults(), "model": "cnn", "local-steps": 4, "score-in-training": False}
    model = build("cnn", image_shape=(1, 8, 8), classes=10, seed=0)
    nodes = [Node(app_module.app, {"partition-id": k, "num-partitions": 2}) for k in range(2)]
    grid = InProcessGrid(nodes, {**run_config, "image-shape": "1x8x8", "classes": 10, "min-partition-size": 10})

    def trained(lam):
        strategy = MethodStrategy(SparseMethod(lam), model=model, fraction_evaluate=0)
        arrays = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=1).arrays
        return sum(float(np.abs(array.numpy()).sum()) for array in arrays.values())

    assert trained(0.1) < trained(0.0)


def test_the_blocks_of_the_page_are_found(written):
    from fused import FusedModel
    from patterns import blocks

    first, *_ = found = find_blocks(FusedModel()).query_key
    assert first == "blocks.0.wqkv.weight:q" and len(found) == 2 * 4
    assert len(blocks.query_key) == 2 * 4 and len(blocks.value_projection) == 2 and len(blocks.layers) == 2
    assert blocks.head == ("head.weight", "head.bias")
    FedFrozen(warmup_rounds=2, model=blocks)


@pytest.mark.parametrize("page", sorted(path.name for path in (DOCS / "methods").glob("*.md")))
def test_the_pages_of_the_methods_make_their_strategies_and_score(page):
    model = build("tiny-vit", image_shape=(1, 8, 8), classes=10, seed=0)
    made, *handlers = snippets_of(f"methods/{page}")
    strategy = eval(made, {**vars(strategies), "model": model})
    assert isinstance(strategy, Strategy)
    for handler in handlers:
        images, labels = torch.rand(4, 1, 8, 8), torch.zeros(4, dtype=torch.long)
        names = {
            "app": ClientApp(), "model": model, "images": images, "labels": labels, "batches": [(images, labels)],
            "states": [model.state_dict()],
            "Message": Message, "MetricRecord": MetricRecord, "RecordDict": RecordDict,
        }  # fmt: skip
        exec(handler, names)
        assert "probe" in names or "train.probe" in names["app"]._registered_funcs or isinstance(
            names["score_ensemble"](model, [model.state_dict()], images, labels, None), EnsembleScore
        )


@pytest.mark.long
@pytest.mark.slow
def test_a_new_text_model_with_a_tokenizer_of_its_own_is_trained_from_another_folder(tmp_path, monkeypatch):
    """The commands of docs/data.md, in a folder with texts and without a checkout."""
    monkeypatch.chdir(tmp_path)
    draw = random.Random(0)
    words = {"good": ["nzuri", "sana", "furaha", "\u00e8r\u00ed"], "bad": ["mbaya", "huzuni", "b\u00fab\u00far\u00fa"]}
    rows = [(" ".join(draw.choices([*words[label], "kitabu", "filamu"], k=8)), label) for label in [*words] * 60]
    Path("texts.txt").write_text("\n".join(text for text, _ in rows))
    Path("reviews.tsv").write_text("text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows))
    exec(files_of("data.md")["new_bert.py"], {})
    tokens = load_tokenizer(str(tmp_path / "my-bert"))
    row = tokens.texts(["nzuri sana"], 16)[0]
    named = tokens._tokenizer.convert_ids_to_tokens(row[row != tokens.padding].tolist())
    assert (named[0], named[-1]) == ("[CLS]", "[SEP]") and len(named) > 2
    (command,) = re.findall(r"^tepal (simulate .*my-bert.*)$", (DOCS / "data.md").read_text(), re.MULTILINE)
    done = CliRunner().invoke(main, [*shlex.split(command), "-c", "num-server-rounds=3 strategy='fedavg'"])
    assert done.exit_code == 0, done.output
    (run,) = (tmp_path / "runs").glob("*-fedavg")
    assert read_metrics(run)[-1].accuracy > 0.8, "two classes with words of their own"


def test_the_drawings_are_those_of_the_code():
    drawings = runpy.run_path(str(DOCS / "drawings.py"))["DRAWINGS"]
    for name, draw in drawings.items():
        assert (DOCS / "methods" / name).read_text() == draw().svg(), "draw them anew: python docs/drawings.py"
    assert {f"methods/{name}" for name in drawings} == {str(p.relative_to(DOCS)) for p in DOCS.glob("methods/*.svg")}


@pytest.mark.long
def test_the_page_on_the_python_api_runs_as_it_stands_with_fewer_rounds(tmp_path, monkeypatch, no_report):
    from tepal.tools import api

    def with_two_rounds(function):
        return lambda *given, **settings: function(*given, **{"local_epochs": 1, **settings, "rounds": 2})

    monkeypatch.chdir(tmp_path)
    for name in ("simulate", "compare"):
        monkeypatch.setattr(api, name, with_two_rounds(getattr(api, name)))
    for number, code in enumerate(snippets_of("python.md")):
        names = {}
        exec(compile(code, f"python.md, block {number}", "exec"), names)
        made = names["compared"].table if "compared" in names else names["run"].metrics
        assert len(made) == 3


@pytest.mark.long
@pytest.mark.slow
def test_the_notebook_gives_what_it_shows(tmp_path, monkeypatch):
    """Numbers may differ a little: machines add floating-point numbers in different orders."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    shown, found = (nbformat.read(DOCS / "python.ipynb", as_version=4) for _ in range(2))
    nbclient.NotebookClient(found, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for ours, theirs in zip(shown.cells, found.cells, strict=True):
        assert numbers_in(theirs) == pytest.approx(numbers_in(ours), rel=0.05, abs=0.03), ours.source


def numbers_in(cell):
    """The numbers that a cell returns and prints, without those in names of folders."""
    outputs = [output for output in cell.get("outputs", []) if output.output_type in ("execute_result", "stream")]
    texts = [output.get("text") or output["data"]["text/plain"] for output in outputs]
    text = re.sub(r"\d{8}-\d{6}|(?<=\d),(?=\d)|<div>.*", "", "\n".join(texts))
    return [float(number) for number in re.findall(r"(?<![\w-])\d+(?:\.\d+)?(?![\w-])", text)]
