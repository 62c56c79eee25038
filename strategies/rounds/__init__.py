"""The machinery of a round: cohort, exchange, merge, checkpoint. Methods stand on it."""
