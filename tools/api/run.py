"""A run that has ended: its figures, its model and its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tepal.records.columns import bytes_text, score_text
from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import (
    add,
    current_summary,
    find_run,
    measured_by,
    read_config,
    read_metrics,
    savings,
    scored,
    summarise,
    total,
)
from tepal.report.remarks import remarks

if TYPE_CHECKING:
    import pandas
    from plotly.graph_objects import Figure
    from torch import Tensor, nn


@dataclass(frozen=True)
class Run:
    """A run directory. `path` is its folder, and everything else is read from there."""

    path: Path

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The run config: all keys, with their defaults."""
        return read_config(self.path)

    @cached_property
    def rounds(self) -> Sequence[RoundRecord]:
        """The records of the rounds."""
        return read_metrics(self.path)

    @cached_property
    def metrics(self) -> pandas.DataFrame:
        """One row for each round, indexed by the round, with the columns of `metrics.jsonl` (docs/runs.md).

        Raises ModuleNotFoundError without pandas.
        """
        frame = with_pandas().DataFrame([line.to_line() for line in self.rounds])
        return frame.set_index("round") if len(frame) else frame

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """The figures of the whole run, as in `summary.json`: `accuracy`, `loss`, `rounds`, `seconds` and others.

        Of a run that goes on, those of the rounds so far.
        """
        return current_summary(self.path) or summarise(self.rounds, self.config)

    @property
    def accuracy(self) -> float | None:
        """Accuracy of the delivered model, in 0…1; None for a regression.

        With `deliver="best"` that of the delivered round, and not of the last one as in `summary`.
        """
        return self._delivered("accuracy")

    def _delivered(self, key: str) -> float | None:
        """A score of the delivered model."""
        if self.summary.get("deliver") == "best":
            for line in scored(self.rounds):
                if line.round == self.summary.get("delivered_round"):
                    return line.value(key)
        found: float | None = self.summary.get(key)
        return found

    @property
    def bytes(self) -> int | None:
        """Payload bytes of all clients and rounds, both ways."""
        found = add(self.summary.get("bytes_down"), self.summary.get("bytes_up"))
        return None if found is None else int(found)

    @property
    def bytes_vs_fedavg(self) -> float | None:
        """The bytes divided by those of FedAvg in the same rounds, without an encoding."""
        fedavg = total(self.rounds, "bytes_fedavg")
        return None if self.bytes is None or not fedavg else self.bytes / fedavg

    @property
    def saved(self) -> tuple[float, float] | None:
        """`bytes_vs_fedavg` as a product: the share that the strategy sends, and that of the encoding."""
        return savings(self.bytes, self.summary.get("bytes_plain"), total(self.rounds, "bytes_fedavg"))

    @property
    def remarks(self) -> list[str]:
        """Sentences about what the figures hide, such as a model that answers one class."""
        return remarks(self.rounds)

    @property
    def weights(self) -> dict[str, Tensor]:
        """The delivered tensors by their names in a state dict; those of an ensemble begin with `mode/<k>/`.

        Raises OSError if the run has no model.
        """
        from safetensors.torch import load_file

        from tepal.tools.predict.model_file import model_file

        return load_file(model_file(self.path))

    @property
    def model(self) -> nn.Module:
        """The delivered model in eval mode on the CPU, read anew at each call; of an ensemble, its first mode.

        Raises:
            OSError: the run has no model.
            ValueError: the model was an object of another Python process: load `weights` into one like it.
        """
        from tepal.tools.predict.predict import load_predictor

        predictor = load_predictor(self.path)
        predictor.model.load_state_dict(next(predictor.states()))
        return predictor.model.cpu().eval()

    def plot(self) -> Figure:
        """Draw the score over the transferred bytes; each point is a round."""
        from plotly.graph_objects import Figure, Scatter

        from tepal.report.round_figures import transferred

        by, sent = measured_by(self.rounds), transferred(self.rounds)
        points = [
            (nbytes / 1e6, score, f"round {line.round}")
            for line, nbytes in zip(self.rounds, sent, strict=True)
            if nbytes is not None and (score := line.value(by.key)) is not None
        ]
        x, y, text = zip(*points, strict=True) if points else ((), (), ())
        curve = Scatter(x=x, y=y, text=text, mode="lines+markers", name=str(self.summary.get("strategy")))
        return Figure(curve).update_layout(xaxis_title="transferred (MB)", yaxis_title=by.name)

    def report(self) -> Path:
        """Write the run's page, and return its path, for a browser."""
        from tepal.report.run_page import write_report

        return write_report(self.path)

    def __repr__(self) -> str:
        by = measured_by(self.rounds)
        figures = [
            str(self.summary.get("strategy")), f"{self.summary.get('rounds')} rounds",
            f"{by.key} {score_text(self._delivered(by.key))}", f"{bytes_text(self.bytes)} transferred",
        ]  # fmt: skip
        return f"<Run {self.path.name}: {', '.join(figures)}>"


def with_pandas() -> Any:
    """Return the package pandas. Raises ModuleNotFoundError, with what to install."""
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("tables need pandas: pip install 'tepal[simulation]'") from error
    return pandas


def load(path: str | Path = "runs") -> Run:
    """Return a run that has ended, or that still goes on.

    Args:
        path: a run directory, or a folder of runs, of which the latest is returned.

    Raises OSError if there is none.
    """
    return Run(find_run(Path(path).expanduser()).resolve())
