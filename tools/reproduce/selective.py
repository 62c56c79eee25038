"""Selective layer fine-tuning (arXiv 2408.15600), Tables 1 and 2 and Figure 2.

Clients differ in labels (CIFAR-10) or in features (domains of PACS, newsgroups), and train one, two, or one to four
layers. The settings of every selection are searched on examples that the results do not have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tepal.records.run_directory import write_whole
from tepal.report.page import Figure, empty_plot
from tepal.tools.reproduce.data import Images, shuffled_images, write_images
from tepal.tools.reproduce.experiment import (
    WEIGHTS,
    Experiment,
    MissingData,
    Reproduction,
    Trial,
    TrialInputs,
    Values,
    joined,
)
from tepal.tools.reproduce.networks import write_text_model
from tepal.tools.reproduce.runs import by_setting, trained
from tepal.tools.reproduce.tuning import SEED, search_trials, tuned
from tepal.tools.reproduce.versus import by_seed, on_server, versus
from tepal.tools.spaces import Choices, Range, Space
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
SEARCHED = "1-4"
"""The budget with which the settings of every selection are searched."""
_RATE: Mapping[str, Space] = {"learning-rate": Range(0.003, 0.3, log=True)}
SEARCH: Mapping[str, Mapping[str, Space]] = {
    **dict.fromkeys(SELECTIONS, _RATE),
    "gradient": {**_RATE, "selective.coupling": Choices((0.0, 0.1, 0.2, 0.4)),
                 "selective.fill": Choices((False, True))},
}  # fmt: skip
"""Selection → the run config keys that are searched, and among which values."""
_COMMON: Mapping[str, Any] = {
    "strategy": "selective", "optimizer": "sgd", "weight-decay": 0.0, "schedule": "constant", "fraction-evaluate": 0.0,
    "score-in-training": False, "held-out-fraction": 0.0,
}  # fmt: skip
_SMALL: Mapping[str, Any] = {
    "fraction-train": 0.5, "num-server-rounds": 15, "evaluate-every": 5, "local-steps": 10, "batch-size": 16,
}  # fmt: skip
_VIT: Mapping[str, Any] = {"model": "compact-vit", "pretrained": "compact-vit-c100", "normalise": "cifar-100"}
_CLIP: Mapping[str, Any] = {"model": "openai/clip-vit-base-patch32", "image-shape": "3x224x224", "batch-size": 64}


@dataclass(frozen=True)
class Kind:
    """How clients differ: data sets, number of clients, and run config of the small and the full setting."""

    title: str
    data: str
    clients: int
    config: Mapping[str, Any]
    full_data: str
    full_clients: int
    full_config: Mapping[str, Any]


KINDS: Mapping[str, Kind] = {
    "labels": Kind(
        "clients differ in labels", "cifar-10", 20, {**_VIT, "partitioner": "dirichlet", "dirichlet-alpha": 0.1},
        "cifar-10", 100,
        {**_CLIP, "partitioner": "dirichlet", "dirichlet-alpha": 0.1, "normalise": "cifar-10", "fraction-train": 0.2,
         "num-server-rounds": 50, "local-steps": 5},
    ),
    "domains": Kind(
        "clients differ in domains", "pacs", 20, {**_VIT, "partitioner": "natural"},
        "domainnet", 6,
        {**_CLIP, "partitioner": "natural", "normalise": "domainnet", "num-server-rounds": 30, "local-steps": 1},
    ),
    "texts": Kind(
        "clients differ in newsgroups", "20newsgroups", 16,
        {"partitioner": "natural", "text-column": "text", "split-column": "split", "group-column": "group",
         "text-length": 48, "num-server-rounds": 10, "evaluate-every": 10},
        "xglue-nc", 100,
        {"model": "xlm-roberta-base", "partitioner": "dirichlet", "fraction-train": 0.2, "num-server-rounds": 20,
         "local-epochs": 1, "batch-size": 32},
    ),
}  # fmt: skip
_TEXT_MODEL = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256}
PRETRAIN: Mapping[str, Any] = {
    **{key: value for key, value in KINDS["texts"].config.items() if key != "group-column"}, "partitioner": "iid",
    "strategy": "fedavg", "num-server-rounds": 8, "evaluate-every": 8, "local-epochs": 1, "batch-size": 32,
    "optimizer": "adamw", "learning-rate": 0.002, "held-out-fraction": 0.1, "test-fraction": 0.01,
    "fraction-evaluate": 0.0, "score-in-training": False, "seed": 42,
}  # fmt: skip
"""The run that pretrains the small text model, on other newsgroups."""

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
    """Accuracy by selection and budget, and which layers are selected.

    Args:
        kind: how clients differ, one of `KINDS`.
    """

    paper = "Selective layer fine-tuning, Tables 1 and 2, Figure 2 (arXiv 2408.15600)"
    deviations = (
        "The learning rate of every selection, for gradients also λ (as a share) and whether budgets are filled, are "
        f"found by the same number of trials of Optuna's TPE sampler with R = {SEARCHED}, on examples that the results "
        "do not have. The paper has one rate for all, and tunes λ between 1 and 1000 for every data set.",
        "Differences are paired by seed; intervals are Student's at 95 %.",
        "The small setting has vision transformers of five layers that were trained on CIFAR-100 (compact-vit-c100), "
        "and a text model of four layers that was pretrained on other newsgroups, instead of CLIP ViT-B/32 and XLM-R. "
        "PACS replaces DomainNet, and newsgroups by subject replace XGLUE-NC: a client has one domain, or one "
        "newsgroup of each subject.",
        "--full omits question answering with LLaMA-2-7B, has one client per domain of DomainNet (the paper: 100 "
        "clients), divides XGLUE-NC by a Dirichlet distribution (the paper: by languages), and normalises images by "
        "their data set's statistics (CLIP has its own).",
    )
    small_scale = (
        "4,000 images, or ten newsgroups; 20 clients (16), half of them per round, 15 rounds (10) of ten steps; five "
        "seeds, six trials of a search; R = 1 and R = 1 to 4."
    )
    full_scale = (
        "The paper's models, data sets, rounds and batch sizes, from pretrained weights in weights/; five seeds, "
        "twelve trials of a search."
    )

    def __init__(self, kind: str) -> None:
        self.name, self.kind = f"selective-{kind}", KINDS[kind]
        self.title = f"Selective layer fine-tuning: {self.kind.title}"

    def data(self, full: bool) -> Sequence[str]:
        return (self.kind.full_data if full else self.kind.data,)

    def weights(self, full: bool) -> Mapping[str, str]:
        model = str(self.kind.full_config["model"])
        return {model: f"the paper's pretrained weights of {model}"} if full else {}

    def trials(self, full: bool) -> Sequence[Trial]:
        pretrained = not full and self.kind.data == "20newsgroups"
        trials = [Trial("pretrained", {"part": "pretraining", "config": PRETRAIN, "clients": 2})] if pretrained else []
        before, searched = tuple(trial.name for trial in trials), 12 if full else 6
        for selection, search in SEARCH.items():
            options = self._options(selection, SEARCHED, SEED, full, "search")
            of = search_trials(selection, options, search, searched)
            trials += [replace(trial, needs=(*before, *trial.needs)) for trial in of]
            needs = (*before, *(trial.name for trial in of))
            budgets = ("1",) if selection == "full" else BUDGETS if full else ("1", "1-4")
            trials += [
                Trial(f"{selection}-{budget}-{seed}", self._options(selection, budget, seed, full, "main"), needs)
                for budget in budgets for seed in (1, 2, 3, 4, 5)
            ]  # fmt: skip
        return trials

    def compute(self, trial: Trial, inputs: TrialInputs) -> Values:
        part = trial.options["part"]
        files = self._files(trial, inputs)
        if part == "pretraining":
            weights = inputs.folder / WEIGHTS / "texts.safetensors"
            return trained(trial, inputs, weights=weights, **files)
        needed = {name: of for name, of in inputs.needed.items() if name != "pretrained"}
        searched = replace(inputs, needed=needed)
        return tuned(replace(trial, needs=tuple(needed)), searched, SEARCH[trial.options["selection"]], **files)

    def results(self, found: Mapping[str, Values]) -> Reproduction:
        parts, lines = list[Reproduction](), dict[str, dict[str, list[float]]]()
        for budget in BUDGETS:
            names = {each: f"{each}-{'1' if each == 'full' else budget}" for each in SELECTIONS}
            runs = {each: of for each, name in names.items() if (of := by_seed(found, name))}
            scores, what = on_server(runs), f"R = {budget}"
            if "gradient" not in scores:
                continue
            for each, seeds in scores.items():
                lines.setdefault(each, {})[budget] = [*seeds.values()]
            title = f"Accuracy with {what}, {len(scores['gradient'])} seeds"
            paper = PAPER[self.kind.full_data]
            papers = {**paper[budget], **{each: of for each, of in paper["1"].items() if each == "full"}}
            parts.append(versus("gradient", runs, scores, title, what=what, paper=papers))
            parts.append(_layers(runs["gradient"], budget))
        if parts:
            figure = by_setting(lines, "budgets", "By budget", "layers that a client trains", _CAPTION)
            parts.append(Reproduction([], [figure]))
        return joined(*parts)

    def _options(self, selection: str, budget: str, seed: int, full: bool, part: str) -> dict[str, Any]:
        kind = self.kind
        config: dict[str, Any] = {
            **_COMMON, **(kind.full_config if full else {**_SMALL, **kind.config}), "selective.selection": selection,
            "seed": seed,
        }  # fmt: skip
        config |= {"selective.budget": float(BUDGETS[budget])} if BUDGETS[budget] else {"selective.draw-budgets": True}
        clients = kind.full_clients if full else kind.clients
        return {"selection": selection, "part": part, "full": full, "config": config, "clients": clients}

    def _files(self, trial: Trial, inputs: TrialInputs) -> dict[str, Any]:
        """Keys of the run config with files of this machine. Raises MissingData."""
        part, data = trial.options["part"], self.kind.data
        if trial.options.get("full"):
            data, model = self.kind.full_data, str(trial.options["config"]["model"])
            weights = inputs.folder / WEIGHTS / model
            return {"dataset": data, "dataset-path": str(inputs.data[data]), "pretrained": str(weights)}
        if data != "20newsgroups":
            return {"dataset": str(_images(data, inputs, part))}
        folder = newsgroups(inputs.folder / "texts", inputs.data[data])
        files = {"dataset": str(folder / f"{part}.jsonl"), "model": str(folder / "model")}
        weights = inputs.folder / WEIGHTS / "texts.safetensors"
        return files if part == "pretraining" else {**files, "pretrained": str(weights)}


_CAPTION = "Accuracy on examples that no client has."


def _layers(runs: Mapping[int, Values], budget: str) -> Reproduction:
    """Which layers the gradients select: the picture of the first seed, and shares over all."""
    layers = [of["layers"] for of in runs.values()]
    shares = np.mean([np.mean(each, axis=0) for each in layers], axis=0)
    most = ", ".join(f"{k + 1} ({shares[k]:.0%})" for k in np.argsort(-shares) if shares[k] >= 0.005)
    finding = f"R = {budget}: gradients select {shares.sum():.2f} layers per client; of {len(shares)} layers {most}."
    return Reproduction([], [_selected(layers[0], budget)], [finding])


def _images(data: str, inputs: TrialInputs, part: str) -> Path:
    """A file of the images of the results or of the search, written once; they share none. For PACS a group is a fifth
    of a domain."""
    path = inputs.folder / "images" / f"{data}-{part}.npz"
    if path.exists():
        return path
    train, test = shuffled_images(data, inputs.data[data], seed=1)
    if test is None:
        test, train = train.first(1_500), train.first(len(train), after=1_500)
    eighth = min(len(train), 8_000) // 8
    chosen, tested = train.first(4 * eighth), test.first(1_500)
    if part == "search":
        chosen, tested = train.first(3 * eighth, after=4 * eighth), train.first(eighth, after=7 * eighth)
    if data == "pacs":
        if chosen.groups is None:
            raise MissingData(f"{inputs.data[data]} has no domain for each image")
        fifths = [int(np.sum(chosen.groups[:k] == group)) % 5 for k, group in enumerate(chosen.groups)]
        groups = np.array([f"{group}-{k}" for group, k in zip(chosen.groups, fifths, strict=True)])
        chosen = Images(chosen.images, chosen.labels, groups)
    return write_images(path, chosen, tested)


def newsgroups(folder: Path, path: Path) -> Path:
    """Write tables of texts, once, and the folder of a small model: newsgroups to pretrain on (`pretraining.jsonl`),
    and newsgroups by domain for the results (`main.jsonl`) and for the search (`search.jsonl`), a third of the training
    texts, of which a quarter is its test set.

    Labels are the newsgroups to pretrain on, and the subjects otherwise; a group is an eighth of a domain.

    Returns:
        The folder.
    """
    lines: dict[str, list[str]] = {"pretraining": [], "search": [], "main": []}
    if (folder / "main.jsonl").exists():
        return folder
    source = named_source(DataConfig(dataset="20newsgroups", dataset_path=str(path)))
    assert isinstance(source, Source) and isinstance(source.train, Texts) and isinstance(source.test, Texts)
    subjects = list(SUBJECTS)
    domain_of = {name: (k, subjects.index(subject)) for subject, names in SUBJECTS.items()
                 for k, name in enumerate(names[:_DOMAINS])}  # fmt: skip
    others = [name for names in SUBJECTS.values() for name in names[_DOMAINS:]]
    for split, part in (("train", source.train), ("test", source.test)):
        assert part.labels is not None
        count: dict[int, int] = {}
        for text, label in zip(part.texts, part.labels, strict=True):
            name = source.class_names[label]
            if name in domain_of:
                domain, subject = domain_of[name]
                number = count[domain] = count.get(domain, -1) + 1
                searched = split == "train" and number // _PARTS % 3 == 0
                tested = searched and number // _PARTS // 3 % 4 == 0
                line = {"text": text, "label": subject, "split": "test" if tested else split,
                        "group": f"{domain}-{number % _PARTS}"}  # fmt: skip
                lines["search" if searched else "main"].append(json.dumps(line))
            elif name in others:
                lines["pretraining"].append(
                    json.dumps({"text": text, "label": others.index(name), "split": split})
                )
    write_text_model(folder / "model", source.train.texts, _TEXT_MODEL)
    for name, each in lines.items():
        write_whole(folder / f"{name}.jsonl", ("\n".join(each) + "\n").encode())
    return folder


def _selected(layers: Sequence[Sequence[float]], budget: str) -> Figure:
    """The share of clients that train each layer, by round, as in Figure 2; `layers`: (rounds, layers)."""
    plot = empty_plot("round", "layer", rounds=len(layers))
    share = np.array(layers).T
    plot.add_heatmap(
        x=list(range(1, share.shape[1] + 1)), y=list(range(1, share.shape[0] + 1)), z=share.tolist(), zmin=0, zmax=1,
        showscale=False, hovertemplate="round %{x}, layer %{y}: %{z:.0%}<extra></extra>",
        meta={"role": "second", "spoken": f"{share.shape[0]} layers, {share.shape[1]} rounds."},
    )  # fmt: skip
    plot.update_yaxes(dtick=1)
    caption = "Share of a round's clients that train each layer (1: next to the input); by gradient norms, first seed."
    return Figure(f"layers-{budget}", f"Layers selected, R = {budget}", caption, plot)
