"""The names of the files in a run directory, and the log line that names the directory."""

from __future__ import annotations

CONFIG, METRICS, MODEL = "config.toml", "metrics.jsonl", "model.safetensors"
SUMMARY, REPORT, LATEST = "summary.json", "report.html", "latest"
CHECKPOINTS, ROUNDS = "checkpoint", "rounds"
LABELS, BLOCKS, NOW, CLIENTS = "labels.json", "blocks.json", "now.json", "clients.json"
SIMULATION = "simulation.json"

KEPT_IN = "This run is kept in "
"""The start of the log line with the run directory, by which other processes find it."""
