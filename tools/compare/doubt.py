"""What a run measured of its doubt: how reliable its probabilities are, and what it makes of foreign images."""

from __future__ import annotations

from collections.abc import Sequence

from tepal.records.columns import Column, score_text
from tepal.records.round_record import RoundRecord

FLAGGED = ("flagged_letters", "flagged_noise", "flagged_covered")
DOUBT_COLUMNS = (
    Column("loss", "loss", text=score_text),
    Column("calibration error", "calibration_error", text=score_text),
    *(Column(f"{name.removeprefix('flagged_')} flagged", name, text=score_text) for name in FLAGGED),
)
"""Of the result on the server's held-out data: the negative log-likelihood, the calibration error, and the shares of
foreign images that are flagged while 5 % of the held-out images are."""


def doubt_figures(metrics: Sequence[RoundRecord]) -> dict[str, float | None]:
    """What was measured with the last score on the server's held-out data, under the keys of DOUBT_COLUMNS.

    None for what has no value there: an earlier one, as of a loss before the model diverged, is not that of the result.
    """
    server = [line for line in metrics if line.accuracy_of == "server"]
    if any(line.accuracy_of == "personal" for line in metrics):
        server = []  # the result is not the server's model
    return {column.key: server[-1].value(column.key) if server else None for column in DOUBT_COLUMNS}
