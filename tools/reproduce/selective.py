"""Table 1 and 2 and Figure 2 of selective layer fine-tuning (arXiv 2408.15600): labels that differ between clients
(CIFAR-10), and features that do (the domains of PACS, newsgroups), with one layer a client, two, and one to four.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tepal.records.run_directory import write_whole
from tepal.report.page import Figure, empty_plot
from tepal.tools.reproduce.data import Images, shuffled_images, write_images
from tepal.tools.reproduce.experiment import Cell, NotAtHand, Outcome, Place, Table, Values
from tepal.tools.reproduce.fedfrozen_vision import PRETRAIN
from tepal.tools.reproduce.networks import VIT, write_text_model
from tepal.tools.reproduce.runs import by_setting, measured, trained
from tepal.training.data.config import DataConfig
from tepal.training.data.examples import Source, Texts
from tepal.training.data.sources import named_source

SELECTIONS = ("full", "top", "bottom", "both", "snr", "rgn", "gradient")
BUDGETS = {"1": 1, "2": 2, "1-4": 0}
"""R, 0: drawn for each client."""
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
"""Data set of the small setting → the paper's that is as skewed, and of the full setting."""
COUPLINGS = (0.0, 0.001, 0.01, 0.1, 1.0)
"""λ of (P1), gone through on CIFAR-10 with budgets that differ: with R = 1 all clients have the same layer anyway."""
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
        "local-steps": 5, "batch-size": 64, "selective.coupling": 1000.0,
    },
    "domainnet": {
        "model": "openai/clip-vit-base-patch32", "partitioner": "natural", "normalise": "domainnet",
        "num-server-rounds": 30, "local-steps": 1, "batch-size": 64, "selective.coupling": 10.0,
    },
    "xglue-nc": {
        "model": "xlm-roberta-base", "partitioner": "dirichlet", "fraction-train": 0.2, "num-server-rounds": 20,
        "local-epochs": 1, "batch-size": 32, "selective.coupling": 10.0,
    },
}  # fmt: skip
_FULL_CLIENTS = {"cifar-10": 100, "domainnet": 6, "xglue-nc": 100}
_CLIENTS = {"cifar-10": 20, "pacs": 20, "20newsgroups": 16}
_PRETRAINED_ON = {"cifar-10": "pacs", "pacs": "cifar-10", "20newsgroups": "20newsgroups"}
_TEXT_MODEL = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256}

# Newsgroups by what they are about. Of each subject the first two make two domains; the others are what the small text
# model is pretrained on, as classes of its own.
SUBJECTS = {
    "computers": ("comp.graphics", "comp.os.ms-windows.misc", "comp.sys.ibm.pc.hardware",
                  "comp.sys.mac.hardware", "comp.windows.x"),
    "leisure": ("rec.autos", "rec.motorcycles", "rec.sport.baseball", "rec.sport.hockey"),
    "science": ("sci.crypt", "sci.electronics", "sci.med", "sci.space"),
    "politics": ("talk.politics.guns", "talk.politics.mideast", "talk.politics.misc"),
    "religion": ("alt.atheism", "soc.religion.christian", "talk.religion.misc"),
}  # fmt: skip
_DOMAINS, _PARTS = 2, 8


class Selective:
    """Accuracy by selection and budget, and which layers are selected."""

    name = "selective"
    title = "Selective layer fine-tuning: which layers to train"
    paper = "Selective layer fine-tuning, Tables 1 and 2, Figure 2 (arXiv 2408.15600)"
    deviations = (
        "The small setting has models of six and four layers in the place of CLIP ViT-B/32 and XLM-R, pretrained by "
        "FedAvg here: for CIFAR-10 on PACS, for PACS on CIFAR-10, for the newsgroups on other newsgroups. Far weaker "
        "weights need more of their layers changed.",
        "PACS stands in for DomainNet, newsgroups by subject for XGLUE-NC: a client has one domain (one newsgroup of "
        "each subject).",
        f"λ is {COUPLING:g}, the best of five on CIFAR-10 with R = 1 to 4, where the paper tunes it among 1 to 1000 "
        "for every data set; the norms that it is set against are those of other models.",
        "--full has no QA with LLaMA-2-7B, and a client a domain of DomainNet.",
    )

    def data(self, full: bool) -> Sequence[str]:
        return tuple(FULL if full else SMALL)

    def scale(self, full: bool) -> str:
        if full:
            return "The paper's models, data sets, rounds and batches, from pretrained weights put into weights/."
        return (
            "4,000 images, or ten newsgroups; 20 clients (16), half of them a round, 15 rounds (10) of ten steps at a "
            "learning rate of .1 (the paper: .01); one seed."
        )

    def cells(self, full: bool) -> Sequence[Cell]:
        if full:
            return [
                _cell(data, selection, budget, {**_COMMON, **keys}, _FULL_CLIENTS[data])
                for data, keys in FULL.items() for budget, selection in _asked()
            ]  # fmt: skip
        cells = [Cell(f"pretrained-for-{data}", _pretraining(data)) for data in SMALL]
        for data, keys in SMALL.items():
            common, needs = {**_COMMON, **_SMALL, **keys}, (f"pretrained-for-{data}",)
            cells += [_cell(data, each, budget, common, _CLIENTS[data], needs) for budget, each in _asked()]
        coupled = {**_COMMON, **_SMALL, **SMALL["cifar-10"]}
        return cells + [
            _cell("cifar-10", "gradient", "1-4", coupled, _CLIENTS["cifar-10"], ("pretrained-for-cifar-10",), coupling)
            for coupling in COUPLINGS if coupling != COUPLING
        ]  # fmt: skip

    def compute(self, cell: Cell, place: Place) -> Values:
        data = str(cell.options["data"])
        if not cell.needs and not cell.name.startswith("pretrained"):
            weights = place.folder / "weights" / str(cell.options["config"]["model"])
            if not weights.exists():
                raise NotAtHand(f"put the paper's weights of {cell.options['config']['model']} into {weights}")
            return trained(cell, place, pretrained=str(weights), **{"dataset-path": str(place.data[data])})
        weights = place.folder / "weights" / f"for-{data}.safetensors"
        keys: dict[str, Any] = {}
        if data == "20newsgroups":
            pretraining, main = newsgroups(place.folder / "texts", place.data[data])
            keys = {"dataset": str(main if cell.needs else pretraining), "model": str(main.parent / "model")}
        elif cell.needs:
            keys = {"dataset": str(_images(data, place))}
        if cell.needs:
            return trained(cell, place, pretrained=str(weights), **keys)
        on = _PRETRAINED_ON[data]
        config = {**cell.options["config"], **({"dataset-path": str(place.data[on])} if on != data else {}), **keys}
        return measured(config, cell.options["clients"], place.folder / "runs" / cell.name, weights=weights)

    def outcome(self, found: Mapping[str, Values]) -> Outcome:
        tables, figures, findings = [], [], []
        for data in (*SMALL, *(name for name in FULL if name not in SMALL)):
            scores = {
                (budget, selection): found[name]["server"]
                for budget, selection in _asked() if (name := _name(data, selection, budget)) in found
            }  # fmt: skip
            if not scores:
                continue
            tables.append(_table(data, scores))
            lines = {
                selection: {budget: [scores[budget, selection]] for budget in BUDGETS if (budget, selection) in scores}
                for selection in SELECTIONS if selection != "full"
            }  # fmt: skip
            title = f"{data}, by budget"
            figures.append(by_setting(lines, f"{data}-budgets", title, "layers a client trains", _CAPTION))
            if layers := found.get(_name(data, "gradient", "1"), {}).get("layers"):
                figures.append(_selected(layers, data))
                shares = np.mean(layers, axis=0)
                most = (f"{k + 1} ({shares[k]:.0%})" for k in np.argsort(-shares) if shares[k] >= 0.005)
                findings.append(f"{data}, R = 1: of {len(shares)} layers the gradients select {', '.join(most)}.")
            for budget in BUDGETS:
                rivals = {each: scores[budget, each] for each in SELECTIONS[1:] if (budget, each) in scores}
                if len(rivals) == len(SELECTIONS) - 1 and ("1", "full") in scores:
                    order = sorted(rivals, key=lambda each: -rivals[each])
                    findings.append(
                        f"{data}, R = {budget}: {', '.join(f'{each} {rivals[each]:.4f}' for each in order)}; "
                        f"all layers {scores['1', 'full']:.4f}."
                    )
        couplings = {
            coupling: found[name] for coupling in COUPLINGS
            if (name := _name("cifar-10", "gradient", "1-4", coupling)) in found
        }  # fmt: skip
        if len(couplings) > 1:
            rows = [
                (f"{coupling:g}", of["server"], float(np.sum(of["layers"], axis=1).mean()))
                for coupling, of in couplings.items()
            ]
            tables.append(Table("Accuracy on CIFAR-10 by λ, R = 1-4", ("λ", "ours", "layers a client"), rows))
        for data in SMALL:
            if of := found.get(f"pretrained-for-{data}"):
                findings.append(f"Pretraining for {data} reached {of['server']:.4f} on held-out examples of its own.")
        return Outcome(tables, figures, findings)


_CAPTION = "On examples that no client has."


def _table(data: str, scores: Mapping[tuple[str, str], float]) -> Table:
    beside = BESIDE.get(data, data)
    rows = []
    for selection in SELECTIONS:
        row: list[str | float | None] = [selection]
        for budget in BUDGETS:
            of = "1" if selection == "full" else budget  # has no budget
            row += [scores.get((of, selection)), PAPER[beside][of].get(selection)]
        rows.append(row)
    headings = ("selection", *(each for budget in BUDGETS for each in (f"R = {budget}", f"paper, {beside}")))
    return Table(f"Accuracy on {data}", headings, rows)


def _asked() -> list[tuple[str, str]]:
    """(budget, selection) of all runs; `full` has no budget."""
    return [("1", "full"), *((budget, each) for budget in BUDGETS for each in SELECTIONS[1:])]


def _name(data: str, selection: str, budget: str, coupling: float = COUPLING) -> str:
    return f"{data}-{selection}-{budget}" + (f"-coupling-{coupling:g}" if coupling != COUPLING else "")


def _cell(
    data: str, selection: str, budget: str, common: Mapping[str, Any], clients: int, needs: Sequence[str] = (),
    coupling: float = COUPLING,
) -> Cell:  # fmt: skip
    config: dict[str, Any] = {**common, "selective.selection": selection, "seed": 1}
    if selection == "gradient":
        config.setdefault("selective.coupling", coupling)  # --full has the paper's
    config |= {"selective.budget": float(BUDGETS[budget])} if BUDGETS[budget] else {"selective.draw-budgets": True}
    return Cell(_name(data, selection, budget, coupling), {"data": data, "config": config, "clients": clients}, needs)


def _pretraining(data: str) -> Values:
    """A run of FedAvg on other data, whose model those of `data` start from."""
    config: dict[str, Any] = dict(PRETRAIN)
    if data == "20newsgroups":
        for key in ("image-shape", "normalise", "model", "dataset"):
            del config[key]
        config |= {**SMALL[data], "group-column": "", "partitioner": "iid", "learning-rate": 0.002}
    else:
        config["dataset"] = _PRETRAINED_ON[data]
    return {"data": data, "config": config, "clients": 2}


def _images(data: str, place: Place) -> Path:
    """4,000 training and 1,500 test images; of PACS a group is a fifth of a domain."""
    path = place.folder / "images" / f"{data}.npz"
    if path.exists():
        return path
    train, test = shuffled_images(data, place.data[data], seed=1)
    if test is None:
        test, train = train.first(1_500), train.first(len(train), after=1_500)
    train = train.first(4_000)
    if data == "pacs":
        if train.groups is None:
            raise NotAtHand(f"{place.data[data]} does not say which domain an image is of")
        places = [int(np.sum(train.groups[:k] == group)) % 5 for k, group in enumerate(train.groups)]
        groups = np.array([f"{group}-{k}" for group, k in zip(train.groups, places, strict=True)])
        train = Images(train.images, train.labels, groups)
    return write_images(path, train, test.first(1_500))


def newsgroups(folder: Path, path: Path) -> tuple[Path, Path]:
    """Tables of the newsgroups to pretrain on and of those by domain, and a small model's config beside the latter.

    Label is the subject, or in pretraining the newsgroup; a group is an eighth of a domain.
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
    """Figure 2: share of a round's clients that train a layer; `layers` (rounds, layers)."""
    plot = empty_plot("round", "layer", rounds=len(layers))
    share = np.array(layers).T
    plot.add_heatmap(
        x=list(range(1, share.shape[1] + 1)), y=list(range(1, share.shape[0] + 1)), z=share.tolist(), zmin=0, zmax=1,
        showscale=False, hovertemplate="round %{x}, layer %{y}: %{z:.0%}<extra></extra>",
        meta={"role": "second", "spoken": f"{share.shape[0]} layers, {share.shape[1]} rounds."},
    )  # fmt: skip
    plot.update_yaxes(dtick=1)
    caption = "Share of a round's clients that train a layer, 1 next to the input; R = 1, by gradients."
    return Figure(f"{data}-layers", f"{data}, layers selected", caption, plot)
