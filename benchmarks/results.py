"""Accuracy and bytes of federated runs on real data, from trained and from random weights.

    python benchmarks/results.py DATA [--only mnist,pacs] [--seeds 1,2,3] [--runs runs/results] [--page]

DATA is a folder with the files that EXPERIMENTS names, in any of the formats of docs/data.md. Each experiment is one
`tepal compare` with conf/results/<name>.toml, a run config (FedAvg and the four methods, three seeds) or a variants
file (five seeds; its settings were searched with conf/search/<name>.toml, docs/simulation.md). An interrupted
experiment is resumed, a finished one is not run again. `--page` prints docs/results.md from the finished experiments.
Tokenizers of text models with random weights are trained here on the training texts. Each experiment uses one process
and one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from tepal.host.toml import parse_run_config
from tepal.tools.compare.comparison import find_comparison, is_comparison, measure, read_comparison
from tepal.tools.compare.figure_columns import columns_of
from tepal.tools.compare.tables import variants_table
from tepal.tools.compare.text_files import markdown
from tepal.tools.reproduce.networks import VOCABULARY, write_text_model
from tepal.training.data import DataConfig, load_client_texts

ROOT = Path(__file__).resolve().parents[1]
SHOWN = ("server_accuracy", "clients_accuracy", "clients_spread", "bytes_total", "bytes_vs_fedavg")
_SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
BERT = {"model_type": "bert", "vocab_size": VOCABULARY, "max_position_embeddings": 64, **_SMALL}
LLAMA = {"model_type": "llama", "vocab_size": VOCABULARY, "tie_word_embeddings": True, **_SMALL}


@dataclass(frozen=True)
class Experiment:
    """A data set in the folder DATA, and its number of clients; `model`: config.json of a model of texts.

    Without `clients`, conf/results/<name>.toml is a variants file, which gives their number.
    """

    title: str
    file: str
    clients: int | None = None
    named: bool = False
    """Whether the config names the data set, and the file is what belongs to the name."""
    model: Mapping[str, object] | None = None
    about: str = ""

    @property
    def key(self) -> str:
        return "dataset-path" if self.named else "dataset"

    @property
    def seeds(self) -> str:
        return "1,2,3,4,5" if self.clients is None else "1,2,3"


EXPERIMENTS = {
    "20-newsgroups-pretrained": Experiment(
        "20 Newsgroups, trained weights", "news20.jsonl.xz", named=True,
        about="`compact-bert-news`, trained on the texts without their labels; “bydate”, 50 clients, Dirichlet 0.3",
    ),
    "cifar-10-pretrained": Experiment(
        "CIFAR-10, trained weights", "cifar10_subset.npz", named=True,
        about="`compact-vit-c100`, trained on CIFAR-100; 10,000 of the training images and 2,000 of the test images, "
        "50 clients, Dirichlet 0.3",
    ),
    "fashion-mnist-pretrained": Experiment(
        "Fashion-MNIST, trained weights", "fashion_mnist.npz", named=True,
        about="`compact-vit-c100`, trained on CIFAR-100; 200 clients, Dirichlet 0.3, images of 32x32",
    ),
    "pacs-pretrained": Experiment(
        "PACS, trained weights", "pacs32.npz",
        about="`compact-vit-c100`, trained on CIFAR-100; 9,991 images of 32x32, a client for each of the four domains",
    ),
    "mnist": Experiment(
        "MNIST by writer", "mnist.npz", 200, True,
        about="539 writers, whole ones dealt to 200 clients, images of 16x16",
    ),
    "fashion-mnist": Experiment(
        "Fashion-MNIST", "fashion_mnist.npz", 200, True, about="200 clients, Dirichlet 0.3, images of 16x16"
    ),
    "cifar-10": Experiment(
        "CIFAR-10", "cifar10_subset.npz", 50, True,
        about="10,000 of the training images and 2,000 of the test images, 50 clients, Dirichlet 0.3",
    ),
    "pacs": Experiment("PACS", "pacs32.npz", 4, about="9,991 images of 32x32, a client for each of the four domains"),
    "shakespeare": Experiment(
        "Shakespeare's roles", "shakespeare_roles.jsonl.xz", 100, about="1,330 roles, whole ones dealt to 100 clients"
    ),
    "20-newsgroups": Experiment(
        "20 Newsgroups", "news20.jsonl.xz", 50, model=BERT, about="“bydate”, 50 clients, Dirichlet 0.3"
    ),
    "qa": Experiment(
        "ARC, OpenBookQA, PIQA", "qa_arc_obqa_piqa.jsonl.xz", 40, model=LLAMA, about="14,213 questions, 40 clients"
    ),
}  # fmt: skip


def config_file(name: str) -> Path:
    return ROOT / "conf" / "results" / f"{name}.toml"


def run(name: str, data: Path, runs: Path, seeds: str | None) -> int:
    """Run the unfinished part of one experiment; returns the exit status of `tepal compare`."""
    experiment, folder = EXPERIMENTS[name], runs / name
    command = [sys.executable, "-m", "tepal.tools.cli.main", "compare", str(ROOT)]
    if found := begun(folder):
        command += ["--resume", str(found)]
    else:
        config = {experiment.key: str(data / experiment.file), "runs": str(folder)}
        if experiment.model:
            config["model"] = str(text_model(name, data, runs))
        given = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        command += [*options(name, config_file(name), seeds or experiment.seeds), "-c", given]
    return subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ}).returncode


def options(name: str, config: Path, seeds: str) -> list[str]:
    """The options of `tepal compare` for one experiment."""
    clients = EXPERIMENTS[name].clients
    if clients is None:
        return ["--variants", str(config), "--seeds", seeds]
    return ["--clients", str(clients), "--seeds", seeds, "-c", str(config)]


def described(model: Mapping[str, object]) -> str:
    return f"{model['model_type']}, {model['num_hidden_layers']} layers, width {model['hidden_size']}"


def begun(folder: Path) -> Path | None:
    """The experiment's comparison, if one was started."""
    return find_comparison(folder) if any(map(is_comparison, folder.glob("*"))) else None


def text_model(name: str, data: Path, runs: Path) -> Path:
    """A directory with a configuration and a tokenizer of word pieces, trained on the training texts."""
    folder = runs / f"{name}-model"
    if (folder / "tokenizer.json").exists():
        return folder
    keys = {"dataset": str(data / EXPERIMENTS[name].file), "partitioner": "iid"}
    config = DataConfig.from_run_config(parse_run_config([str(config_file(name))]) | keys)
    texts = load_client_texts(config, {"partition-id": 0, "num-partitions": 1}, client=name).train  # of all clients
    write_text_model(folder, [*texts.texts, *chain.from_iterable(texts.choices or ())], EXPERIMENTS[name].model or {})
    return folder


INTRODUCTION = """# Results on real data

What each method reaches and costs on real data, in short federated runs of small models. They are not records.

The first four experiments start from [weights that come with Tepal](models.md#weights-that-come-with-tepal), with five
seeds. The learning rate of each variant is the best of a search on the clients’ own tests, with another seed and the
same number of trials for each (`conf/search`, [how to search](simulation.md#searching-for-settings)), with one
exception: on CIFAR-10 the search could not decide between .001 and .002 for FedAvg and FedFrozen; .001 was chosen after
one run of FedAvg with each, scored on the server's data. On 20 Newsgroups, Fashion-MNIST and PACS the best rate found
for single layers is the largest that was tried, so larger ones may be better. The other experiments start from random
weights, with three seeds and one setting for all methods. Frozen projections and single layers are meant for models
that were trained before, so those tables show the methods at their worst.

Every figure is the mean over the seeds ± their standard deviation. **Server’s data** is the accuracy of the global
model (or the ensemble) on examples that no client has. **Clients’ own tests** is the mean over the clients of the
accuracy on their own test examples (of their personal models under FedACS); the spread is the standard deviation over
the clients. Bytes are payload of all clients, both ways. Where clients score the result, they include sending it to
them after the last round; if few clients train and all of them score, this is the larger part (an ensemble is three
models). "Share of FedAvg's bytes" is relative to what FedAvg would send in the same exchanges. FedACS has fewer
exchanges, because its clients are sent no final model to score, so its share is larger than its bytes divided by
FedAvg's. Bytes to the target count all rounds up to the first scored round that reaches it. Every fourth round is
scored on 20 Newsgroups and Fashion-MNIST, every tenth on CIFAR-10 and every second on PACS. On 20 Newsgroups only the
last score reaches the target, so these factors equal those of the total bytes.

Each table is one command, with the data set's file in `dataset` or, if the config names the data set, in
`dataset-path`; `python benchmarks/results.py DATA` runs all of them, and makes the small models for texts.

The papers' own experiments, with their numbers next to ours: [reproducing the papers](reproduce.md).

From trained weights:

- FedAvg is far above the smaller models below (in brackets), which start from random weights and take fewer steps: 20
  Newsgroups 0.60 (a guess), CIFAR-10 0.71 (0.26), PACS 0.68 (0.34), Fashion-MNIST 0.79 (0.70).
- FedFrozen has FedAvg's accuracy, and saves up to a fifth of the bytes to the target; least on 20 Newsgroups, where
  most parameters are word embeddings.
- A single layer of each client is 0.003 to 0.02 below FedAvg, for a fifth to a quarter of the bytes; for half of them
  if, as on Fashion-MNIST, most clients train once, and must first be sent the whole model. On CIFAR-10 and PACS four of
  five seeds reach the target.
- On PACS, after four rounds, FedACS and local training alone are both 0.10 above FedAvg on the clients' own tests.
  Which of the two is better is undecided: FedACS is 0.003 above local, 95 % interval −0.009 to +0.016. The smallest
  learning rate that was tried suits all three best.

From random weights:

- FedFrozen stays within 0.01 of FedAvg on the server's data everywhere.
- Selective layer fine-tuning is designed for pretrained models; embeddings are never trained. From random weights it is
  0.06 below FedAvg on MNIST, and at most 0.04 elsewhere.
- FedACS is better on the clients' own tests if clients differ and most of them have trained (CIFAR-10, PACS, 20
  Newsgroups), and worse if most train once or never (MNIST, Fashion-MNIST) or have similar data (Shakespeare): personal
  models have then been trained for a few steps only.
- Small transformers learn little from one pass over a few texts. On 20 Newsgroups the global models are no better than
  chance, 0.05, where FedACS's personal models learn which labels their client has; for the questions chance is 0.28."""


def page(runs: Path) -> Iterator[str]:
    """The text of docs/results.md, from the finished experiments."""
    yield INTRODUCTION
    for name, experiment in EXPERIMENTS.items():
        if (found := begun(runs / name)) is None:
            continue
        comparison = read_comparison(found)
        results = measure(comparison)
        config = config_file(name).relative_to(ROOT)
        yield f"## {experiment.title}"
        about = f"{experiment.about[:1].upper()}{experiment.about[1:]}"
        given = f'{experiment.key}="{experiment.file}"'
        if experiment.clients is None:
            yield f"{about}."
        elif experiment.model:
            given = f'{given} model="{name}-model"'
            yield f"{about}; {described(experiment.model)}."
        else:
            yield f"{about}; `{comparison.run_config['model']}`."
        asked = " ".join(options(name, config, ",".join(map(str, comparison.seeds))))
        yield f"```sh\ntepal compare . {asked} -c '{given}'\n```"
        if experiment.clients is None:
            _, _, sections = markdown(results).partition("\n\n")  # without the heading
            yield re.sub("^#", "##", sections, flags=re.MULTILINE).rstrip()
        else:
            (group,) = results.sections
            yield variants_table(group, [each for each in columns_of(results.by) if each.key in SHOWN]).markdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--only", default=",".join(EXPERIMENTS))
    parser.add_argument("--seeds", help="default: 1,2,3; of a variants file 1,2,3,4,5")
    parser.add_argument("--runs", type=Path, default=Path("runs/results"))
    parser.add_argument("--page", action="store_true", help="run nothing, print docs/results.md")
    given = parser.parse_args()
    if given.page:
        print("\n\n".join(page(given.runs)))
        return
    names = given.only.split(",")
    if unknown := sorted(set(names) - set(EXPERIMENTS)):
        parser.error(f"--only: unknown {', '.join(unknown)}; known are {', '.join(EXPERIMENTS)}")
    sys.exit(max(run(name, given.data.resolve(), given.runs.resolve(), given.seeds) for name in names))


if __name__ == "__main__":
    main()
