"""Limits of what is read of a run directory. What exceeds one is damaged, or made to harm its reader: an error."""

from __future__ import annotations

MOST_CONFIG = 2**20
"""Bytes of `config.toml`, and of `comparison.json`."""
MOST_SUMMARY = 2**20
"""Bytes of `summary.json`."""
MOST_METRICS_FILE = 128 * 2**20
"""Bytes of `metrics.jsonl`: a hundred thousand rounds of a usual length."""
MOST_STATE = 64 * 2**20
"""Bytes of `now.json`, `clients.json`, `blocks.json` and `labels.json`: a quarter of a million clients."""
MOST_RECORD = 64 * 2**20
"""Bytes of the arrays of one round in `rounds/`, unpacked."""
MOST_RECORDS = 1024 * 2**20
"""Bytes of the arrays of all rounds that are read, unpacked; further ones, the earliest, are not read."""
MOST_SEGMENTS = 10_000
"""Segments in `blocks.json`."""
LARGEST_ROUND = 2**31 - 1
"""The largest number of a round, and of planned rounds."""
DEEPEST = 20
"""Levels of lists and objects inside of one another in a JSON or TOML file."""
