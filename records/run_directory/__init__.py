"""The directory of a run: `runs/<start>-<strategy>/`.

    config.toml         the whole validated run config, flat kebab-case keys
    metrics.jsonl       one JSON line per round, on disk before the next round starts
    rounds/             the arrays that a method records of a round: `np.load("rounds/000001.npz")`
    model.safetensors   the run's model, of the last or the best round, under its raw state_dict names; an ensemble's
                        begin with `mode/<k>/`
    summary.json        the figures of the whole run
    report.html         written by `tepal.report.run_page`
    blocks.json, now.json, clients.json
                        the model's parts, the current round, the clients so far (`tepal.records.live`)
    simulation.json     of a run with simulated clients, how many there are (`tepal.tools.simulation`)
    checkpoint/         what is needed to resume the run (`tepal.strategies.rounds.checkpoint`)
    ../latest           a link to the newest run

Files are written under another name and then renamed (`tepal.host.files`). Only `metrics.jsonl` grows in place; a
server that is killed leaves at most one incomplete last line in it, which `read_metrics` ignores and
`RunDirectory.in_use` removes.
"""

from tepal.records.run_directory.directory import RunDirectory
from tepal.records.run_directory.ending import ending
from tepal.records.run_directory.files import as_json, json_line, make_first_free, point_latest_at, write_whole
from tepal.records.run_directory.holding import RunInUse, held, is_held
from tepal.records.run_directory.limits import DEEPEST, LARGEST_ROUND, MOST_CONFIG, MOST_SEGMENTS
from tepal.records.run_directory.metrics import (
    ACCURACY,
    RMSE,
    Measure,
    add,
    measured_by,
    savings,
    scored,
    summarise,
    total,
)
from tepal.records.run_directory.names import (
    BLOCKS,
    CHECKPOINTS,
    CLIENTS,
    CONFIG,
    KEPT_IN,
    LABELS,
    LATEST,
    METRICS,
    MODEL,
    NOW,
    REPORT,
    ROUNDS,
    SIMULATION,
    SUMMARY,
)
from tepal.records.run_directory.reading import (
    current_summary,
    find_run,
    parse_line,
    read_config,
    read_file,
    read_json,
    read_label_counts,
    read_metrics,
    read_records,
    read_summary,
)

__all__ = [
    "ACCURACY",
    "BLOCKS",
    "CHECKPOINTS",
    "CLIENTS",
    "CONFIG",
    "DEEPEST",
    "KEPT_IN",
    "LABELS",
    "LARGEST_ROUND",
    "LATEST",
    "METRICS",
    "MODEL",
    "MOST_CONFIG",
    "MOST_SEGMENTS",
    "NOW",
    "REPORT",
    "RMSE",
    "ROUNDS",
    "SIMULATION",
    "SUMMARY",
    "Measure",
    "RunDirectory",
    "RunInUse",
    "add",
    "as_json",
    "current_summary",
    "ending",
    "find_run",
    "held",
    "is_held",
    "json_line",
    "make_first_free",
    "measured_by",
    "parse_line",
    "point_latest_at",
    "read_config",
    "read_file",
    "read_json",
    "read_label_counts",
    "read_metrics",
    "read_records",
    "read_summary",
    "savings",
    "scored",
    "summarise",
    "total",
    "write_whole",
]
