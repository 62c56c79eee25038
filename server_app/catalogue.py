"""All strategies that a run config can name: the class, the paper, and what travels. `tepal strategies` prints it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tepal.server_app.config import SECTIONS, about, escaped
from tepal.strategies import (
    APFL,
    Ditto,
    FedACS,
    FedAdagrad,
    FedAdam,
    FedAMP,
    FedAvg,
    FedAvgM,
    FedBE,
    FedEnsemble,
    FedFrozen,
    FedNova,
    FedProx,
    FedYogi,
    LocalOnly,
    MethodStrategy,
    PerFedAvg,
    PFedMe,
    Scaffold,
    SelectiveLayers,
)

WHOLE = "P down, P up"
MEAN_OF_OWN = "the mean of the clients' own models, which no client uses"
COMMON = "the common model, of which every client makes one of its own"


@dataclass(frozen=True)
class Listed:
    """One strategy."""

    strategy: type[MethodStrategy]
    title: str
    paper: str
    travels: str = WHOLE
    """Payload bytes for one client and round, where P are the bytes of the model."""
    result: str = ""
    """What a run's model is, where each client has one of its own."""


CATALOGUE: Mapping[str, Listed] = {
    "fedavg": Listed(FedAvg, "the mean of the clients' models", "McMahan et al. 2017, arXiv:1602.05629"),
    "fedfrozen": Listed(
        FedFrozen,
        "query and key projections are frozen after a warm-up",
        "arXiv:2605.06446",
        "P each way in the warm-up; then P − Φ each way, and Φ down once (Φ: query and key projections)",
    ),
    "selective": Listed(
        SelectiveLayers,
        "each client trains the layers that its gradients speak for",
        "arXiv:2408.15600",
        "P down, the chosen layers and the head up; a number a layer up before",
    ),
    "fedensemble": Listed(
        FedEnsemble,
        "K models by turns, which predict together",
        "arXiv:2107.10663",
        "P down, P up; K·P down where the result is scored",
    ),
    "fedacs": Listed(
        FedACS,
        "a model for each client, mixed with those that point the same way",
        "arXiv:2312.15148",
        result=MEAN_OF_OWN,
    ),
    "fedprox": Listed(FedProx, "clients are held near what they got", "Li et al. 2020, arXiv:1812.06127"),
    "fedavgm": Listed(FedAvgM, "momentum at the server", "Hsu et al. 2019, arXiv:1909.06335"),
    "fedadagrad": Listed(FedAdagrad, "Adagrad at the server", "Reddi et al. 2021, arXiv:2003.00295"),
    "fedyogi": Listed(FedYogi, "Yogi at the server", "Reddi et al. 2021, arXiv:2003.00295"),
    "fedadam": Listed(FedAdam, "Adam at the server", "Reddi et al. 2021, arXiv:2003.00295"),
    "fednova": Listed(FedNova, "changes are normalised by local steps", "Wang et al. 2020, arXiv:2007.07481"),
    "scaffold": Listed(
        Scaffold,
        "control variates correct the clients' drift",
        "Karimireddy et al. 2020, arXiv:1910.06378",
        "P + C down, P + C up (C: the parameters, which is P without buffers)",
    ),
    "fedbe": Listed(
        FedBE, "an ensemble drawn from what clients sent, distilled at the server", "Chen & Chao 2021, arXiv:2009.01974"
    ),
    "local": Listed(
        LocalOnly,
        "every client trains alone",
        "the floor of personalisation",
        "P down once, nothing up",
        result="the initial model, from which every client trained its own",
    ),
    "ditto": Listed(
        Ditto, "a personal model near the global one", "Li et al. 2021, arXiv:2012.04221", result=COMMON
    ),
    "perfedavg": Listed(
        PerFedAvg, "a start that one step makes personal", "Fallah et al. 2020, arXiv:2002.07948", result=COMMON
    ),
    "pfedme": Listed(
        PFedMe, "personal models by Moreau envelopes", "Dinh et al. 2020, arXiv:2006.08848", result=COMMON
    ),
    "apfl": Listed(
        APFL, "a mixture of an own model and the global one", "Deng et al. 2020, arXiv:2003.13461", result=COMMON
    ),
    "fedamp": Listed(
        FedAMP,
        "a model for each client, drawn to those near it",
        "Huang et al. 2021, arXiv:2007.03797",
        result=MEAN_OF_OWN,
    ),
}
"""By the name in the run config."""


@dataclass(frozen=True)
class Option:
    """One key of the run config that belongs to a strategy."""

    key: str
    default: object
    about: str


def options_of(name: str) -> list[Option]:
    """The keys of a strategy's own, in their order; none for a strategy without options."""
    if name not in SECTIONS:
        return []
    fields = SECTIONS[name][1].model_fields.values()
    return [Option(str(field.alias), field.default, about(field)) for field in fields]


def table(names: Sequence[str] = ()) -> RenderableType:
    """All strategies for a terminal, a line each; or what there is to know of some."""
    if not names:
        lines = Table(box=None, pad_edge=False)
        for heading in ("strategy", "what it does", "travels, a client and round", "paper"):
            lines.add_column(heading)
        for name, listed in CATALOGUE.items():
            lines.add_row(name, listed.title, listed.travels, listed.paper)
        return lines
    parts: list[RenderableType] = []
    for name in names:
        listed = CATALOGUE[name]
        parts += [Text(f"{name}: {listed.title}", style="bold"), Text(f"{listed.paper}\n{listed.travels}")]
        options = Table(box=None, pad_edge=False, show_header=False)
        for option in options_of(name):
            options.add_row(f"  {option.key}", json.dumps(option.default), option.about)
        parts += [options, Text()]
    return Group(*parts)


def reference() -> str:
    """docs/strategies.md: `python -m tepal.server_app.catalogue` prints it."""
    lines = [
        "# Strategies",
        "",
        "Each is a value of the key `strategy`, and a class of `tepal.strategies`. What travels is for one client and "
        "round: P are",
        "the bytes of the model. A part that a client still holds does not travel again, under any of them; the models "
        "that are",
        "scored after the last round go down once more where clients do not hold them. `tepal strategies` prints this.",
        "",
        "| strategy | what it does | travels | paper |",
        "|---|---|---|---|",
        *(
            f"| [`{name}`](#{name}) | {listed.title} | {listed.travels} | {listed.paper} |"
            for name, listed in CATALOGUE.items()
        ),
    ]
    for name, listed in CATALOGUE.items():
        lines += ["", f"## {name}", "", f"`{listed.strategy.__name__}`: {listed.title}. {listed.paper}."]
        if options := options_of(name):
            lines += ["", "| key | default | what it is |", "|---|---|---|"]
            lines += [f"| `{o.key}` | `{json.dumps(o.default)}` | {escaped(o.about)} |" for o in options]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(reference(), end="")
