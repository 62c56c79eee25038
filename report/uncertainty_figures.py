"""Figures of the uncertainty of a classifier's predictions: its calibration, and images of no class."""

from __future__ import annotations

from collections.abc import Sequence

from tepal.records.columns import score_text
from tepal.records.round_record import COLUMNS, RoundRecord
from tepal.report.page import Figure, add_curve, empty_plot, thin

_FOREIGN = {"flagged_letters": "main", "flagged_noise": "second", "flagged_covered": "third"}  # column → colour
BINS = 15  # of a calibration, as training/uncertainty.py has them; a report is drawn without torch
_FALSE_ALARMS = 0.05  # share of the held-out images above the entropy threshold


def uncertainty_figures(metrics: Sequence[RoundRecord]) -> list[Figure]:
    """The reliability diagram of the last scored round, and calibration error and flagged images by round.

    [] if the server has not scored a classifier.
    """
    figures = [*_reliability(metrics), *_errors(metrics), *_flagged(metrics)]
    for figure in figures:
        if figure.plot is not None:
            thin(figure.plot)
    return figures


def _reliability(metrics: Sequence[RoundRecord]) -> list[Figure]:
    """Bars of the accuracy in each bin of the predicted class's probability, and the diagonal."""
    for line in reversed(metrics):
        bins = line.calibration_probability, line.calibration_accuracy, line.calibration_examples
        if line.calibration_error is not None and {len(each or ()) for each in bins} == {BINS}:
            break
    else:
        return []
    probability, accuracy, examples = (list(each or ()) for each in bins)
    total = sum(examples)
    plot = empty_plot("probability of the predicted class", "accuracy")
    plot.add_bar(
        x=[(k + 0.5) / BINS for k in range(BINS)],
        y=[right if n else None for right, n in zip(accuracy, examples, strict=True)],
        width=1 / BINS, name="accuracy", meta={"role": "second", "spoken": f"{_count(total)} examples in {BINS} bins."},
        customdata=[*zip(probability, map(_count, examples), strict=True)],
        hovertemplate="%{customdata[1]} examples, mean probability %{customdata[0]:.1%}, accuracy %{y:.1%}"
        "<extra></extra>",
    )  # fmt: skip
    add_curve(
        plot, [0, 1], [0, 1], name="calibrated", role="fedavg", hover="", hoverinfo="skip", mode="lines",
        line={"dash": "dash"},
    )  # fmt: skip
    plot.update_layout(bargap=0)
    plot.update_xaxes(range=[0, 1], tickformat=".0%")
    plot.update_yaxes(range=[0, 1.02], tickformat=".0%")
    loss = "" if line.loss is None else f", negative log-likelihood {score_text(line.loss)} nats"
    caption = (
        f"Accuracy by the probability of the predicted class, in {BINS} bins, on the server's {_count(total)} held-out "
        f"examples after round {line.round}. Expected calibration error {score_text(line.calibration_error)}{loss}. "
        "Bars below the diagonal: predictions are more certain than they are right."
    )
    return [Figure("reliability", "Reliability of the probabilities", caption, plot)]


def _count(examples: float) -> str:
    return f"{examples:,.0f}" if examples < 1e12 else f"{examples:.3g}"


def _errors(metrics: Sequence[RoundRecord]) -> list[Figure]:
    known = [(line.round, line.calibration_error) for line in metrics if line.calibration_error is not None]
    if not known:
        return []
    heading = COLUMNS["calibration_error"].heading
    rounds, errors = zip(*known, strict=True)
    plot = empty_plot("round", heading, rounds=len(metrics))
    add_curve(plot, rounds, errors, name=heading, role="main", hover="round %{x}: %{y:.4f}")
    plot.update_yaxes(rangemode="tozero")
    caption = (
        "Expected calibration error on the server's held-out data, by round: mean difference of accuracy and "
        "probability over 15 bins, weighted by their examples. 0: calibrated."
    )
    return [Figure("calibration-rounds", "Calibration error per round", caption, plot)]


def _flagged(metrics: Sequence[RoundRecord]) -> list[Figure]:
    scored = [line for line in metrics if any(line.value(key) is not None for key in _FOREIGN)]
    if not scored:
        return []
    last = scored[-1]
    plot = empty_plot("round", "flagged", rounds=len(metrics))
    for key, role in _FOREIGN.items():
        known = [(line.round, share) for line in scored if (share := line.value(key)) is not None]
        rounds, shares = [number for number, _ in known], [share for _, share in known]
        add_curve(plot, rounds, shares, name=COLUMNS[key].heading, role=role, hover="round %{x}: %{y:.1%}")
    ends = [scored[0].round, last.round]
    add_curve(
        plot, ends, [_FALSE_ALARMS] * 2, name="held-out images flagged, at most", role="fedavg", mode="lines",
        line={"dash": "dash"}, hover="%{y:.0%}",
    )  # fmt: skip
    plot.update_yaxes(range=[0, 1.02], tickformat=".0%")
    ended = [(COLUMNS[key].heading, last.value(key)) for key in _FOREIGN]
    said = ", ".join(f"{name} {score_text(share)}" for name, share in ended if share is not None)
    threshold = (
        "" if last.entropy_threshold is None else f" ({score_text(last.entropy_threshold)} nats in the last one)"
    )
    caption = (
        "Share of images of no class (letters, pixels in random order, half-covered held-out images; up to 200 each) "
        "whose prediction has an entropy above a threshold, which at most 5 % of the server's held-out images exceed"
        f"{threshold}, by round. After round {last.round}: {said}."
    )
    return [Figure("flagged", "Images of no class with an uncertain prediction", caption, plot)]
