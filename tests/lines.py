"""The rounds of a run as its `metrics.jsonl` has them: column → value."""

from tepal.records.run_directory import read_metrics


def read_lines(run):
    return [record.to_line() for record in read_metrics(run)]
