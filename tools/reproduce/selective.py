"""Selective layer fine-tuning (arXiv 2408.15600), Tables 1 and 2 and Figure 2.

Clients differ in labels (CIFAR-10) or in features (domains of PACS, newsgroups), and train one, two, or one to four
layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tepal.records.run_directory import write_whole
from tepal.report.page import Figure, empty_plot
from tepal.report.table import Table
from tepal.tools.reproduce.data import Images, shuffled_images, write_images
from tepal.tools.reproduce.experiment import Experiment, MissingData, Reproduction, Trial, TrialInputs, Values, table
from tepal.tools.reproduce.fedfrozen_vision import PRETRAIN
from tepal.tools.reproduce.networks import VIT, write_text_model
from tepal.tools.reproduce.runs import by_setting, paper_table, trained
from tepal.training.data.config import DataConfig
from tepal.training.data.examples import Source, Texts
from tepal.training.data.sources import named_source

SELECTIONS = ("full", "top", "bottom", "both", "snr", "rgn", "gradient")
BUDGETS = {"1": 1, "2": 2, "1-4": 0}
"""The budget R: how many layers a client trains; 0: drawn for each client."""
PAPER: Mapping[str, Mapping[str, Mapping[str, float]]] = {
    "cifar-10": {
        "1": {"top": 0.9309, "bottom": 0.2738, "snr": 0.9447, "rgn": 0.9269, "gradient": 0.9547, "full": 0.9543},
        "2": {"top": 0.9361, "bottom": 0.3281, "both": 0.9496, "snr": 0.9049, "rgn": 0.8948, "gradient": 0.9605},
        "1-4": {"top": 0.9122, "bottom": 0.2738, "both": 0.8991, "snr": 0.7572, "rgn": 0.9383, "gradient": 0.9557},
    },
    "domainnet": {
        "1": {"top": 0.8786, "bottom": 0.1380, "snr": 0.8638, "rgn": 0.8880, "gradient": 0.8937, "full": 0.9027},
        "2": {"top": 0.8832, "bottom": 0.1863, "both": 0.8548, "snr": 0.8767, "rgn": 0.8719, "gradient": 0.8964},
        "1-4": {"top": 0.8929, "bottom": 0.2310, "both": 0.8627, "snr": 0.8734, "rgn": 0.8819, "gradient": 0.8939},
    },
    "xglue-nc": {
        "1": {"top": 0.6986, "bottom": 0.4043, "snr": 0.6911, "rgn": 0.7406, "gradient": 0.7495, "full": 0.8211},
        "2": {"top": 0.7705, "bottom": 0.4060, "both": 0.7465, "snr": 0.7992, "rgn": 0.7948, "gradient": 0.8039},
        "1-4": {"top": 0.7817, "bottom": 0.5092, "both": 0.7301, "snr": 0.7824, "rgn": 0.7936, "gradient": 0.8018},
    },
}
"""Data set → R → selection → accuracy."""
BESIDE = {"cifar-10": "cifar-10", "pacs": "domainnet", "20newsgroups": "xglue-nc"}
"""Data set → the paper's data set with the same kind of heterogeneity."""
COUPLINGS = (0.0, 0.001, 0.01, 0.1, 1.0)
"""λ of problem (P1), varied on CIFAR-10 with different budgets: with R = 1 all clients select the same layer anyway."""
COUPLING = 0.1

_COMMON: Mapping[str, Any] = {
    "strategy": "selective", "optimizer": "sgd", "learning-rate": 0.01, "weight-decay": 0.0, "schedule": "constant",
    "fraction-evaluate": 0.0, "score-in-training": False,
}  # fmt: skip
_SMALL: Mapping[str, Any] = {
    "fraction-train": 0.5, "num-server-rounds": 15, "evaluate-every": 5, "local-steps": 10, "batch-size": 16,
    "learning-rate": 0.1,
}  # fmt: skip
SMALL: Mapping[str, Mapping[str, Any]] = {
    "cifar-10": {"model": VIT, "normalise": "cifar-10", "partitioner": "dirichlet", "dirichlet-alpha": 0.1},
    "pacs": {"model": VIT, "normalise": "cifar-10", "partitioner": "natural"},
    "20newsgroups": {
        "partitioner": "natural", "text-column": "text", "split-column": "split", "group-column": "group",
        "text-length": 48, "num-server-rounds": 10, "evaluate-every": 10,
    },
}  # fmt: skip
FULL: Mapping[str, Mapping[str, Any]] = {
    "cifar-10": {
        "model": "openai/clip-vit-base-patch32", "image-shape": "3x224x224", "partitioner": "dirichlet",
        "dirichlet-alpha": 0.1, "normalise": "cifar-10", "fraction-train": 0.2, "num-server-rounds": 50,
        "local-steps": 5, "batch-size": 64, "selective.absolute-coupling": 1000.0,
    },
    "domainnet": {
        "model": "openai/clip-vit-base-patch32", "partitioner": "natural", "normalise": "domainnet",
        "num-server-rounds": 30, "local-steps": 1, "batch-size": 64, "selective.absolute-coupling": 10.0,
    },
    "xglue-nc": {
        "model": "xlm-roberta-base", "partitioner": "dirichlet", "fraction-train": 0.2, "num-server-rounds": 20,
        "local-epochs": 1, "batch-size": 32, "selective.absolute-coupling": 10.0,
    },
}  # fmt: skip
_FULL_CLIENTS = {"cifar-10": 100, "domainnet": 6, "xglue-nc": 100}
_CLIENTS = {"cifar-10": 20, "pacs": 20, "20newsgroups": 16}
_PRETRAINED_ON = {"cifar-10": "pacs", "pacs": "cifar-10", "20newsgroups": "20newsgroups"}
_TEXT_MODEL = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256}

# Newsgroups by subject. The first two of each subject are its two domains; the small text model is pretrained on the
# others, each a class.
SUBJECTS = {
    "computers": ("comp.graphics", "comp.os.ms-windows.misc", "comp.sys.ibm.pc.hardware",
                  "comp.sys.mac.hardware", "comp.windows.x"),
    "leisure": ("rec.autos", "rec.motorcycles", "rec.sport.baseball", "rec.sport.hockey"),
    "science": ("sci.crypt", "sci.electronics", "sci.med", "sci.space"),
    "politics": ("talk.politics.guns", "talk.politics.mideast", "talk.politics.misc"),
    "religion": ("alt.atheism", "soc.religion.christian", "talk.religion.misc"),
}  # fmt: skip
_DOMAINS, _PARTS = 2, 8


class Selective(Experiment):
    """Accuracy by selection and budget, and which layers are selected."""

    name = "selective"
    title = "Selective layer fine-tuning: which layers to train"
    paper = "Selective layer fine-tuning, Tables 1 and 2, Figure 2 (arXiv 2408.15600)"
    deviations = (
        "The small setting has models of six and four layers instead of CLIP ViT-B/32 and XLM-R, pretrained by FedAvg "
        "here: for CIFAR-10 on PACS, for PACS on CIFAR-10, for the newsgroups on other newsgroups. Such weaker weights "
        "need more layers to be trained.",
        "PACS replaces DomainNet, and newsgroups by subject replace XGLUE-NC: a client has one domain (one newsgroup "
        "of each subject).",
        f"λ is {COUPLING:g}, the best of five values on CIFAR-10 with R = 1 to 4, while the paper tunes it between 1 "
        "and 1000 for every data set; the gradient norms that it is weighed against are those of other models.",
        "--full omits question answering with LLaMA-2-7B, and has one client per domain of DomainNet.",
    )
    small_scale = (
        "4,000 images, or ten newsgroups; 20 clients (16), half of them per round, 15 rounds (10) of ten steps at a "
        "learning rate of .1 (the paper: .01); one seed."
    )
    full_scale = "The paper's models, data sets, rounds and batch sizes, from pretrained weights in weights/."

    def data(self, full: bool) -> Sequence[str]:
        return tuple(FULL if full else SMALL)

    def trials(self, full: bool) -> Sequence[Trial]:
        settings = FULL if full else SMALL
        pretraining = [] if full else [Trial(f"pretrained-for-{data}", _pretraining(data)) for data in settings]
        runs = [_trial(data, selection, budget, full) for data in settings for budget, selection in _runs()]
        couplings = [] if full else [each for each in COUPLINGS if each != COUPLING]
        return [*pretraining, *runs, *(_trial("cifar-10", "gradient", "1-4", full, each) for each in couplings)]

    def compute(self, trial: Trial, inputs: TrialInputs) -> Values:
        data, pretraining = str(trial.options["data"]), trial.name.startswith("pretrained")
        files: dict[str, Any] = {}
        if not pretraining and not trial.needs:
            model = str(trial.options["config"]["model"])
            weights = inputs.folder / "weights" / model
            if not weights.exists():
                raise MissingData(f"put the paper's weights of {model} into {weights}")
            files = {"dataset": data, "dataset-path": str(inputs.data[data])}
            return trained(trial, inputs, pretrained=str(weights), **files)
        weights = inputs.folder / "weights" / f"for-{data}.safetensors"
        if data == "20newsgroups":
            others, main = newsgroups(inputs.folder / "texts", inputs.data[data])
            files = {"dataset": str(others if pretraining else main), "model": str(main.parent / "model")}
        elif not pretraining:
            files = {"dataset": str(_images(data, inputs))}
        if pretraining:
            return trained(trial, inputs, weights=weights, **files)
        return trained(trial, inputs, pretrained=str(weights), **files)

    def results(self, found: Mapping[str, Values]) -> Reproduction:
        tables, figures, findings = [], [], []
        for data in dict.fromkeys((*SMALL, *FULL)):
            scores = {
                (budget, selection): found[name]["server"]
                for budget, selection in _runs() if (name := _name(data, selection, budget)) in found
            }  # fmt: skip
            if not scores:
                continue
            tables.append(_table(data, scores))
            lines = {
                selection: {budget: [scores[budget, selection]] for budget in BUDGETS if (budget, selection) in scores}
                for selection in SELECTIONS[1:]
            }
            title = f"{data}, by budget"
            figures.append(by_setting(lines, f"{data}-budgets", title, "layers that a client trains", _CAPTION))
            if layers := found.get(_name(data, "gradient", "1"), {}).get("layers"):
                figures.append(_selected(layers, data))
                shares = np.mean(layers, axis=0)
                most = (f"{k + 1} ({shares[k]:.0%})" for k in np.argsort(-shares) if shares[k] >= 0.005)
                findings.append(f"{data}, R = 1: of {len(shares)} layers, gradient norms select {', '.join(most)}.")
            findings += _rankings(data, scores)
        by_coupling = {each: found.get(_name("cifar-10", "gradient", "1-4", each)) for each in COUPLINGS}
        rows = [
            (f"{coupling:g}", of["server"], float(np.sum(of["layers"], axis=1).mean()))
            for coupling, of in by_coupling.items() if of
        ]  # fmt: skip
        if len(rows) > 1:
            tables.append(table("Accuracy on CIFAR-10 by λ, R = 1-4", ("λ", "ours", "layers per client"), rows))
        for data in SMALL:
            if of := found.get(f"pretrained-for-{data}"):
                findings.append(
                    f"Pretraining for {data} reached an accuracy of {of['server']:.4f} on its held-out examples."
                )
        return Reproduction(tables, figures, findings)


_CAPTION = "Accuracy on examples that no client has."


def _table(data: str, scores: Mapping[tuple[str, str], float]) -> Table:
    theirs = BESIDE.get(data, data)
    return paper_table(
        f"Accuracy on {data}", "selection", {budget: f"R = {budget}" for budget in BUDGETS}, SELECTIONS,
        lambda selection, budget: scores.get((_counted(selection, budget), selection)),
        lambda selection, budget: PAPER[theirs][_counted(selection, budget)].get(selection), f"paper, {theirs}",
    )  # fmt: skip


def _counted(selection: str, budget: str) -> str:
    return "1" if selection == "full" else budget  # `full` has no budget, and is run once


def _rankings(data: str, scores: Mapping[tuple[str, str], float]) -> list[str]:
    """Sentences that rank the selections of each budget, if all of them were computed."""
    sentences = []
    for budget in BUDGETS:
        rivals = {each: scores[budget, each] for each in SELECTIONS[1:] if (budget, each) in scores}
        if len(rivals) == len(SELECTIONS) - 1 and ("1", "full") in scores:
            ranking = ", ".join(f"{each} {rivals[each]:.4f}" for each in sorted(rivals, key=lambda each: -rivals[each]))
            sentences.append(f"{data}, R = {budget}: {ranking}; all layers {scores['1', 'full']:.4f}.")
    return sentences


def _runs() -> list[tuple[str, str]]:
    """(budget, selection) of all runs; `full` has no budget."""
    return [("1", "full"), *((budget, each) for budget in BUDGETS for each in SELECTIONS[1:])]


def _name(data: str, selection: str, budget: str, coupling: float = COUPLING) -> str:
    return f"{data}-{selection}-{budget}" + (f"-coupling-{coupling:g}" if coupling != COUPLING else "")


def _trial(data: str, selection: str, budget: str, full: bool, coupling: float = COUPLING) -> Trial:
    keys = FULL[data] if full else {**_SMALL, **SMALL[data]}
    config: dict[str, Any] = {**_COMMON, **keys, "selective.selection": selection, "seed": 1}
    if selection == "gradient":
        config.setdefault("selective.absolute-coupling", coupling)  # the full setting has the paper's
        config["selective.coupling"] = 0.0  # if λ is 0
    config |= {"selective.budget": float(BUDGETS[budget])} if BUDGETS[budget] else {"selective.draw-budgets": True}
    options = {"data": data, "config": config, "clients": (_FULL_CLIENTS if full else _CLIENTS)[data]}
    needs = () if full else (f"pretrained-for-{data}",)
    return Trial(_name(data, selection, budget, coupling), options, needs)


def _pretraining(data: str) -> Values:
    """Options of the FedAvg run on other data that pretrains the model for `data`."""
    config: dict[str, Any] = dict(PRETRAIN)
    if data == "20newsgroups":
        for key in ("image-shape", "normalise", "model", "dataset"):
            del config[key]
        config |= {**SMALL[data], "group-column": "", "partitioner": "iid", "learning-rate": 0.002}
    else:
        config["dataset"] = _PRETRAINED_ON[data]
    return {"data": data, "config": config, "clients": 2}


def _images(data: str, inputs: TrialInputs) -> Path:
    """A file of 4,000 training and 1,500 test images, written once; for PACS a group is a fifth of a domain."""
    path = inputs.folder / "images" / f"{data}.npz"
    if path.exists():
        return path
    train, test = shuffled_images(data, inputs.data[data], seed=1)
    if test is None:
        test, train = train.first(1_500), train.first(len(train), after=1_500)
    train = train.first(4_000)
    if data == "pacs":
        if train.groups is None:
            raise MissingData(f"{inputs.data[data]} has no domain for each image")
        fifths = [int(np.sum(train.groups[:k] == group)) % 5 for k, group in enumerate(train.groups)]
        groups = np.array([f"{group}-{k}" for group, k in zip(train.groups, fifths, strict=True)])
        train = Images(train.images, train.labels, groups)
    return write_images(path, train, test.first(1_500))


def newsgroups(folder: Path, path: Path) -> tuple[Path, Path]:
    """Write two tables of texts, once: newsgroups to pretrain on, and newsgroups by domain with a small model's folder.

    Labels are the newsgroups to pretrain on, and the subjects otherwise; a group is an eighth of a domain.

    Returns:
        Paths of the table to pretrain on and of the table by domain.
    """
    pretraining, main = folder / "pretraining.jsonl", folder / "by-domain.jsonl"
    if main.exists():
        return pretraining, main
    source = named_source(DataConfig(dataset="20newsgroups", dataset_path=str(path)))
    assert isinstance(source, Source) and isinstance(source.train, Texts) and isinstance(source.test, Texts)
    subjects = list(SUBJECTS)
    domain_of = {name: (k, subjects.index(subject)) for subject, names in SUBJECTS.items()
                 for k, name in enumerate(names[:_DOMAINS])}  # fmt: skip
    others = [name for names in SUBJECTS.values() for name in names[_DOMAINS:]]
    lines: dict[Path, list[str]] = {pretraining: [], main: []}
    for split, part in (("train", source.train), ("test", source.test)):
        assert part.labels is not None
        count: dict[int, int] = {}
        for text, label in zip(part.texts, part.labels, strict=True):
            name = source.class_names[label]
            if name in domain_of:
                domain, subject = domain_of[name]
                count[domain] = count.get(domain, -1) + 1
                group = f"{domain}-{count[domain] % _PARTS}"
                line = {"text": text, "label": subject, "split": split, "group": group}
                lines[main].append(json.dumps(line))
            elif name in others:
                line = {"text": text, "label": others.index(name), "split": split}
                lines[pretraining].append(json.dumps(line))
    write_text_model(folder / "model", source.train.texts, _TEXT_MODEL)
    folder.mkdir(parents=True, exist_ok=True)
    for file, each in lines.items():
        write_whole(file, ("\n".join(each) + "\n").encode())
    return pretraining, main


def _selected(layers: Sequence[Sequence[float]], data: str) -> Figure:
    """The share of clients that train each layer, by round, as in Figure 2; `layers`: (rounds, layers)."""
    plot = empty_plot("round", "layer", rounds=len(layers))
    share = np.array(layers).T
    plot.add_heatmap(
        x=list(range(1, share.shape[1] + 1)), y=list(range(1, share.shape[0] + 1)), z=share.tolist(), zmin=0, zmax=1,
        showscale=False, hovertemplate="round %{x}, layer %{y}: %{z:.0%}<extra></extra>",
        meta={"role": "second", "spoken": f"{share.shape[0]} layers, {share.shape[1]} rounds."},
    )  # fmt: skip
    plot.update_yaxes(dtick=1)
    caption = "Share of a round's clients that train each layer (1: next to the input); R = 1, by gradient norms."
    return Figure(f"{data}-layers", f"{data}, layers selected", caption, plot)
