"""The names of the files in a run directory, and the line of a log that says where it is."""

from __future__ import annotations

CONFIG, METRICS, MODEL, SUMMARY, REPORT, LATEST = (
    "config.toml",
    "metrics.jsonl",
    "model.safetensors",
    "summary.json",
    "report.html",
    "latest",
)

CHECKPOINTS = "checkpoint"
ROUNDS = "rounds"
LABELS, BLOCKS, NOW, CLIENTS = "labels.json", "blocks.json", "now.json", "clients.json"

KEPT_IN = "This run is kept in "
"""How a run's log says where its directory is; what follows a run from outside looks for it."""
