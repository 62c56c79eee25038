"""Local training of one model on one machine's data. It knows nothing of federated learning."""
