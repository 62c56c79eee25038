"""FedFrozen's communication relative to FedAvg's, by model: the cost table of FedFrozen (arXiv 2605.06446).

Two of ten rounds are warm-up. The paper counts the parameters that are uploaded, of base models without a task's head;
`both` counts uploads and downloads, in which the frozen block is sent once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tepal import models
from tepal.models.blocks import find_blocks
from tepal.models.libraries import import_transformers
from tepal.report.page import Figure, empty_plot
from tepal.strategies.fedfrozen import cost_ratio
from tepal.tools.reproduce.experiment import (
    FAILS,
    HOLDS,
    Claim,
    Experiment,
    MissingData,
    Reproduction,
    Trial,
    TrialInputs,
    Values,
    table,
)

WARMUP, ROUNDS = 2, 10
_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_BART = {f"{half}_{key}": size for half in ("encoder", "decoder")
         for key, size in {"layers": 6, "attention_heads": 12, "ffn_dim": 3072}.items()}  # fmt: skip
_T5 = {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8}
# Image shape and classes of the data sets that small models are made for; those of all others are ImageNet's.
_IMAGES_OF = {
    "cnn": ((1, 28, 28), 10),
    "compact-vit": ((3, 32, 32), 10),
    "resnet-20": ((3, 32, 32), 10),
    "tiny-vit": ((1, 8, 8), 10),
}

PAPER: Mapping[str, tuple[str, Mapping[str, Any], float, float]] = {
    "ViT-B/32": ("ViT", {**_BASE, "image_size": 224, "patch_size": 32}, 0.1610, 0.8712),
    "T5-small": ("T5", _T5, 0.1010, 0.8752),
    "BART-base": ("Bart", {"d_model": 768, **_BART}, 0.0981, 0.8780),
    "ELECTRA-base": ("Electra", {"embedding_size": 768, **_BASE}, 0.1302, 0.8959),
    "BERT-base": ("Bert", _BASE, 0.1295, 0.8964),
}
"""Model → its family in transformers, its sizes, and the paper's share of query and key and its relative cost."""
_COSTS = [cost for *_, cost in PAPER.values()]
_ROUNDED = 0.00005  # the paper's costs have four decimals


def on_meta(name: str) -> nn.Module:
    """A model by its name, in its usual size, without weights. Raises ModelError if a library is missing."""
    kind = models.MODELS[name].kind
    shape, classes = _IMAGES_OF.get(name, ((3, 224, 224), 1000))
    classes = {models.TEXTS: 2, models.TABLES: 10}.get(kind, classes)
    sizes: dict[str, Any] = {
        "image_shape": shape, "classes": classes, "vocabulary": 80, "features": 64, "outputs": 32,
    }  # fmt: skip
    with torch.device("meta"):
        return models.build(name, seed=0, **{key: sizes[key] for key in models.NEEDS[kind]})


class FedFrozenCosts(Experiment):
    """Costs of the paper's five models and of every model that a run config can name."""

    name = "fedfrozen-costs"
    title = "FedFrozen's communication relative to FedAvg"
    paper = "FedFrozen, table of communication costs (arXiv 2605.06446)"
    deviations = (
        "The models by name include the head of their task; the paper's five do not. A model whose library is not "
        "installed has no row.",
        "For T5-small and BART-base the paper's share s of query and key does not agree with its relative cost: "
        "1 - .8 s is .9192 and .9215.",
    )
    small_scale = full_scale = (
        f"{WARMUP} warm-up rounds of {ROUNDS}; models in their full size, built without weights: nothing is reduced."
    )

    def trials(self, full: bool) -> Sequence[Trial]:
        papers = [Trial(f"{name.replace('/', '-').lower()}-of-the-paper", {"paper": name}) for name in PAPER]
        # Of the others each is a row of its own, and may need a library that is not installed.
        others = [Trial(name.replace("/", "-"), {"model": name}, optional=True) for name in models.names()]
        return [*papers, *others]

    def compute(self, trial: Trial, inputs: TrialInputs) -> Values:
        of = trial.options
        try:
            model = _papers(of["paper"]) if "paper" in of else on_meta(of["model"])
        except models.ModelError as error:
            raise MissingData(str(error)) from error
        blocks = find_blocks(model)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        frozen = sum(blocks.layout.by_name[name].size for name in blocks.query_key)
        costs: dict[str, float] = {}
        if frozen:
            costs["up"] = cost_ratio(model, WARMUP, ROUNDS)
            costs["both"] = cost_ratio(model, WARMUP, ROUNDS, downlink=True)
        return {**of, "parameters": parameters, "frozen": frozen, **costs}

    def results(self, found: Mapping[str, Values]) -> Reproduction:
        headings = ("model", "parameters", "query and key", "query and key, paper", "up", "up, paper", "both ways")
        papers = [of for of in found.values() if "paper" in of]
        others = [of for of in found.values() if "paper" not in of]
        tables = [
            table("The paper's models", headings, [_row(of["paper"], of, *PAPER[of["paper"]][2:]) for of in papers]),
            table("Models by name", (*headings[:3], "up", "both ways"), [_own(of) for of in others]),
        ]
        findings, claims = [], []
        if len(papers) == len(PAPER):
            furthest = max(abs(of["up"] - PAPER[of["paper"]][3]) for of in papers)
            text = f"FedFrozen uploads {min(_COSTS)} to {max(_COSTS)} of FedAvg's parameters, by model."
            measured = f"Our costs differ from the paper's by at most {furthest:.5f}."
            claims.append(Claim(text, measured, HOLDS if furthest <= _ROUNDED else FAILS))
        without = [of["model"] for of in others if not of["frozen"]]
        if without:
            findings.append(f"Models without attention, which FedFrozen rejects: {', '.join(without)}.")
        return Reproduction(tables, [_figure([of for of in [*papers, *others] if of["frozen"]])], findings, claims)


def _papers(name: str) -> nn.Module:
    """One of the paper's models without weights."""
    family, sizes, *_ = PAPER[name]
    transformers = import_transformers(name)
    make: Callable[[Any], nn.Module] = getattr(transformers, f"{family}Model")
    with torch.device("meta"):
        return make(getattr(transformers, f"{family}Config")(**sizes))


def _row(name: str, of: Values, share: float, cost: float) -> Sequence[str | float | int | None]:
    return (name, of["parameters"], of["frozen"] / of["parameters"], share, of.get("up"), cost, of.get("both"))


def _own(of: Values) -> Sequence[str | float | int | None]:
    return (of["model"], of["parameters"], of["frozen"] / of["parameters"], of.get("up"), of.get("both"))


def _figure(costs: Sequence[Values]) -> Figure:
    plot = empty_plot("relative to FedAvg", "")
    names = [of.get("paper") or of["model"] for of in costs]
    plot.add_bar(
        x=[of["up"] for of in costs], y=names, orientation="h",
        meta={"role": "main", "spoken": f"{len(names)} models."}, hovertemplate="%{y}: %{x:.4f}<extra></extra>",
    )  # fmt: skip
    plot.update_layout(showlegend=False, height=80 + 22 * len(names))
    plot.update_yaxes(autorange="reversed", dtick=1)
    return Figure(
        "costs", "Uploads of FedFrozen", "Uploaded parameters relative to FedAvg, two warm-up rounds of ten.", plot
    )
