"""Selective layer fine-tuning (arXiv 2408.15600), Tables 1 and 2 and Figure 2.

Clients differ in labels (CIFAR-10) or in features (domains of PACS, newsgroups), and train one, two, or one to four
layers. The settings of every selection are searched on examples that the results do not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tepal.report.page import Figure, empty_plot
from tepal.tools.reproduce.experiment import (
    WEIGHTS,
    Experiment,
    Reproduction,
    Trial,
    TrialInputs,
    Values,
    joined,
)
from tepal.tools.reproduce.runs import by_setting, trained
from tepal.tools.reproduce.selective_claims import alike, claims
from tepal.tools.reproduce.selective_data import CLASSES, domainnet, images, newsgroups, xglue
from tepal.tools.reproduce.tuning import SEED, search_trials, tuned
from tepal.tools.reproduce.versus import by_seed, on_server, versus
from tepal.tools.spaces import Choices, Range, Space

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
_FULL: Mapping[str, Any] = {"fraction-train": 0.2, "evaluate-every": 10, "test-fraction": 0.0001}
_VIT: Mapping[str, Any] = {"model": "compact-vit", "pretrained": "compact-vit-c100", "normalise": "cifar-100"}
_CLIP: Mapping[str, Any] = {
    **_FULL, "model": "openai/clip-vit-base-patch32", "image-shape": "3x224x224", "normalise": "clip", "batch-size": 64,
}  # fmt: skip
_OF_VIT = (
    "vision transformers of five layers that were trained on CIFAR-100 (compact-vit-c100) instead of CLIP ViT-B/32; "
    "4,000 images, 20 clients, ten of them per round, 15 rounds of ten steps"
)
_OF_CLIP = (
    "CLIP ViT-B/32 with its own normalisation; batches of 64. Images are resized to 224x224 by bilinear interpolation; "
    "CLIP uses bicubic interpolation and a crop. The paper names CLIP's weights from DataComp, the authors' code "
    "OpenAI's; the weights in weights/ are used"
)


@dataclass(frozen=True)
class Kind:
    """How clients differ, and of the small and the full setting (of 100 clients): the data set, the run config, and
    what they are, in words."""

    title: str
    data: str
    clients: int
    config: Mapping[str, Any]
    small: str
    full_data: str
    full_config: Mapping[str, Any]
    full: str


FULL_CLIENTS = 100
KINDS: Mapping[str, Kind] = {
    "labels": Kind(
        "clients differ in labels", "cifar-10", 20, {**_VIT, "partitioner": "dirichlet", "dirichlet-alpha": 0.1},
        f"CIFAR-10 by Dirichlet .1; {_OF_VIT}",
        "cifar-10",
        {**_CLIP, "partitioner": "dirichlet", "dirichlet-alpha": 0.1, "num-server-rounds": 50, "local-steps": 5},
        f"CIFAR-10 by Dirichlet .1; 50 rounds of five steps; {_OF_CLIP}. A client has at least ten images",
    ),
    "domains": Kind(
        "clients differ in domains", "pacs", 20, {**_VIT, "partitioner": "natural"},
        f"PACS instead of DomainNet, a client has a fifth of a domain; {_OF_VIT}",
        "domainnet",
        {**_CLIP, "partitioner": "natural", "classes": len(CLASSES), "num-server-rounds": 30, "local-steps": 1},
        "DomainNet, a client has random images of one domain; 30 rounds of one step; "
        f"{_OF_CLIP}. Ten classes, as in the authors' code; the text does not say how many",
    ),
    "texts": Kind(
        "clients differ in newsgroups", "20newsgroups", 16,
        {"partitioner": "natural", "text-column": "text", "split-column": "split", "group-column": "group",
         "text-length": 48, "num-server-rounds": 10, "evaluate-every": 10},
        "a text model of four layers that was pretrained on other newsgroups instead of XLM-R-base; ten newsgroups by "
        "subject instead of XGLUE-NC, a client has an eighth of one newsgroup of each subject; 16 clients, eight of "
        "them per round, ten rounds of ten steps",
        "xglue-nc",
        {**_FULL, "model": "xlm-roberta-base", "partitioner": "natural", "num-server-rounds": 20, "local-epochs": 1,
         "batch-size": 32},
        "XGLUE-NC and XLM-R-base, a client has texts of one of five languages; 20 rounds of one local epoch, batches "
        "of 32. The text does not say which texts are trained on; here, as in the authors' code, XGLUE's validation "
        "texts, of which each language has the same number. Title and body are a pair, in the authors' code one text",
    ),
}  # fmt: skip
PRETRAIN: Mapping[str, Any] = {
    **{key: value for key, value in KINDS["texts"].config.items() if key != "group-column"}, "partitioner": "iid",
    "strategy": "fedavg", "num-server-rounds": 8, "evaluate-every": 8, "local-epochs": 1, "batch-size": 32,
    "optimizer": "adamw", "learning-rate": 0.002, "held-out-fraction": 0.1, "test-fraction": 0.01,
    "fraction-evaluate": 0.0, "score-in-training": False, "seed": 42,
}  # fmt: skip
"""The run that pretrains the small text model, on other newsgroups."""


class Selective(Experiment):
    """Accuracy by selection and budget, and which layers are selected.

    Args:
        kind: how clients differ, one of `KINDS`.
    """

    paper = "Selective layer fine-tuning, Tables 1 and 2, Figure 2 (arXiv 2408.15600)"
    deviations = (
        "The learning rate of every selection, for gradients also λ (as a share) and whether budgets are filled, are "
        f"found by the same number of trials of Optuna's TPE sampler with R = {SEARCHED}, and never by test examples "
        "of the results. The paper has one rate, .01, for all these data sets, and a λ of each: 1000, 10 and 10.",
        "The paper's λ is absolute. Here λ is a share of the median over the clients of each one's largest squared "
        "gradient norm, so that one client with large gradients does not decide for all.",
        "Gradients of one batch decide on layers; in the authors' code, sums over all batches. Accuracy is that after "
        "the last round; the authors' code records the best of all rounds.",
        "Differences are paired by seed; intervals are Student's at 95 %.",
        "Question answering with LLaMA-2-7B is omitted.",
    )

    def __init__(self, kind: str) -> None:
        self.name, self.kind = f"selective-{kind}", KINDS[kind]
        self.title = f"Selective layer fine-tuning: {self.kind.title}"

    def scale(self, full: bool) -> str:
        if full:
            return (
                f"{_begun(self.kind.full)}. 100 clients, 20 of them per round; R = 1, 2, and 1 to 4; five seeds, "
                "twelve trials of a search, which trains on four fifths of the training examples and is scored on the "
                "rest. Results train on all but one example of each client, and are scored on the data set's test "
                "examples."
            )
        return (
            f"{_begun(self.kind.small)}; R = 1 and R = 1 to 4; five seeds, six trials of a search, which shares no "
            "example with the results."
        )

    def data(self, full: bool) -> Sequence[str]:
        return (self.kind.full_data if full else self.kind.data,)

    def weights(self, full: bool) -> Mapping[str, str]:
        model = str(self.kind.full_config["model"])
        return {model: f"the paper's pretrained weights of {model}"} if full else {}

    def trials(self, full: bool) -> Sequence[Trial]:
        pretrained = not full and self.kind.data == "20newsgroups"
        trials = [Trial("pretrained", {"part": "pretraining", "config": PRETRAIN, "clients": 2})] if pretrained else []
        before, searched = tuple(trial.name for trial in trials), 12 if full else 6
        needs = dict[str, tuple[str, ...]]()
        for selection, search in SEARCH.items():
            options = self.options(selection, SEARCHED, SEED, full, "search")
            of = search_trials(selection, options, search, searched)
            trials += [replace(trial, needs=(*before, *trial.needs)) for trial in of]
            needs[selection] = (*before, *(trial.name for trial in of))
        trials += [
            Trial(f"{each}-{budget}-{seed}", self.options(each, budget, seed, full, "main"), needs[each])
            for budget in (BUDGETS if full else ("1-4", "1"))
            for each in SELECTIONS if _is_run(each, budget)
            for seed in (1, 2, 3, 4, 5)
        ]  # fmt: skip
        return trials

    def compute(self, trial: Trial, inputs: TrialInputs) -> Values:
        part = trial.options["part"]
        files = self.files(trial.options, inputs)
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
            if same := alike("gradient", runs):
                text = f"{what}: {', '.join(same)} trained the same layers as gradient in every round of every seed."
                parts.append(Reproduction([], findings=[f"{text} The rows differ only because the settings differ."]))
            parts.append(Reproduction([], claims=claims(self.kind.full_data, budget, runs, scores)))
        if parts:
            figure = by_setting(lines, "budgets", "By budget", "layers that a client trains", _CAPTION)
            parts.append(Reproduction([], [figure]))
        return joined(*parts)

    def options(self, selection: str, budget: str, seed: int, full: bool, part: str) -> dict[str, Any]:
        """A trial's options.

        Args:
            selection: one of `SELECTIONS`.
            budget: one of `BUDGETS`.
            seed: the run config's.
            full: the paper's setting instead of the small one.
            part: "main", or "search".
        """
        kind = self.kind
        config: dict[str, Any] = {
            **_COMMON, **(kind.full_config if full else {**_SMALL, **kind.config}), "selective.selection": selection,
            "seed": seed,
        }  # fmt: skip
        config |= {"selective.budget": float(BUDGETS[budget])} if BUDGETS[budget] else {"selective.draw-budgets": True}
        clients = FULL_CLIENTS if full else kind.clients
        return {"selection": selection, "part": part, "full": full, "config": config, "clients": clients}

    def files(self, options: Values, inputs: TrialInputs) -> dict[str, Any]:
        """Keys of the run config with files of this machine, for a trial's options. Raises MissingData."""
        part = options["part"]
        if options.get("full"):
            return self._full_files(options, inputs)
        if self.kind.data != "20newsgroups":
            return {"dataset": str(images(self.kind.data, inputs, part, full=False))}
        folder = newsgroups(inputs.folder / "texts", inputs.data[self.kind.data])
        files = {"dataset": str(folder / f"{part}.jsonl"), "model": str(folder / "model")}
        weights = inputs.folder / WEIGHTS / "texts.safetensors"
        return files if part == "pretraining" else {**files, "pretrained": str(weights)}

    def _full_files(self, options: Values, inputs: TrialInputs) -> dict[str, Any]:
        data, model, part = self.kind.full_data, str(options["config"]["model"]), options["part"]
        files = {"pretrained": str(inputs.folder / WEIGHTS / model)}
        if data == "cifar-10":
            return {**files, "dataset": str(images(data, inputs, part, full=True))}
        write = domainnet if data == "domainnet" else xglue
        folder = write(inputs.folder / data / part, inputs.data[data], part, FULL_CLIENTS)
        return {**files, "dataset": data, "dataset-path": str(folder)}


def _begun(text: str) -> str:
    return text[0].upper() + text[1:]


def _is_run(selection: str, budget: str) -> bool:
    """Training all layers has no budget, and runs under "1"; with one layer, both ends are the bottom."""
    return budget == "1" if selection == "full" else (selection, budget) != ("both", "1")


_CAPTION = "Accuracy on examples that no client has."


def _layers(runs: Mapping[int, Values], budget: str) -> Reproduction:
    """Which layers the gradients select: the picture of the first seed, and shares over all."""
    layers = [of["layers"] for of in runs.values()]
    shares = np.mean([np.mean(each, axis=0) for each in layers], axis=0)
    most = ", ".join(f"{k + 1} ({shares[k]:.0%})" for k in np.argsort(-shares) if shares[k] >= 0.005)
    finding = f"R = {budget}: gradients select {shares.sum():.2f} layers per client; of {len(shares)} layers {most}."
    return Reproduction([], [_selected(layers[0], budget)], [finding])


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
