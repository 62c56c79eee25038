"""The claims of the paper on selective layer fine-tuning (arXiv 2408.15600), for each kind of data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tepal.tools.compare.answers import Paired
from tepal.tools.reproduce.experiment import UNTESTED, Claim
from tepal.tools.reproduce.versus import Runs, Scores, ahead, as_good, claimed, differences

NEAR = 0.01
"""A difference of accuracy that counts as small."""
DRAWN = "1-4"
"""The budgets of Table 2 and Figure 2: one to four layers, drawn for each client."""
_ALIKE = "not compared, because both selections trained the same layers in every round: {}"


def claims(data: str, budget: str, runs: Runs, scores: Scores) -> list[Claim]:
    """The paper's claims on the results with one budget, each with a verdict.

    Two selections that chose the same layers in every round of every seed are not a test of the selection, and their
    difference is in no claim.

    Args:
        data: the paper's data set of which these results stand in place: "cifar-10", "domainnet" or "xglue-nc".
        budget: "1", "2" or "1-4".
        runs, scores: of the same selections.
    """
    return [*claimed(*_on_accuracy(data, budget, runs, scores)), *claimed(_on_layers(data, budget, runs["gradient"]))]


def _on_accuracy(data: str, budget: str, runs: Runs, scores: Scores) -> Iterator[Claim | None]:
    what, gains = f"R = {budget}", differences("gradient", scores)
    full, of_rgn = (gains.pop(each, None) for each in ("full", "rgn"))
    same = alike("gradient", runs)
    if data == "xglue-nc" and budget != DRAWN:  # Section 5.2: on texts the two are similar, and better than all others
        if of_rgn:
            text = f"{what}: selection by gradients is as good as RGN, within {NEAR}."
            of_both = {"rgn": of_rgn}
            yield Claim(text, _ALIKE.format("rgn"), UNTESTED) if "rgn" in same else as_good(text, of_both, NEAR)
        yield _ahead(f"{what}: selection by gradients is better than each other selection but RGN.", gains, same)
    else:
        others = gains | ({"rgn": of_rgn} if of_rgn else {})
        yield _ahead(f"{what}: selection by gradients is better than each other selection.", others, same)
    if full and budget == "1" and data != "xglue-nc":
        yield as_good(f"{what}: it is as good as training all layers, within {NEAR}.", {"full": full}, NEAR)
    to_bottom = {method: gain for method in scores if (gain := differences(method, scores).get("bottom"))}
    text = f"{what}: training the layers next to the input is the worst selection."
    yield _ahead(text, to_bottom, alike("bottom", runs))


def _ahead(text: str, gains: Mapping[str, Paired], same: Sequence[str]) -> Claim | None:
    """The claim that a selection is ahead of others, of which `same` are no test."""
    left_out = [method for method in gains if method in same]
    said = _ALIKE.format(", ".join(left_out)) if left_out else ""
    claim = ahead(text, {method: gain for method, gain in gains.items() if method not in left_out})
    if claim is None:
        return Claim(text, said, UNTESTED) if said else None
    return replace(claim, measured="; ".join(filter(None, (claim.measured, said))))


def alike(selection: str, runs: Runs) -> list[str]:
    """The other selections that trained the same layers as this one, in every round of every seed."""
    ours = {seed: of.get("layers") for seed, of in runs.get(selection, {}).items()}
    return [
        other for other, of_seeds in runs.items()
        if other != selection and ours and ours.keys() == of_seeds.keys()
        and all(layers and layers == of_seeds[seed].get("layers") for seed, layers in ours.items())
    ]  # fmt: skip


def _on_layers(data: str, budget: str, runs: Mapping[int, Mapping[str, object]]) -> Claim | None:
    """Figure 2: which layers gradients select with drawn budgets."""
    layers = {seed: np.array(of["layers"]) for seed, of in runs.items() if of.get("layers")}
    if budget != DRAWN or not layers:
        return None
    what = f"R = {budget}: the layers that gradients select"
    if data == "xglue-nc":
        rounds = {seed: max(len(of) // 3, 1) for seed, of in layers.items()}
        depths = {"first": {seed: _depth(of[: rounds[seed]]) for seed, of in layers.items()},
                  "last": {seed: _depth(of[-rounds[seed] :]) for seed, of in layers.items()}}  # fmt: skip
        text = f"{what} move towards the input: their mean number falls from the first third of the rounds to the last"
        return ahead(f"{text} (Figure 2).", differences("first", depths))
    place, words = {"cifar-10": ("top", "next to the output"), "domainnet": ("middle", "in the middle")}[data]
    shares = {each: {seed: _share(of, each) for seed, of in layers.items()} for each in ("top", "middle", "bottom")}
    return ahead(f"{what} are mostly those {words} (Figure 2).", differences(place, shares))


def _depth(layers: np.ndarray) -> float:
    """The mean number, from 1 at the input, of the layers that are selected; `layers`: (rounds, L), shares."""
    shares = layers.sum(axis=0)
    return float(shares @ np.arange(1, len(shares) + 1) / shares.sum())


def _share(layers: np.ndarray, place: str) -> float:
    """The share of clients that train a layer of a third of the model, the mean over its layers and all rounds.

    A layer belongs to the third in which its middle lies: of five layers 1 and 2 are the bottom, 3 is the middle.
    """
    count = layers.shape[1]
    middles = (np.arange(count) + 0.5) / count
    third = {"bottom": middles < 1 / 3, "middle": (middles >= 1 / 3) & (middles <= 2 / 3), "top": middles > 2 / 3}
    return float(layers[:, third[place]].mean())
