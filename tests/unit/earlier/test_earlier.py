"""Runs that an earlier version has left are gone on with: their checkpoints, stores of models and clients' caches.

`make.py` says how `runs-119af80.tar.xz` was made, by the version that its name says.
"""

import json
import tarfile
from pathlib import Path

import pytest

from tests.quiet import quiet  # noqa: F401
from tests.unit.earlier.make import ROUNDS, figures_of, run_rounds

ARCHIVE = Path(__file__).with_name("runs-119af80.tar.xz")


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def names():
    with tarfile.open(ARCHIVE) as archive:
        return sorted(Path(name).parent.name for name in archive.getnames() if name.endswith("third.json"))


@pytest.mark.parametrize("name", names())
def test_the_next_round_measures_what_it_measured_then(earlier, name):
    run = next(path for path in (earlier / name / "runs").iterdir() if not path.is_symlink())
    run_rounds(earlier / name, {"resume": str(run), "num-server-rounds": ROUNDS + 1})
    rounds = [json.loads(line)["round"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rounds[-1] == ROUNDS + 1 and len(set(rounds)) == len(rounds), "the first rounds were run again"
    then, now = json.loads((earlier / name / "third.json").read_text()), figures_of(run, ROUNDS + 1)
    # The clients' caches have the digests of that version: whatever they are to have is sent once more.
    then["bytes_down"] = figures_of(run, 1)["bytes_down"]
    if name == "fedensemble":  # that version recorded the scores of single modes as the ensemble's
        then |= {key: None for key in then if key.startswith("received_")}
    for key, value in then.items():
        assert now[key] == (value if value is None else pytest.approx(value, rel=1e-5)), key
